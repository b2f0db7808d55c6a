# SPDX-License-Identifier: Apache-2.0
"""Lightning: the state that an item starts from, and the one that it leaves. `part` takes a state's matrix in memory, [V, K], and
returns what a thread has of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.lightning_items import at_swapped, power
from cula.ops.cute.common.states import States, address_of, load_state, slot_of_first, slot_of_last, store_state
from cula.ops.cute.common.tiles import I32, swapped


class LightningStates(NamedTuple):
    """First and last states, and what segments leave to each other."""

    ends: States
    mSeeds: Any  # [ids, HV, V, K] float32; in a backward those of states that go backward come behind the others
    reversed_ends: Any = None  # first and last states of attentions that go backward

    @property
    def shape(self) -> tuple[int, int]:
        """Of a head's state, [V, K]."""
        return self.mSeeds.shape[2:]

    def seed(self, slot: Any, head: Any) -> Any:
        return self.mSeeds[slot, head, None, None]


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


def of_transpose(part: Any, is_swapped: bool) -> Any:
    """`part` of what an item takes for its state: a matrix in memory, or that matrix transposed."""
    return (lambda m: part(swapped(m))) if is_swapped else part


@cute.jit
def read_first_state(acc: cute.Tensor, part: cutlass.Constexpr, states: cutlass.Constexpr, item: cutlass.Constexpr):
    """acc <- the sequence's first state, zeros where it has none."""
    ends, shape = ends_of(states, item.turn), states.shape
    acc.fill(0.0)
    slot = slot_of_first(ends, item.seq)
    if slot >= 0:
        address = address_of(ends.h0, slot, ends.step, item.head, ends.kind, shape)
        at_swapped(item.turn, lambda is_swapped: load_state(of_transpose(part, is_swapped), acc, address, ends.kind, shape))


@cute.jit
def seed_of(like: cute.Tensor, part: cutlass.Constexpr, states: cutlass.Constexpr, item: cutlass.Constexpr, place: I32):
    """What is left in front of a segment of an item's sequence."""
    seed = cute.make_rmem_tensor_like(like)
    left = states.seed(item.id - item.place + place, item.head)
    at_swapped(item.turn, lambda is_swapped: cute.autovec_copy(of_transpose(part, is_swapped)(left), seed))
    return seed


@cute.jit
def read_seeds(acc: cute.Tensor, part: cutlass.Constexpr, states: cutlass.Constexpr, item: cutlass.Constexpr, segment: I32):
    """acc <- the state that a segment starts from, sum_{i<=j} f^((j-i)L) seeds[i]."""
    acc.fill(0.0)
    first = cutlass.max(item.place - item.reach // segment, 1 - ends_of(states, item.turn).has_h0)
    factor = power(item.decay, segment)
    for i in cutlass.range(first, item.place + 1, unroll=1):
        seed = seed_of(acc, part, states, item, i)
        acc.store(acc.load() * factor + seed.load())


@cute.jit
def write_last_state(
    values: cutlass.Constexpr, part: cutlass.Constexpr, states: cutlass.Constexpr, item: cutlass.Constexpr, tokens: I32
):
    """From a sequence's last segment, of that many tokens; `values` returns it."""
    ends, shape = ends_of(states, item.turn), states.shape
    if (item.start + tokens >= item.size) & ((item.place == 0) | (item.start < item.size)):
        slot = slot_of_last(ends, item.seq)
        if slot >= 0:
            address = address_of(ends.ht, slot, ends.step, item.head, ends.kind, shape)
            store_state(part, values, address, ends.kind, shape)
