# SPDX-License-Identifier: Apache-2.0
"""The fused KDA kernel's shared memory and barriers: where chunks lie, and how the two blocks of a cluster tell each other.

A block has two stages, each for a chunk that it computes itself, and an inbox for one that its partner has computed. All that the
recurrence reads of a chunk, kb, qg, kr, P, e^{G_C}, b and T, lies in one piece at a stage's start, `RESULT_BYTES`, and is sent to
the partner's inbox as it is.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync

from cula.ops.cute.common.tiles import BF16, F16, F32, I32, tile_layout
from cula.ops.cute.kda_abi import SQUARE_BYTES, TILE_BYTES, VEC
from cula.ops.cute.sm90.kda_recurrence_steps import ChunkTiles

GROUPS = 2  # of eight warps that compute chunks, one a stage
STAGE_BYTES = 76 * 1024
INBOX = GROUPS  # its number among the stages
# Behind kb, qg and kr; e^{G_C} and b between P and T.
P_AT = 3 * TILE_BYTES
VEC_AT = P_AT + SQUARE_BYTES
T_AT = VEC_AT + 4 * VEC
RESULT_BYTES = T_AT + SQUARE_BYTES


class Barrier(enum.IntEnum):
    """Named barriers."""

    GROUP = 1  # all warps of a group; this is the first group's
    QG_READ = 3  # no warp of the recurrence reads qg any more, whose place o may take
    V_USED = 4  # all warps of the recurrence have used v
    O_IN_PLACE = 5  # all warps of the recurrence have written o


class Mbarriers(NamedTuple):
    """mbarriers; the first `PER_STAGE` are one a stage."""

    ready: Any  # a chunk of our own is computed
    half_free: Any  # both recurrences have read kb and T
    free: Any  # and all else
    o_left: Any  # o has left the part of the stage that is not sent
    arrived: Any  # a chunk of the partner's has come
    taken: Any  # o has left the partner's inbox
    v_full: Any  # v has come


PER_STAGE = 4  # of them are one a stage
ARRIVALS = Mbarriers(ready=256, half_free=8, free=8, o_left=1, arrived=1, taken=1, v_full=1)


def allocate_mbarriers(smem: Any) -> Mbarriers:
    return Mbarriers(*(smem.allocate_array(cutlass.Int64, GROUPS if i < PER_STAGE else 1) for i in range(len(ARRIVALS))))


@cute.jit
def init_mbarriers(bars: cutlass.Constexpr):
    """By one thread."""
    pairs = list(zip(bars, ARRIVALS))
    for g in cutlass.range_constexpr(GROUPS):
        for bar, arrivals in pairs[:PER_STAGE]:
            cute.arch.mbarrier_init(bar + g, arrivals)
    for bar, arrivals in pairs[PER_STAGE:]:
        cute.arch.mbarrier_init(bar, arrivals)


class Cluster(NamedTuple):
    """Where a block stands."""

    rank: Any  # among the two blocks of its cluster
    partner: Any  # the other one's
    number: Any  # of its cluster
    clusters: Any  # how many there are


# Chunks in shared memory


def results_at(stages: Any) -> tuple[ChunkTiles, Any]:
    """(What the recurrence multiplies with, e^{G_C} and b), of all stages."""
    whole, square = tile_layout(64, 128, dtype=F16), tile_layout(64, 64, dtype=F16)
    kb, qg, kr = [_of_stages(stages, i * TILE_BYTES, whole, F16) for i in range(3)]
    P, T = [_of_stages(stages, at, square, F16) for at in (P_AT, T_AT)]
    of_vec = cute.make_layout((1, VEC, INBOX + 1), stride=(VEC, 1, STAGE_BYTES // 4))
    return ChunkTiles(kb, qg, P, T, kr), cute.make_tensor(cute.recast_ptr(stages + VEC_AT, dtype=F32), of_vec)


def _of_stages(stages: Any, at: int, layout: Any, dtype: Any) -> Any:
    """Part of the results, [rows, columns, stage]."""
    outer = cute.append(layout.outer, cute.make_layout(INBOX + 1, stride=STAGE_BYTES * 8 // dtype.width))
    return cute.make_tensor(cute.recast_ptr(stages + at, layout.inner, dtype), outer)


@cute.jit
def stage_of(n: I32, rank: I32):
    """Where chunk n lies."""
    return (n >> 1) & 1 if (n & 1) == rank else I32(INBOX)


@cute.jit
def place_of_o(stages: cute.Pointer, stage: I32):
    """[64 tokens, 64 dv], in memory of the chunk: in a stage of our own the part that is not sent, in the inbox that of qg."""
    layout = tile_layout(64, 64)
    start = stages + (stage * STAGE_BYTES + (I32(RESULT_BYTES) if stage < INBOX else I32(TILE_BYTES)))
    return cute.make_tensor(cute.recast_ptr(start.align(1024), layout.inner, BF16), layout.outer)


# Between the two blocks


def send(source: Any, to: Any, size: int, bar: Any, rank: Any) -> None:
    """Bytes to the same place in another block's shared memory; its barrier counts them."""
    source, to = [cute.make_tensor(cute.recast_ptr(p, dtype=BF16), cute.make_layout(size // 2)) for p in (source, to)]
    # The copy maps `to`, and not the barrier, whose address it takes for one of shared memory.
    there = cute.make_ptr(cutlass.Int64, cute.arch.map_dsmem_ptr(bar, rank).toint(), cute.AddressSpace.smem)
    cute.copy(cute.make_copy_atom(cpasync.CopyBulkS2SOp(), BF16), source, to, mbar_ptr=there, cta_rank=rank)


@cute.jit
def tell_owner(bars: cute.Pointer, n: I32, rank: I32):
    """This warp is done with something of chunk n: the block that computed it should know, by the barrier of its stage."""
    bar = bars + ((n >> 1) & 1)
    with cute.arch.elect_one():
        if (n & 1) == rank:
            cute.arch.mbarrier_arrive(bar)
        else:
            arrive_there(bar, rank)


@cute.jit
def tell_o_left(bars: cutlass.Constexpr, n: I32, rank: I32):
    """The memory that o of chunk n was in is free: in our stage, or in the inbox, for which the partner waits."""
    with cute.arch.elect_one():
        if (n & 1) == rank:
            cute.arch.mbarrier_arrive(bars.o_left + ((n >> 1) & 1))
        else:
            arrive_there(bars.taken, rank)


def arrive_there(bar: Any, rank: Any) -> None:
    """Relaxed: what was read is in registers, or has been copied. A release would wait for all that this thread has stored."""
    cute.arch.mbarrier_arrive(bar, 1 - rank, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER)
