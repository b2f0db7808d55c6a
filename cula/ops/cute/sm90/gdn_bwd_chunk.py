# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet's backward on Hopper, inside a chunk: every gradient that the recurrences do not make, a block for each chunk
and key head, which takes the value heads of that key in turn.

With S before the chunk and dS after it, both [dk, dv], U and dX of the chunk (`kda_bwd_recurrence.py`), unit keys and queries k
and q, write strengths b, and G the log decays summed from the chunk's start:

    f = e^G    r = e^{G_C - G}    D[t, i] = e^{G_t - G_i}, i <= t                        factors, all at most 1
    M1 = scale lower(do U^T) D        M2 = -b strict(dX U^T) D                           gradients of q k^T and of k k^T
    aq = scale f (do S^T)             ak = -b f (dX S^T)           ac = r (U dS^T)
    dq = sum of aq + (sum of M1) k    dk = sum of (ak + ac) + (sum of M1)^T q + (sum of M2 + M2^T) k      over value heads
    dv = b dX                         dbeta_t = <dX, v> - f <k, dX S^T> - sum_i (k k^T D strict(dX U^T))[t, i]
    W = strict(M1 q k^T + M2 k k^T), entry by entry
    w = row sums of W - column sums of W + <q, aq> + <k, ak> - <k, ac>
    dg_s = e^{G_C} <S, dS> + sum_t <k, ac>_t + sum_{t >= s} w_t

dbeta is <dX, E>, E = v - prediction = v - f k S - strict(k k^T D) U, written out: its three terms fall off products that are made
anyway, and nothing is divided by b. An entry of W is one float32 number in a row and in a column, so that what the suffix sum
adds and takes away again cancels.

Two warpgroups. A [64, 64] accumulator of either has rows of tokens. Squares: one has q k^T and M1, the other k k^T and M2, of all
value heads. Tiles: each has 64 channels dk of dq and dk. All of that stays in registers; what is summed over rows, columns and
channels of both meets in shared memory, where the first warp makes dg and dbeta of it; another makes the next head's vectors
meanwhile.

Units. S and U, dS and dX come scaled by powers of two, and each product is taken back to true ones as it is added up. One more
power of two takes the largest entry of M1 and M2 to between 1 and 2 when they become operands.

| shared memory                                                     | bytes |
|-------------------------------------------------------------------|-------|
| k, q, as operands                                                 | 32 K  |
| S, dS                                                             | 64 K  |
| do, U, dX, two stages; then M1 and M2, dq and dk on their way out | 96 K  |
| vectors of tokens, two stages; inverse norms, sums                | 9 K   |
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.memory import SmemAllocator

from cula.core.constants import LOG2_E
from cula.ops.cute.common.fp16_window import inverse_of
from cula.ops.cute.common.fragments import flat, shared_at
from cula.ops.cute.common.gate import exp2, inverse_norm, sigmoid, to_log2
from cula.ops.cute.common.gdn_vectors import GONE, scan, softplus2
from cula.ops.cute.common.kda_intra import load_tiles
from cula.ops.cute.common.lanes import COLUMN, HALF_WARP, ROW, WARP, sum_over, sums_over
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
)
from cula.ops.cute.common.varlen_index import chunk_of_block
from cula.ops.cute.gdn_bwd_abi import OF_A, OF_BIAS, SHARES
from cula.ops.cute.kda_abi import BETA, STATE, TILE_BYTES
from cula.ops.cute.kda_bwd_abi import FACTOR_OF_DS, FACTOR_OF_S
from cula.ops.cute.sm90.kda_bwd_chunk import (
    find_largest,
    largest_of,
    load_records,
    post_largest,
    prefetch_tiles,
    read_piece,
    read_rows,
    unit_of,
    write_piece,
)

THREADS = 256
STAGES = 2  # value heads whose tokens are there
AHEAD = 132  # blocks that a GPU has at once
VECTOR_WARP = 4  # makes vectors of tokens
DO, U, DX = 0, 1, 2  # tiles of tokens
K, Q = 0, 1


class Full(enum.IntEnum):
    """mbarriers that say what has come."""

    KQ = 0
    STATES = 1
    TOKENS = 2  # the first of `STAGES`


class Vector(enum.IntEnum):
    """Numbers of tokens of a value head."""

    SUM = 0  # G, in log2
    SINCE = 1  # f
    UNTIL = 2  # r
    STRENGTH = 3  # b
    DECAY = 4  # g in log2
    SLOPE = 5  # of g by the raw gate


class Part(enum.IntEnum):
    """What the warpgroups have summed over their channels or columns, by tokens."""

    W = 0  # all of w but column sums
    BETA = 1  # of dbeta
    BEHIND = 2  # <k, ac>


