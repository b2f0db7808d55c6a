# SPDX-License-Identifier: Apache-2.0
"""KDA, first half: everything in a chunk of 64 tokens that does not know the state. TMA and mma.sync: Hopper and later.

For one chunk and value head, with log2 decays summed from the chunk's start (G_t; G_C over all of it), unit keys and queries k, q
(the scale inside q), and write strengths b:

    kb = b k e^G              qg = q e^G              kr = k e^{G_C - G}                 [64, 128] each
    A[t, i] = b_t k_t . (e^{G_t - G_i} k_i), i < t    T = (I + A)^{-1}                   [64, 64], T stored transposed
    P[t, i] =     q_t . (e^{G_t - G_i} k_i), i <= t                                      [64, 64]
    e^{G_C}, b, and a bound on how much of a state outlives the chunk                    `VEC` floats

after which `kda_state` has only products to do:  U = T (b v - kb S),   o = qg S + P U,   S <- e^{G_C} S + kr^T U.

Four warps; warp I owns rows 16 I .. 16 I + 15, and a [16, 128] array of it lives in registers as fragments of mma.sync: thread
(r, c) = (lane / 4, lane % 4) holds rows r, r + 8 and channels 8 j + 2 c, + 1. In that layout
  * a cumulative sum over rows is a product with a triangle of ones (g rounded to fp16, sums in float32),
  * row norms are the diagonal of x x^T,
  * the same registers are an A operand (rows of the warp) and a B operand (columns), so that diagonal blocks of the scores need
    no shared memory, and the others only a copy of another warp's registers.

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
| k e^L, q e^L (bf16 only; fp16 has them in the places of k, q) | 32 K |

Three blocks a multiprocessor hide each other's waits; shared memory is what allows no more.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.fragments import (
    activate,
    as_a,
    at_address,
    corner,
    flat,
    lane_address,
    load_matrix,
    read_factors,
    read_gates32,
    round_tf32,
    store_matrix,
    store_quarters,
    store_rows,
    widen,
)
from cula.ops.cute.common.inverse import below, blocks, inverse_columns, inverse_pair
from cula.ops.cute.common.kda_cut import place
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    TF32,
    allocate_tile,
    swapped,
    tile_at,
    tile_layout,
    tma_split,
)

LOG2E = 1.4426950408889634
TILE, HALF = 64 * 128 * 2, 64 * 64 * 2  # bytes of a tile, and of half of its columns
TMA_WARP = 4  # that stores
KEYS, QUERIES = 0, 1  # sides of a block of threads, and tiles of a pair
VEC = 256  # floats of a chunk and head: e^{G_C} [128], b [64], the bound
BETA, BOUND = 128, 192  # where they begin
LOWER_LEFT, UPPER_RIGHT = 1, 2  # quarters of a square, rows first: that of T^T and that of P which are zero

# The tensor cores drop the low 13 bits of a float32 operand. On average that takes 0.72 * 2^-11 off each of two operands; given
# back here, what is left is the error of rounding, without an instruction for each.
UNBIASED = 1.0 + 2 * 0.72 * 2.0**-11
FASTEST = -512.0  # log2 of a token's decay; what is faster is 0 in float32 all the same, and no infinity in fp16


class Kind(NamedTuple):
    """What is known when the kernel is compiled."""

    dtype: type  # of all 16-bit operands; float16 also means: normalise q and k
    g_type: type
    has_gate: bool  # g is raw: activate it; else it is the log decay
    is_scalar: bool = False  # one gate a head, not one a channel

    @property
    def name(self) -> str:
        short = {BF16: "bf16", F16: "f16", F32: "f32"}
        words = ["kda", short[self.dtype], "gate" if self.has_gate else "log", short[self.g_type]]
        return "_".join([*words, "scalar"] if self.is_scalar else words)


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
    mG, mBeta, mBeta16, beta_bits, mA, mBias = gates
    mT, mP, mVec = results
    mma_f16, mma_bf16, mma_tf32 = mmas
    lt, lg = layouts
    dtype, g_type, has_gate, is_scalar = kind
    is_f16 = cutlass.const_expr(dtype is F16)
    mma_scores = mma_f16 if is_f16 else mma_bf16
    record = cute.arch.make_warp_uniform(number * mVec.shape[1] + hv)
    tid, _, _ = cute.arch.thread_idx()
    wid = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    side, block_row = wid // 4, wid % 4  # KEYS or QUERIES, and whose 16 rows
    lane = cute.arch.lane_idx()
    r, c = lane // 4, lane % 4

    smem = SmemAllocator()
    both = tile_layout(64, 128, 2)
    sKQ = allocate_tile(smem, both)  # k, q
    loads = [(tma_k, sKQ[None, None, KEYS], gK, h, 1), (tma_q, sKQ[None, None, QUERIES], gQ, h, 1)]
    # results take the place of what they were made of; a float32 g is of another shape
    sKbQg = tile_at(sKQ, both, dtype)
    if cutlass.const_expr(is_scalar):
        sKr = allocate_tile(smem, lt, dtype)
    else:
        sG = allocate_tile(smem, lg, g_type)
        loads = [(tma_g, sG, gG, hv, 0), *loads]
        sKr = tile_at(sG, lt, dtype) if cutlass.const_expr(g_type.width == 16) else allocate_tile(smem, lt, dtype)
    sDecay = tile_at(sKr, lt, F16)
    # k e^L and q e^L between the passes. fp16 can afford to round them before the last factors are multiplied in, bf16 cannot.
    wide = F16 if is_f16 else F32
    sKlQl = sKbQg if is_f16 else allocate_tile(smem, both, dtype)
    # For each block and channel: L_16, e^{-L_16}, e^{G_C - G after it}, e^{G before the block}; then decays of the blocks between
    # two. When these have been used, P and T pass here on their way out; a half of P's diagonal blocks first (`sHalf`), in
    # what the first pass alone needs.
    lsq = tile_layout(64, 64, dtype=dtype)
    tables = smem.allocate(8 * 1024 if is_f16 else 9 * 1024, 1024)
    sOut = cute.make_tensor(cute.recast_ptr(tables, lsq.inner, dtype), lsq.outer)
    table = lambda at, t, n: cute.make_tensor(cute.recast_ptr(tables + at, dtype=t), cute.make_layout((n, 128), stride=(128, 1)))
    sSum, sInv, sAfter = table(0, F32, 4), table(2048, F32, 4), table(4096, wide, 4)
    sBefore, sBetween = table(4096 + 4 * 128 * wide.width // 8, wide, 4), table(7168 if is_f16 else 8192, dtype, 3)
    sHalf = cute.make_tensor(cute.recast_ptr(tables, dtype=F32), cute.make_layout((4, 2, 32, 4), stride=(1, 128, 4, 512)))
    # keys as B operands [8 values, lane, 16-channel step, warp]; then, in the same memory, A by blocks below the diagonal. Those
    # on it are apart, and replaced by their inverses.
    sX = smem.allocate_tensor(dtype, cute.make_layout((8, 32, 8, 3), stride=(1, 8, 256, 2048)), byte_alignment=16)
    sA = cute.make_tensor(cute.recast_ptr(sX.iterator, dtype=F32), blocks(6))
    sD = smem.allocate_tensor(F32, blocks(4), byte_alignment=16)
    sBias = smem.allocate_tensor(F32, cute.make_layout(128), byte_alignment=16)
    sNorm, sTop = [smem.allocate_tensor(F32, cute.make_layout((64, 2)), byte_alignment=16) for _ in range(2)]
    sBeta = smem.allocate_tensor(F32, cute.make_layout(64), byte_alignment=16)
    sBound = smem.allocate_tensor(F32, cute.make_layout(4), byte_alignment=16)
    bars = smem.allocate_array(cutlass.Int64, 2)  # g; k and q

    # -- q, k and g on their way
    if wid == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(bars + i, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if wid == 0:
        with cute.arch.elect_one():
            if cutlass.const_expr(not is_scalar):
                cute.arch.mbarrier_arrive_and_expect_tx(bars, cute.size_in_bytes(g_type, lg))
            cute.arch.mbarrier_arrive_and_expect_tx(bars + 1, 2 * TILE)
        for atom, s, g, head, bar in loads:
            at = cute.local_tile(cute.domain_offset((t0, 0), g[None, None, head]), (64, 128), (0, 0))
            s_part, g_part = tma_split(atom, s, at)
            cute.copy(atom, g_part, s_part, tma_bar_ptr=bars + bar)
    # so are beta of our two rows and the gate's constants; nobody waits for them yet
    raw_b = cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        t = t0 + cutlass.min(16 * block_row + r + 8 * i, left - 1)
        if beta_bits == 32:
            raw_b[i] = mBeta[t, hv]
        else:
            raw_b[i] = mBeta16[t, hv].to(F32)
    rG = cute.make_rmem_tensor(((2, 2), 1), g_type)  # one gate a head: those of our rows
    if cutlass.const_expr(is_scalar):
        for e in cutlass.range_constexpr(4):
            rG[e] = mG[t0 + cutlass.min(16 * block_row + 2 * c + e % 2 + 8 * (e // 2), left - 1), hv]
    slope = F32(-LOG2E)
    if cutlass.const_expr(has_gate):
        slope = F32(-LOG2E) * cute.math.exp2(mA[hv] * F32(LOG2E))
        if tid < 128:
            sBias[tid] = slope * mBias[hv, tid]

    unit, top = cute.make_rmem_tensor((4,), F32), cute.make_rmem_tensor((4,), F32)
    for e in cutlass.range_constexpr(4):  # rows past the end decay nothing
        token = 16 * block_row + 2 * c + e % 2 + 8 * (e // 2)
        if cutlass.const_expr(has_gate):
            unit[e] = cutlass.max(F32(-1e37), cute.arch.rcp_approx(lower * F32(LOG2E))) if token < left else F32(-1e37)
        else:
            unit[e] = F32(LOG2E) if token < left else F32(0.0)
    top.fill(-1e30)
    until, after = [cute.make_rmem_tensor(((2, 2, 2), 1), F16) for _ in range(2)]  # triangles of ones: i <= t, i > t
    for e in cutlass.range_constexpr(8):
        until[e] = F16(1.0) if 2 * c + e % 2 + 8 * (e // 4) <= r + 8 * (e // 2 % 2) else F16(0.0)
        after[e] = F16(1.0) - until[e]

    if left < 64:  # rows past the end belong to someone else
        if cutlass.const_expr(not is_scalar):
            cute.arch.mbarrier_wait(bars, 0)
        cute.arch.mbarrier_wait(bars + 1, 0)
        row = tid // 4
        if row >= left:
            for _, s, _, _, _ in loads:
                zero = cute.make_rmem_tensor((1, 8), s.element_type)
                zero.fill(0.0)
                for p in cutlass.range_constexpr(4):
                    cute.autovec_copy(zero, cute.local_tile(s, (1, 8), (row, tid % 4 * 4 + p)))
    cute.arch.sync_threads()  # the bias is there, too
    if cutlass.const_expr(not is_scalar):
        cute.arch.mbarrier_wait(bars, 0)

    # -- log2 decays, read with tokens in pairs (the B operand of their sums) and left in their places as fp16. The largest of a
    # token bounds what any channel of a state keeps.
    L_scalar, rest_scalar = [cute.make_rmem_tensor(((2, 2), 1, 1), F32) for _ in range(2)]
    if cutlass.const_expr(is_scalar):
        g16 = cute.make_rmem_tensor(((2, 2), 1), F16)
        activate(rG, g16, slope, (sBias[0],), unit, top, has_gate, FASTEST)
        L_scalar.fill(0.0)
        rest_scalar.fill(0.0)
        cute.gemm(mma_f16, L_scalar, until, g16, L_scalar)
        cute.gemm(mma_f16, rest_scalar, after, g16, rest_scalar)
        if r == 7:  # row 15, of every channel
            for j in cutlass.range_constexpr(8):
                at = 64 * side + 8 * j + 2 * c
                sSum[block_row, at], sSum[block_row, at + 1] = L_scalar[2], L_scalar[3]
    kq_at = lane_address(sKQ, block_row, lane) + HALF * side  # our channels of k; q is a tile further, others where `from_k` says
    from_k = lambda t: I32(t.iterator.toint()) - I32(sKQ.iterator.toint())
    bias_at, sum_at = I32(sBias.iterator.toint()) + 256 * side + 4 * r, I32(sSum.iterator.toint()) + 512 * block_row + 256 * side + 8 * c
    if cutlass.const_expr(not is_scalar and g_type.width == 32):
        of_channels = cute.local_tile(swapped(cute.local_tile(sG, (16, 128), (block_row, 0))), (64, 16), (side, 0))
    if cutlass.const_expr(not is_scalar):
        for n in cutlass.range(4, unroll=1):
            bias = [at_address(bias_at + 64 * n + 32 * hi, F32, 1, 4)[0] for hi in range(2)]
            if cutlass.const_expr(g_type.width == 32):
                raw_g = read_gates32(of_channels, lane, n)
            else:
                raw_g = load_matrix((kq_at ^ 32 * n) + from_k(sG), g_type, True)
            decay16 = cute.make_rmem_tensor((8,), F16)
            activate(raw_g, decay16, slope, bias, unit, top, has_gate)
            for j in cutlass.range_constexpr(2):
                four = cute.make_tensor(decay16.iterator + 4 * j, cute.make_layout(((2, 2), 1)))
                prefix = cute.make_rmem_tensor(((2, 2), 1, 1), F32)
                prefix.fill(0.0)
                cute.gemm(mma_f16, prefix, until, four, prefix)
                if r == 7:  # row 15
                    last_row = cute.make_tensor(prefix.iterator + 2, cute.make_layout((2, 1)))
                    cute.autovec_copy(last_row, at_address(sum_at + 64 * n + 32 * j, F32, 2, 8))
            store_matrix(decay16, (kq_at ^ 32 * n) + from_k(sKr), True)
    # squares of rows are the diagonal of x x^T
    cute.arch.mbarrier_wait(bars + 1, 0)
    xx = cute.make_rmem_tensor(((2, 2), 1, 2), F32)
    xx.fill(0.0)
    for half in cutlass.range(2, unroll=1):
        tiles = [load_matrix((kq_at + HALF * side ^ 32 * s) + HALF * half, BF16) for s in range(4)]
        for x in tiles:
            for i in cutlass.range_constexpr(2):
                column = cute.make_rmem_tensor(((2, 2), 1), BF16)  # rows as columns: the same registers
                for e in cutlass.range_constexpr(4):
                    column[e] = x[e % 2 + 2 * i + 4 * (e // 2)]
                xx_i = corner(xx, 4 * i)
                cute.gemm(mma_bf16, xx_i, as_a(x), column, xx_i)

    # -- norms of rows r and r + 8; column r of row r is with lane 4 r + r / 2
    size, inv = [cute.make_rmem_tensor((2,), F32) for _ in range(2)]
    for i in cutlass.range_constexpr(2):
        mine = xx[6 * i + 1] if r % 2 == 1 else xx[6 * i]
        size[i] = cute.arch.shuffle_sync(mine, 4 * r + r // 2)
        inv[i] = F32(1.0) if side == KEYS else scale
        if is_f16:
            inv[i] = inv[i] * cute.math.rsqrt(size[i] + F32(1e-6), fastmath=True)
        if c == 0:
            sNorm[16 * block_row + r + 8 * i, side] = inv[i]
    for e in cutlass.range_constexpr(4):
        for off in (4, 8, 16):
            top[e] = cute.arch.fmax(top[e], cute.arch.shuffle_sync_bfly(top[e], offset=off))
    if r == 0:
        for e in cutlass.range_constexpr(4):
            sTop[16 * block_row + 2 * c + e % 2 + 8 * (e // 2), side] = top[e]
    b = cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        t = 16 * block_row + r + 8 * i
        x_b = raw_b[i]
        if beta_top > F32(0.0):  # beta is raw
            x_b = beta_top * cute.arch.rcp_approx(F32(1.0) + cute.math.exp2(x_b * F32(-LOG2E), fastmath=True))
        b[i] = x_b if t < left else F32(0.0)
        if c == 0 and side == KEYS:
            sBeta[t] = b[i]
            mVec[number, hv, BETA + t] = b[i]
    cute.arch.sync_threads()

    inv_k, inv_q = [cute.make_rmem_tensor((2,), F32) for _ in range(2)]
    for i in cutlass.range_constexpr(2):
        row = 16 * block_row + r + 8 * i
        inv_k[i], inv_q[i] = sNorm[row, KEYS], sNorm[row, QUERIES]
    # -- a thread a channel: what lies before and after each block
    channel = tid % 128
    sums, before = cute.make_rmem_tensor((4,), F32), F32(0.0)
    for i in cutlass.range_constexpr(4):
        sums[i] = sSum[i, channel]
    whole = sums[0] + sums[1] + sums[2] + sums[3]
    if side == KEYS:
        for i in cutlass.range_constexpr(4):
            sInv[i, channel] = F32(UNBIASED) * cute.math.exp2(-sums[i], fastmath=True)
        mVec[number, hv, channel] = cute.math.exp2(whole, fastmath=True)
        # the bound, log2: |state transition| <= prod_t max_c e^{g_t,c} max(1, |1 - b |k|^2|)
        bound = F32(0.0)
        for i in cutlass.range_constexpr(2):
            row, turn = 16 * block_row + r + 8 * i, F32(1.0) - b[i] * size[i] * (inv[i] * inv[i])
            bound += cute.arch.fmax(sTop[row, KEYS], sTop[row, QUERIES])
            bound += cute.math.log2(cute.arch.fmax(F32(1.0), cute.arch.fmax(turn, -turn)), fastmath=True)
        for off in (4, 8, 16):
            bound += cute.arch.shuffle_sync_bfly(bound, offset=off)
        if lane == 0:
            sBound[block_row] = bound
    else:
        for i in cutlass.range_constexpr(4):
            sBefore[i, channel] = cute.math.exp2(before, fastmath=True).to(wide)
            before += sums[i]
            sAfter[i, channel] = cute.math.exp2(whole - before, fastmath=True).to(wide)
        for i, between in enumerate((sums[1], sums[2], sums[1] + sums[2])):  # of blocks (2, 0), (3, 1), (3, 0)
            sBetween[i, channel] = cute.math.exp2(between, fastmath=True).to(dtype)
    cute.arch.sync_threads()
    if tid == 0:
        mVec[number, hv, BOUND] = sBound[0] + sBound[1] + sBound[2] + sBound[3]

    # -- first pass, half of the channels a side, sixteen at a time: k e^L, q e^L, kr, and the diagonal blocks of the scores
    diagA, diagP = [cute.make_rmem_tensor((8,), F32) for _ in range(2)]
    diagA.fill(0.0)
    diagP.fill(0.0)
    pair_of = lambda t: I32(t.iterator.toint()) + (128 * block_row + 64 * side + 2 * c) * (t.element_type.width // 8)
    inv_at, after_at, before_at = pair_of(sInv), pair_of(sAfter), pair_of(sBefore)
    x_at = I32(sX.iterator.toint()) + 16 * lane
    wide_step = 16 * wide.width // 8
    for n in cutlass.range_constexpr(4):
        four_of = cute.make_rmem_tensor((8,), F16)
        if cutlass.const_expr(not is_scalar):
            four_of = load_matrix((kq_at ^ 32 * n) + from_k(sKr), F16, True)
        raw8_k, raw8_q = [load_matrix((kq_at ^ 32 * n) + at, BF16) for at in (0, TILE)]
        back, post = read_factors(inv_at + 64 * n, F32), read_factors(after_at + wide_step * n, wide)
        since, rest = [cute.make_rmem_tensor(((2, 2), 1, 2), F32) for _ in range(2)]  # L, L_16 - L
        if cutlass.const_expr(is_scalar):
            for e in cutlass.range_constexpr(8):
                since[e], rest[e] = L_scalar[e % 4], rest_scalar[e % 4]
        for total, which in () if cutlass.const_expr(is_scalar) else ((since, until), (rest, after)):
            total.fill(0.0)
            for j in cutlass.range_constexpr(2):
                of_j, four = corner(total, 4 * j), cute.make_tensor(four_of.iterator + 4 * j, cute.make_layout(((2, 2), 1)))
                cute.gemm(mma_f16, of_j, which, four, of_j)
        for e in cutlass.range_constexpr(8):
            since[e] = cute.math.exp2(since[e], fastmath=True)
        for e in cutlass.range_constexpr(8):
            rest[e] = cute.math.exp2(rest[e], fastmath=True)
        # keys first; queries need kd of them
        xk, left_k, down, kd = [cute.make_rmem_tensor((8,), F32) for _ in range(4)]
        widen(raw8_k, xk)
        for e in cutlass.range_constexpr(8):  # e = ci + 2 ri + 4 hi
            xk[e] = xk[e] * inv_k[e // 2 % 2]
        for e in cutlass.range_constexpr(8):
            down[e] = xk[e] * rest[e]
            left_k[e] = xk[e] * since[e]
        kl8, kr8, out, post8 = [cute.make_rmem_tensor((8,), t) for t in (dtype, dtype, dtype, wide)]
        for e in cutlass.range_constexpr(8):
            post8[e] = post[e % 2 + 2 * (e // 4)]
        kl8.store(left_k.load().to(dtype))
        kr8.store(down.load().to(dtype))
        out.store(((kr8 if is_f16 else down).load() * post8.load()).to(dtype))
        store_matrix(kl8, (kq_at ^ 32 * n) + from_k(sKlQl))
        store_matrix(out, (kq_at ^ 32 * n) + from_k(sKr))
        if block_row < 3:  # for the rows below: [n-block = ri][hi][ci]
            as_b = cute.make_rmem_tensor((8,), dtype)
            for e in cutlass.range_constexpr(8):
                as_b[e % 2 + 2 * (e // 4) + 4 * (e // 2 % 2)] = kr8[e]
            to_x = at_address(x_at + 2048 * side + 4096 * block_row + 512 * n, dtype, 8, 16)
            cute.autovec_copy(cute.make_tensor(as_b.iterator, cute.make_layout((8, 1))), to_x)
        if cutlass.const_expr(is_scalar):  # operands of the diagonal blocks decay later, entry by entry
            kd.store(xk.load())
            add_block(mma_tf32, diagA, xk, kd)
        else:
            for e in cutlass.range_constexpr(8):
                kd[e] = down[e] * back[e % 2 + 2 * (e // 4)]
            add_block(mma_tf32, diagA, left_k, kd)
        xq, left_q = [cute.make_rmem_tensor((8,), F32) for _ in range(2)]
        widen(raw8_q, xq)
        for e in cutlass.range_constexpr(8):
            xq[e] = xq[e] * inv_q[e // 2 % 2]
        for e in cutlass.range_constexpr(8):
            left_q[e] = xq[e] * since[e]
        ql8 = cute.make_rmem_tensor((8,), dtype)
        ql8.store(left_q.load().to(dtype))
        store_matrix(ql8, (kq_at ^ 32 * n) + from_k(sKlQl) + TILE)
        add_block(mma_tf32, diagP, xq if cutlass.const_expr(is_scalar) else left_q, kd)
        if cutlass.const_expr(not is_f16):
            first8, b8 = [cute.make_rmem_tensor((8,), wide) for _ in range(2)]
            first = read_factors(before_at + wide_step * n, wide)
            for e in cutlass.range_constexpr(8):
                first8[e], b8[e] = first[e % 2 + 2 * (e // 4)], b[e // 2 % 2]
            out.store((left_k.load() * first8.load() * b8.load()).to(dtype))
            store_matrix(out, kq_at ^ 32 * n)
            out.store((left_q.load() * first8.load()).to(dtype))
            store_matrix(out, (kq_at ^ 32 * n) + TILE)
    # a side has summed over its channels: A's other half goes to the key side, P's to the query side
    pair_at = lambda nb, ri: cute.local_tile(sD[None, None, block_row], (1, 2), (r + 8 * ri, 4 * nb + c))
    if side == QUERIES:
        for nb in cutlass.range_constexpr(2):
            for ri in cutlass.range_constexpr(2):
                cute.autovec_copy(cute.make_tensor(diagA.iterator + 2 * ri + 4 * nb, cute.make_layout((1, 2))), pair_at(nb, ri))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    to_memory = lambda s, i: cute.copy(
        tma_tiles, *tma_split(tma_tiles, s, cute.local_tile(gTiles, (64, 128), (3 * record + i, 0)))
    )
    if wid == TMA_WARP:
        to_memory(sKr, 2)
        cute.arch.cp_async_bulk_commit_group()
    for i in cutlass.range_constexpr(2):
        b[i] = sBeta[16 * block_row + r + 8 * i]  # not kept in registers through the first pass
    finished = pipeline.NamedBarrier(barrier_id=1, num_threads=160)  # A's diagonal blocks
    if side == KEYS:
        for j in cutlass.range_constexpr(2):
            cute.autovec_copy(flat(diagP, 4 * j, 4), sHalf[None, j, lane, block_row])
        for nb in cutlass.range_constexpr(2):
            for ri in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor((1, 2), F32)
                cute.autovec_copy(pair_at(nb, ri), pair)
                for ci in cutlass.range_constexpr(2):
                    x = pair[ci] + diagA[ci + 2 * ri + 4 * nb]
                    if cutlass.const_expr(is_scalar):
                        x = x * entry_decay(L_scalar, c, nb, ri, ci)
                    pair[ci] = x * b[ri] if 8 * nb + 2 * c + ci < r + 8 * ri else F32(0.0)
                cute.autovec_copy(pair, pair_at(nb, ri))
    # their inverses, two a warp: by the warps that have no block below the diagonal
    if block_row == 0:
        finished.arrive_and_wait()
        inverse_pair(sD, side, 3 - side, lane)
    elif side == KEYS:
        finished.arrive()
    # -- second pass: blocks d below the diagonal, of A by the key side, of P by the query side; then kb and qg
    own_at = kq_at + HALF * side + from_k(sKlQl)
    scores = cute.make_rmem_tensor(((2, 2), 1, 2, 3), F32)  # by d - 1
    scores.fill(0.0)
    between_at = I32(sBetween.iterator.toint()) + 2 * c * (dtype.width // 8)
    for d in cutlass.range_constexpr(1, 4):
        if block_row >= d:
            their_at = x_at + 4096 * (block_row - d)
            which_at = between_at + 256 * (block_row - 2 if cutlass.const_expr(d == 2) else I32(2))
            for half in cutlass.range(2, unroll=1):
                for s in cutlass.range_constexpr(4):
                    left8, theirs = load_matrix((own_at ^ 32 * s) + HALF * half, dtype), cute.make_rmem_tensor((8,), dtype)
                    from_x = at_address(their_at + 512 * s + 2048 * half, dtype, 8, 16)
                    cute.autovec_copy(from_x, cute.make_tensor(theirs.iterator, cute.make_layout((8, 1))))
                    if cutlass.const_expr(d > 1):
                        between, of_all = read_factors(which_at + 32 * s + 128 * half, dtype), cute.make_rmem_tensor((8,), dtype)
                        for e in cutlass.range_constexpr(8):
                            of_all[e] = between[e % 4]
                        theirs.store((theirs.load().to(wide) * of_all.load().to(wide)).to(dtype))
                    for nb in cutlass.range_constexpr(2):
                        key = cute.make_tensor(theirs.iterator + 4 * nb, cute.make_layout(((2, 2), 1)))
                        target = corner(scores, 8 * (d - 1) + 4 * nb)
                        cute.gemm(mma_scores, target, as_a(left8), key, target)
    if cutlass.const_expr(is_f16):
        row16 = cute.make_rmem_tensor((8,), F16)
        for e in cutlass.range_constexpr(8):
            row16[e] = (b[e // 2 % 2] if side == KEYS else F32(1.0)).to(F16)
        pre_at = I32(sBefore.iterator.toint()) + 256 * block_row + 4 * c
        for half in cutlass.range(2, unroll=1):
            left8s = [load_matrix((own_at ^ 32 * s) + HALF * half, dtype) for s in range(4)]
            pres = [read_factors(pre_at + 32 * s + 128 * half, F16) for s in range(4)]
            for s, pre, left8 in zip(range(4), pres, left8s):
                pre8, scaled = [cute.make_rmem_tensor((8,), F16) for _ in range(2)]
                for e in cutlass.range_constexpr(8):
                    pre8[e] = pre[e % 2 + 2 * (e // 4)]
                scaled.store(left8.load() * pre8.load() * row16.load())
                store_matrix(scaled, (own_at ^ 32 * s) + HALF * half)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()  # tiles are complete, keys and tables have been read: A and P take their place
    block, nothing = cute.make_rmem_tensor((8,), dtype), cute.make_rmem_tensor((8,), dtype)
    nothing.fill(0.0)
    out_at = lane_address(sOut, block_row, lane)
    of_out = pipeline.NamedBarrier(barrier_id=2, num_threads=256)
    if side == QUERIES:
        if wid == TMA_WARP:
            for i in (KEYS, QUERIES):
                to_memory(sKbQg[None, None, i], i)
            cute.arch.cp_async_bulk_commit_group()
        # -- P
        for j in cutlass.range_constexpr(2):
            other = cute.make_rmem_tensor((4,), F32)
            cute.autovec_copy(sHalf[None, j, lane, block_row], other)
            for e in cutlass.range_constexpr(4):
                x, row, col = diagP[4 * j + e] + other[e], r + 8 * (e // 2), 8 * j + 2 * c + e % 2
                if cutlass.const_expr(is_scalar):
                    x = x * entry_decay(L_scalar, c, j, e // 2, e % 2)
                diagP[4 * j + e] = x if col <= row else F32(0.0)
        cute.arch.sync_warp()
        for d in cutlass.range_constexpr(1, 4):
            if block_row >= d:
                block.store(flat(scores, 8 * (d - 1), 8).load().to(dtype))
                store_matrix(block, out_at ^ 32 * (block_row - d))
            if block_row + d < 4:
                store_matrix(nothing, out_at ^ 32 * (block_row + d))
        block.store(diagP.load().to(dtype))
        store_matrix(block, out_at ^ 32 * block_row)
        if cutlass.const_expr(has_zeros):
            store_rows(sOut, mP, block_row, lane, record)
        else:
            store_quarters(sOut, mP, block_row, lane, record, UPPER_RIGHT)
        of_out.arrive()
        if wid == TMA_WARP:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    else:
        # -- T^T
        for d in cutlass.range_constexpr(1, 4):
            if block_row >= d:
                for nb in cutlass.range_constexpr(2):
                    for ri in cutlass.range_constexpr(2):
                        scaled2, e = cute.make_rmem_tensor((1, 2), F32), 2 * ri + 4 * nb + 8 * (d - 1)
                        scaled2[0], scaled2[1] = scores[e] * b[ri], scores[e + 1] * b[ri]
                        round_tf32(scaled2)
                        to_a = below(sA, block_row, block_row - d)
                        cute.autovec_copy(scaled2, cute.local_tile(to_a, (1, 2), (r + 8 * ri, 4 * nb + c)))
        pipeline.NamedBarrier(barrier_id=1, num_threads=128).arrive_and_wait()
        cols = cute.make_rmem_tensor((32,), F32)
        inverse_columns(mma_tf32, sA, sD, block_row, lane, cols)
        of_out.arrive_and_wait()
        for d in cutlass.range_constexpr(4):
            if block_row + d < 4:
                block.store(flat(cols, 8 * d, 8).load().to(dtype))
                store_matrix(block, out_at ^ 32 * (block_row + d))
            if cutlass.const_expr(d > 0):
                if block_row >= d:
                    store_matrix(nothing, out_at ^ 32 * (block_row - d))
        if cutlass.const_expr(has_zeros):
            store_rows(sOut, mT, block_row, lane, record)
        else:
            store_quarters(sOut, mT, block_row, lane, record, LOWER_LEFT)


@cute.jit
def add_block(mma: cute.TiledMma, acc: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
    """acc [16, 16] += x y^T over 16 channels, in tf32; x and y are arrays of rows."""
    for hi in cutlass.range_constexpr(2):
        a = cute.make_rmem_tensor(((2, 2), 1), F32)
        for e in cutlass.range_constexpr(4):
            a[e // 2 + 2 * (e % 2)] = x[e + 4 * hi]
        for nb in cutlass.range_constexpr(2):
            column = cute.make_tensor(y.iterator + 2 * nb + 4 * hi, cute.make_layout((2, 1)))
            d = corner(acc, 4 * nb)
            cute.gemm(mma, d, cute.recast_tensor(a, TF32), cute.recast_tensor(column, TF32), d)


@cute.jit
def entry_decay(L: cute.Tensor, c: I32, nb: cutlass.Constexpr, ri: cutlass.Constexpr, ci: cutlass.Constexpr):
    """e^{L_t - L_i} of an entry of a diagonal block, one gate a head: no decay is too fast for that."""
    L_col = cute.arch.shuffle_sync(L[2 * nb], 4 * (2 * c + ci))
    return F32(UNBIASED) * cute.math.exp2(L[2 * ri] - L_col, fastmath=True)
