# SPDX-License-Identifier: Apache-2.0
"""KDA on Hopper, the walk of a state over chunks: its producer, its consumers and who carries o away. See `kda_state.py`.

    R = kb S,   U = T (b v - R),   o = qg S + P U,   S <- e^{G_C} S + kr^T U

all transposed. A consumer is a warpgroup with 64 rows dv of S^T, [64, 128] in float32 accumulators; what it multiplies S, b v - R
and U with comes from shared memory, two chunks deep.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import warpgroup

from cula.ops.cute.common.fragments import widen
from cula.ops.cute.common.kda_prepare_steps import BETA, LOWER_LEFT, UPPER_RIGHT, VEC
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, issue, rounded, rows_and_columns, seen_as_a, swapped
from cula.ops.cute.sm90.kda_rows import keep_in_range, unscale_rows

STAGES = 2
TILE_BYTES, QUARTER_BYTES = 64 * 128 * 2, 32 * 32 * 2


class Walk(NamedTuple):
    """What a consumer works with, whatever it walks over."""

    part: Any  # which 64 rows dv
    thread: Any  # in its warpgroup
    mmas: Any  # (x, t, s): products that give [dv, 64] of K-major and of MN-major tiles, and [dv, 128]
    accS: Any  # the state, [64, 128]
    factor: Any  # of its rows
    operands: Any  # kb, qg, P, T, kr as B operands, by stages
    sVec: Any
    load_v: Any
    v_s: Any
    store_o: Any
    sO: Any  # [64 tokens, 64 dv]
    full: Any  # barriers, one a stage
    empty: Any


@cute.jit
def feed(
    copies: cutlass.Constexpr,
    full: cute.Pointer,
    empty: cute.Pointer,
    count: I32,
    first_record: I32,
    HV: I32,
    from_chunk: I32,
    to_chunk: I32,
    is_silent: cutlass.Constexpr,
    sees_v: I32,
):
    """The producer: all that the chunks [from_chunk, to_chunk) are walked with, two ahead. Before them there were `count`;
    returns how many there are now."""
    (tma_tiles, tiles_g, kb_s, qg_s, kr_s), (tma_v, v_g, v_s), (tma_vec, e_g, e_s), (tma_t, t_g, t_s), (tma_p, p_g, p_s) = copies
    size = I32(
        (2 * TILE_BYTES + 3 * QUARTER_BYTES if cutlass.const_expr(is_silent) else 3 * TILE_BYTES + 6 * QUARTER_BYTES) + 4 * VEC
    )
    size += sees_v * TILE_BYTES
    for chunk in cutlass.range(from_chunk, to_chunk, unroll=1):
        record, n = first_record + chunk * HV, count + chunk - from_chunk
        stage = n % STAGES
        bar = full + stage
        cute.arch.mbarrier_wait(empty + stage, (n // STAGES + 1) % 2)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
        cute.copy(tma_tiles, tiles_g[None, 3 * record], kb_s[None, stage], tma_bar_ptr=bar)
        if sees_v == 1:
            cute.copy(tma_v, v_g[None, chunk], v_s[None, stage], tma_bar_ptr=bar)
        cute.copy(tma_vec, e_g[None, record], e_s[None, stage], tma_bar_ptr=bar)
        for quarter in (0, UPPER_RIGHT, 3):
            cute.copy(tma_t, t_g[None, 4 * record + quarter], t_s[None, 4 * stage + quarter], tma_bar_ptr=bar)
        cute.copy(tma_tiles, tiles_g[None, 3 * record + 2], kr_s[None, stage], tma_bar_ptr=bar)
        if cutlass.const_expr(not is_silent):
            cute.copy(tma_tiles, tiles_g[None, 3 * record + 1], qg_s[None, stage], tma_bar_ptr=bar)
            for quarter in (0, LOWER_LEFT, 3):
                cute.copy(tma_p, p_g[None, 4 * record + quarter], p_s[None, 4 * stage + quarter], tma_bar_ptr=bar)
    return count + to_chunk - from_chunk


@cute.jit
def load_v(w: cutlass.Constexpr, rV: cute.Tensor, stage: I32, left: I32, sees_v: I32):
    """v^T of a chunk, as an accumulator lies; zeros for M of a map, and past the sequence's end, where it is someone else's."""
    cute.copy(w.load_v, w.v_s[None, None, None, stage], w.load_v.retile(rV))
    if left < 64 or sees_v == 0:
        words, c = cute.recast_tensor(rV, I32), w.thread % 4  # of tokens 8 j + 2 c, + 1, and two rows
        last = left if sees_v == 1 else I32(0)
        for j in cutlass.range_constexpr(8):
            even = I32(0xFFFF) if 8 * j + 2 * c < last else I32(0)
            odd = I32(-0x10000) if 8 * j + 2 * c + 1 < last else I32(0)
            for a in cutlass.range_constexpr(2):
                words[2 * j + a] = words[2 * j + a] & (even | odd)


@cute.jit
def weigh_v(w: cutlass.Constexpr, rV: cute.Tensor, bv: cute.Tensor, stage: I32, dtype: cutlass.Constexpr):
    """b v^T, in the state's scale."""
    widen(rV, bv)
    BV = rows_and_columns(bv)
    at_x = rows_and_columns(w.mmas[0].get_slice(w.thread).partition_C(cute.make_identity_tensor((64, 64))))
    for j in cutlass.range_constexpr(cute.size(BV, mode=[1])):
        beta = w.sVec[0, BETA + at_x[0, j][1], stage]
        for a in cutlass.range_constexpr(2):
            if cutlass.const_expr(dtype is F16):
                BV[a, j] = BV[a, j] * w.factor[a]
            BV[a, j] = beta * BV[a, j]


