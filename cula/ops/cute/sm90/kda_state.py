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
blocks of lower numbers only, which have begun before it.

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

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.fragments import shared_at, widen
from cula.ops.cute.common.kda_prepare_steps import BETA, LOWER_LEFT, UPPER_RIGHT, VEC
from cula.ops.cute.common.kda_range import inverse_of, is_outside, move_inside
from cula.ops.cute.common.kda_segments import jobs_of, segment_at
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    allocate_tile,
    issue,
    rounded,
    rows_and_columns,
    seen_as_a,
    swapped,
    tile_at,
    tile_layout,
    tma_split,
)

STAGES = 2
OF_B, OF_M, TO_WARM = 0, 1, 2  # walks without output
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
SAFELY_LOW, SAFELY_HIGH = (
    2.0**-13,
    2.0**13,
)  # of sums of squares: a row between them is not far outside `kda_range`'s window, if at all
TILE_BYTES, QUARTER_BYTES, MAP_BYTES = 64 * 128 * 2, 32 * 32 * 2, 128 * 128 * 2


# What fp16 can hold


@cute.jit
def scale_rows(S: cute.Tensor, factor: cute.Tensor):
    for j in cutlass.range_constexpr(cute.size(S, mode=[1])):
        S[0, j] = S[0, j] * factor[0]
        S[1, j] = S[1, j] * factor[1]


@cute.jit
def unscale_rows(S: cute.Tensor, factor: cute.Tensor):
    """Divide by powers of two, exactly."""
    back = cute.make_rmem_tensor((2,), F32)
    for a in cutlass.range_constexpr(2):
        back[a] = inverse_of(factor[a])
    scale_rows(S, back)


@cute.jit
def largest(S: cute.Tensor, top: cute.Tensor):
    """top[row] <- max(top[row], |S[row, :]|), of the columns that this thread holds."""
    for a in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(cute.size(S, mode=[1])):
            top[a] = cute.arch.fmax(top[a], cute.arch.fmax(S[a, j], -S[a, j]))


@cute.jit
def over_row(x: F32):
    """The largest of the four lanes that hold a row."""
    for off in (1, 2):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=off))
    return x


@cute.jit
def squares(x: cute.Tensor, sums: cute.Tensor, dtype: cutlass.Constexpr):
    """sums[row] <- the sum of squares of the columns that this thread holds, roughly: in 16 bits, where too much is infinite. A
    quarter of the work of finding the largest."""
    pairs, part = cute.recast_tensor(x, I32), cute.make_rmem_tensor((4,), I32)  # of [columns, row]; two sums a row
    part.fill(0)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        if cutlass.const_expr(dtype is F16):
            part[i % 4] = cute.arch.fma_packed_f16x2(pairs[i], pairs[i], part[i % 4])
        else:
            part[i % 4] = cute.arch.fma_packed_bf16x2(pairs[i], pairs[i], part[i % 4])
    of_column = cute.recast_tensor(part, dtype)  # [column, row, sum]
    for a in cutlass.range_constexpr(2):
        first, second = [of_column[2 * a + i].to(F32) + of_column[2 * a + i + 1].to(F32) for i in (0, 4)]
        sums[a] = first + second


@cute.jit
def is_safely_inside(half: cute.Tensor, entering: cutlass.Constexpr, factor: cute.Tensor):
    """Whether no row of the warp needs a closer look: by the squares of S, rounded to fp16, and of what enters, in bf16 and not
    scaled."""
    (sums, of_v), is_low = [cute.make_rmem_tensor((2,), F32) for _ in range(2)], cutlass.Boolean(False)
    squares(half, sums, F16)
    if cutlass.const_expr(entering is not None):
        squares(entering, of_v, BF16)
        for a in cutlass.range_constexpr(2):
            sums[a] += of_v[a] * factor[a] * factor[a]
    for a in cutlass.range_constexpr(2):
        lanes = cute.arch.vote_ballot_sync(sums[a] >= F32(SAFELY_LOW))  # of the four of a row one is enough
        lanes = lanes | (lanes >> 1)
        lanes = lanes | (lanes >> 2)
        is_low = is_low or (lanes & 0x11111111) != 0x11111111
    is_high = not (sums[0] <= F32(SAFELY_HIGH) and sums[1] <= F32(SAFELY_HIGH))
    return not (cute.arch.vote_any_sync(is_high) or is_low)


