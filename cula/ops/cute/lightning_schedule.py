# SPDX-License-Identifier: Apache-2.0
"""Lightning's prefill and its backward: which kernel takes a call, and into how many segments sequences are split.

Where (sequence, head) pairs are too few to fill the GPU, sequences are split into segments that run side by side. That costs a
first pass over k and v, and each segment reads what the ones before it left (`common/lightning.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from cula.core.constants import CHUNK
from cula.lightning.problem import LightningProblem
from cula.ops.cute.archs import arch_of
from cula.ops.cute.tensors import sms_of


@dataclass(frozen=True)
class Direction:
    """A forward or a backward: what all of its launches have in common."""

    prefix: str  # of its kernels' names
    attentions: int  # of the recurrence, side by side
    states: int  # that the first pass over segments makes
    splits_v: bool  # has kernels that give a head to several blocks


FORWARD = Direction("lightning", attentions=1, states=1, splits_v=True)
BACKWARD = Direction("bwd_lightning", attentions=3, states=2, splits_v=False)


@dataclass(frozen=True)
class Schedule:
    """A kernel and how its work is split."""

    of: Direction
    kernel: str  # of the architecture's `KERNELS`
    segment: int  # tokens; 0: sequences are whole
    per_seq: int  # segments of every sequence, where all are of one length
    num_ids: int  # segments in all, or sequences
    num_blocks: int

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of what is launched, in order: the first pass over segments, where there are some, and the recurrence."""
        ends = (f"{self.of.prefix}_ends_{self.kernel}",) if self.segment else ()
        return (*ends, f"{self.of.prefix}_{self.kernel}")

    def numbers(self, p: LightningProblem) -> dict[str, int]:
        """The arguments that follow from the numbers of tokens and sequences, by name."""
        numbers = {"T": p.B * p.T, "num_seqs": p.N, "length": 0 if p.is_packed else p.T}
        return numbers | {name: getattr(self, name) for name in ("segment", "per_seq", "num_ids", "num_blocks")}

    def workspace_bytes(self, p: LightningProblem) -> int:
        """What segments leave to each other: states, and in a backward gradients of states; in float32."""
        return 4 * self.of.states * self.num_ids * p.HV * p.V * p.K if self.segment else 0


@dataclass(frozen=True)
class Kernel:
    """A kernel, and microseconds that weigh it and its schedules against others; only ratios matter."""

    name: str
    D: int  # K = V
    chunk: int  # tokens; segments are a multiple
    chunk_us: float  # of the recurrence, where memory does not hold it up
    ends_us: float  # a chunk of the first pass
    launch_us: float  # the first pass's own beginning and end
    seed_us: float  # reading the end of one earlier segment
    bytes_per_us: float  # of the GPU's memory
    blocks_of_v: int = 1  # that a head is given to


KERNELS: dict[str, tuple[Kernel, ...]] = {
    # Fitted to the times of various kernels and schedules of T = 2048 to 131072 with H = 4 to 96 on an H200, bf16.
    "sm90": (
        Kernel("d64", 64, 64, chunk_us=0.8, ends_us=0.4, launch_us=8.0, seed_us=0.3, bytes_per_us=4.2e6),
        Kernel("d128", 128, 64, chunk_us=1.65, ends_us=0.7, launch_us=14.0, seed_us=1.2, bytes_per_us=4.2e6),
        Kernel("d128_half", 128, 64, chunk_us=1.02, ends_us=0.4, launch_us=8.0, seed_us=0.6, bytes_per_us=4.2e6, blocks_of_v=2),
    ),
    # Counted on paper for a B200, not measured: docs/lightning-blackwell.md.
    "sm100": (
        Kernel("d64", 64, 128, chunk_us=0.8, ends_us=0.35, launch_us=8.0, seed_us=1.2, bytes_per_us=7e6),
        Kernel("d128", 128, 128, chunk_us=1.3, ends_us=0.5, launch_us=8.0, seed_us=2.4, bytes_per_us=7e6),
    ),
}
ITEM_US = 3.0  # first loads and last stores of an item
SEGMENT_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
SHORTEST_SEGMENT = 4 * CHUNK  # tokens


