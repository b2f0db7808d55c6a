# SPDX-License-Identifier: Apache-2.0
"""KDA on Hopper, the recurrence over chunks: who loads them, who multiplies, who carries o away. See `kda_recurrence.py`.

    R = kb S,   U = T (b v - R),   o = qg S + P U,   S <- e^{G_C} S + kr^T U

all transposed. A consumer is a warpgroup with 64 rows dv of S^T, [64, 128] in float32 accumulators; what it multiplies S, b v - R
and U with comes from shared memory, two chunks deep.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.fragments import shared_at, widen
from cula.ops.cute.common.states import address_of, is_end, slot_of_last, store_state
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    K_MAJOR,
    MN_MAJOR,
    Tma,
    issue,
    rounded,
    rows_and_columns,
    seen_as_a,
    swapped,
    tma_split,
    wgmma,
)
from cula.ops.cute.kda_abi import BETA, LOWER_LEFT, TILE_BYTES, UPPER_RIGHT, VEC
from cula.ops.cute.sm90.fp16_window import keep_in_range, unscale_rows

STAGES = 2
QUARTER_BYTES = 32 * 32 * 2


class Barrier(enum.IntEnum):
    """Named barriers. Where there is one for each consumer, this is the first's."""

    O_IN_PLACE = 1  # each consumer's: all its warps have handed o over
    CONSUMERS = 3  # both consumers
    TRANSITIONS = 4  # the consumers know that transitions are there, the producer waits for it
    O_FREE = 5  # each consumer's: there is room for o, says the warp that carries it away
    O_FULL = 7  # each consumer's: o is there, says the consumer


class Mmas(NamedTuple):
    """Products of a warpgroup with A in registers, by their results."""

    x: Any  # [64 dv, 64] of a K-major tile
    t: Any  # [64 dv, 64] of an MN-major tile
    s: Any  # [64 dv, 128] of an MN-major tile


def recurrence_mmas(dtype: Any) -> Mmas:
    return Mmas(wgmma(64, K_MAJOR, True, dtype), wgmma(64, MN_MAJOR, True, dtype), wgmma(128, MN_MAJOR, True, dtype))


class ChunkTiles(NamedTuple):
    """What the intra-chunk kernel leaves of a chunk, [rows, columns, stage]: in shared memory, or as B operands."""

    kb: Any
    qg: Any
    P: Any
    T: Any
    kr: Any


class Ring(NamedTuple):
    """mbarriers of the stages that chunks pass through."""

    full: Any  # one a stage: the chunk has come
    empty: Any  # one a stage: both consumers have read it


class Consumer(NamedTuple):
    """What a consumer works with, whatever it runs over."""

    part: Any  # which 64 rows dv
    thread: Any  # in its warpgroup
    mmas: Mmas
    accS: Any  # the state, [64, 128]
    factor: Any  # [2], of its rows
    operands: ChunkTiles
    sVec: Any  # e^{G_C} and b, [1, VEC, stage]
    copy_v: Any  # v^T comes in, and o^T leaves, as an accumulator lies: (ld/st)matrix turns [token, channel] tiles round
    v_s: Any
    copy_o: Any

    @property
    def S(self) -> Any:
        """The state as [row, column]."""
        return rows_and_columns(self.accS)

    def ours(self, m: Any) -> Any:
        """Our part of a [V, K] matrix in memory."""
        return self.mmas.s.get_slice(self.thread).partition_C(cute.local_tile(m, (64, 128), (self.part, 0)))

    def positions(self) -> Any:
        """[row, column] -> the element of S that it is."""
        return rows_and_columns(self.mmas.s.get_slice(self.thread).partition_C(cute.make_identity_tensor((64, 128))))


def make_consumer(part: Any, thread: Any, mmas: Mmas, tiles: ChunkTiles, sVec: Any, sV: Any) -> Consumer:
    """`sV` is v of our rows, [token, dv, stage]."""
    thr_x, thr_t, thr_s = [mma.get_slice(thread) for mma in mmas]
    accS, factor = thr_s.make_fragment_C(thr_s.partition_shape_C((64, 128))), cute.make_rmem_tensor((2,), F32)
    operands = ChunkTiles(
        kb=thr_x.make_fragment_B(thr_x.partition_B(tiles.kb)),  # [N = token, K = dk]
        qg=thr_x.make_fragment_B(thr_x.partition_B(tiles.qg)),
        P=thr_x.make_fragment_B(thr_x.partition_B(tiles.P)),  # [N = t, K = i]
        T=thr_t.make_fragment_B(thr_t.partition_B(swapped(tiles.T))),  # [N = t, K = i], stored [i, t]
        kr=thr_s.make_fragment_B(thr_s.partition_B(swapped(tiles.kr))),  # [N = dk, K = token]
    )
    copy_v, copy_o = [
        cute.make_tiled_copy_C(cute.make_copy_atom(op(True, 4), BF16), mmas.x).get_slice(thread)
        for op in (warp.LdMatrix8x8x16bOp, warp.StMatrix8x8x16bOp)
    ]
    v_s = copy_v.partition_S(swapped(sV))
    return Consumer(part, thread, mmas, accS, factor, operands, sVec, copy_v, v_s, copy_o)


