# SPDX-License-Identifier: Apache-2.0
"""One to eight tokens a row on a pool of states, in plain PyTorch: what all families share. The pool is updated in place and
never copied whole.

A token decays a row's state S [HV, V, K], writes to it along its key, and is answered along its query:

    S <- S D;   u = beta (v - S k), or v where there is no beta;   S <- S + u k^T;   o = S q

The two products with S come first and share one pass over it: S D k and S D q are S times (D k) and (D q), and o is
S D q + u (k . q).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.problem import DecodeProblem


def decode_rows(problem: DecodeProblem, x: Any, q: Tensor, k: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """Outputs [N, T, HV, V]; writes x.state, x.intermediate_states and x.out.

    Args:
        x: the family's decode inputs.
        q, k: [N, T, HV, K] float32, normalised and scaled.
        decay: the state's factor, [N, T, HV, 1, K or 1] float32.
        beta: [N, T, HV, 1] float32, or None.
    """
    o = x.q.new_empty(problem.N, problem.T, problem.HV, problem.V) if x.out is None else x.out
    (_row_by_row if x.q.device.type == "cpu" else _all_rows)(problem, x, Tokens(q, k, x.v.float(), decay, beta), o)
    return o


class Tokens(NamedTuple):
    """What meets the states, with dimensions [N, T] in front."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None

    def at(self, rows: slice, t: int) -> Tokens:
        return Tokens(*[None if x is None else x[rows, t] for x in self])  # type: ignore[arg-type]

    def advance(self, S: Tensor, o: Tensor) -> None:
        """One token of some rows, [rows, HV, ...]: S in place, and o."""
        read = (torch.stack([self.k, self.q], -2) * self.decay) @ S.mT  # [rows, HV, 2, V]
        u = self.v if self.beta is None else self.beta * (self.v - read[:, :, 0])
        S.mul_(self.decay).addcmul_(u.unsqueeze(-1), self.k.unsqueeze(-2))
        o.copy_(read[:, :, 1] + u * (self.k * self.q).sum(-1, keepdim=True))


def _row_by_row(p: DecodeProblem, x: Any, tokens: Tokens, o: Tensor) -> None:
    """On a CPU slots are at hand, so that a row works on its state where it lies: nothing is gathered or scattered."""
    opt = p.options
    slots = [[n] for n in range(p.N)] if x.state_indices is None else x.state_indices.view(p.N, -1).tolist()
    accepted = [0] * p.N if x.num_accepted_tokens is None else x.num_accepted_tokens.tolist()
    is_null = (lambda slot: slot <= 0) if opt.null_is_nonpositive else (lambda slot: slot < 0)
    for n in range(p.N):
        start = slots[n][max(accepted[n] - 1, 0) if p.has_token_indices else 0]
        if x.state_indices is not None and is_null(start):
            o[n] = 0
            continue
        is_kept = accepted[n] > 0 and x.intermediate_states is not None
        first = x.intermediate_states[n, accepted[n] - 1] if is_kept else x.state[start]
        writes_slot = opt.commit and not p.has_token_indices
        is_in_place = writes_slot and not is_kept and first.dtype == torch.float32 and not opt.state_is_kv
        S = first if is_in_place else (first.mT if opt.state_is_kv else first).to(torch.float32, copy=True)
        S, row = S.unsqueeze(0), slice(n, n + 1)
        for t in range(p.T):
            tokens.at(row, t).advance(S, o[row, t])
            as_kept = S[0].mT if opt.state_is_kv else S[0]
            if x.intermediate_states is not None:
                x.intermediate_states[n, t] = as_kept
            if opt.commit and p.has_token_indices and not is_null(slots[n][t]):
                x.state[slots[n][t]] = as_kept
        if writes_slot and not is_in_place:
            x.state[start] = S[0].mT if opt.state_is_kv else S[0]


def _all_rows(p: DecodeProblem, x: Any, tokens: Tokens, o: Tensor) -> None:
    """Elsewhere all rows go together, and no index is read back."""
    opt, every = p.options, slice(None)
    live, S = _first_states(p, x)  # [N], [N, HV, V, K]
    for t in range(p.T):
        o_t = torch.empty_like(o[:, t], dtype=torch.float32)
        tokens.at(every, t).advance(S, o_t)
        o[:, t] = torch.where(live[:, None, None], o_t, 0).to(o.dtype)
        if x.intermediate_states is not None:
            _store(x.intermediate_states[:, t], _rows(p), live, S, opt.state_is_kv)
        if opt.commit and p.has_token_indices:
            slots = x.state_indices[:, t].long()
            _store(x.state, slots, live & ~_is_null(slots, opt.null_is_nonpositive), S, opt.state_is_kv)
    if opt.commit and not p.has_token_indices:
        slots = _rows(p) if x.state_indices is None else x.state_indices.long()
        _store(x.state, slots.to(S.device), live, S, opt.state_is_kv)


def for_value_heads(t: Tensor, group: int) -> Tensor:
    """[N, T, H, K] -> [N, T, HV, K]: each head for the value heads that read it."""
    return t if group == 1 else t.repeat_interleave(group, dim=2)


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
