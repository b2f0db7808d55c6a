# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper, pieces of a head: how several pairs of blocks share a sequence. See `gdn.py`.

A piece lacks the state at its start. Which way it gets it is found out from the gates alone, for all pieces of a head alike.
  * Warm: a piece runs over chunks before its own first, from zero and without output, as many as shrink any state below 2^-24.
    With normalised keys and write strengths up to 2 a state shrinks by e^{sum of g} at least, so the gates alone tell how many.
    All pieces take as many as the one that needs most. The first needs none, and has about as many more chunks of its own.
    Keys that are not normalised here are looked at in those chunks. Where b |k|^2 is not within 0 and 2, or hardly beyond, as it
    is for keys that come normalised, the piece runs over all that is before it, by itself.
  * Mapped: where that would take longer. There is one segment more than there are pieces, of which fewer are used, if there are
    very many, since each waits for the one before. The first piece walks over two segments. Piece p makes the map of segment p,
    S -> S M + B: in each of its two blocks one warpgroup has 64 rows of B, from S = 0, and another 64 rows of M, from S = I and
    without v; T serves both. Then it waits for the state at the start of segment p, hands M S + B on, and walks over segment
    p + 1. So 2 / (pieces + 1) of the steps of one walk, and M never goes through memory.

A pair of blocks waits for one of a lower number only, which has begun before it: `common/kda_segments.py` says what that
relies on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.barriers import arrive
from cula.ops.cute.common.fp16_window import is_outside, move_inside
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.gate import log2, sigmoid
from cula.ops.cute.common.gdn_items import Plan, number_in, sequence_of
from cula.ops.cute.common.gdn_vectors import gate_of, log_decays, read_words, token_of
from cula.ops.cute.common.squares import add_products
from cula.ops.cute.common.tiles import F16, F32, I32, rounded, rows_and_columns, seen_as_a, swapped
from cula.ops.cute.gdn_abi import FEWEST_CHUNKS, TILE_BYTES
from cula.ops.cute.sm90.fp16_window import is_safely_inside, over_row, scale_rows, unscale_rows
from cula.ops.cute.sm90.kda_fused_smem import send

from .gdn_smem import OURS, THEIRS, WARPS, Barrier

AHEAD = 4  # chunks whose gates are on their way while those of one are added up
MAX_WARM_UP = 64  # chunks
MOST_GROWTH = 4  # bits that a state may gain in a warm-up, because unit keys are rounded and some b are 2: it then weighs 2^-21
IN_A_BIT = 4096  # what bits of growth are counted in
FORGOTTEN = -25.0  # log2 of what a state may still weigh when it is dropped: one less, for what is rounded on the way
MOST_MAPPED = 1.3  # pieces that hand states on, as a multiple of the root of the chunks: to wait for one takes about a step


# Who does what


