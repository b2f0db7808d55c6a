# SPDX-License-Identifier: Apache-2.0
"""One to eight tokens a row on a pool of states, in plain PyTorch: what all families share. The pool is updated in place and
never copied whole.

A token decays a row's state S [HV, V, K], writes to it along its key, and is answered along its query:

    S <- S D;   u = beta (v - S k), or v where there is no beta;   S <- S + u k^T;   o = scale S q

Each is one pass over S, in place where S is float32. On a CPU a pass over a state in the cache takes no longer than ten small
calls of torch, so that everything else is done once for all tokens, and in few calls.
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
    p, o = problem, torch.empty_like(x.v, dtype=torch.float32, memory_format=torch.contiguous_format)
    is_read_back = o.device.type == "cpu" or p.is_ragged or p.options.batch_invariant
    (_row_by_row if is_read_back else _all_rows)(p, x, Tokens(q, k, x.v.float(), decay, beta, o))
    return o.to(x.q.dtype) if x.out is None else x.out.copy_(o)


class Tokens(NamedTuple):
    """What meets the states, and what is answered, in float32: [N, T, HV, ...] or, one head behind the other, [heads, 1, ...]."""

    q: Tensor  # K
    k: Tensor  # K
    v: Tensor  # V
    decay: Tensor  # K or 1
    beta: Tensor | None  # 1
    o: Tensor  # V; written

    def at(self, t: int) -> Tokens:
        """Token t of each row."""
        return Tokens._make([None if x is None else x[:, t] for x in self])

    def of_heads(self) -> Tokens:
        """The heads of all tokens, as they come."""
        return Tokens._make([None if x is None else x.reshape(-1, 1, x.shape[-1]) for x in self])

    def split(self, heads: int) -> Sequence[Tokens]:
        """The same in parts of so many heads each."""
        if len(self.q) == heads:
            return (self,)
        return [Tokens._make(some) for some in zip(*[repeat(None) if x is None else x.split(heads) for x in self])]

    def advance(self, S: Tensor, scale: float) -> None:
        """The states of the heads [heads, V, K] by one token, in place, and o."""
        q, k, v, decay, beta, o = self
        S.mul_(decay)
        u = v if beta is None else torch.baddbmm(v, k, S.mT, alpha=-1).mul_(beta)
        S.addcmul_(u.mT, k)
        torch.baddbmm(o, q, S.mT, beta=0, alpha=scale, out=o)


def _row_by_row(p: DecodeProblem, x: Any, tokens: Tokens) -> None:
    """On a CPU slots are at hand, so that a row works on its state where it lies: nothing is gathered or scattered."""
    opt = p.options
    named: list[Any] = list(range(p.N)) if x.state_indices is None else x.state_indices.tolist()
    slots = named if p.has_token_indices else [[slot] for slot in named]
    accepted = [0] * p.N if x.num_accepted_tokens is None else x.num_accepted_tokens.tolist()
    is_null = (lambda slot: slot <= 0) if opt.null_is_nonpositive else (lambda slot: slot < 0)
    states, kept = x.state, x.intermediate_states
    if opt.state_is_kv:
        states, kept = states.mT, None if kept is None else kept.mT
    writes_slot = opt.commit and not p.has_token_indices
    each = tokens.of_heads().split(p.HV)
    kept_rows = range(p.N) if x.intermediate_state_indices is None else x.intermediate_state_indices.tolist()
    offsets = range(0, p.N * p.T + 1, p.T) if x.cu_seqlens is None else x.cu_seqlens.tolist()
    for n in range(p.N):
        of_row = each[offsets[n] : offsets[n + 1]]
        start = slots[n][max(accepted[n] - 1, 0) if p.has_token_indices else 0]
        if x.state_indices is not None and is_null(start):
            for token in of_row:
                token.o.zero_()
            continue
        if not of_row:
            continue
        keeps = kept is not None and kept_rows[n] >= 0
        is_kept = accepted[n] > 0 and keeps
        first = kept[kept_rows[n], accepted[n] - 1] if is_kept else states.select(0, start)
        is_in_place = writes_slot and not is_kept and first.dtype == torch.float32
        S = first if is_in_place else first.to(torch.float32, copy=True)
        for t, token in enumerate(of_row):
            token.advance(S, p.scale)
            if keeps:
                kept[kept_rows[n], t] = S
            if opt.commit and p.has_token_indices and not is_null(slots[n][t]):
                states[slots[n][t]] = S
        if writes_slot and not is_in_place:
            states[start] = S


def _all_rows(p: DecodeProblem, x: Any, tokens: Tokens) -> None:
    """Elsewhere all rows go together, and no index is read back."""
    opt = p.options
    live, S = _first_states(p, x)  # [N], [N, HV, V, K]
    for t in range(p.T):
        token = tokens.at(t).of_heads()
        token.advance(S.view(-1, p.V, p.K), p.scale)
        tokens.o[:, t] = torch.where(live[:, None, None], token.o.view(p.N, p.HV, p.V), 0)
        if x.intermediate_states is not None:
            rows = _kept_rows(p, x)
            _store(x.intermediate_states[:, t], rows, live & (rows >= 0), S, opt.state_is_kv)
        if opt.commit and p.has_token_indices:
            slots = x.state_indices[:, t].long()
            _store(x.state, slots, live & ~_is_null(slots, opt.null_is_nonpositive), S, opt.state_is_kv)
    if opt.commit and not p.has_token_indices:
        slots = _rows(p, S) if x.state_indices is None else x.state_indices.long()
        _store(x.state, slots.to(S.device), live, S, opt.state_is_kv)


def for_value_heads(t: Tensor, group: int) -> Tensor:
    """[N, T, H, K] -> [N, T, HV, K]: each head for the value heads that read it."""
    return t if group == 1 else t.repeat_interleave(group, dim=2)


def _first_states(p: DecodeProblem, x: Any) -> tuple[Tensor, Tensor]:
    """Which rows are live, and the state each starts from (zeros for the others), [N, HV, V, K] float32."""
    opt = p.options
    rows = _rows(p, x.q)
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
        of_rows = _kept_rows(p, x)
        kept = x.intermediate_states[of_rows.clamp(min=0), (accepted - 1).clamp(min=0)].float()
        kept = kept.mT if opt.state_is_kv else kept
        S = torch.where((live & (accepted > 0) & (of_rows >= 0))[:, None, None, None], kept, S)
    return live, S.contiguous()


def _rows(p: DecodeProblem, beside: Tensor) -> Tensor:
    return torch.arange(p.N, device=beside.device)


def _kept_rows(p: DecodeProblem, x: Any) -> Tensor:
    """Which rows of the intermediate states are those of the call's rows; negative: none."""
    rows = x.intermediate_state_indices
    return _rows(p, x.q) if rows is None else rows.long()


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
