# SPDX-License-Identifier: Apache-2.0
"""A repeated call in C, where Python would take microseconds for each step: `native.c`.

    record = LaunchRecord(device, (launcher(addresses, plain, frame), ...), outputs)    # once, by a backend
    replay = replayer(tensors, record)                                                  # once
    ...
    done = replay(others)   # each time: outputs; NotImplemented where the others are not like the tensors, None where an address
                            # will not do or a launch failed

The C code comes with a wheel. In a clone it is compiled at the first record, by the function with which Triton compiles its own
launchers, and kept in Triton's cache. Where that cannot be done, or torch does not let its tensors be read from C (before 2.10),
all of it is done here in Python: the same calls, and a few microseconds more for each.
"""

from __future__ import annotations

import functools
import importlib
import logging
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.problem import needs_grad
from cula.core.replay.torch_internals import Form, current_device, current_stream, empty
from cula.core.slow import warn_if_slow

logger = logging.getLogger("cula")

Tensors = tuple[Tensor | None, ...]
ALIGNMENT = 16  # bytes: kernels are compiled for addresses that are multiples of this, or for any
NUM_SIZES = 4096  # of which a record remembers what calls need
Addresses = Any  # of the tensors of a call, in order, 0 for None: bytes for native.c, a tuple of integers without it
Guard = Callable[[Tensors], Addresses | None]
Launcher = Callable[..., bool]  # (stream, addresses of the call's tensors, *outputs)
Replayer = Callable[[Tensors], Any]


class Address(NamedTuple):
    """An argument of a kernel that is an address."""

    of: int | None  # the tensor of a call with this number; ~0, ~1, ...: the first, the second, ... of the outputs; None: of none
    alignment: int = 1  # bytes that it must be a multiple of
    absent: int = 0  # stands for None
    offset: int = 0  # bytes behind the beginning of the tensor


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
    numbers: tuple[tuple[int, int, int], ...] = ()  # (index among `Resized.numbers`, offset, bytes)


class Resized(NamedTuple):
    """What a call of other sizes needs of a record."""

    numbers: tuple[int, ...]  # arguments of the launches that follow from the sizes
    outputs: tuple[int | Form | None, ...]
    workspace: Callable[[int], Tensor] | None


class Sizes(NamedTuple):
    """Which sizes may differ between the calls of one record, and what follows from them.

    A serving engine's prefill has another number of tokens and of sequences at every step. Strides of tokens and heads, dtypes
    and options stay, and so do kernels; what changes is in `Resized`, which takes a few microseconds to work out.
    """

    # For each tensor of a call None, or for each dimension 0: as recorded; n > 0: the n-th size; n < 0: one more than that.
    labels: tuple[tuple[int, ...] | None, ...]
    resize: Callable[..., Resized | None]  # takes the sizes in order; None where other kernels serve such a call


class LaunchRecord(NamedTuple):
    """What a repeated call does: make its outputs, launch kernels on the current stream, return the outputs."""

    device: int | None  # made current where it is not
    launches: tuple[Launcher, ...]
    outputs: tuple[int | Form | None, ...]  # the number of a tensor of the call; what `empty` makes one from; None
    workspace: Callable[[int], Tensor] | None = None  # for a stream: one more output for the launches, not returned
    is_ready: Callable[[], bool] | None = None  # False: the call goes the long way
    sizes: Sizes | None = None  # None: for tensors of these sizes alone


@functools.cache
def _compiled() -> Any:
    """The module that `native.c` makes, from the wheel or compiled here; or None."""
    try:
        return importlib.import_module("cula.core.replay.cula_native")
    except ImportError:
        pass  # no wheel for this Python: compile it
    try:
        from triton.runtime.build import compile_module_from_src

        with warn_if_slow("compiling native.c, which repeats calls: some seconds, once; kept in Triton's cache"):
            return compile_module_from_src(Path(__file__).with_name("native.c").read_text(), "cula_native")
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as reason:
        level = logging.WARNING if torch.cuda.is_available() else logging.INFO  # without a GPU there are no launches to repeat
        what_to_do = "install Triton, a C compiler and Python's headers, or a wheel that has it compiled"
        logger.log(level, "repeated calls take some microseconds more: native.c cannot be used here (%s); %s", reason, what_to_do)
        return None


def launcher(of: Sequence[Address], plain: Callable[..., Any], frame: Frame | None) -> Launcher:
    """A function that launches a kernel and says whether it did; where it did not, the call goes the long way.

    Args:
        of: the kernel's addresses.
        plain: takes the stream, the numbers of `Resized` (none where sizes are those recorded) and those addresses, and launches.
        frame: does the same from C; None where there is none.
    """
    native = _compiled()
    if native is None or frame is None:
        return _plain(tuple(of), plain)
    places = tuple((of[i].of, at, of[i].alignment, of[i].offset) for i, at in frame.places if of[i].of is not None)
    return native.Launch(frame.function, frame.block, frame.pointers, frame.stream, places, frame.numbers, frame.keep)


def guard(tensors: Tensors, labels: tuple[tuple[int, ...] | None, ...] | None = None) -> Guard:
    """A function that returns the addresses of tensors like these, and None for others: type, shape, strides, dtype, device and
    alignment are compared, and whether there is a gradient to make. Labelled dimensions may have other sizes (see `Sizes`)."""
    native = _compiled()
    if native is not None:
        return native.Guard(tensors, labels)
    is_like = _like(tensors, labels)
    return lambda others: None if is_like(others) is None else _addresses(others)


