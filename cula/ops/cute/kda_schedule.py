# SPDX-License-Identifier: Apache-2.0
"""How a KDA call is spread over a GPU: by the fused kernel or the split ones, and in how many segments.

Free of cutlass, and of tensors: all of it follows from sizes, and a schedule for any GPU can be made on any machine.

**Fused** (Hopper): clusters of two SMs take (sequence, head) pairs in waves, each from its first chunk to its last. It moves the
fewest bytes and needs no workspace, but heads must fill the clusters.

**Split**: the intra-chunk kernel has a block for each chunk and head, and leaves its results in a workspace; the recurrence has a
block for each segment and head. Sequences are split into segments where (sequence, head) pairs alone do not fill the GPU.
`common/kda_segments.py` says how a segment gets its first state: it warms up, or chains the transitions of the segments before.

**Either** (Hopper): packed sequences that would be fused if they had one length. All of these kernels are launched, and the GPU
finds out from the lengths which of them serve the call (`common/kda_lengths.py`); the others end at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import torch

from cula.core.constants import CHUNK
from cula.core.problem import Problem
from cula.gdn.problem import GdnProblem
from cula.kda.problem import KdaProblem
from cula.ops.cute.archs import arch_of
from cula.ops.cute.kda_abi import ANY_LENGTH, NO_LENGTH, WORKSPACE
from cula.ops.cute.tensors import sms_of

FULL = 0.85  # of the clusters in all waves together: from here on the fused kernel is faster
NEARLY_FULL, FEW_TOKENS = 0.7, 32 * CHUNK  # from here on, and up to so many tokens, it is as fast, and faster with slow gates
MANY_WAVES = 8  # in which lengths that nobody knows average out
# Packed sequences count as even if the longest is so many times as long as the mean. The split kernels took 1.24 times as long as
# the fused one for even ones (H200: H=16 8x2048 0.245 and 0.197 ms, H=12 4x2048 0.126 and 0.103).
EVEN = 1.15
WORTH_A_LOOK = 16  # chunks of a cluster: from here on that should be more than idle launches cost; not measured
BRIEF = 2 * CHUNK  # tokens of a sequence up to which it is faster however few heads there are: one launch, not two
SHORT = {torch.bfloat16: "bf16", torch.float32: "f32"}
MOST_CHUNKS, MOST_ROWS = 2**16, 2**25  # what the kernels' counts do not hold any more


def are_too_many(problem: Problem) -> str | None:
    """Why a call of KDA or Gated DeltaNet has more tokens than the kernels can count, as a sentence; None if it has not."""
    p = problem
    if p.B * p.T // CHUNK + p.N >= MOST_CHUNKS:
        return "numbers chunks of 64 tokens with 16 bits: fewer than 2^22 tokens a call"
    if (p.B * p.T + CHUNK * p.N) * p.HV >= MOST_ROWS:
        return "indexes its workspace with 32 bits: fewer than 2^25 tokens times value heads a call"
    return None


def variant(problem: KdaProblem) -> str:
    """The name of the split kernels; other kernels have it in theirs. fp16 operands where keys and queries are normalised, and so
    within their range."""
    dtype = "f16" if problem.options.use_qk_l2norm_in_kernel else "bf16"
    gate = "gate" if problem.gate == "bounded" else problem.gate
    if gate == "log" and problem.options.safe_gate and not problem.has_scalar_gate and problem.g_dtype is torch.bfloat16:
        gate = "safe"
    return f"kda_{dtype}_{gate}_{SHORT[problem.g_dtype]}{'_scalar' if problem.has_scalar_gate else ''}"


class Schedule(NamedTuple):
    """How many numbers chunks and segments take (`common/varlen_index.py`), and who takes them."""

    chunks: int  # 0: the fused kernel alone, for which only clusters count
    segments: int
    per_segment: int  # chunks of a segment
    per_chained_segment: int  # the same in a sequence of which any segment is chained, as blocks find out: as many or more
    has_transitions: bool  # some sequence may have several segments
    helpers: int = 0  # blocks a head that make transitions only
    clusters: int = 0  # of the fused kernel; 0: the split kernels alone
    longest: int = NO_LENGTH  # tokens: the fused kernel's if no sequence has more

    @property
    def is_fused(self) -> bool:
        return self.kernels == ("fused",)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Which are launched, in order."""
        return ("fused",) * (self.clusters > 0) + ("split",) * (self.chunks > 0)

    def workspace_bytes(self, HV: int) -> int:
        """What the split kernels hand on to each other."""
        segments = HV * self.segments
        counts = {"records": HV * self.chunks, "segments": segments, "transitions": segments if self.has_transitions else 0}
        return WORKSPACE.offsets(**counts)["end"]


