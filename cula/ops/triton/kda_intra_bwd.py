# SPDX-License-Identifier: Apache-2.0
"""KDA backward, intra-chunk: all but `kda_pairs_bwd`, which comes between `states` and `finish`. Names as in the forward.

Given S (`h`, before the chunk), dS (`dh`, after it), U, dX and dO (times scale):
    dAqk = lower(dO U^T)      dA = -strict_lower(dX U^T)                                                 [C, C]
    dqg  = dO S               dkb = -dX S               dkr = U dS                                       [C, K]
    b    : sum_v dX V + sum_c (k e^G) dkb + sum_i dA (A / b)

| kernel   | one program for                   | reads                             | writes                                  |
|----------|-----------------------------------|-----------------------------------|-----------------------------------------|
| `scores` | chunk, head                       | dO, u, dx, v                      | dAqk, dA, first term of db              |
| `states` | chunk, head, BK channels          | dO, u, dx, h, dh                  | dqg, dkb, dkr, gradient of decay        |
| `pairs`  | half chunk, head, BK channels     | all of these, q, k, g, beta       | dqn, dkn, dg, shares of db, dA_log, ... |
| `finish` | sub-block of 16 rows, q/k head    | dqn, dkn, shares of db, q, k      | dq, dk, dbeta                           |
| `shares` | head                              | shares of dA_log and ddt_bias     | dA_log, ddt_bias                        |
"""

import triton
import triton.language as tl

from .gate import beta_grad, gate_grad, gate_strength, norm_grad
from .kda_levels import load_gate_input
from .launch import kernel
from .tiles import load_channels, load_rows, store_channels, tile_mask
from .varlen import chunk_span


