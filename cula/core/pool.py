# SPDX-License-Identifier: Apache-2.0
"""States that live in a pool `[P, HV, V, K]`, and those kept inside a prompt for prefix caches: checks, reads and writes.

Nothing here waits for a GPU, except `checkpoint_rows` of packed sequences, which depend on their lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cula.core import checks
from cula.core.checks import INDEX_DTYPES, POOL_DTYPES, ArgumentTypeError
from cula.core.constants import CHUNK
from cula.core.kernels import Pool
from cula.core.problem import Problem


class Serving(NamedTuple):
    """The tensors of a prefill that a serving engine hands over, beside the family's own. All are written, but the indices."""

    out: Tensor | None = None  # [B, T, HV, V]: takes o
    state_pool: Tensor | None = None  # [P, HV, V, K]
    initial_state_indices: Tensor | None = None  # [N]: the slot of each sequence
    has_initial_state: Tensor | None = None  # [N] bool
    checkpoint_states: Tensor | None = None  # [M, HV, V, K]

    @property
    def is_empty(self) -> bool:
        return all(t is None for t in self)

    @property
    def pool(self) -> Pool | None:
        if self.state_pool is None or self.initial_state_indices is None:
            return None
        return Pool(self.state_pool, self.initial_state_indices, self.has_initial_state)


def check_serving(serving: Serving, problem: Problem, q: Tensor, who: str) -> None:
    """Validate a pool with its two vectors, and `out`."""
    _check_state_pool(serving, problem, q.device, who)
    for name in ("out", "state_pool", "checkpoint_states"):
        t = getattr(serving, name)
        if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{who}: {name} is written in place and requires grad; pass {name}.detach(), or call under torch.no_grad()"
            )
    out = serving.out
    if out is None:
        return
    checks.check_tensor(who, "out", out)
    checks.check_shape(who, "out", out, "[B, T, HV, V]", (problem.B, problem.T, problem.HV, problem.V))
    checks.check_dtype(who, "out", out, (q.dtype,))
    checks.check_devices(who, q.device, out=out)
    if problem.needs_grad:
        raise ValueError(f"{who}: out= is for inference, but an input requires grad; call under torch.no_grad()")


def _check_state_pool(serving: Serving, problem: Problem, device: torch.device, who: str) -> None:
    _, pool, indices, has_initial_state, _ = serving
    if pool is None:
        for name, t in (("initial_state_indices", indices), ("has_initial_state", has_initial_state)):
            if t is not None:
                raise ValueError(f"{who}: {name} was given without state_pool")
        return
    if problem.has_initial_state:
        raise ValueError(f"{who}: initial_state and state_pool were both given; a sequence has one first state")
    if problem.needs_grad:
        raise ValueError(
            f"{who}: state_pool is updated in place and has no gradient, but an input requires grad; "
            "use initial_state= to train, or call under torch.no_grad()"
        )
    checks.check_pool(who, "state_pool", pool, "[P, HV, V, K]", (problem.HV, problem.V, problem.K))
    if indices is None:
        raise ValueError(f"{who}: state_pool needs initial_state_indices [N]: the slot of each sequence")
    checks.check_shape(who, "initial_state_indices", indices, "[N]", (problem.N,))
    checks.check_dtype(who, "initial_state_indices", indices, INDEX_DTYPES)
    if has_initial_state is not None:
        checks.check_shape(who, "has_initial_state", has_initial_state, "[N]", (problem.N,))
        checks.check_dtype(who, "has_initial_state", has_initial_state, (torch.bool,))
    checks.check_devices(who, device, state_pool=pool, initial_state_indices=indices, has_initial_state=has_initial_state)


def check_slot_values(serving: Serving, who: str) -> None:
    """Slots in range and distinct. Reads them back."""
    if serving.state_pool is not None and serving.initial_state_indices is not None:
        slots = serving.state_pool.shape[0]
        checks.check_slots(who, "initial_state_indices", serving.initial_state_indices, slots, null_is_nonpositive=False)


