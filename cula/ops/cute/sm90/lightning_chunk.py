# SPDX-License-Identifier: Apache-2.0
"""Lightning on Hopper: what a warpgroup does to states, values and scores of a chunk, in registers and shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.states import States, address_of, load_state, slot_of_first, slot_of_last, store_state
from cula.ops.cute.common.tiles import BF16, F32, I32, rounded, rows_and_columns, swapped

from .lightning_items import LANES, C, at_swapped, in_time, nth, power

# States


class LightningStates(NamedTuple):
    """First and last states, and what segments leave to each other."""

    ends: States
    mSeeds: Any  # [ids, HV, V, K] float32; in a backward those of states that go backward come behind the others
    reversed_ends: Any = None  # first and last states of attentions that go backward

    @property
    def shape(self) -> tuple[int, int]:
        """Of a head's state, [V, K]."""
        return self.mSeeds.shape[2:]


@cute.jit
def ends_of(states: cutlass.Constexpr, turn: cutlass.Constexpr):
    """The first and last states of an item. What is the transpose of another's has no last state of its own."""
    ends = states.ends
    if cutlass.const_expr(turn.is_reversed is not False):
        back = states.reversed_ends
        ends = ends._replace(
            h0=back.h0 if turn.is_reversed else ends.h0,
            has_h0=back.has_h0 if turn.is_reversed else ends.has_h0,
            ht=back.ht if turn.is_reversed else ends.ht,
            has_ht=back.has_ht if turn.is_reversed else ends.has_ht,
        )
    if cutlass.const_expr(turn.is_swapped is not False):
        ends = ends._replace(has_ht=I32(0) if turn.is_swapped else ends.has_ht)
    return ends


def our_rows(thr: Any, rows: Any, is_swapped: bool = False) -> Any:
    """What this thread has of the 64 rows of a state, or of its transpose: `part` of `common/states.py`."""
    return lambda m: thr.partition_C(cute.local_tile(swapped(m) if is_swapped else m, (LANES, m.shape[1]), (rows, 0)))


@cute.jit
def seed_rows(mSeeds: cute.Tensor, id: I32, head: I32, rows: I32, thr, is_swapped: cutlass.Constexpr = False):
    """This thread's elements of what a segment has left."""
    return our_rows(thr, rows, is_swapped)(mSeeds[id, head, None, None])


@cute.jit
def read_first_state(acc: cute.Tensor, thr, states: cutlass.Constexpr, item: cutlass.Constexpr):
    """acc <- the sequence's first state, zeros where it has none."""
    ends, shape = ends_of(states, item.turn), states.shape
    acc.fill(0.0)
    slot = slot_of_first(ends, item.seq)
    if slot >= 0:
        address = address_of(ends.h0, slot, ends.step, item.head, ends.kind, shape)
        part = lambda is_swapped: our_rows(thr, item.rows, is_swapped)
        at_swapped(item.turn, lambda is_swapped: load_state(part(is_swapped), acc, address, ends.kind, shape))


@cute.jit
def seed_of(like: cute.Tensor, thr, states: cutlass.Constexpr, item: cutlass.Constexpr, place: I32):
    """What is left in front of a segment of an item's sequence."""
    seed = cute.make_rmem_tensor_like(like)
    rows = lambda is_swapped: seed_rows(states.mSeeds, item.id - item.place + place, item.head, item.rows, thr, is_swapped)
    at_swapped(item.turn, lambda is_swapped: cute.autovec_copy(rows(is_swapped), seed))
    return seed


@cute.jit
def read_seeds(acc: cute.Tensor, thr, states: cutlass.Constexpr, item: cutlass.Constexpr, segment: I32):
    """acc <- the state that a segment starts from, sum_{i<=j} f^((j-i)L) seeds[i]."""
    acc.fill(0.0)
    first = cutlass.max(item.place - item.reach // segment, 1 - ends_of(states, item.turn).has_h0)
    factor = power(item.decay, segment)
    for i in cutlass.range(first, item.place + 1, unroll=1):
        acc.store(acc.load() * factor + seed_of(acc, thr, states, item, i).load())


@cute.jit
def write_last_state(acc: cute.Tensor, thr, states: cutlass.Constexpr, item: cutlass.Constexpr, tokens: I32):
    """From a sequence's last segment, of that many tokens."""
    ends, shape = ends_of(states, item.turn), states.shape
    if (item.start + tokens >= item.size) & ((item.place == 0) | (item.start < item.size)):
        slot = slot_of_last(ends, item.seq)
        if slot >= 0:
            address = address_of(ends.ht, slot, ends.step, item.head, ends.kind, shape)
            store_state(our_rows(thr, item.rows), lambda: acc, address, ends.kind, shape)


# Powers of f that a thread multiplies with


class Factors(NamedTuple):
    """Of a head: column c = 8 a + column + b of a chunk has leaving[b] eights[a] in O^T, entering[b] eights[7 - a] in V^T."""

    decay: Any  # -log2 f
    scale: Any
    chunk: Any  # of the state over a whole chunk
    leaving: tuple[Any, Any]  # forward in time scale f^(c+1), backward f^(C-1-c)
    entering: tuple[Any, Any]  # forward in time f^(C-1-c), backward scale f^(c+1)
    eights: list[Any]  # f^(8 a), backward in time f^(8 (7 - a))


@cute.jit
def factors_of(decay: F32, scale: F32, column: I32, turn: cutlass.Constexpr):
    rising = power(decay, column + 1) * scale, power(decay, column + 2) * scale
    falling = power(decay, 7 - column), power(decay, 6 - column)
    leaving, entering = rising, falling
    if cutlass.const_expr(turn.is_reversed is not False):
        leaving = [b if turn.is_reversed else a for a, b in zip(rising, falling)]
        entering = [a if turn.is_reversed else b for a, b in zip(rising, falling)]
    eights = [power(decay, in_time(turn, I32(8 * a), 8 * (C // 8 - 1))) for a in range(C // 8)]
    return Factors(decay, scale, power(decay, I32(C)), leaving, entering, eights)


@cute.jit
def times_powers(exact: cute.Tensor, pair: cutlass.Constexpr, eights: cutlass.Constexpr, at_once: cutlass.Constexpr = True):
    """Column 8 a + column + b times pair[b] eights[a]. At once, the compiler keeps 16 products over all chunks."""
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
        times_powers(exact, by.entering, by.eights[::-1], isinstance(turn.is_reversed, bool))
    else:
        x = rows_and_columns(exact)
        for j in cutlass.range_constexpr(C // 4):
            w = left_of(n - 1 - in_time(turn, 8 * (j // 2) + column + j % 2), by, turn)
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
            x[i, j] = x[i, j] if in_time(turn, 8 * (j // 2) + column + j % 2) < n else BF16(0.0)


@cute.jit
def clear_rows(tile: cute.Tensor, n: I32, thread: I32, turn: cutlass.Constexpr):
    """Zero the rows of a [C, K] tile from n on; this warpgroup's wgmma sees it after a barrier."""
    zeros = cute.make_rmem_tensor((1, 8), BF16)
    zeros.fill(0.0)
    per_row = cute.size(tile, mode=[1]) // 8
    for p in cutlass.range_constexpr(C * per_row // 128):
        row = (p * 128 + thread) // per_row
        if in_time(turn, row) >= n:
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
