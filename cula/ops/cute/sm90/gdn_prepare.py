# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper, the preparing role: all of a chunk that depends neither on the state nor on queries. See `gdn.py`.

    G = cumsum of log2 decays     f = 2^G     r = 2^(G_C - G), summed from the end: no difference of large numbers     b
    A[t, i] = k_t . k_i 2^(G_t - G_i) b_i, i < t                  T = (I + A)^-1

A warpgroup. Keys are operands as they came; where they are to be normalised, 1 / |k_t| joins the factors: f_t and r_t b_t are
multiplied by it, and the exponents of A have it as a logarithm. Scores are one wgmma, of which warp w has rows 16 w .. 16 w + 15,
or products of warps, in blocks of 16x16; a decay is one number for an entry, and no exponent is above that of 1 / |k|.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import NamedBarrier

from cula.core.constants import L2_NORM_EPS
from cula.ops.cute.common.barriers import publish
from cula.ops.cute.common.fragments import lane_address, shared_at
from cula.ops.cute.common.gate import exp2, log2
from cula.ops.cute.common.gdn_items import whole_plan
from cula.ops.cute.common.gdn_vectors import (
    INTO_STATE,
    POWER,
    STRENGTH,
    SUM,
    VECTORS,
    Ahead,
    gate_of,
    read_numbers,
    read_pairs,
    write_all_vectors,
)
from cula.ops.cute.common.inverse import (
    BLOCK_BYTES,
    PITCH,
    UNBIASED,
    below,
    inverse_columns,
    inverse_pair,
    place_inverse,
    work_of,
)
from cula.ops.cute.common.squares import products_at, squares_at
from cula.ops.cute.common.tiles import BF16, F32, I32, issue, rows_and_columns
from cula.ops.cute.gdn_abi import TILE_BYTES
from cula.ops.cute.sm90.kda_fused_smem import send
from cula.ops.cute.sm90.kda_recurrence_steps import copy_of, copy_tile

from .gdn_smem import SUM_STAGES, Barrier, stage_of_k, stage_of_t, sum_of

SQUARE_BYTES = TILE_BYTES // 2


@cute.jit
def prepare_role(
    tma_k: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    which: I32,
    variant: cutlass.Constexpr,
):
    """Every chunk, counted through all the heads of a block; or, where four warpgroups of two blocks share the work, our part."""
    if cutlass.const_expr(variant.parts == 1):
        share_head(tma_k, gates, scalars, items, plan, mmas, smem, bars, which, variant)
    else:
        n = I32(0)
        for item in cutlass.range(items.first, items.total, items.step, unroll=1):
            n = prepare_head(tma_k, gates, scalars, items, whole_plan(items, item), mmas, smem, bars, n, variant)


@cute.jit
def prepare_head(
    tma_k: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    n0: I32,
    variant: cutlass.Constexpr,
):
    """The chunks of a plan, two at a time. The block has had n0 chunks before; returns how many it has had then.

    With one chunk at a time two warps would invert diagonal blocks while two wait, and then warp 0 would have the longest column
    of blocks and warp 3 the shortest. With two chunks each warp has as much to do as any other. Warps 0 and 1 have the fewest
    blocks of scores, and write the vectors of the next two chunks, a chunk each.
    """
    wid, lane, ours = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3, cute.arch.lane_idx(), everyone(0)
    of_k, ahead = inputs_of(tma_k, gates, scalars, items, plan, smem)
    first, end = plan.start, plan.end
    for i in cutlass.range_constexpr(cute.size(smem.k, mode=[2]) - 2):
        if wid == 0 and first + i < end:
            ask_for_keys(of_k, smem, bars, first + i, n0 + i)
    if wid < 2 and first + wid < end:
        read_numbers(ahead, first + wid)
        write_vectors_ahead(ahead, smem.vectors, first + wid, n0 + wid)
    ours.arrive_and_wait()
    for chunk in cutlass.range(first, end, 2, unroll=1):
        n, count = n0 + chunk - first, cutlass.min(end - chunk, 2)
        take_both(mmas, smem, bars, ours, n, count, plan.tokens - chunk * 64, wid, lane, variant)
        for i in cutlass.range(count, unroll=1):
            make_scores(mmas, smem, n + i, *work(smem, i), wid, lane, variant)
        if wid < 2 and chunk + wid + 2 < end:
            write_vectors_ahead(ahead, smem.vectors, chunk + wid + 2, n + wid + 2)
        ours.arrive_and_wait()
        if wid >> 1 < count:
            inverse_pair(work_of(smem.diagonal, wid >> 1, 4), wid & 1, 3 - (wid & 1), lane)
        ours.arrive_and_wait()
        for i in cutlass.range(count, unroll=1):
            place_t(of_k, mmas, smem, bars, plan, chunk + i, n + i, i, wid, lane)
    return n0 + end - first


