# SPDX-License-Identifier: Apache-2.0
"""KDA on Blackwell, the recurrence: a state passes over the chunks that the intra-chunk kernel made, and stays in tensor memory.

Never run on a GPU: compiled, and its PTX run on a CPU (docs/kda-blackwell.md).

A chunk, with the state S [128 dk, 128 dv] in float32:
    R = kb S,   o = qg S                      two products with the same A operand
    U = T (b v - R)
    o += P U,   S <- e^{G_C} S + kr^T U
All of it transposed, S^T [128 dv, 128 dk], so that every product has M = 128 rows dv, lane = row, and its A operand in tensor
memory, where one thread a row puts it. Rows dv do not mix: what a thread does to its row needs no other thread.

Segments, their warm-up and their chains are those of `common/kda_segments.py`. A launch before this one computes transitions by
the same recurrence, without output. A chained segment takes the M's of the segments before it through the same ring as its
chunks, an M for a chunk.

| warps | role                                                                         | registers |
|-------|------------------------------------------------------------------------------|-----------|
| 0     | `load_role`: TMA loads; allocates tensor memory                              | 72        |
| 1     | `mma_role`: issues every product                                             | 72        |
| 4-7   | `rows_role`: S to 16 bits and its decay, b v - R, U to 16 bits               | 240       |
| 8-11  | `output_role`: o from tensor memory over shared memory to global memory      | 192       |

| barrier    | arrives                         | waits      | says                                             |
|------------|---------------------------------|------------|--------------------------------------------------|
| full[2]    | TMA                             | 1, 4-7     | a chunk, or an M, is in the ring                 |
| empty[2]   | 1 (commit), 4-7 (a lane each)   | 0          | it has been read                                 |
| s_ready[2] | 4-7                             | 1, (8-11)  | S is an operand (and its factor is there)        |
| x_done     | 1 (commit)                      | 4-7        | R                                                |
| x_ready    | 4-7                             | 1          | b v - R is an operand; the decayed S is in place |
| u_done     | 1 (commit)                      | 4-7        | U                                                |
| u_ready    | 4-7                             | 1          | U is an operand                                  |
| s_done     | 1 (commit)                      | 4-7        | S after the chunk, or the transition             |
| o_done[2]  | 1 (commit)                      | 8-11       | o                                                |
| o_free[2]  | 8-11                            | 1, 4-7     | o and the factor have been read                  |

| tensor memory                  | columns   | | shared memory                        | bytes |
|--------------------------------|-----------|-|--------------------------------------|-------|
| S                              | 0 - 127   | | kb, qg, kr, v (or an M): two stages  | 128 K |
| S in 16 bits                   | 128 - 191 | | T, P: two stages                     | 32 K  |
| R                              | 192 - 255 | | o                                    | 16 K  |
| U                              | 256 - 319 | | e^{G_C}, b: two stages               | 2 K   |
| o, two of them; lo of S in chains | 320 - 447 | | factors of rows, two                 | 1 K   |
| b v - R, U in 16 bits          | 448 - 511 | |                                      |       |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.fp16_window import inverse_of
from cula.ops.cute.common.kda_chain import begin_of_chain, norm_in_word, square_of
from cula.ops.cute.common.kda_segments import segment_at, span_of
from cula.ops.cute.common.states import (
    KeptStates,
    States,
    address_of,
    first_kept,
    is_end,
    load_state,
    slot_of_first,
    slot_of_last,
    store_state,
)
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, K_MAJOR, MN_MAJOR, Tma, swapped, tma_split
from cula.ops.cute.kda_abi import BETA, SQUARE_BYTES, STATE, TILE_BYTES, VEC

from .kda_recurrence_smem import (
    KB,
    KR,
    QG,
    STAGES,
    TILES,
    Barrier,
    Column,
    Mbarriers,
    Storage,
    Task,
    V,
    allocate,
    init_mbarriers,
    mbarriers_at,
)
from .rows import keep_in_range, largest_of_columns, pieces, residue, rounded, rows_at
from .tmem import COLUMNS, accumulator, after_sync, before_sync, commit, issue, operand_a, row_load, row_stores, stored, umma

THREADS = 384
ISSUE_REGISTERS, ROW_REGISTERS, OUTPUT_REGISTERS = 72, 240, 192
STORE_WARP = 8  # issues the TMA stores
MATRIX_BYTES = 2 * STATE  # of M, hi or lo


class Mmas(NamedTuple):
    """Products with A in tensor memory, by their results."""

    x: Any  # [128 dv, 64] of a K-major tile
    t: Any  # [128 dv, 64] of an MN-major tile
    s: Any  # [128 dv, 128] of an MN-major tile


def recurrence_mmas(dtype: Any) -> Mmas:
    return Mmas(umma(64, K_MAJOR, dtype), umma(64, MN_MAJOR, dtype), umma(128, MN_MAJOR, dtype))


class RecurrenceTma(NamedTuple):
    """What TMA copies."""

    tiles: Tma
    T: Tma
    P: Tma
    vec: Tma
    v: Tma
    o: Tma
    m: Tma


class Memory(NamedTuple):
    """What threads read and write."""

    mO: Any  # [T, 128, HV]
    mVec: Any  # [chunks, HV, VEC]
    states: States
    kept: KeptStates
    mB: Any  # [segments HV, 128, 128]
    mM: Any  # [2 segments HV, 128, 128]
    mDone: Any  # [segments HV]: norms of M's
    mCu: Any  # [N + 1]


class BlockSizes(NamedTuple):
    """Numbers that a block goes by."""

    L: Any  # chunks of a segment
    length: Any
    halvings: Any


class Block(NamedTuple):
    """What the roles of a block share."""

    tma: RecurrenceTma
    memory: Memory
    storage: Storage
    bars: Mbarriers
    tmem: Any
    mmas: Mmas
    dtype: Any
    is_transition: bool
    HV: Any
    hv: Any
    which: Any  # of a transition's halves: 0 for B, 1 for M

    @property
    def is_f16(self) -> bool:
        return self.dtype is F16

    @property
    def halves(self) -> int:
        """Of M that are read: fp16 has the mantissa of tf32, and hi is enough."""
        return 1 if self.is_f16 else 2

    def first_transition(self, task: Task) -> Any:
        """The first to chain, behind the one that only gives its B."""
        return (task.first_segment + task.chain_from + 1) * self.HV + self.hv


@cute.kernel
def recurrence_kernel(
    tma: RecurrenceTma,
    memory: Memory,
    sizes: BlockSizes,
    mmas: Mmas,
    lt: cute.ComposedLayout,
    lv: cute.ComposedLayout,
    lsq: cute.ComposedLayout,
    lo: cute.ComposedLayout,
    lm: cute.ComposedLayout,
    dtype: cutlass.Constexpr,
    is_transition: cutlass.Constexpr,
):
    """A block for each (value head, number of a segment); for transitions two, for B and M.

    Its segment's chunks come after the transitions that it chains: step `it` of both goes through stage it % 2 for the
    it // 2-th time.
    """
    storage = allocate(lt, lv, lsq, lo, lm, dtype)
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp_id == 0:
        cute.arch.alloc_tmem(COLUMNS, storage.tmem)
        cute.arch.relinquish_tmem_alloc_permit()
        with cute.arch.elect_one():
            init_mbarriers(storage.bars)
    cute.arch.mbarrier_init_fence()
    cute.arch.griddepcontrol_wait()  # for the kernel before: this one was launched before it ended
    if cutlass.const_expr(is_transition):  # behind the last kernel of a call, another's blocks would take SMs still wanted
        cute.arch.griddepcontrol_launch_dependents()
    hv, number, which = cute.arch.block_idx()
    if warp_id == 0:
        write_task(storage.sTask, memory, sizes, hv, number, which, is_transition)
    before_sync()
    cute.arch.sync_threads()
    after_sync()
    tmem = cute.arch.retrieve_tmem_ptr(F32, 16, storage.tmem)
    if storage.sTask[0] >= 0:
        tid, _, _ = cute.arch.thread_idx()
        warpgroup_id = cute.arch.make_warp_uniform(tid // 128)
        thread = tid % 128  # in its warpgroup: the lane of tensor memory that it sees
        of_call = (memory.mVec.shape[1], hv, which)
        x = Block(tma, memory, storage, mbarriers_at(storage.bars), tmem, mmas, dtype, is_transition, *of_call)
        if warpgroup_id == 0:
            cute.arch.setmaxregister_decrease(ISSUE_REGISTERS)
            if warp_id == 0:
                load_role(x)
            elif warp_id == 1:
                mma_role(x)
        elif warpgroup_id == 1:
            cute.arch.setmaxregister_increase(ROW_REGISTERS)
            rows_role(x, thread)
        else:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            if cutlass.const_expr(not is_transition):
                output_role(x, thread, warp_id == STORE_WARP)
    before_sync()
    cute.arch.sync_threads()
    after_sync()
    if warp_id == 0:
        cute.arch.dealloc_tmem(tmem, COLUMNS)


@cute.jit
def write_task(
    sTask: cute.Tensor,
    memory: cutlass.Constexpr,
    sizes: cutlass.Constexpr,
    hv: I32,
    number: I32,
    which: I32,
    is_transition: cutlass.Constexpr,
):
    """What the block has to do, by a warp."""
    segment = segment_at(number, memory.mCu, sizes.L, sizes.length, sizes.halvings)
    slot = slot_of_first(memory.states, segment.seq)
    has_h0 = I32(1) if slot >= 0 else I32(0)
    span = span_of(memory.mVec, hv, which, has_h0, sizes.L, segment, is_transition)
    i, HV, chain_from = segment.i, memory.mVec.shape[1], I32(-1)
    following, row = I32(-1), I32(0)
    if cutlass.const_expr(not is_transition):
        if span.is_chained == 1:
            chain_from = begin_of_chain(memory.mDone, (number - i) * HV + hv, HV, i, has_h0, False)
        following, row = first_kept(memory.kept, memory.mCu, segment.seq, sizes.length, span.out_from)
    task = Task(
        num_transitions=i - 1 - chain_from if span.is_chained == 1 else I32(0),
        chain_from=chain_from,
        num_chunks=cutlass.max(span.to_chunk - span.from_chunk, 0) if span.is_busy else I32(-1),
        is_last=I32(1) if i == segment.segments - 1 else I32(0),
        seq=segment.seq,
        begin=segment.begin,
        tokens=segment.tokens,
        chunk0=segment.chunk0,
        first_segment=number - i,
        i=i,
        from_chunk=span.from_chunk,
        out_from=span.out_from,
        is_chained=span.is_chained,
        slot=slot,
        has_h0=has_h0,
        following=following,
        row=row,
    )
    with cute.arch.elect_one():
        for at, value in enumerate(task):
            sTask[at] = value


# Loads


@cute.jit
def load_role(x: cutlass.Constexpr):
    """A warp: M's and chunks to the ring."""
    tma, storage, bars, hv, HV = x.tma, x.storage, x.bars, x.hv, x.HV
    task = storage.task()
    num_transitions, first = task.num_transitions, x.first_transition(task)
    tiles = cute.local_tile(tma.tiles.coordinates, (64, 128), (None, 0))
    ring_s, tiles_g = tma_split(tma.tiles.atom, storage.ring, tiles)
    m_s, m_g = tma_split(tma.m.atom, storage.sM, cute.local_tile(tma.m.coordinates, (128, 128), (None, 0)))
    t_s, t_g = tma_split(tma.T.atom, storage.sT, cute.local_tile(tma.T.coordinates, (64, 64), (None, 0)))
    p_s, p_g = tma_split(tma.P.atom, storage.sP, cute.local_tile(tma.P.coordinates, (64, 64), (None, 0)))
    e_s, e_g = tma_split(tma.vec.atom, storage.sVec, cute.local_tile(tma.vec.coordinates, (1, VEC), (None, 0)))
    of_v = cute.local_tile(cute.domain_offset((task.begin, 0), tma.v.coordinates[None, None, hv]), (64, 128), (None, 0))
    v_s, v_g = tma_split(tma.v.atom, storage.sV, of_v)
    for it in cutlass.range(num_transitions + task.num_chunks, unroll=1):
        s = it % STAGES
        bar = bars.full + s
        cute.arch.mbarrier_wait(bars.empty + s, (it // STAGES + 1) % 2)
        if it < num_transitions:
            record = first + it * HV
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, x.halves * MATRIX_BYTES)
            for half in cutlass.range_constexpr(x.halves):
                cute.copy(tma.m.atom, m_g[None, 2 * record + half], m_s[None, 2 * s + half], tma_bar_ptr=bar)
        else:
            chunk = task.from_chunk + it - num_transitions
            record = (task.chunk0 + chunk) * HV + hv
            size = 3 * TILE_BYTES + SQUARE_BYTES if cutlass.const_expr(x.is_transition) else 4 * TILE_BYTES + 2 * SQUARE_BYTES
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, size + 4 * VEC)
            cute.copy(tma.tiles.atom, tiles_g[None, 3 * record], ring_s[None, TILES * s + KB], tma_bar_ptr=bar)
            cute.copy(tma.v.atom, v_g[None, chunk], v_s[None, TILES * s + V], tma_bar_ptr=bar)
            cute.copy(tma.vec.atom, e_g[None, record], e_s[None, s], tma_bar_ptr=bar)
            cute.copy(tma.T.atom, t_g[None, record], t_s[None, s], tma_bar_ptr=bar)
            cute.copy(tma.tiles.atom, tiles_g[None, 3 * record + 2], ring_s[None, TILES * s + KR], tma_bar_ptr=bar)
            if cutlass.const_expr(not x.is_transition):
                cute.copy(tma.tiles.atom, tiles_g[None, 3 * record + 1], ring_s[None, TILES * s + QG], tma_bar_ptr=bar)
                cute.copy(tma.P.atom, p_g[None, record], p_s[None, s], tma_bar_ptr=bar)


