# SPDX-License-Identifier: Apache-2.0
"""KDA, intra-chunk: everything inside a chunk that needs no state, in one pass over q, k, g and beta.

With G the running sum of the log decay, q and k normalised, b the activated beta:
    kb   = b k e^G           kr = k e^(G_C - G)           qg = q e^G               [C, K]
    A    = b strict_lower(sum_c k_t k_i e^(G_t - G_i))    T  = (I + A)^-1          [C, C]
    Aqk  =        lower(sum_c q_t k_i e^(G_t - G_i))                               [C, C]
    decay = e^G_C                                                                  [K]

Every exponent is a sum of g over a range of tokens (`kda_levels.range_matrix`). At each level S, with e = exp(sum of g between
a row and the middle of its block of 2S rows), the scores are the masked product (q e)(k e)^T, and both factors are at most 1.
    levels 32 and 16                     always
    levels 8, 4, 2, 1                    any gate: exact down to neighbouring tokens
    or one block of 16 rows, split at half its sum, where the gate is bounded (SAFE): exp(+-8 |g|), tf32
The pair t = i has no decay. q and k are normalised in float32 and rounded once, with the decay in.

One program a (chunk, value head), four warps, channels in blocks of BK. Outputs are head-major ([HV, B*T, .]), so that a chunk is
contiguous; kb, kr, qg, Aqk and T have the dtype of q, the rest is float32. v is not needed: the recurrence applies T to
b v - kb S^T.
"""

import triton
import triton.language as tl

from .gate import activate_beta, gate_strength, inverse_norm
from .kda_levels import level_mask, load_decay, range_matrix, unit_lower_inverse
from .launch import kernel
from .tiles import store_channels, tile_mask
from .varlen import chunk_span


