# SPDX-License-Identifier: Apache-2.0
"""States across ranks: each rank turns the state it gets from its neighbour into the one it hands on by an affine transition.

    X_out = X_in M + B      X [N, HV, V, K],  M [N, HV, K, K] or one number a head [N, HV, 1, 1],  B like X

Nothing here knows what the states are of. Forwards, M and B are the transition of a rank's tokens and X is the recurrent
state. Backwards the neighbours change places, M is transposed, B is the gradient that a rank's own outputs send to its
first state, and X is the gradient of the state. Both directions of every family are this one computation.

Rows of V do not mix, X_out[v] = X_in[v] M + B[v], so a chain of ranks can hand on the states in blocks of V, one behind
the other:

    rank 0   send 0   send 1   send 2
    rank 1            0 -> 0   1 -> 1   2 -> 2
    rank 2                     0 -> 0   1 -> 1   2 -> 2
    rank 3                              take 0   take 1   take 2
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from cula.dist.comm import Channel
from cula.dist.cost import Schedule


@dataclass(frozen=True)
class Affine:
    """The transition of this rank. M is None where what it hands on does not depend on what it gets."""

    M: Tensor | None
    B: Tensor

    def __call__(self, X: Tensor, rows: slice = slice(None)) -> Tensor:
        """Apply to a block of V: X [N, HV, block, K]."""
        B = self.B[:, :, rows]
        if self.M is None:
            return B
        if self.M.shape[-1] == 1:
            return torch.addcmul(B, X, self.M)
        return torch.baddbmm(B.flatten(0, 1), X.flatten(0, 1), self.M.flatten(0, 1)).view_as(X)


@dataclass(frozen=True)
class Neighbours:
    """Where states come from and go to: ranks of the group, counted along the direction of travel."""

    before: tuple[int, ...]  # ranks whose transitions make up what arrives here, nearest first
    after: tuple[int, ...]  # ranks that what leaves here reaches, nearest first

    @classmethod
    def of(cls, rank: int, num_before: int, num_after: int) -> Neighbours:
        return cls(tuple(rank - i for i in range(1, num_before + 1)), tuple(rank + i for i in range(1, num_after + 1)))

    def reversed(self) -> Neighbours:
        return Neighbours(self.after, self.before)


def scan(
    channel: Channel, schedule: Schedule, near: Neighbours, affine: Affine | None, like: Tensor, rows_of_M: int
) -> Tensor | None:
    """The state that arrives at this rank once all ranks before it have applied their transitions; None where none does.

    Args:
        affine: what this rank does to it; None where nothing leaves this rank.
        like: a tensor of the states' shape [N, HV, V, K].
        rows_of_M: rows of M: K, or 1 for one number a head.
    """
    if not near.before and not near.after:
        return None
    if schedule.exchange == "gather":
        return _gather(channel, near, affine, like, rows_of_M)
    return _chain(channel, schedule.blocks, near, affine, like)


def blocks_of(V: int, count: int) -> list[slice]:
    """V rows in at most `count` blocks, as even as can be."""
    cuts = [i * V // count for i in range(count + 1)]
    return [slice(a, z) for a, z in itertools.pairwise(cuts) if z > a]


def _chain(channel: Channel, count: int, near: Neighbours, affine: Affine | None, like: Tensor) -> Tensor | None:
    blocks = blocks_of(like.shape[2], count)
    source, target = near.before[:1], near.after[:1]
    arrived: list[Tensor] = []

    def receives(i: int) -> list[tuple[int, Tensor]]:
        return [(rank, like[:, :, blocks[i]]) for rank in source if i < len(blocks)]

    if affine is not None and affine.M is not None and source:
        # block i + 1 comes in while block i goes out
        arrived += channel.exchange([], receives(0))
        for i, rows in enumerate(blocks):
            arrived += channel.exchange([(rank, affine(arrived[i], rows)) for rank in target], receives(i + 1))
    else:
        # what leaves waits for nothing
        if affine is not None:
            channel.exchange([(rank, affine.B[:, :, rows]) for rows in blocks for rank in target], [])
        arrived = channel.exchange([], [r for i in range(len(blocks)) for r in receives(i)])
    return torch.cat(arrived, dim=2) if arrived else None


def _gather(channel: Channel, near: Neighbours, affine: Affine | None, like: Tensor, rows_of_M: int) -> Tensor | None:
    """Every transition to every later rank at once; each composes those that concern it. Few steps, many bytes: for small groups.

    A transition crosses as [N, HV, rows_of_M + V, K]. The rank that begins a chain sends M = 0.
    """
    N, HV, V, K = like.shape
    sends = []
    if affine is not None:
        M = like.new_zeros(N, HV, rows_of_M, K) if affine.M is None else affine.M.expand(N, HV, rows_of_M, K)
        payload = torch.cat([M, affine.B], dim=2)
        sends = [(rank, payload) for rank in near.after]
    like_payload = like.new_empty(1).expand(N, HV, rows_of_M + V, K)
    arrived = channel.exchange(sends, [(rank, like_payload) for rank in near.before])
    if not arrived:
        return None
    X = like.new_zeros(N, HV, V, K)
    for payload in reversed(arrived):  # the furthest rank first
        M, B = payload.split([rows_of_M, V], dim=2)
        X = Affine(M[..., :1] if rows_of_M == 1 else M, B)(X)
    return X
