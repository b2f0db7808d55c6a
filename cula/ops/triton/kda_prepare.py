# SPDX-License-Identifier: Apache-2.0
"""KDA, everything inside a chunk that needs no state.

With G the running sum of the log decay, q and k normalised, b the activated beta:
    kb   = b k e^G           kr = k e^(G_C - G)           qg = q e^G               [C, K]
    A    = b strict_lower(sum_c k_t k_i e^(G_t - G_i))    T  = (I + A)^-1          [C, C]
    Aqk  =        lower(sum_c q_t k_i e^(G_t - G_i))                               [C, C]
    decay = e^G_C                                                                  [K]
`kda_common` says how the exponents are split. q and k are normalised in float32 and rounded once, with the decay in.

| kernel               | one program for              | reads             | writes                                   |
|----------------------|------------------------------|-------------------|------------------------------------------|
| `kda_gate_kernel`    | sub-block of 16 rows, head   | g                 | c, totals (log2 units)                   |
| `kda_local_kernel`   | sub-block of 16 rows, head   | q, k, beta, c     | kb, kr, qg, b, norms, decay, diagonal blocks |
| `kda_pairs_kernel`   | two sub-blocks, head         | q, k, c           | the other blocks of A and Aqk |
| `kda_inverse_kernel` | chunk, head                  | A                 | T                                        |

A program of the first three is one or two warps: tiles are small, sums and scans stay in the warp, and a dozen or more of them
on a multiprocessor hide each other's latency (one program a chunk with [64, BK] tiles took twice as long on an H200: it waited
for barriers, with registers for no more than eight warps). Channels are walked in blocks of BK.
Outputs are head-major ([HV, B*T, .]), so that a chunk is contiguous; kb, kr, qg, Aqk and T have the dtype of q, the rest is
float32.
v is not needed: the state kernels apply T to b v - kb S^T.
"""

import triton
import triton.language as tl

from .kda_common import (
    activate_beta,
    chunk_span,
    inverse_norm,
    level_decay,
    level_mask,
    load_decay,
    pair_of_blocks,
    sum_between,
    sums_around,
    unit_lower_inverse,
)


