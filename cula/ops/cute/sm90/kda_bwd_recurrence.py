# SPDX-License-Identifier: Apache-2.0
"""KDA backward on Hopper, both recurrences: states once more along a sequence, and their gradients against it, in one launch.

With what the intra-chunk kernel of the forward leaves of a chunk (`common/kda_intra.py`), S [dk, dv] in float32 accumulators:

    forward    X = b v - kb S           U = T X               S  <- e^{G_C} S + kr^T U                 keeps S (before), U
    reverse    dU = P^T do + kr dS      dX = T^T dU           dS <- e^{G_C} dS + qg^T do - kb^T dX     keeps dS (after), -dX

Neither needs the other, so that a block runs in one direction over one (sequence, value head), or over a segment of it where
those are few (`kda_bwd_segments.py`). Segments that need them get their transitions from walks of the same kernel that keep
nothing, in a launch of their own. As in the forward's recurrence all is transposed, S^T [dv, dk], because wgmma takes A, never B,
from registers: two consumer warpgroups own 64 rows dv each, a producer warp feeds them by TMA, two chunks deep, and a warp for
each consumer carries its results away.

What is kept is fp16. Consumers scale all rows, and what meets them, by one power of two (`fit`), which is kept too: rows dv are
what the products of `kda_bwd_chunk.py` sum over, so that they cannot have factors of their own.

| warps      | role                                                        | registers |
|------------|-------------------------------------------------------------|-----------|
| 0          | `load_role`: TMA loads                                      | 40        |
| 1, 2       | `store_role`: TMA stores of a consumer's results            | 40        |
| 4-7, 8-11  | `forward_role` or `reverse_role`: 64 rows dv each           | 232       |

| shared memory                 | bytes  |
|-------------------------------|--------|
| kb, qg, kr, v or do: two stages | 128 K |
| T, P: two stages              | 32 K   |
| S or dS, U or dX on their way | 48 K   |
| e^{G_C}, b: two stages        | 2 K    |
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.fp16_window import is_outside, move_inside
from cula.ops.cute.common.fragments import widen
from cula.ops.cute.common.lanes import WARP, largest_over
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    Tma,
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
from cula.ops.cute.kda_abi import LOWER_LEFT, TILE_BYTES, UPPER_RIGHT, VEC
from cula.ops.cute.kda_bwd_abi import FACTOR_OF_DS, FACTOR_OF_S
from cula.ops.cute.sm90.fp16_window import SAFELY_HIGH, SAFELY_LOW, largest, scale_rows, squares, unscale_rows
from cula.ops.cute.sm90.kda_bwd_segments import (
    FORWARD,
    End,
    Of,
    Start,
    Walk,
    WalkSizes,
    walk_for_transition,
    walk_with_results,
)
from cula.ops.cute.sm90.kda_recurrence_steps import (
    QUARTER_BYTES,
    STAGES,
    ChunkCopies,
    ChunkTiles,
    Consumer,
    Mmas,
    Ring,
    clear_absent_quarters,
    copy_of,
    copy_tile,
    decay_columns,
    load_v,
    make_consumer,
    weigh_v,
)

THREADS = 384
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
CONSUMER_WARPS = 8


class Barrier(enum.IntEnum):
    """Named barriers. Where there is one for each consumer, this is the first's."""

    STATE_FREE = 1  # each consumer's: there is room for a state, says the warp that carries it away
    STATE_FULL = 3  # each consumer's: it is there, says the consumer
    TOKENS_FREE = 5  # the same for U or dX
    TOKENS_FULL = 7
    CONSUMERS = 9  # the eight warps of both agree on a factor


class WalkTma(NamedTuple):
    """What TMA copies."""

    tiles: Tma
    T: Tma
    P: Tma
    vec: Tma
    v: Tma
    do: Tma
    S: Tma  # stores, [64 dv, 128], two of a record
    dS: Tma
    U: Tma  # stores, [64 tokens, 64 dv]
    dX: Tma


class WalkMemory(NamedTuple):
    """What threads read and write."""

    mH0: Any  # [N, HV, dv, dk]
    mDht: Any
    mDh0: Any
    mEnds: Any  # [Of, segments HV, dv, dk]: what a walk over a segment ends with
    mM: Any  # [segments HV, dk, dk], fp16
    mVec: Any  # [chunks, HV, VEC]
    mFactors: Any  # [records, FACTORS]
    mCu: Any  # [N + 1]


