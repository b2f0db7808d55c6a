# SPDX-License-Identifier: Apache-2.0
"""What functions with flash-linear-attention's signatures share: its state layout, keywords that it ignores, short calls."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from cula.core import checks
from cula.core.checks import IO_DTYPES, POOL_DTYPES
from cula.core.constants import CHUNK, MAX_DECODE_TOKENS
from cula.core.decode import decode
from cula.core.family import Family
from cula.core.pool import Serving
from cula.core.prefill import prefill
from cula.core.problem import DecodeOptions


def state_layout(state_v_first: bool, transpose_state_layout: bool | None, frames: int = 1) -> bool:
    """Whether states are `[N, HV, V, K]`: FLA's `state_v_first`, or its deprecated name with FLA's words.

    `frames` are those of the function that was called: two where it is decorated by `torch.no_grad`.
    """
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`.")
    _warn("`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning, frames)
    return transpose_state_layout


def warn_of_ignored(who: str, kwargs: dict[str, Any], frames: int = 1) -> None:
    """Say which keywords are ignored, if any; `frames` as in `state_layout`."""
    if kwargs:
        _warn(f"{who}: ignores {', '.join(kwargs)}, as flash-linear-attention does", UserWarning, frames)


def _warn(message: str, category: type[Warning], frames: int) -> None:
    """Warn the caller; not where torch traces, which has no graph for a warning."""
    if not torch.compiler.is_compiling():
        warnings.warn(message, category, stacklevel=3 + frames)


def check_chunk_size(chunk_size: int | None) -> None:
    """FLA's error for sizes that its kernels of simple GLA do not have; cuLA's result does not depend on it."""
    if chunk_size is not None and (chunk_size < 1 or chunk_size & (chunk_size - 1)):
        raise ValueError(f"`chunk_size` must be a power of 2, got {chunk_size}.")


def check_state_chunks(who: str, chunk_size: int, return_intermediate_states: bool) -> None:
    """That states at chunk starts are asked for by the chunks that cuLA has: the one result that depends on their size."""
    if return_intermediate_states and chunk_size != CHUNK:
        raise ValueError(
            f"{who}: return_intermediate_states=True returns the states every {CHUNK} tokens; chunk_size is {chunk_size}, "
            f"pass chunk_size={CHUNK}"
        )


def refuse_head_first(head_first: bool | None) -> None:
    """FLA's error for a layout that it had once."""
    if head_first is not None:
        raise DeprecationWarning("head_first has been removed. Inputs must be in `[B, T, H, ...]` format.")


