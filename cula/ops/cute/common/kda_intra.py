# SPDX-License-Identifier: Apache-2.0
"""KDA, the intra-chunk kernel: everything in a chunk of 64 tokens that does not depend on the state. It is made of TMA and
mma.sync. This is Hopper's; Blackwell has most of its steps in a kernel of its own (`sm100/kda_intra.py`).

For one chunk and value head, with log2 decays summed from the chunk's start (G_t; G_C over all of it), unit keys and queries k, q
(the scale inside q), and write strengths b:

    kb = b k e^G              qg = q e^G              kr = k e^{G_C - G}                 [64, 128] each
    A[t, i] = b_t k_t . (e^{G_t - G_i} k_i), i < t    T = (I + A)^{-1}                   [64, 64], T stored transposed
    P[t, i] =     q_t . (e^{G_t - G_i} k_i), i <= t                                      [64, 64]
    e^{G_C}, b, and a bound on how much of a state outlives the chunk (split only)       `VEC` floats

after which the recurrence (`kda_recurrence.py`) has only products to do:

    U = T (b v - kb S)        o = qg S + P U          S <- e^{G_C} S + kr^T U

Eight warps, on two sides. Warps I and 4 + I own rows 16 I .. 16 I + 15. Where the work is by channels, each side takes half of
them; else one side takes the keys (norms, kb, A, T), the other the queries (norms, qg, P). An array [16, n] of a warp lives in
registers as fragments of mma.sync: thread (r, c) = (lane / 4, lane % 4) holds rows r, r + 8 and channels 8 j + 2 c, + 1. In that
layout
  * a cumulative sum over rows is a product with a triangle of ones (g rounded to fp16, sums in float32),
  * row norms are the diagonal of x x^T,
  * the same registers are an A operand (rows of the warp) and a B operand (columns), so that diagonal blocks of the scores need
    no shared memory, and the others only a copy of another warp's registers.

| step (`kda_intra_steps.py`)                                    | by                                       | waits for |
|----------------------------------------------------------------|------------------------------------------|-----------|
| `sum_gates`: decays, their sums over blocks                    | half of the channels                     | g         |
| `norms`, `write_strengths`                                     | k or q                                   | k, q      |
| `factors`: decays from block to block                          | a thread a channel                       | all warps |
| `first_pass`: k e^L, q e^L, kr, diagonal blocks of A and P     | half of the channels                     | all warps |
| `join_halves`, inverses of A's diagonal blocks                 | warps without a block below the diagonal | all warps |
| `second_pass`: blocks below the diagonal; `scale_rows`: kb, qg | A and kb, or P and qg                    |           |
| `place_p`, `invert` and `place_t`; `send_square`               | P, or T                                  | all warps |
| `leave_sizes`, `bound_by_pairs`: what outlives the chunk       | queries, then keys                       |           |

Exponents. L_t sums from the start of the 16-row block, so e^L and e^{L_16 - L} are at most 1: all that the blocks below the
diagonal use, in 16 bits. Diagonal blocks use e^{L_t} e^{-L_i}, which reaches e^{80} for decays of -5 a token: tf32 has the range
of float32. Where gates may decay faster, diagonal blocks are made of three of 8x8, with exponents from the middle of each
(`first_pass_steep`). With one gate a head e^{L_t - L_i} is one number for an entry, and multiplies it.

Precision (`dtype`): fp16 operands where keys and queries are normalised here, so that nothing exceeds 1 (2 with negative
eigenvalues); bf16 otherwise. The backward has fp16 for keys and queries that come normalised, too.

| shared memory                               | bytes |
|---------------------------------------------|-------|
| q, k, g; then qg, kb, kr in their places    | 48 K  |
| keys for other warps; then A below the diagonal | 12 K |
| A on the diagonal; then T there             | 5 K   |
| sums and factors a block and channel; then P, then T | 8 K |
| bias, norms, sizes of kb and kr, beta       | 2 K   |
| k e^L, q e^L (bf16 only; fp16 has them in the places of k, q) | 32 K |

Three blocks on an SM hide each other's waits; shared memory is what allows no more.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.gate import sigmoid, slope_of
from cula.ops.cute.common.inverse import inverse_pair
from cula.ops.cute.common.kda_intra_bound import (
    bound_by_pairs,
    leave_head_bound,
    leave_largest_decay,
    leave_sizes,
)
from cula.ops.cute.common.kda_intra_smem import Full, smem_layout
from cula.ops.cute.common.kda_intra_steep import first_pass_of
from cula.ops.cute.common.kda_intra_steps import (
    KEYS,
    Chunk,
    IntraMmas,
    factors,
    invert,
    join_halves,
    norms,
    place_a,
    place_p,
    place_t,
    scale_rows,
    second_pass,
    send_square,
    sum_gates,
    sums_of,
)
from cula.ops.cute.common.kda_lengths import leave_to_fused
from cula.ops.cute.common.tiles import F16, F32, I32, Tma, tma_split
from cula.ops.cute.common.varlen_index import chunk_of_block
from cula.ops.cute.kda_abi import BETA, BOUND, LOWER_LEFT, TILE_BYTES, UPPER_RIGHT

THREADS = 256
LOAD_WARP, STORE_WARP = 0, 4  # issue what TMA does


class Barrier(enum.IntEnum):
    """Named barriers. A number may serve twice, one use after the other."""

    DIAGONAL = 1  # A's diagonal blocks are whole: the warps of the keys, and the first of the queries
    A_IN_PLACE = 1  # all rows of A are: the warps of the keys
    P_LEFT = 2  # P has left the memory that T takes, and sizes of kr and kb are there: all warps


class IntraTma(NamedTuple):
    """What TMA copies."""

    q: Tma
    k: Tma
    g: Tma  # one gate a channel, in bf16; others are read by threads
    tiles: Tma  # kb, qg, kr, three tiles a record


class GateInputs(NamedTuple):
    """What threads read of gates and write strengths."""

    mGate: Any  # [T, HV], where there is one gate a head; [T, HV, 128] of float32
    mBeta: Any  # [T, HV], as float32
    mBeta16: Any  # and as bfloat16
    mA: Any  # [HV]
    mBias: Any  # [HV, 128]


class IntraScalars(NamedTuple):
    """Numbers of a call."""

    scale: Any
    lower: Any
    beta_top: Any
    beta_bits: Any
    longest: Any = None  # see `kda_lengths.py`; None: the call is the intra-chunk kernel's


class IntraResults(NamedTuple):
    """What threads write."""

    mT: Any  # [64 records, 64], transposed; or by quarters, [128 records, 32]
    mP: Any  # the same
    mVec: Any  # [chunks, HV, VEC]
    mDone: Any  # [segments of all heads]: how many of a segment's B and M there are


@cute.kernel
def intra_kernel(
    tma: IntraTma,
    gates: GateInputs,
    results: IntraResults,
    mCu: cute.Tensor,
    scalars: IntraScalars,
    length: I32,
    halvings: I32,
    group: I32,
    mmas: IntraMmas,
    lt: cute.ComposedLayout,
    variant: cutlass.Constexpr,
    has_whole_squares: cutlass.Constexpr,
):
    """A block for each (value head, number of a chunk). T and P are written as whole squares, or by quarters, without the one
    that is zero."""
    if cutlass.const_expr(scalars.longest is not None):
        leave_to_fused(mCu, scalars.longest, is_last=False)
    cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended
    cute.arch.griddepcontrol_launch_dependents()  # the next kernel may set itself up; it waits for our end
    hv, number, begin, start, tokens = chunk_of_block(mCu, length, halvings)
    clear_done(results, hv, number)
    if start < tokens:
        place = Place(hv, head_of(hv, group), number, begin + start, tokens - start)
        intra_chunk(tma, gates, results, scalars, mmas, lt, variant, has_whole_squares, place)


class Place(NamedTuple):
    """Where a chunk is."""

    hv: Any  # value head
    h: Any  # head of q and k
    number: Any  # of the chunk
    t0: Any  # first token
    left: Any  # tokens from there to the sequence's end; more than 64 are later chunks'


@cute.jit
def clear_done(results: cutlass.Constexpr, hv: I32, number: I32):
    """Of the segment that has the block's number, if there is one: the recurrence counts."""
    segment = number * results.mVec.shape[1] + hv
    if segment < cute.size(results.mDone) and cute.arch.thread_idx()[0] == 0:
        results.mDone[segment] = I32(0)


