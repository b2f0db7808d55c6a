# SPDX-License-Identifier: Apache-2.0
"""How a call of Gated DeltaNet is spread over a GPU, and which calls its own kernels leave to KDA's.

On Hopper blocks have a whole state each, or half of one. On Blackwell they have whole states, and few heads are left to KDA's
kernels, which cut sequences into segments. Free of cutlass, and of tensors: all of it follows from sizes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from cula.core.constants import CHUNK
from cula.gdn.problem import GdnProblem
from cula.ops.cute.archs import arch_of
from cula.ops.cute.gdn_abi import FEWEST_CHUNKS, WORKSPACE
from cula.ops.cute.sm100.arch import BLACKWELL
from cula.ops.cute.tensors import sms_of

# Microseconds a chunk, of a block with a whole state and of one with half of it. Only their ratio matters. Measured on an H200
# before whole states had their chunks prepared two at a time.
WHOLE_US, HALF_US = 3.7, 1.9
WAVES_OF_UNEVEN = 8  # of heads, over which lengths of packed sequences average out: a long one alone takes half as long in halves
# On Blackwell, clocks of an SM for a chunk: of a block with a whole state, and of KDA's two kernels, which spread any number of
# heads over all SMs. Counted, not measured (docs/gdn-blackwell.md).
OWN_CLOCKS, KDA_CLOCKS = 5_400, 8_600


class Schedule(NamedTuple):
    """Who takes the value heads of sequences."""

    blocks: int  # with a whole state each, that take heads in turns; 0: pairs of blocks, with half of one each
    pieces: int = 0  # pairs of blocks a head

    @property
    def kernel(self) -> str:
        return "whole" if self.blocks else "half"

    def workspace_bytes(self, heads: int) -> int:
        """What pairs of blocks hand on to each other, of so many heads of sequences."""
        return WORKSPACE.offsets(records=2 * self.pieces * heads)["end"] if self.pieces > 1 else 0


def schedule(problem: GdnProblem, num_sms: int) -> Schedule | None:
    """The schedule of a call on a GPU with so many SMs; None: KDA's kernels serve it, with one gate a head. They do where states
    inside of sequences are kept."""
    if problem.options.return_intermediate_states:
        return None
    return _on_blackwell(problem, num_sms) if arch_of(problem.sm) is BLACKWELL else _on_hopper(problem, num_sms)


def _on_blackwell(p: GdnProblem, num_sms: int) -> Schedule | None:
    """Whole states where heads fill the GPU well enough. Batch-invariant calls have the same kernel for any number of heads."""
    heads = p.N * p.HV
    is_slower = -(-heads // num_sms) * num_sms * OWN_CLOCKS > heads * KDA_CLOCKS
    if p.checkpoint_dtype is not None or (is_slower and not p.options.batch_invariant):
        return None
    return Schedule(blocks=min(heads, num_sms))


def _on_hopper(p: GdnProblem, num_sms: int) -> Schedule:
    """Whole states where heads of alike sequences fill the GPU, otherwise as many pieces as there are SMs and chunks for. The
    kernel uses fewer where they wait for each other, as only gates say. Batch-invariant calls have the same kernel for any number
    of heads, and sequences in one piece."""
    heads = p.N * p.HV
    is_uneven = p.is_packed and heads < WAVES_OF_UNEVEN * num_sms
    is_faster = not is_uneven and -(-heads // num_sms) * WHOLE_US <= -(-heads // (num_sms // 2)) * HALF_US
    if p.options.batch_invariant or is_faster:
        return Schedule(blocks=min(heads, num_sms))
    of_longest = -(-p.T // (CHUNK * FEWEST_CHUNKS))  # of packed sequences one may be all
    pieces = min(num_sms // 2 // heads, of_longest)
    return Schedule(blocks=0, pieces=max(1, pieces))


def how(problem: GdnProblem, num_sms: int) -> str:
    """What a call that is not KDA's does on a GPU, for `cula.explain`."""
    made, heads = schedule(problem, num_sms), problem.N * problem.HV
    assert made is not None
    kept = "; disable_recompute=True changes nothing" if problem.needs_grad and problem.options.disable_recompute else ""
    if made.blocks:
        return f"one kernel, {heads} heads of sequences by {made.blocks} blocks, no workspace{kept}"
    if made.pieces == 1:
        return f"one kernel, {heads} heads of sequences by a pair of blocks each, no workspace{kept}"
    size = made.workspace_bytes(heads) / 2**20
    return f"one kernel, {heads} heads of sequences by {made.pieces} pairs of blocks each, {size:.3g} MiB of workspace{kept}"


@functools.lru_cache(maxsize=1024)
def schedule_on(problem: GdnProblem, device: torch.device) -> Schedule | None:
    """The schedule of a call on a GPU of this machine."""
    return schedule(problem, sms_of(device))
