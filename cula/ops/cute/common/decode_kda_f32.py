# SPDX-License-Identifier: Apache-2.0
"""Decode, several tokens of KDA on states in float32: multiply-adds. `decode_frame.py` has the formulas.

  1. 2T sums of products over a lane's columns, and over the lanes by halves: a lane sends half of its sums and keeps the other.
     First by vectors, 8 of them at most: which one a lane accumulates as its j-th depends on the lane (j ^ lane), so that all
     lanes send the same registers. Then, of 16 lanes, by rows, for the same end numbered anew in the second 8 (`row_of`).
  2. The recurrence of u. A lane has its role, R or Q of a token, for `kept` rows. u_i, which all lanes of a row are told, is
     added with its factor.
  3. S_T.

`vectors` [2T, 128] has k e^G of the tokens, then q e^G; `writes` [T + 1, 128] k e^{G_T - G}, then e^{G_T}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.decode_call import D
from cula.ops.cute.common.decode_kda_intra import mixing, table_sizes
from cula.ops.cute.common.decode_memory import read_four, vector_at, widened
from cula.ops.cute.common.decode_state_f32 import LINE, ROWS, SAME_LINE, StateF32
from cula.ops.cute.common.tiles import F32, I32
from cula.ops.cute.decode_abi import Flag


@dataclass(frozen=True)
class KdaF32(StateF32):
    """What T tokens do to the rows of a warp."""

    is_kda = True
    uses = ()

    @property
    def tables(self) -> tuple[int, ...]:
        return table_sizes(self.T)

    @property
    def roles(self) -> int:
        """Lanes have these: with up to four tokens R of the tokens, then Q; with eight R, and Q as a second one."""
        return min(2 * self.T, LINE)

    @property
    def kept(self) -> int:
        """Rows that a lane keeps the sums of: its first."""
        return ROWS * LINE // self.lanes

    def row_of(self, r: int, lane: Any) -> Any:
        return lane // self.lanes * ROWS + (r ^ (lane % self.lanes // LINE * self.kept))

    def first_row(self, lane: Any) -> Any:
        """Of those that a lane reads v and writes o of, among its warp's."""
        return self.row_of(0, lane)

    def token_of_v(self, lane: Any) -> Any:
        """T or more where a lane wants no v."""
        return lane % LINE

    def token_of_output(self, lane: Any) -> Any:
        """None that is there where a lane has no role Q."""
        return lane % LINE - (self.T if self.T <= 4 else 0)

    @cute.jit
    def load_values(self, v: Int64):
        """v of the lane's rows, which begin at that address."""
        values = cute.make_rmem_tensor((self.kept // 2,), I32)
        cute.autovec_copy(vector_at(I32, v, self.kept // 2, 2 * self.kept), values)
        return values

    def put_vectors(self, tables: Any, t: int, channel: Any, key: Any, query: Any) -> None:
        """k e^G and q e^G of token t, to the tables."""
        tables[0][t * D + channel], tables[0][(self.T + t) * D + channel] = key, query

    def put_write(self, tables: Any, t: int, channel: Any, write: Any) -> None:
        """k e^{G_T - G} of token t."""
        tables[1][t * D + channel] = write

    @cute.jit
    def sum_over_lanes(self, sums: cute.Tensor):
        """To sums[:kept, 0], the lane's own. sums[r, j] of a lane belong to its r-th row and vector j ^ lane."""
        half = self.roles // 2
        while cutlass.const_expr(half > 0):
            for r in cutlass.range_constexpr(ROWS):
                for j in cutlass.range_constexpr(half):
                    sums[r, j] += cute.arch.shuffle_sync_bfly(sums[r, j + half], offset=half)
            half //= 2
        for r in cutlass.range_constexpr(ROWS - self.kept):
            sums[r, 0] += cute.arch.shuffle_sync_bfly(sums[r + self.kept, 0], offset=LINE)
        if cutlass.const_expr(self.roles < LINE):  # two lanes of a line have the same role
            for r in cutlass.range_constexpr(self.kept):
                sums[r, 0] += cute.arch.shuffle_sync_bfly(sums[r, 0], offset=self.roles)

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
        T, kept, roles, parts, flags = self.T, self.kept, self.roles, 2 * self.T // self.roles, call.flags
        role, at = lane % roles, lane % self.lanes * 4
        factors = [mixing(mix, role, b, scale, T, flags)]  # while the state is on its way; a second role's have no registers yet

        # R and Q: 2T sums, 8 at a time
        x = cute.make_rmem_tensor((kept, parts), F32)
        for part in cutlass.range_constexpr(parts):
            sums = cute.make_rmem_tensor((ROWS, roles), F32)
            sums.fill(0.0)
            for c in cutlass.range_constexpr(self.pieces):
                for j in cutlass.range_constexpr(roles):
                    four = read_four(vectors, (part * roles + (j ^ role)) * D + at + c * 4 * self.lanes)
                    for r in cutlass.range_constexpr(ROWS):
                        for e in cutlass.range_constexpr(4):
                            sums[r, j] += stored[4 * c + e, r] * four[e]
            self.sum_over_lanes(sums)
            if cutlass.const_expr(part > 0):
                factors.append(mixing(mix, role + part * roles, F32(0.0), scale, T, flags))
            for r in cutlass.range_constexpr(kept):
                x[r, part] = sums[r, 0] * factors[part][0]

        # u and o
        of_v = widened(values, kept)
        for r in cutlass.range_constexpr(kept):
            x[r, 0] += factors[0][1] * of_v[r]
        u = cute.make_rmem_tensor((ROWS, T), F32)
        for i in cutlass.range_constexpr(T):
            for r in cutlass.range_constexpr(kept):
                u[r, i] = cute.arch.shuffle_sync(x[r, 0], i, mask_and_clamp=SAME_LINE)
                for part in cutlass.range_constexpr(parts):
                    x[r, part] += factors[part][2][i] * u[r, i]
        of_queries = cute.make_tensor(x.iterator + (parts - 1) * kept, cute.make_layout(kept))
        self.write_output(of_queries, to, call.o.token, call.tokens, lane)

        if (flags & Flag.COMMIT) != 0:
            self.update_state(stored, u, writes, lane)
            self.store_state(stored, state, lane)

    @cute.jit
    def update_state(self, stored: cute.Tensor, u: cute.Tensor, writes: cute.Tensor, lane: I32):
        """S0 becomes S_T."""
        T, kept, at = self.T, self.kept, lane % self.lanes * 4
        for i in cutlass.range_constexpr(T):
            for r in cutlass.range_constexpr(kept, ROWS):
                u[r, i] = cute.arch.shuffle_sync_bfly(u[r - kept, i], offset=LINE)
        for c in cutlass.range_constexpr(self.pieces):
            decay = read_four(writes, T * D + at + c * 4 * self.lanes)
            for r in cutlass.range_constexpr(ROWS):
                for e in cutlass.range_constexpr(4):
                    stored[4 * c + e, r] *= decay[e]
            for i in cutlass.range_constexpr(T):
                four = read_four(writes, i * D + at + c * 4 * self.lanes)
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(4):
                        stored[4 * c + e, r] += u[r, i] * four[e]