class Storage(NamedTuple):
    """Shared memory."""

    tiles: ChunkTiles
    sV: Any  # [64 tokens, 128 dv, stage]: v or do
    sVec: Any  # [1, VEC, stage]
    state: Any  # [64 dv, 128, consumer]: S or dS on its way out
    tokens: Any  # [64 tokens, 64 dv, consumer]: U or dX
    flags: Any  # [8 warps, 2]: whether fp16 holds what a warp has
    tops: Any  # [8 warps]: the largest of it
    ring: Ring


def allocate(lt: Any, lv: Any) -> Storage:
    smem = SmemAllocator()
    sKb, sQg, sKr = [allocate_tile(smem, lt, F16) for _ in range(3)]
    sV = allocate_tile(smem, lv)
    # T and P by quarters [32, 32], of which one is zero and stays so: stage, columns, rows
    square = tile_layout(64, 64, STAGES, F16, columns_of=32)
    sT, sP = allocate_tile(smem, square, F16), allocate_tile(smem, square, F16)
    state, tokens = [allocate_tile(smem, tile_layout(64, columns, 2, F16), F16) for columns in (128, 64)]
    sVec = smem.allocate_tensor(F32, cute.make_layout((1, VEC, STAGES), stride=(VEC, 1, VEC)), byte_alignment=128)
    flags = smem.allocate_tensor(I32, cute.make_layout((8, 2)), byte_alignment=16)
    tops = smem.allocate_tensor(F32, cute.make_layout(8), byte_alignment=16)
    full, empty = [smem.allocate_array(cutlass.Int64, STAGES) for _ in range(2)]
    return Storage(ChunkTiles(sKb, sQg, sP, sT, sKr), sV, sVec, state, tokens, flags, tops, Ring(full, empty))


@cute.jit
def set_up(storage: cutlass.Constexpr, tma: cutlass.Constexpr):
    """Barriers, descriptors, and zeros in the quarters of T and P that are never loaded."""
    tid, _, _ = cute.arch.thread_idx()
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(storage.ring.full + stage, 1)
                cute.arch.mbarrier_init(storage.ring.empty + stage, CONSUMER_WARPS)
        for of in tma:
            cpasync.prefetch_descriptor(of.atom)
    cute.arch.mbarrier_init_fence()
    clear_absent_quarters(storage.tiles, tid, F16)
    cute.arch.sync_threads()


