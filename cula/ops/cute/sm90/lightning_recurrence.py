# SPDX-License-Identifier: Apache-2.0
"""Lightning on Hopper, the recurrence: outputs of an item and, from a sequence's last segment, its last state."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import warp, warpgroup

from cula.ops.cute.common.lightning_items import at_attention, in_time, item_at, nth, num_items, power, row_of
from cula.ops.cute.common.lightning_states import read_first_state, read_seeds, write_last_state
from cula.ops.cute.common.tiles import BF16, F32, I32, issue, rounded, seen_as_a, swapped, tma_split

from .lightning_chunk import (
    clear_columns,
    clear_rows,
    decay_scores,
    factors_of,
    lag_factors,
    our_rows,
    times_leaving,
    weighed,
)
from .lightning_config import LANES, C


class Barrier(enum.IntEnum):
    """Named barriers of a block; 0 is sync_threads'."""

    FIRST_RECURRENCE = 1  # the four warps of a warpgroup
    SECOND_RECURRENCE = 2


class Output(NamedTuple):
    """o, by TMA and by threads."""

    tma: Any
    gO: Any
    mO: Any


class Fragments(NamedTuple):
    """What a thread has of operands, accumulators and copies."""

    accP: Any  # [C, C]
    accO: Any  # [64 channels, C]
    accS: Any  # [64 channels, K]
    aQ: Any
    bK: Any
    bQ: Any  # [N = token, K = key channel]
    bP: Any  # [N = r, K = i]
    bK_swapped: Any  # [N = key channel, K = token]
    load_v: Any
    store_o: Any
    store_p: Any
    tVs: Any
    tOs: Any
    tPs: Any
    thr_s: Any
    row: Any  # of an accumulator's first element; see rows_and_columns
    column: Any


@cute.jit
def fragments_of(cfg: cutlass.Constexpr, tiles: cutlass.Constexpr, mmas: cutlass.Constexpr, lanes: I32, thread: I32):
    """v^T comes in, and o^T leaves, as an accumulator lies; (st/ld)matrix turns the [token, channel] tiles round."""
    mma_p, mma_o, mma_s = mmas
    sQ, sK, sP = tiles.sQ, tiles.sK, tiles.sP
    thr_p, thr_o, thr_s = mma_p.get_slice(thread), mma_o.get_slice(thread), mma_s.get_slice(thread)
    accP = thr_p.make_fragment_C(thr_p.partition_shape_C((C, C)))
    accO = thr_o.make_fragment_C(thr_o.partition_shape_C((LANES, C)))
    accS = thr_s.make_fragment_C(thr_s.partition_shape_C((LANES, cfg.K)))
    aQ, bK = thr_p.make_fragment_A(thr_p.partition_A(sQ)), thr_p.make_fragment_B(thr_p.partition_B(sK))
    bQ = thr_o.make_fragment_B(thr_o.partition_B(sQ))
    bP = thr_o.make_fragment_B(thr_o.partition_B(sP))
    bK_swapped = thr_s.make_fragment_B(thr_s.partition_B(swapped(sK)))
    load_v = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_o).get_slice(thread)
    store_o = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BF16), mma_o).get_slice(thread)
    store_p = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BF16), mma_p).get_slice(thread)
    tVs = load_v.partition_S(swapped(cute.local_tile(tiles.sV, (C, LANES, cfg.stages), (0, lanes, 0))))
    tOs, tPs = store_o.partition_D(swapped(tiles.sO)), store_p.partition_D(sP)
    row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
    return Fragments(
        accP, accO, accS, aQ, bK, bQ, bP, bK_swapped, load_v, store_o, store_p, tVs, tOs, tPs, thr_s, row, column
    )  # fmt: skip


@cute.jit
def put_scores(f: cutlass.Constexpr, lags: cute.Tensor, now: I32):
    """P, decayed, to its buffer in shared memory."""
    decay_scores(f.accP, lags)
    cute.copy(f.store_p, f.store_p.retile(rounded(f.accP)), f.tPs[None, None, None, now])
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def values_of(f: cutlass.Constexpr, by: cutlass.Constexpr, turn: cutlass.Constexpr, stage: I32, n: I32):
    """V^T of a chunk of n tokens, as it is and weighed for the state; the state is multiplied by f^n."""
    rV = cute.make_rmem_tensor_like(f.accO, BF16)
    cute.copy(f.load_v, f.tVs[None, None, None, stage], f.load_v.retile(rV))
    if n < C:
        clear_columns(rV, n, f.column, turn)
    rW = weighed(rV, n, f.column, by, turn)
    factor = by.chunk
    if n < C:
        factor = power(by.decay, n)
    f.accS.store(f.accS.load() * factor)
    return rV, rW


class Place(NamedTuple):
    """Where an item leaves its chunks in one of the outputs; `nth` says which is which."""

    tma: Any
    pO: Any  # buffers in shared memory, as TMA splits them
    gO: Any  # chunks
    o_rows: Any  # [token, channel, chunk]


@cute.jit
def place_in(output: cutlass.Constexpr, sO: cute.Tensor, item: cutlass.Constexpr):
    at = (row_of(item, C), 0)
    gO = cute.local_tile(cute.domain_offset(at, output.gO[None, None, item.head]), (C, LANES), (None, item.rows))
    pO, gO = tma_split(output.tma, sO, gO)
    o_rows = cute.local_tile(cute.domain_offset(at, output.mO[None, None, item.head]), (C, LANES), (None, item.rows))
    return Place(output.tma, pO, gO, o_rows)


