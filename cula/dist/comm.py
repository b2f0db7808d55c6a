# SPDX-License-Identifier: Apache-2.0
"""Groups and messages: everything here that touches `torch.distributed`, and nothing about attention.

Messages of a call are point-to-point and carry a tag of that call and direction. Where the process group looks at
tags (gloo does) calls in flight cannot take each other's messages, whatever order backwards run in; where it does not
(NCCL) messages between two ranks keep the order in which both issue them, as all NCCL traffic does. A gloo group moves
tensors that live on a GPU through host memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cula.dist.varlen import check_rank

FIRST_TAG = 1 << 24  # clear of the small tags that other users of the group are likely to pick
NUM_TAGS = 1 << 24


def resolve_group(who: str, prefix: str, group: Any, size: int, rank: int, dims: tuple[str, ...]) -> dist.ProcessGroup | None:
    """The process group behind a group, a `DeviceMesh` or None (the default group), with size and rank checked.

    Args:
        dims: names under which a mesh of several dimensions may hold the wanted one.

    Returns:
        None where a single rank needs no group.
    """
    check_rank(who, prefix, rank, size)
    if group is None and size == 1:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{who}: {prefix}_size is {size}, but torch.distributed is not initialised; call init_process_group")
    group = process_group(who, prefix, dist.group.WORLD if group is None else group, dims)
    found_size, found_rank = dist.get_world_size(group), dist.get_rank(group)
    if found_size != size:
        raise ValueError(f"{who}: {prefix}_group has {found_size} ranks, but {prefix}_size is {size}")
    if found_rank != rank:
        raise ValueError(f"{who}: this process is rank {found_rank} of {prefix}_group, but {prefix}_rank is {rank}")
    return group


def process_group(who: str, prefix: str, group: Any, dims: tuple[str, ...]) -> dist.ProcessGroup:
    """The process group behind a group or a `DeviceMesh`; `dims` as in `resolve_group`."""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` gives to the others
        raise ValueError(f"{who}: this process is not in {prefix}_group")
    if not isinstance(group, DeviceMesh):
        raise ValueError(f"{who}: {prefix}_group is {type(group).__name__}; expected a ProcessGroup or a DeviceMesh")
    if group.ndim == 1:
        return group.get_group()
    for name in group.mesh_dim_names or ():
        if name in dims:
            return group.get_group(name)
    raise ValueError(
        f"{who}: {prefix}_group is a mesh of {group.ndim} dimensions named {group.mesh_dim_names}; "
        f"pass one dimension of it (mesh[name]), or name it one of {list(dims)}"
    )


class GroupState:
    """What this process remembers about a group: calls counted, sends under way, signatures agreed on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0
        self.unfinished: list[tuple[Any, Tensor]] = []  # sends and their buffers
        self.agreed: Any = None  # see handshake.py

    def next_call(self) -> int:
        with self.lock:
            self.calls += 1
            return self.calls


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()
_states_lock = threading.Lock()


def group_state(group: dist.ProcessGroup) -> GroupState:
    with _states_lock:
        return _states.setdefault(group, GroupState())


