# SPDX-License-Identifier: Apache-2.0
"""The definitions, token by token in float64: slow, short, and what every backend is measured against.

Each family has its own (`cula/kda/reference.py`, ...); they share no code with any backend, and everything (packing, groups,
gates) is written out where it is used, so that a page can be checked by eye. `decode` is the same for all: a row at a time, a
token at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula.core.family import FAMILIES
from cula.core.reference import relative_error
from cula.gdn.reference import gdn, gdn_gate
from cula.kda.reference import kda, kda_gate
from cula.lightning.reference import lightning

__all__ = ["decode", "gdn", "gdn_gate", "kda", "kda_gate", "lightning", "relative_error"]

DEFINITIONS: dict[str, Any] = {"kda": kda, "gdn": gdn, "lightning": lightning}


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
    scale: float | None = None,
    **own: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(o [N, T, HV, V], the pool afterwards, the intermediate states afterwards), float64; nothing is changed in place.

    A row at a time, a token at a time: the definition of the family on one token from the row's state.
    """
    N, T, HV, V = v.shape
    pool = state.double().clone()
    kept = None if intermediate_states is None else intermediate_states.double().clone()
    o = torch.zeros(N, T, HV, V, dtype=torch.float64, device=q.device)
    prefill, token_inputs = DEFINITIONS[mode], FAMILIES[mode].token_inputs
    per_token: dict[str, Tensor] = {name: x for name, x in own.items() if name in token_inputs}
    constant = {name: x for name, x in own.items() if name not in per_token}

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
            here: dict[str, Any] = {name: x[n : n + 1, t : t + 1] for name, x in per_token.items()}
            o_t, S_t = prefill(q_t, k_t, v_t, **here, scale=scale, initial_state=S[None], **constant)
            o[n, t], S = o_t[0, 0], S_t[0]
            if kept is not None:
                kept[n, t] = S
            if commit and slot_per_token and not is_null(slots[t]):
                pool[slots[t]] = S
        if commit and not slot_per_token:
            pool[start] = S
    return o, pool, kept
