# SPDX-License-Identifier: Apache-2.0
"""KDA backward on Hopper, inside a chunk: every gradient that the recurrences do not make, a block for each chunk and value head.

With S before the chunk and dS after it, both [dk, dv], U and dX of the chunk (`kda_bwd_recurrence.py`), log decays summed inside
blocks of 8 tokens (L from the start of a block to a token, R from behind it to the end, E the decay over all of it):

    1          dv = b dX           dP = lower(do U^T)      XU = dX U^T,  dA = -strict_lower(XU)
    2 rows     aq = do S^T,  ak = -dX S^T;    for the blocks c before block r:
                   aq = E_c aq + dP[r, c] (k e^R)_c            ak = E_c ak + dA[r, c] (k e^R)_c
    3 columns  ac = U dS^T;                   for the blocks r behind block c:
                   ac = E_r ac + dP[r, c]^T (q e^L)_r + dA[r, c]^T (b k e^L)_r
    4 pairs    i < t of one block, in three levels (`kda_bwd_chunk_steps.py`)
    5          dq = e^L aq + pairs + dP_tt k         d(b k) = e^L ak + pairs         dk = b d(b k) + e^R ac + pairs + dP_tt q
    6          dg_s = sum_dv S1 dS + sum_{t >= s} w_t,  S1 after the chunk
                   w = (q e^L) aq + (b k e^L) ak - (k e^R) ac, and the same of pairs
    7          db = <dX, v> + <k, d(b k)>,  and  b db = diag(XU)
    8          through the gate's activation and the norms

b db is the diagonal alone: the terms of v, of the state and of the scores cancel, as A U = X - U. A raw beta needs no more, since
b is a factor of its sigmoid's slope, and nothing is divided by it; an activated one may be 0, and takes the sums. In 6 the pairs
behind s are added and taken away again, which is exact up to float32 because both times a pair is made from the same rounded
operands.

Transposed: channels are rows. Warp j owns channels 16 j .. 16 j + 15 and all 64 tokens. Accumulators of `S do^T`, `S dX^T` and
`dS U^T`, wgmma's, are fragments of mma.sync with a warp's sixteen channels, so that 2 and 3 go on in them; operands such as k e^R
are made in the registers that they are read from. Only dP and dA are shared.

Units. S and U, dS and dX come scaled by powers of two. All sums have the scale of a state times that of a gradient; one power of
two more takes the largest of dP, dA and U dS^T to between 1 and 2, so that fp16 holds operands and results, whatever the size of
do.

| shared memory                                | bytes |
|----------------------------------------------|-------|
| S; then k and q; then k e^R and e^R          | 32 K  |
| dS; then U dS^T, and dk on its way           | 32 K  |
| do; then g, and dg in its place, where TMA reads gates | 16 K |
| U; then dP and dA                            | 16 K  |
| dX; then dq on its way                       | 16 K  |
| b; inverse norms; diagonal of dP; maxima     | 1 K   |

Two blocks on an SM hide each other's waits.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.memory import SmemAllocator

from cula.core.constants import LOG2_E
from cula.ops.cute.common.fp16_window import bits_of, from_bits, inverse_of
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.gate import bounded_unit, slope_of, softplus_unit
from cula.ops.cute.common.kda_intra import clear_past_end, load_tiles
from cula.ops.cute.common.kda_intra_steps import KEYS, QUERIES, Chunk, IntraMmas, norms
from cula.ops.cute.common.lanes import HALF_WARP, ROW, WARP, largest_over, sum_over
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    K_MAJOR,
    MN_MAJOR,
    Tma,
    allocate_tile,
    issue,
    swapped,
    tile_at,
    tile_layout,
    tma_split,
)
from cula.ops.cute.common.varlen_index import chunk_of_block
from cula.ops.cute.kda_abi import BETA, STATE, TILE_BYTES
from cula.ops.cute.kda_bwd_abi import FACTOR_OF_DS, FACTOR_OF_S, OF_STRENGTHS, OF_V
from cula.ops.cute.sm90.kda_bwd_chunk_steps import (
    BLOCKS,
    ChunkMmas,
    Gate,
    Strip,
    blocks_pass,
    dot_states,
    finish_head_gates,
    last_pass,
    park_columns,
    scale_parked,
)

THREADS = 256
DO, U, DX = 0, 1, 2  # tiles of tokens
AHEAD = 264  # blocks that a GPU has at once: two on each of 132 SMs
TINY, HUGE = 1e-30, 1e30
ROOM = 1024.0  # how much larger than the chunk's unit fp16 may hold gradients of q and k


class Full(enum.IntEnum):
    """mbarriers that say what has come."""

    TOKENS = 0
    DS = 1
    S = 2
    INPUTS = 3


class ChunkTma(NamedTuple):
    """What TMA loads."""

    q: Tma
    k: Tma
    g: Tma  # gates of channels in bfloat16; the others are read by threads
    do: Tma
    S: Tma  # [128, 128], one a record
    dS: Tma
    U: Tma  # [64, 128], one a record
    dX: Tma


class ChunkMemory(NamedTuple):
    """What threads read and write; heads come last."""

    mVec: Any  # [chunks, HV, VEC]
    mFactors: Any  # [records, FACTORS]
    mCu: Any  # [N + 1]
    mA: Any  # [HV]
    mBias: Any  # [HV, 128]
    mQ: Any  # [T, 128, H]
    mK: Any
    mV: Any  # [T, 128, HV]
    mGate: Any
    mDq: Any  # [T, 128, H]
    mDk: Any
    mShareQ: Any  # [T, 128, HV], float32, in the place of the two where value heads share keys
    mShareK: Any
    mDv: Any  # [T, 128, HV]
    mDg: Any
    mDbeta: Any  # [T, HV], as float32
    mDbeta16: Any  # and as bfloat16
    mShares: Any  # [chunks, HV, 2, 128]
    mParts: Any  # [records, PARTS, 64]


class ChunkScalars(NamedTuple):
    """Numbers of a call."""

    scale: Any
    lower: Any
    beta_top: Any
    beta_bits: Any
    length: Any
    halvings: Any
    group: Any


class WgmmaPair(NamedTuple):
    """Products of a warpgroup from shared memory, [64, 64] each."""

    states: Any  # A is a state, turned round
    tokens: Any


def wgmma_pair() -> WgmmaPair:
    source = warpgroup.OperandSource.SMEM
    ops = [warpgroup.MmaF16BF16Op(F16, F32, (64, 64, 16), source, major, K_MAJOR) for major in (MN_MAJOR, K_MAJOR)]
    return WgmmaPair(*[cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1)) for op in ops])


class SmemLayout(NamedTuple):
    """Arrays in shared memory; see the table above."""

    S: Any  # [dv, dk]
    dS: Any
    tokens: Any  # [64, 128, 3]: do, U, dX
    raw_do: Any  # do as it comes, in bfloat16
    k: Any
    q: Any
    to_q: int  # bytes from k
    g: Any
    scores: Any  # [64, 64, 2]: dP, dA
    parked: Any
    dq: Any
    dk: Any
    beta: Any  # [64]
    norms: Any  # [64, side], inverse
    diagonal: Any  # [64], of dP, in fp16
    tops: Any  # [8, 2]
    full: Any  # mbarriers, by `Full`


def smem_layout() -> SmemLayout:
    smem = SmemAllocator()
    one, pair, scores = tile_layout(64, 128), tile_layout(64, 128, 2), tile_layout(64, 64, 2, F16)
    S, dS = [allocate_tile(smem, tile_layout(128, 128, dtype=F16), F16) for _ in range(2)]
    tokens = allocate_tile(smem, tile_layout(64, 128, 3, F16), F16)
    kq, halves = tile_at(S, pair, BF16), tile_at(dS, tile_layout(64, 128, 2, F16), F16)
    of_vectors = smem.allocate_tensor(F32, cute.make_layout(192), byte_alignment=16)

    def vector(at: int, *shape: int) -> Any:
        return cute.make_tensor(of_vectors.iterator + at, cute.make_layout(shape))

    return SmemLayout(
        S=S,
        dS=dS,
        tokens=tokens,
        raw_do=tile_at(tokens[None, None, DO], one, BF16),
        k=kq[None, None, 0],
        q=kq[None, None, 1],
        to_q=TILE_BYTES,
        g=tile_at(tokens[None, None, DO], one, BF16),
        scores=tile_at(tokens[None, None, U], scores, F16),
        parked=halves[None, None, 0],
        dq=tokens[None, None, DX],
        dk=halves[None, None, 1],
        norms=vector(0, 64, 2),
        beta=vector(128, 64),
        diagonal=smem.allocate_tensor(F16, cute.make_layout(64), byte_alignment=16),
        tops=smem.allocate_tensor(F32, cute.make_layout((8, 2)), byte_alignment=16),
        full=smem.allocate_array(cutlass.Int64, len(Full)),
    )


class Place(NamedTuple):
    """Where a chunk is."""

    hv: Any  # value head
    h: Any  # head of q and k
    number: Any  # of the chunk
    record: Any
    t0: Any  # first token
    left: Any  # tokens from there to the sequence's end; more than 64 are later chunks'


@cute.kernel
def chunk_kernel(
    tma: ChunkTma,
    memory: ChunkMemory,
    scalars: ChunkScalars,
    wgmmas: WgmmaPair,
    mmas: ChunkMmas,
    of_norms: IntraMmas,
    variant: cutlass.Constexpr,
):
    """A block for each (value head, number of a chunk)."""
    cute.arch.griddepcontrol_wait()  # for the kernel before: this one may be launched before it has ended
    hv, number, begin, start, tokens = chunk_of_block(memory.mCu, scalars.length, scalars.halvings)
    tid = cute.arch.thread_idx()[0]
    if start < tokens:
        place = Place(
            hv, hv // scalars.group, number, number * memory.mVec.shape[1] + hv, begin + start, tokens - start
        )  # fmt: skip
        backward_chunk(tma, memory, scalars, wgmmas, mmas, of_norms, variant, place)
    elif cutlass.const_expr(variant.is_raw):
        memory.mShares[number, hv, tid // 128, tid % 128] = F32(0.0)


def load_records(loads: Any, full: Any) -> None:
    """Tiles of the workspace, each (tensor, tile in shared memory, size, record, which of the mbarriers)."""
    for tma, s, shape, record, which in loads:
        s_part, g_part = tma_split(tma.atom, s, cute.local_tile(tma.coordinates, shape, (record, 0)))
        cute.copy(tma.atom, g_part, s_part, tma_bar_ptr=full + which)


def prefetch_tiles(tiles: Any) -> None:
    """Tiles, each (tensor, tile in shared memory that it would go to, tile in memory), to the L2 cache."""
    for tma, s, at in tiles:
        cute.prefetch(tma.atom, tma_split(tma.atom, s, at)[1])


@cute.jit
def prefetch_later(tma: cutlass.Constexpr, smem: cutlass.Constexpr, record: I32, records: I32):
    """What the recurrences left for the block that will come when this one, or one like it, is done. All blocks begin alike, and
    share the memory fairly: without this all would load, and then all compute."""
    if record + AHEAD < records:
        of_tokens, later = smem.tokens[None, None, U], record + AHEAD
        prefetch_tiles(
            [
                (of, s, cute.local_tile(of.coordinates, shape, (later, 0)))
                for of, s, shape in (
                    (tma.U, of_tokens, (64, 128)),
                    (tma.dX, of_tokens, (64, 128)),
                    (tma.dS, smem.dS, (128, 128)),
                    (tma.S, smem.S, (128, 128)),
                )
            ]
        )


@cute.jit
def load_first(tma: cutlass.Constexpr, smem: cutlass.Constexpr, place: cutlass.Constexpr, wid: I32, variant: cutlass.Constexpr):
    """What the recurrences left, and do, on their way; what comes later, to the L2 cache."""
    if wid == 0:
        with cute.arch.elect_one():
            for which in Full:
                cute.arch.mbarrier_init(smem.full + which, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if wid == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(smem.full + Full.TOKENS, 3 * TILE_BYTES)
            cute.arch.mbarrier_arrive_and_expect_tx(smem.full + Full.DS, 2 * STATE)
            cute.arch.mbarrier_arrive_and_expect_tx(smem.full + Full.S, 2 * STATE)
        load_tiles([(tma.do, smem.raw_do, place.hv, Full.TOKENS)], place.t0, smem.full)
        load_records(
            [
                (tma.U, smem.tokens[None, None, U], (64, 128), place.record, Full.TOKENS),
                (tma.dX, smem.tokens[None, None, DX], (64, 128), place.record, Full.TOKENS),
                (tma.dS, smem.dS, (128, 128), place.record, Full.DS),
                (tma.S, smem.S, (128, 128), place.record, Full.S),
            ],
            smem.full,
        )
        inputs = [(tma.k, smem.k, place.h), (tma.q, smem.q, place.h)]
        if cutlass.const_expr(variant.has_gate_tile):
            inputs = [*inputs, (tma.g, smem.g, place.hv)]
        prefetch_tiles(
            [
                (of, s, cute.local_tile(cute.domain_offset((place.t0, 0), of.coordinates[None, None, head]), (64, 128), (0, 0)))
                for of, s, head in inputs
            ]
        )


# Rows by threads: sixteen of them have a row of 128 channels


def piece(t: Any, row: Any, tid: Any) -> Any:
    """Eight channels of a row."""
    return cute.local_tile(t, (1, 8), (row, tid % 16))


@cute.jit
def read_piece(t: cute.Tensor, row: I32, tid: I32):
    raw, wide = cute.make_rmem_tensor((1, 8), t.element_type), cute.make_rmem_tensor((8,), F32)
    cute.autovec_copy(piece(t, row, tid), raw)
    wide.store(cute.make_tensor(raw.iterator, cute.make_layout(8)).load().to(F32))
    return wide


@cute.jit
def write_piece(x: cute.Tensor, t: cute.Tensor, row: I32, tid: I32):
    out = cute.make_rmem_tensor((1, 8), t.element_type)
    cute.make_tensor(out.iterator, cute.make_layout(8)).store(x.load().to(t.element_type))
    cute.autovec_copy(out, piece(t, row, tid))


@cute.jit
def scale_do(smem: cutlass.Constexpr, factor: F32, tid: I32, left: I32):
    """do as fp16, in the gradients' scale; zeros past the end, where it is the next sequence's."""
    for p in cutlass.range(4, unroll=2):
        row = 16 * p + tid // 16
        x = read_piece(smem.raw_do, row, tid)
        for e in cutlass.range_constexpr(8):
            x[e] = x[e] * factor
        if row >= left:
            x.fill(0.0)
        write_piece(x, smem.tokens[None, None, DO], row, tid)


@cute.jit
def store_dv(x: cutlass.Constexpr, mDv: cute.Tensor, mV: cute.Tensor, back: F32, tid: I32):
    """dv = b dX, and <dX, v> where it is asked for; mDv and mV begin with the chunk. What is kept of dX is -dX."""
    smem, left, mParts = x.smem, x.left, x.mParts
    for p in cutlass.range(4, unroll=2):
        row = 16 * p + tid // 16
        dx = read_piece(smem.tokens[None, None, DX], row, tid)
        if x.is_activated:
            v, dot = read_piece(mV, cutlass.min(row, left - 1), tid), F32(0.0)
            for e in cutlass.range_constexpr(8):
                dot += dx[e] * v[e]
            dot = sum_over(HALF_WARP, dot)
            if tid % 16 == 0:
                mParts[OF_V, row] = -back * dot
        by = -back * smem.beta[row]
        for e in cutlass.range_constexpr(8):
            dx[e] = dx[e] * by
        if row < left:
            write_piece(dx, mDv, row, tid)


class RowsOut(NamedTuple):
    """Where dq or dk of a chunk goes, and what it is made from."""

    grad: Any  # [64, 128], in shared memory
    rows: Any  # [4 * 8], of q or k: this thread's pieces, which are on their way
    inverse: Any  # [64], norms
    plain: Any  # in bfloat16, where a value head has keys of its own
    share: Any  # in float32, where it shares them
    back: Any  # from the chunk's units to true ones
    is_normalised: bool  # in the kernel


@cute.jit
def read_rows(raw: cute.Tensor, tid: I32, left: I32):
    """Our pieces of q or k once more, for which nobody waits yet."""
    rows = cute.make_rmem_tensor((32,), raw.element_type)
    for p in cutlass.range_constexpr(4):
        to = cute.make_tensor(rows.iterator + 8 * p, cute.make_layout((1, 8)))
        cute.autovec_copy(piece(raw, cutlass.min(16 * p + tid // 16, left - 1), tid), to)
    return rows


@cute.jit
def store_through_norm(out: cutlass.Constexpr, group: I32, tid: I32, left: I32):
    """From the gradient of n = r x, x the row: r (dn - n <n, dn>); as it is, where rows come normalised."""
    for p in cutlass.range_constexpr(4):
        row = 16 * p + tid // 16
        x = cute.make_rmem_tensor((8,), F32)
        x.store(flat(out.rows, 8 * p, 8).load().to(F32))
        dn = read_piece(out.grad, row, tid)
        if cutlass.const_expr(out.is_normalised):
            r, dot = out.inverse[row], F32(0.0)
            for e in cutlass.range_constexpr(8):
                dot += x[e] * dn[e]
            dot = sum_over(HALF_WARP, dot)
            by, along = r * out.back, dot * r * r
            for e in cutlass.range_constexpr(8):
                dn[e] = by * (dn[e] - x[e] * along)
        else:
            for e in cutlass.range_constexpr(8):
                dn[e] = out.back * dn[e]
        if row < left:
            if group == 1:
                write_piece(dn, out.plain, row, tid)
            else:
                write_piece(dn, out.share, row, tid)


@cute.jit
def store_dg(smem: cutlass.Constexpr, mDg: cute.Tensor, tid: I32, left: I32):
    for p in cutlass.range(4, unroll=4):
        row = 16 * p + tid // 16
        if row < left:
            cute.autovec_copy(piece(smem.g, row, tid), piece(mDg, row, tid))


# Squares and units


@cute.jit
def unit_of(top: F32):
    """The power of two that takes the largest value to between 1 and 2; 1 where there is none."""
    power = I32(254) - (bits_of(cutlass.min(cutlass.max(top, F32(TINY)), F32(HUGE))) >> 23)
    return from_bits(power << 23)


@cute.jit
def largest_of(acc: cute.Tensor, top: F32):
    for i in cutlass.range_constexpr(cute.size(acc)):
        top = cute.arch.fmax(top, cute.math.absf(acc[i]))
    return top


@cute.jit
def post_largest(top: F32, tops: cute.Tensor, wid: I32, lane: I32):
    """Our warp's largest value, for `find_largest` behind a barrier."""
    top = largest_over(WARP, top)
    if lane == 0:
        tops[wid] = top