@cute.jit
def head_of(hv: I32, group: I32):
    """Of q and k."""
    return hv if group == 1 else hv // group


def load_tiles(loads: Any, t0: Any, full: Any) -> None:
    """[64, 128] from token t0 on, of each (tensor, tile in shared memory, head, which of the mbarriers)."""
    for tma, s, head, which in loads:
        at = cute.local_tile(cute.domain_offset((t0, 0), tma.coordinates[None, None, head]), (64, 128), (0, 0))
        s_part, g_part = tma_split(tma.atom, s, at)
        cute.copy(tma.atom, g_part, s_part, tma_bar_ptr=full + which)


@cute.jit
def start_loads(x: cutlass.Constexpr, tma: cutlass.Constexpr, place: cutlass.Constexpr, wid: I32):
    """g on its way; k and q when it has come, so that they pass while gates are summed and not all blocks' tiles come at once.
    Returns all three, for `finish_loads`."""
    smem, has_gate_tile = x.smem, x.variant.has_gate_tile
    loads = [(tma.k, smem.k, place.h, Full.KQ), (tma.q, smem.q, place.h, Full.KQ)]
    if cutlass.const_expr(has_gate_tile):
        loads = [(tma.g, smem.g, place.hv, Full.G), *loads]
    if wid == LOAD_WARP:
        with cute.arch.elect_one():
            if cutlass.const_expr(has_gate_tile):
                cute.arch.mbarrier_arrive_and_expect_tx(smem.full + Full.G, TILE_BYTES)
            cute.arch.mbarrier_arrive_and_expect_tx(smem.full + Full.KQ, 2 * TILE_BYTES)
        load_tiles(loads[:1] if cutlass.const_expr(has_gate_tile) else loads, place.t0, smem.full)
    return loads


