# SPDX-License-Identifier: Apache-2.0
"""The device that kernels launch on."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def on_device_of(t: Tensor) -> contextlib.AbstractContextManager[None]:
    """Kernels launch on the current device, so make it that of the tensors. (Autograd does so by itself.)"""
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        return torch.cuda.device(t.device)
    return contextlib.nullcontext()
