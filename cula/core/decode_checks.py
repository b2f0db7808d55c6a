# SPDX-License-Identifier: Apache-2.0
"""What is checked of a decode, and the problem that describes it.

A call has N rows of T tokens each; a packed call `[1, N, H, K]` is N rows of one. With `cu_seqlens` it is ragged: rows of up to
T tokens each lie behind each other, and T is known on the device alone, so that the problem has an upper bound.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula import settings
from cula.core import checks
from cula.core.checks import INDEX_DTYPES, POOL_DTYPES
from cula.core.constants import MAX_DECODE_TOKENS
from cula.core.family import FAMILIES, Family
from cula.core.problem import DecodeOptions, DecodeProblem, needs_grad

GATE_SWITCHES = ("lower_bound", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")


class Dims(NamedTuple):
    """The sizes of a decode, and how its tokens lie: lead is (N, T), or (1, tokens of all rows) where rows are packed."""

    N: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    lead: tuple[int, int]
    lead_name: str  # as errors write it, "[N, T"


class DecodeRequest(NamedTuple):
    """A checked call."""

    family: Family
    problem: DecodeProblem
    x: Any  # the family's decode inputs as N rows of T tokens
    is_packed: bool
    who: str


def describe_decode(
    family: Family,
    x: Any,
    options: DecodeOptions,
    device: torch.device | str | None,
    who: str,
    trains: bool | None = None,
) -> DecodeRequest:
    """Raise on anything wrong, or return the checked call. Reads no data.

    Args:
        trains: whether a tensor requires a gradient; None to read it off them, which an operator's fake cannot.
    """
    assert family.decode is not None
    traits, q, state = family.decode, x.q, x.state
    _check_gate_switches(family, options, who)
    B, rows, H, K, HV, V = checks.check_qkv(who, q, x.k, x.v)
    layout, inner = ("[P, HV, K, V]", (HV, K, V)) if options.state_is_kv else ("[P, HV, V, K]", (HV, V, K))
    P = checks.check_pool(who, "state", state, layout, inner)
    checks.check_devices(who, q.device, **dict(zip(x._fields[3:], x[3:])))
    is_ragged = x.cu_seqlens is not None
    is_packed = not is_ragged and _check_rows(x, B, rows, P, who)
    if is_ragged:
        N, T = _check_ragged_rows(x, rows, P, who)
        dims = Dims(N, T, H, HV, K, V, (1, rows), "[1, tokens")
    else:
        N, T = (rows, 1) if is_packed else (B, rows)
        dims = Dims(N, T, H, HV, K, V, (1, N) if is_packed else (N, T), "[1, N" if is_packed else "[N, T")
    own, facts = traits.check(x, options, dims, who)
    _check_drafts(x, dims, layout, inner, who)
    if needs_grad(x) if trains is None else trains:
        raise ValueError(
            f"{who}: decode updates its state in place and has no gradient, but an input requires grad; "
            "call it under torch.no_grad() or torch.inference_mode()"
        )
    checks.check_device_argument(device, q, who)
    problem = DecodeProblem(
        family=family.name,
        device=q.device.type,
        sm=checks.compute_capability(q.device),
        dtype=q.dtype,
        pool_dtype=state.dtype,
        N=N,
        T=T,
        P=P,
        H=H,
        HV=HV,
        K=K,
        V=V,
        has_indices=x.state_indices is not None,
        has_token_indices=x.state_indices is not None and x.state_indices.dim() == 2,
        has_accepted=x.num_accepted_tokens is not None,
        has_intermediate_states=x.intermediate_states is not None,
        scale=K**-0.5 if options.scale is None else float(options.scale),
        options=options,
        has_aligned_slots=checks.has_aligned_slots(state),
        kept_dtype=None if x.intermediate_states is None else x.intermediate_states.dtype,
        has_aligned_kept=x.intermediate_states is None or checks.has_aligned_states(x.intermediate_states),
        is_ragged=is_ragged,
        **facts,
    )
    return DecodeRequest(family, problem, _as_rows(x, own, is_packed), is_packed, who)


def _check_gate_switches(family: Family, options: DecodeOptions, who: str) -> None:
    """That a call sets no switch of a gate, or of beta, that the family does not have."""
    for name in GATE_SWITCHES:
        if getattr(options, name) != DecodeOptions._field_defaults[name] and name not in family.Options._fields:
            takers = [f"{f.name!r}" for f in FAMILIES.values() if f.decode is not None and name in f.Options._fields]
            raise ValueError(f"{who}: {name}= belongs to mode {' or '.join(takers)}; mode {family.name!r} does not have it")


def _check_rows(x: Any, B: int, rows: int, P: int, who: str) -> bool:
    """How q's first two dimensions are to be read; whether as packed rows of one token."""
    indices = x.state_indices
    _check_indices(indices, who)
    sequences = P if indices is None else indices.shape[0]
    is_packed = sequences != B and B == 1 and sequences == rows
    if sequences != B and not is_packed:
        given = (
            f"state holds {P} slots and state_indices is None"
            if indices is None
            else f"state_indices has shape {checks.shape_of(indices)}"
        )
        raise ValueError(
            f"{who}: q has shape {checks.shape_of(x.q)}, that is {B} rows of {rows} tokens or {rows} packed rows, but {given}; "
            "give one index a row"
        )
    T = 1 if is_packed else rows
    if not 1 <= T <= MAX_DECODE_TOKENS:
        raise ValueError(f"{who}: {T} tokens a row; decode takes 1 to {MAX_DECODE_TOKENS} (use prefill for more)")
    if indices is not None and indices.dim() == 2:
        checks.check_shape(who, "state_indices", indices, "[N, T]", (rows if is_packed else B, T))
    return is_packed


