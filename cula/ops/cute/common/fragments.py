# SPDX-License-Identifier: Apache-2.0
"""Arrays of a warp in registers, as mma.sync lays them out, and their way to and from shared memory.

Of a [16, n] array, thread (r, c) = (lane / 4, lane % 4) holds rows r, r + 8 and columns 8 j + 2 c, + 1.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

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
def read_gates(by_channel: cute.Tensor, mma: cute.TiledMma, lane: I32, s: I32):
    """Channels 16 s .. 16 s + 15 of [channel, token], tokens in pairs: 8 values [token, token / 8, channel / 8], channels r and
    r + 8, tokens 2 c + .. and 8 more."""
    r, c = lane // 4, lane % 4
    g_type = by_channel.element_type
    out = cute.make_rmem_tensor((8,), g_type)
    if cutlass.const_expr(g_type.width == 16):
        as_b = cute.make_tensor(out.iterator, cute.make_layout(((2, 2), 2, 1)))
        ld = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), g_type), mma).get_slice(lane)
        cute.copy(ld, ld.partition_S(by_channel)[None, s, 0], ld.retile(as_b)[None, 0, 0])
    else:
        for e in cutlass.range_constexpr(8):
            out[e] = by_channel[16 * s + 8 * (e // 4) + r, 2 * c + e % 2 + 8 * (e // 2 % 2)]
    return out


@cute.jit
def read_factors(table: cute.Tensor, row: I32, s: I32, c: I32, out: cute.Tensor):
    """A table's row at channels 16 s + 8 hi + 2 c + ci, for [ci, hi]."""
    for hi in cutlass.range_constexpr(2):
        pair = cute.make_tensor(out.iterator + 2 * hi, cute.make_layout((1, 2)))
        cute.autovec_copy(cute.local_tile(table, (1, 2), (row, 8 * s + 4 * hi + c)), pair)


@cute.jit
def widen(x: cute.Tensor, out: cute.Tensor):
    """bf16 to float32: an instruction a value, where a conversion takes two for every other one."""
    pairs, bits = cute.recast_tensor(x, I32), cute.recast_tensor(out, I32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        bits[2 * i] = pairs[i] << 16
        bits[2 * i + 1] = pairs[i] & I32(-0x10000)


@cute.jit
def activate(
    raw: cute.Tensor,
    out: cute.Tensor,
    slope: F32,
    bias: cutlass.Constexpr,
    unit: cute.Tensor,
    top: cute.Tensor,
    has_gate: cutlass.Constexpr,
    fastest: cutlass.Constexpr = None,
):
    """Log2 decays, raw * unit or sigmoid / unit, of four tokens of each channel that `bias` has; `top` keeps the largest of each
    token. Stage by stage: the latencies of one value are hidden by the others."""
    n = 4 * len(bias)
    x = cute.make_rmem_tensor((n,), F32)
    if cutlass.const_expr(raw.element_type is BF16):
        widen(raw, x)
    else:
        for e in cutlass.range_constexpr(n):
            x[e] = raw[e]
    if cutlass.const_expr(has_gate):
        for e in cutlass.range_constexpr(n):
            x[e] = slope * x[e] + bias[e // 4]
        for e in cutlass.range_constexpr(n):
            x[e] = cute.math.exp2(x[e], fastmath=True)
        for e in cutlass.range_constexpr(n):
            x[e] = x[e] * unit[e % 4] + unit[e % 4]
        for e in cutlass.range_constexpr(n):
            x[e] = cute.arch.rcp_approx(x[e])
    else:
        for e in cutlass.range_constexpr(n):
            x[e] = x[e] * unit[e % 4]
    if cutlass.const_expr(fastest is not None):
        for e in cutlass.range_constexpr(n):
            x[e] = cute.arch.fmax(x[e], F32(fastest))
    for e in cutlass.range_constexpr(n):
        top[e % 4] = cute.arch.fmax(top[e % 4], x[e])
    flat(out, 0, n).store(x.load().to(F16))


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
