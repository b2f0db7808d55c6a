# SPDX-License-Identifier: Apache-2.0
"""Lightning on Hopper: what a warpgroup does to states, values and scores of a chunk, in registers and shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.states import States, address_of, load_state, slot_of_first, slot_of_last, store_state
from cula.ops.cute.common.tiles import BF16, F32, I32, rounded, rows_and_columns

from .lightning_items import LANES, C, power

# States


class LightningStates(NamedTuple):
    """First and last states, and what segments leave to each other."""

    ends: States
    mSeeds: Any  # [ids, HV, V, K] float32

    @property
    def shape(self) -> tuple[int, int]:
        """Of a head's state, [V, K]."""
        return self.mSeeds.shape[2:]


@cute.jit
def state_rows(mH: cute.Tensor, slot: I32, head: I32, rows: I32, thr):
    """This thread's elements of the 64 rows of a state."""
    return thr.partition_C(cute.local_tile(mH[slot, head, None, None], (LANES, mH.shape[3]), (rows, 0)))


def our_rows(thr: Any, rows: Any) -> Any:
    """What this thread has of a state's matrix in memory, [V, K]: `part` of `common/states.py`."""
    return lambda m: thr.partition_C(cute.local_tile(m, (LANES, m.shape[1]), (rows, 0)))


@cute.jit
def read_first_state(acc: cute.Tensor, thr, states: cutlass.Constexpr, item: cutlass.Constexpr):
    """acc <- the sequence's first state, zeros where it has none."""
    ends, shape = states.ends, states.shape
    acc.fill(0.0)
    slot = slot_of_first(ends, item.seq)
    if slot >= 0:
        address = address_of(ends.h0, slot, ends.step, item.head, ends.kind, shape)
        load_state(our_rows(thr, item.rows), acc, address, ends.kind, shape)


@cute.jit
def read_seeds(acc: cute.Tensor, thr, states: cutlass.Constexpr, item: cutlass.Constexpr, segment: I32):
    """acc <- the state that a segment starts from, sum_{i<=j} f^((j-i)L) seeds[i]."""
    acc.fill(0.0)
    first = cutlass.max(item.place - item.reach // segment, 1 - states.ends.has_h0)
    factor = power(item.decay, segment)
    for i in cutlass.range(first, item.place + 1, unroll=1):
        seed = cute.make_rmem_tensor_like(acc)
        cute.autovec_copy(state_rows(states.mSeeds, item.id - item.place + i, item.head, item.rows, thr), seed)
        acc.store(acc.load() * factor + seed.load())


@cute.jit
def write_last_state(acc: cute.Tensor, thr, states: cutlass.Constexpr, item: cutlass.Constexpr, tokens: I32):
    """From a sequence's last segment, of that many tokens."""
    ends, shape = states.ends, states.shape
    if (item.start + tokens >= item.size) & ((item.place == 0) | (item.start < item.size)):
        slot = slot_of_last(ends, item.seq)
        if slot >= 0:
            address = address_of(ends.ht, slot, ends.step, item.head, ends.kind, shape)
            store_state(our_rows(thr, item.rows), lambda: acc, address, ends.kind, shape)


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
