# SPDX-License-Identifier: Apache-2.0
"""Lightning attention in Triton: forward, and a backward made of the same kernel run three times (`lightning_decay.py`
has the gradient of the decay, for calls that ask for it).

Recurrence of one head, f = exp(-s):   S_t = f S_{t-1} + v_t k_t^T   [V, K],      o_t = scale S_t q_t   [V]

One program runs over the BT-token chunks of one (segment, value head, V block) with S^T [BK, BV] in fp32 registers. For a
chunk of n tokens, rows r = 0..n-1:

    o_r = scale (f^(r+1) S q_r + sum_{i<=r} f^(r-i) (q_r . k_i) v_i)        S <- f^n S + sum_i f^(n-1-i) v_i k_i^T

Backward. With D_t = f D_{t+1} + scale do_t q_t^T, the gradient of S_t, each gradient is such an attention again:

    dq_t = scale S_t^T do_t     forward in time,   (q, k, v) := (do, v, k), first state h0^T
    dv_t = D_t k_t              backward in time,  (q, k, v) := (k, q, do), first state dht
    dk_t = D_t^T v_t            backward in time,  (q, k, v) := (v, do, q), first state dht^T

Backward in time the carried state is X = f D_{next}, which starts as dht itself and ends as dh0. So `scale` multiplies
what enters the state instead of what leaves it, and the two exponents become f^r (reading X) and f^(n-i) (entering X).

Segments. Where N * HV * (V blocks) programs would not fill the GPU, each sequence is cut into segments of L tokens. A
first kernel makes the state each segment ends with when it starts from zero; the recurrence of segment j then starts from
h0 f^(jL) + sum_i f^((j-1-i)L) end_i. Terms whose factor is below 2^-REACH, zero in fp32, are not read. The number of
segments follows from sizes the host knows: packed sequence n owns ids cu[n] // L + n and up, T // L + N in all, and a
program finds n by counting (`varlen`). No atomics; a result depends on no order of execution.

The kernels are in `lightning_recurrence.py`; here is how a problem is cut, and the order of the launches.

Limits: K <= 256; fp32 products are 3xTF32. V may be anything: where a gradient takes V for K and V > 256, it is cut into
parts, each of which is an attention of its own, and their dq and dk are added.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cula.core.kernels import Forward
from cula.core.replay.record import LaunchRecord
from cula.lightning.problem import LightningInputs, LightningProblem

from .configs import multiprocessors
from .decode import decode as lightning_decode
from .decode import record_decode as record_lightning_decode
from .kda_intra_bwd import kda_shares_bwd_kernel
from .launch import Variant
from .lightning_decay import lightning_decay_bwd_kernel
from .lightning_recurrence import lightning_recurrence_kernel, lightning_segment_kernel
from .memory import New, allocator
from .recording import record_call

# Microseconds on an H200 for K = V = 128, bf16, chunks of 64, fitted to the times of various cuts of T = 1024 to 131072
# with H = 4 to 64. Only their ratios matter, to weigh segments against whole sequences.
CHUNK_US = 1.48  # a chunk of the recurrence; shared memory lets one program at a time on an SM
WAVE_US = 4.0  # first loads and last stores of the programs that run together
SEGMENT_US = 0.65  # a chunk of the segment kernel
LAUNCH_US = 6.0  # the segment kernel's own beginning and end
LOOK_BACK_US = 0.7  # reading one earlier segment's state
MIN_SEGMENT_CHUNKS = 2
SEGMENT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

# Bytes of shared memory that one block may take, by compute capability; all others have the most.
SHARED_BYTES = {(8, 0): 166912, (8, 7): 166912, (8, 6): 101376, (8, 9): 101376, (12, 0): 101376, (12, 1): 101376}
MOST_SHARED_BYTES = 232448

__all__ = [
    "lightning_bwd",
    "lightning_decode",
    "lightning_fwd",
    "record_lightning_bwd",
    "record_lightning_decode",
    "record_lightning_fwd",
]

MOST_CHANNELS = 256  # of a state that a program has in registers, beside the channels of its own block
SHARES = 64  # of the gradient of decay that a program adds at once


@dataclass(frozen=True)
class Schedule:
    """Tiles and segments of one recurrence."""

    BT: int  # tokens in a chunk
    BV: int  # value channels of a program
    num_warps: int
    num_stages: int
    num_segments: int  # ids, over all sequences; one a sequence where `length` is 0
    length: int  # tokens in a segment; 0: sequences are whole


@functools.lru_cache(maxsize=1024)
def schedule_lightning(problem: LightningProblem, K: int, V: int, num_sms: int) -> Schedule:
    """How to run the recurrence with q, k of K channels and v of V."""
    N, T, BK, size = problem.N, problem.T, max(16, triton.next_power_of_2(K)), problem.dtype.itemsize
    if size == 2:
        BT, BV, num_warps, max_stages = min(problem.options.chunk_size, 64), 64 if V > 32 else 32, 4, 3
    elif BK < 128:
        BT, BV, num_warps, max_stages = min(problem.options.chunk_size, 32), 32, 4, 3
    else:  # the operands of a 3xTF32 product sit in registers, three times over
        BT, BV, num_warps, max_stages = 16, 32, 8, 1
    heads = problem.HV * triton.cdiv(V, BV)  # programs of one segment
    like = problem.alone() if problem.options.batch_invariant else problem
    cut = _cut_packed if like.is_packed and like.N > 1 else _cut_rows
    length = cut(like.N, triton.cdiv(like.T, BT), heads, num_sms) * BT
    if not length:
        count = N
    else:
        count = T // length + N if problem.is_packed else N * triton.cdiv(T, length)

    available = MOST_SHARED_BYTES if problem.sm is None else SHARED_BYTES.get(problem.sm, MOST_SHARED_BYTES)
    stages = [n for n in range(1, max_stages + 1) if size * (n * BT * (2 * BK + BV) + BK * BV) <= available]
    return Schedule(BT, BV, num_warps, max(stages, default=1), count, length)


def _cut_rows(rows: int, chunks: int, heads: int, num_sms: int) -> int:
    """Chunks in a segment for rows of equal length, 0 to leave them whole: the cheapest of a few cuts, by the above."""

    def cost(per_row: int) -> float:
        programs, length = rows * heads * per_row, triton.cdiv(chunks, per_row)
        whole = triton.cdiv(programs, num_sms) * (WAVE_US + length * CHUNK_US)
        if per_row == 1:
            return whole
        return whole + max(1.0, programs / (2 * num_sms)) * length * SEGMENT_US + LAUNCH_US + (per_row - 1) * LOOK_BACK_US

    per_row = min((n for n in SEGMENT_COUNTS if n == 1 or chunks >= n * MIN_SEGMENT_CHUNKS), key=cost)
    return triton.cdiv(chunks, per_row) if per_row > 1 else 0


def _cut_packed(rows: int, chunks: int, heads: int, num_sms: int) -> int:
    """Chunks in a segment for packed sequences of unknown lengths, `chunks` in all; 0 to leave them whole.

    A cut at an SM's share of the chunks fills the GPU with one long sequence. Where there are sequences enough to fill it
    anyhow, only what exceeds twice that share is cut, so that sequences of similar lengths stay whole.
    """
    share = triton.cdiv(chunks * heads, num_sms)
    if rows * heads >= num_sms // 2:
        share *= 2
    length = max(share, 4 * MIN_SEGMENT_CHUNKS)
    return length if 2 * length <= chunks else 0


@functools.cache
def _kernels(
    heads: tuple[int, int, int, int], K: int, V: int, BT: int, BV: int, num_warps: int, num_stages: int, reverse: bool
) -> tuple[Variant, Variant]:
    """The kernel of segments and that of the recurrence; heads are HV and those of the roles q, k and v."""
    HV, num_q, num_k, num_v = heads
    constants = dict(
        HV=HV,
        GK=HV // num_k,
        GV=HV // num_v,
        K=K,
        V=V,
        BT=BT,
        BK=max(16, triton.next_power_of_2(K)),
        BV=BV,
        REVERSE=reverse,
        PRECISION="tf32x3",
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return lightning_segment_kernel.variant(**constants), lightning_recurrence_kernel.variant(**constants, GQ=HV // num_q)


def _attend(
    problem: LightningProblem,
    x: LightningInputs,
    roles: tuple[Tensor, Tensor, Tensor],
    o: Tensor,
    h0: Tensor | None,
    ht: Tensor | None,
    new: New,
    is_swapped: bool = False,
    reverse: bool = False,
) -> None:
    """One attention in the roles (q, k, v) -> o, from the states h0 to the states ht.

    States are [., HV, V, K] as the library keeps them; `is_swapped` says that the v role's channels are their last
    dimension, as for dq and dk, where the roles of K and V trade places. The roles' channels may be a part of V.
    """
    q, k, v = roles
    (num_q, K), (num_k, _), (num_v, V) = q.shape[2:], k.shape[2:], v.shape[2:]
    HV, size = problem.HV, problem.K * problem.V
    s = schedule_lightning(problem, K, V, multiprocessors(k.device))
    segment, recurrence = _kernels((HV, num_q, num_k, num_v), K, V, s.BT, s.BV, s.num_warps, s.num_stages, reverse)
    grid = s.num_segments * HV * -(-V // s.BV)
    common = {
        "k": k,
        "v": v,
        "decay": x.decay,
        "cu_seqlens": x.cu_seqlens,
        "k_strides": k.stride(),
        "v_strides": v.stride(),
        "h_strides": (HV * size, size, problem.K, 1) if is_swapped else (HV * size, size, 1, problem.K),
        "T": problem.T,
        "N": problem.N,
        "length": s.length,
        "per_row": 1 if problem.is_packed or not problem.N else s.num_segments // problem.N,
        "scale": problem.scale,
    }
    ends = None  # [segments, HV, V, K] float32
    if s.length:
        ends = new((s.num_segments, HV, problem.V, problem.K), torch.float32)
        segment(grid, **common, ends=ends)
    recurrence(grid, **common, q=q, q_strides=q.stride(), o=o, o_strides=o.stride(), h0=h0, ht=ht, ends=ends)


def lightning_fwd(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> Forward:
    """Outputs `[B, T, HV, V]` (written to `out` where given) and, where asked for, the final state `[N, HV, V, K]` float32."""
    p, new = problem, allocator(x.q.device)
    o = new(tuple(x.v.shape), x.v.dtype) if out is None else out
    ht = new((p.N, p.HV, p.V, p.K), torch.float32) if p.options.output_final_state else None
    _attend(p, x, (x.q, x.k, x.v), o, x.initial_state, ht, new)
    return Forward(o, ht)


def lightning_bwd(
    problem: LightningProblem, x: LightningInputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v (in their dtype), of decay (None where it is not asked for), and of the initial state (float32; None
    where there was none)."""
    p, new = problem, allocator(x.q.device)
    do = do.to(x.q.dtype)
    if do.stride(-1) != 1:
        do = do.contiguous()
    dht = None if dht is None else dht.to(torch.float32).contiguous()
    dh0 = new((p.N, p.HV, p.V, p.K), torch.float32) if p.has_initial_state else None
    # Of a group of value heads each makes its share of dq and dk, and so does each part of V; fp32 shares are then added in a
    # fixed order.
    parts = [slice(start, start + MOST_CHANNELS) for start in range(0, p.V, MOST_CHANNELS)]
    shape = (len(parts), *x.q.shape[:2], p.HV, p.K)
    dtype = torch.float32 if _has_shares(p) else x.q.dtype
    dq, dk, dv = new(shape, dtype), new(shape, dtype), new(tuple(x.v.shape), x.v.dtype)
    for i, part in enumerate(parts):
        do_part, v_part = do[..., part], x.v[..., part]
        h0, last = (None if t is None else t[:, :, part] for t in (x.initial_state, dht))
        _attend(p, x, (do_part, v_part, x.k), dq[i], h0, None, new, is_swapped=True)
        _attend(p, x, (v_part, do_part, x.q), dk[i], last, None, new, is_swapped=True, reverse=True)
    _attend(p, x, (x.k, x.q, do), dv, dht, dh0, new, reverse=True)
    d_decay = _decay_bwd(p, x, do, dht, new) if "decay" in p.grads else None
    return _sum_shares(dq, x.q), _sum_shares(dk, x.k), dv, d_decay, dh0


