# SPDX-License-Identifier: Apache-2.0
"""Recorded launches: a kernel's host function called again, with new addresses, and the same numbers but for some."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cula.core.replay.record import Address, Frame, Launcher, launcher
from cula.ops.cute.abi import Abi


class Source(NamedTuple):
    """Where a recorded launch finds an address."""

    of: int | None  # the tensor of a call with this number; ~0, ~1, ...: the first, the second, ... of the outputs; None: of none
    absent: int = 0  # the address that stands for a tensor which a call does not have


def record(
    abi: Abi,
    kernel: Callable[..., Any],
    sources: Mapping[str, Source | int | None],
    numbers: Mapping[str, int | float | bool],
    varying: Sequence[str] = (),
) -> Launcher:
    """A function that calls `kernel(*addresses, *numbers, stream)`, both in the order that `abi` describes.

    Args:
        sources: where addresses come from (a number alone is a `Source` of that tensor); they must be aligned as described.
        numbers: the same each time, but for those that vary.
        varying: names of integers that follow from a call's sizes, in the order of `Resized.numbers`; some may be arguments of
            the call's other kernels.
    """
    found = {name: source if isinstance(source, Source) else Source(source) for name, source in sources.items()}
    of = [Address(s.of, a.align, s.absent) for a, s in zip(abi.addresses, abi.in_order(abi.addresses, found))]
    names = [a.name for a in abi.numbers]
    return again(kernel, of, abi.pack_numbers(numbers), [names.index(name) if name in names else None for name in varying])


def again(
    kernel: Callable[..., Any], of: Sequence[Address], numbers: Sequence[int | float], varying: Sequence[int | None] = ()
) -> Launcher:
    """A function that calls `kernel(*addresses, *numbers, stream)`; `varying` are the places of numbers that a call brings, None
    for one that this kernel does not take."""

    def plain(stream: int, given: tuple[int, ...], *addresses: int) -> None:
        there = list(numbers)
        for i, number in zip(varying, given):
            if i is not None:
                there[i] = number
        kernel(*addresses, *there, stream)

    return launcher(of, plain, frame(kernel, of, numbers, varying))


# From C: TVMFFIFunctionCall(function, arguments, their number, result), arguments and result being of TVMFFIAny:
# a number for the type, 4 bytes of zeros, and 8 of the value.

WORDS = struct.Struct("4Q")
INTEGER, FLOAT = struct.Struct("iIq"), struct.Struct("iId")
IS_INTEGER, IS_FLOAT = 1, 3
ANY, VALUE = 16, 8  # bytes of one, and where the value is


def frame(
    kernel: Callable[..., Any], of: Sequence[Address], numbers: Sequence[int | float], varying: Sequence[int | None] = ()
) -> Frame | None:
    """A call that leaves the numbers as they are, where tvm-ffi's own converts 40 of them each time; None for a kernel that is no
    function of tvm-ffi's."""
    if not hasattr(kernel, "__chandle__"):
        return None
    arguments = (*(a.absent for a in of), *numbers, 0)
    packed = [FLOAT.pack(IS_FLOAT, 0, x) if isinstance(x, float) else INTEGER.pack(IS_INTEGER, 0, x) for x in arguments]
    # four words | result | arguments
    result_at = WORDS.size
    arguments_at = result_at + ANY
    value_at = lambda i: arguments_at + ANY * i + VALUE
    words = WORDS.pack(kernel.__chandle__(), 0, len(arguments), 0)
    return Frame(
        _call_function(),
        words + bytes(ANY) + b"".join(packed),
        ((8, arguments_at), (24, result_at)),
        value_at(len(arguments) - 1),
        tuple((i, value_at(i)) for i in range(len(of))),
        kernel,
        tuple((i, value_at(len(of) + place), VALUE) for i, place in enumerate(varying) if place is not None),
    )


@functools.cache
def _call_function() -> int:
    import tvm_ffi

    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    function = ctypes.cast(library.TVMFFIFunctionCall, ctypes.c_void_p).value
    assert function is not None
    return function
