# SPDX-License-Identifier: Apache-2.0
"""How much of a state outlives a chunk: an upper bound on the norm of its transition, which segments go by (`kda_segments.py`).

The transition is S -> M S + B, where M = diag(e^{G_C}) - kr^T T kb = diag(e^{G_C}) - sum_{i <= t} T_ti kr_t kb_i^T. Each term of
the sum has rank one, so that

    |M| <= max_c e^{G_C,c} + sum_{i <= t} |kr_t| |T_ti| |kb_i|

whatever keys, write strengths and gates are. kr, T and kb are taken as the recurrence reads them, in 16 bits. What it rounds in
between, and what is rounded here, is allowed for by the reader. The sum is left in four parts, of which the last has the maximum,
for the reader to add up: no warp waits for another. NaN stays NaN, which no comparison calls forgotten.

With one gate a head, prod_t e^{g_t} max(1, |1 - b_t |k_t|^2|) is the norm where keys are alike, and no bound is below it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.fp16_window import bits_of, from_bits
from cula.ops.cute.common.fragments import flat, lane_address, shared_at
from cula.ops.cute.common.gate import exp2, log2
from cula.ops.cute.common.kda_intra_steps import address
from cula.ops.cute.common.lanes import COLUMN, WARP, sum_over
from cula.ops.cute.common.squares import squares_at
from cula.ops.cute.common.tiles import F16, F32, I32
from cula.ops.cute.kda_abi import BOUND


@cute.jit
def leave_sizes(x: cutlass.Constexpr):
    """|kr_t| and |kb_i| of our rows, to shared memory."""
    kr_at, kb_at = [lane_address(t, x.block_row, x.lane) for t in (x.smem.kr, x.smem.kb_qg[None, None, 0])]
    for which in cutlass.range(2, unroll=1):
        of_type = x.mmas.f16 if cutlass.const_expr(x.variant.dtype is F16) else x.mmas.bf16
        squares = squares_at(of_type, kr_at if which == 0 else kb_at, x.r, x.variant.dtype)
        leave_roots(x, squares, x.block_row, which)


@cute.jit
def leave_roots(x: cutlass.Constexpr, squares: cute.Tensor, block_row: I32, which: I32):
    """One of the two from their squares."""
    smem = x.smem
    if x.c == 0:
        for i in cutlass.range_constexpr(2):
            smem.sizes[16 * block_row + x.r + 8 * i, which] = cute.math.sqrt(squares[i], fastmath=True)


@cute.jit
def bound_by_pairs(x: cutlass.Constexpr, cols: cute.Tensor):
    """sum |kr_t| |T_ti| |kb_i| over the rows i of T^T that `cols` has and all t.

    All rows i together are what the bound has besides the largest decay, which the warps with the fewest blocks add.
    """
    sizes_at = address(x.smem.sizes) + (16 * x.block_row + 2 * x.c) * 4
    y, total = cute.make_rmem_tensor((2,), F32), F32(0.0)
    y.fill(0.0)
    for d in cutlass.range_constexpr(4):
        if x.block_row + d < 4:
            for nb in cutlass.range_constexpr(2):
                kr, block = cute.make_rmem_tensor((2, 1), F32), cute.make_rmem_tensor((4,), F32)
                cute.autovec_copy(shared_at(sizes_at + 64 * d + 32 * nb, F32, 2, 8), kr)
                block.store(flat(cols, 8 * d + 4 * nb, 4).load().to(F32))
                for e in cutlass.range_constexpr(4):
                    y[e // 2] = y[e // 2] + kr[e % 2] * cute.math.absf(block[e])
    for i in cutlass.range_constexpr(2):
        total += y[i] * x.smem.sizes[16 * x.block_row + x.r + 8 * i, 1]
    total = sum_over(WARP, total)
    if x.block_row == 3:
        of, nan = x.smem.bound, {"nan": True}
        total += cute.arch.fmax(cute.arch.fmax(of[0], of[1], **nan), cute.arch.fmax(of[2], of[3], **nan), **nan)
    return total


@cute.jit
def leave_largest_decay(x: cutlass.Constexpr, kept: F32, b: cute.Tensor, size: cute.Tensor, inverse: cute.Tensor):
    """What is known before there are scores, by KEYS and to shared memory: the largest e^{G_C} of the channels. With one gate a
    head all of it, in log2 and of our rows."""
    smem = x.smem
    if cutlass.const_expr(x.variant.is_scalar):
        bound = F32(0.0)
        for i in cutlass.range_constexpr(2):
            eigenvalue = F32(1.0) - b[i] * size[i] * (inverse[i] * inverse[i])
            bound += log2(cute.arch.fmax(F32(1.0), cute.math.absf(eigenvalue), nan=True))
        bound = sum_over(COLUMN, bound)
        if x.lane == 0:
            smem.bound[x.block_row] = bound + smem.sums[x.block_row, 0]
    else:
        largest = cute.arch.warp_redux_sync(bits_of(kept), "max")  # as integers: they are not negative, and NaN is the largest
        if x.lane == 0:
            smem.bound[x.block_row] = from_bits(largest)


@cute.jit
def leave_head_bound(x: cutlass.Constexpr, thread: I32, vec: cute.Tensor):
    """With one gate a head, the product over all rows, as a sum of which it is the only part."""
    bound = x.smem.bound
    if thread < 4:
        whole = exp2(bound[0] + bound[1] + bound[2] + bound[3])
        vec[BOUND + thread] = whole if thread == 0 else F32(0.0)
