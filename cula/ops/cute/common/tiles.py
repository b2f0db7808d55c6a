# SPDX-License-Identifier: Apache-2.0
"""Tiles in shared memory, TMA copies, and wgmma with its accumulators.

A tile is [rows, columns], columns contiguous, 16-bit, swizzled by 128 bytes where a row has as many. The same bytes serve
TMA, ldmatrix and wgmma: as they lie where columns are the reduction (K-major), swapped where rows are (MN-major).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

BF16, F16, F32, I32 = cutlass.BFloat16, cutlass.Float16, cutlass.Float32, cutlass.Int32
TF32 = cutlass.TFloat32
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


# Tensors from numbers: to hand over a tensor itself costs the caller microseconds


def at_address(dtype: Any, address: Any, align: int) -> Any:
    """A pointer to global memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def of_tokens(pointer: Any, T: Any, heads: Any, width: int, strides: Any) -> Any:
    """[T, heads, width]; strides are multiples of 16 bytes, as TMA wants them."""
    unit = 128 // pointer.dtype.width
    return cute.make_tensor(
        pointer, cute.make_layout((T, heads, width), stride=(*(cute.assume(s, divby=unit) for s in strides), 1))
    )


# Shared memory


def tile_layout(rows: int, columns: int, stages: int | None = None, dtype: Any = BF16, columns_of: int | None = None) -> Any:
    """The swizzled layout of a tile, or of some stages of it; `columns_of` a narrower tile, where it is made of such."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = kinds.K_SW128 if (columns_of or columns) * dtype.width % 1024 == 0 else kinds.K_SW64
    shape = (rows, columns) if stages is None else (rows, columns, stages)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=tuple(range(len(shape))))


def allocate_tile(smem: Any, layout: Any, dtype: Any = BF16) -> Any:
    """The swizzle goes to the pointer, where wgmma looks for it."""
    return smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def tile_at(t: Any, layout: Any, dtype: Any) -> Any:
    """The memory of a tile taken for another one."""
    return cute.make_tensor(cute.recast_ptr(t.iterator, layout.inner, dtype), layout.outer)


def swapped(t: Any) -> Any:
    """The same memory with its first two modes exchanged."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 0, *range(2, cute.rank(t))]))


# TMA


def by_head(t: Any) -> Any:
    """[T, H, D] -> [T, D, H]: the modes that tiles are cut from come first."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[0, 2, 1]))


class Tma(NamedTuple):
    """A tensor as TMA copies tiles of it."""

    atom: Any
    coordinates: Any  # what tiles are cut from, in the place of the tensor


def tma_atom(op: Any, t: Any, layout: Any, tile: tuple[int, int]) -> Tma:
    """Tiles of the first two modes of t; a stage mode of the layout is dropped."""
    one = cute.slice_(layout, (None, None, 0)) if cute.rank(layout) == 3 else layout
    return Tma(*cpasync.make_tiled_tma_atom(op, t, one, tile))


def tma_load(t: Any, layout: Any, tile: tuple[int, int]) -> Tma:
    return tma_atom(cpasync.CopyBulkTensorTileG2SOp(), t, layout, tile)


def tma_store(t: Any, layout: Any, tile: tuple[int, int]) -> Tma:
    return tma_atom(cpasync.CopyBulkTensorTileS2GOp(), t, layout, tile)


def tma_split(atom: Any, s: Any, g: Any) -> Any:
    """Shared memory [r, c, stage] and global tiles [r, c, rest...] as `cute.copy` wants them: [stage] and [rest]."""
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))


# wgmma


def wgmma(n: int, b_major: Any, a_in_registers: bool, dtype: Any = BF16) -> Any:
    """m64 n<n> k16 of one warpgroup; A is K-major."""
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, F32, (64, n, 16), source, K_MAJOR, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: cutlass.Constexpr):
    """acc (+)= a b^T, a group of its own, not waited for."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)  # its own, so that the flag set here stays here
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def rows_and_columns(acc: Any) -> Any:
    """An accumulator ((2, 2, N / 8), M, 1) seen as [row, column].

    Thread t of the warpgroup holds at [i, j] the element of row 16 (t // 32) + (t % 32) // 4 + 8 i and column
    8 (j // 2) + 2 (t % 4) + j % 2.
    """
    (v, m, n), (sv, sm, sn) = acc.layout.shape, acc.layout.stride
    shape, stride = ((v[1], m), (v[0], *v[2:], n)), ((sv[1], sm), (sv[0], *sv[2:], sn))
    return cute.make_tensor(acc.iterator, cute.make_layout(shape, stride=stride))


def seen_as_a(fragment: Any) -> Any:
    """16-bit registers laid out like an accumulator, seen as an A operand: pairs of 8 columns are its blocks of k16."""
    (v, m, n), (sv, sm, sn) = fragment.layout.shape, fragment.layout.stride
    shape, stride = ((v[0], v[1], 2), m, (v[2] // 2, n)), ((sv[0], sv[1], sv[2]), sm, (2 * sv[2], sn))
    return cute.make_tensor(fragment.iterator, cute.make_layout(shape, stride=stride))


@cute.jit
def rounded(acc: cute.Tensor, dtype: cutlass.Constexpr = BF16):
    """fp32 registers rounded to 16 bits."""
    out = cute.make_rmem_tensor_like(acc, dtype)
    out.store(acc.load().to(dtype))
    return out
