# SPDX-License-Identifier: Apache-2.0
"""Pairs of tokens inside a chunk: levels, sums of decays over ranges, and the triangular inverse.

Levels. A score needs `exp(G_t - G_i)` for i < t, G the running sum of the log decay. Exactly one S of 32, 16, 8, 4, 2, 1 has
t in the second and i in the first half of the same aligned block of 2S rows. The factor splits at the middle of that block
into two that are at most 1, so the scores of a level are one masked matrix product, whatever the gate. Where the gate is known
to be bounded (SAFE: about -5 a token, good to -10) the last four levels are one product in blocks of 16 rows, split at half the
block's sum, with exponents of either sign within 8 |g|. The pair t = i has no decay.

The backward takes all levels one by one, whatever the gate.

Ranges. Every exponent is a sum of g over a range of tokens that has one sign, so it is made as a product of g with a matrix of
zeros and ones: no running sums are subtracted from each other, and tensor cores do the adding.
"""

import triton
import triton.language as tl

from .gate import summable_log2_decay
from .tiles import load_channels, tile_mask, tile_mask_t

NUM_SUBS = 4  # sub-blocks of 16 rows


@triton.jit
def level_mask(S: tl.constexpr, C: tl.constexpr):
    """[C, C]: row in the second half, column in the first half, of the same block of 2S."""
    o_r = tl.arange(0, C)[:, None]
    o_c = tl.arange(0, C)[None, :]
    return (o_r // (2 * S) == o_c // (2 * S)) & (o_r % (2 * S) >= S) & (o_c % (2 * S) < S)


# Ranges


@triton.jit
def range_matrix(KIND: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """[C, C] such that row t of its product with g is a sum of g over a range of tokens that starts or ends at t.

    KIND 0: all up to t. -1: all behind t. -2: of the 16 rows around t, half of those up to t minus half of those behind.
    S > 0: between t and the middle of its block of 2S rows, t itself in the second half included.
    """
    o_t = tl.arange(0, C)[:, None]
    o_s = tl.arange(0, C)[None, :]
    if KIND == 0:
        b_m = tl.where(o_s <= o_t, 1.0, 0.0)
    elif KIND == -1:
        b_m = tl.where(o_s > o_t, 1.0, 0.0)
    elif KIND == -2:
        b_m = tl.where(o_s // 16 == o_t // 16, tl.where(o_s <= o_t, 0.5, -0.5), 0.0)
    else:
        middle = o_t // (2 * KIND) * (2 * KIND) + KIND
        b_m = tl.where((o_t >= middle) & (o_s >= middle) & (o_s <= o_t), 1.0, 0.0)
        b_m += tl.where((o_t < middle) & (o_s < middle) & (o_s > o_t), 1.0, 0.0)
    return b_m.to(DT)


@triton.jit
def range_columns(middle, N: tl.constexpr, DT: tl.constexpr):
    """The transpose for tiles that are transposed, [s, t]: ones where s lies between t and the middle of t's block.

    A product x = g R gives every t the sum of g over its range. middle [1, N] or a number: 0 sums from the start of the tile to
    t, N from behind t to its end. The middle of a level is a value here, because the backward's levels are a loop. `range_matrix`
    spells its cases out, because with this one formula the intra-chunk kernel takes up to 6 % more instructions (sm_90).
    """
    o_s = tl.arange(0, N)[:, None]
    o_t = tl.arange(0, N)[None, :]
    return tl.where((o_s >= middle) == (o_s <= o_t), 1.0, 0.0).to(DT)


# Log decays of a tile


@triton.jit
def load_gate_input(g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K: tl.constexpr, BK: tl.constexpr, SCALAR: tl.constexpr):
    """Raw g + dt_bias of a tile, [C, BK] float32, or [C] for one gate a head; g points at the chunk's first token."""
    if SCALAR:
        b_x = tl.load(g + o_t * s_gt, mask=m_t, other=0.0).to(tl.float32)
        if dt_bias is not None:
            b_x += tl.load(dt_bias + i_h).to(tl.float32)
    else:
        m_x = tile_mask(m_t, o_k, K, BK)
        b_x = tl.load(g + o_t[:, None] * s_gt + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
        if dt_bias is not None:
            b_x += load_channels(dt_bias + i_h * K + o_k, o_k, K, BK).to(tl.float32)[None, :]
    return b_x


@triton.jit
def load_decay(
    g, s_gt, dt_bias, a, lower_bound, i_h, o_k, o_t, m_t,
    K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, SCALAR: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """log2 decays of rows o_t and channels o_k, [BC, BK]; rows past the sequence and channels past K decay nothing."""
    b_x = load_gate_input(g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K, BK, SCALAR)
    b_g2 = summable_log2_decay(b_x, a, lower_bound, GATE)
    if SCALAR:
        b_g2 = tl.broadcast_to(tl.where(m_t, b_g2, 0.0)[:, None], [BC, BK])
    else:
        b_g2 = tl.where(tile_mask(m_t, o_k, K, BK), b_g2, 0.0)
    return b_g2


@triton.jit
def load_gate_input_t(g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K: tl.constexpr, BK: tl.constexpr, SCALAR: tl.constexpr):
    """`load_gate_input`, transposed: [BK, C], or [1, C] for one gate a head."""
    if SCALAR:
        b_x = tl.load(g + o_t * s_gt, mask=m_t, other=0.0).to(tl.float32)[None, :]
        if dt_bias is not None:
            b_x += tl.load(dt_bias + i_h).to(tl.float32)
    else:
        m_x = tile_mask_t(m_t, o_k, K, BK)
        b_x = tl.load(g + o_k[:, None] + o_t[None, :] * s_gt, mask=m_x, other=0.0).to(tl.float32)
        if dt_bias is not None:
            b_x += load_channels(dt_bias + i_h * K + o_k, o_k, K, BK).to(tl.float32)[:, None]
    return b_x


@triton.jit
def load_decay_t(
    g, s_gt, dt_bias, a, lower_bound, i_h, o_k, o_t, m_t,
    K: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, SCALAR: tl.constexpr, GATE: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """`load_decay`, transposed: [BK, BC]."""
    b_x = load_gate_input_t(g, s_gt, dt_bias, i_h, o_k, o_t, m_t, K, BK, SCALAR)
    b_g = summable_log2_decay(b_x, a, lower_bound, GATE)
    b_g = tl.where(m_t[None, :] if SCALAR else tile_mask_t(m_t, o_k, K, BK), b_g, 0.0)
    return tl.broadcast_to(b_g, [BK, BC]).to(DT)


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