def choose_schedule(problem: LightningProblem, num_sms: int, of: Direction = FORWARD) -> Schedule:
    """The cheapest kernel and number of segments, by the times above and sizes the host knows. Batch-invariant calls have the
    kernel and the length of segments that one sequence alone would have."""
    p = problem
    if p.options.batch_invariant:
        of_one = choose_schedule(p.alone(), num_sms, of)
        return split_into(p, of_one.kernel, of_one.segment, num_sms, of)
    # Packed lengths are not known here: as if all were alike.
    chunks = max(1, -(-(p.T // max(1, p.N) if p.is_packed else p.T) // CHUNK))
    kernel, per_seq = _cheapest(of, arch_of(p.sm).name, p.N, p.HV, p.V, chunks * CHUNK, num_sms)
    return make_schedule(problem, kernel, per_seq, num_sms, of)


@functools.lru_cache(maxsize=4096)
def _cheapest(of: Direction, arch: str, N: int, HV: int, V: int, tokens: int, num_sms: int) -> tuple[str, int]:
    """The kernel, and the number of segments to a sequence. Kept, because lengths change at every call and chunks seldom."""
    options = [
        (_cost(of, kernel, N * HV, tokens, per_seq, num_sms), kernel.name, per_seq)
        for kernel in KERNELS[arch]
        if kernel.D == V and (of.splits_v or kernel.blocks_of_v == 1)
        for per_seq in SEGMENT_COUNTS
        if per_seq == 1 or tokens >= per_seq * SHORTEST_SEGMENT
    ]
    _, name, per_seq = min(options)
    return name, per_seq


def make_schedule(problem: LightningProblem, kernel: str, per_seq: int, num_sms: int, of: Direction = FORWARD) -> Schedule:
    """The schedule of a kernel with about `per_seq` segments to a sequence."""
    # Packed: a length that splits a sequence of the mean length so; a longer one is split into more.
    tokens, chunk = problem.T // problem.N if problem.is_packed else problem.T, _kernel_of(problem, kernel).chunk
    return split_into(problem, kernel, 0 if per_seq == 1 else -(-tokens // (per_seq * chunk)) * chunk, num_sms, of)


def split_into(problem: LightningProblem, kernel: str, segment: int, num_sms: int, of: Direction = FORWARD) -> Schedule:
    """The schedule of a kernel with segments of so many tokens, or 0 for whole sequences."""
    N, T, per_seq = problem.N, problem.T, 1
    if problem.is_packed:
        num_ids = T // segment + N if segment else N
    else:
        per_seq = -(-T // segment) if segment else 1
        num_ids = N * per_seq
    blocks = num_ids * problem.HV * _kernel_of(problem, kernel).blocks_of_v * of.attentions
    return Schedule(of, kernel, segment, per_seq, num_ids, min(blocks, num_sms))


def _kernel_of(problem: LightningProblem, name: str) -> Kernel:
    return next(k for k in KERNELS[arch_of(problem.sm).name] if k.name == name)


def _cost(of: Direction, kernel: Kernel, heads: int, tokens: int, per_seq: int, num_sms: int) -> float:
    """Microseconds, for so many heads of all sequences."""
    chunks, states = -(-tokens // kernel.chunk), heads * per_seq * kernel.blocks_of_v
    waves, length = -(-states * of.attentions // num_sms), -(-chunks // per_seq)
    bytes_of_heads = heads * chunks * kernel.chunk * kernel.D * 2
    loads_us = of.attentions * 4 * bytes_of_heads / kernel.bytes_per_us
    recurrence = max(waves * (ITEM_US + length * kernel.chunk_us), loads_us)
    if per_seq == 1:
        return recurrence
    share = (per_seq - 1) / per_seq
    waves = -(-states * of.states // num_sms)
    ends = max(waves * length * kernel.ends_us, of.states * share * 2 * bytes_of_heads / kernel.bytes_per_us)
    return recurrence + ends + kernel.launch_us + (per_seq - 1) * kernel.seed_us


@functools.lru_cache(maxsize=1024)
def schedule_on(problem: LightningProblem, device: torch.device, of: Direction = FORWARD) -> Schedule:
    """The schedule of a call on a GPU of this machine."""
    return choose_schedule(problem, sms_of(device), of)
