# SPDX-License-Identifier: Apache-2.0
"""Lightning: the state that an item starts from, and the one that it leaves. `part` takes a state's matrix in memory, [V, K], and
returns what a thread has of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.lightning_items import power
from cula.ops.cute.common.states import States, address_of, load_state, slot_of_first, slot_of_last, store_state
from cula.ops.cute.common.tiles import I32


class LightningStates(NamedTuple):
    """First and last states, and what segments leave to each other."""

    ends: States
    mSeeds: Any  # [ids, HV, V, K] float32

    @property
    def shape(self) -> tuple[int, int]:
        """Of a head's state, [V, K]."""
        return self.mSeeds.shape[2:]

    def seed(self, slot: Any, head: Any) -> Any:
        return self.mSeeds[slot, head, None, None]


@cute.jit
def read_first_state(acc: cute.Tensor, part: cutlass.Constexpr, states: cutlass.Constexpr, item: cutlass.Constexpr):
    """acc <- the sequence's first state, zeros where it has none."""
    ends, shape = states.ends, states.shape
    acc.fill(0.0)
    slot = slot_of_first(ends, item.seq)
    if slot >= 0:
        address = address_of(ends.h0, slot, ends.step, item.head, ends.kind, shape)
        load_state(part, acc, address, ends.kind, shape)


@cute.jit
def read_seeds(acc: cute.Tensor, part: cutlass.Constexpr, states: cutlass.Constexpr, item: cutlass.Constexpr, segment: I32):
    """acc <- the state that a segment starts from, sum_{i<=j} f^((j-i)L) seeds[i]."""
    acc.fill(0.0)
    first = cutlass.max(item.place - item.reach // segment, 1 - states.ends.has_h0)
    factor = power(item.decay, segment)
    for i in cutlass.range(first, item.place + 1, unroll=1):
        seed = cute.make_rmem_tensor_like(acc)
        cute.autovec_copy(part(states.seed(item.id - item.place + i, item.head)), seed)
        acc.store(acc.load() * factor + seed.load())


@cute.jit
def write_last_state(
    values: cutlass.Constexpr, part: cutlass.Constexpr, states: cutlass.Constexpr, item: cutlass.Constexpr, tokens: I32
):
    """From a sequence's last segment, of that many tokens; `values` returns it."""
    ends, shape = states.ends, states.shape
    if (item.start + tokens >= item.size) & ((item.place == 0) | (item.start < item.size)):
        slot = slot_of_last(ends, item.seq)
        if slot >= 0:
            address = address_of(ends.ht, slot, ends.step, item.head, ends.kind, shape)
            store_state(part, values, address, ends.kind, shape)
