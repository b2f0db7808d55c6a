# SPDX-License-Identifier: Apache-2.0
"""T = (I + A)^{-1} of a unit lower triangular [64, 64] matrix by one warpgroup, in blocks of 16x16.

Substitution on the diagonal blocks in float32 (a Neumann series would lose digits to keys that are alike), products of tf32 below
them.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.fragments import corner, flat, lane_address, round_tf32, store_matrix
from cula.ops.cute.common.tiles import F32, I32, TF32

PITCH = 20  # floats a row of a 16x16 block in shared memory: rows of whole 16 bytes, and 8 rows of 8 bytes meet no bank twice
BLOCK_BYTES = 16 * PITCH * 4
# The tensor cores drop the low 13 bits of a float32 operand, on average 0.72 * 2^-11 of it. Given back here, as an exponent, what
# is left is the error of rounding, without an instruction for each.
UNBIASED = math.log2(1.0 + 0.72 * 2.0**-11)


def blocks(n):
    """The layout of n blocks in shared memory."""
    return cute.make_layout((16, 16, n), stride=(PITCH, 1, 16 * PITCH))


def work_of(t, which, n):
    """The n blocks of one of several preparers, that lie one behind the other."""
    return cute.make_tensor(t.iterator + which * (n * 16 * PITCH), blocks(n))


@cute.jit
def inverse_pair(sD: cute.Tensor, first: I32, second: I32, lane: I32):
    """Blocks first and second of sD <- (I + strict lower block)^{-1}, by one warp: in float32, then rounded to tf32.

    Half a warp a block, a lane a column; row i needs x_{i-1} last.
    """
    block, j = sD[None, None, first if lane < 16 else second], lane % 16
    x, row = cute.make_rmem_tensor((16,), F32), cute.make_rmem_tensor((16,), F32)
    for i in cutlass.range_constexpr(16):
        x[i] = F32(1.0) if j == i else F32(0.0)
        if cutlass.const_expr(i > 0):
            cute.autovec_copy(block[i, None], row)
        other = F32(0.0)  # two sums, half the latency
        for m in cutlass.range_constexpr(i):
            if cutlass.const_expr(m % 2 == i % 2):
                other = other - row[m] * x[m]
            else:
                x[i] = x[i] - row[m] * x[m]
        x[i] = x[i] + other
    cute.arch.sync_warp()
    round_tf32(x)
    for i in cutlass.range_constexpr(16):
        block[i, j] = x[i]


@cute.jit
def load_b16(block: cute.Tensor, lane: I32, b: cute.Tensor):
    """b[ci, kb, nb] = block[8 nb + r, 8 kb + 2 c + ci]: the B operand of products with block^T."""
    for nb in cutlass.range_constexpr(2):
        for kb in cutlass.range_constexpr(2):
            pair = cute.make_tensor(b.iterator + 4 * nb + 2 * kb, cute.make_layout((1, 2)))
            cute.autovec_copy(cute.local_tile(block, (1, 2), (8 * nb + lane // 4, 4 * kb + lane % 4)), pair)


@cute.jit
def mm_tf32(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """acc [16, 16] += a b^T, a an accumulator whose columns are the reduction, b from `load_b16`; both rounded.

    The k index inside 8 is permuted alike on both sides (slot c is column 2 c, slot c + 4 column 2 c + 1): a sum does not see it.
    """
    for kb in cutlass.range_constexpr(2):
        x = cute.make_rmem_tensor(((2, 2), 1), F32)  # A's registers run rows first, an accumulator's columns first
        for e in cutlass.range_constexpr(4):
            x[e // 2 + 2 * (e % 2)] = a[e + 4 * kb]
        for nb in cutlass.range_constexpr(2):
            y = cute.make_tensor(b.iterator + 4 * nb + 2 * kb, cute.make_layout((2, 1)))
            d = corner(acc, 4 * nb)
            cute.gemm(mma, d, cute.recast_tensor(x, TF32), cute.recast_tensor(y, TF32), d)


def below(sA, i, j):
    """Block (i, j), j < i, below the diagonal."""
    return sA[None, None, i * (i - 1) // 2 + j]


@cute.jit
def round_block(out: cute.Tensor, cols: cute.Tensor, d: cutlass.Constexpr, by_row: cutlass.Constexpr):
    """out[8 d ..] <- cols[8 d ..], rows r and r + 8 times `by_row`, unless that is None, in the precision of `out`."""
    block = cute.make_rmem_tensor((8,), F32)
    for e in cutlass.range_constexpr(8):
        block[e] = cols[8 * d + e] if cutlass.const_expr(by_row is None) else cols[8 * d + e] * by_row[e // 2 % 2]
    flat(out, 8 * d, 8).store(block.load().to(out.element_type))


@cute.jit
def inverse_columns(
    mma: cute.TiledMma, sA: cute.Tensor, sD: cute.Tensor, wid: I32, lane: I32, out: cute.Tensor, by_row: cutlass.Constexpr
):
    """out[8 d ..] <- block (J, J + d) of T^T for J = wid: T_IJ^T = -(sum_{J <= L < I} T_LJ^T A_IL^T) T_II^T; its rows r and r + 8
    times `by_row` [2], unless that is None.

    A block column a warp, no exchange: each result is in the registers where the next product wants it. tf32 is enough, T is
    rounded to 16 bits in the end; what is in shared memory has been rounded to it.
    """
    r, c = lane // 4, lane % 4
    first, cols = sD[None, None, wid], cute.make_rmem_tensor((32,), F32)
    for e in cutlass.range_constexpr(8):
        cols[e] = first[8 * (e // 4) + 2 * c + e % 2, r + 8 * (e // 2 % 2)]
    flat(cols, 8, 24).fill(0.0)  # never undefined: to the compiler that would be alive from the start
    out.fill(0.0)
    round_block(out, cols, 0, by_row)
    for d in cutlass.range_constexpr(1, 4):
        if wid + d < 4:
            b = cute.make_rmem_tensor(((2,), 2, 2), F32)
            total, last = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), F32)
            total.fill(0.0)
            last.fill(0.0)
            for m in cutlass.range_constexpr(d):
                load_b16(below(sA, wid + d, wid + m), lane, b)
                mm_tf32(mma, total, flat(cols, 8 * m, 8), b)
            load_b16(sD[None, None, wid + d], lane, b)
            round_tf32(total)
            mm_tf32(mma, last, total, b)
            for e in cutlass.range_constexpr(8):
                cols[e + 8 * d] = -last[e]
            round_tf32(flat(cols, 8 * d, 8))
            round_block(out, cols, d, by_row)


@cute.jit
def place_inverse(columns: cute.Tensor, to: cute.Tensor, wid: I32, lane: I32):
    """Our rows of T^T to a tile in shared memory."""
    at, nothing = lane_address(to, wid, lane), cute.make_rmem_tensor((8,), to.element_type)
    nothing.fill(0.0)
    for d in cutlass.range_constexpr(4):
        if wid + d < 4:
            store_matrix(flat(columns, 8 * d, 8), at ^ 32 * (wid + d))
        if d > 0 and wid >= d:
            store_matrix(nothing, at ^ 32 * (wid - d))
