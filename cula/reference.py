# SPDX-License-Identifier: Apache-2.0
"""The definitions, token by token in float64: slow, short, and what every backend is measured against.

These functions share no code with any backend. Each follows one sequence and one value head at a time; everything
else (packing, groups, gates) is written out where it is used, so that the page can be checked by eye. They are
differentiable, so their autograd gradients are the reference for gradients.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


def kda_gate(g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None) -> Tensor:
    """The log decay of a raw gate g [..., HV, K] (or [..., HV]: one gate a head)."""
    HV = g.shape[2]
    per_head = (HV, 1) if g.dim() == 4 else (HV,)
    z = g.double() if dt_bias is None else g.double() + dt_bias.double().reshape(g.shape[2:])
    rate = torch.ones((), dtype=torch.float64) if A_log is None else A_log.double().exp().view(per_head)
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
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for row, start, end in _sequences(B, T, cu_seqlens):
        S = _first_state(initial_state, len(states), HV, V, K, q.device)
        for t in range(start, end):
            # value head hv reads query/key head hv // (HV // H)
            q_t, k_t = (x[row, t].repeat_interleave(HV // H, dim=0) for x in (q, k))  # [HV, K]
            S = S * g[row, t].exp()[:, None, :]
            u = beta[row, t, :, None] * (v[row, t] - (S * k_t[:, None, :]).sum(-1))  # [HV, V]
            S = S + u[:, :, None] * k_t[:, None, :]
            outputs.append(scale * (S * q_t[:, None, :]).sum(-1))
        states.append(S)
    return _stack(outputs, B, T, HV, V, q), torch.stack(states)


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
    for row, start, end in _sequences(B, T, cu_seqlens):
        S = _first_state(initial_state, len(states), HV, V, K, q.device)
        for t in range(start, end):
            q_t, k_t = (x[row, t].repeat_interleave(HV // H, dim=0) for x in (q, k))
            S = factor * S + v[row, t][:, :, None] * k_t[:, None, :]
            outputs.append(scale * (S * q_t[:, None, :]).sum(-1))
        states.append(S)
    return _stack(outputs, B, T, HV, V, q), torch.stack(states)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    mode: str = "kda",
    state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    null_index: str = "negative",
    commit: bool = True,
    decay: Tensor | None = None,
    scale: float | None = None,
    **kda_arguments: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(o [N, T, HV, V], the pool afterwards, the intermediate states afterwards), float64; nothing is changed in place.

    A row at a time, a token at a time: `kda` or `lightning` on one token from the row's state.
    """
    N, T, HV, V = v.shape
    pool = state.double().clone()
    kept = None if intermediate_states is None else intermediate_states.double().clone()
    o = torch.zeros(N, T, HV, V, dtype=torch.float64, device=q.device)
    per_token: dict[str, Tensor] = {name: x for name, x in kda_arguments.items() if name in ("g", "beta")}
    constant = {name: x for name, x in kda_arguments.items() if name not in per_token}

    def is_null(slot: int) -> bool:
        return slot <= 0 if null_index == "nonpositive" else slot < 0

    for n in range(N):
        accepted = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n])
        slots = [n] * T if state_indices is None else state_indices[n].expand(T).tolist()
        slot_per_token = state_indices is not None and state_indices.dim() == 2
        start = slots[max(accepted - 1, 0)] if slot_per_token else slots[0]
        if state_indices is not None and is_null(start):
            continue
        S = pool[start]
        if accepted > 0 and kept is not None:
            S = kept[n, accepted - 1].clone()
        for t in range(T):
            q_t, k_t, v_t = (x[n : n + 1, t : t + 1] for x in (q, k, v))
            if mode == "kda":
                here: dict[str, Any] = {name: x[n : n + 1, t : t + 1] for name, x in per_token.items()}
                o_t, S_t = kda(q_t, k_t, v_t, **here, scale=scale, initial_state=S[None], **constant)
            else:
                assert decay is not None
                o_t, S_t = lightning(q_t, k_t, v_t, decay, scale=scale, initial_state=S[None])
            o[n, t], S = o_t[0, 0], S_t[0]
            if kept is not None:
                kept[n, t] = S
            if commit and slot_per_token and not is_null(slots[t]):
                pool[slots[t]] = S
        if commit and not slot_per_token:
            pool[start] = S
    return o, pool, kept


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| over the whole tensor; the absolute error where want is all zero."""
    got, want = got.detach(), want.detach().double()
    difference = (got.double() - want).norm()
    return float(difference / want.norm()) if bool(want.any()) else float(difference)


def _sequences(B: int, T: int, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(batch row, first token, end) of each sequence."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    offsets = cu_seqlens.tolist()
    return [(0, a, z) for a, z in itertools.pairwise(offsets)]


def _first_state(initial_state: Tensor | None, n: int, HV: int, V: int, K: int, device: torch.device) -> Tensor:
    if initial_state is None:
        return torch.zeros(HV, V, K, dtype=torch.float64, device=device)
    return initial_state[n].double()


def _stack(outputs: list[Tensor], B: int, T: int, HV: int, V: int, like: Tensor) -> Tensor:
    return torch.stack(outputs).view(B, T, HV, V) if outputs else like.new_zeros(B, T, HV, V)
