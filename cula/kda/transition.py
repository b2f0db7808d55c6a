# SPDX-License-Identifier: Apache-2.0
"""What a run of tokens does to a KDA state S [V, K]: `S -> S M + B`.

One token has `M = diag(e^g) (I - beta k k^T)` and `B = beta v k^T`. A chunk of C tokens, with G the running sum of its log
decays and T = (I + strict_lower(beta k k^T e^{G_t - G_i}))^-1, has the factored form

    M = diag(e^{G_C}) - (beta k e^G)^T T^T (k e^{G_C - G})        [K, K]

which kernels apply without forming it. A segment or a rank has the M and B that `kda_transition` makes by running the same chunk
recurrence on [identity; zero].
"""

from cula.core.family import Transition

TRANSITION = Transition(is_dense=True)
