# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: what there is to do, and numbers and tensors that roles go by, on every architecture with a kernel for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.arguments import tokens_of, vector_of
from cula.ops.cute.common.fp16_window import from_bits
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, Tma, at_address
from cula.ops.cute.gdn_abi import STATE

MAX_SLOTS = 1 << 30  # of a pool, as far as a layout must say


class GdnTma(NamedTuple):
    """What TMA copies."""

    q: Tma
    k: Tma
    v: Tma
    o: Tma


class Scattered(NamedTuple):
    """[T, HV] numbers of 32 or 16 bits, float32 or bfloat16, which threads read one by one.

    A number is read as the aligned word that it is in: so both kinds are one load that nothing waits for, and are told apart when
    the number is used.
    """

    address: Any
    token: Any  # strides, in elements
    head: Any
    bits: Any


@cute.jit
def address_of(m: cutlass.Constexpr, t: I32, hv: I32):
    return m.address + (Int64(t) * m.token + Int64(hv) * m.head) * Int64(m.bits >> 3)


@cute.jit
def word_at(m: cutlass.Constexpr, t: I32, hv: I32):
    """The word that a number is in."""
    where = cute.make_ptr(I32, address_of(m, t, hv) & Int64(-4), cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(where, cute.make_layout((1,)))[0]


@cute.jit
def number_in(word: I32, m: cutlass.Constexpr, t: I32, hv: I32):
    """And the number, as float32."""
    shift = I32(address_of(m, t, hv) & Int64(2)) << 3
    return from_bits((word >> shift) << (32 - m.bits))


class GateInputs(NamedTuple):
    """What threads read of gates and write strengths."""

    g: Any  # `Scattered`
    beta: Any
    A_log: Any  # [HV]
    dt_bias: Any


class States(NamedTuple):
    """First and last states, [slots, HV, dv, dk], as each of the kinds of `gdn_abi.py`, and which sequence has which slot."""

    h0: Any
    ht: Any
    read_from: Any  # [N]
    write_to: Any
    handed: Any = None  # what pieces of a head hand on to each other, where there are such


class Scalars(NamedTuple):
    """Numbers of a call."""

    scale: Any
    beta_top: Any
    has_gate: Any
    h0_kind: Any
    ht_kind: Any
    is_indexed: Any
    first_slot: Any
    num_slots: Any


class Items(NamedTuple):
    """The pieces of work of a launch: value heads of sequences, each a block's, or each cut into pieces for pairs of blocks."""

    HV: Any
    group: Any  # value heads of each head of q and k
    length: Any
    total: Any
    mCu: Any
    pieces: Any
    first: Any = None  # a block takes the heads `first`, `first` + `step`, ...
    step: Any = None
    rank: Any = None  # of the block among those that share a state


class Plan(NamedTuple):
    """What a block does of a head: chunks from `start` to `middle` without output, from there to `end` with it."""

    seq: Any
    hv: Any
    begin: Any  # first token of the sequence
    tokens: Any  # of the sequence
    start: Any
    middle: Any
    end: Any
    is_map: Any  # the chunks without output are to give a map of states, not a state
    export_at: Any  # the chunk at whose start the state is handed on; -1: at none
    record: Any  # which of `Handed` is ours to read; the next pair's is two further
    is_last: Any  # the state at its end is the sequence's last


@cute.jit
def sequence_of(items: cutlass.Constexpr, item: I32):
    """(Sequence, value head, first token, tokens) of a head."""
    seq = item // items.HV
    begin, tokens = seq * items.length, items.length
    if items.length == 0:
        begin = items.mCu[seq]
        tokens = items.mCu[seq + 1] - begin
    return seq, item - seq * items.HV, begin, tokens


@cute.jit
def longest_first(items: cutlass.Constexpr, item: I32):
    """The item that comes next where those of longer sequences come first, as no long one should begin when others end. By a
    warp; in the order that they have, where sequences have one length, or are more than a warp has lanes, and so about as long
    together wherever they are."""
    N, nth, lane = items.total // items.HV, item // items.HV, cute.arch.lane_idx()
    if items.length == 0 and N <= 32:
        at, longer = cutlass.min(lane, N - 1), I32(0)
        tokens = items.mCu[at + 1] - items.mCu[at]
        for other in cutlass.range(N, unroll=1):
            theirs = cute.arch.shuffle_sync(tokens, other)
            longer += I32(1) if theirs > tokens or (theirs == tokens and other < lane) else I32(0)
        found = cute.arch.warp_redux_sync(lane if lane < N and longer == nth else I32(0), "max")
        item += (found - nth) * items.HV
    return cute.arch.make_warp_uniform(item)


@cute.jit
def whole_plan(items: cutlass.Constexpr, item: I32):
    """All of a head."""
    seq, hv, begin, tokens = sequence_of(items, item)
    nothing = I32(0)
    return Plan(seq, hv, begin, tokens, nothing, nothing, (tokens + 63) // 64, nothing, I32(-1), nothing, I32(1))


# A call's arguments, as `gdn_abi.py` describes them


class Operands(NamedTuple):
    """The tensors of a call, and its numbers."""

    q: Any  # [T, H, 128]
    k: Any
    v: Any  # [T, HV, 128]
    o: Any
    gates: GateInputs
    states: States
    scalars: Scalars
    cu: Any  # [N + 1]


def operands(x: Any) -> Operands:
    """Those of a call's arguments."""
    return Operands(
        *(tokens_of(x, name, heads) for name, heads in (("q", x.H), ("k", x.H), ("v", x.HV), ("o", x.HV))),
        GateInputs(
            Scattered(x.g, x.g_token, x.g_head, x.g_bits),
            Scattered(x.beta, x.beta_token, x.beta_head, x.beta_bits),
            *(vector_of(F32, address, x.HV) for address in (x.A_log, x.dt_bias)),
        ),
        States(
            *(of_states(address, slot, x.HV) for address, slot in ((x.h0, x.h0_slot), (x.ht, x.ht_slot))),
            *(vector_of(I32, address, x.N) for address in (x.read_from, x.write_to)),
        ),
        Scalars(*(getattr(x, name) for name in Scalars._fields)),
        vector_of(I32, x.cu, x.N + 1),
    )


def items_of(x: Any, cu: Any, **others: Any) -> Items:
    """What there is to do."""
    return Items(x.HV, x.HV // x.H, x.length, x.N * x.HV, cu, x.pieces, **others)


# States in memory


def of_states(address: Any, slot: Any, HV: Any) -> tuple[Any, ...]:
    """[slots, HV, dv, dk] of each kind, any number of slots. Read and written in pairs: a slot's stride is even."""
    layout = cute.make_layout((MAX_SLOTS, HV, 128, 128), stride=(cute.assume(slot, divby=2), STATE, 128, 1))
    return tuple(cute.make_tensor(at_address(dtype, address, dtype.width // 4), layout) for dtype in (F32, BF16, F16))


@cute.jit
def slot_of(slots: cute.Tensor, scalars: cutlass.Constexpr, seq: I32):
    """Of a sequence; negative where it has none."""
    slot = seq
    if scalars.is_indexed == 1:
        given = slots[seq]
        slot = given if given >= scalars.first_slot and given < scalars.num_slots else I32(-1)
    return slot
