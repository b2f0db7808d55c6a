# SPDX-License-Identifier: Apache-2.0
"""Lightning prefill by the names existing code imports. Forward only, and `scale` is 1 by default: unlike `cula_lightning`."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.api import cula_lightning
from cula.contract import CHUNK, ArgumentTypeError


@torch.no_grad()
def lightning_attn_fwd(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """(o, final state [B, H, V, K] or None) of equally long sequences; see `cula.cula_lightning`."""
    return cula_lightning(
        Q,
        K,
        V,
        decay,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        chunk_size=chunk_size,
    )


@torch.no_grad()
def lightning_attn_fwd_varlen(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float = 1.0,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    chunk_size: int = CHUNK,
    persistent: bool = True,
) -> tuple[Tensor, Tensor]:
    """(o, state pool) of packed sequences. The pool is updated in place; without one, a pool [N, H, V, K] is made.

    Args:
        cu_seqlens: `[N + 1]` int32.
        initial_state_indices: `[N]` slots; row n uses slot n by default.
        persistent: accepted for existing callers; scheduling is the kernel's business.
    """
    who = "lightning_attn_fwd_varlen"
    if cu_seqlens.dtype != torch.int32:
        raise ArgumentTypeError(f"{who}: cu_seqlens has dtype {cu_seqlens.dtype}; expected int32")
    N = cu_seqlens.shape[0] - 1
    if state_pool is None:
        if initial_state_indices is not None:
            raise ValueError(f"{who}: initial_state_indices was given without state_pool")
        state_pool = Q.new_zeros(N, V.shape[2], V.shape[3], K.shape[3], dtype=torch.float32)
    if initial_state_indices is None:
        initial_state_indices = torch.arange(N, dtype=torch.int32, device=Q.device)
    o, _ = cula_lightning(
        Q,
        K,
        V,
        decay,
        scale=scale,
        cu_seqlens=cu_seqlens,
        state_pool=state_pool,
        initial_state_indices=initial_state_indices,
        chunk_size=chunk_size,
    )
    return o, state_pool
