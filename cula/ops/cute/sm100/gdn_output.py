# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Blackwell, the output's role: a warpgroup that hangs off the chain of states. See `gdn.py`.

    o = scale (f (q S) + P E)

Both products are in tensor memory, transposed: a thread has one channel of all tokens. It writes o over the queries of the chunk,
which nobody needs any more, and TMA takes it from there.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.barriers import arrive
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.gdn_items import whole_plan
from cula.ops.cute.common.gdn_vectors import POWER, read_vector
from cula.ops.cute.common.tiles import BF16, F32, I32, tma_split

from .gdn_issue import halves_of
from .gdn_smem import Barrier, Column, Q, Turn, queries_of
from .rows import address_of_column, afresh, entry_at, times, times_plus
from .tmem import PIECE, after_sync, before_sync, row_load


@cute.jit
def output_role(x: cutlass.Constexpr, thread: I32):
    """A warpgroup: o of each chunk, of which one warp issues the TMA stores."""
    tma, items, bars, storage = x.tma, x.items, x.bars, x.storage
    together = NamedBarrier(barrier_id=Barrier.OUTPUT, num_threads=128)
    n = I32(0)
    for item in cutlass.range(items.first, items.total, items.step, unroll=1):
        plan = whole_plan(items, item)
        o_s, o_g = tma_split(tma.o.atom, storage.halves, halves_of(tma.o.coordinates, plan.hv, plan.begin))
        of_head = cute.domain_offset((plan.begin, 0), x.mO[None, None, plan.hv])
        o_rows = cute.local_tile(of_head, (64, 128), (None, 0))
        for chunk in cutlass.range(plan.end, unroll=1):
            s, left = Turn(n).stage, plan.tokens - chunk * 64
            o = add_up(x, thread, n)
            put_column(storage.raw, s, thread, o)
            cute.arch.fence_proxy("async.shared", space="cta")
            together.arrive_and_wait()
            if left < 64:  # TMA would write on into the next sequence
                copy_rows(queries_of(storage.raw)[None, None, s], o_rows[None, None, chunk], afresh(thread), left)
            elif is_first_warp(thread):
                for half in cutlass.range_constexpr(2):
                    cute.copy(tma.o.atom, o_s[None, 4 * s + 2 * half + 1], o_g[None, chunk, half])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            arrive(bars.empty + s)
            n += 1
    if is_first_warp(thread):
        cute.arch.cp_async_bulk_wait_group(0)


def is_first_warp(thread):
    """That which issues the TMA stores; found out each time, which takes no register in between."""
    return cute.arch.make_warp_uniform(thread // 32) == 0


@cute.jit
def add_up(x: cutlass.Constexpr, thread: I32, n: I32):
    """Our channel of o, [64], rounded."""
    bars, now, o = x.bars, Turn(n), cute.make_rmem_tensor((64,), BF16)
    cute.arch.mbarrier_wait(bars.ready + now.stage, now.of_stage)  # long over, as the next: they show what has been written
    cute.arch.mbarrier_wait(bars.s_ready + now.place, now.of_place)
    unit = x.storage.unit[thread, now.place]
    cute.arch.mbarrier_wait(bars.o_done + now.place, now.of_place)
    after_sync()
    for at in cutlass.range_constexpr(0, 64, PIECE):
        inter, intra = [cute.make_rmem_tensor((PIECE,), F32) for _ in range(2)]
        row_load(x.mmas.x, x.tmem + (Column.INTER + at), PIECE, thread, waits=False)(inter)
        row_load(x.mmas.x, x.tmem + (Column.INTRA + at), PIECE, thread)(intra)
        times_plus(inter, read_vector(x.storage.vectors, POWER + at, now.vectors, PIECE), intra)
        times(inter, unit)
        flat(o, at, PIECE).store(inter.load().to(BF16))
    before_sync()
    arrive(bars.o_free)
    return o


@cute.jit
def put_column(raw: cute.Tensor, stage: I32, thread: I32, o: cute.Tensor):
    """Our channel to the place of the queries."""
    of_column = address_of_column(raw, stage, thread)
    for t in cutlass.range_constexpr(64):
        entry_at(of_column, Q + t, BF16)[0] = o[t]


@cute.jit
def copy_rows(tile: cute.Tensor, rows: cute.Tensor, thread: I32, left: I32):
    """The first rows of a tile to global memory, by 128 threads."""
    for p in cutlass.range(8, unroll=1):
        row = p * 8 + thread // 16
        if row < left:
            cute.autovec_copy(
                cute.local_tile(tile, (1, 8), (row, thread % 16)), cute.local_tile(rows, (1, 8), (row, thread % 16))
            )
