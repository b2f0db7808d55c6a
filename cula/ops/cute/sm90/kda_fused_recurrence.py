# SPDX-License-Identifier: Apache-2.0
"""The fused KDA kernel, the recurrence role: a warpgroup with 64 rows dv of the state passes over all chunks of a head.

How soon it is done with a stage decides how fast chunks pass. So it is T that has b, not kb: U = (T b) (v - S kb^T). When a chunk
comes, v and -S are in their places and the first product begins at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.states import address_of, first_kept, load_state, slot_of_first
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    issue,
    rounded,
    rows_and_columns,
    seen_as_a,
    swapped,
    tma_split,
)
from cula.ops.cute.kda_abi import TILE_BYTES
from cula.ops.cute.sm90.fp16_window import keep_in_range, unscale_rows
from cula.ops.cute.sm90.kda_fused_smem import (
    INBOX,
    RESULT_BYTES,
    Barrier,
    place_of_o,
    results_at,
    stage_of,
    tell_o_left,
    tell_owner,
)
from cula.ops.cute.sm90.kda_recurrence_steps import (
    copy_rows,
    decay_columns,
    load_v,
    make_consumer,
    save_at_boundary,
)


class ValueLoads(NamedTuple):
    """v of a head on its way."""

    atom: Any
    source: Any  # [chunk]
    to: Any  # [1]
    full: Any  # mbarrier


class Step(NamedTuple):
    """Which chunk it is."""

    n: Any  # of all that the cluster has passed
    chunk: Any  # of the sequence
    chunks: Any  # of the sequence
    stage: Any
    left: Any  # tokens from its start to the sequence's end


def recurrence_barrier(which: Barrier) -> NamedBarrier:
    return NamedBarrier(barrier_id=which, num_threads=128)


@cute.jit
def recurrence_role(
    tma: cutlass.Constexpr,
    memory: cutlass.Constexpr,
    items: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    stages: cutlass.Constexpr,
    sV: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
):
    """A warpgroup: the heads number, number + clusters, ... from their first state to their last."""
    rank, thread = cluster.rank, cute.arch.thread_idx()[0] % 128
    warp_in = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
    states, kept = memory.states, memory.kept
    tiles, sVec = results_at(stages)
    w = make_consumer(rank, thread, mmas, tiles, sVec, sV)
    n = I32(0)
    for item in cutlass.range(cluster.number, items.total, cluster.clusters, unroll=1):
        seq, hv, begin, tokens = items.at(memory.mCu, item)
        chunks = (tokens + 63) // 64
        v_rows, o_tiles, o_rows = [
            cute.local_tile(cute.domain_offset((begin, 0), t[None, None, hv]), (64, 64), (None, rank))
            for t in (tma.v.coordinates, tma.o.coordinates, memory.mO)
        ]
        to_v, v_g = tma_split(tma.v.atom, sV, v_rows)
        v = ValueLoads(tma.v.atom, v_g, to_v, bars.v_full)
        if warp_in == 0 and chunks > 0:
            ask_for_v(v, I32(0))
        w.factor.fill(1.0)
        w.accS.fill(0.0)
        slot = slot_of_first(states, seq)
        if slot >= 0:
            load_state(w.ours, w.accS, address_of(states.h0, slot, states.step, hv, states.kind), states.kind)
        following, row = first_kept(kept, memory.mCu, seq, items.length, I32(0))
        place = (seq, hv, tokens)
        for chunk in cutlass.range(chunks, unroll=1):
            if chunk == following:
                following, row = save_at_boundary(w, states, kept, place, chunk, chunks, following, row, F16)
            stage = stage_of(n, rank)
            cute.arch.mbarrier_wait(bars.v_full, n & 1)
            step = Step(n, chunk, chunks, stage, tokens - chunk * 64)
            accO = recurrence_step(w, v, bars, step, warp_in)
            store_o(w, accO, tma.o, o_tiles, o_rows, stages, step, warp_in)
            warpgroup.wait_group(0)
            tell_owner(bars.free, n, rank)
            n += 1
        save_at_boundary(w, states, kept, place, chunks, chunks, following, row, F16)
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def ask_for_v(v: cutlass.Constexpr, chunk: I32):
    """v of a chunk is to come."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(v.full, TILE_BYTES // 2)
    cute.copy(v.atom, v.source[None, chunk], v.to[None, 0], tma_bar_ptr=v.full)


