# SPDX-License-Identifier: Apache-2.0
"""States in global memory: where a sequence's first state comes from, where its last one goes, and those kept inside a prompt.

First and last states are one for each sequence, or slots of a pool; a sequence then has the slot that an index names, or none.
What is kept inside a prompt are states between chunks (`kda_abi.Kept`). All of it is at the ends of a sequence, or rare, so that
dtypes, indices and masks are numbers that a kernel looks at, and not variants of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.lanes import WARP, sum_over
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, at_address
from cula.ops.cute.kda_abi import Kept
from cula.ops.cute.states_abi import StateKind

SHAPE = (128, 128)  # of a head's state, [V, K], where nothing else is said


class States(NamedTuple):
    """First and last states, as `states_abi.py` describes them."""

    h0: Any
    ht: Any
    step: Any  # bytes from a slot, or a sequence's state, to the next
    kind: Any
    has_h0: Any
    has_ht: Any
    read_from: Any
    write_to: Any
    has_state: Any
    index_step: Any
    mask_step: Any
    index_bits: Any
    first_slot: Any
    num_slots: Any


class KeptStates(NamedTuple):
    """States inside of a prompt, as `kda_abi.py` does."""

    at: Any
    offsets: Any
    step: Any
    kind: Any
    mode: Any
    every: Any
    rows: Any


def states_of(x: Any) -> States:
    """Those of a call's arguments."""
    return States(
        x.h0, x.ht, x.state_step, x.state_kind, x.has_h0, x.has_ht, x.read_from, x.write_to, x.has_state, x.index_step,
        x.mask_step, x.index_bits, x.first_slot, x.num_slots,
    )  # fmt: skip


def kept_states_of(x: Any) -> KeptStates:
    return KeptStates(x.kept, x.kept_offsets, x.kept_step, x.kept_kind, x.kept_mode, x.kept_every, x.kept_rows)


# Which


def number_at(dtype: Any, address: Any) -> Any:
    return cute.make_tensor(at_address(dtype, address, dtype.width // 8), cute.make_layout(1))[0]


@cute.jit
def slot_of(indices: Int64, states: cutlass.Constexpr, seq: I32):
    """The slot of a sequence; -1 where it has none, and for an index that is not one of the pool's."""
    slot = seq
    if states.index_bits > 0:
        at = indices + Int64(seq) * states.index_step
        index = Int64(0)
        if states.index_bits == 64:
            index = number_at(Int64, at)
        else:
            index = Int64(number_at(I32, at))
        is_slot = index >= Int64(states.first_slot) and index < Int64(states.num_slots)
        slot = index.to(I32) if is_slot else I32(-1)
    return slot


@cute.jit
def slot_of_first(states: cutlass.Constexpr, seq: I32):
    """The slot that a sequence starts from; -1: it starts from zero."""
    slot = I32(-1)
    if states.has_h0 == 1:
        slot = slot_of(states.read_from, states, seq)
        if states.has_state != 0:
            is_there = number_at(cutlass.Uint8, states.has_state + Int64(seq) * states.mask_step)
            slot = slot if is_there.to(I32) != 0 else I32(-1)
    return slot


@cute.jit
def slot_of_last(states: cutlass.Constexpr, seq: I32):
    """The slot that a sequence leaves its last state in; -1: nowhere."""
    slot = I32(-1)
    if states.has_ht == 1:
        slot = slot_of(states.write_to, states, seq)
    return slot


@cute.jit
def address_of(base: Int64, number: I32, step: Int64, hv: I32, kind: I32, shape: cutlass.Constexpr = SHAPE):
    """Of a head's state."""
    size = shape[0] * shape[1]
    return base + Int64(number) * step + Int64(hv) * Int64(I32(4 * size) if kind == StateKind.F32 else I32(2 * size))


def matrix_at(dtype: Any, address: Any, shape: tuple[int, int]) -> Any:
    """A state, [V, K]."""
    return cute.make_tensor(at_address(dtype, address, 16), cute.make_layout(shape, stride=(shape[1], 1)))


@cute.jit
def first_kept(kept: cutlass.Constexpr, mCu: cute.Tensor, seq: I32, length: I32, start: I32):
    """(The first boundary between chunks, from `start` on, at which the state is kept, its row), by a warp. Boundary b is before
    chunk b of the sequence; -1 where there is none."""
    following, row = I32(-1), I32(0)
    if kept.mode == Kept.OFFSETS:
        offset = number_at(I32, kept.offsets + Int64(seq) * 4)
        row = seq
        following = offset // 64 if offset > 0 and offset % 64 == 0 and offset >= 64 * start else I32(-1)
    elif kept.mode != Kept.NOTHING:
        # Of the sequences before: at the start of every chunk, or at the end of every so many.
        span = 64 * kept.every
        more = I32(63) if kept.mode == Kept.STARTS else I32(0)
        if length > 0:
            row = seq * ((length + more) // span)
        else:
            for n in cutlass.range(cute.arch.lane_idx(), seq, 32, unroll=1):
                row += (mCu[n + 1] - mCu[n] + more) // span
            row = sum_over(WARP, row)
        if kept.mode == Kept.STARTS:
            following, row = start, row + start
        else:
            j = cutlass.max((start + kept.every - 1) // kept.every, 1)
            following, row = j * kept.every, row + j - 1
    return following, row


@cute.jit
def is_end(kept: cutlass.Constexpr, boundary: I32, tokens: I32):
    """Whether a boundary is behind a sequence's last token, and what is kept there may be kept: no chunk starts there."""
    return kept.mode != Kept.STARTS and boundary > 0 and boundary * 64 == tokens


# On their way. `part` takes a state's matrix in memory and returns what a thread has of it.


@cute.jit
def load_state(part: cutlass.Constexpr, acc: cute.Tensor, address: Int64, kind: I32, shape: cutlass.Constexpr = SHAPE):
    """acc <- a state, in float32."""
    if kind == StateKind.F32:
        cute.autovec_copy(part(matrix_at(F32, address, shape)), acc)
    elif kind == StateKind.BF16:
        load_as(part, acc, address, BF16, shape)
    else:
        load_as(part, acc, address, F16, shape)


@cute.jit
def load_as(part: cutlass.Constexpr, acc: cute.Tensor, address: Int64, dtype: cutlass.Constexpr, shape: cutlass.Constexpr):
    given = cute.make_rmem_tensor_like(acc, dtype)
    cute.autovec_copy(part(matrix_at(dtype, address, shape)), given)
    acc.store(given.load().to(F32))


@cute.jit
def store_state(part: cutlass.Constexpr, values: cutlass.Constexpr, address: Int64, kind: I32, shape: cutlass.Constexpr = SHAPE):
    """A state to memory, rounded to what it is kept as. `values` returns it in float32, and is called where it is wanted: what it
    computes takes registers no longer than that."""
    if kind == StateKind.F32:
        store_as(part, values, address, F32, shape)
    elif kind == StateKind.BF16:
        store_as(part, values, address, BF16, shape)
    else:
        store_as(part, values, address, F16, shape)


@cute.jit
def store_as(
    part: cutlass.Constexpr, values: cutlass.Constexpr, address: Int64, dtype: cutlass.Constexpr, shape: cutlass.Constexpr
):
    acc = values()
    out = cute.make_rmem_tensor_like(acc, dtype)
    out.store(acc.load().to(dtype))
    cute.autovec_copy(out, part(matrix_at(dtype, address, shape)))