@cute.jit
def find_largest(tops: cute.Tensor):
    top = tops[0]
    for i in cutlass.range_constexpr(1, 8):
        top = cute.arch.fmax(top, tops[i])
    return top


@cute.jit
def diagonal_of(square: cute.Tensor, block_row: I32, r: I32):
    """Entries (t, t) of rows t = 16 block_row + r + 8 i, [2], of a [64, 64] accumulator: right in the lanes with c = r / 2."""
    out = cute.make_rmem_tensor((2,), F32)
    out.fill(0.0)
    for i in cutlass.range_constexpr(2):
        for n in cutlass.range_constexpr(4):
            at = 4 * (2 * n + i) + 2 * i
            entry = square[at + 1] if r % 2 == 1 else square[at]
            out[i] = entry if block_row == n else out[i]
    return out


@cute.jit
def place_square(square: cute.Tensor, unit: F32, to: cute.Tensor, mma: cute.TiledMma, thread: I32):
    """A [64, 64] accumulator to shared memory, as fp16."""
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), F16), mma).get_slice(thread)
    half = cute.make_rmem_tensor_like(square, F16)
    half.store((square.load() * unit).to(F16))
    cute.copy(copy, copy.retile(half), copy.partition_D(to))


@cute.jit
def scale_placed(x: cutlass.Constexpr, by: F32, square: cute.Tensor, mma: cute.TiledMma, thread: I32):
    """What our thread has placed in shared memory, in other units."""
    scale_parked(x, by)
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), F16), mma).get_slice(thread)
    back = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), F16), mma).get_slice(thread)
    half = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((64, 64)), F16)
    cute.copy(back, back.partition_S(square), back.retile(half))
    half.store((half.load().to(F32) * by).to(F16))
    cute.copy(copy, copy.retile(half), copy.partition_D(square))
    diagonal, at = x.smem.diagonal, 16 * x.wid + x.r
    if x.wid < 4 and x.c == x.r // 2:
        for i in cutlass.range_constexpr(2):
            diagonal[at + 8 * i] = (diagonal[at + 8 * i].to(F32) * by).to(F16)


