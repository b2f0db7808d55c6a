# SPDX-License-Identifier: Apache-2.0
"""The steps of `kda_bwd_chunk.py`, by one warp with sixteen channels and all tokens of a chunk, sixteen at a time.

Arrays [16 channels, 16 tokens] are fragments of mma.sync: thread (r, c) = (lane / 4, lane % 4) holds channels r + 8 hi and tokens
2 c + ci + 8 half at e = ci + 2 hi + 4 half. As they lie they are accumulators and A operands.

Decays are products, never differences of sums: with a_t <= 1 the decay of a token, the factor between a token and any point
of its block is a product of a's, so that gates of any strength keep their relative accuracy. Lanes exchange the products of
their two tokens (`x1`) and of two lanes (`x2`); everything else follows.

Pairs i < t inside a block belong to one of four levels: t in the second and i in the first half of an aligned block of 2 s rows,
s = 8, 4, 2, 1. Rows and columns of a level are different tokens, so that one array of factors serves both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from cula.core.constants import LOG2_E
from cula.ops.cute.common.fragments import as_a, corner, flat, lane_address, load_matrix, shared_at, store_matrix, widen
from cula.ops.cute.common.gate import exp2
from cula.ops.cute.common.tiles import BF16, F16, F32, I32

HALF = 8192  # bytes of half of the columns of a tile [64, 128] in 16 bits
SWAP = (0, 1, 4, 5, 2, 3, 6, 7)  # from where `load_matrix`, transposed, puts values to where an accumulator has them, and back
LEVELS = (8, 4, 2, 1)
LARGEST_EXPONENT = 100.0  # of 2 in an activation: beyond, it is flat in float32, and its square would be infinite


class ChunkMmas(NamedTuple):
    """Products of one warp, by their depth."""

    k16: Any
    k8: Any


def chunk_mmas() -> ChunkMmas:
    return ChunkMmas(*[cute.make_tiled_mma(warp.MmaF16BF16Op(F16, F32, (16, 8, k)), (1, 1, 1)) for k in (16, 8)])


class Strip(NamedTuple):
    """Sixteen channels of a chunk as one warp sees them."""

    smem: Any
    variant: Any
    mmas: ChunkMmas
    wid: Any  # which sixteen
    lane: Any
    r: Any
    c: Any
    left: Any  # tokens
    scale: Any
    gate: Any  # `Gate`
    parked: Any = None  # takes what is parked to the chunk's units

    def at(self, tile: Any) -> Any:
        """The address of our channels in a 16-bit tile [64, 128], for the first block of tokens; see `lane_address`."""
        return (lane_address(tile, 0, self.lane) + HALF * (self.wid >> 2)) ^ (32 * (self.wid & 3))


class Gate(NamedTuple):
    """What a gate's activation depends on."""

    slope: Any  # -a log2(e)
    unit: Any  # 1 / lower in log2
    lower: Any
    strength: Any  # a
    bias: Any  # [2], of our channels
    mGate: Any  # [T, 128] of a head from the chunk's first token on, where gates are float32
    mDg: Any


class Decays(NamedTuple):
    """Decays of a block."""

    a: Any  # [8], of each token
    x1: Any  # [4], by i = hi + 2 half: the neighbouring lane's two tokens
    x2: Any  # [4], the other two lanes' four


# What a block is made of


@cute.jit
def load_block(tile_at: I32, m: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """Sixteen tokens of a tile, as an accumulator lies, in float32."""
    raw, wide, out = load_matrix(tile_at + 2048 * m, dtype, True), cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), F32)
    if cutlass.const_expr(dtype is BF16):
        widen(raw, wide)
    else:
        wide.store(raw.load().to(F32))
    for e in cutlass.range_constexpr(8):
        out[e] = wide[SWAP[e]]
    return out


@cute.jit
def store_block(x: cute.Tensor, tile_at: I32, m: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """The other way."""
    out, rounded = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), dtype)
    for e in cutlass.range_constexpr(8):
        out[e] = x[SWAP[e]]
    rounded.store(out.load().to(dtype))
    store_matrix(rounded, tile_at + 2048 * m, True)


