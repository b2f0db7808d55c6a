# SPDX-License-Identifier: Apache-2.0
"""What a repeated call asks of torch before it launches, by the names that answer in a tenth of the time.

torch's public functions for these take a microsecond or two each, of the ten or so that a call has. What they stand on is
what compiled code calls (`torch._inductor`); it is not public, so where it is missing the public functions do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# The number of the current CUDA device. Only once CUDA is initialised, as it is where there is a CUDA tensor.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

# The current stream of a device, as the number that a launch takes.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)

# A tensor of a shape, strides and dtype on the current CUDA device, from torch's allocator.
empty: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor] = getattr(_guards, "_empty_strided_cuda", _empty)


# Whether what the current stream is given now goes to a CUDA graph.
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


# How many `TorchDispatchMode`s are on: `make_fx`, selective checkpointing, counters. They see operators, and not what is launched
# beside them.
modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def is_forward_mode() -> bool:
    """Whether a level of forward-mode AD is open: outside of one no tensor has a tangent. False where torch does not say."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def form_of(t: Tensor) -> Form:
    """The shape, strides and dtype of a tensor, from which `empty` makes another like it."""
    return tuple(t.shape), t.stride(), t.dtype