@cute.jit
def store_dbeta(memory: cutlass.Constexpr, scalars: cutlass.Constexpr, t: I32, hv: I32, db: F32):
    if scalars.beta_bits == 32:
        memory.mDbeta[t, hv] = db
    else:
        memory.mDbeta16[t, hv] = db.to(BF16)


@cute.jit
def gate_of(
    memory: cutlass.Constexpr, scalars: cutlass.Constexpr, place: cutlass.Constexpr, channel: I32, variant: cutlass.Constexpr
):
    bias = cute.make_rmem_tensor((2,), F32)
    slope, unit, rate = F32(0.0), F32(0.0), F32(0.0)
    if cutlass.const_expr(variant.is_raw):
        for hi in cutlass.range_constexpr(2):
            bias[hi] = memory.mBias[place.hv, channel + 8 * hi]
        A_log = memory.mA[place.hv]
        slope = slope_of(A_log, variant.gate == "gate")
        unit = bounded_unit(scalars.lower) if cutlass.const_expr(variant.gate == "gate") else softplus_unit(A_log)
        rate = scalars.lower * slope * F32(-1.0 / LOG2_E) if cutlass.const_expr(variant.gate == "gate") else unit
    mGate, mDg = [cute.domain_offset((place.t0, 0), m[None, None, place.hv]) for m in (memory.mGate, memory.mDg)]
    return Gate(slope, unit, rate, bias, mGate, mDg)


