# SPDX-License-Identifier: Apache-2.0
"""What machine this is, for code that names hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cula.core.checks import compute_capability


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def get_device_sm_version(device: torch.device | str | None = None) -> tuple[int, int]:
    """Compute capability of a CUDA device, (9, 0) for Hopper; RuntimeError for a device that has none."""
    device = _device(device)
    sm = compute_capability(device)
    if sm is None:
        raise RuntimeError(f"get_device_sm_version: {device} is not a CUDA device and has no compute capability")
    return sm


def is_hopper(device: torch.device | str | None = None) -> bool:
    """Whether the device is SM90."""
    return compute_capability(_device(device)) == (9, 0)


def is_blackwell(device: torch.device | str | None = None) -> bool:
    """Whether the device is a data-centre Blackwell, SM100 or SM103."""
    return compute_capability(_device(device)) in ((10, 0), (10, 3))


def assert_hopper(device: torch.device | str | None = None) -> None:
    """RuntimeError unless the device is SM90."""
    if not is_hopper(device):
        raise RuntimeError(f"needs a Hopper GPU (compute capability 9.0); this is {describe_device(device)}")


def assert_blackwell(device: torch.device | str | None = None) -> None:
    """RuntimeError unless the device is SM100 or SM103."""
    if not is_blackwell(device):
        raise RuntimeError(f"needs a Blackwell GPU (compute capability 10.0 or 10.3); this is {describe_device(device)}")


def describe_device(device: torch.device | str | None = None) -> str:
    """ "NVIDIA H200 (cuda:0, SM 9.0)", or "cpu"."""
    device = _device(device)
    sm = compute_capability(device)
    if sm is None:
        return str(device)
    return f"{torch.cuda.get_device_name(device)} ({device}, SM {sm[0]}.{sm[1]})"


def get_kda_fused_fwd(device: torch.device | str | None = None) -> Callable[..., Any]:
    """The fastest KDA prefill with `chunk_kda`'s signature for a device. It is `chunk_kda` itself, which is dispatched: to fused
    kernels where there are some, to modular ones elsewhere."""
    from cula.kda.fla import chunk_kda

    return chunk_kda
