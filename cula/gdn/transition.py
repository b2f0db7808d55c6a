# SPDX-License-Identifier: Apache-2.0
"""What a run of tokens does to a GDN state S [V, K]: `S -> S M + B`.

One token has `M = e^g (I - beta k k^T)` and `B = beta v k^T`. A chunk of C tokens, with G the running sum of its log decays and
T = (I + strict_lower(beta k k^T e^{G_t - G_i}))^-1, has

    M = e^{G_C} (I - (beta k e^G)^T T^T (k e^{-G}))        [K, K]

which is as dense as KDA's; but decays are factors of its rows and columns, and leave k itself alone.
"""

from cula.core.family import Transition

TRANSITION = Transition(is_dense=True)