@kernel(numbers="T TT NT", floats="scale")
def kda_scores_bwd_kernel(
    v, do, u, dx, da_qk, da_kk, da_max, db, cu_seqlens, chunk_seq, chunk_base, v_strides, do_strides, T, TT, NT, scale,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, IS_PACKED: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """dAqk and dA in units of da_max [chunks, HV], a power of two that keeps the largest of them below 2: float16 then has
    tf32's precision, whatever the size of dO."""
    i_h = tl.program_id(0) % HV
    i_c = tl.program_id(0) // HV
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if num <= 0:
        return
    o_c = tl.arange(0, C)
    m_c = o_c < num
    row = i_h.to(tl.int64) * TT + i_b * T + t0
    v += i_b * v_strides[0] + t0 * v_strides[1] + i_h * v_strides[2]
    do += i_b * do_strides[0] + t0 * do_strides[1] + i_h * do_strides[2]
    b_dA = tl.zeros([C, C], tl.float32)
    b_dAqk = tl.zeros([C, C], tl.float32)
    b_db = tl.zeros([C], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_cv = row * V + o_c[:, None] * V + o_v[None, :]
        m_cv = tile_mask(m_c, o_v, V, BV)
        b_u = tl.trans(tl.load(u + o_cv, mask=m_cv, other=0.0))
        b_dx = tl.load(dx + o_cv, mask=m_cv, other=0.0)
        b_do = tl.load(do + o_c[:, None] * do_strides[1] + o_v[None, :], mask=m_cv, other=0.0).to(u.dtype.element_ty)
        b_v = tl.load(v + o_c[:, None] * v_strides[1] + o_v[None, :], mask=m_cv, other=0.0)
        b_dAqk = tl.dot(b_do, b_u, b_dAqk, input_precision=IP)
        b_dA = tl.dot(b_dx, b_u, b_dA, input_precision=IP)
        b_db += tl.sum(b_dx.to(tl.float32) * b_v.to(tl.float32), axis=1)
    m_low = o_c[:, None] >= o_c[None, :]
    b_dAqk = tl.where(m_low, b_dAqk * scale, 0.0)
    b_dA = tl.where(m_low, -b_dA, 0.0)
    b_max = tl.max(tl.maximum(tl.abs(b_dAqk), tl.abs(b_dA)), axis=1, keep_dims=True)
    b_max = tl.max(b_max, axis=0, keep_dims=True)  # [1, 1]: Triton 3.6 fails on sm_100 if the first maximum is a vector
    b_max = tl.minimum(tl.maximum(b_max, 1e-24), 1e24)
    b_max = (b_max.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    o_cc = row * C + o_c[:, None] * C + o_c[None, :]
    tl.store(da_qk + o_cc, (b_dAqk / b_max).to(da_qk.dtype.element_ty), mask=m_c[:, None])
    tl.store(da_kk + o_cc, (b_dA / b_max).to(da_kk.dtype.element_ty), mask=m_c[:, None])
    tl.store(da_max + i_c.to(tl.int64) * HV + i_h + tl.zeros([1, 1], tl.int32), b_max)
    tl.store(db + row + o_c, b_db, mask=m_c)


@kernel(numbers="T TT NT", floats="scale")
def kda_states_bwd_kernel(
    do, u, dx, h, dh, decay, dqg, dkb, dkr, ddecay, cu_seqlens, chunk_seq, chunk_base, do_strides, T, TT, NT, scale,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    IS_PACKED: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Gradients through the states, of BK channels of one (chunk, head)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % NK
    i_h = tl.program_id(0) // NK % HV
    i_c = tl.program_id(0) // (NK * HV)
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if num <= 0:
        return
    o_c = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)
    m_c = o_c < num
    row = i_h.to(tl.int64) * TT + i_b * T + t0
    o_chunk = i_c.to(tl.int64) * HV + i_h
    do += i_b * do_strides[0] + t0 * do_strides[1] + i_h * do_strides[2]
    b_dqg = tl.zeros([C, BK], tl.float32)
    b_dkb = tl.zeros([C, BK], tl.float32)
    b_dkr = tl.zeros([C, BK], tl.float32)
    b_dend = tl.zeros([BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_cv = row * V + o_c[:, None] * V + o_v[None, :]
        o_vk = o_chunk * (V * K) + o_v[:, None] * K + o_k[None, :]
        m_cv = tile_mask(m_c, o_v, V, BV)
        b_h = load_rows(h + o_vk, o_v < V, o_k, V % BV != 0, K, BK)
        b_dh = load_rows(dh + o_vk, o_v < V, o_k, V % BV != 0, K, BK)
        b_u = tl.load(u + o_cv, mask=m_cv, other=0.0)
        b_dx = tl.load(dx + o_cv, mask=m_cv, other=0.0)
        b_do = tl.load(do + o_c[:, None] * do_strides[1] + o_v[None, :], mask=m_cv, other=0.0).to(u.dtype.element_ty)
        b_dqg = tl.dot(b_do, b_h, b_dqg, input_precision=IP)
        b_dkb = tl.dot(b_dx, b_h, b_dkb, input_precision=IP)
        b_dkr = tl.dot(b_u, b_dh, b_dkr, input_precision=IP)
        b_dend += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=0)
    o_ck = row * K + o_c[:, None] * K + o_k[None, :]
    m_ck = tile_mask(m_c, o_k, K, BK)
    tl.store(dqg + o_ck, (b_dqg * scale).to(dqg.dtype.element_ty), mask=m_ck)
    tl.store(dkb + o_ck, (-b_dkb).to(dkb.dtype.element_ty), mask=m_ck)
    tl.store(dkr + o_ck, b_dkr.to(dkr.dtype.element_ty), mask=m_ck)
    store_channels(ddecay + o_chunk * K + o_k, b_dend * load_channels(decay + o_chunk * K + o_k, o_k, K, BK), o_k, K, BK)


@triton.jit
def store_shares(dA_part, dbias_part, o_part, b_da, b_dbias, o_k, K: tl.constexpr, BK: tl.constexpr):
    """A program's shares of dA_log and ddt_bias, where they are wanted: BK of K channels', or (K and BK are 1) a head's."""
    if dA_part is not None:
        store_channels(dA_part + o_part, b_da, o_k, K, BK)
    if dbias_part is not None:
        store_channels(dbias_part + o_part, b_dbias, o_k, K, BK)


@triton.jit
def through_norm(x, s_xt, b_dn, o_t, m_tk, BK: tl.constexpr, NORM: tl.constexpr):
    """Gradient of rows o_t of x from that of their normalised form."""
    if NORM:
        o_k = tl.arange(0, BK)
        b_x = tl.load(x + o_t[:, None] * s_xt + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        b_dn = norm_grad(b_dn, b_x)
    return b_dn


@triton.jit
def sum_parts(part, b_sum, o_row, m_t, stride, NK: tl.constexpr):
    """What the blocks of channels left in `part`, added up in their order."""
    for i_k in tl.static_range(NK):
        b_sum += tl.load(part + i_k * stride + o_row, mask=m_t, other=0.0)
    return b_sum


@kernel(numbers="T TT NT", floats="lower_bound")
def kda_finish_bwd_kernel(
    q, k, g, beta, A_log, dt_bias, dqn, dkn, dg_part, db, db_part, dq, dk, dg, dbeta, dA_part, dbias_part,
    cu_seqlens, chunk_seq, chunk_base, q_strides, k_strides, g_strides, T, TT, NT, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr,
    GATE: tl.constexpr, SCALAR: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr, BETA_MAX: tl.constexpr,
    IS_PACKED: tl.constexpr,
):  # fmt: skip
    """What needs all channels or all value heads of a group: dq and dk through the norm, dbeta, and one gate a head.

    beta is the activated one; db [HV, B*T] and db_part add up to its gradient.
    """
    BC: tl.constexpr = 16
    NB: tl.constexpr = C // BC
    G: tl.constexpr = HV // H
    i_r = tl.program_id(0) % NB
    i_hk = tl.program_id(0) // NB % H
    i_c = tl.program_id(0) // (NB * H)
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if i_r * BC >= num:
        if SCALAR:
            for i_g in range(0, G):
                store_shares(dA_part, dbias_part, (i_c.to(tl.int64) * NB + i_r) * HV + i_hk * G + i_g, 0.0, 0.0, 0, 1, 1)
        return
    o_t = i_r * BC + tl.arange(0, BC)
    o_k = tl.arange(0, BK)
    m_t = o_t < num
    m_tk = tile_mask(m_t, o_k, K, BK)
    token = i_b * T + t0
    b_dq = tl.zeros([BC, BK], tl.float32)
    b_dk = tl.zeros([BC, BK], tl.float32)
    for i_g in range(0, G):
        i_h = i_hk * G + i_g
        row = i_h.to(tl.int64) * TT + token
        o_tk = row * K + o_t[:, None] * K + o_k[None, :]
        b_dq += tl.load(dqn + o_tk, mask=m_tk, other=0.0).to(tl.float32)
        b_dk += tl.load(dkn + o_tk, mask=m_tk, other=0.0).to(tl.float32)
        out = (token * HV + i_h) + o_t * HV
        b_db = tl.load(db + row + o_t, mask=m_t, other=0.0)
        b_db = sum_parts(db_part, b_db, row + o_t, m_t, HV * TT.to(tl.int64), NK)
        if SIGMOID:
            b_db = beta_grad(b_db, tl.load(beta + row + o_t, mask=m_t, other=0.0), BETA_MAX)
        tl.store(dbeta + out, b_db.to(dbeta.dtype.element_ty), mask=m_t)
        if SCALAR:
            b_dg = sum_parts(dg_part, tl.zeros([BC], tl.float32), row + o_t, m_t, HV * TT.to(tl.int64), NK)
            p_g = g + i_b * g_strides[0] + t0 * g_strides[1] + i_h * g_strides[2]
            b_x = load_gate_input(p_g, g_strides[1], dt_bias, i_h, o_k, o_t, m_t, K, BK, SCALAR)
            b_dx, b_da = gate_grad(b_dg, b_x, gate_strength(A_log, i_h), lower_bound, GATE)
            tl.store(dg + out, b_dx.to(dg.dtype.element_ty), mask=m_t)
            o_part = (i_c.to(tl.int64) * NB + i_r) * HV + i_h
            b_da = tl.sum(tl.where(m_t, b_da, 0.0), axis=0)
            store_shares(dA_part, dbias_part, o_part, b_da, tl.sum(tl.where(m_t, b_dx, 0.0), axis=0), 0, 1, 1)

    o_tk = (token * H + i_hk) * K + o_t[:, None] * (H * K) + o_k[None, :]
    q += i_b * q_strides[0] + t0 * q_strides[1] + i_hk * q_strides[2]
    b_dq = through_norm(q, q_strides[1], b_dq, o_t, m_tk, BK, NORM)
    tl.store(dq + o_tk, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    k += i_b * k_strides[0] + t0 * k_strides[1] + i_hk * k_strides[2]
    b_dk = through_norm(k, k_strides[1], b_dk, o_t, m_tk, BK, NORM)
    tl.store(dk + o_tk, b_dk.to(dk.dtype.element_ty), mask=m_tk)


@kernel(numbers="R")
def kda_shares_bwd_kernel(
    dA_part, dbias_part, dA_log, ddt_bias, R, HV: tl.constexpr, KC: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """dA_log [HV] and ddt_bias [HV, KC] of one head: the sums of their shares [R, HV, KC], in a fixed order.

    KC is K, and BK a power of two that holds it, or both are 1 for one gate a head. Either may be None, with its shares.
    """
    i_h = tl.program_id(0)
    o_r = tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    b_dA = tl.zeros([BR, BK], tl.float32)
    b_dbias = tl.zeros([BR, BK], tl.float32)
    for i_r in range(0, R, BR):
        m_r = tile_mask(i_r + o_r < R, o_k, KC, BK)
        o_rk = ((i_r + o_r).to(tl.int64) * HV + i_h)[:, None] * KC + o_k[None, :]
        if dA_part is not None:
            b_dA += tl.load(dA_part + o_rk, mask=m_r, other=0.0)
        if dbias_part is not None:
            b_dbias += tl.load(dbias_part + o_rk, mask=m_r, other=0.0)
    if dA_part is not None:
        tl.store(dA_log + i_h, tl.sum(tl.sum(b_dA, axis=1), axis=0))
    if dbias_part is not None:
        store_channels(ddt_bias + i_h * KC + o_k, tl.sum(b_dbias, axis=0), o_k, KC, BK)
