# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper, the preparing role: all of a chunk that knows no state and no query. See `gdn.py`.

    G = cumsum of log2 decays     f = 2^G     r = 2^(G_C - G), summed from the end: no difference of large numbers     b
    A[t, i] = k_t . k_i 2^(G_t - G_i) b_i, i < t                  T = (I + A)^-1

A warpgroup. Keys are made operands in place: a thread has half of a row, normalises it and rounds it to fp16. Scores are one
wgmma, of which warp w has rows 16 w .. 16 w + 15; a decay is one number for an entry, and no exponent is above zero.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import NamedBarrier

from cula.core.constants import LOG2_E
from cula.ops.cute.common.fragments import flat, lane_address, shared_at, store_matrix, widen
from cula.ops.cute.common.gate import exp2, inverse_norm, log2, sigmoid, to_log2
from cula.ops.cute.common.inverse import below, inverse_columns, inverse_pair
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, issue, rows_and_columns
from cula.ops.cute.gdn_abi import TILE_BYTES
from cula.ops.cute.sm90.kda_recurrence_steps import copy_of, copy_tile

from .gdn_items import number_in, read_pairs, whole_plan, word_at
from .gdn_smem import DECAY, INTO_STATE, POWER, STRENGTH, SUM, Barrier, work_of

GONE = -128.0  # log2 of a token's decay; what is faster is 0 in float32 all the same, and sums of it keep their digits
# The tensor cores drop the low 13 bits of a float32 operand, on average 0.72 * 2^-11 of it. Given back here, as an exponent, what
# is left is the error of rounding, without an instruction for each.
UNBIASED = math.log2(1.0 + 0.72 * 2.0**-11)
HALF = 8192  # bytes between the halves of a [64, 128] tile


@cute.jit
def prepare_role(
    tma_k: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    which: I32,
    variant: cutlass.Constexpr,
):
    """Every chunk, counted through all the heads of a block; or, where two share the work, every other one."""
    if cutlass.const_expr(variant.parts == 1):
        prepare_head(tma_k, gates, scalars, items, plan, mmas, smem, bars, which, I32(0), variant)
    else:
        n = I32(0)
        for item in cutlass.range(items.first, items.total, items.step, unroll=1):
            n = prepare_head(tma_k, gates, scalars, items, whole_plan(items, item), mmas, smem, bars, which, n, variant)