@cute.jit
def store_by_tma(places: cutlass.Constexpr, turn: cutlass.Constexpr, buffer: I32, count: I32):
    """The last of so many chunks of o to where this item's attention leaves it."""

    def copy(i: int) -> None:
        cute.copy(places[i].tma, places[i].pO[None, buffer], places[i].gO[None, nth(turn, count - 1)])

    at_attention(turn, len(places), copy)
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def store_by_threads(
    places: cutlass.Constexpr, sO: cute.Tensor, turn: cutlass.Constexpr, buffer: I32, count: I32, n: I32, thread: I32
):
    """The same of a chunk of fewer tokens, predicated: TMA would clip at the tensor's ends only."""
    at_attention(turn, len(places), lambda i: copy_rows(sO, places[i].o_rows, buffer, count - 1, turn, n, thread))


@cute.jit
def copy_rows(sO: cute.Tensor, o_rows: cute.Tensor, buffer: I32, chunk: I32, turn: cutlass.Constexpr, n: I32, thread: I32):
    """The rows of n tokens."""
    for p in cutlass.range_constexpr(C // 16):
        r = p * 16 + thread // 8
        if in_time(turn, r, C - 1) < n:
            cute.autovec_copy(
                cute.local_tile(sO[None, None, buffer], (1, 8), (r, thread % 8)),
                cute.local_tile(o_rows[None, None, nth(turn, chunk)], (1, 8), (r, thread % 8)),
            )


@cute.jit
def recurrence(
    work: cutlass.Constexpr,
    ring,
    tiles: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    states: cutlass.Constexpr,
    scale: F32,
    mmas: cutlass.Constexpr,
):
    """A consumer's role."""
    cfg, sK, sO, segment = work.cfg, tiles.sK, tiles.sO, work.sizes.segment
    mma_p, mma_o, mma_s = mmas
    thread, _, _ = cute.arch.thread_idx()
    lanes = cute.arch.make_warp_uniform(thread // 128) - 1  # which 64 channels of the block are ours
    thread = thread % 128
    is_storing = thread // 32 == 0  # the warp that issues TMA stores
    ours = pipeline.NamedBarrier(barrier_id=Barrier.FIRST_RECURRENCE + lanes, num_threads=128)
    f = fragments_of(cfg, tiles, mmas, lanes, thread)
    ahead = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)  # to be waited for next
    behind = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)  # to be released next
    now = 2 * lanes  # which of all buffers of P and O this chunk has; the next one has the other of our two

    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(first, num_items(work), step, unroll=1):
        item = item_at(work, index, lanes)
        turn, ours_of = item.turn, our_rows(f.thr_s, item.rows)
        if segment == 0:
            read_first_state(f.accS, ours_of, states, item)
        else:
            read_seeds(f.accS, ours_of, states, item, segment)
        lags = lag_factors(item.decay, scale, f.row, f.column, turn)
        by = factors_of(item.decay, scale, f.column, turn)
        places = [place_in(output, sO, item) for output in outputs]

        # No wgmma may start or end in a branch: the compiler would wait after each. So P is made even for no tokens, and
        # once more after the last chunk, of whatever is there.
        tokens = cute.arch.make_warp_uniform(item.tokens)
        num_chunks = cute.arch.make_warp_uniform((tokens + C - 1) // C)
        stage = ahead.index
        if num_chunks > 0:
            ring.consumer_wait(ahead)
            if tokens < C:
                clear_rows(sK[None, None, stage], tokens, thread, turn)
                ours.arrive_and_wait()
            ahead.advance()
        issue(mma_p, f.accP, f.aQ[None, None, None, stage], f.bK[None, None, None, stage], False)

        # On the tensor cores, one after the other: O = S q^T | O += V^T P^T, S += V^T k, P of the next chunk.
        for chunk in cutlass.range(num_chunks, unroll=1):
            n = cutlass.min(tokens - chunk * C, C)
            other = 4 * lanes + 1 - now
            issue(mma_o, f.accO, seen_as_a(rounded(f.accS)), f.bQ[None, None, None, behind.index], False)

            warpgroup.wait_group(1)  # P
            put_scores(f, lags, now)
            if is_storing:
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # this chunk's buffer of O is free again
            ours.arrive_and_wait()
            if is_storing & (chunk > 0):
                store_by_tma(places, turn, other, chunk)
            rV, rW = values_of(f, by, turn, behind.index, n)

            warpgroup.wait_group(0)  # O
            times_leaving(f.accO, by)
            issue(mma_o, f.accO, seen_as_a(rV), f.bP[None, None, None, now], True)
            issue(mma_s, f.accS, seen_as_a(rW), f.bK_swapped[None, None, None, behind.index], True)
            stage = behind.index
            left = tokens - (chunk + 1) * C
            if left > 0:
                ring.consumer_wait(ahead)
                stage = ahead.index
                if left < C:
                    clear_rows(sK[None, None, stage], left, thread, turn)
                    ours.arrive_and_wait()
                ahead.advance()
            issue(mma_p, f.accP, f.aQ[None, None, None, stage], f.bK[None, None, None, stage], False)

            warpgroup.wait_group(2)  # O
            cute.copy(f.store_o, f.store_o.retile(rounded(f.accO)), f.tOs[None, None, None, now])
            warpgroup.wait_group(1)  # S
            ring.consumer_release(behind)
            behind.advance()
            now = other

        warpgroup.wait_group(0)
        if num_chunks > 0:
            cute.arch.fence_proxy("async.shared", space="cta")
            ours.arrive_and_wait()
            last = 4 * lanes + 1 - now
            n = tokens - (num_chunks - 1) * C
            if n == C:
                if is_storing:
                    store_by_tma(places, turn, last, num_chunks)
            else:
                store_by_threads(places, sO, turn, last, num_chunks, n, thread)
        write_last_state(lambda: f.accS, ours_of, states, item, tokens)
    if is_storing:
        cute.arch.cp_async_bulk_wait_group(0)
