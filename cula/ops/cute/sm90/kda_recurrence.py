# SPDX-License-Identifier: Apache-2.0
"""KDA on Hopper, the recurrence: a state passes over the chunks that the intra-chunk kernel made, and never leaves the registers.

A chunk, with the state S [128 dk, 128 dv] in float32:
    R = kb S,   o = qg S                      two products with the same A operand
    U = T (b v - R)
    o += P U,   S <- e^{G_C} S + kr^T U
All of it transposed, S^T [dv, dk], because wgmma takes A, never B, from registers: two consumer warpgroups own 64 rows dv each
and exchange nothing. A producer warp feeds both by TMA, two chunks deep.

Segments, their warm-up and their chains are those of `common/kda_segments.py`. There is one launch: where some segment is
chained, blocks first compute transitions, by the same recurrence without output, and count each in global memory; a chained
segment then waits for those before it. A block waits for blocks of lower numbers only, which have begun before it. Such a
sequence has fewer segments, and more of its blocks compute transitions.

| warps      | role                                          | registers |
|------------|-----------------------------------------------|-----------|
| 0          | `load_role`: TMA loads                        | 40        |
| 1, 2       | `output_role`: TMA stores of a consumer's o   | 40        |
| 4-7, 8-11  | `consumer_role`: the recurrence, 64 rows dv each | 232    |

| shared memory                     | bytes |
|-----------------------------------|-------|
| kb, qg, kr, v: two stages         | 128 K |
| T, P: two stages                  | 32 K  |
| o                                 | 16 K  |
| e^{G_C}, b: two stages            | 2 K   |
| squares of an M, begin of a chain | 36    |

| mbarrier             | says                                              | arrivals         |
|----------------------|---------------------------------------------------|------------------|
| `ring.full`          | a chunk has come, for each stage                  | 1, and its bytes |
| `ring.empty`         | both consumers have read it                       | 8 warps          |
| `transitions.full`   | an M has come, for each place                     | 1, and its bytes |
| `transitions.empty`  | both consumers have multiplied with it            | 8 warps          |

Named barriers are those of `Barrier` in `kda_recurrence_steps.py`.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.kda_chain import begin_of_chain, norm_in_word
from cula.ops.cute.common.kda_lengths import leave_to_fused
from cula.ops.cute.common.kda_segments import segment_at, tasks_of
from cula.ops.cute.common.states import KeptStates, States, address_of, first_kept, load_state, slot_of_first
from cula.ops.cute.common.tiles import F16, F32, I32, Tma, allocate_tile, swapped, tile_at, tile_layout, tma_split
from cula.ops.cute.kda_abi import VEC
from cula.ops.cute.sm90.fp16_window import unscale_rows
from cula.ops.cute.sm90.kda_recurrence_steps import (
    STAGES,
    Barrier,
    ChunkCopies,
    ChunkTiles,
    Mmas,
    Ring,
    carry_o,
    clear_absent_quarters,
    copy_of,
    load_chunks,
    make_consumer,
    next_stop,
    run_chunks,
    save_at_boundary,
    store_last_o,
)
from cula.ops.cute.sm90.kda_transitions import (
    Chain,
    TransitionBarriers,
    count_done,
    load_b,
    load_transitions,
    run_chain,
    store_b,
    store_m,
)

THREADS = 384
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
CONSUMER_WARPS = 8
COUNTING_WARP = 4  # says that a transition is there, and where a chain begins


class Task(enum.IntEnum):
    """What a block does before its segment. What it runs over there has no output."""

    OF_B = 0
    OF_M = 1
    WARM_UP = 2  # to the state at the segment's start, if only that which it begins with
    END = 3


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
    mDone: Any  # [segments HV]
    mCu: Any  # [N + 1]


class BlockSizes(NamedTuple):
    """Numbers that a block goes by."""

    L: Any  # chunks of a segment
    chained_L: Any  # the same where some segment of a sequence is chained
    length: Any
    halvings: Any
    helpers: Any
    longest: Any  # see `kda_lengths.py`; None: the call is this kernel's


class Storage(NamedTuple):
    """Shared memory."""

    tiles: ChunkTiles
    sV: Any  # [64 tokens, 128 dv, stage]
    all_tiles: Any  # the memory of kb, qg, kr and v, one tile after the other
    sO: Any  # [64 tokens, 64 dv, consumer]
    sVec: Any  # [1, VEC, stage]
    ring: Ring
    transitions: TransitionBarriers
    sSquares: Any  # [consumers' warps]: of an M
    sBegin: Any  # [1]: the segment whose B a chain begins with


class Block(NamedTuple):
    """What a block's roles know of its work."""

    hv: Any
    HV: Any
    segment: Any  # `Segment`
    tasks: Any  # `Tasks`
    first_number: Any  # of the sequence's segments
    start: Any  # first chunk of its own segment
    to_chunk: Any  # the one after its last
    slot: Any  # of the sequence's first state; -1 where it starts from zero
    has_h0: Any  # 1 where it does not


