# SPDX-License-Identifier: Apache-2.0
"""What fp16 can hold, on Hopper: rows of a state in the accumulators of a warpgroup (`common/fp16_window.py` has the idea).

A thread has two rows of S^T, [2, columns], and `factor` [2], the powers of two that they are scaled by.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.fp16_window import inverse_of, is_outside, move_inside
from cula.ops.cute.common.fragments import widen
from cula.ops.cute.common.lanes import ROW, largest_over
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, rows_and_columns

SAFELY_LOW, SAFELY_HIGH = 2.0**-13, 2.0**13  # of sums of squares: a row between them is not far outside the window, if at all


@cute.jit
def scale_rows(S: cute.Tensor, factor: cute.Tensor):
    for j in cutlass.range_constexpr(cute.size(S, mode=[1])):
        S[0, j] = S[0, j] * factor[0]
        S[1, j] = S[1, j] * factor[1]


@cute.jit
def unscale_rows(S: cute.Tensor, factor: cute.Tensor):
    """Divide by powers of two, exactly."""
    back = cute.make_rmem_tensor((2,), F32)
    for a in cutlass.range_constexpr(2):
        back[a] = inverse_of(factor[a])
    scale_rows(S, back)


@cute.jit
def largest(S: cute.Tensor, top: cute.Tensor):
    """top[row] <- max(top[row], |S[row, :]|), of the columns that this thread holds."""
    for a in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(cute.size(S, mode=[1])):
            top[a] = cute.arch.fmax(top[a], cute.arch.fmax(S[a, j], -S[a, j]))


@cute.jit
def over_row(x: F32):
    """The largest of the four lanes that hold a row."""
    return largest_over(ROW, x)


@cute.jit
def squares(x: cute.Tensor, sums: cute.Tensor, dtype: cutlass.Constexpr):
    """sums[row] <- the sum of squares of the columns that this thread holds, roughly: in 16 bits, where too much is infinite. A
    quarter of the work of finding the largest."""
    pairs, part = cute.recast_tensor(x, I32), cute.make_rmem_tensor((4,), I32)  # of [columns, row]; two sums a row
    part.fill(0)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        if cutlass.const_expr(dtype is F16):
            part[i % 4] = cute.arch.fma_packed_f16x2(pairs[i], pairs[i], part[i % 4])
        else:
            part[i % 4] = cute.arch.fma_packed_bf16x2(pairs[i], pairs[i], part[i % 4])
    of_column = cute.recast_tensor(part, dtype)  # [column, row, sum]
    for a in cutlass.range_constexpr(2):
        first, second = [of_column[2 * a + i].to(F32) + of_column[2 * a + i + 1].to(F32) for i in (0, 4)]
        sums[a] = first + second


@cute.jit
def is_safely_inside(half: cute.Tensor, entering: cutlass.Constexpr, factor: cute.Tensor):
    """Whether no row of the warp needs a closer look: by the squares of S, rounded to fp16, and of what enters, in bf16 and not
    scaled."""
    (sums, of_v), is_low = [cute.make_rmem_tensor((2,), F32) for _ in range(2)], cutlass.Boolean(False)
    squares(half, sums, F16)
    if cutlass.const_expr(entering is not None):
        squares(entering, of_v, BF16)
        for a in cutlass.range_constexpr(2):
            sums[a] += of_v[a] * factor[a] * factor[a]
    for a in cutlass.range_constexpr(2):
        lanes = cute.arch.vote_ballot_sync(sums[a] >= F32(SAFELY_LOW))  # of the four of a row one is enough
        lanes = lanes | (lanes >> 1)
        lanes = lanes | (lanes >> 2)
        is_low = is_low or (lanes & 0x11111111) != 0x11111111
    is_high = not (sums[0] <= F32(SAFELY_HIGH) and sums[1] <= F32(SAFELY_HIGH))
    return not (cute.arch.vote_any_sync(is_high) or is_low)


@cute.jit
def scale_into_range(S: cute.Tensor, entering: cutlass.Constexpr, factor: cute.Tensor):
    """Scale rows of S that, or whose part of what enters, have left what fp16 holds well (`common/fp16_window.py`)."""
    top, move = [cute.make_rmem_tensor((2,), F32) for _ in range(2)]
    top.fill(0.0)
    if cutlass.const_expr(entering is not None):
        wide = cute.make_rmem_tensor_like(entering, F32)
        widen(entering, wide)
        largest(rows_and_columns(wide), top)
        for a in cutlass.range_constexpr(2):
            top[a] = top[a] * factor[a]
    largest(S, top)
    for a in cutlass.range_constexpr(2):
        top[a] = over_row(top[a])
        move[a] = move_inside(top[a], factor[a]) if is_outside(top[a], factor[a]) else F32(1.0)
        factor[a] = factor[a] * move[a]
    scale_rows(S, move)


@cute.jit
def keep_in_range(accS: cute.Tensor, half: cute.Tensor, entering: cutlass.Constexpr, factor: cute.Tensor):
    """S, and it rounded to fp16, such that fp16 holds it well, and so v with which it is to meet."""
    if not is_safely_inside(half, entering, factor):
        scale_into_range(rows_and_columns(accS), entering, factor)
        half.store(accS.load().to(F16))