class Products(NamedTuple):
    """What wgmma made, of our channels, in the chunk's units; [32] each."""

    aq: Any
    ak: Any
    h: Any  # [2]
    unit: Any


@cute.jit
def multiply(
    x: cutlass.Constexpr,
    tma: cutlass.Constexpr,
    memory: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    place: cutlass.Constexpr,
    wgmmas: cutlass.Constexpr,
    back_d: F32,
    back: F32,
):
    """All products with states and tokens; dv and dbeta leave, dP and dA are placed, and k, q and g are on their way."""
    smem, wid, lane, variant = x.smem, x.wid, x.lane, x.variant
    tid, _, _ = cute.arch.thread_idx()
    wg, thread, left = wid >> 2, tid % 128, x.left
    thr_s, thr_t = wgmmas.states.get_slice(thread), wgmmas.tokens.get_slice(thread)
    aS, aDs = [
        thr_s.make_fragment_A(thr_s.partition_A(cute.local_tile(swapped(t), (64, 128), (wg, 0)))) for t in (smem.S, smem.dS)
    ]
    aTokens = thr_t.make_fragment_A(thr_t.partition_A(smem.tokens))
    bTokens = thr_s.make_fragment_B(thr_s.partition_B(smem.tokens))
    ac, aq, ak = [thr_s.make_fragment_C(thr_s.partition_shape_C((64, 64))) for _ in range(3)]
    square = thr_t.make_fragment_C(thr_t.partition_shape_C((64, 64)))

    issue(wgmmas.tokens, square, aTokens[None, None, None, 2 * wg], bTokens[None, None, None, U], False)  # dP, or -XU
    cute.arch.mbarrier_wait(smem.full + Full.DS, 0)
    issue(wgmmas.states, ac, aDs, bTokens[None, None, None, U], False)
    mDv, mV = [cute.domain_offset((place.t0, 0), m[None, None, place.hv]) for m in (memory.mDv, memory.mV)]
    store_dv(x, mDv, mV, back_d, tid)
    cute.arch.mbarrier_wait(smem.full + Full.S, 0)
    h = dot_states(x, smem.S, smem.dS)
    warpgroup.wait_group(0)
    diagonal, row = diagonal_of(square, wid & 3, x.r), 16 * (wid & 3) + x.r
    if wg == 1 and not x.is_activated:
        for i in cutlass.range_constexpr(2):
            if x.c == x.r // 2 and row + 8 * i < left:
                slope = F32(1.0) - smem.beta[row + 8 * i] * cute.arch.rcp_approx(scalars.beta_top)  # of the sigmoid, but for b
                store_dbeta(memory, scalars, place.t0 + row + 8 * i, place.hv, -diagonal[i] * back * slope)
    post_largest(largest_of(square, largest_of(ac, F32(0.0))), smem.tops[None, 0], wid, lane)
    cute.arch.sync_threads()  # dS and U have been read
    unit = unit_of(find_largest(smem.tops[None, 0]))
    park_columns(x, ac, unit)
    place_square(square, unit, smem.scores[None, None, wg], wgmmas.tokens, thread)
    if wg == 0 and x.c == x.r // 2:
        for i in cutlass.range_constexpr(2):
            smem.diagonal[row + 8 * i] = (diagonal[i] * unit).to(F16)

    issue(wgmmas.states, aq, aS, bTokens[None, None, None, DO], False)
    issue(wgmmas.states, ak, aS, bTokens[None, None, None, DX], False)
    warpgroup.wait_group(0)
    post_largest(largest_of(ak, largest_of(aq, F32(0.0))), smem.tops[None, 1], wid, lane)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()  # all but what was placed here has been read
    if wid == 0:
        load_inputs(tma, smem, place, variant)
        prefetch_later(tma, smem, place.record, memory.mVec.shape[0] * memory.mVec.shape[1])
    most = find_largest(smem.tops[None, 1]) * unit
    if most > F32(ROOM):  # rows through the state are that much larger than all else
        by = unit_of(most)
        unit = unit * by
        scale_placed(x, by, smem.scores[None, None, wg], wgmmas.tokens, thread)
    for n in cutlass.range_constexpr(32):
        aq[n] = aq[n] * unit
        ak[n] = ak[n] * unit
    for hi in cutlass.range_constexpr(2):
        h[hi] = h[hi] * unit
    return Products(aq, ak, h, unit)


