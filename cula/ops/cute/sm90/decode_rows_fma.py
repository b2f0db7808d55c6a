# SPDX-License-Identifier: Apache-2.0
"""Decode, what meets a state in float32: multiply-adds. `decode.py` has the formulas.

8 lanes share a row, and a lane holds four pieces of 4 columns of four rows next to each other, 64 numbers.
  1. 2T sums of products over a lane's columns, and over the 8 lanes by halves: a lane sends half of its sums and keeps the other,
     three times, and has one left. Which sum it accumulates as its j-th depends on the lane (j ^ lane), so that all lanes send
     the same registers.
  2. The recurrence of u. Lane i has b_i (v_i - R_i), or Q_i; column i of (-b A; P) times u_i, which all lanes are told, is added.
  3. S_T.

`vectors` [2T, 128] has -b k e^G of the tokens, then q e^G; `writes` [T + 1, 128] k e^{G_T - G}, then e^{G_T}. The 8 lanes of a
row read 128 bytes next to each other, so no bank is asked twice.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.decode_flags import COMMIT
from cula.ops.cute.common.tiles import BF16, F32, I32, at_address
from cula.ops.cute.sm90.decode_common import WARP_ROWS, D, four_at, read_four, vector_at, widened

ROWS, LANES = 4, 8  # rows of a lane, lanes of a row
SEGMENT = (32 - LANES) << 8 | 31  # a shuffle's: lanes are counted within those of a row
assert ROWS * 32 // LANES == WARP_ROWS


def first_row(lane: Any) -> Any:
    """Of a lane, among its warp's."""
    return lane // LANES * ROWS


def role(lane: Any, T: int) -> Any:
    """With up to four tokens lanes of a row have roles 0..2T-1: R of the tokens, then Q."""
    return lane % min(2 * T, LANES)


@cute.jit
def load_values(v: Int64, v_token: I32, tokens: I32, T: cutlass.Constexpr, lane: I32):
    """Of v, lane i of a row wants token i. v is the address of the lane's rows of token 0."""
    values = cute.make_rmem_tensor((ROWS // 2,), I32)
    values.fill(0)
    token = role(lane, T)
    if token < tokens and token < T:
        cute.autovec_copy(vector_at(I32, v + Int64(token * v_token) * 2, ROWS // 2, 8), values)
    return values


@cute.jit
def write_zeros(to: Int64, o_token: I32, tokens: I32, lane: I32):
    zeros = cute.make_rmem_tensor((ROWS,), BF16)
    zeros.fill(0.0)
    token = lane % LANES
    if token < tokens:
        cute.autovec_copy(zeros, vector_at(BF16, to + Int64(token * o_token) * 2, ROWS, 8))


def state_at(state: Any, lane: Any) -> Any:
    """A lane's part of the pool, [numbers in 16 bytes, 16 bytes of a row, rows]."""
    layout = cute.make_layout((4, D // (4 * LANES), ROWS), stride=(1, 4 * LANES, D))
    return cute.make_tensor(at_address(F32, state + Int64(lane % LANES * 16), 16), layout)


@cute.jit
def put(
    tables: cutlass.Constexpr,
    T: cutlass.Constexpr,
    i: I32,
    lane: I32,
    key: cute.Tensor,
    query: cute.Tensor,
    write: cute.Tensor,
):
    """Token i's -b k e^G, q e^G and k e^{G_T - G}, four channels a lane, to the tables."""
    vectors, writes, at = tables[0], tables[1], 4 * lane
    cute.autovec_copy(key, four_at(vectors, i * D + at))
    cute.autovec_copy(query, four_at(vectors, (T + i) * D + at))
    cute.autovec_copy(write, four_at(writes, i * D + at))


@cute.jit
def sum_by_halves(sums: cute.Tensor, count: cutlass.Constexpr, r: cutlass.Constexpr):
    """The sum of row r that is this lane's: sums[r, j] of a lane belongs to vector j ^ lane. `count` of them, 4 or 8."""
    half = count // 2
    while cutlass.const_expr(half > 0):
        for j in cutlass.range_constexpr(half):
            sums[r, j] += cute.arch.shuffle_sync_bfly(sums[r, j + half], offset=half)
        half //= 2
    whole = count
    while cutlass.const_expr(whole < LANES):
        sums[r, 0] += cute.arch.shuffle_sync_bfly(sums[r, 0], offset=whole)
        whole *= 2


@cute.jit
def decode_rows(
    stored: cute.Tensor,
    gS: cute.Tensor,
    values: cute.Tensor,
    tables: cutlass.Constexpr,
    tokens: I32,
    flags: I32,
    T: cutlass.Constexpr,
    lane: I32,
    to: Int64,
    o_token: I32,
):
    """`stored` is the lane's part of the state, `to` the address of its rows of token 0 in o."""
    vectors, writes, mix, strengths = tables[:4]
    of_row, which_sum = lane % LANES, role(lane, T)
    S = cute.make_tensor(stored.iterator, cute.make_layout((D // LANES, ROWS)))

    # R and Q: 2T sums, 8 at a time
    count = min(2 * T, LANES)
    x = cute.make_rmem_tensor((ROWS, 2 * T // count), F32)
    for part in cutlass.range_constexpr(2 * T // count):
        sums = cute.make_rmem_tensor((ROWS, count), F32)
        sums.fill(0.0)
        for c in cutlass.range_constexpr(D // (4 * LANES)):
            for j in cutlass.range_constexpr(count):
                which = part * count + (j ^ which_sum)
                four = read_four(vectors, which * D + of_row * 4 + c * 4 * LANES)
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(4):
                        sums[r, j] += S[4 * c + e, r] * four[e]
        for r in cutlass.range_constexpr(ROWS):
            sum_by_halves(sums, count, r)
            x[r, part] = sums[r, 0]

    # u and o
    strength = strengths[which_sum] if which_sum < T else F32(0.0)
    of_v = widened(values, I32(0), ROWS)
    for r in cutlass.range_constexpr(ROWS):
        x[r, 0] += strength * of_v[r]
    u = cute.make_rmem_tensor((ROWS, T), F32)
    for i in cutlass.range_constexpr(T):
        for r in cutlass.range_constexpr(ROWS):
            u[r, i] = cute.arch.shuffle_sync(x[r, 0], i, mask_and_clamp=SEGMENT)
        for part in cutlass.range_constexpr(2 * T // count):
            m = mix[(part * count + which_sum) * T + i]
            for r in cutlass.range_constexpr(ROWS):
                x[r, part] += m * u[r, i]
    token = of_row if cutlass.const_expr(2 * T > LANES) else of_row - T
    if token >= 0 and token < tokens:
        out = cute.make_rmem_tensor((ROWS,), BF16)
        for r in cutlass.range_constexpr(ROWS):
            out[r] = x[r, 2 * T // count - 1].to(BF16)
        cute.autovec_copy(out, vector_at(BF16, to + Int64(token * o_token) * 2, ROWS, 8))

    # The state after the last token
    if (flags & COMMIT) != 0:
        for c in cutlass.range_constexpr(D // (4 * LANES)):
            decay = read_four(writes, T * D + of_row * 4 + c * 4 * LANES)
            for r in cutlass.range_constexpr(ROWS):
                for e in cutlass.range_constexpr(4):
                    S[4 * c + e, r] *= decay[e]
            for i in cutlass.range_constexpr(T):
                four = read_four(writes, i * D + of_row * 4 + c * 4 * LANES)
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(4):
                        S[4 * c + e, r] += u[r, i] * four[e]
        cute.autovec_copy(stored, gS)
