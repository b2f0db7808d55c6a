# SPDX-License-Identifier: Apache-2.0
"""Decode: numbers on their way between global memory, shared memory and registers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.tiles import BF16, F32, I32, at_address


def vector_at(dtype: Any, address: Any, size: int, align: int = 0) -> Any:
    """A vector in global memory."""
    return cute.make_tensor(at_address(dtype, address, align or dtype.width // 8), cute.make_layout(size))


def number_at(dtype: Any, address: Any, position: Any) -> Any:
    """One number in global memory, integers as a word. Loaded here, and not where a compiler that sinks loads finds its use."""
    at = at_address(dtype, address + Int64(position) * (dtype.width // 8), dtype.width // 8)
    number = cute.arch.load(at, dtype, cop="ca")
    return number if dtype is F32 else number.to(I32)


@cute.jit
def load_words(address: Int64, size: cutlass.Constexpr, count: cutlass.Constexpr = 1):
    """`count` vectors of `size` words, 64 bytes apart: [size, count]."""
    words = cute.make_rmem_tensor((size, count), I32)
    for i in cutlass.range_constexpr(count):
        cute.autovec_copy(vector_at(I32, address + 64 * i, size, 4 * size), flat(words, size * i, size))
    return words


def fence(never: Any) -> None:
    """Keep arithmetic on its side of a wait or barrier.

    The compiler moves arithmetic past both as it likes, and with it the waits for what the arithmetic needs. It moves none past a
    place where a thread may end, as far as it knows. `never` is never true, and is computed from what must be there before.
    """
    cute.arch.inline_ptx("exit;", predicate=never)


def copy_to(table: Any, position: Any, address: Any, size: int) -> None:
    """Have 4 or 16 bytes copied to a table in shared memory, to be waited for as a group."""
    to = I32((table.iterator + position).toint())
    cute.arch.inline_ptx(f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {size};", read_only_args=[to, address])


def four_at(table: Any, position: Any) -> Any:
    """16 bytes of a table in shared memory; the position is a multiple of 4."""
    pointer = table.iterator + cute.assume(position, divby=4)
    return cute.make_tensor(pointer.align(16), cute.make_layout(4))


@cute.jit
def read_four(table: cute.Tensor, position: I32):
    four = cute.make_rmem_tensor((4,), F32)
    cute.autovec_copy(four_at(table, position), four)
    return four


def select(condition: Any, x: Any, y: Any) -> Any:
    """`x if condition else y` of two numbers that both are there: never a branch."""
    return type(x)(cutlass.select_(condition, x, y))


def always_there(t: int, T: int) -> bool:
    """Whether every call of the kernel for T tokens has token t: calls of T / 2 tokens or fewer have a kernel of their own."""
    return t <= T // 2


# Numbers of two possible dtypes. What is loaded stays as it is until all loads are on their way: to widen a number is to wait for
# it.


def size_of(flags: Any, is_f32: int) -> Any:
    """Bytes of a number that is in float32 or bfloat16."""
    return select((flags & is_f32) != 0, I32(4), I32(2))


def load_halves(address: Any, positions: list, is_f32: Any) -> list[tuple[Any, Any]]:
    """Numbers in float32 or bfloat16, at some positions from an address: their upper 16 bits, and the lower ones of a float32."""
    size = select(is_f32, I32(4), I32(2))
    upper = address + (size - 2)
    return [tuple(number_at(cutlass.Uint16, half + Int64(p * size), 0) for half in (upper, address)) for p in positions]


@cute.jit
def number_of(halves: cutlass.Constexpr, is_f32: cutlass.Boolean):
    """The float32 number that `load_halves` has loaded."""
    out = cute.make_rmem_tensor((1,), F32)
    bits = cute.recast_tensor(out, I32)
    bits[0] = halves[0] << 16
    if cutlass.const_expr(is_f32 is not False):
        bits[0] = (halves[0] << 16) | select(is_f32, halves[1] & 0xFFFF, I32(0))
    return out[0]


@cute.jit
def widened(words: cute.Tensor, count: cutlass.Constexpr):
    """bfloat16 numbers, two a word."""
    out = cute.make_rmem_tensor((count,), F32)
    bits = cute.recast_tensor(out, I32)
    for e in cutlass.range_constexpr(count):
        word = words[e // 2]
        bits[e] = word << 16 if cutlass.const_expr(e % 2 == 0) else word & I32(-65536)
    return out


@cute.jit
def packed(x: F32, y: F32):
    """Two numbers rounded to bfloat16, x in the lower half of a word."""
    pair, word = cute.make_rmem_tensor((2,), F32), cute.make_rmem_tensor((2,), BF16)
    pair[0], pair[1] = x, y
    word.store(pair.load().to(BF16))
    return cute.recast_tensor(word, I32)[0]
