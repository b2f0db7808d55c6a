# SPDX-License-Identifier: Apache-2.0
"""Decodes drawn at random: slots in every order, padded rows, drafts that are kept, undone or only verified."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cula import reference
from cula.api import cula_decode
from cula.core.constants import MAX_DECODE_TOKENS
from cula.fuzz.draw import INDEX_DTYPES, STATE_DTYPES, Draw
from cula.fuzz.family import Shape, fuzz_of
from cula.fuzz.judge import changed_slots, damage, error_of

BF16_ROUNDING = 4e-3  # of a state that is kept in bf16, or in fp16


@dataclass
class DecodeCall:
    family: str
    shape: Shape
    keywords: dict[str, Any]
    switches: dict[str, Any]
    written: set[str] = field(default_factory=set)


def draw_decode(draw: Draw, family: str, variant: Shape, switches: dict[str, Any]) -> DecodeCall:
    fuzz = fuzz_of(family)
    N, T = draw.integer(1, 5), draw.switch("T", (1, 1, 1, 2, 4, draw.switch("any T", range(1, MAX_DECODE_TOKENS + 1))))
    s = replace(variant, B=N, T=T, N=N, lens=None)
    lens = tuple(draw.integer(0, T) for _ in range(N))
    is_ragged = T > 1 and sum(lens) > 0 and draw.chance_of("is ragged", 0.3)
    lead = (1, sum(lens)) if is_ragged else (N, T)
    unit = 1.0 if switches.get("use_qk_l2norm_in_kernel") else s.K**-0.5
    values = {
        "q": (draw.normal(*lead, s.H, s.K) * unit, s.dtype),
        "k": (draw.normal(*lead, s.H, s.K) * unit, s.dtype),
        "v": (draw.normal(*lead, s.HV, s.V), s.dtype),
    } | fuzz.tensors(draw, replace(s, B=lead[0], T=lead[1]), switches)
    kw: dict[str, Any] = {
        name: draw.place(name, x, dtype, "any" if x.dim() > 2 else "plain") for name, (x, dtype) in values.items()
    }
    call = DecodeCall(family, s, kw, switches, {"state"})
    kw |= switches | {
        "mode": family,
        "commit": draw.chance_of("commit", 0.8),
        "null_index": draw.switch("null_index", ("negative", "negative", "nonpositive")),
    }
    if draw.chance(0.3):
        kw["scale"] = 0.3
    if is_ragged:
        offsets = torch.tensor([0, *itertools.accumulate(lens)])
        kw["cu_seqlens"] = draw.place("cu_seqlens", offsets, draw.switch("cu_seqlens", INDEX_DTYPES), "plain")
    _draw_pool(draw, call)
    if draw.chance_of("out", 0.2):
        kw["out"] = draw.place("out", torch.full((*lead, s.HV, s.V), torch.nan), s.dtype, "any")
        call.written.add("out")
    return call


def _draw_pool(draw: Draw, call: DecodeCall) -> None:
    s, kw = call.shape, call.keywords
    N, T, states = s.N, s.T, (s.HV, s.V, s.K)
    pool_dtype = draw.switch("state", STATE_DTYPES)
    if draw.chance_of("no indices", 0.1):  # no indices: slot n is row n's
        kw["state"] = draw.place("state", draw.normal(N, *states), pool_dtype, "slots")
        return
    a_slot_a_token = T > 1 and draw.chance_of("a slot a token", 0.3)
    P = N * (T if a_slot_a_token else 1) + draw.integer(1, 3)
    slots = draw.permutation(P)[: N * T].view(N, T) if a_slot_a_token else draw.permutation(P)[:N]
    is_padding = draw.uniform(N) < 0.2
    slots = torch.where(is_padding[:, None] if a_slot_a_token else is_padding, -1, slots)
    if draw.chance_of("kept states", 0.3):
        _draw_kept_states(draw, call, pool_dtype)
    if (a_slot_a_token or "intermediate_states" in kw) and draw.chance_of("accepted", 0.5):
        accepted = (draw.uniform(N) * (T + 1)).long().clamp(max=T)
        kw["num_accepted_tokens"] = draw.place(
            "num_accepted_tokens", accepted, draw.switch("accepted dtype", INDEX_DTYPES), "plain"
        )
    values = torch.full((P, *states), torch.nan)
    live = sorted({int(i) for i in slots.flatten() if i >= 0})
    values[live] = draw.normal(len(live), *states)
    kw["state"] = draw.place("state", values, pool_dtype, "slots")
    kw["state_indices"] = draw.place("state_indices", slots, draw.switch("state_indices", INDEX_DTYPES), "plain")


def _draw_kept_states(draw: Draw, call: DecodeCall, dtype: torch.dtype) -> None:
    """A buffer for the states of drafts, with as many rows as the call or more, of which some are named."""
    s, kw = call.shape, call.keywords
    rows, tokens = s.N + draw.integer(0, 2), s.T + draw.integer(0, 1)
    kw["intermediate_states"] = draw.place("intermediate_states", draw.normal(rows, tokens, s.HV, s.V, s.K), dtype, "plain")
    call.written.add("intermediate_states")
    if draw.chance_of("rows of kept states", 0.5):
        of = torch.where(draw.uniform(s.N) < 0.2, -1, draw.permutation(rows)[: s.N])
        of_dtype = draw.switch("dtype of rows", INDEX_DTYPES)
        kw["intermediate_state_indices"] = draw.place("intermediate_state_indices", of, of_dtype, "plain")


def judge_decode(draw: Draw, call: DecodeCall, backend: str, limit: float) -> str | None:
    """Make the call; what is wrong with it, or None."""
    kw = call.keywords
    asked: dict[str, Any] = {name: _double(x) if isinstance(x, Tensor) else x for name, x in kw.items() if name != "out"}
    o, pool = cula_decode(**kw, backend=backend)
    want_o, want_pool, want_kept = reference.decode(**asked)
    is_rounded = kw["state"].dtype != torch.float32
    limit_of_states = limit + (BF16_ROUNDING * call.shape.T if is_rounded else 0.0)
    limit_of_o = limit + (BF16_ROUNDING if is_rounded else 0.0)
    wrong = error_of("o", o, want_o, limit_of_o)
    written = _written_slots(kw)
    for slot in sorted(written) if not wrong else ():
        wrong = wrong or error_of(f"slot {slot}", pool[slot], want_pool[slot], limit_of_states)
    if not wrong and want_kept is not None:
        wrong = error_of("intermediate_states", kw["intermediate_states"], want_kept, limit_of_states)
    return wrong or changed_slots(draw.buffers["state"].original(), kw["state"], written) or damage(draw, call.written)


def _written_slots(kw: dict[str, Any]) -> set[int]:
    if not kw["commit"]:
        return set()
    P, T = kw["state"].shape[0], kw["q"].shape[1]
    indices = kw["state_indices"].tolist() if "state_indices" in kw else list(range(P))
    lengths = kw["cu_seqlens"].diff().tolist() if "cu_seqlens" in kw else [T] * len(indices)
    first = 1 if kw["null_index"] == "nonpositive" and "state_indices" in kw else 0
    if not isinstance(indices[0], list):
        return {slot for slot, length in zip(indices, lengths) if slot >= first and length}
    accepted = kw["num_accepted_tokens"].tolist() if "num_accepted_tokens" in kw else [0] * len(indices)
    rows = [row[:length] for row, a, length in zip(indices, accepted, lengths) if row[max(a - 1, 0)] >= first]
    return {slot for row in rows for slot in row if slot >= first}


def _double(t: Tensor) -> Tensor:
    return t.detach().cpu().double() if t.is_floating_point() else t.cpu().clone()
