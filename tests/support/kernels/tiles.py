# SPDX-License-Identifier: Apache-2.0
"""Tiles in shared memory, TMA and accumulators, as the test kernels use them.

A tile is [rows, columns], columns contiguous, bf16 or fp16, swizzled. The same bytes serve TMA, ldmatrix and tensor cores, as
they lie (reduction over columns) and swapped (reduction over rows).
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor

BF16, F16, F32 = cutlass.BFloat16, cutlass.Float16, cutlass.Float32
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def fake(dtype, *shape):
    """A row-major tensor argument, 16-byte aligned."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def tile_layout(rows, columns, stages=None, dtype=BF16):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    shape = (rows, columns) if stages is None else (rows, columns, stages)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def allocate_tile(smem, layout, dtype=BF16):
    return smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def swapped(t):
    """The same memory with its first two modes exchanged."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 0, *range(2, cute.rank(t))]))


def reordered(t, *modes):
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=list(modes)))


def tma_atom(op, t, layout, tile):
    """The copy atom and coordinates of tiles of the first two modes of t; a stage mode of the layout is dropped."""
    one = cute.slice_(layout, (None, None, 0)) if cute.rank(layout) == 3 else layout
    return cpasync.make_tiled_tma_atom(op, t, one, tile)


def tma_load(t, layout, tile):
    return tma_atom(cpasync.CopyBulkTensorTileG2SOp(), t, layout, tile)


def tma_store(t, layout, tile):
    return tma_atom(cpasync.CopyBulkTensorTileS2GOp(), t, layout, tile)


def tma_split(atom, s, g):
    """Shared memory [r, c, stage] and global tiles [r, c, rest] as cute.copy wants them."""
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))


@cute.jit
def init_barriers(bars: cute.Pointer, warp: cutlass.Int32, n: cutlass.Constexpr):
    """n mbarriers of one arrival each, seen by everybody."""
    if warp == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(n):
                cute.arch.mbarrier_init(bars + i, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def rows_and_columns(acc):
    """An accumulator ((2, 2, N / 8), M, 1) seen as [row, column]."""
    (v, m, n), (sv, sm, sn) = acc.layout.shape, acc.layout.stride
    shape, stride = ((v[1], m), (v[0], *v[2:], n)), ((sv[1], sm), (sv[0], *sv[2:], sn))
    return cute.make_tensor(acc.iterator, cute.make_layout(shape, stride=stride))


@cute.jit
def as_a_operand(acc: cute.Tensor):
    """An fp32 accumulator rounded to bf16 and seen as the A operand of the next wgmma: no register changes its thread."""
    out = cute.make_rmem_tensor_like(acc, BF16)
    out.store(acc.load().to(BF16))
    (v, m, n), (sv, sm, sn) = out.layout.shape, out.layout.stride
    shape, stride = ((v[0], v[1], 2), m, (v[2] // 2, n)), ((sv[0], sv[1], sv[2]), sm, (2 * sv[2], sn))
    return cute.make_tensor(out.iterator, cute.make_layout(shape, stride=stride))
