# SPDX-License-Identifier: Apache-2.0
"""What holds while kernels run: the device that they launch on, and no autocast."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def running_on(t: Tensor) -> contextlib.AbstractContextManager[None]:
    """Where the kernels of a call run.

    Kernels launch on the current device, so make it that of the tensors. (Autograd does so by itself.) And `torch.autocast` is
    off: it would change the dtypes of products inside of a backend that is written in torch, and tensors are taken as they
    come.
    """
    is_elsewhere = t.is_cuda and t.device.index != torch.cuda.current_device()
    casts = t.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(t.device.type)
    if not (is_elsewhere or casts):
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    if is_elsewhere:
        stack.enter_context(torch.cuda.device(t.device))
    if casts:
        stack.enter_context(torch.autocast(t.device.type, enabled=False))
    return stack  # type: ignore[return-value]