@cute.jit
def store_operand(x: cute.Tensor, tile_at: I32, m: cutlass.Constexpr):
    """The same of what is rounded already."""
    out = cute.make_rmem_tensor((8,), F16)
    for e in cutlass.range_constexpr(8):
        out[e] = x[SWAP[e]]
    store_matrix(out, tile_at + 2048 * m, True)


@cute.jit
def of_tokens(vector: cute.Tensor, c: I32, m: cutlass.Constexpr):
    """[4]: a vector's values at the tokens 16 m + 2 c + ci + 8 half, by ci + 2 half."""
    out, at = cute.make_rmem_tensor((4,), F32), I32(vector.iterator.toint()) + 8 * c
    for half in cutlass.range_constexpr(2):
        two = cute.make_tensor(out.iterator + 2 * half, cute.make_layout((2, 1)))
        cute.autovec_copy(shared_at(at + 64 * m + 32 * half, F32, 2, 8), two)
    return out


@cute.jit
def load_normed(x: cutlass.Constexpr, tile: cute.Tensor, side: cutlass.Constexpr, m: cutlass.Constexpr):
    """k, or q with the scale in it."""
    out, inverse = load_block(x.at(tile), m, BF16), of_tokens(x.smem.norms[None, side], x.c, m)
    for i in cutlass.range_constexpr(4):
        inverse[i] = inverse[i] * x.scale if cutlass.const_expr(side == 1) else inverse[i]
    for e in cutlass.range_constexpr(8):
        out[e] = out[e] * inverse[e % 2 + 2 * (e // 4)]
    return out


def token_of(x: Strip, e: int, m: int) -> Any:
    return 16 * m + 2 * x.c + e % 2 + 8 * (e // 4)


def channel_of(x: Strip, e: int) -> Any:
    return 16 * x.wid + x.r + 8 * (e // 2 % 2)


@cute.jit
def load_gates(x: cutlass.Constexpr, m: cutlass.Constexpr):
    """Raw gates, with their bias if they are to be activated."""
    raw = cute.make_rmem_tensor((8,), F32)
    if cutlass.const_expr(x.variant.g_type is BF16):
        raw = load_block(x.at(x.smem.g), m, BF16)
    else:
        for e in cutlass.range_constexpr(8):
            token = cutlass.min(token_of(x, e, m), x.left - 1)
            raw[e] = x.gate.mGate[token, channel_of(x, e)]
    if cutlass.const_expr(x.variant.has_gate):
        for e in cutlass.range_constexpr(8):
            raw[e] = raw[e] + x.gate.bias[e // 2 % 2]
    return raw


@cute.jit
def powers_of(x: cutlass.Constexpr, raw: cute.Tensor, is_finite: cutlass.Constexpr):
    """2^(slope x), of which the activation is made."""
    y = cute.make_rmem_tensor((8,), F32)
    for e in cutlass.range_constexpr(8):
        exponent = x.gate.slope * raw[e]
        if cutlass.const_expr(is_finite):
            exponent = cutlass.min(exponent, F32(LARGEST_EXPONENT))
        y[e] = exp2(exponent)
    return y


@cute.jit
def decays_of(x: cutlass.Constexpr, raw: cute.Tensor, y: cute.Tensor, m: cutlass.Constexpr):
    """Decays of tokens, from log decays that are rounded as the forward rounds them; tokens past the end decay nothing."""
    a, log = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), F32)
    for e in cutlass.range_constexpr(8):
        if cutlass.const_expr(x.variant.has_gate):
            log[e] = cute.arch.rcp_approx(x.gate.unit * y[e] + x.gate.unit)
        else:
            log[e] = raw[e] * F32(LOG2_E)
    if x.left < 64:
        for e in cutlass.range_constexpr(8):
            log[e] = log[e] if token_of(x, e, m) < x.left else F32(0.0)
    rounded = cute.make_rmem_tensor((8,), F16)
    rounded.store(log.load().to(F16))
    log.store(rounded.load().to(F32))
    for e in cutlass.range_constexpr(8):
        a[e] = exp2(log[e])
    x1, x2 = [cute.make_rmem_tensor((4,), F32) for _ in range(2)]
    for i in cutlass.range_constexpr(4):
        x1[i] = cute.arch.shuffle_sync_bfly(a[2 * i] * a[2 * i + 1], offset=1)
    for i in cutlass.range_constexpr(4):
        x2[i] = cute.arch.shuffle_sync_bfly(a[2 * i] * a[2 * i + 1] * x1[i], offset=2)
    return Decays(a, x1, x2)


def eight(d: Decays, i: int) -> Any:
    """The decay over the eight tokens of a half."""
    return d.a[2 * i] * d.a[2 * i + 1] * d.x1[i] * d.x2[i]


@cute.jit
def whole_of(d: cutlass.Constexpr):
    """The decay over a block, of our two channels."""
    out = cute.make_rmem_tensor((2,), F32)
    for hi in cutlass.range_constexpr(2):
        out[hi] = eight(d, hi) * eight(d, hi + 2)
    return out


@cute.jit
def since_start(x: cutlass.Constexpr, d: cutlass.Constexpr, spans: cutlass.Constexpr = 16):
    """From the start of the block of 16 tokens, or of 8, to each token, which is included."""
    out, one = cute.make_rmem_tensor((8,), F32), F32(1.0)
    for i in cutlass.range_constexpr(4):
        before = (d.x1[i] if x.c % 2 == 1 else one) * (d.x2[i] if x.c >= 2 else one)
        if cutlass.const_expr(spans == 16 and i >= 2):
            before = before * eight(d, i - 2)
        out[2 * i] = before * d.a[2 * i]
        out[2 * i + 1] = out[2 * i] * d.a[2 * i + 1]
    return out


@cute.jit
def until_end(x: cutlass.Constexpr, d: cutlass.Constexpr, spans: cutlass.Constexpr = 16):
    """From behind each token to the end of the block of 16 tokens, or of 8."""
    out, one = cute.make_rmem_tensor((8,), F32), F32(1.0)
    for i in cutlass.range_constexpr(4):
        behind = (one if x.c % 2 == 1 else d.x1[i]) * (one if x.c >= 2 else d.x2[i])
        if cutlass.const_expr(spans == 16 and i < 2):
            behind = behind * eight(d, i + 2)
        out[2 * i + 1] = behind
        out[2 * i] = behind * d.a[2 * i + 1]
    return out


@cute.jit
def of_level(x: cutlass.Constexpr, d: cutlass.Constexpr, s: cutlass.Constexpr):
    """Between each token and the middle of its block of 2 s."""
    out, one = cute.make_rmem_tensor((8,), F32), F32(1.0)
    if cutlass.const_expr(s == 8):
        rows, columns = since_start(x, d, 8), until_end(x, d, 8)
        for e in cutlass.range_constexpr(8):
            out[e] = columns[e] if cutlass.const_expr(e < 4) else rows[e]
    elif cutlass.const_expr(s == 1):
        for e in cutlass.range_constexpr(8):
            out[e] = one if cutlass.const_expr(e % 2 == 0) else d.a[e]
    else:
        is_row = x.c >= 2 if cutlass.const_expr(s == 4) else x.c % 2 == 1
        for i in cutlass.range_constexpr(4):
            first, second = d.a[2 * i], d.a[2 * i + 1]
            out[2 * i] = first if is_row else second
            out[2 * i + 1] = first * second if is_row else one
            if cutlass.const_expr(s == 4):  # over the lane between
                between = d.x1[i] if x.c % 2 == x.c // 2 else one
                out[2 * i], out[2 * i + 1] = out[2 * i] * between, out[2 * i + 1] * between
    return out


@cute.jit
def times(a: cute.Tensor, b: cute.Tensor):
    """As an operand."""
    wide, out = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), F16)
    for e in cutlass.range_constexpr(8):
        wide[e] = a[e] * b[e]
    out.store(wide.load().to(F16))
    return out


@cute.jit
def widened(a: cute.Tensor):
    """An operand as it was rounded: shares of the gates' gradients are made from such, so that a pair's share in its row and in
    its column is the same number."""
    out = cute.make_rmem_tensor((8,), F32)
    out.store(a.load().to(F32))
    return out


# Products


def score_at(x: Strip, which: int, row: int, column: int) -> Any:
    """Where `load_matrix` finds a block of dP (0) or dA (1)."""
    return lane_address(x.smem.scores[None, None, which], row, x.lane) ^ (32 * column)


@cute.jit
def pair_of_words(words: cute.Tensor, i: cutlass.Constexpr, j: cutlass.Constexpr):
    """Two of a block's words as a B operand."""
    out = cute.make_rmem_tensor(((2, 2), 1), F16)
    both = cute.recast_tensor(flat(out, 0, 4), I32)
    both[0], both[1] = words[i], words[j]
    return out


@cute.jit
def add_rows(x: cutlass.Constexpr, acc: cute.Tensor, a: cute.Tensor, which: cutlass.Constexpr, row: cutlass.Constexpr,
             column: cutlass.Constexpr):  # fmt: skip
    """acc[channel, t] += sum_i a[channel, i] d[t, i], d a block of dP or dA."""
    words = cute.recast_tensor(load_matrix(score_at(x, which, row, column), F16), I32)
    for half in cutlass.range_constexpr(2):
        to = corner(acc, 8 * row + 4 * half)
        cute.gemm(x.mmas.k16, to, as_a(a), pair_of_words(words, half, half + 2), to)


@cute.jit
def add_columns(x: cutlass.Constexpr, acc: cute.Tensor, a: cute.Tensor, which: cutlass.Constexpr, row: cutlass.Constexpr,
                column: cutlass.Constexpr):  # fmt: skip
    """acc[channel, i] += sum_t a[channel, t] d[t, i], of one block."""
    words = cute.recast_tensor(load_matrix(score_at(x, which, row, column), F16, True), I32)
    for half in cutlass.range_constexpr(2):
        to = corner(acc, 4 * half)
        cute.gemm(x.mmas.k16, to, as_a(a), pair_of_words(words, 2 * half, 2 * half + 1), to)


@cute.jit
def add_eighth(x: cutlass.Constexpr, acc: cute.Tensor, to: cutlass.Constexpr, a: cute.Tensor, of: cutlass.Constexpr, word: I32):
    """Half `to` of acc += half `of` of a times an [8, 8] block."""
    b = cute.make_rmem_tensor((2, 1), F16)
    cute.recast_tensor(flat(b, 0, 2), I32)[0] = word
    d, left = corner(acc, 4 * to), cute.make_tensor(a.iterator + 4 * of, cute.make_layout(((2, 2), 1)))
    cute.gemm(x.mmas.k8, d, left, b, d)


@cute.jit
def level_masks(x: cutlass.Constexpr, s: cutlass.Constexpr):
    """(Of d[t = r, i = 2 c + ci], of d[t = 2 c + ci, i = r]): which entries of an [8, 8] block are a level's."""
    r, c = x.r, x.c
    if cutlass.const_expr(s == 4):
        plain, turned = I32(-1) if r >= 4 and c < 2 else I32(0), I32(-1) if r < 4 and c >= 2 else I32(0)
    elif cutlass.const_expr(s == 2):
        is_same = r // 4 == c // 2
        plain = I32(-1) if is_same and r % 4 >= 2 and c % 2 == 0 else I32(0)
        turned = I32(-1) if is_same and r % 4 < 2 and c % 2 == 1 else I32(0)
    else:
        plain = I32(0xFFFF) if r // 2 == c and r % 2 == 1 else I32(0)
        turned = I32(-0x10000) if r // 2 == c and r % 2 == 0 else I32(0)
    return plain, turned


@cute.jit
def add_level(
    x: cutlass.Constexpr,
    s: cutlass.Constexpr,
    d: cutlass.Constexpr,
    k: cute.Tensor,
    q: cute.Tensor,
    words: cutlass.Constexpr,
    grads: cutlass.Constexpr,
):
    """Pairs of a level: adds to dq, dk and w of the block, which are `grads`.

    `words` are the block's dP and dA, as they lie and turned round. Where a token is no row of the level, its row's sum is zero,
    and likewise for columns, so that dk takes both from one sum.
    """
    (dP, dA, dP_t, dA_t), (dq, dk, w) = words, grads
    f = of_level(x, d, s)
    ke, qe = times(k, f), times(q, f)
    of_q, of_k = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), F32)
    of_q.fill(0.0)
    of_k.fill(0.0)
    if cutlass.const_expr(s == 8):  # t in the second half, i in the first
        add_eighth(x, of_q, 1, ke, 0, dP[1])
        add_eighth(x, of_k, 1, ke, 0, dA[1])
        add_eighth(x, of_k, 0, qe, 1, dP_t[1])
        add_eighth(x, of_k, 0, ke, 1, dA_t[1])
    else:
        plain, turned = level_masks(x, s)
        for half in cutlass.range_constexpr(2):
            add_eighth(x, of_q, half, ke, half, dP[3 * half] & plain)
            add_eighth(x, of_k, half, ke, half, dA[3 * half] & plain)
            add_eighth(x, of_k, half, qe, half, dP_t[3 * half] & turned)
            add_eighth(x, of_k, half, ke, half, dA_t[3 * half] & turned)
    kw, qw = widened(ke), widened(qe)
    is_row = x.c >= 2 if cutlass.const_expr(s == 4) else x.c % 2 == 1
    sign = F32(1.0) if is_row else F32(-1.0)
    for e in cutlass.range_constexpr(8):
        if cutlass.const_expr((s != 8 or e >= 4) and (s != 1 or e % 2 == 1)):
            dq[e] = dq[e] + f[e] * of_q[e]
            w[e] = w[e] + qw[e] * of_q[e]
        dk[e] = dk[e] + f[e] * of_k[e]
        if cutlass.const_expr(s == 8 or s == 1):
            is_row_of = e >= 4 if cutlass.const_expr(s == 8) else e % 2 == 1
            w[e] = w[e] + kw[e] * of_k[e] if cutlass.const_expr(is_row_of) else w[e] - kw[e] * of_k[e]
        else:
            w[e] = w[e] + sign * (kw[e] * of_k[e])


