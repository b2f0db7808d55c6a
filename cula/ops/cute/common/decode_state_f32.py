# SPDX-License-Identifier: Apache-2.0
"""Decode: how a warp holds its rows of a state in float32, and writes the outputs of those rows.

8 or 16 lanes share a row, and a lane holds pieces of 4 columns of four rows next to each other. With 16 lanes a warp has 8 rows
instead of 16: half as much to do and twice as many warps, which is for little work. 8 lanes next to each other ask for 128 bytes
next to each other: a line of the state's, or every bank of shared memory once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.decode_call import BLOCKS, WARPS, D
from cula.ops.cute.common.decode_memory import vector_at
from cula.ops.cute.common.tiles import BF16, F32, I32, at_address

ROWS = 4  # of a lane
LINE = 8  # lanes that have a line of a row together
SAME_LINE = (32 - LINE) << 8 | 31  # a shuffle's segments


@dataclass(frozen=True)
class StateF32(ABC):
    """The rows of a warp, for T tokens. A family says which of them a lane keeps sums of, and which token's o it writes."""

    T: int
    lanes: int  # of a row

    dtype = F32  # of the states
    warps, blocks, prefetching_blocks = WARPS, BLOCKS, 0

    @property
    def warp_rows(self) -> int:
        return ROWS * 32 // self.lanes

    @property
    def pieces(self) -> int:
        """Of 4 columns, of a row and lane."""
        return D // (4 * self.lanes)

    @property
    @abstractmethod
    def kept(self) -> int:
        """Rows that a lane keeps the sums of."""

    @abstractmethod
    def row_of(self, r: int, lane: Any) -> Any:
        """The row that is a lane's r-th, among its warp's."""

    @abstractmethod
    def first_row(self, lane: Any) -> Any:
        """Of those that a lane writes o of, among its warp's."""

    @abstractmethod
    def token_of_output(self, lane: Any) -> Any:
        """The token whose o a lane writes; none that is there where it writes nothing."""

    def write_zeros(self, to: Any, o_token: Any, tokens: Any, lane: Any) -> None:
        zeros = cute.make_rmem_tensor((self.kept,), F32)
        zeros.fill(0.0)
        self.write_output(zeros, to, o_token, tokens, lane)

    @cute.jit
    def write_output(self, x: cute.Tensor, to: Int64, o_token: I32, tokens: I32, lane: I32):
        """o of the rows that a lane keeps. `to` is the address of the rows of token 0."""
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

    @cute.jit
    def store_state(self, stored: cute.Tensor, state: Int64, lane: I32):
        for r in cutlass.range_constexpr(ROWS):
            cute.autovec_copy(self.row_in(stored, r), self.row_at(state, r, lane))
