# SPDX-License-Identifier: Apache-2.0
"""KDA, first half: everything in a chunk of 64 tokens that does not know the state. TMA and mma.sync: Hopper and later.

For one chunk and value head, with log2 decays summed from the chunk's start (G_t; G_C over all of it), unit keys and queries k, q
(the scale inside q), and write strengths b:

    kb = b k e^G              qg = q e^G              kr = k e^{G_C - G}                 [64, 128] each
    A[t, i] = b_t k_t . (e^{G_t - G_i} k_i), i < t    T = (I + A)^{-1}                   [64, 64], T stored transposed
    P[t, i] =     q_t . (e^{G_t - G_i} k_i), i <= t                                      [64, 64]
    e^{G_C}, b, and a bound on how much of a state outlives the chunk                    `VEC` floats

after which `kda_state` has only products to do:  U = T (b v - kb S),   o = qg S + P U,   S <- e^{G_C} S + kr^T U.

Eight warps, on two sides. Warps I and 4 + I own rows 16 I .. 16 I + 15. Where the work is by channels, each side takes half of
them; else one side takes the keys (norms, kb, A, T), the other the queries (norms, qg, P). An array [16, n] of a warp lives in
registers as fragments of mma.sync: thread (r, c) = (lane / 4, lane % 4) holds rows r, r + 8 and channels 8 j + 2 c, + 1. In that
layout
  * a cumulative sum over rows is a product with a triangle of ones (g rounded to fp16, sums in float32),
  * row norms are the diagonal of x x^T,
  * the same registers are an A operand (rows of the warp) and a B operand (columns), so that diagonal blocks of the scores need
    no shared memory, and the others only a copy of another warp's registers.

| step (`kda_prepare_steps.py`)              | by                       | waits for     |
|--------------------------------------------|--------------------------|---------------|
| `sum_gates`: decays, their sums over blocks | half of the channels     | g             |
| `norms`, beta                              | k or q                   | k, q          |
| `factors`: decays from block to block      | a thread a channel       | all warps     |
| `first_pass`: k e^L, q e^L, kr, diagonal blocks of A and P | half of the channels | all warps |
| `join_halves`, inverses of A's diagonal blocks | warps without a block below the diagonal | all warps |
| `second_pass`: blocks below the diagonal; `scale_rows`: kb, qg | A and kb, or P and qg | |
| `place_p`, `invert` and `place_t`; `send_square` | P, or T             | all warps     |

Exponents. L_t sums from the start of the 16-row block, so e^L and e^{L_16 - L} are at most 1: all that the blocks below the
diagonal use, in 16 bits. Diagonal blocks use e^{L_t} e^{-L_i}, which reaches e^{80} for decays of -5 a token: tf32 has the range
of float32. A gate that may decay faster does not come here, unless there is one a head: then e^{L_t - L_i} is one number for an
entry, and multiplies it.

Precision (`dtype`): fp16 operands where keys and queries are normalised here, so that nothing exceeds 1 (2 with negative
eigenvalues); bf16 otherwise.

| shared memory                               | bytes |
|---------------------------------------------|-------|
| q, k, g; then qg, kb, kr in their places    | 48 K (80 K with float32 g) |
| keys for other warps; then A below the diagonal | 12 K |
| A on the diagonal; then T there             | 5 K   |
| sums and factors a block and channel; then P, then T | 8 K |
| bias, norms, largest decays, beta           | 2 K   |
| k e^L, q e^L (bf16 only; fp16 has them in the places of k, q) | 32 K |

Three blocks a multiprocessor hide each other's waits; shared memory is what allows no more.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import pipeline
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.gate import bounded_slope, sigmoid
from cula.ops.cute.common.inverse import inverse_pair
from cula.ops.cute.common.kda_cut import place
from cula.ops.cute.common.kda_prepare_steps import (
    BETA,
    BOUND,
    KEYS,
    LOWER_LEFT,
    TILE,
    UPPER_RIGHT,
    Chunk,
    factors,
    first_pass,
    invert,
    join_halves,
    norms,
    place_a,
    place_p,
    place_t,
    room,
    scale_rows,
    second_pass,
    send_square,
    sum_gates,
    triangles,
)
from cula.ops.cute.common.tiles import F16, F32, I32, tma_split

TMA_WARP = 4  # that stores


# The kernel


@cute.kernel
def prepare_kernel(
    tma_q: cute.CopyAtom,
    gQ: cute.Tensor,
    tma_k: cute.CopyAtom,
    gK: cute.Tensor,
    tma_g: cute.CopyAtom,
    gG: cute.Tensor,
    tma_tiles: cute.CopyAtom,
    gTiles: cute.Tensor,
    mG: cute.Tensor,
    mBeta: cute.Tensor,
    mBeta16: cute.Tensor,
    mA: cute.Tensor,
    mBias: cute.Tensor,
    mT: cute.Tensor,
    mP: cute.Tensor,
    mVec: cute.Tensor,
    mDone: cute.Tensor,
    mCu: cute.Tensor,
    scale: F32,
    lower: F32,
    beta_top: F32,
    beta_bits: I32,
    length: I32,
    steps: I32,
    group: I32,
    mma_f16: cute.TiledMma,
    mma_bf16: cute.TiledMma,
    mma_tf32: cute.TiledMma,
    lt: cute.ComposedLayout,
    lg: cute.ComposedLayout,
    kind: cutlass.Constexpr,
    has_zeros: cutlass.Constexpr,
):
    """A block for each (value head, number of a chunk). T and P are written as squares if `has_zeros`, else by quarters,
    without the one that is zero."""
    cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended
    cute.arch.griddepcontrol_launch_dependents()  # the next kernel may set itself up; it waits for our end
    hv, chunk, seq = cute.arch.block_idx()
    _, spans, _ = cute.arch.grid_dim()
    number, begin, tokens = seq * spans + chunk, seq * length, length
    if length == 0:  # packed: the grid has one row of numbers for all sequences
        _, first, begin, tokens = place(number, 64, mCu, length, steps)
        chunk = number - first
    map_number = number * mVec.shape[1] + hv
    if map_number < cute.size(mDone) and cute.arch.thread_idx()[0] == 0:
        mDone[map_number] = I32(0)  # for the kernels to come
    start = chunk * 64
    if start < tokens:
        prepare_chunk(
            (tma_q, gQ, tma_k, gK, tma_g, gG, tma_tiles, gTiles),
            (mG, mBeta, mBeta16, beta_bits, mA, mBias),
            (mT, mP, mVec),
            scale,
            lower,
            beta_top,
            (mma_f16, mma_bf16, mma_tf32),
            (lt, lg),
            kind,
            has_zeros,
            hv,
            hv if group == 1 else hv // group,
            number,
            begin + start,
            tokens - start,
        )


def load_tiles(loads: Any, t0: Any, bars: Any) -> None:
    """[64, 128] from token t0 on, of each (TMA atom, tile, tensor, head, number of its barrier)."""
    for atom, s, g, head, bar in loads:
        at = cute.local_tile(cute.domain_offset((t0, 0), g[None, None, head]), (64, 128), (0, 0))
        s_part, g_part = tma_split(atom, s, at)
        cute.copy(atom, g_part, s_part, tma_bar_ptr=bars + bar)


@cute.jit
def read_ahead(x: cutlass.Constexpr, gates: cutlass.Constexpr, thread: I32, hv: I32, t0: I32):
    """Beta of our two rows, gates of our rows if there is one a head, and the slope of gates; their bias to shared memory."""
    mG, mBeta, mBeta16, beta_bits, mA, mBias = gates
    bias = x.room.bias
    raw_b, raw_g = cute.make_rmem_tensor((2,), F32), cute.make_rmem_tensor(((2, 2), 1), x.kind.g_type)
    for i in cutlass.range_constexpr(2):
        t = t0 + cutlass.min(16 * x.block_row + x.r + 8 * i, x.left - 1)
        if beta_bits == 32:
            raw_b[i] = mBeta[t, hv]
        else:
            raw_b[i] = mBeta16[t, hv].to(F32)
    if cutlass.const_expr(x.kind.is_scalar):
        for e in cutlass.range_constexpr(4):
            raw_g[e] = mG[t0 + cutlass.min(16 * x.block_row + 2 * x.c + e % 2 + 8 * (e // 2), x.left - 1), hv]
    slope = F32(0.0)
    if cutlass.const_expr(x.kind.has_gate):
        slope = bounded_slope(mA[hv])
        if thread < 128:
            bias[thread] = slope * mBias[hv, thread]
    return raw_b, raw_g, slope


@cute.jit
def clear_past_end(loads: cutlass.Constexpr, thread: I32, left: I32):
    """Rows past the end of a sequence, which belong to someone else."""
    row = thread >> 2
    if row >= left:
        for _, s, _, _, _ in loads:
            zero = cute.make_rmem_tensor((1, 8), s.element_type)
            zero.fill(0.0)
            for p in cutlass.range_constexpr(4):
                cute.autovec_copy(zero, cute.local_tile(s, (1, 8), (row, (thread & 3) * 4 + p)))


@cute.jit
def strengths(x: cutlass.Constexpr, raw: cute.Tensor, beta_top: F32):
    """b of our two rows, which shared memory gets too."""
    beta, b = x.room.beta, cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        t = 16 * x.block_row + x.r + 8 * i
        b[i] = raw[i]
        if beta_top > F32(0.0):  # beta is raw
            b[i] = beta_top * sigmoid(raw[i])
        b[i] = b[i] if t < x.left else F32(0.0)
        if x.c == 0 and x.side == KEYS:
            beta[t] = b[i]
    return b


@cute.jit
def prepare_chunk(
    tma: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    results: cutlass.Constexpr,
    scale: F32,
    lower: F32,
    beta_top: F32,
    mmas: cutlass.Constexpr,
    layouts: cutlass.Constexpr,
    kind: cutlass.Constexpr,
    has_zeros: cutlass.Constexpr,
    hv: I32,
    h: I32,
    number: I32,
    t0: I32,
    left: I32,
):
    """The chunk that begins at token t0 and has `left` tokens (or more than 64: then the rest is another chunk's)."""
    tma_q, gQ, tma_k, gK, tma_g, gG, tma_tiles, gTiles = tma
    mT, mP, mVec = results
    lt, lg = layouts
    has_channels = not kind.is_scalar
    record = cute.arch.make_warp_uniform(number * mVec.shape[1] + hv)
    tid, _, _ = cute.arch.thread_idx()
    wid = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    side, block_row = wid >> 2, wid & 3
    lane = cute.arch.lane_idx()
    r, c = lane >> 2, lane & 3
    here = room(SmemAllocator(), lt, lg, kind)
    x = Chunk(here, kind, mmas, side, block_row, lane, r, c, left)

    # -- g on its way; k and q when it has come, so that they pass while gates are summed and not all blocks' tiles come at once
    loads = [(tma_k, here.k, gK, h, 1), (tma_q, here.q, gQ, h, 1)]
    if cutlass.const_expr(has_channels):
        loads = [(tma_g, here.g, gG, hv, 0), *loads]
    if wid == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(here.bars + i, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if wid == 0:
        with cute.arch.elect_one():
            if cutlass.const_expr(has_channels):
                cute.arch.mbarrier_arrive_and_expect_tx(here.bars, cute.size_in_bytes(kind.g_type, lg))
            cute.arch.mbarrier_arrive_and_expect_tx(here.bars + 1, 2 * TILE)
        load_tiles(loads[:1] if cutlass.const_expr(has_channels) else loads, t0, here.bars)
    raw_b, raw_g, slope = read_ahead(x, gates, tid, hv, t0)  # nobody waits for them yet
    until, after = triangles(r, c)
    if cutlass.const_expr(has_channels):
        cute.arch.mbarrier_wait(here.bars, 0)
        if wid == 0:
            load_tiles(loads[1:], t0, here.bars)
    if left < 64:
        cute.arch.mbarrier_wait(here.bars + 1, 0)
        clear_past_end(loads, tid, left)
    cute.arch.sync_threads()  # the bias is there, too

    # -- decays, norms, beta
    L, rest = sum_gates(x, raw_g, slope, lower, until, after)
    cute.arch.mbarrier_wait(here.bars + 1, 0)
    size, inverse = norms(x, scale)
    b = strengths(x, raw_b, beta_top)
    if c == 0 and side == KEYS:
        for i in cutlass.range_constexpr(2):
            mVec[number, hv, BETA + 16 * block_row + r + 8 * i] = b[i]
    cute.arch.sync_threads()
    factors(x, tid % 128, mVec[number, hv, None], b, size, inverse)
    cute.arch.sync_threads()
    if tid == 0:
        mVec[number, hv, BOUND] = here.bound[0] + here.bound[1] + here.bound[2] + here.bound[3]

    # -- scores and tiles
    diagonal_a, diagonal_p = first_pass(x, until, after, L, rest, b)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    to_memory = lambda s, i: cute.copy(
        tma_tiles, *tma_split(tma_tiles, s, cute.local_tile(gTiles, (64, 128), (3 * record + i, 0)))
    )
    if wid == TMA_WARP:
        to_memory(here.kr, 2)
        cute.arch.cp_async_bulk_commit_group()
    for i in cutlass.range_constexpr(2):
        b[i] = here.beta[16 * block_row + r + 8 * i]  # not kept in registers through the first pass
    join_halves(x, diagonal_a, diagonal_p, b, L)
    joined = pipeline.NamedBarrier(barrier_id=1, num_threads=160)  # the warps of the keys, and one more
    if block_row == 0:
        joined.arrive_and_wait()
        inverse_pair(here.diagonal, side, 3 - side, lane)
    elif side == KEYS:
        joined.arrive()
    scores = second_pass(x)
    if cutlass.const_expr(kind.dtype is F16):
        scale_rows(x, b)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()  # tiles are complete, keys and tables have been read: A and P take their place

    # -- P, then T
    p_has_left = pipeline.NamedBarrier(barrier_id=2, num_threads=256)
    if side == KEYS:
        place_a(x, scores, b)
        pipeline.NamedBarrier(barrier_id=1, num_threads=128).arrive_and_wait()
        cols = cute.make_rmem_tensor((32,), kind.dtype)
        invert(x, cols)
        p_has_left.arrive_and_wait()
        place_t(x, cols, here.out)
        send_square(x, mT, record, None if cutlass.const_expr(has_zeros) else LOWER_LEFT)
    else:
        if wid == TMA_WARP:
            for i in cutlass.range_constexpr(2):
                to_memory(here.kb_qg[None, None, i], i)
            cute.arch.cp_async_bulk_commit_group()
        place_p(x, scores, diagonal_p, L)
        send_square(x, mP, record, None if cutlass.const_expr(has_zeros) else UPPER_RIGHT)
        p_has_left.arrive()
        if wid == TMA_WARP:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
