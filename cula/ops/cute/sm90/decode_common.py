# SPDX-License-Identifier: Apache-2.0
"""What the parts of the decode kernel share: sizes, and numbers on their way from memory to registers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.tiles import F32, I32, at_address

D = 128  # K and V
WARP_ROWS = 16  # rows of a state that a warp has
MAX_WARPS = D // WARP_ROWS


def vector_at(dtype: Any, address: Any, size: int, align: int = 0) -> Any:
    """A vector in global memory."""
    return cute.make_tensor(at_address(dtype, address, align or dtype.width // 8), cute.make_layout(size))


def four_at(table: Any, position: Any) -> Any:
    """16 bytes of a table in shared memory; the position is a multiple of 4."""
    pointer = table.iterator + cute.assume(position, divby=4)
    return cute.make_tensor(pointer.align(16), cute.make_layout(4))


@cute.jit
def read_four(table: cute.Tensor, position: I32):
    four = cute.make_rmem_tensor((4,), F32)
    cute.autovec_copy(four_at(table, position), four)
    return four


# What is loaded stays as it is until all loads are on their way: to widen a number is to wait for it.


@cute.jit
def load_words(words: cute.Tensor, address: Int64, offset: I32, is_f32: I32):
    """float32 or bfloat16 numbers, as many as `words`, at a multiple of their size."""
    count = cute.size(words)
    if is_f32 != 0:
        cute.autovec_copy(vector_at(I32, address + Int64(offset) * 4, count, 4 * count), words)
    else:
        if cutlass.const_expr(count == 1):
            words[0] = vector_at(cutlass.Uint16, address + Int64(offset) * 2, 1)[0].to(I32)
        else:
            half = cute.make_tensor(words.iterator, cute.make_layout(count // 2))
            cute.autovec_copy(vector_at(I32, address + Int64(offset) * 2, count // 2, 2 * count), half)


@cute.jit
def widened(words: cute.Tensor, is_f32: I32, count: cutlass.Constexpr):
    """The numbers in what `load_words` left."""
    out = cute.make_rmem_tensor((count,), F32)
    bits = cute.recast_tensor(out, I32)
    for e in cutlass.range_constexpr(count):
        word = words[e // 2]
        bits[e] = word << 16 if cutlass.const_expr(e % 2 == 0) else word & I32(-65536)
    if is_f32 != 0:
        for e in cutlass.range_constexpr(count):
            bits[e] = words[e]
    return out
