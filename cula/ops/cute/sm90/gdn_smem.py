# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper: what lies in shared memory, and the barriers by which roles tell each other. See `gdn.py`."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.gdn_vectors import SUM, VECTOR_STAGES, VECTORS
from cula.ops.cute.common.inverse import blocks
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, allocate_tile, tile_at, tile_layout

KEY_STAGES, Q_STAGES, T_STAGES = {2: 5, 1: 4}, {2: 1, 1: 2}, {2: 2, 1: 4}  # by parts
SUM_STAGES, WARPS = 4, 16
AT_ONCE = 2  # chunks whose inverses are in the making: of one warpgroup, or one of each of two


class Barrier(enum.IntEnum):
    """Named barriers; of the warpgroups that prepare, this is the first's."""

    PREPARE = 2
    STATE = 4  # a state has been written to memory
    OUTPUT = 5  # of the warpgroup that makes o


# Rows of a map in `M`. No chunk has an output, and hence an S in 16 bits, before both have been used.
THEIRS, OURS = 0, 1


class Smem(NamedTuple):
    """Shared memory. Parts are those of the state that a block has."""

    k: Any  # [64, 128, KEY_STAGES]
    q: Any  # [64, 128, Q_STAGES]
    v: Any  # [64 tokens, 64 dv, 2 parts]: two stages a part
    S: Any  # [64 dv, 128 dk, parts]
    E: Any  # [64 dv, 64 tokens, parts]
    o: Any  # [64 tokens, 64 dv, 2 or 4]: in the place of E for whole states, a part each; otherwise of q, every second
    T: Any  # [64 i, 64 t, T_STAGES]: transposed
    vectors: Any  # [VECTORS, VECTOR_STAGES]
    sums: Any  # [64, SUM_STAGES]: G, where keys are normalised here: SUM of `vectors` then is G + log2 |k|
    below: Any  # A below the diagonal, by blocks, of AT_ONCE chunks
    diagonal: Any
    M: Any  # [64 dk, 128 dk, 2]: the partner's rows of a map, in the place of S, and ours; of blocks with half of a state
    warm_ups: Any  # [WARPS]: what warps have found of a head's boundaries


class Bars(NamedTuple):
    """mbarriers."""

    k_full: Any  # keys have come, for each stage
    k_ready: Any  # they are operands, and vectors are in place
    k_empty: Any  # all have read both
    t_ready: Any  # T is in place, for each of its stages; half of them are the partner's where there is one
    t_asked: Any  # the partner has room for T, for each stage of ours
    q_full: Any
    v_full: Any  # for each part and stage
    v_empty: Any
    s_full: Any  # S in 16 bits is in place, for each part
    s_empty: Any
    e_full: Any  # E is
    e_empty: Any
    m_ours: Any  # our half of M is in place
    m_theirs: Any  # the partner's half has come


def allocate(smem: Any, variant: Any) -> tuple[Smem, Bars]:
    parts = variant.parts
    k = allocate_tile(smem, tile_layout(64, 128, KEY_STAGES[parts]))
    q = allocate_tile(smem, tile_layout(64, 128, Q_STAGES[parts]))
    v = allocate_tile(smem, tile_layout(64, 64, 2 * parts))
    of_s = tile_layout(64 * parts, 128)  # also one operand of 128 rows
    M = allocate_tile(smem, tile_layout(64, 128, 2, F16), F16) if parts == 1 else None
    S = allocate_tile(smem, of_s) if M is None else tile_at(M, of_s, BF16)
    E = allocate_tile(smem, tile_layout(64, 64, parts))
    o = E if parts == 2 else tile_at(q, tile_layout(64, 64, 4), BF16)
    T = allocate_tile(smem, tile_layout(64, 64, T_STAGES[parts]))
    vectors = smem.allocate_tensor(F32, cute.make_layout((VECTORS, VECTOR_STAGES)), byte_alignment=16)
    sums = None
    if variant.is_normalised:
        sums = smem.allocate_tensor(F32, cute.make_layout((64, SUM_STAGES)), byte_alignment=16)
    below = smem.allocate_tensor(F32, blocks(6 * AT_ONCE), byte_alignment=16)
    diagonal = smem.allocate_tensor(F32, blocks(4 * AT_ONCE), byte_alignment=16)
    counts = Bars(*(len(of) for of in arrivals(parts)))
    bars = Bars(*(smem.allocate_array(cutlass.Int64, n) for n in counts))
    warm_ups = smem.allocate_tensor(I32, cute.make_layout((WARPS,)), byte_alignment=16)
    S = cute.local_tile(S, (64, 128), (None, 0))
    return Smem(k, q, v, S, E, o, T, vectors, sums, below, diagonal, M, warm_ups), bars


def arrivals(parts: int) -> Bars:
    """How many arrivals each mbarrier counts: in the order in which they lie. Warps arrive, or one thread for all. Of `t_ready`,
    where blocks prepare for each other, `init_barriers` knows more."""
    stages, of_v = KEY_STAGES[parts], 2 * parts
    return Bars(
        k_full=[1] * stages,
        k_ready=[1] * stages,
        k_empty=[4 * parts + 4] * stages,
        t_ready=[4] * T_STAGES[parts],
        t_asked=[1] * T_STAGES[parts],
        q_full=[4],
        v_full=[1] * of_v,
        v_empty=[4] * of_v,
        s_full=[4] * parts,
        s_empty=[4] * parts,
        e_full=[4] * parts,
        e_empty=[4] * parts,
        m_ours=[4],
        m_theirs=[1],
    )


def init_barriers(bars: Bars, parts: int, rank: Any) -> None:
    """By one thread. T of our own chunks comes from four warps, that of the partner's as bytes."""
    for bar, counts in zip(bars, arrivals(parts)):
        for i, count in enumerate(counts):
            if bar is bars.t_ready and parts == 1:
                count = I32(4) - I32(3) * (rank ^ (i & 1))
            cute.arch.mbarrier_init(bar + i, count)


def sum_of(smem: Any, row: Any, n: Any) -> Any:
    """G of a token of the block's n-th chunk."""
    return smem.vectors[SUM + row, n & 7] if smem.sums is None else smem.sums[row, n % SUM_STAGES]


def stage_of_k(smem: Smem, n: Any) -> tuple[Any, Any]:
    """Where keys of the block's n-th chunk lie, and how often, modulo 2, others did before."""
    stages, count = cute.size(smem.k, mode=[2]), cutlass.Uint32(n)
    return I32(count % stages), I32(count // stages) & 1


def stage_of_t(smem: Smem, n: Any) -> tuple[Any, Any]:
    """Where T of the block's n-th chunk lies, and how often, modulo 2, another one did before."""
    stages = cute.size(smem.T, mode=[2])
    return n & (stages - 1), (n >> stages.bit_length() - 1) & 1
