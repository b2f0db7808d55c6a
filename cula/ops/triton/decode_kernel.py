# SPDX-License-Identifier: Apache-2.0
"""The decode kernel; `decode.py` says what it computes and how its tiles lie.

The tile S of a state is [BV, BC] or cut, [BR, NC, NR, BC]; accordingly a vector over K is [BC] or [BR, NC, 1, BC], and what there
is one of for each row [BV] or [BR, NR].
"""

import triton
import triton.language as tl

from .gate import LOG2_E, activate_beta, gate_strength, inverse_norm, log2_decay
from .launch import kernel


@triton.jit
def is_null(slot, NULL_IS_NONPOSITIVE: tl.constexpr):
    return slot <= 0 if NULL_IS_NONPOSITIVE else slot < 0


@triton.jit
def load_tile(p, m_s, IS_WHOLE: tl.constexpr):
    """A tile of a state in fp32; zeros past its edges."""
    if IS_WHOLE:
        return tl.load(p).to(tl.float32)
    else:
        return tl.load(p, mask=m_s, other=0.0).to(tl.float32)


@triton.jit
def store_tile(p, b_s, m_s, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        tl.store(p, b_s.to(p.dtype.element_ty))
    else:
        tl.store(p, b_s.to(p.dtype.element_ty), mask=m_s)


@triton.jit
def over_k(b_x):
    """The sum over K. Pieces first, which are in registers."""
    if len(b_x.shape) == 1:
        return tl.sum(b_x, axis=0)
    elif len(b_x.shape) == 2:
        return tl.sum(b_x, axis=1)
    else:
        return tl.sum(tl.sum(b_x, axis=1), axis=2)


@triton.jit
def across(b_x):
    """A vector over K, to meet S."""
    return b_x[None, :] if len(b_x.shape) == 1 else b_x


@triton.jit
def down(b_x):
    """What there is one of for each row, or a sum over K of a vector, to meet S or a vector."""
    if len(b_x.shape) == 0:
        return b_x
    elif len(b_x.shape) == 1:
        return b_x[:, None]
    else:
        return b_x[:, None, :, None]


@triton.jit
def tile_offsets(i_v, NC: tl.constexpr, NR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PER_LANE: tl.constexpr):
    """Channels of K and of V that this program has."""
    BV: tl.constexpr = NR * BR
    if NC * BR > 1:
        # The same numbers as arange's, but the compiler sees no more than PER_LANE in a row and gives a lane no more.
        o_c = tl.arange(0, BC) // PER_LANE * PER_LANE + tl.arange(0, BC) % PER_LANE
        o_k = tl.arange(0, NC)[None, :, None, None] * BC + o_c[None, None, None, :]
        o_k = tl.broadcast_to(o_k, [BR, NC, 1, BC])
        o_v = i_v * BV + tl.arange(0, NR)[None, :] * BR + tl.arange(0, BR)[:, None]  # [BR, NR]
    else:
        o_k = tl.arange(0, BC)
        o_v = i_v * BV + tl.arange(0, BV)
    return o_k, o_v


@triton.jit
def load_gate(g, A_log, dt_bias, A_log_strides, dt_bias_strides, i_h, o_k, m_k, HAS_SCALAR_GATE: tl.constexpr):
    """Raw g and dt_bias of one token, over K or one number, and exp(A_log); g points at the token. A_log and dt_bias may have any
    of the dtypes that models keep them in."""
    a = 1.0
    if A_log is not None:
        a = gate_strength(A_log, i_h * A_log_strides[0])
    b_bias = 0.0
    if HAS_SCALAR_GATE:
        b_g = tl.load(g)
        if dt_bias is not None:
            b_bias = tl.load(dt_bias + i_h * dt_bias_strides[0]).to(tl.float32)
    else:
        b_g = tl.load(g + o_k, mask=m_k, other=0.0)
        if dt_bias is not None:
            p_bias = dt_bias + i_h * dt_bias_strides[0] + o_k * dt_bias_strides[1]
            b_bias = tl.load(p_bias, mask=m_k, other=0.0).to(tl.float32)
    return b_g, b_bias, a


@triton.jit
def queries_and_keys(b_q, b_k, scale, USE_L2_NORM: tl.constexpr):
    """q (times scale) and k of one token in fp32, normalised, and their product."""
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    if USE_L2_NORM:
        b_q *= down(inverse_norm(over_k(b_q * b_q)))
        b_k *= down(inverse_norm(over_k(b_k * b_k)))
    b_q *= scale
    return b_q, b_k, over_k(b_k * b_q)


@triton.jit
def row_offset(strides, i_n, first, cu):
    """Where the tokens of a row begin: `first` counts the tokens before it where rows are ragged."""
    return i_n * strides[0] if cu is None else first * strides[1]


@kernel(floats="scale lower_bound", any_address="indices beta A_log decay accepted kept_rows cu")
def decode_kernel(
    q, k, v, pool, indices, g, beta, A_log, dt_bias, decay, accepted, kept, kept_rows, cu, o,
    q_strides, k_strides, v_strides, pool_strides, indices_strides, g_strides, beta_strides, A_log_strides, dt_bias_strides,
    decay_strides, accepted_strides, kept_strides, kept_rows_strides, cu_strides, o_strides, scale, lower_bound,
    T: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    NC: tl.constexpr, NR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PER_LANE: tl.constexpr,
    GATE: tl.constexpr, HAS_SCALAR_GATE: tl.constexpr, HAS_TOKEN_INDICES: tl.constexpr, USE_L2_NORM: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr, BETA_MAX: tl.constexpr, NULL_IS_NONPOSITIVE: tl.constexpr, COMMIT: tl.constexpr,
    STATE_IS_KV: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """One (row, value head, V block). `decay` given: Lightning; otherwise KDA."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    BV: tl.constexpr = NR * BR
    NV: tl.constexpr = (V + BV - 1) // BV
    IS_WHOLE: tl.constexpr = (NC * BC == K) and (V % BV == 0)
    i_v, i_nh = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_h = i_nh % HV
    i_n = (i_nh // HV).to(tl.int64)
    i_qk = i_h // (HV // H)
    o_k, o_v = tile_offsets(i_v, NC, NR, BR, BC, PER_LANE)
    m_k, m_v = o_k < K, o_v < V
    m_s = down(m_v) & across(m_k)
    first = i_n * 0
    num_tokens = T
    if cu is not None:
        first = tl.load(cu + i_n * cu_strides[0]).to(tl.int64)
        num_tokens = tl.minimum((tl.load(cu + (i_n + 1) * cu_strides[0]) - first).to(tl.int32), T)
        if num_tokens <= 0:
            return
    p_o = o + row_offset(o_strides, i_n, first, cu) + i_h * o_strides[2] + o_v * o_strides[3]

    num_accepted = 0
    if accepted is not None:
        num_accepted = tl.load(accepted + i_n * accepted_strides[0]).to(tl.int32)
    if indices is None:
        slot = i_n
    else:
        p_index = indices + i_n * indices_strides[0]
        if HAS_TOKEN_INDICES and accepted is not None:
            slot = tl.load(p_index + tl.maximum(num_accepted - 1, 0) * indices_strides[1]).to(tl.int64)
        else:
            slot = tl.load(p_index).to(tl.int64)
        if is_null(slot, NULL_IS_NONPOSITIVE):
            for i_t in range(num_tokens):
                tl.store(p_o + i_t * o_strides[1], tl.zeros(o_v.shape, dtype=o.dtype.element_ty), mask=m_v)
            return

    # A slot is contiguous, [V, K] or [K, V]; the kept states may lie anyhow.
    o_s = (down(o_v) + across(o_k) * V) if STATE_IS_KV else (down(o_v) * K + across(o_k))
    pool += i_h * (V * K)
    if kept is None:
        b_s = load_tile(pool + slot * pool_strides[0] + o_s, m_s, IS_WHOLE)
    else:
        if STATE_IS_KV:
            o_kept = down(o_v) * kept_strides[4] + across(o_k) * kept_strides[3]
        else:
            o_kept = down(o_v) * kept_strides[3] + across(o_k) * kept_strides[4]
        i_kept = i_n
        starts_from_kept = num_accepted > 0
        m_kept = m_s
        if kept_rows is not None:
            i_kept = tl.load(kept_rows + i_n * kept_rows_strides[0]).to(tl.int64)
            starts_from_kept = starts_from_kept & (i_kept >= 0)
            m_kept = m_s & (i_kept >= 0)
        kept += i_kept * kept_strides[0] + i_h.to(tl.int64) * kept_strides[2]
        if starts_from_kept:
            b_s = load_tile(kept + tl.cast(num_accepted - 1, tl.int64) * kept_strides[1] + o_kept, m_s, IS_WHOLE)
        else:
            b_s = load_tile(pool + slot * pool_strides[0] + o_s, m_s, IS_WHOLE)

    p_q = q + row_offset(q_strides, i_n, first, cu) + i_qk * q_strides[2] + o_k
    p_k = k + row_offset(k_strides, i_n, first, cu) + i_qk * k_strides[2] + o_k
    p_v = v + row_offset(v_strides, i_n, first, cu) + i_h * v_strides[2] + o_v
    for i_t in range(num_tokens):
        b_q = tl.load(p_q + i_t * q_strides[1], mask=m_k, other=0.0)
        b_k = tl.load(p_k + i_t * k_strides[1], mask=m_k, other=0.0)
        b_v = tl.load(p_v + i_t * v_strides[1], mask=m_v, other=0.0)
        if decay is not None:
            b_decay = tl.load(decay + i_h * decay_strides[0])
        else:
            p_g = g + row_offset(g_strides, i_n, first, cu) + i_t * g_strides[1] + i_h * g_strides[2]
            b_g, b_bias, a = load_gate(p_g, A_log, dt_bias, A_log_strides, dt_bias_strides, i_h, o_k, m_k, HAS_SCALAR_GATE)
            b_beta = tl.load(beta + row_offset(beta_strides, i_n, first, cu) + i_t * beta_strides[1] + i_h * beta_strides[2])

        b_q, b_k, b_kq = queries_and_keys(b_q, b_k, scale, USE_L2_NORM)
        b_u = b_v.to(tl.float32)
        if decay is not None:
            b_s *= tl.exp2(-b_decay * LOG2_E)
        else:
            b_e = tl.exp2(log2_decay(b_g.to(tl.float32) + b_bias, a, lower_bound, GATE))
            b_s *= b_e if HAS_SCALAR_GATE else across(b_e)
            b_u = activate_beta(b_beta.to(tl.float32), USE_BETA_SIGMOID, BETA_MAX) * (b_u - over_k(b_s * across(b_k)))
        b_o = over_k(b_s * across(b_q)) + b_u * b_kq
        b_s += down(b_u) * across(b_k)
        tl.store(p_o + i_t * o_strides[1], b_o.to(o.dtype.element_ty), mask=m_v)
        if kept is not None:
            store_tile(kept + tl.cast(i_t, tl.int64) * kept_strides[1] + o_kept, b_s, m_kept, IS_WHOLE and kept_rows is None)
        if COMMIT and HAS_TOKEN_INDICES:
            slot_t = tl.load(indices + i_n * indices_strides[0] + i_t * indices_strides[1]).to(tl.int64)
            if not is_null(slot_t, NULL_IS_NONPOSITIVE):
                store_tile(pool + slot_t * pool_strides[0] + o_s, b_s, m_s, IS_WHOLE)
    if COMMIT and not HAS_TOKEN_INDICES:
        store_tile(pool + slot * pool_strides[0] + o_s, b_s, m_s, IS_WHOLE)
