# SPDX-License-Identifier: Apache-2.0
"""Lightning prefill by the names existing code imports. Forward only, and `scale` is 1 by default: unlike `cula_lightning`."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.core.checks import check_cu_seqlens, check_int32_offsets, check_tokens
from cula.core.constants import CHUNK
from cula.core.pool import Serving
from cula.core.prefill import prefill
from cula.lightning.family import FAMILY
from cula.lightning.problem import LightningInputs, LightningOptions


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
    options = LightningOptions(scale, chunk_size, output_final_state)
    return prefill(FAMILY, LightningInputs(Q, K, V, decay, initial_state), options, who="lightning_attn_fwd")


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
    check_tokens(who, Q=Q, K=K, V=V)
    check_int32_offsets(who, cu_seqlens)
    N = check_cu_seqlens(who, cu_seqlens, Q, "Q")
    if state_pool is None:
        if initial_state_indices is not None:
            raise ValueError(f"{who}: initial_state_indices was given without state_pool")
        state_pool = Q.new_zeros(N, V.shape[2], V.shape[3], K.shape[3], dtype=torch.float32)
    if initial_state_indices is None:
        initial_state_indices = torch.arange(N, dtype=torch.int32, device=Q.device)
    x = LightningInputs(Q, K, V, decay, cu_seqlens=cu_seqlens)
    serving = Serving(state_pool=state_pool, initial_state_indices=initial_state_indices)
    o, _ = prefill(FAMILY, x, LightningOptions(scale, chunk_size), serving, who=who)
    return o, state_pool
