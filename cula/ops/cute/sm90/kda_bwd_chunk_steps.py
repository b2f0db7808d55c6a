# SPDX-License-Identifier: Apache-2.0
"""The steps of `kda_bwd_chunk.py`, by one warp with sixteen channels and all tokens of a chunk, in blocks of eight tokens.

Arrays [16 channels, 8 tokens] are fragments of mma.sync: thread (r, c) = (lane / 4, lane % 4) holds channels r + 8 hi and tokens
2 c + ci at e = ci + 2 hi. As they lie they are accumulators, and A operands of products over eight tokens.

Decays are products, never differences of sums: with a_t <= 1 the decay of a token, the factor between a token and any point
of its block is a product of a's, so that gates of any strength keep their relative accuracy. Lanes exchange the products of
their two tokens (`x1`) and of two lanes (`x2`); everything else follows.

Pairs i < t inside a block belong to one of three levels: t in the second and i in the first half of an aligned block of 2 s rows,
s = 4, 2, 1. Rows and columns of a level are different tokens, so that one array of factors serves both. Pairs of the last level
are a thread's own, and need no product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from cula.core.constants import LOG2_E
from cula.ops.cute.common.fragments import as_a, corner, flat, lane_address, load_matrix, shared_at, store_matrix, widen
from cula.ops.cute.common.gate import exp2, softplus2, to_log2
from cula.ops.cute.common.lanes import COLUMN, ROW, sum_over
from cula.ops.cute.common.tiles import BF16, F16, F32, I32
from cula.ops.cute.kda_bwd_abi import OF_GATES, OF_STRENGTHS

BLOCKS = 8  # of eight tokens
HALF = 8192  # bytes of half of the columns of a tile [64, 128] in 16 bits, and of a square [64, 64]
ROWS = 1024  # bytes of eight rows of it
SWAP = (0, 1, 4, 5, 2, 3, 6, 7)  # from where `load_matrix`, transposed, puts two blocks to where accumulators have them, and back
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
    is_activated: Any  # beta comes as b
    mParts: Any  # [PARTS, 64]

    def at(self, tile: Any) -> Any:
        """The address of our channels in a 16-bit tile [64, 128], for the first two blocks of tokens; see `lane_address`."""
        at_k = (lane_address(self.smem.k, 0, self.lane) + HALF * (self.wid >> 2)) ^ (32 * (self.wid & 3))
        return at_k + self.from_k(tile)

    def at_one(self, tile: Any) -> Any:
        """The same for one block: sixteen lanes point to its rows, half of our channels each."""
        row, side, at_k = self.lane % 8, self.lane // 8 % 2, I32(self.smem.k.iterator.toint())
        return ((at_k + HALF * (self.wid >> 2) + 128 * row + 16 * (side ^ row)) ^ (32 * (self.wid & 3))) + self.from_k(tile)

    def from_k(self, tile: Any) -> Any:
        """Bytes from the tile of k to another: a constant, so that one register has the addresses of all. Tiles begin at
        multiples of what an exclusive or changes."""
        return I32(tile.iterator.toint()) - I32(self.smem.k.iterator.toint())


class Gate(NamedTuple):
    """What a gate's activation depends on."""

    slope: Any  # these two as in `common/gate.py`
    unit: Any
    rate: Any  # lower a of a bounded gate, -a of a softplus gate
    bias: Any  # [2], of our channels
    mGate: Any  # [T, 128] of a head from the chunk's first token on, where no tile has them
    mDg: Any


class Decays(NamedTuple):
    """Decays of a block."""

    a: Any  # [4], of each token
    x1: Any  # [2], by hi: the neighbouring lane's two tokens
    x2: Any  # [2], the other two lanes' four

    def pair(self, hi: int) -> Any:
        return self.a[2 * hi] * self.a[2 * hi + 1]

    def whole(self, hi: int) -> Any:
        """Over the block."""
        return self.pair(hi) * self.x1[hi] * self.x2[hi]


class BlockInputs(NamedTuple):
    """Keys and queries of a block, and what keys are written with."""

    k: Any  # [4]
    q: Any
    b: Any  # [2], by token
    k16: Any  # [4], in fp16
    bk16: Any  # b k
    q16: Any


# What a block is made of