def schedule(problem: KdaProblem, num_sms: int) -> Schedule:
    """The schedule of a call on a GPU with so many SMs.

    Split each sequence so that every SM gets one segment. A segment has a minimum length, because it re-runs up to four chunks to
    rebuild its initial state, and looks at the decay of all the others. If gates decay too slowly for that, segments chain
    transitions instead; Hopper then uses fewer, longer ones (`chained_segment`). Batch-invariant calls have segments of one
    length, whatever their sequences are.
    """
    p = problem
    if why_split(p, num_sms) is None:
        return fused(clusters_for(p, num_sms))
    if p.options.batch_invariant:
        of_one = schedule(p.alone(), num_sms)
        return split_into(p, of_one.per_segment, num_sms, of_one.per_chained_segment)._replace(helpers=0)
    made = split(p, num_sms)
    if is_fused_if_even(p, num_sms):
        return made._replace(clusters=clusters_for(p, num_sms), longest=CHUNK * math.ceil(EVEN * mean_chunks(p)))
    return made


def split(problem: KdaProblem, num_sms: int) -> Schedule:
    """The split kernels, with as many segments as there are SMs for."""
    p, mean = problem, mean_chunks(problem)
    sms_each = num_sms // (p.N * p.HV)  # for a head of a sequence
    shortest = max(1, round(arch_of(p.sm).kda.shortest_segment * math.sqrt(mean)))
    wanted = max(1, min(sms_each, -(-mean // shortest)))
    if wanted == 1 and p.is_packed:
        return split_into(p, whole_chunks(p), num_sms)
    made = split_into(p, -(-mean // wanted), num_sms)
    return made._replace(per_chained_segment=chained_segment(p, made, mean))


def mean_chunks(problem: Problem) -> int:
    """Chunks of a sequence, as if all were alike."""
    return -(-problem.T // (CHUNK * (problem.N if problem.is_packed else 1)))


def whole_chunks(problem: Problem) -> int:
    """More chunks than a sequence has: a segment of so many is all of it."""
    return -(-problem.T // CHUNK) + 1


def varlen_numbers(problem: Problem, per_segment: int) -> tuple[int, int]:
    """How many numbers chunks take, and segments of so many chunks (`common/varlen_index.py`)."""
    p = problem
    if p.is_packed:
        return p.T // CHUNK + p.N, p.T // (CHUNK * per_segment) + p.N
    of_one = -(-p.T // CHUNK)
    return p.B * of_one, p.B * -(-of_one // per_segment)


def chained_segment(problem: KdaProblem, made: Schedule, mean: int) -> int:
    """Chunks of a segment in chained sequences, of `mean` chunks.

    A chained segment first computes its B, and then waits for a chain of transitions that is one step longer for each segment
    before it. So about half of a sequence's blocks have a segment, and the others compute the M's: no block computes both (the
    last segment has no B to compute). There are no more segments than the steps are worth, each of which takes a third of a
    chunk's time. Where a segment's chunks are many beside the steps saved, the chunks are what takes time, and nothing changes.
    """
    segments = -(-mean // made.per_segment)
    if not arch_of(problem.sm).kda.has_chained_schedule or made.per_segment > 2 * segments:
        return made.per_segment
    walkers = min((segments + made.helpers) // 2 + 1, round(math.sqrt(3 * mean)))
    return max(made.per_segment, -(-mean // walkers))


def split_into(problem: KdaProblem, per_segment: int, num_sms: int, per_chained_segment: int | None = None) -> Schedule:
    """Segments of so many chunks. A single sequence may have helpers, on SMs that have no segment."""
    p, (chunks, segments) = problem, varlen_numbers(problem, per_segment)
    helpers = max(0, min(num_sms // p.HV - segments, segments - 1)) if p.N == 1 else 0
    return Schedule(chunks, segments, per_segment, per_chained_segment or per_segment, segments > p.N, helpers)


def fused(clusters: int) -> Schedule:
    """The fused kernel, on so many clusters."""
    nothing = Schedule(chunks=0, segments=0, per_segment=0, per_chained_segment=0, has_transitions=False)
    return nothing._replace(clusters=clusters, longest=ANY_LENGTH)


def keeps_tiles(problem: KdaProblem) -> bool:
    """Whether a forward keeps its workspace for the backward of the same architecture, which then begins with the recurrences."""
    p = problem
    return p.needs_grad and p.options.disable_recompute and has_backward(p) and p.options.use_qk_l2norm_in_kernel


def has_backward(problem: KdaProblem) -> bool:
    """Whether a call's architecture has kernels for its gradient."""
    return "kda_bwd" in arch_of(problem.sm).serves and why_no_backward(problem) is None


def why_no_backward(problem: KdaProblem | GdnProblem) -> str | None:
    """Why the backward of an architecture that has one does not serve a call of KDA or Gated DeltaNet; None if it does. Its
    operands are fp16, for keys that are normalised, in the kernel or before."""
    if problem.options.use_qk_l2norm_in_kernel or problem.gate == "log":
        return None
    return "has a backward for keys that are normalised in the kernel, or come so with log decays: use_qk_l2norm_in_kernel=True"


def why_split(problem: KdaProblem, num_sms: int) -> str | None:
    """Why a call does not go to the fused kernel, as a sentence; None if it does."""
    p = problem.alone() if problem.options.batch_invariant else problem
    arch = arch_of(p.sm)
    if not arch.kda.has_fused:
        return f"{arch.title} has no fused kernel"
    if keeps_tiles(p):
        return "disable_recompute=True keeps the workspace for the backward, which then has one kernel less to run"
    if not p.options.use_qk_l2norm_in_kernel:
        return "the fused kernel takes keys that it normalises"
    most, heads = num_sms // 2, p.N * p.HV
    if p.T <= BRIEF and heads <= most:
        return None
    if most == 0 or (heads < MANY_WAVES * most and p.is_packed and not fills(p.HV, most)):
        return f"sequences may differ in length, and HV = {p.HV} heads of one do not fill {most} clusters"
    is_nearly_full = not p.is_packed and p.T <= FEW_TOKENS and NEARLY_FULL * most <= heads <= most
    if not (fills(heads, most) or is_nearly_full):
        return f"N HV = {heads} would leave many of {most} clusters idle"
    return None


def is_fused_if_even(problem: KdaProblem, num_sms: int) -> bool:
    """Whether packed sequences, which may differ in length, would be the fused kernel's if they did not, and are worth a look."""
    p, mean = problem, mean_chunks(problem)
    if not p.is_packed:
        return False
    even = dataclasses.replace(p, B=p.N, T=CHUNK * mean, is_packed=False)
    return why_split(even, num_sms) is None and waves(p.N * p.HV, num_sms // 2) * mean >= WORTH_A_LOOK


def fills(heads: int, clusters: int) -> bool:
    """Whether so many heads of one length keep clusters busy."""
    return heads >= FULL * waves(heads, clusters) * clusters


def waves(heads: int, clusters: int) -> int:
    """How often clusters take a head each."""
    return -(-heads // clusters)


def clusters_for(problem: KdaProblem, num_sms: int) -> int:
    """As many as there are. Where lengths may differ, so many that each has the same heads of every sequence, if that can be."""
    p, most = problem, num_sms // 2
    if p.is_packed and most < p.N * p.HV and fills(p.HV, most):
        return -(-p.HV // waves(p.HV, most))
    return min(p.N * p.HV, most)


def how(problem: KdaProblem, num_sms: int) -> str:
    """What a call does on a GPU, for `cula.explain`."""
    made, reason = schedule(problem, num_sms), why_split(problem, num_sms)
    if reason is None:
        return f"fused: one kernel on {made.clusters} clusters of two SMs, no workspace"
    either = ""
    if made.clusters:
        either = f"fused, one kernel on {made.clusters} clusters of two SMs, if no sequence has more than {made.longest} tokens, "
        either += "as the GPU finds out; otherwise "
    parts = "whole sequences"
    if made.has_transitions:
        parts = f"segments of {made.per_segment} chunks of {CHUNK} tokens"
        if made.per_chained_segment > made.per_segment:
            parts += f", of {made.per_chained_segment} where gates forget slowly"
    return f"{either}split: two kernels, {parts}, {made.workspace_bytes(problem.HV) / 2**20:.3g} MiB of workspace: {reason}"


@functools.lru_cache(maxsize=1024)
def schedule_on(problem: KdaProblem, device: torch.device) -> Schedule:
    """The schedule of a call on a GPU of this machine."""
    return schedule(problem, sms_of(device))
