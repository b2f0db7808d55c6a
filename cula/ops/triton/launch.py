# SPDX-License-Identifier: Apache-2.0
"""Launching Triton kernels: by name, and after the first time without asking Triton which compiled kernel it is.

    @kernel(numbers="T NT", floats="scale")                          # what the signature does not say of the parameters
    def some_kernel(q, o, q_strides, o_strides, T, NT, scale, K: tl.constexpr): ...

    variant = some_kernel.variant(K=128, num_warps=4)                # once: constants and launch options
    variant(grid, q=q, o=o, q_strides=q.stride(), ..., scale=0.5)    # each time: everything else, by name, in any order

Triton's own call derives from every argument what it compiles for: 30 to 60 us of host time with forty arguments, which is more
than a short kernel takes the GPU. A variant writes the same facts into a key and keeps the compiled kernel under it:

| argument                    | what the key holds of it                                                                     |
|-----------------------------|----------------------------------------------------------------------------------------------|
| tensor                      | dtype; whether its address is a multiple of 16; None                                         |
| `*_strides` (ints, a tuple) | of each: whether it is 1, a multiple of 16, wider than 32 bits; their number; None           |
| numbers (ints)              | whether any is wider than 32 bits: Triton is told not to specialise on them                  |
| floats                      | nothing                                                                                      |

So a new length finds the kernel of the last one. Constants and options are the variant's, the device is in the key. The key may
tell apart what Triton does not; it must never do the reverse, which `tests/ops/triton/test_launch.py` compares.

A launch then is one call of the driver, cuLaunchKernelEx, made from C (`native.c`) on a block of memory laid out here (`frame`).
Where that cannot be, Triton's compiled launcher takes the arguments; and where a version of Triton has neither, each launch goes
through its JIT, which is said once in the log. Triton's JIT also makes every launch that it alone can make: the first of a key
(it compiles), those of the interpreter, of tensors that are not on a GPU, and those that a profiler's hooks want to hear of.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import logging
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter, or_
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cula.core.replay import record
from cula.core.replay.record import Address, Frame, Launcher
from cula.core.replay.torch_internals import current_device, current_stream
from cula.core.slow import warn_if_slow

from .memory import current

logger = logging.getLogger("cula")

ALIGNMENT = 16  # bytes: Triton compiles one kernel for addresses that are multiples of this, another for all others
OPTIONS = frozenset({"num_warps", "num_stages", "maxnreg", "launch_pdl"})
KEPT = "kept in Triton's cache (python -m cula warmup compiles in parallel, ahead of time)"
STRIDES = "_strides"  # how the names of parameters end that are tuples of strides


def kernel(*, numbers: str = "", floats: str = "", any_address: str = "") -> Callable[[Callable[..., None]], Kernel]:
    """Decorator of a Triton kernel; see `Kernel`."""
    return lambda function: Kernel(function, numbers.split(), floats.split(), any_address.split())


class Kernel:
    """A Triton kernel and the kinds of its parameters.

    Constants are annotated `tl.constexpr`, strides are named `*_strides`, and what is neither these nor described is a tensor.
    The order is tensors, strides, numbers, floats, constants.

    Args:
        numbers: integers whose value changes from call to call, which nothing is compiled for.
        floats: likewise.
        any_address: tensors that one compiled kernel takes at any address, because it reads one number of them at a time.
    """

    def __init__(
        self,
        function: Callable[..., None],
        numbers: Sequence[str] = (),
        floats: Sequence[str] = (),
        any_address: Sequence[str] = (),
    ):
        self.name = function.__name__
        parameters = inspect.signature(function).parameters
        constants = [name for name, p in parameters.items() if "constexpr" in str(p.annotation)]
        described = {*numbers, *floats, *constants}
        strides = [name for name in parameters if name.endswith(STRIDES) and name not in described]
        tensors = [name for name in parameters if name not in described and name not in strides]
        expected = [*tensors, *strides, *numbers, *floats, *constants]
        if list(parameters) != expected or not {*any_address} <= {*tensors}:
            raise TypeError(f"{self.name} takes {', '.join(parameters)}; its description says {', '.join(expected)}")
        self.tensors, self.constants, self.any_address = tuple(tensors), tuple(constants), frozenset(any_address)
        self.arguments = tuple(expected[: len(expected) - len(constants)])
        self._pick = itemgetter(*self.arguments)
        self.num_tensors, self.num_numbers = len(tensors), len(numbers)
        self.cuts = (*itertools.accumulate([len(tensors), len(strides), len(numbers)]),)  # where each kind of argument ends
        self.jit: Any = triton.jit(do_not_specialize=[*numbers, *floats], do_not_specialize_on_alignment=[*any_address])(function)
        self.is_compiled = isinstance(self.jit, JITFunction)  # otherwise it is interpreted

    def variant(self, **given: Any) -> Variant:
        """The kernel with these constants and launch options. Keep it: what it has launched is remembered there."""
        if unknown := given.keys() - OPTIONS - {*self.constants}:
            raise TypeError(f"{self.name} has no constants or options {', '.join(sorted(unknown))}")
        if missing := {*self.constants} - given.keys():
            raise TypeError(f"{self.name} wants constants {', '.join(sorted(missing))}")
        options = {name: value for name, value in given.items() if name in OPTIONS and value is not None}
        return Variant(self, {name: given[name] for name in self.constants}, options)

    def in_order(self, named: Mapping[str, Any]) -> tuple:
        """Arguments by name, as the kernel takes them."""
        try:
            arguments = self._pick(named)
        except KeyError:
            raise self._misnamed(named) from None
        if len(named) != len(arguments):
            raise self._misnamed(named)
        return arguments

    def _misnamed(self, named: Mapping[str, Any]) -> TypeError:
        missing, unknown = [n for n in self.arguments if n not in named], [n for n in named if n not in self.arguments]
        said = [f"{what} {', '.join(names)}" for what, names in (("wants", missing), ("does not take", unknown)) if names]
        return TypeError(f"{self.name} {' and '.join(said)}")


class Variant:
    """A kernel with its constants, and what has been compiled of it. Safe to use from several threads.

    variant(grid, **arguments) launches `grid` programs on the current stream of the current device.
    """

    def __init__(self, kernel: Kernel, constants: dict[str, Any], options: dict[str, Any]):
        self.kernel, self.constants, self.options = kernel, constants, options
        self._known: dict[tuple, Direct] = {}

    def __call__(self, grid: int, /, **named: Any) -> None:
        kernel = self.kernel
        arguments = kernel.in_order(named)
        if not grid:
            return
        if current.log is not None:
            current.log.launches.append((self, grid, named))
        first = arguments[0]
        if first is None:
            first = next(t for t in arguments if t is not None)
        if not can_launch_directly(kernel, first):
            self._by_triton(grid, arguments)
            return
        i, j, k = kernel.cuts
        tensors, strides, numbers, rest = arguments[:i], arguments[i:j], arguments[j:k], arguments[j:]
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        device = current_device()
        key = (
            device,
            reduce(or_, addresses) % ALIGNMENT and tuple([a % ALIGNMENT == 0 for a in addresses]),
            reduce(or_, numbers, 0) >> 31 and _classes[numbers],
            *[t if t is None else t.dtype for t in tensors],
            *map(_class_of, strides),
        )
        launch = self._known.get(key)
        if launch is None:
            self._check_floats(rest)
            with warn_if_slow(f"compiling the Triton kernel {kernel.name}: some seconds, once for each GPU; {KEPT}"):
                self._known[key] = self._direct(self._by_triton(grid, arguments), strides, rest)
        elif not launch(current_stream(device), grid, addresses, strides, rest):
            self._by_triton(grid, arguments)

    def record(self, grid: int, of: Mapping[str, Address], /, **named: Any) -> tuple[int, Launcher]:
        """The current device, and a function that repeats this launch with other addresses (see `record.launcher`).

        Args:
            grid: programs along the one axis.
            of: for each tensor, where its address comes from.
            named: the arguments; of tensors only the addresses will differ.
        """
        kernel = self.kernel
        arguments = kernel.in_order(named)
        i = kernel.num_tensors
        compiled = kernel.jit.warmup(*arguments, *self.constants.values(), grid=(grid,), **self.options)
        run = compiled.run  # loads the module, so that `function` is there
        rest = (*arguments[i:], *self.constants.values())

        def plain(stream: int, numbers: tuple[int, ...], *addresses: int) -> None:
            run(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *rest)

        passed = [None if t is None else Passed(n) for n, t in enumerate(arguments[:i])]
        addresses = [of[name] for name in kernel.tensors]
        return driver.active.get_current_device(), record.launcher(addresses, plain, frame(compiled, grid, (*passed, *rest)))

    def _by_triton(self, grid: int, arguments: tuple) -> Any:
        return self.kernel.jit[(grid,)](*arguments, *self.constants.values(), **self.options)

    def _check_floats(self, rest: tuple) -> None:
        """Triton would compile for an integer where one is given. That numbers are integers shows when the key is made."""
        floats = rest[self.kernel.num_numbers :]
        for name, value in zip(self.kernel.arguments[len(self.kernel.arguments) - len(floats) :], floats):
            if not isinstance(value, float):
                raise TypeError(f"{self.kernel.name}: {name} is {value!r}; a float is needed")

    def _direct(self, compiled: Any, strides: tuple, rest: tuple) -> Direct:
        """How to launch this compiled kernel; `strides` and `rest` say how many numbers there are, and of which kind."""
        absent = [name for name in ("run", "function", "packed_metadata", "metadata", "src") if not hasattr(compiled, name)]
        if absent:
            _say_once(f"Triton {triton.__version__} has no {', '.join(absent)} of compiled kernels: launches go through its JIT")
            return lambda stream, grid, addresses, strides, rest: False
        return (
            from_c(compiled, self.kernel, strides, rest, tuple(self.constants.values()))
            or from_python(compiled, tuple(self.constants.values()))
        )  # fmt: skip


def can_launch_directly(kernel: Kernel, first: Tensor) -> bool:
    """Whether Triton need not be asked: its kernels are compiled, the tensors are on a GPU, and nobody listens."""
    return kernel.is_compiled and first.is_cuda and is_ready()


def is_ready() -> bool:
    """Whether there is no profiler that wants to hear of launches, and so must hear of this one from Triton."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return not (getattr(enter, "calls", enter is not None) or getattr(leave, "calls", leave is not None))