@cute.jit
def load_block(at: I32, n: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """A block of a tile, from `Strip.at_one`, in float32."""
    raw, out = cute.make_rmem_tensor((4,), dtype), cute.make_rmem_tensor((4,), F32)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 2), dtype)
    cute.copy(atom, shared_at(at + ROWS * n, dtype, 4, 16), cute.make_tensor(raw.iterator, cute.make_layout((4, 1))))
    if cutlass.const_expr(dtype is BF16):
        widen(raw, out)
    else:
        out.store(raw.load().to(F32))
    return out


@cute.jit
def store_block(x: cute.Tensor, at: I32, n: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """The other way."""
    out = cute.make_rmem_tensor((4,), dtype)
    out.store(x.load() if cutlass.const_expr(x.element_type is dtype) else x.load().to(dtype))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 2), dtype)
    cute.copy(atom, cute.make_tensor(out.iterator, cute.make_layout((4, 1))), shared_at(at + ROWS * n, dtype, 4, 16))


@cute.jit
def load_two(at: I32, m: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """Two blocks at once, from `Strip.at`: [8], the second behind the first."""
    raw, out, wide = (
        load_matrix(at + 2 * ROWS * m, dtype, True),
        cute.make_rmem_tensor((8,), F32),
        cute.make_rmem_tensor((8,), F32),
    )
    if cutlass.const_expr(dtype is BF16):
        widen(raw, wide)
    else:
        wide.store(raw.load().to(F32))
    for e in cutlass.range_constexpr(8):
        out[e] = wide[SWAP[e]]
    return out


@cute.jit
def store_two(x: cute.Tensor, at: I32, m: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """The other way."""
    out, rounded = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), dtype)
    for e in cutlass.range_constexpr(8):
        out[e] = x[SWAP[e]]
    rounded.store(out.load().to(dtype))
    store_matrix(rounded, at + 2 * ROWS * m, True)


@cute.jit
def of_tokens(vector: cute.Tensor, c: I32, n: cutlass.Constexpr):
    """[2]: a vector's values at our tokens."""
    raw, out = cute.make_rmem_tensor((2,), vector.element_type), cute.make_rmem_tensor((2,), F32)
    size = vector.element_type.width // 8
    at = I32(vector.iterator.toint()) + size * (2 * c + 8 * n)
    cute.autovec_copy(shared_at(at, vector.element_type, 2, 2 * size), cute.make_tensor(raw.iterator, cute.make_layout((2, 1))))
    out.store(raw.load().to(F32))
    return out


@cute.jit
def load_normed(x: cutlass.Constexpr, tile: cute.Tensor, side: cutlass.Constexpr, n: cutlass.Constexpr):
    """k, or q with the scale in it."""
    out, inverse = load_block(x.at_one(tile), n, BF16), of_tokens(x.smem.norms[None, side], x.c, n)
    for i in cutlass.range_constexpr(2):
        inverse[i] = inverse[i] * x.scale if cutlass.const_expr(side == 1) else inverse[i]
    for e in cutlass.range_constexpr(4):
        out[e] = out[e] * inverse[e % 2]
    return out


def token_of(x: Strip, e: int, n: int) -> Any:
    return 8 * n + 2 * x.c + e % 2


