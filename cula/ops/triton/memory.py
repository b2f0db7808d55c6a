# SPDX-License-Identifier: Apache-2.0
"""New tensors for results and for what kernels hand on to each other."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cula.core.replay import torch_internals

New = Callable[[tuple[int, ...], torch.dtype], Tensor]


def allocator(device: torch.device) -> New:
    """A function of shape and dtype that makes contiguous tensors on this device, which is the current one if it is a GPU."""
    return _on_gpu if device.type == "cuda" else functools.partial(_elsewhere, device)


def _on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch_internals.empty(shape, _contiguous(shape), dtype)
    return made if current.log is None else current.log.keep(made)


def _elsewhere(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    return made if current.log is None else current.log.keep(made)


# What a call allocates and launches, where somebody records it


class Log:
    """New tensors, all kept, and launches: (variant, grid, arguments by name)."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.launches: list[tuple[Any, int, dict[str, Any]]] = []

    def keep(self, t: Tensor) -> Tensor:
        self.tensors.append(t)
        return t


class _Current(threading.local):
    log: Log | None = None


current = _Current()


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
