# SPDX-License-Identifier: Apache-2.0
"""The definition of KDA, token by token in float64: slow, short, and what every backend is measured against.

It shares no code with any backend, follows one sequence at a time, and is differentiable: its autograd gradients are the
reference for gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cula.core.constants import L2_NORM_EPS
from cula.core.reference import first_state, sequences, stack


def kda_gate(g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None) -> Tensor:
    """The log decay of a raw gate g [..., HV, K] (or [..., HV]: one gate a head)."""
    HV = g.shape[2]
    per_head = (HV, 1) if g.dim() == 4 else (HV,)
    z = g.double() if dt_bias is None else g.double() + dt_bias.double().reshape(g.shape[2:])
    rate = g.new_ones((), dtype=torch.float64) if A_log is None else A_log.double().exp().view(per_head)
    if lower_bound is None:
        return -rate * torch.nn.functional.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, HV, V], final_state [N, HV, V, K]), both float64.

    S <- S diag(exp g_t);  S <- S + beta_t (v_t - S k_t) k_t^T;  o_t = scale S q_t
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    q, k, v, beta = q.double(), k.double(), v.double(), beta.double()
    g = kda_gate(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g.double()
    if g.dim() == 3:
        g = g[..., None].expand(B, T, HV, K)
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + L2_NORM_EPS).sqrt() for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for row, start, end in sequences(B, T, cu_seqlens):
        S = first_state(initial_state, len(states), HV, V, K, q.device)
        for t in range(start, end):
            # value head hv reads query/key head hv // (HV // H)
            q_t, k_t = (x[row, t].repeat_interleave(HV // H, dim=0) for x in (q, k))  # [HV, K]
            S = S * g[row, t].exp()[:, None, :]
            u = beta[row, t, :, None] * (v[row, t] - (S * k_t[:, None, :]).sum(-1))  # [HV, V]
            S = S + u[:, :, None] * k_t[:, None, :]
            outputs.append(scale * (S * q_t[:, None, :]).sum(-1))
        states.append(S)
    return stack(outputs, B, T, HV, V, q), torch.stack(states)
