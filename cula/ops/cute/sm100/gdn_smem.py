# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Blackwell: its shared and tensor memory, and the mbarriers by which roles tell each other. See `gdn.py`."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.gdn_vectors import VECTOR_STAGES, VECTORS
from cula.ops.cute.common.inverse import blocks
from cula.ops.cute.common.tiles import BF16, F32, I32, allocate_tile, tile_at, tile_layout

STAGES, PREPARERS = 4, 2
Q = 64  # the row of a stage's tile at which queries begin, behind the keys


class Column(enum.IntEnum):
    """Where in tensor memory things begin. A float32 takes a column, two 16-bit values share one."""

    S = 0  # [128 dv, 128 dk]
    S16 = 128  # S in 16 bits
    R = 192  # [128 dv, 64 tokens]
    Y16 = 192  # Y in 16 bits, where R was
    E = 256  # [128 dv, 64 tokens]
    W16 = 256  # r b E in 16 bits, where E was, ...
    E16 = 288  # ... and E itself
    INTER = 320  # [128 dv, 64 tokens]: q S
    INTRA = 384  # [128 dv, 64 tokens]: P E
    SCORES = 448  # [64 keys and 64 queries, 64 keys]


class Barrier(enum.IntEnum):
    """Named barriers; of the warpgroups that prepare, this is the first's."""

    OUTPUT = 1
    PREPARE = 2


class Mbarriers(NamedTuple):
    """The mbarriers of the table in `gdn.py`."""

    full: Any
    ready: Any
    empty: Any
    v_full: Any
    v_empty: Any
    a_done: Any
    a_free: Any
    t_ready: Any
    s_ready: Any
    r_done: Any
    y_ready: Any
    e_done: Any
    w_ready: Any
    e_ready: Any
    s_done: Any
    o_done: Any
    o_free: Any


# (How many there are of each, arrivals that complete a phase): warps arrive, or one thread, TMA or commit for all.
OF_MBARRIERS = Mbarriers(
    full=(STAGES, 1),
    ready=(STAGES, 1),
    empty=(STAGES, 4),
    v_full=(2, 1),
    v_empty=(2, 4),
    a_done=(PREPARERS, 1),
    a_free=(1, 4),
    t_ready=(2, 4),
    s_ready=(2, 4),
    r_done=(1, 1),
    y_ready=(1, 4),
    e_done=(1, 1),
    w_ready=(1, 4),
    e_ready=(1, 4),
    s_done=(1, 1),
    o_done=(2, 1),
    o_free=(1, 4),
)
NUM_MBARRIERS = sum(count for count, _ in OF_MBARRIERS)


def mbarriers_at(bars: Any) -> Mbarriers:
    places = [sum(count for count, _ in OF_MBARRIERS[:i]) for i in range(len(OF_MBARRIERS))]
    return Mbarriers(*(bars + place for place in places))


@cute.jit
def init_mbarriers(bars: cutlass.Constexpr):
    """By one thread."""
    for bar, (count, arrivals) in zip(bars, OF_MBARRIERS):
        for i in range(count):
            cute.arch.mbarrier_init(bar + i, arrivals)


class Turn(NamedTuple):
    """Where a block's n-th chunk has its place, and the parity that the phases of mbarriers have then."""

    n: Any

    @property
    def stage(self) -> Any:
        return self.n & (STAGES - 1)

    @property
    def of_stage(self) -> Any:
        return (self.n >> 2) & 1

    @property
    def place(self) -> Any:
        """Of what there are two."""
        return self.n & 1

    @property
    def of_place(self) -> Any:
        return (self.n >> 1) & 1

    @property
    def parity(self) -> Any:
        """Of what there is one."""
        return self.n & 1

    @property
    def vectors(self) -> Any:
        return self.n & (VECTOR_STAGES - 1)


class Storage(NamedTuple):
    """Shared memory."""

    raw: Any  # [128, 128, STAGES]: 64 keys and 64 queries of a chunk, as they came
    kq: Any  # the same memory, in the type of operands
    halves: Any  # the same memory as TMA fills it, [64, 64, 4 of a stage]: channels 0 .. of k, of q, channels 64 .. of k, of q
    v: Any  # [64 tokens, 128 dv, 2]
    T: Any  # [64 i, 64 t, 2]: transposed
    P: Any  # [64 t, 64 i, 2]
    vectors: Any  # [VECTORS, VECTOR_STAGES]
    unit: Any  # [128 dv, 2]: what rows of o, as the state is scaled, are to be multiplied by
    below: Any  # A below the diagonal, by blocks, of each preparer
    diagonal: Any
    bars: Any
    tmem: Any  # gets the address of tensor memory


def allocate(dtype: Any) -> Storage:
    smem = SmemAllocator()
    raw = allocate_tile(smem, tile_layout(128, 128, STAGES))
    v = allocate_tile(smem, tile_layout(64, 128, 2))
    T, P = [allocate_tile(smem, tile_layout(64, 64, 2, dtype), dtype) for _ in range(2)]
    vectors = smem.allocate_tensor(F32, cute.make_layout((VECTORS, VECTOR_STAGES)), byte_alignment=16)
    unit = smem.allocate_tensor(F32, cute.make_layout((128, 2)), byte_alignment=16)
    below = smem.allocate_tensor(F32, blocks(6 * PREPARERS), byte_alignment=16)
    diagonal = smem.allocate_tensor(F32, blocks(4 * PREPARERS), byte_alignment=16)
    bars = smem.allocate_array(cutlass.Int64, NUM_MBARRIERS)
    kq = tile_at(raw, tile_layout(128, 128, STAGES, dtype), dtype)
    halves = tile_at(raw, tile_layout(64, 64, 4 * STAGES), BF16)
    return Storage(raw, kq, halves, v, T, P, vectors, unit, below, diagonal, bars, smem.allocate_array(I32, 1))


def keys_of(kq: Any) -> Any:
    """[64, 128, STAGES]"""
    return cute.local_tile(kq, (64, 128), (0, 0, None))


def queries_of(kq: Any) -> Any:
    return cute.local_tile(kq, (64, 128), (1, 0, None))
