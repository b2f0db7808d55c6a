# SPDX-License-Identifier: Apache-2.0
"""Lightning attention, the recurrence along a sequence: the kernels of `lightning.py`, which has the formulas."""

import triton
import triton.language as tl

from .gate import LOG2_E
from .launch import kernel
from .varlen import counted_segment

REACH = tl.constexpr(150.0)  # 2^-150 is zero in fp32
MAX_DECAY = tl.constexpr(1e4)  # exp(-1e4) is zero too; keeps inf * 0 out of the exponents


@triton.jit
def row_pointer(x, strides, i_b, i_t, i_h):
    """Pointer to the channels of one token and head."""
    return x + tl.cast(i_b, tl.int64) * strides[0] + tl.cast(i_t, tl.int64) * strides[1] + tl.cast(i_h, tl.int64) * strides[2]


@triton.jit
def state_pointer(h, strides, i_n, i_h):
    return h + tl.cast(i_n, tl.int64) * strides[0] + tl.cast(i_h, tl.int64) * strides[1]


@triton.jit
def load_rows(p, m_r, m_d, IS_WHOLE: tl.constexpr):
    """Rows of a chunk; zeros where a mask is False. IS_WHOLE: the block ends with the channels, m_d says nothing."""
    if IS_WHOLE:
        return tl.load(p, mask=m_r[:, None], other=0.0)
    else:
        return tl.load(p, mask=m_r[:, None] & m_d[None, :], other=0.0)


@triton.jit
def head_log2_decay(decay, i_h):
    return tl.minimum(tl.load(decay + i_h), MAX_DECAY) * LOG2_E


@triton.jit
def num_in_reach(log2_decay):
    """Tokens after which a state's factor is zero in fp32."""
    return tl.minimum(REACH / tl.maximum(log2_decay, 1e-7), 2e9).to(tl.int64)


@triton.jit
def entering(log2_decay, o_r, n, scale, REVERSE: tl.constexpr):
    """With what factor row r of n enters the state, [BT]; rows past n, which hold zeros, get a finite one."""
    if REVERSE:
        return tl.exp2(-log2_decay * tl.maximum(n - o_r, 0)) * scale
    else:
        return tl.exp2(-log2_decay * tl.maximum(n - 1 - o_r, 0))


@triton.jit
def advance(b_s, b_k, b_v, b_w, factor, PRECISION: tl.constexpr):
    """S^T <- factor S^T + k^T (w v), [BK, BV]."""
    b_vw = (b_v * b_w[:, None]).to(b_k.dtype)
    return tl.dot(tl.trans(b_k), b_vw, acc=b_s * factor, input_precision=PRECISION)


