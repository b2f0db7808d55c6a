# SPDX-License-Identifier: Apache-2.0
"""Tensors in the form that the CuTe kernels take them, and those that they write to."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cula.core.problem import Problem
from cula.ops.cute.abi import TMA_BYTES


def as_tokens(t: Tensor) -> Tensor:
    """[B, T, H, D] or [B, T, H] whose first two dimensions flatten into one with the stride of the second, and which TMA can
    address; a copy only where it is not so already."""
    unit = TMA_BYTES // t.element_size() if t.dim() == 4 else 1
    B, T = t.shape[:2]
    stride = t.stride()
    is_flat = B == 1 or stride[0] == T * stride[1]
    is_spread = all(s > 0 and s % unit == 0 for s in stride[:-1])  # a dimension that was expanded has stride 0
    if is_flat and is_spread and stride[-1] == 1 and (t.dim() == 3 or t.data_ptr() % TMA_BYTES == 0):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def as_states(t: Tensor) -> Tensor:
    """Contiguous states at an address that is read 16 bytes at a time."""
    return t if t.data_ptr() % TMA_BYTES == 0 else t.clone()


@functools.cache
def sms_of(device: torch.device) -> int:
    """SMs of a GPU of this machine."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def empty_output(p: Problem, device: torch.device, out: Tensor | None) -> Tensor:
    """What takes o: the caller's tensor where there is one."""
    return torch.empty((p.B, p.T, p.HV, p.V), dtype=p.dtype, device=device) if out is None else out


def empty_final_state(p: Problem, device: torch.device) -> Tensor | None:
    """What takes the final states, where they are asked for."""
    if not p.options.output_final_state:
        return None
    return torch.empty((p.N, p.HV, p.V, p.K), dtype=torch.float32, device=device)


@functools.cache
def zeros_on(device: torch.device, *shape: int) -> Tensor:
    """Zeros in float32, which stand for a gate's parameter where a call has none. Nobody writes to them."""
    return torch.zeros(shape, dtype=torch.float32, device=device)


def stream_of(device: torch.device) -> int:
    """The stream that a call's kernels go to."""
    return torch.cuda.current_stream(device).cuda_stream


def address(t: Tensor | None) -> int:
    """As kernels take it: 0 for a tensor that a call does not have."""
    return 0 if t is None else t.data_ptr()
