# SPDX-License-Identifier: Apache-2.0
"""The two steps of a repeated call that would take Python microseconds, in C: `native.c`.

    is_like = likeness(tensors)                         # once, for a plan
    launch = launcher(addresses, plain, frame)
    ...
    at = is_like(others)                                # each time: their addresses if they are like the tensors, or None
    done = at is not None and launch(stream, at, o)     # False: an address will not do, or the launch failed

The C code is compiled at the first plan, by the function with which Triton compiles its own launchers, and kept in Triton's
cache. Where that cannot be done, or torch does not let its tensors be read from C (before 2.10), both steps are done here in
Python: the same calls, and a few microseconds more for each.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from cula.ops.host import TensorGuards

logger = logging.getLogger("cula")

Addresses = Any  # of the tensors of a call, in order, 0 for None: bytes for native.c, a tuple of integers without it
Likeness = Callable[[tuple[Tensor | None, ...]], Addresses | None]
Launcher = Callable[..., bool]  # (stream, addresses of the call's tensors, *outputs)


class Address(NamedTuple):
    """An argument of a kernel that is an address."""

    of: int  # the tensor of a call with this number; ~0, ~1, ...: the first, the second, ... of the outputs
    alignment: int = 1  # bytes that it must be a multiple of
    absent: int = 0  # stands for None


class Frame(NamedTuple):
    """How a function is called from C: it takes four words, and what they point to is laid out in a block of memory.

    A call copies the block, writes addresses into the copy and passes its first four words on.
    """

    function: int  # its address; it returns 0 where all went well
    block: bytes
    pointers: tuple[tuple[int, int], ...]  # (at, to): the word at offset `at` is the address of what is at offset `to`
    stream: int  # the offset of the stream
    places: tuple[tuple[int, int], ...]  # (number of an `Address`, its offset)
    keep: Any  # what the function needs alive


@functools.cache
def _compiled() -> Any:
    """The module that `native.c` makes, or None."""
    try:
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(Path(__file__).with_suffix(".c").read_text(), "cula_native")
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as reason:
        logger.info("repeated calls take some microseconds more: native.c cannot be used here (%s)", reason)
        return None


def likeness(tensors: tuple[Tensor | None, ...]) -> Likeness | None:
    """A function that returns the addresses of tensors like these, and None for others: type, shape, strides, dtype and device
    are compared, and whether there is a gradient to make. None: this torch has no fast way to compare them."""
    native = _compiled()
    if native is not None:
        return native.Likeness(tensors)
    return None if TensorGuards is None else _guarded(tensors)


def addresses(tensors: tuple[Tensor | None, ...]) -> Addresses:
    """As a launcher takes them."""
    native = _compiled()
    return _addresses(tensors) if native is None else native.addresses(tensors)


def launcher(of: Sequence[Address], plain: Callable[..., Any], frame: Frame | None) -> Launcher:
    """A function that launches a kernel and says whether it did; where it did not, the call goes the long way.

    Args:
        of: the kernel's addresses.
        plain: takes the stream and those addresses, and launches.
        frame: does the same from C; None where there is none.
    """
    native = _compiled()
    if native is None or frame is None:
        return _plain(tuple(of), plain)
    places = tuple((of[i].of, at, of[i].alignment) for i, at in frame.places)
    return native.Call(frame.function, frame.block, frame.pointers, frame.stream, places, frame.keep)


# Without native.c


def _addresses(tensors: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    return tuple([0 if t is None else t.data_ptr() for t in tensors])


def _guarded(tensors: tuple[Tensor | None, ...]) -> Likeness:
    """By what torch.compile asks of tensors, which compares all of them in one call.

    Written for these tensors as one expression, `lambda t: addresses(t) if t[2] is None and check(t[0], t[1]) else None`: a loop
    would take longer than the comparison.
    """
    given = [(i, t) for i, t in enumerate(tensors) if t is not None]
    sizes, strides = [list(t.shape) for _, t in given], [list(t.stride()) for _, t in given]
    check = TensorGuards(*(t for _, t in given), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    asked = [f"t[{i}] is None" for i, t in enumerate(tensors) if t is None]
    asked.append(f"check({', '.join(f't[{i}]' for i, _ in given)})")
    return eval(f"lambda t: addresses(t) if {' and '.join(asked)} else None", {"check": check, "addresses": _addresses})


def _plain(of: tuple[Address, ...], plain: Callable[..., Any]) -> Launcher:
    def launch(stream: int, at: Addresses, *outputs: Tensor | None) -> bool:
        if not isinstance(at, tuple):
            at = memoryview(at).cast("Q")
        made = _addresses(outputs)
        there = [at[a.of] if a.of >= 0 else made[~a.of] for a in of]
        if any([address % a.alignment for a, address in zip(of, there)]):
            return False
        plain(stream, *[address or a.absent for a, address in zip(of, there)])
        return True

    return launch
