# SPDX-License-Identifier: Apache-2.0
"""KDA, the recurrence along a sequence: states and outputs forward, gradients of the states backward, the scan of segments.

Tiles kb, kr, qg, T, Aqk, decay are those of `kda_intra`; S is [V, K], as stored. One chunk forward:
    X = b V - kb S^T        U = T X        O = scale (qg S^T + Aqk U)        S <- S decay + U^T kr
and backward, dS the gradient of the state after the chunk, dO times scale:
    dU = Aqk^T dO + kr dS^T        dX = T^T dU        dV = b dX        dS <- dS decay + dO^T qg - dX^T kb
The rows of S (and of dS) never mix, so a program runs over the chunks with BV rows of it in registers. Everything is formed
transposed ([BV, C]): the state and U^T are then left operands, which tensor cores take from registers.

Segments. Few (sequence, head) pairs leave a GPU idle, so a sequence may be cut into segments of `seg` chunks. The transition of
a segment takes its first state to its last, S -> S M + B: B is the recurrence from S = 0, M the recurrence from S = I with V = 0
(K more rows of the same chain). A short scan gives every segment's first state, and the chains run again from there. This is
exact for any gate. The gradient goes through the same transitions, dS -> dS M^T + D, D the backward chain from dS = 0.
"""

import triton
import triton.language as tl

from .launch import kernel
from .tiles import load_channels, load_rows, store_rows
from .varlen import chain_span


