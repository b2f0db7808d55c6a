# SPDX-License-Identifier: Apache-2.0
"""What the float64 definitions of all families share: sequences, first states, and how far a result is off."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| over the whole tensor; the absolute error where want is all zero."""
    got, want = got.detach(), want.detach().double()
    difference = (got.double() - want).norm()
    return float(difference / want.norm()) if bool(want.any()) else float(difference)


def sequences(B: int, T: int, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(batch row, first token, end) of each sequence."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    offsets = cu_seqlens.tolist()
    return [(0, a, z) for a, z in itertools.pairwise(offsets)]


def first_state(initial_state: Tensor | None, n: int, HV: int, V: int, K: int, device: torch.device) -> Tensor:
    if initial_state is None:
        return torch.zeros(HV, V, K, dtype=torch.float64, device=device)
    return initial_state[n].double()


def stack(outputs: list[Tensor], B: int, T: int, HV: int, V: int, like: Tensor) -> Tensor:
    return torch.stack(outputs).view(B, T, HV, V) if outputs else like.new_zeros(B, T, HV, V)
