# SPDX-License-Identifier: Apache-2.0
"""Blackwell, rows of a matrix with a thread each: pieces of them in registers, columns of tiles, what fp16 can hold."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.fp16_window import is_outside, move_inside
from cula.ops.cute.common.fragments import shared_at
from cula.ops.cute.common.tiles import F32, I32


@cute.jit
def afresh(thread: I32):
    """Its number in its warpgroup, which the compiler does not know: what follows from it, addresses and masks, is not kept in
    registers around a loop."""
    return cute.arch.shuffle_sync(thread, cute.arch.lane_idx()) & 127


def rows_at(t, at, r, c, width=1):
    """Columns c .. c + width - 1 of rows r, r + 8, ... of the [64, 128] tile number `at` of t, swizzled by 128 bytes: [width, 8].

    The swizzle exchanges pieces of 8 elements by a row's place r among eight, so that one address serves all of these.
    """
    plain = cute.recast_ptr(t.iterator, dtype=t.element_type)
    start = plain + (at * (64 * 128) + c // 64 * (64 * 64) + 64 * r + (c % 64 ^ 8 * r))
    return cute.make_tensor(start.align(2 * width), cute.make_layout((width, 8), stride=(1, 512)))


def row_of(t, at, r):
    """Row r of the tile number `at` of t [rows, columns, tiles], swizzled by 128 bytes, as pieces of 8 elements.

    Within 64 columns the swizzle exchanges pieces by a row's place among eight: so eight addresses serve all of them.
    """
    rows, columns = (cute.size(n) for n in t.shape[:2])
    row = cute.recast_ptr(t.iterator, dtype=t.element_type) + (at * (rows * columns) + 64 * r)
    starts = [row + (c // 64 * (64 * rows) + (c % 64 ^ 8 * (r % 8))) for c in range(0, columns, 8)]
    return [cute.make_tensor(start.align(16), cute.make_layout(8)) for start in starts]


def put_row(pieces_of_row, x):
    """Registers to some pieces of a row."""
    for i, to in enumerate(pieces_of_row):
        cute.autovec_copy(cute.make_tensor(x.iterator + 8 * i, cute.make_layout(8)), to)


def address_of_row(t, at, r):
    """Where row r of the tile number `at` of t [rows, columns, tiles], 16 bits, swizzled by 128 bytes, is in shared memory.

    `piece_address` has its pieces of 16 bytes. So a row costs one register, which changes with the tile, and not one for each
    piece, which the compiler would make before a loop over tiles and keep.
    """
    rows, columns = (cute.size(n) for n in t.shape[:2])
    return I32(t.iterator.toint()) + at * (2 * rows * columns) + 128 * r + 16 * (r % 8)


def piece_address(t, of_row, p):
    """Of piece p of a row."""
    return (of_row ^ 16 * (p % 8)) + 128 * cute.size(t.shape[0]) * (p // 8)


def address_of_column(t, at, c):
    """The same of column c."""
    rows, columns = (cute.size(n) for n in t.shape[:2])
    return I32(t.iterator.toint()) + at * (2 * rows * columns) + c // 64 * (128 * rows) + 2 * (c % 64)


def entry_at(of_column, row, dtype):
    """What a column has in a row."""
    return shared_at((of_column ^ 16 * (row % 8)) + 128 * row, dtype, 1, 2)


def pieces(x):
    """Registers by 32, as they are stored. Work goes from piece to piece, so that few are alive at a time."""
    return [cute.make_tensor(x.iterator + 32 * p, cute.make_layout(32)) for p in range(cute.size(x) // 32)]


@cute.jit
def rounded(x: cute.Tensor, dtype: cutlass.Constexpr):
    """A piece in 16 bits."""
    half = cute.make_rmem_tensor((32,), dtype)
    half.store(x.load().to(dtype))
    return half


@cute.jit
def residue(x: cute.Tensor, dtype: cutlass.Constexpr):
    """x <- what rounding to 16 bits leaves of it."""
    x.store(x.load() - x.load().to(dtype).to(F32))


@cute.jit
def largest(x: cute.Tensor, top: F32):
    """max(top, |x|)"""
    tops = cute.make_rmem_tensor((4,), F32)
    tops.fill(top)
    for j in cutlass.range_constexpr(cute.size(x)):
        y = x[j].to(F32)
        tops[j % 4] = cute.arch.fmax(tops[j % 4], cute.arch.fmax(y, -y))
    return cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))


@cute.jit
def largest_of_columns(t: cute.Tensor, at: I32, left: I32, thread: I32):
    """max |column `thread`| of the first `left` rows of the bf16 tile number `at`: later ones are another sequence's.

    A lane reads eight columns of eight rows, 16 bytes at a time; then lanes hand each other the halves that they do not keep.
    """
    lane = thread % 32
    tops, eight = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), t.element_type)
    tops.fill(0.0)
    of_t = rows_at(t, at, lane // 4, thread // 32 * 32 + lane % 4 * 8, 8)
    for p in cutlass.range_constexpr(8):
        cute.autovec_copy(of_t[None, p], eight)
        for c in cutlass.range_constexpr(8):
            x = eight[c].to(F32) if lane // 4 + 8 * p < left else F32(0.0)
            tops[c] = cute.arch.fmax(tops[c], cute.arch.fmax(x, -x))
    for step in (4, 2, 1):
        is_upper = (lane & 4 * step) != 0
        for c in cutlass.range_constexpr(step):
            kept = tops[c + step] if is_upper else tops[c]
            given = tops[c] if is_upper else tops[c + step]
            tops[c] = cute.arch.fmax(kept, cute.arch.shuffle_sync_bfly(given, offset=4 * step))
    return cute.arch.shuffle_sync(tops[0], lane // 8 + 4 * (lane % 8))  # column c is with lane c / 8 + 4 (c % 8)


@cute.jit
def keep_in_range(S: cute.Tensor, top: F32, factor: cute.Tensor):
    """Scale the row when it, or one of v with largest value `top`, leaves what fp16 holds well (`common/fp16_window.py`)."""
    top = largest(S, top)
    if cute.arch.vote_any_sync(is_outside(top, factor[0])):
        move = F32(1.0)
        if is_outside(top, factor[0]):
            move = move_inside(top, factor[0])
        for j in cutlass.range_constexpr(cute.size(S)):
            S[j] = S[j] * move
        factor[0] = factor[0] * move


# Two float32 by one instruction, which the compiler does not find by itself


@cute.jit
def times(x: cute.Tensor, y: cutlass.Constexpr):
    """x <- x y, of a number or as many as there are of x."""
    for j in cutlass.range_constexpr(0, cute.size(x), 2):
        both = (y[j], y[j + 1]) if cutlass.const_expr(isinstance(y, cute.Tensor)) else (y, y)
        x[j], x[j + 1] = cute.arch.mul_packed_f32x2((x[j], x[j + 1]), both)


@cute.jit
def times_plus(x: cute.Tensor, y: cutlass.Constexpr, z: cute.Tensor):
    """x <- x y + z"""
    for j in cutlass.range_constexpr(0, cute.size(x), 2):
        both = (y[j], y[j + 1]) if cutlass.const_expr(isinstance(y, cute.Tensor)) else (y, y)
        x[j], x[j + 1] = cute.arch.fma_packed_f32x2((x[j], x[j + 1]), both, (z[j], z[j + 1]))
