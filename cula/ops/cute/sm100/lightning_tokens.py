# SPDX-License-Identifier: Apache-2.0
"""Lightning on Blackwell, scores and outputs: a thread has one token of a chunk.

Never run on a GPU: see `lightning.py`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.lightning_items import item_at, num_items, power
from cula.ops.cute.common.tiles import BF16, F32, I32, tma_split

from .lightning_smem import Barrier, C, Column
from .rows import put_row, rounded, row_of
from .tmem import PIECE, after_sync, before_sync, row_load, row_stores, stored


def chunks_of(t: Any, head: Any, start: Any) -> Any:
    """The chunks of one head of [T, D, heads], from a token on: [C, D, chunk]."""
    return cute.local_tile(cute.domain_offset((start, 0), t[None, None, head]), (C, t.shape[1]), (None, 0))


@cute.jit
def scores_role(x: cutlass.Constexpr, thread: I32):
    """A warpgroup: P of each chunk, decayed and in bf16."""
    work, bars = x.work, x.bars
    it = I32(0)
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(first, num_items(work), step, unroll=1):
        item = item_at(work, index, I32(0))
        near, far = lag_factors(item.decay, x.scale, thread % 32)
        for _ in cutlass.range((item.tokens + C - 1) // C, unroll=1):
            cute.arch.mbarrier_wait(bars.p_done, it % 2)
            after_sync()
            decay_scores(x, thread, item.decay, near, far)
            stored()
            before_sync()
            cute.arch.mbarrier_arrive(bars.p_ready)
            it += 1


@cute.jit
def lag_factors(decay: F32, scale: F32, lane: I32):
    """Of 32 columns j: scale f^(lane-j), and scale f^(31-j)."""
    near, far = cute.make_rmem_tensor((PIECE,), F32), cute.make_rmem_tensor((PIECE,), F32)
    for j in cutlass.range_constexpr(PIECE):
        near[j] = power(decay, cutlass.max(lane - j, 0)) * scale
        far[j] = power(decay, I32(PIECE - 1 - j)) * scale
    return near, far


@cute.jit
def decay_scores(x: cutlass.Constexpr, thread: I32, decay: F32, near: cute.Tensor, far: cute.Tensor):
    """q k^T -> P, in bf16, over the columns that have been read. A warp has the diagonal in one of the blocks of 32 columns;
    what is right of it is zero, whatever the product is: k may be another sequence's there."""
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    for b in cutlass.range_constexpr(C // PIECE):
        P, P16 = cute.make_rmem_tensor((PIECE,), F32), cute.make_rmem_tensor((PIECE,), BF16)
        P16.fill(0.0)
        if b <= warp:
            row_load(x.mmas.p, x.tmem + (Column.P + PIECE * b), PIECE, thread)(P)
            if b == warp:
                for j in cutlass.range_constexpr(PIECE):
                    P[j] = P[j] * near[j] if j <= lane else F32(0.0)
            else:
                P.store(P.load() * far.load() * power(decay, thread - (PIECE * b + PIECE - 1)))
            P16.store(P.load().to(BF16))
        row_stores(x.mmas.p, x.tmem + (Column.P + PIECE // 2 * b), PIECE // 2, thread, PIECE // 2)[0](P16)


@cute.jit
def output_role(x: cutlass.Constexpr, thread: I32):
    """A warpgroup: o of each chunk, of which one warp issues the TMA stores. It takes the place of q in the ring."""
    work, tma, sQ, bars, cfg = x.work, x.tma, x.storage.sQ, x.bars, x.cfg
    together = NamedBarrier(barrier_id=Barrier.OUTPUT, num_threads=128)
    is_storing = cute.arch.make_warp_uniform(thread // 32) == 0
    stages, it = cfg.depth, I32(0)
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(first, num_items(work), step, unroll=1):
        item = item_at(work, index, I32(0))
        at = item.begin + item.start
        o_s, o_g = tma_split(tma.o.atom, sQ, chunks_of(tma.o.coordinates, item.head, at))
        o_rows = chunks_of(x.mO, item.head, at)
        factor = power(item.decay, thread + 1) * x.scale
        for chunk in cutlass.range((item.tokens + C - 1) // C, unroll=1):
            s, n = it % stages, cutlass.min(item.tokens - chunk * C, C)
            cute.arch.mbarrier_wait(bars.o_done, it % 2)
            after_sync()
            add_up(x, thread, s, factor)
            before_sync()
            cute.arch.mbarrier_arrive(bars.o_free)
            cute.arch.fence_proxy("async.shared", space="cta")
            together.arrive_and_wait()
            if n == C:
                if is_storing:
                    cute.copy(tma.o.atom, o_s[None, s], o_g[None, chunk])
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            else:
                copy_rows(sQ[None, None, s], o_rows[None, None, chunk], n, thread)
            cute.arch.mbarrier_arrive(bars.empty + s)
            it += 1
    if is_storing:
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def add_up(x: cutlass.Constexpr, thread: I32, s: I32, factor: F32):
    """o = factor q S^T + P v, in bf16, to the stage's q."""
    for p in cutlass.range_constexpr(x.cfg.V // PIECE):
        inter, intra = [cute.make_rmem_tensor((PIECE,), F32) for _ in range(2)]
        row_load(x.mmas.p, x.tmem + (Column.INTER + PIECE * p), PIECE, thread, waits=False)(inter)
        row_load(x.mmas.p, x.tmem + (Column.INTRA + PIECE * p), PIECE, thread)(intra)
        inter.store(inter.load() * factor + intra.load())
        put_row(row_of(x.storage.sQ, s, thread)[4 * p : 4 * p + 4], rounded(inter, BF16))


@cute.jit
def copy_rows(tile: cute.Tensor, rows: cute.Tensor, n: I32, thread: I32):
    """The first n rows of a tile to global memory, by 128 threads."""
    per_row = cute.size(tile, mode=[1]) // 8
    for p in cutlass.range(C * per_row // 128, unroll=1):
        row, at = (128 * p + thread) // per_row, (128 * p + thread) % per_row
        if row < n:
            cute.autovec_copy(cute.local_tile(tile, (1, 8), (row, at)), cute.local_tile(rows, (1, 8), (row, at)))
