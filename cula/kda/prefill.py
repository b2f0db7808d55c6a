# SPDX-License-Identifier: Apache-2.0
"""Fused KDA prefill kernels by the hardware they are written for."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from cula.utils import assert_blackwell, assert_hopper


def kda_prefill_hopper(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> NoReturn:
    """The fused Hopper prefill. RuntimeError off SM90; not in this release: `chunk_kda` runs there."""
    assert_hopper(q.device)
    raise NotImplementedError("kda_prefill_hopper: this release has no fused Hopper kernel; use cula.cula_kda or chunk_kda")


def kda_prefill_blackwell(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> NoReturn:
    """The fused Blackwell prefill. RuntimeError off SM100/SM103; not in this release: `chunk_kda` runs there."""
    assert_blackwell(q.device)
    raise NotImplementedError("kda_prefill_blackwell: this release has no fused Blackwell kernel; use cula.cula_kda or chunk_kda")
