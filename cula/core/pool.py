# SPDX-License-Identifier: Apache-2.0
"""States that live in a pool `[P, HV, V, K]`, and those kept inside a prompt for prefix caches: checks, reads and writes.

A backend's kernels may read and write both themselves (`core/kernels.py`); what is here does it around those that do not. Nothing
here waits for a GPU, except `checkpoint_rows` of packed sequences, which depend on their lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core import checks
from cula.core.checks import INDEX_DTYPES, POOL_DTYPES
from cula.core.constants import CHUNK
from cula.core.kernels import Checkpoints, Pool
from cula.core.problem import Problem


class Serving(NamedTuple):
    """The tensors of a prefill that a serving engine hands over, beside the family's own. All are written, but the indices."""

    out: Tensor | None = None  # [B, T, HV, V]: takes o
    state_pool: Tensor | None = None  # [P, HV, V, K]
    initial_state_indices: Tensor | None = None  # [N]: the slot of each sequence
    has_initial_state: Tensor | None = None  # [N] bool
    checkpoint_states: Tensor | None = None  # [M, HV, V, K]
    checkpoint_offsets: Tensor | None = None  # [N] int32

    def pool(self, options: Any) -> Pool | None:
        """The slots that a call with these options reads and writes; None where it has no pool."""
        if self.state_pool is None or self.initial_state_indices is None:
            return None
        return Pool(self.state_pool, self.initial_state_indices, self.has_initial_state, _null_is_nonpositive(options))

    def checkpoints(self, every: int | None) -> Checkpoints | None:
        return None if self.checkpoint_states is None else Checkpoints(self.checkpoint_states, every, self.checkpoint_offsets)


def _null_is_nonpositive(options: Any) -> bool:
    """Whether slot 0 marks padding too, of a family that has the option."""
    return getattr(options, "null_is_nonpositive", False)


def check_serving(serving: Serving, problem: Problem, q: Tensor, who: str) -> None:
    """Validate a pool with its two vectors, and `out`."""
    _check_state_pool(serving, problem, q.device, who)
    for name in ("out", "state_pool", "checkpoint_states"):
        t = getattr(serving, name)
        if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{who}: {name} is written in place and requires grad; pass {name}.detach(), or call under torch.no_grad()"
            )
        if isinstance(t, Tensor):
            checks.check_own_elements(who, name, t)
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
    pool, indices, has_initial_state = serving.state_pool, serving.initial_state_indices, serving.has_initial_state
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


def check_slot_values(pool: Pool | None, who: str) -> None:
    """Slots in range and distinct. Reads them back."""
    if pool is not None:
        checks.check_slots(who, "initial_state_indices", pool.indices, pool.states.shape[0], pool.null_is_nonpositive)


def read_pool(pool: Pool) -> Tensor:
    """First states [N, HV, V, K] float32: the slot's, or zeros for a null index or where `has_initial_state` is False."""
    states, indices, has_initial_state, _ = pool
    starts_from_slot = indices >= pool.first_slot
    if has_initial_state is not None:
        starts_from_slot = starts_from_slot & has_initial_state
    first = states.index_select(0, indices.clamp(min=0).long()).float()
    return torch.where(starts_from_slot[:, None, None, None], first, 0)


def write_pool(pool: Pool, last: Tensor) -> None:
    """Put states [N, ...] into their slots; a null index writes nothing.

    Without reading the indices back: a row that has no slot repeats what some row with a slot writes, and if no row has
    one, all of them write slot 0 back unchanged.
    """
    states, indices, *_ = pool
    if not indices.shape[0]:
        return
    has_slot = indices >= pool.first_slot
    some = torch.argmax(has_slot.to(torch.int8), 0, keepdim=True)  # [1]: a row that has a slot, if any
    anchor_slot = indices.index_select(0, some).clamp(min=0).long()
    anchor = torch.where(has_slot.any(), last.index_select(0, some).to(states.dtype), states.index_select(0, anchor_slot))
    slots = torch.where(has_slot, indices.long(), anchor_slot)
    values = torch.where(has_slot[:, None, None, None], last.to(states.dtype), anchor)
    states.index_copy_(0, slots, values)