@cute.jit
def decay_columns(w: cutlass.Constexpr, S: cute.Tensor, at_s: cutlass.Constexpr, stage: I32, which: cutlass.Constexpr):
    """S <- e^{G_C} S, half of its columns."""
    columns = cute.size(S, mode=[1]) // 2
    for j in cutlass.range_constexpr(which * columns, (which + 1) * columns):
        decay = w.sVec[0, at_s[0, j][1], stage]
        for a in cutlass.range_constexpr(2):
            S[a, j] = S[a, j] * decay


def o_barriers(part: Any) -> Any:
    """Between a consumer and the warp that carries its o away: there is room for it, it is there."""
    return [pipeline.NamedBarrier(barrier_id=first + part, num_threads=160) for first in (5, 7)]


@cute.jit
def hand_over_o(w: cutlass.Constexpr, accO: cute.Tensor, dtype: cutlass.Constexpr):
    """o^T to shared memory, as [token, dv], from where `carry_o` takes it."""
    if cutlass.const_expr(dtype is F16):
        unscale_rows(rows_and_columns(accO), w.factor)
    rO = rounded(accO)
    has_room, is_there = o_barriers(w.part)
    has_room.arrive_and_wait()
    cute.copy(w.store_o, w.store_o.retile(rO), w.store_o.partition_D(swapped(w.sO)))
    cute.arch.fence_proxy("async.shared", space="cta")
    is_there.arrive()


@cute.jit
def carry_o(tma_o: cute.CopyAtom, o_s: cute.Tensor, o_g: cute.Tensor, part: I32, from_chunk: I32, to_chunk: I32, tokens: I32):
    """A warp for each consumer: its o to global memory, but not the last tokens of a sequence (`store_last_o`)."""
    has_room, is_there = o_barriers(part)
    for chunk in cutlass.range(from_chunk, to_chunk, unroll=1):
        has_room.arrive()
        is_there.arrive_and_wait()
        if tokens - chunk * 64 >= 64:
            cute.copy(tma_o, o_s, o_g[None, chunk])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def store_last_o(w: cutlass.Constexpr, o_rows: cute.Tensor, chunk: I32, left: I32):
    """The rest of a sequence that is less than a chunk: TMA would write on into the next sequence."""
    if left < 64:
        pipeline.NamedBarrier(barrier_id=1 + w.part, num_threads=128).arrive_and_wait()  # all warps have handed it over
        copy_rows(w.sO, o_rows[None, None, chunk], w.thread, left)


