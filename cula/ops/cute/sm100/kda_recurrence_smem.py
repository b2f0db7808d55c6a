# SPDX-License-Identifier: Apache-2.0
"""KDA on Blackwell, the recurrence's memory: shared and tensor memory, mbarriers, and what a block's roles know of its work."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.tiles import BF16, F32, I32, allocate_tile, tile_at
from cula.ops.cute.kda_abi import VEC

STAGES = 2
TILES = 4  # kb, qg, kr, v of a stage
KB, QG, KR, V = range(TILES)  # their order


class Column(enum.IntEnum):
    """Where in tensor memory things begin. A float32 takes a column, two 16-bit values share one."""

    S = 0  # [128 dv, 128 dk]
    S16 = 128  # S in 16 bits
    R = 192  # [128 dv, 64 tokens]
    U = 256
    O = 320  # two of them; or S minus S16, where transitions are chained
    X16 = 448  # b v - R in 16 bits
    U16 = 480  # U in 16 bits


class Barrier(enum.IntEnum):
    """Named barriers."""

    OUTPUT = 1  # the warps of the output role
    ROWS = 2  # those of the rows role


class Mbarriers(NamedTuple):
    """The mbarriers of the table in `kda_recurrence.py`; the first five are one a stage, or one for each of two o's."""

    full: Any
    empty: Any
    s_ready: Any
    o_done: Any
    o_free: Any
    x_done: Any
    x_ready: Any
    u_done: Any
    u_ready: Any
    s_done: Any


ARRIVALS = Mbarriers(full=1, empty=5, s_ready=128, o_done=1, o_free=128, x_done=1, x_ready=128, u_done=1, u_ready=128, s_done=1)
PAIRS = 5  # of the mbarriers are one a stage
NUM_MBARRIERS = len(ARRIVALS) + PAIRS


def mbarriers_at(bars: Any) -> Mbarriers:
    single = range(2 * PAIRS, NUM_MBARRIERS)
    return Mbarriers(*(bars + 2 * i for i in range(PAIRS)), *(bars + i for i in single))


@cute.jit
def init_mbarriers(bars: cute.Pointer):
    """By one thread."""
    for i, arrivals in enumerate(ARRIVALS):
        for n in range(2 if i < PAIRS else 1):
            cute.arch.mbarrier_init(bars + (2 * i + n if i < PAIRS else PAIRS + i), arrivals)


class Task(NamedTuple):
    """What a block has to do. It is kept in shared memory: roles read it when they begin, and it takes no registers before."""

    num_chunks: Any  # -1: nothing
    seq: Any
    begin: Any  # first token of the sequence
    tokens: Any  # of the sequence
    chunk0: Any  # number of the sequence's first chunk
    first_segment: Any  # number of the sequence's first segment
    i: Any  # which of the segments this is
    from_chunk: Any
    out_from: Any  # the first chunk with output
    is_chained: Any
    num_transitions: Any  # to chain before the chunks
    chain_from: Any  # the segment whose B a chain begins with; -1 for the initial state
    is_last: Any  # of the sequence's segments
    slot: Any  # of the sequence's first state; -1 where it starts from zero
    has_h0: Any  # 1 where it does not
    following: Any  # the first boundary between chunks at which the state is kept
    row: Any  # and where


class Storage(NamedTuple):
    """Shared memory."""

    ring: Any  # [64, 128, TILES a stage]
    sV: Any  # the same memory in bf16
    sM: Any  # the same memory: M's [128, 128, hi and lo a stage]
    sT: Any  # [64, 64, stage]
    sP: Any
    sO: Any  # [64 tokens, 128 dv]
    sVec: Any  # [1, VEC, stage]
    sFactor: Any  # [128 dv, 2]; or sums of squares of the rows role's warps
    bars: Any
    sTask: Any
    tmem: Any  # gets the address of tensor memory

    def task(self) -> Task:
        return Task(*(self.sTask[at] for at in range(len(Task._fields))))


def allocate(lt: Any, lv: Any, lsq: Any, lo: Any, lm: Any, dtype: Any) -> Storage:
    smem = SmemAllocator()
    ring = allocate_tile(smem, lt, dtype)
    sT, sP = allocate_tile(smem, lsq, dtype), allocate_tile(smem, lsq, dtype)
    sO = allocate_tile(smem, lo)
    sVec = smem.allocate_tensor(F32, cute.make_layout((1, VEC, STAGES), stride=(VEC, 1, VEC)), byte_alignment=128)
    sFactor = smem.allocate_tensor(F32, cute.make_layout((128, 2)), byte_alignment=16)
    bars = smem.allocate_array(cutlass.Int64, NUM_MBARRIERS)
    sTask = smem.allocate_tensor(I32, cute.make_layout(len(Task._fields)), byte_alignment=16)
    tmem = smem.allocate_array(I32, 1)
    return Storage(ring, tile_at(ring, lv, BF16), tile_at(ring, lm, dtype), sT, sP, sO, sVec, sFactor, bars, sTask, tmem)
