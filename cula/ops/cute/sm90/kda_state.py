# SPDX-License-Identifier: Apache-2.0
"""KDA on Hopper, second half: the state walks over the chunks that `kda_prepare` made and never leaves the registers.

A chunk, with the state S [128 dk, 128 dv] in float32:
    R = kb S,   o = qg S                      two products with the same A operand
    U = T (b v - R)
    o += P U,   S <- e^{G_C} S + kr^T U
All of it transposed, S^T [dv, dk], because wgmma takes A, never B, from registers: two consumer warpgroups own 64 rows dv each
and exchange nothing. A producer warp feeds both by TMA, two chunks deep.

Segments, warm and cold, are those of `common/kda_segments.py`. One launch: where some segment starts cold, blocks first make the
maps, by the same walk without output, and raise a flag for each; a cold segment then waits for those before it. A block waits for
blocks of lower numbers only, which have begun before it. Such a sequence has fewer segments, and more of its blocks make maps.

| warps      | role                                       | registers |
|------------|--------------------------------------------|-----------|
| 0          | TMA loads                                  | 40        |
| 1, 2       | TMA stores of a consumer's o               | 40        |
| 4-7, 8-11  | the walk, 64 rows dv each                  | 232       |

| shared memory                 | bytes  |
|-------------------------------|--------|
| kb, qg, kr, v: two stages     | 128 K  |
| T, P: two stages              | 32 K   |
| o                             | 16 K   |
| e^{G_C}, b: two stages        | 2 K    |
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.fragments import shared_at
from cula.ops.cute.common.kda_prepare_steps import LOWER_LEFT, UPPER_RIGHT, VEC
from cula.ops.cute.common.kda_segments import jobs_of, segment_at
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    allocate_tile,
    rounded,
    rows_and_columns,
    seen_as_a,
    swapped,
    tile_at,
    tile_layout,
    tma_split,
)
from cula.ops.cute.sm90.kda_rows import keep_in_range, scale_rows, unscale_rows
from cula.ops.cute.sm90.kda_walk import QUARTER_BYTES, STAGES, Walk, carry_o, feed, walk

OF_B, OF_M, TO_WARM = 0, 1, 2  # walks without output
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
MAP_BYTES = 128 * 128 * 2


# Segments


def place_of_b(mB: Any, record: Any, part: Any, thread: Any) -> Any:
    """Of a map's B, what this thread holds, [4, 16]: not as a matrix but in the order of registers, so that warps read and write
    without gaps."""
    start = mB[record, None, None].iterator + (part * 8192 + thread * 4)
    return cute.make_tensor(start.align(16), cute.make_layout((4, 16), stride=(1, 512)))


def in_fours(acc: Any) -> Any:
    return cute.make_tensor(acc.iterator, cute.make_layout((4, 16)))


@cute.jit
def load_b(mB: cute.Tensor, record: I32, part: I32, thread: I32, acc: cute.Tensor):
    cute.autovec_copy(place_of_b(mB, record, part, thread), in_fours(acc))


@cute.jit
def store_b(acc: cute.Tensor, mB: cute.Tensor, record: I32, part: I32, thread: I32):
    cute.autovec_copy(in_fours(acc), place_of_b(mB, record, part, thread))


# Maps on their way. A [128, 128] matrix M passes through the memory of the chunks' tiles, in two pieces of [64, 128]; of the two
# stages only the one that the first chunk of the walk is not in, so that this one comes meanwhile. fp16 has room for two maps
# there; in bf16 M is a pair, hi + lo, and one fills it.


def halves_of(dtype: Any) -> int:
    return 1 if dtype is F16 else 2


def tile_of(map_place: Any, half: int, piece: int, stage: Any, dtype: Any) -> Any:
    """The number, among the tiles of all stages, of a piece of M."""
    return STAGES * (2 * (halves_of(dtype) * map_place + half) + piece) + stage


@cute.jit
def feed_maps(
    tma_m: cute.CopyAtom,
    m_g: cute.Tensor,
    m_s: cute.Tensor,
    bars: cutlass.Constexpr,
    record: I32,
    step: I32,
    n: I32,
    stage: I32,
    dtype: cutlass.Constexpr,
):
    """The producer: maps record, record + step, ..., n of them, each when its place is free; returns when all places are."""
    there, gone = bars
    halves = cutlass.const_expr(halves_of(dtype))
    places = cutlass.const_expr(2 // halves)
    for i in cutlass.range(n + places, unroll=1):
        place = i % places
        if i >= places:
            cute.arch.mbarrier_wait(gone + place, (i // places + 1) % 2)
        if i < n:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(there + place, halves * MAP_BYTES)
            for half in cutlass.range_constexpr(halves):
                for piece in cutlass.range_constexpr(2):
                    source = m_g[None, 4 * (record + i * step) + 2 * half + piece]
                    to = m_s[None, tile_of(place, half, piece, stage, dtype)]
                    cute.copy(tma_m, source, to, tma_bar_ptr=there + place)


@cute.jit
def chain(
    w: cutlass.Constexpr,
    mB: cute.Tensor,
    bM: cute.Tensor,
    bars: cutlass.Constexpr,
    record: I32,
    step: I32,
    n: I32,
    stage: I32,
    dtype: cutlass.Constexpr,
):
    """accS <- M_{n-1} (... M_0 S + B_0 ...) + B_{n-1}; map i has the number record + i * step.

    In bf16 S is a pair too, hi + lo (their product leaves lo lo out); fp16 has the mantissa of tf32: hi is enough.
    """
    accS, factor, mma_s = w.accS, w.factor, w.mmas[2]
    there, gone = bars
    halves = cutlass.const_expr(halves_of(dtype))
    places = cutlass.const_expr(2 // halves)
    # B of the next step comes while one is multiplied. (Only where a factor is applied to it: else the compiler would load it
    # right into accumulators in flight.)
    is_ahead = cutlass.const_expr(dtype is F16)
    following = cute.make_rmem_tensor_like(accS, F32)
    if is_ahead:
        load_b(mB, record, w.part, w.thread, following)
    for i in cutlass.range(n, unroll=1):
        place = i % places
        hi, low = rounded(accS, dtype), cute.make_rmem_tensor_like(accS, dtype)
        if is_ahead:
            keep_in_range(accS, hi, None, factor)
            accS.store(following.load())
            scale_rows(rows_and_columns(accS), factor)
        else:
            low.store((accS.load() - hi.load().to(F32)).to(dtype))
            load_b(mB, record + i * step, w.part, w.thread, accS)
        cute.arch.mbarrier_wait(there + place, (i // places) % 2)
        warpgroup.fence()
        atom = cute.make_mma_atom(mma_s.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for a, half in ((hi, 0), (low, 0), (hi, 1))[: 2 * halves - 1]:
            for k in cutlass.range_constexpr(8):
                at = tile_of(place, half, k // 4, stage, dtype)
                cute.gemm(atom, accS, seen_as_a(a)[None, None, k], bM[None, None, k % 4, at], accS)
        warpgroup.commit_group()
        if is_ahead:
            load_b(mB, record + cutlass.min(i + 1, n - 1) * step, w.part, w.thread, following)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(gone + place)


# The kernel


@cute.kernel
def state_kernel(
    tma_tiles: cute.CopyAtom,
    gTiles: cute.Tensor,
    tma_t: cute.CopyAtom,
    gT: cute.Tensor,
    tma_p: cute.CopyAtom,
    gP: cute.Tensor,
    tma_vec: cute.CopyAtom,
    gVec: cute.Tensor,
    tma_v: cute.CopyAtom,
    gV: cute.Tensor,
    tma_o: cute.CopyAtom,
    gO: cute.Tensor,
    tma_m: cute.CopyAtom,
    gM: cute.Tensor,
    mO: cute.Tensor,
    mVec: cute.Tensor,
    mH0: cute.Tensor,
    mHt: cute.Tensor,
    mB: cute.Tensor,
    mM: cute.Tensor,
    mDone: cute.Tensor,
    mCu: cute.Tensor,
    has_h0: I32,
    has_ht: I32,
    L: I32,
    cold_L: I32,
    length: I32,
    steps: I32,
    helpers: I32,
    mma_x: cute.TiledMma,
    mma_t: cute.TiledMma,
    mma_s: cute.TiledMma,
    lt: cute.ComposedLayout,
    lv: cute.ComposedLayout,
    lo: cute.ComposedLayout,
    dtype: cutlass.Constexpr,
):
    """A block for each (value head, number): `helpers`, then one for the number of each segment of L chunks. Those of a sequence
    that starts cold anywhere take segments of cold_L."""
    tid, _, _ = cute.arch.thread_idx()
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    warpgroup_id = cute.arch.make_warp_uniform(tid // 128)
    smem = SmemAllocator()
    sKb, sQg, sKr = [allocate_tile(smem, lt, dtype) for _ in range(3)]
    sV = allocate_tile(smem, lv)
    all_tiles = tile_at(sKb, tile_layout(64, 128, 4 * STAGES, dtype), dtype)  # of these four, one after the other
    # T and P by quarters [32, 32], of which one is zero and stays so: stage, columns, rows
    square, quarters = tile_layout(64, 64, STAGES, dtype, columns_of=32), tile_layout(32, 32, 4 * STAGES, dtype)
    sT, sP = allocate_tile(smem, square, dtype), allocate_tile(smem, square, dtype)
    sO = allocate_tile(smem, lo)  # [64 tokens, 64 dv, warpgroup]
    sVec = smem.allocate_tensor(F32, cute.make_layout((1, VEC, STAGES), stride=(VEC, 1, VEC)), byte_alignment=128)
    full, empty, map_there, map_gone = [smem.allocate_array(cutlass.Int64, STAGES) for _ in range(4)]
    hv, number, _ = cute.arch.block_idx()
    HV = mVec.shape[1]
    own_number = cutlass.max(number - helpers, 0)  # a helper's is that of the only sequence
    seq, begin, tokens, chunk0, i, segments = segment_at(own_number, mCu, L, length, steps)
    first_number, first_record, all_chunks = own_number - i, chunk0 * HV + hv, (tokens + 63) // 64
    if warp_id == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, 8)  # warps
                cute.arch.mbarrier_init(map_there + stage, 1)
                cute.arch.mbarrier_init(map_gone + stage, 8)
        for atom in (tma_tiles, tma_t, tma_p, tma_vec, tma_v, tma_o):
            cpasync.prefetch_descriptor(atom)
    cute.arch.mbarrier_init_fence()
    if warpgroup_id == 1:
        zero = cute.make_rmem_tensor((8, 1), dtype)
        zero.fill(0.0)
        for stage in cutlass.range_constexpr(STAGES):
            for tile, quarter in ((sT, LOWER_LEFT), (sP, UPPER_RIGHT)):
                at = I32(tile.iterator.toint()) + (4 * stage + quarter) * QUARTER_BYTES + 16 * (tid % 128)
                cute.autovec_copy(zero, shared_at(at, dtype, 8, 16))
        cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    maps_are_made = pipeline.NamedBarrier(barrier_id=4, num_threads=288)  # the consumers know, the producer wants to

    cute.arch.griddepcontrol_wait()  # for the kernel before: this one was launched before it ended
    i, L, is_walker, warm, cold, b_segment, m_segment = jobs_of(
        mVec, hv, helpers, has_h0, L, cold_L, chunk0, all_chunks, number - helpers - first_number, segments
    )
    start, to_chunk = i * L, cutlass.min(i * L + L, all_chunks)

    if warpgroup_id == 0:
        # -- the producer
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp_id == 0:
            tiles = cute.local_tile(gTiles, (64, 128), (None, 0))
            kb_s, tiles_g = tma_split(tma_tiles, sKb, tiles)
            qg_s, _ = tma_split(tma_tiles, sQg, tiles)
            kr_s, _ = tma_split(tma_tiles, sKr, tiles)
            t_s, t_g = tma_split(tma_t, tile_at(sT, quarters, dtype), cute.local_tile(gT, (32, 32), (None, 0)))
            p_s, p_g = tma_split(tma_p, tile_at(sP, quarters, dtype), cute.local_tile(gP, (32, 32), (None, 0)))
            e_s, e_g = tma_split(tma_vec, sVec, cute.local_tile(gVec, (1, VEC), (None, 0)))
            of_v = cute.local_tile(cute.domain_offset((begin, 0), gV[None, None, hv]), (64, 128), (None, 0))
            v_s, v_g = tma_split(tma_v, sV, of_v)
            copies = (
                (tma_tiles, tiles_g, kb_s, qg_s, kr_s),
                (tma_v, v_g, v_s),
                (tma_vec, e_g, e_s),
                (tma_t, t_g, t_s),
                (tma_p, p_g, p_s),
            )
            count = I32(0)
            for turn in cutlass.range(3, unroll=1):
                task = task_at(turn, i)
                is_on, from_chunk, chunks = span_of(task, b_segment, m_segment, start, warm, L)
                if is_on:
                    sees_v = I32(0) if task == OF_M else I32(1)
                    count = feed(copies, full, empty, count, first_record, HV, from_chunk, from_chunk + chunks, True, sees_v)
            if is_walker:
                if cold == 1:  # the first chunk, then maps in the memory of the other stage
                    count = feed(copies, full, empty, count, first_record, HV, start, start + 1, False, I32(1))
                    maps_are_made.arrive_and_wait()  # and all chunks before have been read
                    cute.arch.fence_proxy("async.global")
                    m_s, m_g = tma_split(tma_m, all_tiles, cute.local_tile(gM, (64, 128), (None, 0)))
                    first = (first_number + 1 - has_h0) * HV + hv
                    feed_maps(tma_m, m_g, m_s, (map_there, map_gone), first, HV, i - 1 + has_h0, count % STAGES, dtype)
                count = feed(copies, full, empty, count, first_record, HV, start + cold, to_chunk, False, I32(1))
        elif warp_id < 3 and is_walker:
            part = warp_id - 1
            of_part = cute.local_tile(cute.domain_offset((begin, 0), gO[None, None, hv]), (64, 64), (None, part))
            o_s, o_g = tma_split(tma_o, sO, of_part)
            carry_o(tma_o, o_s[None, part], o_g, part, start, to_chunk, tokens)
    else:
        # -- a consumer: 64 rows dv
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        part = warpgroup_id - 1
        thread = tid % 128
        both = pipeline.NamedBarrier(barrier_id=3, num_threads=256)
        is_f16 = cutlass.const_expr(dtype is F16)
        thr_x, thr_t, thr_s = mma_x.get_slice(thread), mma_t.get_slice(thread), mma_s.get_slice(thread)
        accS, factor = thr_s.make_fragment_C(thr_s.partition_shape_C((64, 128))), cute.make_rmem_tensor((2,), F32)
        S = rows_and_columns(accS)
        at_s = rows_and_columns(thr_s.partition_C(cute.make_identity_tensor((64, 128))))
        bKb, bQg = [thr_x.make_fragment_B(thr_x.partition_B(s)) for s in (sKb, sQg)]  # [N = token, K = dk]
        bP = thr_x.make_fragment_B(thr_x.partition_B(sP))  # [N = t, K = i]
        bT = thr_t.make_fragment_B(thr_t.partition_B(swapped(sT)))  # [N = t, K = i], stored [i, t]
        bKr = thr_s.make_fragment_B(thr_s.partition_B(swapped(sKr)))  # [N = dk, K = token]
        # v^T comes in, and o^T leaves, as an accumulator lies; (st/ld)matrix turns [token, channel] tiles round
        load_v = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_x).get_slice(thread)
        store_o = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BF16), mma_x).get_slice(thread)
        v_s = load_v.partition_S(swapped(cute.local_tile(sV, (64, 64, STAGES), (0, part, 0))))
        ours = lambda m: thr_s.partition_C(cute.local_tile(m, (64, 128), (part, 0)))  # of a [V, K] matrix
        w = Walk(
            part,
            thread,
            (mma_x, mma_t, mma_s),
            accS,
            factor,
            (bKb, bQg, bP, bT, bKr),
            sVec,
            load_v,
            v_s,
            store_o,
            sO[None, None, part],
            full,
            empty,
        )
        count = I32(0)

        # -- without output: B of our own segment, M of another, and the chunks that warm our own up
        for turn in cutlass.range(3, unroll=1):
            task = task_at(turn, i)
            is_on, from_chunk, chunks = span_of(task, b_segment, m_segment, start, warm, L)
            if is_on:
                factor.fill(1.0)
                for j in cutlass.range_constexpr(cute.size(S, mode=[1])):
                    for a in cutlass.range_constexpr(2):
                        is_one = task == OF_M and at_s[a, j][0] + 64 * part == at_s[a, j][1]
                        S[a, j] = F32(1.0) if is_one else F32(0.0)
                if task == TO_WARM and from_chunk == 0 and has_h0 == 1:
                    cute.autovec_copy(ours(mH0[seq, hv, None, None]), accS)
                sees_v = I32(0) if task == OF_M else I32(1)
                count = walk(w, count, from_chunk, from_chunk + chunks, tokens, sees_v, None, dtype)
                if task != TO_WARM:
                    if is_f16:
                        unscale_rows(S, factor)
                    record = (first_number + (b_segment if task == OF_B else m_segment)) * HV + hv
                    if task == OF_B:
                        store_b(accS, mB, record, part, thread)
                    else:
                        hi, low = rounded(accS, dtype), cute.make_rmem_tensor_like(accS, dtype)
                        cute.autovec_copy(hi, ours(mM[2 * record, None, None]))
                        if cutlass.const_expr(not is_f16):  # see `chain`
                            low.store((accS.load() - hi.load().to(F32)).to(dtype))
                            cute.autovec_copy(low, ours(mM[2 * record + 1, None, None]))
                    cute.arch.fence_acq_rel_gpu()
                    both.arrive_and_wait()
                    if warp_id == 4:
                        with cute.arch.elect_one():
                            cute.arch.red(mDone.iterator + record, I32(1), op="add", dtype="s32", sem="release", scope="gpu")

        if is_walker:
            # -- the state to begin with
            if warm == 0:
                factor.fill(1.0)
                accS.fill(0.0)
                if has_h0 == 1:
                    cute.autovec_copy(ours(mH0[seq, hv, None, None]), accS)
            if cold == 1:
                record = first_number * HV + hv
                wait_for_maps(mDone, record, HV, i, has_h0)
                maps_are_made.arrive()
                if has_h0 == 0:  # from zero the first map gives its B
                    load_b(mB, record, part, thread, accS)
                    record += HV
                bM = thr_s.make_fragment_B(thr_s.partition_B(swapped(all_tiles)))  # [N = dk out, K = dk in]
                chain(w, mB, bM, (map_there, map_gone), record, HV, i - 1 + has_h0, (count + 1) % STAGES, dtype)

            # -- the chunks, and what is left
            o_rows = cute.local_tile(cute.domain_offset((begin, 0), mO[None, None, hv]), (64, 64), (None, part))
            count = walk(w, count, start, to_chunk, tokens, I32(1), o_rows, dtype)
            if is_f16:
                unscale_rows(S, factor)
            if to_chunk == (tokens + 63) // 64 and has_ht == 1:
                cute.autovec_copy(accS, ours(mHt[seq, hv, None, None]))


@cute.jit
def task_at(turn: I32, i: I32):
    """B, then M, then what warms up; every other segment M first. So B of a segment and M of it, which the next one makes, are on
    their way at the same time, and one of them finds what it reads in the L2 cache."""
    return turn ^ (i & 1) if turn < TO_WARM else turn


@cute.jit
def span_of(task: I32, b_segment: I32, m_segment: I32, start: I32, warm: I32, L: I32):
    """(whether there is such a task, its first chunk, how many)."""
    segment = b_segment if task == OF_B else m_segment
    is_on = warm > 0 if task == TO_WARM else segment >= 0
    return is_on, start - warm if task == TO_WARM else segment * L, warm if task == TO_WARM else L


@cute.jit
def wait_for_maps(mDone: cute.Tensor, record: I32, step: I32, n: I32, has_h0: I32):
    """Of the segments before ours, each B and M; without an initial state nobody makes the first M. A lane a segment."""
    lane = cute.arch.lane_idx()
    for s in cutlass.range(0, n, 32, unroll=1):
        j = cutlass.min(s + lane, n - 1)
        wanted = I32(2) if j > 0 or has_h0 == 1 else I32(1)
        done = I32(0)
        while done < wanted:
            done = cute.arch.load(mDone.iterator + record + j * step, I32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()
