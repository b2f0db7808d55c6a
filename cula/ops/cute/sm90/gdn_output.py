# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper, the output's role: a warpgroup that hangs off the chain of states. See `gdn.py`.

    P[t, i] = q_t . k_i 2^(G_t - G_i) b_i, i <= t        o = scale (f (q S) + P E)

P is a left operand in registers, queries are one where they lie, S and E come from shared memory. Where queries are to be
normalised, 1 / |q_t| joins f_t and the exponents of P. Each warp brings 16 rows of queries in and takes the same rows of o out,
which lie in the place of E until they are copied, or, with half of a state, in that of the queries.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import NamedBarrier

from cula.core.constants import L2_NORM_EPS
from cula.ops.cute.common.barriers import arrive
from cula.ops.cute.common.decode_memory import fence
from cula.ops.cute.common.fragments import flat, lane_address
from cula.ops.cute.common.gate import exp2, log2
from cula.ops.cute.common.gdn_items import whole_plan
from cula.ops.cute.common.gdn_vectors import STRENGTH, SUM, read_pairs
from cula.ops.cute.common.squares import squares_at
from cula.ops.cute.common.tiles import (
    BF16,
    F32,
    I32,
    issue,
    rounded,
    rows_and_columns,
    seen_as_a,
    tile_at,
    tile_layout,
    tma_split,
)
from cula.ops.cute.gdn_abi import TILE_BYTES
from cula.ops.cute.sm90.kda_recurrence_steps import copy_of

from .gdn_segments import begin_map, share_map
from .gdn_smem import Q_STAGES, Barrier, stage_of_k, sum_of
from .gdn_state import make_walker, state_step, store_tile


@cute.jit
def output_role(
    tma: cutlass.Constexpr,
    mO: cute.Tensor,
    scale: F32,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    variant: cutlass.Constexpr,
):
    """o of all chunks of a block's heads. In a block with a piece of a head, first its half of a map, if it makes one."""
    if cutlass.const_expr(variant.parts == 1):
        n = I32(0)
        if plan.is_map == 1:
            n = make_map(make_walker(mmas, smem, I32(0)), items.rank, plan, smem, bars)
        else:
            for _ in cutlass.range(plan.start, plan.middle, unroll=1):
                stage, turn = stage_of_k(smem, n)
                cute.arch.mbarrier_wait(bars.k_ready + stage, turn)
                arrive(bars.k_empty + stage)
                n += 1
        output_of_head(tma, mO, scale, items, plan, mmas, smem, bars, n, variant)
    else:
        n = I32(0)
        for item in cutlass.range(items.first, items.total, items.step, unroll=1):
            n = output_of_head(tma, mO, scale, items, whole_plan(items, item), mmas, smem, bars, n, variant)
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def make_map(w: cutlass.Constexpr, rank: I32, plan: cutlass.Constexpr, smem: cutlass.Constexpr, bars: cutlass.Constexpr):
    """Our rows of M, what the chunks without output make of the identity; returns how many they are."""
    begin_map(w, rank, bars)
    n = I32(0)
    for _ in cutlass.range(plan.start, plan.middle, unroll=1):
        state_step(w, smem, bars, n, None, I32(64), False)
        n += 1
    share_map(w, rank, smem, bars)
    return n