@triton.jit
def chunk_fwd(
    b_S, i_t, num, head, base, i_h, kb, kr, qg, t_inv, a_qk, beta, decay, v, o, h, u, o_v, o_tv, o_to, s_vt, s_ot, scale,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    IS_TRANSITION: tl.constexpr, IS_TAIL: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One chunk of a chain: from the state before it to the state after it."""
    DT: tl.constexpr = kb.dtype.element_ty
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_ck = o_c[:, None] * K + o_k[None, :]
    o_cc = o_c[:, None] * C + o_c[None, :]
    m_c = o_c < num
    t0 = tl.cast(i_t, tl.int64) * C
    row = head + t0
    o_chunk = (base + i_t) * HV + i_h
    b_kb = load_rows(kb + row * K + o_ck, m_c, o_k, IS_TAIL, K, BK)
    b_T = load_rows(t_inv + row * C + o_cc, m_c, o_c, IS_TAIL, C, C)
    b_kr = load_rows(kr + row * K + o_ck, m_c, o_k, IS_TAIL, K, BK)
    b_decay = load_channels(decay + o_chunk * K + o_k, o_k, K, BK)
    if h is not None:
        p_h = h + o_chunk * (V * K) + o_v[:, None] * K + o_k[None, :]
        store_rows(p_h, b_S.to(h.dtype.element_ty), o_v < V, o_k, V % BV != 0, K, BK)

    b_Sd = b_S.to(DT)
    b_X = -tl.dot(b_Sd, tl.trans(b_kb), input_precision=IP)  # [BV, C]
    if IS_TRANSITION:
        b_v = tl.load(v + t0 * s_vt + o_tv, mask=m_c[:, None] & (o_v < V)[None, :], other=0.0)
    else:
        b_v = load_rows(v + t0 * s_vt + o_tv, m_c, o_v, IS_TAIL, V, BV)
    b_beta = tl.load(beta + row + o_c, mask=m_c, other=0.0) if IS_TAIL else tl.load(beta + row + o_c)
    b_X += tl.trans(b_v).to(tl.float32) * b_beta[None, :]
    b_U = tl.dot(b_X.to(DT), tl.trans(b_T), input_precision=IP).to(DT)  # [BV, C]
    if o is not None:
        b_qg = load_rows(qg + row * K + o_ck, m_c, o_k, IS_TAIL, K, BK)
        b_Aqk = load_rows(a_qk + row * C + o_cc, m_c, o_c, IS_TAIL, C, C)
        b_o = tl.dot(b_Sd, tl.trans(b_qg), input_precision=IP)
        b_o = tl.dot(b_U, tl.trans(b_Aqk), b_o, input_precision=IP) * scale
    b_S = tl.dot(b_U, b_kr, b_S * b_decay[None, :], input_precision=IP)
    if o is not None:
        store_rows(o + t0 * s_ot + o_to, tl.trans(b_o.to(o.dtype.element_ty)), m_c, o_v, IS_TAIL, V, BV)
    if u is not None:
        store_rows(u + row * V + o_c[:, None] * V + o_v[None, :], tl.trans(b_U), m_c, o_v, IS_TAIL, V, BV)
    return b_S


@triton.jit
def chunk_bwd(
    b_dS, i_t, num, head, token, base, i_h, kb, kr, qg, t_inv, a_qk, beta, decay, do, dh, dx, dv, o_v, o_to, s_ot, scale,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    IS_TAIL: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One chunk of a chain in reverse: from the gradient of the state after it to that of the state before it."""
    DT: tl.constexpr = kb.dtype.element_ty
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_ck = o_c[:, None] * K + o_k[None, :]
    o_cc = o_c[:, None] * C + o_c[None, :]
    m_c = o_c < num
    t0 = tl.cast(i_t, tl.int64) * C
    row = head + t0
    o_chunk = (base + i_t) * HV + i_h
    b_kr = load_rows(kr + row * K + o_ck, m_c, o_k, IS_TAIL, K, BK)
    b_T = load_rows(t_inv + row * C + o_cc, m_c, o_c, IS_TAIL, C, C)
    b_kb = load_rows(kb + row * K + o_ck, m_c, o_k, IS_TAIL, K, BK)
    b_qg = load_rows(qg + row * K + o_ck, m_c, o_k, IS_TAIL, K, BK)
    b_Aqk = load_rows(a_qk + row * C + o_cc, m_c, o_c, IS_TAIL, C, C)
    b_do = load_rows(do + t0 * s_ot + o_to, m_c, o_v, IS_TAIL, V, BV)
    b_doT = (tl.trans(b_do).to(tl.float32) * scale).to(DT)  # [BV, C]
    b_decay = load_channels(decay + o_chunk * K + o_k, o_k, K, BK)
    b_dSd = b_dS.to(DT)
    if dh is not None:
        store_rows(dh + o_chunk * (V * K) + o_v[:, None] * K + o_k[None, :], b_dSd, o_v < V, o_k, V % BV != 0, K, BK)

    b_dU = tl.dot(b_doT, b_Aqk, input_precision=IP)
    b_dU = tl.dot(b_dSd, tl.trans(b_kr), b_dU, input_precision=IP)
    b_dX = tl.dot(b_dU.to(DT), b_T, input_precision=IP)  # [BV, C]
    b_dXd = b_dX.to(DT)
    b_dS = tl.dot(b_doT, b_qg, b_dS * b_decay[None, :], input_precision=IP)
    b_dS = tl.dot(-b_dXd, b_kb, b_dS, input_precision=IP)
    if dx is not None:
        store_rows(dx + row * V + o_c[:, None] * V + o_v[None, :], tl.trans(b_dXd), m_c, o_v, IS_TAIL, V, BV)
        b_beta = tl.load(beta + row + o_c, mask=m_c, other=0.0) if IS_TAIL else tl.load(beta + row + o_c)
        p_dv = dv + ((token + t0) * HV + i_h) * V + o_c[:, None] * (HV * V) + o_v[None, :]
        store_rows(p_dv, tl.trans((b_dX * b_beta[None, :]).to(dv.dtype.element_ty)), m_c, o_v, IS_TAIL, V, BV)
    return b_dS


@kernel(numbers="T TT NT NS seg", floats="scale")
def kda_recurrence_fwd_kernel(
    kb, kr, qg, t_inv, a_qk, beta, decay, v, first_state, o, ht, h, u, transitions, cu_seqlens, chunk_base, seg_seq, seg_base,
    v_strides, o_strides, T, TT, NT, NS, seg, scale,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    IS_PACKED: tl.constexpr, HAS_SEG: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Chains of whole sequences or segments from their `first_state` (zero if None).

    Optional outputs: o; ht, the last states; h, the state before each chunk; u. With `transitions` [chains, HV, V + K, K]
    instead: rows [0, V) are B and rows [V, V + K) are M of each chain.
    """
    IS_TRANSITION: tl.constexpr = transitions is not None
    ROWS: tl.constexpr = V + K if IS_TRANSITION else V
    NB: tl.constexpr = (ROWS + BV - 1) // BV
    i_r = tl.program_id(0) % NB
    i_h = tl.program_id(0) // NB % HV
    i_w = tl.program_id(0) // (NB * HV)
    i_b, bos, length, first, last, base, alive = chain_span(
        i_w, cu_seqlens, chunk_base, seg_seq, seg_base, T, NT, NS, seg, IS_PACKED, HAS_SEG, C
    )
    if not alive:
        return
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_r * BV + tl.arange(0, BV)
    o_vk = o_v[:, None] * K + o_k[None, :]
    head = i_h.to(tl.int64) * TT + i_b * T + bos
    v += i_b * v_strides[0] + bos * v_strides[1] + i_h * v_strides[2]
    if o is not None:
        o += i_b * o_strides[0] + bos * o_strides[1] + i_h * o_strides[2]
    o_chain = i_w.to(tl.int64) * HV + i_h

    if IS_TRANSITION:
        b_S = tl.where((o_v - V)[:, None] == o_k[None, :], 1.0, 0.0)
    elif first_state is not None:
        b_S = load_rows(first_state + o_chain * (V * K) + o_vk, o_v < V, o_k, V % BV != 0, K, BK)
    else:
        b_S = tl.zeros([BV, BK], tl.float32)

    s_vt = v_strides[1]
    o_tv = o_c[:, None] * s_vt + o_v[None, :]
    s_ot = 0
    if o is not None:
        s_ot = o_strides[1]
    o_to = o_c[:, None] * s_ot + o_v[None, :]
    full = tl.minimum(last, length // C)
    for i_t in range(first, full):
        b_S = chunk_fwd(b_S, i_t, C, head, base, i_h, kb, kr, qg, t_inv, a_qk, beta, decay, v, o, h, u, o_v, o_tv, o_to,
                        s_vt, s_ot, scale, HV, K, V, C, BK, BV, IS_TRANSITION, False, IP)  # fmt: skip
    if full < last:
        b_S = chunk_fwd(b_S, full, length - full * C, head, base, i_h, kb, kr, qg, t_inv, a_qk, beta, decay, v, o, h, u,
                        o_v, o_tv, o_to, s_vt, s_ot, scale, HV, K, V, C, BK, BV, IS_TRANSITION, True, IP)  # fmt: skip

    if IS_TRANSITION:
        store_rows(transitions + o_chain * (ROWS * K) + o_vk, b_S, o_v < ROWS, o_k, ROWS % BV != 0, K, BK)
    if ht is not None:
        store_rows(ht + o_chain * (V * K) + o_vk, b_S, o_v < V, o_k, V % BV != 0, K, BK)


@kernel(numbers="T TT NT NS seg", floats="scale")
def kda_recurrence_bwd_kernel(
    kb, kr, qg, t_inv, a_qk, beta, decay, do, dlast, dh, dx, dv, dfirst, cu_seqlens, chunk_base, seg_seq, seg_base,
    do_strides, T, TT, NT, NS, seg, scale,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    IS_PACKED: tl.constexpr, HAS_SEG: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Chains from the last chunk to the first, from the gradient `dlast` of their last state (zero if None).

    Optional outputs: dh, the gradient of the state after each chunk; dx (scratch) and dv; dfirst, of each chain's first state.
    """
    NB: tl.constexpr = (V + BV - 1) // BV
    i_r = tl.program_id(0) % NB
    i_h = tl.program_id(0) // NB % HV
    i_w = tl.program_id(0) // (NB * HV)
    i_b, bos, length, first, last, base, alive = chain_span(
        i_w, cu_seqlens, chunk_base, seg_seq, seg_base, T, NT, NS, seg, IS_PACKED, HAS_SEG, C
    )
    if not alive:
        return
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_r * BV + tl.arange(0, BV)
    o_vk = o_v[:, None] * K + o_k[None, :]
    head = i_h.to(tl.int64) * TT + i_b * T + bos
    do += i_b * do_strides[0] + bos * do_strides[1] + i_h * do_strides[2]
    o_chain = i_w.to(tl.int64) * HV + i_h

    if dlast is not None:
        b_dS = load_rows(dlast + o_chain * (V * K) + o_vk, o_v < V, o_k, V % BV != 0, K, BK)
    else:
        b_dS = tl.zeros([BV, BK], tl.float32)

    s_ot = do_strides[1]
    o_to = o_c[:, None] * s_ot + o_v[None, :]
    token = i_b * T + bos
    full = tl.minimum(last, length // C)
    if full < last:
        b_dS = chunk_bwd(b_dS, full, length - full * C, head, token, base, i_h, kb, kr, qg, t_inv, a_qk, beta, decay, do,
                         dh, dx, dv, o_v, o_to, s_ot, scale, HV, K, V, C, BK, BV, True, IP)  # fmt: skip
    for i in range(0, full - first):
        b_dS = chunk_bwd(b_dS, full - 1 - i, C, head, token, base, i_h, kb, kr, qg, t_inv, a_qk, beta, decay, do,
                         dh, dx, dv, o_v, o_to, s_ot, scale, HV, K, V, C, BK, BV, False, IP)  # fmt: skip

    if dfirst is not None:
        store_rows(dfirst + o_chain * (V * K) + o_vk, b_dS, o_v < V, o_k, V % BV != 0, K, BK)


@kernel(numbers="NS")
def kda_scan_kernel(
    transitions, offsets, first, states, last, seg_base, NS,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_TRANSITION: tl.constexpr,
):  # fmt: skip
    """First state of every segment (`states`) and the last state, by S <- S M + B along the sequence from `first` (or zero).

    `transitions` [segments, HV, V + K, K] holds B above M. With `offsets` the scan is the backward one: in reverse,
    S <- S M^T + offset. IS_TRANSITION scans V + K rows from [0 | I], which composes the transitions. The state in hand passes
    through `states`, so that a product can take it in slices of BS of its BK columns.
    """
    IS_BWD: tl.constexpr = offsets is not None
    ROWS: tl.constexpr = V + K if IS_TRANSITION else V
    NB: tl.constexpr = (ROWS + BV - 1) // BV
    i_r = tl.program_id(0) % NB
    i_h = tl.program_id(0) // NB % HV
    i_n = tl.program_id(0) // (NB * HV)
    if IS_PACKED:
        base = tl.load(seg_base + i_n)
        num = tl.load(seg_base + i_n + 1) - base
    else:
        base = i_n * NS
        num = i_n * 0 + NS
    o_k = tl.arange(0, BK)
    o_s = tl.arange(0, BS)
    o_v = i_r * BV + tl.arange(0, BV)
    o_vk = o_v[:, None] * K + o_k[None, :]
    o_state = (i_n.to(tl.int64) * HV + i_h) * (ROWS * K)
    if IS_TRANSITION:
        b_S = tl.where((o_v - V)[:, None] == o_k[None, :], 1.0, 0.0)
    elif first is not None:
        b_S = load_rows(first + o_state + o_vk, o_v < V, o_k, V % BV != 0, K, BK)
    else:
        b_S = tl.zeros([BV, BK], tl.float32)
    for i in range(0, num):
        i_s = base + (num - 1 - i if IS_BWD else i)
        o_seg = tl.cast(i_s, tl.int64) * HV + i_h
        p_B = transitions + o_seg * ((V + K) * K)
        p_M = p_B + V * K
        p_S = states + o_seg * (ROWS * K)
        store_rows(p_S + o_vk, b_S, o_v < ROWS, o_k, ROWS % BV != 0, K, BK)
        tl.debug_barrier()
        if IS_BWD:
            b_S = load_rows(offsets + o_seg * (V * K) + o_vk, o_v < V, o_k, V % BV != 0, K, BK)
        else:
            b_S = load_rows(p_B + o_vk, o_v < V, o_k, True, K, BK)
        for i_k in range(0, K, BS):
            b_s = load_rows(p_S + o_v[:, None] * K + i_k + o_s[None, :], o_v < ROWS, i_k + o_s, ROWS % BV != 0, K, BS)
            if IS_BWD:
                p_slice = p_M + o_k[:, None] * K + i_k + o_s[None, :]
                b_M = tl.trans(load_rows(p_slice, o_k < K, i_k + o_s, K % BK != 0, K, BS))
            else:
                b_M = load_rows(p_M + (i_k + o_s)[:, None] * K + o_k[None, :], i_k + o_s < K, o_k, K % BS != 0, K, BK)
            b_S = tl.dot(b_s, b_M, b_S, input_precision="tf32x3")
    if last is not None:
        store_rows(last + o_state + o_vk, b_S, o_v < ROWS, o_k, ROWS % BV != 0, K, BK)