@triton.jit
def inverse_norms(x, s_xt, o_t, m_t, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr):
    """1 / sqrt(sum x^2 + eps) of each row, [C]; ones without NORM."""
    b_r = tl.full([C], 1.0, tl.float32)
    if NORM:
        b_sum = tl.zeros([C], tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_x = tile_mask(m_t, o_k, K, BK)
            b_x = tl.load(x + o_t[:, None] * s_xt + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
            b_sum += tl.sum(b_x * b_x, axis=1)
        b_r = inverse_norm(b_sum)
    return b_r


@triton.jit
def add_scores(
    b_Aqk, b_A, b_q, b_k, b_g, C: tl.constexpr, SAFE: tl.constexpr, GDT: tl.constexpr, SDT: tl.constexpr, IP: tl.constexpr
):
    """Decayed scores q k^T and k k^T of a block of channels, added to Aqk and A; what is on or above the diagonal is void."""
    o_t = tl.arange(0, C)
    if SAFE:
        b_x = tl.dot(range_matrix(-2, C, GDT), b_g, input_precision=IP)
        b_e = tl.exp2(b_x)
        b_kt = tl.trans(b_k * tl.exp2(-b_x))
        m_s = o_t[:, None] // 16 == o_t[None, :] // 16
        b_Aqk += tl.where(m_s, tl.dot(b_q * b_e, b_kt, input_precision=IP), 0.0)
        b_A += tl.where(m_s, tl.dot(b_k * b_e, b_kt, input_precision=IP), 0.0)
    for i_s in tl.static_range(4 if SAFE else 0, 6):
        m_s = level_mask(1 << i_s, C)
        b_e = tl.exp2(tl.dot(range_matrix(1 << i_s, C, GDT), b_g, input_precision=IP))
        b_ke = (b_k * b_e).to(SDT)
        b_Aqk += tl.where(m_s, tl.dot((b_q * b_e).to(SDT), tl.trans(b_ke), input_precision=IP), 0.0)
        b_A += tl.where(m_s, tl.dot(b_ke, tl.trans(b_ke), input_precision=IP), 0.0)
    return b_Aqk, b_A


@kernel(numbers="beta_sb beta_st beta_sh T TT NT", floats="lower_bound")
def kda_intra_fwd_kernel(
    q, k, g, beta, A_log, dt_bias, kb, kr, qg, t_inv, a_qk, b_out, rq_out, rk_out, decay, cu_seqlens, chunk_seq, chunk_base,
    q_strides, k_strides, g_strides, beta_sb, beta_st, beta_sh, T, TT, NT, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, SCALAR: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr, BETA_MAX: tl.constexpr,
    IS_PACKED: tl.constexpr, SAFE: tl.constexpr, GDT: tl.constexpr, SDT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """GDT and SDT are the operand types of the decays and of the scores, IP the precision of float32 operands.

    The strides of beta are numbers, because T is a factor of them and nothing is gained by compiling for what it makes of them.
    Without a_qk only kb, kr and qg are written: for a backward that was handed the rest.
    """
    i_h = tl.program_id(0) % HV
    i_c = tl.program_id(0) // HV
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if num <= 0:
        return
    i_hk = i_h // (HV // H)
    o_t = tl.arange(0, C)
    m_t = o_t < num
    row = i_h.to(tl.int64) * TT + i_b * T + t0  # of the head-major outputs
    q += i_b * q_strides[0] + t0 * q_strides[1] + i_hk * q_strides[2]
    k += i_b * k_strides[0] + t0 * k_strides[1] + i_hk * k_strides[2]
    g += i_b * g_strides[0] + t0 * g_strides[1] + i_h * g_strides[2]
    beta += i_b * beta_sb + t0 * beta_st + i_h * beta_sh

    b_beta = tl.load(beta + o_t * beta_st, mask=m_t, other=0.0).to(tl.float32)
    b_beta = tl.where(m_t, activate_beta(b_beta, SIGMOID, BETA_MAX), 0.0)
    if a_qk is not None:
        b_rq = inverse_norms(q, q_strides[1], o_t, m_t, C, K, BK, NORM)
        b_rk = inverse_norms(k, k_strides[1], o_t, m_t, C, K, BK, NORM)
        tl.store(b_out + row + o_t, b_beta, mask=m_t)
        tl.store(rq_out + row + o_t, b_rq, mask=m_t)
        tl.store(rk_out + row + o_t, b_rk, mask=m_t)
    else:
        b_rq = tl.load(rq_out + row + o_t, mask=m_t, other=0.0)
        b_rk = tl.load(rk_out + row + o_t, mask=m_t, other=0.0)
    a = gate_strength(A_log, i_h)

    b_Aqk = tl.zeros([C, C], tl.float32)
    b_A = tl.zeros([C, C], tl.float32)
    b_diag = tl.zeros([C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_tk = tile_mask(m_t, o_k, K, BK)
        b_q = tl.load(q + o_t[:, None] * q_strides[1] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32) * b_rq[:, None]
        b_k = tl.load(k + o_t[:, None] * k_strides[1] + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32) * b_rk[:, None]
        b_g = load_decay(g, g_strides[1], dt_bias, a, lower_bound, i_h, o_k, o_t, m_t, K, C, BK, SCALAR, GATE)
        if a_qk is not None:
            store_channels(decay + (i_c.to(tl.int64) * HV + i_h) * K + o_k, tl.exp2(tl.sum(b_g, axis=0)), o_k, K, BK)
            b_diag += tl.sum(b_q * b_k, axis=1)
        b_g = b_g.to(GDT)

        o_tk = row * K + o_t[:, None] * K + o_k[None, :]
        b_e = tl.exp2(tl.dot(range_matrix(0, C, GDT), b_g, input_precision=IP))
        tl.store(qg + o_tk, (b_q * b_e).to(qg.dtype.element_ty), mask=m_tk)
        tl.store(kb + o_tk, (b_k * b_e * b_beta[:, None]).to(kb.dtype.element_ty), mask=m_tk)
        b_e = tl.exp2(tl.dot(range_matrix(-1, C, GDT), b_g, input_precision=IP))
        tl.store(kr + o_tk, (b_k * b_e).to(kr.dtype.element_ty), mask=m_tk)
        if a_qk is not None:
            b_Aqk, b_A = add_scores(b_Aqk, b_A, b_q, b_k, b_g, C, SAFE, GDT, SDT, IP)

    if a_qk is not None:
        m_low = o_t[:, None] > o_t[None, :]
        o_cc = row * C + o_t[:, None] * C + o_t[None, :]
        b_Aqk = tl.where(o_t[:, None] == o_t[None, :], b_diag[:, None], tl.where(m_low, b_Aqk, 0.0))
        tl.store(a_qk + o_cc, b_Aqk.to(a_qk.dtype.element_ty), mask=m_t[:, None])
        b_T = unit_lower_inverse(tl.where(m_low, b_A * b_beta[:, None], 0.0), C, SDT, IP)
        tl.store(t_inv + o_cc, b_T.to(t_inv.dtype.element_ty), mask=m_t[:, None])
