# SPDX-License-Identifier: Apache-2.0
"""State buffers for one rank of a tensor-parallel group."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.core.checks import POOL_DTYPES, ArgumentTypeError


def alloc_state_buffer(
    batch_size: int,
    num_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    *,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
) -> Tensor:
    """Zeros for the states of a prefill on one rank: `[batch_size, num_heads / tp_size, head_dim_v, head_dim_k]`.

    Args:
        batch_size: sequences, N.
        num_heads: value heads of the whole model, HV.
        head_dim_k, head_dim_v: K and V. K is the last dimension of a state.
        tp_size: ranks that share the heads; must divide `num_heads`.
        dtype: float32 (what `initial_state` takes), bfloat16 or float16.
        device: where.

    Example:
        >>> alloc_state_buffer(2, 8, 64, 32, tp_size=4, device="cpu").shape
        torch.Size([2, 2, 32, 64])
    """
    return _alloc("alloc_state_buffer", "batch_size", batch_size, num_heads, head_dim_k, head_dim_v, tp_size, dtype, device)


def alloc_decode_state_pool(
    pool_size: int,
    num_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    *,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
) -> Tensor:
    """Zeros for a decode pool on one rank: `[pool_size, num_heads / tp_size, head_dim_v, head_dim_k]`.

    Args:
        pool_size: slots, P.
        num_heads, head_dim_k, head_dim_v, tp_size, dtype, device: as in `alloc_state_buffer`.
    """
    return _alloc("alloc_decode_state_pool", "pool_size", pool_size, num_heads, head_dim_k, head_dim_v, tp_size, dtype, device)


def _alloc(
    who: str,
    count_name: str,
    count: int,
    num_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    least = ((count_name, count, 0), ("num_heads", num_heads, 1), ("head_dim_k", head_dim_k, 1), ("head_dim_v", head_dim_v, 1))
    for name, value, smallest in (*least, ("tp_size", tp_size, 1)):
        if not isinstance(value, int) or value < smallest:
            raise ValueError(f"{who}: {name} is {value!r}; expected an integer >= {smallest}")
    if num_heads % tp_size != 0:
        raise ValueError(f"{who}: tp_size = {tp_size} does not divide num_heads = {num_heads}")
    if dtype not in POOL_DTYPES:
        raise ArgumentTypeError(f"{who}: dtype is {dtype}; expected torch.float32, torch.bfloat16 or torch.float16")
    return torch.zeros(count, num_heads // tp_size, head_dim_v, head_dim_k, dtype=dtype, device=device)