@functools.cache
def _say_once(what: str) -> None:
    logger.info("%s", what)


# What Triton compiles an integer for


class _Classes(dict):
    """Tuples of integers -> what Triton distinguishes of them, a letter each; None -> nothing."""

    MOST = 4096

    def __missing__(self, numbers: tuple[int, ...] | None) -> str:
        if len(self) >= self.MOST:
            self.clear()
        letters = "-" if numbers is None else "".join([_letter(n) for n in numbers])
        self[numbers] = letters
        return letters


def _letter(n: int) -> str:
    if n == 1:
        return "1"
    letter = "d" if n % 16 == 0 else "n"
    return letter if -(2**31) <= n < 2**31 else letter.upper() if n < 2**63 else "U"


_classes = _Classes()
_class_of = _classes.__getitem__


# Launching a compiled kernel: (stream, grid, addresses, strides, numbers and floats) -> whether it was launched

Direct = Callable[[int, int, Sequence[int], tuple, tuple], bool]


def from_python(compiled: Any, constants: tuple) -> Direct:
    """By Triton's own compiled launcher, which takes everything, constants too."""
    run = compiled.run  # loads the module, so that `function` is there
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(stream: int, grid: int, addresses: Sequence[int], strides: tuple, rest: tuple) -> bool:
        run(grid, 1, 1, stream, function, metadata, None, None, None, *addresses, *strides, *rest, *constants)
        return True

    return launch