@cute.jit
def finish_loads(
    x: cutlass.Constexpr,
    loads: cutlass.Constexpr,
    place: cutlass.Constexpr,
    thread: I32,
    wid: I32,
    are_operands: cutlass.Constexpr = False,
):
    """g has come, and rows past the end are clear. k and q may be operands as they lie."""
    smem = x.smem
    if cutlass.const_expr(x.variant.has_gate_tile):
        cute.arch.mbarrier_wait(smem.full + Full.G, 0)
        if wid == LOAD_WARP:
            load_tiles(loads[1:], place.t0, smem.full)
    if place.left < 64:
        cute.arch.mbarrier_wait(smem.full + Full.KQ, 0)
        clear_past_end(loads, thread, place.left)
        if cutlass.const_expr(are_operands):
            cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()  # the bias is there, too


@cute.jit
def read_ahead(x: cutlass.Constexpr, gates: cutlass.Constexpr, beta_bits: I32, thread: I32, hv: I32, t0: I32):
    """(Beta of our two rows, gates of our rows that are not read by TMA, A_log and the slope of raw gates). Their bias goes to
    shared memory."""
    bias, raw_b = x.smem.bias, cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        t = t0 + cutlass.min(16 * x.block_row + x.r + 8 * i, x.left - 1)
        if beta_bits == 32:
            raw_b[i] = gates.mBeta[t, hv]
        else:
            raw_b[i] = gates.mBeta16[t, hv].to(F32)
    raw_g = read_gates(x, gates.mGate, hv, t0)
    A_log, slope = F32(0.0), F32(0.0)
    if cutlass.const_expr(x.variant.is_raw):
        A_log = gates.mA[hv]
        slope = slope_of(A_log, x.variant.gate == "gate")
        if thread < 128:
            bias[thread] = slope * gates.mBias[hv, thread]
    return raw_b, raw_g, A_log, slope


