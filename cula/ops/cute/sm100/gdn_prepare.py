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

from .gdn_smem import PREPARERS, STAGES, Barrier, Column
from .rows import put_row, row_of
from .tmem import PIECE, after_sync, before_sync, row_load

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
        n = n0 + chunk
        cute.arch.mbarrier_wait(bars.full + n % STAGES, n // STAGES % 2)
        make_operands(x, thread, n % STAGES, plan.tokens - chunk * 64)
        prepare_chunk(x, ahead, thread, which, chunk, n)
    return n0 + plan.end


@cute.jit
def make_operands(x: cutlass.Constexpr, thread: I32, stage: I32, left: I32):
    """A row of keys or queries normalised and rounded to fp16, in place, zeros past the end. What is an operand as it came: only
    the zeros."""
    of_raw, of_operands = row_of(x.storage.raw, stage, thread), row_of(x.storage.kq, stage, thread)
    is_past = thread % 64 >= left
    if cutlass.const_expr(x.is_f16):
        row, sums, wide = cute.make_rmem_tensor((128,), BF16), *(cute.make_rmem_tensor((n,), F32) for n in (4, 8))
        for p in cutlass.range_constexpr(16):
            cute.autovec_copy(of_raw[p], flat(row, 8 * p, 8))
        if is_past:
            row.fill(0.0)
        sums.fill(0.0)
        for p in cutlass.range_constexpr(16):
            widen(flat(row, 8 * p, 8), wide)
            for e in cutlass.range_constexpr(8):
                sums[e % 4] += wide[e] * wide[e]
        inverse = inverse_norm((sums[0] + sums[1]) + (sums[2] + sums[3]))
        for p in cutlass.range_constexpr(16):
            out = cute.make_rmem_tensor((8,), x.dtype)
            out.store((flat(row, 8 * p, 8).load().to(F32) * inverse).to(x.dtype))
            cute.autovec_copy(out, of_operands[p])
    elif is_past:
        zero = cute.make_rmem_tensor((8,), BF16)
        zero.fill(0.0)
        for p in cutlass.range_constexpr(16):
            cute.autovec_copy(zero, of_operands[p])


@cute.jit
def prepare_chunk(x: cutlass.Constexpr, ahead: cutlass.Constexpr, thread: I32, which: I32, chunk: I32, n: I32):
    """T and P of the block's n-th chunk, whose operands and vectors have been written; and vectors of our next one."""
    storage, bars, end = x.storage, x.bars, ahead.plan.end
    wid, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    place, phase, following = n % 2, n // 2 % 2, chunk + PREPARERS
    ours = NamedBarrier(barrier_id=Barrier.PREPARE + which, num_threads=128)
    sA, sD = work_of(storage.below, which, 6), work_of(storage.diagonal, which, 4)
    cute.arch.fence_proxy("async.shared", space="cta")
    ours.arrive_and_wait()
    if thread == 0:
        cute.arch.mbarrier_arrive(bars.ready + n % STAGES)
    scores = load_scores(x, thread, which, phase)
    decay_scores(scores, storage.vectors, n & 7, thread)
    if wid < 2:
        place_scores(scores, sA, sD, thread)
    ours.arrive_and_wait()
    if wid < 2:
        inverse_pair(sD, wid, 3 - wid, lane)
    else:
        P = cute.make_rmem_tensor((64,), x.dtype)
        P.store(scores.load().to(x.dtype))
        cute.arch.mbarrier_wait(bars.o_done + place, phase ^ 1)  # chunk n - 2 is done, whose T and P were here
        put_row(row_of(storage.P, place, thread % 64), P)
        if following < end:
            write_vectors(ahead, storage.vectors, following, n + PREPARERS, wid)
            if following + PREPARERS < end:
                read_ahead(ahead, following + PREPARERS, wid)
    ours.arrive_and_wait()
    columns = cute.make_rmem_tensor((32,), x.dtype)
    inverse_columns(x.mmas.tf32, sA, sD, wid, lane, columns, None)
    place_inverse(columns, storage.T[None, None, place], wid, lane)
    publish(bars.t_ready + place)


@cute.jit
def load_scores(x: cutlass.Constexpr, thread: I32, which: I32, phase: I32):
    """Our row of [k; q] k^T, as far as it has entries on or left of the diagonal; then zeros."""
    scores, at = cute.make_rmem_tensor((64,), F32), x.tmem + Column.SCORES
    scores.fill(0.0)
    cute.arch.mbarrier_wait(x.bars.a_done + which, phase)
    after_sync()
    row_load(x.mmas.scores, at, PIECE, thread)(scores)
    if cute.arch.make_warp_uniform(thread // 32) & 1 == 1:
        row_load(x.mmas.scores, at + PIECE, PIECE, thread)(flat(scores, PIECE, PIECE))
    before_sync()
    arrive(x.bars.a_free)
    return scores


@cute.jit
def decay_scores(scores: cute.Tensor, vectors: cute.Tensor, place: I32, thread: I32):
    """Our row, decayed and weighed; zeros right of the diagonal, and on it for keys.

    What is left of A's diagonal block of 16 columns is going to be an operand of tf32: see `UNBIASED`.
    """
    t, is_key = thread % 64, thread < 64
    past = t if is_key else t + 1  # so many entries are not zero
    of_row = vectors[SUM + t, place]
    for block in cutlass.range_constexpr(4):
        if block // 2 <= cute.arch.make_warp_uniform(thread // 32) & 1:
            sums, b = [read_vector(vectors, of + 16 * block, place, 16) for of in (SUM, STRENGTH)]
            exponent = of_row + F32(UNBIASED) if is_key and block < t // 16 else of_row
            for j in cutlass.range_constexpr(16):
                i = 16 * block + j
                scores[i] = scores[i] * (exp2(exponent - sums[j]) * b[j]) if i < past else F32(0.0)


@cute.jit
def place_scores(scores: cute.Tensor, sA: cute.Tensor, sD: cute.Tensor, t: I32):
    """Our row of A to where it is inverted: in float32 on the diagonal, below it for tf32."""
    own, row = t // 16, 4 * PITCH * (t % 16)
    diagonal = I32(sD.iterator.toint()) + own * BLOCK_BYTES + row
    left = I32(sA.iterator.toint()) + (own * (own - 1) >> 1) * BLOCK_BYTES + row
    for block in cutlass.range_constexpr(4):
        if block <= own:
            to = diagonal if block == own else left + block * BLOCK_BYTES
            for j in cutlass.range_constexpr(0, 16, 4):
                four = cute.make_tensor(scores.iterator + (16 * block + j), cute.make_layout((4, 1)))
                cute.autovec_copy(four, shared_at(to + 4 * j, F32, 4, 16))