# The producer


class Copy(NamedTuple):
    """Tiles on their way from global to shared memory."""

    atom: Any
    source: Any  # [tile]
    to: Any  # [stage]


def copy_of(tma: Tma, s: Any, tiles: Any) -> Copy:
    to, source = tma_split(tma.atom, s, tiles)
    return Copy(tma.atom, source, to)


def copy_tile(copy: Copy, tile: Any, stage: Any, bar: Any) -> None:
    cute.copy(copy.atom, copy.source[None, tile], copy.to[None, stage], tma_bar_ptr=bar)


class ChunkCopies(NamedTuple):
    """All that chunks are made of."""

    kb: Copy  # of tile 3 record
    qg: Copy  # 3 record + 1
    kr: Copy  # 3 record + 2
    v: Copy  # of a chunk of the sequence
    vec: Copy  # of a record
    T: Copy  # of quarter 4 record ...
    P: Copy


@cute.jit
def clear_absent_quarters(tiles: cutlass.Constexpr, thread: I32, dtype: cutlass.Constexpr):
    """Zeros in the quarters of T and P that are never loaded. By the second warpgroup, which publishes them."""
    if cute.arch.make_warp_uniform(thread // 128) == 1:
        zero = cute.make_rmem_tensor((8, 1), dtype)
        zero.fill(0.0)
        for stage in cutlass.range_constexpr(STAGES):
            for tile, quarter in ((tiles.T, LOWER_LEFT), (tiles.P, UPPER_RIGHT)):
                at = I32(tile.iterator.toint()) + (4 * stage + quarter) * QUARTER_BYTES + 16 * (thread % 128)
                cute.autovec_copy(zero, shared_at(at, dtype, 8, 16))
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def load_chunks(
    copies: cutlass.Constexpr,
    ring: cutlass.Constexpr,
    count: I32,
    first_record: I32,
    HV: I32,
    from_chunk: I32,
    to_chunk: I32,
    has_output: cutlass.Constexpr,
    sees_v: I32,
):
    """The producer: all that the recurrence reads of the chunks [from_chunk, to_chunk), two ahead. Before them there were
    `count`; returns how many there are now."""
    size = I32(
        (3 * TILE_BYTES + 6 * QUARTER_BYTES if cutlass.const_expr(has_output) else 2 * TILE_BYTES + 3 * QUARTER_BYTES) + 4 * VEC
    )
    size += sees_v * TILE_BYTES
    for chunk in cutlass.range(from_chunk, to_chunk, unroll=1):
        record, n = first_record + chunk * HV, count + chunk - from_chunk
        stage = n % STAGES
        bar = ring.full + stage
        cute.arch.mbarrier_wait(ring.empty + stage, (n // STAGES + 1) % 2)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
        copy_tile(copies.kb, 3 * record, stage, bar)
        if sees_v == 1:
            copy_tile(copies.v, chunk, stage, bar)
        copy_tile(copies.vec, record, stage, bar)
        for quarter in (0, UPPER_RIGHT, 3):
            copy_tile(copies.T, 4 * record + quarter, 4 * stage + quarter, bar)
        copy_tile(copies.kr, 3 * record + 2, stage, bar)
        if cutlass.const_expr(has_output):
            copy_tile(copies.qg, 3 * record + 1, stage, bar)
            for quarter in (0, LOWER_LEFT, 3):
                copy_tile(copies.P, 4 * record + quarter, 4 * stage + quarter, bar)
    return count + to_chunk - from_chunk


# A consumer


@cute.jit
def load_v(w: cutlass.Constexpr, rV: cute.Tensor, stage: I32, left: I32, sees_v: I32):
    """v^T of a chunk, as an accumulator lies. It is zero for M of a transition, and past the end of the sequence, where v belongs
    to the next one."""
    cute.copy(w.copy_v, w.v_s[None, None, None, stage], w.copy_v.retile(rV))
    if left < 64 or sees_v == 0:
        words, c = cute.recast_tensor(rV, I32), w.thread % 4  # of tokens 8 j + 2 c, + 1, and two rows
        last = left if sees_v == 1 else I32(0)
        for j in cutlass.range_constexpr(8):
            even = I32(0xFFFF) if 8 * j + 2 * c < last else I32(0)
            odd = I32(-0x10000) if 8 * j + 2 * c + 1 < last else I32(0)
            for a in cutlass.range_constexpr(2):
                words[2 * j + a] = words[2 * j + a] & (even | odd)


@cute.jit
def weigh_v(w: cutlass.Constexpr, rV: cute.Tensor, bv: cute.Tensor, stage: I32, dtype: cutlass.Constexpr):
    """b v^T, in the state's scale."""
    widen(rV, bv)
    BV = rows_and_columns(bv)
    at_x = rows_and_columns(w.mmas.x.get_slice(w.thread).partition_C(cute.make_identity_tensor((64, 64))))
    for j in cutlass.range_constexpr(cute.size(BV, mode=[1])):
        beta = w.sVec[0, BETA + at_x[0, j][1], stage]
        for a in cutlass.range_constexpr(2):
            if cutlass.const_expr(dtype is F16):
                BV[a, j] = BV[a, j] * w.factor[a]
            BV[a, j] = beta * BV[a, j]


@cute.jit
def decay_columns(w: cutlass.Constexpr, S: cute.Tensor, at_s: cutlass.Constexpr, stage: I32, which: cutlass.Constexpr):
    """S <- e^{G_C} S, half of its columns."""
    columns = cute.size(S, mode=[1]) // 2
    for j in cutlass.range_constexpr(which * columns, (which + 1) * columns):
        decay = w.sVec[0, at_s[0, j][1], stage]
        for a in cutlass.range_constexpr(2):
            S[a, j] = S[a, j] * decay


@cute.jit
def run_chunks(
    w: cutlass.Constexpr,
    ring: cutlass.Constexpr,
    count: I32,
    from_chunk: I32,
    to_chunk: I32,
    tokens: I32,
    sees_v: I32,
    sO: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """A consumer: the state over the chunks [from_chunk, to_chunk) of a sequence of so many tokens.

    `sO` is where o is handed over, or None where there is no output. M of a transition does not see v. Returns how many chunks
    have passed, `count` before these.

    What the warps do between products is most of a chunk's time: they are few, and wait for every value. So it is little, and
    what does not depend on a product is done while one runs.
    """
    has_output, is_f16 = cutlass.const_expr(sO is not None), cutlass.const_expr(dtype is F16)
    mma_x, mma_t, mma_s = w.mmas
    accS, factor = w.accS, w.factor
    bKb, bQg, bP, bT, bKr = w.operands
    thr_x, thr_t = mma_x.get_slice(w.thread), mma_t.get_slice(w.thread)
    accX, accO = [thr_x.make_fragment_C(thr_x.partition_shape_C((64, 64))) for _ in range(2)]
    accU = thr_t.make_fragment_C(thr_t.partition_shape_C((64, 64)))
    at_s, S = w.positions(), w.S
    half = cute.make_rmem_tensor_like(accS, dtype)
    for chunk in cutlass.range(from_chunk, to_chunk, unroll=1):
        n = count + chunk - from_chunk
        stage = n % STAGES
        cute.arch.mbarrier_wait(ring.full + stage, n // STAGES % 2)
        rV, bv = cute.make_rmem_tensor_like(accX, BF16), cute.make_rmem_tensor_like(accX, F32)
        load_v(w, rV, stage, tokens - chunk * 64, sees_v)
        half.store(accS.load().to(dtype))
        if is_f16:
            keep_in_range(accS, half, rV, factor)
        issue(mma_x, accX, seen_as_a(half), bKb[None, None, None, stage], False)
        weigh_v(w, rV, bv, stage, dtype)
        decay_columns(w, S, at_s, stage, 0)
        warpgroup.wait_group(0)
        rX = cute.make_rmem_tensor_like(accX, dtype)
        rX.store((bv.load() - accX.load()).to(dtype))
        issue(mma_t, accU, seen_as_a(rX), bT[None, None, None, stage], False)
        if cutlass.const_expr(has_output):
            issue(mma_x, accO, seen_as_a(half), bQg[None, None, None, stage], False)
        decay_columns(w, S, at_s, stage, 1)
        warpgroup.wait_group(1 if cutlass.const_expr(has_output) else 0)
        aU = seen_as_a(rounded(accU, dtype))
        if cutlass.const_expr(has_output):
            issue(mma_x, accO, aU, bP[None, None, None, stage], True)
        issue(mma_s, accS, aU, bKr[None, None, None, stage], True)
        if cutlass.const_expr(has_output):
            warpgroup.wait_group(1)
            hand_over_o(w, accO, sO, dtype)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty + stage)
    return count + to_chunk - from_chunk


# The state on its way out


@cute.jit
def unscaled(w: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """What we have of the state, as it is without factors."""
    S = cute.make_rmem_tensor_like(w.accS)
    S.store(w.accS.load())
    if cutlass.const_expr(dtype is F16):
        unscale_rows(rows_and_columns(S), w.factor)
    return S


@cute.jit
def save_at_boundary(
    w: cutlass.Constexpr,
    states: cutlass.Constexpr,
    kept: cutlass.Constexpr,
    place: cutlass.Constexpr,
    boundary: I32,
    to_chunk: I32,
    following: I32,
    row: I32,
    dtype: cutlass.Constexpr,
):
    """The state before a chunk, or behind the last of a sequence: to its row, if `following` says that it is kept, and to where
    the sequence leaves its last state. `place` is the sequence, its head and its tokens; what is before chunk `to_chunk` is
    another segment's. Returns the next boundary at which the state is kept, and its row.
    """
    seq, hv, tokens = place
    is_kept = boundary == following and (boundary < to_chunk or is_end(kept, boundary, tokens))
    slot, kept_row = I32(-1), row if is_kept and row < kept.rows else I32(-1)
    if boundary * 64 >= tokens:
        slot = slot_of_last(states, seq)
    for which in cutlass.range(2, unroll=1):
        number, base, step, kind = slot, states.ht, states.step, states.kind
        if which == 1:
            number, base, step, kind = kept_row, kept.at, kept.step, kept.kind
        if number >= 0:
            store_state(w.ours, lambda: unscaled(w, dtype), address_of(base, number, step, hv, kind), kind)
    return (following + kept.every, row + 1) if boundary == following else (following, row)


@cute.jit
def next_stop(boundary: I32, following: I32, to_chunk: I32):
    """Up to which chunk a state runs from a boundary on: the next at which it is kept, or the last."""
    return following if following > boundary and following < to_chunk else to_chunk


# o on its way out


def o_barriers(part: Any) -> tuple[Any, Any]:
    """Between a consumer and the warp that carries its o away: there is room for it, and it is there."""
    free, full = [NamedBarrier(barrier_id=first + part, num_threads=160) for first in (Barrier.O_FREE, Barrier.O_FULL)]
    return free, full


@cute.jit
def hand_over_o(w: cutlass.Constexpr, accO: cute.Tensor, sO: cute.Tensor, dtype: cutlass.Constexpr):
    """o^T to shared memory, as [token, dv], from where `carry_o` takes it."""
    if cutlass.const_expr(dtype is F16):
        unscale_rows(rows_and_columns(accO), w.factor)
    rO = rounded(accO)
    free, full = o_barriers(w.part)
    free.arrive_and_wait()
    cute.copy(w.copy_o, w.copy_o.retile(rO), w.copy_o.partition_D(swapped(sO)))
    cute.arch.fence_proxy("async.shared", space="cta")
    full.arrive()


@cute.jit
def carry_o(tma_o: cute.CopyAtom, o_s: cute.Tensor, o_g: cute.Tensor, part: I32, from_chunk: I32, to_chunk: I32, tokens: I32):
    """A warp for each consumer: its o to global memory, but not the last tokens of a sequence (`store_last_o`)."""
    free, full = o_barriers(part)
    for chunk in cutlass.range(from_chunk, to_chunk, unroll=1):
        free.arrive()
        full.arrive_and_wait()
        if tokens - chunk * 64 >= 64:
            cute.copy(tma_o, o_s, o_g[None, chunk])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def store_last_o(w: cutlass.Constexpr, sO: cute.Tensor, o_rows: cute.Tensor, chunk: I32, left: I32):
    """The rest of a sequence that is less than a chunk, by threads: TMA would write on into the next sequence."""
    if left < 64:
        NamedBarrier(barrier_id=Barrier.O_IN_PLACE + w.part, num_threads=128).arrive_and_wait()
        copy_rows(sO, o_rows[None, None, chunk], w.thread, left)


@cute.jit
def copy_rows(source: cute.Tensor, to: cute.Tensor, thread: I32, rows: I32):
    """Some of the rows of a [64, 64] tile in 16 bits, by 128 threads."""
    for p in cutlass.range_constexpr(4):
        row = p * 16 + thread // 8
        if row < rows:
            cute.autovec_copy(*[cute.local_tile(t, (1, 8), (row, thread % 8)) for t in (source, to)])
