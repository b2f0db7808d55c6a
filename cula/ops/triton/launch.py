# SPDX-License-Identifier: Apache-2.0
"""Launching a compiled kernel again, without asking Triton which one it is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

from cula.ops.host import current_device

ALIGNMENT = 16  # bytes: Triton compiles one kernel for addresses that are multiples of this, another for all others


class Launch:
    """A kernel compiled for certain shapes, strides and dtypes, to be launched on any tensors that have them.

    Triton's own call derives the specialisation from every argument each time, which takes the host several times as
    long as a short kernel takes the GPU. Here only addresses and the stream are new. A caller in a hurry puts them in place by
    itself; a function that does it would be a third of what is left for Python to do:

        launch.run(*launch.before, current_stream(launch.device), *launch.after, *addresses, *launch.rest)

    Addresses stand in the order of the tensors, 0 for None.

    Args:
        kernel: a `triton.jit` function whose first parameters are the tensors.
        grid: programs along the one axis.
        tensors: those of a call; None where a parameter is None.
        rest: all other parameters, constants included, in order.
        options: `num_warps` and so on.
    """

    def __init__(self, kernel: Any, grid: int, tensors: Sequence[Tensor | None], rest: Sequence[Any], **options: Any):
        compiled = kernel.warmup(*tensors, *rest, grid=(grid,), **options)
        self.device: int = driver.active.get_current_device()
        self.rest = tuple(rest)
        run = compiled.run  # loads the module, so that `function` is there
        after_stream = (compiled.function, compiled.packed_metadata, None, None, None)
        self.run, self.before, self.after = _unwrapped(run, (grid, 1, 1), after_stream, (*tensors, *rest))

    def fits(self) -> bool:
        """Whether a launch may happen now: on the kernel's device, and with no profiler that wants to hear of it."""
        return current_device() == self.device and not _is_hooked()


def _unwrapped(run: Any, grid: tuple[int, int, int], after_stream: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """The C function behind a kernel's launcher, and what that passes to it before the stream and after it.

    The launcher is Python and costs two microseconds; what it adds differs between releases. So one that only records is
    asked once. Where there is no such function, or it needs scratch memory for each launch, the launcher itself.
    """
    passed: list[tuple[Any, ...]] = []
    if hasattr(run, "launch"):
        recorder = copy.copy(run)
        recorder.launch = lambda *all: passed.append(all)
        stream = object()
        recorder(*grid, stream, *after_stream, *arguments)
        before_arguments = passed[0][: len(passed[0]) - len(arguments)] if passed else ()
        needs_scratch = any(isinstance(x, Tensor) for x in before_arguments)
        if before_arguments[3:4] == (stream,) and not needs_scratch:
            return run.launch, before_arguments[:3], before_arguments[4:]
    return run, grid, after_stream


def _is_hooked() -> bool:
    hooks = knobs.runtime.launch_enter_hook
    return bool(getattr(hooks, "calls", hooks is not None))
