# SPDX-License-Identifier: Apache-2.0
"""Decode, several tokens of Lightning on states in bfloat16: tensor cores, with neither shared memory nor a word between lanes
(norms apart), and one kernel for all numbers of tokens.

Every warp makes P for itself. (q; k) S0^T has q and k as they are; P times v is (P_hi, P_lo) times (v, v), with P where the
product that made it has left it; S_T has (w_hi, w_lo) times (k, k), w_i = d^{T-1-i} v_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import warp

from cula.ops.cute.common.decode_call import BLOCKS, WARPS
from cula.ops.cute.common.decode_lightning import FirstTokens, power, products, there, two_rows
from cula.ops.cute.common.decode_memory import load_words, packed, select, vector_at, widened
from cula.ops.cute.common.decode_state_bf16 import LANES, LOADS, STEPS, StateBf16, multiply, split, state_at
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.gate import inverse_norm
from cula.ops.cute.common.tiles import BF16, F32, I32
from cula.ops.cute.decode_abi import Flag

LOWER, UPPER = 0x5410, 0x7632  # halves of two words, for prmt


@dataclass(frozen=True)
class LightningBf16(StateBf16):
    """What up to eight tokens do to the rows of a warp."""

    is_kda = False
    warps, blocks = 1, WARPS * BLOCKS  # no warp needs another, and blocks of one spread over more multiprocessors
    tables = ()

    def token_addresses(self, at: FirstTokens, tokens: Any, wid: Any, lane: Any) -> list:
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
    def intra(
        self, call: cutlass.Constexpr, raw: cutlass.Constexpr, rate: F32, place: cutlass.Constexpr, tables: cutlass.Constexpr
    ):
        """Factors: of S0 . q_g; P of token g and tokens i = 2c, 2c + 1; d^{T-1-i}, that of v_i in the state."""
        q, k, values, keys = raw
        lane, scale, tokens = place.lane, call.scale, call.tokens
        t, i = lane // LANES, lane % LANES * 2
        dots = products(q, k, k)
        x = cute.make_rmem_tensor((5,), F32)
        query, pairs, writes = flat(x, 4, 1), flat(x, 0, 2), flat(x, 2, 2)
        query[0] = scale * power(rate, t + 1)
        for e in cutlass.range_constexpr(2):
            pairs[e] = select(i + e <= t, dots[e] * (scale * power(rate, t - i - e)), F32(0.0))
            writes[e] = select(i + e < tokens, power(rate, tokens - 1 - i - e), F32(0.0))
        if (call.flags & Flag.USE_NORM) != 0:
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
        call: cutlass.Constexpr,
        stored: cute.Tensor,
        state: Int64,
        ready: cutlass.Constexpr,
        tables: cutlass.Constexpr,
        lane: I32,
        to: Int64,
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
        if g < call.tokens:
            out = cute.make_rmem_tensor((self.lane_rows,), BF16)
            for r in cutlass.range_constexpr(self.lane_rows):
                e, side = r % 2, r // 2
                out[r] = ((sums[e, 0, side, 0] + sums[e, 0, side, 1]) * query + inside[e, side]).to(BF16)
            cute.autovec_copy(out, vector_at(BF16, to + Int64(g * call.o.token) * 2, self.lane_rows, 8))

        if (call.flags & Flag.COMMIT) != 0:
            sides = []
            for side in cutlass.range_constexpr(2):
                of_tokens = widened(flat(of_v, 2 * side, 1), 2)
                sides.append(parts_of(of_tokens[0] * writes[0], of_tokens[1] * writes[1]))
            (high, low), (high_below, low_below) = sides
            self.update_state(words, four_of(high, high_below, low, low_below), keys, decay)
            cute.autovec_copy(stored, state_at(state, lane, self.sides))

    @cute.jit
    def update_state(self, words: cute.Tensor, a: cute.Tensor, keys: cutlass.Constexpr, decay: F32):
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
