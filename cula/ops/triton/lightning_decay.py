# SPDX-License-Identifier: Apache-2.0
"""Lightning attention, the gradient of the decay: for models that learn it.

With f = exp(-s), an output is o_t = scale sum_i f^(t-i) (q_t . k_i) v_i, and the derivative of f^lag by -s is lag f^lag. So
beside the state S this kernel carries W, the sum of v k^T with weights lag f^lag, from a sequence's start to its end:

    W_t = f (W_{t-1} + S_{t-1})                  ds = -(scale sum_t do_t . (W_t q_t) + <dht, W_T>)

and in a chunk of n tokens, rows r = 0..n-1, everything [V, K]:

    W_r q_r = f^(r+1) (W + (r+1) S) q_r + sum_{i<=r} (r-i) f^(r-i) (q_r . k_i) v_i
    W <- f^n (W + n S) + sum_i (n-1-i) f^(n-1-i) v_i k_i^T

No large sums are subtracted from each other, as there would be with the places of tokens in the sequence for weights. A program
takes one (sequence, value head, V block), and the V blocks and sequences are added afterwards in a fixed order. Sequences are not
cut into segments.

W grows with the lags in reach, min(T, 1/s). Where it is an operand of 16 bits it is in units of that, and the lags inside of a
chunk are in units of BT, so that float16 holds them wherever it holds S.
"""

import triton.language as tl

from .launch import kernel
from .lightning_recurrence import head_log2_decay, load_rows, row_pointer, state_pointer
from .varlen import counted_segment


@kernel(numbers="T N", floats="scale")
def lightning_decay_bwd_kernel(
    q, k, v, do, decay, h0, dht, shares, cu_seqlens, q_strides, k_strides, v_strides, do_strides, T, N, scale,
    HV: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Shares [N, V blocks, HV] of ds. States are [N, HV, V, K], held as [BK, BV]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_hn = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_h = i_hn % HV
    i_n, _, i_b, bos, size, _ = counted_segment(i_hn // HV, cu_seqlens, T, N, 1, 1, False)

    log2_decay = head_log2_decay(decay, i_h)
    unit = tl.maximum(tl.minimum(size.to(tl.float32), 1.0 / tl.maximum(log2_decay, 1e-9)), 1.0)
    o_r, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = o_k[:, None] + o_v[None, :] * K
    h_strides = (HV * K * V, K * V)
    b_s = tl.zeros([BK, BV], tl.float32)
    if h0 is not None:
        b_s = tl.load(state_pointer(h0, h_strides, i_n, i_h) + o_s, mask=m_s, other=0.0)
    b_w = tl.zeros([BK, BV], tl.float32)

    p_q = row_pointer(q, q_strides, i_b, bos, i_h // G)
    p_k = row_pointer(k, k_strides, i_b, bos, i_h // G)
    p_v = row_pointer(v, v_strides, i_b, bos, i_h)
    p_do = row_pointer(do, do_strides, i_b, bos, i_h)
    o_rq = o_r[:, None] * q_strides[1] + o_k[None, :]
    o_rk = o_r[:, None] * k_strides[1] + o_k[None, :]
    o_rv = o_r[:, None] * v_strides[1] + o_v[None, :]
    o_rd = o_r[:, None] * do_strides[1] + o_v[None, :]
    o_f = (o_r + 1).to(tl.float32)
    b_leave = tl.exp2(-log2_decay * o_f)
    lag = tl.maximum(o_r[:, None] - o_r[None, :], 0).to(tl.float32)
    b_lag = lag * (1.0 / BT) * tl.exp2(-log2_decay * lag)  # [BT, BT], zero above the diagonal and on it

    b_sum = tl.zeros([BT], tl.float32)
    for r in range(0, size, BT):
        n = tl.minimum(size - r, BT)
        m_r = o_r < n
        b_q = load_rows(p_q + o_rq, m_r, m_k, BK == K)
        b_k = load_rows(p_k + o_rk, m_r, m_k, BK == K)
        b_v = load_rows(p_v + o_rv, m_r, m_v, V % BV == 0)
        b_do = load_rows(p_do + o_rd, m_r, m_v, V % BV == 0).to(tl.float32)
        b_o = tl.dot(b_q, (b_w * (1.0 / unit)).to(b_q.dtype), input_precision=PRECISION) * unit
        b_o += tl.dot(b_q, b_s.to(b_q.dtype), input_precision=PRECISION) * o_f[:, None]
        b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (b_lag * scale)  # [BT, BT]
        b_in = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION) * BT
        b_sum += tl.sum((b_o * (b_leave * scale)[:, None] + b_in) * b_do, axis=1)

        b_after = tl.maximum(n - 1 - o_r, 0).to(tl.float32)  # tokens behind row r; rows past n hold zeros
        b_f = tl.exp2(-log2_decay * b_after)
        factor = tl.exp2(-log2_decay * n)
        b_vw = (b_v * (b_f * b_after * (1.0 / BT))[:, None]).to(b_k.dtype)
        b_w = (b_w + b_s * n.to(tl.float32)) * factor
        b_w += tl.dot(tl.trans(b_k), b_vw, input_precision=PRECISION) * BT
        b_s = tl.dot(tl.trans(b_k), (b_v * b_f[:, None]).to(b_k.dtype), acc=b_s * factor, input_precision=PRECISION)
        p_q += BT * q_strides[1]
        p_k += BT * k_strides[1]
        p_v += BT * v_strides[1]
        p_do += BT * do_strides[1]
    total = tl.sum(b_sum, axis=0)
    if dht is not None:
        b_d = tl.load(state_pointer(dht, h_strides, i_n, i_h) + o_s, mask=m_s, other=0.0)
        total += tl.sum(tl.sum(b_d * b_w, axis=1), axis=0)
    tl.store(shares + (tl.cast(i_n, tl.int64) * NV + i_v) * HV + i_h, -total)
