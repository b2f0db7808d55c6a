# SPDX-License-Identifier: Apache-2.0
"""Lightning attention in Triton: forward, and a backward made of the same kernel run three times.

Recurrence of one head, f = exp(-s):   S_t = f S_{t-1} + v_t k_t^T   [V, K],      o_t = scale S_t q_t   [V]

One program walks the BT-token chunks of one (segment, value head, V block) with S^T [BK, BV] in fp32 registers. For a
chunk of n tokens, rows r = 0..n-1:

    o_r = scale (f^(r+1) S q_r + sum_{i<=r} f^(r-i) (q_r . k_i) v_i)        S <- f^n S + sum_i f^(n-1-i) v_i k_i^T

Backward. With D_t = f D_{t+1} + scale do_t q_t^T, the gradient of S_t, each gradient is such an attention again:

    dq_t = scale S_t^T do_t     forward in time,   (q, k, v) := (do, v, k), first state h0^T
    dv_t = D_t k_t              backward in time,  (q, k, v) := (k, q, do), first state dht
    dk_t = D_t^T v_t            backward in time,  (q, k, v) := (v, do, q), first state dht^T

Backward in time the carried state is X = f D_{next}, which starts as dht itself and ends as dh0. So `scale` multiplies
what enters the state instead of what leaves it, and the two exponents become f^r (reading X) and f^(n-i) (entering X).

Segments. Where N * HV * (V blocks) programs would not fill the GPU, each sequence is cut into segments of L tokens. A
first kernel makes the state each segment ends with when it starts from zero; a walk then starts from
h0 f^(jL) + sum_i f^((j-1-i)L) end_i. Terms whose factor is below 2^-REACH, zero in fp32, are not read. The number of
segments follows from sizes the host knows: packed sequence n owns ids cu[n] // L + n and up, T // L + N in all, and a
program finds n by counting. No atomics; a result depends on no order of execution.

Limits: K <= 256 (any V); fp32 products are 3xTF32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cula.lightning.problem import LightningInputs, LightningProblem

LOG2_E = tl.constexpr(1.4426950408889634)
REACH = tl.constexpr(150.0)  # 2^-150 is zero in fp32
MAX_DECAY = tl.constexpr(1e4)  # exp(-1e4) is zero too; keeps inf * 0 out of the exponents
BN = tl.constexpr(128)  # sequences counted at once when a packed segment looks for its own


# Device code


@triton.jit
def _find_segment(i_s, cu_seqlens, T, N, length, per_row, IS_CUT: tl.constexpr):
    """Segment id -> its sequence, its place in it, the sequence's row, first token and size, the id of its segment 0."""
    if cu_seqlens is None:
        i_n = i_s // per_row
        return i_n, i_s % per_row, i_n, 0, T, i_n * per_row
    else:
        if IS_CUT:
            i_n = -1
            for n in range(0, N, BN):
                o_n = n + tl.arange(0, BN)
                m_n = o_n < N
                id_0 = tl.load(cu_seqlens + o_n, mask=m_n, other=0) // length + o_n
                i_n += tl.sum((m_n & (id_0 <= i_s)).to(tl.int32), axis=0)
        else:
            i_n = i_s
        bos = tl.load(cu_seqlens + i_n)
        size = tl.load(cu_seqlens + i_n + 1) - bos
        id_0 = (bos // length + i_n) if IS_CUT else i_n
        return i_n, i_s - id_0, 0, bos, size, id_0


@triton.jit
def _row(x, strides, i_b, i_t, i_h):
    """Pointer to the channels of one token and head."""
    return x + tl.cast(i_b, tl.int64) * strides[0] + tl.cast(i_t, tl.int64) * strides[1] + tl.cast(i_h, tl.int64) * strides[2]


@triton.jit
def _state(h, strides, i_n, i_h):
    return h + tl.cast(i_n, tl.int64) * strides[0] + tl.cast(i_h, tl.int64) * strides[1]


@triton.jit
def _load(p, m_r, m_d, IS_WHOLE: tl.constexpr):
    """Rows of a chunk; zeros where a mask is False. IS_WHOLE: the block ends with the channels, m_d says nothing."""
    if IS_WHOLE:
        return tl.load(p, mask=m_r[:, None], other=0.0)
    else:
        return tl.load(p, mask=m_r[:, None] & m_d[None, :], other=0.0)


@triton.jit
def _log2_decay(decay, i_h):
    return tl.minimum(tl.load(decay + i_h), MAX_DECAY) * LOG2_E


@triton.jit
def _num_in_reach(log2_decay):
    """Tokens after which a state's factor is zero in fp32."""
    return tl.minimum(REACH / tl.maximum(log2_decay, 1e-7), 2e9).to(tl.int64)


@triton.jit
def _enter(log2_decay, o_r, n, scale, REVERSE: tl.constexpr):
    """With what factor row r of n enters the state, [BT]; rows past n, which hold zeros, get a finite one."""
    if REVERSE:
        return tl.exp2(-log2_decay * tl.maximum(n - o_r, 0)) * scale
    else:
        return tl.exp2(-log2_decay * tl.maximum(n - 1 - o_r, 0))


@triton.jit
def _advance(b_s, b_k, b_v, b_w, factor, PRECISION: tl.constexpr):
    """S^T <- factor S^T + k^T (w v), [BK, BV]."""
    b_vw = (b_v * b_w[:, None]).to(b_k.dtype)
    return tl.dot(tl.trans(b_k), b_vw, acc=b_s * factor, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "N", "length", "per_row"])
