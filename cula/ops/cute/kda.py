# SPDX-License-Identifier: Apache-2.0
"""KDA on the CuTe kernels of Hopper and Blackwell: which variant, how sequences are cut, and the launch.

`common/kda_prepare.py` and the architecture's `kda_state.py` say what the kernels compute. `sm90/kda_fused.py` is both in
one, for full GPUs and short calls. Forward only: the gradient is another backend's.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.kernels import Forward
from cula.core.replay.record import Address, LaunchRecord
from cula.core.replay.torch_internals import form_of
from cula.core.replay.workspace import workspace
from cula.kda.problem import KdaInputs, KdaProblem
from cula.ops.cute.launch import again as launch_again
from cula.ops.cute.tensors import TMA_BYTES, address, as_states, as_tokens, stream_of
from cula.ops.cute.toolchain.loader import load

HOPPER = (9, 0)
# by compute capability
ARCH_OF: dict[tuple[int, int] | None, str] = {HOPPER: "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
CHUNK, K, V = 64, 128, 128
FULL = 0.85  # of the turns that clusters take together: from here on one pass is faster than two kernels
NEARLY_FULL, FEW_TOKENS = 0.7, 32 * CHUNK  # from here on, and up to so many tokens, it is as fast, and faster with slow gates
MANY = 8  # turns, in which lengths that nobody knows average out
BRIEF = 2 * CHUNK  # tokens of a sequence up to which one pass is faster however few heads there are: one launch, not two
CHUNK_BYTES = 3 * CHUNK * K * 2 + 2 * CHUNK * CHUNK * 2 + 256 * 4  # of the workspace, for each chunk and head: see common/kda.py
MAP_BYTES = V * K * 4 + 2 * K * K * 2  # for each segment and head: B float32, M as a pair of 16-bit values

SHORT = {torch.bfloat16: "bf16", torch.float32: "f32"}


class Cut(NamedTuple):
    """How many numbers chunks and segments take (`common/kda_cut.py`)."""

    chunks: int
    segments: int
    per_segment: int  # chunks
    per_cold_segment: int  # chunks, in a sequence of which any segment starts cold: as many or more, which the GPU decides
    has_maps: bool  # some sequence may be cut
    helpers: int = 0  # blocks a head that make maps only
    clusters: int = 0  # of two multiprocessors, for one pass over whole sequences, without a workspace; 0: two kernels

    def bytes(self, HV: int) -> int:
        flags = -(-4 * HV * self.segments // 128) * 128
        return HV * (self.chunks * CHUNK_BYTES + (self.segments * MAP_BYTES if self.has_maps else 0)) + flags


def cut(problem: KdaProblem, num_sms: int) -> Cut:
    """Segments enough to give every multiprocessor one, but not too short: each walks a chunk or two twice, and looks at the
    bounds of all the others. Where gates forget slowly Hopper has longer ones (`cold_segments`); Blackwell has the same, of
    which each is a step more for the later ones."""
    p = problem
    if why_two_kernels(p, num_sms) is None:
        return in_one_pass(clusters_of(p, num_sms))
    mean = -(-p.T // (CHUNK * (p.N if p.is_packed else 1)))  # chunks of a sequence, as if all were alike
    room = num_sms // (p.N * p.HV)
    shortest = max(1, round((0.25 if p.sm == HOPPER else 0.6) * math.sqrt(mean)))
    wanted = max(1, min(room, -(-mean // shortest)))
    if wanted == 1 and p.is_packed:
        return cut_into(p, -(-p.T // CHUNK) + 1, num_sms)  # longer than any sequence
    made = cut_into(p, -(-mean // wanted), num_sms)
    return made._replace(per_cold_segment=cold_segments(p, made, mean))


def cold_segments(problem: KdaProblem, cut: Cut, mean: int) -> int:
    """Chunks of a segment where sequences, of `mean` chunks, start cold.

    Before it walks, a segment makes its B then, and waits for a chain of maps that is a step longer for each segment before it.
    So about half of a sequence's blocks walk, and the others make the M's: no block makes both (the last segment has no B to
    make). And no more of them than the steps are worth, each of which takes a third of a chunk's time. Not if a segment's
    chunks are many beside the steps saved: the walk is what takes time then.
    """
    segments = -(-mean // cut.per_segment)
    if problem.sm != HOPPER or cut.per_segment > 2 * segments:  # Blackwell's kernels have one cut
        return cut.per_segment
    walkers = min((segments + cut.helpers) // 2 + 1, round(math.sqrt(3 * mean)))
    return max(cut.per_segment, -(-mean // walkers))


def cut_into(problem: KdaProblem, per_segment: int, num_sms: int, per_cold_segment: int | None = None) -> Cut:
    """Segments of so many chunks. The maps of a single sequence may keep multiprocessors busy that have no segment."""
    p = problem
    if p.is_packed:
        chunks, segments = p.T // CHUNK + p.N, p.T // (CHUNK * per_segment) + p.N
    else:
        chunks_of_one = -(-p.T // CHUNK)
        chunks, segments = p.B * chunks_of_one, p.B * -(-chunks_of_one // per_segment)
    helpers = max(0, min(num_sms // p.HV - segments, segments - 1)) if p.N == 1 else 0
    return Cut(chunks, segments, per_segment, per_cold_segment or per_segment, segments > p.N, helpers)


def why_two_kernels(problem: KdaProblem, num_sms: int) -> str | None:
    """Why a call is not done in one pass (`sm90/kda_fused.py`), as a sentence; None if it is."""
    p = problem
    if p.sm != HOPPER:
        return "one pass is Hopper's"
    if not p.options.use_qk_l2norm_in_kernel:
        return "one pass takes keys that the kernel normalises"
    if not p.has_scalar_gate and p.g_dtype is not torch.bfloat16:
        return "one pass takes gates in bfloat16, or one a head"
    most, heads = num_sms // 2, p.N * p.HV
    if p.T <= BRIEF and heads <= most:
        return None
    if most == 0 or (heads < MANY * most and p.is_packed and not fills(p.HV, most)):
        return f"sequences may differ in length, and HV = {p.HV} heads of one do not fill {most} clusters"
    is_nearly_full = not p.is_packed and p.T <= FEW_TOKENS and NEARLY_FULL * most <= heads <= most
    if not (fills(heads, most) or is_nearly_full):
        return f"N HV = {heads} would leave many of {most} clusters idle"
    return None


def fills(heads: int, clusters: int) -> bool:
    """Whether so many heads of one length keep clusters busy."""
    return heads >= FULL * turns(heads, clusters) * clusters


def turns(heads: int, clusters: int) -> int:
    return -(-heads // clusters)


def clusters_of(problem: KdaProblem, num_sms: int) -> int:
    """As many as there are; where lengths may differ, if it can be so many that each has as many heads of every sequence."""
    p, most = problem, num_sms // 2
    if p.is_packed and most < p.N * p.HV and fills(p.HV, most):
        return -(-p.HV // turns(p.HV, most))
    return min(p.N * p.HV, most)


def how(problem: KdaProblem, num_sms: int) -> str:
    """What a call does on a GPU, for `cula.explain`."""
    made, reason = cut(problem, num_sms), why_two_kernels(problem, num_sms)
    if reason is None:
        return f"one pass on {made.clusters} clusters of two multiprocessors, no workspace"
    parts = "whole sequences"
    if made.has_maps:
        parts = f"segments of {made.per_segment} chunks of {CHUNK} tokens"
        if made.per_cold_segment > made.per_segment:
            parts += f", of {made.per_cold_segment} where gates forget slowly"
    return f"two kernels, {parts}, {made.bytes(problem.HV) / 2**20:.3g} MiB of workspace: {reason}"


def in_one_pass(clusters: int) -> Cut:
    return Cut(chunks=0, segments=0, per_segment=0, per_cold_segment=0, has_maps=False, clusters=clusters)


@functools.lru_cache(maxsize=1024)
def _cut_on(problem: KdaProblem, device: torch.device) -> Cut:
    return cut(problem, torch.cuda.get_device_properties(device).multi_processor_count)


def variant(problem: KdaProblem) -> str:
    """The name of the two kernels. fp16 operands where keys and queries are normalised, and so within their range."""
    dtype = "f16" if problem.options.use_qk_l2norm_in_kernel else "bf16"
    gate = "gate" if problem.options.use_gate_in_kernel else "log"
    return f"kda_{dtype}_{gate}_{SHORT[problem.g_dtype]}{'_scalar' if problem.has_scalar_gate else ''}"


def _kernel(problem: KdaProblem, cut: Cut) -> Any:
    name = variant(problem)
    return load(f"fused_{name}" if cut.clusters else name, ARCH_OF[problem.sm])


def kda_fwd(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> Forward:
    """Outputs and, where asked for, the final state."""
    ht = None
    if problem.options.output_final_state:
        ht = torch.empty((problem.N, problem.HV, V, K), dtype=torch.float32, device=x.q.device)
    return Forward(run(problem, x, _cut_on(problem, x.q.device), ht, out), ht, None)


def run(problem: KdaProblem, x: KdaInputs, cut: Cut, ht: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Launch with a given cut; returns o."""
    p, device = problem, x.q.device
    o = torch.empty((p.B, p.T, p.HV, V), dtype=torch.bfloat16, device=device) if out is None else out
    to = as_tokens(o)  # a copy where TMA cannot write to `out`
    x = x._replace(
        q=as_tokens(x.q),
        k=as_tokens(x.k),
        v=as_tokens(x.v),
        g=as_tokens(x.g),
        beta=as_tokens(x.beta),
        initial_state=None if x.initial_state is None else as_states(x.initial_state),
    )
    work = () if cut.clusters else (torch.empty(cut.bytes(p.HV), dtype=torch.uint8, device=device),)
    addresses = _addresses(x, _no_gate(device, p.HV), to, ht, *work)
    _kernel(p, cut)(*addresses, *_numbers(p, x, cut, to, ht), stream_of(device))
    if to is not o:
        o.copy_(to)
    return o


