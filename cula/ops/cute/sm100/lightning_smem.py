# SPDX-License-Identifier: Apache-2.0
"""Lightning on Blackwell: what a kernel is compiled for, its shared and tensor memory, and its mbarriers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.lightning_items import FORWARD, Attention
from cula.ops.cute.common.tiles import BF16, I32, allocate_tile, tile_at, tile_layout

C = 128  # tokens of a chunk: as many as tensor memory has lanes


@dataclass(frozen=True)
class Config:
    """One kernel."""

    D: int  # K = V
    stages: int  # of the ring of q, k and v
    stages_of_ends: int  # of that of k and v in the first pass over segments
    only_ends: bool = False  # the first pass over segments, not the recurrence
    # As `common/lightning_items.py` asks for them: a block has all of V, and one thread each of its rows.
    chunk: int = C
    warpgroups: int = 1
    blocks_of_v: int = 1
    attentions: tuple[Attention, ...] = FORWARD

    @property
    def K(self) -> int:
        return self.D

    @property
    def V(self) -> int:
        return self.D

    @property
    def depth(self) -> int:
        return self.stages_of_ends if self.only_ends else self.stages

    @property
    def num_threads(self) -> int:
        return 256 if self.only_ends else 512

    @property
    def chunk_bytes(self) -> int:
        """That TMA loads."""
        return (2 if self.only_ends else 3) * C * self.D * 2


class Column(enum.IntEnum):
    """Where in tensor memory things begin, float32, a column each."""

    S = 0  # [128 of V, K]; of V = 64 the upper lanes hold nothing of use
    P = 128  # [C, C]; then P in bf16, in the first half of these columns
    INTER = 256  # [C, V]: q S^T
    INTRA = 384  # [C, V]: P v


class Barrier(enum.IntEnum):
    """Named barriers."""

    OUTPUT = 1  # the warps of the output role


class Mbarriers(NamedTuple):
    """The mbarriers of the table in `lightning.py`; the first two are one a stage."""

    full: Any
    empty: Any
    p_done: Any
    p_ready: Any
    s_ready: Any
    k_ready: Any
    s_done: Any
    o_done: Any
    o_free: Any


RINGS = 2  # of the mbarriers are one a stage


def arrivals(cfg: Config) -> Mbarriers:
    empty = 1 if cfg.only_ends else 128
    return Mbarriers(full=1, empty=empty, p_done=1, p_ready=128, s_ready=128, k_ready=128, s_done=1, o_done=1, o_free=128)


def mbarriers_at(bars: Any, cfg: Config) -> Mbarriers:
    rings = range(0, RINGS * cfg.depth, cfg.depth)
    single = range(RINGS * cfg.depth, RINGS * cfg.depth + len(Mbarriers._fields) - RINGS)
    return Mbarriers(*(bars + i for i in (*rings, *single)))


@cute.jit
def init_mbarriers(bars: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """By one thread."""
    for i, count in enumerate(arrivals(cfg)):
        for n in range(cfg.depth if i < RINGS else 1):
            cute.arch.mbarrier_init(bars[i] + n, count)


class Layouts(NamedTuple):
    """Of tiles in shared memory."""

    q: Any  # [C, D, stage]; o leaves from here
    vk: Any  # [C, D, v and k of a stage]
    wide: Any  # [C, 128, ...], the same memory
    s: Any  # [V, K]


def layouts(cfg: Config) -> Layouts:
    tiles = 2 * cfg.depth
    return Layouts(
        q=tile_layout(C, cfg.D, cfg.depth),
        vk=tile_layout(C, cfg.D, tiles),
        wide=tile_layout(C, 128, tiles * cfg.D // 128),
        s=tile_layout(cfg.D, cfg.D),
    )


class Storage(NamedTuple):
    """Shared memory."""

    sVK: Any  # [C, D, v and k of a stage]: tile 2 s is v of stage s, the next one k
    wide: Any  # the same memory by 128 columns: v, of D = 64 with k beside it
    sQ: Any  # [C, D, stage]
    sS: Any  # [V, K]: S in bf16
    bars: Any
    tmem: Any  # gets the address of tensor memory


def allocate(of: Layouts, cfg: Config) -> Storage:
    smem = SmemAllocator()
    sVK = allocate_tile(smem, of.vk)
    sQ, sS = (None, None) if cfg.only_ends else (allocate_tile(smem, of.q), allocate_tile(smem, of.s))
    bars = smem.allocate_array(cutlass.Int64, RINGS * cfg.depth + len(Mbarriers._fields) - RINGS)
    return Storage(sVK, tile_at(sVK, of.wide, BF16), sQ, sS, bars, smem.allocate_array(I32, 1))
