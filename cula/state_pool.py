# SPDX-License-Identifier: Apache-2.0
"""Reading and writing states that live in a pool `[P, HV, V, K]`, and those kept inside a prompt for prefix caches.

Nothing here waits for a GPU, except `checkpoint_places` of packed sequences, which depend on their lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cula.contract import CHUNK, POOL_DTYPES, ArgumentTypeError, KdaProblem


def read_pool(pool: Tensor, indices: Tensor, has_initial_state: Tensor | None) -> Tensor:
    """First states [N, HV, V, K] float32: the slot's, or zeros for a negative index or where `has_initial_state` is False."""
    starts_from_slot = indices >= 0
    if has_initial_state is not None:
        starts_from_slot = starts_from_slot & has_initial_state
    states = pool.index_select(0, indices.clamp(min=0).long()).float()
    return torch.where(starts_from_slot[:, None, None, None], states, 0)


def write_pool(pool: Tensor, indices: Tensor, states: Tensor) -> None:
    """Put states [N, ...] into their slots; a negative index writes nothing.

    Without reading the indices back: a row that has no slot repeats what some row with a slot writes, and if no row has
    one, all of them write slot 0 back unchanged.
    """
    has_slot = indices >= 0
    some = torch.argmax(has_slot.to(torch.int8), 0, keepdim=True)  # [1]: a row that has a slot, if any
    anchor_slot = indices.index_select(0, some).clamp(min=0).long()
    anchor = torch.where(has_slot.any(), states.index_select(0, some).to(pool.dtype), pool.index_select(0, anchor_slot))
    slots = torch.where(has_slot, indices.long(), anchor_slot)
    values = torch.where(has_slot[:, None, None, None], states.to(pool.dtype), anchor)
    pool.index_copy_(0, slots, values)


def checkpoint_places(
    every: int | None, buffer: Tensor | None, problem: KdaProblem, cu_seqlens: Tensor | None, who: str
) -> list[int]:
    """Validate `checkpoint_every` and `checkpoint_states`; return where each checkpoint stands in [states at chunk
    starts, sequence by sequence; final states]. Reads packed lengths on the host."""
    if every is None and buffer is None:
        return []
    if every is None or buffer is None:
        raise ValueError(f"{who}: checkpoint_every and checkpoint_states go together; one of them is None")
    if not isinstance(every, int) or every <= 0 or every % CHUNK != 0:
        raise ValueError(f"{who}: checkpoint_every is {every!r}; expected a positive multiple of {CHUNK}")
    inner = (problem.HV, problem.V, problem.K)
    if buffer.dim() != 4 or buffer.shape[1:] != inner:
        raise ValueError(f"{who}: checkpoint_states has shape {list(buffer.shape)}; expected [M, HV, V, K] = {['M', *inner]}")
    if buffer.dtype not in POOL_DTYPES:
        raise ArgumentTypeError(f"{who}: checkpoint_states has dtype {buffer.dtype}; expected float32 or bfloat16")
    if problem.needs_grad:
        raise ValueError(f"{who}: checkpoint_states is for inference, but an input requires grad; call under torch.no_grad()")
    lengths = [problem.T] * problem.N if cu_seqlens is None else cu_seqlens.diff().tolist()
    chunks = [-(-length // CHUNK) for length in lengths]
    total, first, places = sum(chunks), 0, []
    for n, length in enumerate(lengths):
        for end in range(every, length + 1, every):
            places.append(first + end // CHUNK if end < length else total + n)
        first += chunks[n]
    if len(places) > buffer.shape[0]:
        raise ValueError(f"{who}: checkpoint_states has {buffer.shape[0]} rows; these sequences have {len(places)} checkpoints")
    return places


def write_checkpoints(buffer: Tensor, places: list[int], states: Tensor, final_state: Tensor) -> None:
    """states [B, NT, HV, V, K] at chunk starts and final_state [N, HV, V, K] -> the first rows of `buffer`."""
    both = torch.cat([states.flatten(0, 1), final_state])
    buffer[: len(places)] = both[torch.tensor(places, dtype=torch.long, device=both.device)].to(buffer.dtype)
