# SPDX-License-Identifier: Apache-2.0
"""Lightning on Hopper: what a warpgroup does to states, values and scores of a chunk, in registers and shared memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.lightning_items import power
from cula.ops.cute.common.tiles import BF16, F32, I32, rounded, rows_and_columns

from .lightning_config import LANES, C

# States


def our_rows(thr: Any, rows: Any) -> Any:
    """What this thread has of the 64 rows of a state's matrix in memory: `part` of `common/lightning_states.py`."""
    return lambda m: thr.partition_C(cute.local_tile(m, (LANES, m.shape[1]), (rows, 0)))


# Values. Transposed: rows are channels, columns tokens.


@cute.jit
def weighed(v: cute.Tensor, decay: F32, n: I32, column: I32, f8: F32, even: F32, odd: F32):
    """V^T with column i times f^(n-1-i), rounded to bf16; columns from n on hold zeros.

    `even` and `odd` are the factors of this thread's last two columns in a whole chunk.
    """
    exact = cute.make_rmem_tensor_like(v, F32)
    exact.store(v.load().to(F32))
    x = rows_and_columns(exact)
    if n == C:
        for a in cutlass.range_constexpr(C // 8 - 1, -1, -1):
            for i in cutlass.range_constexpr(2):
                x[i, 2 * a], x[i, 2 * a + 1] = x[i, 2 * a] * even, x[i, 2 * a + 1] * odd
            even, odd = even * f8, odd * f8
    else:
        for j in cutlass.range_constexpr(C // 4):
            w = power(decay, cutlass.max(n - 1 - (8 * (j // 2) + column + j % 2), 0))
            for i in cutlass.range_constexpr(2):
                x[i, j] = x[i, j] * w
    return rounded(exact)


@cute.jit
def clear_columns(v: cute.Tensor, n: I32, column: I32):
    """Zero the tokens from n on."""
    x = rows_and_columns(v)
    for j in cutlass.range_constexpr(C // 4):
        for i in cutlass.range_constexpr(2):
            x[i, j] = x[i, j] if 8 * (j // 2) + column + j % 2 < n else BF16(0.0)


@cute.jit
def clear_rows(tile: cute.Tensor, n: I32, thread: I32):
    """Zero the rows of a [C, K] tile from n on; this warpgroup's wgmma sees it after a barrier."""
    zeros = cute.make_rmem_tensor((1, 8), BF16)
    zeros.fill(0.0)
    per_row = cute.size(tile, mode=[1]) // 8
    for p in cutlass.range_constexpr(C * per_row // 128):
        row = (p * 128 + thread) // per_row
        if row >= n:
            cute.autovec_copy(zeros, cute.local_tile(tile, (1, 8), (row, (p * 128 + thread) % per_row)))
    cute.arch.fence_proxy("async.shared", space="cta")


# Scores and outputs


@cute.jit
def lag_factors(decay: F32, scale: F32, row: I32, column: I32):
    """[9, 2]: f^(r-i) scale at [r - i == 8 m + row - column - b], zero above the diagonal."""
    lags = cute.make_rmem_tensor((9, 2), F32)
    for m in cutlass.range_constexpr(9):
        for b in cutlass.range_constexpr(2):
            lag = row - column - b + 8 * (m - 7)
            factor = power(decay, cutlass.max(lag, 0)) * scale
            lags[m, b] = factor if lag >= 0 else F32(0.0)
    return lags


@cute.jit
def decay_scores(accP: cute.Tensor, lags: cute.Tensor):
    """q k^T -> P."""
    P = rows_and_columns(accP)
    for i in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(C // 4):
            P[i, j] = P[i, j] * lags[i - j // 2 + 7, j % 2]


@cute.jit
def decay_outputs(accO: cute.Tensor, even: F32, odd: F32, f8: F32):
    """S q^T -> S q^T scale f^(r+1). `even` and `odd` are the factors of this thread's first two columns."""
    O = rows_and_columns(accO)
    for a in cutlass.range_constexpr(C // 8):
        for i in cutlass.range_constexpr(2):
            O[i, 2 * a], O[i, 2 * a + 1] = O[i, 2 * a] * even, O[i, 2 * a + 1] * odd
        even, odd = even * f8, odd * f8
