# SPDX-License-Identifier: Apache-2.0
"""One to eight tokens a row on a pool of states, in plain PyTorch. The pool is updated in place and never copied whole.

KDA, for each token:        S <- S diag(exp g);  S <- S + beta (v - S k) k^T;  o = scale S q
Lightning, for each token:  S <- exp(-s) S + v k^T;                            o = scale S q
"""

from __future__ import annotations

import torch
from torch import Tensor

from cula.contract import DecodeInputs, DecodeProblem
from cula.ops.torch import gate


def decode(problem: DecodeProblem, x: DecodeInputs) -> Tensor:
    """See `cula.ops`; `cula.api.cula_decode` says what each tensor means."""
    p, opt = problem, problem.options
    live, S = _first_states(p, x)  # [N], [N, HV, V, K]
    q, k, v = x.q.float(), x.k.float(), x.v.float()
    if opt.use_qk_l2norm_in_kernel:
        q, k = gate.l2_normalise(q)[0], gate.l2_normalise(k)[0]
    q = q * p.scale
    q, k = (t.repeat_interleave(p.HV // p.H, dim=2) for t in (q, k))  # [N, T, HV, K]
    decay, beta = _decays(p, x)  # [N, T, HV, 1, K or 1], [N, T, HV, 1] or None

    o = x.q.new_empty(p.N, p.T, p.HV, p.V) if x.out is None else x.out
    for t in range(p.T):
        k_t, q_t = k[:, t, :, None, :], q[:, t, :, None, :]  # [N, HV, 1, K]
        S *= decay[:, t]
        u = v[:, t] if beta is None else beta[:, t] * (v[:, t] - (S * k_t).sum(-1))  # [N, HV, V]
        S.addcmul_(u.unsqueeze(-1), k_t)
        o_t = (S * q_t).sum(-1)
        o[:, t] = torch.where(live[:, None, None], o_t, 0).to(o.dtype)
        if x.intermediate_states is not None:
            _store(x.intermediate_states[:, t], _rows(p), live, S, opt.state_is_kv)
        if opt.commit and p.has_token_indices:
            assert x.state_indices is not None
            slots = x.state_indices[:, t].long()
            _store(x.state, slots, live & ~_is_null(slots, opt.null_is_nonpositive), S, opt.state_is_kv)
    if opt.commit and not p.has_token_indices:
        slots = _rows(p) if x.state_indices is None else x.state_indices.long()
        _store(x.state, slots.to(S.device), live, S, opt.state_is_kv)
    return o


def _first_states(p: DecodeProblem, x: DecodeInputs) -> tuple[Tensor, Tensor]:
    """Which rows are live, and the state each starts from (zeros for the others), [N, HV, V, K] float32."""
    opt, device = p.options, x.q.device
    rows = _rows(p).to(device)
    accepted = None if x.num_accepted_tokens is None else x.num_accepted_tokens.long()
    if x.state_indices is None:
        slots = rows
    elif p.has_token_indices:
        last = torch.zeros_like(rows) if accepted is None else (accepted - 1).clamp(min=0)
        slots = x.state_indices.long()[rows, last]
    else:
        slots = x.state_indices.long()
    live = torch.ones_like(slots, dtype=torch.bool) if x.state_indices is None else ~_is_null(slots, opt.null_is_nonpositive)
    S = _load(x.state, slots, live, opt.state_is_kv)
    if accepted is not None and x.intermediate_states is not None:
        kept = x.intermediate_states[rows, (accepted - 1).clamp(min=0)].float()
        kept = kept.mT if opt.state_is_kv else kept
        S = torch.where((live & (accepted > 0))[:, None, None, None], kept, S)
    return live, S.contiguous()


def _decays(p: DecodeProblem, x: DecodeInputs) -> tuple[Tensor, Tensor | None]:
    """The state's factor, [N, T, HV, 1, K or 1], and beta [N, T, HV, 1] (None for Lightning)."""
    opt = p.options
    if not opt.is_kda:
        assert x.decay is not None
        return (-x.decay).exp().view(1, 1, p.HV, 1, 1).expand(p.N, p.T, -1, -1, -1), None
    assert x.g is not None and x.beta is not None
    g = x.g.float().unsqueeze(-1) if p.has_scalar_gate else x.g.float()  # [N, T, HV, K or 1]
    A = None if x.A_log is None else x.A_log.exp().view(p.HV, 1)
    bias = None if x.dt_bias is None else x.dt_bias.view(p.HV, -1)
    g = gate.log_decay(p.gate, g, A, bias, opt.lower_bound)
    beta = gate.beta_value(x.beta.float(), opt.use_beta_sigmoid_in_kernel, opt.allow_neg_eigval)
    return g.exp().unsqueeze(-2), beta.unsqueeze(-1)


def _rows(p: DecodeProblem) -> Tensor:
    return torch.arange(p.N)


def _is_null(slots: Tensor, null_is_nonpositive: bool) -> Tensor:
    return slots <= 0 if null_is_nonpositive else slots < 0


def _load(pool: Tensor, slots: Tensor, live: Tensor, is_kv: bool) -> Tensor:
    """The live rows' slots; zeros elsewhere, whose slots are not read."""
    S = torch.zeros(len(slots), *pool.shape[1:], dtype=torch.float32, device=pool.device)
    S[live] = pool[slots[live]].float()
    return S.mT if is_kv else S


def _store(pool: Tensor, slots: Tensor, live: Tensor, S: Tensor, is_kv: bool) -> None:
    S = S.mT if is_kv else S
    pool[slots.to(pool.device)[live]] = S[live].to(pool.dtype)
