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
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.fragments import (
    activate,
    corner,
    flat,
    read_factors,
    read_gates,
    read_rows,
    round_tf32,
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
VEC = 256  # floats of a chunk and head: e^{G_C} [128], b [64], the bound
BETA, BOUND = 128, 192  # where they begin

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
):
    """A block for each (value head, number of a chunk)."""
    cute.arch.griddepcontrol_launch_dependents()  # the next kernel may set itself up; it waits for our end
    hv, number, _ = cute.arch.block_idx()
    _, first, begin, tokens = place(number, 64, mCu, length, steps)
    start = (number - first) * 64
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
            hv,
            hv // group,
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
    record = number * mVec.shape[1] + hv
    tid, _, _ = cute.arch.thread_idx()
    wid = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    r, c = lane // 4, lane % 4

    smem = SmemAllocator()
    sQ, sK = allocate_tile(smem, lt), allocate_tile(smem, lt)
    loads = [(tma_k, sK, gK, h), (tma_q, sQ, gQ, h)]
    # results take the place of what they were made of; a float32 g is of another shape
    sKb, sQg = tile_at(sK, lt, dtype), tile_at(sQ, lt, dtype)
    if cutlass.const_expr(is_scalar):
        sKr = allocate_tile(smem, lt, dtype)
    else:
        sG = allocate_tile(smem, lg, g_type)
        loads = [(tma_g, sG, gG, hv), *loads]
        sKr = tile_at(sG, lt, dtype) if cutlass.const_expr(g_type.width == 16) else allocate_tile(smem, lt, dtype)
    sDecay = tile_at(sKr, lt, F16)
    # k e^L and q e^L between the passes. fp16 can afford to round them before the last factors are multiplied in, bf16 cannot.
    wide = F16 if is_f16 else F32
    sKl, sQl = sKb, sQg
    if cutlass.const_expr(not is_f16):
        sKl, sQl = allocate_tile(smem, lt, dtype), allocate_tile(smem, lt, dtype)
    # For each block and channel: L_16, e^{-L_16}, e^{G before the block}, e^{G_C - G after it}; then decays of the blocks between
    # two. When these have been used, P and T pass here on their way out.
    lsq = tile_layout(64, 64, dtype=dtype)
    tables = smem.allocate(8 * 1024 if is_f16 else 9 * 1024, 1024)
    sOut = cute.make_tensor(cute.recast_ptr(tables, lsq.inner, dtype), lsq.outer)
    table = lambda at, t, n: cute.make_tensor(cute.recast_ptr(tables + at, dtype=t), cute.make_layout((n, 128), stride=(128, 1)))
    half = 512 * wide.width // 8
    sSum, sInv = table(0, F32, 4), table(2048, F32, 4)
    sBefore, sAfter, sBetween = table(4096, wide, 4), table(4096 + half, wide, 4), table(4096 + 2 * half, dtype, 3)
    # keys as B operands [8 values, lane, 16-channel step, warp]; then, in the same memory, A by blocks below the diagonal. Those
    # on it are apart, and replaced by their inverses.
    sX = smem.allocate_tensor(dtype, cute.make_layout((8, 32, 8, 3), stride=(1, 8, 256, 2048)), byte_alignment=16)
    sA = cute.make_tensor(cute.recast_ptr(sX.iterator, dtype=F32), blocks(6))
    sD = smem.allocate_tensor(F32, blocks(4), byte_alignment=16)
    sBias = smem.allocate_tensor(F32, cute.make_layout(128), byte_alignment=16)
    sBound = smem.allocate_tensor(F32, cute.make_layout(4), byte_alignment=16)
    bar = smem.allocate_array(cutlass.Int64, 1)

    # -- q, k and g on their way
    if wid == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(bar, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if wid == 0:
        with cute.arch.elect_one():
            g_bytes = 0 if cutlass.const_expr(is_scalar) else cute.size_in_bytes(g_type, lg)
            cute.arch.mbarrier_arrive_and_expect_tx(bar, 2 * cute.size_in_bytes(BF16, lt) + g_bytes)
        for atom, s, g, head in loads:
            at = cute.local_tile(cute.domain_offset((t0, 0), g[None, None, head]), (64, 128), (0, 0))
            s_part, g_part = tma_split(atom, s, at)
            cute.copy(atom, g_part, s_part, tma_bar_ptr=bar)
    # so are beta of our two rows and the gate's constants; nobody waits for them yet
    raw_b = cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        t = t0 + cutlass.min(16 * wid + r + 8 * i, left - 1)
        if beta_bits == 32:
            raw_b[i] = mBeta[t, hv]
        else:
            raw_b[i] = mBeta16[t, hv].to(F32)
    rG = cute.make_rmem_tensor(((2, 2), 1), g_type)  # one gate a head: those of our rows
    if cutlass.const_expr(is_scalar):
        for e in cutlass.range_constexpr(4):
            rG[e] = mG[t0 + cutlass.min(16 * wid + 2 * c + e % 2 + 8 * (e // 2), left - 1), hv]
    slope = F32(-LOG2E)
    if cutlass.const_expr(has_gate):
        slope = F32(-LOG2E) * cute.math.exp2(mA[hv] * F32(LOG2E))
        sBias[tid] = slope * mBias[hv, tid]
        cute.arch.sync_threads()
    cute.arch.mbarrier_wait(bar, 0)

    if left < 64:  # rows past the end belong to someone else
        row = tid // 2
        if row >= left:
            for _, s, _, _ in loads:
                zero = cute.make_rmem_tensor((1, 8), s.element_type)
                zero.fill(0.0)
                for p in cutlass.range_constexpr(8):
                    cute.autovec_copy(zero, cute.local_tile(s, (1, 8), (row, tid % 2 * 8 + p)))
        cute.arch.sync_threads()

    # -- log2 decays, read with tokens in pairs (the B operand of their sums) and left in their places as fp16. The largest of a
    # token bounds what any channel of a state keeps.
    rows = lambda s: cute.local_tile(s, (16, 128), (wid, 0))
    by_channel = lambda s: swapped(rows(s))  # [128 channels, 16 tokens]
    unit, top = cute.make_rmem_tensor((4,), F32), cute.make_rmem_tensor((4,), F32)
    for e in cutlass.range_constexpr(4):  # rows past the end decay nothing
        token = 16 * wid + 2 * c + e % 2 + 8 * (e // 2)
        if cutlass.const_expr(has_gate):
            unit[e] = cutlass.max(F32(-1e37), F32(1.0) / (lower * F32(LOG2E))) if token < left else F32(-1e37)
        else:
            unit[e] = F32(LOG2E) if token < left else F32(0.0)
    top.fill(-1e30)
    until, after = [cute.make_rmem_tensor(((2, 2, 2), 1), F16) for _ in range(2)]  # triangles of ones: i <= t, i > t
    for e in cutlass.range_constexpr(8):
        until[e] = F16(1.0) if 2 * c + e % 2 + 8 * (e // 4) <= r + 8 * (e // 2 % 2) else F16(0.0)
        after[e] = F16(1.0) - until[e]
    ldT = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), F16), mma_f16).get_slice(lane)
    stT = cute.make_tiled_copy_B(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), F16), mma_f16).get_slice(lane)
    decays = ldT.partition_S(by_channel(sDecay))
    L_scalar, rest_scalar = [cute.make_rmem_tensor(((2, 2), 1, 1), F32) for _ in range(2)]
    if cutlass.const_expr(is_scalar):
        g16 = cute.make_rmem_tensor(((2, 2), 1), F16)
        activate(rG, g16, slope, (sBias[0],), unit, top, has_gate, FASTEST)
        L_scalar.fill(0.0)
        rest_scalar.fill(0.0)
        cute.gemm(mma_f16, L_scalar, until, g16, L_scalar)
        cute.gemm(mma_f16, rest_scalar, after, g16, rest_scalar)
        if r == 7:  # row 15, of every channel
            for j in cutlass.range_constexpr(16):
                sSum[wid, 8 * j + 2 * c], sSum[wid, 8 * j + 2 * c + 1] = L_scalar[2], L_scalar[3]
    # squares of rows, the diagonal of x x^T, come with it
    ld = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BF16), mma_bf16)
    ld_n = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BF16), mma_bf16)
    srcQ, srcK = [ld.get_slice(lane).partition_S(rows(s)) for s in (sQ, sK)]
    qq, kk = [cute.make_rmem_tensor(((2, 2), 1, 2), F32) for _ in range(2)]
    qq.fill(0.0)
    kk.fill(0.0)
    for two in cutlass.range(4, unroll=1):
        at = (2 * two, 2 * two + 1)
        raw_g = [] if cutlass.const_expr(is_scalar) else [read_gates(by_channel(sG), mma_bf16, lane, s) for s in at]
        biases = [(sBias[16 * s + r], sBias[16 * s + 8 + r]) for s in at]
        for s in at:
            for src, tile, xx in ((srcQ, sQ, qq), (srcK, sK, kk)):
                as_rows, as_columns = read_rows(ld, src, lane, s), cute.make_rmem_tensor(((2, 2), 2, 1), BF16)
                columns = ld_n.get_slice(lane).partition_S(rows(tile))
                cute.copy(ld_n, columns[None, None, s], ld_n.get_slice(lane).retile(as_columns)[None, None, 0])
                for i in cutlass.range_constexpr(2):
                    of_half = cute.make_tensor(as_columns.iterator + 4 * i, cute.make_layout(((2, 2), 1)))
                    xx_i = corner(xx, 4 * i)
                    cute.gemm(mma_bf16, xx_i, cute.make_tensor(as_rows.iterator, cute.make_layout(((2, 2, 2), 1))), of_half, xx_i)
        decays16 = [cute.make_rmem_tensor(((2, 2), 2, 1), F16) for _ in raw_g]
        for raw, decay16, bias in zip(raw_g, decays16, biases):
            activate(raw, decay16, slope, bias, unit, top, has_gate)
        for s, decay16 in zip(at, decays16):
            for j in cutlass.range_constexpr(2):
                four = cute.make_tensor(decay16.iterator + 4 * j, cute.make_layout(((2, 2), 1)))
                prefix = cute.make_rmem_tensor(((2, 2), 1, 1), F32)
                prefix.fill(0.0)
                cute.gemm(mma_f16, prefix, until, four, prefix)
                if r == 7:  # row 15
                    last_row = cute.make_tensor(prefix.iterator + 2, cute.make_layout((1, 2)))
                    cute.autovec_copy(last_row, cute.local_tile(sSum, (1, 2), (wid, 8 * s + 4 * j + c)))
            cute.copy(stT, stT.retile(decay16)[None, 0, 0], stT.partition_D(by_channel(sDecay))[None, s, 0])
    cute.arch.sync_threads()

    b = cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        t = 16 * wid + r + 8 * i
        x = raw_b[i]
        if beta_top > F32(0.0):  # beta is raw
            x = beta_top * cute.arch.rcp_approx(F32(1.0) + cute.math.exp2(x * F32(-LOG2E), fastmath=True))
        b[i] = x if t < left else F32(0.0)
        if c == 0:
            mVec[number, hv, BETA + t] = b[i]

    # -- norms of rows r and r + 8; column r of row r is with lane 4 r + r / 2
    inv_q, inv_k, size_k = [cute.make_rmem_tensor((2,), F32) for _ in range(3)]
    for xx, inv, gain in ((qq, inv_q, scale), (kk, inv_k, F32(1.0))):
        for i in cutlass.range_constexpr(2):
            mine = xx[6 * i + 1] if r % 2 == 1 else xx[6 * i]
            size_k[i] = cute.arch.shuffle_sync(mine, 4 * r + r // 2)  # the keys come last
            inv[i] = gain
            if is_f16:
                inv[i] = gain * cute.math.rsqrt(size_k[i] + F32(1e-6), fastmath=True)

    # -- the bound, log2: |state transition| <= prod_t max_c e^{g_t,c} max(1, |1 - b |k|^2|)
    bound, grow = F32(0.0), F32(0.0)
    for e in cutlass.range_constexpr(4):
        for off in (4, 8, 16):
            top[e] = cute.arch.fmax(top[e], cute.arch.shuffle_sync_bfly(top[e], offset=off))
        bound += top[e]
    for off in (1, 2):
        bound += cute.arch.shuffle_sync_bfly(bound, offset=off)
    for i in cutlass.range_constexpr(2):
        turn = F32(1.0) - b[i] * size_k[i] * (inv_k[i] * inv_k[i])
        grow += cute.math.log2(cute.arch.fmax(F32(1.0), cute.arch.fmax(turn, -turn)), fastmath=True)
    for off in (4, 8, 16):
        grow += cute.arch.shuffle_sync_bfly(grow, offset=off)
    if lane == 0:
        sBound[wid] = bound + grow

    # -- thread = channel: what lies before and after each block
    sums, before = cute.make_rmem_tensor((4,), F32), F32(0.0)
    for i in cutlass.range_constexpr(4):
        sums[i] = sSum[i, tid]
    whole = sums[0] + sums[1] + sums[2] + sums[3]
    for i in cutlass.range_constexpr(4):
        sBefore[i, tid] = cute.math.exp2(before, fastmath=True).to(wide)
        before += sums[i]
        sAfter[i, tid] = cute.math.exp2(whole - before, fastmath=True).to(wide)
        sInv[i, tid] = F32(UNBIASED) * cute.math.exp2(-sums[i], fastmath=True)
    for i, between in enumerate((sums[1], sums[2], sums[1] + sums[2])):  # of blocks (2, 0), (3, 1), (3, 0)
        sBetween[i, tid] = cute.math.exp2(between, fastmath=True).to(dtype)
    mVec[number, hv, tid] = cute.math.exp2(whole, fastmath=True)
    cute.arch.sync_threads()
    if tid == 0:
        mVec[number, hv, BOUND] = sBound[0] + sBound[1] + sBound[2] + sBound[3]

    # -- first pass, two times sixteen channels at a time: k e^L, q e^L, kr, and the diagonal blocks of the scores
    accA, accP = [cute.make_rmem_tensor(((2, 2), 1, 2, 4), F32) for _ in range(2)]  # block columns 0..2; the diagonal is last
    accA.fill(0.0)
    accP.fill(0.0)
    st = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), mma_bf16).get_slice(lane)
    to_rows = lambda x, s: cute.copy(
        st, st.retile(cute.make_tensor(x.iterator, cute.make_layout(((2, 2), 1, 2))))[None, None, 0], s
    )
    toKl, toQl, toKb, toQg, toKr = [st.partition_D(rows(s)) for s in (sKl, sQl, sKb, sQg, sKr)]
    for two in cutlass.range(4, unroll=1):
        at = (2 * two, 2 * two + 1)
        sums16 = [cute.make_rmem_tensor(((2, 2), 2, 1), F16) for _ in at]
        if cutlass.const_expr(not is_scalar):
            for s, four_of in zip(at, sums16):
                cute.copy(ldT, decays[None, s, 0], ldT.retile(four_of)[None, 0, 0])
        raw_q, raw_k = [[read_rows(ld, src, lane, s) for s in at] for src in (srcQ, srcK)]
        backs, posts = [cute.make_rmem_tensor((4,), F32) for _ in at], [cute.make_rmem_tensor((4,), wide) for _ in at]
        for s, back, post in zip(at, backs, posts):
            read_factors(sInv, wid, s, c, back)
            read_factors(sAfter, wid, s, c, post)
        for s, four_of, raw8_q, raw8_k, back, post in zip(at, sums16, raw_q, raw_k, backs, posts):
            since, rest = [cute.make_rmem_tensor(((2, 2), 1, 2), F32) for _ in range(2)]  # L, L_16 - L
            if cutlass.const_expr(is_scalar):
                for e in cutlass.range_constexpr(8):
                    since[e], rest[e] = L_scalar[e % 4], rest_scalar[e % 4]
            for total, which in () if cutlass.const_expr(is_scalar) else ((since, until), (rest, after)):
                total.fill(0.0)
                for j in cutlass.range_constexpr(2):
                    of_j, four = corner(total, 4 * j), cute.make_tensor(four_of.iterator + 4 * j, cute.make_layout(((2, 2), 1)))
                    cute.gemm(mma_f16, of_j, which, four, of_j)
            xq, xk, down, kd = [cute.make_rmem_tensor((8,), F32) for _ in range(4)]
            widen(raw8_q, xq)
            widen(raw8_k, xk)
            post8 = cute.make_rmem_tensor((8,), wide)
            for e in cutlass.range_constexpr(8):
                since[e] = cute.math.exp2(since[e], fastmath=True)
            for e in cutlass.range_constexpr(8):
                rest[e] = cute.math.exp2(rest[e], fastmath=True)
            for e in cutlass.range_constexpr(8):  # e = ci + 2 ri + 4 hi
                xk[e] = xk[e] * inv_k[e // 2 % 2]
                xq[e] = xq[e] * inv_q[e // 2 % 2]
            left_k, left_q = xk, xq  # operands of the diagonal blocks, beside kd
            if cutlass.const_expr(is_scalar):  # those decay later, entry by entry
                left_k, left_q = [cute.make_rmem_tensor((8,), F32) for _ in range(2)]
                left_k.store(xk.load())
                left_q.store(xq.load())
                kd.store(xk.load())
            for e in cutlass.range_constexpr(8):
                down[e] = xk[e] * rest[e]
                xk[e] = xk[e] * since[e]
                xq[e] = xq[e] * since[e]
            for e in cutlass.range_constexpr(8):
                if cutlass.const_expr(not is_scalar):
                    kd[e] = down[e] * back[e % 2 + 2 * (e // 4)]
                post8[e] = post[e % 2 + 2 * (e // 4)]
            kl8, ql8, kr8, out = [cute.make_rmem_tensor((8,), dtype) for _ in range(4)]
            kl8.store(xk.load().to(dtype))
            ql8.store(xq.load().to(dtype))
            kr8.store(down.load().to(dtype))
            out.store(((kr8 if is_f16 else down).load() * post8.load()).to(dtype))
            to_rows(kl8, toKl[None, None, s])
            to_rows(ql8, toQl[None, None, s])
            to_rows(out, toKr[None, None, s])
            if cutlass.const_expr(not is_f16):
                first, first8, b8 = [cute.make_rmem_tensor((n,), wide) for n in (4, 8, 8)]
                read_factors(sBefore, wid, s, c, first)
                for e in cutlass.range_constexpr(8):
                    first8[e], b8[e] = first[e % 2 + 2 * (e // 4)], b[e // 2 % 2]
                out.store((xk.load() * first8.load() * b8.load()).to(dtype))
                to_rows(out, toKb[None, None, s])
                out.store((xq.load() * first8.load()).to(dtype))
                to_rows(out, toQg[None, None, s])
            if wid < 3:  # for the warps below: [n-block = ri][hi][ci]
                ours = cute.make_rmem_tensor((8,), dtype)
                for e in cutlass.range_constexpr(8):
                    ours[e % 2 + 2 * (e // 4) + 4 * (e // 2 % 2)] = kr8[e]
                cute.autovec_copy(ours, sX[None, lane, s, wid])
            for hi in cutlass.range_constexpr(2):
                a_k, a_q = [cute.make_rmem_tensor(((2, 2), 1), F32) for _ in range(2)]
                for e in cutlass.range_constexpr(4):
                    a_k[e // 2 + 2 * (e % 2)], a_q[e // 2 + 2 * (e % 2)] = left_k[e + 4 * hi], left_q[e + 4 * hi]
                for nb in cutlass.range_constexpr(2):
                    y = cute.recast_tensor(cute.make_tensor(kd.iterator + 2 * nb + 4 * hi, cute.make_layout((2, 1))), TF32)
                    for a, acc in ((a_k, accA), (a_q, accP)):
                        d = corner(acc, 24 + 4 * nb)
                        cute.gemm(mma_tf32, d, cute.recast_tensor(a, TF32), y, d)
    for nb in cutlass.range_constexpr(2):
        for ri in cutlass.range_constexpr(2):
            neighbours = cute.make_rmem_tensor((1, 2), F32)
            for ci in cutlass.range_constexpr(2):
                e, row, col = 24 + ci + 2 * ri + 4 * nb, r + 8 * ri, 8 * nb + 2 * c + ci
                if cutlass.const_expr(is_scalar):  # e^{L_t - L_i}: no decay is too fast for that
                    L_col = cute.arch.shuffle_sync(L_scalar[2 * nb], 4 * (2 * c + ci))
                    decay = F32(UNBIASED) * cute.math.exp2(L_scalar[2 * ri] - L_col, fastmath=True)
                    accA[e] = accA[e] * decay
                    accP[e] = accP[e] * decay
                neighbours[ci] = accA[e] * b[ri] if col < row else F32(0.0)
                accP[e] = accP[e] if col <= row else F32(0.0)
            cute.autovec_copy(neighbours, cute.local_tile(sD[None, None, wid], (1, 2), (r + 8 * ri, 4 * nb + c)))
    cute.arch.sync_threads()

    # -- second pass: blocks below the diagonal, our rows against another warp's registers as columns; then kb and qg
    ld_l = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype), mma_bf16)
    srcKl, srcQl = [ld_l.get_slice(lane).partition_S(rows(s)) for s in (sKl, sQl)]
    as_a = lambda x: cute.make_tensor(x.iterator, cute.make_layout(((2, 2, 2), 1)))
    for J in cutlass.range_constexpr(3):
        if wid > J:
            which = I32(1)  # of the decays between two blocks
            if cutlass.const_expr(J == 0):
                which = I32(0) if wid == 2 else I32(2)
            for s in cutlass.range(8, unroll=4):
                our_k, our_q = [read_rows(ld_l, src, lane, s, dtype) for src in (srcKl, srcQl)]
                theirs, between = cute.make_rmem_tensor((8,), dtype), cute.make_rmem_tensor((4,), dtype)
                cute.autovec_copy(sX[None, lane, s, J], theirs)
                if cutlass.const_expr(J < 2):
                    read_factors(sBetween, which, s, c, between)
                    if wid == J + 1:  # nothing lies between
                        between.fill(1.0)
                    of_all = cute.make_rmem_tensor((8,), dtype)
                    for e in cutlass.range_constexpr(8):
                        of_all[e] = between[e % 4]
                    theirs.store((theirs.load().to(wide) * of_all.load().to(wide)).to(dtype))
                for nb in cutlass.range_constexpr(2):
                    key = cute.make_tensor(theirs.iterator + 4 * nb, cute.make_layout(((2, 2), 1)))
                    for ours, acc in ((our_k, accA), (our_q, accP)):
                        target = corner(acc, 8 * J + 4 * nb)
                        cute.gemm(mma_scores, target, as_a(ours), key, target)
    if cutlass.const_expr(is_f16):
        b16 = cute.make_rmem_tensor((8,), F16)
        for e in cutlass.range_constexpr(8):
            b16[e] = b[e // 2 % 2].to(F16)
        for two in cutlass.range(4, unroll=1):
            at = (2 * two, 2 * two + 1)
            ours_l = [[read_rows(ld_l, src, lane, s, dtype) for src in (srcKl, srcQl)] for s in at]
            pres = [cute.make_rmem_tensor((4,), F16) for _ in at]
            for s, pre in zip(at, pres):
                read_factors(sBefore, wid, s, c, pre)
            for s, pre, (our_k, our_q) in zip(at, pres, ours_l):
                pre8, scaled_k, scaled_q = [cute.make_rmem_tensor((8,), F16) for _ in range(3)]
                for e in cutlass.range_constexpr(8):
                    pre8[e] = pre[e % 2 + 2 * (e // 4)]
                scaled_k.store(our_k.load() * pre8.load() * b16.load())
                scaled_q.store(our_q.load() * pre8.load())
                to_rows(scaled_k, toKb[None, None, s])
                to_rows(scaled_q, toQg[None, None, s])
    # the diagonal's inverses, two a warp: by the warps that have had least to do
    if wid < 2:
        inverse_pair(sD, wid, 3 - wid, lane)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()  # tiles are complete, keys and tables have been read: A and P take their place
    if wid == 0:
        for i, s in enumerate((sKb, sQg, sKr)):
            s_part, g_part = tma_split(tma_tiles, s, cute.local_tile(gTiles, (64, 128), (3 * record + i, 0)))
            cute.copy(tma_tiles, s_part, g_part)
        cute.arch.cp_async_bulk_commit_group()
    for J in cutlass.range_constexpr(3):
        if wid > J:
            for nb in cutlass.range_constexpr(2):
                for ri in cutlass.range_constexpr(2):
                    scaled, e = cute.make_rmem_tensor((1, 2), F32), 2 * ri + 4 * nb + 8 * J
                    scaled[0], scaled[1] = accA[e] * b[ri], accA[e + 1] * b[ri]
                    round_tf32(scaled)
                    cute.autovec_copy(scaled, cute.local_tile(below(sA, wid, J), (1, 2), (r + 8 * ri, 4 * nb + c)))
    toOut = st.partition_D(cute.local_tile(sOut, (16, 64), (wid, 0)))
    block, nothing = cute.make_rmem_tensor((8,), dtype), cute.make_rmem_tensor((8,), dtype)
    nothing.fill(0.0)
    for J in cutlass.range_constexpr(4):
        if wid > J:
            block.store(flat(accP, 8 * J, 8).load().to(dtype))
            to_rows(block, toOut[None, None, J])
        if wid < J:
            to_rows(nothing, toOut[None, None, J])
    block.store(flat(accP, 24, 8).load().to(dtype))
    to_rows(block, toOut[None, None, wid])
    store_rows(sOut, mP, 64 * record, wid, lane)
    cute.arch.sync_threads()

    # -- T^T
    cols = cute.make_rmem_tensor((32,), F32)
    inverse_columns(mma_tf32, sA, sD, wid, lane, cols)
    for d in cutlass.range_constexpr(4):
        if wid + d < 4:
            block.store(flat(cols, 8 * d, 8).load().to(dtype))
            to_rows(block, toOut[None, None, wid + d])
        if wid > d:
            to_rows(nothing, toOut[None, None, d])
    store_rows(sOut, mT, 64 * record, wid, lane)
    if wid == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
