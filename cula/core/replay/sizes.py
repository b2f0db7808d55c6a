# SPDX-License-Identifier: Apache-2.0
"""Which sizes may differ between the calls of one record of a prefill: tokens and sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cula.core.constants import CHUNK
from cula.core.replay.record import Resized
from cula.core.replay.torch_internals import Form

# Sizes of a batch are B and T, those of packed sequences T and N.
FIRST, SECOND = 1, 2

CAPACITY = 1 << 16  # schedules
NUM_LENGTHS = 3  # of the arguments that follow from sizes, those that are no schedule: T, N, length

ProblemT = TypeVar("ProblemT")


class Scheduled(NamedTuple):
    """What follows from a call's sizes."""

    numbers: tuple[int, ...]  # arguments of the launches, lengths first
    workspace: Callable[[int], Tensor] | None
    saved: tuple[Form, ...] = ()  # what a forward makes for the backward


def prefill_labels(x: Any, serving: Any, token_inputs: tuple[str, ...], is_packed: bool) -> tuple[tuple[int, ...] | None, ...]:
    """Labels for the tensors of a call, in order: the family's inputs, and those of a `core.pool.Serving` or, for a backward, the
    gradients do and dht."""
    of_tokens = (0, FIRST) if is_packed else (FIRST, SECOND)
    of_sequences = SECOND if is_packed else FIRST

    def labels(name: str, t: Tensor | None) -> tuple[int, ...] | None:
        if t is None:
            return None
        if name in token_inputs or name == "out":
            return (*of_tokens, *(0,) * (t.dim() - 2))
        if name in ("initial_state", "dht"):
            return (of_sequences, 0, 0, 0)
        if name in ("initial_state_indices", "has_initial_state", "checkpoint_offsets"):
            return (of_sequences,)
        return (-of_sequences,) if name == "cu_seqlens" else None

    return tuple([labels(name, t) for of in (x, serving) for name, t in zip(of._fields, of)])


def resized(problem: ProblemT, B: int, T: int, N: int) -> ProblemT:
    """The problem with other sizes, made in a microsecond."""
    other = object.__new__(type(problem))
    other.__dict__.update(problem.__dict__, B=B, T=T, N=N)
    return other


def prefill_resize(
    p: Any, schedule_of: Callable[[int, int, int], Scheduled | None], place_of_out: int | None, has_ht: bool
) -> Callable[[int, int], Resized | None]:
    """`Sizes.resize` of a prefill that makes o, or is given `out`, and makes a final state, or does not.

    Args:
        p: the problem that was recorded.
        schedule_of: of B, T and N; None where other kernels serve such a call. It is asked once for each number of chunks.
    """
    is_packed, dtype, HV, K, V = p.is_packed, p.dtype, p.HV, p.K, p.V
    scheduled = by_chunks(schedule_of)

    def resize(first: int, second: int) -> Resized | None:
        B, T, N = (1, first, second) if is_packed else (first, second, first)
        found = scheduled(B, T, N) if T and N else None
        if found is None:
            return None
        o = ((B, T, HV, V), (T * HV * V, HV * V, V, 1), dtype) if place_of_out is None else place_of_out
        ht = ((N, HV, V, K), (HV * V * K, V * K, K, 1), torch.float32) if has_ht else None
        numbers = (B * T, N, 0 if is_packed else T, *found.numbers[NUM_LENGTHS:])
        return Resized(numbers, (o, ht, *found.saved), found.workspace)

    return resize


def by_chunks(function: Callable[[int, int, int], Any]) -> Callable[[int, int, int], Any]:
    """A function of B, T and N that asks another of the same once for each number of chunks.

    A new length then seldom costs a new schedule. T counts by the chunks that it fills and begins, in all and for each of N
    sequences: schedules depend on no more, and so a call has the same one whatever calls there were before it.
    """
    known: dict[tuple[int, ...], Any] = {}

    def of(B: int, T: int, N: int) -> Any:
        key = (B, N, 2 * (T // CHUNK) + (T % CHUNK > 0), -(-T // (CHUNK * N)), -(-(T // N) // CHUNK))
        if key not in known:
            if len(known) >= CAPACITY:
                known.clear()
            known[key] = function(B, T, N)
        return known[key]

    return of
