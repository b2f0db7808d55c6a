# SPDX-License-Identifier: Apache-2.0
"""Products of a tile's rows, by a warp for sixteen of them, and their squares: the diagonal of x x^T, whose operands are the same
registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.fragments import as_a, corner, load_matrix
from cula.ops.cute.common.tiles import F32, I32

HALF = 8192  # bytes between the halves of a [64, 128] tile


@cute.jit
def add_products(mma: cute.TiledMma, products: cute.Tensor, rows: cute.Tensor, others: cute.Tensor):
    """products <- + x y^T over sixteen channels of our rows and sixteen others, in two halves of eight others."""
    for i in cutlass.range_constexpr(2):
        columns = cute.make_rmem_tensor(((2, 2), 1), rows.element_type)  # the same registers
        for e in cutlass.range_constexpr(4):
            columns[e] = others[e % 2 + 2 * i + 4 * (e // 2)]
        block = corner(products, 4 * i)
        cute.gemm(mma, block, as_a(rows), columns, block)


@cute.jit
def products_at(mma: cute.TiledMma, own_at: I32, others_at: I32, dtype: cutlass.Constexpr):
    """Products of our rows of a tile with sixteen others, all 128 channels, 8 values [ci, ri, hi]: of row r + 8 ri with the other
    row 8 hi + 2 c + ci. Addresses are the `lane_address` of rows."""
    products = cute.make_rmem_tensor(((2, 2), 1, 2), F32)
    products.fill(0.0)
    for half in cutlass.range_constexpr(2):
        for s in cutlass.range_constexpr(4):
            rows, others = [load_matrix((at ^ 32 * s) + HALF * half, dtype) for at in (own_at, others_at)]
            add_products(mma, products, rows, others)
    return products


@cute.jit
def diagonal_of(squares: cute.Tensor, r: I32):
    """The squares of rows r and r + 8: column r of row r is with lane 4 r + r / 2."""
    size = cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        mine = squares[6 * i + 1] if r % 2 == 1 else squares[6 * i]
        size[i] = cute.arch.shuffle_sync(mine, 4 * r + r // 2)
    return size


@cute.jit
def squares_at(mma: cute.TiledMma, own_at: I32, r: I32, dtype: cutlass.Constexpr):
    """Squares of our rows r and r + 8 of a tile, all 128 channels. `own_at` is the `lane_address` of our rows."""
    squares = cute.make_rmem_tensor(((2, 2), 1, 2), F32)
    squares.fill(0.0)
    for half in cutlass.range(2, unroll=1):
        for rows in [load_matrix((own_at ^ 32 * s) + HALF * half, dtype) for s in range(4)]:
            add_products(mma, squares, rows, rows)
    return diagonal_of(squares, r)