@cute.jit
def diagonal_words(x: cutlass.Constexpr, m: cutlass.Constexpr):
    """A diagonal block of dP and of dA, as they lie and turned round."""
    return [
        cute.recast_tensor(load_matrix(score_at(x, which, m, m), F16, is_turned), I32)
        for is_turned in (False, True)
        for which in (0, 1)
    ]


# The passes over a chunk's blocks


@cute.jit
def blocks_pass(x: cutlass.Constexpr, aq: cute.Tensor, ak: cute.Tensor, w: cute.Tensor, h: cute.Tensor, to_columns: cute.Tensor,
                behind: cutlass.Constexpr):  # fmt: skip
    """Blocks from the first to the last: what rows read, what rows of later blocks write to columns, pairs inside a block.

    aq and ak are do S^T and -b dX S^T; a block's are complete when all blocks before it have been added, each time after what was
    there has decayed over that block. Leaves dq, and dk as far as it is known, in their tiles, the shares of the gates'
    gradients in w [32], in h [2] what passes the chunk's end, which was the sum of S dS over dv, and for the last pass, in the
    places of k and q, the operand k e^R and the decay e^R; in `to_columns` what rows behind a block add to its columns, and in
    `behind` the decay over the blocks behind it.
    """
    smem, decayed, passing = x.smem, [F32(1.0), F32(1.0)], [F32(0.0), F32(0.0)]
    to_columns.fill(0.0)
    for m in cutlass.range_constexpr(4):
        k, q = load_normed(x, smem.k, 0, m), load_normed(x, smem.q, 1, m)
        raw = load_gates(x, m)
        d = decays_of(x, raw, powers_of(x, raw, False) if cutlass.const_expr(x.variant.has_gate) else raw, m)
        since, until, E = since_start(x, d), until_end(x, d), whole_of(d)
        dq, dk, w_m = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), F32), flat(w, 8 * m, 8)
        ql, kl, kr = times(q, since), times(k, since), times(k, until)
        store_operand(kr, x.at(smem.k), m)
        store_block(until, x.at(smem.q), m, F16)
        diagonal, right, ac, qw, kw = of_tokens(smem.diagonal, x.c, m), widened(kr), read_columns(x, m), widened(ql), widened(kl)
        for e in cutlass.range_constexpr(8):
            of_q, of_k, pair = aq[8 * m + e], ak[8 * m + e], diagonal[e % 2 + 2 * (e // 4)]
            w_m[e] = qw[e] * of_q + kw[e] * of_k
            dq[e] = since[e] * of_q + pair * k[e]
            dk[e] = since[e] * of_k + pair * q[e]
        for hi in cutlass.range_constexpr(2):
            passing[hi] = passing[hi] * E[hi]
            decayed[hi] = decayed[hi] * E[hi]
            for i in cutlass.range_constexpr(4):
                e = i % 2 + 2 * hi + 4 * (i // 2)
                passing[hi] = passing[hi] + right[e] * ac[e]
        for r in cutlass.range_constexpr(m + 1, 4):
            for acc, which in ((aq, 0), (ak, 1)):
                for e in cutlass.range_constexpr(8):
                    acc[8 * r + e] = acc[8 * r + e] * E[e // 2 % 2]
                add_rows(x, acc, kr, which, r, m)
        for column in cutlass.range_constexpr(m):
            part = cute.make_rmem_tensor((8,), F32)
            part.fill(0.0)
            add_columns(x, part, ql, 0, m, column)
            add_columns(x, part, kl, 1, m, column)
            for e in cutlass.range_constexpr(8):
                to_columns[8 * column + e] = to_columns[8 * column + e] + behind[column][e // 2 % 2] * part[e]
            behind[column] = [behind[column][hi] * E[hi] for hi in range(2)]
        words = diagonal_words(x, m)
        for s in LEVELS:
            add_level(x, s, d, k, q, words, (dq, dk, w_m))
        store_block(dq, x.at(smem.dq), m, F16)
        store_block(dk, x.at(smem.dk), m, F16)
    for hi in cutlass.range_constexpr(2):
        total = passing[hi]
        for off in (1, 2):
            total += cute.arch.shuffle_sync_bfly(total, offset=off)
        h[hi] = h[hi] * decayed[hi] + total


@cute.jit
def last_pass(x: cutlass.Constexpr, w: cute.Tensor, h: cute.Tensor, to_columns: cute.Tensor, behind: cutlass.Constexpr, back: F32,
              sums: cute.Tensor):  # fmt: skip
    """Blocks from the last to the first: completes dk in its tile, and the gates' gradients, which are sums over the tokens behind.

    `back` takes the chunk's units to true ones; sums are [2] of dt_bias and [2] of A_log.
    """
    smem, sum_behind = x.smem, [h[0], h[1]]
    sums.fill(0.0)
    for m in (3, 2, 1, 0):
        ac, dk, dg = read_columns(x, m), load_block(x.at(smem.dk), m, F16), cute.make_rmem_tensor((8,), F32)
        right, until = load_block(x.at(smem.k), m, F16), load_block(x.at(smem.q), m, F16)
        for e in cutlass.range_constexpr(8):
            column = to_columns[8 * m + e] + behind[m][e // 2 % 2] * ac[e]
            dk[e] = dk[e] + until[e] * column
            w[8 * m + e] = w[8 * m + e] - right[e] * column
        store_block(dk, x.at(smem.dk), m, F16)
        for half in (1, 0):
            for hi in cutlass.range_constexpr(2):
                first, second = w[8 * m + 2 * hi + 4 * half], w[8 * m + 2 * hi + 4 * half + 1]
                two = first + second
                next_two = cute.arch.shuffle_sync_bfly(two, offset=1)
                next_four = cute.arch.shuffle_sync_bfly(two + next_two, offset=2)
                later = sum_behind[hi] + (F32(0.0) if x.c % 2 == 1 else next_two) + (F32(0.0) if x.c >= 2 else next_four)
                dg[2 * hi + 4 * half + 1] = later + second
                dg[2 * hi + 4 * half] = later + two
                sum_behind[hi] = sum_behind[hi] + two + next_two + next_four
        finish_gates(x, dg, back, sums, m)


@cute.jit
def park_columns(x: cutlass.Constexpr, ac: cute.Tensor, unit: F32):
    """U dS^T out of the registers, in so many units, as fp16."""
    for m in cutlass.range_constexpr(4):
        wide, out = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), F16)
        for e in cutlass.range_constexpr(8):
            wide[e] = ac[8 * m + e] * unit
        out.store(wide.load().to(F16))
        cute.autovec_copy(cute.make_tensor(out.iterator, cute.make_layout((8, 1))), shared_at(column_at(x, m), F16, 8, 16))


@cute.jit
def read_columns(x: cutlass.Constexpr, m: cutlass.Constexpr):
    """They come back, in the chunk's units."""
    raw, out = cute.make_rmem_tensor((8,), F16), cute.make_rmem_tensor((8,), F32)
    cute.autovec_copy(shared_at(column_at(x, m), F16, 8, 16), cute.make_tensor(raw.iterator, cute.make_layout((8, 1))))
    out.store(raw.load().to(F32))
    for e in cutlass.range_constexpr(8):
        out[e] = out[e] * x.parked
    return out


def column_at(x: Strip, m: int) -> Any:
    return I32(x.smem.parked.iterator.toint()) + 16 * (32 * x.wid + x.lane) + 4096 * m


@cute.jit
def finish_gates(x: cutlass.Constexpr, dg: cute.Tensor, back: F32, sums: cute.Tensor, m: cutlass.Constexpr):
    """From the gradients of log decays to those of raw gates, which leave; adds to the sums of dt_bias and A_log."""
    if cutlass.const_expr(x.variant.has_gate):
        raw = load_gates(x, m)
        y, by = powers_of(x, raw, True), back * (x.gate.lower * x.gate.strength)
        for e in cutlass.range_constexpr(8):
            s = cute.arch.rcp_approx(F32(1.0) + y[e])
            dg[e] = (dg[e] * by) * (s * (y[e] * s))
        if x.left < 64:
            for e in cutlass.range_constexpr(8):
                dg[e] = dg[e] if token_of(x, e, m) < x.left else F32(0.0)
        for e in cutlass.range_constexpr(8):
            hi = e // 2 % 2
            sums[hi] = sums[hi] + dg[e]
            sums[2 + hi] = sums[2 + hi] + dg[e] * raw[e]
    else:
        for e in cutlass.range_constexpr(8):
            dg[e] = dg[e] * back
    if cutlass.const_expr(x.variant.g_type is BF16):
        store_block(dg, x.at(x.smem.g), m, BF16)
    else:
        for e in cutlass.range_constexpr(8):
            if token_of(x, e, m) < x.left:
                x.gate.mDg[token_of(x, e, m), channel_of(x, e)] = dg[e]


@cute.jit
def dot_states(x: cutlass.Constexpr, S: cute.Tensor, dS: cute.Tensor):
    """The sum of S dS over dv for our channels, [2]: the diagonal of S^T dS."""
    acc = cute.make_rmem_tensor((8,), F32)
    acc.fill(0.0)
    at_s, at_d = [
        (lane_address(t, 0, x.lane) + 2 * HALF * (x.wid >> 2)) ^ (32 * (x.wid & 3)) for t in (S, dS)
    ]  # fmt: skip
    for n in cutlass.range(8, unroll=2):
        left, right = load_matrix(at_s + 2048 * n, F16, True), load_matrix(at_d + 2048 * n, F16, True)
        a, words = cute.make_rmem_tensor((8,), F16), cute.recast_tensor(right, I32)
        for e in cutlass.range_constexpr(8):
            a[e] = left[SWAP[e]]
        for half in cutlass.range_constexpr(2):
            to = corner(acc, 4 * half)
            cute.gemm(x.mmas.k16, to, as_a(a), pair_of_words(words, 2 * half, 2 * half + 1), to)
    out = cute.make_rmem_tensor((2,), F32)
    for hi in cutlass.range_constexpr(2):  # column r of row r is with lane 4 r + r / 2
        mine = acc[6 * hi + 1] if x.r % 2 == 1 else acc[6 * hi]
        out[hi] = cute.arch.shuffle_sync(mine, 4 * x.r + x.r // 2)
    return out