def is_decode(q: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether a call of FLA's recurrent form is one that the decode kernels take: up to 8 tokens of each row.

    Packed rows are known to be short where all of them together have no more, and on a CPU, where their offsets can be read.
    Offsets that are wrong are for the prefill to refuse.
    """
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return 0 < T <= MAX_DECODE_TOKENS and B > 0
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or B != 1 or T == 0:
        return False
    lengths = _lengths(cu_seqlens, T)
    return T <= MAX_DECODE_TOKENS if lengths is None else bool(((lengths >= 0) & (lengths <= MAX_DECODE_TOKENS)).all())


def is_decode_on_pool(q: Tensor, cu_seqlens: Tensor | None, slots: Tensor | None) -> bool:
    """The same of a call that names slots of a pool: one for each token says how many tokens a packed row has at most."""
    if cu_seqlens is not None and isinstance(slots, Tensor) and slots.dim() == 2:
        return q.shape[0] == 1 and q.shape[1] > 0 and 0 < slots.shape[1] <= MAX_DECODE_TOKENS
    return is_decode(q, cu_seqlens)


def _are_single_tokens(q: Tensor, cu_seqlens: Tensor) -> bool:
    """Whether packed rows that are decoded are known to have one token each, as those of a generation's step."""
    N, T = cu_seqlens.shape[0] - 1, q.shape[1]
    if N != T or N == 1:
        return N == T
    lengths = _lengths(cu_seqlens, T)
    return lengths is not None and bool((lengths == 1).all())


def _lengths(cu_seqlens: Tensor, T: int) -> Tensor | None:
    """Of packed rows, where offsets can be read without waiting for a GPU and have all T tokens; -1 for one of wrong offsets."""
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu" or checks.has_no_data(cu_seqlens):
        return None
    lengths = cu_seqlens.diff()
    return lengths if cu_seqlens[0] == 0 and cu_seqlens[-1] == T else torch.full_like(lengths, -1)


def recurrent(
    family: Family,
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    switches: dict[str, Any],
    *,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    backend: str,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's recurrent form of a family with gates, from first states that stay as they are: up to 8 tokens of each row by the
    decode kernels where that is known (`is_decode`), others by the prefill's. `switches` are options that both have."""
    check_first_states(who, q, v, initial_state, state_v_first, cu_seqlens)
    if is_decode(q, cu_seqlens):
        assert family.decode is not None
        rows = family.decode.Inputs(
            q, k, v, initial_state, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens, out=out
        )  # fmt: skip
        of_decode = DecodeOptions(state_is_kv=not state_v_first, **switches)
        return decode_few(family, rows, of_decode, output_final_state, backend, who)
    x = family.Inputs(q, k, v, g, beta, A_log, dt_bias, swap_layout(initial_state, state_v_first), cu_seqlens)
    options = family.Options(output_final_state=output_final_state, **switches)
    o, final_state = prefill(family, x, options, Serving(out=out), backend=backend, who=who)
    return o, swap_layout(final_state, state_v_first)


def decode_few(
    family: Family, rows: Any, options: DecodeOptions, output_final_state: bool, backend: str, who: str
) -> tuple[Tensor, Tensor | None]:
    """Up to 8 tokens of each row from first states (`rows.state`, None for zeros) that stay as they are: o, and last states where
    asked for.

    One token's last states are written where they are returned; those of several are made in a copy.
    """
    q, v, h0, cu_seqlens = rows.q, rows.v, rows.state, rows.cu_seqlens
    N, is_one_token = q.shape[0], q.shape[1] == 1
    if cu_seqlens is not None:
        N, is_one_token = cu_seqlens.shape[0] - 1, _are_single_tokens(q, cu_seqlens)
        if is_one_token:  # rows of one token, which decode takes packed and without offsets
            rows = rows._replace(cu_seqlens=None)
    if h0 is not None and (is_one_token or not output_final_state):
        h0 = (h0 if h0.dtype in POOL_DTYPES else h0.float()).contiguous()
        after = torch.empty_like(h0, dtype=torch.float32).unsqueeze(1) if output_final_state else None
        rows, options = rows._replace(state=h0, intermediate_states=after), options._replace(commit=False)
        o, _ = decode(family, rows, options, backend=backend, who=who)
        return o, None if after is None else after[:, 0]
    if h0 is None:
        inner = (q.shape[3], v.shape[3]) if options.state_is_kv else (v.shape[3], q.shape[3])
        states = torch.zeros(N, v.shape[2], *inner, dtype=torch.float32, device=q.device)
    else:
        states = h0.float().clone(memory_format=torch.contiguous_format)
    o, states = decode(family, rows._replace(state=states), options, backend=backend, who=who)
    return o, states if output_final_state else None


def check_floating(who: str, **tensors: Tensor | None) -> None:
    """That tensors which are converted to float32 hold real numbers: of others that would leave something out."""
    for name, t in tensors.items():
        if t is None:
            continue
        checks.check_tensor(who, name, t)
        if not t.is_floating_point():
            raise checks.ArgumentTypeError(
                f"{who}: {name} has dtype {checks.dtype_name(t.dtype)}; expected floating point numbers"
            )


def of_one_dtype(who: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FLA takes q, k and v of several dtypes; kernels take one."""
    if q.dtype == k.dtype == v.dtype:
        return q, k, v
    for name, t in (("q", q), ("k", k), ("v", v)):
        checks.check_dtype(who, name, t, IO_DTYPES)
    widest = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(widest), k.to(widest), v.to(widest)


def check_first_states(
    who: str, q: Tensor, v: Tensor, initial_state: Tensor | None, state_v_first: bool, cu_seqlens: Tensor | None = None
) -> None:
    """First states as FLA's callers know them: the checks further down see them transposed, or as a pool.

    What is wrong with the offsets is for those to say.
    """
    if initial_state is None:
        return
    check_floating(who, initial_state=initial_state)
    if cu_seqlens is not None and (not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1):
        return
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    letters, wanted, other, swapped = "[N, HV, K, V]", (N, HV, K, V), "[N, HV, V, K]", (N, HV, V, K)
    if state_v_first:
        letters, wanted, other, swapped = other, swapped, letters, wanted
    if initial_state.shape == swapped and K != V:
        raise ValueError(
            f"{who}: initial_state has shape {list(swapped)}, which is {other}; with state_v_first={state_v_first} states are "
            f"{letters} = {list(wanted)}: pass state_v_first={not state_v_first}, or initial_state.transpose(-1, -2)"
        )
    checks.check_shape(who, "initial_state", initial_state, letters, wanted)


def swap_layout(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """Between the caller's layout and [N, HV, V, K], in float32."""
    if state is None:
        return None
    state = state.float()
    return state if state_v_first else state.transpose(-1, -2).contiguous()
