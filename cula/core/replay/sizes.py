# SPDX-License-Identifier: Apache-2.0
"""Which sizes may differ between the calls of one record of a prefill: tokens and sequences."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

# Sizes of a batch are B and T, those of packed sequences T and N.
FIRST, SECOND = 1, 2
NUM_SERVING = 5  # tensors of a call behind the family's inputs, of which the first is `out`

ProblemT = TypeVar("ProblemT")


def prefill_labels(
    x: Any, out: Tensor | None, token_inputs: tuple[str, ...], is_packed: bool
) -> tuple[tuple[int, ...] | None, ...]:
    """Labels for the tensors of a call, in order: the family's inputs, `out`, and four that such a call does not have."""
    of_tokens = (0, FIRST) if is_packed else (FIRST, SECOND)
    of_sequences = SECOND if is_packed else FIRST

    def labels(name: str, t: Tensor | None) -> tuple[int, ...] | None:
        if t is None:
            return None
        if name in token_inputs:
            return (*of_tokens, *(0,) * (t.dim() - 2))
        if name == "initial_state":
            return (of_sequences, 0, 0, 0)
        return (-of_sequences,) if name == "cu_seqlens" else None

    of_out = None if out is None else (*of_tokens, 0, 0)
    return (*(labels(name, t) for name, t in zip(x._fields, x)), of_out, *(None,) * (NUM_SERVING - 1))


def resized(problem: ProblemT, is_packed: bool, first: int, second: int) -> ProblemT | None:
    """The problem with other sizes, made in a microsecond; None where there is no token."""
    B, T, N = (1, first, second) if is_packed else (first, second, first)
    if not (T and N):
        return None
    other = object.__new__(type(problem))
    other.__dict__.update(problem.__dict__, B=B, T=T, N=N)
    return other
