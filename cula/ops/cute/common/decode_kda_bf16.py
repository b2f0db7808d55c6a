# SPDX-License-Identifier: Apache-2.0
"""Decode, several tokens of KDA on states in bfloat16: tensor cores. `decode_frame.py` has the formulas, `decode_state_bf16.py`
how a warp holds its rows and how a float32 factor is split in two.

  1. (R; Q) = vectors S0^T, m16n8k16: up to four tokens have their 2T <= 8 vectors as rows 0..7 of A and the vectors' second parts
     as rows 8..15; eight tokens have R and Q, and a second product for the second parts. S0 is exact. Lane (g, c) gets vector g
     at numbers 2c and 2c + 1 of all sides, which are rows 4c .. 4c + 3 of the warp's (or 8c .. 8c + 7), next to each other.
  2. The recurrence of u. Lane (i, c) has R_i or Q_i of its rows, and v_i; u_i, which all lanes are told, is added
     with its factor.
  3. S_T starts as e^{G_T} S0 in float32, and is the accumulator of two products m16n8k8 for two sides, 8 columns and four tokens.
     The reduction is over tokens and parts: lane c has (u_hi, u_lo) times (w_hi, w_lo) of token c, then (u_lo, u_hi) times them.

| in shared memory, words                   | what                                                                               |
|-------------------------------------------|------------------------------------------------------------------------------------|
| `vectors` [8 steps, 2T, 4 (c), 4]         | A of 1: of a vector, parts (first, second) of two channels, then of the other two  |
| with eight tokens [8, 2 parts, 8, 4, 4]   | (R, Q) of two channels, then of the other two                                      |
| `writes` [T / 4, 4 (j), 4 (c), 8 (g'), 4] | B of 3: (w_hi, w_lo) of token c, channel 32 j + 8 (g / 2) + 2 e + g % 2            |
| the last 128 of `writes`                  | e^{G_T}, float32                                                                   |

g' is g ^ 2c, with which a quarter of a warp's 16-byte reads fall into different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import warp

from cula.ops.cute.common.decode_call import BLOCKS, WARPS, D
from cula.ops.cute.common.decode_kda_intra import mixing, table_sizes
from cula.ops.cute.common.decode_memory import packed, read_four, vector_at, widened
from cula.ops.cute.common.decode_state_bf16 import LANES, LOADS, SAME_C, STEPS, StateBf16, multiply, split, state_at
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.tiles import BF16, F32, I32
from cula.ops.cute.decode_abi import Flag


@dataclass(frozen=True)
class KdaBf16(StateBf16):
    """What T tokens do to the rows of a warp."""

    tall_blocks: int = BLOCKS  # on a multiprocessor at least, where there are four sides

    is_kda = True
    warps = WARPS

    @property
    def blocks(self) -> int:
        """On a multiprocessor at least. A fifth is worth the few registers that it takes, where they are few."""
        return self.tall_blocks if self.sides == 4 else BLOCKS + (self.T <= 4)

    @property
    def tables(self) -> tuple[int, ...]:
        return table_sizes(self.T)

    @property
    def groups(self) -> int:
        """Of up to four tokens."""
        return max(self.T // 4, 1)

    def token_of_v(self, lane: Any) -> Any:
        """T or more where a lane wants no v."""
        return lane // LANES

    @cute.jit
    def load_values(self, v: Int64):
        """v of the lane's rows, which begin at that address."""
        values = cute.make_rmem_tensor((self.sides,), I32)
        cute.autovec_copy(vector_at(I32, v, self.sides, 8), values)
        return values

    @cute.jit
    def put_vectors(self, tables: cutlass.Constexpr, t: cutlass.Constexpr, channel: I32, key: F32, query: F32):
        """k e^G and q e^G of token t, to the tables."""
        T, j, (eighth, half, e, odd) = self.T, channel // 32, places(channel)
        numbers = cute.make_rmem_tensor((2,), F32)
        numbers[0], numbers[1] = key, query
        halves = cute.make_tensor(cute.recast_ptr(tables[0].iterator, dtype=BF16), cute.make_layout(4 * T * D))
        for w, part in enumerate(split(numbers)):
            for n in cutlass.range_constexpr(2):
                vector, word = (n * T + t, w) if T <= 4 else (w * T + t, n)
                at = ((2 * T * (2 * j + half) + vector) * 4 + eighth) * 4 + 2 * e + word
                halves[2 * at + odd] = part[n].to(BF16)

    @cute.jit
    def put_write(self, tables: cutlass.Constexpr, t: cutlass.Constexpr, channel: I32, write: F32):
        """k e^{G_T - G} of token t."""
        j, (eighth, half, e, odd) = channel // 32, places(channel)
        number = cute.make_rmem_tensor((1,), F32)
        number[0] = write
        high, low = split(number)
        group, c = t // LANES, t % LANES
        at = ((group * LOADS + j) * min(self.T, LANES) + c) * 8 + ((2 * eighth + odd) ^ (2 * c))
        words_at(tables[1], at * 4 + 2 * half + e, 1)[0] = packed(high[0], low[0])

    @cute.jit
    def meet_state(self, words: cute.Tensor, vectors: cute.Tensor, factors: cutlass.Constexpr, role: I32, c: I32):
        """R and Q of the lane's rows, with their factors. Up to four tokens on two sides have steps in two sums, so that half as
        many products wait for each other; eight tokens have two parts."""
        T, sides = self.T, self.sides
        parts = max(T // 4, 1)  # in products of their own
        chains = max(4 // (parts * sides), 1)
        k16 = cute.make_mma_atom(warp.MmaF16BF16Op(BF16, F32, (16, 8, 16)))
        acc = cute.make_rmem_tensor((2, 2, sides, chains), F32)  # [number 2c or 2c + 1, vector g or g + 8, side]
        acc.fill(0.0)
        for s in cutlass.range_constexpr(STEPS):
            for part in cutlass.range_constexpr(parts):
                a = cute.make_rmem_tensor((4,), I32)
                cute.autovec_copy(words_at(vectors, (((s * parts + part) * min(2 * T, 8) + role) * 4 + c) * 4, 4), a)
                for side in cutlass.range_constexpr(sides):
                    multiply(k16, flat(acc, 4 * side + 4 * sides * (s % chains), 4), a, flat(words, 2 * s + 4 * LOADS * side, 2))
        x = cute.make_rmem_tensor((self.lane_rows, self.groups), F32)
        for r in cutlass.range_constexpr(self.lane_rows):
            both = [sum_of([acc[r % 2, n, r // 2, chain] for chain in range(chains)]) for n in range(2)]
            if cutlass.const_expr(T <= 4):
                x[r, 0] = (both[0] + both[1]) * factors[0][0]
            else:
                x[r, 0], x[r, 1] = both[0] * factors[0][0], both[1] * factors[1][0]
        return x

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
        values, b, scale = ready
        vectors, writes, mix, _ = tables
        T, groups, rows, flags = self.T, self.groups, self.lane_rows, call.flags
        g, c = lane // LANES, lane % LANES
        role = g % min(2 * T, 8)  # with up to four tokens 0..2T-1: R of the tokens, then Q; with eight R, and Q as a second one
        factors = [mixing(mix, role + 8 * p, F32(0.0) if p else b, scale, T, flags) for p in range(groups)]
        words = cute.recast_tensor(stored, I32)  # [two columns, j, side]
        x = self.meet_state(words, vectors, factors, role, c)  # b (v - R) or Q; with eight tokens both

        # u and o
        of_v = widened(values, rows)
        for r in cutlass.range_constexpr(rows):
            x[r, 0] += factors[0][1] * of_v[r]
        for i in cutlass.range_constexpr(T):
            u = cute.make_rmem_tensor((rows,), F32)
            for r in cutlass.range_constexpr(rows):
                u[r] = cute.arch.shuffle_sync(x[r, 0], LANES * i, mask_and_clamp=SAME_C)
            for p in cutlass.range_constexpr(groups):
                for r in cutlass.range_constexpr(rows):
                    x[r, p] += factors[p][2][i] * u[r]
        token = g if cutlass.const_expr(T == 8) else g - T
        if token >= 0 and token < call.tokens:
            out = cute.make_rmem_tensor((rows,), BF16)
            for r in cutlass.range_constexpr(rows):
                out[r] = x[r, groups - 1].to(BF16)
            cute.autovec_copy(out, vector_at(BF16, to + Int64(token * call.o.token) * 2, rows, 8))

        if (flags & Flag.COMMIT) != 0:
            self.update_state(words, x, writes, lane)
            cute.autovec_copy(stored, state_at(state, lane, self.sides))

    @cute.jit
    def update_state(self, words: cute.Tensor, x: cute.Tensor, writes: cute.Tensor, lane: I32):
        """S0 becomes S_T, two sides at a time. Lane (i, c) has u of token i and its rows, four for two sides, in `x[:, 0]`."""
        T, groups, sides = self.T, self.groups, self.sides
        g, c = lane // LANES, lane % LANES
        a = cute.make_rmem_tensor((2, 2, groups, sides // 2), I32)  # [side, order of parts]
        for p in cutlass.range_constexpr(groups):
            source = LANES * (c + LANES * p) + g // 2  # has u of token c, or c + 4, and the row
            for side in cutlass.range_constexpr(sides):
                even, odd = [cute.arch.shuffle_sync(x[2 * side + e, 0], source) for e in range(2)]
                mine = cute.make_rmem_tensor((1,), F32)
                mine[0] = odd if g % 2 == 1 else even
                if cutlass.const_expr(T < LANES):
                    mine[0] = mine[0] if c < T else F32(0.0)
                high, low = split(mine)
                one, pair = side % 2, side // 2
                a[one, 0, p, pair], a[one, 1, p, pair] = packed(high[0], low[0]), packed(low[0], high[0])
        k8 = cute.make_mma_atom(warp.MmaF16BF16Op(BF16, F32, (16, 8, 8)))
        for j in cutlass.range_constexpr(LOADS):
            w = cute.make_rmem_tensor((4, groups), I32)
            for p in cutlass.range_constexpr(groups):
                own = c % min(T, LANES)
                at = ((p * LOADS + j) * min(T, LANES) + own) * 8 + (g ^ (2 * own))
                cute.autovec_copy(words_at(writes, at * 4, 4), flat(w, 4 * p, 4))
            for half in cutlass.range_constexpr(2):
                decay = read_four(writes, T * D + 32 * j + 8 * c + 4 * half)
                for e in cutlass.range_constexpr(2):
                    n = 2 * half + e  # the lane's columns 2n, 2n + 1 of its 8
                    for pair in cutlass.range_constexpr(sides // 2):
                        of_sides = [flat(words, n + 4 * j + 4 * LOADS * (2 * pair + one), 1) for one in range(2)]
                        S = cute.make_rmem_tensor((2, 2), F32)  # [column, side]
                        for one in cutlass.range_constexpr(2):
                            of_row = widened(of_sides[one], 2)
                            for odd in cutlass.range_constexpr(2):
                                S[odd, one] = of_row[odd] * decay[2 * e + odd]
                        for p in cutlass.range_constexpr(groups):
                            for order in cutlass.range_constexpr(2):
                                multiply(k8, S, flat(a, 4 * (p + groups * pair) + 2 * order, 2), flat(w, 4 * p + n, 1))
                        for one in cutlass.range_constexpr(2):
                            of_sides[one][0] = packed(S[0, one], S[1, one])


def places(channel: Any) -> tuple:
    """Of a channel among the 32 of a load: which 8, which half of them, which two of that, which of the two."""
    return channel // 8 % 4, channel // 4 % 2, channel // 2 % 2, channel % 2


def words_at(table: Any, position: Any, count: int) -> Any:
    """`count` words of a table at a multiple of `count`."""
    pointer = cute.recast_ptr(table.iterator, dtype=I32) + cute.assume(position, divby=count)
    return cute.make_tensor(pointer.align(4 * count), cute.make_layout(count))


def sum_of(terms: list) -> Any:
    return terms[0] if len(terms) == 1 else terms[0] + sum_of(terms[1:])
