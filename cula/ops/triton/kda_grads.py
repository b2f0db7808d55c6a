# SPDX-License-Identifier: Apache-2.0
"""KDA backward, everything inside a chunk. Names as in `kda_prepare` and `kda_state`.

Given S (`h`, before the chunk), dS (`dh`, after it), U, dX and dO (times scale):
    dAqk = lower(dO U^T)      dA = -strict_lower(dX U^T)                                                 [C, C]
    dqg  = dO S               dkb = -dX S               dkr = U dS                                       [C, K]
    b    : sum_v dX V + sum_c (k e^G) dkb + sum_i dA (A / b)

Pairs. A pair i < t belongs to one level S = 32, 16, 8, 4, 2, 1: t in the second and i in the first half of an aligned block of 2S
rows. With e the decay between a row and the middle of its block, never above 1, and the level's part of dAqk and dA:
    dq_t = e_t (dAqk (k e))      dkb_t = e_t (dA (k e))      dk_i = e_i (dAqk^T (q e) + dA^T (b k e))
Rows and columns of a level are different tokens, so one array e serves both. Exact for any gate.

The gate. Every exponent x is a sum of g over a range of tokens, x = R g with R of zeros and ones (from the chunk's start, to its
end, to the middle of a block), so its gradient, q dq + b k dkb + k dk of the terms it is in, goes back as dg = R^T dx. No term is
added and taken away again: a strong decay keeps its relative accuracy. Pairs t = i have no decay and never enter.

| kernel   | one program for                   | reads                             | writes                                  |
|----------|-----------------------------------|-----------------------------------|-----------------------------------------|
| `scores` | chunk, head                       | dO, u, dx, v                      | dAqk, dA, first term of db              |
| `state`  | chunk, head, BK channels          | dO, u, dx, h, dh                  | dqg, dkb, dkr, gradient of decay        |
| `pairs`  | half chunk, head, BK channels     | all of these, q, k, g, beta       | dqn, dkn, dg, shares of db, dA_log, ... |
| `finish` | sub-block of 16 rows, q/k head    | dqn, dkn, shares of db, q, k      | dq, dk, dbeta                           |

Schedule of `pairs`. Tiles are transposed, [BK, 32]: channels are the rows of all products, whose left operands (k e, q e, g, dx)
are then made in the registers that tensor cores read them from, and only the small matrices dAqk, dA and R pass through shared
memory. Half a chunk and 64 channels with four warps keep a tile at 16 registers a thread. That matters for more than
occupancy: with all 255 registers taken, the ptxas of Triton 3.6 (12.8) was seen to add the constant of a shared-memory
descriptor to a register that held something else, so that products read wrong or unmapped shared memory.
"""

import triton
import triton.language as tl

from .kda_common import NORM_EPS, chunk_span, gate_grad, gate_log2, load_gate_input


