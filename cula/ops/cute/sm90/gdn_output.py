# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper, the output's role: a warpgroup that hangs off the chain of states. See `gdn.py`.

    P[t, i] = q_t . k_i 2^(G_t - G_i) b_i, i <= t        o = scale (f (q S) + P E)

P is a left operand in registers, and so are queries that are normalised here; others are one where they lie. S and E come from
shared memory. Each warp brings 16 rows of queries in and takes the same rows of o out, through the same memory: so the warps
need not meet.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cula.ops.cute.common.barriers import arrive
from cula.ops.cute.common.fragments import flat, lane_address, load_matrix, shared_at, widen
from cula.ops.cute.common.gate import exp2, inverse_norm
from cula.ops.cute.common.gdn_items import whole_plan
from cula.ops.cute.common.gdn_vectors import STRENGTH, SUM, read_pairs
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
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

from .gdn_prepare import HALF
from .gdn_segments import begin_map, share_map
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
            w = make_walker(mmas, smem, I32(0), scale)
            n = make_map(w, items.rank, plan, smem, bars, variant.dtype)
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
def make_map(
    w: cutlass.Constexpr,
    rank: I32,
    plan: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Our rows of M, what the chunks without output make of the identity; returns how many they are."""
    begin_map(w, rank, bars)
    n = I32(0)
    for _ in cutlass.range(plan.start, plan.middle, unroll=1):
        state_step(w, smem, bars, n, None, I32(64), False, dtype)
        n += 1
    share_map(w, rank, smem, bars, dtype)
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
    """The chunks with output of a plan; n were before them, returns how many then."""
    thread, wid = cute.arch.thread_idx()[0] % 128, cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
    hv, end = plan.hv, plan.end
    of_warps = tile_at(smem.q, tile_layout(16, 64, 16), BF16)
    of_head = cute.domain_offset((plan.begin, 0), tma.q.coordinates[None, None, hv // items.group])
    of_q = copy_of(tma.q, of_warps, cute.local_tile(of_head, (16, 64), (None, None)))
    of_head = cute.domain_offset((plan.begin, 0), tma.o.coordinates[None, None, hv])
    o_s, o_g = tma_split(tma.o.atom, of_warps, cute.local_tile(of_head, (16, 64), (None, None)))
    o_rows = cute.local_tile(cute.domain_offset((plan.begin, 0), mO[None, None, hv]), (64, 64), (None, None))
    o_tiles = tile_at(smem.q, tile_layout(64, 64, 4), BF16)
    if plan.middle < end:
        ask_for_queries(of_q, bars, plan.middle, I32(0) if cutlass.const_expr(variant.parts == 1) else n, wid)
    for chunk in cutlass.range(plan.middle, end, unroll=1):
        left = plan.tokens - chunk * 64
        shown = chunk - plan.middle if cutlass.const_expr(variant.parts == 1) else n
        place = shown & 1
        cute.arch.mbarrier_wait(bars.q_full, place)
        q = queries(mmas, smem, place, thread, wid, variant)
        P, f = scores_of(q, scale, mmas, smem, bars, n, thread, variant)
        if chunk + 1 < end:
            ask_for_queries(of_q, bars, chunk + 1, shown + 1, wid)
        for which in cutlass.range_constexpr(variant.outputs):
            o = output_of(q, P, f, mmas, smem, bars, which, shown, thread, variant)
            store_tile(mmas.p_e, thread, o, tile_of(smem.q, place, which, variant))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        for part in cutlass.range_constexpr(variant.parts):
            columns = items.rank + part
            if left < 64:  # TMA would write on into the next sequence
                copy_our_rows(o_tiles[None, None, 2 * place + part], o_rows[None, None, chunk, columns], wid, left)
            else:
                cute.copy(tma.o.atom, o_s[None, 8 * place + 4 * part + wid], o_g[None, 4 * chunk + wid, columns])
                cute.arch.cp_async_bulk_commit_group()
        n += 1
    return n


def tile_of(q: Any, place: Any, which: Any, variant: Any) -> Any:
    """Where o goes that one product makes: queries lay there."""
    if variant.outputs == variant.parts:
        return tile_at(q, tile_layout(64, 64, 4), BF16)[None, None, 2 * place + which]
    return q[None, None, place]


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
def queries(mmas: cutlass.Constexpr, smem: cutlass.Constexpr, place: I32, thread: I32, wid: I32, variant: cutlass.Constexpr):
    """As a left operand: where they lie, or normalised in registers."""
    if cutlass.const_expr(variant.is_normalised):
        return load_queries(smem.q[None, None, place], wid)
    thr = mmas.q_k.get_slice(thread)
    return thr.make_fragment_A(thr.partition_A(smem.q))[None, None, None, place]


@cute.jit
def load_queries(tile: cute.Tensor, wid: I32):
    """Our 16 rows in registers, [.., 8 steps of 16 channels], normalised, in fp16."""
    at = lane_address(tile, wid, cute.arch.lane_idx())
    raw, out = [cute.make_rmem_tensor((64,), dtype) for dtype in (BF16, F16)]
    for s in cutlass.range_constexpr(8):
        flat(raw, 8 * s, 8).store(load_matrix((at ^ 32 * (s % 4)) + HALF * (s // 4), BF16).load())
    sums, wide, inverse = [cute.make_rmem_tensor((n,), F32) for n in (4, 8, 2)]
    sums.fill(0.0)
    for s in cutlass.range_constexpr(8):
        widen(flat(raw, 8 * s, 8), wide)
        for e in cutlass.range_constexpr(8):  # row e / 2 % 2 of our two
            sums[e % 4] += wide[e] * wide[e]
    for i in cutlass.range_constexpr(2):
        total = sums[2 * i] + sums[2 * i + 1]
        for off in (1, 2):
            total += cute.arch.shuffle_sync_bfly(total, offset=off)
        inverse[i] = inverse_norm(total)
    for s in cutlass.range_constexpr(8):
        widen(flat(raw, 8 * s, 8), wide)
        for e in cutlass.range_constexpr(8):
            wide[e] = wide[e] * inverse[e // 2 % 2]
        flat(out, 8 * s, 8).store(wide.load().to(F16))
    return cute.make_tensor(out.iterator, cute.make_layout(((2, 2, 2), 1, 8), stride=((1, 2, 4), 0, 8)))


@cute.jit
def scores_of(
    q: cute.Tensor,
    scale: F32,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    n: I32,
    thread: I32,
    variant: cutlass.Constexpr,
):
    """(P as a left operand, f of our two rows). In bf16 both are scaled."""
    stage, of_vectors, lane, wid = n & 3, n & 7, thread % 32, cute.arch.make_warp_uniform(thread // 32)
    r, c = lane // 4, lane % 4
    thr = mmas.q_k.get_slice(thread)
    acc = thr.make_fragment_C(thr.partition_shape_C((64, 64)))
    k = thr.make_fragment_B(thr.partition_B(smem.k))
    cute.arch.mbarrier_wait(bars.k_ready + stage, (n >> 2) & 1)
    issue(mmas.q_k, acc, q, k[None, None, None, stage], False)
    of_row, f = cute.make_rmem_tensor((2,), F32), cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        of_row[i] = smem.vectors[SUM + 16 * wid + r + 8 * i, of_vectors]
        f[i] = exp2(of_row[i])
        if cutlass.const_expr(not variant.is_normalised):
            f[i] = f[i] * scale
    # No branches, by which warps could skip blocks above the diagonal: the compiler would have them wait for the product.
    P, factors, last = rows_and_columns(acc), cute.make_rmem_tensor((2, 16), F32), 16 * wid + r - 2 * c
    for block in cutlass.range_constexpr(4):
        if cutlass.const_expr(block == variant.early_factors):
            warpgroup.wait_group(0)
        sums, b = [read_pairs(smem.vectors, which + 16 * block, of_vectors, c, 2) for which in (SUM, STRENGTH)]
        for j in cutlass.range_constexpr(4):
            weight = b[j] if cutlass.const_expr(variant.is_normalised) else b[j] * scale
            for i in cutlass.range_constexpr(2):
                factor = exp2(of_row[i] - sums[j]) * weight
                is_past = 16 * block + 8 * (j // 2) + j % 2 - 8 * i <= last
                factors[i, 4 * block + j] = factor if is_past else F32(0.0)
    if cutlass.const_expr(variant.early_factors == 4):
        warpgroup.wait_group(0)
    for j in cutlass.range_constexpr(16):
        for i in cutlass.range_constexpr(2):
            P[i, j] = P[i, j] * factors[i, j]
    rP = rounded(acc, variant.dtype)
    arrive(bars.k_empty + stage)
    return seen_as_a(rP), f


@cute.jit
def output_of(
    q: cute.Tensor,
    P: cute.Tensor,
    f: cute.Tensor,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    which: cutlass.Constexpr,
    shown: I32,
    thread: I32,
    variant: cutlass.Constexpr,
):
    """o of one part of the state or, where queries are in no registers, of all; rounded."""
    parts = range(variant.parts) if cutlass.const_expr(variant.outputs == 1) else (which,)
    width, place = 64 * len(parts), which if cutlass.const_expr(variant.outputs > 1) else 0
    all_S = tile_at(smem.S, tile_layout(64 * variant.parts, 128, None, variant.dtype), variant.dtype)
    all_E = tile_at(smem.E, tile_layout(64 * variant.parts, 64, None, variant.dtype), variant.dtype)
    thr = mmas.p_e.get_slice(thread)
    acc = thr.make_fragment_C(thr.partition_shape_C((64, width)))
    S, E = [thr.make_fragment_B(thr.partition_B(cute.local_tile(x, (width, x.shape[1]), (place, 0)))) for x in (all_S, all_E)]
    O = rows_and_columns(acc)
    for part in parts:
        cute.arch.mbarrier_wait(bars.s_full + part, shown & 1)
    issue(mmas.q_s, acc, q, S, False)
    warpgroup.wait_group(0)
    for part in parts:
        arrive(bars.s_empty + part)
    if cutlass.const_expr(not variant.is_normalised):
        arrive(bars.q_empty)
    for j in cutlass.range_constexpr(width // 4):
        for i in cutlass.range_constexpr(2):
            O[i, j] = O[i, j] * f[i]
    for part in parts:
        cute.arch.mbarrier_wait(bars.e_full + part, shown & 1)
    issue(mmas.p_e, acc, P, E, True)
    if cutlass.const_expr(variant.is_normalised):
        unit = read_units(smem.unit, which, thread % 4)
        warpgroup.wait_group(0)
        for j in cutlass.range_constexpr(16):
            for i in cutlass.range_constexpr(2):
                O[i, j] = O[i, j] * unit[j]
    else:
        warpgroup.wait_group(0)
    out = rounded(acc)
    for part in parts:
        arrive(bars.e_empty + part)
    if cutlass.const_expr(not variant.is_normalised):
        cute.arch.mbarrier_wait(bars.q_empty, shown & 1)  # all warps have read queries, where o goes
    return out


@cute.jit
def read_units(units: cute.Tensor, part: cutlass.Constexpr, c: I32):
    """What our columns, 8 j + 2 c and + 1, are to be multiplied by."""
    out = cute.make_rmem_tensor((16,), F32)
    at = I32(units.iterator.toint()) + 4 * (64 * part + 2 * c)
    for j in cutlass.range_constexpr(8):
        cute.autovec_copy(shared_at(at + 32 * j, F32, 2, 8), cute.make_tensor(out.iterator + 2 * j, cute.make_layout((2, 1))))
    return out