@cute.jit
def output_of_head(
    tma: cutlass.Constexpr,
    mO: cute.Tensor,
    scale: F32,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    n: I32,
    variant: cutlass.Constexpr,
):
    """o of the chunks of a plan that have output. The block has had n chunks before; returns how many it has had then."""
    thread, wid = cute.arch.thread_idx()[0] % 128, cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
    hv, end = plan.hv, plan.end
    is_whole, of_warps = cutlass.const_expr(variant.parts == 2), tile_layout(16, 64, 8 * Q_STAGES[variant.parts])
    of_head = cute.domain_offset((plan.begin, 0), tma.q.coordinates[None, None, hv // items.group])
    of_q = copy_of(tma.q, tile_at(smem.q, of_warps, BF16), cute.local_tile(of_head, (16, 64), (None, None)))
    of_head = cute.domain_offset((plan.begin, 0), tma.o.coordinates[None, None, hv])
    o_tiles = tile_at(smem.o, tile_layout(16, 64, 8), BF16)
    o_s, o_g = tma_split(tma.o.atom, o_tiles, cute.local_tile(of_head, (16, 64), (None, None)))
    everyone = NamedBarrier(barrier_id=Barrier.OUTPUT, num_threads=128)
    if plan.middle < end:
        ask_for_queries(of_q, bars, plan.middle, n if cutlass.const_expr(is_whole) else I32(0), wid, variant)
    for chunk in cutlass.range(plan.middle, end, unroll=1):
        left = plan.tokens - chunk * 64
        shown = n if cutlass.const_expr(is_whole) else chunk - plan.middle
        place = I32(0) if cutlass.const_expr(is_whole) else shown & 1
        cute.arch.mbarrier_wait(bars.q_full, shown & 1)
        P, f = scores_of(place, scale, mmas, smem, bars, n, thread, variant)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # of o that this warp has written before
        if cutlass.const_expr(is_whole):
            if shown > 0:
                give_back_errors(bars, variant)
        elif chunk + 1 < end:
            ask_for_queries(of_q, bars, chunk + 1, shown + 1, wid, variant)
        parts = meet_states(place, f, mmas, smem, bars, shown, thread, variant)
        if cutlass.const_expr(is_whole):
            everyone.arrive_and_wait()  # all warps have read queries
            if chunk + 1 < end:
                ask_for_queries(of_q, bars, chunk + 1, shown + 1, wid, variant)
        add_errors(parts, P, mmas, smem, bars, shown, thread, variant)
        if cutlass.const_expr(not is_whole):
            give_back_errors(bars, variant)
        everyone.arrive_and_wait()  # all warps have read what o takes the place of
        take_out(parts, (tma.o.atom, o_s, o_g), mO, mmas, smem, items, plan, chunk, left, place, thread, wid, variant)
        n += 1
    return n


@cute.jit
def give_back_errors(bars: cutlass.Constexpr, variant: cutlass.Constexpr):
    """E of the next chunk may come."""
    for part in cutlass.range_constexpr(variant.parts):
        arrive(bars.e_empty + part)


@cute.jit
def take_out(
    parts: cutlass.Constexpr,
    of_o: cutlass.Constexpr,
    mO: cute.Tensor,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    chunk: I32,
    left: I32,
    place: I32,
    thread: I32,
    wid: I32,
    variant: cutlass.Constexpr,
):
    """A warp's 16 rows of o, by way of shared memory."""
    (atom, o_s, o_g), is_whole = of_o, cutlass.const_expr(variant.parts == 2)
    tiles = [part if is_whole else 2 * place for part in range(variant.parts)]
    for part in cutlass.range_constexpr(variant.parts):
        store_tile(mmas.p_e, thread, rounded(parts[part]), smem.o[None, None, tiles[part]])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    for part in cutlass.range_constexpr(variant.parts):
        columns = items.rank + part
        if left < 64:  # TMA would write on into the next sequence
            rest = cute.domain_offset((plan.begin + 64 * chunk, 0), mO[None, None, plan.hv])
            copy_our_rows(smem.o[None, None, tiles[part]], cute.local_tile(rest, (64, 64), (0, columns)), wid, left)
        else:
            cute.copy(atom, o_s[None, 4 * tiles[part] + wid], o_g[None, 4 * chunk + wid, columns])
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def ask_for_queries(
    of_q: cutlass.Constexpr, bars: cutlass.Constexpr, chunk: I32, shown: I32, wid: I32, variant: cutlass.Constexpr
):
    """A warp asks for its own 16 rows, to where all have read others, and o has been copied."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full, TILE_BYTES // 4)
    for columns in cutlass.range_constexpr(2):
        to = of_q.to[None, 8 * (shown & Q_STAGES[variant.parts] - 1) + 4 * columns + wid]
        cute.copy(of_q.atom, of_q.source[None, 4 * chunk + wid, columns], to, tma_bar_ptr=bars.q_full)


@cute.jit
def copy_our_rows(source: cute.Tensor, to: cute.Tensor, wid: I32, rows: I32):
    """What a sequence has of a warp's 16 rows of a [64, 64] tile."""
    lane = cute.arch.lane_idx()
    for p in cutlass.range(4, unroll=1):
        row = 16 * wid + 4 * p + lane // 8
        if row < rows:
            cute.autovec_copy(*[cute.local_tile(t, (1, 8), (row, lane % 8)) for t in (source, to)])
    cute.arch.sync_warp()


@cute.jit
def scores_of(
    place: I32,
    scale: F32,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    n: I32,
    thread: I32,
    variant: cutlass.Constexpr,
):
    """(P as a left operand, f of our two rows), both scaled."""
    (stage, turn), of_vectors, lane, wid = stage_of_k(smem, n), n & 7, thread % 32, cute.arch.make_warp_uniform(thread // 32)
    r, c = lane // 4, lane % 4
    of_row, f = cute.make_rmem_tensor((2,), F32), cute.make_rmem_tensor((2,), F32)
    of_row.fill(0.0)
    if cutlass.const_expr(variant.is_normalised):
        squares = squares_at(mmas.squares, lane_address(smem.q[None, None, place], wid, lane), r, BF16)
        for i in cutlass.range_constexpr(2):
            of_row[i] = F32(-0.5) * log2(squares[i] + F32(L2_NORM_EPS))
    thr = mmas.q_k.get_slice(thread)
    acc = thr.make_fragment_C(thr.partition_shape_C((64, 64)))
    q, k = thr.make_fragment_A(thr.partition_A(smem.q)), thr.make_fragment_B(thr.partition_B(smem.k))
    cute.arch.mbarrier_wait(bars.k_ready + stage, turn)
    issue(mmas.q_k, acc, q[None, None, None, place], k[None, None, None, stage], False)
    for i in cutlass.range_constexpr(2):
        of_row[i] += sum_of(smem, 16 * wid + r + 8 * i, n)
    # No branches, by which warps could skip blocks above the diagonal: the compiler would have them wait for the product.
    P, rP, last = rows_and_columns(acc), cute.make_rmem_tensor_like(acc, BF16), 16 * wid + r - 2 * c
    factors = cute.make_rmem_tensor((2, 16), F32)
    for block in cutlass.range_constexpr(4):
        sums, b = [read_pairs(smem.vectors, of + 16 * block, of_vectors, c, 2) for of in (SUM, STRENGTH)]
        for j in cutlass.range_constexpr(4):
            weight = b[j] * scale
            for i in cutlass.range_constexpr(2):
                factor = exp2(of_row[i] - sums[j]) * weight
                is_past = 16 * block + 8 * (j // 2) + j % 2 - 8 * i <= last
                factors[i, 4 * block + j] = factor if is_past else F32(0.0)
    warpgroup.wait_group(0)
    for block in cutlass.range_constexpr(4):
        weigh(P, factors, acc, rP, block)
    arrive(bars.k_empty + stage)
    if cutlass.const_expr(variant.parts == 2):
        round_now(rP)
    for i in cutlass.range_constexpr(2):
        f[i] = exp2(of_row[i]) * scale
    return seen_as_a(rP), f


@cute.jit
def round_now(x: cute.Tensor):
    """Have 16-bit numbers be there from here on: the compiler would round them where they are used, and until then has no
    registers for twice as many words. None of them has all bits set, which no rounding makes."""
    words, bits = cute.recast_tensor(x, I32), I32(-1)
    for w in cutlass.range_constexpr(cute.size(words)):
        bits = bits & words[w]
    fence(never=bits == I32(-1))


@cute.jit
def weigh(P: cute.Tensor, factors: cute.Tensor, acc: cute.Tensor, rP: cute.Tensor, block: cutlass.Constexpr):
    """Sixteen columns of P, which are registers of acc, times their factors, rounded."""
    for j in cutlass.range_constexpr(4 * block, 4 * block + 4):
        for i in cutlass.range_constexpr(2):
            P[i, j] = P[i, j] * factors[i, j]
    flat(rP, 8 * block, 8).store(flat(acc, 8 * block, 8).load().to(BF16))


@cute.jit
def meet_states(
    place: I32,
    f: cute.Tensor,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    shown: I32,
    thread: I32,
    variant: cutlass.Constexpr,
):
    """scale f (q S) of each part of the state. All parts meet the queries at once: none waits for E of another to change."""
    thr = mmas.q_s.get_slice(thread)
    q, S = thr.make_fragment_A(thr.partition_A(smem.q)), thr.make_fragment_B(thr.partition_B(smem.S))
    parts = [thr.make_fragment_C(thr.partition_shape_C((64, 64))) for _ in range(variant.parts)]
    for part in cutlass.range_constexpr(variant.parts):
        cute.arch.mbarrier_wait(bars.s_full + part, shown & 1)
        issue(mmas.q_s, parts[part], q[None, None, None, place], S[None, None, None, part], False)
    warpgroup.wait_group(0)
    for part in cutlass.range_constexpr(variant.parts):
        arrive(bars.s_empty + part)
        O = rows_and_columns(parts[part])
        for j in cutlass.range_constexpr(16):
            for i in cutlass.range_constexpr(2):
                O[i, j] = O[i, j] * f[i]
    return parts


@cute.jit
def add_errors(
    parts: cutlass.Constexpr,
    P: cute.Tensor,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    shown: I32,
    thread: I32,
    variant: cutlass.Constexpr,
):
    """And P E joins them."""
    thr = mmas.p_e.get_slice(thread)
    E = thr.make_fragment_B(thr.partition_B(smem.E))
    for part in cutlass.range_constexpr(variant.parts):
        cute.arch.mbarrier_wait(bars.e_full + part, shown & 1)
        issue(mmas.p_e, parts[part], P, E[None, None, None, part], True)
    warpgroup.wait_group(0)