def allocate(lt: Any, lv: Any, lo: Any, dtype: Any) -> Storage:
    smem = SmemAllocator()
    sKb, sQg, sKr = [allocate_tile(smem, lt, dtype) for _ in range(3)]
    sV = allocate_tile(smem, lv)
    all_tiles = tile_at(sKb, tile_layout(64, 128, 4 * STAGES, dtype), dtype)
    # T and P by quarters [32, 32], of which one is zero and stays so: stage, columns, rows
    square = tile_layout(64, 64, STAGES, dtype, columns_of=32)
    sT, sP = allocate_tile(smem, square, dtype), allocate_tile(smem, square, dtype)
    sO = allocate_tile(smem, lo)
    sVec = smem.allocate_tensor(F32, cute.make_layout((1, VEC, STAGES), stride=(VEC, 1, VEC)), byte_alignment=128)
    full, empty, transition_full, transition_empty = [smem.allocate_array(cutlass.Int64, STAGES) for _ in range(4)]
    tiles, transitions = ChunkTiles(sKb, sQg, sP, sT, sKr), TransitionBarriers(transition_full, transition_empty)
    sSquares = smem.allocate_tensor(F32, cute.make_layout(CONSUMER_WARPS), byte_alignment=16)
    sBegin = smem.allocate_tensor(I32, cute.make_layout(1), byte_alignment=4)
    return Storage(tiles, sV, all_tiles, sO, sVec, Ring(full, empty), transitions, sSquares, sBegin)