@functools.cache
def _decay_kernels(dtype: torch.dtype, heads: tuple[int, int], K: int, V: int) -> tuple[int, Variant, Variant]:
    """Blocks along V, the kernel that makes shares of the decay's gradient, and the one that adds them."""
    (HV, H), BK = heads, max(16, triton.next_power_of_2(K))
    BT = 16 if dtype == torch.float32 else 32 if BK > 128 else 64
    BV = 32  # 64 spills thousands of bytes on sm_80
    constants = {"HV": HV, "G": HV // H, "K": K, "V": V, "BT": BT, "BK": BK, "BV": BV, "PRECISION": "tf32x3"}
    return (
        triton.cdiv(V, BV),
        lightning_decay_bwd_kernel.variant(**constants, num_warps=8, num_stages=1),
        kda_shares_bwd_kernel.variant(HV=HV, KC=1, BK=1, BR=SHARES, num_warps=4, num_stages=1),
    )


def _decay_bwd(p: LightningProblem, x: LightningInputs, do: Tensor, dht: Tensor | None, new: New) -> Tensor:
    """The gradient of decay, [HV] float32."""
    num_blocks, make, add = _decay_kernels(p.dtype, (p.HV, p.H), p.K, p.V)
    shares, d_decay = new((p.N * num_blocks, p.HV), torch.float32), new((p.HV,), torch.float32)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "do": do}
    make(
        p.N * p.HV * num_blocks,
        **tensors,
        **{f"{name}_strides": t.stride() for name, t in tensors.items()},
        decay=x.decay,
        h0=x.initial_state,
        dht=dht,
        shares=shares,
        cu_seqlens=x.cu_seqlens,
        T=p.T,
        N=p.N,
        scale=p.scale,
    )
    add(p.HV, dA_part=shares, dbias_part=None, dA_log=d_decay, ddt_bias=None, R=p.N * num_blocks)
    return d_decay


