# SPDX-License-Identifier: Apache-2.0
"""Decode, Lightning: KDA's formulas in `decode.py` with u = v and one decay a head, so with less to do.

With d = e^{-s}, the decay a token, and the scale inside q:

    Q_t = d^{t+1} S0 . q_t     P[t, i] = d^{t-i} q_t . k_i, i <= t     o_t = Q_t + sum_i P[t, i] v_i
    S_T = d^T S0 + sum_i (d^{T-1-i} v_i) k_i

No token waits for another, powers of d and norms are factors of sums, and what meets the state are q and k as they came: 2T + 1
multiply-adds a number of it. Products q_t . k_i are on tensor cores for either kind of states, with (q; k) as A and k as B: lane
(g, c) = (lane / 4, lane % 4) has channels 8c .. 8c + 7 of 32 and token g of both, and gets q_g . k_i and k_g . k_i for i = 2c and
2c + 1. Tokens that are not there are loaded as the last.

`LightningFma`, states in float32: as `RowsFma`, with q and k in float32 in shared memory. A lane has v of all tokens for its four
rows. T sums are halved among lanes by vectors, and then by rows.

| shared memory, float32 | what                                                                                |
|------------------------|-------------------------------------------------------------------------------------|
| `vectors` [2T, 128]    | q of the tokens, then k                                                             |
| `dots` [3, T, T, 4]    | q_t . k_i; for norms k_t . k_i, q_t . q_i: sums over the channels of each warp      |

`LightningMma`, states in bfloat16: as `RowsMma`, but with neither shared memory nor a word between lanes (norms apart), and one
kernel for all numbers of tokens. Every warp makes P for itself. (q; k) S0^T has q and k as they are; P times v is (P_hi, P_lo)
times (v, v), with P where the product that made it has left it; S_T has (w_hi, w_lo) times (k, k), w_i = d^{T-1-i} v_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import warp

from cula.ops.cute.common.decode_flags import COMMIT, USE_NORM
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.tiles import BF16, F32, I32, LOG2E
from cula.ops.cute.sm90.decode_common import (
    BLOCKS,
    WARPS,
    D,
    always_there,
    four_at,
    load_words,
    number_at,
    packed,
    read_four,
    select,
    vector_at,
    widened,
)
from cula.ops.cute.sm90.decode_rows_fma import LINE, ROWS, RowsFma
from cula.ops.cute.sm90.decode_rows_mma import LANES, LOADS, STEPS, RowsMma, multiply, split, state_at
from cula.ops.cute.sm90.decode_tokens import sum_of_warps

FASTEST = 1000.0  # of decays, log2: as good as infinite, and 0 times it is 0
LOWER, UPPER = 0x5410, 0x7632  # halves of two words, for prmt


class Firsts(NamedTuple):
    """Where q, k and v of a (row, head) begin, v with the warp's rows, and what a token further is, in numbers."""

    q: Any
    k: Any
    v: Any
    q_token: Any
    k_token: Any
    v_token: Any


def places(rows: Any, addresses: Any, row_strides: Any, strides: Any, tokens: Any, flags: Any, place: tuple) -> list:
    """Of -log of the decay a token, then what `rows` wants of the tokens."""
    n, hv, h, warp_row, wid, lane = place
    (q_token, q_head), (k_token, k_head), (v_token, v_head) = strides[:3]
    of_head = (h * q_head, h * k_head, hv * v_head + warp_row)
    firsts = (first + (Int64(n) * row + head) * 2 for first, row, head in zip(addresses, row_strides, of_head))
    of_decay = addresses[7] + Int64(hv * strides[6]) * 4
    return [of_decay, *rows.token_places(Firsts(*firsts, q_token, k_token, v_token), tokens, wid, lane)]


def before_the_slot(rows: Any, at: list, strides: Any, tokens: Any, flags: Any, wid: Any, lane: Any, tables: Any) -> tuple:
    """With as little to prepare as here, it is better to have tokens early than to have them apart from the state."""
    return rows.load_tokens(*at[1:]), number_at(F32, at[0], 0)