def kda_fwd_again(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> LaunchRecord | None:
    """A recipe for more calls like this one, with all that follows from shapes and strides worked out; None if some tensors would
    have to be copied. It takes those of x and then `out`, at addresses that TMA can read, and makes o and the final state."""
    p, device = problem, x.q.device
    o = torch.empty((p.B, p.T, p.HV, V), dtype=torch.bfloat16, device=device) if out is None else out
    ht = torch.empty((p.N, p.HV, V, K), dtype=torch.float32, device=device) if p.options.output_final_state else None
    if any(as_tokens(t) is not t for t in (*x[:5], o)):
        return None
    cut = _cut_on(p, device)
    no_A, no_bias = (address(t) for t in _no_gate(device, p.HV))
    of_q, of_k, of_v = (Address(i, TMA_BYTES) for i in range(3))
    of_g, of_beta = Address(3, 1 if p.has_scalar_gate else TMA_BYTES), Address(4)
    of_A, of_bias, of_h0, of_cu = Address(5, absent=no_A), Address(6, absent=no_bias), Address(7, TMA_BYTES), Address(8)
    of_o, of_ht, of_work = Address(~0, TMA_BYTES), Address(~1), () if cut.clusters else (Address(~2),)
    of = (of_q, of_k, of_v, of_g, of_beta, of_A, of_bias, of_o, of_h0, of_ht, of_cu, *of_work)
    launch = launch_again(_kernel(p, cut), of, _numbers(p, x, cut, o, ht))
    outputs = (form_of(o) if out is None else len(x), None if ht is None else form_of(ht))
    return LaunchRecord(device.index, (launch,), outputs, None if cut.clusters else workspace(device.index, cut.bytes(p.HV)))


def _addresses(x: KdaInputs, absent: tuple[Tensor, Tensor], o: Tensor, ht: Tensor | None, *work: Tensor) -> tuple[int, ...]:
    """In the order of `common/kda.py` and `sm90/kda_fused.py`."""
    q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens = x
    A_log, dt_bias = absent[0] if A_log is None else A_log, absent[1] if dt_bias is None else dt_bias
    return tuple([address(t) for t in (q, k, v, g, beta, A_log, dt_bias, o, h0, ht, cu_seqlens, *work)])


def _numbers(p: KdaProblem, x: KdaInputs, cut: Cut, o: Tensor, ht: Tensor | None) -> tuple[int | float, ...]:
    """The other arguments, in their order."""
    beta_top = 0.0
    if p.options.use_beta_sigmoid_in_kernel:
        beta_top = 2.0 if p.options.allow_neg_eigval else 1.0
    return (
        *(stride for t in (x.q, x.k, x.v, x.g, o) for stride in t.stride()[1:3]),  # of a scalar g too
        x.beta.stride(1),
        p.B * p.T,
        p.N,
        p.H,
        p.HV,
        p.scale,
        p.options.lower_bound or 0.0,
        beta_top,
        8 * x.beta.element_size(),
        int(x.initial_state is not None),
        int(ht is not None),
        0 if p.is_packed else p.T,
        *((cut.clusters,) if cut.clusters else ((p.N - 1).bit_length(), *cut[:4], int(cut.has_maps), cut.helpers)),
    )


@functools.cache
def _no_gate(device: torch.device, HV: int) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias where a call has none."""
    return torch.zeros(HV, dtype=torch.float32, device=device), torch.zeros((HV, K), dtype=torch.float32, device=device)
