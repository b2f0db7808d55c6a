# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper, the output's role: a warpgroup that hangs off the chain of states. See `gdn.py`.

    P[t, i] = q_t . k_i 2^(G_t - G_i) b_i, i <= t        o = scale (f (q S) + P E)

Queries and P are left operands in registers; S and E come from shared memory, 64 columns dv at a time.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.barriers import arrive
from cula.ops.cute.common.fragments import flat, lane_address, load_matrix, shared_at, widen
from cula.ops.cute.common.gate import exp2, inverse_norm
from cula.ops.cute.common.gdn_items import whole_plan
from cula.ops.cute.common.gdn_vectors import STRENGTH, SUM, read_pairs
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, issue, rounded, rows_and_columns, seen_as_a, tma_split
from cula.ops.cute.gdn_abi import TILE_BYTES
from cula.ops.cute.sm90.kda_recurrence_steps import copy_of, copy_rows, copy_tile

from .gdn_prepare import HALF
from .gdn_segments import begin_map, share_map
from .gdn_smem import Barrier
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
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3 == 0:
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
    of_head = cute.domain_offset((plan.begin, 0), tma.q.coordinates[None, None, hv // items.group])
    of_q = copy_of(tma.q, smem.q, cute.local_tile(of_head, (64, 128), (None, 0)))
    o_tiles, o_rows = [
        cute.local_tile(cute.domain_offset((plan.begin, 0), t[None, None, hv]), (64, 64), (None, None))
        for t in (tma.o.coordinates, mO)
    ]
    if wid == 0 and plan.middle < end:
        ask_for_queries(of_q, bars, plan.middle)
    for chunk in cutlass.range(plan.middle, end, unroll=1):
        left = plan.tokens - chunk * 64
        shown = chunk - plan.middle if cutlass.const_expr(variant.parts == 1) else n
        cute.arch.mbarrier_wait(bars.q_full, shown & 1)
        q = load_queries(smem.q[None, None, 0], wid, variant)
        P, f = scores_of(q, mmas, smem, bars, n, thread)
        if wid == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        everyone().arrive_and_wait()  # queries have been read, and there is room for o
        if wid == 0 and chunk + 1 < end:
            ask_for_queries(of_q, bars, chunk + 1)
        for part in cutlass.range_constexpr(variant.parts):
            o = output_of(q, P, f, scale, mmas, smem, bars, part, shown, thread, variant.dtype)
            store_tile(mmas.x, thread, o, smem.o[None, None, part])
            cute.arch.fence_proxy("async.shared", space="cta")
            everyone().arrive_and_wait()
            columns = items.rank + part
            if left < 64:  # TMA would write on into the next sequence
                copy_rows(smem.o[None, None, part], o_rows[None, None, chunk, columns], thread, left)
            elif wid == 0:
                o_s, o_g = tma_split(tma.o.atom, smem.o, o_tiles[None, None, None, columns])
                cute.copy(tma.o.atom, o_s[None, part], o_g[None, chunk])
                cute.arch.cp_async_bulk_commit_group()
        n += 1
    return n


def everyone() -> NamedBarrier:
    return NamedBarrier(barrier_id=Barrier.OUTPUT, num_threads=128)


@cute.jit
def ask_for_queries(of_q: cutlass.Constexpr, bars: cutlass.Constexpr, chunk: I32):
    """By a warp, when all have read those before."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full, TILE_BYTES)
    copy_tile(of_q, chunk, 0, bars.q_full)


@cute.jit
def load_queries(tile: cute.Tensor, wid: I32, variant: cutlass.Constexpr):
    """Our 16 rows as a left operand, [.., 8 steps of 16 channels], normalised where that is to be done here."""
    at = lane_address(tile, wid, cute.arch.lane_idx())
    raw = cute.make_rmem_tensor((64,), BF16)
    out = cute.make_rmem_tensor((64,), variant.dtype) if cutlass.const_expr(variant.is_normalised) else raw
    for s in cutlass.range_constexpr(8):
        flat(raw, 8 * s, 8).store(load_matrix((at ^ 32 * (s % 4)) + HALF * (s // 4), BF16).load())
    if cutlass.const_expr(variant.is_normalised):
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
            flat(out, 8 * s, 8).store(wide.load().to(variant.dtype))
    return cute.make_tensor(out.iterator, cute.make_layout(((2, 2, 2), 1, 8), stride=((1, 2, 4), 0, 8)))


@cute.jit
def scores_of(q: cute.Tensor, mmas: cutlass.Constexpr, smem: cutlass.Constexpr, bars: cutlass.Constexpr, n: I32, thread: I32):
    """(P as a left operand, f of our two rows)."""
    stage, of_vectors, lane, wid = n & 3, n & 7, thread % 32, cute.arch.make_warp_uniform(thread // 32)
    r, c = lane // 4, lane % 4
    thr = mmas.x.get_slice(thread)
    acc = thr.make_fragment_C(thr.partition_shape_C((64, 64)))
    k = thr.make_fragment_B(thr.partition_B(smem.k))
    cute.arch.mbarrier_wait(bars.k_ready + stage, (n >> 2) & 1)
    issue(mmas.x, acc, q, k[None, None, None, stage], False)
    of_row, f = cute.make_rmem_tensor((2,), F32), cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        of_row[i] = smem.vectors[SUM + 16 * wid + r + 8 * i, of_vectors]
        f[i] = exp2(of_row[i])
    warpgroup.wait_group(0)
    P = rows_and_columns(acc)
    for block in cutlass.range_constexpr(4):
        if block <= wid:
            sums, b = [read_pairs(smem.vectors, which + 16 * block, of_vectors, c, 2) for which in (SUM, STRENGTH)]
            for j in cutlass.range_constexpr(4):
                for i in cutlass.range_constexpr(2):
                    P[i, 4 * block + j] = P[i, 4 * block + j] * (exp2(of_row[i] - sums[j]) * b[j])
        if block >= wid:
            for j in cutlass.range_constexpr(4 * block, 4 * block + 4):
                for i in cutlass.range_constexpr(2):
                    is_past = 8 * (j // 2) + 2 * c + j % 2 <= 16 * wid + r + 8 * i
                    P[i, j] = P[i, j] if is_past else F32(0.0)
    rP = rounded(acc, smem.k.element_type)
    arrive(bars.k_empty + stage)
    return seen_as_a(rP), f


@cute.jit
def output_of(
    q: cute.Tensor,
    P: cute.Tensor,
    f: cute.Tensor,
    scale: F32,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    part: cutlass.Constexpr,
    shown: I32,
    thread: I32,
    dtype: cutlass.Constexpr,
):
    """64 columns of o, rounded."""
    thr = mmas.x.get_slice(thread)
    acc = thr.make_fragment_C(thr.partition_shape_C((64, 64)))
    S, E = thr.make_fragment_B(thr.partition_B(smem.S)), thr.make_fragment_B(thr.partition_B(smem.E))
    O = rows_and_columns(acc)
    cute.arch.mbarrier_wait(bars.s_full + part, shown & 1)
    issue(mmas.x, acc, q, S[None, None, None, part], False)
    warpgroup.wait_group(0)
    arrive(bars.s_empty + part)
    for j in cutlass.range_constexpr(16):
        for i in cutlass.range_constexpr(2):
            O[i, j] = O[i, j] * f[i]
    cute.arch.mbarrier_wait(bars.e_full + part, shown & 1)
    issue(mmas.x, acc, P, E[None, None, None, part], True)
    if cutlass.const_expr(dtype is F16):
        unit = read_units(smem.unit, part, thread % 4)
        warpgroup.wait_group(0)
        for j in cutlass.range_constexpr(16):
            for i in cutlass.range_constexpr(2):
                O[i, j] = O[i, j] * unit[j]
    else:
        warpgroup.wait_group(0)
        acc.store(acc.load() * scale)
    out = rounded(acc)
    arrive(bars.e_empty + part)
    return out


@cute.jit
def read_units(units: cute.Tensor, part: cutlass.Constexpr, c: I32):
    """What our columns, 8 j + 2 c and + 1, are to be multiplied by."""
    out = cute.make_rmem_tensor((16,), F32)
    at = I32(units.iterator.toint()) + 4 * (64 * part + 2 * c)
    for j in cutlass.range_constexpr(8):
        cute.autovec_copy(shared_at(at + 32 * j, F32, 2, 8), cute.make_tensor(out.iterator + 2 * j, cute.make_layout((2, 1))))
    return out
