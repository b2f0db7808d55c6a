# SPDX-License-Identifier: Apache-2.0
"""KDA on Hopper, transitions of segments: S <- M S + B, how they are kept, and how a chained segment gets its first state.

A [128, 128] matrix M passes through the memory of the chunks' tiles, in two pieces of [64, 128]. Of the two stages it takes only
the one that the segment's first chunk is not in, so that this chunk comes meanwhile. There fp16 has room for two M's; in bf16 M
is a pair, hi + lo, and one fills it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cula.ops.cute.common.kda_chain import square_of
from cula.ops.cute.common.tiles import F16, F32, I32, rounded, rows_and_columns, seen_as_a
from cula.ops.cute.kda_abi import STATE
from cula.ops.cute.sm90.fp16_window import keep_in_range, scale_rows
from cula.ops.cute.sm90.kda_recurrence_steps import STAGES, copy_tile

MATRIX_BYTES = 2 * STATE  # of M, hi or lo


class Chain(NamedTuple):
    """The transitions that a segment chains: numbers record, record + step, ..., n of them."""

    record: Any
    step: Any
    n: Any
    stage: Any  # whose memory they pass through


class TransitionBarriers(NamedTuple):
    """mbarriers of the places that M's pass through."""

    full: Any
    empty: Any


# Kept


def place_of_b(mB: Any, record: Any, part: Any, thread: Any) -> Any:
    """What this thread holds of a B, [4, 16]: not as a matrix but in the order of registers, so that warps read and write without
    gaps."""
    start = mB[record, None, None].iterator + (part * 8192 + thread * 4)
    return cute.make_tensor(start.align(16), cute.make_layout((4, 16), stride=(1, 512)))


def in_fours(acc: Any) -> Any:
    return cute.make_tensor(acc.iterator, cute.make_layout((4, 16)))


@cute.jit
def load_b(mB: cute.Tensor, record: I32, part: I32, thread: I32, acc: cute.Tensor):
    cute.autovec_copy(place_of_b(mB, record, part, thread), in_fours(acc))


@cute.jit
def store_b(w: cutlass.Constexpr, mB: cute.Tensor, record: I32):
    cute.autovec_copy(in_fours(w.accS), place_of_b(mB, record, w.part, w.thread))


@cute.jit
def store_m(w: cutlass.Constexpr, mM: cute.Tensor, record: I32, sSquares: cute.Tensor, dtype: cutlass.Constexpr):
    """M to memory; the sum of its squares to shared memory, one number for each warp of both consumers."""
    hi, low = rounded(w.accS, dtype), cute.make_rmem_tensor_like(w.accS, dtype)
    cute.autovec_copy(hi, w.ours(mM[2 * record, None, None]))
    if cutlass.const_expr(dtype is not F16):  # see `run_chain`
        low.store((w.accS.load() - hi.load().to(F32)).to(dtype))
        cute.autovec_copy(low, w.ours(mM[2 * record + 1, None, None]))
    square = cute.arch.warp_reduction_sum(square_of(w.accS, hi))
    if w.thread % 32 == 0:
        sSquares[4 * w.part + w.thread // 32] = square


@cute.jit
def count_done(mDone: cute.Tensor, record: I32, norm: I32):
    """One more of a transition's B and M is in memory, with a norm if it is M, by one thread, after a barrier of all who wrote
    it."""
    cute.arch.red(mDone.iterator + record, norm + 1, op="add", dtype="s32", sem="release", scope="gpu")


# Chained


def halves_of(dtype: Any) -> int:
    return 1 if dtype is F16 else 2


def tile_of(place: Any, half: int, piece: int, stage: Any, dtype: Any) -> Any:
    """The number, among the tiles of all stages, of a piece of M."""
    return STAGES * (2 * (halves_of(dtype) * place + half) + piece) + stage


@cute.jit
def load_transitions(copy: cutlass.Constexpr, bars: cutlass.Constexpr, chain: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """The producer: each M when its place is free; returns when all places are."""
    halves = cutlass.const_expr(halves_of(dtype))
    places = cutlass.const_expr(2 // halves)
    for i in cutlass.range(chain.n + places, unroll=1):
        place = i % places
        if i >= places:
            cute.arch.mbarrier_wait(bars.empty + place, (i // places + 1) % 2)
        if i < chain.n:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars.full + place, halves * MATRIX_BYTES)
            for half in cutlass.range_constexpr(halves):
                for piece in cutlass.range_constexpr(2):
                    tile = 4 * (chain.record + i * chain.step) + 2 * half + piece
                    copy_tile(copy, tile, tile_of(place, half, piece, chain.stage, dtype), bars.full + place)


@cute.jit
def run_chain(
    w: cutlass.Constexpr,
    mB: cute.Tensor,
    bM: cute.Tensor,
    bars: cutlass.Constexpr,
    chain: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """A consumer: accS <- M_{n-1} (... M_0 S + B_0 ...) + B_{n-1}.

    In bf16 S is a pair too, hi + lo (their product leaves lo lo out); fp16 has the mantissa of tf32, and hi is enough.
    """
    accS, factor, mma_s = w.accS, w.factor, w.mmas.s
    halves = cutlass.const_expr(halves_of(dtype))
    places = cutlass.const_expr(2 // halves)
    # B of the next step comes while one is multiplied. (Only where a factor is applied to it: else the compiler would load it
    # right into accumulators in flight.)
    is_ahead = cutlass.const_expr(dtype is F16)
    following = cute.make_rmem_tensor_like(accS, F32)
    if is_ahead:
        load_b(mB, chain.record, w.part, w.thread, following)
    for i in cutlass.range(chain.n, unroll=1):
        place = i % places
        hi, low = rounded(accS, dtype), cute.make_rmem_tensor_like(accS, dtype)
        if is_ahead:
            keep_in_range(accS, hi, None, factor)
            accS.store(following.load())
            scale_rows(rows_and_columns(accS), factor)
        else:
            low.store((accS.load() - hi.load().to(F32)).to(dtype))
            load_b(mB, chain.record + i * chain.step, w.part, w.thread, accS)
        cute.arch.mbarrier_wait(bars.full + place, (i // places) % 2)
        warpgroup.fence()
        atom = cute.make_mma_atom(mma_s.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for a, half in ((hi, 0), (low, 0), (hi, 1))[: 2 * halves - 1]:
            for k in cutlass.range_constexpr(8):
                at = tile_of(place, half, k // 4, chain.stage, dtype)
                cute.gemm(atom, accS, seen_as_a(a)[None, None, k], bM[None, None, k % 4, at], accS)
        warpgroup.commit_group()
        if is_ahead:
            load_b(mB, chain.record + cutlass.min(i + 1, chain.n - 1) * chain.step, w.part, w.thread, following)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars.empty + place)
