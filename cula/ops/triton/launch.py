# SPDX-License-Identifier: Apache-2.0
"""Launching a compiled kernel again, without asking Triton which one it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

ALIGNMENT = 16  # bytes: Triton compiles one kernel for addresses that are multiples of this, another for all others


class Launch:
    """A kernel compiled for certain shapes, strides and dtypes, to be launched on any tensors that have them.

    Triton's own call derives the specialisation from every argument each time, which takes the host several times as
    long as a short kernel takes the GPU. Here only addresses and the stream are new.

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
        self._run = compiled.run  # loads the module, so that `function` is there
        self._before = (compiled.function, compiled.packed_metadata, None, None, None)
        self._grid, self._rest = grid, tuple(rest)
        self._current_device, self._stream_of = driver.active.get_current_device, driver.active.get_current_stream

    def fits(self) -> bool:
        """Whether a launch may happen now: on the kernel's device, and with no profiler that wants to hear of it."""
        return self._current_device() == self.device and not _is_hooked()

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch on the current stream. Addresses stand in the order of the tensors, 0 for None."""
        self._run(self._grid, 1, 1, self._stream_of(self.device), *self._before, *addresses, *self._rest)


def _is_hooked() -> bool:
    hooks = knobs.runtime.launch_enter_hook
    return bool(getattr(hooks, "calls", hooks is not None))