@cute.kernel
def walks_kernel(
    tma: WalkTma,
    memory: WalkMemory,
    sizes: WalkSizes,
    mmas: Mmas,
    lt: cute.ComposedLayout,
    lv: cute.ComposedLayout,
    keeps: cutlass.Constexpr,
):
    """A block for each (direction and value head, number of a segment); where it keeps nothing, for each (`Of` and value head,
    number)."""
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    warpgroup_id = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    storage = allocate(lt, lv)
    kind, number, _ = cute.arch.block_idx()
    set_up(storage, tma)
    cute.arch.griddepcontrol_wait()  # for the kernel before: this one was launched before it ended
    if cutlass.const_expr(keeps):
        walk = walk_with_results(memory.mVec, memory.mCu, kind >> 1, kind & 1, number, sizes)
    else:
        walk = walk_for_transition(memory.mVec, memory.mCu, kind // len(Of), kind % len(Of), number, sizes)

    if warpgroup_id == 0:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp_id == 0:
            load_role(tma, storage, walk)
        elif warp_id < 3:
            store_role(tma, storage, walk, warp_id - 1, keeps)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        part, thread = warpgroup_id - 1, cute.arch.thread_idx()[0] % 128
        sV = cute.local_tile(storage.sV, (64, 64, STAGES), (0, part, 0))
        w = make_consumer(part, thread, mmas, storage.tiles, storage.sVec, sV)
        begin_walk(w, memory, sizes, walk)
        if walk.direction == FORWARD:
            forward_role(w, storage, walk, memory.mFactors, keeps)
        else:
            reverse_role(w, storage, walk, memory.mFactors, keeps)
        end_walk(w, memory, walk)


@cute.jit
def begin_walk(w: cutlass.Constexpr, memory: cutlass.Constexpr, sizes: cutlass.Constexpr, walk: cutlass.Constexpr):
    """What a consumer begins with."""
    S, at_s = w.S, w.positions()
    w.factor.fill(1.0)
    for j in cutlass.range_constexpr(cute.size(S, mode=[1])):
        for a in cutlass.range_constexpr(2):
            is_one = walk.start == Start.IDENTITY and at_s[a, j][0] + 64 * w.part == at_s[a, j][1]
            S[a, j] = F32(1.0) if is_one else F32(0.0)
    if walk.start == Start.GIVEN:
        if walk.direction == FORWARD:
            if sizes.has_h0 == 1:
                cute.autovec_copy(w.ours(memory.mH0[walk.seq, walk.hv, None, None]), w.accS)
        elif sizes.has_dht == 1:
            cute.autovec_copy(w.ours(memory.mDht[walk.seq, walk.hv, None, None]), w.accS)
    elif walk.start == Start.ENDS:
        cute.autovec_copy(w.ours(memory.mEnds[walk.direction, walk.start_record, None, None]), w.accS)


@cute.jit
def end_walk(w: cutlass.Constexpr, memory: cutlass.Constexpr, walk: cutlass.Constexpr):
    """What it ends with, to memory. An M is kept in both precisions."""
    if walk.end != End.NOWHERE:
        unscale_rows(w.S, w.factor)
        if walk.end == End.DH0:
            cute.autovec_copy(w.accS, w.ours(memory.mDh0[walk.seq, walk.hv, None, None]))
        else:
            of = I32(Of.M) if walk.end == End.M else walk.direction
            cute.autovec_copy(w.accS, w.ours(memory.mEnds[of, walk.end_record, None, None]))
            if walk.end == End.M:
                cute.autovec_copy(rounded(w.accS, F16), w.ours(memory.mM[walk.end_record, None, None]))


# Tiles come and go


def chunk_at(walk: Walk, n: Any, is_reverse: bool) -> Any:
    """The chunk of a step."""
    return walk.chunk - n if is_reverse else walk.chunk + n


def chunk_copies(tma: WalkTma, storage: Storage, walk: Walk, entering: Tma) -> ChunkCopies:
    """Of a sequence and one head; `entering` is v or do."""
    tiles = cute.local_tile(tma.tiles.coordinates, (64, 128), (None, 0))
    kb, qg, kr = [copy_of(tma.tiles, s, tiles) for s in (storage.tiles.kb, storage.tiles.qg, storage.tiles.kr)]
    quarters = tile_layout(32, 32, 4 * STAGES, F16)
    T, P = [
        copy_of(of, tile_at(s, quarters, F16), cute.local_tile(of.coordinates, (32, 32), (None, 0)))
        for of, s in ((tma.T, storage.tiles.T), (tma.P, storage.tiles.P))
    ]
    vec = copy_of(tma.vec, storage.sVec, cute.local_tile(tma.vec.coordinates, (1, VEC), (None, 0)))
    of_v = cute.local_tile(cute.domain_offset((walk.begin, 0), entering.coordinates[None, None, walk.hv]), (64, 128), (None, 0))
    return ChunkCopies(kb, qg, kr, copy_of(entering, storage.sV, of_v), vec, T, P)


@cute.jit
def load_role(tma: cutlass.Constexpr, storage: cutlass.Constexpr, walk: cutlass.Constexpr):
    """A warp: all that the consumers read, in the order in which they do."""
    if walk.direction == FORWARD:
        load_chunks(chunk_copies(tma, storage, walk, tma.v), storage.ring, walk, False)
    else:
        load_chunks(chunk_copies(tma, storage, walk, tma.do), storage.ring, walk, True)


@cute.jit
def load_chunks(copies: cutlass.Constexpr, ring: cutlass.Constexpr, walk: cutlass.Constexpr, is_reverse: cutlass.Constexpr):
    """The chunks of a walk, two ahead. The reverse reads qg and P besides."""
    size = 3 * TILE_BYTES + 3 * QUARTER_BYTES + 4 * VEC
    if cutlass.const_expr(is_reverse):
        size += TILE_BYTES + 3 * QUARTER_BYTES
    size = I32(size) - (I32(1) - walk.sees_v) * TILE_BYTES
    for n in cutlass.range(walk.steps, unroll=1):
        chunk = chunk_at(walk, n, is_reverse)
        record, stage = walk.first_record + chunk * walk.HV, n % STAGES
        bar = ring.full + stage
        cute.arch.mbarrier_wait(ring.empty + stage, (n // STAGES + 1) % 2)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
        if walk.sees_v == 1:
            copy_tile(copies.v, chunk, stage, bar)
        if cutlass.const_expr(is_reverse):
            for quarter in (0, LOWER_LEFT, 3):
                copy_tile(copies.P, 4 * record + quarter, 4 * stage + quarter, bar)
            copy_tile(copies.qg, 3 * record + 1, stage, bar)
        copy_tile(copies.kb, 3 * record, stage, bar)
        copy_tile(copies.vec, record, stage, bar)
        for quarter in (0, UPPER_RIGHT, 3):
            copy_tile(copies.T, 4 * record + quarter, 4 * stage + quarter, bar)
        copy_tile(copies.kr, 3 * record + 2, stage, bar)


def hand_over(part: Any, free: Barrier, full: Barrier) -> tuple[Any, Any]:
    """Between a consumer and the warp that carries its results away: there is room for one, and it is there."""
    return NamedBarrier(barrier_id=free + part, num_threads=160), NamedBarrier(barrier_id=full + part, num_threads=160)


@cute.jit
def store_role(tma: cutlass.Constexpr, storage: cutlass.Constexpr, walk: cutlass.Constexpr, part: I32, keeps: cutlass.Constexpr):
    """A warp for each consumer: its results to the workspace."""
    if cutlass.const_expr(keeps):
        if walk.direction == FORWARD:
            store_chunks(tma.S, tma.U, storage, walk, part, False)
        else:
            store_chunks(tma.dS, tma.dX, storage, walk, part, True)


@cute.jit
def store_chunks(
    state: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    storage: cutlass.Constexpr,
    walk: cutlass.Constexpr,
    part: I32,
    is_reverse: cutlass.Constexpr,
):
    """A state and then tokens of each chunk. While one of them is read, the other may be written. Those of a warm-up are taken
    and dropped."""
    state_s, state_g = tma_split(state.atom, storage.state, cute.local_tile(state.coordinates, (64, 128), (None, 0)))
    tokens_s, tokens_g = tma_split(tokens.atom, storage.tokens, cute.local_tile(tokens.coordinates, (64, 64), (None, part)))
    state_free, state_full = hand_over(part, Barrier.STATE_FREE, Barrier.STATE_FULL)
    tokens_free, tokens_full = hand_over(part, Barrier.TOKENS_FREE, Barrier.TOKENS_FULL)
    for n in cutlass.range(walk.steps, unroll=1):
        record = walk.first_record + chunk_at(walk, n, is_reverse) * walk.HV
        cute.arch.cp_async_bulk_wait_group(1, read=True)
        state_free.arrive()
        state_full.arrive_and_wait()
        if n >= walk.silent:
            cute.copy(state.atom, state_s[None, part], state_g[None, 2 * record + part])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(1, read=True)
        tokens_free.arrive()
        tokens_full.arrive_and_wait()
        if n >= walk.silent:
            cute.copy(tokens.atom, tokens_s[None, part], tokens_g[None, record])
        cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def hand_state(w: cutlass.Constexpr, half: cute.Tensor, storage: cutlass.Constexpr):
    """The state, rounded, to shared memory, from where `store_chunks` takes it."""
    free, full = hand_over(w.part, Barrier.STATE_FREE, Barrier.STATE_FULL)
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), F16), w.mmas.s).get_slice(w.thread)
    free.arrive_and_wait()
    cute.copy(copy, copy.retile(half), copy.partition_D(storage.state[None, None, w.part]))
    cute.arch.fence_proxy("async.shared", space="cta")
    full.arrive()


