# SPDX-License-Identifier: Apache-2.0
"""One to eight tokens a row on a pool of states, in plain PyTorch: what all families share. The pool is updated in place and
never copied whole.

A token decays a row's state S [HV, V, K], writes to it along its key, and is answered along its query:

    S <- S D;   u = beta (v - S k), or v where there is no beta;   S <- S + u k^T;   o = scale S q

Each is one pass over S, in place where S is float32. A state in the cache goes by in about 20 us a pass, no more than ten small calls
of torch take, so that everything else is done once for all tokens and in few calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.problem import DecodeProblem


def decode_rows(problem: DecodeProblem, x: Any, q: Tensor, k: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """Outputs [N, T, HV, V]; writes x.state, x.intermediate_states and x.out.

    Args:
        x: the family's decode inputs.
        q, k: [N, T, HV, K] float32, normalised.
        decay: the state's factor, [N, T, HV, K or 1] float32.
        beta: [N, T, HV, 1] float32, or None.
    """
    p = problem
    tokens = Tokens(q, k, x.v.float(), decay, beta)
    if x.q.device.type == "cpu":
        o = _row_by_row(p, x, tokens.of_heads()).view(p.N, p.T, p.HV, p.V)
    else:
        by_time = Tokens._make([None if t is None else t.transpose(0, 1) for t in tokens])
        o = _all_rows(p, x, by_time.of_heads()).view(p.T, p.N, p.HV, p.V).transpose(0, 1)
    return o.to(x.q.dtype).contiguous() if x.out is None else x.out.copy_(o)


class Tokens(NamedTuple):
    """What meets the states: some tokens, and of each some heads. All in float32."""

    q: Tensor  # [heads, 1, K]
    k: Tensor  # [heads, 1, K]
    v: Tensor  # [heads, 1, V]
    decay: Tensor  # [heads, 1, K or 1]
    beta: Tensor | None  # [heads, 1, 1]

    def of_heads(self) -> Tokens:
        """The heads of all tokens in a row, from tensors [..., HV, K], as they come."""
        return Tokens._make([None if t is None else t.reshape(-1, 1, t.shape[-1]) for t in self])

    def split(self, heads: int) -> Sequence[Tokens]:
        """So many heads each."""
        if len(self.q) == heads:
            return (self,)
        return [Tokens._make(some) for some in zip(*[repeat(None) if t is None else t.split(heads) for t in self])]

    def advance(self, S: Tensor, o: Tensor, scale: float) -> None:
        """The state of each head [heads, V, K] by one token, in place, and what that answers [heads, 1, V]."""
        q, k, v, decay, beta = self
        S.mul_(decay)
        u = v if beta is None else torch.baddbmm(v, k, S.mT, alpha=-1).mul_(beta)
        S.addcmul_(u.mT, k)
        torch.baddbmm(o, q, S.mT, beta=0, alpha=scale, out=o)


def _row_by_row(p: DecodeProblem, x: Any, tokens: Tokens) -> Tensor:
    """On a CPU slots are at hand, so that a row works on its state where it lies: nothing is gathered or scattered. o [N T HV, 1, V]."""
    opt = p.options
    slots = [[n] for n in range(p.N)] if x.state_indices is None else x.state_indices.view(p.N, -1).tolist()
    accepted = [0] * p.N if x.num_accepted_tokens is None else x.num_accepted_tokens.tolist()
    is_null = (lambda slot: slot <= 0) if opt.null_is_nonpositive else (lambda slot: slot < 0)
    states, kept = x.state, x.intermediate_states
    if opt.state_is_kv:
        states, kept = states.mT, None if kept is None else kept.mT
    writes_slot = opt.commit and not p.has_token_indices
    o = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    each = list(zip(tokens.split(p.HV), o.split(p.HV)))
    for n in range(p.N):
        of_row = each[n * p.T : (n + 1) * p.T]
        start = slots[n][max(accepted[n] - 1, 0) if p.has_token_indices else 0]
        if x.state_indices is not None and is_null(start):
            for _, o_t in of_row:
                o_t.zero_()
            continue
        is_kept = accepted[n] > 0 and kept is not None
        first = kept[n, accepted[n] - 1] if is_kept else states[start]
        is_in_place = writes_slot and not is_kept and first.dtype == torch.float32
        S = first if is_in_place else first.to(torch.float32, copy=True)
        for t, (token, o_t) in enumerate(of_row):
            token.advance(S, o_t, p.scale)
            if kept is not None:
                kept[n, t] = S
            if opt.commit and p.has_token_indices and not is_null(slots[n][t]):
                states[slots[n][t]] = S
        if writes_slot and not is_in_place:
            states[start] = S
    return o


def _all_rows(p: DecodeProblem, x: Any, tokens: Tokens) -> Tensor:
    """Elsewhere all rows go together, and no index is read back. o [T N HV, 1, V]."""
    opt = p.options
    live, S = _first_states(p, x)  # [N], [N, HV, V, K]
    o = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    each = zip(tokens.split(p.N * p.HV), o.split(p.N * p.HV))
    for t, (token, o_t) in enumerate(each):
        token.advance(S.view(-1, p.V, p.K), o_t, p.scale)
        o_t.masked_fill_(~live.repeat_interleave(p.HV)[:, None, None], 0)
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