@triton.jit(do_not_specialize=["scale", "T", "TT", "NT"])
def kda_grads_scores_kernel(
    v,
    do,
    u,
    dx,
    da_qk,
    da_kk,
    da_max,
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
    tl.store(dqg + o_ck, (b_dqg * scale).to(dqg.dtype.element_ty), mask=m_c[:, None])
    tl.store(dkb + o_ck, (-b_dkb).to(dkb.dtype.element_ty), mask=m_c[:, None])
    tl.store(dkr + o_ck, b_dkr.to(dkr.dtype.element_ty), mask=m_c[:, None])
    tl.store(ddecay + o_chunk * K + o_k, b_dend * tl.load(decay + o_chunk * K + o_k))


@triton.jit
def ranges(middle, N: tl.constexpr, DT: tl.constexpr):
    """[s, t]: ones where token s lies between token t and the middle of t's block, t in the second half included.

    A product x = g R gives every t the sum of g over its range. middle [1, N] or a number: 0 sums from the start of the tile to
    t, N from behind t to its end.
    """
    o_s = tl.arange(0, N)[:, None]
    o_t = tl.arange(0, N)[None, :]
    return tl.where((o_s >= middle) == (o_s <= o_t), 1.0, 0.0).to(DT)


@triton.jit
def load_half(x, s_xt, b_r, o_k, o_t, m_t, DT: tl.constexpr):
    """Rows o_t of q or k times their inverse norms, transposed, [BK, BH]."""
    b_x = tl.load(x + o_k[:, None] + o_t[None, :] * s_xt, mask=m_t[None, :], other=0.0).to(tl.float32)
    return (b_x * b_r[None, :]).to(DT)


@triton.jit
def load_gate_half(g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K: tl.constexpr, SCALAR: tl.constexpr):
    """Raw g + dt_bias of rows o_t, transposed, [BK, BH], or [1, BH] for one gate a head."""
    if SCALAR:
        b_x = tl.load(g + o_t * s_gt, mask=m_t, other=0.0).to(tl.float32)[None, :]
        if dt_bias is not None:
            b_x += tl.load(dt_bias + i_h)
    else:
        b_x = tl.load(g + o_k[:, None] + o_t[None, :] * s_gt, mask=m_t[None, :], other=0.0).to(tl.float32)
        if dt_bias is not None:
            b_x += tl.load(dt_bias + i_h * K + o_k)[:, None]
    return b_x


@triton.jit
def load_decay_half(
    g, s_gt, dt_bias, a, lower_bound, i_h, o_k, o_t, m_t,
    K: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, SCALAR: tl.constexpr, GATE: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """log2 decays of rows o_t, transposed, [BK, BH]; rows past the sequence decay nothing."""
    b_x = load_gate_half(g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K, SCALAR)
    b_g = tl.where(m_t[None, :], gate_log2(b_x, a, lower_bound, GATE), 0.0)
    return tl.broadcast_to(b_g, [BK, BH]).to(DT)


@triton.jit
def load_scores(p, o_r, o_c, num, C: tl.constexpr, DT: tl.constexpr):
    """Rows o_r and columns o_c of a chunk's dAqk or dA."""
    return tl.load(p + o_r[:, None] * C + o_c[None, :], mask=(o_r < num)[:, None], other=0.0).to(DT)


@triton.jit
def load_tile(p, o_k, o_t, m_t, K: tl.constexpr):
    """Rows o_t of a workspace [.., K], transposed, [BK, BH] float32."""
    return tl.load(p + o_k[:, None] + o_t[None, :] * K, mask=m_t[None, :], other=0.0).to(tl.float32)


@triton.jit
def pairs_half(
    q, k, g, beta, A_log, dt_bias, rq, rk, dqg, dkb, dkr, ddecay, da_qk, da_kk, da_max, dqn, dkn, dg, db_part, dA_part,
    dbias_part, cu_seqlens, chunk_seq, chunk_base, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, lower_bound, T, TT,
    NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr,
    SCALAR: tl.constexpr, IS_PACKED: tl.constexpr, GDT: tl.constexpr, SDT: tl.constexpr, IP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One half of a chunk: HALF 0, the first, or 1. Arguments as of the kernel."""
    BH: tl.constexpr = C // 2
    NK: tl.constexpr = K // BK
    XDT: tl.constexpr = tl.float32 if IP == "tf32x3" else tl.bfloat16  # of gradients of exponents: range before precision
    i_k = tl.program_id(0) // 2 % NK
    i_h = tl.program_id(0) // (2 * NK) % HV
    i_c = tl.program_id(0) // (2 * NK * HV)
    i_b, t0, num = chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED, C)
    if num <= HALF * BH:
        return
    i_hk = i_h // (HV // H)
    o_k = i_k * BK + tl.arange(0, BK)
    o_r = tl.arange(0, BH)
    o_t = HALF * BH + o_r
    o_o = BH - HALF * BH + o_r  # tokens of the other half
    m_t = o_t < num
    m_o = o_o < num
    token = i_b * T + t0
    row = i_h.to(tl.int64) * TT + token
    o_chunk = i_c.to(tl.int64) * HV + i_h
    # scalars go into the pointers, so that the offsets of tiles stay 32 bits wide
    q += i_b * s_qb + t0 * s_qt + i_hk * s_qh
    k += i_b * s_kb + t0 * s_kt + i_hk * s_kh
    g += i_b * s_gb + t0 * s_gt + i_h * s_gh
    beta += row
    rq += row
    rk += row
    dqg += row * K
    dkb += row * K
    dkr += row * K
    da_qk += row * C
    da_kk += row * C
    a = 1.0
    if A_log is not None:
        a = tl.exp(tl.load(A_log + i_h))
    unit = tl.load(da_max + o_chunk)  # gradients below are in these units

    # The other half: k (and q) decayed to where the halves meet; the pairs with it (level 32, rows in the second half, columns
    # in the first); and the gradient of its sums of g that span this half (b_end), which are those of k e^(G_C - G) if it is the
    # first, of q e^G and k e^G if it is the second.
    b_g = load_decay_half(g, s_gt, dt_bias, a, lower_bound, i_h, o_k, o_o, m_o, K, BK, BH, SCALAR, GATE, GDT)
    b_Eo = tl.exp2(tl.sum(b_g.to(tl.float32), axis=1))
    b_e = tl.exp2(tl.dot(b_g, ranges(BH * HALF, BH, GDT), input_precision=IP))
    b_k = load_half(k, s_kt, tl.load(rk + o_o, mask=m_o, other=0.0), o_k, o_o, m_o, tl.float32) * b_e
    if HALF == 0:
        b_q = load_half(q, s_qt, tl.load(rq + o_o, mask=m_o, other=0.0), o_k, o_o, m_o, tl.float32) * b_e
        b_k = b_k * tl.load(beta + o_o, mask=m_o, other=0.0)[None, :]
        b_end = tl.sum(b_q * load_tile(dqg, o_k, o_o, m_o, K) + b_k * load_tile(dkb, o_k, o_o, m_o, K), axis=1)
        b_col = tl.dot(b_q.to(SDT), load_scores(da_qk, o_o, o_t, num, C, SDT), input_precision=IP)
        b_col = tl.dot(b_k.to(SDT), load_scores(da_kk, o_o, o_t, num, C, SDT), b_col, input_precision=IP)
    else:
        b_end = tl.sum(b_k * load_tile(dkr, o_k, o_o, m_o, K), axis=1)
        b_rowq = tl.dot(b_k.to(SDT), tl.trans(load_scores(da_qk, o_t, o_o, num, C, SDT)), input_precision=IP)
        b_rowk = tl.dot(b_k.to(SDT), tl.trans(load_scores(da_kk, o_t, o_o, num, C, SDT)), input_precision=IP)

    # This half: through the states, and with what the other half gave. dg takes the gradients of both kinds of sums.
    b_beta = tl.load(beta + o_t, mask=m_t, other=0.0)
    b_q = load_half(q, s_qt, tl.load(rq + o_t, mask=m_t, other=0.0), o_k, o_t, m_t, SDT)
    b_k = load_half(k, s_kt, tl.load(rk + o_t, mask=m_t, other=0.0), o_k, o_t, m_t, SDT)
    b_g = load_decay_half(g, s_gt, dt_bias, a, lower_bound, i_h, o_k, o_t, m_t, K, BK, BH, SCALAR, GATE, GDT)
    b_end = b_end * tl.exp2(tl.sum(b_g.to(tl.float32), axis=1)) + tl.load(ddecay + o_chunk * K + o_k)
    b_e = tl.exp2(tl.dot(b_g, ranges(0, BH, GDT), input_precision=IP))  # from the half's start to t
    b_dq = load_tile(dqg, o_k, o_t, m_t, K) * (1.0 / unit)
    b_dkb = load_tile(dkb, o_k, o_t, m_t, K) * (1.0 / unit)
    if HALF == 1:
        b_dq = b_dq * b_Eo[:, None] + b_rowq
        b_dkb = b_dkb * b_Eo[:, None] + b_rowk
    b_dq = b_dq * b_e
    b_dkb = b_dkb * b_e
    b_x = b_q.to(tl.float32) * b_dq + b_k.to(tl.float32) * (b_dkb * b_beta[None, :])
    b_dg = tl.dot(b_x.to(XDT), tl.trans(ranges(0, BH, XDT)), input_precision=IP)
    b_e = tl.exp2(tl.dot(b_g, ranges(BH, BH, GDT), input_precision=IP))  # from behind t to the half's end
    b_dk = load_tile(dkr, o_k, o_t, m_t, K) * (1.0 / unit)
    if HALF == 0:
        b_dk = b_dk * b_Eo[:, None] + b_col
    b_dk = b_dk * b_e
    b_x = b_k.to(tl.float32) * b_dk
    b_dg = tl.dot(b_x.to(XDT), tl.trans(ranges(BH, BH, XDT)), b_dg, input_precision=IP)

    # levels 16 to 1: pairs inside the half
    for i_l in range(5):  # a loop, not unrolled: nothing of a later level is fetched early and held in registers
        S = 16 >> i_l
        middle = (o_r & (-2 * S))[None, :] + S
        m_s = ((o_r & -S)[:, None] - (o_r & -S)[None, :] == S) & ((o_r & S) == 0)[None, :]
        b_aq = tl.where(m_s, load_scores(da_qk, o_t, o_t, num, C, SDT), 0.0).to(SDT)
        b_ak = tl.where(m_s, load_scores(da_kk, o_t, o_t, num, C, SDT), 0.0).to(SDT)
        b_e = tl.exp2(tl.dot(b_g, ranges(middle, BH, GDT), input_precision=IP))
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
        b_dg = tl.dot(b_x.to(XDT), tl.trans(ranges(middle, BH, XDT)), b_dg, input_precision=IP)
    b_dg = b_dg * unit + b_end[:, None]

    # out: q and k with the pairs t = i, this program's share of db, and g through the gate
    b_diag = tl.load(da_qk + o_t * (C + 1), mask=m_t, other=0.0).to(tl.float32)[None, :]
    o_tk = row * K + o_t[None, :] * K + o_k[:, None]
    b_x = (b_dq + b_k.to(tl.float32) * b_diag) * unit
    tl.store(dqn + o_tk, b_x.to(dqn.dtype.element_ty), mask=m_t[None, :])
    b_x = (b_dk + b_dkb * b_beta[None, :] + b_q.to(tl.float32) * b_diag) * unit
    tl.store(dkn + o_tk, b_x.to(dkn.dtype.element_ty), mask=m_t[None, :])
    o_row = i_k.to(tl.int64) * HV * TT + row + o_t
    tl.store(db_part + o_row, tl.sum(b_k.to(tl.float32) * b_dkb, axis=0) * unit, mask=m_t)
    if SCALAR:
        tl.store(dg + o_row, tl.sum(b_dg, axis=0), mask=m_t)
    else:
        b_x = load_gate_half(g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K, SCALAR)
        b_dx, b_da = gate_grad(b_dg, b_x, a, lower_bound, GATE)
        p_dg = dg + (token * HV + i_h) * K + o_t[None, :] * (HV * K) + o_k[:, None]
        tl.store(p_dg, b_dx.to(dg.dtype.element_ty), mask=m_t[None, :])
        o_part = ((i_c.to(tl.int64) * 2 + HALF) * HV + i_h) * K + o_k
        if dA_part is not None:
            tl.store(dA_part + o_part, tl.sum(tl.where(m_t[None, :], b_da, 0.0), axis=1))
        if dbias_part is not None:
            tl.store(dbias_part + o_part, tl.sum(tl.where(m_t[None, :], b_dx, 0.0), axis=1))


@triton.jit(do_not_specialize=["T", "TT", "NT", "lower_bound"])
def kda_grads_pairs_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    rq,
    rk,
    dqg,
    dkb,
    dkr,
    ddecay,
    da_qk,
    da_kk,
    da_max,
    dqn,
    dkn,
    dg,
    db_part,
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
    lower_bound,
    T,
    TT,
    NT,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    SCALAR: tl.constexpr,
    IS_PACKED: tl.constexpr,
    GDT: tl.constexpr,
    SDT: tl.constexpr,
    IP: tl.constexpr,
):
    """beta is the activated one; rq and rk are inverse norms. GDT and SDT are the operand types of decays and scores.

    dqn, dkn [HV, B*T, K] take the gradients of the normalised q and k; db_part [K / BK, HV, B*T] each block of channels' share.
    dg is final, or, for one gate a head, [K / BK, HV, B*T] like db_part. dA_part and dbias_part are [chunks, 2, HV, K].
    """
    if tl.program_id(0) % 2 == 0:
        pairs_half(
            q, k, g, beta, A_log, dt_bias, rq, rk, dqg, dkb, dkr, ddecay, da_qk, da_kk, da_max, dqn, dkn, dg, db_part, dA_part,
            dbias_part, cu_seqlens, chunk_seq, chunk_base, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, lower_bound,
            T, TT, NT, H, HV, K, C, BK, GATE, SCALAR, IS_PACKED, GDT, SDT, IP, 0,
        )  # fmt: skip
    else:
        pairs_half(
            q, k, g, beta, A_log, dt_bias, rq, rk, dqg, dkb, dkr, ddecay, da_qk, da_kk, da_max, dqn, dkn, dg, db_part, dA_part,
            dbias_part, cu_seqlens, chunk_seq, chunk_base, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_gb, s_gt, s_gh, lower_bound,
            T, TT, NT, H, HV, K, C, BK, GATE, SCALAR, IS_PACKED, GDT, SDT, IP, 1,
        )  # fmt: skip


@triton.jit
def unnormalise(x, s_xt, b_dn, o_t, m_t, K: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr):
    """Gradient of x from that of n = x r, r = 1 / |x|: r (dn - n (n . dn))."""
    if NORM:
        o_k = tl.arange(0, K)
        b_x = tl.load(x + o_t[:, None] * s_xt + o_k[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
        b_r = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) + NORM_EPS)
        b_n = b_x * b_r[:, None]
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
    dg_part,
    db,
    db_part,
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
        return
    o_t = i_r * BC + tl.arange(0, BC)
    o_k = tl.arange(0, K)
    m_t = o_t < num
    m_tk = m_t[:, None]
    token = i_b * T + t0
    b_dq = tl.zeros([BC, K], tl.float32)
    b_dk = tl.zeros([BC, K], tl.float32)
    for i_g in range(0, G):
        i_h = i_hk * G + i_g
        row = i_h.to(tl.int64) * TT + token
        o_tk = row * K + o_t[:, None] * K + o_k[None, :]
        b_dq += tl.load(dqn + o_tk, mask=m_tk, other=0.0).to(tl.float32)
        b_dk += tl.load(dkn + o_tk, mask=m_tk, other=0.0).to(tl.float32)
        out = (token * HV + i_h) + o_t * HV
        b_db = tl.load(db + row + o_t, mask=m_t, other=0.0)
        for i_k in tl.static_range(NK):
            b_db += tl.load(db_part + i_k * HV * TT.to(tl.int64) + row + o_t, mask=m_t, other=0.0)
        if SIGMOID:
            b_beta = tl.load(beta + row + o_t, mask=m_t, other=0.0)
            b_db = b_db * b_beta * (1.0 - b_beta / BETA_MAX)
        tl.store(dbeta + out, b_db.to(dbeta.dtype.element_ty), mask=m_t)
        if SCALAR:
            b_dg = tl.zeros([BC], tl.float32)
            for i_k in tl.static_range(NK):
                b_dg += tl.load(dg_part + i_k * HV * TT.to(tl.int64) + row + o_t, mask=m_t, other=0.0)
            a = 1.0
            if A_log is not None:
                a = tl.exp(tl.load(A_log + i_h))
            p_g = g + i_b * s_gb + t0 * s_gt + i_h * s_gh
            b_x = load_gate_input(p_g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K, SCALAR, dt_bias is not None)
            b_dx, b_da = gate_grad(b_dg, b_x, a, lower_bound, GATE)
            tl.store(dg + out, b_dx.to(dg.dtype.element_ty), mask=m_t)
            o_part = (i_c.to(tl.int64) * NB + i_r) * HV + i_h
            if dA_part is not None:
                tl.store(dA_part + o_part, tl.sum(tl.where(m_t, b_da, 0.0), axis=0))
            if dbias_part is not None:
                tl.store(dbias_part + o_part, tl.sum(tl.where(m_t, b_dx, 0.0), axis=0))

    o_tk = (token * H + i_hk) * K + o_t[:, None] * (H * K) + o_k[None, :]
    b_dq = unnormalise(q + i_b * s_qb + t0 * s_qt + i_hk * s_qh, s_qt, b_dq, o_t, m_t, K, BC, NORM)
    tl.store(dq + o_tk, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    b_dk = unnormalise(k + i_b * s_kb + t0 * s_kt + i_hk * s_kh, s_kt, b_dk, o_t, m_t, K, BC, NORM)
    tl.store(dk + o_tk, b_dk.to(dk.dtype.element_ty), mask=m_tk)