def from_c(compiled: Any, kernel: Kernel, strides: tuple, rest: tuple, constants: tuple) -> Direct | None:
    """By the driver alone, from C; None where that cannot be.

    All arguments travel as 64-bit words: the grid, addresses, strides, numbers, floats.
    """
    lengths = [0 if s is None else len(s) for s in strides]
    num_floats = len(rest) - kernel.num_numbers
    num_words = 1 + kernel.num_tensors + sum(lengths) + len(rest)
    words = iter(range(1, num_words))
    tensors = [Passed(next(words)) for _ in range(kernel.num_tensors)]
    passed_strides = [tuple([Passed(next(words)) for _ in range(n)]) for n in lengths]
    numbers = [Passed(next(words), is_float=i >= kernel.num_numbers) for i in range(len(rest))]
    block = frame(compiled, Passed(0), (*tensors, *passed_strides, *numbers, *constants))
    if block is None or record._compiled() is None:
        return None
    call = record.launcher([Address(i) for i in range(num_words)], _unreachable, block)
    num_integers = num_words - 1 - kernel.num_tensors - num_floats
    pack = struct.Struct(f"<{1 + kernel.num_tensors}Q{num_integers}q" + "f4x" * num_floats).pack
    flat = itertools.chain.from_iterable

    def launch(stream: int, grid: int, addresses: Sequence[int], strides: tuple, rest: tuple) -> bool:
        return call(stream, pack(grid | ONE_ROW, *addresses, *flat(filter(None, strides)), *rest))

    return launch


