# SPDX-License-Identifier: Apache-2.0
"""The steps of `kda_intra.py`, in their order. They meet in shared memory, of which `kda_intra_smem.py` has the layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from cula.core.constants import LOG2_E
from cula.ops.cute.common.fragments import (
    as_a,
    corner,
    flat,
    lane_address,
    load_matrix,
    read_factors,
    round_tf32,
    shared_at,
    store_matrix,
    store_quarters,
    store_rows,
    widen,
)
from cula.ops.cute.common.gate import NO_DECAY, bounded_unit, exp2, gates_of_channels, inverse_norm, multiply, softplus_unit
from cula.ops.cute.common.inverse import below, inverse_columns
from cula.ops.cute.common.kda_intra_smem import SmemLayout
from cula.ops.cute.common.kda_variant import KdaVariant
from cula.ops.cute.common.squares import squares_at
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, TF32
from cula.ops.cute.kda_abi import TILE_BYTES

KEYS, QUERIES = 0, 1  # sides of a block of threads, and tiles of a pair
HALF = TILE_BYTES // 2  # half of a tile's columns

# The tensor cores drop the low 13 bits of a float32 operand. On average that takes 0.72 * 2^-11 off each of two operands; given
# back here, what is left is the error of rounding, without an instruction for each.
UNBIASED = 1.0 + 2 * 0.72 * 2.0**-11
FASTEST = -512.0  # log2 of a token's decay; what is faster is 0 in float32 all the same, and no infinity in fp16
# The same for gates of channels without a bound. Exponents of diagonal blocks then stay within 4 * 24 = 96, and what such a token
# should have forgotten, and has not, is 2^-24 of it: less than the chunk's own roundings by 2^12.
STEEPEST = -24.0


class IntraMmas(NamedTuple):
    """Products of one warp, by the type of their operands."""

    f16: Any
    bf16: Any
    tf32: Any


def intra_mmas() -> IntraMmas:
    of_16, shape = [warp.MmaF16BF16Op(t, F32, (16, 8, 16)) for t in (F16, BF16)], (16, 16, 16)
    mma_f16, mma_bf16 = [cute.make_tiled_mma(op, (1, 1, 1), permutation_mnk=shape) for op in of_16]
    return IntraMmas(mma_f16, mma_bf16, cute.make_tiled_mma(warp.MmaTF32Op((16, 8, 8)), (1, 1, 1)))


class Chunk(NamedTuple):
    """A chunk as one warp sees it."""

    smem: SmemLayout
    variant: KdaVariant
    mmas: IntraMmas
    side: Any  # KEYS or QUERIES
    block_row: Any  # which 16 rows are the warp's
    lane: Any
    r: Any  # lane / 4
    c: Any  # lane % 4
    left: Any  # tokens
    # Who takes the operands of blocks below the diagonal, where those are not `second_pass`'s: an object with `leave_rows` and
    # `leave_keys`, which the first pass calls. Then kb and qg are made in that pass, whatever their type is.
    scores: Any = None
    has_pairs: bool = False  # there are instructions for two float32 at once

    def anew(self, thread: Any) -> Chunk:
        """The same by the thread's number: else the compiler keeps what it has made of the lane's through all that is between."""
        lane = thread & 31
        return self._replace(lane=lane, r=lane >> 2, c=lane & 3)

    def at(self, t: Any, channels: int = 64) -> Any:
        """The address of our rows in a 16-bit tile [64, 128], from our half of the channels on; see `lane_address`."""
        return lane_address(t, self.block_row, self.lane) + HALF * self.side * (channels // 64)

    def pairs_of(self, table: Any) -> Any:
        """The address of our block's row of a table, at our first pair of channels in our half of them."""
        size = table.element_type.width // 8
        return address(table) + 128 * size * self.block_row + size * (64 * self.side + 2 * self.c)


def address(t: Any) -> Any:
    return I32(t.iterator.toint())


def pair(t: Any, start: Any) -> Any:
    """Two registers, one row."""
    return cute.make_tensor(t.iterator + start, cute.make_layout((1, 2)))