@cute.jit
def scale_into_range(S: cute.Tensor, entering: cutlass.Constexpr, factor: cute.Tensor):
    """Scale rows of S that, or whose part of what enters, have left what fp16 holds well (`common/kda_range.py`)."""
    top, move = [cute.make_rmem_tensor((2,), F32) for _ in range(2)]
    top.fill(0.0)
    if cutlass.const_expr(entering is not None):
        wide = cute.make_rmem_tensor_like(entering, F32)
        widen(entering, wide)
        largest(rows_and_columns(wide), top)
        for a in cutlass.range_constexpr(2):
            top[a] = top[a] * factor[a]
    largest(S, top)
    for a in cutlass.range_constexpr(2):
        top[a] = over_row(top[a])
        move[a] = move_inside(top[a], factor[a]) if is_outside(top[a], factor[a]) else F32(1.0)
        factor[a] = factor[a] * move[a]
    scale_rows(S, move)


@cute.jit
def keep_in_range(accS: cute.Tensor, half: cute.Tensor, entering: cutlass.Constexpr, factor: cute.Tensor):
    """S, and it rounded to fp16, such that fp16 holds it well, and so v with which it is to meet."""
    if not is_safely_inside(half, entering, factor):
        scale_into_range(rows_and_columns(accS), entering, factor)
        half.store(accS.load().to(F16))


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


