# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Blackwell, the preparing role: all of a chunk that knows no state. See `gdn.py`.

    A[t, i] = k_t . k_i 2^(G_t - G_i) b_i, i < t      T = (I + A)^-1      P[t, i] = q_t . k_i 2^(G_t - G_i) b_i, i <= t

A warpgroup for every other chunk. A thread has one row of [k; q], which it normalises and rounds to fp16 in place, and the same
row of the scores: warps 0 and 1 have A, 2 and 3 have P. A decay is one number for an entry, and no exponent of those that are
used is above zero. While the first two warps invert the diagonal blocks, the others write the vectors of the next chunk.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.barriers import arrive, publish
from cula.ops.cute.common.fragments import flat, shared_at, widen
from cula.ops.cute.common.gate import exp2, inverse_norm
from cula.ops.cute.common.gdn_items import whole_plan
from cula.ops.cute.common.gdn_vectors import STRENGTH, SUM, Ahead, gate_of, read_ahead, read_vector, write_vectors
from cula.ops.cute.common.inverse import PITCH, UNBIASED, inverse_columns, inverse_pair, place_inverse, work_of
from cula.ops.cute.common.tiles import BF16, F32, I32

from .gdn_smem import PREPARERS, Barrier, Column, Turn
from .rows import address_of_row, afresh, piece_address, times, times_plus
from .tmem import after_sync, before_sync, row_load

BLOCK_BYTES = 4 * 16 * PITCH  # of a 16x16 block to be inverted


@cute.jit
def prepare_role(x: cutlass.Constexpr, thread: I32, which: I32):
    """A warpgroup: every other chunk, counted through all the heads of a block."""
    items = x.items
    n = I32(0)
    for item in cutlass.range(items.first, items.total, items.step, unroll=1):
        n = prepare_head(x, thread, which, item, n)