def four_of(t: Any, j: int) -> Any:
    """Half of a transposed block's registers as a B operand."""
    return cute.make_tensor(t.iterator + 4 * j, cute.make_layout(((2, 2), 1)))


def column(t: Any) -> Any:
    return cute.make_tensor(t.iterator, cute.make_layout((8, 1)))


@cute.jit
def triangles(r: I32, c: I32):
    """A operands of ones where i <= t and where i > t: products with them sum over tokens."""
    until, after = [cute.make_rmem_tensor(((2, 2, 2), 1), F16) for _ in range(2)]
    for e in cutlass.range_constexpr(8):
        until[e] = F16(1.0) if 2 * c + e % 2 + 8 * (e // 4) <= r + 8 * (e // 2 % 2) else F16(0.0)
        after[e] = F16(1.0) - until[e]
    return until, after


@cute.jit
def small_triangles(r: I32, c: I32):
    """A operands for sums over the 8 tokens of half a block; a product with one makes two sums for each token t. From the first
    token to t, and from behind t to the last; from behind the fourth to t, or minus from behind t to the fourth, and over all."""
    ends, middles = [cute.make_rmem_tensor(((2, 2), 1), F16) for _ in range(2)]
    for ci in cutlass.range_constexpr(2):
        i = 2 * c + ci
        ends[ci] = F16(1.0) if i <= r else F16(0.0)
        ends[2 + ci] = F16(1.0) - ends[ci]
        middles[ci] = F16(1.0) if i > 3 and i <= r else (F16(-1.0) if i <= 3 and i > r else F16(0.0))
        middles[2 + ci] = F16(1.0)
    return ends, middles


def sums_of(variant: KdaVariant, r: Any, c: Any) -> Any:
    """The two A operands that a variant sums gates with."""
    return small_triangles(r, c) if variant.is_steep else triangles(r, c)


# Decays


@cute.jit
def units_of_tokens(x: cutlass.Constexpr, A_log: F32, lower: F32):
    """What the activated gates of our four tokens are multiplied by; rows past the end decay nothing."""
    unit = cute.make_rmem_tensor((4,), F32)
    for e in cutlass.range_constexpr(4):
        token = 16 * x.block_row + 2 * x.c + e % 2 + 8 * (e // 2)
        if cutlass.const_expr(x.variant.gate == "gate"):
            unit[e] = bounded_unit(lower) if token < x.left else F32(NO_DECAY)
        elif cutlass.const_expr(x.variant.gate == "softplus"):
            unit[e] = softplus_unit(A_log) if token < x.left else F32(0.0)
        else:
            unit[e] = F32(LOG2_E) if token < x.left else F32(0.0)
    return unit


@cute.jit
def sum_gates(x: cutlass.Constexpr, raw: cute.Tensor, A_log: F32, slope: F32, lower: F32, until: cute.Tensor, after: cute.Tensor):
    """Log2 decays and their sums over our block, of our half of the channels.

    Gates are read with tokens in pairs, which is the B operand of their sums, and left as fp16 where kr will be. Those that have
    no tile in shared memory come in registers (`raw`).

    One gate a head needs no memory. For it this returns L and L_16 - L of our rows.
    """
    smem, gate, is_scalar, mma_f16 = x.smem, x.variant.gate, x.variant.is_scalar, x.mmas.f16
    unit = units_of_tokens(x, A_log, lower)
    L, rest = [cute.make_rmem_tensor(((2, 2), 1, 1), F32) for _ in range(2)]
    if cutlass.const_expr(is_scalar):
        g16 = cute.make_rmem_tensor(((2, 2), 1), F16)
        gates_of_channels(raw, g16, slope, (smem.bias[0],), unit, gate, FASTEST)
        L.fill(0.0)
        rest.fill(0.0)
        cute.gemm(mma_f16, L, until, g16, L)
        cute.gemm(mma_f16, rest, after, g16, rest)
        if x.r == 7:  # row 15, of every channel
            for j in cutlass.range_constexpr(8):
                at = 64 * x.side + 8 * j + 2 * x.c
                smem.sums[x.block_row, at], smem.sums[x.block_row, at + 1] = L[2], L[2]
    else:
        if cutlass.const_expr(x.variant.has_gate_tile):
            for n in cutlass.range(4, unroll=1):
                sum_channels(x, raw, slope, unit, until, after, n)
        else:
            for n in cutlass.range_constexpr(4):
                sum_channels(x, raw, slope, unit, until, after, n)
    return L, rest


@cute.jit
def sum_channels(
    x: cutlass.Constexpr, raw: cute.Tensor, slope: F32, unit: cute.Tensor, until: cute.Tensor, after: cute.Tensor, n: I32
):
    """`sum_gates` of sixteen channels."""
    smem, variant = x.smem, x.variant
    bias_at, sum_at = address(smem.bias) + 256 * x.side + 4 * x.r, x.pairs_of(smem.sums)
    bias = [shared_at(bias_at + 64 * n + 32 * hi, F32, 1, 4)[0] for hi in range(2)]
    if cutlass.const_expr(variant.has_gate_tile):
        raw8 = load_matrix(x.at(smem.g) ^ 32 * n, variant.g_type, True)
    else:
        raw8 = flat(raw, 8 * n, 8)
    decays = cute.make_rmem_tensor((8,), F16)
    fastest = STEEPEST if cutlass.const_expr(variant.is_steep) else None
    gates_of_channels(raw8, decays, slope, bias, unit, variant.gate, fastest, x.has_pairs)
    for j in cutlass.range_constexpr(2):
        prefix = cute.make_rmem_tensor(((2, 2), 1, 1), F32)
        prefix.fill(0.0)
        if cutlass.const_expr(variant.is_steep):
            for half in cutlass.range_constexpr(2):
                add_eight(prefix, after, decays, 2 * j + half)
        else:
            cute.gemm(x.mmas.f16, prefix, until, four_of(decays, j), prefix)
        if x.r == 7:  # row 15
            last_row = cute.make_tensor(prefix.iterator + 2, cute.make_layout((2, 1)))
            cute.autovec_copy(last_row, shared_at(sum_at + 64 * n + 32 * j, F32, 2, 8))
    store_matrix(decays, x.at(smem.steps) ^ 32 * n, True)


@cute.jit
def add_eight(acc: cute.Tensor, which: cute.Tensor, decays: cute.Tensor, i: cutlass.Constexpr):
    """acc += sums over 8 tokens, by one of `small_triangles`, of register i of a transposed block: tokens 8 (i % 2) and on."""
    mma = cute.make_mma_atom(warp.MmaF16BF16Op(F16, F32, (16, 8, 8)))
    of_decays = cute.make_tensor(decays.iterator + 2 * i, cute.make_layout(((2,), 1)))
    cute.gemm(mma, corner(acc, 0), which, of_decays, corner(acc, 0))


@cute.jit
def norms(x: cutlass.Constexpr, scale: F32):
    """(Squares, inverse norms) of rows r and r + 8 of our k or q; the scale is in the norms of q."""
    smem = x.smem
    size = squares_at(x.mmas.bf16, lane_address(smem.k, x.block_row, x.lane) + smem.to_q * x.side, x.r, BF16)
    return size, leave_norms(x, size, scale)


@cute.jit
def leave_norms(x: cutlass.Constexpr, size: cute.Tensor, scale: F32):
    """Inverse norms from squares, to shared memory too."""
    smem = x.smem
    inverse = cute.make_rmem_tensor((2,), F32)
    for i in cutlass.range_constexpr(2):
        inverse[i] = F32(1.0) if x.side == KEYS else scale
        if cutlass.const_expr(x.variant.is_normalised):
            inverse[i] = inverse[i] * inverse_norm(size[i])
        if x.c == 0:
            smem.norms[16 * x.block_row + x.r + 8 * i, x.side] = inverse[i]
    return inverse


@cute.jit
def factors(x: cutlass.Constexpr, channel: I32, vec: cute.Tensor):
    """The decays before, after and between blocks, by a thread for each channel. Returns e^{G_C} of it, if its side is KEYS."""
    smem, dtype = x.smem, x.variant.dtype
    wide = smem.after.element_type
    sums, before = cute.make_rmem_tensor((4,), F32), F32(0.0)
    for i in cutlass.range_constexpr(4):
        sums[i] = smem.sums[i, channel]
    whole = sums[0] + sums[1] + sums[2] + sums[3]
    kept = F32(0.0)
    if x.side == KEYS:
        if cutlass.const_expr(not x.variant.is_steep):
            for i in cutlass.range_constexpr(4):
                smem.inverses[i, channel] = F32(UNBIASED) * exp2(-sums[i])
        kept = exp2(whole)
        vec[channel] = kept
    else:
        for i in cutlass.range_constexpr(4):
            smem.before[i, channel] = exp2(before).to(wide)
            before += sums[i]
            smem.after[i, channel] = exp2(whole - before).to(wide)
        for i, between in enumerate((sums[1], sums[2], sums[1] + sums[2])):  # of blocks (2, 0), (3, 1), (3, 0)
            smem.between[i, channel] = exp2(between).to(dtype)
    return kept


# Scores and tiles


@cute.jit
def first_pass(
    x: cutlass.Constexpr, until: cute.Tensor, after: cute.Tensor, L_scalar: cute.Tensor, rest_scalar: cute.Tensor, b: cute.Tensor
):
    """k e^L, q e^L, kr, and keys for the rows below, to shared memory; returns the diagonal blocks of A and P as far as our
    channels add to them. It goes through sixteen channels at a time."""
    smem, dtype, is_scalar, (mma_f16, _, mma_tf32) = x.smem, x.variant.dtype, x.variant.is_scalar, x.mmas
    is_f16 = dtype is F16
    wide = smem.after.element_type
    diagonal_a, diagonal_p = [cute.make_rmem_tensor((8,), F32) for _ in range(2)]
    diagonal_a.fill(0.0)
    diagonal_p.fill(0.0)
    k_at = x.at(smem.k)  # others are where `from_k` says: one address for all
    from_k = lambda t: address(t) - address(smem.k)
    back_at, post_at, pre_at = x.pairs_of(smem.inverses), x.pairs_of(smem.after), x.pairs_of(smem.before)
    key_at = address(smem.keys) + 16 * x.lane + 2048 * x.side + 4096 * x.block_row
    step = 16 * wide.width // 8
    to = x.scores
    makes_all = not is_f16 or to is not None  # kb and qg too
    # A loop would take an object whose method it calls for something that it changes.
    leave_rows, leave_b = (None, None) if cutlass.const_expr(to is None) else (to.leave_rows, to.leave_keys)
    of_rows = None if cutlass.const_expr(to is None) else norms_of_rows(x)
    for n in cutlass.range(4, unroll=4 if cutlass.const_expr(smem.T is None) else 1):  # fused, registers are fewer
        decays = cute.make_rmem_tensor((8,), F16)
        if cutlass.const_expr(not is_scalar):
            decays = load_matrix((k_at ^ 32 * n) + from_k(smem.steps), F16, True)
        raw_k, raw_q = [load_matrix((k_at ^ 32 * n) + at, BF16) for at in (0, smem.to_q)]
        back, post = read_factors(back_at + 64 * n, F32), read_factors(post_at + step * n, wide)
        inv_k, inv_q = norms_of_rows(x) if cutlass.const_expr(to is None) else of_rows  # each time where registers are few
        since, rest = [cute.make_rmem_tensor(((2, 2), 1, 2), F32) for _ in range(2)]  # L, L_16 - L
        if cutlass.const_expr(is_scalar):
            for e in cutlass.range_constexpr(8):  # all columns are alike
                since[e], rest[e] = L_scalar[2 * (e // 2 % 2)], rest_scalar[2 * (e // 2 % 2)]
        for total, which in () if cutlass.const_expr(is_scalar) else ((since, until), (rest, after)):
            total.fill(0.0)
            for j in cutlass.range_constexpr(2):
                of_j = corner(total, 4 * j)
                cute.gemm(mma_f16, of_j, which, four_of(decays, j), of_j)
        for e in cutlass.range_constexpr(8):
            since[e] = exp2(since[e])
        for e in cutlass.range_constexpr(8):
            rest[e] = exp2(rest[e])
        # keys first: what queries need of them is `right` alone, and registers are few
        k, left_k, down, right = [cute.make_rmem_tensor((8,), F32) for _ in range(4)]
        widen(raw_k, k)
        multiply(k, inv_k, lambda e: e // 2 % 2, x.has_pairs)  # e = ci + 2 ri + 4 hi
        down.store(k.load())
        multiply(down, rest, lambda e: e, x.has_pairs)
        for e in cutlass.range_constexpr(8):  # not in pairs: operands of tf32 have their registers in another order
            left_k[e] = k[e] * since[e]
        kl8, key8, out, post8 = [cute.make_rmem_tensor((8,), t) for t in (dtype, dtype, dtype, wide)]
        for e in cutlass.range_constexpr(8):
            post8[e] = post[e % 2 + 2 * (e // 4)]
        kl8.store(left_k.load().to(dtype))
        key8.store(down.load().to(dtype))
        out.store(((key8 if cutlass.const_expr(is_f16) else down).load() * post8.load()).to(dtype))
        if cutlass.const_expr(to is None):
            store_matrix(kl8, (k_at ^ 32 * n) + from_k(smem.kl_ql))
        store_matrix(out, (k_at ^ 32 * n) + from_k(smem.kr))
        if cutlass.const_expr(to is None):
            leave_keys(x, key8, key_at + 512 * n)
        else:
            leave_rows(kl8, KEYS, 16 * n)
            leave_b(x, key8, n)
        if cutlass.const_expr(is_scalar):  # operands of the diagonal blocks decay later, entry by entry
            right.store(k.load())
            add_block(mma_tf32, diagonal_a, k, right)
        else:
            right.store(down.load())
            multiply(right, back, lambda e: e % 2 + 2 * (e // 4), x.has_pairs)
            add_block(mma_tf32, diagonal_a, left_k, right)
        q, left_q, ql8 = [cute.make_rmem_tensor((8,), t) for t in (F32, F32, dtype)]
        widen(raw_q, q)
        multiply(q, inv_q, lambda e: e // 2 % 2, x.has_pairs)
        for e in cutlass.range_constexpr(8):
            left_q[e] = q[e] * since[e]
        ql8.store(left_q.load().to(dtype))
        if cutlass.const_expr(to is None):
            store_matrix(ql8, (k_at ^ 32 * n) + from_k(smem.kl_ql) + TILE_BYTES)
        if cutlass.const_expr(to is not None):
            leave_rows(ql8, QUERIES, 16 * n)
        add_block(mma_tf32, diagonal_p, q if cutlass.const_expr(is_scalar) else left_q, right)
        if cutlass.const_expr(makes_all):  # kb and qg, in bf16 from what has not been rounded
            pre, pre8, b8 = read_factors(pre_at + step * n, wide), *[cute.make_rmem_tensor((8,), wide) for _ in range(2)]
            for e in cutlass.range_constexpr(8):
                pre8[e], b8[e] = pre[e % 2 + 2 * (e // 4)], b[e // 2 % 2].to(wide)
            out.store(((kl8 if cutlass.const_expr(is_f16) else left_k).load() * pre8.load() * b8.load()).to(dtype))
            store_matrix(out, k_at ^ 32 * n)
            out.store(((ql8 if cutlass.const_expr(is_f16) else left_q).load() * pre8.load()).to(dtype))
            store_matrix(out, (k_at ^ 32 * n) + TILE_BYTES)
    hand_over(x, diagonal_a)
    return diagonal_a, diagonal_p


@cute.jit
def norms_of_rows(x: cutlass.Constexpr):
    """Inverse norms of k and of q, of rows r and r + 8."""
    inv_k, inv_q = [cute.make_rmem_tensor((2,), F32) for _ in range(2)]
    for i in cutlass.range_constexpr(2):
        row = 16 * x.block_row + x.r + 8 * i
        inv_k[i], inv_q[i] = x.smem.norms[row, KEYS], x.smem.norms[row, QUERIES]
    return inv_k, inv_q


@cute.jit
def leave_keys(x: cutlass.Constexpr, key8: cute.Tensor, at: I32):
    """Keys for the rows below, as B operands: [n-block = ri][hi][ci]."""
    if x.block_row < 3:
        as_b = cute.make_rmem_tensor((8,), key8.element_type)
        for e in cutlass.range_constexpr(8):
            as_b[e % 2 + 2 * (e // 4) + 4 * (e // 2 % 2)] = key8[e]
        cute.autovec_copy(column(as_b), shared_at(at, key8.element_type, 8, 16))


@cute.jit
def hand_over(x: cutlass.Constexpr, diagonal_a: cute.Tensor):
    """The other side has the other half of the channels: A's goes to the keys' now, P's to the queries' when tables are free
    (`join_halves`)."""
    if x.side == QUERIES:
        for nb in cutlass.range_constexpr(2):
            for ri in cutlass.range_constexpr(2):
                cute.autovec_copy(pair(diagonal_a, 2 * ri + 4 * nb), entries(x, nb, ri))


def entries(x: Chunk, nb: int, ri: int) -> Any:
    """Two neighbours of our diagonal block of A in shared memory."""
    return cute.local_tile(x.smem.diagonal[None, None, x.block_row], (1, 2), (x.r + 8 * ri, 4 * nb + x.c))


@cute.jit
def add_block(mma: cute.TiledMma, acc: cute.Tensor, x: cute.Tensor, y: cute.Tensor):
    """acc [16, 16] += x y^T over 16 channels, in tf32; x and y are arrays of rows."""
    for hi in cutlass.range_constexpr(2):
        a = cute.make_rmem_tensor(((2, 2), 1), F32)
        for e in cutlass.range_constexpr(4):
            a[e // 2 + 2 * (e % 2)] = x[e + 4 * hi]
        for nb in cutlass.range_constexpr(2):
            of_y = cute.make_tensor(y.iterator + 2 * nb + 4 * hi, cute.make_layout((2, 1)))
            d = corner(acc, 4 * nb)
            cute.gemm(mma, d, cute.recast_tensor(a, TF32), cute.recast_tensor(of_y, TF32), d)


@cute.jit
def entry_decay(L: cute.Tensor, c: I32, nb: cutlass.Constexpr, ri: cutlass.Constexpr, ci: cutlass.Constexpr):
    """e^{L_t - L_i} of an entry of a diagonal block, one gate a head: no decay is too fast for that."""
    L_col = cute.arch.shuffle_sync(L[2 * nb], 4 * (2 * c + ci))
    return exp2(L[2 * ri] - L_col)


@cute.jit
def whole_entry(
    x: cutlass.Constexpr, entry: F32, L: cute.Tensor, nb: cutlass.Constexpr, ri: cutlass.Constexpr, ci: cutlass.Constexpr
):
    """An entry of a diagonal block from the sum of its halves: times what its operands did not have."""
    if cutlass.const_expr(x.variant.is_scalar):
        entry = entry * (F32(UNBIASED) * entry_decay(L, x.c, nb, ri, ci))
    elif cutlass.const_expr(x.variant.is_steep):
        entry = entry * F32(UNBIASED)
    return entry


@cute.jit
def join_halves(x: cutlass.Constexpr, diagonal_a: cute.Tensor, diagonal_p: cute.Tensor, b: cute.Tensor, L: cute.Tensor):
    """The two sides' halves of diagonal blocks come together: the side of the keys adds up A's, as they are to be inverted, and
    hands its half of P's over."""
    if x.side == KEYS:
        for j in cutlass.range_constexpr(2):
            cute.autovec_copy(flat(diagonal_p, 4 * j, 4), x.smem.halves[None, j, x.lane, x.block_row])
        for nb in cutlass.range_constexpr(2):
            for ri in cutlass.range_constexpr(2):
                two = cute.make_rmem_tensor((1, 2), F32)
                cute.autovec_copy(entries(x, nb, ri), two)
                for ci in cutlass.range_constexpr(2):
                    entry = whole_entry(x, two[ci] + diagonal_a[ci + 2 * ri + 4 * nb], L, nb, ri, ci)
                    two[ci] = entry * b[ri] if 8 * nb + 2 * x.c + ci < x.r + 8 * ri else F32(0.0)
                cute.autovec_copy(two, entries(x, nb, ri))


@cute.jit
def second_pass(x: cutlass.Constexpr):
    """Returns the blocks d = 1, 2, 3 below the diagonal of our rows, [.., d - 1]: k e^L or q e^L against keys of other rows."""
    smem, dtype = x.smem, x.variant.dtype
    mma, wide = x.mmas.f16 if cutlass.const_expr(dtype is F16) else x.mmas.bf16, smem.after.element_type
    own_at, key_at = x.at(smem.kl_ql, 128), address(smem.keys) + 16 * x.lane
    between_at = address(smem.between) + 2 * x.c * (dtype.width // 8)
    scores = cute.make_rmem_tensor(((2, 2), 1, 2, 3), F32)
    scores.fill(0.0)
    for d in cutlass.range_constexpr(1, 4):
        if x.block_row >= d:
            their_at = key_at + 4096 * (x.block_row - d)
            decay_at = between_at + 256 * (x.block_row - 2 if cutlass.const_expr(d == 2) else I32(2))
            for half in cutlass.range(2, unroll=1):
                for s in cutlass.range_constexpr(4):
                    ours, theirs = load_matrix((own_at ^ 32 * s) + HALF * half, dtype), cute.make_rmem_tensor((8,), dtype)
                    cute.autovec_copy(shared_at(their_at + 512 * s + 2048 * half, dtype, 8, 16), column(theirs))
                    if cutlass.const_expr(d > 1):  # the blocks between
                        decay, decay8 = read_factors(decay_at + 32 * s + 128 * half, dtype), cute.make_rmem_tensor((8,), dtype)
                        for e in cutlass.range_constexpr(8):
                            decay8[e] = decay[e % 4]
                        theirs.store((theirs.load().to(wide) * decay8.load().to(wide)).to(dtype))
                    for nb in cutlass.range_constexpr(2):
                        block = corner(scores, 8 * (d - 1) + 4 * nb)
                        cute.gemm(mma, block, as_a(ours), four_of(theirs, nb), block)
    return scores


@cute.jit
def scale_rows(x: cutlass.Constexpr, b: cutlass.Constexpr):
    """k e^L becomes kb and q e^L becomes qg, in place. Where b is None, T gets it instead of kb."""
    smem = x.smem
    own_at, pre_at = x.at(smem.kl_ql, 128), address(smem.before) + 256 * x.block_row + 4 * x.c
    row8 = cute.make_rmem_tensor((8,), F16)
    for e in cutlass.range_constexpr(8 if cutlass.const_expr(b is not None) else 0):
        row8[e] = (b[e // 2 % 2] if x.side == KEYS else F32(1.0)).to(F16)
    for half in cutlass.range(2, unroll=1):
        rows = [load_matrix((own_at ^ 32 * s) + HALF * half, F16) for s in range(4)]
        pres = [read_factors(pre_at + 32 * s + 128 * half, F16) for s in range(4)]
        for s, pre, ours in zip(range(4), pres, rows):
            pre8, scaled = [cute.make_rmem_tensor((8,), F16) for _ in range(2)]
            for e in cutlass.range_constexpr(8):
                pre8[e] = pre[e % 2 + 2 * (e // 4)]
            scaled.store(ours.load() * pre8.load())
            if cutlass.const_expr(b is not None):
                scaled.store(scaled.load() * row8.load())
            store_matrix(scaled, (own_at ^ 32 * s) + HALF * half)


# Squares


@cute.jit
def place_p(x: cutlass.Constexpr, scores: cute.Tensor, diagonal: cute.Tensor, L: cute.Tensor):
    """Our rows of P to shared memory (`out`)."""
    smem, dtype = x.smem, x.variant.dtype
    lower = cute.make_rmem_tensor((24,), dtype)
    lower.store(flat(scores, 0, 24).load().to(dtype))
    for j in cutlass.range_constexpr(2):
        half = cute.make_rmem_tensor((4,), F32)
        cute.autovec_copy(smem.halves[None, j, x.lane, x.block_row], half)
        for e in cutlass.range_constexpr(4):
            row, col = x.r + 8 * (e // 2), 8 * j + 2 * x.c + e % 2
            entry = whole_entry(x, diagonal[4 * j + e] + half[e], L, j, e // 2, e % 2)
            diagonal[4 * j + e] = entry if col <= row else F32(0.0)
    cute.arch.sync_warp()
    out_at = lane_address(smem.out, x.block_row, x.lane)
    block, nothing = cute.make_rmem_tensor((8,), dtype), cute.make_rmem_tensor((8,), dtype)
    nothing.fill(0.0)
    block.store(diagonal.load().to(dtype))
    store_matrix(block, out_at ^ 32 * x.block_row)
    for d in cutlass.range_constexpr(1, 4):
        if x.block_row >= d:
            store_matrix(flat(lower, 8 * (d - 1), 8), out_at ^ 32 * (x.block_row - d))
        if x.block_row + d < 4:
            store_matrix(nothing, out_at ^ 32 * (x.block_row + d))


@cute.jit
def place_a(x: cutlass.Constexpr, scores: cute.Tensor, b: cute.Tensor):
    """Our rows of A, the blocks below the diagonal, to where they are to be read from."""
    smem = x.smem
    for d in cutlass.range_constexpr(1, 4):
        if x.block_row >= d:
            block_a = below(smem.below, x.block_row, x.block_row - d)
            for nb in cutlass.range_constexpr(2):
                for ri in cutlass.range_constexpr(2):
                    two, e = cute.make_rmem_tensor((1, 2), F32), 2 * ri + 4 * nb + 8 * (d - 1)
                    two[0], two[1] = scores[e] * b[ri], scores[e + 1] * b[ri]
                    round_tf32(two)
                    cute.autovec_copy(two, cute.local_tile(block_a, (1, 2), (x.r + 8 * ri, 4 * nb + x.c)))


@cute.jit
def invert(x: cutlass.Constexpr, cols: cute.Tensor, b: cutlass.Constexpr = None):
    """cols <- our rows of T^T, or of (T b)^T: block column J = block_row of T. All rows of A must be in place."""
    inverse_columns(x.mmas.tf32, x.smem.below, x.smem.diagonal, x.block_row, x.lane, cols, b)


@cute.jit
def place_t(x: cutlass.Constexpr, cols: cute.Tensor, to: cute.Tensor):
    """Our rows of T^T to a tile in shared memory."""
    out_at, nothing = lane_address(to, x.block_row, x.lane), cute.make_rmem_tensor((8,), x.variant.dtype)
    nothing.fill(0.0)
    for d in cutlass.range_constexpr(4):
        if x.block_row + d < 4:
            store_matrix(flat(cols, 8 * d, 8), out_at ^ 32 * (x.block_row + d))
        if d > 0 and x.block_row >= d:
            store_matrix(nothing, out_at ^ 32 * (x.block_row - d))


@cute.jit
def send_square(x: cutlass.Constexpr, m: cute.Tensor, record: I32, absent: cutlass.Constexpr):
    """Our rows of what lies in `out` to global memory: all, or by quarters without an `absent` one."""
    if cutlass.const_expr(absent is None):
        store_rows(x.smem.out, m, x.block_row, x.lane, record)
    else:
        store_quarters(x.smem.out, m, x.block_row, x.lane, record, absent)