@cute.jit
def prepare_head(
    tma_k: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    which: I32,
    n0: I32,
    variant: cutlass.Constexpr,
):
    """The chunks of a plan, before which there were n0; returns how many there are then."""
    wid, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3, cute.arch.lane_idx()
    preparers = cutlass.const_expr(variant.preparers)
    raw_g, raw_b = [cute.make_rmem_tensor((2,), I32) for _ in range(2)]
    hv, begin, tokens, end = plan.hv, plan.begin, plan.tokens, plan.end
    first = plan.start + ((which - n0) & (preparers - 1))
    of_head = cute.domain_offset((begin, 0), tma_k.coordinates[None, None, hv // items.group])
    of_k = copy_of(tma_k, smem.raw_k, cute.local_tile(of_head, (64, 128), (None, 0)))
    a, bias = gate_of(gates, scalars, hv)
    for i in cutlass.range_constexpr(2 // preparers):
        if wid == 0 and first + i < end:
            ask_for_keys(of_k, bars, first + i, n0 + first + i - plan.start)
    ahead = Ahead(gates, scalars, raw_g, raw_b, a, bias, plan)
    if first < end:
        read_ahead(ahead, first, wid)
        write_vectors(ahead, smem.vectors, first, n0 + first - plan.start, wid)
    if first + preparers < end:
        read_ahead(ahead, first + preparers, wid)
    for chunk in cutlass.range(first, end, preparers, unroll=1):
        n = n0 + chunk - plan.start
        cute.arch.mbarrier_wait(bars.k_full + (n & 3), (n >> 2) & 1)
        make_operands(smem.raw_k[None, None, n & 3], wid, lane, tokens - chunk * 64, variant)
        prepare_chunk(of_k, mmas, smem, bars, ahead, which, chunk, n, wid, lane, variant)
    return n0 + end - plan.start


class Ahead(NamedTuple):
    """What the vectors of a head's next chunk are made from."""

    gates: Any
    scalars: Any
    raw_g: Any  # [2], of the next chunk, which is on its way
    raw_b: Any
    a: Any  # of the gate
    bias: Any
    plan: Any


@cute.jit
def ask_for_keys(of_k: cutlass.Constexpr, bars: cutlass.Constexpr, chunk: I32, n: I32):
    """Keys of a chunk, the n-th of this block, are to come. By a warp."""
    stage = n & 3
    cute.arch.mbarrier_wait(bars.k_empty + stage, ((n >> 2) + 1) & 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full + stage, TILE_BYTES)
    copy_tile(of_k, chunk, stage, bars.k_full + stage)


# Gates and write strengths: lane l has tokens 2 l and 2 l + 1, in each of the warps


@cute.jit
def gate_of(gates: cutlass.Constexpr, scalars: cutlass.Constexpr, hv: I32):
    """e^A_log and the bias of a head."""
    a, bias = F32(0.0), F32(0.0)
    if scalars.has_gate == 1:
        a, bias = cute.math.exp2(to_log2(gates.A_log[hv])), gates.dt_bias[hv]
    return a, bias


@cute.jit
def token_of(plan: cutlass.Constexpr, chunk: I32, i: cutlass.Constexpr):
    return plan.begin + cutlass.min(chunk * 64 + 2 * cute.arch.lane_idx() + i, plan.tokens - 1)


@cute.jit
def read_words(m: cutlass.Constexpr, words: cute.Tensor, plan: cutlass.Constexpr, chunk: I32):
    """The words that numbers of our two tokens of a chunk are in; nobody waits for them yet."""
    for i in cutlass.range_constexpr(2):
        words[i] = word_at(m, token_of(plan, chunk, i), plan.hv)


@cute.jit
def softplus2(x: F32):
    """log2(1 + e^x). Its tail, log2(1 + y), by a series where 1 + y would lose digits of y: slow gates are made of it."""
    y = exp2(cute.arch.fmax(x, -x) * F32(-LOG2_E))
    series = y * (F32(1.0) - y * (F32(0.5) - y * (F32(1.0 / 3.0) - y * (F32(0.25) - y * F32(0.2)))))
    tail = to_log2(series) if y < F32(0.06) else log2(F32(1.0) + y)
    return to_log2(cute.arch.fmax(x, F32(0.0))) + tail


@cute.jit
def log_decays(m: cutlass.Constexpr, words: cute.Tensor, plan: cutlass.Constexpr, chunk: I32, has_gate: I32, a: F32, bias: F32):
    """log2 decays of our two tokens of a chunk; zero past the end."""
    x, left = cute.make_rmem_tensor((2,), F32), plan.tokens - chunk * 64
    for i in cutlass.range_constexpr(2):
        number = number_in(words[i], m, token_of(plan, chunk, i), plan.hv)
        x[i] = to_log2(number)
        if has_gate == 1:
            x[i] = -a * softplus2(number + bias)
        x[i] = cute.arch.fmax(x[i], F32(GONE)) if 2 * cute.arch.lane_idx() + i < left else F32(0.0)
    return x


@cute.jit
def scan(x: F32, is_forward: cutlass.Constexpr):
    """The sum of the lanes before this one, or of those behind it."""
    lane, total = cute.arch.lane_idx(), x
    for step in cutlass.range_constexpr(5):
        by = 1 << step if cutlass.const_expr(is_forward) else -(1 << step)
        other = cute.arch.shuffle_sync(total, (lane - by) & 31)
        total += other if lane - by >= 0 and lane - by < 32 else F32(0.0)
    by = 1 if cutlass.const_expr(is_forward) else -1
    other = cute.arch.shuffle_sync(total, (lane - by) & 31)
    return other if lane - by >= 0 and lane - by < 32 else F32(0.0)


@cute.jit
def read_ahead(ahead: cutlass.Constexpr, chunk: I32, wid: I32):
    """What the warps that write vectors need of a chunk."""
    if wid >= 2:
        read_words(ahead.gates.g, ahead.raw_g, ahead.plan, chunk)
        read_words(ahead.gates.beta, ahead.raw_b, ahead.plan, chunk)


@cute.jit
def write_vectors(ahead: cutlass.Constexpr, vectors: cute.Tensor, chunk: I32, n: I32, wid: I32):
    """Of a chunk, the n-th of the block. Warp 2: G, f, and the decay of the whole chunk. Warp 3: r b and b."""
    lane, place, left = cute.arch.lane_idx(), n & 7, ahead.plan.tokens - chunk * 64
    if wid >= 2:
        x = log_decays(ahead.gates.g, ahead.raw_g, ahead.plan, chunk, ahead.scalars.has_gate, ahead.a, ahead.bias)
        if wid == 2:
            total = scan(x[0] + x[1], True)
            for i in cutlass.range_constexpr(2):
                total += x[i]
                vectors[SUM + 2 * lane + i, place] = total
                vectors[POWER + 2 * lane + i, place] = exp2(total)
            if lane == 31:
                vectors[DECAY, place] = exp2(total)
        else:
            after, beta_top = scan(x[0] + x[1], False), ahead.scalars.beta_top
            for i in cutlass.range_constexpr(1, -1, -1):
                b = number_in(ahead.raw_b[i], ahead.gates.beta, token_of(ahead.plan, chunk, i), ahead.plan.hv)
                if beta_top > F32(0.0):  # beta is raw
                    b = beta_top * sigmoid(b)
                b = b if 2 * lane + i < left else F32(0.0)
                vectors[STRENGTH + 2 * lane + i, place] = b
                vectors[INTO_STATE + 2 * lane + i, place] = b * exp2(after)
                after += x[i]


# Keys


@cute.jit
def make_operands(tile: cute.Tensor, wid: I32, lane: I32, left: I32, variant: cutlass.Constexpr):
    """Keys normalised and rounded to fp16, in place, zeros past the end. Keys that are operands as they came: only the zeros.

    A lane has half of a row, 8 pieces of 16 bytes, such that 8 lanes' pieces meet no bank twice.
    """
    row = 16 * wid + lane % 16
    at = I32(tile.iterator.toint()) + row * 128 + (lane // 16) * HALF
    if cutlass.const_expr(variant.is_normalised):
        x = cute.make_rmem_tensor((64,), BF16)
        for p in cutlass.range_constexpr(8):
            cute.autovec_copy(shared_at(at + ((p ^ (row & 7)) << 4), BF16, 8, 16), eight(x, p))
        if row >= left:
            x.fill(0.0)
        sums, wide = cute.make_rmem_tensor((4,), F32), cute.make_rmem_tensor((8,), F32)
        sums.fill(0.0)
        for p in cutlass.range_constexpr(8):
            widen(flat(x, 8 * p, 8), wide)
            for e in cutlass.range_constexpr(8):
                sums[e % 4] += wide[e] * wide[e]
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        inverse = inverse_norm(total + cute.arch.shuffle_sync_bfly(total, offset=16))
        for p in cutlass.range_constexpr(8):
            out = cute.make_rmem_tensor((8,), F16)
            out.store((flat(x, 8 * p, 8).load().to(F32) * inverse).to(F16))  # not `widen`: what it made is not kept so long
            cute.autovec_copy(eight(out, 0), shared_at(at + ((p ^ (row & 7)) << 4), F16, 8, 16))
    elif row >= left:
        zero = cute.make_rmem_tensor((8,), BF16)
        zero.fill(0.0)
        for p in cutlass.range_constexpr(8):
            cute.autovec_copy(eight(zero, 0), shared_at(at + 16 * p, BF16, 8, 16))


def eight(x: Any, p: int) -> Any:
    """Values 8 p .. 8 p + 7 as they are copied."""
    return cute.make_tensor(x.iterator + 8 * p, cute.make_layout((8, 1)))


# Scores and their inverse


@cute.jit
def prepare_chunk(
    of_k: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    which: I32,
    chunk: I32,
    n: I32,
    wid: I32,
    lane: I32,
    variant: cutlass.Constexpr,
):
    """T of the block's n-th chunk, whose keys and vectors have been written; and vectors of the one that is next to prepare."""
    plan, following = ahead.plan, chunk + variant.preparers
    thread, stage, place = cute.arch.thread_idx()[0] % 128, n & 3, n & 1
    ours = NamedBarrier(barrier_id=Barrier.PREPARE + which, num_threads=128)
    sA, sD = work_of(smem.below, which, 6), work_of(smem.diagonal, which, 4)
    cute.arch.fence_proxy("async.shared", space="cta")
    ours.arrive_and_wait()
    if thread == 0:
        cute.arch.mbarrier_arrive(bars.k_ready + stage)
    thr = mmas.kk.get_slice(thread)
    scores = thr.make_fragment_C(thr.partition_shape_C((64, 64)))
    a, b = thr.make_fragment_A(thr.partition_A(smem.k)), thr.make_fragment_B(thr.partition_B(smem.k))
    issue(mmas.kk, scores, a[None, None, None, stage], b[None, None, None, stage], False)
    warpgroup.wait_group(0)
    place_scores(scores, smem.vectors, n & 7, sA, sD, wid, lane)
    ours.arrive_and_wait()
    if wid < 2:
        inverse_pair(sD, wid, 3 - wid, lane)
    elif following < plan.end:
        write_vectors(ahead, smem.vectors, following, n + variant.preparers, wid)
        if following + variant.preparers < plan.end:
            read_ahead(ahead, following + variant.preparers, wid)
    ours.arrive_and_wait()
    if wid == 0 and chunk + 2 < plan.end:
        ask_for_keys(of_k, bars, chunk + 2, n + 2)
    columns = cute.make_rmem_tensor((32,), variant.dtype)
    inverse_columns(mmas.tf32, sA, sD, wid, lane, columns, None)
    cute.arch.mbarrier_wait(bars.k_empty + ((n + 2) & 3), (((n + 2) >> 2) + 1) & 1)  # chunk n - 2 is done, whose T was here
    place_inverse(columns, smem.T[None, None, place], wid, lane)
    cute.arch.fence_proxy("async.shared", space="cta")
    ours.arrive_and_wait()
    if thread == 0:
        cute.arch.mbarrier_arrive(bars.t_ready + place)


@cute.jit
def place_scores(scores: cute.Tensor, vectors: cute.Tensor, place: I32, sA: cute.Tensor, sD: cute.Tensor, wid: I32, lane: I32):
    """Our rows of A, decayed and weighed, to where they are inverted: in float32 on the diagonal, below it for tf32."""
    r, c = lane // 4, lane % 4
    A, of_row = rows_and_columns(scores), cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        of_row[i] = vectors[SUM + 16 * wid + r + 8 * i, place]
    # All factors are read before any store: the compiler does not know that they lie elsewhere, and would have each wait for it.
    for block in cutlass.range_constexpr(4):
        if block <= wid:
            unbiased = F32(UNBIASED) if block < wid else F32(0.0)
            sums, b = [read_pairs(vectors, of + 16 * block, place, c, 2) for of in (SUM, STRENGTH)]
            for j in cutlass.range_constexpr(4):
                for i in cutlass.range_constexpr(2):
                    A[i, 4 * block + j] = A[i, 4 * block + j] * (exp2(of_row[i] + unbiased - sums[j]) * b[j])
    for block in cutlass.range_constexpr(4):
        if block <= wid:
            to = sD[None, None, block] if block == wid else below(sA, wid, block)
            for nb in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    two = cute.make_rmem_tensor((1, 2), F32)
                    for e in cutlass.range_constexpr(2):
                        is_kept = block < wid or 8 * nb + 2 * c + e < r + 8 * i
                        two[e] = A[i, 4 * block + 2 * nb + e] if is_kept else F32(0.0)
                    cute.autovec_copy(two, cute.local_tile(to, (1, 2), (r + 8 * i, 4 * nb + c)))


@cute.jit
def place_inverse(columns: cute.Tensor, to: cute.Tensor, wid: I32, lane: I32):
    """Our rows of T^T to a tile in shared memory."""
    at, nothing = lane_address(to, wid, lane), cute.make_rmem_tensor((8,), to.element_type)
    nothing.fill(0.0)
    for d in cutlass.range_constexpr(4):
        if wid + d < 4:
            store_matrix(flat(columns, 8 * d, 8), at ^ 32 * (wid + d))
        if d > 0 and wid >= d:
            store_matrix(nothing, at ^ 32 * (wid - d))
