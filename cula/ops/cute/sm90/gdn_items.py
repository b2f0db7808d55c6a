# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper: what there is to do, and numbers and tensors that roles go by. See `gdn.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.fp16_window import from_bits
from cula.ops.cute.common.fragments import shared_at
from cula.ops.cute.common.tiles import F32, I32, Tma

from .gdn_smem import VECTORS


class GdnVariant(NamedTuple):
    """What the code depends on."""

    dtype: Any  # of operands: fp16 for keys and queries that are normalised here, otherwise bf16
    parts: int  # of 64 rows dv each, of a block: the whole state, or half of it

    @property
    def is_normalised(self) -> bool:
        return self.dtype is cutlass.Float16

    @property
    def preparers(self) -> int:
        """Warpgroups that prepare chunks: one beside two parts of the state, two beside one."""
        return 3 - self.parts

    @property
    def name(self) -> str:
        return f"gdn_{'f16' if self.is_normalised else 'bf16'}_{'whole' if self.parts == 2 else 'half'}"


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
    handed: Any  # `Handed`


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


class Handed(NamedTuple):
    """What pairs of blocks hand on to the next."""

    states: Any  # [records, STATE / 2] float32
    done: Any  # [records]


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
def whole_plan(items: cutlass.Constexpr, item: I32):
    """All of a head."""
    seq, hv, begin, tokens = sequence_of(items, item)
    nothing = I32(0)
    return Plan(seq, hv, begin, tokens, nothing, nothing, (tokens + 63) // 64, nothing, I32(-1), nothing, I32(1))


@cute.jit
def read_pairs(vectors: cute.Tensor, which: cutlass.Constexpr, place: I32, c: I32, n: cutlass.Constexpr = 8):
    """One of a chunk's vectors at the tokens of this thread's columns, 8 j + 2 c and + 1, for j < n."""
    out = cute.make_rmem_tensor((2 * n,), F32)
    at = I32(vectors.iterator.toint()) + 4 * (place * VECTORS + which + 2 * c)
    for j in cutlass.range_constexpr(n):
        cute.autovec_copy(shared_at(at + 32 * j, F32, 2, 8), cute.make_tensor(out.iterator + 2 * j, cute.make_layout((2, 1))))
    return out