@cute.jit
def hand_tokens(w: cutlass.Constexpr, half: cute.Tensor, storage: cutlass.Constexpr):
    """U^T or dX^T, rounded, likewise, as [token, dv]."""
    free, full = hand_over(w.part, Barrier.TOKENS_FREE, Barrier.TOKENS_FULL)
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), F16), w.mmas.x).get_slice(w.thread)
    free.arrive_and_wait()
    cute.copy(copy, copy.retile(half), copy.partition_D(swapped(storage.tokens[None, None, w.part])))
    cute.arch.fence_proxy("async.shared", space="cta")
    full.arrive()


# The range of fp16


@cute.jit
def fit(w: cutlass.Constexpr, half: cute.Tensor, entering: cute.Tensor, storage: cutlass.Constexpr, n: I32):
    """Scale all rows such that fp16 holds well what they are, and what enters with this chunk; `half` is S rounded."""
    sums, of_v, lane = *[cute.make_rmem_tensor((2,), F32) for _ in range(2)], cute.arch.lane_idx()
    squares(half, sums, F16)
    squares(entering, of_v, BF16)
    both = sums[0] + sums[1] + (of_v[0] + of_v[1]) * w.factor[0] * w.factor[0]
    is_high = cute.arch.vote_any_sync(not (both <= F32(SAFELY_HIGH)))
    is_low = not cute.arch.vote_any_sync(both >= F32(SAFELY_LOW))
    flags, found, ours = storage.flags[None, n % 2], cute.make_rmem_tensor((8,), I32), 4 * w.part + w.thread // 32
    if lane == 0:
        flags[ours] = (I32(2) if is_high else I32(0)) + (I32(1) if is_low else I32(0))
    barrier = NamedBarrier(barrier_id=Barrier.CONSUMERS, num_threads=256)
    barrier.arrive_and_wait()
    cute.autovec_copy(flags, found)
    any_high, all_low = found[0] & 2, found[0] & 1
    for i in cutlass.range_constexpr(1, 8):
        any_high, all_low = any_high | (found[i] & 2), all_low & found[i]
    if any_high + all_low > 0:
        top = cute.make_rmem_tensor((2,), F32)
        top.fill(0.0)
        wide = cute.make_rmem_tensor_like(entering, F32)
        widen(entering, wide)
        largest(rows_and_columns(wide), top)
        for a in cutlass.range_constexpr(2):
            top[a] = top[a] * w.factor[a]
        largest(w.S, top)
        highest = largest_over(WARP, cute.arch.fmax(top[0], top[1]))
        if lane == 0:
            storage.tops[ours] = highest
        barrier.arrive_and_wait()
        for i in cutlass.range_constexpr(8):
            highest = cute.arch.fmax(highest, storage.tops[i])
        move = cute.make_rmem_tensor((2,), F32)
        move.fill(move_inside(highest, w.factor[0]) if is_outside(highest, w.factor[0]) else F32(1.0))
        for a in cutlass.range_constexpr(2):
            w.factor[a] = w.factor[a] * move[a]
        scale_rows(w.S, move)
        half.store(w.accS.load().to(F16))