@cute.jit
def recurrence_step(w: cutlass.Constexpr, v: cutlass.Constexpr, bars: cutlass.Constexpr, step: cutlass.Constexpr, warp_in: I32):
    """v - R, U, o and the new state; o is left in its accumulator while the state is on its way. All that can be is done before
    the chunk is waited for: how long a stage is occupied decides how fast chunks pass."""
    n, chunk, chunks, stage, left = step
    mma_x, mma_t, mma_s = w.mmas
    thr_x, thr_t = mma_x.get_slice(w.thread), mma_t.get_slice(w.thread)
    bKb, bQg, bP, bT, bKr = w.operands
    accS = w.accS
    S, at_s = w.S, w.positions()
    accX, accO = [thr_x.make_fragment_C(thr_x.partition_shape_C((64, 64))) for _ in range(2)]
    accU = thr_t.make_fragment_C(thr_t.partition_shape_C((64, 64)))
    rV = cute.make_rmem_tensor_like(accX, BF16)
    load_v(w, rV, I32(0), left, I32(1))
    half = rounded(accS, F16)
    keep_in_range(accS, half, rV, w.factor)
    negate(half)
    take_v(w, rV, accX)
    # The next v may come when all warps have used theirs: a barrier alone does not wait for what is being read.
    recurrence_barrier(Barrier.V_USED).arrive_and_wait()
    if warp_in == 0 and chunk + 1 < chunks:
        ask_for_v(v, chunk + 1)
    if stage < INBOX:
        cute.arch.mbarrier_wait(bars.ready + stage, (n >> 2) & 1)
    else:
        if warp_in == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars.arrived, RESULT_BYTES)
        cute.arch.mbarrier_wait(bars.arrived, (n >> 1) & 1)
    issue(mma_x, accX, seen_as_a(half), bKb[None, None, None, stage], True)
    if warp_in == 0 and n > 0:  # the other warps are done with the last o since they came for v
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        tell_o_left(bars, n - 1, w.part)
    warpgroup.wait_group(0)
    issue(mma_t, accU, seen_as_a(rounded(accX, F16)), bT[None, None, None, stage], False)
    warpgroup.wait_group(0)
    aU = seen_as_a(rounded(accU, F16))
    issue(mma_x, accO, aU, bP[None, None, None, stage], False)
    tell_owner(bars.half_free, n, w.part)  # kb and T have been read
    for part in cutlass.range_constexpr(2):  # S in 16 bits once more, by halves: there are no registers to keep it in
        again = cute.make_rmem_tensor_like(accX, F16)
        again.store(cute.make_tensor(accS.iterator + 32 * part, accX.layout).load().to(F16))
        issue(mma_x, accO, seen_as_a(again), bQg[None, None, (None, part), stage], True)
        decay_columns(w, S, at_s, stage, part)
        if cutlass.const_expr(part == 0):
            warpgroup.wait_group(0)
    issue(mma_s, accS, aU, bKr[None, None, None, stage], True)
    warpgroup.wait_group(1)
    return accO


@cute.jit
def negate(half: cute.Tensor):
    """Flip the signs of fp16 values."""
    pairs = cute.recast_tensor(half, I32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = pairs[i] ^ I32(-0x7FFF8000)


@cute.jit
def take_v(w: cutlass.Constexpr, rV: cute.Tensor, accX: cute.Tensor):
    """X <- v^T in the state's scale."""
    words, X = cute.recast_tensor(rV, I32), rows_and_columns(accX)
    both = cute.make_rmem_tensor((2,), F32)
    bits = cute.recast_tensor(both, I32)
    for j in cutlass.range_constexpr(0, cute.size(X, mode=[1]), 2):
        for a in cutlass.range_constexpr(2):
            word = words[j + a]
            bits[0], bits[1] = word << 16, word & I32(-0x10000)
            for i in cutlass.range_constexpr(2):
                X[a, j + i] = both[i] * w.factor[a]


@cute.jit
def store_o(
    w: cutlass.Constexpr,
    accO: cute.Tensor,
    tma_o: cutlass.Constexpr,
    o_tiles: cute.Tensor,
    o_rows: cute.Tensor,
    stages: cute.Pointer,
    step: cutlass.Constexpr,
    warp_in: I32,
):
    """o to shared memory and from there to global memory, which a later step waits for (`tell_o_left`)."""
    unscale_rows(rows_and_columns(accO), w.factor)
    rO = rounded(accO)
    recurrence_barrier(Barrier.QG_READ).arrive_and_wait()
    to_o = place_of_o(stages, step.stage)
    cute.copy(w.copy_o, w.copy_o.retile(rO), w.copy_o.partition_D(swapped(to_o)))
    cute.arch.fence_proxy("async.shared", space="cta")
    recurrence_barrier(Barrier.O_IN_PLACE).arrive_and_wait()
    if step.left < 64:  # TMA would write on into the next sequence
        copy_rows(to_o, o_rows[None, None, step.chunk], w.thread, step.left)
    elif warp_in == 0:
        o_s, o_g = tma_split(tma_o.atom, to_o, o_tiles)
        cute.copy(tma_o.atom, o_s, o_g[None, step.chunk])
        cute.arch.cp_async_bulk_commit_group()