def _check_indices(indices: Tensor | None, who: str) -> None:
    if indices is None:
        return
    checks.check_tensor(who, "state_indices", indices)
    checks.check_dtype(who, "state_indices", indices, INDEX_DTYPES)
    if indices.dim() not in (1, 2):
        raise ValueError(f"{who}: state_indices has shape {checks.shape_of(indices)}; expected [N] or [N, T]")


def _check_ragged_rows(x: Any, tokens: int, P: int, who: str) -> tuple[int, int]:
    """How many rows `cu_seqlens` makes of q's tokens, and the most tokens that one of them may have."""
    indices, kept = x.state_indices, x.intermediate_states
    N = checks.check_cu_seqlens(who, x.cu_seqlens, x.q)
    _check_indices(indices, who)
    if (P if indices is None else indices.shape[0]) != N:
        given = f"state holds {P} slots" if indices is None else f"state_indices has shape {checks.shape_of(indices)}"
        raise ValueError(f"{who}: cu_seqlens has {N} rows, but {given}; give one index a row")
    if tokens < 1:
        raise ValueError(f"{who}: q has shape {checks.shape_of(x.q)}; decode takes at least one token")
    T = min(tokens, MAX_DECODE_TOKENS)
    if indices is not None and indices.dim() == 2:
        T = indices.shape[1]
        if not 1 <= T <= MAX_DECODE_TOKENS:
            raise ValueError(f"{who}: state_indices has {T} slots a row; decode takes 1 to {MAX_DECODE_TOKENS} tokens a row")
    elif kept is not None and checks.rank_of(who, "intermediate_states", kept) == 5:
        T = min(T, kept.shape[1])
    return N, T


def _check_drafts(x: Any, dims: Dims, layout: str, inner: tuple[int, int, int], who: str) -> None:
    """What keeps and undoes draft tokens, and `out`."""
    if x.num_accepted_tokens is not None:
        checks.check_shape(who, "num_accepted_tokens", x.num_accepted_tokens, "[N]", (dims.N,))
        checks.check_dtype(who, "num_accepted_tokens", x.num_accepted_tokens, INDEX_DTYPES)
        if x.intermediate_states is None and (x.state_indices is None or x.state_indices.dim() != 2):
            raise ValueError(
                f"{who}: num_accepted_tokens needs the states it goes back to: pass intermediate_states=, "
                "or state_indices of shape [N, T]"
            )
    _check_kept_states(x, dims, layout, inner, who)
    for name in ("state", "intermediate_states", "out"):
        if isinstance(t := getattr(x, name), Tensor):
            checks.check_own_elements(who, name, t)
    if x.out is not None:
        checks.check_shape(who, "out", x.out, dims.lead_name + ", HV, V]", (*dims.lead, dims.HV, dims.V))
        checks.check_dtype(who, "out", x.out, (x.q.dtype,))