@triton.jit(do_not_specialize=["T", "TT", "NT", "lower_bound"])
def kda_gate_kernel(
    g,
    A_log,
    dt_bias,
    c_sum,
    totals,
    cu_seqlens,
    chunk_seq,
    chunk_base,
    s_gb,
    s_gt,
    s_gh,
    T,
    TT,
    NT,
    lower_bound,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    SCALAR: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """Running sums of the log2 decay in sub-blocks, c_sum [HV, B*T, K], and their totals [chunks, HV, 4, K]."""
    BC: tl.constexpr = 16
    NB: tl.constexpr = C // BC
    i_r = tl.program_id(0) % NB
    i_h = tl.program_id(0) // NB % HV
    i_c = tl.program_id(0) // (NB * HV)
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if num <= 0:
        return
    o_t = i_r * BC + tl.arange(0, BC)
    m_t = o_t < num
    row = i_h.to(tl.int64) * TT + i_b * T + t0
    g += i_b * s_gb + t0 * s_gt + i_h * s_gh
    a = 1.0
    if A_log is not None:
        a = tl.exp(tl.load(A_log + i_h))
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_g2 = load_decay(g, s_gt, dt_bias, a, lower_bound, i_h, o_k, o_t, m_t, K, BC, BK, SCALAR, GATE)
        tl.store(c_sum + row * K + o_t[:, None] * K + o_k[None, :], tl.cumsum(b_g2, axis=0), mask=m_t[:, None])
        tl.store(totals + ((i_c.to(tl.int64) * HV + i_h) * NB + i_r) * K + o_k, tl.sum(b_g2, axis=0))


@triton.jit(do_not_specialize=["s_bb", "s_bt", "s_bh", "T", "TT", "NT"])
def kda_local_kernel(
    q,
    k,
    beta,
    c_sum,
    totals,
    kb,
    kr,
    qg,
    a_kk,
    a_qk,
    b_out,
    rq_out,
    rk_out,
    decay,
    cu_seqlens,
    chunk_seq,
    chunk_base,
    s_qb,
    s_qt,
    s_qh,
    s_kb,
    s_kt,
    s_kh,
    s_bb,
    s_bt,
    s_bh,
    T,
    TT,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    BETA_MAX: tl.constexpr,
    IS_PACKED: tl.constexpr,
    SAFE: tl.constexpr,
    SDT: tl.constexpr,
    IP: tl.constexpr,
):
    """The scaled tiles of a sub-block, its diagonal blocks of A and Aqk, beta, the norms, and (from the last one) the decay."""
    BC: tl.constexpr = 16
    NB: tl.constexpr = C // BC
    i_r = tl.program_id(0) % NB
    i_h = tl.program_id(0) // NB % HV
    i_c = tl.program_id(0) // (NB * HV)
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if i_r * BC >= num:
        return
    i_hk = i_h // (HV // H)
    o_r = tl.arange(0, BC)
    o_t = i_r * BC + o_r  # rows of the chunk
    m_t = o_t < num
    m_tk = m_t[:, None]
    is_last = (i_r + 1) * BC >= num
    row = i_h.to(tl.int64) * TT + i_b * T + t0  # of the head-major outputs
    q += i_b * s_qb + t0 * s_qt + i_hk * s_qh
    k += i_b * s_kb + t0 * s_kt + i_hk * s_kh
    c_sum += row * K
    totals += (i_c.to(tl.int64) * HV + i_h) * (NB * K)
    beta += i_b * s_bb + t0 * s_bt + i_h * s_bh

    b_beta = tl.load(beta + o_t * s_bt, mask=m_t, other=0.0).to(tl.float32)
    b_beta = tl.where(m_t, activate_beta(b_beta, SIGMOID, BETA_MAX), 0.0)
    b_rq = inverse_norm(q, s_qt, o_t, m_t, BC, K, BK, NORM)
    b_rk = inverse_norm(k, s_kt, o_t, m_t, BC, K, BK, NORM)
    tl.store(b_out + row + o_t, b_beta, mask=m_t)
    tl.store(rq_out + row + o_t, b_rq, mask=m_t)
    tl.store(rk_out + row + o_t, b_rk, mask=m_t)

    b_Aqk = tl.zeros([BC, BC], tl.float32)
    b_A = tl.zeros([BC, BC], tl.float32)
    b_diag = tl.zeros([BC], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_q = tl.load(q + o_t[:, None] * s_qt + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32) * b_rq[:, None]
        b_k = tl.load(k + o_t[:, None] * s_kt + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32) * b_rk[:, None]
        b_c = tl.load(c_sum + o_t[:, None] * K + o_k[None, :], mask=m_tk, other=0.0)
        b_t = tl.load(totals + i_r * K + o_k)
        b_before, b_after = sums_around(totals, i_r, o_k, K, NB, BK)

        b_diag += tl.sum(b_q * b_k, axis=1)
        if SAFE:
            b_up = tl.exp2(b_c - 0.5 * b_t[None, :])
            b_down = tl.exp2(0.5 * b_t[None, :] - b_c)
            b_kt = tl.trans(b_k * b_down)
            b_Aqk += tl.dot(b_q * b_up, b_kt, input_precision=IP)
            b_A += tl.dot(b_k * b_up, b_kt, input_precision=IP)
            b_eG = b_up * tl.exp2(0.5 * b_t + b_before)[None, :]
            b_eR = b_down * tl.exp2(0.5 * b_t + b_after)[None, :]
        else:
            for i_s in tl.static_range(4):
                m_s = level_mask(1 << i_s, BC)
                b_e = level_decay(b_c, 1 << i_s, BC, BK)
                b_ke = (b_k * b_e).to(SDT)
                b_Aqk += tl.where(m_s, tl.dot((b_q * b_e).to(SDT), tl.trans(b_ke), input_precision=IP), 0.0)
                b_A += tl.where(m_s, tl.dot(b_ke, tl.trans(b_ke), input_precision=IP), 0.0)
            b_eG = tl.exp2(b_c + b_before[None, :])
            b_eR = tl.exp2((b_t + b_after)[None, :] - b_c)

        o_tk = row * K + o_t[:, None] * K + o_k[None, :]
        tl.store(qg + o_tk, (b_q * b_eG).to(qg.dtype.element_ty), mask=m_tk)
        tl.store(kb + o_tk, (b_k * b_eG * b_beta[:, None]).to(kb.dtype.element_ty), mask=m_tk)
        tl.store(kr + o_tk, (b_k * b_eR).to(kr.dtype.element_ty), mask=m_tk)
        if is_last:
            tl.store(decay + (i_c.to(tl.int64) * HV + i_h) * K + o_k, tl.exp2(b_before + b_t))

    m_low = o_r[:, None] > o_r[None, :]
    b_Aqk = tl.where(o_r[:, None] == o_r[None, :], b_diag[:, None], tl.where(m_low, b_Aqk, 0.0))
    b_A = tl.where(m_low, b_A * b_beta[:, None], 0.0)
    o_cc = row * C + o_t[:, None] * C + o_r[None, :]
    tl.store(a_kk + o_cc + i_r * BC, b_A, mask=m_tk)
    tl.store(a_qk + o_cc + i_r * BC, b_Aqk.to(a_qk.dtype.element_ty), mask=m_tk)
    for i_s in range(i_r + 1, NB):
        tl.store(a_qk + o_cc + i_s * BC, tl.zeros([BC, BC], a_qk.dtype.element_ty), mask=m_tk)


@triton.jit(do_not_specialize=["T", "TT", "NT"])
def kda_pairs_kernel(
    q,
    k,
    beta,
    rq,
    rk,
    c_sum,
    totals,
    a_kk,
    a_qk,
    cu_seqlens,
    chunk_seq,
    chunk_base,
    s_qb,
    s_qt,
    s_qh,
    s_kb,
    s_kt,
    s_kh,
    T,
    TT,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    IS_PACKED: tl.constexpr,
    SDT: tl.constexpr,
    IP: tl.constexpr,
):
    """The blocks of A and Aqk below the diagonal; beta is the activated one, rq and rk the inverse norms."""
    BC: tl.constexpr = 16
    NB: tl.constexpr = C // BC
    NP: tl.constexpr = NB * (NB - 1) // 2
    i_p = tl.program_id(0) % NP
    i_h = tl.program_id(0) // NP % HV
    i_c = tl.program_id(0) // (NP * HV)
    i_r, i_s = pair_of_blocks(i_p)
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if i_r * BC >= num:
        return
    i_hk = i_h // (HV // H)
    o_r = tl.arange(0, BC)
    o_t = i_r * BC + o_r
    o_i = i_s * BC + o_r
    m_t = o_t < num
    m_tk = m_t[:, None]
    row = i_h.to(tl.int64) * TT + i_b * T + t0
    q += i_b * s_qb + t0 * s_qt + i_hk * s_qh
    k += i_b * s_kb + t0 * s_kt + i_hk * s_kh
    c_sum += row * K
    totals += (i_c.to(tl.int64) * HV + i_h) * (NB * K)
    b_beta = tl.load(beta + row + o_t, mask=m_t, other=0.0)
    b_rq = tl.load(rq + row + o_t, mask=m_t, other=0.0)
    b_rk = tl.load(rk + row + o_t, mask=m_t, other=0.0)
    b_ri = tl.load(rk + row + o_i)
    b_Aqk = tl.zeros([BC, BC], tl.float32)
    b_A = tl.zeros([BC, BC], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_q = tl.load(q + o_t[:, None] * s_qt + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32) * b_rq[:, None]
        b_k = tl.load(k + o_t[:, None] * s_kt + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32) * b_rk[:, None]
        b_c = tl.load(c_sum + o_t[:, None] * K + o_k[None, :], mask=m_tk, other=0.0)
        b_ki = tl.load(k + o_i[:, None] * s_kt + o_k[None, :]).to(tl.float32) * b_ri[:, None]
        b_ci = tl.load(c_sum + o_i[:, None] * K + o_k[None, :])
        b_t = tl.load(totals + i_s * K + o_k)
        b_span = sum_between(totals, i_s, i_r, o_k, K, BK)
        b_e = tl.exp2(b_c + b_span[None, :])
        b_ki = tl.trans((b_ki * tl.exp2(b_t[None, :] - b_ci)).to(SDT))
        b_Aqk += tl.dot((b_q * b_e).to(SDT), b_ki, input_precision=IP)
        b_A += tl.dot((b_k * b_e).to(SDT), b_ki, input_precision=IP)
    o_cc = row * C + o_t[:, None] * C + o_i[None, :]
    tl.store(a_kk + o_cc, b_A * b_beta[:, None], mask=m_tk)
    tl.store(a_qk + o_cc, b_Aqk.to(a_qk.dtype.element_ty), mask=m_tk)


@triton.jit(do_not_specialize=["T", "TT", "NT"])
def kda_inverse_kernel(
    a_kk,
    t_inv,
    cu_seqlens,
    chunk_seq,
    chunk_base,
    T,
    TT,
    NT,
    HV: tl.constexpr,
    C: tl.constexpr,
    IS_PACKED: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    i_h = tl.program_id(0) % HV
    i_c = tl.program_id(0) // HV
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if num <= 0:
        return
    o_c = tl.arange(0, C)
    m_low = o_c[:, None] > o_c[None, :]
    m_c = (o_c < num)[:, None]
    o_cc = (i_h.to(tl.int64) * TT + i_b * T + t0) * C + o_c[:, None] * C + o_c[None, :]
    b_A = tl.load(a_kk + o_cc, mask=m_c & m_low, other=0.0)
    b_T = unit_lower_inverse(b_A, C, DT, IP)
    tl.store(t_inv + o_cc, b_T.to(t_inv.dtype.element_ty), mask=m_c)
