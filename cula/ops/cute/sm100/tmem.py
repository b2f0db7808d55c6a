# SPDX-License-Identifier: Apache-2.0
"""tcgen05 products, and tensor memory as plain cells: 128 lanes, columns of 32 bits.

An accumulator of M = 128 has row = lane, column = column. A 16-bit A operand has two neighbours in a column, the low half first.
A thread of a warpgroup sees one lane, its own number, so a row of a matrix is one thread's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05

from cula.ops.cute.common.tiles import F32, K_MAJOR

COLUMNS = 512  # of a multiprocessor
PIECE = 32  # columns of one load or store: as many registers must be neighbours


def umma(n: int, b_major: Any, dtype: Any) -> Any:
    """m128 n<n> k16, A in tensor memory."""
    op = tcgen05.MmaF16BF16Op(dtype, F32, (128, n, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.TMEM, K_MAJOR, b_major)
    return cute.make_tiled_mma(op)


def umma_of_tiles(n: int, a_major: Any, b_major: Any, dtype: Any) -> Any:
    """m128 n<n> k16, A in shared memory."""
    op = tcgen05.MmaF16BF16Op(dtype, F32, (128, n, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, a_major, b_major)
    return cute.make_tiled_mma(op)


def accumulator(mma: Any, ptr: Any, n: int) -> Any:
    """[128, n] in float32 at a column."""
    return cute.make_tensor(ptr, mma.make_fragment_C(mma.partition_shape_C((128, n))).layout)


def operand_a(mma: Any, ptr: Any, k: int, dtype: Any) -> Any:
    """[128, k] in 16 bits at a column; takes k / 2 of them."""
    return cute.make_tensor(cute.recast_ptr(ptr, dtype=dtype), mma.make_fragment_A(mma.partition_shape_A((128, k))).layout)


@cute.jit
def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: cutlass.Constexpr):
    """acc (+)= a b^T, by one warp; a commit tells when it is done."""
    atom = cute.make_mma_atom(mma.op)  # its own, so that the flag set here stays here
    atom.set(tcgen05.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(tcgen05.Field.ACCUMULATE, True)


@cute.jit
def commit(*bars: cute.Pointer):
    """Arrive at each barrier when all that this warp issued is done."""
    with cute.arch.elect_one():
        for bar in bars:
            tcgen05.commit(bar)


def before_sync() -> None:
    """Tensor memory is ordered between threads only with this before a barrier, ..."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def after_sync() -> None:
    """... and with this behind it."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def row_load(mma: Any, ptr: Any, n: int, thread: Any, waits: bool = True) -> Callable[[Any], None]:
    """A function that fills n registers with the thread's lane of n columns, and waits for them, or leaves that to a load after
    it."""
    pieces = [_piece(tcgen05.Ld32x32bOp, mma, ptr + at, min(n, PIECE), thread) for at in range(0, n, PIECE)]

    def load(registers: Any) -> None:
        for i, (copy, cells, shape) in enumerate(pieces):
            cute.copy(copy, cells, _words(registers, PIECE * i, shape))
        if waits:
            cute.arch.fence_view_async_tmem_load()

    return load


def row_stores(mma: Any, ptr: Any, n: int, thread: Any, piece: int = PIECE) -> list[Callable[[Any], None]]:
    """Functions that write `piece` registers each, or twice as many 16-bit values, to the thread's lane of n columns.

    To be waited for by `stored`.
    """
    pieces = [_piece(tcgen05.St32x32bOp, mma, ptr + at, piece, thread) for at in range(0, n, piece)]

    def store(copy: Any, cells: Any, shape: Any, registers: Any) -> None:
        cute.copy(copy, _words(registers, 0, shape), cells)

    return [functools.partial(store, *piece) for piece in pieces]


def loaded() -> None:
    """Wait for this warp's loads from tensor memory."""
    cute.arch.fence_view_async_tmem_load()


def stored() -> None:
    """Wait for this warp's stores to tensor memory."""
    cute.arch.fence_view_async_tmem_store()


def _piece(op: Any, mma: Any, ptr: Any, n: int, thread: Any) -> tuple[Any, Any, Any]:
    """A copy of n columns at `ptr`, thread = lane, register j = column j: its atom, the cells, the shape of its registers."""
    layout = accumulator(mma, ptr, mma.op.shape_mnk[1]).layout  # of at least n columns
    cells = cute.make_tensor(ptr, cute.composition(layout, cute.make_layout((128, n))))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op(getattr(tcgen05.Repetition, f"x{n}")), F32), cells)
    mine, coordinates = copy.get_slice(thread), cute.make_identity_tensor((128, n))
    if op is tcgen05.St32x32bOp:
        return copy, mine.partition_D(cells), mine.partition_S(coordinates).shape
    return copy, mine.partition_S(cells), mine.partition_D(coordinates).shape


def _words(registers: Any, start: int, shape: Any) -> Any:
    return cute.make_tensor(cute.recast_ptr(registers.iterator, dtype=F32) + start, cute.make_layout(shape))
