# SPDX-License-Identifier: Apache-2.0
"""What functions with flash-linear-attention's signatures share: its state layout, and keywords that it ignores."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor


def state_layout(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """Whether states are `[N, HV, V, K]`: FLA's `state_v_first`, or its deprecated name with FLA's words."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`.")
    warnings.warn(
        "`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning, stacklevel=3
    )  # fmt: skip
    return transpose_state_layout


def warn_of_ignored(who: str, kwargs: dict[str, Any]) -> None:
    if kwargs:
        warnings.warn(f"{who}: ignores {', '.join(kwargs)}, as flash-linear-attention does", stacklevel=3)


def own_states(q: Tensor, v: Tensor, initial_state: Tensor | None, state_v_first: bool) -> Tensor:
    """States in the caller's layout that a decode may write."""
    if initial_state is not None:
        return initial_state.float().clone(memory_format=torch.contiguous_format)
    inner = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return torch.zeros(q.shape[0], v.shape[2], *inner, dtype=torch.float32, device=q.device)


def swap_layout(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """Between the caller's layout and [N, HV, V, K], in float32."""
    if state is None:
        return None
    state = state.float()
    return state if state_v_first else state.transpose(-1, -2).contiguous()
