# SPDX-License-Identifier: Apache-2.0
"""One to eight tokens a row on a pool of states, in plain PyTorch: what all families share. The pool is updated in place and
never copied whole.

A token t decays a row's state S [HV, V, K] and writes to it, `S <- S + u k^T`, and is answered by `o = S q`. What the decay and
u are is the family's business: its `step(S, t)` decays S in place and returns u [N, HV, V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.core.problem import DecodeProblem


def decode_rows(problem: DecodeProblem, x: Any, q: Tensor, k: Tensor, step: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Outputs [N, T, HV, V]; writes x.state, x.intermediate_states and x.out.

    Args:
        x: the family's decode inputs.
        q, k: [N, T, HV, K] float32, normalised and scaled.
        step: decays the states [N, HV, V, K] by a token, in place, and returns what it writes along k, [N, HV, V].
    """
    p, opt = problem, problem.options
    live, S = _first_states(p, x)  # [N], [N, HV, V, K]
    o = x.q.new_empty(p.N, p.T, p.HV, p.V) if x.out is None else x.out
    for t in range(p.T):
        u = step(S, t)
        S.addcmul_(u.unsqueeze(-1), k[:, t, :, None, :])
        o_t = (S * q[:, t, :, None, :]).sum(-1)
        o[:, t] = torch.where(live[:, None, None], o_t, 0).to(o.dtype)
        if x.intermediate_states is not None:
            _store(x.intermediate_states[:, t], _rows(p), live, S, opt.state_is_kv)
        if opt.commit and p.has_token_indices:
            slots = x.state_indices[:, t].long()
            _store(x.state, slots, live & ~_is_null(slots, opt.null_is_nonpositive), S, opt.state_is_kv)
    if opt.commit and not p.has_token_indices:
        slots = _rows(p) if x.state_indices is None else x.state_indices.long()
        _store(x.state, slots.to(S.device), live, S, opt.state_is_kv)
    return o


def for_value_heads(t: Tensor, group: int) -> Tensor:
    """[N, T, H, K] -> [N, T, HV, K]: each head for the value heads that read it."""
    return t.repeat_interleave(group, dim=2)


def _first_states(p: DecodeProblem, x: Any) -> tuple[Tensor, Tensor]:
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