# Products


@cute.jit
def mma_role(x: cutlass.Constexpr):
    """A warp: every product, each when its operands are there."""
    (mma_x, mma_t, mma_s), storage, bars, tmem, dtype = x.mmas, x.storage, x.bars, x.tmem, x.dtype
    task = storage.task()
    thr_x, thr_t, thr_s = mma_x.get_slice(0), mma_t.get_slice(0), mma_s.get_slice(0)
    accS, accR = accumulator(mma_s, tmem + Column.S, 128), accumulator(mma_x, tmem + Column.R, 64)
    accU = accumulator(mma_t, tmem + Column.U, 64)
    aS, aX = operand_a(mma_x, tmem + Column.S16, 128, dtype), operand_a(mma_t, tmem + Column.X16, 64, dtype)
    aU, aU_o = operand_a(mma_s, tmem + Column.U16, 64, dtype), operand_a(mma_x, tmem + Column.U16, 64, dtype)
    bK = mma_x.make_fragment_B(thr_x.partition_B(storage.ring))  # [N = token, K = dk]: kb, qg
    bP = mma_x.make_fragment_B(thr_x.partition_B(storage.sP))  # [N = t, K = i]
    bT = mma_t.make_fragment_B(thr_t.partition_B(swapped(storage.sT)))  # [N = t, K = i], stored [i, t]
    bKr = mma_s.make_fragment_B(thr_s.partition_B(swapped(storage.ring)))  # [N = dk, K = token]
    if cutlass.const_expr(not x.is_transition):
        multiply_transitions(x, accS, task.num_transitions)
    for n in cutlass.range(task.num_chunks, unroll=1):
        it = task.num_transitions + n
        s, phase = it % STAGES, it // STAGES % 2
        o_at = n % 2
        cute.arch.mbarrier_wait(bars.full + s, phase)
        cute.arch.mbarrier_wait(bars.s_ready + s, phase)
        after_sync()
        issue(mma_x, accR, aS, bK[None, None, None, TILES * s + KB], False)
        commit(bars.x_done)
        accO = accumulator(mma_x, tmem + (Column.O + 64 * o_at), 64)
        if cutlass.const_expr(not x.is_transition):
            cute.arch.mbarrier_wait(bars.o_free + o_at, (n // 2 + 1) % 2)
            after_sync()
            issue(mma_x, accO, aS, bK[None, None, None, TILES * s + QG], False)
        cute.arch.mbarrier_wait(bars.x_ready, n % 2)
        after_sync()
        issue(mma_t, accU, aX, bT[None, None, None, s], False)
        commit(bars.u_done)
        cute.arch.mbarrier_wait(bars.u_ready, n % 2)
        after_sync()
        issue(mma_s, accS, aU, bKr[None, None, None, TILES * s + KR], True)
        commit(bars.s_done)
        if cutlass.const_expr(not x.is_transition):
            issue(mma_x, accO, aU_o, bP[None, None, None, s], True)
            commit(bars.o_done + o_at)
        commit(bars.empty + s)


@cute.jit
def multiply_transitions(x: cutlass.Constexpr, accS: cute.Tensor, num_transitions: I32):
    """S <- S M + B, for each; the rows role puts B into the accumulator. S is a pair of 16-bit values, and so is M in bf16; the
    product leaves lo lo out."""
    mma_s, bars, tmem = x.mmas.s, x.bars, x.tmem
    hi, low = [operand_a(mma_s, tmem + at, 128, x.dtype) for at in (Column.S16, Column.O)]
    bM = mma_s.make_fragment_B(mma_s.get_slice(0).partition_B(swapped(x.storage.sM)))  # [N = dk out, K = dk in]
    for it in cutlass.range(num_transitions, unroll=1):
        s, phase = it % STAGES, it // STAGES % 2
        cute.arch.mbarrier_wait(bars.full + s, phase)
        cute.arch.mbarrier_wait(bars.s_ready + s, phase)
        after_sync()
        for a, half in ((hi, 0), (low, 0), (hi, 1))[: 1 + x.halves]:
            issue(mma_s, accS, a, bM[None, None, None, 2 * s + half], True)
        commit(bars.s_done, bars.empty + s)


# Rows: a thread has one row dv of everything


class Rows(NamedTuple):
    """A thread's registers, and its lane of tensor memory."""

    thread: Any
    S: Any  # [128], its row of S^T
    X: Any  # [64], of R, b v - R or U
    factor: Any  # [1]
    is_first_lane: Any
    load_s: Any
    store_s: Any  # by pieces of 32
    load_r: Any
    load_u: Any
    store_s16: Any
    store_low: Any
    store_x16: Any
    store_u16: Any


def make_rows(x: Block, thread: Any) -> Rows:
    mma_x, _, mma_s = x.mmas
    tmem, is_first_lane = x.tmem, cute.arch.lane_idx() == 0
    load_s, store_s = row_load(mma_s, tmem + Column.S, 128, thread), row_stores(mma_s, tmem + Column.S, 128, thread)
    load_r, load_u = row_load(mma_x, tmem + Column.R, 64, thread), row_load(mma_x, tmem + Column.U, 64, thread)
    of_16 = ((Column.S16, 64), (Column.O, 64), (Column.X16, 32), (Column.U16, 32))
    stores = [row_stores(mma_x, tmem + at, n, thread, 16) for at, n in of_16]
    S, X = cute.make_rmem_tensor((128,), F32), cute.make_rmem_tensor((64,), F32)
    return Rows(thread, S, X, cute.make_rmem_tensor((1,), F32), is_first_lane, load_s, store_s, load_r, load_u, *stores)


@cute.jit
def rows_role(x: cutlass.Constexpr, thread: I32):
    """A warpgroup: what products take and give, between tensor memory and registers."""
    task = x.storage.task()
    rows = make_rows(x, thread)
    rows.factor[0] = F32(1.0)
    first_state(x, rows, task)
    following, row = task.following, task.row
    for n in cutlass.range(task.num_chunks, unroll=1):
        is_kept = task.from_chunk + n == following
        rows_step(x, rows, task, n, row if is_kept else I32(-1))
        if is_kept:
            following, row = following + x.memory.kept.every, row + 1
    last_state(x, rows, task, following, row)


@cute.jit
def first_state(x: cutlass.Constexpr, rows: cutlass.Constexpr, task: cutlass.Constexpr):
    """S <- the state to begin with, to tensor memory."""
    S, thread, memory, states, hv, has_h0 = rows.S, rows.thread, x.memory, x.memory.states, x.hv, task.has_h0
    S.fill(0.0)
    if cutlass.const_expr(x.is_transition):
        one = F32(1.0) if x.which == 1 else F32(0.0)
        for j in cutlass.range_constexpr(128):
            S[j] = one if j == thread else F32(0.0)
    else:
        if has_h0 == 1 and (task.from_chunk == 0 or (task.is_chained == 1 and task.chain_from < 0)):
            address = address_of(states.h0, task.slot, states.step, hv, states.kind)
            load_state(lambda m: m[thread, None], S, address, states.kind)
        if task.chain_from >= 0:
            cute.autovec_copy(memory.mB[(task.first_segment + task.chain_from) * x.HV + hv, thread, None], S)
    for p in cutlass.range_constexpr(4):
        rows.store_s[p](pieces(S)[p])
    stored()
    if cutlass.const_expr(not x.is_transition):
        chain_rows(x, rows, task.num_transitions, x.first_transition(task))


@cute.jit
def chain_rows(x: cutlass.Constexpr, rows: cutlass.Constexpr, num_transitions: I32, first: I32):
    """S <- S M + B, for each: S, in tensor memory, becomes a pair of 16-bit values there, and B takes its place."""
    S, factor, bars, dtype = rows.S, rows.factor, x.bars, x.dtype
    # A loop would take an object whose method it calls for something that it changes.
    load_s, store_s, store_s16, store_low = rows.load_s, rows.store_s, rows.store_s16, rows.store_low
    load_pieces = [row_load(x.mmas.s, x.tmem + (Column.S + 32 * p), 32, rows.thread) for p in range(4)]
    for it in cutlass.range(num_transitions, unroll=1):
        if cutlass.const_expr(x.is_f16):
            load_s(S)
            keep_in_range(S, F32(0.0), factor)
        of_b = x.memory.mB[first + it * x.HV, rows.thread, None]
        for p in cutlass.range_constexpr(4):
            piece = pieces(S)[p]
            if cutlass.const_expr(not x.is_f16):  # not all at once: the roundings of all of S are more registers than there are
                load_pieces[p](piece)
            store_s16[p](rounded(piece, dtype))
            residue(piece, dtype)
            store_low[p](rounded(piece, dtype))
        stored()  # before B takes the registers of S
        for p in cutlass.range_constexpr(4):
            piece = pieces(S)[p]
            cute.autovec_copy(cute.local_tile(of_b, (32,), (p,)), piece)
            if cutlass.const_expr(x.is_f16):
                piece.store(piece.load() * factor[0])
            store_s[p](piece)
        stored()
        before_sync()
        cute.arch.mbarrier_arrive(bars.s_ready + it % STAGES)
        cute.arch.mbarrier_wait(bars.s_done, it % 2)
        after_sync()
        if rows.is_first_lane:
            cute.arch.mbarrier_arrive(bars.empty + it % STAGES)


@cute.jit
def rows_step(x: cutlass.Constexpr, rows: cutlass.Constexpr, task: cutlass.Constexpr, n: I32, row: I32):
    """A chunk: S as an operand, its decay, b v - R and U as operands. The state before it goes to a row of those that are kept,
    if that is not negative."""
    S, X, factor, thread, bars, dtype = rows.S, rows.X, rows.factor, rows.thread, x.bars, x.dtype
    sV, sVec = x.storage.sV, x.storage.sVec
    it = task.num_transitions + n
    s, phase = it % STAGES, it // STAGES % 2
    left = task.tokens - (task.from_chunk + n) * 64
    cute.arch.mbarrier_wait(bars.full + s, phase)
    top = F32(0.0)
    if cutlass.const_expr(x.is_f16):
        top = largest_of_columns(sV, TILES * s + V, left, thread) * factor[0]
        if cutlass.const_expr(x.is_transition):
            top = top if x.which == 0 else F32(0.0)  # M does not see v
    if it > 0:
        cute.arch.mbarrier_wait(bars.s_done, (it - 1) % 2)
        after_sync()
    rows.load_s(S)
    if cutlass.const_expr(not x.is_transition):
        kept = x.memory.kept
        if row >= 0 and row < kept.rows:
            address, back = address_of(kept.at, row, kept.step, x.hv, kept.kind), inverse_of(factor[0])
            for p in cutlass.range_constexpr(4):
                piece = cute.make_rmem_tensor((32,), F32)
                piece.store(pieces(S)[p].load() * back)
                store_state(piece_of(thread, p), lambda piece=piece: piece, address, kept.kind)
    if cutlass.const_expr(x.is_f16):
        keep_in_range(S, top, factor)
    for p in cutlass.range_constexpr(4):
        rows.store_s16[p](rounded(pieces(S)[p], dtype))
    if cutlass.const_expr(x.is_f16 and not x.is_transition):
        cute.arch.mbarrier_wait(bars.o_free + n % 2, (n // 2 + 1) % 2)
        x.storage.sFactor[thread, n % 2] = factor[0]
    stored()
    before_sync()
    cute.arch.mbarrier_arrive(bars.s_ready + s)
    for p in cutlass.range_constexpr(4):  # meanwhile the state decays
        piece, decay = pieces(S)[p], cute.make_rmem_tensor((32,), F32)
        cute.autovec_copy(cute.local_tile(sVec[0, None, s], (32,), (p,)), decay)
        piece.store(piece.load() * decay.load())
        rows.store_s[p](piece)
    values = cute.make_rmem_tensor((64,), BF16)
    for r in cutlass.range_constexpr(8):
        of_v = rows_at(sV, TILES * s + V, r, thread)
        for p in cutlass.range_constexpr(8):
            values[8 * p + r] = of_v[0, p]
    cute.arch.mbarrier_wait(bars.x_done, n % 2)
    after_sync()
    rows.load_r(X)
    for p in cutlass.range_constexpr(16):
        beta = cute.make_rmem_tensor((4,), F32)
        cute.autovec_copy(cute.local_tile(sVec[0, None, s], (4,), (BETA // 4 + p,)), beta)
        for j in cutlass.range_constexpr(4):
            value = values[4 * p + j].to(F32)
            if cutlass.const_expr(x.is_f16):
                value = value * factor[0]
            if cutlass.const_expr(x.is_transition):
                value = value if x.which == 0 else F32(0.0)
            X[4 * p + j] = beta[j] * value - X[4 * p + j]
    if left < 64:  # v past the end is another sequence's
        for t in cutlass.range_constexpr(64):
            X[t] = X[t] if t < left else F32(0.0)
    for p in cutlass.range_constexpr(2):
        rows.store_x16[p](rounded(pieces(X)[p], dtype))
    stored()  # S too
    before_sync()
    cute.arch.mbarrier_arrive(bars.x_ready)
    if rows.is_first_lane:
        cute.arch.mbarrier_arrive(bars.empty + s)
    cute.arch.mbarrier_wait(bars.u_done, n % 2)
    after_sync()
    rows.load_u(X)
    for p in cutlass.range_constexpr(2):
        rows.store_u16[p](rounded(pieces(X)[p], dtype))
    stored()
    before_sync()
    cute.arch.mbarrier_arrive(bars.u_ready)


def piece_of(thread: Any, p: int) -> Any:
    """32 columns of a thread's row of a matrix."""
    return lambda m: cute.local_tile(m[thread, None], (32,), (p,))


@cute.jit
def last_state(x: cutlass.Constexpr, rows: cutlass.Constexpr, task: cutlass.Constexpr, following: I32, row: I32):
    """S from tensor memory to global memory: as B or M of a transition, or as the sequence's last state, which may be kept as
    well: then it is at boundary `following`, and goes to a row."""
    thread, memory, states, kept, dtype = rows.thread, x.memory, x.memory.states, x.memory.kept, x.dtype
    steps = task.num_transitions + task.num_chunks
    if steps > 0:
        cute.arch.mbarrier_wait(x.bars.s_done, (steps - 1) % 2)
        after_sync()
    record = (task.first_segment + task.i) * x.HV + x.hv
    back = inverse_of(rows.factor[0])
    slot, square = I32(-1), F32(0.0)
    if cutlass.const_expr(not x.is_transition):
        slot = slot_of_last(states, task.seq) if task.is_last == 1 else I32(-1)
        is_kept = task.is_last == 1 and row < kept.rows and is_end(kept, following, task.tokens)
        row = row if is_kept else I32(-1)
    for p in cutlass.range_constexpr(4):
        piece = pieces(rows.S)[p]
        row_load(x.mmas.s, x.tmem + (Column.S + 32 * p), 32, thread)(piece)
        if cutlass.const_expr(x.is_f16):
            piece.store(piece.load() * back)
        to = lambda t, p=p: cute.local_tile(t, (32,), (p,))
        if cutlass.const_expr(x.is_transition):
            if x.which == 0:
                cute.autovec_copy(piece, to(memory.mB[record, thread, None]))
            else:
                hi = rounded(piece, dtype)
                square += square_of(piece, hi)
                cute.autovec_copy(hi, to(memory.mM[2 * record, thread, None]))
                residue(piece, dtype)
                cute.autovec_copy(rounded(piece, dtype), to(memory.mM[2 * record + 1, thread, None]))
        else:
            value = lambda piece=piece: piece
            if slot >= 0:
                store_state(piece_of(thread, p), value, address_of(states.ht, slot, states.step, x.hv, states.kind), states.kind)
            if row >= 0:
                store_state(piece_of(thread, p), value, address_of(kept.at, row, kept.step, x.hv, kept.kind), kept.kind)
    if cutlass.const_expr(x.is_transition):
        keep_norm(x, thread, square, record)


@cute.jit
def keep_norm(x: cutlass.Constexpr, thread: I32, square: F32, record: I32):
    """Of M, given a row's sum of squares; by the rows role."""
    sSquares, mDone = x.storage.sFactor, x.memory.mDone
    of_warp = cute.arch.warp_reduction_sum(square)
    if thread % 32 == 0:
        sSquares[thread // 32, 0] = of_warp
    NamedBarrier(barrier_id=Barrier.ROWS, num_threads=128).arrive_and_wait()
    if thread == 0 and x.which == 1:
        mDone[record] = norm_in_word((sSquares[0, 0] + sSquares[1, 0]) + (sSquares[2, 0] + sSquares[3, 0]))


# Output


@cute.jit
def output_role(x: cutlass.Constexpr, thread: I32, is_storing: cutlass.Boolean):
    """A warpgroup: o of each chunk, of which one warp issues the TMA stores."""
    tma, storage, bars, hv = x.tma, x.storage, x.bars, x.hv
    task = storage.task()
    together = NamedBarrier(barrier_id=Barrier.OUTPUT, num_threads=128)
    of_o = cute.local_tile(cute.domain_offset((task.begin, 0), tma.o.coordinates[None, None, hv]), (64, 128), (None, 0))
    o_s, o_g = tma_split(tma.o.atom, storage.sO, of_o)
    o_rows = cute.local_tile(cute.domain_offset((task.begin, 0), x.memory.mO[None, None, hv]), (64, 128), (None, 0))
    O = cute.make_rmem_tensor((64,), F32)
    for n in cutlass.range(task.num_chunks, unroll=1):
        it, chunk, o_at = task.num_transitions + n, task.from_chunk + n, n % 2
        left = task.tokens - chunk * 64
        cute.arch.mbarrier_wait(bars.o_done + o_at, n // 2 % 2)
        after_sync()
        row_load(x.mmas.x, x.tmem + (Column.O + 64 * o_at), 64, thread)(O)
        back = F32(1.0)
        if cutlass.const_expr(x.is_f16):
            cute.arch.mbarrier_wait(bars.s_ready + it % STAGES, it // STAGES % 2)  # long over; it shows what rows wrote
            back = inverse_of(storage.sFactor[thread, o_at])
        before_sync()
        cute.arch.mbarrier_arrive(bars.o_free + o_at)
        if chunk >= task.out_from:
            if is_storing:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            together.arrive_and_wait()
            O16 = cute.make_rmem_tensor((64,), BF16)
            O16.store((O.load() * back).to(BF16))
            for r in cutlass.range_constexpr(8):
                to = rows_at(storage.sO, 0, r, thread)
                for p in cutlass.range_constexpr(8):
                    to[0, p] = O16[8 * p + r]
            cute.arch.fence_proxy("async.shared", space="cta")
            together.arrive_and_wait()
            if left >= 64:
                if is_storing:
                    cute.copy(tma.o.atom, o_s, o_g[None, chunk])
                    cute.arch.cp_async_bulk_commit_group()
            else:  # TMA would write on into the next sequence
                copy_rows(storage.sO, o_rows, chunk, thread, left)
    if is_storing:
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def copy_rows(sO: cute.Tensor, o_rows: cute.Tensor, chunk: I32, thread: I32, rows: I32):
    """Some of the rows of o to global memory, by 128 threads."""
    for p in cutlass.range_constexpr(8):
        row = p * 8 + thread // 16
        if row < rows:
            source = cute.local_tile(sO, (1, 8), (row, thread % 16))
            cute.autovec_copy(source, cute.local_tile(o_rows[None, None, chunk], (1, 8), (row, thread % 16)))
