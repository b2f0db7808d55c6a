# SPDX-License-Identifier: Apache-2.0
"""KDA on Blackwell, second half: the state walks over the chunks that `kda_prepare` made and stays in tensor memory.

Never run on a GPU: compiled, and its PTX run on a CPU (docs/kda-blackwell.md).

A chunk, with the state S [128 dk, 128 dv] in float32:
    R = kb S,   o = qg S                      two products with the same A operand
    U = T (b v - R)
    o += P U,   S <- e^{G_C} S + kr^T U
All of it transposed, S^T [128 dv, 128 dk], so that every product has M = 128 rows dv, lane = row, and its A operand in tensor
memory, where one thread a row puts it. Rows dv do not mix: what a thread does to its row needs no other thread.

Segments, warm and cold, are those of `common/kda_segments.py`; in map mode this same walk makes their maps. A cold segment
takes the maps before it through the same ring as its chunks, a map for a chunk.

| warps | role                                                           | registers |
|-------|----------------------------------------------------------------|-----------|
| 0     | TMA loads; tensor memory's allocation                          | 72        |
| 1     | issues every product                                           | 72        |
| 4-7   | rows: S to 16 bits and its decay, b v - R, U to 16 bits        | 240       |
| 8-11  | o: from tensor memory over shared memory to global memory      | 192       |

| barrier    | arrives                         | waits      | says                                             |
|------------|---------------------------------|------------|--------------------------------------------------|
| full[2]    | TMA                             | 1, 4-7     | a chunk, or a map, is in the ring                |
| empty[2]   | 1 (commit), 4-7 (a lane each)   | 0          | it has been read                                 |
| s_ready[2] | 4-7                             | 1, (8-11)  | S is an operand (and its factor is there)        |
| x_done     | 1 (commit)                      | 4-7        | R                                                |
| x_ready    | 4-7                             | 1          | b v - R is an operand; the decayed S is in place |
| u_done     | 1 (commit)                      | 4-7        | U                                                |
| u_ready    | 4-7                             | 1          | U is an operand                                  |
| s_done     | 1 (commit)                      | 4-7        | S after the chunk, or the map                    |
| o_done[2]  | 1 (commit)                      | 8-11       | o                                                |
| o_free[2]  | 8-11                            | 1, 4-7     | o and the factor have been read                  |

| tensor memory                  | columns   | | shared memory                        | bytes |
|--------------------------------|-----------|-|--------------------------------------|-------|
| S                              | 0 - 127   | | kb, qg, kr, v (or a map): two stages | 128 K |
| S in 16 bits                   | 128 - 191 | | T, P: two stages                     | 32 K  |
| R                              | 192 - 255 | | o                                    | 16 K  |
| U                              | 256 - 319 | | e^{G_C}, b: two stages               | 2 K   |
| o, two of them; lo of S in maps| 320 - 447 | | factors of rows, two                 | 1 K   |
| b v - R, U in 16 bits          | 448 - 511 | |                                      |       |
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.kda_prepare_steps import BETA, VEC
from cula.ops.cute.common.kda_range import inverse_of, is_outside, move_inside
from cula.ops.cute.common.kda_segments import segment_of
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, allocate_tile, swapped, tile_at, tma_split

from .tmem import COLUMNS, accumulator, after_sync, before_sync, commit, issue, operand_a, row_load, row_stores, stored

STAGES = 2
TILES = 4  # kb, qg, kr, v of a stage
THREADS = 384
ISSUE_REGISTERS, ROW_REGISTERS, OUT_REGISTERS = 72, 240, 192
S_AT, S16_AT, R_AT, U_AT, O_AT, X16_AT, U16_AT = 0, 128, 192, 256, 320, 448, 480
TILE_BYTES, SQUARE_BYTES, MAP_BYTES = 64 * 128 * 2, 64 * 64 * 2, 128 * 128 * 2


def rows_at(t, at, r, c, width=1):
    """Columns c .. c + width - 1 of rows r, r + 8, ... of the [64, 128] tile number `at` of t, swizzled by 128 bytes: [width, 8].

    The swizzle exchanges pieces of 8 elements by a row's place r among eight, so that one address serves all of these.
    """
    plain = cute.recast_ptr(t.iterator, dtype=t.element_type)
    start = plain + (at * (64 * 128) + c // 64 * (64 * 64) + 64 * r + (c % 64 ^ 8 * r))
    return cute.make_tensor(start.align(2 * width), cute.make_layout((width, 8), stride=(1, 512)))


@cute.jit
def largest(x: cute.Tensor, top: F32):
    """max(top, |x|)"""
    tops = cute.make_rmem_tensor((4,), F32)
    tops.fill(top)
    for j in cutlass.range_constexpr(cute.size(x)):
        y = x[j].to(F32)
        tops[j % 4] = cute.arch.fmax(tops[j % 4], cute.arch.fmax(y, -y))
    return cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))


@cute.jit
def largest_of_columns(t: cute.Tensor, at: I32, left: I32, thread: I32):
    """max |column `thread`| of the first `left` rows of the bf16 tile number `at`: later ones are another sequence's.

    A lane reads eight columns of eight rows, 16 bytes at a time; then lanes hand each other the halves that they do not keep.
    """
    lane = thread % 32
    tops, eight = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), t.element_type)
    tops.fill(0.0)
    of_t = rows_at(t, at, lane // 4, thread // 32 * 32 + lane % 4 * 8, 8)
    for p in cutlass.range_constexpr(8):
        cute.autovec_copy(of_t[None, p], eight)
        for c in cutlass.range_constexpr(8):
            x = eight[c].to(F32) if lane // 4 + 8 * p < left else F32(0.0)
            tops[c] = cute.arch.fmax(tops[c], cute.arch.fmax(x, -x))
    for step in (4, 2, 1):
        is_upper = (lane & 4 * step) != 0
        for c in cutlass.range_constexpr(step):
            kept = tops[c + step] if is_upper else tops[c]
            given = tops[c] if is_upper else tops[c + step]
            tops[c] = cute.arch.fmax(kept, cute.arch.shuffle_sync_bfly(given, offset=4 * step))
    return cute.arch.shuffle_sync(tops[0], lane // 8 + 4 * (lane % 8))  # column c is with lane c / 8 + 4 (c % 8)


@cute.jit
def keep_in_range(S: cute.Tensor, top: F32, factor: cute.Tensor):
    """Scale the row when it, or one of v with largest value `top`, leaves what fp16 holds well (`common/kda_range.py`)."""
    top = largest(S, top)
    if cute.arch.vote_any_sync(is_outside(top, factor[0])):
        move = F32(1.0)
        if is_outside(top, factor[0]):
            move = move_inside(top, factor[0])
        for j in cutlass.range_constexpr(cute.size(S)):
            S[j] = S[j] * move
        factor[0] = factor[0] * move


def pieces(x):
    """Registers by 32, as they are stored. Work goes from piece to piece, so that few are alive at a time."""
    return [cute.make_tensor(x.iterator + 32 * p, cute.make_layout(32)) for p in range(cute.size(x) // 32)]


@cute.jit
def rounded(x: cute.Tensor, dtype: cutlass.Constexpr):
    """In 16 bits."""
    half = cute.make_rmem_tensor((32,), dtype)
    half.store(x.load().to(dtype))
    return half


@cute.jit
def residue(x: cute.Tensor, dtype: cutlass.Constexpr):
    """x <- what rounding to 16 bits leaves of it."""
    x.store(x.load() - x.load().to(dtype).to(F32))


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
    mCu: cute.Tensor,
    has_h0: I32,
    has_ht: I32,
    L: I32,
    length: I32,
    steps: I32,
    mma_x: cute.TiledMma,
    mma_t: cute.TiledMma,
    mma_s: cute.TiledMma,
    lt: cute.ComposedLayout,
    lv: cute.ComposedLayout,
    lsq: cute.ComposedLayout,
    lo: cute.ComposedLayout,
    lm: cute.ComposedLayout,
    dtype: cutlass.Constexpr,
    is_map: cutlass.Constexpr,
):
    """A block for each (value head, number of a segment); in map mode two, for B and M."""
    smem = SmemAllocator()
    sRing = allocate_tile(smem, lt, dtype)  # [64, 128, TILES a stage]
    sV, sM = tile_at(sRing, lv, BF16), tile_at(sRing, lm, dtype)  # the same memory; maps [128, 128, hi and lo a stage]
    sT, sP = allocate_tile(smem, lsq, dtype), allocate_tile(smem, lsq, dtype)
    sO = allocate_tile(smem, lo)
    sVec = smem.allocate_tensor(F32, cute.make_layout((1, VEC, STAGES), stride=(VEC, 1, VEC)), byte_alignment=128)
    sFactor = smem.allocate_tensor(F32, cute.make_layout((128, 2)), byte_alignment=16)
    bars = smem.allocate_array(cutlass.Int64, 15)
    sTask = smem.allocate_tensor(I32, cute.make_layout(12), byte_alignment=16)  # of the block: roles read it when they begin
    address = smem.allocate_array(I32, 1)
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp_id == 0:
        cute.arch.alloc_tmem(COLUMNS, address)
        cute.arch.relinquish_tmem_alloc_permit()
        with cute.arch.elect_one():
            for at, count in enumerate((1, 1, 5, 5, 128, 128, 1, 1, 128, 128, 1, 128, 1, 128, 1)):
                cute.arch.mbarrier_init(bars + at, count)
    cute.arch.mbarrier_init_fence()
    cute.arch.griddepcontrol_wait()  # for the kernel before: this one was launched before it ended
    if cutlass.const_expr(is_map):  # behind the last kernel of a call, another's blocks would take multiprocessors still wanted
        cute.arch.griddepcontrol_launch_dependents()
    hv, number, which = cute.arch.block_idx()
    if warp_id == 0:
        is_busy, seq, begin, tokens, chunk0, first_segment, i, segments, from_chunk, out_from, to_chunk, cold = segment_of(
            mVec, mCu, hv, number, which, has_h0, L, length, steps, is_map
        )
        # maps of the segments before, from the first on; without an initial state that one only gives its B
        num_maps = i - 1 + has_h0 if cold == 1 else I32(0)
        num_chunks = cutlass.max(to_chunk - from_chunk, 0) if is_busy else I32(-1)
        is_last = I32(1) if i == segments - 1 else I32(0)
        with cute.arch.elect_one():
            for at, value in enumerate(
                (num_chunks, seq, begin, tokens, chunk0, first_segment, i, from_chunk, out_from, cold, num_maps, is_last)
            ):
                sTask[at] = value
    before_sync()
    cute.arch.sync_threads()
    after_sync()
    tmem = cute.arch.retrieve_tmem_ptr(F32, 16, address)
    if sTask[0] >= 0:
        walk(
            (tma_tiles, gTiles, tma_t, gT, tma_p, gP, tma_vec, gVec, tma_v, gV, tma_o, gO, tma_m, gM),
            (mO, mH0, mHt, mB, mM),
            (sRing, sV, sM, sT, sP, sO, sVec, sFactor, sTask, bars),
            tmem,
            (mma_x, mma_t, mma_s),
            dtype,
            is_map,
            mVec.shape[1],
            hv,
            which,
            has_h0,
            has_ht,
        )
    before_sync()
    cute.arch.sync_threads()
    after_sync()
    if warp_id == 0:
        cute.arch.dealloc_tmem(tmem, COLUMNS)


@cute.jit
def walk(
    tma: cutlass.Constexpr,
    memory: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    tmem: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    is_map: cutlass.Constexpr,
    HV: I32,
    hv: I32,
    which: I32,
    has_h0: I32,
    has_ht: I32,
):
    """The chunks of a segment, after the maps of those before it.

    Maps come first, then chunks: step `it` of both goes through stage it % 2 for the it // 2-th time.
    """
    tma_tiles, gTiles, tma_t, gT, tma_p, gP, tma_vec, gVec, tma_v, gV, tma_o, gO, tma_m, gM = tma
    mO, mH0, mHt, mB, mM = memory
    mma_x, mma_t, mma_s = mmas
    tid, _, _ = cute.arch.thread_idx()
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    warpgroup_id = cute.arch.make_warp_uniform(tid // 128)
    thread = tid % 128  # in its warpgroup: the lane it sees
    is_f16 = cutlass.const_expr(dtype is F16)
    halves = 1 if is_f16 else 2  # of M that are read: fp16 has the mantissa of tf32, and hi is enough

    sRing, sV, sM, sT, sP, sO, sVec, sFactor, sTask, bars = shared
    full, empty, s_ready, o_done, o_free = [bars + 2 * b for b in range(5)]
    x_done, x_ready, u_done, u_ready, s_done = [bars + 10 + b for b in range(5)]

    task = lambda: [sTask[at] for at in range(12)]
    if warpgroup_id == 0:
        cute.arch.setmaxregister_decrease(ISSUE_REGISTERS)
        if warp_id == 0:
            # -- loads
            num_chunks, _, begin, _, chunk0, first_segment, _, from_chunk, _, _, num_maps, _ = task()
            first_map = (first_segment + (1 - has_h0)) * HV + hv
            tiles = cute.local_tile(gTiles, (64, 128), (None, 0))
            ring_s, tiles_g = tma_split(tma_tiles, sRing, tiles)
            m_s, m_g = tma_split(tma_m, sM, cute.local_tile(gM, (128, 128), (None, 0)))
            t_s, t_g = tma_split(tma_t, sT, cute.local_tile(gT, (64, 64), (None, 0)))
            p_s, p_g = tma_split(tma_p, sP, cute.local_tile(gP, (64, 64), (None, 0)))
            e_s, e_g = tma_split(tma_vec, sVec, cute.local_tile(gVec, (1, VEC), (None, 0)))
            of_v = cute.local_tile(cute.domain_offset((begin, 0), gV[None, None, hv]), (64, 128), (None, 0))
            v_s, v_g = tma_split(tma_v, sV, of_v)
            for it in cutlass.range(num_maps + num_chunks, unroll=1):
                s = it % STAGES
                bar = full + s
                cute.arch.mbarrier_wait(empty + s, (it // STAGES + 1) % 2)
                if it < num_maps:
                    record = first_map + it * HV
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bar, halves * MAP_BYTES)
                    for half in cutlass.range_constexpr(halves):
                        cute.copy(tma_m, m_g[None, 2 * record + half], m_s[None, 2 * s + half], tma_bar_ptr=bar)
                else:
                    chunk = from_chunk + it - num_maps
                    record = (chunk0 + chunk) * HV + hv
                    size = 3 * TILE_BYTES + SQUARE_BYTES if cutlass.const_expr(is_map) else 4 * TILE_BYTES + 2 * SQUARE_BYTES
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bar, size + 4 * VEC)
                    cute.copy(tma_tiles, tiles_g[None, 3 * record], ring_s[None, TILES * s], tma_bar_ptr=bar)
                    cute.copy(tma_v, v_g[None, chunk], v_s[None, TILES * s + 3], tma_bar_ptr=bar)
                    cute.copy(tma_vec, e_g[None, record], e_s[None, s], tma_bar_ptr=bar)
                    cute.copy(tma_t, t_g[None, record], t_s[None, s], tma_bar_ptr=bar)
                    cute.copy(tma_tiles, tiles_g[None, 3 * record + 2], ring_s[None, TILES * s + 2], tma_bar_ptr=bar)
                    if cutlass.const_expr(not is_map):
                        cute.copy(tma_tiles, tiles_g[None, 3 * record + 1], ring_s[None, TILES * s + 1], tma_bar_ptr=bar)
                        cute.copy(tma_p, p_g[None, record], p_s[None, s], tma_bar_ptr=bar)
        elif warp_id == 1:
            # -- products
            num_chunks, num_maps = sTask[0], sTask[10]
            thr_x, thr_t, thr_s = mma_x.get_slice(0), mma_t.get_slice(0), mma_s.get_slice(0)
            accS, accR = accumulator(mma_s, tmem + S_AT, 128), accumulator(mma_x, tmem + R_AT, 64)
            accU = accumulator(mma_t, tmem + U_AT, 64)
            aS, aX = operand_a(mma_x, tmem + S16_AT, 128, dtype), operand_a(mma_t, tmem + X16_AT, 64, dtype)
            aU, aU_o = operand_a(mma_s, tmem + U16_AT, 64, dtype), operand_a(mma_x, tmem + U16_AT, 64, dtype)
            bK = mma_x.make_fragment_B(thr_x.partition_B(sRing))  # [N = token, K = dk]: kb, qg
            bP = mma_x.make_fragment_B(thr_x.partition_B(sP))  # [N = t, K = i]
            bT = mma_t.make_fragment_B(thr_t.partition_B(swapped(sT)))  # [N = t, K = i], stored [i, t]
            bKr = mma_s.make_fragment_B(thr_s.partition_B(swapped(sRing)))  # [N = dk, K = token]
            if cutlass.const_expr(not is_map):
                hi = operand_a(mma_s, tmem + S16_AT, 128, dtype)
                low = operand_a(mma_s, tmem + O_AT, 128, dtype)
                bM = mma_s.make_fragment_B(thr_s.partition_B(swapped(sM)))  # [N = dk out, K = dk in]
                for it in cutlass.range(num_maps, unroll=1):
                    s, phase = it % STAGES, it // STAGES % 2
                    cute.arch.mbarrier_wait(full + s, phase)
                    cute.arch.mbarrier_wait(s_ready + s, phase)
                    after_sync()
                    for a, half in ((hi, 0), (low, 0), (hi, 1))[: 1 + halves]:
                        issue(mma_s, accS, a, bM[None, None, None, 2 * s + half], True)
                    commit(s_done, empty + s)
            for n in cutlass.range(num_chunks, unroll=1):
                it = num_maps + n
                s, phase = it % STAGES, it // STAGES % 2
                o_at = n % 2
                cute.arch.mbarrier_wait(full + s, phase)
                cute.arch.mbarrier_wait(s_ready + s, phase)
                after_sync()
                issue(mma_x, accR, aS, bK[None, None, None, TILES * s], False)
                commit(x_done)
                accO = accumulator(mma_x, tmem + (O_AT + 64 * o_at), 64)
                if cutlass.const_expr(not is_map):
                    cute.arch.mbarrier_wait(o_free + o_at, (n // 2 + 1) % 2)
                    after_sync()
                    issue(mma_x, accO, aS, bK[None, None, None, TILES * s + 1], False)
                cute.arch.mbarrier_wait(x_ready, n % 2)
                after_sync()
                issue(mma_t, accU, aX, bT[None, None, None, s], False)
                commit(u_done)
                cute.arch.mbarrier_wait(u_ready, n % 2)
                after_sync()
                issue(mma_s, accS, aU, bKr[None, None, None, TILES * s + 2], True)
                commit(s_done)
                if cutlass.const_expr(not is_map):
                    issue(mma_x, accO, aU_o, bP[None, None, None, s], True)
                    commit(o_done + o_at)
                commit(empty + s)
    elif warpgroup_id == 1:
        # -- rows
        cute.arch.setmaxregister_increase(ROW_REGISTERS)
        num_chunks, seq, _, tokens, _, first_segment, i, from_chunk, _, cold, num_maps, is_last = task()
        first_map = (first_segment + (1 - has_h0)) * HV + hv
        lane_is_first = cute.arch.lane_idx() == 0
        load_s, store_s = row_load(mma_s, tmem + S_AT, 128, thread), row_stores(mma_s, tmem + S_AT, 128, thread)
        load_r, load_u = row_load(mma_x, tmem + R_AT, 64, thread), row_load(mma_x, tmem + U_AT, 64, thread)
        store_s16, store_low, store_x16, store_u16 = [
            row_stores(mma_x, tmem + at, n, thread, 16) for at, n in ((S16_AT, 64), (O_AT, 64), (X16_AT, 32), (U16_AT, 32))
        ]
        S, X = cute.make_rmem_tensor((128,), F32), cute.make_rmem_tensor((64,), F32)
        factor = cute.make_rmem_tensor((1,), F32)
        factor[0] = F32(1.0)

        # -- the state to begin with
        S.fill(0.0)
        if cutlass.const_expr(is_map):
            one = F32(1.0) if which == 1 else F32(0.0)
            for j in cutlass.range_constexpr(128):
                S[j] = one if j == thread else F32(0.0)
        else:
            if has_h0 == 1 and (from_chunk == 0 or cold == 1):
                cute.autovec_copy(mH0[seq, hv, thread, None], S)
            if has_h0 == 0 and cold == 1:
                cute.autovec_copy(mB[first_segment * HV + hv, thread, None], S)
            for it in cutlass.range(num_maps, unroll=1):
                # S <- S M + B, S a pair of 16-bit values and so is M in bf16; the product leaves lo lo out
                if is_f16:
                    keep_in_range(S, F32(0.0), factor)
                of_b = mB[first_map + it * HV, thread, None]
                for p in cutlass.range_constexpr(4):
                    piece = pieces(S)[p]
                    store_s16[p](rounded(piece, dtype))
                    residue(piece, dtype)
                    store_low[p](rounded(piece, dtype))
                stored()  # before B takes the registers of S
                for p in cutlass.range_constexpr(4):
                    piece = pieces(S)[p]
                    cute.autovec_copy(cute.local_tile(of_b, (32,), (p,)), piece)
                    if is_f16:
                        piece.store(piece.load() * factor[0])
                    store_s[p](piece)
                stored()
                before_sync()
                cute.arch.mbarrier_arrive(s_ready + it % STAGES)
                cute.arch.mbarrier_wait(s_done, it % 2)
                after_sync()
                load_s(S)
                if lane_is_first:
                    cute.arch.mbarrier_arrive(empty + it % STAGES)
        for p in cutlass.range_constexpr(4):
            store_s[p](pieces(S)[p])
        stored()

        # -- the chunks
        for n in cutlass.range(num_chunks, unroll=1):
            it = num_maps + n
            s, phase = it % STAGES, it // STAGES % 2
            left = tokens - (from_chunk + n) * 64
            cute.arch.mbarrier_wait(full + s, phase)
            top = F32(0.0)
            if is_f16:
                top = largest_of_columns(sV, TILES * s + 3, left, thread) * factor[0]
                if cutlass.const_expr(is_map):
                    top = top if which == 0 else F32(0.0)  # M does not see v
            if it > 0:
                cute.arch.mbarrier_wait(s_done, (it - 1) % 2)
                after_sync()
            load_s(S)
            if is_f16:
                keep_in_range(S, top, factor)
            for p in cutlass.range_constexpr(4):
                store_s16[p](rounded(pieces(S)[p], dtype))
            if cutlass.const_expr(is_f16 and not is_map):
                cute.arch.mbarrier_wait(o_free + n % 2, (n // 2 + 1) % 2)
                sFactor[thread, n % 2] = factor[0]
            stored()
            before_sync()
            cute.arch.mbarrier_arrive(s_ready + s)
            for p in cutlass.range_constexpr(4):  # meanwhile the state decays
                piece, decay = pieces(S)[p], cute.make_rmem_tensor((32,), F32)
                cute.autovec_copy(cute.local_tile(sVec[0, None, s], (32,), (p,)), decay)
                piece.store(piece.load() * decay.load())
                store_s[p](piece)
            V = cute.make_rmem_tensor((64,), BF16)
            for r in cutlass.range_constexpr(8):
                of_v = rows_at(sV, TILES * s + 3, r, thread)
                for p in cutlass.range_constexpr(8):
                    V[8 * p + r] = of_v[0, p]
            cute.arch.mbarrier_wait(x_done, n % 2)
            after_sync()
            load_r(X)
            for p in cutlass.range_constexpr(16):
                beta = cute.make_rmem_tensor((4,), F32)
                cute.autovec_copy(cute.local_tile(sVec[0, None, s], (4,), (BETA // 4 + p,)), beta)
                for j in cutlass.range_constexpr(4):
                    x = V[4 * p + j].to(F32)
                    if is_f16:
                        x = x * factor[0]
                    if cutlass.const_expr(is_map):
                        x = x if which == 0 else F32(0.0)
                    X[4 * p + j] = beta[j] * x - X[4 * p + j]
            if left < 64:  # v past the end is someone else's
                for t in cutlass.range_constexpr(64):
                    X[t] = X[t] if t < left else F32(0.0)
            for p in cutlass.range_constexpr(2):
                store_x16[p](rounded(pieces(X)[p], dtype))
            stored()  # S too
            before_sync()
            cute.arch.mbarrier_arrive(x_ready)
            if lane_is_first:
                cute.arch.mbarrier_arrive(empty + s)
            cute.arch.mbarrier_wait(u_done, n % 2)
            after_sync()
            load_u(X)
            for p in cutlass.range_constexpr(2):
                store_u16[p](rounded(pieces(X)[p], dtype))
            stored()
            before_sync()
            cute.arch.mbarrier_arrive(u_ready)

        # -- what is left
        if num_maps + num_chunks > 0:
            cute.arch.mbarrier_wait(s_done, (num_maps + num_chunks - 1) % 2)
            after_sync()
        record = (first_segment + i) * HV + hv
        back = inverse_of(factor[0])
        for p in cutlass.range_constexpr(4):
            piece = pieces(S)[p]
            row_load(mma_s, tmem + (S_AT + 32 * p), 32, thread)(piece)
            if is_f16:
                piece.store(piece.load() * back)
            to = lambda t, p=p: cute.local_tile(t, (32,), (p,))
            if cutlass.const_expr(is_map):
                if which == 0:
                    cute.autovec_copy(piece, to(mB[record, thread, None]))
                else:
                    cute.autovec_copy(rounded(piece, dtype), to(mM[2 * record, thread, None]))
                    residue(piece, dtype)
                    cute.autovec_copy(rounded(piece, dtype), to(mM[2 * record + 1, thread, None]))
            else:
                if has_ht == 1 and is_last == 1:
                    cute.autovec_copy(piece, to(mHt[seq, hv, thread, None]))
    else:
        # -- o
        cute.arch.setmaxregister_increase(OUT_REGISTERS)
        if cutlass.const_expr(not is_map):
            num_chunks, _, begin, tokens, _, _, _, from_chunk, out_from, _, num_maps, _ = task()
            is_storing = warp_id == 8  # the warp that issues TMA stores
            together = pipeline.NamedBarrier(barrier_id=1, num_threads=128)
            of_o = cute.local_tile(cute.domain_offset((begin, 0), gO[None, None, hv]), (64, 128), (None, 0))
            o_s, o_g = tma_split(tma_o, sO, of_o)
            o_rows = cute.local_tile(cute.domain_offset((begin, 0), mO[None, None, hv]), (64, 128), (None, 0))
            O = cute.make_rmem_tensor((64,), F32)
            for n in cutlass.range(num_chunks, unroll=1):
                it, chunk, o_at = num_maps + n, from_chunk + n, n % 2
                left = tokens - chunk * 64
                cute.arch.mbarrier_wait(o_done + o_at, n // 2 % 2)
                after_sync()
                row_load(mma_x, tmem + (O_AT + 64 * o_at), 64, thread)(O)
                back = F32(1.0)
                if is_f16:
                    cute.arch.mbarrier_wait(s_ready + it % STAGES, it // STAGES % 2)  # long over; it shows what rows wrote
                    back = inverse_of(sFactor[thread, o_at])
                before_sync()
                cute.arch.mbarrier_arrive(o_free + o_at)
                if chunk >= out_from:
                    if is_storing:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    together.arrive_and_wait()
                    O16 = cute.make_rmem_tensor((64,), BF16)
                    O16.store((O.load() * back).to(BF16))
                    for r in cutlass.range_constexpr(8):
                        to = rows_at(sO, 0, r, thread)
                        for p in cutlass.range_constexpr(8):
                            to[0, p] = O16[8 * p + r]
                    cute.arch.fence_proxy("async.shared", space="cta")
                    together.arrive_and_wait()
                    if left >= 64:
                        if is_storing:
                            cute.copy(tma_o, o_s, o_g[None, chunk])
                            cute.arch.cp_async_bulk_commit_group()
                    else:  # TMA would write on into the next sequence
                        for p in cutlass.range_constexpr(8):
                            row = p * 8 + thread // 16
                            if row < left:
                                cute.autovec_copy(
                                    cute.local_tile(sO, (1, 8), (row, thread % 16)),
                                    cute.local_tile(o_rows[None, None, chunk], (1, 8), (row, thread % 16)),
                                )
            if is_storing:
                cute.arch.cp_async_bulk_wait_group(0)