@cute.jit
def set_up(storage: cutlass.Constexpr, tma: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """Barriers, descriptors, and zeros in the quarters of T and P that are never loaded."""
    tid, _, _ = cute.arch.thread_idx()
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(storage.ring.full + stage, 1)
                cute.arch.mbarrier_init(storage.ring.empty + stage, CONSUMER_WARPS)
                cute.arch.mbarrier_init(storage.transitions.full + stage, 1)
                cute.arch.mbarrier_init(storage.transitions.empty + stage, CONSUMER_WARPS)
        for of in (tma.tiles, tma.T, tma.P, tma.vec, tma.v, tma.o):
            cpasync.prefetch_descriptor(of.atom)
    cute.arch.mbarrier_init_fence()
    clear_absent_quarters(storage.tiles, tid, dtype)
    cute.arch.sync_threads()


@cute.kernel
def recurrence_kernel(
    tma: RecurrenceTma,
    memory: Memory,
    sizes: BlockSizes,
    mmas: Mmas,
    lt: cute.ComposedLayout,
    lv: cute.ComposedLayout,
    lo: cute.ComposedLayout,
    dtype: cutlass.Constexpr,
):
    """A block for each (value head, number): `helpers`, then one for the number of each segment of L chunks. In a sequence of
    which any segment is chained they take segments of chained_L."""
    if cutlass.const_expr(sizes.longest is not None):
        leave_to_fused(memory.mCu, sizes.longest, is_last=True)
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    warpgroup_id = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    storage = allocate(lt, lv, lo, dtype)
    hv, number, _ = cute.arch.block_idx()
    helpers, L = sizes.helpers, sizes.L
    own_number = cutlass.max(number - helpers, 0)  # a helper's is that of the only sequence
    segment = segment_at(own_number, memory.mCu, L, sizes.length, sizes.halvings)
    first_number = own_number - segment.i
    set_up(storage, tma, dtype)

    cute.arch.griddepcontrol_wait()  # for the kernel before: this one was launched before it ended
    slot = slot_of_first(memory.states, segment.seq)
    has_h0 = I32(1) if slot >= 0 else I32(0)
    i = number - helpers - first_number
    tasks = tasks_of(memory.mVec, hv, helpers, has_h0, L, sizes.chained_L, segment, i)
    start = tasks.i * tasks.L
    to_chunk = cutlass.min(start + tasks.L, (segment.tokens + 63) // 64)
    block = Block(hv, memory.mVec.shape[1], segment, tasks, first_number, start, to_chunk, slot, has_h0)

    if warpgroup_id == 0:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp_id == 0:
            load_role(tma, storage, block, dtype)
        elif warp_id < 3 and tasks.has_segment:
            output_role(tma, storage, block, warp_id - 1)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consumer_role(memory, storage, block, sizes, mmas, warpgroup_id - 1, dtype)


@cute.jit
def first_step(tasks: cutlass.Constexpr):
    """The first of the steps of which each is a task: one that makes no transitions begins with the warm-up."""
    return I32(Task.OF_B) if tasks.b_segment >= 0 or tasks.m_segment >= 0 else I32(Task.WARM_UP)


@cute.jit
def task_at(step: I32, i: I32):
    """The task of a step: B, then M, then the warm-up; in every other segment M first. So B of a segment and M of it, which the
    next one computes, are computed at the same time, and one of them finds what it reads in the L2 cache."""
    return step ^ (i & 1) if step < Task.WARM_UP else step


@cute.jit
def chunks_of_task(task: I32, tasks: cutlass.Constexpr, start: I32):
    """(Its first chunk, how many): none where the block has no such task."""
    is_warm_up = task == Task.WARM_UP
    segment = tasks.b_segment if task == Task.OF_B else tasks.m_segment
    of_segment = tasks.L if segment >= 0 else I32(0)
    return start - tasks.warm_up if is_warm_up else segment * tasks.L, tasks.warm_up if is_warm_up else of_segment


def transitions_barrier() -> NamedBarrier:
    """The consumers know when transitions are there, the producer waits for it."""
    return NamedBarrier(barrier_id=Barrier.TRANSITIONS, num_threads=288)


@cute.jit
def load_role(tma: cutlass.Constexpr, storage: cutlass.Constexpr, block: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """A warp: all that the consumers read, in the order in which they do."""
    hv, HV, segment, tasks, first_number, start, to_chunk, _, _ = block
    ring, first_record = storage.ring, segment.chunk0 * HV + hv
    copies = chunk_copies(tma, storage, hv, segment.begin, dtype)
    count = I32(0)
    for step in cutlass.range(first_step(tasks), Task.END, unroll=1):
        task = task_at(step, tasks.i)
        from_chunk, chunks = chunks_of_task(task, tasks, start)
        sees_v = I32(0) if task == Task.OF_M else I32(1)
        count = load_chunks(copies, ring, count, first_record, HV, from_chunk, from_chunk + chunks, False, sees_v)
    if tasks.has_segment:
        if tasks.is_chained == 1:  # the first chunk, then transitions in the memory of the other stage
            count = load_chunks(copies, ring, count, first_record, HV, start, start + 1, True, I32(1))
            transitions_barrier().arrive_and_wait()  # and all chunks before have been read
            cute.arch.fence_proxy("async.global")
            of_m = copy_of(tma.m, storage.all_tiles, cute.local_tile(tma.m.coordinates, (64, 128), (None, 0)))
            begin = cute.arch.make_warp_uniform(storage.sBegin[0])
            chain = Chain((first_number + begin + 1) * HV + hv, HV, tasks.i - 1 - begin, count % STAGES)
            load_transitions(of_m, storage.transitions, chain, dtype)
        count = load_chunks(copies, ring, count, first_record, HV, start + tasks.is_chained, to_chunk, True, I32(1))


def chunk_copies(tma: RecurrenceTma, storage: Storage, hv: Any, begin: Any, dtype: Any) -> ChunkCopies:
    """Of a sequence that begins at a token, and one head."""
    tiles = cute.local_tile(tma.tiles.coordinates, (64, 128), (None, 0))
    kb, qg, kr = [copy_of(tma.tiles, s, tiles) for s in (storage.tiles.kb, storage.tiles.qg, storage.tiles.kr)]
    quarters = tile_layout(32, 32, 4 * STAGES, dtype)
    T, P = [
        copy_of(of, tile_at(s, quarters, dtype), cute.local_tile(of.coordinates, (32, 32), (None, 0)))
        for of, s in ((tma.T, storage.tiles.T), (tma.P, storage.tiles.P))
    ]
    vec = copy_of(tma.vec, storage.sVec, cute.local_tile(tma.vec.coordinates, (1, VEC), (None, 0)))
    of_v = cute.local_tile(cute.domain_offset((begin, 0), tma.v.coordinates[None, None, hv]), (64, 128), (None, 0))
    return ChunkCopies(kb, qg, kr, copy_of(tma.v, storage.sV, of_v), vec, T, P)


@cute.jit
def output_role(tma: cutlass.Constexpr, storage: cutlass.Constexpr, block: cutlass.Constexpr, part: I32):
    """A warp for each consumer: carries its o away."""
    begin, tokens = block.segment.begin, block.segment.tokens
    of_head = cute.domain_offset((begin, 0), tma.o.coordinates[None, None, block.hv])
    o_s, o_g = tma_split(tma.o.atom, storage.sO, cute.local_tile(of_head, (64, 64), (None, part)))
    carry_o(tma.o.atom, o_s[None, part], o_g, part, block.start, block.to_chunk, tokens)


@cute.jit
def consumer_role(
    memory: cutlass.Constexpr,
    storage: cutlass.Constexpr,
    block: cutlass.Constexpr,
    sizes: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    part: I32,
    dtype: cutlass.Constexpr,
):
    """A warpgroup with 64 rows dv: transitions that are its block's to compute, then its block's segment."""
    segment, tasks = block.segment, block.tasks
    thread = cute.arch.thread_idx()[0] % 128
    sV = cute.local_tile(storage.sV, (64, 64, STAGES), (0, part, 0))
    w = make_consumer(part, thread, mmas, storage.tiles, storage.sVec, sV)
    count = run_tasks(w, memory, storage, block, dtype)
    if tasks.has_segment:
        if tasks.is_chained == 1:
            chain_transitions(w, memory, storage, block, count, dtype)
        seq, tokens, states, kept = segment.seq, segment.tokens, memory.states, memory.kept
        following, row = first_kept(kept, memory.mCu, seq, sizes.length, block.start)
        of_head = cute.domain_offset((segment.begin, 0), memory.mO[None, None, block.hv])
        output = storage.sO[None, None, part], cute.local_tile(of_head, (64, 64), (None, part))
        place, boundary, to_chunk = (seq, block.hv, tokens), block.start, block.to_chunk
        # Most segments leave no state at all, and pass here once, by all the code that does.
        leaves_last = to_chunk * 64 >= tokens and (states.has_ht == 1 or following >= 0)
        last = to_chunk if leaves_last else to_chunk - 1
        while boundary <= last:
            if boundary == following or boundary >= to_chunk:
                following, row = save_at_boundary(w, states, kept, place, boundary, to_chunk, following, row, dtype)
            stop = next_stop(boundary, following, to_chunk)
            count = run_chunks(w, storage.ring, count, boundary, stop, tokens, I32(1), output[0], dtype)
            boundary = stop if boundary < to_chunk else to_chunk + 1
        store_last_o(w, *output, to_chunk - 1, tokens - (to_chunk - 1) * 64)


@cute.jit
def run_tasks(
    w: cutlass.Constexpr,
    memory: cutlass.Constexpr,
    storage: cutlass.Constexpr,
    block: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Without output: B of our own segment, M of another, and the warm-up of our own, which leaves in accS the state that our
    segment, or its chain, begins with. Returns how many chunks have passed."""
    segment, tasks, hv = block.segment, block.tasks, block.hv
    S, at_s, count = w.S, w.positions(), I32(0)
    for step in cutlass.range(first_step(tasks), Task.END, unroll=1):
        task = task_at(step, tasks.i)
        from_chunk, chunks = chunks_of_task(task, tasks, block.start)
        w.factor.fill(1.0)
        if task == Task.OF_M:
            for j in cutlass.range_constexpr(cute.size(S, mode=[1])):
                for a in cutlass.range_constexpr(2):
                    S[a, j] = F32(1.0) if at_s[a, j][0] + 64 * w.part == at_s[a, j][1] else F32(0.0)
        else:
            w.accS.fill(0.0)
            is_first = task == Task.WARM_UP and tasks.has_segment and (chunks == 0 or from_chunk == 0)
            if is_first and block.slot >= 0:
                states = memory.states
                load_state(w.ours, w.accS, address_of(states.h0, block.slot, states.step, hv, states.kind), states.kind)
        sees_v = I32(0) if task == Task.OF_M else I32(1)
        count = run_chunks(w, storage.ring, count, from_chunk, from_chunk + chunks, segment.tokens, sees_v, None, dtype)
        if task != Task.WARM_UP and chunks > 0:
            of = block.first_number + (tasks.b_segment if task == Task.OF_B else tasks.m_segment)
            keep_transition(w, memory, storage.sSquares, task, of * block.HV + hv, dtype)
    return count


@cute.jit
def keep_transition(
    w: cutlass.Constexpr,
    memory: cutlass.Constexpr,
    sSquares: cute.Tensor,
    task: I32,
    record: I32,
    dtype: cutlass.Constexpr,
):
    """B or M, which accS is, to memory; says that it is there."""
    if cutlass.const_expr(dtype is F16):
        unscale_rows(w.S, w.factor)
    if task == Task.OF_B:
        store_b(w, memory.mB, record)
    else:
        store_m(w, memory.mM, record, sSquares, dtype)
    cute.arch.fence_acq_rel_gpu()
    NamedBarrier(barrier_id=Barrier.CONSUMERS, num_threads=256).arrive_and_wait()
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == COUNTING_WARP:
        with cute.arch.elect_one():
            norm = I32(0)
            if task == Task.OF_M:
                square = F32(0.0)
                for of in cutlass.range_constexpr(CONSUMER_WARPS):
                    square += sSquares[of]
                norm = norm_in_word(square)
            count_done(memory.mDone, record, norm)


@cute.jit
def chain_transitions(
    w: cutlass.Constexpr,
    memory: cutlass.Constexpr,
    storage: cutlass.Constexpr,
    block: cutlass.Constexpr,
    count: I32,
    dtype: cutlass.Constexpr,
):
    """accS, which is the sequence's first state <- that at the start of our segment."""
    HV, tasks = block.HV, block.tasks
    record = block.first_number * HV + block.hv
    begin = begin_of_chain(memory.mDone, record, HV, tasks.i, block.has_h0, True)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == COUNTING_WARP:
        with cute.arch.elect_one():
            storage.sBegin[0] = begin
    transitions_barrier().arrive()
    if begin >= 0:  # from zero, or from what is forgotten, a transition gives its B
        load_b(memory.mB, record + begin * HV, w.part, w.thread, w.accS)
    record += (begin + 1) * HV
    thr_s = w.mmas.s.get_slice(w.thread)
    bM = thr_s.make_fragment_B(thr_s.partition_B(swapped(storage.all_tiles)))  # [N = dk out, K = dk in]
    chain = Chain(record, HV, tasks.i - 1 - begin, (count + 1) % STAGES)
    run_chain(w, memory.mB, bM, storage.transitions, chain, dtype)
