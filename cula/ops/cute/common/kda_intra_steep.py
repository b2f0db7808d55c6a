# SPDX-License-Identifier: Apache-2.0
"""The first pass of `kda_intra.py` for gates of channels that may decay at any speed.

A diagonal block of 16x16 scores is made of three blocks of 8x8, with L the log decay summed from the start of the 16 rows:

    on the diagonal, rows 0-7      e^{L_t - L_4} e^{L_4 - L_i}, from the middle of their rows: within 2^96 by `STEEPEST`
    on the diagonal, rows 8-15     e^{L_t - L_12} e^{L_12 - L_i}
    below, rows 8-15 by 0-7        e^{L_t - L_8} e^{L_8 - L_i}, both at most 1

The operands are float32, read as tf32. Entries above the diagonal may be infinite; they are selected away, not multiplied. An A
operand has 16 rows, so it takes 8 of k and 8 of q: each product makes a block of A and one of P. Exponents are sums over the 8
tokens of half a block by matrices of 0, 1 and -1 (`small_triangles`); that nothing cancels in them is why they may be large.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.fragments import corner, flat, load_matrix, read_pair, store_columns, widen
from cula.ops.cute.common.gate import exp2, multiply
from cula.ops.cute.common.kda_intra_steps import KEYS, QUERIES, Chunk, add_eight, address, first_pass, hand_over, leave_keys
from cula.ops.cute.common.tiles import BF16, F16, F32, TF32
from cula.ops.cute.kda_abi import TILE_BYTES


def first_pass_of(x: Chunk, until: Any, after: Any, L: Any, rest: Any, b: Any) -> Any:
    """The first pass of a variant."""
    return first_pass_steep(x, until, after, b) if x.variant.is_steep else first_pass(x, until, after, L, rest, b)


class Exponentials(NamedTuple):
    """Of sums of decays, at rows r, r + 8 and two channels, [ci, ri]; L_t sums from the start of a block of 16 rows to t."""

    since: Any  # e^{L_t}
    rest: Any  # e^{L_16 - L_t}
    level: Any  # e^{L_8 - L_t}, e^{L_t - L_8}: from the half's end to the middle, and from the middle on
    ahead: Any  # e^{L_t - L_4}, e^{L_t - L_12}: from the middle of each half
    back: Any  # the other way


@cute.jit
def exponentials(decays: cute.Tensor, j: cutlass.Constexpr, ends: cute.Tensor, middles: cute.Tensor):
    """Those of channels 8 j + 2 c + ci. Each exponent is a sum of decays, not a difference of sums."""
    first, second, around_first, around_second = [cute.make_rmem_tensor((4,), F32) for _ in range(4)]
    for total, which, half in ((first, ends, 0), (second, ends, 1), (around_first, middles, 0), (around_second, middles, 1)):
        total.fill(0.0)
        add_eight(total, which, decays, 2 * j + half)
    since, rest, level, ahead, back = [cute.make_rmem_tensor((4,), F32) for _ in range(5)]
    for ci in cutlass.range_constexpr(2):
        since[ci], since[2 + ci] = first[ci], around_first[2 + ci] + second[ci]
        rest[ci], rest[2 + ci] = first[2 + ci] + around_second[2 + ci], second[2 + ci]
        level[ci], level[2 + ci] = first[2 + ci], second[ci]
        ahead[ci], ahead[2 + ci] = around_first[ci], around_second[ci]
    for e in cutlass.range_constexpr(4):
        back[e] = exp2(-ahead[e])
    for t in (since, rest, level, ahead):
        for e in cutlass.range_constexpr(4):
            t[e] = exp2(t[e])
    return Exponentials(since, rest, level, ahead, back)


@cute.jit
def first_pass_steep(x: cutlass.Constexpr, ends: cute.Tensor, middles: cute.Tensor, b: cute.Tensor):
    """`first_pass` where channels may decay at any speed."""
    smem, dtype = x.smem, x.variant.dtype
    is_f16 = dtype is F16
    wide = smem.after.element_type
    early, late, cross = [cute.make_rmem_tensor((4,), F32) for _ in range(3)]  # rows of k, then of q
    for acc in (early, late, cross):
        acc.fill(0.0)
    k_at = x.at(smem.k)
    from_k = lambda t: address(t) - address(smem.k)
    post_at, pre_at = x.pairs_of(smem.after), x.pairs_of(smem.before)
    key_at = address(smem.keys) + 16 * x.lane + 2048 * x.side + 4096 * x.block_row
    step = 16 * wide.width // 8
    to = x.scores
    makes_all = not is_f16 or to is not None  # kb and qg too
    leave_rows, leave_b = (None, None) if cutlass.const_expr(to is None) else (to.leave_rows, to.leave_keys)
    for n in cutlass.range(4, unroll=1):  # sixteen channels at a time; unrolled they take more registers than there are
        decays = load_matrix((k_at ^ 32 * n) + from_k(smem.steps), F16, True)
        raw_k, raw_q = [load_matrix((k_at ^ 32 * n) + at, BF16) for at in (0, smem.to_q)]
        inv_k, inv_q = [cute.make_rmem_tensor((2,), F32) for _ in range(2)]
        for i in cutlass.range_constexpr(2):
            row = 16 * x.block_row + x.r + 8 * i
            inv_k[i], inv_q[i] = smem.norms[row, KEYS], smem.norms[row, QUERIES]
        key8 = cute.make_rmem_tensor((8,), dtype)
        for j in cutlass.range_constexpr(2):
            of = exponentials(decays, j, ends, middles)
            post, pre = [read_pair(at + step * n + j * step // 2, wide) for at in (post_at, pre_at if makes_all else post_at)]
            k, q, left, out = [cute.make_rmem_tensor((4,), F32) for _ in range(4)]
            post4, pre4, b4, rounded = [cute.make_rmem_tensor((4,), t) for t in (wide, wide, wide, dtype)]
            at = (k_at ^ 32 * n) ^ 16 * j  # what is done is stored: registers are few
            widen(flat(raw_k, 4 * j, 4), k)
            multiply(k, inv_k, lambda e: e // 2, x.has_pairs)  # e = ci + 2 ri
            if cutlass.const_expr(x.has_pairs):
                for t, factor in ((out, of.rest), (left, of.since)):
                    t.store(k.load() * factor.load())
                for e in cutlass.range_constexpr(4):
                    post4[e] = post[e % 2]
            else:
                for e in cutlass.range_constexpr(4):
                    out[e], left[e], post4[e] = k[e] * of.rest[e], k[e] * of.since[e], post[e % 2]
            flat(key8, 4 * j, 4).store(out.load().to(dtype))
            kept = flat(key8, 4 * j, 4) if cutlass.const_expr(is_f16) else out
            store_columns((kept.load() * post4.load()).to(dtype), at + from_k(smem.kr), dtype)
            if cutlass.const_expr(to is None):
                store_columns(left.load().to(dtype), at + from_k(smem.kl_ql), dtype)
            else:
                rounded.store(left.load().to(dtype))
                leave_rows(rounded, KEYS, 16 * n + 8 * j)
            if cutlass.const_expr(makes_all and is_f16):  # kb, and then qg
                for e in cutlass.range_constexpr(4):
                    pre4[e], b4[e] = pre[e % 2], b[e // 2].to(wide)
                store_columns(rounded.load() * pre4.load() * b4.load(), at, dtype)
            elif cutlass.const_expr(makes_all):  # from what has not been rounded
                for e in cutlass.range_constexpr(4):
                    out[e] = left[e] * pre[e % 2] * b[e // 2]
                store_columns(out.load().to(dtype), at, dtype)
            widen(flat(raw_q, 4 * j, 4), q)
            multiply(q, inv_q, lambda e: e // 2, x.has_pairs)
            left.store(of.since.load())
            multiply(left, q, lambda e: e, x.has_pairs)
            if cutlass.const_expr(to is None):
                store_columns(left.load().to(dtype), at + from_k(smem.kl_ql) + TILE_BYTES, dtype)
            else:
                rounded.store(left.load().to(dtype))
                leave_rows(rounded, QUERIES, 16 * n + 8 * j)
            if cutlass.const_expr(makes_all and is_f16):
                store_columns(rounded.load() * pre4.load(), at + TILE_BYTES, dtype)
            elif cutlass.const_expr(makes_all):
                for e in cutlass.range_constexpr(4):
                    out[e] = left[e] * pre[e % 2]
                store_columns(out.load().to(dtype), at + TILE_BYTES, dtype)
            for ri, acc in ((0, early), (1, late)):
                add_rows(x, acc, (k, q), of.ahead, (k, of.back), ri, ri)
            add_rows(x, cross, (k, q), of.level, (k, of.level), 1, 0)
        if cutlass.const_expr(to is None):
            leave_keys(x, key8, key_at + 512 * n)
        else:
            leave_b(x, key8, n)
    diagonal_a, diagonal_p = [cute.make_rmem_tensor((8,), F32) for _ in range(2)]
    for e in cutlass.range_constexpr(2):
        for t, i in ((diagonal_a, e), (diagonal_p, 2 + e)):
            t[e], t[2 + e], t[4 + e], t[6 + e] = early[i], cross[i], F32(0.0), late[i]
    hand_over(x, diagonal_a)
    return diagonal_a, diagonal_p


@cute.jit
def add_rows(
    x: cutlass.Constexpr,
    acc: cute.Tensor,
    rows: cutlass.Constexpr,
    decay: cute.Tensor,
    columns: cutlass.Constexpr,
    ri: cutlass.Constexpr,
    rj: cutlass.Constexpr,
):
    """acc [16, 8] += the rows of k and q that are r + 8 ri, decayed, times the keys r + 8 rj, over 8 channels, in tf32."""
    a, y = cute.make_rmem_tensor(((2, 2), 1), F32), cute.make_rmem_tensor((2, 1), F32)
    for ci in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(2):
            a[i + 2 * ci] = rows[i][ci + 2 * ri] * decay[ci + 2 * ri]
        if cutlass.const_expr(not x.has_pairs):
            y[ci] = columns[0][ci + 2 * rj] * columns[1][ci + 2 * rj]
    if cutlass.const_expr(x.has_pairs):
        flat(y, 0, 2).store(flat(columns[0], 2 * rj, 2).load() * flat(columns[1], 2 * rj, 2).load())
    cute.gemm(x.mmas.tf32, corner(acc, 0), cute.recast_tensor(a, TF32), cute.recast_tensor(y, TF32), corner(acc, 0))
