# SPDX-License-Identifier: Apache-2.0
"""One description of a launch, for now and for later: a `Launch` calls a kernel's host function, or makes what a record calls
again, with new addresses, and the same numbers but for some."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from cula.core.pool import Serving
from cula.core.replay.record import Address, Frame, Launcher, LaunchRecord, Sizes, launcher
from cula.core.replay.sizes import Scheduled, prefill_labels, prefill_resize
from cula.core.replay.torch_internals import Form, form_of
from cula.ops.cute.abi import Abi
from cula.ops.cute.tensors import address


class Operand(NamedTuple):
    """What stands at an address: a tensor, and where a record of the call finds its like."""

    tensor: Tensor | None
    # Which of the call's tensors, by number; ~0, ~1, ...: which of its outputs; None: no tensor of a recorded call.
    of: int | None = None
    absent: Tensor | None = None  # stands for a tensor that a call does not have


def places(*of: Any) -> dict[str, int]:
    """The numbers of a call's tensors by name, where it takes those of some NamedTuples in order."""
    return {name: i for i, name in enumerate(name for fields in of for name in fields._fields)}


def token_strides(**tensors: Tensor) -> dict[str, int]:
    """Arguments `q_token`, `q_head`, ...: the strides of tensors [B, T, heads, ...] by name."""
    strides = {}
    for name, t in tensors.items():
        strides[f"{name}_token"], strides[f"{name}_head"] = t.stride()[1:3]
    return strides


class Launch(NamedTuple):
    """One kernel of a call, with all that it is given: addresses and numbers by the names of its description."""

    abi: Abi
    kernel: Callable[..., Any]
    operands: Mapping[str, Operand]
    numbers: Mapping[str, int | float | bool]
    varying: Sequence[str] = ()  # numbers that follow from sizes, in the order of `Resized.numbers`; some may be other kernels'

    def now(self, stream: int) -> None:
        given = {name: address(x.absent if x.tensor is None else x.tensor) for name, x in self.operands.items()}
        self.kernel(*self.abi.pack_addresses(given), *self.abi.pack_numbers(self.numbers), stream)

    def recorded(self) -> Launcher:
        """What launches it for other tensors, in a record: tensors that are aligned as described."""
        operands = self.abi.in_order(self.abi.addresses, self.operands)
        of = [Address(x.of, a.align, address(x.absent)) for a, x in zip(self.abi.addresses, operands)]
        names = [a.name for a in self.abi.numbers]
        varying = [names.index(name) if name in names else None for name in self.varying]
        return launcher_of(self.kernel, of, self.abi.pack_numbers(self.numbers), varying)


def prefill_record(
    p: Any,
    x: Any,
    serving: Serving,
    token_inputs: tuple[str, ...],
    made: tuple[Tensor, Tensor | None],
    launches: Sequence[Launch],
    workspace: Callable[[int], Tensor] | None,
    schedule_of: Callable[[int, int, int], Scheduled | None],
    saved: tuple[Form, ...] = (),
) -> LaunchRecord:
    """A record of a prefill's launches, for calls of other lengths too.

    Args:
        made: o, which is `serving.out` where that is given, and a final state, where the call makes one.
        schedule_of: as `prefill_resize` takes it.
        saved: what else the call makes, for a backward.
    """
    o, ht = made
    place_of_out = None if serving.out is None else places(x, serving)["out"]
    outputs = (form_of(o) if place_of_out is None else place_of_out, None if ht is None else form_of(ht), *saved)
    resize = prefill_resize(p, schedule_of, place_of_out, ht is not None)
    sizes = Sizes(prefill_labels(x, serving, token_inputs, p.is_packed), resize)
    return LaunchRecord(x.q.device.index, tuple(launch.recorded() for launch in launches), outputs, workspace, sizes=sizes)


def launcher_of(
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