@kernel(numbers="T N length per_row", floats="scale")
def lightning_segment_kernel(
    k, v, decay, ends, cu_seqlens, k_strides, v_strides, h_strides, T, N, length, per_row, scale,
    HV: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state each segment but a sequence's last ends with when it starts from zero: `ends` [segments, HV, K x V]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_hs = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_h, i_s = i_hs % HV, i_hs // HV
    _, i_j, i_b, bos, size, _ = counted_segment(i_s, cu_seqlens, T, N, length, per_row, True)
    stop = (i_j + 1) * length
    if stop >= size:
        return

    # Tokens out of the end's reach are left out. `length` is a multiple of BT: every chunk is full.
    log2_decay = head_log2_decay(decay, i_h)
    num = tl.minimum(length, (num_in_reach(log2_decay) // BT + 1) * BT).to(tl.int32)
    start = stop - num
    o_r, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    k_step = -k_strides[1] if REVERSE else k_strides[1]
    v_step = -v_strides[1] if REVERSE else v_strides[1]
    i_t = bos + (size - 1 - start if REVERSE else start)
    p_k = row_pointer(k, k_strides, i_b, i_t, i_h // GK)
    p_v = row_pointer(v, v_strides, i_b, i_t, i_h // GV)
    o_rk = o_r[:, None] * k_step + o_k[None, :]
    o_rv = o_r[:, None] * v_step + o_v[None, :]
    m_r, m_k, m_v = o_r < BT, o_k < K, o_v < V
    b_w = entering(log2_decay, o_r, BT, scale, REVERSE)
    factor = tl.exp2(-log2_decay * BT)

    b_s = tl.zeros([BK, BV], dtype=tl.float32)
    for _ in range(0, num, BT):
        b_k = load_rows(p_k + o_rk, m_r, m_k, BK == K)
        b_v = load_rows(p_v + o_rv, m_r, m_v, V % BV == 0)
        b_s = advance(b_s, b_k, b_v, b_w, factor, PRECISION)
        p_k += BT * k_step
        p_v += BT * v_step
    o_s = o_k[:, None] * h_strides[2] + o_v[None, :] * h_strides[3]
    tl.store(state_pointer(ends, h_strides, i_s, i_h) + o_s, b_s, mask=m_k[:, None] & m_v[None, :])


@triton.jit
def first_state(h0, ends, h_strides, log2_decay, length, i_n, i_j, i_h, id_0, o_s, m_s, BK: tl.constexpr, BV: tl.constexpr):
    """The state in front of segment i_j of sequence i_n: from h0 and the ends of the segments before, as far as they reach."""
    b_s = tl.zeros([BK, BV], dtype=tl.float32)
    if h0 is not None:
        b_s = tl.load(state_pointer(h0, h_strides, i_n, i_h) + o_s, mask=m_s, other=0.0)
    if ends is not None:
        seg_factor = tl.exp2(-log2_decay * length)
        first = tl.maximum(i_j - 1 - num_in_reach(log2_decay) // length, 0).to(tl.int32)
        if first > 0:
            b_s = tl.zeros([BK, BV], dtype=tl.float32)
        p_e = state_pointer(ends, h_strides, id_0 + first, i_h)
        for _ in range(first, i_j):
            b_s = b_s * seg_factor + tl.load(p_e + o_s, mask=m_s, other=0.0)
            p_e += h_strides[0]
    return b_s


@kernel(numbers="T N length per_row", floats="scale")
def lightning_recurrence_kernel(
    q, k, v, o, decay, h0, ht, ends, cu_seqlens, q_strides, k_strides, v_strides, o_strides, h_strides,
    T, N, length, per_row, scale,
    HV: tl.constexpr, GQ: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment (a whole sequence where `ends` is None), and from a sequence's last the final state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_hs = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_h, i_s = i_hs % HV, i_hs // HV
    i_n, i_j, i_b, bos, size, id_0 = counted_segment(i_s, cu_seqlens, T, N, length, per_row, ends is not None)
    if ends is None:
        start = i_j * 0
        stop = start + size
    else:
        start = i_j * length
        stop = tl.minimum(start + length, size)
        if (i_j > 0) & (start >= size):  # an empty sequence still has its segment 0, which hands h0 on
            return

    log2_decay = head_log2_decay(decay, i_h)
    o_r, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = o_k[:, None] * h_strides[2] + o_v[None, :] * h_strides[3]  # of the k role's and of the v role's channels
    b_s = first_state(h0, ends, h_strides, log2_decay, length, i_n, i_j, i_h, id_0, o_s, m_s, BK, BV)

    q_step = -q_strides[1] if REVERSE else q_strides[1]
    k_step = -k_strides[1] if REVERSE else k_strides[1]
    v_step = -v_strides[1] if REVERSE else v_strides[1]
    o_step = -o_strides[1] if REVERSE else o_strides[1]
    i_t = bos + (size - 1 - start if REVERSE else start)
    p_q = row_pointer(q, q_strides, i_b, i_t, i_h // GQ)
    p_k = row_pointer(k, k_strides, i_b, i_t, i_h // GK)
    p_v = row_pointer(v, v_strides, i_b, i_t, i_h // GV)
    p_o = row_pointer(o, o_strides, i_b, i_t, i_h)
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
        b_q = load_rows(p_q + o_rq, m_r, m_k, BK == K)
        b_k = load_rows(p_k + o_rk, m_r, m_k, BK == K)
        b_v = load_rows(p_v + o_rv, m_r, m_v, V % BV == 0)
        b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_d  # [BT, BT]
        b_o = tl.dot(b_q, b_s.to(b_q.dtype), input_precision=PRECISION) * b_leave[:, None]  # [BT, BV]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, acc=b_o, input_precision=PRECISION)
        tl.store(p_o + o_ro, b_o.to(o.dtype.element_ty), mask=m_r[:, None] & m_v[None, :])
        b_s = advance(b_s, b_k, b_v, entering(log2_decay, o_r, n, scale, REVERSE), tl.exp2(-log2_decay * n), PRECISION)
        p_q += BT * q_step
        p_k += BT * k_step
        p_v += BT * v_step
        p_o += BT * o_step
    if ht is not None:  # noqa: SIM102 (settled at compile time; the other when it runs)
        if stop == size:
            tl.store(state_pointer(ht, h_strides, i_n, i_h) + o_s, b_s, mask=m_s)