class Channel:
    """The messages of one call in one direction. Ranks are ranks of the group.

    `exchange` waits for what it receives, never for what it sends: a rank that runs its backwards in another order than
    its neighbour must not hold both up. `close` settles the sends: at once after a forward, whose order is the
    program's; after a backward at the next forward on the group, or when many have piled up.
    """

    MAX_UNFINISHED = 256

    def __init__(self, group: dist.ProcessGroup, call: int, is_backward: bool):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.state = group_state(group)
        self.is_backward = is_backward
        self.tag = FIRST_TAG + (2 * call + is_backward) % NUM_TAGS
        self.on_host = dist.get_backend(group) == "gloo"

    def exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Tensor]:
        """Send each tensor to its rank and receive one like each given from its rank; returns the received, in order."""
        if not sends and not receives:
            return []
        ops, buffers, kept = [], [], []
        for source, like in receives:
            buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu" if self.on_host else like.device)
            buffers.append(buffer)
            ops.append(self._op(dist.irecv, buffer, source))
        for target, t in sends:
            payload = t.contiguous().cpu() if self.on_host else t.contiguous()
            kept.append(payload)
            ops.append(self._op(dist.isend, payload, target))
        works = dist.batch_isend_irecv(ops)
        if len(works) == len(ops):
            for work in works[: len(receives)]:
                work.wait()
            self.state.unfinished += zip(works[len(receives) :], kept, strict=True)
        else:  # one work for the whole batch: NCCL, where waiting orders streams and does not block the host
            for work in works:
                work.wait()
        return [b.to(like.device) for b, (_, like) in zip(buffers, receives, strict=True)]

    def close(self) -> None:
        """Wait for the sends, or leave them to a later call: see the class."""
        if not self.is_backward or len(self.state.unfinished) > self.MAX_UNFINISHED:
            while self.state.unfinished:
                self.state.unfinished.pop(0)[0].wait()

    def _op(self, op: Callable[..., Any], t: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(op, t, dist.get_global_rank(self.group, peer), self.group, self.tag)


def scatter_rows(channel: Channel, rows: Tensor | None, owners: tuple[int, ...], root: int, like: Tensor) -> Tensor:
    """From `rows` [N, ...] on the root to each rank the rows it owns, in order; `like` is one row."""
    mine = [n for n, owner in enumerate(owners) if owner == channel.rank]
    if channel.rank != root:
        if not mine:
            return like.new_empty(0, *like.shape)
        return channel.exchange([], [(root, like.expand(len(mine), *like.shape))])[0]
    assert rows is not None
    sends = []
    for target in sorted(set(owners) - {root}):
        sends.append((target, rows[[n for n, owner in enumerate(owners) if owner == target]]))
    channel.exchange(sends, [])
    return rows[mine]


def collect_rows(channel: Channel, mine: Tensor, owners: tuple[int, ...], root: int) -> Tensor | None:
    """The way back: [N, ...] on the root, None elsewhere. `mine` are the rows this rank owns."""
    if channel.rank != root:
        channel.exchange([(root, mine)] if len(mine) else [], [])
        return None
    like = mine.new_empty(1, *mine.shape[1:])
    sources = sorted(set(owners) - {root})
    receives = [(source, like.expand(owners.count(source), *like.shape[1:])) for source in sources]
    parts = dict(zip(sources, channel.exchange([], receives), strict=True))
    parts[root] = mine
    out = mine.new_empty(len(owners), *mine.shape[1:])
    for owner, part in parts.items():
        out[[n for n, o in enumerate(owners) if o == owner]] = part
    return out


def broadcast(t: Tensor, root: int, group: dist.ProcessGroup) -> Tensor:
    """The root's tensor on every rank; elsewhere `t` gives the shape."""
    buffer = t.cpu() if dist.get_backend(group) == "gloo" else t.clone()
    dist.broadcast(buffer, dist.get_global_rank(group, root), group=group)
    return buffer.to(t.device)


def sum_to(channel: Channel, t: Tensor, root: int) -> Tensor | None:
    """The sum over ranks on the root, None elsewhere: a tree of ceil(log2 P) steps, always added in the same order."""
    place = (channel.rank - root) % channel.size
    reach = 1
    while reach < channel.size:
        if place & reach:
            channel.exchange([((channel.rank - reach) % channel.size, t)], [])
            return None
        if place + reach < channel.size:
            t = t + channel.exchange([], [((channel.rank + reach) % channel.size, t)])[0]
        reach *= 2
    return t


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        payload = x.contiguous().cpu() if dist.get_backend(group) == "gloo" else x.contiguous()
        parts = [torch.empty_like(payload) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, payload, group=group)
        return torch.cat(parts, dim).to(x.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0].chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)].contiguous(), None, None


def gather_heads(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """The ranks' heads side by side along `dim`, on every rank.

    Its gradient is this rank's slice: as usual in tensor parallelism, every rank goes on to compute the same loss from
    the gathered tensor. No message in the backward.
    """
    return x if group is None else _GatherHeads.apply(x, dim, group)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *xs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in xs]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def tie(y: Tensor, *outputs: Tensor | None) -> Tensor:
    """y itself, made to depend on `outputs` with weight zero (exactly zero, NaN or not).

    A context-parallel call exchanges gradients in its backward, so its backward must run on every rank. A rank whose
    loss uses neither `o` nor `final_state` of a call says so with `loss = tie(loss, o)`.
    """
    given = [x for x in outputs if x is not None]
    return _Tie.apply(y, *given)