def _unreachable(*arguments: Any) -> None:
    raise AssertionError("a launch from C was made from Python")


# From C: cuLaunchKernelEx(config, function, parameters, extra)

WORDS = struct.Struct("4Q")
CONFIG = struct.Struct("7I4x2QI4x")  # CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and their number
GRID, STREAM, ATTRIBUTES = 0, 32, 40  # offsets there
ONE_ROW = 1 << 32  # beside the programs along the first axis: one along the second
ATTRIBUTE = struct.Struct("I4xI60x")  # CUlaunchAttribute: which one, and its value
STARTS_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
WORD = 8
NUM_SCRATCH = 2  # last parameters of every kernel: addresses of scratch memory, which ours do not use
MAX_PARAMETERS = 60  # `native.c` has room for 64 pointers, of which a frame takes some for itself

# What a launch may need that is not done here.
UNUSUAL = ("launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")


@dataclass(frozen=True)
class Passed:
    """Stands for a word that each launch passes; all else of a frame is fixed."""

    number: int
    is_float: bool = False


def frame(compiled: Any, grid: int | Passed, arguments: Sequence[Any]) -> Frame | None:
    """A launch by the driver alone; None for a kernel that takes more than a grid and parameters.

    Args:
        compiled: Triton's compiled kernel, loaded where `compiled.run` has been asked for.
        grid: programs along the first axis.
        arguments: of all parameters, constants included, in the kernel's order.
    """
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or any([getattr(metadata, name, 0) for name in UNUSUAL]):
        return None
    compiled.run  # noqa: B018 (loads the module, so that `function` is there)
    values = [*parameters(tuple(compiled.src.signature.values()), arguments)]
    packed = [_packed(kind, value) for kind, value in values] + [bytes(WORD)] * NUM_SCRATCH
    function = _driver_function("cuLaunchKernelEx")
    if function is None or None in packed or len(packed) != num_parameters(compiled) or len(packed) > MAX_PARAMETERS:
        return None
    # four words | CUlaunchConfig | its attribute, if it has one | addresses of the parameters | parameters
    attributes = ATTRIBUTE.pack(STARTS_EARLY, 1) if metadata.launch_pdl else b""
    attributes_at = WORDS.size + CONFIG.size
    pointers_at = attributes_at + len(attributes)
    values_at = pointers_at + WORD * len(packed)
    words = WORDS.pack(0, compiled.function, 0, 0)
    programs = 0 if isinstance(grid, Passed) else grid
    config = CONFIG.pack(programs, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared, 0, 0, bool(attributes))
    places = [(value.number, values_at + WORD * i) for i, (_, value) in enumerate(values) if isinstance(value, Passed)]
    if isinstance(grid, Passed):
        places.append((grid.number, WORDS.size + GRID))
    return Frame(
        function,
        words + config + attributes + bytes(WORD * len(packed)) + b"".join(packed),  # type: ignore[arg-type]
        (
            (0, WORDS.size),
            *([(WORDS.size + ATTRIBUTES, attributes_at)] if attributes else []),
            (2 * WORD, pointers_at),
            *((pointers_at + WORD * i, values_at + WORD * i) for i in range(len(packed))),
        ),
        WORDS.size + STREAM,
        tuple(places),
        compiled,
    )


def parameters(types: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The types and values that reach the kernel: those of tuples one by one, no constants."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from parameters(kind, value)
        elif kind != "constexpr":
            yield kind, value


def _packed(kind: str, value: Any) -> bytes | None:
    """A parameter in the first bytes of a word, zeros for one that is passed; None for types that are not used here."""
    is_integer = kind.startswith("*") or re.fullmatch(r"[iu]\d+", kind)
    if isinstance(value, Passed):
        return bytes(WORD) if (kind == "fp32" if value.is_float else is_integer) else None
    if kind in ("fp32", "fp64"):
        return struct.pack("f4x" if kind == "fp32" else "d", value)
    return (int(value) % 2**64).to_bytes(WORD, "little") if is_integer else None


def num_parameters(compiled: Any) -> int:
    """As the compiled kernel has them; -1 where that cannot be seen, in a cache that has only binaries."""
    ptx = compiled.asm.get("ptx", "")
    declared = re.search(rf"\.entry\s+{re.escape(compiled.name)}\((.*?)\)", ptx, re.DOTALL)
    return declared[1].count(".param") if declared else -1


def _driver_function(name: str) -> int | None:
    try:
        return ctypes.cast(getattr(ctypes.CDLL("libcuda.so.1"), name), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
