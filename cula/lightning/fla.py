# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention by flash-linear-attention's names: `chunk_lightning_attn`, simple GLA with one decay a head (`g_gamma`).

States are `[N, H, K, V]` unless `state_v_first=True`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula.core import checks
from cula.core.fla import (
    check_chunk_size,
    check_first_states,
    check_floating,
    decode_few,
    is_decode,
    of_one_dtype,
    refuse_head_first,
    state_layout,
    swap_layout,
    warn_of_ignored,
)
from cula.core.prefill import prefill
from cula.core.problem import DecodeOptions, needs_grad
from cula.lightning.family import FAMILY
from cula.lightning.problem import LightningDecodeInputs, LightningInputs, LightningOptions


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA with constant decays, as `fla.ops.simple_gla.chunk_simple_gla(g_gamma=...)`.

    Args:
        q, k, v, scale, ...: as in `cula.cula_lightning`; tensors of several dtypes are brought to the widest.
        g: decays that depend on data; not served.
        g_gamma: `[H]`, the log decay of each head, <= 0; differentiable.
        cu_seqlens_cpu: accepted for FLA's callers; not needed.
        chunk_size: a power of 2, a hint: the result does not depend on it.
        backend: one by name, or "auto" for the fastest that serves the call.
        **kwargs: ignored with a warning, as FLA ignores them without one.
    """
    who = "chunk_simple_gla"
    refuse_head_first(head_first)
    check_chunk_size(chunk_size)
    warn_of_ignored(who, kwargs)
    return _simple_gla(who, q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, backend)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same by the name of FLA's recurrent form: up to 8 tokens of each sequence by the decode kernel, where no gradient is
    needed. `reverse` is not served, and `transpose_state_layout` is FLA's old name of `state_v_first`."""
    who = "fused_recurrent_simple_gla"
    if reverse:
        raise NotImplementedError(f"{who}: reverse=True is not served; flip the tensors along T")
    warn_of_ignored(who, kwargs)
    state_v_first = state_layout(state_v_first, transpose_state_layout)
    return _simple_gla(
        who, q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, backend, is_recurrent=True
    )


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Lightning Attention with the slopes of a layer, as `fla.ops.lightning_attn.chunk_lightning_attn`."""
    who = "chunk_lightning_attn"
    refuse_head_first(head_first)
    check_chunk_size(chunk_size)
    warn_of_ignored(who, kwargs)
    checks.check_tokens(who, q=q, k=k, v=v)
    H = q.shape[2]
    slopes = (8 / H * (1 - layer_idx / num_layers)) * torch.arange(H, dtype=torch.float32, device=q.device)
    return _simple_gla(who, q, k, v, None, -slopes, scale, initial_state, output_final_state, False, cu_seqlens, backend)


def _simple_gla(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    g_gamma: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    backend: str,
    is_recurrent: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if g is not None:
        raise NotImplementedError(
            f"{who}: g makes decays depend on data, which Lightning Attention does not have; pass g_gamma= (one decay a head), "
            "or use cula.cula_kda with one gate a head"
        )
    checks.check_tokens(who, q=q, k=k, v=v)
    io_dtype = q.dtype
    q, k, v = of_one_dtype(who, q, k, v)
    if g_gamma is None:  # FLA's default: nothing is forgotten
        g_gamma = torch.zeros(v.shape[2], dtype=torch.float32, device=q.device)
    check_floating(who, g_gamma=g_gamma)
    check_first_states(who, q, v, initial_state, state_v_first, cu_seqlens)
    decay = -checks.reshaped(who, "g_gamma", g_gamma, "[H]", (v.shape[2],)).float()
    if is_recurrent and is_decode(q, cu_seqlens) and not needs_grad((q, k, v, decay, initial_state)):
        rows = LightningDecodeInputs(q, k, v, initial_state, decay=decay, cu_seqlens=cu_seqlens)  # type: ignore[arg-type]
        of_decode = DecodeOptions(scale, state_is_kv=not state_v_first)
        o, final_state = decode_few(FAMILY, rows, of_decode, output_final_state, backend, who)
        return o.to(io_dtype), final_state
    x = LightningInputs(q, k, v, decay, swap_layout(initial_state, state_v_first), cu_seqlens)
    o, final_state = prefill(FAMILY, x, LightningOptions(scale, output_final_state=output_final_state), backend=backend, who=who)
    return o.to(io_dtype), swap_layout(final_state, state_v_first)