@cute.jit
def read_gates(x: cutlass.Constexpr, mGate: cute.Tensor, hv: I32, t0: I32):
    """Gates of tokens 2 c + ci + 8 ri of our block, [ci, ri, channel]: one a head, or channels r + 8 j of our half, as
    `load_matrix`, transposed, has those of a tile. Zeros past the sequence's end."""
    variant = x.variant
    channels = 1 if variant.is_scalar else 8
    raw = cute.make_rmem_tensor(((2, 2), 1) if variant.is_scalar else (4 * channels,), variant.g_type)
    for e in cutlass.range_constexpr(0 if cutlass.const_expr(variant.has_gate_tile) else 4):
        row = 16 * x.block_row + 2 * x.c + e % 2 + 8 * (e // 2)
        t = t0 + cutlass.min(row, x.left - 1)
        for j in cutlass.range_constexpr(channels):
            if cutlass.const_expr(variant.is_scalar):
                value = mGate[t, hv]
            else:
                value = mGate[t, hv, 64 * x.side + x.r + 8 * j]
            raw[e + 4 * j] = value if row < x.left else variant.g_type(0.0)
    return raw


@cute.jit
def clear_past_end(loads: cutlass.Constexpr, thread: I32, left: I32):
    """Zeros for rows past the end of a sequence, which belong to the next one."""
    row = thread >> 2
    if row >= left:
        for _, s, _, _ in loads:
            zero = cute.make_rmem_tensor((1, 8), s.element_type)
            zero.fill(0.0)
            for p in cutlass.range_constexpr(4):
                cute.autovec_copy(zero, cute.local_tile(s, (1, 8), (row, (thread & 3) * 4 + p)))


@cute.jit
def write_strengths(x: cutlass.Constexpr, raw: cute.Tensor, beta_top: F32):
    """b of our two rows, which goes to shared memory too."""
    beta, b = x.smem.beta, cute.make_rmem_tensor((2,), F32)
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
def intra_chunk(
    tma: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    results: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    lt: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    has_whole_squares: cutlass.Constexpr,
    place: cutlass.Constexpr,
):
    """One chunk by the eight warps of a block."""
    hv, number, left, mVec = place.hv, place.number, place.left, results.mVec
    record = cute.arch.make_warp_uniform(number * mVec.shape[1] + hv)
    tid, _, _ = cute.arch.thread_idx()
    wid = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    side, block_row = wid >> 2, wid & 3
    lane = cute.arch.lane_idx()
    r, c = lane >> 2, lane & 3
    smem = smem_layout(SmemAllocator(), lt, variant)
    x = Chunk(smem, variant, mmas, side, block_row, lane, r, c, left)

    if wid == LOAD_WARP:
        with cute.arch.elect_one():
            for which in Full:
                cute.arch.mbarrier_init(smem.full + which, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    loads = start_loads(x, tma, place, wid)
    raw_b, raw_g, A_log, slope = read_ahead(x, gates, scalars.beta_bits, tid, hv, place.t0)  # nobody waits for them yet
    until, after = sums_of(variant, r, c)
    finish_loads(x, loads, place, tid, wid)

    # -- decays, norms, write strengths
    L, rest = sum_gates(x, raw_g, A_log, slope, scalars.lower, until, after)
    cute.arch.mbarrier_wait(smem.full + Full.KQ, 0)
    size, inverse = norms(x, scalars.scale)
    b = write_strengths(x, raw_b, scalars.beta_top)
    if c == 0 and side == KEYS:
        for i in cutlass.range_constexpr(2):
            mVec[number, hv, BETA + 16 * block_row + r + 8 * i] = b[i]
    cute.arch.sync_threads()
    kept = factors(x, tid % 128, mVec[number, hv, None])
    if side == KEYS:
        leave_largest_decay(x, kept, b, size, inverse)
    cute.arch.sync_threads()
    if cutlass.const_expr(variant.is_scalar):
        leave_head_bound(x, tid, mVec[number, hv, None])

    # -- scores and tiles
    diagonal_a, diagonal_p = first_pass_of(x, until, after, L, rest, b)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if wid == STORE_WARP:
        store_tile(tma.tiles, smem.kr, record, 2)
        cute.arch.cp_async_bulk_commit_group()
    for i in cutlass.range_constexpr(2):
        b[i] = smem.beta[16 * block_row + r + 8 * i]  # not kept in registers through the first pass
    join_halves(x, diagonal_a, diagonal_p, b, L)
    joined = NamedBarrier(barrier_id=Barrier.DIAGONAL, num_threads=160)
    if block_row == 0:
        joined.arrive_and_wait()
        inverse_pair(smem.diagonal, side, 3 - side, lane)
    elif side == KEYS:
        joined.arrive()
    scores = second_pass(x)
    again = x.anew(tid)
    if cutlass.const_expr(variant.dtype is F16):
        scale_rows(x, b)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()  # tiles are complete, keys and tables have been read: A and P take their place

    if side == KEYS:
        finish_keys(x, again, scores, b, results, place, record, has_whole_squares)
    else:
        finish_queries(x, again, scores, diagonal_p, L, tma.tiles, results.mP, record, wid, has_whole_squares)


@cute.jit
def finish_keys(
    x: cutlass.Constexpr,
    again: cutlass.Constexpr,
    scores: cute.Tensor,
    b: cute.Tensor,
    results: cutlass.Constexpr,
    place: cutlass.Constexpr,
    record: I32,
    has_whole_squares: cutlass.Constexpr,
):
    """T, when P has left the memory that it takes, and what bounds the chunk's transition. By the warps of the keys."""
    variant, mVec = x.variant, results.mVec
    place_a(x, scores, b)
    NamedBarrier(barrier_id=Barrier.A_IN_PLACE, num_threads=128).arrive_and_wait()
    cols = cute.make_rmem_tensor((32,), variant.dtype)
    invert(x, cols)
    NamedBarrier(barrier_id=Barrier.P_LEFT, num_threads=256).arrive_and_wait()
    place_t(again if variant.is_steep or variant.gate != "gate" else x, cols, x.smem.out)
    send_square(x, results.mT, record, None if cutlass.const_expr(has_whole_squares) else LOWER_LEFT)
    if cutlass.const_expr(not variant.is_scalar):
        bound = bound_by_pairs(x, cols)
        if x.lane == 0:
            mVec[place.number, place.hv, BOUND + x.block_row] = bound


@cute.jit
def finish_queries(
    x: cutlass.Constexpr,
    again: cutlass.Constexpr,
    scores: cute.Tensor,
    diagonal_p: cute.Tensor,
    L: cute.Tensor,
    tiles: cutlass.Constexpr,
    mP: cute.Tensor,
    record: I32,
    wid: I32,
    has_whole_squares: cutlass.Constexpr,
):
    """P, sizes of kr and kb, and tiles to global memory. By the warps of the queries."""
    variant = x.variant
    if wid == STORE_WARP:
        for i in cutlass.range_constexpr(2):
            store_tile(tiles, x.smem.kb_qg[None, None, i], record, i)
        cute.arch.cp_async_bulk_commit_group()
    place_p(again if variant.is_steep or variant.gate != "gate" else x, scores, diagonal_p, L)
    send_square(x, mP, record, None if cutlass.const_expr(has_whole_squares) else UPPER_RIGHT)
    if cutlass.const_expr(not variant.is_scalar):
        leave_sizes(again)  # the inverse takes longer than this and P
    NamedBarrier(barrier_id=Barrier.P_LEFT, num_threads=256).arrive()
    if wid == STORE_WARP:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def store_tile(tiles: Tma, s: Any, record: Any, i: int) -> None:
    """Tile i of a record, of kb, qg and kr, to global memory."""
    to = cute.local_tile(tiles.coordinates, (64, 128), (3 * record + i, 0))
    cute.copy(tiles.atom, *tma_split(tiles.atom, s, to))