@cute.jit
def copy_rows(source: cute.Tensor, to: cute.Tensor, thread: I32, rows: I32):
    """Some of the rows of a [64, 64] tile in 16 bits, by 128 threads."""
    for p in cutlass.range_constexpr(4):
        row = p * 16 + thread // 8
        if row < rows:
            cute.autovec_copy(*[cute.local_tile(t, (1, 8), (row, thread % 8)) for t in (source, to)])


@cute.jit
def walk(
    w: cutlass.Constexpr,
    count: I32,
    from_chunk: I32,
    to_chunk: I32,
    tokens: I32,
    sees_v: I32,
    o_rows: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """A consumer: the state over the chunks [from_chunk, to_chunk) of a sequence of so many tokens.

    `o_rows` is o [64 tokens, 64 dv, chunk], or None where there is no output. The half M of a map does not see v. Returns how
    many chunks have passed, `count` before these.

    What the warps do between products is most of a chunk's time: they are few, and wait for every value. So it is little, and
    what does not depend on a product is done while one runs.
    """
    is_silent, is_f16 = cutlass.const_expr(o_rows is None), cutlass.const_expr(dtype is F16)
    mma_x, mma_t, mma_s = w.mmas
    accS, factor = w.accS, w.factor
    bKb, bQg, bP, bT, bKr = w.operands
    thr_x, thr_t, thr_s = [mma.get_slice(w.thread) for mma in w.mmas]
    accX, accO = [thr_x.make_fragment_C(thr_x.partition_shape_C((64, 64))) for _ in range(2)]
    accU = thr_t.make_fragment_C(thr_t.partition_shape_C((64, 64)))
    at_s = rows_and_columns(thr_s.partition_C(cute.make_identity_tensor((64, 128))))
    S = rows_and_columns(accS)
    half = cute.make_rmem_tensor_like(accS, dtype)
    for chunk in cutlass.range(from_chunk, to_chunk, unroll=1):
        n = count + chunk - from_chunk
        stage = n % STAGES
        cute.arch.mbarrier_wait(w.full + stage, n // STAGES % 2)
        rV, bv = cute.make_rmem_tensor_like(accX, BF16), cute.make_rmem_tensor_like(accX, F32)
        load_v(w, rV, stage, tokens - chunk * 64, sees_v)
        half.store(accS.load().to(dtype))
        if is_f16:
            keep_in_range(accS, half, rV, factor)
        issue(mma_x, accX, seen_as_a(half), bKb[None, None, None, stage], False)
        weigh_v(w, rV, bv, stage, dtype)
        decay_columns(w, S, at_s, stage, 0)
        warpgroup.wait_group(0)
        rX = cute.make_rmem_tensor_like(accX, dtype)
        rX.store((bv.load() - accX.load()).to(dtype))
        issue(mma_t, accU, seen_as_a(rX), bT[None, None, None, stage], False)
        if cutlass.const_expr(not is_silent):
            issue(mma_x, accO, seen_as_a(half), bQg[None, None, None, stage], False)
        decay_columns(w, S, at_s, stage, 1)
        warpgroup.wait_group(0 if cutlass.const_expr(is_silent) else 1)
        aU = seen_as_a(rounded(accU, dtype))
        if cutlass.const_expr(not is_silent):
            issue(mma_x, accO, aU, bP[None, None, None, stage], True)
        issue(mma_s, accS, aU, bKr[None, None, None, stage], True)
        if cutlass.const_expr(not is_silent):
            warpgroup.wait_group(1)
            hand_over_o(w, accO, dtype)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(w.empty + stage)
    if cutlass.const_expr(not is_silent):
        store_last_o(w, o_rows, to_chunk - 1, tokens - (to_chunk - 1) * 64)
    return count + to_chunk - from_chunk
