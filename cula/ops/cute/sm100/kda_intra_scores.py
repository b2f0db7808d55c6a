# SPDX-License-Identifier: Apache-2.0
"""KDA on Blackwell, products of the intra-chunk kernel by tcgen05: scores below the diagonal, and the squares of rows.

**Scores.** Block (I, J), I > J, of 16x16 scores is k e^L and q e^L of rows I against k e^{L_16 - L} of rows J, times the decays
of the blocks between: nothing exceeds 1, whatever the gate is. The left operand is the same for every J. It is in tensor memory,
where a warp puts its registers as they are: rows of block I are lanes 32 I .. 32 I + 15 for k, and the 16 lanes behind them for
q. The right operand is a tile in shared memory of six blocks of 16 keys, one for each (I, J), with the decays between multiplied
in. One product of M = 128 and N = 96 makes all of them, and more that nobody reads; a warp reads its own, again as fragments of
mma.sync.

**Squares** of rows are the diagonal of x x^T, M = N = 64, of tiles as they lie: of k and q for their norms, of kr and kb for the
bound of `common/kda_intra_bound.py`. Two of them share columns, one in the lower and one in the upper half of every 32 lanes.

| tensor memory                       | columns   |
|-------------------------------------|-----------|
| k e^L, q e^L in 16 bits             | 0 - 63    |
| scores                              | 64 - 159  |
| squares of k, q; then of kr, kb     | 160 - 223 |
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.fragments import flat, lane_address, read_factors, store_matrix
from cula.ops.cute.common.kda_intra_steps import Chunk
from cula.ops.cute.common.squares import diagonal_of
from cula.ops.cute.common.tiles import F32, I32, K_MAJOR, tile_layout

from .tmem import LANE, accumulator, issue, load_fragment, loaded, operand_a, pointer_at, store_fragment, umma, umma_of_few_rows

COLUMNS = 256  # that are allocated: two blocks share an SM
KEY_ROWS = 96  # six blocks of keys
HALF_OF_KEYS = KEY_ROWS * 128  # bytes: half of the channels
BLOCK_BYTES = 16 * 128  # of these, a block's


class Column(enum.IntEnum):
    """Where in tensor memory things begin."""

    ROWS = 0
    SCORES = 64
    SQUARES = 160


def key_tile(dtype: Any) -> Any:
    return tile_layout(KEY_ROWS, 128, dtype=dtype)


FIRST_BLOCK = (0, 3, 5)  # of the scores (J + d, J), J = 0 .. 3 - d, for d = 1, 2, 3: which of the blocks of keys


class Scores(NamedTuple):
    """A warp's part of them."""

    start: Any  # of our columns
    rows: Any  # the same, with the first lane of our block of rows
    rows_at: Any  # and the column of our half of the channels
    keys_at: Any  # where our keys for the block below go; others come `FIRST_BLOCK` blocks later

    def leave_rows(self, x16: Any, side: int, channel: int) -> None:
        """k e^L or q e^L of our rows from a channel of our half on, to tensor memory; to be waited for by `stored`."""
        store_fragment(self.rows_at + (16 * LANE * side + Column.ROWS + channel // 2), x16)

    def leave_keys(self, x: Chunk, key8: Any, n: Any) -> None:
        """Sixteen channels of keys for the rows below."""
        leave_keys(x, self.keys_at, key8, n)


def scores_of(x: Chunk, start: Any) -> Scores:
    rows = start + 32 * LANE * x.block_row
    keys_at = lane_address(x.smem.keys, x.block_row, x.lane) + HALF_OF_KEYS * x.side
    return Scores(start, rows, rows + 32 * x.side, keys_at)


@cute.jit
def leave_keys(x: cutlass.Constexpr, keys_at: I32, key8: cute.Tensor, n: cutlass.Constexpr):
    """Keys for the rows below, in the tile: those of the block below as they are, others with what decays between."""
    smem, dtype, at = x.smem, key8.element_type, keys_at ^ 32 * n
    between_at = x.pairs_of(smem.between) + 2 * 16 * n
    if x.block_row < 3:
        store_matrix(key8, at)
    if x.block_row < 2:  # the table begins with blocks (2, 0) and (3, 1)
        leave_decayed(smem, key8, between_at, at + BLOCK_BYTES * FIRST_BLOCK[1], dtype)
    if x.block_row == 0:  # and ends with (3, 0)
        leave_decayed(smem, key8, between_at + 2 * 256, at + BLOCK_BYTES * FIRST_BLOCK[2], dtype)


@cute.jit
def leave_decayed(smem: cutlass.Constexpr, key8: cute.Tensor, decay_at: I32, to: I32, dtype: cutlass.Constexpr):
    wide = smem.after.element_type
    decay, decay8, out = read_factors(decay_at, dtype), *[cute.make_rmem_tensor((8,), dtype) for _ in range(2)]
    for e in cutlass.range_constexpr(8):
        decay8[e] = decay[e % 2 + 2 * (e // 4)]
    out.store((key8.load().to(wide) * decay8.load().to(wide)).to(dtype))
    store_matrix(out, to)


@cute.jit
def multiply_scores(x: cutlass.Constexpr):
    """All blocks below the diagonal, by one warp."""
    dtype, start = x.variant.dtype, x.scores.start
    mma = umma(KEY_ROWS, K_MAJOR, dtype)
    rows = operand_a(mma, pointer_at(start + Column.ROWS), 128, dtype)
    keys = mma.make_fragment_B(mma.get_slice(0).partition_B(x.smem.keys))
    issue(mma, accumulator(mma, pointer_at(start + Column.SCORES), KEY_ROWS), rows, keys, False)


@cute.jit
def multiply_squares(x: cutlass.Constexpr, lower: cute.Tensor, upper: cute.Tensor):
    """x x^T of two tiles, by one warp."""
    for half, tile in enumerate((lower, upper)):
        mma = umma_of_few_rows(64, tile.element_type)
        part, at = mma.get_slice(0), pointer_at(x.scores.start + (16 * LANE * half + Column.SQUARES))
        rows, columns = mma.make_fragment_A(part.partition_A(tile)), mma.make_fragment_B(part.partition_B(tile))
        issue(mma, accumulator(mma, at, 64), rows, columns, False)


@cute.jit
def read_squares(x: cutlass.Constexpr):
    """The squares of rows r and r + 8 of our block: of the lower tile for KEYS, of the upper one for QUERIES."""
    squares = cute.make_rmem_tensor((8,), F32)
    load_fragment(x.scores.rows + (16 * LANE * x.side + Column.SQUARES + 16 * x.block_row), squares)
    loaded()
    return diagonal_of(squares, x.r)


@cute.jit
def read_scores(x: cutlass.Constexpr):
    """Blocks d = 1, 2, 3 below the diagonal of our rows, as `second_pass` returns them; those that do not exist are others'."""
    scores = cute.make_rmem_tensor(((2, 2), 1, 2, 3), F32)
    at = x.scores.rows + (16 * LANE * x.side + Column.SCORES + 16 * x.block_row)
    for d in cutlass.range_constexpr(1, 4):
        load_fragment(at + 16 * (FIRST_BLOCK[d - 1] - d), flat(scores, 8 * (d - 1), 8))
    loaded()
    return scores
