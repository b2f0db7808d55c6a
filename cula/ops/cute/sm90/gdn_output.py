# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper, the output's role: a warpgroup that hangs off the chain of states. See `gdn.py`.

    P[t, i] = q_t . k_i 2^(G_t - G_i) b_i, i <= t        o = scale (f (q S) + P E)

P is a left operand in registers, queries are one where they lie, S and E come from shared memory. Where queries are to be
normalised, 1 / |q_t| joins f_t and the exponents of P. Each warp brings 16 rows of queries in and takes the same rows of o out,
through the same memory: so the warps need not meet, but for the end of the products that read queries.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cula.core.constants import L2_NORM_EPS
from cula.ops.cute.common.barriers import arrive
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
from .gdn_smem import sum_of
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
                cute.arch.mbarrier_wait(bars.k_ready + (n & 3), (n >> 2) & 1)
                arrive(bars.k_empty + (n & 3))
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
    of_warps = tile_at(smem.q, tile_layout(16, 64, 16), BF16)
    of_head = cute.domain_offset((plan.begin, 0), tma.q.coordinates[None, None, hv // items.group])
    of_q = copy_of(tma.q, of_warps, cute.local_tile(of_head, (16, 64), (None, None)))
    of_head = cute.domain_offset((plan.begin, 0), tma.o.coordinates[None, None, hv])
    o_s, o_g = tma_split(tma.o.atom, of_warps, cute.local_tile(of_head, (16, 64), (None, None)))
    o_tiles = tile_at(smem.q, tile_layout(64, 64, 4), BF16)
    if plan.middle < end:
        ask_for_queries(of_q, bars, plan.middle, I32(0) if cutlass.const_expr(variant.parts == 1) else n, wid)
    for chunk in cutlass.range(plan.middle, end, unroll=1):
        left = plan.tokens - chunk * 64
        shown = chunk - plan.middle if cutlass.const_expr(variant.parts == 1) else n
        place = shown & 1
        cute.arch.mbarrier_wait(bars.q_full, place)
        P, f = scores_of(place, scale, mmas, smem, bars, n, thread, variant)
        if chunk + 1 < end:
            ask_for_queries(of_q, bars, chunk + 1, shown + 1, wid)
        o = [output_of(place, P, f, mmas, smem, bars, part, shown, thread, variant) for part in range(variant.parts)]
        cute.arch.mbarrier_wait(bars.q_empty, shown & 1)  # all warps have read queries, where o goes
        for part in cutlass.range_constexpr(variant.parts):
            store_tile(mmas.p_e, thread, o[part], o_tiles[None, None, 2 * place + part])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        for part in cutlass.range_constexpr(variant.parts):
            columns = items.rank + part
            if left < 64:  # TMA would write on into the next sequence
                rest = cute.domain_offset((plan.begin + 64 * chunk, 0), mO[None, None, hv])
                copy_our_rows(o_tiles[None, None, 2 * place + part], cute.local_tile(rest, (64, 64), (0, columns)), wid, left)
            else:
                cute.copy(tma.o.atom, o_s[None, 8 * place + 4 * part + wid], o_g[None, 4 * chunk + wid, columns])
                cute.arch.cp_async_bulk_commit_group()
        n += 1
    return n


@cute.jit
def ask_for_queries(of_q: cutlass.Constexpr, bars: cutlass.Constexpr, chunk: I32, shown: I32, wid: I32):
    """A warp asks for its own 16 rows, when what it wrote there of o has been read."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full, TILE_BYTES // 4)
    for columns in cutlass.range_constexpr(2):
        to = of_q.to[None, 8 * (shown & 1) + 4 * columns + wid]
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
    """(P as a left operand, f of our two rows), both scaled; from queries in one of the two stages."""
    stage, of_vectors, lane, wid = n & 3, n & 7, thread % 32, cute.arch.make_warp_uniform(thread // 32)
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
    cute.arch.mbarrier_wait(bars.k_ready + stage, (n >> 2) & 1)
    issue(mmas.q_k, acc, q[None, None, None, place], k[None, None, None, stage], False)
    for i in cutlass.range_constexpr(2):
        of_row[i] += sum_of(smem, 16 * wid + r + 8 * i, n)
    # No branches, by which warps could skip blocks above the diagonal: the compiler would have them wait for the product.
    P, rP, last = rows_and_columns(acc), cute.make_rmem_tensor_like(acc, BF16), 16 * wid + r - 2 * c
    factors = cute.make_rmem_tensor((2, 16), F32)
    if cutlass.const_expr(not variant.has_early_factors):
        warpgroup.wait_group(0)
    for block in cutlass.range_constexpr(4):
        sums, b = [read_pairs(smem.vectors, of + 16 * block, of_vectors, c, 2) for of in (SUM, STRENGTH)]
        for j in cutlass.range_constexpr(4):
            weight = b[j] * scale
            for i in cutlass.range_constexpr(2):
                factor = exp2(of_row[i] - sums[j]) * weight
                is_past = 16 * block + 8 * (j // 2) + j % 2 - 8 * i <= last
                factors[i, 4 * block + j] = factor if is_past else F32(0.0)
        if cutlass.const_expr(not variant.has_early_factors):
            weigh(P, factors, acc, rP, block)
    if cutlass.const_expr(variant.has_early_factors):
        warpgroup.wait_group(0)
        for block in cutlass.range_constexpr(4):
            weigh(P, factors, acc, rP, block)
    arrive(bars.k_empty + stage)
    for i in cutlass.range_constexpr(2):
        f[i] = exp2(of_row[i]) * scale
    return seen_as_a(rP), f


@cute.jit
def weigh(P: cute.Tensor, factors: cute.Tensor, acc: cute.Tensor, rP: cute.Tensor, block: cutlass.Constexpr):
    """Sixteen columns of P, which are registers of acc, times their factors, rounded."""
    for j in cutlass.range_constexpr(4 * block, 4 * block + 4):
        for i in cutlass.range_constexpr(2):
            P[i, j] = P[i, j] * factors[i, j]
    flat(rP, 8 * block, 8).store(flat(acc, 8 * block, 8).load().to(BF16))


@cute.jit
def output_of(
    place: I32,
    P: cute.Tensor,
    f: cute.Tensor,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    part: cutlass.Constexpr,
    shown: I32,
    thread: I32,
    variant: cutlass.Constexpr,
):
    """o of one part of the state, rounded."""
    thr_q, thr_p = mmas.q_s.get_slice(thread), mmas.p_e.get_slice(thread)
    q, acc = thr_q.make_fragment_A(thr_q.partition_A(smem.q)), thr_q.make_fragment_C(thr_q.partition_shape_C((64, 64)))
    S = thr_q.make_fragment_B(thr_q.partition_B(smem.S))
    E, O = thr_p.make_fragment_B(thr_p.partition_B(smem.E)), rows_and_columns(acc)
    cute.arch.mbarrier_wait(bars.s_full + part, shown & 1)
    issue(mmas.q_s, acc, q[None, None, None, place], S[None, None, None, part], False)
    warpgroup.wait_group(0)
    arrive(bars.s_empty + part)
    if cutlass.const_expr(part == variant.parts - 1):
        arrive(bars.q_empty)
    for j in cutlass.range_constexpr(16):
        for i in cutlass.range_constexpr(2):
            O[i, j] = O[i, j] * f[i]
    cute.arch.mbarrier_wait(bars.e_full + part, shown & 1)
    issue(mmas.p_e, acc, P, E[None, None, None, part], True)
    warpgroup.wait_group(0)
    out = rounded(acc)
    arrive(bars.e_empty + part)
    return out