class ChunkTma(NamedTuple):
    """What TMA loads."""

    q: Tma
    k: Tma
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
    mGate: Any  # [T, HV]
    mA: Any  # [HV]
    mBias: Any  # [HV, 128], all of a head alike
    mV: Any  # [T, 128, HV]
    mDq: Any  # [T, 128, H]
    mDk: Any
    mDv: Any  # [T, 128, HV]
    mDg: Any  # [T, HV]
    mDbeta: Any  # [T, HV], as float32
    mDbeta16: Any  # and as bfloat16
    mShares: Any  # [chunks, HV, 2]


class ChunkScalars(NamedTuple):
    """Numbers of a call."""

    scale: Any
    beta_top: Any
    beta_bits: Any
    length: Any
    halvings: Any
    group: Any  # value heads of each head of q and k


class Mmas(NamedTuple):
    """Products of a warpgroup from shared memory, [64, 64] each, by how their operands lie."""

    rows: Any  # both with rows of what is summed over
    right: Any  # B with columns of it
    both: Any  # A and B


def chunk_mmas() -> Mmas:
    source, majors = warpgroup.OperandSource.SMEM, ((K_MAJOR, K_MAJOR), (K_MAJOR, MN_MAJOR), (MN_MAJOR, MN_MAJOR))
    ops = [warpgroup.MmaF16BF16Op(F16, F32, (64, 64, 16), source, a, b) for a, b in majors]
    return Mmas(*[cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1)) for op in ops])


class SmemLayout(NamedTuple):
    """Arrays in shared memory; see the table above."""

    kq: Any  # [64, 128, 2]
    raw_k: Any  # as they come, in bfloat16
    raw_q: Any
    S: Any  # [dv, dk]
    dS: Any
    tokens: Any  # [64, 128, 3 STAGES]: do, U, dX
    raw_do: Any  # [64, 128, 3 STAGES]: the same as bfloat16
    squares: Any  # [64, 64, 2]: M1, M2
    out: Any  # [64, 128, 2]: dq, dk in bfloat16
    vectors: Any  # [64, Vector, STAGES]
    inverse: Any  # [64, 2]: 1 / |k|, 1 / |q|
    strengths: Any  # [64]: <dX, v>
    columns: Any  # [64, 8 warps]: column sums of W
    parts: Any  # [64, 2 warpgroups, Part]
    dots: Any  # [64, 2 warpgroups, 2]: <k, dk> and <q, dq>
    warps: Any  # [8]
    full: Any  # mbarriers


def smem_layout() -> SmemLayout:
    smem = SmemAllocator()
    pair, six = tile_layout(64, 128, 2, F16), tile_layout(64, 128, 3 * STAGES, F16)
    kq, state = allocate_tile(smem, pair, F16), tile_layout(128, 128, dtype=F16)
    S, dS = [allocate_tile(smem, state, F16) for _ in range(2)]
    tokens = allocate_tile(smem, six, F16)
    raw_kq, raw = tile_at(kq, tile_layout(64, 128, 2), BF16), tile_at(tokens, tile_layout(64, 128, 3 * STAGES), BF16)

    def numbers(*shape: int) -> Any:
        return smem.allocate_tensor(F32, cute.make_layout(shape), byte_alignment=16)

    return SmemLayout(
        kq=kq,
        raw_k=raw_kq[None, None, K],
        raw_q=raw_kq[None, None, Q],
        S=S,
        dS=dS,
        tokens=tokens,
        raw_do=raw,
        squares=tile_at(tokens, tile_layout(64, 64, 2, F16), F16),
        out=tile_at(tokens[None, None, 3], tile_layout(64, 128, 2), BF16),
        vectors=numbers(64, len(Vector), STAGES),
        inverse=numbers(64, 2),
        strengths=numbers(64),
        columns=numbers(64, 8),
        parts=numbers(64, 2, len(Part)),
        dots=numbers(64, 2, 2),
        warps=numbers(8),
        full=smem.allocate_array(cutlass.Int64, Full.TOKENS + STAGES),
    )


class Place(NamedTuple):
    """Where a chunk is."""

    h: Any  # head of q and k
    number: Any  # of the chunk
    t0: Any  # first token
    left: Any  # tokens from there to the sequence's end; more than 64 are later chunks'


class Thread(NamedTuple):
    """Which of a block's threads this is. Of a [64, 64] accumulator it has rows `row` and `row` + 8, and columns 8 j + 2 c and
    + 1."""

    tid: Any
    wid: Any
    lane: Any
    wg: Any  # warpgroup
    row: Any
    c: Any