def check_checkpoints(checkpoints: Checkpoints | None, every: int | None, problem: Problem, q: Tensor, who: str) -> None:
    """Validate `checkpoint_states` with what says which they are, but for what depends on data."""
    if checkpoints is None:
        if every is not None:
            raise ValueError(f"{who}: checkpoint_every needs checkpoint_states [M, HV, V, K], which take the states")
        return
    buffer, _, offsets = checkpoints
    if (every is None) == (offsets is None):
        given = "neither was" if every is None else "both were"
        raise ValueError(f"{who}: checkpoint_states goes with one of checkpoint_every and checkpoint_offsets; {given} given")
    inner = (problem.HV, problem.V, problem.K)
    if checks.rank_of(who, "checkpoint_states", buffer) != 4 or buffer.shape[1:] != inner:
        raise ValueError(f"{who}: checkpoint_states has shape {list(buffer.shape)}; expected [M, HV, V, K] = {['M', *inner]}")
    checks.check_dtype(who, "checkpoint_states", buffer, POOL_DTYPES)
    checks.check_devices(who, q.device, checkpoint_states=buffer, checkpoint_offsets=offsets)
    if every is not None:
        if not isinstance(every, int) or every <= 0 or every % CHUNK != 0:
            raise ValueError(f"{who}: checkpoint_every is {every!r}; expected a positive multiple of {CHUNK}")
        if not problem.is_packed:
            _check_rows(buffer, problem.N * (problem.T // every), who)
    if offsets is not None:
        checks.check_shape(who, "checkpoint_offsets", offsets, "[N]", (problem.N,))
        checks.check_dtype(who, "checkpoint_offsets", offsets, (torch.int32,))
        _check_rows(buffer, problem.N, who)
    if problem.needs_grad:
        raise ValueError(f"{who}: checkpoint_states is for inference, but an input requires grad; call under torch.no_grad()")


def _check_rows(buffer: Tensor, wanted: int, who: str) -> None:
    if wanted > buffer.shape[0]:
        raise ValueError(f"{who}: checkpoint_states has {buffer.shape[0]} rows; these sequences have {wanted} checkpoints")


def check_checkpoint_values(checkpoints: Checkpoints | None, problem: Problem, cu_seqlens: Tensor | None, who: str) -> None:
    """Room for every checkpoint, and offsets that are whole chunks inside of their sequences. Reads lengths and offsets back."""
    if checkpoints is None:
        return
    buffer, every, offsets = checkpoints
    lengths = _lengths(problem, cu_seqlens)
    if every is not None:
        _check_rows(buffer, sum(length // every for length in lengths), who)
    for n, (offset, length) in enumerate(zip([] if offsets is None else offsets.tolist(), lengths)):
        if offset % CHUNK or not 0 <= offset <= length:
            raise ValueError(
                f"{who}: checkpoint_offsets[{n}] is {offset}; expected a multiple of {CHUNK} "
                f"from 0 (none) to the {length} tokens of the sequence"
            )


def _lengths(problem: Problem, cu_seqlens: Tensor | None) -> list[int]:
    return [problem.T] * problem.N if cu_seqlens is None else cu_seqlens.diff().tolist()


def checkpoint_rows(checkpoints: Checkpoints, problem: Problem, cu_seqlens: Tensor | None, who: str) -> Tensor | None:
    """Where checkpoints by `every` stand in [states at chunk starts, sequence by sequence; final states]: numbers on the states'
    device. Reads packed lengths on the host. None for checkpoints by offsets, which need no such list."""
    buffer, every, _ = checkpoints
    if every is None:
        return None
    lengths = _lengths(problem, cu_seqlens)
    chunks = [-(-length // CHUNK) for length in lengths]
    total, first, rows = sum(chunks), 0, []
    for n, length in enumerate(lengths):
        for end in range(every, length + 1, every):
            rows.append(first + end // CHUNK if end < length else total + n)
        first += chunks[n]
    _check_rows(buffer, len(rows), who)
    return torch.tensor(rows, dtype=torch.long, device=buffer.device)


def write_checkpoints(
    checkpoints: Checkpoints, rows: Tensor | None, problem: Problem, cu_seqlens: Tensor | None, states: Tensor, last: Tensor
) -> None:
    """states [B, NT, HV, V, K] at chunk starts and final states `last` [N, HV, V, K] -> the rows of the buffer."""
    buffer, _, offsets = checkpoints
    both = torch.cat([states.flatten(0, 1), last])
    if rows is not None:
        buffer[: len(rows)] = both[rows].to(buffer.dtype)
        return
    assert offsets is not None
    N, of_last = problem.N, both.shape[0] - problem.N
    n = torch.arange(N, device=buffer.device)
    lengths = torch.full_like(n, problem.T) if cu_seqlens is None else cu_seqlens.diff()
    chunks = (lengths + (CHUNK - 1)) // CHUNK
    first = chunks.cumsum(0) - chunks
    is_kept = (offsets > 0) & (offsets % CHUNK == 0) & (offsets <= lengths)
    rows = torch.where(offsets < lengths, first + offsets // CHUNK, of_last + n)
    values = both[torch.where(is_kept, rows, 0)].to(buffer.dtype)
    buffer[:N] = torch.where(is_kept[:, None, None, None], values, buffer[:N])
