# SPDX-License-Identifier: Apache-2.0
"""Prefills drawn at random: fixed and packed lengths, states of every kind, checkpoints, `out`, gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cula.core.constants import CHUNK
from cula.core.family import FAMILIES
from cula.core.reference import sequences
from cula.fuzz.draw import INDEX_DTYPES, STATE_DTYPES, Draw
from cula.fuzz.family import Shape, fuzz_of
from cula.fuzz.judge import GRADIENT_FACTOR, changed_slots, damage, error_of, error_of_parts, heads_of

GRADIENT_TOKENS = 70
BF16_ROUNDING = 4e-3  # of a tensor that is rounded to bf16 once, or to fp16
DECAY_PARAMETERS = ("A_log", "dt_bias", "decay")  # whose gradients are sums over all tokens of a head


@dataclass
class Prefill:
    """A call to be made: its keywords, what they mean, and what of it is written."""

    family: str
    shape: Shape
    keywords: dict[str, Any]
    switches: dict[str, Any]
    wants_grad: bool = False
    written: set[str] = field(default_factory=set)


def draw_prefill(draw: Draw, family: str, variant: Shape, switches: dict[str, Any], is_long: bool) -> Prefill:
    """A call of a compiled variant: heads and dims are given, tokens and states are drawn."""
    fuzz = fuzz_of(family)
    wants_grad = draw.chance_of("gradients", 0.25) and not is_long
    shape = _draw_lengths(draw, variant, GRADIENT_TOKENS if wants_grad else 3000 if is_long else 150)
    s = shape
    unit = 1.0 if switches.get("use_qk_l2norm_in_kernel") else s.K**-0.5  # keys of about unit length, either way
    values = {
        "q": (draw.normal(s.B, s.T, s.H, s.K) * unit, s.dtype),
        "k": (draw.normal(s.B, s.T, s.H, s.K) * unit, s.dtype),
        "v": (draw.normal(s.B, s.T, s.HV, s.V), s.dtype),
    } | fuzz.tensors(draw, s, switches)
    keywords: dict[str, Any] = {name: draw.place(name, x, dtype, _layout(x)) for name, (x, dtype) in values.items()}
    call = Prefill(family, shape, keywords, switches, wants_grad)
    keywords |= switches | fuzz.hints(draw, switches)
    keywords["output_final_state"] = draw.chance_of("output_final_state", 0.7)
    if draw.chance(0.3):
        keywords["scale"] = 0.3
    if s.lens is not None:
        offsets = torch.tensor([0, *itertools.accumulate(s.lens)])
        keywords["cu_seqlens"] = draw.place("cu_seqlens", offsets, draw.switch("cu_seqlens", INDEX_DTYPES), "plain")
    _draw_states(draw, call)
    return call


def _layout(x: Tensor) -> str:
    return "any" if x.dim() > 2 else "plain"


def _draw_lengths(draw: Draw, variant: Shape, most: int) -> Shape:
    if draw.chance_of("is packed", 0.5):
        lens = tuple(draw.one_of((0, 1, draw.integer(1, most), draw.integer(1, most))) for _ in range(draw.integer(1, 4)))
        return replace(variant, B=1, T=sum(lens), N=len(lens), lens=lens)
    B, T = draw.one_of((1, 1, 2, 3)), draw.one_of((1, draw.integer(1, most), CHUNK * draw.integer(1, max(1, most // CHUNK))))
    return replace(variant, B=B, T=T, N=B, lens=None)


def _draw_states(draw: Draw, call: Prefill) -> None:
    """First and last states: plain tensors, or slots of a pool; checkpoints; `out`."""
    s, kw = call.shape, call.keywords
    states = (s.HV, s.V, s.K)
    kind = draw.switch("states", ("none", "plain", "plain") if call.wants_grad else ("none", "plain", "pool", "pool"))
    if kind == "plain":
        kw["initial_state"] = draw.place("initial_state", draw.normal(s.N, *states), torch.float32, "slots")
    elif kind == "pool":
        _draw_pool(draw, call)
    if call.wants_grad:
        return
    if FAMILIES[call.family].keeps_states and draw.chance_of("checkpoints", 0.15):
        _draw_checkpoints(draw, call)
    if draw.chance_of("out", 0.2):
        kw["out"] = draw.place("out", torch.full((s.B, s.T, s.HV, s.V), torch.nan), s.dtype, "any")
        call.written.add("out")


def _draw_checkpoints(draw: Draw, call: Prefill) -> None:
    """States behind every so many tokens, or behind one number of them for each sequence."""
    s, kw = call.shape, call.keywords
    lens = s.lens or (s.T,) * s.N
    if draw.chance_of("checkpoint_every", 0.5):
        every = kw["checkpoint_every"] = CHUNK * draw.integer(1, 3)
        rows = sum(length // every for length in lens)
    else:
        offsets = torch.tensor([CHUNK * draw.integer(0, length // CHUNK) for length in lens])
        kw["checkpoint_offsets"] = draw.place("checkpoint_offsets", offsets, torch.int32, "plain")
        rows = s.N
    empty = torch.full((rows + draw.integer(0, 2), s.HV, s.V, s.K), torch.nan)
    kw["checkpoint_states"] = draw.place("checkpoint_states", empty, draw.switch("checkpoint_states", STATE_DTYPES), "slots")
    call.written.add("checkpoint_states")


def _is_null(kw: dict[str, Any], slot: int) -> bool:
    return slot < 0 or (slot == 0 and kw["null_index"] == "nonpositive")


def _draw_pool(draw: Draw, call: Prefill) -> None:
    """A pool whose other slots are poison, and so are those that a sequence starts without reading."""
    s, kw = call.shape, call.keywords
    P = s.N + draw.integer(1, 3)
    slots = torch.where(draw.uniform(s.N) < 0.2, -1, draw.permutation(P)[: s.N])
    starts = draw.uniform(s.N) < 0.6 if draw.chance_of("has_initial_state", 0.5) else torch.ones(s.N, dtype=torch.bool)
    values = torch.full((P, s.HV, s.V, s.K), torch.nan)
    kw["null_index"] = draw.switch("null_index", ("negative", "negative", "nonpositive"))
    live = [int(slot) for slot, is_read in zip(slots, starts) if not _is_null(kw, int(slot)) and is_read]
    values[live] = draw.normal(len(live), s.HV, s.V, s.K)
    kw["state_pool"] = draw.place("state_pool", values, draw.switch("state_pool", STATE_DTYPES), "slots")
    dtype = draw.switch("initial_state_indices", INDEX_DTYPES)
    kw["initial_state_indices"] = draw.place("initial_state_indices", slots, dtype, "plain")
    if not bool(starts.all()):
        kw["has_initial_state"] = draw.place("has_initial_state", starts, None, "plain")
    call.written.add("state_pool")


# The answer


def judge_prefill(draw: Draw, call: Prefill, backend: str, limit: float) -> str | None:
    """Make the call; what is wrong with it, or None."""
    fuzz, s, kw = fuzz_of(call.family), call.shape, dict(call.keywords)
    entry = FAMILIES[call.family].load_entry()
    names = [n for n in FAMILIES[call.family].differentiable if kw.get(n) is not None] if call.wants_grad else []
    leaves = {n: kw[n].detach().requires_grad_() for n in names}
    kw |= leaves
    first = _first_states(draw, call)
    made = {new: kw.pop(old) for old, new in zip(("q", "k", "v"), fuzz.arguments)}
    o, state = entry(**made, **kw, backend=backend)[:2]

    inputs = {n: _double(b.original()) for n, b in draw.buffers.items() if n in ("q", "k", "v", "g", "beta", *names)}
    inputs |= {n: _double(call.keywords[n]) for n in ("A_log", "dt_bias", "decay") if call.keywords.get(n) is not None}
    if first is not None:
        inputs["initial_state"] = _double(first)
    for n in names:
        inputs[n].requires_grad_()
    cu_seqlens = None if s.lens is None else torch.tensor([0, *itertools.accumulate(s.lens)])
    want_o, want_state = fuzz.definition(**inputs, **call.switches, scale=kw.get("scale"), cu_seqlens=cu_seqlens)
    spans = sequences(s.B, s.T, cu_seqlens)
    wrong = error_of("o", o, want_o, limit) or error_of_parts("o", heads_of(o.cpu(), want_o, spans, 2), limit)
    if not wrong and kw.get("output_final_state"):
        wrong = error_of("final_state", state, want_state, limit)
    elif not wrong and state is not None:
        wrong = "a final state was returned that nobody asked for"
    wrong = wrong or _wrong_pool(draw, call, want_state, limit) or _wrong_checkpoints(call, inputs, limit)
    if not wrong and names:
        wrong = _wrong_gradients(draw, leaves, inputs, (o, state), (want_o, want_state), limit)
    return wrong or damage(draw, call.written)


def _double(t: Tensor) -> Tensor:
    return t.detach().double().cpu()


def _first_states(draw: Draw, call: Prefill) -> Tensor | None:
    kw, s = call.keywords, call.shape
    if "initial_state" in kw:
        return draw.buffers["initial_state"].original()
    if "state_pool" not in kw:
        return None
    pool, slots = draw.buffers["state_pool"].original().cpu(), kw["initial_state_indices"].tolist()
    starts = [True] * s.N if "has_initial_state" not in kw else kw["has_initial_state"].tolist()
    zeros = torch.zeros(s.HV, s.V, s.K, dtype=pool.dtype)
    return torch.stack([zeros if _is_null(kw, slot) or not reads else pool[slot] for slot, reads in zip(slots, starts)])


def _wrong_pool(draw: Draw, call: Prefill, want: Tensor, limit: float) -> str | None:
    kw = call.keywords
    if "state_pool" not in kw:
        return None
    slots = [None if _is_null(kw, slot) else slot for slot in kw["initial_state_indices"].tolist()]
    rounding = 0.0 if kw["state_pool"].dtype == torch.float32 else BF16_ROUNDING
    for n, slot in enumerate(slots):
        if slot is not None:
            wrong = error_of(f"slot {slot}", kw["state_pool"][slot], want[n], limit + rounding)
            if wrong:
                return wrong
    return changed_slots(draw.buffers["state_pool"].original(), kw["state_pool"], {slot for slot in slots if slot is not None})


def _wrong_checkpoints(call: Prefill, inputs: dict[str, Tensor], limit: float) -> str | None:
    kw, s = call.keywords, call.shape
    if "checkpoint_states" not in kw:
        return None
    fuzz, tokens = fuzz_of(call.family), FAMILIES[call.family].token_inputs
    cu_seqlens = None if s.lens is None else torch.tensor([0, *itertools.accumulate(s.lens)])
    spans = sequences(s.B, s.T, cu_seqlens)
    written = _checkpoints(kw, [end - start for _, start, end in spans])
    for row, (n, length) in written.items():
        b, start, _ = spans[n]
        part = {name: x[b : b + 1, start : start + length] if name in tokens else x for name, x in inputs.items()}
        if "initial_state" in part:
            part["initial_state"] = part["initial_state"][n : n + 1]
        _, want = fuzz.definition(**part, **call.switches)
        wrong = error_of(f"checkpoint {row}", kw["checkpoint_states"][row], want[0], limit + BF16_ROUNDING)
        if wrong:
            return wrong
    others = [row for row in range(kw["checkpoint_states"].shape[0]) if row not in written]
    return (
        None
        if bool(kw["checkpoint_states"][others].isnan().all())
        else "rows of checkpoint_states were written that no state is for"
    )


def _checkpoints(kw: dict[str, Any], lengths: list[int]) -> dict[int, tuple[int, int]]:
    """Which rows are written, and with the state of which sequence behind how many tokens."""
    if "checkpoint_offsets" in kw:
        return {n: (n, offset) for n, offset in enumerate(kw["checkpoint_offsets"].tolist()) if offset}
    every = kw["checkpoint_every"]
    return dict(enumerate((n, end) for n, length in enumerate(lengths) for end in range(every, length + 1, every)))


def _wrong_gradients(
    draw: Draw,
    leaves: dict[str, Tensor],
    inputs: dict[str, Tensor],
    got: tuple[Tensor, Tensor | None],
    want: tuple[Tensor, Tensor],
    limit: float,
) -> str | None:
    """What is wrong with the gradients of a sum of the outputs with random weights; None if nothing is."""
    pairs = [(x, y, draw.normal(*y.shape)) for x, y in zip(got, want) if x is not None and y.requires_grad]
    ours = torch.autograd.grad([x for x, _, _ in pairs], list(leaves.values()), [w.to(x) for x, _, w in pairs], allow_unused=True)
    theirs = torch.autograd.grad(
        [y for _, y, _ in pairs], [inputs[n] for n in leaves], [w.to(x.dtype).double() for x, _, w in pairs], allow_unused=True
    )
    largest = max([float(t.norm()) for t in theirs if t is not None], default=0.0)
    terms = _decay_terms(inputs, dict(zip(leaves, theirs)))
    for name, a, b in zip(leaves, ours, theirs):
        if a is None or b is None:  # no gradient is one of zeros
            if any(t is not None and bool(t.any()) for t in (a, b)):
                return f"the gradient of {name} is {'missing' if a is None else 'there, and the definition has none'}"
            continue
        rounded = BF16_ROUNDING if a.dtype == torch.bfloat16 else 0.0
        beside = max(largest, terms) if name in DECAY_PARAMETERS else largest
        wrong = error_of(f"the gradient of {name}", a, b, GRADIENT_FACTOR * limit + rounded, beside)
        if wrong:
            return wrong
    return None


def _decay_terms(inputs: dict[str, Tensor], gradients: dict[str, Tensor | None]) -> float:
    """The size of what a gradient of decays sums over tokens, q dq - k dk: rounding is relative to it, not to the sum."""
    strongest = inputs["g"].detach().abs().max().clamp_min(1.0) if "g" in inputs and inputs["g"].numel() else 1.0
    terms = [(inputs[n].detach() * d).abs().sum() for n in ("q", "k") if (d := gradients.get(n)) is not None]
    return float(sum(terms) * strongest)
