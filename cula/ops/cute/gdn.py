# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on the CuTe kernels: those of KDA that take one gate a head. Forward only, as they are."""

from __future__ import annotations

from cula.core.dispatch import AnyProblem
from cula.gdn.problem import GdnProblem, by_kda, kda_problem
from cula.ops.cute import decode, kda
from cula.ops.cute.decode import decode as gdn_decode
from cula.ops.cute.decode import record_decode as record_gdn_decode

__all__ = [
    "checkpoints_why_not",
    "gdn_decode",
    "gdn_fwd",
    "gdn_fwd_checkpoints",
    "gdn_fwd_pool",
    "pool_why_not",
    "record_gdn_decode",
    "record_gdn_fwd",
    "record_gdn_fwd_checkpoints",
    "record_gdn_fwd_pool",
    "why_not",
]

gdn_fwd = by_kda(kda.kda_fwd)
gdn_fwd_pool, gdn_fwd_checkpoints = by_kda(kda.kda_fwd_pool), by_kda(kda.kda_fwd_checkpoints)
record_gdn_fwd = by_kda(kda.record_kda_fwd)
record_gdn_fwd_pool, record_gdn_fwd_checkpoints = by_kda(kda.record_kda_fwd_pool), by_kda(kda.record_kda_fwd_checkpoints)


def pool_why_not(problem: GdnProblem) -> str | None:
    return kda.pool_why_not(kda_problem(problem))


def checkpoints_why_not(problem: GdnProblem) -> str | None:
    return kda.checkpoints_why_not(kda_problem(problem))


def why_not(op: str, problem: AnyProblem) -> str | None:
    """Why the kernels do not serve a call on a GPU that they are for, as a sentence; None if they do."""
    if not isinstance(problem, GdnProblem):
        return decode.why_not(op, problem)
    return kda.why_not(op, kda_problem(problem))