def lightning_segment_kernel(
    k,
    v,
    decay,
    ends,
    cu_seqlens,
    k_strides,
    v_strides,
    h_strides,
    scale,
    T,
    N,
    length,
    per_row,
    HV: tl.constexpr,
    GK: tl.constexpr,
    GV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state each segment but a sequence's last ends with when it starts from zero: `ends` [segments, HV, K x V]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_hs = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_h, i_s = i_hs % HV, i_hs // HV
    _, i_j, i_b, bos, size, _ = _find_segment(i_s, cu_seqlens, T, N, length, per_row, True)
    stop = (i_j + 1) * length
    if stop >= size:
        return

    # Tokens out of the end's reach are left out. `length` is a multiple of BT: every chunk is full.
    log2_decay = _log2_decay(decay, i_h)
    num = tl.minimum(length, (_num_in_reach(log2_decay) // BT + 1) * BT).to(tl.int32)
    start = stop - num
    o_r, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    k_step = -k_strides[1] if REVERSE else k_strides[1]
    v_step = -v_strides[1] if REVERSE else v_strides[1]
    i_t = bos + (size - 1 - start if REVERSE else start)
    p_k = _row(k, k_strides, i_b, i_t, i_h // GK)
    p_v = _row(v, v_strides, i_b, i_t, i_h // GV)
    o_rk = o_r[:, None] * k_step + o_k[None, :]
    o_rv = o_r[:, None] * v_step + o_v[None, :]
    m_r, m_k, m_v = o_r < BT, o_k < K, o_v < V
    b_w = _enter(log2_decay, o_r, BT, scale, REVERSE)
    factor = tl.exp2(-log2_decay * BT)

    b_s = tl.zeros([BK, BV], dtype=tl.float32)
    for _ in range(0, num, BT):
        b_k = _load(p_k + o_rk, m_r, m_k, BK == K)
        b_v = _load(p_v + o_rv, m_r, m_v, V % BV == 0)
        b_s = _advance(b_s, b_k, b_v, b_w, factor, PRECISION)
        p_k += BT * k_step
        p_v += BT * v_step
    o_s = o_k[:, None] * h_strides[2] + o_v[None, :] * h_strides[3]
    tl.store(_state(ends, h_strides, i_s, i_h) + o_s, b_s, mask=m_k[:, None] & m_v[None, :])


@triton.jit(do_not_specialize=["T", "N", "length", "per_row"])
def lightning_walk_kernel(
    q,
    k,
    v,
    o,
    decay,
    h0,
    ht,
    ends,
    cu_seqlens,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    h_strides,
    scale,
    T,
    N,
    length,
    per_row,
    HV: tl.constexpr,
    GQ: tl.constexpr,
    GK: tl.constexpr,
    GV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Outputs of one segment (a whole sequence where `ends` is None), and from a sequence's last the final state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_hs = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_h, i_s = i_hs % HV, i_hs // HV
    i_n, i_j, i_b, bos, size, id_0 = _find_segment(i_s, cu_seqlens, T, N, length, per_row, ends is not None)
    if ends is None:
        start = i_j * 0
        stop = start + size
    else:
        start = i_j * length
        stop = tl.minimum(start + length, size)
        if (i_j > 0) & (start >= size):  # an empty sequence still has its segment 0, which hands h0 on
            return

    log2_decay = _log2_decay(decay, i_h)
    o_r, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = o_k[:, None] * h_strides[2] + o_v[None, :] * h_strides[3]  # of the k role's and of the v role's channels
    b_s = tl.zeros([BK, BV], dtype=tl.float32)
    if h0 is not None:
        b_s = tl.load(_state(h0, h_strides, i_n, i_h) + o_s, mask=m_s, other=0.0)
    if ends is not None:
        seg_factor = tl.exp2(-log2_decay * length)
        first = tl.maximum(i_j - 1 - _num_in_reach(log2_decay) // length, 0).to(tl.int32)
        if first > 0:
            b_s = tl.zeros([BK, BV], dtype=tl.float32)
        p_e = _state(ends, h_strides, id_0 + first, i_h)
        for _ in range(first, i_j):
            b_s = b_s * seg_factor + tl.load(p_e + o_s, mask=m_s, other=0.0)
            p_e += h_strides[0]

    q_step = -q_strides[1] if REVERSE else q_strides[1]
    k_step = -k_strides[1] if REVERSE else k_strides[1]
    v_step = -v_strides[1] if REVERSE else v_strides[1]
    o_step = -o_strides[1] if REVERSE else o_strides[1]
    i_t = bos + (size - 1 - start if REVERSE else start)
    p_q = _row(q, q_strides, i_b, i_t, i_h // GQ)
    p_k = _row(k, k_strides, i_b, i_t, i_h // GK)
    p_v = _row(v, v_strides, i_b, i_t, i_h // GV)
    p_o = _row(o, o_strides, i_b, i_t, i_h)
    # Scalar pointers and int32 offsets: a tile of 64-bit pointers would cost twice the registers.
    o_rq = o_r[:, None] * q_step + o_k[None, :]
    o_rk = o_r[:, None] * k_step + o_k[None, :]
    o_rv = o_r[:, None] * v_step + o_v[None, :]
    o_ro = o_r[:, None] * o_step + o_v[None, :] * o_strides[3]

    if REVERSE:
        b_leave = tl.exp2(-log2_decay * o_r)  # with what factor the state reaches row r
    else:
        b_leave = tl.exp2(-log2_decay * (o_r + 1)) * scale
    lag = o_r[:, None] - o_r[None, :]
    b_d = tl.where(lag >= 0, tl.exp2(-log2_decay * tl.maximum(lag, 0)) * scale, 0.0)  # [BT, BT]

    for r in range(start, stop, BT):
        n = tl.minimum(stop - r, BT)
        m_r = o_r < n
        b_q = _load(p_q + o_rq, m_r, m_k, BK == K)
        b_k = _load(p_k + o_rk, m_r, m_k, BK == K)
        b_v = _load(p_v + o_rv, m_r, m_v, V % BV == 0)
        b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_d  # [BT, BT]
        b_o = tl.dot(b_q, b_s.to(b_q.dtype), input_precision=PRECISION) * b_leave[:, None]  # [BT, BV]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, acc=b_o, input_precision=PRECISION)
        tl.store(p_o + o_ro, b_o.to(o.dtype.element_ty), mask=m_r[:, None] & m_v[None, :])
        b_s = _advance(b_s, b_k, b_v, _enter(log2_decay, o_r, n, scale, REVERSE), tl.exp2(-log2_decay * n), PRECISION)
        p_q += BT * q_step
        p_k += BT * k_step
        p_v += BT * v_step
        p_o += BT * o_step
    if ht is not None:  # noqa: SIM102 (settled at compile time; the other when it runs)
        if stop == size:
            tl.store(_state(ht, h_strides, i_n, i_h) + o_s, b_s, mask=m_s)


# Host code


# Microseconds on an H200 for K = V = 128, bf16, chunks of 64, fitted to the times of various cuts of T = 1024 to 131072
# with H = 4 to 64. Only their ratios matter, to weigh segments against whole sequences.
WALK_US = 1.48  # a chunk of a walk; shared memory lets one walk at a time on an SM
WAVE_US = 4.0  # first loads and last stores of the walks that run together
SEGMENT_US = 0.65  # a chunk of the segment kernel
LAUNCH_US = 6.0  # the segment kernel's own beginning and end
LOOK_BACK_US = 0.7  # reading one earlier segment's state
MIN_SEGMENT_CHUNKS = 2
SEGMENT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

# Bytes of shared memory that one block may take, by compute capability; all others have the most.
SHARED_BYTES = {(8, 0): 166912, (8, 7): 166912, (8, 6): 101376, (8, 9): 101376, (12, 0): 101376, (12, 1): 101376}
MOST_SHARED_BYTES = 232448


@dataclass(frozen=True)
class Plan:
    """Tiles and segments of one walk."""

    BT: int  # tokens in a chunk
    BV: int  # value channels of a program
    num_warps: int
    num_stages: int
    num_segments: int  # ids, over all sequences; one a sequence where `length` is 0
    length: int  # tokens in a segment; 0: sequences are whole


@functools.lru_cache(maxsize=1024)
def _plan(problem: LightningProblem, K: int, V: int, num_sms: int) -> Plan:
    """How to run a walk with q, k of K channels and v of V."""
    N, T, BK, size = problem.N, problem.T, max(16, triton.next_power_of_2(K)), problem.dtype.itemsize
    if size == 2:
        BT, BV, num_warps, max_stages = min(problem.chunk_size, 64), 64 if V > 32 else 32, 4, 3
    elif BK < 128:
        BT, BV, num_warps, max_stages = min(problem.chunk_size, 32), 32, 4, 3
    else:  # the operands of a 3xTF32 product sit in registers, three times over
        BT, BV, num_warps, max_stages = 16, 32, 8, 1
    heads = problem.HV * triton.cdiv(V, BV)  # programs of one segment
    cut = _cut_packed if problem.is_packed and N > 1 else _cut_rows
    length = cut(N, triton.cdiv(T, BT), heads, num_sms) * BT
    if not length:
        count = N
    else:
        count = T // length + N if problem.is_packed else N * triton.cdiv(T, length)

    available = MOST_SHARED_BYTES if problem.sm is None else SHARED_BYTES.get(problem.sm, MOST_SHARED_BYTES)
    stages = [n for n in range(1, max_stages + 1) if size * (n * BT * (2 * BK + BV) + BK * BV) <= available]
    return Plan(BT, BV, num_warps, max(stages, default=1), count, length)


def _cut_rows(rows: int, chunks: int, heads: int, num_sms: int) -> int:
    """Chunks in a segment for rows of equal length, 0 to leave them whole: the cheapest of a few cuts, by the above."""

    def cost(per_row: int) -> float:
        programs, length = rows * heads * per_row, triton.cdiv(chunks, per_row)
        walk = triton.cdiv(programs, num_sms) * (WAVE_US + length * WALK_US)
        if per_row == 1:
            return walk
        return walk + max(1.0, programs / (2 * num_sms)) * length * SEGMENT_US + LAUNCH_US + (per_row - 1) * LOOK_BACK_US

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
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class _Walk:
    """One attention in the roles (q, k, v) -> o: the operands, their head groups, and how states are laid out.

    States are [., HV, V, K] as the library keeps them; `is_swapped` says that the v role's channels are their last
    dimension, as for dq and dk, where the roles of K and V trade places.
    """

    def __init__(self, problem: LightningProblem, x: LightningInputs, k: Tensor, v: Tensor, is_swapped: bool, reverse: bool):
        self.problem, self.x, self.k, self.v = problem, x, k, v
        K, V = k.shape[-1], v.shape[-1]
        self.plan = plan = _plan(problem, K, V, _num_sms(k.device))
        size = K * V
        self.h_strides = (problem.HV * size, size, V, 1) if is_swapped else (problem.HV * size, size, 1, K)
        self.grid = (plan.num_segments * problem.HV * triton.cdiv(V, plan.BV),)
        per_row = 1 if problem.is_packed or not problem.N else plan.num_segments // problem.N
        self.sizes = (problem.scale, problem.T, problem.N, plan.length, per_row)
        self.constants = dict(
            HV=problem.HV,
            GK=problem.HV // k.shape[2],
            GV=problem.HV // v.shape[2],
            K=K,
            V=V,
            BT=plan.BT,
            BK=max(16, triton.next_power_of_2(K)),
            BV=plan.BV,
            REVERSE=reverse,
            PRECISION="tf32x3",
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )

    def segment_ends(self) -> Tensor | None:
        """[segments, HV, V, K] float32, or None where sequences are whole."""
        if not self.plan.length:
            return None
        problem = self.problem
        ends = self.k.new_empty((self.plan.num_segments, problem.HV, problem.V, problem.K), dtype=torch.float32)
        lightning_segment_kernel[self.grid](
            self.k,
            self.v,
            self.x.decay,
            ends,
            self.x.cu_seqlens,
            self.k.stride(),
            self.v.stride(),
            self.h_strides,
            *self.sizes,
            **self.constants,
        )
        return ends

    def run(self, q: Tensor, o: Tensor, h0: Tensor | None, ht: Tensor | None, ends: Tensor | None) -> None:
        lightning_walk_kernel[self.grid](
            q,
            self.k,
            self.v,
            o,
            self.x.decay,
            h0,
            ht,
            ends,
            self.x.cu_seqlens,
            q.stride(),
            self.k.stride(),
            self.v.stride(),
            o.stride(),
            self.h_strides,
            *self.sizes,
            GQ=self.problem.HV // q.shape[2],
            **self.constants,
        )


def lightning_fwd(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Outputs `[B, T, HV, V]` (written to `out` where given) and, where asked for, the final state `[N, HV, V, K]` float32."""
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device) if out is None else out
    ht = _new_state(problem, x) if problem.output_final_state else None
    walk = _Walk(problem, x, x.k, x.v, is_swapped=False, reverse=False)
    walk.run(x.q, o, x.initial_state, ht, walk.segment_ends())
    return o, ht


def lightning_bwd(
    problem: LightningProblem, x: LightningInputs, do: Tensor, dht: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v (in their dtype) and of the initial state (float32; None where there was none)."""
    do = do.to(x.q.dtype)
    if do.stride(-1) != 1:
        do = do.contiguous()
    dht = None if dht is None else dht.to(torch.float32).contiguous()
    dh0 = _new_state(problem, x) if problem.has_initial_state else None
    # Of a group of value heads each makes its share of dq and dk; fp32 shares are then added in a fixed order.
    shape = (*x.q.shape[:2], problem.HV, problem.K)
    dtype = x.q.dtype if problem.H == problem.HV else torch.float32
    dq = torch.empty(shape, dtype=dtype, device=x.q.device)
    dk = torch.empty(shape, dtype=dtype, device=x.q.device)
    dv = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)

    walk = _Walk(problem, x, x.v, x.k, is_swapped=True, reverse=False)
    walk.run(do, dq, x.initial_state, None, walk.segment_ends())
    walk = _Walk(problem, x, x.q, do, is_swapped=False, reverse=True)
    walk.run(x.k, dv, dht, dh0, walk.segment_ends())
    walk = _Walk(problem, x, do, x.q, is_swapped=True, reverse=True)
    walk.run(x.v, dk, dht, None, walk.segment_ends())
    return _sum_groups(dq, x.q), _sum_groups(dk, x.k), dv, dh0


def _new_state(problem: LightningProblem, x: LightningInputs) -> Tensor:
    return torch.empty((problem.N, problem.HV, problem.V, problem.K), dtype=torch.float32, device=x.q.device)


def _sum_groups(shares: Tensor, like: Tensor) -> Tensor:
    """[B, T, HV, K] -> [B, T, H, K]."""
    if shares.shape == like.shape:
        return shares
    return shares.unflatten(2, (like.shape[2], -1)).sum(3).to(like.dtype)
