# SPDX-License-Identifier: Apache-2.0
"""What a context-parallel call costs, as formulas; `cp_mode="auto"` is `cheapest` below.

P ranks in a chain, N states of HV heads in flight between neighbours, n tokens of each sequence on a rank.

    f, m, b, c   time of a rank's forward, transition (M, B), backward, gradient of the first state alone
    S, D         bytes of the states [N, HV, V, K] and of M ([N, HV, K, K], or one number a head), float32
    a, w         a message of x bytes takes a + x / w
    y            time to apply a transition to the states

    ring         P f + (P - 1) (a + S / w)                         one rank after another
    chain        m + (P + k - 2) (a + S / (k w) + y / k) + f       k blocks of V, one behind the other
    gather       m + a + (P - 1) ((S + D) / w + y) + f             every transition to every later rank, at once

and the same with b for f and c for m on the way back. docs/distributed.md works the numbers out and a discrete-event
simulation in the tests checks the formulas.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

CHUNK = 64  # tokens a kernel handles at once
FP32 = 4  # bytes
BLOCKS = (1, 2, 4, 8, 16)  # how many blocks of V a chain may be cut into
MIN_BLOCK = 8  # rows of V in a block, at least
NOMINAL_TOKENS = 8192  # on a rank, for a batch: ranks may hold different numbers of tokens and must choose alike


@dataclass(frozen=True)
class Machine:
    """One GPU among many. The defaults are an H100-class card with a 400 Gb/s port of its own; seconds, bytes, FLOP/s."""

    latency: float = 12e-6  # a point-to-point message through NCCL, launch included
    bandwidth: float = 45e9  # bytes a second, one direction
    kernel_rate: float = 32e12  # chunked kernels in bf16; H200, Triton, T = 8,192, 32 heads of 128: forward 1.36 ms
    fp32_rate: float = 30e12  # transitions are applied to states in float32
    attention_rate: float = 600e12  # softmax attention, for comparison


@dataclass(frozen=True)
class Work:
    """Floating-point operations a token and value head."""

    forward: float
    transition: float
    backward: float
    state_grad: float


@dataclass(frozen=True)
class Load:
    """A call, as far as its cost goes."""

    ranks: int  # the longest chain of ranks that a sequence runs through
    states: int  # N: states in flight between neighbours
    heads: int  # HV on one rank
    K: int
    V: int
    tokens: int  # on one rank, all sequences together
    has_dense_transition: bool  # KDA, GDN; Lightning's M is one number a head
    with_backward: bool

    @property
    def state_bytes(self) -> int:
        return self.states * self.heads * self.V * self.K * FP32

    @property
    def transition_bytes(self) -> int:
        """Of M alone; B is a state."""
        return self.states * self.heads * (self.K * self.K if self.has_dense_transition else 1) * FP32

    @property
    def apply_flops(self) -> int:
        return 2 * self.states * self.heads * self.V * self.K * (self.K if self.has_dense_transition else 1)


@dataclass(frozen=True)
class Schedule:
    """How states cross ranks: "ring", "chain" (blocks of V) or "gather"."""

    exchange: str
    blocks: int = 1


def work(load: Load) -> Work:
    """Matrix products of the chunked forwards, counted; the other passes of KDA as multiples of it.

    Those multiples come from one run of earlier kernels on an H200 (T = 8,192, 32 heads of 128, bf16; docs/distributed.md has
    the present ones beside them):
    forward 1.361 ms, transition 1.088 ms, backward 3.961 ms (Triton); the gradient of the first state 1.14 forwards (PyTorch).
    """
    K, V, C = load.K, load.V, CHUNK
    if load.has_dense_transition:
        forward = 6 * K * V + 4 * C * (K + V)
        return Work(forward, transition=0.8 * forward, backward=2.9 * forward, state_grad=1.14 * forward)
    forward = 4 * K * V + 2 * C * (K + V)
    return Work(forward, transition=2 * K * V, backward=2.5 * forward, state_grad=2 * K * V)


def passes(load: Load, machine: Machine) -> list[tuple[float, float]]:
    """(local pass that makes the transition, pass that needs the state) in seconds: forward and, in training, backward."""
    w = work(load)
    unit = load.tokens * load.heads / machine.kernel_rate
    both = [(w.transition * unit, w.forward * unit), (w.state_grad * unit, w.backward * unit)]
    return both if load.with_backward else both[:1]


def ring_time(load: Load, run: float, machine: Machine) -> float:
    return load.ranks * run + (load.ranks - 1) * (machine.latency + load.state_bytes / machine.bandwidth)


def chain_time(load: Load, summarise: float, run: float, blocks: int, machine: Machine) -> float:
    """Block j leaves rank r in step r + j, so the last block reaches the last rank after P + k - 2 steps."""
    step = machine.latency + (load.state_bytes / machine.bandwidth + load.apply_flops / machine.fp32_rate) / blocks
    return summarise + (load.ranks + blocks - 2) * step + run


def gather_time(load: Load, summarise: float, run: float, machine: Machine) -> float:
    """The last rank takes in all the others' transitions through one port and composes them."""
    one = (load.state_bytes + load.transition_bytes) / machine.bandwidth + load.apply_flops / machine.fp32_rate
    return summarise + machine.latency + (load.ranks - 1) * one + run


def total_time(load: Load, schedule: Schedule, machine: Machine = Machine()) -> float:  # noqa: B008
    """Seconds until the last rank is done, forward and (in training) backward."""
    total = 0.0
    for summarise, run in passes(load, machine):
        if load.ranks == 1:
            total += run
        elif schedule.exchange == "ring":
            total += ring_time(load, run, machine)
        elif schedule.exchange == "chain":
            total += chain_time(load, summarise, run, schedule.blocks, machine)
        else:
            total += gather_time(load, summarise, run, machine)
    return total


@functools.lru_cache(maxsize=256)
def cheapest(load: Load, cp_mode: str = "auto", machine: Machine = Machine()) -> Schedule:  # noqa: B008
    """The best schedule that `cp_mode` ("auto", "ring", "scan") allows. Ranks with equal loads choose alike."""
    candidates = [] if cp_mode == "scan" else [Schedule("ring")]
    if cp_mode != "ring":
        candidates.append(Schedule("gather"))
        candidates += [Schedule("chain", k) for k in BLOCKS if k == 1 or load.V // k >= MIN_BLOCK]
    return min(candidates, key=lambda s: total_time(load, s, machine))


def sent_bytes(load: Load, schedule: Schedule) -> int:
    """The most one rank sends in one direction."""
    if load.ranks == 1:
        return 0
    if schedule.exchange == "gather":
        return (load.ranks - 1) * (load.state_bytes + load.transition_bytes)
    return load.state_bytes


def ring_attention(load: Load, machine: Machine = Machine()) -> tuple[int, float]:  # noqa: B008
    """(bytes a rank sends, seconds) of causal softmax attention over the same tokens, forward: keys and values in
    bf16 go round the ring, P - 1 steps, each hidden behind the attention of one block where that is longer."""
    block_bytes = load.tokens * load.heads * (load.K + load.V) * 2
    block_flops = load.tokens**2 * load.heads * 2 * (load.K + load.V) / 2  # causal, balanced: half of each block
    compute = block_flops / machine.attention_rate
    message = machine.latency + block_bytes / machine.bandwidth
    return (load.ranks - 1) * block_bytes, compute + (load.ranks - 1) * max(compute, message)