def record_lightning_fwd(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> LaunchRecord | None:
    """A record for calls like this one; see `recording.py`."""
    p = problem
    return record_call(("lightning_fwd", p), lambda: lightning_fwd(p, x, out)[:2], (*x, out), p.B * p.T * p.HV, x.q.device)


def record_lightning_bwd(
    problem: LightningProblem, x: LightningInputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
) -> LaunchRecord | None:
    """A record for backwards like this one. It takes the tensors of x, do and dht."""
    p = problem
    if _has_shares(p):  # which are added by torch
        return None
    run = lambda: lightning_bwd(p, x, saved, do, dht)
    return record_call(("lightning_bwd", p), run, (*x, do, dht), p.B * p.T * p.HV, x.q.device)


def _has_shares(p: LightningProblem) -> bool:
    """Whether dq and dk are sums over heads of a group, or over parts of V."""
    return p.H != p.HV or p.V > MOST_CHANNELS


def _sum_shares(shares: Tensor, like: Tensor) -> Tensor:
    """[parts of V, B, T, HV, K] -> [B, T, H, K]."""
    if shares.shape[1:] == like.shape and len(shares) == 1:
        return shares[0]
    return shares.unflatten(3, (like.shape[2], -1)).sum((0, 4)).to(like.dtype)