@cute.jit
def write_vectors_ahead(ahead: cutlass.Constexpr, vectors: cute.Tensor, chunk: I32, n: I32):
    """Vectors of a chunk, the block's n-th, from numbers that are on their way; those of the next but one then are."""
    write_all_vectors(ahead, vectors, chunk, n)
    if chunk + 2 < ahead.plan.end:
        read_numbers(ahead, chunk + 2)


@cute.jit
def place_t(
    of_k: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    chunk: I32,
    n: I32,
    i: I32,
    wid: I32,
    lane: I32,
):
    """A column of T of the first or the second of two chunks, the block's n-th; and later keys are asked for."""
    column, (place, _), ahead = wid if i == 0 else 3 - wid, stage_of_t(smem, n), cute.size(smem.k, mode=[2]) - 2
    columns = cute.make_rmem_tensor((32,), BF16)
    inverse_columns(mmas.tf32, *work(smem, i), column, lane, columns, None)
    stage, turn = stage_of_k(smem, n + ahead)
    cute.arch.mbarrier_wait(bars.k_empty + stage, turn ^ 1)  # chunk n - 2 is done, whose keys and T were here
    place_inverse(columns, smem.T[None, None, place], column, lane)
    publish(bars.t_ready + place)
    if wid == 0 and chunk + ahead < plan.end:
        ask_for_keys(of_k, smem, bars, chunk + ahead, n + ahead)


def work(smem: Any, i: Any) -> tuple[Any, Any]:
    """Where the i-th of the chunks in the making is inverted: blocks below the diagonal, and on it."""
    return work_of(smem.below, i, 6), work_of(smem.diagonal, i, 4)


