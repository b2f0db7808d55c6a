# SPDX-License-Identifier: Apache-2.0
"""Decode: how a warp holds its rows of a state in bfloat16, as factors of mma.sync, and what tensor cores do with it.

Lane (g, c) = (lane / 4, lane % 4) holds two of its warp's 16 rows of S0, number g of each `side` (with four sides four of 32),
and loads 16 bytes of them at a time: columns 32 j + 8 c .. + 7. Which column is which of a product's is free as long as both
factors agree, so what was loaded are fragments as it is: of step s = 2j + half, columns 32 j + 8 c + 4 half .. + 3. With four
sides a block has a whole state, and its tokens meet each other once; with two there are twice as many blocks.

A float32 factor is a sum of two in bfloat16, the upper half of its bits and the rest (`split`): 16 bits of it, where outputs and
states keep 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.decode_call import D
from cula.ops.cute.common.decode_memory import vector_at
from cula.ops.cute.common.tiles import BF16, I32, at_address

LANES = 4  # of a row
LOADS = D // (8 * LANES)  # of 16 bytes, of a row and lane
STEPS = D // 16
SAME_C = (LANES - 1) << 8 | 31  # a shuffle's segments: lanes of the same c


@dataclass(frozen=True)
class StateBf16:
    """The rows of a warp, for T tokens."""

    T: int
    sides: int = 2  # of 8 rows, or 4

    dtype = BF16  # of the states
    uses = ("mma",)
    prefetching_blocks = 0

    @property
    def warp_rows(self) -> int:
        return 8 * self.sides

    @property
    def lane_rows(self) -> int:
        """Once the vectors have met the state."""
        return 2 * self.sides

    def first_row(self, lane: Any) -> Any:
        """Of those that a lane writes o of, among its warp's."""
        return lane % LANES * self.lane_rows

    @cute.jit
    def write_zeros(self, to: Int64, o_token: I32, tokens: I32, lane: I32):
        zeros = cute.make_rmem_tensor((self.lane_rows,), BF16)
        zeros.fill(0.0)
        token = lane // LANES
        if token < tokens:
            cute.autovec_copy(zeros, vector_at(BF16, to + Int64(token * o_token) * 2, self.lane_rows, 8))

    @cute.jit
    def load_state(self, state: Int64, lane: I32):
        gS = state_at(state, lane, self.sides)
        stored = cute.make_rmem_tensor(gS.shape, BF16)
        cute.autovec_copy(gS, stored)
        return stored


def state_at(state: Any, lane: Any, sides: int) -> Any:
    """A lane's part of the pool, [numbers in 16 bytes, 16 bytes of a row, sides]; `state` is where the rows of its warp begin.

    Number g of a side is row 2 sides (g / 2) + g % 2 + 2 side: so numbers 2c and 2c + 1 of all sides are next to each other.
    """
    g, c = lane // LANES, lane % LANES
    first = at_address(BF16, state + Int64((g // 2 * 2 * sides + g % 2) * 2 * D + c * 16), 16)
    return cute.make_tensor(first, cute.make_layout((8, LOADS, sides), stride=(1, 8 * LANES, 2 * D)))


@cute.jit
def split(x: cute.Tensor):
    """float32 numbers as sums of two: one that is its upper half, and the rest."""
    high, low = cute.make_rmem_tensor_like(x), cute.make_rmem_tensor_like(x)
    bits, of_high = cute.recast_tensor(x, I32), cute.recast_tensor(high, I32)
    for e in cutlass.range_constexpr(cute.size(x)):
        of_high[e] = bits[e] & I32(-65536)
    for e in cutlass.range_constexpr(cute.size(x)):
        low[e] = x[e] - high[e]
    return high, low


def multiply(atom: Any, acc: Any, a: Any, b: Any) -> None:
    """acc [16, 8] += a b^T: four registers, and words of two numbers: four of a and two of b, or half as many."""
    d = cute.make_tensor(acc.iterator, cute.make_layout(((2, 2), 1, 1)))
    of_a = (2, 2, 2) if cute.size(a) == 4 else (2, 2)
    of_b = (2, 2) if cute.size(b) == 2 else 2
    as_a, as_b = (
        cute.make_tensor(cute.recast_tensor(t, BF16).iterator, cute.make_layout((shape, 1, 1)))
        for t, shape in ((a, of_a), (b, of_b))
    )
    cute.gemm(atom, d, as_a, as_b, d)
