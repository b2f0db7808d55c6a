# SPDX-License-Identifier: Apache-2.0
"""The definition of Gated DeltaNet, token by token in float64: slow, short, and what every backend is measured against.

It shares no code with any backend nor with KDA's, follows one sequence at a time, and is differentiable: its autograd gradients
are the reference for gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cula.core.constants import L2_NORM_EPS, SOFTPLUS_THRESHOLD
from cula.core.reference import first_state, sequences, stack


def gdn_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """The log decay of a raw gate g [..., HV]: `-exp(A_log) softplus(g + dt_bias)`."""
    z = g.double() if dt_bias is None else g.double() + dt_bias.double()
    return -A_log.double().flatten().exp() * torch.nn.functional.softplus(z, threshold=SOFTPLUS_THRESHOLD)


def gdn(
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
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, HV, V], final_state [N, HV, V, K]), both float64.

    S <- exp(g_t) S;  S <- S + beta_t (v_t - S k_t) k_t^T;  o_t = scale S q_t
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    q, k, v, beta = q.double(), k.double(), v.double(), beta.double()
    if use_gate_in_kernel:
        assert A_log is not None
        g = gdn_gate(g, A_log, dt_bias)
    g = g.double()
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
            q_t, k_t = (x[row, t].repeat_interleave(HV // H, dim=0)[:, None, :] for x in (q, k))  # [HV, 1, K]
            S = S * g[row, t].exp()[:, None, None]
            u = beta[row, t, :, None] * (v[row, t] - (S * k_t).sum(-1))  # [HV, V]
            S = S + u[:, :, None] * k_t
            outputs.append(scale * (S * q_t).sum(-1))
        states.append(S)
    return stack(outputs, B, T, HV, V, q), torch.stack(states)