def inputs_of(tma_k: Any, gates: Any, scalars: Any, items: Any, plan: Any, smem: Any) -> tuple[Any, Ahead]:
    """Keys of a head as they are copied, and what vectors are made from."""
    of_head = cute.domain_offset((plan.begin, 0), tma_k.coordinates[None, None, plan.hv // items.group])
    of_k = copy_of(tma_k, smem.k, cute.local_tile(of_head, (64, 128), (None, 0)))
    a, bias = gate_of(gates, scalars, plan.hv)
    raw_g, raw_b = [cute.make_rmem_tensor((2,), I32) for _ in range(2)]
    return of_k, Ahead(gates, scalars, raw_g, raw_b, a, bias, plan)


@cute.jit
def ask_for_keys(of_k: cutlass.Constexpr, smem: cutlass.Constexpr, bars: cutlass.Constexpr, chunk: I32, n: I32):
    """Keys of a chunk, the n-th of this block, are to come. By a warp."""
    stage, turn = stage_of_k(smem, n)
    cute.arch.mbarrier_wait(bars.k_empty + stage, turn ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full + stage, TILE_BYTES)
    copy_tile(of_k, chunk, stage, bars.k_full + stage)


# Keys


@cute.jit
def take_both(
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    ours: cutlass.Constexpr,
    n: I32,
    count: I32,
    left: I32,
    wid: I32,
    lane: I32,
    variant: cutlass.Constexpr,
):
    """Wait for keys of two chunks, or of the last one, whose vectors are there, and make them what products and other roles read:
    rows past the end are cleared, and norms join the factors. Nobody reads what was inverted before any more."""
    for i in cutlass.range(count, unroll=1):
        stage, turn = stage_of_k(smem, n + i)
        cute.arch.mbarrier_wait(bars.k_full + stage, turn)
    if left < 64 * count:
        last, _ = stage_of_k(smem, n + count - 1)
        clear_rows(smem.k[None, None, last], wid, lane, left - 64 * (count - 1))
        cute.arch.fence_proxy("async.shared", space="cta")
    if cutlass.const_expr(variant.is_normalised):
        for i in cutlass.range(count, unroll=1):
            join_norms(mmas, smem, n + i, wid, lane)
    ours.arrive_and_wait()
    thread = cute.arch.thread_idx()[0] % 128
    if thread < count:
        own, _ = stage_of_k(smem, n + thread)
        cute.arch.mbarrier_arrive(bars.k_ready + own)


@cute.jit
def take_keys(
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    ours: cutlass.Constexpr,
    n: I32,
    left: I32,
    wid: I32,
    lane: I32,
    variant: cutlass.Constexpr,
):
    """The same of one chunk, the block's n-th, which has so many tokens left, and for whose vectors warps wait here."""
    stage, turn = stage_of_k(smem, n)
    cute.arch.mbarrier_wait(bars.k_full + stage, turn)
    if left < 64:
        clear_rows(smem.k[None, None, stage], wid, lane, left)
        cute.arch.fence_proxy("async.shared", space="cta")
    if cutlass.const_expr(variant.is_normalised):
        ours.arrive_and_wait()  # vectors are there
        join_norms(mmas, smem, n, wid, lane)
    ours.arrive_and_wait()
    if cute.arch.thread_idx()[0] % 128 == 0:
        cute.arch.mbarrier_arrive(bars.k_ready + stage)


@cute.jit
def clear_rows(tile: cute.Tensor, wid: I32, lane: I32, left: I32):
    """Zeros past the end of the sequence. A lane has half of a row, 8 pieces of 16 bytes."""
    row = 16 * wid + lane % 16
    if row >= left:
        at, zero = I32(tile.iterator.toint()) + row * 128 + (lane // 16) * (TILE_BYTES // 2), cute.make_rmem_tensor((8, 1), BF16)
        zero.fill(0.0)
        for p in cutlass.range_constexpr(8):
            cute.autovec_copy(zero, shared_at(at + 16 * p, BF16, 8, 16))
    cute.arch.sync_warp()


@cute.jit
def join_norms(mmas: cutlass.Constexpr, smem: cutlass.Constexpr, n: I32, wid: I32, lane: I32):
    """Of the keys that are this warp's 16 rows."""
    stage, _ = stage_of_k(smem, n)
    squares = squares_at(mmas.squares, lane_address(smem.k[None, None, stage], wid, lane), lane // 4, BF16)
    for i in cutlass.range_constexpr(2):
        join_norm(smem, n, 16 * wid + lane // 4 + 8 * i, squares[i], lane % 4)


@cute.jit
def join_norm(smem: cutlass.Constexpr, n: I32, row: I32, square: F32, c: I32):
    """The norm of a key joins its factors, by three of its four lanes: exponents of columns, f, r b."""
    log_norm = F32(0.5) * log2(square + F32(L2_NORM_EPS))
    at = I32(smem.vectors.iterator.toint()) + 4 * ((n & 7) * VECTORS + row)
    if c == 0:
        x = shared_at(at + 4 * SUM, F32, 1, 4)
        smem.sums[row, n % SUM_STAGES] = x[0]
        x[0] = x[0] + log_norm
    elif c < 3:
        x = shared_at(at + (4 * POWER if c == 1 else 4 * INTO_STATE), F32, 1, 4)
        x[0] = x[0] * exp2(-log_norm)


def everyone(which: Any) -> NamedBarrier:
    """The barrier of all threads of a warpgroup that prepares."""
    return NamedBarrier(barrier_id=Barrier.PREPARE + which, num_threads=128)


# Scores


@cute.jit
def exponents_of_rows(smem: cutlass.Constexpr, n: I32, strip: I32, lane: I32, variant: cutlass.Constexpr):
    """G_t of a lane's two rows of sixteen; where keys are normalised here, G_t - log2 |k_t|."""
    of_row = cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        row = 16 * strip + lane // 4 + 8 * i
        of_row[i] = sum_of(smem, row, n)
        if cutlass.const_expr(variant.is_normalised):  # G - log2 |k| of G and G + log2 |k|
            of_row[i] = 2 * of_row[i] - smem.vectors[SUM + row, n & 7]
    return of_row


def weight_of(of_row: Any, of_column: Any, b: Any) -> Any:
    """2^(G_t - G_i) b_i, with norms where they are made here: what a score is multiplied by."""
    return exp2(of_row - of_column) * b


@cute.jit
def make_scores(
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    n: I32,
    sA: cute.Tensor,
    sD: cute.Tensor,
    wid: I32,
    lane: I32,
    variant: cutlass.Constexpr,
):
    """A of the block's n-th chunk, to where it is inverted."""
    thr, (stage, _) = mmas.kk.get_slice(cute.arch.thread_idx()[0] % 128), stage_of_k(smem, n)
    scores = thr.make_fragment_C(thr.partition_shape_C((64, 64)))
    a, b = thr.make_fragment_A(thr.partition_A(smem.k)), thr.make_fragment_B(thr.partition_B(smem.k))
    issue(mmas.kk, scores, a[None, None, None, stage], b[None, None, None, stage], False)
    warpgroup.wait_group(0)
    place_scores(scores, smem, n, sA, sD, wid, lane, variant)


@cute.jit
def place_scores(
    scores: cute.Tensor,
    smem: cutlass.Constexpr,
    n: I32,
    sA: cute.Tensor,
    sD: cute.Tensor,
    wid: I32,
    lane: I32,
    variant: cutlass.Constexpr,
):
    """Our rows of A, decayed and weighed, to where they are inverted: in float32 on the diagonal, below it for tf32."""
    r, c = lane // 4, lane % 4
    A, of_row = rows_and_columns(scores), exponents_of_rows(smem, n, wid, lane, variant)
    # All factors are read before any store: the compiler does not know that they lie elsewhere, and would have each wait for it.
    for block in cutlass.range_constexpr(4):
        if block <= wid:
            unbiased = F32(UNBIASED) if block < wid else F32(0.0)
            sums, b = [read_pairs(smem.vectors, of + 16 * block, n & 7, c, 2) for of in (SUM, STRENGTH)]
            for j in cutlass.range_constexpr(4):
                for i in cutlass.range_constexpr(2):
                    A[i, 4 * block + j] = A[i, 4 * block + j] * weight_of(of_row[i] + unbiased, sums[j], b[j])
    for block in cutlass.range_constexpr(4):
        if block <= wid:
            to = sD[None, None, block] if block == wid else below(sA, wid, block)
            for nb in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    two = cute.make_rmem_tensor((1, 2), F32)
                    for e in cutlass.range_constexpr(2):
                        is_kept = block < wid or 8 * nb + 2 * c + e < r + 8 * i
                        two[e] = A[i, 4 * block + 2 * nb + e] if is_kept else F32(0.0)
                    cute.autovec_copy(two, cute.local_tile(to, (1, 2), (r + 8 * i, 4 * nb + c)))


@cute.jit
def make_warp_scores(
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    n: I32,
    sA: cute.Tensor,
    sD: cute.Tensor,
    strip: I32,
    lane: I32,
    variant: cutlass.Constexpr,
):
    """Sixteen rows of A of the block's n-th chunk, by a warp, up to the diagonal, in blocks of 16x16."""
    (stage, _), of_row = stage_of_k(smem, n), exponents_of_rows(smem, n, strip, lane, variant)
    tile = smem.k[None, None, stage]
    own_at = lane_address(tile, strip, lane)
    for block in cutlass.range(strip + 1, unroll=1):
        A = products_at(mmas.squares, own_at, lane_address(tile, block, lane), BF16)
        place_block(A, of_row, smem, n, sA, sD, strip, block, lane)


@cute.jit
def place_block(
    A: cute.Tensor,
    of_row: cute.Tensor,
    smem: cutlass.Constexpr,
    n: I32,
    sA: cute.Tensor,
    sD: cute.Tensor,
    strip: I32,
    block: I32,
    lane: I32,
):
    """A block, decayed and weighed: in float32 on the diagonal, below it for tf32."""
    r, c, is_below = lane // 4, lane % 4, block < strip
    unbiased = F32(UNBIASED) if is_below else F32(0.0)
    number = strip * (strip - 1) // 2 + block
    to = I32(sD.iterator.toint()) + BLOCK_BYTES * strip
    if is_below:
        to = I32(sA.iterator.toint()) + BLOCK_BYTES * number
    sums, b = [read_pairs(smem.vectors, of, n & 7, c + 8 * block, 2) for of in (SUM, STRENGTH)]
    for i in cutlass.range_constexpr(2):
        for nb in cutlass.range_constexpr(2):
            two = cute.make_rmem_tensor((2, 1), F32)
            for e in cutlass.range_constexpr(2):
                j = 2 * nb + e
                x = A[4 * nb + 2 * i + e] * weight_of(of_row[i] + unbiased, sums[j], b[j])
                two[e] = x if is_below or 8 * nb + 2 * c + e < r + 8 * i else F32(0.0)
            cute.autovec_copy(two, shared_at(to + 4 * ((r + 8 * i) * PITCH + 8 * nb + 2 * c), F32, 2, 8))


# What two blocks share


@cute.jit
def share_head(
    tma_k: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    which: I32,
    variant: cutlass.Constexpr,
):
    """A warpgroup's part of a plan's chunks: of every four, keys and vectors of two neighbours, and for both blocks T of the
    second of these two.

    T of chunk n is made by block n % 2. With u = n in the odd block and n + 1 in the even one, the warpgroup has the pairs
    (u, u + 1) of every other even u, and T where u is odd: behind T there is time for vectors, and then chunk n - 4 is done.
    """
    wid, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3, cute.arch.lane_idx()
    of_k, ahead = inputs_of(tma_k, gates, scalars, items, plan, smem)
    chunks, n_of_0, partner = plan.end - plan.start, items.rank - 1, 1 - items.rank
    many = chunks - n_of_0  # values of u, the first of which may be no chunk
    last = 2 * (many // 4) + cutlass.min(cutlass.max(many % 4 - 2 * which, 0), 2)
    first = I32(1) if which + items.rank == 0 else I32(0)
    n = 2 * which + n_of_0
    if wid >= 2:
        mine = n + wid - 2  # warp 2 has vectors of the first of the two, warp 3 of the second
        if mine >= 0 and mine < chunks:
            read_numbers(ahead, plan.start + mine)
            write_all_vectors(ahead, smem.vectors, plan.start + mine, mine)
        if mine + 4 < chunks:
            read_numbers(ahead, plan.start + mine + 4)
    if wid == 3:
        for i in cutlass.range_constexpr(2):
            if n + i >= 0 and n + i < chunks:
                ask_for_keys(of_k, smem, bars, plan.start + n + i, n + i)
                if cutlass.const_expr(i == 0):
                    ask_for_t(bars, n, partner)
    for turn in cutlass.range(first, last, unroll=1):
        u = 4 * (turn >> 1) + 2 * which + (turn & 1)
        n = u + n_of_0
        take_keys(mmas, smem, bars, everyone(which), n, plan.tokens - (plan.start + n) * 64, wid, lane, variant)
        following = n + 1
        if u & 1 == 1:
            share_t(mmas, smem, bars, which, partner, n, wid, lane, variant)
            following = n + 3
            if wid >= 2:
                mine = following + wid - 2
                if mine < chunks:
                    write_all_vectors(ahead, smem.vectors, plan.start + mine, mine)
                    if mine + 4 < chunks:
                        read_numbers(ahead, plan.start + mine + 4)
        if wid == 3 and turn > 0 and following < chunks:
            ask_for_keys(of_k, smem, bars, plan.start + following, following)
            if u & 1 == 1:
                ask_for_t(bars, following, partner)


@cute.jit
def share_t(
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    which: I32,
    partner: I32,
    n: I32,
    wid: I32,
    lane: I32,
    variant: cutlass.Constexpr,
):
    """T of the n-th chunk, whose keys and vectors have been written, to our shared memory and the partner's. Each warp has 16
    rows of it, as they lie 2 KB, and sends them when it is done."""
    ours, (place, turn) = everyone(which), stage_of_t(smem, n)
    sA, sD = work(smem, which)
    if cutlass.const_expr(variant.has_warp_scores):
        make_warp_scores(mmas, smem, n, sA, sD, wid, lane, variant)
    else:
        make_scores(mmas, smem, n, sA, sD, wid, lane, variant)
    ours.arrive_and_wait()
    if wid < 2:
        inverse_pair(sD, wid, 3 - wid, lane)
    ours.arrive_and_wait()
    columns = cute.make_rmem_tensor((32,), BF16)
    inverse_columns(mmas.tf32, sA, sD, wid, lane, columns, None)
    # Chunk n - 4, whose T was here, is done: in this block since keys have come to where its own were.
    cute.arch.mbarrier_wait(bars.t_asked + place, turn)
    tile = smem.T[None, None, place]
    place_inverse(columns, tile, wid, lane)
    publish(bars.t_ready + place)
    rows = cute.make_ptr(BF16, I32(tile.iterator.toint()) + wid * (SQUARE_BYTES // 4), cute.AddressSpace.smem, assumed_align=16)
    with cute.arch.elect_one():
        send(rows, rows, SQUARE_BYTES // 4, bars.t_ready + place, partner)


@cute.jit
def ask_for_t(bars: cutlass.Constexpr, n: I32, partner: I32):
    """T of the n-th chunk is to come from the partner: where it goes all have read what was there. By the warp that has asked for
    the chunk's keys, which waited for that."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.t_ready + (n & 3), SQUARE_BYTES)
        cute.arch.mbarrier_arrive(bars.t_asked + (n & 3), partner, scope=nvvm.MemScopeKind.CLUSTER)
