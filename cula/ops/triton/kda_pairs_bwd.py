# SPDX-License-Identifier: Apache-2.0
"""KDA backward, pairs of tokens: the gradient of the decayed scores and of the gate. `kda_intra_bwd` has the table of kernels.

Pairs. A pair i < t belongs to one level S = 32, 16, 8, 4, 2, 1: t in the second and i in the first half of an aligned block of 2S
rows. With e the decay between a row and the middle of its block, never above 1, and the level's part of dAqk and dA:
    dq_t = e_t (dAqk (k e))      dkb_t = e_t (dA (k e))      dk_i = e_i (dAqk^T (q e) + dA^T (b k e))
Rows and columns of a level are different tokens, so one array e serves both. Exact for any gate.

The gate. Every exponent x is a sum of g over a range of tokens, x = R g with R of zeros and ones (from the chunk's start, to its
end, to the middle of a block), so its gradient, q dq + b k dkb + k dk of the terms it is in, goes back as dg = R^T dx. No term is
added and taken away again: a strong decay keeps its relative accuracy. Pairs t = i have no decay and never enter.

Schedule. A program takes half a chunk (HALF 0 or 1) and BK channels: first what the *other* half gives to it (`from_other_half`),
then what comes through the states (`from_states`), then the levels inside the half (`inner_levels`). Tiles are transposed,
[BK, 32]: channels are the rows of all products, whose left operands (k e, q e, g, dx) are then made in the registers that tensor
cores read them from, and only the small matrices dAqk, dA and R pass through shared memory. Half a chunk and 64 channels with
four warps keep a tile at 16 registers a thread. That matters for more than occupancy: with all 255 registers taken, the ptxas of
Triton 3.6 (12.8) was seen to add the constant of a shared-memory descriptor to a register that held something else, so that
products read wrong or unmapped shared memory.
"""

import triton
import triton.language as tl

from .gate import gate_grad, gate_strength
from .kda_intra_bwd import store_shares
from .kda_levels import load_decay_t, load_gate_input_t, range_columns
from .launch import kernel
from .tiles import load_channels, tile_mask_t
from .varlen import chunk_span


@triton.jit
def load_half(x, s_xt, r, o_k, o_t, m_t, K: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr):
    """Rows o_t of q or k times their inverse norms r, transposed, [BK, BH]."""
    b_r = tl.load(r + o_t, mask=m_t, other=0.0)
    b_x = tl.load(x + o_k[:, None] + o_t[None, :] * s_xt, mask=tile_mask_t(m_t, o_k, K, BK), other=0.0).to(tl.float32)
    return (b_x * b_r[None, :]).to(DT)


@triton.jit
def load_scores(p, o_r, o_c, num, C: tl.constexpr, DT: tl.constexpr):
    """Rows o_r and columns o_c of a chunk's dAqk or dA."""
    return tl.load(p + o_r[:, None] * C + o_c[None, :], mask=(o_r < num)[:, None], other=0.0).to(DT)


@triton.jit
def load_tile(p, o_k, o_t, m_t, K: tl.constexpr, BK: tl.constexpr):
    """Rows o_t of a workspace [.., K], transposed, [BK, BH] float32."""
    return tl.load(p + o_k[:, None] + o_t[None, :] * K, mask=tile_mask_t(m_t, o_k, K, BK), other=0.0).to(tl.float32)


