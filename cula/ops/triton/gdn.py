# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet in Triton: KDA's kernels, which take one gate a head."""

from cula.core.dispatch import AnyProblem
from cula.gdn.problem import GdnProblem, by_kda, kda_problem

from . import backend, kda
from .decode import decode as gdn_decode
from .decode import record_decode as record_gdn_decode

__all__ = [
    "gdn_bwd",
    "gdn_decode",
    "gdn_fwd",
    "gdn_transition",
    "record_gdn_bwd",
    "record_gdn_decode",
    "record_gdn_fwd",
    "why_not",
]

gdn_fwd = by_kda(kda.kda_fwd)
gdn_bwd = by_kda(kda.kda_bwd)
gdn_transition = by_kda(kda.kda_transition)
record_gdn_fwd = by_kda(kda.record_kda_fwd)
record_gdn_bwd = by_kda(kda.record_kda_bwd)


def why_not(op: str, problem: AnyProblem) -> str | None:
    """What the backend says of the KDA call that does the same."""
    return backend.why_not(op, kda_problem(problem)) if isinstance(problem, GdnProblem) else None