def replayer(tensors: Tensors, record: LaunchRecord | Replayer) -> Replayer:
    """A function that makes a call like the one with these tensors by a record, or by a function of tensors; NotImplemented for
    tensors that are not like them."""
    native = _compiled()
    if not isinstance(record, LaunchRecord):
        is_same, replay = guard(tensors), record
        return lambda others: NotImplemented if is_same(others) is None else replay(others)
    if record.sizes is not None:  # lengths come again, and to find them takes a tenth of the time
        record = record._replace(sizes=record.sizes._replace(resize=functools.lru_cache(NUM_SIZES)(record.sizes.resize)))
    device, launches, outputs, workspace, is_ready, sizes = record
    labels, resize = (None, None) if sizes is None else sizes
    if native is None or not all(isinstance(launch, native.Launch) for launch in launches):
        is_like = _like(tensors, labels)
        return lambda others: NotImplemented if (found := is_like(others)) is None else _follow(record, others, found)
    return native.Record(
        guard(tensors, labels),
        launches,
        outputs,
        workspace,
        is_ready,
        device,
        current_device,
        current_stream,
        empty,
        _elsewhere,
        resize,
    )


def finder() -> Callable[[tuple[tuple[Any, Replayer], ...], Tensors, Any], Any]:
    """A function of pairs (static arguments, function), tensors and static arguments: what the first function with those makes of
    the tensors; NotImplemented if there is none that does."""
    native = _compiled()
    return _first if native is None else native.first


def _elsewhere(device: int, replay: Replayer, tensors: Tensors) -> Any:
    with torch.cuda.device(device):
        return replay(tensors)


# Without native.c


def _first(known: tuple[tuple[Any, Replayer], ...], tensors: Tensors, static_args: Any) -> Any:
    for of, replay in known:
        if of == static_args and (done := replay(tensors)) is not NotImplemented:
            return done
    return NotImplemented


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple([0 if t is None else t.data_ptr() for t in tensors])


def signature(tensors: Tensors) -> tuple[Any, ...] | None:
    """What tensors have in common with those of a call like theirs; None if there is a gradient to make, or no tensor with memory
    of its own where one belongs."""
    return None if needs_grad(tensors) else forms(tensors)


def forms(tensors: Tensors) -> tuple[Any, ...] | None:
    """The form of each tensor, whether there is a gradient to make or not; None where one has no memory of its own."""
    try:
        return tuple([t if t is None else _form(t) for t in tensors])
    except (AttributeError, TypeError, RuntimeError):  # no tensor, or one of functorch's or of a fake mode
        return None


def _form(t: Tensor) -> tuple[Any, ...]:
    return type(t), t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % ALIGNMENT == 0


def _like(tensors: Tensors, labels: tuple[tuple[int, ...] | None, ...] | None) -> Callable[[Tensors], tuple[int, ...] | None]:
    """A function that returns the sizes of labels in tensors like these, and None for others."""
    of = (None,) * len(tensors) if labels is None else labels
    seen = _signature_without(tensors, of)

    def sizes_of(others: Tensors) -> tuple[int, ...] | None:
        if len(others) != len(of) or seen is None or _signature_without(others, of) != seen:
            return None
        sizes: dict[int, int] = {}
        for t, labels in zip(others, of):
            for size, label in zip(() if t is None or labels is None else t.shape, labels or ()):
                size -= label < 0
                if label and (size < 0 or sizes.setdefault(abs(label), size) != size):
                    return None
        return tuple([sizes[label] for label in sorted(sizes)])

    return sizes_of


def _signature_without(tensors: Tensors, labels: Sequence[tuple[int, ...] | None]) -> tuple[Any, ...] | None:
    """The signature, with labelled sizes left out, and with strides that follow from them checked instead of compared."""
    found = signature(tensors)
    if found is None or not any(labels):
        return found
    return tuple([form if form is None or not of else _without(form, of) for form, of in zip(found, labels)])


def _without(form: tuple[Any, ...], labels: tuple[int, ...]) -> tuple[Any, ...] | None:
    kind, shape, strides, *rest = form
    if len(shape) != len(labels):
        return None
    kept = []
    for i, (size, stride, label) in enumerate(zip(shape, strides, labels)):
        is_flat = i + 1 < len(labels) and labels[i + 1]
        if is_flat and size > 1 and stride != shape[i + 1] * strides[i + 1]:
            return None
        kept.append((None if label else size, None if is_flat else stride))
    return kind, tuple(kept), *rest


def _plain(of: tuple[Address, ...], plain: Callable[..., Any]) -> Launcher:
    def launch(stream: int, at: Addresses, *outputs: Tensor | None, numbers: tuple[int, ...] = ()) -> bool:
        if not isinstance(at, tuple):
            at = memoryview(at).cast("Q")
        made = _addresses(outputs)
        there = [0 if a.of is None else at[a.of] if a.of >= 0 else made[~a.of] for a in of]
        there = [address + a.offset if address else 0 for a, address in zip(of, there)]
        if any([address % a.alignment for a, address in zip(of, there)]):
            return False
        plain(stream, numbers, *[address or a.absent for a, address in zip(of, there)])
        return True

    return launch


def _follow(record: LaunchRecord, tensors: Tensors, sizes: tuple[int, ...]) -> Any:
    device, launches, outputs, workspace, is_ready, of_sizes = record
    if is_ready is not None and not is_ready():
        return None
    if current_device() != device:
        with torch.cuda.device(device):
            return _follow(record, tensors, sizes)
    more = {}
    if of_sizes is not None:
        resized = of_sizes.resize(*sizes)
        if resized is None:
            return NotImplemented
        numbers, outputs, workspace = resized
        more = {"numbers": numbers}
    stream, at = current_stream(device), _addresses(tensors)
    made = tuple([tensors[o] if isinstance(o, int) else o if o is None else empty(*o) for o in outputs])
    seen = made if workspace is None else (*made, workspace(stream))
    for launch in launches:
        if not launch(stream, at, *seen, **more):
            return None
    return made
