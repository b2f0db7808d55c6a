# SPDX-License-Identifier: Apache-2.0
"""Decode, several tokens of Lightning on states in float32: multiply-adds, with q and k in float32 in shared memory.

A lane has v of all tokens for its four rows. T sums are halved among lanes by vectors, and then by rows.

| shared memory, float32 | what                                                                                |
|------------------------|-------------------------------------------------------------------------------------|
| `vectors` [2T, 128]    | q of the tokens, then k                                                             |
| `dots` [3, T, T, 4]    | q_t . k_i; for norms k_t . k_i, q_t . q_i: sums over the channels of each warp      |

The update stays in multiply-adds: sums of tensor cores round towards zero, which a state that decays slowly would collect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.decode_call import WARPS, D
from cula.ops.cute.common.decode_lightning import FirstTokens, power, products, there
from cula.ops.cute.common.decode_memory import (
    always_there,
    four_at,
    load_words,
    read_four,
    select,
    vector_at,
    widened,
)
from cula.ops.cute.common.decode_state_bf16 import LANES
from cula.ops.cute.common.decode_state_f32 import LINE, ROWS, StateF32
from cula.ops.cute.common.decode_sums import sum_of_warps
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.gate import inverse_norm
from cula.ops.cute.common.tiles import F32, I32
from cula.ops.cute.decode_abi import Flag


@dataclass(frozen=True)
class LightningF32(StateF32):
    """What T tokens do to the rows of a warp."""

    is_kda = False
    uses = ("mma",)

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

    def token_addresses(self, at: FirstTokens, tokens: Any, wid: Any, lane: Any) -> list:
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
    def intra(
        self, call: cutlass.Constexpr, raw: cutlass.Constexpr, rate: F32, place: cutlass.Constexpr, tables: cutlass.Constexpr
    ):
        """Fill the tables; ends with the block's one barrier."""
        q, k, values = raw
        vectors, dots = tables
        wid, lane = place.wid, place.lane
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
        if (call.flags & Flag.USE_NORM) != 0:
            squares = products(q, k, q)
            if is_token:
                for e in cutlass.range_constexpr(2):
                    dots[at + (self.T * self.T + e) * WARPS] = found[2 + e]
                    dots[at + (2 * self.T * self.T + e) * WARPS] = squares[e]
        cute.arch.sync_threads()
        return values, rate

    @cute.jit
    def factors(self, call: cutlass.Constexpr, dots: cute.Tensor, role: I32, rate: F32):
        """Of token `role`: that of S0 . q; P. Of all tokens: d^{T-1-i}, that of v in the state."""
        T, scale, tokens = self.T, call.scale, call.tokens
        x = cute.make_rmem_tensor((2 * T + 1,), F32)
        query, pairs, writes = flat(x, 2 * T, 1), flat(x, 0, T), flat(x, T, T)
        query[0] = scale * power(rate, role + 1)
        for i in cutlass.range_constexpr(T):
            pair = sum_of_warps(dots, role * T + i) * (scale * power(rate, role - i))
            pairs[i] = select(role >= i, pair, F32(0.0))
            writes[i] = power(rate, tokens - 1 - i)
            if cutlass.const_expr(not always_there(i, T)):
                writes[i] = select(tokens > i, writes[i], F32(0.0))
        if (call.flags & Flag.USE_NORM) != 0:
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
        call: cutlass.Constexpr,
        stored: cute.Tensor,
        state: Int64,
        ready: cutlass.Constexpr,
        tables: cutlass.Constexpr,
        lane: I32,
        to: Int64,
    ):
        """`stored` is the lane's part of the state, `to` the address of its rows of token 0 in o."""
        values, rate = ready
        vectors, dots = tables
        T, kept, role, at = self.T, self.kept, lane % self.T, lane % self.lanes * 4
        query, pairs, writes = self.factors(call, dots, role, rate)

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
        self.write_output(x, to, call.o.token, call.tokens, lane)

        if (call.flags & Flag.COMMIT) != 0:
            self.update_state(stored, values, writes, power(rate, call.tokens), vectors, lane)
            self.store_state(stored, state, lane)

    @cute.jit
    def update_state(
        self, stored: cute.Tensor, values: cute.Tensor, writes: cute.Tensor, decay: F32, vectors: cute.Tensor, lane: I32
    ):
        """S0 becomes S_T."""
        T, at = self.T, lane % self.lanes * 4
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
