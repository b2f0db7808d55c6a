# SPDX-License-Identifier: Apache-2.0
"""One context-parallel call on one rank: local passes (`kernels.py`), states across ranks (`scan.py`), one autograd node.

`o` and `final_state` come out of the same autograd node, so using either in a loss runs the whole backward, with all the
messages the other ranks wait for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cula.core.device import running_on
from cula.core.operator import without_gradient
from cula.dist.comm import Channel, broadcast, collect_rows, group_state, scatter_rows, sum_to
from cula.dist.cost import Schedule
from cula.dist.kernels import Inputs, LocalKernels
from cula.dist.scan import Affine, Neighbours, scan
from cula.dist.varlen import Layout


@dataclass(frozen=True)
class Call:
    """Everything about a call but its tensors."""

    kernels: LocalKernels
    layout: Layout
    schedule: Schedule
    group: dist.ProcessGroup | None  # None: a single rank
    rank: int
    size: int
    has_initial_state: bool  # of a batch: on rank 0 only
    output_final_state: bool
    broadcast_final_state: bool
    number: int = 0  # of the call on its group, once the ranks agree on it; keeps the messages of calls apart

    @property
    def first(self) -> int:
        """The rank whose `initial_state` counts."""
        return 0

    @property
    def last(self) -> int:
        """The rank that gets `final_state`."""
        return self.size - 1

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor | None, Saved]:
        """(o, final_state, what backward needs). x holds this rank's tokens and the caller's `initial_state`."""
        share, near, channel = self.layout.share, self._neighbours(), self._channel(is_backward=False)
        row = x.v.new_empty(1, dtype=torch.float32).expand(x.v.shape[2], x.v.shape[3], x.q.shape[3])
        states = row.expand(len(share.ids), *row.shape)  # the shape of the local states
        h0 = None
        if self.has_initial_state:
            begun = self._spread(channel, x.initial_state, self.layout.begins_on, self.first, row)
            h0 = _fill(None, share.rows_begin, begun, states)
        x = x._replace(initial_state=h0, cu_seqlens=_local_offsets(share.cu_seqlens, x.q.device))

        M = arrived = None
        if self.schedule.exchange == "ring":
            sources = [(rank, states[share.rows_in]) for rank in near.before[:1]]
            arrived = channel.exchange([], sources)[0] if sources else None
        elif near.before or near.after:
            affine = None
            if share.num_after:
                affine = Affine(*self.kernels.transition(self.kernels.piece(x, share.tokens(share.rows_out))))
                if share.is_passage:
                    M = affine.M
                else:
                    affine = Affine(None, affine.B if h0 is None else affine(h0[share.rows_out]))
            arrived = self._scan(channel, near, affine, states[share.rows_in])
        if arrived is not None:
            x = x._replace(initial_state=_fill(h0, share.rows_in, arrived, states))

        o, ht, kept = self.kernels.forward(x)
        if self.schedule.exchange == "ring":
            channel.exchange([(rank, ht[share.rows_out]) for rank in near.after[:1]], [])
        final_state = self._final_state(channel, ht[share.rows_end], row) if self.output_final_state else None
        channel.close()
        return o, final_state, Saved(x, M, kept)

    def backward(self, saved: Saved, do: Tensor | None, d_final: Tensor | None) -> tuple[list[Tensor | None], Tensor | None]:
        """(gradients of the inputs before initial_state, gradient of initial_state): the forward with ranks reversed."""
        x, share, near = saved.x, self.layout.share, self._neighbours().reversed()
        channel = self._channel(is_backward=True)
        do = torch.zeros_like(x.v) if do is None else do.contiguous()
        row = x.v.new_empty(1, dtype=torch.float32).expand(x.v.shape[2], x.v.shape[3], x.q.shape[3])
        states = row.expand(len(share.ids), *row.shape)
        dht = self._final_state_grad(channel, d_final, row, states) if self.output_final_state else None

        arrived = None
        if self.schedule.exchange == "ring":
            sources = [(rank, states[share.rows_out]) for rank in near.before[:1]]
            arrived = channel.exchange([], sources)[0] if sources else None
        elif near.before or near.after:
            affine = None
            if share.num_before:
                tokens = share.tokens(share.rows_in)
                d_last = None if dht is None or share.is_passage else dht[share.rows_in]
                C = self.kernels.state_grad(self.kernels.piece(x, tokens), do[:, tokens].contiguous(), d_last)
                affine = Affine(None if saved.M is None else saved.M.mT, C)
            arrived = self._scan(channel, near, affine, states[share.rows_out])
        if arrived is not None:
            dht = _fill(dht, share.rows_out, arrived, states)

        grads, dh0 = self.kernels.backward(x, saved.kept, do, dht)
        d_initial = None
        if dh0 is not None and self.schedule.exchange == "ring":
            channel.exchange([(rank, dh0[share.rows_in]) for rank in near.after[:1]], [])
        if dh0 is not None and self.has_initial_state:
            d_initial = self._collect(channel, dh0[share.rows_begin], self.layout.begins_on, self.first)
        channel.close()
        return grads, d_initial

    def _neighbours(self) -> Neighbours:
        return Neighbours.of(self.rank, self.layout.share.num_before, self.layout.share.num_after)

    def _channel(self, is_backward: bool) -> Channel | _NoChannel:
        return _NoChannel() if self.group is None else Channel(self.group, self.number, is_backward)

    def _scan(self, channel: Any, near: Neighbours, affine: Affine | None, like: Tensor) -> Tensor | None:
        return scan(channel, self.schedule, near, affine, like, like.shape[3] if self.kernels.has_dense_transition else 1)

    def _spread(self, channel: Any, rows: Tensor | None, owners: tuple[int, ...], root: int, row: Tensor) -> Tensor:
        """Rows [N, ...] of `root` to the ranks that own them."""
        if any(owner != root for owner in owners):
            return scatter_rows(channel, rows, owners, root, row)
        return rows if self.rank == root and rows is not None else row.expand(0, *row.shape)

    def _collect(self, channel: Any, mine: Tensor, owners: tuple[int, ...], root: int) -> Tensor | None:
        """Rows of their owners to `root`, in order [N, ...]; None on the other ranks."""
        if any(owner != root for owner in owners):
            return collect_rows(channel, mine, owners, root)
        return mine if self.rank == root else None

    def _final_state(self, channel: Any, ended: Tensor, row: Tensor) -> Tensor | None:
        whole = self._collect(channel, ended, self.layout.ends_on, self.last)
        if not self.broadcast_final_state or self.group is None:
            return whole
        if whole is None:
            whole = torch.zeros(len(self.layout.ends_on), *row.shape, dtype=row.dtype, device=row.device)
        return broadcast(whole, self.last, self.group)

    def _final_state_grad(self, channel: Any, d_final: Tensor | None, row: Tensor, states: Tensor) -> Tensor | None:
        """Gradients of the local last states, those that end here filled in."""
        owners = self.layout.ends_on
        crosses = self.size > 1 and (self.broadcast_final_state or any(owner != self.last for owner in owners))
        if d_final is None:
            if not crosses:
                return None
            d_final = torch.zeros(len(owners), *row.shape, dtype=row.dtype, device=row.device)
        if self.broadcast_final_state and self.size > 1:
            d_final = sum_to(channel, d_final, self.last)
        ended = self._spread(channel, d_final, owners, self.last, row)
        return _fill(None, self.layout.share.rows_end, ended, states)


@dataclass(frozen=True)
class Saved:
    """What the backward reads besides the gradients."""

    x: Inputs  # with the local first states
    M: Tensor | None  # of the sequences that pass through, where the exchange is a scan
    kept: tuple[Tensor, ...]  # of the forward kernel


class _NoChannel:
    """One rank alone has nobody to talk to."""

    def exchange(self, sends: list[Any], receives: list[Any]) -> list[Tensor]:
        assert not sends and not receives
        return []

    def close(self) -> None: ...


class ContextParallel(torch.autograd.Function):
    """`Call` as an autograd node; arguments are the call and the tensors of x."""

    @staticmethod
    def forward(ctx: Any, call: Call, inputs: type, *x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        o, final_state, saved = call.forward(inputs(*x))
        ctx.call, ctx.inputs = call, inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved.x, saved.M, *saved.kept)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
        tensors, count = ctx.saved_tensors, len(ctx.inputs._fields)  # read once: reading them may run the forward again
        x, (M, *kept) = ctx.inputs(*tensors[:count]), tensors[count:]
        with torch.no_grad(), running_on(x.q):
            grads, d_initial = ctx.call.backward(Saved(x, M, tuple(kept)), do, d_final)
        return None, None, *without_gradient((*grads, d_initial), (*x, do, d_final)), None  # none for cu_seqlens


def run(call: Call, x: Inputs, needs_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Make the call, with the tensors' device current: kernels launch there."""
    with running_on(x.q):
        if needs_grad:
            return ContextParallel.apply(call, type(x), *x)
        o, final_state, _ = call.forward(x)
        return o, final_state


def next_number(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group_state(group).next_call()


def _fill(whole: Tensor | None, rows: slice, values: Tensor, states: Tensor) -> Tensor:
    """`whole` (zeros where None) with some rows replaced, as a tensor of its own where it changes."""
    if len(values) == len(states):
        return values.contiguous()
    filled = torch.zeros(states.shape, dtype=states.dtype, device=states.device) if whole is None else whole.clone()
    filled[rows] = values
    return filled


@functools.lru_cache(maxsize=64)
def _local_offsets(offsets: tuple[int, ...] | None, device: torch.device) -> Tensor | None:
    if offsets is None:
        return None
    with torch.inference_mode(False):  # a tensor that outlives the call, and that a backward may have to save
        return torch.tensor(offsets, dtype=torch.int32, device=device)
