# SPDX-License-Identifier: Apache-2.0
"""Decode, what meets a state in float32: multiply-adds. `decode.py` has the formulas.

8 or 16 lanes share a row, and a lane holds pieces of 4 columns of four rows next to each other. With 16 lanes a warp has 8 rows
instead of 16: half as much to do and twice as many warps that prepare, which is for little work.
  1. 2T sums of products over a lane's columns, and over the lanes by halves: a lane sends half of its sums and keeps the other.
     First by vectors, 8 of them at most: which one a lane accumulates as its j-th depends on the lane (j ^ lane), so that all
     lanes send the same registers. Then, of 16 lanes, by rows, for the same end numbered anew in the second 8 (`row_of`).
  2. The recurrence of u. A lane has its role, R or Q of a token, for `kept` rows. u_i, which all lanes of a row are told, is
     added with its factor.
  3. S_T.

`vectors` [2T, 128] has k e^G of the tokens, then q e^G; `writes` [T + 1, 128] k e^{G_T - G}, then e^{G_T}. 8 lanes next to each
other ask for 128 bytes next to each other: a line of the state's, or every bank of shared memory once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.decode_flags import COMMIT
from cula.ops.cute.common.tiles import BF16, F32, I32, at_address
from cula.ops.cute.sm90.decode_common import BLOCKS, WARPS, D, read_four, vector_at, widened
from cula.ops.cute.sm90.decode_tokens import Raw, mixing

ROWS = 4  # of a lane
LINE = 8  # lanes that have a line of a row together
SAME_LINE = (32 - LINE) << 8 | 31  # a shuffle's segments


@dataclass(frozen=True)
class RowsFma:
    """What T tokens do to the rows of a warp."""

    T: int
    lanes: int  # of a row

    dtype = F32  # of the states
    is_kda = True
    warps, blocks, early_blocks = WARPS, BLOCKS, 0

    @property
    def tables(self) -> tuple[int, ...]:
        """Numbers of `vectors`, `writes`, `mix` and `raw`."""
        return 2 * self.T * D, (self.T + 1) * D, 2 * self.T * self.T * WARPS, Raw(self.T).size

    @property
    def warp_rows(self) -> int:
        return ROWS * 32 // self.lanes

    @property
    def pieces(self) -> int:
        """Of 4 columns, of a row and lane."""
        return D // (4 * self.lanes)

    @property
    def roles(self) -> int:
        """Lanes have these: with up to four tokens R of the tokens, then Q; with eight R, and Q as a second one."""
        return min(2 * self.T, LINE)

    @property
    def kept(self) -> int:
        """Rows that a lane keeps the sums of: its first."""
        return ROWS * LINE // self.lanes

    def row_of(self, r: int, lane: Any) -> Any:
        """The row that is a lane's r-th, among its warp's."""
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

    def write_zeros(self, to: Any, o_token: Any, tokens: Any, lane: Any) -> None:
        zeros = cute.make_rmem_tensor((self.kept,), F32)
        zeros.fill(0.0)
        self.write_output(zeros, to, o_token, tokens, lane)

    @cute.jit
    def write_output(self, x: cute.Tensor, to: Int64, o_token: I32, tokens: I32, lane: I32):
        """o of the lane's rows, if it has role Q. `to` is the address of the rows of token 0."""
        token = self.token_of_output(lane)
        if token >= 0 and token < tokens:
            out = cute.make_rmem_tensor((self.kept,), BF16)
            for r in cutlass.range_constexpr(self.kept):
                out[r] = x[r].to(BF16)
            cute.autovec_copy(out, vector_at(BF16, to + Int64(token * o_token) * 2, self.kept, 2 * self.kept))

    def row_at(self, state: Any, r: int, lane: Any) -> Any:
        """Row r of a lane in the pool, [4 columns, pieces]; `state` is where the rows of its warp begin."""
        at = state + Int64((self.row_of(r, lane) * D + lane % self.lanes * 4) * 4)
        return cute.make_tensor(at_address(F32, at, 16), cute.make_layout((4, self.pieces), stride=(1, 4 * self.lanes)))

    def row_in(self, stored: Any, r: int) -> Any:
        """The same in registers."""
        return cute.make_tensor(stored.iterator + r * 4 * self.pieces, cute.make_layout((4, self.pieces)))

    @cute.jit
    def load_state(self, state: Int64, lane: I32):
        stored = cute.make_rmem_tensor((4 * self.pieces, ROWS), F32)
        for r in cutlass.range_constexpr(ROWS):
            cute.autovec_copy(self.row_at(state, r, lane), self.row_in(stored, r))
        return stored

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
        values, b, scale = ready
        vectors, writes, mix, _ = tables
        T, kept, roles, parts = self.T, self.kept, self.roles, 2 * self.T // self.roles
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
        self.write_output(of_queries, to, o_token, tokens, lane)

        # The state after the last token
        if (flags & COMMIT) != 0:
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
            for r in cutlass.range_constexpr(ROWS):
                cute.autovec_copy(self.row_in(stored, r), self.row_at(state, r, lane))
