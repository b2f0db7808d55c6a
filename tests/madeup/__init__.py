# SPDX-License-Identifier: Apache-2.0
"""A family and a backend that live here only: what a new one has to bring, and all that it gets for it.

The family is a fading memory: `S <- exp(-r_t) S + v k^T;  o = scale S q`, with a rate r_t >= 0 a token and head. The backend
has one kernel module, for that family. Nothing outside of this folder knows of either.
"""

from cula.core.dispatch import Backend, register_backend
from cula.core.family import register_family
from tests.madeup.family import FAMILY


def refuses_long_heads(op, problem):
    return f"takes head dims up to 64, and this call has K = {problem.K}" if problem.K > 64 else None


BACKEND = Backend("madeup", "tests.madeup.ops", "token loops for a test", refuses_long_heads, options=frozenset({"patience"}))

register_family(FAMILY)
register_backend(BACKEND, before="torch")
