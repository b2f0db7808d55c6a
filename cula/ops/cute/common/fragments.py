# SPDX-License-Identifier: Apache-2.0
"""Arrays of a warp in registers, as mma.sync lays them out, and their way to and from shared memory.

Of a [16, n] array, thread (r, c) = (lane / 4, lane % 4) holds rows r, r + 8 and columns 8 j + 2 c, + 1.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.tiles import BF16, F16, F32, I32


def flat(t, start, size):
    """`size` registers of a compact array as a vector."""
    return cute.make_tensor(t.iterator + start, cute.make_layout(size))


def corner(t, start):
    """One m16n8 accumulator out of a compact array of them: registers [column, row half]."""
    return cute.make_tensor(t.iterator + start, cute.make_layout(((2, 2), 1, 1)))


@cute.jit
def read_rows(ld: cute.TiledCopy, src: cute.Tensor, lane: I32, s: I32, dtype: cutlass.Constexpr = BF16):
    """Channels 16 s .. 16 s + 15 of the warp's rows: 8 values [ci, ri, hi], channel 8 hi + 2 c + ci, row r + 8 ri."""
    out = cute.make_rmem_tensor((8,), dtype)
    as_a = cute.make_tensor(out.iterator, cute.make_layout(((2, 2, 2), 1, 1)))
    cute.copy(ld, src[None, None, s], ld.get_slice(lane).retile(as_a)[None, None, 0])
    return out


@cute.jit
def read_factors(table: cute.Tensor, row: I32, s: I32, c: I32, out: cute.Tensor):
    """A table's row at channels 16 s + 8 hi + 2 c + ci, for [ci, hi]."""
    for hi in cutlass.range_constexpr(2):
        pair = cute.make_tensor(out.iterator + 2 * hi, cute.make_layout((1, 2)))
        cute.autovec_copy(cute.local_tile(table, (1, 2), (row, 8 * s + 4 * hi + c)), pair)


@cute.jit
def activate(
    raw: cute.Tensor,
    out: cute.Tensor,
    slope: F32,
    bias: F32,
    unit: cute.Tensor,
    top: cute.Tensor,
    has_gate: cutlass.Constexpr,
):
    """Log2 decays of four tokens of a channel: raw * unit, or sigmoid / unit; `top` keeps the largest that each token has had."""
    x = cute.make_rmem_tensor((4,), F32)
    for e in cutlass.range_constexpr(4):
        x[e] = raw[e].to(F32)
        if cutlass.const_expr(has_gate):
            x[e] = cute.arch.rcp_approx(cute.math.exp2(slope * x[e] + bias, fastmath=True) * unit[e] + unit[e])
        else:
            x[e] = x[e] * unit[e]
        top[e] = cute.arch.fmax(top[e], x[e])
    flat(out, 0, 4).store(x.load().to(F16))


@cute.jit
def store_rows(s: cute.Tensor, m: cute.Tensor, first: I32, wid: I32, lane: I32):
    """The warp's 16 rows of a [64, 64] tile that it has just written to shared memory, to rows `first`.. of m."""
    cute.arch.sync_warp()
    for p in cutlass.range_constexpr(4):
        row = 16 * wid + 4 * p + lane // 8
        cute.autovec_copy(cute.local_tile(s, (1, 8), (row, lane % 8)), cute.local_tile(m, (1, 8), (first + row, lane % 8)))
    cute.arch.sync_warp()


@cute.jit
def round_tf32(x: cute.Tensor):
    """To the nearest tf32, in place."""
    bits = cute.recast_tensor(x, I32)
    for i in cutlass.range_constexpr(cute.size(x)):
        bits[i] = (bits[i] + I32(0x1000)) & I32(-0x2000)
