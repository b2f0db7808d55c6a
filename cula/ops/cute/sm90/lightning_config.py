# SPDX-License-Identifier: Apache-2.0
"""Lightning on Hopper: what a kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from cula.core.constants import CHUNK
from cula.ops.cute.common.lightning_items import FORWARD, Attention

C = CHUNK  # tokens that the kernels take at once
LANES = 64  # value channels of a warpgroup


@dataclass(frozen=True)
class Config:
    """One kernel."""

    K: int
    V: int
    warpgroups: int  # that run a recurrence; each takes 64 value channels
    depth: int  # of the ring of q, k and v
    blocks: int  # on a multiprocessor
    registers: tuple[int, int]  # of a thread that loads, of one of a recurrence
    only_ends: bool = False  # the first pass over segments, not the recurrence
    chunk: int = C
    inputs: tuple[str, ...] = ("q", "k", "v")
    outputs: tuple[str, ...] = ("o",)  # of each attention
    attentions: tuple[Attention, ...] = FORWARD

    @property
    def num_threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def num_tiles(self) -> int:
        """That a chunk is read as: k, v and q, of which the first pass over segments leaves out q."""
        return 2 if self.only_ends else 3

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors that are read."""
        return tuple(dict.fromkeys(name for attention in self.attentions for name in attention.roles[: self.num_tiles]))

    @property
    def channels(self) -> int:
        """Of V, of a block."""
        return LANES * self.warpgroups

    @property
    def blocks_of_v(self) -> int:
        return self.V // self.channels

    @property
    def stages(self) -> int:
        return 2 * self.depth if self.only_ends else self.depth  # the first pass has no q, P and O in shared memory
