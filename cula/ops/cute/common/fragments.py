# SPDX-License-Identifier: Apache-2.0
"""Arrays of a warp in registers, as mma.sync lays them out, and their way to and from shared memory.

Of a [16, n] array, thread (r, c) = (lane / 4, lane % 4) holds rows r, r + 8 and columns 8 j + 2 c, + 1.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from cula.ops.cute.common.tiles import I32


def flat(t, start, size):
    """`size` registers of a compact array as a vector."""
    return cute.make_tensor(t.iterator + start, cute.make_layout(size))


def corner(t, start):
    """One m16n8 accumulator out of a compact array of them: registers [column, row half]."""
    return cute.make_tensor(t.iterator + start, cute.make_layout(((2, 2), 1, 1)))


def as_a(x):
    """The 8 values of a [16, 16] block as an A operand."""
    return cute.make_tensor(x.iterator, cute.make_layout(((2, 2, 2), 1)))


def shared_at(address, dtype, n, align):
    """n values in shared memory."""
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align), cute.make_layout((n, 1)))


@cute.jit
def lane_address(tile: cute.Tensor, block_row: I32, lane: I32):
    """Where (ld/st)matrix wants this lane to point for the [16, 16] block at rows 16 block_row.., columns 0.. of a 16-bit tile of
    128-byte rows, swizzled.

    The block of columns 16 s is at `lane_address ^ 32 s` for s < 4, and 64 columns on at 8192 more for a tile of 64 rows: an
    address costs one instruction, or none. The same lanes serve a block and its transpose.
    """
    return I32(tile.iterator.toint()) + (16 * block_row + lane % 16) * 128 + ((lane // 16) ^ (lane % 8)) * 16


@cute.jit
def load_matrix(address: I32, dtype: cutlass.Constexpr, is_transposed: cutlass.Constexpr = False):
    """A [16, 16] block: 8 values [ci, ri, hi], column 8 hi + 2 c + ci, row r + 8 ri; transposed, columns r + 8 hi and rows
    2 c + ci + 8 ri."""
    out = cute.make_rmem_tensor((8,), dtype)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(is_transposed, 4), dtype)
    cute.copy(atom, shared_at(address, dtype, 8, 16), cute.make_tensor(out.iterator, cute.make_layout((8, 1))))
    return out


@cute.jit
def store_matrix(x: cute.Tensor, address: I32, is_transposed: cutlass.Constexpr = False):
    """The other way."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(is_transposed, 4), x.element_type)
    cute.copy(atom, cute.make_tensor(x.iterator, cute.make_layout((8, 1))), shared_at(address, x.element_type, 8, 16))


@cute.jit
def store_columns(values, address: I32, dtype: cutlass.Constexpr):
    """Half of a [16, 16] block, eight columns: 4 values [ci, ri]. Lanes from 16 on point nowhere."""
    x, atom = cute.make_rmem_tensor((4, 1), dtype), cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 2), dtype)
    flat(x, 0, 4).store(values)
    cute.copy(atom, x, shared_at(address, dtype, 4, 16))


@cute.jit
def read_pair(address: I32, dtype: cutlass.Constexpr):
    """Two neighbours in a table."""
    out = cute.make_rmem_tensor((2, 1), dtype)
    cute.autovec_copy(shared_at(address, dtype, 2, dtype.width // 4), out)
    return out


@cute.jit
def read_factors(address: I32, dtype: cutlass.Constexpr):
    """A table's values at channels 8 hi + 2 c + ci, for [ci, hi]; the address is that of channel 2 c."""
    out, size = cute.make_rmem_tensor((4,), dtype), dtype.width // 8
    for hi in cutlass.range_constexpr(2):
        pair = cute.make_tensor(out.iterator + 2 * hi, cute.make_layout((2, 1)))
        cute.autovec_copy(shared_at(address + 8 * hi * size, dtype, 2, 2 * size), pair)
    return out


@cute.jit
def widen(x: cute.Tensor, out: cute.Tensor):
    """bf16 to float32: an instruction a value, where a conversion takes two for every other one."""
    pairs, bits = cute.recast_tensor(x, I32), cute.recast_tensor(out, I32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        bits[2 * i] = pairs[i] << 16
        bits[2 * i + 1] = pairs[i] & I32(-0x10000)


@cute.jit
def store_rows(s: cute.Tensor, m: cute.Tensor, wid: I32, lane: I32, record: I32):
    """The warp's 16 rows of a [64, 64] tile that it has just written to shared memory, to m [64 records, 64]."""
    cute.arch.sync_warp()
    for p in cutlass.range_constexpr(4):
        row = 16 * wid + 4 * p + lane // 8
        cute.autovec_copy(cute.local_tile(s, (1, 8), (row, lane % 8)), cute.local_tile(m, (1, 8), (64 * record + row, lane % 8)))
    cute.arch.sync_warp()


@cute.jit
def store_quarters(s: cute.Tensor, m: cute.Tensor, wid: I32, lane: I32, record: I32, absent: cutlass.Constexpr):
    """The same by quarters [32, 32], rows first, to m [128 records, 32], without the `absent` one."""
    cute.arch.sync_warp()
    for columns in cutlass.range_constexpr(2):
        quarter = 2 * columns + (wid >> 1)
        if quarter != absent:
            for p in cutlass.range_constexpr(2):
                row, piece = 8 * p + lane // 4, lane % 4
                to = cute.local_tile(m, (1, 8), ((4 * record + quarter) * 32 + (wid & 1) * 16 + row, piece))
                cute.autovec_copy(cute.local_tile(s, (1, 8), (16 * wid + row, 4 * columns + piece)), to)
    cute.arch.sync_warp()


@cute.jit
def round_tf32(x: cute.Tensor):
    """To the nearest tf32, in place."""
    bits = cute.recast_tensor(x, I32)
    for i in cutlass.range_constexpr(cute.size(x)):
        bits[i] = (bits[i] + I32(0x1000)) & I32(-0x2000)