@cute.jit
def plan_piece(
    items: cutlass.Constexpr,
    keys: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    warm_ups: cute.Tensor,
    item: I32,
    piece: I32,
):
    """The plan of a pair of blocks. By all threads of a block."""
    seq, hv, begin, tokens = sequence_of(items, item)
    chunks = (tokens + 63) // 64
    pieces = cutlass.max(cutlass.min(items.pieces, chunks // FEWEST_CHUNKS), 1)
    # chunks of a piece's own; how many more the first has; over how many the others walk before
    length, more, before, is_mapped = chunks, I32(0), I32(0), I32(0)
    if pieces > 1:
        root = cute.math.sqrt(chunks.to(F32), fastmath=True)
        mapped = cutlass.min(pieces, (F32(MOST_MAPPED) * root + F32(0.5)).to(I32))
        segment, is_mapped = (chunks + mapped) // (mapped + 1), I32(1)
        most = cutlass.min(2 * segment + mapped - 1 - (chunks + pieces - 1) // pieces, MAX_WARM_UP)
        head = Head(hv, begin, tokens)
        length, more, before = warm_up(gates, scalars, head, warm_ups, chunks, pieces, most)
        is_mapped = I32(1) if before > most else I32(0)
        if is_mapped == 1:
            length, more, before = segment, segment, segment
        elif cutlass.const_expr(keys is not None):
            at = more + piece * length
            if piece > 0 and at < chunks:  # noqa: SIM102 (both sides of "and" would be run)
                if may_grow(keys, gates, scalars, head, warm_ups, at, before):
                    before = at
    # where a piece begins with output, and where it ends
    middle, end = more + piece * length if piece > 0 else I32(0), more + (piece + 1) * length
    is_busy = piece < pieces and (middle < chunks or piece == 0)
    export_at = cutlass.max(middle, more) if is_mapped == 1 and end < chunks else I32(-1)
    idle = I32(0)
    return Plan(
        seq,
        hv,
        begin,
        tokens,
        cutlass.max(middle - before, 0) if is_busy else idle,
        middle if is_busy else idle,
        cutlass.min(end, chunks) if is_busy else idle,
        is_mapped if is_busy and piece > 0 else idle,
        export_at,
        2 * (item * items.pieces + piece) + items.rank,
        I32(1) if is_busy and end >= chunks else idle,
    )


class Head(NamedTuple):
    """Of a sequence."""

    hv: Any
    begin: Any
    tokens: Any


@cute.jit
def warm_up(
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    head: cutlass.Constexpr,
    warm_ups: cute.Tensor,
    chunks: I32,
    pieces: I32,
    most: I32,
):
    """(Chunks of a piece's own, how many more the first has, over how many the others walk before; these more than `most` where
    pieces should not warm up). By all threads of a block.

    How many more the first should have is known only when warm-ups have been counted, and then boundaries are others. So they are
    counted once more, if that saves two steps.
    """
    length, more, before, is_new = I32(0), I32(0), I32(0), I32(1)
    wid, (a, bias) = cute.arch.make_warp_uniform(cute.arch.warp_idx()), gate_of(gates, scalars, head.hv)
    while is_new == 1:
        more, ours = before, I32(0)
        length = (chunks - more + pieces - 1) // pieces
        for boundary in cutlass.range(wid + 1, pieces, WARPS, unroll=1):
            chunk = more + boundary * length
            chunk = chunk if chunk < chunks and ours <= most else I32(0)
            ours = cutlass.max(ours, chunks_to_forget(gates.g, head, chunk, most, scalars.has_gate, a, bias))
        warm_ups[wid] = ours
        cute.arch.sync_threads()
        before = cute.arch.make_warp_uniform(cute.arch.warp_redux_sync(warm_ups[cute.arch.lane_idx() & (WARPS - 1)], "max"))
        cute.arch.sync_threads()  # all have read
        is_new = I32(1) if before <= most and before - more >= 2 * pieces else I32(0)
    return length, more, before


@cute.jit
def chunks_to_forget(g: cutlass.Constexpr, head: cutlass.Constexpr, chunk: I32, most: I32, has_gate: I32, a: F32, bias: F32):
    """How many chunks before a boundary forget what came before them; all, if they do not, or would take more than `most` at the
    rate of those that have been seen. By a warp."""
    total, seen, words = F32(0.0), I32(0), [cute.make_rmem_tensor((2,), I32) for _ in range(AHEAD)]
    for w in cutlass.range_constexpr(AHEAD):
        read_words(g, words[w], head, cutlass.max(chunk - 1 - w, 0))
    while seen < chunk and total >= F32(FORGOTTEN) and (seen < AHEAD or total * most.to(F32) <= F32(FORGOTTEN) * seen.to(F32)):
        seen += 1
        x = log_decays(g, words[0], head, chunk - seen, has_gate, a, bias)
        ours = x[0] + x[1]
        for w in cutlass.range_constexpr(AHEAD - 1):
            words[w].store(words[w + 1].load())
        read_words(g, words[AHEAD - 1], head, cutlass.max(chunk - seen - AHEAD, 0))
        for step in cutlass.range_constexpr(5):
            ours += cute.arch.shuffle_sync_bfly(ours, offset=1 << step)
        total += ours
    return seen if total < F32(FORGOTTEN) else chunk


# Keys that come as they are


class Keys(NamedTuple):
    """Where they are looked at."""

    m: Any  # [T, 128, H]
    group: Any  # value heads of each
    mma: Any  # of a warp, for squares


@cute.jit
def may_grow(
    keys: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    head: cutlass.Constexpr,
    votes: cute.Tensor,
    past: I32,
    before: I32,
):
    """Whether the tokens of a warm-up may make a state larger, by more than some bits in all: I - b k k^T has no norm above 1
    where z = b |k|^2 is within 0 and 2, and otherwise one of |z - 1|. By all threads of a block."""
    wid, lane, bits = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx(), F32(0.0)
    of_head = cute.domain_offset((head.begin, 0), keys.m[None, None, head.hv // keys.group])
    for chunk in cutlass.range(cutlass.max(past - before, 0) + wid, past, WARPS, unroll=1):
        words = cute.make_rmem_tensor((2,), I32)
        read_words(gates.beta, words, head, chunk)
        longest = largest_square(cute.local_tile(of_head, (64, 128), (chunk, 0)), keys.mma)
        for i in cutlass.range_constexpr(2):
            b = number_in(words[i], gates.beta, token_of(head, chunk, i), head.hv)
            if scalars.beta_top > F32(0.0):  # beta is raw
                b = scalars.beta_top * sigmoid(b)
            z = b * longest
            bits += log2(cute.arch.fmax(F32(1.0), cute.arch.fmax(z - F32(1.0), F32(1.0) - z)))
    votes[wid] = cute.arch.warp_redux_sync((cutlass.min(bits, F32(MOST_GROWTH)) * F32(IN_A_BIT)).to(I32), "add")
    cute.arch.sync_threads()
    vote = votes[lane & (WARPS - 1)]
    of_all = cute.arch.warp_redux_sync(vote if lane < WARPS else I32(0), "add")
    return cute.arch.make_warp_uniform(of_all) >= I32(MOST_GROWTH * IN_A_BIT)


@cute.jit
def largest_square(rows: cute.Tensor, mma: cute.TiledMma):
    """Of 64 rows in memory, by a warp: the largest product of two of them, of sixteen with each other. In which order channels
    are, products do not care."""
    lane, top = cute.arch.lane_idx(), F32(0.0)
    for n in cutlass.range(4, unroll=2):
        squares, raw = cute.make_rmem_tensor(((2, 2), 1, 2), F32), cute.make_rmem_tensor((64,), rows.element_type)
        squares.fill(0.0)
        for i in cutlass.range_constexpr(8):
            at = cute.local_tile(rows, (1, 8), (16 * n + 8 * (i % 2) + lane // 4, 4 * (i // 2) + lane % 4))
            cute.autovec_copy(at, cute.make_tensor(raw.iterator + 8 * i, cute.make_layout((1, 8))))
        for i in cutlass.range_constexpr(8):
            pairs = cute.make_rmem_tensor((8,), rows.element_type)  # of rows r and r + 8 in turn
            for e in cutlass.range_constexpr(8):
                pairs[e] = raw[16 * (i // 2) + 8 * (e // 2 % 2) + 4 * (i % 2) + 2 * (e // 4) + e % 2]
            add_products(mma, squares, pairs, pairs)
        for e in cutlass.range_constexpr(8):
            top = cute.arch.fmax(top, squares[e])
    for step in cutlass.range_constexpr(5):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
    return top


# Maps


@cute.jit
def begin_map(w: cutlass.Constexpr, rank: I32, bars: cutlass.Constexpr):
    """S <- our 64 rows of the identity; the partner's rows of M may come."""
    S, c = rows_and_columns(w.accS), w.thread % 4
    for j in cutlass.range_constexpr(32):
        for a in cutlass.range_constexpr(2):
            is_one = 64 * rank + w.row(a) == 8 * (j // 2) + 2 * c + j % 2
            S[a, j] = F32(1.0) if is_one else F32(0.0)
    if w.thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(bars.m_theirs, TILE_BYTES)


@cute.jit
def share_map(w: cutlass.Constexpr, rank: I32, smem: cutlass.Constexpr, bars: cutlass.Constexpr):
    """Our rows of M, in fp16, for our chain and for the partner's."""
    ours, theirs = [smem.M[None, None, which] for which in (OURS, THEIRS)]
    w.store(rounded(w.accS, F16), ours)
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive(bars.m_ours)
    if w.thread // 32 == 0:
        cute.arch.mbarrier_wait(bars.m_ours, 0)
        with cute.arch.elect_one():
            send(ours.iterator, theirs.iterator, TILE_BYTES, bars.m_theirs, 1 - rank)


@cute.jit
def chain(
    w: cutlass.Constexpr,
    handed: cutlass.Constexpr,
    record: I32,
    rank: I32,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
):
    """accS, which is B, <- S M + B, S being what the piece before has handed on. In fp16, whatever other operands are: M has no
    entry above 1, and rows of S are scaled to fit."""
    S, place = rows_and_columns(w.accS), place_of(w, handed.states, record)
    factor, done = cute.make_rmem_tensor((2,), F32), I32(0)
    factor.fill(1.0)
    while done == 0:
        done = cute.arch.load(handed.done.iterator + record, I32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()
    half = cute.make_rmem_tensor_like(w.accS, F16)
    load_rounded(place, half, factor)
    if not is_safely_inside(half, None, factor):
        find_factor(place, factor)
        load_rounded(place, half, factor)
    scale_rows(S, factor)
    thr = w.mmas.chain.get_slice(w.thread)
    M = thr.make_fragment_B(thr.partition_B(swapped(smem.M)))  # [N = dk after, K = dk before]
    other = rank ^ OURS  # rows 64 rank and on are ours
    cute.arch.mbarrier_wait(bars.m_ours, 0)
    cute.arch.mbarrier_wait(bars.m_theirs, 0)
    warpgroup.fence()
    atom, a = cute.make_mma_atom(w.mmas.chain.op), seen_as_a(half)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for i in cutlass.range_constexpr(8):
        cute.gemm(atom, w.accS, a[None, None, i], M[None, None, i % 4, (i // 4) ^ other], w.accS)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    NamedBarrier(barrier_id=Barrier.STATE, num_threads=128).arrive_and_wait()  # a part of M is where S comes next
    unscale_rows(S, factor)


@cute.jit
def load_rounded(place: cute.Tensor, half: cute.Tensor, factor: cute.Tensor):
    """A state's rows times their factors in fp16. By quarters: there are no registers for all of it beside B."""
    for quarter in cutlass.range_constexpr(4):
        part = load_quarter(place, quarter)
        for e in cutlass.range_constexpr(16):
            part[e] = part[e] * factor[e // 2 % 2]
        flat(half, 16 * quarter, 16).store(part.load().to(F16))


@cute.jit
def find_factor(place: cute.Tensor, factor: cute.Tensor):
    """Of each row, that brings it into fp16's window; before it is 1."""
    top = cute.make_rmem_tensor((2,), F32)
    top.fill(0.0)
    for quarter in cutlass.range_constexpr(4):
        part = load_quarter(place, quarter)
        for e in cutlass.range_constexpr(16):
            top[e // 2 % 2] = cute.arch.fmax(top[e // 2 % 2], cute.arch.fmax(part[e], -part[e]))
    for a in cutlass.range_constexpr(2):
        highest = over_row(top[a])
        factor[a] = move_inside(highest, F32(1.0)) if is_outside(highest, F32(1.0)) else F32(1.0)


@cute.jit
def load_quarter(place: cute.Tensor, quarter: cutlass.Constexpr):
    part = cute.make_rmem_tensor((16,), F32)
    of_four = cute.make_layout((4, 4))
    from_place = cute.make_tensor(place.iterator + quarter * 4 * 512, cute.make_layout((4, 4), stride=(1, 512)))
    cute.autovec_copy(from_place, cute.make_tensor(part.iterator, of_four))
    return part


# States handed on


def place_of(w: Any, states: Any, record: Any) -> Any:
    """What this thread holds of a record, [4, 16]: in the order of registers, so that warps read and write without gaps."""
    start = states[record, None].iterator + w.thread * 4
    return cute.make_tensor(start.align(16), cute.make_layout((4, 16), stride=(1, 512)))


def in_fours(acc: Any) -> Any:
    return cute.make_tensor(acc.iterator, cute.make_layout((4, 16)))


@cute.jit
def hand_on(w: cutlass.Constexpr, handed: cutlass.Constexpr, record: I32):
    """The state, for the piece that waits for it."""
    cute.autovec_copy(in_fours(w.accS), place_of(w, handed.states, record))
    cute.arch.fence_acq_rel_gpu()
    NamedBarrier(barrier_id=Barrier.STATE, num_threads=128).arrive_and_wait()
    if w.thread == 0:
        cute.arch.red(handed.done.iterator + record, I32(1), op="add", dtype="s32", sem="release", scope="gpu")