class Block(NamedTuple):
    """What the steps of a block have in common."""

    tma: Any
    memory: Any
    scalars: Any
    mmas: Any
    variant: Any
    smem: Any
    place: Any
    me: Any

    def record(self, j: Any) -> Any:
        """Of the j-th value head in the workspace."""
        return self.place.number * self.memory.mVec.shape[1] + self.value_head(j)

    def value_head(self, j: Any) -> Any:
        return self.place.h * self.scalars.group + j

    def vectors(self, j: Any) -> Any:
        """[64, Vector], of the j-th value head."""
        return self.smem.vectors[None, None, j % STAGES]


class Sums(NamedTuple):
    """What a thread adds up over the value heads, [32] each."""

    dq: Any
    dk: Any
    square: Any  # of M1, or of M2
    scores: Any  # q k^T, or k k^T: not a sum, but there from the first head to the last


@cute.kernel
def chunk_kernel(tma: ChunkTma, memory: ChunkMemory, scalars: ChunkScalars, mmas: Mmas, variant: cutlass.Constexpr):
    """A block for each (key head, number of a chunk)."""
    cute.arch.griddepcontrol_wait()  # for the kernel before: this one may be launched before it has ended
    h, number, begin, start, tokens = chunk_of_block(memory.mCu, scalars.length, scalars.halvings)
    tid = cute.arch.thread_idx()[0]
    if start < tokens:
        wid, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        me = Thread(tid, wid, lane, wid >> 2, 16 * (wid & 3) + (lane >> 2), lane & 3)
        place = Place(h, number, begin + start, tokens - start)
        backward_chunk(Block(tma, memory, scalars, mmas, variant, smem_layout(), place, me))
    elif cutlass.const_expr(variant.is_raw):  # shares of a number that no chunk has
        for j in cutlass.range(tid, SHARES * scalars.group, THREADS, unroll=1):
            memory.mShares[number, h * scalars.group + j // SHARES, j % SHARES] = F32(0.0)


@cute.jit
def backward_chunk(x: cutlass.Constexpr):
    """One chunk and key head by the eight warps of a block."""
    smem, me, group = x.smem, x.me, cute.arch.make_warp_uniform(x.scalars.group)
    if me.wid == 0:
        with cute.arch.elect_one():
            for which in range(Full.TOKENS + STAGES):
                cute.arch.mbarrier_init(smem.full + which, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if me.wid == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(smem.full + Full.KQ, 2 * TILE_BYTES)
        of_keys = [(x.tma.k, smem.raw_k, x.place.h, Full.KQ), (x.tma.q, smem.raw_q, x.place.h, Full.KQ)]
        load_tiles(of_keys, x.place.t0, smem.full)
        load_tokens(x, I32(0))
        load_states(x, I32(0))
        if group > 1:
            load_tokens(x, I32(1))
    elif me.wid == VECTOR_WARP:
        write_vectors(x, I32(0))
    factors = cute.make_rmem_tensor((2,), F32)
    read_factors(x, I32(0), factors)
    cute.arch.mbarrier_wait(smem.full + Full.KQ, 0)
    make_operands(x)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()

    thr = x.mmas.rows.get_slice(me.tid % 128)
    sums = Sums(*[thr.make_fragment_C(thr.partition_shape_C((64, 64))) for _ in range(4)])
    for t in sums[:3]:
        t.fill(0.0)
    aKq, bKq = thr.make_fragment_A(thr.partition_A(smem.kq)), thr.make_fragment_B(thr.partition_B(smem.kq))
    issue(x.mmas.rows, sums.scores, aKq[None, None, None, 1 - me.wg], bKq[None, None, None, K], False)
    warpgroup.wait_group(0)
    for j in cutlass.range(group, unroll=1):
        back = inverse_of(factors[0]) * inverse_of(factors[1])
        one_head(x, sums, j, factors[1], back)
        if j + 1 < group:
            read_factors(x, j + 1, factors)
        if me.wid == 0:  # all have read the states, and the tokens of this head
            if j + 1 < group:
                load_states(x, j + 1)
            if j + 2 < group:
                load_tokens(x, j + 2)
            if j == 0:
                prefetch_later(x)
            finish_head(x, j, back)
        elif me.wid == VECTOR_WARP and j + 1 < group:
            write_vectors(x, j + 1)
        cute.arch.sync_threads()  # vectors and sums have been read
    finish_keys(x, sums)


@cute.jit
def read_factors(x: cutlass.Constexpr, j: I32, factors: cute.Tensor):
    """What S and U, dS and dX of the j-th value head are scaled by; nobody waits for them yet."""
    for i, which in enumerate((FACTOR_OF_S, FACTOR_OF_DS)):
        factors[i] = x.memory.mFactors[x.record(j), which]


# Tiles come


@cute.jit
def load_tokens(x: cutlass.Constexpr, j: I32):
    """do, U and dX of the j-th value head. By a warp."""
    stage = j % STAGES
    bar, record = Full.TOKENS + stage, x.record(j)
    tiles = [x.smem.tokens[None, None, 3 * stage + i] for i in range(3)]
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(x.smem.full + bar, 3 * TILE_BYTES)
    load_tiles([(x.tma.do, x.smem.raw_do[None, None, 3 * stage + DO], x.value_head(j), bar)], x.place.t0, x.smem.full)
    load_records([(x.tma.U, tiles[U], (64, 128), record, bar), (x.tma.dX, tiles[DX], (64, 128), record, bar)], x.smem.full)


@cute.jit
def load_states(x: cutlass.Constexpr, j: I32):
    """S and dS likewise."""
    record = x.record(j)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(x.smem.full + Full.STATES, 2 * 2 * STATE)
    load_records(
        [(x.tma.dS, x.smem.dS, (128, 128), record, Full.STATES), (x.tma.S, x.smem.S, (128, 128), record, Full.STATES)],
        x.smem.full,
    )


@cute.jit
def prefetch_later(x: cutlass.Constexpr):
    """What the block that comes behind this one, or one like it, begins with, to the L2 cache. Blocks are in the order of
    records. Its tokens are where they are looked for if sequences are whole chunks, and near there if not."""
    place, smem, tma, HV = x.place, x.smem, x.tma, x.memory.mVec.shape[1]
    H = HV // x.scalars.group
    record, of_tokens = x.record(0) + AHEAD * x.scalars.group, smem.tokens[None, None, U]
    if record < x.memory.mVec.shape[0] * HV:
        h, chunks = (place.h + AHEAD) % H, (place.h + AHEAD) // H
        of_records = ((tma.U, of_tokens, (64, 128)), (tma.dX, of_tokens, (64, 128)))
        of_records += ((tma.S, smem.S, (128, 128)), (tma.dS, smem.dS, (128, 128)))
        tiles = [(of, s, cute.local_tile(of.coordinates, shape, (record, 0))) for of, s, shape in of_records]
        of_heads = ((tma.k, smem.raw_k, h), (tma.q, smem.raw_q, h), (tma.do, smem.raw_do[None, None, DO], h * x.scalars.group))
        for of, s, head in of_heads:
            of_head = cute.domain_offset((place.t0 + 64 * chunks, 0), of.coordinates[None, None, head])
            tiles.append((of, s, cute.local_tile(of_head, (64, 128), (0, 0))))
        prefetch_tiles(tiles)


# Rows by threads: sixteen of them have a row of 128 channels


@cute.jit
def make_operands(x: cutlass.Constexpr):
    """Keys and queries rounded to fp16, in place, and before that normalised, with their inverse norms, where they do not come
    so; zeros past the end."""
    tid, smem = x.me.tid, x.smem
    for p in cutlass.range(4, unroll=1):
        row = 16 * p + tid // 16
        for side, raw in ((K, smem.raw_k), (Q, smem.raw_q)):
            n, square = read_piece(raw, row, tid), F32(0.0)
            if row >= x.place.left:
                n.fill(0.0)
            inverse = F32(1.0)
            if cutlass.const_expr(x.variant.is_normalised):
                for e in cutlass.range_constexpr(8):
                    square += n[e] * n[e]
                inverse = inverse_norm(sum_over(HALF_WARP, square))
                for e in cutlass.range_constexpr(8):
                    n[e] = n[e] * inverse
            write_piece(n, smem.kq[None, None, side], row, tid)
            if tid % 16 == 0:
                smem.inverse[row, side] = inverse


@cute.jit
def scale_do(x: cutlass.Constexpr, stage: I32, factor: F32):
    """do as fp16, in the gradients' scale; zeros past the end, where it is the next sequence's."""
    tid, at = x.me.tid, 3 * stage + DO
    for p in cutlass.range(4, unroll=2):
        row = 16 * p + tid // 16
        rows = read_piece(x.smem.raw_do[None, None, at], row, tid)
        for e in cutlass.range_constexpr(8):
            rows[e] = rows[e] * factor
        if row >= x.place.left:
            rows.fill(0.0)
        write_piece(rows, x.smem.tokens[None, None, at], row, tid)


@cute.jit
def read_values(x: cutlass.Constexpr, j: I32):
    """Our pieces of v of the j-th value head; nobody waits for them yet."""
    mV = cute.domain_offset((x.place.t0, 0), x.memory.mV[None, None, x.value_head(j)])
    return read_rows(mV, x.me.tid, x.place.left)


@cute.jit
def store_dv(x: cutlass.Constexpr, j: I32, values: cute.Tensor, back: F32):
    """dv = b dX, and <dX, v>. What is kept of dX is -dX, and `back` takes it to true units."""
    tid, smem, left, hv = x.me.tid, x.smem, x.place.left, x.value_head(j)
    mDv = cute.domain_offset((x.place.t0, 0), x.memory.mDv[None, None, hv])
    dX = smem.tokens[None, None, 3 * (j % STAGES) + DX]
    for p in cutlass.range_constexpr(4):
        row = 16 * p + tid // 16
        v, dx, dot = cute.make_rmem_tensor((8,), F32), read_piece(dX, row, tid), F32(0.0)
        v.store(flat(values, 8 * p, 8).load().to(F32))
        b = x.vectors(j)[row, Vector.STRENGTH]
        for e in cutlass.range_constexpr(8):
            dx[e] = -back * dx[e]
            dot += dx[e] * v[e]
            dx[e] = b * dx[e]
        dot = sum_over(HALF_WARP, dot)
        if tid % 16 == 0:
            smem.strengths[row] = dot
        if row < left:
            write_piece(dx, mDv, row, tid)


# Numbers of tokens: lane l has tokens 2 l and 2 l + 1


class Gate(NamedTuple):
    """A gate's log2 decay g2 and raw value with its bias, of two tokens."""

    g2: Any
    z: Any
    a: Any  # e^A_log


@cute.jit
def gates_of(x: cutlass.Constexpr, hv: I32):
    """Of our two tokens; no decay past the end."""
    g2, z, lane = cute.make_rmem_tensor((2,), F32), cute.make_rmem_tensor((2,), F32), x.me.lane
    a, bias = F32(1.0), F32(0.0)
    if cutlass.const_expr(x.variant.is_raw):
        a, bias = cute.math.exp2(to_log2(x.memory.mA[hv])), x.memory.mBias[hv, 0]
    for i in cutlass.range_constexpr(2):
        token = 2 * lane + i
        z[i] = x.memory.mGate[x.place.t0 + cutlass.min(token, x.place.left - 1), hv].to(F32) + bias
        if cutlass.const_expr(x.variant.is_raw):
            g2[i] = -a * softplus2(z[i])
        else:
            g2[i] = to_log2(z[i])
        g2[i] = cute.arch.fmax(g2[i], F32(GONE)) if token < x.place.left else F32(0.0)
    return Gate(g2, z, a)


@cute.jit
def write_vectors(x: cutlass.Constexpr, j: I32):
    """Those of the j-th value head. By a warp."""
    hv, lane, vectors = x.value_head(j), x.me.lane, x.vectors(j)
    gate = gates_of(x, hv)
    g2 = gate.g2
    before, behind = scan(g2[0] + g2[1], True), scan(g2[0] + g2[1], False)
    for i in cutlass.range_constexpr(2):
        token = 2 * lane + i
        before += g2[i]
        vectors[token, Vector.SUM] = before
        vectors[token, Vector.SINCE] = exp2(before)
        vectors[token, Vector.UNTIL] = exp2(behind + g2[1] if i == 0 else behind)
        vectors[token, Vector.STRENGTH] = x.memory.mVec[x.place.number, hv, BETA + token]
        if cutlass.const_expr(x.variant.is_raw):
            vectors[token, Vector.DECAY] = g2[i]
            vectors[token, Vector.SLOPE] = -gate.a * sigmoid(gate.z[i])


# A value head


@cute.jit
def add_square(x: cutlass.Constexpr, j: I32, square: cute.Tensor, sums: cutlass.Constexpr, back: F32):
    """do U^T, or -dX U^T, as a share of M1 or M2 and of the sums over W; returns those over rows [2], without and with the factor
    of their row."""
    smem, me, vectors = x.smem, x.me, x.vectors(j)
    rows, weighted, by = [cute.make_rmem_tensor((2,), F32) for _ in range(3)]
    columns = cute.make_rmem_tensor((16,), F32)
    rows.fill(0.0)
    columns.fill(0.0)
    until = cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        by[i] = back * (x.scalars.scale if me.wg == 0 else vectors[me.row + 8 * i, Vector.STRENGTH])
        until[i] = vectors[me.row + 8 * i, Vector.SUM]
    for n in cutlass.range_constexpr(32):
        i, column = n // 2 % 2, 8 * (n // 4) + 2 * me.c + n % 2
        t = me.row + 8 * i
        decay = exp2(cutlass.min(until[i] - vectors[column, Vector.SUM], F32(0.0)))
        entry = decay * square[n] if column < t or (column == t and me.wg == 0) else F32(0.0)
        sums.square[n] = sums.square[n] + by[i] * entry
        pair = entry * sums.scores[n] if column < t else F32(0.0)
        rows[i] = rows[i] + pair
        at = 2 * (n // 4) + n % 2
        columns[at] = columns[at] + by[i] * pair
    for i in cutlass.range_constexpr(2):
        weighted[i] = by[i] * rows[i]
    for at in cutlass.range_constexpr(16):
        total = sum_over(COLUMN, columns[at])
        if me.lane < 4:
            smem.columns[8 * (at // 2) + 2 * me.c + at % 2, me.wid] = total
    return rows, weighted


@cute.jit
def normed(x: cutlass.Constexpr, side: cutlass.Constexpr):
    """k or q at the places of an accumulator, of our warpgroup's channels, in fp16."""
    mma, thread = x.mmas.rows, x.me.tid % 128
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), F16), mma).get_slice(thread)
    half = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((64, 64)), F16)
    tile = cute.local_tile(x.smem.kq[None, None, side], (64, 64), (0, x.me.wg))
    cute.copy(copy, copy.partition_S(tile), copy.retile(half))
    return half


@cute.jit
def scale_and_dot(x: cutlass.Constexpr, acc: cute.Tensor, to: cute.Tensor, n: cute.Tensor, by: cute.Tensor):
    """to += by acc, row by row; returns the dots of our rows of n and of acc [2], over our channels, without `by`."""
    dots = cute.make_rmem_tensor((2,), F32)
    dots.fill(0.0)
    for e in cutlass.range_constexpr(32):
        i = e // 2 % 2
        dots[i] = dots[i] + n[e].to(F32) * acc[e]
        to[e] = to[e] + by[i] * acc[e]
    return dots


@cute.jit
def dot_states(x: cutlass.Constexpr):
    """<S, dS>, what each warp has of it: entries are where they are in both."""
    total, tid, warps = F32(0.0), x.me.tid, x.smem.warps
    for n in cutlass.range(8, unroll=4):
        two = []
        for t in (x.smem.S, x.smem.dS):
            raw, wide = cute.make_rmem_tensor((8, 1), F16), cute.make_rmem_tensor((8, 1), F32)
            cute.autovec_copy(shared_at(I32(t.iterator.toint()) + 16 * tid + 4096 * n, F16, 8, 16), raw)
            wide.store(raw.load().to(F32))
            two.append(wide)
        for e in cutlass.range_constexpr(8):
            total += two[0][e] * two[1][e]
    total = sum_over(WARP, total)
    if x.me.lane == 0:
        warps[x.me.wid] = total


@cute.jit
def one_head(x: cutlass.Constexpr, sums: cutlass.Constexpr, j: I32, factor_d: F32, back: F32):
    """All products of a value head; ends with a barrier, behind which its sums are in shared memory."""
    smem, me, mmas, vectors = x.smem, x.me, x.mmas, x.vectors(j)
    stage, thread = j % STAGES, me.tid % 128
    values = read_values(x, j)
    cute.arch.mbarrier_wait(smem.full + Full.TOKENS + stage, j // STAGES % 2)
    scale_do(x, stage, factor_d)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()

    thr, thr_s = mmas.rows.get_slice(thread), mmas.right.get_slice(thread)
    aTokens, bTokens = thr.make_fragment_A(thr.partition_A(smem.tokens)), thr.make_fragment_B(thr.partition_B(smem.tokens))
    bS, bDs = [
        thr_s.make_fragment_B(thr_s.partition_B(cute.local_tile(swapped(t), (64, 128), (me.wg, 0)))) for t in (smem.S, smem.dS)
    ]
    square, aq, ak, ac = [thr.make_fragment_C(thr.partition_shape_C((64, 64))) for _ in range(4)]
    of = lambda t, which: t[None, None, None, 3 * stage + which]
    issue(mmas.rows, square, aTokens[None, None, None, 3 * stage + 2 * me.wg], of(bTokens, U), False)
    cute.arch.mbarrier_wait(smem.full + Full.STATES, j % 2)
    issue(mmas.right, aq, of(aTokens, DO), bS, False)
    store_dv(x, j, values, inverse_of(factor_d))
    dot_states(x)
    warpgroup.wait_group(1)
    rows, part = add_square(x, j, square, sums, back)
    issue(mmas.right, ak, of(aTokens, DX), bS, False)
    by_q, by_k, by_c, strengths = [cute.make_rmem_tensor((2,), F32) for _ in range(4)]
    for i in cutlass.range_constexpr(2):
        t = me.row + 8 * i
        strengths[i] = vectors[t, Vector.STRENGTH]
        by_q[i] = x.scalars.scale * back * vectors[t, Vector.SINCE]
        by_k[i] = strengths[i] * back * vectors[t, Vector.SINCE]
        by_c[i] = back * vectors[t, Vector.UNTIL]
    warpgroup.wait_group(1)
    of_q = scale_and_dot(x, aq, sums.dq, normed(x, Q), by_q)
    issue(mmas.right, ac, of(aTokens, U), bDs, False)
    k = normed(x, K)
    warpgroup.wait_group(1)
    of_k = scale_and_dot(x, ak, sums.dk, k, by_k)
    warpgroup.wait_group(0)
    of_c = scale_and_dot(x, ac, sums.dk, k, by_c)
    for i in cutlass.range_constexpr(2):
        t = me.row + 8 * i
        read, kept = back * vectors[t, Vector.SINCE] * of_k[i], by_c[i] * of_c[i]
        w = part[i] + by_q[i] * of_q[i] + strengths[i] * read - kept
        beta = read + (back * rows[i] if me.wg == 1 else F32(0.0))
        sums_of_row = sums_over(ROW, w, beta, kept)
        if me.c == 0:
            for which in Part:
                smem.parts[t, me.wg, which] = sums_of_row[which]
    cute.arch.fence_proxy("async.shared", space="cta")  # what comes next into these places comes by TMA
    cute.arch.sync_threads()


@cute.jit
def finish_head(x: cutlass.Constexpr, j: I32, back: F32):
    """dg and dbeta of a value head from what all have summed. By a warp."""
    smem, lane = x.smem, x.me.lane
    w, behind = cute.make_rmem_tensor((2,), F32), F32(0.0)
    for i in cutlass.range_constexpr(2):
        t = 2 * lane + i
        w[i] = smem.parts[t, 0, Part.W] + smem.parts[t, 1, Part.W]
        behind += smem.parts[t, 0, Part.BEHIND] + smem.parts[t, 1, Part.BEHIND]
        for n in cutlass.range_constexpr(8):
            w[i] = w[i] - smem.columns[t, n]
        store_dbeta(x, j, t, smem.strengths[t] + smem.parts[t, 0, Part.BETA] + smem.parts[t, 1, Part.BETA])
    behind = sum_over(WARP, behind)
    through = smem.warps[0]
    for n in cutlass.range_constexpr(1, 8):
        through += smem.warps[n]
    later = behind + scan(w[0] + w[1], False)
    later += back * x.vectors(j)[63, Vector.SINCE] * through
    dg = cute.make_rmem_tensor((2,), F32)
    dg[1] = later + w[1]
    dg[0] = dg[1] + w[0]
    store_dg(x, j, dg)


@cute.jit
def store_dbeta(x: cutlass.Constexpr, j: I32, t: I32, db: F32):
    """From the gradient of b to that of beta."""
    b, top, memory, hv = x.vectors(j)[t, Vector.STRENGTH], x.scalars.beta_top, x.memory, x.value_head(j)
    if top > F32(0.0):  # beta is raw
        db = db * (b * (F32(1.0) - b * cute.arch.rcp_approx(top)))
    if t < x.place.left:
        if x.scalars.beta_bits == 32:
            memory.mDbeta[x.place.t0 + t, hv] = db
        else:
            memory.mDbeta16[x.place.t0 + t, hv] = db.to(BF16)


@cute.jit
def store_dg(x: cutlass.Constexpr, j: I32, dg: cute.Tensor):
    """From the gradients of log decays to those of raw gates, and the chunk's shares of their parameters."""
    of_bias, of_a, memory, hv, vectors = F32(0.0), F32(0.0), x.memory, x.value_head(j), x.vectors(j)
    for i in cutlass.range_constexpr(2):
        t = 2 * x.me.lane + i
        if t < x.place.left:
            d = dg[i]
            if cutlass.const_expr(x.variant.is_raw):
                d = d * vectors[t, Vector.SLOPE]
                of_bias += d
                of_a += dg[i] * (vectors[t, Vector.DECAY] * F32(1.0 / LOG2_E))
            memory.mDg[x.place.t0 + t, hv] = d.to(x.variant.g_type)
    if cutlass.const_expr(x.variant.is_raw):
        of_bias, of_a = sums_over(WARP, of_bias, of_a)
        if x.me.lane == 0:
            memory.mShares[x.place.number, hv, OF_BIAS] = of_bias
            memory.mShares[x.place.number, hv, OF_A] = of_a


# The key head


@cute.jit
def place_tile(acc: cute.Tensor, to: cute.Tensor, mma: cute.TiledMma, thread: I32):
    """A [64, 64] accumulator to shared memory, rounded."""
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), to.element_type), mma).get_slice(thread)
    half = cute.make_rmem_tensor_like(acc, to.element_type)
    half.store(acc.load().to(to.element_type))
    cute.copy(copy, copy.retile(half), copy.partition_D(to))