@cute.jit
def prepare_head(x: cutlass.Constexpr, thread: I32, which: I32, item: I32, n0: I32):
    """Our chunks of a head, before which the block had n0; returns how many there are then."""
    scalars, gates, vectors, bars = x.scalars, x.gates, x.storage.vectors, x.bars
    wid = cute.arch.make_warp_uniform(thread // 32)
    plan = whole_plan(x.items, item)
    first = (which - n0) & (PREPARERS - 1)
    raw_g, raw_b = [cute.make_rmem_tensor((2,), I32) for _ in range(2)]
    a, bias = gate_of(gates, scalars, plan.hv)
    ahead = Ahead(gates, scalars, raw_g, raw_b, a, bias, plan)
    if first < plan.end:
        read_ahead(ahead, first, wid)
        write_vectors(ahead, vectors, first, n0 + first, wid)
    if first + PREPARERS < plan.end:
        read_ahead(ahead, first + PREPARERS, wid)
    for chunk in cutlass.range(first, plan.end, PREPARERS, unroll=1):
        n, mine = n0 + chunk, afresh(thread)
        cute.arch.mbarrier_wait(bars.full + Turn(n).stage, Turn(n).of_stage)
        make_operands(x, mine, Turn(n).stage, plan.tokens - chunk * 64)
        prepare_chunk(x, ahead, mine, which, chunk, n)
    return n0 + plan.end


@cute.jit
def make_operands(x: cutlass.Constexpr, thread: I32, stage: I32, left: I32):
    """A row of keys or queries, in place: zeros past the end; normalised and rounded to fp16, unless it is used as it came."""
    tile = x.storage.kq
    of_row, zero = address_of_row(tile, stage, thread), cute.make_rmem_tensor((8,), x.dtype)
    if thread % 64 >= left:
        zero.fill(0.0)
        for p in cutlass.range(16, unroll=1):
            cute.autovec_copy(eight(zero), shared_at(piece_address(tile, of_row, p), x.dtype, 8, 16))
    if cutlass.const_expr(x.is_f16):
        raw, wide, sums, out = [cute.make_rmem_tensor((8,), of) for of in (BF16, F32, F32, x.dtype)]
        sums.fill(0.0)
        for p in cutlass.range_constexpr(16):
            cute.autovec_copy(shared_at(piece_address(tile, of_row, p), BF16, 8, 16), eight(raw))
            widen(raw, wide)
            times_plus(wide, wide, sums)
            sums, wide = wide, sums
        for step in (4, 2, 1):
            for e in cutlass.range_constexpr(step):
                sums[e] += sums[e + step]
        inverse = inverse_norm(sums[0])
        for p in cutlass.range_constexpr(16):  # read once more: there are no registers to keep it
            cute.autovec_copy(shared_at(piece_address(tile, of_row, p), BF16, 8, 16), eight(raw))
            widen(raw, wide)
            times(wide, inverse)
            out.store(wide.load().to(x.dtype))
            cute.autovec_copy(eight(out), shared_at(piece_address(tile, of_row, p), x.dtype, 8, 16))


def eight(x):
    """Values as they are copied."""
    return cute.make_tensor(x.iterator, cute.make_layout((8, 1)))


@cute.jit
def prepare_chunk(x: cutlass.Constexpr, ahead: cutlass.Constexpr, thread: I32, which: I32, chunk: I32, n: I32):
    """T and P of the block's n-th chunk, whose operands and vectors have been written; and vectors of our next one."""
    storage, bars, end = x.storage, x.bars, ahead.plan.end
    wid, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    place, following = Turn(n).place, chunk + PREPARERS
    ours = NamedBarrier(barrier_id=Barrier.PREPARE + which, num_threads=128)
    sA, sD = work_of(storage.below, which, 6), work_of(storage.diagonal, which, 4)
    cute.arch.fence_proxy("async.shared", space="cta")
    ours.arrive_and_wait()
    if thread == 0:
        cute.arch.mbarrier_arrive(bars.ready + Turn(n).stage)
    take_scores(x, sA, sD, thread, which, n)
    ours.arrive_and_wait()
    if wid < 2:
        inverse_pair(sD, wid, 3 - wid, lane)
    elif following < end:
        of_head = ahead._replace(plan=ahead.plan._replace(hv=cute.arch.make_warp_uniform(ahead.plan.hv)))  # likewise
        write_vectors(of_head, storage.vectors, following, n + PREPARERS, wid)
        if following + PREPARERS < end:
            read_ahead(of_head, following + PREPARERS, wid)
    ours.arrive_and_wait()
    columns = cute.make_rmem_tensor((32,), x.dtype)
    inverse_columns(x.mmas.tf32, sA, sD, wid, lane, columns, None)
    place_inverse(columns, storage.T[None, None, place], wid, lane)
    publish(bars.t_ready + place)


@cute.jit
def take_scores(x: cutlass.Constexpr, sA: cute.Tensor, sD: cute.Tensor, thread: I32, which: I32, n: I32):
    """Our row of [k; q] k^T, decayed and weighed: of A to where it is inverted, of P to its tile. By blocks of 16 columns; those
    right of a warp's 32 rows are nothing."""
    wid, now, bars = cute.arch.make_warp_uniform(thread // 32), Turn(n), x.bars
    cute.arch.mbarrier_wait(bars.a_done + which, now.of_place)
    after_sync()
    if wid >= 2:
        cute.arch.mbarrier_wait(bars.o_done + now.place, now.of_place ^ 1)  # chunk n - 2 is done, whose T and P were here
    for block in cutlass.range_constexpr(4):
        if block // 2 <= wid & 1:
            scores = cute.make_rmem_tensor((16,), F32)
            row_load(x.mmas.scores, x.tmem + (Column.SCORES + 16 * block), 16, thread)(scores)
            decay_scores(scores, x.storage.vectors, now.vectors, thread, block)
            if block // 2 == wid & 1:
                clear_right(scores, thread, 16 * (block % 2))
            if wid < 2:
                place_scores(scores, sA, sD, thread, block)
            else:
                put_scores(x, now.place, thread % 64, block, scores)
        elif wid >= 2:
            nothing = cute.make_rmem_tensor((16,), F32)
            nothing.fill(0.0)
            put_scores(x, now.place, thread % 64, block, nothing)
    before_sync()
    arrive(bars.a_free)


@cute.jit
def decay_scores(scores: cute.Tensor, vectors: cute.Tensor, place: I32, thread: I32, block: cutlass.Constexpr):
    """A block of our row, decayed and weighed. What is left of A's diagonal block is going to be an operand of tf32: see
    `UNBIASED`."""
    t, left_of = thread % 64, F32(UNBIASED) if thread < 64 else F32(0.0)
    of_row = vectors[SUM + t, place]
    exponent = of_row + left_of if block < t // 16 else of_row
    for at in cutlass.range_constexpr(0, 16, 8):
        sums, b = [read_vector(vectors, of + 16 * block + at, place, 8) for of in (SUM, STRENGTH)]
        factors = cute.make_rmem_tensor((8,), F32)
        for j in cutlass.range_constexpr(8):
            factors[j] = exp2(exponent - sums[j])
        times(factors, b)
        times(flat(scores, at, 8), factors)


@cute.jit
def clear_right(scores: cute.Tensor, thread: I32, first: cutlass.Constexpr):
    """Zeros right of the diagonal, and on it for keys, of columns from the first on among 32; there is no decay there."""
    past = thread % 32 if thread < 64 else thread % 32 + 1  # so many entries of those 32 are not zero
    for j in cutlass.range_constexpr(16):
        scores[j] = scores[j] if first + j < past else F32(0.0)


@cute.jit
def place_scores(scores: cute.Tensor, sA: cute.Tensor, sD: cute.Tensor, t: I32, block: cutlass.Constexpr):
    """A block of our row of A to where it is inverted: in float32 on the diagonal, below it for tf32."""
    own, row = t // 16, 4 * PITCH * (t % 16)
    if block <= own:
        left = I32(sA.iterator.toint()) + ((own * (own - 1) >> 1) + block) * BLOCK_BYTES + row
        to = I32(sD.iterator.toint()) + own * BLOCK_BYTES + row if block == own else left
        for j in cutlass.range_constexpr(0, 16, 4):
            four = cute.make_tensor(scores.iterator + j, cute.make_layout((4, 1)))
            cute.autovec_copy(four, shared_at(to + 4 * j, F32, 4, 16))


@cute.jit
def put_scores(x: cutlass.Constexpr, place: I32, t: I32, block: cutlass.Constexpr, scores: cute.Tensor):
    """A block of our row of P to its tile."""
    tile, half = x.storage.P, cute.make_rmem_tensor((16,), x.dtype)
    half.store(scores.load().to(x.dtype))
    of_row = address_of_row(tile, place, t)
    for p in cutlass.range_constexpr(2):
        cute.autovec_copy(eight(flat(half, 8 * p, 8)), shared_at(piece_address(tile, of_row, 2 * block + p), x.dtype, 8, 16))