@cute.jit
def keep_factor(
    w: cutlass.Constexpr, mFactors: cute.Tensor, walk: cutlass.Constexpr, n: I32, chunk: I32, which: cutlass.Constexpr
):
    if w.thread == 0 and w.part == 0 and n >= walk.silent:
        mFactors[walk.first_record + chunk * walk.HV, which] = w.factor[0]


# The two directions


@cute.jit
def forward_role(
    w: cutlass.Constexpr,
    storage: cutlass.Constexpr,
    walk: cutlass.Constexpr,
    mFactors: cute.Tensor,
    keeps: cutlass.Constexpr,
):
    """A consumer: S over the chunks of a walk."""
    mma_x, mma_t, mma_s = w.mmas
    bKb, bT, bKr = w.operands.kb, w.operands.T, w.operands.kr
    thr_x, thr_t = mma_x.get_slice(w.thread), mma_t.get_slice(w.thread)
    accX = thr_x.make_fragment_C(thr_x.partition_shape_C((64, 64)))
    accU = thr_t.make_fragment_C(thr_t.partition_shape_C((64, 64)))
    at_s, S = w.positions(), w.S
    half = cute.make_rmem_tensor_like(w.accS, F16)
    for n in cutlass.range(walk.steps, unroll=1):
        stage, chunk = n % STAGES, chunk_at(walk, n, False)
        cute.arch.mbarrier_wait(storage.ring.full + stage, n // STAGES % 2)
        rV, bv = cute.make_rmem_tensor_like(accX, BF16), cute.make_rmem_tensor_like(accX, F32)
        load_v(w, rV, stage, walk.tokens - chunk * 64, walk.sees_v)
        half.store(w.accS.load().to(F16))
        fit(w, half, rV, storage, n)
        issue(mma_x, accX, seen_as_a(half), bKb[None, None, None, stage], False)
        if cutlass.const_expr(keeps):
            hand_state(w, half, storage)
            keep_factor(w, mFactors, walk, n, chunk, FACTOR_OF_S)
        weigh_v(w, rV, bv, stage, F16)
        decay_columns(w, S, at_s, stage, 0)
        warpgroup.wait_group(0)
        rX = cute.make_rmem_tensor_like(accX, F16)
        rX.store((bv.load() - accX.load()).to(F16))
        issue(mma_t, accU, seen_as_a(rX), bT[None, None, None, stage], False)
        decay_columns(w, S, at_s, stage, 1)
        warpgroup.wait_group(0)
        rU = rounded(accU, F16)
        issue(mma_s, w.accS, seen_as_a(rU), bKr[None, None, None, stage], True)
        if cutlass.const_expr(keeps):
            hand_tokens(w, rU, storage)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.ring.empty + stage)


