# SPDX-License-Identifier: Apache-2.0
"""New tensors for results and for what kernels hand on to each other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cula.core.replay import torch_internals

New = Callable[[tuple[int, ...], torch.dtype], Tensor]


def allocator(device: torch.device) -> New:
    """A function of shape and dtype that makes contiguous tensors on this device, which is the current one if it is a GPU."""
    return _on_gpu if device.type == "cuda" else functools.partial(_elsewhere, device)


def _on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch_internals.empty(shape, _contiguous(shape), dtype)


def _elsewhere(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
