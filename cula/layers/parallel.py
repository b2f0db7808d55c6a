# SPDX-License-Identifier: Apache-2.0
"""Layers on several processes: what crosses from rank to rank outside of the recurrence, which is `cula.dist`'s.

With a `tp_group`, a rank has the parameters of its share of the heads. What the ranks' heads read in common (the input, the
narrow half of a low-rank projection, the norm's weight) goes through `shared`, the sum of the ranks' outputs through `summed`.
With a `cp_group`, a rank has a slice of the tokens, and the first inputs of its convolutions come from the rank before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cula.dist.comm import Channel, group_state


def size_of(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None


def shared(x: Tensor, group: Any) -> Tensor:
    """x, the same on every rank, each of which uses it for its own heads: its gradient is the sum of theirs."""
    return x if group is None else _Shared.apply(x, group)


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum of the ranks' x, on every rank; each goes on to compute the same with it."""
    return x if group is None else _Summed.apply(x, group)


class _FromRankBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, last: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.call = group, group_state(group).next_call()
        return _shift(last, group, ctx.call, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _shift(grads[0].contiguous(), ctx.group, ctx.call, -1), None


def _shift(x: Tensor, group: Any, call: int, by: int) -> Tensor:
    """x of the rank `by` places before; zeros where there is none."""
    channel = Channel(group, call, by < 0)
    to, source = channel.rank + by, channel.rank - by
    sends = [(to, x)] if 0 <= to < channel.size else []
    receives = [(source, x)] if 0 <= source < channel.size else []
    got = channel.exchange(sends, receives)
    channel.close()
    return got[0] if got else torch.zeros_like(x)


def from_rank_before(last: Tensor, group: Any) -> Tensor:
    """What the rank before hands on as `last`; zeros on the first."""
    return _FromRankBefore.apply(last, group)
