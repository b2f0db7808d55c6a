# SPDX-License-Identifier: Apache-2.0
"""Lightning's prefill and its backward: which kernel takes a call, and into how many segments sequences are split.

Where (sequence, head) pairs are too few to fill the GPU, sequences are split into segments that run side by side. That costs a
first pass over k and v, and each segment reads what the ones before it left (`sm90/lightning.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cula.core.constants import CHUNK
from cula.lightning.problem import LightningProblem

ARCH = "sm_90a"  # that there are kernels for


@dataclass(frozen=True)
class Direction:
    """A forward or a backward: what all of its launches have in common."""

    kernels: tuple[tuple[int, tuple[str, ...]], ...]  # by head dim
    attentions: int  # of the recurrence, side by side
    states: int  # that the first pass over segments makes


FORWARD = Direction(((64, ("d64",)), (128, ("d128", "d128_half"))), attentions=1, states=1)
BACKWARD = Direction(((64, ("d64",)), (128, ("d128",))), attentions=3, states=2)


@dataclass(frozen=True)
class Schedule:
    """A kernel and how its work is split."""

    kernel: str  # d128, d128_half or d64
    segment: int  # tokens; 0: sequences are whole
    per_seq: int  # segments of every sequence, where all are of one length
    num_ids: int  # segments in all, or sequences
    num_blocks: int


# Microseconds on an H200, bf16, fitted to the times of various kernels and schedules of T = 2048 to 131072 with H = 4 to 96. Only
# their ratios matter, to weigh schedules and kernels against each other.
CHUNK_US = {"d128": 1.65, "d128_half": 1.02, "d64": 0.8}  # of the recurrence, where memory does not hold it up
ENDS_US = {"d128": 0.7, "d128_half": 0.4, "d64": 0.4}  # a chunk of the first pass
ITEM_US = 3.0  # first loads and last stores of an item
LAUNCH_US = {"d128": 14.0, "d128_half": 8.0, "d64": 8.0}  # the first pass's own beginning and end
SEED_US = {"d128": 1.2, "d128_half": 0.6, "d64": 0.3}  # reading the end of one earlier segment
BYTES_PER_US = 4.2e6
SEGMENT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
MIN_SEGMENT_CHUNKS = 4


def choose_schedule(problem: LightningProblem, num_sms: int, of: Direction = FORWARD) -> Schedule:
    """The cheapest kernel and number of segments, by the times above and sizes the host knows."""
    p = problem
    # Packed lengths are not known here: as if all were alike.
    chunks = max(1, -(-(p.T // max(1, p.N) if p.is_packed else p.T) // CHUNK))
    kernel, per_seq = _cheapest(of, p.N, p.HV, p.K, chunks, num_sms)
    return make_schedule(problem, kernel, per_seq, num_sms, of)


@functools.lru_cache(maxsize=4096)
def _cheapest(of: Direction, N: int, HV: int, K: int, chunks: int, num_sms: int) -> tuple[str, int]:
    """The kernel, and the number of segments to a sequence. Kept, because lengths change at every call and chunks seldom."""
    options = [
        (_cost(of, kernel, N * HV, K, chunks, per_seq, num_sms), kernel, per_seq)
        for kernel in dict(of.kernels)[K]
        for per_seq in SEGMENT_COUNTS
        if per_seq == 1 or chunks >= per_seq * MIN_SEGMENT_CHUNKS
    ]
    _, kernel, per_seq = min(options)
    return kernel, per_seq


def make_schedule(problem: LightningProblem, kernel: str, per_seq: int, num_sms: int, of: Direction = FORWARD) -> Schedule:
    """The schedule of a kernel with about `per_seq` segments to a sequence."""
    N, T = problem.N, problem.T
    if problem.is_packed:
        # A length that splits a sequence of the mean length so; a longer one is split into more.
        segment = 0 if per_seq == 1 else -(-(T // N) // (per_seq * CHUNK)) * CHUNK
        num_ids, per_seq = (T // segment + N if segment else N), 1
    else:
        segment = 0 if per_seq == 1 else -(-T // (per_seq * CHUNK)) * CHUNK
        per_seq = -(-T // segment) if segment else 1
        num_ids = N * per_seq
    return Schedule(kernel, segment, per_seq, num_ids, min(num_ids * problem.HV * _items(of, kernel), num_sms))


def _items(of: Direction, kernel: str) -> int:
    """What blocks take one after the other, of one segment of a head."""
    return of.attentions * (2 if kernel == "d128_half" else 1)


def _cost(of: Direction, kernel: str, heads: int, K: int, chunks: int, per_seq: int, num_sms: int) -> float:
    """Microseconds, for so many heads of all sequences."""
    items = heads * per_seq * _items(of, kernel)
    waves, length = -(-items // num_sms), -(-chunks // per_seq)
    bytes_of_heads = heads * chunks * CHUNK * K * 2
    recurrence = max(waves * (ITEM_US + length * CHUNK_US[kernel]), of.attentions * 4 * bytes_of_heads / BYTES_PER_US)
    if per_seq == 1:
        return recurrence
    share = (per_seq - 1) / per_seq
    waves = -(-items * of.states // of.attentions // num_sms)
    ends = max(waves * length * ENDS_US[kernel], of.states * share * 2 * bytes_of_heads / BYTES_PER_US)
    return recurrence + ends + LAUNCH_US[kernel] + (per_seq - 1) * SEED_US[kernel]
