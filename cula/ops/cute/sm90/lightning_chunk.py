# SPDX-License-Identifier: Apache-2.0
"""Lightning on Hopper: what a warpgroup does to states, values and scores of a chunk, in registers and shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.lightning_items import in_time, nth, power
from cula.ops.cute.common.tiles import BF16, F32, I32, rounded, rows_and_columns

from .lightning_config import LANES, C

# States


def our_rows(thr: Any, rows: Any) -> Any:
    """What this thread has of the 64 rows of a state's matrix in memory: `part` of `common/lightning_states.py`."""
    return lambda m: thr.partition_C(cute.local_tile(m, (LANES, m.shape[1]), (rows, 0)))


# Powers of f that a thread multiplies with


class Factors(NamedTuple):
    """Of a head: column c = 8 a + column + b of a chunk has leaving[b] f^(8 a) in O^T, entering[b] f^(8 (7 - a)) in V^T, backward
    in time with 7 - a and a."""

    decay: Any  # -log2 f
    scale: Any
    eight: Any  # f^8
    chunk: Any  # of the state over a whole chunk
    leaving: tuple[Any, Any]  # forward in time scale f^(c+1), backward f^(C-1-c)
    entering: tuple[Any, Any]  # forward in time f^(C-1-c), backward scale f^(c+1)
    eights: list[Any] | None  # those of `leaving` for each a, where a kernel learns the direction as it runs


@cute.jit
def factors_of(decay: F32, scale: F32, column: I32, turn: cutlass.Constexpr):
    eight, chunk = power(decay, I32(8)), power(decay, I32(C))
    falling = power(decay, 7 - column), power(decay, 6 - column)
    rising = power(decay, column + 1) * scale, power(decay, column + 2) * scale
    if cutlass.const_expr(turn.is_reversed is False):
        return Factors(decay, scale, eight, chunk, rising, falling, None)
    leaving = [b if turn.is_reversed else a for a, b in zip(rising, falling)]
    entering = [a if turn.is_reversed else b for a, b in zip(rising, falling)]
    eights = [power(decay, in_time(turn, I32(8 * a), 8 * (C // 8 - 1))) for a in range(C // 8)]
    return Factors(decay, scale, eight, chunk, leaving, entering, eights)


@cute.jit
def times_entering(v: cute.Tensor, by: cutlass.Constexpr):
    """V^T of a whole chunk times what is left of each token behind the last. From a table, all 32 products would not fit."""
    if cutlass.const_expr(by.eights is None):
        times_chain(v, by.entering, by.eight, range(C // 8 - 1, -1, -1))
    else:
        times_table(v, by.entering, by.eights[::-1], at_once=False)


@cute.jit
def times_leaving(accO: cute.Tensor, by: cutlass.Constexpr):
    """S q^T -> S q^T scale f^(r+1), backward in time f^r."""
    if cutlass.const_expr(by.eights is None):
        times_chain(accO, by.leaving, by.eight, range(C // 8))
    else:
        times_table(accO, by.leaving, by.eights, at_once=True)


@cute.jit
def times_chain(exact: cute.Tensor, pair: cutlass.Constexpr, eight: F32, order: cutlass.Constexpr):
    """Columns 8 a + column + b times pair[b] eight^i, a being the i-th of an order. The compiler keeps all of these powers."""
    x, (even, odd) = rows_and_columns(exact), pair
    for a in order:
        for i in cutlass.range_constexpr(2):
            x[i, 2 * a], x[i, 2 * a + 1] = x[i, 2 * a] * even, x[i, 2 * a + 1] * odd
        even, odd = even * eight, odd * eight


@cute.jit
def times_table(exact: cute.Tensor, pair: cutlass.Constexpr, eights: cutlass.Constexpr, at_once: cutlass.Constexpr):
    """Columns 8 a + column + b times pair[b] eights[a]. At once, the compiler keeps 16 products over all chunks."""
    x = rows_and_columns(exact)
    for a in cutlass.range_constexpr(C // 8):
        for b in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                if cutlass.const_expr(at_once):
                    x[i, 2 * a + b] = x[i, 2 * a + b] * (pair[b] * eights[a])
                else:
                    x[i, 2 * a + b] = x[i, 2 * a + b] * pair[b] * eights[a]


# Values. Transposed: rows are channels, columns tokens.


@cute.jit
def weighed(v: cute.Tensor, n: I32, column: I32, by: cutlass.Constexpr, turn: cutlass.Constexpr):
    """V^T of a chunk of n tokens, each times what is left of it behind the last, rounded to bf16: f^(n-1-i) for token i forward
    in time, scale f^(n-i) backward. Tokens from n on hold zeros."""
    exact = cute.make_rmem_tensor_like(v, F32)
    exact.store(v.load().to(F32))
    if n == C:
        times_entering(exact, by)
    else:
        x = rows_and_columns(exact)
        for j in cutlass.range_constexpr(C // 4):
            w = left_of(n - 1 - in_time(turn, 8 * (j // 2) + column + j % 2, C - 1), by, turn)
            for i in cutlass.range_constexpr(2):
                x[i, j] = x[i, j] * w
    return rounded(exact)


@cute.jit
def left_of(lag: I32, by: cutlass.Constexpr, turn: cutlass.Constexpr):
    """What is left of a token so many tokens later."""
    if cutlass.const_expr(turn.is_reversed is not False):
        left = power(by.decay, cutlass.max(lag + 1 if turn.is_reversed else lag, 0))
        return left * by.scale if turn.is_reversed else left
    return power(by.decay, cutlass.max(lag, 0))


@cute.jit
def clear_columns(v: cute.Tensor, n: I32, column: I32, turn: cutlass.Constexpr):
    """Zero the tokens from n on."""
    x = rows_and_columns(v)
    for j in cutlass.range_constexpr(C // 4):
        for i in cutlass.range_constexpr(2):
            x[i, j] = x[i, j] if in_time(turn, 8 * (j // 2) + column + j % 2, C - 1) < n else BF16(0.0)


@cute.jit
def clear_rows(tile: cute.Tensor, n: I32, thread: I32, turn: cutlass.Constexpr):
    """Zero the rows of a [C, K] tile from n on; this warpgroup's wgmma sees it after a barrier."""
    zeros = cute.make_rmem_tensor((1, 8), BF16)
    zeros.fill(0.0)
    per_row = cute.size(tile, mode=[1]) // 8
    for p in cutlass.range_constexpr(C * per_row // 128):
        row = (p * 128 + thread) // per_row
        if in_time(turn, row, C - 1) >= n:
            cute.autovec_copy(zeros, cute.local_tile(tile, (1, 8), (row, (p * 128 + thread) % per_row)))
    cute.arch.fence_proxy("async.shared", space="cta")


# Scores


@cute.jit
def lag_factors(decay: F32, scale: F32, row: I32, column: I32, turn: cutlass.Constexpr):
    """[9, 2]: f^(r-i) scale at [r - i == 8 m + row - column - b], zero where r is before i."""
    lags = cute.make_rmem_tensor((9, 2), F32)
    for m in cutlass.range_constexpr(9):
        for b in cutlass.range_constexpr(2):
            lag = nth(turn, row - column - b + 8 * (m - 7))
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