@cute.jit
def load_inputs(tma: cutlass.Constexpr, smem: cutlass.Constexpr, place: cutlass.Constexpr, variant: cutlass.Constexpr):
    """k, q and, where TMA reads them, gates."""
    tiles = 3 if cutlass.const_expr(variant.has_gate_tile) else 2
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(smem.full + Full.INPUTS, tiles * TILE_BYTES)
    loads = [(tma.k, smem.k, place.h, Full.INPUTS), (tma.q, smem.q, place.h, Full.INPUTS)]
    if cutlass.const_expr(variant.has_gate_tile):
        loads = [*loads, (tma.g, smem.g, place.hv, Full.INPUTS)]
    load_tiles(loads, place.t0, smem.full)


@cute.jit
def backward_chunk(
    tma: cutlass.Constexpr,
    memory: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    wgmmas: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    of_norms: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    place: cutlass.Constexpr,
):
    """One chunk by the eight warps of a block."""
    tid, _, _ = cute.arch.thread_idx()
    wid, lane, left = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx(), place.left
    r, c = lane >> 2, lane & 3
    smem = smem_layout()
    load_first(tma, smem, place, wid, variant)
    if tid < 64:
        smem.beta[tid] = memory.mVec[place.number, place.hv, BETA + tid]
    factor_s, factor_d = memory.mFactors[place.record, FACTOR_OF_S], memory.mFactors[place.record, FACTOR_OF_DS]
    back = inverse_of(factor_s) * inverse_of(factor_d)
    gate = gate_of(memory, scalars, place, 16 * wid + r, variant)
    is_activated, mParts = scalars.beta_top == F32(0.0), memory.mParts[place.record, None, None]
    x = Strip(smem, variant, mmas, wid, lane, r, c, left, scalars.scale, gate, is_activated, mParts)
    cute.arch.mbarrier_wait(smem.full + Full.TOKENS, 0)
    scale_do(smem, factor_d, tid, left)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    made = multiply(x, tma, memory, scalars, place, wgmmas, inverse_of(factor_d), back)
    back = back * inverse_of(made.unit)

    cute.arch.mbarrier_wait(smem.full + Full.INPUTS, 0)
    if left < 64:
        cleared = (smem.k, smem.q, smem.g) if cutlass.const_expr(variant.has_gate_tile) else (smem.k, smem.q)
        clear_past_end([(None, tile, None, None) for tile in cleared], tid, left)
        cute.arch.sync_threads()
    norms(Chunk(smem, variant, of_norms, wid >> 2, wid & 3, lane, r, c, left), F32(1.0))
    cute.arch.sync_threads()  # scores are in place, too
    w, sums = cute.make_rmem_tensor((32,), F32), cute.make_rmem_tensor((4,), F32)
    to_columns, behind = cute.make_rmem_tensor((32,), F32), [[F32(1.0), F32(1.0)] for _ in range(BLOCKS)]
    blocks_pass(x, made.aq, made.ak, w, made.h, to_columns, behind)
    last_pass(x, w, made.h, to_columns, behind, back, sums)
    mShares = memory.mShares[place.number, place.hv, None, None]
    if cutlass.const_expr(variant.is_raw and not variant.is_scalar):
        for i in cutlass.range_constexpr(4):
            total = sum_over(ROW, sums[i])
            if c == 0:
                mShares[i // 2, 16 * wid + r + 8 * (i % 2)] = total
    cute.arch.sync_threads()
    raws = [cute.domain_offset((place.t0, 0), m[None, None, place.h]) for m in (memory.mQ, memory.mK)]
    rows = [read_rows(raw, tid, left) for raw in raws]
    if tid < 64:
        if is_activated and tid < left:
            db = mParts[OF_V, tid]
            for i in cutlass.range_constexpr(8):
                db += back * mParts[OF_STRENGTHS + i, tid]
            store_dbeta(memory, scalars, place.t0 + tid, place.hv, db)
        if cutlass.const_expr(variant.is_scalar):
            finish_head_gates(x, mShares, tid)
    for i, (side, grad, plain, share, by) in enumerate(
        (
            (QUERIES, smem.dq, memory.mDq, memory.mShareQ, back * scalars.scale),
            (KEYS, smem.dk, memory.mDk, memory.mShareK, back),
        )
    ):
        to = [cute.domain_offset((place.t0, 0), m[None, None, head]) for m, head in ((plain, place.h), (share, place.hv))]
        out = RowsOut(grad, rows[i], smem.norms[None, side], *to, by, variant.is_normalised)
        store_through_norm(out, scalars.group, tid, left)
    if cutlass.const_expr(variant.has_gate_tile):
        store_dg(smem, gate.mDg, tid, left)