@cute.jit
def finish_keys(x: cutlass.Constexpr, sums: cutlass.Constexpr):
    """dq and dk: the products with M1 and M2, then through the norms."""
    smem, me, mmas, thread = x.smem, x.me, x.mmas, x.me.tid % 128
    post_largest(largest_of(sums.square, F32(0.0)), smem.warps, me.wid, me.lane)
    cute.arch.sync_threads()
    unit = unit_of(find_largest(smem.warps))
    for n in cutlass.range_constexpr(32):
        sums.square[n] = sums.square[n] * unit
    place_tile(sums.square, smem.squares[None, None, me.wg], mmas.rows, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()

    thr, thr_t = mmas.right.get_slice(thread), mmas.both.get_slice(thread)
    aM, aMt = thr.make_fragment_A(thr.partition_A(smem.squares)), thr_t.make_fragment_A(thr_t.partition_A(swapped(smem.squares)))
    b = thr.make_fragment_B(thr.partition_B(cute.local_tile(swapped(smem.kq), (64, 64, 2), (me.wg, 0, 0))))
    dq, dk = [thr.make_fragment_C(thr.partition_shape_C((64, 64))) for _ in range(2)]
    issue(mmas.right, dq, aM[None, None, None, 0], b[None, None, None, K], False)
    issue(mmas.both, dk, aMt[None, None, None, 0], b[None, None, None, Q], False)
    issue(mmas.right, dk, aM[None, None, None, 1], b[None, None, None, K], True)
    issue(mmas.both, dk, aMt[None, None, None, 1], b[None, None, None, K], True)
    warpgroup.wait_group(0)
    back = inverse_of(unit)
    for n in cutlass.range_constexpr(32):
        dq[n] = sums.dq[n] + back * dq[n]
        dk[n] = sums.dk[n] + back * dk[n]
    through_norms(x, dk, dq)
    cute.arch.sync_threads()
    for side, m in ((K, x.memory.mDk), (Q, x.memory.mDq)):
        to = cute.domain_offset((x.place.t0, 0), m[None, None, x.place.h])
        for p in cutlass.range(4, unroll=4):
            row = 16 * p + me.tid // 16
            if row < x.place.left:
                cute.autovec_copy(
                    cute.local_tile(smem.out[None, None, side], (1, 8), (row, me.tid % 16)),
                    cute.local_tile(to, (1, 8), (row, me.tid % 16)),
                )


@cute.jit
def through_norms(x: cutlass.Constexpr, dk: cute.Tensor, dq: cute.Tensor):
    """From the gradient of n = x / |x|: (dn - n <n, dn>) / |x|, to shared memory; as it is, where x comes normalised."""
    smem, me = x.smem, x.me
    if cutlass.const_expr(x.variant.is_normalised):
        for side, d in ((K, dk), (Q, dq)):
            n, dots = normed(x, side), cute.make_rmem_tensor((2,), F32)
            dots.fill(0.0)
            for e in cutlass.range_constexpr(32):
                dots[e // 2 % 2] = dots[e // 2 % 2] + n[e].to(F32) * d[e]
            for i in cutlass.range_constexpr(2):
                total = sum_over(ROW, dots[i])
                if me.c == 0:
                    smem.dots[me.row + 8 * i, me.wg, side] = total
    cute.arch.sync_threads()  # of the other half, too; and nobody reads any more where they go
    for side, d in ((K, dk), (Q, dq)):
        if cutlass.const_expr(x.variant.is_normalised):
            n = normed(x, side)
            for i in cutlass.range_constexpr(2):
                t = me.row + 8 * i
                along, inverse = smem.dots[t, 0, side] + smem.dots[t, 1, side], smem.inverse[t, side]
                for e in cutlass.range_constexpr(16):
                    at = 4 * (e // 2) + 2 * i + e % 2
                    d[at] = inverse * (d[at] - n[at].to(F32) * along)
        place_tile(d, cute.local_tile(smem.out[None, None, side], (64, 64), (0, me.wg)), x.mmas.rows, me.tid % 128)