@triton.jit
def from_other_half(
    q, k, beta, rq, rk, dqg, dkb, dkr, da_qk, da_kk, b_g, s_qt, s_kt, o_k, o_t, o_o, num,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, SDT: tl.constexpr, IP: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """What the other half (tokens o_o, log decays b_g) gives to this one (tokens o_t).

    The other half's k (and q) are decayed to where the halves meet. Returns the gradient of its sums of g that span this half,
    [BK], which are those of k e^(G_C - G) if it is the first half, of q e^G and k e^G if it is the second; and the pairs with it
    (level 32, rows in the second half, columns in the first): twice this half's columns, or its rows of dq and of dkb.
    """
    m_o = o_o < num
    b_e = tl.exp2(tl.dot(b_g, range_columns(BH * HALF, BH, b_g.dtype), input_precision=IP))
    b_k = load_half(k, s_kt, rk, o_k, o_o, m_o, K, BK, tl.float32) * b_e
    if HALF == 0:
        b_q = load_half(q, s_qt, rq, o_k, o_o, m_o, K, BK, tl.float32) * b_e
        b_k = b_k * tl.load(beta + o_o, mask=m_o, other=0.0)[None, :]
        b_end = tl.sum(b_q * load_tile(dqg, o_k, o_o, m_o, K, BK) + b_k * load_tile(dkb, o_k, o_o, m_o, K, BK), axis=1)
        b_col = tl.dot(b_q.to(SDT), load_scores(da_qk, o_o, o_t, num, C, SDT), input_precision=IP)
        b_col = tl.dot(b_k.to(SDT), load_scores(da_kk, o_o, o_t, num, C, SDT), b_col, input_precision=IP)
        return b_end, b_col, b_col
    else:
        b_end = tl.sum(b_k * load_tile(dkr, o_k, o_o, m_o, K, BK), axis=1)
        b_rowq = tl.dot(b_k.to(SDT), tl.trans(load_scores(da_qk, o_t, o_o, num, C, SDT)), input_precision=IP)
        b_rowk = tl.dot(b_k.to(SDT), tl.trans(load_scores(da_kk, o_t, o_o, num, C, SDT)), input_precision=IP)
        return b_end, b_rowq, b_rowk


@triton.jit
def from_states(
    b_q, b_k, b_g, b_beta, b_Eo, b_1, b_2, dqg, dkb, dkr, unit, o_k, o_t, m_t,
    K: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, XDT: tl.constexpr, IP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """dq, dkb, dk and dg of this half through the states, with what the other half gave; all in units of `unit`.

    b_Eo is the other half's whole decay, [BK]; dg takes the gradients of both kinds of sums.
    """
    b_e = tl.exp2(tl.dot(b_g, range_columns(0, BH, b_g.dtype), input_precision=IP))  # from the half's start to t
    b_dq = load_tile(dqg, o_k, o_t, m_t, K, BK) * (1.0 / unit)
    b_dkb = load_tile(dkb, o_k, o_t, m_t, K, BK) * (1.0 / unit)
    if HALF == 1:
        b_dq = b_dq * b_Eo[:, None] + b_1
        b_dkb = b_dkb * b_Eo[:, None] + b_2
    b_dq = b_dq * b_e
    b_dkb = b_dkb * b_e
    b_x = b_q.to(tl.float32) * b_dq + b_k.to(tl.float32) * (b_dkb * b_beta[None, :])
    b_dg = tl.dot(b_x.to(XDT), tl.trans(range_columns(0, BH, XDT)), input_precision=IP)
    b_e = tl.exp2(tl.dot(b_g, range_columns(BH, BH, b_g.dtype), input_precision=IP))  # from behind t to the half's end
    b_dk = load_tile(dkr, o_k, o_t, m_t, K, BK) * (1.0 / unit)
    if HALF == 0:
        b_dk = b_dk * b_Eo[:, None] + b_1
    b_dk = b_dk * b_e
    b_x = b_k.to(tl.float32) * b_dk
    b_dg = tl.dot(b_x.to(XDT), tl.trans(range_columns(BH, BH, XDT)), b_dg, input_precision=IP)
    return b_dq, b_dkb, b_dk, b_dg


@triton.jit
def inner_levels(
    b_dq, b_dkb, b_dk, b_dg, b_q, b_k, b_g, b_beta, da_qk, da_kk, o_t, num,
    C: tl.constexpr, BH: tl.constexpr, SDT: tl.constexpr, XDT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Levels 16 to 1, the pairs inside the half, added to dq, dkb, dk and dg."""
    o_r = tl.arange(0, BH)
    for i_l in range(5):  # a loop, not unrolled: nothing of a later level is fetched early and held in registers
        S = 16 >> i_l
        middle = (o_r & (-2 * S))[None, :] + S
        m_s = ((o_r & -S)[:, None] - (o_r & -S)[None, :] == S) & ((o_r & S) == 0)[None, :]
        b_aq = tl.where(m_s, load_scores(da_qk, o_t, o_t, num, C, SDT), 0.0).to(SDT)
        b_ak = tl.where(m_s, load_scores(da_kk, o_t, o_t, num, C, SDT), 0.0).to(SDT)
        b_e = tl.exp2(tl.dot(b_g, range_columns(middle, BH, b_g.dtype), input_precision=IP))
        b_ke = (b_k.to(tl.float32) * b_e).to(SDT)
        b_row = tl.dot(b_ke, tl.trans(b_aq), input_precision=IP)
        b_dq += b_row * b_e
        b_x = b_q.to(tl.float32) * b_row
        b_row = tl.dot(b_ke, tl.trans(b_ak), input_precision=IP)
        b_dkb += b_row * b_e
        b_x += b_k.to(tl.float32) * (b_row * b_beta[None, :])
        b_col = tl.dot((b_k.to(tl.float32) * b_e * b_beta[None, :]).to(SDT), b_ak, input_precision=IP)
        b_col = tl.dot((b_q.to(tl.float32) * b_e).to(SDT), b_aq, b_col, input_precision=IP)
        b_dk += b_col * b_e
        b_x = (b_x + b_k.to(tl.float32) * b_col) * b_e
        b_dg = tl.dot(b_x.to(XDT), tl.trans(range_columns(middle, BH, XDT)), b_dg, input_precision=IP)
    return b_dq, b_dkb, b_dk, b_dg


@triton.jit
def store_gate_grad(
    b_dg, g, s_gt, dt_bias, a, lower_bound, p_dg, dA_part, dbias_part, o_part, i_h, o_k, o_t, m_t,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, SCALAR: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """dg through the gate, and this half's shares of dA_log and ddt_bias; p_dg points at the chunk's first token."""
    b_x = load_gate_input_t(g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K, BK, SCALAR)
    b_dx, b_da = gate_grad(b_dg, b_x, a, lower_bound, GATE)
    p_dg += o_t[None, :] * (HV * K) + o_k[:, None]
    tl.store(p_dg, b_dx.to(p_dg.dtype.element_ty), mask=tile_mask_t(m_t, o_k, K, BK))
    b_da = tl.sum(tl.where(m_t[None, :], b_da, 0.0), axis=1)
    store_shares(dA_part, dbias_part, o_part, b_da, tl.sum(tl.where(m_t[None, :], b_dx, 0.0), axis=1), o_k, K, BK)


@triton.jit
def pairs_half(
    q, k, g, beta, A_log, dt_bias, rq, rk, dqg, dkb, dkr, ddecay, da_qk, da_kk, da_max, dqn, dkn, dg, db_part, dA_part,
    dbias_part, cu_seqlens, chunk_seq, chunk_base, q_strides, k_strides, g_strides, T, TT, NT, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr,
    SCALAR: tl.constexpr, IS_PACKED: tl.constexpr, GDT: tl.constexpr, SDT: tl.constexpr, IP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One half of a chunk: HALF 0, the first, or 1. Arguments as of the kernel."""
    BH: tl.constexpr = C // 2
    NK: tl.constexpr = (K + BK - 1) // BK
    XDT: tl.constexpr = tl.float32 if IP == "tf32x3" else tl.bfloat16  # of gradients of exponents: range before precision
    i_k = tl.program_id(0) // 2 % NK
    i_h = tl.program_id(0) // (2 * NK) % HV
    i_c = tl.program_id(0) // (2 * NK * HV)
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if num <= HALF * BH:
        if not SCALAR:
            o_none = ((i_c.to(tl.int64) * 2 + HALF) * HV + i_h) * K + i_k * BK + tl.arange(0, BK)
            b_none = tl.zeros([BK], tl.float32)
            store_shares(dA_part, dbias_part, o_none, b_none, b_none, i_k * BK + tl.arange(0, BK), K, BK)
        return
    i_hk = i_h // (HV // H)
    o_k = i_k * BK + tl.arange(0, BK)
    o_t = HALF * BH + tl.arange(0, BH)
    o_o = BH - HALF * BH + tl.arange(0, BH)  # tokens of the other half
    m_t = o_t < num
    token = i_b * T + t0
    row = i_h.to(tl.int64) * TT + token
    o_chunk = i_c.to(tl.int64) * HV + i_h
    # scalars go into the pointers, so that the offsets of tiles stay 32 bits wide
    s_qt, s_kt, s_gt = q_strides[1], k_strides[1], g_strides[1]
    q += i_b * q_strides[0] + t0 * s_qt + i_hk * q_strides[2]
    k += i_b * k_strides[0] + t0 * s_kt + i_hk * k_strides[2]
    g += i_b * g_strides[0] + t0 * s_gt + i_h * g_strides[2]
    beta += row
    rq += row
    rk += row
    dqg += row * K
    dkb += row * K
    dkr += row * K
    da_qk += row * C
    da_kk += row * C
    a = gate_strength(A_log, i_h)
    unit = tl.load(da_max + o_chunk)  # gradients below are in these units

    b_g = load_decay_t(g, s_gt, dt_bias, a, lower_bound, i_h, o_k, o_o, o_o < num, K, BH, BK, SCALAR, GATE, GDT)
    b_Eo = tl.exp2(tl.sum(b_g.to(tl.float32), axis=1))
    b_end, b_1, b_2 = from_other_half(q, k, beta, rq, rk, dqg, dkb, dkr, da_qk, da_kk, b_g, s_qt, s_kt, o_k, o_t, o_o, num,
                                      K, C, BK, BH, SDT, IP, HALF)  # fmt: skip

    b_beta = tl.load(beta + o_t, mask=m_t, other=0.0)
    b_q = load_half(q, s_qt, rq, o_k, o_t, m_t, K, BK, SDT)
    b_k = load_half(k, s_kt, rk, o_k, o_t, m_t, K, BK, SDT)
    b_g = load_decay_t(g, s_gt, dt_bias, a, lower_bound, i_h, o_k, o_t, m_t, K, BH, BK, SCALAR, GATE, GDT)
    b_end = b_end * tl.exp2(tl.sum(b_g.to(tl.float32), axis=1)) + load_channels(ddecay + o_chunk * K + o_k, o_k, K, BK)
    b_dq, b_dkb, b_dk, b_dg = from_states(b_q, b_k, b_g, b_beta, b_Eo, b_1, b_2, dqg, dkb, dkr, unit, o_k, o_t, m_t,
                                          K, BK, BH, XDT, IP, HALF)  # fmt: skip
    b_dq, b_dkb, b_dk, b_dg = inner_levels(b_dq, b_dkb, b_dk, b_dg, b_q, b_k, b_g, b_beta, da_qk, da_kk, o_t, num,
                                           C, BH, SDT, XDT, IP)  # fmt: skip
    b_dg = b_dg * unit + b_end[:, None]

    # out: q and k with the pairs t = i, this program's share of db, and g through the gate
    b_diag = tl.load(da_qk + o_t * (C + 1), mask=m_t, other=0.0).to(tl.float32)[None, :]
    o_tk = row * K + o_t[None, :] * K + o_k[:, None]
    m_tk = tile_mask_t(m_t, o_k, K, BK)
    b_x = (b_dq + b_k.to(tl.float32) * b_diag) * unit
    tl.store(dqn + o_tk, b_x.to(dqn.dtype.element_ty), mask=m_tk)
    b_x = (b_dk + b_dkb * b_beta[None, :] + b_q.to(tl.float32) * b_diag) * unit
    tl.store(dkn + o_tk, b_x.to(dkn.dtype.element_ty), mask=m_tk)
    o_row = i_k.to(tl.int64) * HV * TT + row + o_t
    tl.store(db_part + o_row, tl.sum(b_k.to(tl.float32) * b_dkb, axis=0) * unit, mask=m_t)
    if SCALAR:
        tl.store(dg + o_row, tl.sum(b_dg, axis=0), mask=m_t)
    else:
        o_part = ((i_c.to(tl.int64) * 2 + HALF) * HV + i_h) * K + o_k
        store_gate_grad(b_dg, g, s_gt, dt_bias, a, lower_bound, dg + (token * HV + i_h) * K, dA_part, dbias_part, o_part,
                        i_h, o_k, o_t, m_t, HV, K, BK, SCALAR, GATE)  # fmt: skip


@kernel(numbers="T TT NT", floats="lower_bound")
def kda_pairs_bwd_kernel(
    q, k, g, beta, A_log, dt_bias, rq, rk, dqg, dkb, dkr, ddecay, da_qk, da_kk, da_max, dqn, dkn, dg, db_part, dA_part,
    dbias_part, cu_seqlens, chunk_seq, chunk_base, q_strides, k_strides, g_strides, T, TT, NT, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr,
    SCALAR: tl.constexpr, IS_PACKED: tl.constexpr, GDT: tl.constexpr, SDT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """beta is the activated one; rq and rk are inverse norms. GDT and SDT are the operand types of decays and scores.

    dqn, dkn [HV, B*T, K] take the gradients of the normalised q and k; db_part [K / BK, HV, B*T] each block of channels' share.
    dg is final, or, for one gate a head, [K / BK, HV, B*T] like db_part. dA_part and dbias_part are [chunks, 2, HV, K].
    """
    if tl.program_id(0) % 2 == 0:
        pairs_half(
            q, k, g, beta, A_log, dt_bias, rq, rk, dqg, dkb, dkr, ddecay, da_qk, da_kk, da_max, dqn, dkn, dg, db_part, dA_part,
            dbias_part, cu_seqlens, chunk_seq, chunk_base, q_strides, k_strides, g_strides, T, TT, NT, lower_bound,
            H, HV, K, C, BK, GATE, SCALAR, IS_PACKED, GDT, SDT, IP, 0,
        )  # fmt: skip
    else:
        pairs_half(
            q, k, g, beta, A_log, dt_bias, rq, rk, dqg, dkb, dkr, ddecay, da_qk, da_kk, da_max, dqn, dkn, dg, db_part, dA_part,
            dbias_part, cu_seqlens, chunk_seq, chunk_base, q_strides, k_strides, g_strides, T, TT, NT, lower_bound,
            H, HV, K, C, BK, GATE, SCALAR, IS_PACKED, GDT, SDT, IP, 1,
        )  # fmt: skip
