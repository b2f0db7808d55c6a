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
    intermediate_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    null_index: str = "negative",
    commit: bool = True,
    scale: float | None = None,
    **own: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(o of v's shape, the pool afterwards, the intermediate states afterwards), float64; nothing is changed in place.

    A row at a time, a token at a time: the definition of the family on one token from the row's state.
    """
    N, T = v.shape[:2] if cu_seqlens is None else (len(cu_seqlens) - 1, v.shape[1])
    pool = state.double().clone()
    kept = None if intermediate_states is None else intermediate_states.double().clone()
    o = torch.zeros(v.shape, dtype=torch.float64, device=q.device)
    prefill, token_inputs = DEFINITIONS[mode], FAMILIES[mode].token_inputs
    of_tokens: dict[str, Tensor] = {"q": q, "k": k, "v": v} | {name: x for name, x in own.items() if name in token_inputs}
    constant = {name: x for name, x in own.items() if name not in of_tokens}

    def is_null(slot: int) -> bool:
        return slot <= 0 if null_index == "nonpositive" else slot < 0

    for n in range(N):
        accepted = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n])
        slots = [n] if state_indices is None else state_indices[n].reshape(-1).tolist()
        slot_per_token = state_indices is not None and state_indices.dim() == 2
        start = slots[max(accepted - 1, 0)] if slot_per_token else slots[0]
        row, first, end = (n, 0, T) if cu_seqlens is None else (0, int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
        if first == end or (state_indices is not None and is_null(start)):
            continue
        S = pool[start]
        kept_row = n if intermediate_state_indices is None else int(intermediate_state_indices[n])
        keeps = kept is not None and kept_row >= 0
        if accepted > 0 and keeps:
            S = kept[kept_row, accepted - 1].clone()  # type: ignore[index]
        for t in range(end - first):
            here: dict[str, Any] = {name: x[row : row + 1, first + t : first + t + 1] for name, x in of_tokens.items()}
            o_t, S_t = prefill(**here, scale=scale, initial_state=S[None], **constant)
            o[row, first + t], S = o_t[0, 0], S_t[0]
            if keeps:
                kept[kept_row, t] = S  # type: ignore[index]
            if commit and slot_per_token and not is_null(slots[t]):
                pool[slots[t]] = S
        if commit and not slot_per_token:
            pool[start] = S
    return o, pool, kept