def reverse_operands(w: Consumer, tiles: ChunkTiles) -> ChunkTiles:
    """The tiles as B operands, the other way round than in the forward."""
    thr_x, thr_t, thr_s = [mma.get_slice(w.thread) for mma in w.mmas]
    return ChunkTiles(
        kb=thr_s.make_fragment_B(thr_s.partition_B(swapped(tiles.kb))),  # [N = dk, K = token]
        qg=thr_s.make_fragment_B(thr_s.partition_B(swapped(tiles.qg))),
        P=thr_t.make_fragment_B(thr_t.partition_B(swapped(tiles.P))),  # [N = i, K = t]
        T=thr_x.make_fragment_B(thr_x.partition_B(tiles.T)),  # [N = i, K = t], as it is stored
        kr=thr_x.make_fragment_B(thr_x.partition_B(tiles.kr)),  # [N = token, K = dk]
    )


@cute.jit
def reverse_role(
    w: cutlass.Constexpr,
    storage: cutlass.Constexpr,
    walk: cutlass.Constexpr,
    mFactors: cute.Tensor,
    keeps: cutlass.Constexpr,
):
    """A consumer: dS against the chunks of a walk. What multiplies do does not wait for dS."""
    mma_x, mma_t, mma_s = w.mmas
    bKb, bQg, bP, bT, bKr = reverse_operands(w, storage.tiles)
    thr_x = mma_x.get_slice(w.thread)
    accU, accX = [thr_x.make_fragment_C(thr_x.partition_shape_C((64, 64))) for _ in range(2)]
    at_s, S = w.positions(), w.S
    half = cute.make_rmem_tensor_like(w.accS, F16)
    for n in cutlass.range(walk.steps, unroll=1):
        stage, chunk = n % STAGES, chunk_at(walk, n, True)
        cute.arch.mbarrier_wait(storage.ring.full + stage, n // STAGES % 2)
        raw, wide = cute.make_rmem_tensor_like(accX, BF16), cute.make_rmem_tensor_like(accX, F32)
        load_v(w, raw, stage, walk.tokens - chunk * 64, I32(1))
        half.store(w.accS.load().to(F16))
        fit(w, half, raw, storage, n)
        widen(raw, wide)
        scale_rows(rows_and_columns(wide), w.factor)
        rO = rounded(wide, F16)
        issue(mma_t, accU, seen_as_a(rO), bP[None, None, None, stage], False)
        issue(mma_x, accU, seen_as_a(half), bKr[None, None, None, stage], True)
        if cutlass.const_expr(keeps):
            hand_state(w, half, storage)
            keep_factor(w, mFactors, walk, n, chunk, FACTOR_OF_DS)
        for which in cutlass.range_constexpr(2):
            decay_columns(w, S, at_s, stage, which)
        issue(mma_s, w.accS, seen_as_a(rO), bQg[None, None, None, stage], True)
        warpgroup.wait_group(1)
        rU = rounded(accU, F16)
        issue(mma_x, accX, seen_as_a(rU), bT[None, None, None, stage], False)
        warpgroup.wait_group(0)
        rX = cute.make_rmem_tensor_like(accX, F16)
        rX.store((-accX.load()).to(F16))
        issue(mma_s, w.accS, seen_as_a(rX), bKb[None, None, None, stage], True)
        if cutlass.const_expr(keeps):
            hand_tokens(w, rX, storage)
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.ring.empty + stage)