@cute.jit
def load_map(
    tma_m: cute.CopyAtom,
    parts: cutlass.Constexpr,
    bar: cute.Pointer,
    odd: cutlass.Constexpr,
    halves: cutlass.Constexpr,
    record: I32,
):
    """M of a segment, hi or hi and lo, into one of the two places."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bar, halves * MAP_BYTES)
    for half in cutlass.range_constexpr(halves):
        s_part, g_part = parts[2 * odd + half]
        cute.copy(tma_m, g_part[None, 2 * record + half], s_part, tma_bar_ptr=bar)


@cute.jit
def chain(
    accS: cute.Tensor,
    factor: cute.Tensor,
    mma_s: cute.TiledMma,
    thr_s: cutlass.Constexpr,
    maps: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    lm: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    bars: cute.Pointer,
    both: cutlass.Constexpr,
    part: I32,
    thread: I32,
    is_issuer: cutlass.Boolean,
    record: I32,
    step: I32,
    n: I32,
):
    """accS <- M_{n-1} (... M_0 S + B_0 ...) + B_{n-1}; map i has the number record + i * step.

    S is a pair of 16-bit values, hi + lo, and so is M in bf16 (their product leaves lo lo out); fp16 has the mantissa of tf32,
    and M's hi is enough. Maps pass through the memory of the chunks' tiles (a [128, 128] one is two stages of [64, 128]), in two
    places by turns, so that the next comes while one is applied.
    """
    tma_m, gM, mB = maps
    halves = 1 if cutlass.const_expr(dtype is F16) else 2
    sM = [tile_at(t, lm, dtype) for t in tiles]
    bM = [thr_s.make_fragment_B(thr_s.partition_B(swapped(s))) for s in sM]  # [N = dk out, K = dk in]
    parts = [tma_split(tma_m, s, cute.local_tile(gM, (128, 128), (None, 0))) for s in sM]
    for odd in cutlass.range_constexpr(2):
        if odd < n and is_issuer:
            load_map(tma_m, parts, bars + odd, odd, halves, record + odd * step)
    # B of the next step comes while one is multiplied. (Only where a factor is applied to it: else the compiler would load it
    # right into accumulators in flight.)
    is_ahead = cutlass.const_expr(dtype is F16)
    following = cute.make_rmem_tensor_like(accS, F32)
    if is_ahead:
        load_b(mB, record, part, thread, following)
    for i in cutlass.range(0, n, 2, unroll=1):
        for odd in cutlass.range_constexpr(2):
            if i + odd < n:
                hi, low = rounded(accS, dtype), cute.make_rmem_tensor_like(accS, dtype)
                if is_ahead:
                    keep_in_range(accS, hi, None, factor)
                low.store((accS.load() - hi.load().to(F32)).to(dtype))
                if is_ahead:
                    accS.store(following.load())
                    scale_rows(rows_and_columns(accS), factor)
                else:
                    load_b(mB, record + (i + odd) * step, part, thread, accS)
                cute.arch.mbarrier_wait(bars + odd, (i // 2) % 2)
                warpgroup.fence()
                atom = cute.make_mma_atom(mma_s.op)
                atom.set(warpgroup.Field.ACCUMULATE, True)
                for a, b in ((hi, bM[2 * odd]), (low, bM[2 * odd]), (hi, bM[2 * odd + 1]))[: 1 + halves]:
                    for k in cutlass.range_constexpr(8):
                        cute.gemm(atom, accS, seen_as_a(a)[None, None, k], b[None, None, k], accS)
                warpgroup.commit_group()
                if is_ahead:
                    load_b(mB, record + cutlass.min(i + odd + 1, n - 1) * step, part, thread, following)
                warpgroup.wait_group(0)
                both.arrive_and_wait()
                if i + odd + 2 < n and is_issuer:
                    load_map(tma_m, parts, bars + odd, odd, halves, record + (i + odd + 2) * step)


# The walk


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
):
    """The producer: all that the chunks [from_chunk, to_chunk) are walked with, two ahead. Before them there were `count`;
    returns how many there are now."""
    (tma_tiles, tiles_g, kb_s, qg_s, kr_s), (tma_v, v_g, v_s), (tma_vec, e_g, e_s), (tma_t, t_g, t_s), (tma_p, p_g, p_s) = copies
    size = (3 * TILE_BYTES + 3 * QUARTER_BYTES if cutlass.const_expr(is_silent) else 4 * TILE_BYTES + 6 * QUARTER_BYTES) + 4 * VEC
    for chunk in cutlass.range(from_chunk, to_chunk, unroll=1):
        record, n = first_record + chunk * HV, count + chunk - from_chunk
        stage = n % STAGES
        bar = full + stage
        cute.arch.mbarrier_wait(empty + stage, (n // STAGES + 1) % 2)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
        cute.copy(tma_tiles, tiles_g[None, 3 * record], kb_s[None, stage], tma_bar_ptr=bar)
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
        for p in cutlass.range_constexpr(4):
            row = p * 16 + w.thread // 8
            if row < left:
                cute.autovec_copy(
                    cute.local_tile(w.sO, (1, 8), (row, w.thread % 8)),
                    cute.local_tile(o_rows[None, None, chunk], (1, 8), (row, w.thread % 8)),
                )


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
    length: I32,
    steps: I32,
    helpers: I32,
    mma_x: cute.TiledMma,
    mma_t: cute.TiledMma,
    mma_s: cute.TiledMma,
    lt: cute.ComposedLayout,
    lv: cute.ComposedLayout,
    lo: cute.ComposedLayout,
    lm: cute.ComposedLayout,
    dtype: cutlass.Constexpr,
):
    """A block for each (value head, number): `helpers`, then one for the number of each segment."""
    tid, _, _ = cute.arch.thread_idx()
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    warpgroup_id = cute.arch.make_warp_uniform(tid // 128)
    smem = SmemAllocator()
    sKb, sQg, sKr = [allocate_tile(smem, lt, dtype) for _ in range(3)]
    sV = allocate_tile(smem, lv)
    # T and P by quarters [32, 32], of which one is zero and stays so: stage, columns, rows
    square, quarters = tile_layout(64, 64, STAGES, dtype, columns_of=32), tile_layout(32, 32, 4 * STAGES, dtype)
    sT, sP = allocate_tile(smem, square, dtype), allocate_tile(smem, square, dtype)
    sO = allocate_tile(smem, lo)  # [64 tokens, 64 dv, warpgroup]
    sVec = smem.allocate_tensor(F32, cute.make_layout((1, VEC, STAGES), stride=(VEC, 1, VEC)), byte_alignment=128)
    full, empty, map_bars = [smem.allocate_array(cutlass.Int64, STAGES) for _ in range(3)]
    sBegin = smem.allocate_tensor(I32, cute.make_layout(1), byte_alignment=4)
    hv, number, _ = cute.arch.block_idx()
    HV = mVec.shape[1]
    own_number = cutlass.max(number - helpers, 0)  # a helper's is that of the only sequence
    seq, begin, tokens, chunk0, i, segments = segment_at(own_number, mCu, L, length, steps)
    first_record, start, to_chunk = chunk0 * HV + hv, i * L, cutlass.min(i * L + L, (tokens + 63) // 64)
    if warp_id == 0:
        with cute.arch.elect_one():
            sBegin[0] = begin  # a chain of maps leaves no register for it
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, 8)  # warps
                cute.arch.mbarrier_init(map_bars + stage, 1)
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
    chained = pipeline.NamedBarrier(barrier_id=4, num_threads=288)  # all warps at work: maps have left the tiles

    cute.arch.griddepcontrol_wait()  # for the kernel before: this one was launched before it ended
    cute.arch.griddepcontrol_launch_dependents()
    is_walker, warm, cold, b_segment, m_segment = jobs_of(mVec, hv, number, helpers, has_h0, L, chunk0, i, segments)

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
            for task in cutlass.range(3, unroll=1):
                is_on, from_chunk, chunks = span_of(task, b_segment, m_segment, start, warm, L)
                if is_on:
                    count = feed(copies, full, empty, count, first_record, HV, from_chunk, from_chunk + chunks, True)
            if is_walker:
                if cold == 1:
                    chained.arrive_and_wait()
                count = feed(copies, full, empty, count, first_record, HV, start, to_chunk, False)
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
        for task in cutlass.range(3, unroll=1):
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
                    record = (own_number - i + (b_segment if task == OF_B else m_segment)) * HV + hv
                    if task == OF_B:
                        store_b(accS, mB, record, part, thread)
                    else:
                        hi, low = rounded(accS, dtype), cute.make_rmem_tensor_like(accS, dtype)
                        low.store((accS.load() - hi.load().to(F32)).to(dtype))
                        cute.autovec_copy(hi, ours(mM[2 * record, None, None]))
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
                record = (own_number - i) * HV + hv
                wait_for_maps(mDone, record, HV, i, has_h0)
                both.arrive_and_wait()  # the tiles are free, too
                cute.arch.fence_proxy("async.global")
                if has_h0 == 0:  # from zero the first map gives its B
                    load_b(mB, record, part, thread, accS)
                    record += HV
                chain(
                    accS,
                    factor,
                    mma_s,
                    thr_s,
                    (tma_m, gM, mB),
                    (sKb, sQg, sKr, sV),
                    lm,
                    dtype,
                    map_bars,
                    both,
                    part,
                    thread,
                    warp_id == 4,
                    record,
                    HV,
                    i - 1 + has_h0,
                )
                chained.arrive_and_wait()

            # -- the chunks, and what is left
            o_rows = cute.local_tile(cute.domain_offset((sBegin[0], 0), mO[None, None, hv]), (64, 64), (None, part))
            count = walk(w, count, start, to_chunk, tokens, I32(1), o_rows, dtype)
            if is_f16:
                unscale_rows(S, factor)
            if i == segments - 1 and has_ht == 1:
                cute.autovec_copy(accS, ours(mHt[seq, hv, None, None]))


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
