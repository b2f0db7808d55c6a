# SPDX-License-Identifier: Apache-2.0
"""The definition of Lightning Attention, token by token in float64; see `cula/kda/reference.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.core.reference import first_state, sequences, stack


def lightning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, HV, V], final_state [N, HV, V, K]), both float64.

    S <- exp(-s) S + v_t k_t^T;  o_t = scale S q_t
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    q, k, v = q.double(), k.double(), v.double()
    factor = (-decay.double()).exp()[:, None, None]
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for row, start, end in sequences(B, T, cu_seqlens):
        S = first_state(initial_state, len(states), HV, V, K, q.device)
        for t in range(start, end):
            q_t, k_t = (x[row, t].repeat_interleave(HV // H, dim=0) for x in (q, k))
            S = factor * S + v[row, t][:, :, None] * k_t[:, None, :]
            outputs.append(scale * (S * q_t[:, None, :]).sum(-1))
        states.append(S)
    return stack(outputs, B, T, HV, V, q), torch.stack(states)
