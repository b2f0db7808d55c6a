# SPDX-License-Identifier: Apache-2.0
"""Tensors in the form that the CuTe kernels take them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

TMA_BYTES = 16  # addresses and strides that TMA reads from are multiples of this


def as_tokens(t: Tensor) -> Tensor:
    """[B, T, H, D] -> [B T, H, D], as TMA can address it; a copy only where it could not."""
    flat = t.flatten(0, 1)
    size = t.element_size()
    if (
        flat.data_ptr() % TMA_BYTES
        or flat.stride(0) * size % TMA_BYTES
        or flat.stride(1) * size % TMA_BYTES
        or flat.stride(2) != 1
    ):
        return flat.clone(memory_format=torch.contiguous_format)
    return flat


@functools.cache
def no_states(device: torch.device, V: int, K: int) -> Tensor:
    """For where a call has no states: of the right form, and empty."""
    return torch.empty((0, 1, V, K), dtype=torch.float32, device=device)


@functools.cache
def no_places(device: torch.device) -> Tensor:
    """For where a call has no offsets or indices."""
    return torch.empty(0, dtype=torch.int32, device=device)
