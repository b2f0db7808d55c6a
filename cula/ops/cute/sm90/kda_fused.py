# SPDX-License-Identifier: Apache-2.0
"""KDA on Hopper in one pass: chunks are prepared and walked over on the same multiprocessors, with nothing but shared memory
between. For calls whose (sequence, head) pairs fill the GPU, and for short ones; it needs no workspace.

The steps are those of `kda_prepare.py` and `kda_walk.py`. Registers decide the schedule: a state [128 dv, 128 dk] in float32 and
what it is multiplied with leave too few for warps that prepare. So two multiprocessors share a head, a cluster of two blocks:
each has 64 rows dv of the state, prepares every other chunk, and sends it to its partner's shared memory.

| warps | role                                           | registers |
|-------|------------------------------------------------|-----------|
| 0-7   | prepare chunks 4 m + rank                      | 80        |
| 8-15  | prepare chunks 4 m + 2 + rank                  | 80        |
| 16-19 | the walk over all chunks, 64 rows dv           | 160       |

Chunks are counted through all the heads of a cluster, so that preparing runs ahead from one to the next.

| shared memory                                                                               | bytes |
|---------------------------------------------------------------------------------------------|-------|
| two rooms (`kda_prepare_steps.py`): raw tiles, prepared ones in their places, all in between | 152 K |
| an inbox: a chunk that the partner prepared                                                 | 65 K  |
| v [64 tokens, 64 dv]                                                                        | 8 K   |

What the walk needs of a chunk, kb, qg, kr, P, e^{G_C} and T, lies in one piece of its room, `PARCEL` bytes, and leaves as soon
as it is there. A room is free when both walks are done with its chunk, which also says that the copy has been made; g comes
first, to the place of kb, with which they are done first.

Rooms are few, so what counts is how soon a walk is done with one. Here it is T that has b, not kb: U = (T b) (v - S kb^T), and
when a chunk comes, v and -S are in their places and the first product begins at once.

| mbarrier    | says                                                     | arrivals              |
|-------------|----------------------------------------------------------|-----------------------|
| `ready`     | a chunk of our own is prepared, for each room            | 256 threads           |
| `arrived`   | one of the partner's has come                            | 1, and its bytes      |
| `half_free` | both walks have read kb and T, for each room             | 4 warps here, 4 there |
| `free`      | and all else                                             | 4 warps here, 4 there |
| `o_left`    | o, which was in memory of the room that is not sent, has left it | 1             |
| `taken`     | o, which was in the partner's inbox, has left it         | 1 there               |
| `v_full`    | v is there                                               | 1, and its bytes      |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.inverse import inverse_pair
from cula.ops.cute.common.kda import operands, prepare_mmas
from cula.ops.cute.common.kda_prepare import clear_past_end, load_tiles, read_ahead, strengths
from cula.ops.cute.common.kda_prepare_steps import (
    KEYS,
    TILE,
    VEC,
    Arena,
    Chunk,
    Kind,
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
    sum_gates,
    triangles,
)
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    K_MAJOR,
    MN_MAJOR,
    by_head,
    issue,
    rounded,
    rows_and_columns,
    seen_as_a,
    swapped,
    tile_layout,
    tma_load,
    tma_split,
    tma_store,
    wgmma,
)
from cula.ops.cute.sm90.kda_rows import keep_in_range, unscale_rows
from cula.ops.cute.sm90.kda_walk import Walk, copy_rows, decay_columns, load_v
from cula.ops.cute.toolchain.variants import Variant

THREADS, WALKERS = 640, 16  # the first warp that walks
PREPARE_REGISTERS, WALK_REGISTERS = 80, 160
ROOM, SQUARE = 76 * 1024, 64 * 64 * 2  # bytes of a room, of P and of T
P_AT, VEC_AT, T_AT = 3 * TILE, 3 * TILE + SQUARE, 3 * TILE + SQUARE + 4 * VEC  # behind kb, qg and kr; e^{G_C} and b between
PARCEL = T_AT + SQUARE
SENDER = 4  # warp of a group
INBOX = 2  # its number among the places of prepared chunks


def send(source: Any, to: Any, size: int, bar: Any, rank: Any) -> None:
    """Bytes to the same place in another block's shared memory; its barrier counts them."""
    source, to = [cute.make_tensor(cute.recast_ptr(p, dtype=BF16), cute.make_layout(size // 2)) for p in (source, to)]
    # The copy maps `to`, and not the barrier, whose address it takes for one of shared memory.
    there = cute.make_ptr(cutlass.Int64, cute.arch.map_dsmem_ptr(bar, rank).toint(), cute.AddressSpace.smem)
    cute.copy(cute.make_copy_atom(cpasync.CopyBulkS2SOp(), BF16), source, to, mbar_ptr=there, cta_rank=rank)


@cute.jit
def item_at(item: I32, HV: I32, mCu: cute.Tensor, length: I32):
    """(sequence, value head, first token, tokens) of a piece of work."""
    seq = item // HV
    begin, tokens = seq * length, length
    if length == 0:
        begin = mCu[seq]
        tokens = mCu[seq + 1] - begin
    return seq, item - seq * HV, begin, tokens


# Preparing
#
# At each barrier all warps of a group wait, also where some need not: where warps pass by one, compute-sanitizer's racecheck
# takes others for broken, in kernels of ten lines, too. What it costs could not be measured.


def wait_in_a_branch(barrier: Any) -> None:
    """Warps may come to it by different instructions, which `bar.sync` does not promise to bear."""
    number, threads = [I32(n).ir_value() for n in (barrier.barrier_id, barrier.num_threads)]
    nvvm.barrier_cta_sync(number, thread_count=threads, aligned=False)


@cute.jit
def prepare_in_place(
    tma: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scale: F32,
    lower: F32,
    beta_top: F32,
    mmas: cutlass.Constexpr,
    kind: cutlass.Constexpr,
    here: cutlass.Constexpr,
    group: I32,
    thread: I32,
    hv: I32,
    h: I32,
    t0: I32,
    left: I32,
    use: I32,
    bars: cutlass.Constexpr,
    parcel: cutlass.Constexpr,
    other: I32,
):
    """The chunk that begins at token t0 and has `left` tokens (or more than 64: then the rest is another chunk's), by the eight
    warps of a group, in its room, which has been used `use` times."""
    tma_q, gQ, tma_k, gK, tma_g, gG = tma
    ready, half_free, free, o_left, taken, arrived = bars
    start, inbox = parcel
    wid = cute.arch.make_warp_uniform(thread // 32)
    side, block_row = wid >> 2, wid & 3
    lane = cute.arch.lane_idx()
    r, c = lane >> 2, lane & 3
    everyone = pipeline.NamedBarrier(barrier_id=1 + group, num_threads=256)
    x = Chunk(here, kind, mmas, side, block_row, lane, r, c, left)
    has_channels = not kind.is_scalar
    of_g = [(tma_g, here.g, gG, hv, 0)] if cutlass.const_expr(has_channels) else []
    of_kq = [(tma_k, here.k, gK, h, 1), (tma_q, here.q, gQ, h, 1)]
    if wid == 0:
        cute.arch.mbarrier_wait(half_free + group, (use + 1) & 1)
        if cutlass.const_expr(has_channels):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(here.bars, TILE)
            load_tiles(of_g, t0, here.bars)
    raw_b, raw_g, slope = read_ahead(x, gates, thread, hv, t0)
    until, after = triangles(r, c)
    if cutlass.const_expr(has_channels):
        cute.arch.mbarrier_wait(here.bars, use & 1)
    everyone.arrive_and_wait()  # the bias is there, too
    if wid == 0:
        cute.arch.mbarrier_wait(free + group, (use + 1) & 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(here.bars + 1, 2 * TILE)
        load_tiles(of_kq, t0, here.bars)
    if left < 64:
        cute.arch.mbarrier_wait(here.bars + 1, use & 1)
        clear_past_end(of_g + of_kq, thread, left)
        everyone.arrive_and_wait()

    L, rest = sum_gates(x, raw_g, slope, lower, until, after)
    cute.arch.mbarrier_wait(here.bars + 1, use & 1)
    size, inverse = norms(x, scale)
    b = strengths(x, raw_b, beta_top)
    everyone.arrive_and_wait()
    factors(x, thread & 127, here.decays, b, size, inverse)
    everyone.arrive_and_wait()
    cute.arch.mbarrier_wait(o_left + group, (use + 1) & 1)  # the first pass writes to where it was
    diagonal_a, diagonal_p = first_pass(x, until, after, L, rest, b)
    everyone.arrive_and_wait()
    for i in cutlass.range_constexpr(2):
        b[i] = here.beta[16 * block_row + r + 8 * i]
    join_halves(x, diagonal_a, diagonal_p, b, L)
    everyone.arrive_and_wait()
    if block_row == 0:
        inverse_pair(here.diagonal, side, 3 - side, lane)
    scores = second_pass(x)
    scale_rows(x, None)
    for i in cutlass.range_constexpr(2):
        b[i] = here.beta[16 * block_row + r + 8 * i]  # not kept in registers
    cute.arch.fence_proxy("async.shared", space="cta")
    everyone.arrive_and_wait()
    if wid == SENDER:  # tiles are complete; T and P follow
        cute.arch.mbarrier_wait(taken, (group + 1) & 1)
        with cute.arch.elect_one():
            send(start, inbox, P_AT, arrived, other)
    if side == KEYS:
        place_a(x, scores, b)
        wait_in_a_branch(everyone)
        cols = cute.make_rmem_tensor((32,), kind.dtype)
        invert(x, cols, b)
        wait_in_a_branch(everyone)  # nobody reads A any more, T takes its place
        place_t(x, cols, here.T)
    else:
        place_p(x, scores, diagonal_p, L)
        for _ in range(2):
            wait_in_a_branch(everyone)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_arrive(ready + group)  # each thread for itself: so racecheck can follow
    if wid == SENDER:
        cute.arch.mbarrier_wait(ready + group, use & 1)
        with cute.arch.elect_one():
            send(start + P_AT, inbox + P_AT, PARCEL - P_AT, arrived, other)


# The walk


def prepared(places: Any, at: int, layout: Any, dtype: Any) -> Any:
    """Part of the prepared chunks, [rows, columns, place]."""
    outer = cute.append(layout.outer, cute.make_layout(INBOX + 1, stride=ROOM * 8 // dtype.width))
    return cute.make_tensor(cute.recast_ptr(places + at, layout.inner, dtype), outer)


@cute.jit
def place_of(n: I32, rank: I32):
    """Where chunk n lies."""
    return (n >> 1) & 1 if (n & 1) == rank else I32(INBOX)


@cute.jit
def room_for_o(places: cute.Pointer, place: I32):
    """[64 tokens, 64 dv], in memory of the chunk: of our own that part of the room which is not sent, else qg's."""
    layout = tile_layout(64, 64)
    start = places + (place * ROOM + (I32(PARCEL) if place < INBOX else I32(TILE)))
    return cute.make_tensor(cute.recast_ptr(start.align(1024), layout.inner, BF16), layout.outer)


@cute.jit
def tell_owner(bars: cute.Pointer, n: I32, rank: I32):
    """This warp is done with something of chunk n: the block that prepared it should know, by the barrier of its room."""
    bar = bars + ((n >> 1) & 1)
    with cute.arch.elect_one():
        if (n & 1) == rank:
            cute.arch.mbarrier_arrive(bar)
        else:
            arrive_there(bar, rank)


@cute.jit
def tell_o_left(bars: cutlass.Constexpr, n: I32, rank: I32):
    """Shared memory in which o of chunk n was is free: in our room, or in the inbox, for which the partner waits."""
    o_left, taken = bars
    with cute.arch.elect_one():
        if (n & 1) == rank:
            cute.arch.mbarrier_arrive(o_left + ((n >> 1) & 1))
        else:
            arrive_there(taken, rank)


def arrive_there(bar: Any, rank: Any) -> None:
    """Relaxed: what was read is in registers, or has been copied. A release would wait for all that this thread has stored."""
    cute.arch.mbarrier_arrive(bar, 1 - rank, relaxed=True, scope=nvvm.MemScopeKind.CLUSTER)


@cute.jit
def negate(half: cute.Tensor):
    """Of fp16 values: their signs."""
    pairs = cute.recast_tensor(half, I32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = pairs[i] ^ I32(-0x7FFF8000)


@cute.jit
def take_v(w: cutlass.Constexpr, rV: cute.Tensor, accX: cute.Tensor):
    """X <- v^T in the state's scale."""
    words, X = cute.recast_tensor(rV, I32), rows_and_columns(accX)
    both = cute.make_rmem_tensor((2,), F32)
    bits = cute.recast_tensor(both, I32)
    for j in cutlass.range_constexpr(0, cute.size(X, mode=[1]), 2):
        for a in cutlass.range_constexpr(2):
            word = words[j + a]
            bits[0], bits[1] = word << 16, word & I32(-0x10000)
            for i in cutlass.range_constexpr(2):
                X[a, j + i] = both[i] * w.factor[a]


@cute.jit
def ask_for_v(v: cutlass.Constexpr, chunk: I32):
    """v of a chunk is to come."""
    tma_v, v_g, v_s, v_full = v
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(v_full, TILE // 2)
    cute.copy(tma_v, v_g[None, chunk], v_s[None, 0], tma_bar_ptr=v_full)


@cute.jit
def walk_chunk(
    w: cutlass.Constexpr,
    v: cutlass.Constexpr,
    there: cutlass.Constexpr,
    half_free: cute.Pointer,
    o_gone: cutlass.Constexpr,
    n: I32,
    warp_in: I32,
    chunk: I32,
    chunks: I32,
    stage: I32,
    left: I32,
):
    """v - R, U, o and the new state; o is left in its accumulator while the state is on its way. All that can be is done before
    the chunk is waited for: how long a room is occupied decides how fast chunks pass."""
    mma_x, mma_t, mma_s = w.mmas
    thr_x, thr_t, thr_s = [mma.get_slice(w.thread) for mma in w.mmas]
    bKb, bQg, bP, bT, bKr = w.operands
    accS = w.accS
    S, at_s = rows_and_columns(accS), rows_and_columns(thr_s.partition_C(cute.make_identity_tensor((64, 128))))
    accX, accO = [thr_x.make_fragment_C(thr_x.partition_shape_C((64, 64))) for _ in range(2)]
    accU = thr_t.make_fragment_C(thr_t.partition_shape_C((64, 64)))
    rV = cute.make_rmem_tensor_like(accX, BF16)
    load_v(w, rV, I32(0), left, I32(1))
    half = rounded(accS, F16)
    keep_in_range(accS, half, rV, w.factor)
    negate(half)
    take_v(w, rV, accX)
    # The next v may come when all warps have used theirs: a barrier alone does not wait for what is being read.
    pipeline.NamedBarrier(barrier_id=4, num_threads=128).arrive_and_wait()
    if warp_in == 0 and chunk + 1 < chunks:
        ask_for_v(v, chunk + 1)
    ready, arrived = there
    if stage < INBOX:
        cute.arch.mbarrier_wait(ready + stage, (n >> 2) & 1)
    else:
        if warp_in == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, PARCEL)
        cute.arch.mbarrier_wait(arrived, (n >> 1) & 1)
    issue(mma_x, accX, seen_as_a(half), bKb[None, None, None, stage], True)
    if warp_in == 0 and n > 0:  # the other warps are done with the last o since they came for v
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        tell_o_left(o_gone, n - 1, w.part)
    warpgroup.wait_group(0)
    issue(mma_t, accU, seen_as_a(rounded(accX, F16)), bT[None, None, None, stage], False)
    warpgroup.wait_group(0)
    aU = seen_as_a(rounded(accU, F16))
    issue(mma_x, accO, aU, bP[None, None, None, stage], False)
    tell_owner(half_free, n, w.part)  # kb and T have been read
    for part in cutlass.range_constexpr(2):  # S in 16 bits once more, by halves: there are no registers to keep it in
        again = cute.make_rmem_tensor_like(accX, F16)
        again.store(cute.make_tensor(accS.iterator + 32 * part, accX.layout).load().to(F16))
        issue(mma_x, accO, seen_as_a(again), bQg[None, None, (None, part), stage], True)
        decay_columns(w, S, at_s, stage, part)
        if cutlass.const_expr(part == 0):
            warpgroup.wait_group(0)
    issue(mma_s, accS, aU, bKr[None, None, None, stage], True)
    warpgroup.wait_group(1)
    return accO


# The kernel


@cute.kernel
def fused_kernel(
    tma_q: cute.CopyAtom,
    gQ: cute.Tensor,
    tma_k: cute.CopyAtom,
    gK: cute.Tensor,
    tma_g: cute.CopyAtom,
    gG: cute.Tensor,
    tma_v: cute.CopyAtom,
    gV: cute.Tensor,
    tma_o: cute.CopyAtom,
    gO: cute.Tensor,
    mG: cute.Tensor,
    mBeta: cute.Tensor,
    mBeta16: cute.Tensor,
    mA: cute.Tensor,
    mBias: cute.Tensor,
    mO: cute.Tensor,
    mH0: cute.Tensor,
    mHt: cute.Tensor,
    mCu: cute.Tensor,
    scale: F32,
    lower: F32,
    beta_top: F32,
    beta_bits: I32,
    has_h0: I32,
    has_ht: I32,
    length: I32,
    group_of_heads: I32,
    HV: I32,
    items: I32,
    mma_f16: cute.TiledMma,
    mma_bf16: cute.TiledMma,
    mma_tf32: cute.TiledMma,
    mma_x: cute.TiledMma,
    mma_t: cute.TiledMma,
    mma_s: cute.TiledMma,
    lt: cute.ComposedLayout,
    lv: cute.ComposedLayout,
    kind: cutlass.Constexpr,
):
    """Cluster i takes the pieces of work i, i + clusters, ..."""
    tid, _, _ = cute.arch.thread_idx()
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    rank, cluster, clusters = block & 1, block >> 1, blocks >> 1
    other = 1 - rank
    smem = SmemAllocator()
    places = smem.allocate(2 * ROOM + PARCEL, 1024)
    sV = smem.allocate_tensor(BF16, lv.outer, byte_alignment=1024, swizzle=lv.inner)
    ready, half_free, free, o_left = [smem.allocate_array(cutlass.Int64, 2) for _ in range(4)]
    arrived, taken, v_full = [smem.allocate_array(cutlass.Int64, 1) for _ in range(3)]
    if warp_id == 0:
        for g in cutlass.range_constexpr(2):
            here = room(Arena(places + g * ROOM), lt, lt, kind, stays=True)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(here.bars + i, 1)
        with cute.arch.elect_one():
            for g in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(ready + g, 256)
                cute.arch.mbarrier_init(half_free + g, 8)
                cute.arch.mbarrier_init(free + g, 8)
                cute.arch.mbarrier_init(o_left + g, 1)
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init(taken, 1)
            cute.arch.mbarrier_init(v_full, 1)
        for atom in (tma_q, tma_k, tma_g, tma_v, tma_o):
            cpasync.prefetch_descriptor(atom)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended

    if warp_id < WALKERS:
        # -- prepare every fourth chunk
        cute.arch.setmaxregister_decrease(PREPARE_REGISTERS)
        group = warp_id >> 3
        thread = tid & 255
        start = places + group * ROOM
        here = room(Arena(start), lt, lt, kind, stays=True)
        item, chunk, use = cluster, 2 * group + rank, I32(0)
        while item < items:
            _, hv, begin, tokens = item_at(item, HV, mCu, length)
            if chunk * 64 < tokens:
                prepare_in_place(
                    (tma_q, gQ, tma_k, gK, tma_g, gG),
                    (mG, mBeta, mBeta16, beta_bits, mA, mBias),
                    scale,
                    lower,
                    beta_top,
                    (mma_f16, mma_bf16, mma_tf32),
                    kind,
                    here,
                    group,
                    thread,
                    hv,
                    hv if group_of_heads == 1 else hv // group_of_heads,
                    begin + chunk * 64,
                    tokens - chunk * 64,
                    use,
                    (ready, half_free, free, o_left, taken, arrived),
                    (start, places + INBOX * ROOM),
                    other,
                )
                chunk, use = chunk + 4, use + 1
            else:
                chunk, item = chunk - (tokens + 63) // 64, item + clusters
    else:
        # -- walk over all, 64 rows dv
        cute.arch.setmaxregister_increase(WALK_REGISTERS)
        thread = tid % 128
        warp_in = warp_id & 3
        thr_x, thr_t, thr_s = mma_x.get_slice(thread), mma_t.get_slice(thread), mma_s.get_slice(thread)
        square = tile_layout(64, 64, dtype=F16)
        l16 = tile_layout(64, 128, dtype=F16)
        sKb, sQg, sKr = [prepared(places, i * TILE, l16, F16) for i in range(3)]
        sP, sT = [prepared(places, at, square, F16) for at in (P_AT, T_AT)]
        sVec = cute.make_tensor(
            cute.recast_ptr(places + VEC_AT, dtype=F32), cute.make_layout((1, VEC, 3), stride=(VEC, 1, ROOM // 4))
        )
        accS, factor = thr_s.make_fragment_C(thr_s.partition_shape_C((64, 128))), cute.make_rmem_tensor((2,), F32)
        S = rows_and_columns(accS)
        bKb, bQg = [thr_x.make_fragment_B(thr_x.partition_B(s)) for s in (sKb, sQg)]  # [N = token, K = dk]
        bP = thr_x.make_fragment_B(thr_x.partition_B(sP))  # [N = t, K = i]
        bT = thr_t.make_fragment_B(thr_t.partition_B(swapped(sT)))  # [N = t, K = i], stored [i, t]
        bKr = thr_s.make_fragment_B(thr_s.partition_B(swapped(sKr)))  # [N = dk, K = token]
        of_v = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_x).get_slice(thread)
        store_o = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BF16), mma_x).get_slice(thread)
        v_s = of_v.partition_S(swapped(sV))
        ours = lambda m: thr_s.partition_C(cute.local_tile(m, (64, 128), (rank, 0)))  # of a [V, K] matrix
        w = Walk(
            rank, thread, (mma_x, mma_t, mma_s), accS, factor, (bKb, bQg, bP, bT, bKr), sVec, of_v, v_s, store_o, None, None, None
        )
        together, is_there = [pipeline.NamedBarrier(barrier_id=i, num_threads=128) for i in (3, 5)]
        n = I32(0)
        for item in cutlass.range(cluster, items, clusters, unroll=1):
            seq, hv, begin, tokens = item_at(item, HV, mCu, length)
            chunks = (tokens + 63) // 64
            v_rows, o_tiles, o_rows = [
                cute.local_tile(cute.domain_offset((begin, 0), t[None, None, hv]), (64, 64), (None, rank)) for t in (gV, gO, mO)
            ]
            to_v, v_g = tma_split(tma_v, sV, v_rows)
            v = (tma_v, v_g, to_v, v_full)
            if warp_in == 0 and chunks > 0:
                ask_for_v(v, I32(0))
            factor.fill(1.0)
            accS.fill(0.0)
            if has_h0 == 1:
                cute.autovec_copy(ours(mH0[seq, hv, None, None]), accS)
            for chunk in cutlass.range(chunks, unroll=1):
                stage = place_of(n, rank)
                cute.arch.mbarrier_wait(v_full, n & 1)
                left = tokens - chunk * 64
                accO = walk_chunk(w, v, (ready, arrived), half_free, (o_left, taken), n, warp_in, chunk, chunks, stage, left)
                unscale_rows(rows_and_columns(accO), factor)
                rO = rounded(accO)
                together.arrive_and_wait()  # no warp reads qg any more
                to_o = room_for_o(places, stage)
                cute.copy(store_o, store_o.retile(rO), store_o.partition_D(swapped(to_o)))
                cute.arch.fence_proxy("async.shared", space="cta")
                is_there.arrive_and_wait()
                if left < 64:  # TMA would write on into the next sequence
                    copy_rows(to_o, o_rows[None, None, chunk], thread, left)
                elif warp_in == 0:
                    o_s, o_g = tma_split(tma_o, to_o, o_tiles)
                    cute.copy(tma_o, o_s, o_g[None, chunk])
                    cute.arch.cp_async_bulk_commit_group()
                warpgroup.wait_group(0)
                tell_owner(free, n, rank)
                n += 1
            unscale_rows(S, factor)
            if has_ht == 1:
                cute.autovec_copy(accS, ours(mHt[seq, hv, None, None]))
        cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.cluster_arrive()  # the partner may still send
    cute.arch.cluster_wait()


@cute.jit
def fused_host(
    q: Int64,
    k: Int64,
    v: Int64,
    g: Int64,
    beta: Int64,
    A_log: Int64,
    dt_bias: Int64,
    o: Int64,
    h0: Int64,
    ht: Int64,
    cu: Int64,
    q_token: Int64,
    q_head: Int64,
    k_token: Int64,
    k_head: Int64,
    v_token: Int64,
    v_head: Int64,
    g_token: Int64,
    g_head: Int64,
    o_token: Int64,
    o_head: Int64,
    beta_token: Int64,
    T: I32,
    N: I32,
    H: I32,
    HV: I32,
    scale: F32,
    lower: F32,
    beta_top: F32,
    beta_bits: I32,
    has_h0: I32,
    has_ht: I32,
    length: I32,
    clusters: I32,
    stream,
    kind: cutlass.Constexpr,
):
    """As `common/kda.py`'s, without a workspace and all that cuts sequences; so many clusters take turns at N HV heads."""
    mQ, mK, mV, mO, gates, mG, mBeta, mBeta16, mA, mBias, mCu, mH0, mHt = operands(
        (q, k, v, g, beta, A_log, dt_bias, o, h0, ht, cu),
        ((q_token, q_head), (k_token, k_head), (v_token, v_head), (g_token, g_head), (o_token, o_head), beta_token),
        (T, N, H, HV),
        kind,
    )
    lt, lv = tile_layout(64, 128), tile_layout(64, 64, 1)
    (tma_q, gQ), (tma_k, gK), (tma_g, gG) = [tma_load(by_head(t), lt, (64, 128)) for t in (mQ, mK, mG)]
    tma_v, gV = tma_load(by_head(mV), lv, (64, 64))
    tma_o, gO = tma_store(by_head(mO), tile_layout(64, 64), (64, 64))
    mmas = (wgmma(64, K_MAJOR, True, F16), wgmma(64, MN_MAJOR, True, F16), wgmma(128, MN_MAJOR, True, F16))
    fused_kernel(
        tma_q,
        gQ,
        tma_k,
        gK,
        tma_g,
        gG,
        tma_v,
        gV,
        tma_o,
        gO,
        gates,
        mBeta,
        mBeta16,
        mA,
        mBias,
        by_head(mO),
        mH0,
        mHt,
        mCu,
        scale,
        lower,
        beta_top,
        beta_bits,
        has_h0,
        has_ht,
        length,
        HV // H,
        HV,
        N * HV,
        *prepare_mmas(),
        *mmas,
        lt,
        lv,
        kind,
    ).launch(
        grid=(2 * clusters, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(2, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


def variants() -> Iterator[Variant]:
    """What fits into shared memory: fp16 operands, and gates of 16 bits or one a head."""
    numbers = [Int64(0)] * 11 + [Int64(8)] * 11 + [I32(1)] * 4 + [F32(1.0), F32(-5.0), F32(1.0)] + [I32(1)] * 5
    uses = ("wgmma", "tma_load", "tma_store", "mma", "ldmatrix")
    kinds = [Kind(F16, BF16, has_gate) for has_gate in (True, False)]
    kinds += [Kind(F16, g_type, has_gate, is_scalar=True) for g_type in (BF16, F32) for has_gate in (True, False)]
    for kind in kinds:
        yield Variant(f"fused_{kind.name}", fused_host, (*numbers, make_fake_stream(), kind), uses=uses)
