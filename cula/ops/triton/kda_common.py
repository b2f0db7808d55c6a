# SPDX-License-Identifier: Apache-2.0
"""Device functions that the KDA kernels share: where a chunk lies, the gate, levels of pairs, the triangular inverse.

Levels. A score needs `exp(G_t - G_i)` for i < t, G the running sum of the log decay. Exactly one S of 32, 16, 8, 4, 2, 1 has
t in the second and i in the first half of the same aligned block of 2S rows. The factor splits at the middle of that block
into two that are at most 1, so the scores of a level are one masked matrix product, whatever the gate. Where the gate is known
to be bounded (SAFE: about -5 a token, good to -10) the last four levels are one product in blocks of 16 rows, split at half the
block's sum, with exponents of either sign within 8 |g|. The pair t = i has no decay.

The backward takes all levels one by one, whatever the gate.
All decays are in log2 units (suffix 2), so that each costs a single ex2.
"""

import triton
import triton.language as tl

CHUNK = 64
NUM_SUBS = 4  # sub-blocks of 16 rows
LOG2_E = tl.constexpr(1.4426950408889634)
# 2^-160 is zero in float32: a stronger decay forgets no more, but would swamp the running sum (-inf included).
MIN_LOG2 = tl.constexpr(-160.0)
NORM_EPS = tl.constexpr(1e-6)


# Where things lie


