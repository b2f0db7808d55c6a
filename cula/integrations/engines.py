# SPDX-License-Identifier: Apache-2.0
"""Calls of serving engines on their state pools, for the plug-ins of vLLM and SGLang.

Pools are `[slots, HV, V, K]` (Lightning's `[slots, H, K, V]`) and updated in place. Tokens of all requests
are packed, `[1, T, heads, dim]`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cula.api import cula_decode, cula_gdn, cula_kda, cula_lightning
from cula.core.constants import CHUNK
from cula.core.kernels import Pool
from cula.core.pool import read_pool, write_pool

Mode = Literal["gdn", "kda"]


def prefill(
    mode: Mode,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor,
    *,
    writes: bool = True,
    returns_states: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Sequences that start from their slots and leave their last states there.

    Args:
        indices: `[N]` slots; negative ones are sequences without one.
        writes: False leaves the pool as it is.
        returns_states: also return the state at the start of each 64-token chunk.
        track_state: `[N, HV, V, K]`: row n takes the state at the start of chunk `track_chunk_idx[n]` of sequence n (-1: none).
        **options: of `cula_gdn` or `cula_kda`.

    Returns:
        `(o, states)`: o `[1, T, HV, V]`; states `[1, NT, HV, V, K]` or None.
    """
    function: Any = cula_gdn if mode == "gdn" else cula_kda
    first = None
    if not writes or track_state is not None:
        first = read_pool(Pool(pool, indices, None))
    options |= {"state_pool": pool, "initial_state_indices": indices} if writes else {"initial_state": first}
    with torch.no_grad():
        if track_state is not None:
            assert first is not None and track_chunk_idx is not None
            is_first = (track_chunk_idx == 0)[:, None, None, None]  # before the first chunk: where the sequence starts
            track_state.copy_(torch.where(is_first, first.to(track_state.dtype), track_state))
            offsets = track_chunk_idx.clamp(min=0).to(torch.int32) * CHUNK
            options |= {"checkpoint_states": track_state, "checkpoint_offsets": offsets}
        if returns_states:
            options["return_intermediate_states"] = True
        o, _, *states = function(q, k, v, g, beta, cu_seqlens=cu_seqlens, **options)
    return o, states[0] if returns_states else None


def decode(
    mode: Mode,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    pool: Tensor,
    indices: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    **options: Any,
) -> Tensor:
    """Rows of tokens with raw gates and raw beta logits.

    Args:
        q, k, v: `[N, T, heads, dim]`, or packed `[1, N, heads, dim]`.
        a, b: gates and logits, in any shape.
        **options: of `cula_decode`.
    """
    gates = v.shape[:3] if mode == "gdn" else (*v.shape[:3], q.shape[-1])
    if mode == "kda":
        options["lower_bound"] = lower_bound
    with torch.no_grad():
        o, _ = cula_decode(
            q, k, v, pool, mode=mode, state_indices=indices, g=a.reshape(gates), beta=b.reshape(v.shape[:3]),
            A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, **options,
        )  # fmt: skip
    return o


def lightning_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    pool: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
    scale: float,
) -> Tensor:
    """Lightning over sequences that start from their slots of a pool `[slots, H, K, V]` (where `has_state`) and end there."""
    slots = Pool(pool.transpose(-1, -2), indices, has_state)
    with torch.no_grad():
        h0 = read_pool(slots).contiguous()
        o, last = cula_lightning(q, k, v, decay, scale=scale, initial_state=h0, output_final_state=True, cu_seqlens=cu_seqlens)
        assert last is not None
        write_pool(slots, last)
    return o
