# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Blackwell, the four warps that issue what runs by itself: loads and products. See `gdn.py`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.gdn_items import whole_plan
from cula.ops.cute.common.tiles import I32, swapped, tma_split
from cula.ops.cute.gdn_abi import TILE_BYTES

from .gdn_smem import Column, Turn, keys_of, queries_of
from .tmem import accumulator, after_sync, commit, issue, operand_a


@cute.jit
def load_keys(x: cutlass.Constexpr):
    """A warp: k and q of every chunk, by halves of 64 channels."""
    tma, items, bars, halves = x.tma, x.items, x.bars, x.storage.halves
    n = I32(0)
    for item in cutlass.range(items.first, items.total, items.step, unroll=1):
        plan = whole_plan(items, item)
        of_head = plan.hv // items.group
        k_s, k_g = tma_split(tma.k.atom, halves, halves_of(tma.k.coordinates, of_head, plan.begin))
        q_s, q_g = tma_split(tma.q.atom, halves, halves_of(tma.q.coordinates, of_head, plan.begin))
        for chunk in cutlass.range(plan.end, unroll=1):
            now = Turn(n)
            s, bar = now.stage, bars.full + now.stage
            cute.arch.mbarrier_wait(bars.empty + s, now.of_stage ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, 2 * TILE_BYTES)
            for half in cutlass.range_constexpr(2):
                cute.copy(tma.k.atom, k_g[None, chunk, half], k_s[None, 4 * s + 2 * half], tma_bar_ptr=bar)
                cute.copy(tma.q.atom, q_g[None, chunk, half], q_s[None, 4 * s + 2 * half + 1], tma_bar_ptr=bar)
            n += 1


def halves_of(t, head, begin):
    """The chunks of one head of [T, 128, heads], from a token on, by halves of its channels: [64, 64, chunk, half]."""
    return cute.local_tile(cute.domain_offset((begin, 0), t[None, None, head]), (64, 64), (None, None))


@cute.jit
def load_values(x: cutlass.Constexpr):
    """A warp: v of every chunk. Apart from k and q, which are wanted two chunks earlier."""
    tma, items, bars, sV = x.tma, x.items, x.bars, x.storage.v
    n = I32(0)
    for item in cutlass.range(items.first, items.total, items.step, unroll=1):
        plan = whole_plan(items, item)
        of_head = cute.domain_offset((plan.begin, 0), tma.v.coordinates[None, None, plan.hv])
        v_s, v_g = tma_split(tma.v.atom, sV, cute.local_tile(of_head, (64, 128), (None, 0)))
        for chunk in cutlass.range(plan.end, unroll=1):
            now = Turn(n)
            bar = bars.v_full + now.place
            cute.arch.mbarrier_wait(bars.v_empty + now.place, now.of_place ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, TILE_BYTES)
            cute.copy(tma.v.atom, v_g[None, chunk], v_s[None, now.place], tma_bar_ptr=bar)
            n += 1


@cute.jit
def scores_role(x: cutlass.Constexpr):
    """A warp: [k; q] k^T of every chunk, as soon as they are operands. Not the chain's warp, which waits for other things."""
    mma, items, bars, kq = x.mmas.scores, x.items, x.bars, x.storage.kq
    thr, acc = mma.get_slice(0), accumulator(mma, x.tmem + Column.SCORES, 64)
    a = mma.make_fragment_A(thr.partition_A(kq))
    b = mma.make_fragment_B(thr.partition_B(keys_of(kq)))
    n = I32(0)
    for item in cutlass.range(items.first, items.total, items.step, unroll=1):
        for _ in cutlass.range(whole_plan(items, item).end, unroll=1):
            now = Turn(n)
            s = now.stage
            cute.arch.mbarrier_wait(bars.ready + s, now.of_stage)
            cute.arch.mbarrier_wait(bars.a_free, now.parity ^ 1)
            after_sync()
            issue(mma, acc, a[None, None, None, s], b[None, None, None, s], False)
            commit(bars.a_done + now.place)
            n += 1


@cute.jit
def mma_role(x: cutlass.Constexpr):
    """A warp: every product of the chain and of the output, each when its operands are there."""
    _, mma_x, mma_t, mma_s, _ = x.mmas
    items, bars, storage, tmem, dtype = x.items, x.bars, x.storage, x.tmem, x.dtype
    thr_x, thr_t, thr_s = mma_x.get_slice(0), mma_t.get_slice(0), mma_s.get_slice(0)
    accS, accE = accumulator(mma_s, tmem + Column.S, 128), accumulator(mma_t, tmem + Column.E, 64)
    accR, inter, intra = [accumulator(mma_x, tmem + at, 64) for at in (Column.R, Column.INTER, Column.INTRA)]
    aS, aE = operand_a(mma_x, tmem + Column.S16, 128, dtype), operand_a(mma_x, tmem + Column.E16, 64, dtype)
    aY, aW = operand_a(mma_t, tmem + Column.Y16, 64, dtype), operand_a(mma_s, tmem + Column.W16, 64, dtype)
    bK = mma_x.make_fragment_B(thr_x.partition_B(keys_of(storage.kq)))  # [N = token, K = dk]
    bQ = mma_x.make_fragment_B(thr_x.partition_B(queries_of(storage.kq)))
    bP = mma_x.make_fragment_B(thr_x.partition_B(storage.P))  # [N = t, K = i]
    bT = mma_t.make_fragment_B(thr_t.partition_B(swapped(storage.T)))  # [N = t, K = i], stored [i, t]
    bK_s = mma_s.make_fragment_B(thr_s.partition_B(swapped(keys_of(storage.kq))))  # [N = dk, K = token]
    n = I32(0)
    for item in cutlass.range(items.first, items.total, items.step, unroll=1):
        for _ in cutlass.range(whole_plan(items, item).end, unroll=1):
            now = Turn(n)
            s, place = now.stage, now.place
            cute.arch.mbarrier_wait(bars.ready + s, now.of_stage)
            cute.arch.mbarrier_wait(bars.s_ready + place, now.of_place)
            after_sync()
            issue(mma_x, accR, aS, bK[None, None, None, s], False)
            commit(bars.r_done)
            cute.arch.mbarrier_wait(bars.o_free, now.parity ^ 1)  # so P E has been multiplied: E may be written over
            after_sync()
            issue(mma_x, inter, aS, bQ[None, None, None, s], False)
            cute.arch.mbarrier_wait(bars.t_ready + place, now.of_place)
            cute.arch.mbarrier_wait(bars.y_ready, now.parity)
            after_sync()
            issue(mma_t, accE, aY, bT[None, None, None, place], False)
            commit(bars.e_done)
            cute.arch.mbarrier_wait(bars.w_ready, now.parity)
            after_sync()
            issue(mma_s, accS, aW, bK_s[None, None, None, s], True)
            commit(bars.s_done)
            cute.arch.mbarrier_wait(bars.e_ready, now.parity)
            after_sync()
            issue(mma_x, intra, aE, bP[None, None, None, place], False)
            commit(bars.o_done + place)
            n += 1
