# SPDX-License-Identifier: Apache-2.0
"""KDA backward, everything inside a chunk. Names as in `kda_prepare` and `kda_state`; exponents are split as `kda_common` says.

Given S (`h`, before the chunk), dS (`dh`, after it), U, dX and dO (times scale):
    dAqk = lower(dO U^T)      dA = -strict_lower(dX U^T)                                                 [C, C]
    dqg  = dO S               dkb = -dX S               dkr = U dS                                       [C, K]
    b    : sum_v dX V + sum_c (k e^G) dkb + sum_i dA (A / b)
Scores, sub-block r of rows against sub-block s of columns, e_t and e_i the two factors of their decay:
    rows  q: e_t (dAqk (k e_i))      k: b e_t (dA (k e_i))      columns  k: e_i (dAqk^T (q e_t) + (b dA)^T (k e_t))

The gate. Every exponent is a sum of g over a range of tokens; its gradient (q dq or k dk of that term) belongs to all of them.
A row's exponent is c_t, plus totals of whole sub-blocks before it; a column's is t - c_i, plus totals behind it. So inside a
sub-block dg is the sum over rows at or behind a token (of c's gradients) and over rows before it (of those of t - c), and
whole sub-blocks get totals: `sums` keeps, for each sub-block r, those of its exponents that reach beyond it. No term
is added and taken away again, but for pairs of one sub-block where the gate is SAFE; pairs t = i never enter. A strong decay
keeps its relative accuracy.

| kernel   | one program for                         | reads                 | writes                                        |
|----------|-----------------------------------------|-----------------------|-----------------------------------------------|
| `scores` | chunk, head                             | dO, u, dx, v          | dAqk, dA, first term of db                    |
| `state`  | chunk, head, BK channels                | dO, u, dx, h, dh      | dqg, dkb, dkr, gradient of decay              |
| `intra`  | sub-block, head, BK channels (one warp) | all of these, q, k, c | dq, dk, dg in their place, `sums`, db         |
| `finish` | sub-block, q/k head                     | those, q, k, g, beta  | dq, dk, dg, dbeta, shares of dA_log, ddt_bias |
"""

import triton
import triton.language as tl

from .kda_common import chunk_span, gate_grad, inverse_norm, level_decay, level_mask, load_gate_input, sums_around

NUM_SUMS = 5  # vectors [K] a sub-block keeps: from pairs with sub-blocks 0, 1, 2; from q e^G and k e^G; from k e^(G_C - G)


