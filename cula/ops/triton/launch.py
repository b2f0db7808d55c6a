# SPDX-License-Identifier: Apache-2.0
"""Launching a compiled kernel again, without asking Triton which one it is."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

from cula.core.replay.record import Address, Frame, launcher

ALIGNMENT = 16  # bytes: Triton compiles one kernel for addresses that are multiples of this, another for all others


class Launch:
    """A kernel compiled for certain shapes, strides and dtypes, to be launched on any tensors that have them.

    Triton's own call derives the specialisation from every argument each time, which takes the host several times as
    long as a short kernel takes the GPU. Here only addresses and the stream are new:

        launch.is_ready() and launch.run(stream, addresses, *outputs)    # as in `native.py`

    Args:
        kernel: a `triton.jit` function whose first parameters are tensors.
        grid: programs along the one axis.
        tensors: those of a call; None where a parameter is None.
        rest: all other parameters, constants included, in order.
        of: where the addresses of the tensors come from.
        options: `num_warps` and so on.
    """

    def __init__(
        self, kernel: Any, grid: int, tensors: Sequence[Tensor | None], rest: Sequence[Any], of: Sequence[Address], **options: Any
    ):
        compiled = kernel.warmup(*tensors, *rest, grid=(grid,), **options)
        self.device: int = driver.active.get_current_device()
        launch = compiled.run  # loads the module, so that `function` is there

        def plain(stream: int, *addresses: int) -> None:
            launch(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *rest)

        self.run = launcher(of, plain, frame(compiled, grid, tensors, rest))

    @staticmethod
    def is_ready() -> bool:
        """Whether there is no profiler that wants to hear of launches, and so must hear of this one from Triton."""
        hooks = knobs.runtime.launch_enter_hook
        return not getattr(hooks, "calls", hooks is not None)


# From C: cuLaunchKernelEx(config, function, parameters, extra)

WORDS = struct.Struct("4Q")
CONFIG = struct.Struct("7I4x2QI4x")  # CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and their number
STREAM, ATTRIBUTES = 32, 40  # offsets there
ATTRIBUTE = struct.Struct("I4xI60x")  # CUlaunchAttribute: which one, and its value
STARTS_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
WORD = 8
NUM_SCRATCH = 2  # last parameters of every kernel: addresses of scratch memory, which ours do not use

# What a launch may need that is not done here.
UNUSUAL = ("launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")


def frame(compiled: Any, grid: int, tensors: Sequence[Tensor | None], rest: Sequence[Any]) -> Frame | None:
    """A launch by the driver alone; None for a kernel that takes more than a grid and parameters."""
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or any([getattr(metadata, name, 0) for name in UNUSUAL]):
        return None
    tensor_numbers = [i for i, t in enumerate(tensors) if t is not None]
    types = tuple(compiled.src.signature.values())
    values = [_packed(kind, value) for kind, value in parameters(types, (*([0] * len(tensors)), *rest))]
    values += [bytes(WORD)] * NUM_SCRATCH
    function = _driver_function("cuLaunchKernelEx")
    if function is None or None in values or len(values) != num_parameters(compiled):
        return None
    # four words | CUlaunchConfig | its attribute, if it has one | addresses of the parameters | parameters
    attributes = ATTRIBUTE.pack(STARTS_EARLY, 1) if metadata.launch_pdl else b""
    attributes_at = WORDS.size + CONFIG.size
    pointers_at = attributes_at + len(attributes)
    values_at = pointers_at + WORD * len(values)
    words = WORDS.pack(0, compiled.function, 0, 0)
    config = CONFIG.pack(grid, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared, 0, 0, bool(attributes))
    return Frame(
        function,
        words + config + attributes + bytes(WORD * len(values)) + b"".join(values),  # type: ignore[arg-type]
        (
            (0, WORDS.size),
            *([(WORDS.size + ATTRIBUTES, attributes_at)] if attributes else []),
            (2 * WORD, pointers_at),
            *((pointers_at + WORD * i, values_at + WORD * i) for i in range(len(values))),
        ),
        WORDS.size + STREAM,
        tuple((tensor, values_at + WORD * i) for i, tensor in enumerate(tensor_numbers)),
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
    """A parameter in the first bytes of a word; None for types that are not used here."""
    if kind in ("fp32", "fp64"):
        return struct.pack("f4x" if kind == "fp32" else "d", value)
    if kind.startswith("*") or re.fullmatch(r"[iu]\d+", kind):
        return (int(value) % 2**64).to_bytes(WORD, "little")
    return None


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