def behind_the_state(rows: Any, at: list, found: tuple, strides: Any, tokens: Any, flags: Any, lane: Any) -> tuple:
    """Nothing more to load."""
    return found


def prepare(
    rows: Any, addresses: Any, raw: tuple, factors: tuple, tokens: Any, flags: Any, wid: Any, lane: Any, tables: Any
) -> tuple:
    """What `rows.decode_rows` wants to know of the tokens."""
    of_tokens, s = raw
    rate = cute.arch.fmax(s * F32(-LOG2E), F32(-FASTEST))
    return rows.prepare(of_tokens, rate, factors[0], tokens, flags, wid, lane, tables)


def power(rate: Any, n: Any) -> Any:
    """d^n"""
    return cute.math.exp2(rate * F32(n), fastmath=True)


def inverse_norm(square: Any) -> Any:
    return cute.math.rsqrt(square + F32(1e-6), fastmath=True)


def there(token: Any, tokens: Any) -> Any:
    """A token, or the last."""
    return select(token < tokens, token, tokens - 1)


@cute.jit
def products(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    """x_g . z_i, then y_g . z_i, of the two i of a lane, over channels that the lanes have. In two sums, so that half as many
    products wait for each other."""
    k16 = cute.make_mma_atom(warp.MmaF16BF16Op(BF16, F32, (16, 8, 16)))
    sums = cute.make_rmem_tensor((4, 2), F32)
    sums.fill(0.0)
    for step in cutlass.range_constexpr(cute.size(x) // 2):
        multiply(k16, flat(sums, 4 * (step % 2), 4), two_rows(x, y, step), flat(z, 2 * step, 2))
    for e in cutlass.range_constexpr(4):
        sums[e, 0] += sums[e, 1]
    return flat(sums, 0, 4)


@cute.jit
def two_rows(x: cute.Tensor, y: cute.Tensor, step: cutlass.Constexpr):
    """16 channels of two vectors as rows g and g + 8 of A."""
    a = cute.make_rmem_tensor((4,), I32)
    for e in cutlass.range_constexpr(2):
        a[2 * e], a[2 * e + 1] = flat(x, 2 * step + e, 1)[0], flat(y, 2 * step + e, 1)[0]
    return a


# States in float32


@dataclass(frozen=True)
class LightningFma(RowsFma):
    """What T tokens do to the rows of a warp."""

    is_kda = False

    @property
    def tables(self) -> tuple[int, ...]:
        return 2 * self.T * D, 3 * self.T * self.T * WARPS

    @property
    def kept(self) -> int:
        """Rows that a lane keeps the sums of, from `first_kept` on."""
        return max(ROWS * self.T // self.lanes, 1)

    def row_of(self, r: int, lane: Any) -> Any:
        return lane // self.lanes * ROWS + r

    def first_kept(self, lane: Any) -> Any:
        """Among the lane's rows. Lanes next to each other have different tokens, then different rows."""
        return lane // self.T % (ROWS // self.kept) * self.kept

    def first_row(self, lane: Any) -> Any:
        return self.row_of(0, lane) + self.first_kept(lane)

    def token_of_output(self, lane: Any) -> Any:
        return lane % self.T

    def token_places(self, at: Firsts, tokens: Any, wid: Any, lane: Any) -> list:
        """Of q and k of the warp's channels, and of v of the lane's rows and all tokens."""
        token, channel = there(lane // LANES, tokens), wid * 32 + lane % LANES * 8
        of_each = [I32(t) if always_there(t, self.T) else there(I32(t), tokens) for t in range(self.T)]
        return [
            at.q + Int64(token * at.q_token + channel) * 2,
            at.k + Int64(token * at.k_token + channel) * 2,
            *(at.v + Int64(t * at.v_token + self.row_of(0, lane)) * 2 for t in of_each),
        ]

    def load_tokens(self, q: Any, k: Any, *v: Any) -> tuple:
        return load_words(q, 4), load_words(k, 4), self.load_all_values(v)

    @cute.jit
    def load_all_values(self, at: cutlass.Constexpr):
        """Words [2, T]."""
        values = cute.make_rmem_tensor((2, self.T), I32)
        for t in cutlass.range_constexpr(self.T):
            cute.autovec_copy(vector_at(I32, at[t], 2, 8), flat(values, 2 * t, 2))
        return values

    @cute.jit
    def prepare(
        self,
        raw: cutlass.Constexpr,
        rate: F32,
        scale: F32,
        tokens: I32,
        flags: I32,
        wid: I32,
        lane: I32,
        tables: cutlass.Constexpr,
    ):
        """Fill the tables; ends with the block's one barrier."""
        q, k, values = raw
        vectors, dots = tables
        g, c = lane // LANES, lane % LANES
        if g < self.T:
            for n, x in enumerate((q, k)):
                numbers = widened(flat(x, 0, 4), 8)
                for half in cutlass.range_constexpr(2):
                    at = (n * self.T + g) * D + wid * 32 + 8 * c + 4 * half
                    cute.autovec_copy(flat(numbers, 4 * half, 4), four_at(vectors, at))
        found = products(q, k, k)
        is_token = g < self.T and 2 * c < self.T
        at = (g * self.T + 2 * c) * WARPS + wid
        if is_token:
            dots[at], dots[at + WARPS] = found[0], found[1]
        if (flags & USE_NORM) != 0:
            squares = products(q, k, q)
            if is_token:
                for e in cutlass.range_constexpr(2):
                    dots[at + (self.T * self.T + e) * WARPS] = found[2 + e]
                    dots[at + (2 * self.T * self.T + e) * WARPS] = squares[e]
        cute.arch.sync_threads()
        return values, rate, scale

    @cute.jit
    def factors(self, dots: cute.Tensor, role: I32, rate: F32, scale: F32, tokens: I32, flags: I32):
        """Of token `role`: that of S0 . q; P. Of all tokens: d^{T-1-i}, that of v in the state."""
        T = self.T
        x = cute.make_rmem_tensor((2 * T + 1,), F32)
        query, pairs, writes = flat(x, 2 * T, 1), flat(x, 0, T), flat(x, T, T)
        query[0] = scale * power(rate, role + 1)
        for i in cutlass.range_constexpr(T):
            pair = sum_of_warps(dots, role * T + i) * (scale * power(rate, role - i))
            pairs[i] = select(role >= i, pair, F32(0.0))
            writes[i] = power(rate, tokens - 1 - i)
            if cutlass.const_expr(not always_there(i, T)):
                writes[i] = select(tokens > i, writes[i], F32(0.0))
        if (flags & USE_NORM) != 0:
            of_q = inverse_norm(sum_of_warps(dots, 2 * T * T + role * (T + 1)))
            query[0] *= of_q
            for i in cutlass.range_constexpr(T):
                of_k = inverse_norm(sum_of_warps(dots, T * T + i * (T + 1)))
                pairs[i] *= of_q * of_k
                writes[i] *= of_k
        return query[0], pairs, writes

    @cute.jit
    def sum_over_lanes(self, sums: cute.Tensor, lane: I32):
        """To sums[:kept, 0], rows from `first_kept` on. sums[r, j] of a lane belong to its r-th row and vector j ^ lane."""
        half = self.T // 2
        while cutlass.const_expr(half > 0):
            for r in cutlass.range_constexpr(ROWS):
                for j in cutlass.range_constexpr(half):
                    sums[r, j] += cute.arch.shuffle_sync_bfly(sums[r, j + half], offset=half)
            half //= 2
        half = ROWS // 2
        while cutlass.const_expr(half >= self.kept):
            offset = self.T * half // self.kept
            is_upper = (lane & offset) != 0
            for r in cutlass.range_constexpr(half):
                low, high = sums[r, 0], sums[r + half, 0]
                sent = cute.arch.shuffle_sync_bfly(select(is_upper, low, high), offset=offset)
                sums[r, 0] = select(is_upper, high, low) + sent
            half //= 2
        if cutlass.const_expr(self.lanes > self.T * ROWS):  # two lanes of a row have the same
            sums[0, 0] += cute.arch.shuffle_sync_bfly(sums[0, 0], offset=LINE)

    @cute.jit
    def kept_values(self, values: cute.Tensor, t: cutlass.Constexpr, lane: I32):
        """v of token t and the rows that the lane keeps."""
        first = self.first_kept(lane)
        words = cute.make_rmem_tensor((2,), I32)
        words[0], words[1] = values[0, t], values[1, t]
        if cutlass.const_expr(self.kept < ROWS):
            words[0] = select(first < 2, words[0], words[1])
        out = widened(words, max(self.kept, 2))
        if cutlass.const_expr(self.kept == 1):
            out[0] = select(first % 2 == 0, out[0], out[1])
        return out

    @cute.jit
    def decode_rows(
        self,
        stored: cute.Tensor,
        state: Int64,
        ready: cutlass.Constexpr,
        tables: cutlass.Constexpr,
        tokens: I32,
        flags: I32,
        lane: I32,
        to: Int64,
        o_token: I32,
    ):
        """`stored` is the lane's part of the state, `to` the address of its rows of token 0 in o."""
        values, rate, scale = ready
        vectors, dots = tables
        T, kept, role, at = self.T, self.kept, lane % self.T, lane % self.lanes * 4
        query, pairs, writes = self.factors(dots, role, rate, scale, tokens, flags)

        # Q: T sums
        sums = cute.make_rmem_tensor((ROWS, T), F32)
        sums.fill(0.0)
        for c in cutlass.range_constexpr(self.pieces):
            for j in cutlass.range_constexpr(T):
                four = read_four(vectors, (j ^ role) * D + at + c * 4 * self.lanes)
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(4):
                        sums[r, j] += stored[4 * c + e, r] * four[e]
        self.sum_over_lanes(sums, lane)

        # o
        x = cute.make_rmem_tensor((kept,), F32)
        for r in cutlass.range_constexpr(kept):
            x[r] = sums[r, 0] * query
        for i in cutlass.range_constexpr(T):
            of_v = self.kept_values(values, i, lane)
            for r in cutlass.range_constexpr(kept):
                x[r] += pairs[i] * of_v[r]
        self.write_output(x, to, o_token, tokens, lane)

        # The state after the last token
        if (flags & COMMIT) != 0:
            decay = power(rate, tokens)
            u = cute.make_rmem_tensor((ROWS, T), F32)
            for i in cutlass.range_constexpr(T):
                of_rows = widened(flat(values, 2 * i, 2), ROWS)
                for r in cutlass.range_constexpr(ROWS):
                    u[r, i] = of_rows[r] * writes[i]
            for c in cutlass.range_constexpr(self.pieces):
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(4):
                        stored[4 * c + e, r] *= decay
                for i in cutlass.range_constexpr(T):
                    four = read_four(vectors, (T + i) * D + at + c * 4 * self.lanes)
                    for r in cutlass.range_constexpr(ROWS):
                        for e in cutlass.range_constexpr(4):
                            stored[4 * c + e, r] += u[r, i] * four[e]
            for r in cutlass.range_constexpr(ROWS):
                cute.autovec_copy(self.row_in(stored, r), self.row_at(state, r, lane))


# States in bfloat16


@dataclass(frozen=True)
class LightningMma(RowsMma):
    """What up to eight tokens do to the rows of a warp."""

    is_kda = False
    warps, blocks = 1, WARPS * BLOCKS  # no warp needs another, and blocks of one spread over more multiprocessors
    tables = ()

    def token_places(self, at: Firsts, tokens: Any, wid: Any, lane: Any) -> list:
        g, c = lane // LANES, lane % LANES
        own, others = there(g, tokens), [there(2 * c + e, tokens) for e in range(2)]
        return [
            at.q + Int64(own * at.q_token + 8 * c) * 2,
            at.k + Int64(own * at.k_token + 8 * c) * 2,
            *(at.v + Int64(i * at.v_token + g // 2 * self.lane_rows) * 2 for i in others),
            *(at.k + Int64(i * at.k_token + 4 * g) * 2 for i in others),
        ]

    def load_tokens(self, q: Any, k: Any, v: Any, other_v: Any, other_k: Any, last_k: Any) -> tuple:
        """q and k of token g, [4 words, j], channels 32 j + 8 c .. + 7. Of tokens 2c and 2c + 1 v, rows 4 (g / 2) .. + 3, half of
        which are number g of a side, and k once more, [2 words, j], channels 32 j + 4 g .. + 3."""
        values, keys = [load_words(x, 2) for x in (v, other_v)], [load_words(x, 2, LOADS) for x in (other_k, last_k)]
        return load_words(q, 4, LOADS), load_words(k, 4, LOADS), values, keys

    @cute.jit
    def prepare(
        self,
        raw: cutlass.Constexpr,
        rate: F32,
        scale: F32,
        tokens: I32,
        flags: I32,
        wid: I32,
        lane: I32,
        tables: cutlass.Constexpr,
    ):
        """Factors: of S0 . q_g; P of token g and tokens i = 2c, 2c + 1; d^{T-1-i}, that of v_i in the state."""
        q, k, values, keys = raw
        t, i = lane // LANES, lane % LANES * 2
        dots = products(q, k, k)
        x = cute.make_rmem_tensor((5,), F32)
        query, pairs, writes = flat(x, 4, 1), flat(x, 0, 2), flat(x, 2, 2)
        query[0] = scale * power(rate, t + 1)
        for e in cutlass.range_constexpr(2):
            pairs[e] = select(i + e <= t, dots[e] * (scale * power(rate, t - i - e)), F32(0.0))
            writes[e] = select(i + e < tokens, power(rate, tokens - 1 - i - e), F32(0.0))
        if (flags & USE_NORM) != 0:
            squares = products(q, k, q)
            halves = [cute.arch.shuffle_sync(squares[e], t * LANES + t // 2) for e in range(2)]  # where q_t meets itself
            of_q = inverse_norm(select(t % 2 == 0, halves[0], halves[1]))
            query[0] *= of_q
            for e in cutlass.range_constexpr(2):
                of_k = inverse_norm(cute.arch.shuffle_sync(dots[2 + e], (i + e) * LANES + i // 2))
                pairs[e] *= of_q * of_k
                writes[e] *= of_k
        return q, k, values, keys, query[0], pairs, writes, power(rate, tokens)

    @cute.jit
    def decode_rows(
        self,
        stored: cute.Tensor,
        state: Int64,
        ready: cutlass.Constexpr,
        tables: cutlass.Constexpr,
        tokens: I32,
        flags: I32,
        lane: I32,
        to: Int64,
        o_token: I32,
    ):
        """`stored` is the lane's part of the state, `to` the address of its rows of token 0 in o."""
        q, k, values, keys, query, pairs, writes, decay = ready
        k16 = cute.make_mma_atom(warp.MmaF16BF16Op(BF16, F32, (16, 8, 16)))
        words = cute.recast_tensor(stored, I32)  # [two columns, j, side]
        g = lane // LANES

        # v of the lane's two tokens, number g of each side; what tokens say to each other
        own = select(g % 2 == 0, I32(LOWER), I32(UPPER))
        of_v = cute.make_rmem_tensor((2, 2), I32)  # twice the same word, for both parts of P; [side]
        inside = cute.make_rmem_tensor((4, 2), F32)
        inside.fill(0.0)
        a = parts_of(pairs[0], pairs[1])
        for side in cutlass.range_constexpr(2):
            of_v[0, side] = pair_of(values[0][side], values[1][side], own)
            of_v[1, side] = of_v[0, side]
            multiply(k16, flat(inside, 4 * side, 4), four_of(a[0], I32(0), a[1], I32(0)), flat(of_v, 2 * side, 2))

        # Q, in two sums, of token g and rows 4c .. 4c + 3
        sums = cute.make_rmem_tensor((2, 2, 2, 2), F32)  # [row, q or k, side, sum]
        sums.fill(0.0)
        for s in cutlass.range_constexpr(STEPS):
            for side in cutlass.range_constexpr(2):
                of_state = flat(words, 2 * s + 4 * LOADS * side, 2)
                multiply(k16, flat(sums, 4 * side + 8 * (s % 2), 4), two_rows(q, k, s), of_state)
        if g < tokens:
            out = cute.make_rmem_tensor((self.lane_rows,), BF16)
            for r in cutlass.range_constexpr(self.lane_rows):
                e, side = r % 2, r // 2
                out[r] = ((sums[e, 0, side, 0] + sums[e, 0, side, 1]) * query + inside[e, side]).to(BF16)
            cute.autovec_copy(out, vector_at(BF16, to + Int64(g * o_token) * 2, self.lane_rows, 8))

        if (flags & COMMIT) != 0:
            sides = []
            for side in cutlass.range_constexpr(2):
                of_tokens = widened(flat(of_v, 2 * side, 1), 2)
                sides.append(parts_of(of_tokens[0] * writes[0], of_tokens[1] * writes[1]))
            (high, low), (high_below, low_below) = sides
            self.write_state(words, four_of(high, high_below, low, low_below), keys, decay)
            cute.autovec_copy(stored, state_at(state, lane, self.sides))

    @cute.jit
    def write_state(self, words: cute.Tensor, a: cute.Tensor, keys: cutlass.Constexpr, decay: F32):
        """S0 becomes S_T. Column n of a product is channel 32 j + 4 n + e, so a lane's two are numbers e and e + 4 of its 8."""
        k16 = cute.make_mma_atom(warp.MmaF16BF16Op(BF16, F32, (16, 8, 16)))
        for j in cutlass.range_constexpr(LOADS):
            for w in cutlass.range_constexpr(2):
                S = cute.make_rmem_tensor((2, 2, 2), F32)  # [number e or e + 4, side, e % 2], e / 2 = w
                for side in cutlass.range_constexpr(2):
                    for far in cutlass.range_constexpr(2):
                        two = widened(flat(words, w + 2 * far + 4 * j + 4 * LOADS * side, 1), 2)
                        for e in cutlass.range_constexpr(2):
                            S[far, side, e] = two[e] * decay
                for e in cutlass.range_constexpr(2):
                    of_k = pair_of(keys[0][w, j], keys[1][w, j], I32(UPPER if e else LOWER))
                    b = cute.make_rmem_tensor((2,), I32)
                    b[0], b[1] = of_k, of_k
                    multiply(k16, flat(S, 4 * e, 4), a, b)
                for side in cutlass.range_constexpr(2):
                    for far in cutlass.range_constexpr(2):
                        to = flat(words, w + 2 * far + 4 * j + 4 * LOADS * side, 1)
                        to[0] = packed(S[far, side, 0], S[far, side, 1])


def pair_of(x: Any, y: Any, halves: Any) -> Any:
    """The lower or the upper halves of two words as one."""
    return I32(cute.arch.prmt(x, y, halves))


@cute.jit
def parts_of(x: F32, y: F32):
    """Two numbers as sums of two in bfloat16: a word of first parts and one of second ones."""
    numbers = cute.make_rmem_tensor((2,), F32)
    numbers[0], numbers[1] = x, y
    high, low = split(numbers)
    return packed(high[0], high[1]), packed(low[0], low[1])


@cute.jit
def four_of(x: I32, y: I32, z: I32, w: I32):
    words = cute.make_rmem_tensor((4,), I32)
    words[0], words[1], words[2], words[3] = x, y, z, w
    return words