@triton.jit(do_not_specialize=["scale", "T", "TT", "NT"])
def kda_grads_scores_kernel(
    v,
    do,
    u,
    dx,
    da_qk,
    da_kk,
    db,
    cu_seqlens,
    chunk_seq,
    chunk_base,
    s_vb,
    s_vt,
    s_vh,
    s_ob,
    s_ot,
    s_oh,
    scale,
    T,
    TT,
    NT,
    HV: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IP: tl.constexpr,
):
    i_h = tl.program_id(0) % HV
    i_c = tl.program_id(0) // HV
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if num <= 0:
        return
    o_c = tl.arange(0, C)
    m_c = o_c < num
    row = i_h.to(tl.int64) * TT + i_b * T + t0
    v += i_b * s_vb + t0 * s_vt + i_h * s_vh
    do += i_b * s_ob + t0 * s_ot + i_h * s_oh
    b_dA = tl.zeros([C, C], tl.float32)
    b_dAqk = tl.zeros([C, C], tl.float32)
    b_db = tl.zeros([C], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_cv = row * V + o_c[:, None] * V + o_v[None, :]
        b_u = tl.trans(tl.load(u + o_cv, mask=m_c[:, None], other=0.0))
        b_dx = tl.load(dx + o_cv, mask=m_c[:, None], other=0.0)
        b_do = tl.load(do + o_c[:, None] * s_ot + o_v[None, :], mask=m_c[:, None], other=0.0).to(u.dtype.element_ty)
        b_v = tl.load(v + o_c[:, None] * s_vt + o_v[None, :], mask=m_c[:, None], other=0.0)
        b_dAqk = tl.dot(b_do, b_u, b_dAqk, input_precision=IP)
        b_dA = tl.dot(b_dx, b_u, b_dA, input_precision=IP)
        b_db += tl.sum(b_dx.to(tl.float32) * b_v.to(tl.float32), axis=1)
    o_cc = row * C + o_c[:, None] * C + o_c[None, :]
    tl.store(da_qk + o_cc, b_dAqk * scale, mask=m_c[:, None])
    tl.store(da_kk + o_cc, -b_dA, mask=m_c[:, None])
    tl.store(db + row + o_c, b_db, mask=m_c)


@triton.jit(do_not_specialize=["scale", "T", "TT", "NT"])
def kda_grads_state_kernel(
    do,
    u,
    dx,
    h,
    dh,
    decay,
    dqg,
    dkb,
    dkr,
    ddecay,
    cu_seqlens,
    chunk_seq,
    chunk_base,
    s_ob,
    s_ot,
    s_oh,
    scale,
    T,
    TT,
    NT,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IP: tl.constexpr,
):
    NK: tl.constexpr = K // BK
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
    do += i_b * s_ob + t0 * s_ot + i_h * s_oh
    b_dqg = tl.zeros([C, BK], tl.float32)
    b_dkb = tl.zeros([C, BK], tl.float32)
    b_dkr = tl.zeros([C, BK], tl.float32)
    b_dend = tl.zeros([BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_cv = row * V + o_c[:, None] * V + o_v[None, :]
        o_vk = o_chunk * (V * K) + o_v[:, None] * K + o_k[None, :]
        b_h = tl.load(h + o_vk)
        b_dh = tl.load(dh + o_vk)
        b_u = tl.load(u + o_cv, mask=m_c[:, None], other=0.0)
        b_dx = tl.load(dx + o_cv, mask=m_c[:, None], other=0.0)
        b_do = tl.load(do + o_c[:, None] * s_ot + o_v[None, :], mask=m_c[:, None], other=0.0).to(u.dtype.element_ty)
        b_dqg = tl.dot(b_do, b_h, b_dqg, input_precision=IP)
        b_dkb = tl.dot(b_dx, b_h, b_dkb, input_precision=IP)
        b_dkr = tl.dot(b_u, b_dh, b_dkr, input_precision=IP)
        b_dend += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=0)
    o_ck = row * K + o_c[:, None] * K + o_k[None, :]
    tl.store(dqg + o_ck, b_dqg * scale, mask=m_c[:, None])
    tl.store(dkb + o_ck, -b_dkb, mask=m_c[:, None])
    tl.store(dkr + o_ck, b_dkr, mask=m_c[:, None])
    tl.store(ddecay + o_chunk * K + o_k, b_dend * tl.load(decay + o_chunk * K + o_k))


@triton.jit
def load_block(p, i_r, i_s, num, C: tl.constexpr, BC: tl.constexpr):
    """Block (i_r, i_s) of a chunk's [C, C] matrix; rows past the end are zero."""
    o_t = i_r * BC + tl.arange(0, BC)
    o_i = i_s * BC + tl.arange(0, BC)
    return tl.load(p + o_t[:, None] * C + o_i[None, :], mask=(o_t < num)[:, None], other=0.0)


@triton.jit
def hand_to_sibling(b_dP, b_dQ, S: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr):
    """For halves of blocks of 2S rows: a second half's gradients of sums from the block's start go to every token of the first
    half, a first half's gradients of sums to the block's end go to every token of the second half. [BC, BK]"""
    b_P = tl.reshape(b_dP, [BC // (2 * S), 2 * S, BK])
    b_Q = tl.reshape(b_dQ, [BC // (2 * S), 2 * S, BK])
    m_2 = (tl.arange(0, 2 * S) >= S)[None, :, None]
    b_first = tl.sum(tl.where(m_2, b_P, 0.0), axis=1, keep_dims=True)
    b_second = tl.sum(tl.where(m_2, 0.0, b_Q), axis=1, keep_dims=True)
    return tl.reshape(tl.where(m_2, b_second, b_first), [BC, BK])


@triton.jit(do_not_specialize=["T", "TT", "NT"])
def kda_grads_intra_kernel(
    q,
    k,
    beta,
    rq,
    rk,
    c_sum,
    totals,
    da_qk,
    da_kk,
    dq,
    dk,
    dg,
    db_part,
    sums,
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
    SAFE: tl.constexpr,
    IP: tl.constexpr,
):
    """dq, dk, dg hold dqg, dkr, dkb on entry and the gradients of the normalised q and k and of the log decay on exit.

    dg still lacks what `sums` says of other sub-blocks. db_part [K / BK, HV, B*T]: this program's channels' share of db.
    """
    BC: tl.constexpr = 16
    NB: tl.constexpr = C // BC
    NK: tl.constexpr = K // BK
    i_r = tl.program_id(0) % NB
    i_k = tl.program_id(0) // NB % NK
    i_h = tl.program_id(0) // (NB * NK) % HV
    i_c = tl.program_id(0) // (NB * NK * HV)
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if i_r * BC >= num:
        return
    i_hk = i_h // (HV // H)
    o_r = tl.arange(0, BC)
    o_t = i_r * BC + o_r
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = o_t < num
    m_tk = m_t[:, None]
    row = i_h.to(tl.int64) * TT + i_b * T + t0
    q += i_b * s_qb + t0 * s_qt + i_hk * s_qh
    k += i_b * s_kb + t0 * s_kt + i_hk * s_kh
    beta += row
    rq += row
    rk += row
    c_sum += row * K
    da_qk += row * C
    da_kk += row * C
    totals += (i_c.to(tl.int64) * HV + i_h) * (NB * K)
    sums += ((i_c.to(tl.int64) * HV + i_h) * NB + i_r) * (5 * K) + o_k

    b_beta = tl.load(beta + o_t, mask=m_t, other=0.0)[:, None]
    b_rq = tl.load(rq + o_t, mask=m_t, other=0.0)
    b_rk = tl.load(rk + o_t, mask=m_t, other=0.0)
    b_q = tl.load(q + o_t[:, None] * s_qt + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32) * b_rq[:, None]
    b_k = tl.load(k + o_t[:, None] * s_kt + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32) * b_rk[:, None]
    b_c = tl.load(c_sum + o_t[:, None] * K + o_k[None, :], mask=m_tk, other=0.0)
    b_t = tl.load(totals + i_r * K + o_k)
    b_before, b_after = sums_around(totals, i_r, o_k, K, NB, BK)

    # the state's terms
    o_tk = row * K + o_t[:, None] * K + o_k[None, :]
    b_eG = tl.exp2(b_c + b_before[None, :])
    b_dq = tl.load(dq + o_tk, mask=m_tk, other=0.0) * b_eG
    b_dkb = tl.load(dg + o_tk, mask=m_tk, other=0.0) * b_eG
    b_dk = tl.load(dk + o_tk, mask=m_tk, other=0.0) * tl.exp2((b_t + b_after)[None, :] - b_c)
    b_db = tl.sum(b_k * b_dkb, axis=1)
    b_dkb = b_dkb * b_beta
    b_dP = b_q * b_dq + b_k * b_dkb
    b_dQ = b_k * b_dk
    b_dk += b_dkb
    tl.store(sums + 3 * K, tl.sum(b_dP, axis=0))
    tl.store(sums + 4 * K, tl.sum(b_dQ, axis=0))

    # pairs with earlier sub-blocks: this one's are the rows
    b_span = tl.zeros([BK], tl.float32)
    for i in range(0, i_r):
        i_s = i_r - 1 - i
        o_i = i_s * BC + o_r
        b_ts = tl.load(totals + i_s * K + o_k)
        b_cs = tl.load(c_sum + o_i[:, None] * K + o_k[None, :])
        b_ks = tl.load(k + o_i[:, None] * s_kt + o_k[None, :]).to(tl.float32) * tl.load(rk + o_i)[:, None]
        b_ks = b_ks * tl.exp2(b_ts[None, :] - b_cs)
        b_e = tl.exp2(b_c + b_span[None, :])
        b_rowq = tl.dot(load_block(da_qk, i_r, i_s, num, C, BC), b_ks, input_precision=IP) * b_e
        b_rowk = tl.dot(load_block(da_kk, i_r, i_s, num, C, BC), b_ks, input_precision=IP) * b_e
        b_dq += b_rowq
        b_db += tl.sum(b_k * b_rowk, axis=1)
        b_rowk = b_rowk * b_beta
        b_dk += b_rowk
        b_z = b_q * b_rowq + b_k * b_rowk
        b_dP += b_z
        tl.store(sums + i_s * K, tl.sum(b_z, axis=0))
        b_span += b_ts

    # pairs with later sub-blocks: this one's are the columns
    b_span = tl.zeros([BK], tl.float32)
    for i_s in range(i_r + 1, tl.cdiv(num, BC)):
        o_s = i_s * BC + o_r
        m_s = o_s < num
        b_cs = tl.load(c_sum + o_s[:, None] * K + o_k[None, :], mask=m_s[:, None], other=0.0)
        b_es = tl.exp2(b_cs)
        b_bs = tl.load(beta + o_s, mask=m_s, other=0.0)
        b_rs = tl.load(rq + o_s, mask=m_s, other=0.0)
        b_qs = tl.load(q + o_s[:, None] * s_qt + o_k[None, :], mask=m_s[:, None], other=0.0).to(tl.float32) * b_rs[:, None] * b_es
        b_col = tl.dot(tl.trans(load_block(da_qk, i_s, i_r, num, C, BC)), b_qs, input_precision=IP)
        b_rs = tl.load(rk + o_s, mask=m_s, other=0.0) * b_bs
        b_ks = tl.load(k + o_s[:, None] * s_kt + o_k[None, :], mask=m_s[:, None], other=0.0).to(tl.float32) * b_rs[:, None] * b_es
        b_col = tl.dot(tl.trans(load_block(da_kk, i_s, i_r, num, C, BC)), b_ks, b_col, input_precision=IP)
        b_col = b_col * tl.exp2((b_t + b_span)[None, :] - b_c)
        b_dk += b_col
        b_dQ += b_k * b_col
        b_span += tl.load(totals + i_s * K + o_k)

    # pairs inside
    b_aq = load_block(da_qk, i_r, i_r, num, C, BC)
    b_ak = load_block(da_kk, i_r, i_r, num, C, BC)
    b_diag = tl.sum(tl.where(o_r[:, None] == o_r[None, :], b_aq, 0.0), axis=1)
    if SAFE:
        m_low = o_r[:, None] > o_r[None, :]
        b_aq = tl.where(m_low, b_aq, 0.0)
        b_ak = tl.where(m_low, b_ak, 0.0)
        b_up = tl.exp2(b_c - 0.5 * b_t[None, :])
        b_down = tl.exp2(0.5 * b_t[None, :] - b_c)
        b_rowq = tl.dot(b_aq, b_k * b_down, input_precision=IP) * b_up
        b_rowk = tl.dot(b_ak, b_k * b_down, input_precision=IP) * b_up
        b_col = tl.dot(tl.trans(b_aq), b_q * b_up, input_precision=IP)
        b_col = tl.dot(tl.trans(b_ak), b_k * b_beta * b_up, b_col, input_precision=IP) * b_down
        b_dq += b_rowq
        b_db += tl.sum(b_k * b_rowk, axis=1)
        b_rowk = b_rowk * b_beta
        b_dk += b_rowk
        b_dk += b_col
        b_dP += b_q * b_rowq + b_k * b_rowk - b_k * b_col
        b_dg = tl.cumsum(b_dP, axis=0, reverse=True) + tl.cumsum(b_dQ, axis=0) - b_dQ
    else:
        b_dg = tl.zeros([BC, BK], tl.float32)
        for i_s in tl.static_range(4):
            m_s = level_mask(8 >> i_s, BC)
            b_dg += hand_to_sibling(b_dP, b_dQ, 8 >> i_s, BC, BK)
            b_e = level_decay(b_c, 8 >> i_s, BC, BK)
            b_aqs = tl.where(m_s, b_aq, 0.0)
            b_aks = tl.where(m_s, b_ak, 0.0)
            b_rowq = tl.dot(b_aqs, b_k * b_e, input_precision=IP) * b_e
            b_rowk = tl.dot(b_aks, b_k * b_e, input_precision=IP) * b_e
            b_col = tl.dot(tl.trans(b_aqs), b_q * b_e, input_precision=IP)
            b_col = tl.dot(tl.trans(b_aks), b_k * b_beta * b_e, b_col, input_precision=IP) * b_e
            b_dq += b_rowq
            b_db += tl.sum(b_k * b_rowk, axis=1)
            b_rowk = b_rowk * b_beta
            b_dk += b_rowk
            b_dk += b_col
            b_dP += b_q * b_rowq + b_k * b_rowk
            b_dQ += b_k * b_col
        b_dg += b_dP

    b_dq += b_diag[:, None] * b_k
    b_dk += b_diag[:, None] * b_q
    tl.store(dq + o_tk, b_dq, mask=m_tk)
    tl.store(dk + o_tk, b_dk, mask=m_tk)
    tl.store(dg + o_tk, b_dg, mask=m_tk)
    tl.store(db_part + i_k.to(tl.int64) * HV * TT + row + o_t, b_db, mask=m_t)


@triton.jit
def unnormalise(x, s_xt, b_dn, o_t, m_t, K: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr):
    """Gradient of x from that of n = x r, r = 1 / |x|: r (dn - n (n . dn))."""
    if NORM:
        o_k = tl.arange(0, K)
        b_r = inverse_norm(x, s_xt, o_t, m_t, BC, K, K, True)
        b_n = tl.load(x + o_t[:, None] * s_xt + o_k[None, :], mask=m_t[:, None], other=0.0).to(tl.float32) * b_r[:, None]
        b_dn = (b_dn - b_n * tl.sum(b_n * b_dn, axis=1)[:, None]) * b_r[:, None]
    return b_dn


@triton.jit(do_not_specialize=["T", "TT", "NT", "lower_bound"])
def kda_grads_finish_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    dqn,
    dkn,
    dgl,
    db,
    db_part,
    sums,
    ddecay,
    dq,
    dk,
    dg,
    dbeta,
    dA_part,
    dbias_part,
    cu_seqlens,
    chunk_seq,
    chunk_base,
    s_qb,
    s_qt,
    s_qh,
    s_kb,
    s_kt,
    s_kh,
    s_gb,
    s_gt,
    s_gh,
    T,
    TT,
    NT,
    lower_bound,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    NK: tl.constexpr,
    GATE: tl.constexpr,
    SCALAR: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    BETA_MAX: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """The rest: totals of other sub-blocks into dg and through the gate, dq and dk over the value heads of a group and
    through the norm, dbeta through its sigmoid. beta is the activated one; db [HV, B*T] and db_part add up to its gradient."""
    BC: tl.constexpr = 16
    NB: tl.constexpr = C // BC
    G: tl.constexpr = HV // H
    i_r = tl.program_id(0) % NB
    i_hk = tl.program_id(0) // NB % H
    i_c = tl.program_id(0) // (NB * H)
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if i_r * BC >= num:
        return
    o_t = i_r * BC + tl.arange(0, BC)
    o_k = tl.arange(0, K)
    m_t = o_t < num
    m_tk = m_t[:, None]
    token = i_b * T + t0
    q += i_b * s_qb + t0 * s_qt + i_hk * s_qh
    k += i_b * s_kb + t0 * s_kt + i_hk * s_kh
    b_dq = tl.zeros([BC, K], tl.float32)
    b_dk = tl.zeros([BC, K], tl.float32)
    for i_g in range(0, G):
        i_h = i_hk * G + i_g
        o_chunk = i_c.to(tl.int64) * HV + i_h
        row = i_h.to(tl.int64) * TT + token
        o_tk = row * K + o_t[:, None] * K + o_k[None, :]
        b_dq += tl.load(dqn + o_tk, mask=m_tk, other=0.0)
        b_dk += tl.load(dkn + o_tk, mask=m_tk, other=0.0)

        b_sum = tl.load(ddecay + o_chunk * K + o_k)
        p_sums = sums + o_chunk * (NB * 5 * K) + o_k
        for i_s in range(0, i_r):
            b_sum += tl.load(p_sums + (i_s * 5 + 4) * K)
        for i_s in range(i_r + 1, tl.cdiv(num, BC)):
            b_sum += tl.load(p_sums + (i_s * 5 + 3) * K)
            for i in range(0, i_r):  # pairs that have this sub-block between them
                b_sum += tl.load(p_sums + (i_s * 5 + i) * K)
        b_dg = tl.load(dgl + o_tk, mask=m_tk, other=0.0) + b_sum[None, :]
        a = 1.0
        if A_log is not None:
            a = tl.exp(tl.load(A_log + i_h))
        p_g = g + i_b * s_gb + t0 * s_gt + i_h * s_gh
        b_x = load_gate_input(p_g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K, SCALAR, dt_bias is not None)
        out = (token * HV + i_h) + o_t.to(tl.int64) * HV
        o_part = (i_c.to(tl.int64) * NB + i_r) * HV + i_h
        if SCALAR:
            b_dx, b_da = gate_grad(tl.sum(b_dg, axis=1), b_x, a, lower_bound, GATE)
            b_da = tl.where(m_t, b_da, 0.0)
            tl.store(dg + out, b_dx.to(dg.dtype.element_ty), mask=m_t)
            if dbias_part is not None:
                tl.store(dbias_part + o_part, tl.sum(tl.where(m_t, b_dx, 0.0), axis=0))
        else:
            b_dx, b_da2 = gate_grad(b_dg, b_x, a, lower_bound, GATE)
            b_da = tl.sum(tl.where(m_tk, b_da2, 0.0), axis=1)
            tl.store(dg + out[:, None] * K + o_k[None, :], b_dx.to(dg.dtype.element_ty), mask=m_tk)
            if dbias_part is not None:
                tl.store(dbias_part + o_part * K + o_k, tl.sum(tl.where(m_tk, b_dx, 0.0), axis=0))
        if dA_part is not None:
            tl.store(dA_part + o_part, tl.sum(b_da, axis=0))

        b_db = tl.load(db + row + o_t, mask=m_t, other=0.0)
        for i_k in range(0, NK):
            b_db += tl.load(db_part + i_k * HV * TT + row + o_t, mask=m_t, other=0.0)
        if SIGMOID:
            b_beta = tl.load(beta + row + o_t, mask=m_t, other=0.0)
            b_db = b_db * b_beta * (1.0 - b_beta / BETA_MAX)
        tl.store(dbeta + out, b_db.to(dbeta.dtype.element_ty), mask=m_t)

    o_tk = (token * H + i_hk) * K + o_t[:, None] * (H * K) + o_k[None, :]
    b_dq = unnormalise(q, s_qt, b_dq, o_t, m_t, K, BC, NORM)
    tl.store(dq + o_tk, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    b_dk = unnormalise(k, s_kt, b_dk, o_t, m_t, K, BC, NORM)
    tl.store(dk + o_tk, b_dk.to(dk.dtype.element_ty), mask=m_tk)