def read_pool(pool: Pool) -> Tensor:
    """First states [N, HV, V, K] float32: the slot's, or zeros for a negative index or where `has_initial_state` is False."""
    states, indices, has_initial_state = pool
    starts_from_slot = indices >= 0
    if has_initial_state is not None:
        starts_from_slot = starts_from_slot & has_initial_state
    first = states.index_select(0, indices.clamp(min=0).long()).float()
    return torch.where(starts_from_slot[:, None, None, None], first, 0)


def write_pool(pool: Pool, last: Tensor) -> None:
    """Put states [N, ...] into their slots; a negative index writes nothing.

    Without reading the indices back: a row that has no slot repeats what some row with a slot writes, and if no row has
    one, all of them write slot 0 back unchanged.
    """
    states, indices, _ = pool
    has_slot = indices >= 0
    some = torch.argmax(has_slot.to(torch.int8), 0, keepdim=True)  # [1]: a row that has a slot, if any
    anchor_slot = indices.index_select(0, some).clamp(min=0).long()
    anchor = torch.where(has_slot.any(), last.index_select(0, some).to(states.dtype), states.index_select(0, anchor_slot))
    slots = torch.where(has_slot, indices.long(), anchor_slot)
    values = torch.where(has_slot[:, None, None, None], last.to(states.dtype), anchor)
    states.index_copy_(0, slots, values)


def check_checkpoints(every: int | None, buffer: Tensor | None, problem: Problem, who: str) -> None:
    """Validate `checkpoint_every` and `checkpoint_states`, but for what depends on packed lengths."""
    if every is None and buffer is None:
        return
    if every is None or buffer is None:
        raise ValueError(f"{who}: checkpoint_every and checkpoint_states go together; one of them is None")
    if not isinstance(every, int) or every <= 0 or every % CHUNK != 0:
        raise ValueError(f"{who}: checkpoint_every is {every!r}; expected a positive multiple of {CHUNK}")
    inner = (problem.HV, problem.V, problem.K)
    if buffer.dim() != 4 or buffer.shape[1:] != inner:
        raise ValueError(f"{who}: checkpoint_states has shape {list(buffer.shape)}; expected [M, HV, V, K] = {['M', *inner]}")
    if buffer.dtype not in POOL_DTYPES:
        raise ArgumentTypeError(f"{who}: checkpoint_states has dtype {buffer.dtype}; expected float32, bfloat16 or float16")
    if problem.needs_grad:
        raise ValueError(f"{who}: checkpoint_states is for inference, but an input requires grad; call under torch.no_grad()")


def checkpoint_rows(every: int, buffer: Tensor, problem: Problem, cu_seqlens: Tensor | None, who: str) -> list[int]:
    """Where each checkpoint stands in [states at chunk starts, sequence by sequence; final states]. Reads packed lengths on the
    host."""
    lengths = [problem.T] * problem.N if cu_seqlens is None else cu_seqlens.diff().tolist()
    chunks = [-(-length // CHUNK) for length in lengths]
    total, first, rows = sum(chunks), 0, []
    for n, length in enumerate(lengths):
        for end in range(every, length + 1, every):
            rows.append(first + end // CHUNK if end < length else total + n)
        first += chunks[n]
    if len(rows) > buffer.shape[0]:
        raise ValueError(f"{who}: checkpoint_states has {buffer.shape[0]} rows; these sequences have {len(rows)} checkpoints")
    return rows


def write_checkpoints(buffer: Tensor, rows: list[int], states: Tensor, final_state: Tensor) -> None:
    """states [B, NT, HV, V, K] at chunk starts and final_state [N, HV, V, K] -> the first rows of `buffer`."""
    both = torch.cat([states.flatten(0, 1), final_state])
    buffer[: len(rows)] = both[torch.tensor(rows, dtype=torch.long, device=both.device)].to(buffer.dtype)