def _check_kept_states(x: Any, dims: Dims, layout: str, inner: tuple[int, int, int], who: str) -> None:
    """The buffer for states of draft tokens: with room for every row and token, or with the rows that are named."""
    kept, rows = x.intermediate_states, x.intermediate_state_indices
    if rows is not None:
        if kept is None:
            raise ValueError(f"{who}: intermediate_state_indices names rows of intermediate_states, which is None")
        checks.check_shape(who, "intermediate_state_indices", rows, "[N]", (dims.N,))
        checks.check_dtype(who, "intermediate_state_indices", rows, INDEX_DTYPES)
    if kept is None:
        return
    rank = checks.rank_of(who, "intermediate_states", kept)
    least = (1 if rows is not None else dims.N, dims.T)
    if rank != 5 or kept.shape[2:] != inner or any(has < needs for has, needs in zip(kept.shape, least)):
        raise ValueError(
            f"{who}: intermediate_states has shape {checks.shape_of(kept)}; expected [N, T{layout[2:]} = "
            f"{[dims.N, dims.T, *inner]}, or more rows and tokens"
        )
    checks.check_dtype(who, "intermediate_states", kept, POOL_DTYPES)


def _as_rows(x: Any, own: dict[str, Tensor | None], is_packed: bool) -> Any:
    """The tensors with tokens as [N, T, ...]."""

    def rows(t: Tensor | None) -> Tensor | None:
        return t.transpose(0, 1) if is_packed and t is not None else t

    tokens = {name: rows(checks.unit_last_stride(getattr(x, name))) for name in ("q", "k", "v")}
    of_tokens = {name: rows(t) if t is not None and t.dim() > 2 else t for name, t in own.items()}
    return x._replace(**tokens, **of_tokens, out=rows(x.out))


def has_values(x: Any) -> bool:
    """Whether a call has numbers that say where to read and write, which are checked where they are at hand."""
    return any(t is not None for t in (x.state_indices, x.cu_seqlens, x.num_accepted_tokens, x.intermediate_state_indices))


def check_values(request: DecodeRequest) -> None:
    """The checks that read data: slots in range and distinct, accepted counts; with CULA_CHECK=1 also what a family checks."""
    x, p, who = request.x, request.problem, request.who
    if x.state_indices is not None:
        checks.check_slots(who, "state_indices", x.state_indices, p.P, p.options.null_is_nonpositive)
    accepted, kept = x.num_accepted_tokens, x.intermediate_states
    most = p.T if p.has_token_indices or kept is None else kept.shape[1]
    if accepted is not None and bool(((accepted < 0) | (accepted > most)).any()):
        raise ValueError(f"{who}: num_accepted_tokens holds {accepted.tolist()}; each is 0 to T = {most}")
    if x.intermediate_state_indices is not None:
        rows, holder = x.intermediate_state_indices, "intermediate_states"
        checks.check_slots(who, "intermediate_state_indices", rows, kept.shape[0], False, holder, "row")
    if x.cu_seqlens is not None:
        _check_lengths(x.cu_seqlens.tolist(), x.q.shape[1], p.T, who)
    if settings.check_values():
        of_rows = _without_padding(request)
        checks.check_finite(who, of_rows, skip=("state", "intermediate_states", "out"))
        assert request.family.decode is not None
        request.family.decode.check_values(of_rows, p, who)


def _without_padding(request: DecodeRequest) -> Any:
    """The tensors with tokens as [all of them, ...], without those of padded rows and those behind the last offset: nothing
    depends on what these hold."""
    x, p = request.x, request.problem
    is_live = torch.ones(p.N, dtype=torch.bool, device=x.q.device)
    if x.state_indices is not None:
        slots = x.state_indices
        if p.has_token_indices:
            accepted = torch.zeros_like(slots[:, 0]) if x.num_accepted_tokens is None else x.num_accepted_tokens
            slots = slots.gather(1, (accepted.long() - 1).clamp(min=0)[:, None])[:, 0]
        is_live = slots >= (1 if p.options.null_is_nonpositive else 0)
    if x.cu_seqlens is None:
        is_live = is_live[:, None].expand(p.N, p.T)
    else:
        of_rows = is_live.repeat_interleave(x.cu_seqlens.diff().long())
        is_live = torch.zeros(1, x.q.shape[1], dtype=torch.bool, device=x.q.device)
        is_live[0, : len(of_rows)] = of_rows
    return x._replace(**{name: getattr(x, name)[is_live] for name in request.family.token_inputs})


def _check_lengths(offsets: list[int], tokens: int, most: int, who: str) -> None:
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] > tokens or min(lengths) < 0:
        raise ValueError(f"{who}: cu_seqlens is {offsets}; expected non-decreasing offsets from 0 to at most {tokens} tokens")
    if max(lengths) > most:
        raise ValueError(f"{who}: cu_seqlens has a row of {max(lengths)} tokens; this call takes up to {most} a row")
