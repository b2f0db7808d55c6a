# SPDX-License-Identifier: Apache-2.0
"""Makes the family and the backend known to the process that imports this."""

from cula.core.dispatch import Backend, register_backend
from cula.core.family import register_family
from tests.madeup.family import FAMILY


def refuses_long_heads(op, problem):
    return f"takes head dims up to 64, and this call has K = {problem.K}" if problem.K > 64 else None


BACKEND = Backend("madeup", "tests.madeup.ops", "token loops for a test", refuses_long_heads, options=frozenset({"patience"}))

register_family(FAMILY)
register_backend(BACKEND, before="torch")