def channel_of(x: Strip, e: int) -> Any:
    return 16 * x.wid + x.r + 8 * (e // 2 % 2)


@cute.jit
def read_gates(x: cutlass.Constexpr, raw: cute.Tensor, n: cutlass.Constexpr):
    """Those of a block, in float32, from memory."""
    for e in cutlass.range_constexpr(4):
        raw[e] = x.gate.mGate[cutlass.min(token_of(x, e, n), x.left - 1), channel_of(x, e)].to(F32)


@cute.jit
def add_bias(x: cutlass.Constexpr, raw: cute.Tensor):
    for e in cutlass.range_constexpr(cute.size(raw)):
        raw[e] = raw[e] + x.gate.bias[e // 2 % 2]


@cute.jit
def log_decays(x: cutlass.Constexpr, g: cute.Tensor):
    """g <- log decays, base 2; raw gates have their bias already."""
    n, gate = cute.size(g), x.gate
    if cutlass.const_expr(x.variant.gate == "gate"):
        for e in cutlass.range_constexpr(n):
            g[e] = exp2(gate.slope * g[e])
        for e in cutlass.range_constexpr(n):
            g[e] = cute.arch.rcp_approx(gate.unit * g[e] + gate.unit)
    elif cutlass.const_expr(x.variant.gate == "softplus"):
        for e in cutlass.range_constexpr(n):
            g[e] = gate.slope * g[e]
        softplus2(g)
        for e in cutlass.range_constexpr(n):
            g[e] = gate.unit * g[e]
    else:
        for e in cutlass.range_constexpr(n):
            g[e] = to_log2(g[e])


@cute.jit
def through_gate(x: cutlass.Constexpr, dg: cute.Tensor, raw: cute.Tensor, of_A: cute.Tensor):
    """dg <- gradients of raw gates, from those of log decays; of_A <- what each adds to that of A_log. `raw` has the bias."""
    n, gate = cute.size(dg), x.gate
    if cutlass.const_expr(x.variant.gate == "gate"):
        for e in cutlass.range_constexpr(n):
            y = exp2(cutlass.min(gate.slope * raw[e], F32(LARGEST_EXPONENT)))
            s = cute.arch.rcp_approx(F32(1.0) + y)
            dg[e] = (dg[e] * gate.rate) * (s * (y * s))
            of_A[e] = dg[e] * raw[e]
    else:
        of_A.store(raw.load())
        log_decays(x, of_A)
        for e in cutlass.range_constexpr(n):
            of_A[e] = dg[e] * (of_A[e] * F32(1.0 / LOG2_E))
            dg[e] = (dg[e] * gate.rate) * cute.arch.rcp_approx(F32(1.0) + exp2(-gate.slope * raw[e]))


@cute.jit
def decays_of(x: cutlass.Constexpr, n: cutlass.Constexpr):
    """Decays of tokens, from log decays that are rounded as the forward rounds them; tokens past the end decay nothing."""
    a, log = [cute.make_rmem_tensor((4,), F32) for _ in range(2)]
    if cutlass.const_expr(x.variant.has_gate_tile):
        log.store(load_block(x.at_one(x.smem.g), n, BF16).load())
    else:
        read_gates(x, log, n)
    if cutlass.const_expr(x.variant.is_raw):
        add_bias(x, log)
    log_decays(x, log)
    if x.left < 64:
        for e in cutlass.range_constexpr(4):
            log[e] = log[e] if token_of(x, e, n) < x.left else F32(0.0)
    rounded = cute.make_rmem_tensor((4,), F16)
    rounded.store(log.load().to(F16))
    log.store(rounded.load().to(F32))
    for e in cutlass.range_constexpr(4):
        a[e] = exp2(log[e])
    x1, x2 = [cute.make_rmem_tensor((2,), F32) for _ in range(2)]
    for hi in cutlass.range_constexpr(2):
        x1[hi] = cute.arch.shuffle_sync_bfly(a[2 * hi] * a[2 * hi + 1], offset=1)
    for hi in cutlass.range_constexpr(2):
        x2[hi] = cute.arch.shuffle_sync_bfly(a[2 * hi] * a[2 * hi + 1] * x1[hi], offset=2)
    return Decays(a, x1, x2)


@cute.jit
def since_start(x: cutlass.Constexpr, d: cutlass.Constexpr):
    """From the start of the block to each token, which is included."""
    out, one = cute.make_rmem_tensor((4,), F32), F32(1.0)
    for hi in cutlass.range_constexpr(2):
        out[2 * hi] = (d.x1[hi] if x.c % 2 == 1 else one) * (d.x2[hi] if x.c >= 2 else one) * d.a[2 * hi]
        out[2 * hi + 1] = out[2 * hi] * d.a[2 * hi + 1]
    return out


@cute.jit
def until_end(x: cutlass.Constexpr, d: cutlass.Constexpr):
    """From behind each token to the end of the block."""
    out, one = cute.make_rmem_tensor((4,), F32), F32(1.0)
    for hi in cutlass.range_constexpr(2):
        out[2 * hi + 1] = (one if x.c % 2 == 1 else d.x1[hi]) * (one if x.c >= 2 else d.x2[hi])
        out[2 * hi] = out[2 * hi + 1] * d.a[2 * hi + 1]
    return out


@cute.jit
def of_level(x: cutlass.Constexpr, d: cutlass.Constexpr, s: cutlass.Constexpr):
    """Between each token and the middle of its block of 2 s."""
    out, one = cute.make_rmem_tensor((4,), F32), F32(1.0)
    is_row = x.c >= 2 if cutlass.const_expr(s == 4) else x.c % 2 == 1
    for hi in cutlass.range_constexpr(2):
        out[2 * hi] = d.a[2 * hi] if is_row else d.a[2 * hi + 1]
        out[2 * hi + 1] = d.pair(hi) if is_row else one
        if cutlass.const_expr(s == 4):  # over the lane between
            between = d.x1[hi] if x.c % 2 == x.c // 2 else one
            out[2 * hi], out[2 * hi + 1] = out[2 * hi] * between, out[2 * hi + 1] * between
    return out


@cute.jit
def halves(a: cute.Tensor):
    """Rounded to fp16, of which operands are made."""
    out = cute.make_rmem_tensor((4,), F16)
    out.store(a.load().to(F16))
    return out


@cute.jit
def times(a: cute.Tensor, b: cute.Tensor):
    """An operand, from its two factors in fp16: two values by one instruction."""
    out = cute.make_rmem_tensor((4,), F16)
    out.store(a.load() * b.load())
    return out


@cute.jit
def widened(a: cute.Tensor):
    """An operand as it was rounded: shares of the gates' gradients are made from such, so that a pair's share in its row and in
    its column is the same number."""
    out = cute.make_rmem_tensor((4,), F32)
    out.store(a.load().to(F32))
    return out


# Products


@cute.jit
def blocks_of_a_column(x: cutlass.Constexpr, which: cutlass.Constexpr, n: cutlass.Constexpr, first: cutlass.Constexpr):
    """Blocks (r, n) of dP (0) or dA (1) for four r from `first` on: a word each, [t = r, i = 2 c + ci]."""
    at = (I32(x.smem.scores.iterator.toint()) + 128 * x.lane + 16 * (x.lane % 8)) ^ (16 * n)
    return cute.recast_tensor(load_matrix(at + ROWS * first + HALF * which, F16), I32)


@cute.jit
def blocks_of_a_row(x: cutlass.Constexpr, which: cutlass.Constexpr, n: cutlass.Constexpr, first: cutlass.Constexpr):
    """Blocks (n, c) for four c from `first` on, 0 or 4: a word each, [t = 2 c + ci, i = r]."""
    at = I32(x.smem.scores.iterator.toint()) + 128 * (x.lane % 8) + 16 * ((x.lane // 8) ^ (x.lane % 8))
    return cute.recast_tensor(load_matrix((at ^ (16 * first)) + ROWS * n + HALF * which, F16, True), I32)


@cute.jit
def diagonal_blocks(x: cutlass.Constexpr, n: cutlass.Constexpr):
    """Block (n, n) of dP and of dA, as they lie and turned round. By themselves: what else four blocks bring is needed later."""
    row, at = x.lane % 8, I32(x.smem.scores.iterator.toint())
    at = ((at + 128 * row + 16 * row + HALF * (x.lane // 8 % 2)) ^ (16 * n)) + ROWS * n
    words = []
    for is_turned in (False, True):
        both, atom = cute.make_rmem_tensor((4,), F16), cute.make_copy_atom(warp.LdMatrix8x8x16bOp(is_turned, 2), F16)
        cute.copy(atom, shared_at(at, F16, 4, 16), cute.make_tensor(both.iterator, cute.make_layout((4, 1))))
        words += [cute.recast_tensor(both, I32)[i] for i in range(2)]
    return words


@cute.jit
def add_product(x: cutlass.Constexpr, acc: cute.Tensor, start: cutlass.Constexpr, a: cute.Tensor, word: I32):
    """acc[start ..] += a times an [8, 8] block."""
    b = cute.make_rmem_tensor((2, 1), F16)
    cute.recast_tensor(flat(b, 0, 2), I32)[0] = word
    d = corner(acc, start)
    cute.gemm(x.mmas.k8, d, cute.make_tensor(a.iterator, cute.make_layout(((2, 2), 1))), b, d)


@cute.jit
def level_masks(x: cutlass.Constexpr, s: cutlass.Constexpr):
    """(Of d[t = r, i = 2 c + ci], of d[t = 2 c + ci, i = r]): which words of a block are a level's."""
    r, c = x.r, x.c
    if cutlass.const_expr(s == 4):
        plain, turned = I32(-1) if r >= 4 and c < 2 else I32(0), I32(-1) if r < 4 and c >= 2 else I32(0)
    else:
        is_same = r // 4 == c // 2
        plain = I32(-1) if is_same and r % 4 >= 2 and c % 2 == 0 else I32(0)
        turned = I32(-1) if is_same and r % 4 < 2 and c % 2 == 1 else I32(0)
    return plain, turned


@cute.jit
def add_level(
    x: cutlass.Constexpr,
    s: cutlass.Constexpr,
    d: cutlass.Constexpr,
    of: cutlass.Constexpr,
    words: cutlass.Constexpr,
    grads: cutlass.Constexpr,
):
    """Pairs of a level: adds to dq, dk, <k, d(b k)> and w of the block, which are `grads`.

    `words` are the block's dP and dA, as they lie and turned round. Where a token is no row of the level, its row's sum is zero,
    and likewise for columns, so that one sum serves both.
    """
    (dP, dA, dP_t, dA_t), (dq, dk, db, w) = words, grads
    f = of_level(x, d, s)
    is_row = x.c >= 2 if cutlass.const_expr(s == 4) else x.c % 2 == 1
    f16, ours = halves(f), cute.make_rmem_tensor((4,), F16)
    pairs, of_rows, of_columns = [cute.recast_tensor(t, I32) for t in (ours, of.bk16, of.k16)]
    for i in cutlass.range_constexpr(2):
        pairs[i] = of_rows[i] if is_row else of_columns[i]
    ke, qe, (plain, turned) = times(ours, f16), times(of.q16, f16), level_masks(x, s)
    of_q, of_k = cute.make_rmem_tensor((4,), F32), cute.make_rmem_tensor((4,), F32)
    of_q.fill(0.0)
    of_k.fill(0.0)
    add_product(x, of_q, 0, ke, dP & plain)
    add_product(x, of_k, 0, ke, dA & plain)
    add_product(x, of_k, 0, qe, dP_t & turned)
    add_product(x, of_k, 0, ke, dA_t & turned)
    kw, qw = widened(ke), widened(qe)
    sign = F32(1.0) if is_row else F32(-1.0)
    for e in cutlass.range_constexpr(4):
        dq[e] = dq[e] + f[e] * of_q[e]
        part = f[e] * of_k[e]
        dk[e] = dk[e] + (of.b[e % 2] if is_row else F32(1.0)) * part
        db[e % 2] = db[e % 2] + (of.k[e] if is_row else F32(0.0)) * part
        w[e] = w[e] + qw[e] * of_q[e] + sign * (kw[e] * of_k[e])


@cute.jit
def add_neighbours(
    x: cutlass.Constexpr, d: cutlass.Constexpr, of: cutlass.Constexpr, words: cutlass.Constexpr, grads: cutlass.Constexpr
):
    """The pairs of neighbours that a thread has both of, t = i + 1 odd."""
    (dq, dk, db, w), (k, q, b) = grads, of[:3]
    of_p, of_a = [low_half(cute.arch.shuffle_sync(word, 4 * (2 * x.c + 1) + x.c)) for word in words[:2]]
    for hi in cutlass.range_constexpr(2):
        i, t = 2 * hi, 2 * hi + 1
        row = of_a * k[t]
        key, reader = d.a[t] * k[i], of_p * q[t] + b[1] * row
        dq[t] = dq[t] + of_p * key
        dk[t] = dk[t] + (b[1] * of_a) * key
        db[1] = db[1] + row * key
        dk[i] = dk[i] + d.a[t] * reader
        share = key * reader
        w[t] = w[t] + share
        w[i] = w[i] - share


@cute.jit
def low_half(word: I32):
    one = cute.make_rmem_tensor((1,), I32)
    one[0] = word
    return cute.recast_tensor(one, F16)[0].to(F32)


# The passes over a chunk's blocks


@cute.jit
def blocks_pass(
    x: cutlass.Constexpr,
    aq: cute.Tensor,
    ak: cute.Tensor,
    w: cute.Tensor,
    h: cute.Tensor,
    to_columns: cute.Tensor,
    behind: cutlass.Constexpr,
):
    """Blocks from the first to the last: what rows read, what rows of later blocks write to columns, pairs inside a block.

    aq and ak are do S^T and -dX S^T; a block's are complete when all blocks before it have been added, each time after what was
    there has decayed over that block. Leaves dq, and dk as far as it is known, in their tiles, the shares of the gates'
    gradients in w [32], in h [2] what passes the chunk's end, which was the sum of S dS over dv, and for the last pass, in the
    places of k and q, the operand k e^R and the decay e^R; in `to_columns` what rows behind a block add to its columns, and in
    `behind` the decay over the blocks behind it.
    """
    smem, passing = x.smem, [h[hi] if x.c == 0 else F32(0.0) for hi in range(2)]  # one of four lanes has it until they are added
    to_columns.fill(0.0)
    for n in cutlass.range_constexpr(BLOCKS):
        k, q, d = load_normed(x, smem.k, 0, n), load_normed(x, smem.q, 1, n), decays_of(x, n)
        since, until, E = since_start(x, d), until_end(x, d), [d.whole(hi) for hi in range(2)]
        dq, dk, bk = [cute.make_rmem_tensor((4,), F32) for _ in range(3)]
        b, db, w_n = of_tokens(smem.beta, x.c, n), cute.make_rmem_tensor((2,), F32), flat(w, 4 * n, 4)
        for e in cutlass.range_constexpr(4):
            bk[e] = b[e % 2] * k[e]
        k16, bk16, q16, since16, until16 = [halves(t) for t in (k, bk, q, since, until)]
        of, grads = BlockInputs(k, q, b, k16, bk16, q16), (dq, dk, db, w_n)
        db.fill(0.0)
        kr, ac, pair = times(k16, until16), read_columns(x, n), of_tokens(smem.diagonal, x.c, n)
        store_block(kr, x.at_one(smem.k), n, F16)
        store_block(until16, x.at_one(smem.q), n, F16)
        right = widened(kr)
        for hi in cutlass.range_constexpr(2):
            passing[hi] = passing[hi] * E[hi] + right[2 * hi] * ac[2 * hi] + right[2 * hi + 1] * ac[2 * hi + 1]
        ql, kl = times(q16, since16), times(bk16, since16)
        qw, kw = widened(ql), widened(kl)
        for e in cutlass.range_constexpr(4):
            of_q, of_k = aq[4 * n + e], ak[4 * n + e]
            w_n[e] = qw[e] * of_q + kw[e] * of_k
            dq[e] = since[e] * of_q + pair[e % 2] * k[e]
            row = since[e] * of_k
            dk[e] = b[e % 2] * row + pair[e % 2] * q[e]
            db[e % 2] = db[e % 2] + k[e] * row
        words = diagonal_blocks(x, n)
        add_neighbours(x, d, of, words, grads)
        for s in (2, 4):
            add_level(x, s, d, of, words, grads)
        if x.is_activated:
            leave_sums(x, db, OF_STRENGTHS, n)
        store_block(dq, x.at_one(smem.dq), n, F16)
        store_block(dk, x.at_one(smem.dk), n, F16)
        for first in (0, 4):
            if cutlass.const_expr(first < n):
                add_columns(x, to_columns, behind, ql, kl, E, n, first)
        for first in (0, 4):
            if cutlass.const_expr(first + 3 > n):
                add_rows(x, aq, ak, kr, E, n, first)
    for hi in cutlass.range_constexpr(2):
        h[hi] = sum_over(ROW, passing[hi])


@cute.jit
def add_rows(
    x: cutlass.Constexpr,
    aq: cute.Tensor,
    ak: cute.Tensor,
    kr: cute.Tensor,
    E: cutlass.Constexpr,
    n: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    """What rows behind block n, of four blocks, read of it."""
    of_p, of_a = [blocks_of_a_column(x, which, n, first) for which in range(2)]
    for r in cutlass.range_constexpr(max(first, n + 1), first + 4):
        for acc, words in ((aq, of_p), (ak, of_a)):
            for e in cutlass.range_constexpr(4):
                acc[4 * r + e] = acc[4 * r + e] * E[e // 2]
            add_product(x, acc, 4 * r, kr, words[r - first])


@cute.jit
def add_columns(
    x: cutlass.Constexpr,
    to_columns: cute.Tensor,
    behind: cutlass.Constexpr,
    ql: cute.Tensor,
    kl: cute.Tensor,
    E: cutlass.Constexpr,
    n: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    """What rows of block n write to columns before it, of four blocks."""
    of_p, of_a = [blocks_of_a_row(x, which, n, first) for which in range(2)]
    for c in cutlass.range_constexpr(first, min(first + 4, n)):
        part = cute.make_rmem_tensor((4,), F32)
        part.fill(0.0)
        add_product(x, part, 0, ql, of_p[c - first])
        add_product(x, part, 0, kl, of_a[c - first])
        for e in cutlass.range_constexpr(4):
            to_columns[4 * c + e] = to_columns[4 * c + e] + behind[c][e // 2] * part[e]
        behind[c] = [behind[c][hi] * E[hi] for hi in range(2)]


def column_at(x: Strip, n: int) -> Any:
    """Where a thread parks a block of what it holds of U dS^T."""
    return I32(x.smem.parked.iterator.toint()) + 8 * (32 * x.wid + x.lane) + 2048 * n


@cute.jit
def park_columns(x: cutlass.Constexpr, ac: cute.Tensor, unit: F32):
    """U dS^T out of the registers, in so many units, as fp16."""
    for n in cutlass.range_constexpr(BLOCKS):
        wide, out = cute.make_rmem_tensor((4,), F32), cute.make_rmem_tensor((4,), F16)
        for e in cutlass.range_constexpr(4):
            wide[e] = ac[4 * n + e] * unit
        out.store(wide.load().to(F16))
        cute.autovec_copy(cute.make_tensor(out.iterator, cute.make_layout((4, 1))), shared_at(column_at(x, n), F16, 4, 8))


@cute.jit
def read_columns(x: cutlass.Constexpr, n: cutlass.Constexpr):
    """They come back."""
    raw, out = cute.make_rmem_tensor((4,), F16), cute.make_rmem_tensor((4,), F32)
    cute.autovec_copy(shared_at(column_at(x, n), F16, 4, 8), cute.make_tensor(raw.iterator, cute.make_layout((4, 1))))
    out.store(raw.load().to(F32))
    return out


@cute.jit
def scale_parked(x: cutlass.Constexpr, by: F32):
    wide = cute.make_rmem_tensor((32,), F32)
    for n in cutlass.range_constexpr(BLOCKS):
        flat(wide, 4 * n, 4).store(read_columns(x, n).load())
    park_columns(x, wide, by)


@cute.jit
def last_pass(
    x: cutlass.Constexpr,
    w: cute.Tensor,
    h: cute.Tensor,
    to_columns: cute.Tensor,
    behind: cutlass.Constexpr,
    back: F32,
    sums: cute.Tensor,
):
    """Blocks from the last to the first, two at a time: completes dk in its tile, and the gates' gradients, which are sums over
    the tokens behind.

    `back` takes the chunk's units to true ones; sums are [2] of dt_bias and [2] of A_log.
    """
    smem, sum_behind = x.smem, [h[0], h[1]]
    sums.fill(0.0)
    for m in (3, 2, 1, 0):
        ac, dk, dg = (
            [read_columns(x, 2 * m + i) for i in range(2)],
            load_two(x.at(smem.dk), m, F16),
            cute.make_rmem_tensor((8,), F32),
        )
        right, until = load_two(x.at(smem.k), m, F16), load_two(x.at(smem.q), m, F16)
        for e in cutlass.range_constexpr(8):
            column = to_columns[8 * m + e] + behind[2 * m + e // 4][e // 2 % 2] * ac[e // 4][e % 4]
            dk[e] = dk[e] + until[e] * column
            w[8 * m + e] = w[8 * m + e] - right[e] * column
        store_two(dk, x.at(smem.dk), m, F16)
        for half in (1, 0):
            for hi in cutlass.range_constexpr(2):
                at = 2 * hi + 4 * half
                second, two = w[8 * m + at + 1], w[8 * m + at] + w[8 * m + at + 1]
                next_two = cute.arch.shuffle_sync_bfly(two, offset=1)
                next_four = cute.arch.shuffle_sync_bfly(two + next_two, offset=2)
                later = sum_behind[hi] + (F32(0.0) if x.c % 2 == 1 else next_two) + (F32(0.0) if x.c >= 2 else next_four)
                dg[at + 1] = later + second
                dg[at] = later + two
                sum_behind[hi] = sum_behind[hi] + two + next_two + next_four
        finish_gates(x, dg, back, sums, m)


@cute.jit
def leave_sums(x: cutlass.Constexpr, values: cute.Tensor, first: cutlass.Constexpr, n: cutlass.Constexpr):
    """Sums over our channels for each of a block's tokens, of which threads have [2]; they are added up when all warps have left
    theirs."""
    mParts = x.mParts
    for ci in cutlass.range_constexpr(2):
        total = sum_over(COLUMN, values[ci])
        if x.r == 0:
            mParts[first + x.wid, token_of(x, ci, n)] = total


@cute.jit
def finish_head_gates(x: cutlass.Constexpr, mShares: cute.Tensor, t: I32):
    """`finish_gates` where there is one gate a head, a thread for each token t; mShares [2, 128] has one value a token."""
    dg, of_A, raw = [cute.make_rmem_tensor((1,), F32) for _ in range(3)]
    mParts, mGate, mDg = x.mParts, x.gate.mGate, x.gate.mDg
    dg.fill(0.0)
    for i in cutlass.range_constexpr(8):
        dg[0] = dg[0] + mParts[OF_GATES + i, t]
    if cutlass.const_expr(x.variant.is_raw):
        raw[0] = mGate[cutlass.min(t, x.left - 1), 0].to(F32) + x.gate.bias[0]
        through_gate(x, dg, raw, of_A)
        for i, share in enumerate((dg, of_A)):
            mShares[i, t] = share[0] if t < x.left else F32(0.0)
            mShares[i, 64 + t] = F32(0.0)
    if t < x.left:
        mDg[t, 0] = dg[0].to(x.variant.g_type)


@cute.jit
def finish_gates(x: cutlass.Constexpr, dg: cute.Tensor, back: F32, sums: cute.Tensor, m: cutlass.Constexpr):
    """From the gradients of log decays to those of raw gates, which leave; adds to the sums of dt_bias and A_log. Where there is
    one gate a head, sums over our channels leave."""
    for e in cutlass.range_constexpr(8):
        dg[e] = dg[e] * back
    if cutlass.const_expr(x.variant.is_scalar):
        for i in cutlass.range_constexpr(2):
            two = cute.make_rmem_tensor((2,), F32)
            for ci in cutlass.range_constexpr(2):
                two[ci] = dg[4 * i + ci] + dg[4 * i + 2 + ci]
            leave_sums(x, two, OF_GATES, 2 * m + i)
    else:
        finish_channel_gates(x, dg, sums, m)


@cute.jit
def finish_channel_gates(x: cutlass.Constexpr, dg: cute.Tensor, sums: cute.Tensor, m: cutlass.Constexpr):
    if cutlass.const_expr(x.variant.is_raw):
        raw, of_A = cute.make_rmem_tensor((8,), F32), cute.make_rmem_tensor((8,), F32)
        if cutlass.const_expr(x.variant.has_gate_tile):
            raw.store(load_two(x.at(x.smem.g), m, BF16).load())
        else:
            for i in cutlass.range_constexpr(2):
                read_gates(x, flat(raw, 4 * i, 4), 2 * m + i)
        add_bias(x, raw)
        if x.left < 64:
            for e in cutlass.range_constexpr(8):
                dg[e] = dg[e] if token_of(x, e, 2 * m + e // 4) < x.left else F32(0.0)
        through_gate(x, dg, raw, of_A)
        for e in cutlass.range_constexpr(8):
            hi = e // 2 % 2
            sums[hi] = sums[hi] + dg[e]
            sums[2 + hi] = sums[2 + hi] + of_A[e]
    if cutlass.const_expr(x.variant.has_gate_tile):
        store_two(dg, x.at(x.smem.g), m, BF16)
    else:
        mDg = x.gate.mDg
        for e in cutlass.range_constexpr(8):
            token, channel = token_of(x, e, 2 * m + e // 4), channel_of(x, e)
            if token < x.left:
                mDg[token, channel] = dg[e]


@cute.jit
def pair_of_words(words: cute.Tensor, i: cutlass.Constexpr, j: cutlass.Constexpr):
    """Two of a matrix's words as a B operand."""
    out = cute.make_rmem_tensor(((2, 2), 1), F16)
    both = cute.recast_tensor(flat(out, 0, 4), I32)
    both[0], both[1] = words[i], words[j]
    return out


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
