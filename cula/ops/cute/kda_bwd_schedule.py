# SPDX-License-Identifier: Apache-2.0
"""How the recurrences of a backward are spread over a GPU: in how many segments. For KDA and Gated DeltaNet.

Free of cutlass, and of tensors: all of it follows from sizes, and a schedule for any GPU can be made on any machine.

A segment is walked in either direction by a block of its own, and an SM has room for one block. Where gates forget, G segments
of a head and sequence are 2 G blocks. Where they do not (`sm90/kda_bwd_segments.py`), a launch before makes B of the first G - 1
segments, D of the last G - 1 and M of those in between, 3 G - 4 blocks, so that a sequence of C chunks takes 2 C / G steps
instead of C. G is the largest number for which every block of either launch has an SM. Two segments that are chained would take
as many steps as one: where no more are to be had, nobody makes transitions, and sequences that do not forget are not cut.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from cula.gdn.problem import GdnProblem
from cula.kda.problem import KdaProblem
from cula.ops.cute.kda_schedule import mean_chunks, varlen_numbers, whole_chunks
from cula.ops.cute.tensors import sms_of

SHORTEST = 8  # chunks of a segment: it may warm up over four more, and two more launches take as long as some six


class Schedule(NamedTuple):
    """How many numbers chunks and segments take (`common/varlen_index.py`)."""

    chunks: int
    segments: int
    per_segment: int  # chunks of a segment
    has_transitions: bool  # what segments do to a state is made, where it is needed

    @property
    def transitions(self) -> int:
        """For how many segments a head the workspace has room for one."""
        return self.segments if self.has_transitions else 0

    def numbers(self) -> dict[str, int]:
        """As kernels take it."""
        return self._asdict() | {"has_transitions": int(self.has_transitions)}


def schedule(problem: KdaProblem | GdnProblem, num_sms: int) -> Schedule:
    """The schedule of a call on a GPU with so many SMs. Batch-invariant calls have segments of one length, whatever their
    sequences are."""
    p = problem
    if p.options.batch_invariant:
        wanted, mean = _wanted(p.alone(), num_sms), mean_chunks(p.alone())
    else:
        wanted, mean = _wanted(p, num_sms), mean_chunks(p)
    return split_into(p, -(-mean // wanted) if wanted > 1 else whole_chunks(p), has_transitions=wanted > 2)


def split_into(problem: KdaProblem | GdnProblem, per_segment: int, has_transitions: bool) -> Schedule:
    """Segments of so many chunks."""
    return Schedule(*varlen_numbers(problem, per_segment), per_segment, has_transitions)


def whole_sequences(problem: KdaProblem | GdnProblem, num_sms: int) -> Schedule:
    """The schedule where nothing but transitions is made, or gradients of first states: two blocks a segment, which are walked
    once."""
    p = problem
    mean = mean_chunks(p)
    wanted = max(1, min(num_sms // (2 * p.N * p.HV), mean // SHORTEST))
    return split_into(p, -(-mean // wanted) if wanted > 1 else whole_chunks(p), has_transitions=True)


def _wanted(p: KdaProblem | GdnProblem, num_sms: int) -> int:
    """Segments of a sequence."""
    heads = p.N * p.HV
    return max(1, min((num_sms // heads + 4) // 3, num_sms // (2 * heads), mean_chunks(p) // SHORTEST))


@functools.lru_cache(maxsize=1024)
def schedule_on(problem: KdaProblem | GdnProblem, device: torch.device) -> Schedule:
    """The schedule of a call on a GPU of this machine."""
    return schedule(problem, sms_of(device))


@functools.lru_cache(maxsize=1024)
def whole_on(problem: KdaProblem | GdnProblem, device: torch.device) -> Schedule:
    """`whole_sequences` on a GPU of this machine."""
    return whole_sequences(problem, sms_of(device))