@triton.jit
def span_table_kernel(cu_seqlens, span_seq, span_base, N, capacity, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Cut every sequence into spans of SPAN tokens: `span_base[n]` is the first id of sequence n, `span_seq[id]` its n.

    One program a sequence. Ids beyond the last one get -1, so that kernels launched on the host's upper bound exit.
    """
    i_n = tl.program_id(0)
    o_b = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.int32)
    for i in range(0, i_n, BLOCK):
        m_b = i + o_b < i_n
        b_lo = tl.load(cu_seqlens + i + o_b, mask=m_b, other=0)
        b_hi = tl.load(cu_seqlens + i + o_b + 1, mask=m_b, other=0)
        b_sum += (b_hi - b_lo + SPAN - 1) // SPAN
    base = tl.sum(b_sum)
    end = base + (tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n) + SPAN - 1) // SPAN
    tl.store(span_base + i_n, base)
    for i in range(base, end, BLOCK):
        tl.store(span_seq + i + o_b, tl.zeros([BLOCK], tl.int32) + i_n, mask=i + o_b < end)
    if i_n == N - 1:
        tl.store(span_base + N, end)
        for i in range(end, capacity, BLOCK):
            tl.store(span_seq + i + o_b, tl.full([BLOCK], -1, tl.int32), mask=i + o_b < capacity)


@triton.jit
def chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED: tl.constexpr, C: tl.constexpr):
    """Batch row, first token in it, and number of tokens of chunk i_c; no tokens for an id beyond the last chunk."""
    if IS_PACKED:
        i_n = tl.load(chunk_seq + i_c)
        i_s = tl.maximum(i_n, 0)
        t0 = tl.load(cu_seqlens + i_s) + (i_c - tl.load(chunk_base + i_s)) * C
        num = tl.where(i_n >= 0, tl.minimum(tl.load(cu_seqlens + i_s + 1) - t0, C), 0)
        i_b = i_c * 0
    else:
        i_b = i_c // NT
        t0 = (i_c - i_b * NT) * C
        num = tl.minimum(T - t0, C)
    return i_b.to(tl.int64), t0.to(tl.int64), num


@triton.jit
def work_span(
    i_w,
    cu_seqlens,
    chunk_base,
    seg_seq,
    seg_base,
    T,
    NT,
    NS,
    seg,
    IS_PACKED: tl.constexpr,
    HAS_SEG: tl.constexpr,
    C: tl.constexpr,
):
    """A chain of chunks: sequence i_w whole, or segment i_w of `seg` chunks.

    Returns batch row, first token of the sequence in it, its length, first and last + 1 chunk, id of its chunk 0, alive.
    """
    alive = True
    first = i_w * 0
    if HAS_SEG:
        if IS_PACKED:
            i_n = tl.load(seg_seq + i_w)
            alive = i_n >= 0
            i_n = tl.maximum(i_n, 0)
            first = (i_w - tl.load(seg_base + i_n)) * seg
        else:
            i_n = i_w // NS
            first = (i_w - i_n * NS) * seg
    else:
        i_n = i_w
    if IS_PACKED:
        bos = tl.load(cu_seqlens + i_n)
        length = tl.load(cu_seqlens + i_n + 1) - bos
        base = tl.load(chunk_base + i_n)
        i_b = i_n * 0
    else:
        bos = i_n * 0
        length = bos + T
        base = i_n * NT
        i_b = i_n
    last = (length + C - 1) // C
    if HAS_SEG:
        last = tl.minimum(last, first + seg)
    return i_b.to(tl.int64), bos.to(tl.int64), length, first, last, base.to(tl.int64), alive


# Gate, beta, norm


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x), by a reciprocal root and its square: a division checks ranges that cannot occur."""
    b_r = tl.rsqrt(1.0 + tl.exp2(-LOG2_E * b_x))
    return b_r * b_r


@triton.jit
def gate_log2(b_x, a, lower_bound, GATE: tl.constexpr):
    """log2 of the decay. b_x is the log decay (GATE "log"), or raw g + dt_bias; a = exp(A_log)."""
    if GATE == "softplus":
        b_e = tl.exp(tl.minimum(b_x, 20.0))
        b_log1p = tl.where(b_e < 0.01, b_e * (1.0 - b_e * (0.5 - b_e * 0.33333333)), tl.log(1.0 + b_e))
        b_g = -a * tl.where(b_x > 20.0, b_x, b_log1p)
    elif GATE == "bounded":
        b_g = lower_bound * sigmoid(a * b_x)
    else:
        b_g = b_x
    return tl.maximum(b_g * LOG2_E, MIN_LOG2)


@triton.jit
def gate_grad(b_dg, b_x, a, lower_bound, GATE: tl.constexpr):
    """From the gradient of the natural log decay: the gradient of raw g (and dt_bias), and each token's share of dA_log."""
    if GATE == "softplus":
        b_dx = -a * sigmoid(b_x) * b_dg
        b_da = b_dg * gate_log2(b_x, a, lower_bound, GATE) / LOG2_E
    elif GATE == "bounded":
        b_s = sigmoid(a * b_x)
        b_dx = lower_bound * a * b_s * (1.0 - b_s) * b_dg
        b_da = b_dx * b_x
    else:
        b_dx = b_dg
        b_da = b_dg * 0.0
    return b_dx, b_da


@triton.jit
def load_gate_input(g, s_gt, dt_bias, i_h, o_k, o_c, m_c, K: tl.constexpr, SCALAR: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Raw g + dt_bias of a tile, [C, BK] float32, or [C] for one gate a head; g points at the chunk's first token."""
    if SCALAR:
        b_x = tl.load(g + o_c * s_gt, mask=m_c, other=0.0).to(tl.float32)
        if HAS_BIAS:
            b_x += tl.load(dt_bias + i_h)
    else:
        b_x = tl.load(g + o_c[:, None] * s_gt + o_k[None, :], mask=m_c[:, None], other=0.0).to(tl.float32)
        if HAS_BIAS:
            b_x += tl.load(dt_bias + i_h * K + o_k)[None, :]
    return b_x


@triton.jit
def decay_log2(b_x, a, lower_bound, m_c, C: tl.constexpr, BK: tl.constexpr, SCALAR: tl.constexpr, GATE: tl.constexpr):
    """log2 decays of a tile [C, BK]; rows past the sequence decay nothing."""
    b_g2 = gate_log2(b_x, a, lower_bound, GATE)
    if SCALAR:
        b_g2 = tl.broadcast_to(tl.where(m_c, b_g2, 0.0)[:, None], [C, BK])
    else:
        b_g2 = tl.where(m_c[:, None], b_g2, 0.0)
    return b_g2


@triton.jit
def load_decay(
    g, s_gt, dt_bias, a, lower_bound, i_h, o_k, o_t, m_t,
    K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, SCALAR: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """log2 decays of rows o_t and channels o_k, [BC, BK]."""
    b_x = load_gate_input(g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K, SCALAR, dt_bias is not None)
    return decay_log2(b_x, a, lower_bound, m_t, BC, BK, SCALAR, GATE)


@triton.jit
def activate_beta(b_beta, SIGMOID: tl.constexpr, BETA_MAX: tl.constexpr):
    if SIGMOID:
        b_beta = BETA_MAX * tl.sigmoid(b_beta)
    return b_beta


@triton.jit
def inverse_norm(x, s_xt, o_c, m_c, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr):
    """1 / sqrt(sum x^2 + eps) of each row, [C]; ones without NORM."""
    b_r = tl.full([C], 1.0, tl.float32)
    if NORM:
        b_sum = tl.zeros([C], tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            b_x = tl.load(x + o_c[:, None] * s_xt + o_k[None, :], mask=m_c[:, None], other=0.0).to(tl.float32)
            b_sum += tl.sum(b_x * b_x, axis=1)
        b_r = 1.0 / tl.sqrt(b_sum + NORM_EPS)
    return b_r


# Levels


@triton.jit
def level_mask(S: tl.constexpr, C: tl.constexpr):
    """[C, C]: row in the second half, column in the first half, of the same block of 2S."""
    o_r = tl.arange(0, C)[:, None]
    o_c = tl.arange(0, C)[None, :]
    return (o_r // (2 * S) == o_c // (2 * S)) & (o_r % (2 * S) >= S) & (o_c % (2 * S) < S)


# Triangular inverse


@triton.jit
def round_tf32(b_x):
    """Round to the 10 mantissa bits a tf32 product keeps (the hardware would truncate: three times the error)."""
    b_i = b_x.to(tl.int32, bitcast=True)
    return ((b_i + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def merge_dot(b_x, b_y, DT: tl.constexpr, IP: tl.constexpr):
    if DT == tl.float32 and IP == "tf32":  # noqa: SIM300  (constexprs, not a Yoda condition)
        b_x = round_tf32(b_x)
        b_y = round_tf32(b_y)
    return tl.dot(b_x.to(DT), b_y.to(DT), input_precision=IP)


@triton.jit
def unit_lower_inverse(b_A, C: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr):
    """(I + A)^-1 of a strictly lower A [C, C], float32. Operands of its products are DT: float32 or float16 (not bfloat16).

    The 4x4 diagonal blocks D by (I - D)(I + D^2), which is exact since D^4 = 0 (on larger blocks the powers blow up for
    correlated keys); then blocks of 2S from blocks of S, X <- X - X A_S X with A_S the lower left corners: two products a level.
    """
    o_c = tl.arange(0, C)
    b_D = tl.where(o_c[:, None] // 4 == o_c[None, :] // 4, b_A, 0.0)
    b_X = tl.where(o_c[:, None] == o_c[None, :], 1.0, 0.0) - b_D
    b_X += merge_dot(b_X, merge_dot(b_D, b_D, DT, IP), DT, IP)
    for i_s in tl.static_range(2, 6):
        b_X -= merge_dot(merge_dot(b_X, tl.where(level_mask(1 << i_s, C), b_A, 0.0), DT, IP), b_X, DT, IP)
    return b_X
