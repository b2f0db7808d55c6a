# SPDX-License-Identifier: Apache-2.0
"""Decode token by token, KDA and Lightning: for draft tokens, whose states are kept, and rows of different lengths.

    KDA        u = b (v - S . (k e^g))     o = S . (q e^g) + u (k . q)     S <- e^g S + u k
    Lightning  u = v                       o = d S . q + u (k . q)         S <- d S + u k

A call whose state after every token goes to memory moves so many bytes that the products of a token hide behind them. So the
state stays in registers, in float32, and tokens follow each other in a loop; the loads of the next token are on their way while
this one meets the state. Nothing depends on the number of tokens, and one kernel serves rows of 1 to 8.

A block is a warp with 16 rows of a state, 16 lanes a row, as in `decode_one.py`, whose steps for a token these are. A lane has 8
channels of 8 rows: of a float32 state two pieces of 16 bytes, 64 channels apart, so that the lanes of a row read and write 256
bytes next to each other; of a bfloat16 state one.

Where a row starts, with a = num_accepted_tokens (0 where there are none): from intermediate_states[row, a - 1] where that buffer
is given and a >= 1, otherwise from the slot state_indices[n], or state_indices[n, max(a - 1, 0)] where every token has a slot.
A null slot makes the row padding: zeros come out, and no state is read or written. A negative intermediate_state_index keeps
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.arguments import variant_of
from cula.ops.cute.common.decode_call import Call, D, Place
from cula.ops.cute.common.decode_frame import numbers_of, tensors_of
from cula.ops.cute.common.decode_memory import load_halves, number_at, packed, select, size_of, vector_at, widened
from cula.ops.cute.common.decode_one import LOADS, OneToken, Token, addresses, intra
from cula.ops.cute.common.decode_sums import sum_of_each
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.tiles import BF16, F32, I32
from cula.ops.cute.decode_abi import BESIDES, STEPS, Flag
from cula.ops.cute.toolchain.variants import Variant

HALF = D // 2  # channels between the pieces of a float32 row that a lane has
# Words of a token as it was loaded
K_AT, Q_AT, G_AT, V_AT, B_AT, WORDS = 0, 4, 8, 12, 13, 15


class Drafts(NamedTuple):
    """Where the states of draft tokens are, and how many tokens rows have; an address of 0 for what a call does not have."""

    accepted: Any
    kept: Any
    kept_rows: Any
    offsets: Any
    kept_row: Any  # strides in elements, from here on
    kept_token: Any
    kept_head: Any
    token_slot: Any
    accepted_stride: Any
    kept_rows_stride: Any
    offsets_stride: Any


class Row(NamedTuple):
    """A row of the call, as its warp finds it."""

    first: Any  # token of it, where rows are ragged
    count: Any  # of its tokens
    at_slot: Any  # address of its slot's number
    state: Any  # address of the slot, for this warp
    kept: Any  # of the states to keep
    keeps: Any  # whether there are some


@dataclass(frozen=True)
class Steps(OneToken):
    """What tokens, one after another, do to the rows of a warp."""

    dtype: Any = F32  # of the states

    prefetching_blocks = 0

    @property
    def blocks(self) -> int:  # type: ignore[override]
        """On a multiprocessor: two or three for each of its four schedulers, and so 255 or 168 registers. With 168 the kernels
        for float32 states spill; a warp of theirs has twice the bytes on their way."""
        return 8 if self.is_f32 else 12

    @property
    def is_f32(self) -> bool:
        return self.dtype is F32

    def first_channel(self, lane: Any) -> Any:
        """Of a lane; of a float32 state the other four are `HALF` further."""
        return lane % self.lanes * (4 if self.is_f32 else self.channels)

    def own_channel(self, lane: Any) -> Any:
        """The first of the four whose gate a lane makes; lane ^ 16 makes the others."""
        return self.first_channel(lane) + lane // self.lanes * (HALF if self.is_f32 else 4)

    def load_channels(self, at: Any, words: Any) -> None:
        """Of k or q: four words."""
        if self.is_f32:
            for piece in range(2):
                cute.autovec_copy(vector_at(I32, at + piece * HALF * 2, 2, 8), flat(words, 2 * piece, 2))
        else:
            cute.autovec_copy(vector_at(I32, at, 4, 16), words)

    def piece_at(self, state: Any, i: int, piece: int, lane: Any) -> Any:
        """16 bytes of a lane's i-th row; `state` is where the warp's rows begin."""
        size = self.dtype.width // 8
        own = state + Int64((lane // self.lanes * D + self.first_channel(lane)) * size)
        return vector_at(F32 if self.is_f32 else I32, own + (2 * i * D + piece * HALF) * size, 4, 16)  # a constant away

    @cute.jit
    def load_state(self, state: Int64, lane: I32):
        """[channels, rows] in float32. All loads are on their way before anything waits for one."""
        stored = cute.make_rmem_tensor((self.channels, LOADS), F32)
        if cutlass.const_expr(self.is_f32):
            for i in cutlass.range_constexpr(LOADS):
                for piece in cutlass.range_constexpr(2):
                    cute.autovec_copy(self.piece_at(state, i, piece, lane), flat(stored, self.channels * i + 4 * piece, 4))
        else:
            words = cute.make_rmem_tensor((4, LOADS), I32)
            for i in cutlass.range_constexpr(LOADS):
                cute.autovec_copy(self.piece_at(state, i, 0, lane), flat(words, 4 * i, 4))
            for i in cutlass.range_constexpr(LOADS):
                row = widened(flat(words, 4 * i, 4), self.channels)
                for c in cutlass.range_constexpr(self.channels):
                    stored[c, i] = row[c]
        return stored

    @cute.jit
    def store_state(self, stored: cute.Tensor, state: Int64, lane: I32):
        words = cute.make_rmem_tensor((4,), I32)
        for i in cutlass.range_constexpr(LOADS):
            if cutlass.const_expr(self.is_f32):
                for piece in cutlass.range_constexpr(2):
                    cute.autovec_copy(flat(stored, self.channels * i + 4 * piece, 4), self.piece_at(state, i, piece, lane))
            else:
                for w in cutlass.range_constexpr(4):
                    words[w] = packed(stored[2 * w, i], stored[2 * w + 1, i])
                cute.autovec_copy(words, self.piece_at(state, i, 0, lane))

    @cute.jit
    def step(self, stored: cute.Tensor, ready: cutlass.Constexpr, to: Int64, lane: I32):
        """A token meets the state: o of the lane's row goes to that address, and `stored` becomes the state after it."""
        k, q, kq, v, decay, b = ready
        for i in cutlass.range_constexpr(LOADS):
            for c in cutlass.range_constexpr(self.channels):
                stored[c, i] *= decay[c]
        vectors = (k, q) if self.is_kda else (q,)
        sums = cute.make_rmem_tensor((LOADS, len(vectors)), F32)
        sums.fill(0.0)
        for i in cutlass.range_constexpr(LOADS):
            for c in cutlass.range_constexpr(self.channels):
                for n, vector in enumerate(vectors):
                    sums[i, n] += stored[c, i] * vector[c]
        total, _ = sum_of_each([sums[i, n] for n in range(len(vectors)) for i in range(LOADS)], lane, self.lanes)
        u, query = v, total
        if cutlass.const_expr(self.is_kda):
            other = cute.arch.shuffle_sync_bfly(total, offset=1)
            is_query = lane % 2 == 1
            u, query = b * (v - select(is_query, other, total)), select(is_query, total, other)
        if self.writes_output(lane):
            vector_at(BF16, to, 1)[0] = (query + u * kq).to(BF16)
        for i in cutlass.range_constexpr(LOADS):
            of_row = cute.arch.shuffle_sync(u, self.lane_of_sum(i), mask_and_clamp=self.same_row)
            for c in cutlass.range_constexpr(self.channels):
                stored[c, i] += of_row * k[c]


@cute.kernel
def steps_kernel(
    addresses: tuple,
    row_strides: tuple,
    strides: tuple,
    factors: tuple,
    drafts: tuple,
    tokens: I32,
    per_group: Int64,
    slots: I32,
    flags: I32,
    rows: cutlass.Constexpr,
):
    """A block for each (16 rows of a state, value head, row of the call), as `decode_kernel`."""
    call = Call.of(addresses, row_strides, strides, factors, slots, tokens, flags)
    block, hv, n = cute.arch.block_idx()
    lane, _, _ = cute.arch.thread_idx()
    place = Place(n, hv, I32((Int64(hv) * per_group) >> 30), block * rows.warp_rows, I32(0), lane)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

    row, is_null, start = find_row(rows, call, Drafts(*drafts), place)
    o = call.o
    to = o.at + (o.offset(n, hv) + Int64(row.first) * o.token + place.warp_row + rows.first_row(lane)) * 2
    write_zeros = rows.write_zeros
    if is_null:
        for t in cutlass.range(row.count, unroll=1):
            write_zeros(to + Int64(t) * o.token * 2, o.token, tokens, lane)
    elif row.count > 0:
        run_tokens(rows, call, Drafts(*drafts), place, row, start, to)


@cute.jit
def find_row(rows: cutlass.Constexpr, call: cutlass.Constexpr, drafts: cutlass.Constexpr, place: cutlass.Constexpr):
    """The row, whether it is padding, and the address of the state it starts from."""
    n, hv, flags, pool = place.n, place.hv, call.flags, call.state
    in_state = place.warp_row * D  # where the warp's rows begin
    first, count = I32(0), call.tokens
    if drafts.offsets != 0:
        wide = (flags & Flag.OFFSETS_IS_I64) != 0
        first = integer_at(drafts.offsets, Int64(n) * drafts.offsets_stride, wide)
        behind = integer_at(drafts.offsets, Int64(n + 1) * drafts.offsets_stride, wide)
        count = cutlass.min(behind - first, call.tokens)
    accepted = I32(0)
    if drafts.accepted != 0:
        accepted = integer_at(drafts.accepted, Int64(n) * drafts.accepted_stride, (flags & Flag.ACCEPTED_IS_I64) != 0)
    has_indices = call.has(call.indices)
    wide = (flags & Flag.INDEX_IS_I64) != 0
    at_slot = Int64(n) * call.indices.stride
    slot = I32(n)
    is_null = cutlass.Boolean(False)
    if has_indices:
        last = select((flags & Flag.HAS_TOKEN_SLOTS) != 0, cutlass.max(accepted - 1, 0), I32(0))
        slot = integer_at(call.indices.at, at_slot + Int64(last) * drafts.token_slot, wide)
        is_null = is_null_slot(slot, flags)
    element = rows.dtype.width // 8
    state = pool.at + (Int64(slot) * pool.stride + hv * (D * D) + in_state) * element
    start = state
    kept, keeps = drafts.kept, drafts.kept != 0
    if keeps:
        i = I32(n)
        if drafts.kept_rows != 0:
            i = integer_at(drafts.kept_rows, Int64(n) * drafts.kept_rows_stride, (flags & Flag.KEPT_ROWS_IS_I64) != 0)
        keeps = i >= 0
        kept = drafts.kept + (Int64(i) * drafts.kept_row + Int64(hv) * drafts.kept_head + in_state) * element
        if keeps and accepted > 0:
            start = kept + Int64(accepted - 1) * drafts.kept_token * element
    return Row(first, count, at_slot, state, kept, keeps), is_null, start


@cute.jit
def run_tokens(
    rows: cutlass.Constexpr,
    call: cutlass.Constexpr,
    drafts: cutlass.Constexpr,
    place: cutlass.Constexpr,
    row: cutlass.Constexpr,
    start: Int64,
    to: Int64,
):
    """The tokens of a row, from the state at `start`; outputs from `to` on."""
    flags, lane, element = call.flags, place.lane, rows.dtype.width // 8
    stored = rows.load_state(start, lane)
    at = addresses(rows, call, place)
    raw, ahead = cute.make_rmem_tensor((WORDS,), I32), cute.make_rmem_tensor((WORDS,), I32)
    load_token(rows, call, at, row.first, raw)
    A, bias = load_parameters(rows, call, at)
    for t in cutlass.range(row.count, unroll=1):
        load_token(rows, call, at, row.first + cutlass.min(t + 1, row.count - 1), ahead)
        token = as_token(rows, raw, A, bias)
        ready = intra(rows, call, token, place, ())
        rows.step(stored, ready, to + Int64(t) * call.o.token * 2, lane)
        if row.keeps:
            rows.store_state(stored, row.kept + Int64(t) * drafts.kept_token * element, lane)
        if (flags & Flag.COMMIT) != 0 and (flags & Flag.HAS_TOKEN_SLOTS) != 0:
            of_token = row.at_slot + Int64(t) * drafts.token_slot
            slot = integer_at(call.indices.at, of_token, (flags & Flag.INDEX_IS_I64) != 0)
            if not is_null_slot(slot, flags):
                own = call.state.at + (Int64(slot) * call.state.stride + place.hv * (D * D) + place.warp_row * D) * element
                rows.store_state(stored, own, lane)
        for w in cutlass.range_constexpr(WORDS):
            raw[w] = ahead[w]
    if (flags & Flag.COMMIT) != 0 and (flags & Flag.HAS_TOKEN_SLOTS) == 0:
        rows.store_state(stored, row.state, lane)


# Tokens


@cute.jit
def load_token(rows: cutlass.Constexpr, call: cutlass.Constexpr, at: cutlass.Constexpr, t: I32, words: cute.Tensor):
    """Token t as it lies in memory; nothing waits for it yet."""
    rows.load_channels(at.k + Int64(t) * call.k.token * 2, flat(words, K_AT, 4))
    rows.load_channels(at.q + Int64(t) * call.q.token * 2, flat(words, Q_AT, 4))
    words[V_AT] = number_at(cutlass.Uint16, at.v + Int64(t) * call.v.token * 2, 0)
    if cutlass.const_expr(rows.is_kda):
        size = size_of(call.flags, Flag.G_IS_F32)
        g = at.g + Int64(t) * call.g.token * size
        if cutlass.const_expr(rows.is_scalar):
            load_number(g, size, flat(words, G_AT, 2))
        else:
            for half, part in ((0, g), (2, g + (size - 2) * 4)):  # of 8 bytes the same twice, of 16 the others
                cute.autovec_copy(vector_at(I32, part, 2, 8), flat(words, G_AT + half, 2))
        size = size_of(call.flags, Flag.BETA_IS_F32)
        load_number(at.b + Int64(t) * call.beta.token * size, size, flat(words, B_AT, 2))


def load_number(address: Any, size: Any, words: Any) -> None:
    """A number in float32 or bfloat16: its upper 16 bits, and the lower ones of a float32."""
    words[0] = number_at(cutlass.Uint16, address + (size - 2), 0)
    words[1] = number_at(cutlass.Uint16, address, 0)


@cute.jit
def load_parameters(rows: cutlass.Constexpr, call: cutlass.Constexpr, at: cutlass.Constexpr):
    """A_log, and dt_bias of the channels whose gates a lane makes, number by number, since it may lie anyhow; with one gate a
    head both as `load_halves` loads them."""
    if cutlass.const_expr(rows.is_scalar):
        A, bias = load_parameter(at.A, call, Flag.A_IS_F32), load_parameter(at.bias, call, Flag.BIAS_IS_F32)
    else:
        A, bias = number_at(F32, at.A, 0), cute.make_rmem_tensor((4,), I32)
        bias.fill(0)
        if cutlass.const_expr(rows.is_kda):
            bits = cute.recast_tensor(bias, F32)
            for c in cutlass.range_constexpr(4):
                bits[c] = number_at(F32, at.bias, c * call.bias.channel)
    return A, bias


def load_parameter(address: Any, call: Call, is_f32: Flag) -> Any:
    """Of a head."""
    return load_halves(address, [I32(0)], (call.flags & is_f32) != 0)[0]


def as_token(rows: Any, words: Any, A: Any, bias: Any) -> Token:
    """What `intra` takes."""
    token = Token(flat(words, K_AT, 4), flat(words, Q_AT, 4), words[V_AT], A)
    if not rows.is_kda:
        return token
    g = (words[G_AT], words[G_AT + 1]) if rows.is_scalar else (flat(words, G_AT, 2), flat(words, G_AT + 2, 2))
    return token._replace(g=g, bias=bias, b=(words[B_AT], words[B_AT + 1]))


# Numbers that say where


def integer_at(address: Any, position: Any, is_i64: Any) -> Any:
    """An index in int32 or int64, of which the lower half is enough: a negative one is negative there, too."""
    return number_at(I32, address + position * Int64(select(is_i64, I32(8), I32(4))), 0)


def is_null_slot(slot: Any, flags: Any) -> Any:
    return slot < select((flags & Flag.ZERO_IS_NULL) != 0, I32(1), I32(0))


# The launch


@cute.jit
def steps_host(x: cutlass.Constexpr, stream, rows: cutlass.Constexpr):
    """The arguments that `STEPS` describes; see `decode_host`."""
    steps_kernel(*tensors_of(x), tuple(getattr(x, name) for name in BESIDES), *numbers_of(x), rows).launch(
        grid=(D // rows.warp_rows, x.HV, x.N),
        block=(32, 1, 1),
        min_blocks_per_mp=rows.blocks,
        preferred_smem_carveout=0,  # percent: there are no tables, and all of it is L1
        use_pdl=True,
        stream=stream,
    )


def steps_variants() -> Iterator[Variant]:
    """`decode_steps_<states>`; with one gate a head `_scalar`, of Lightning `_lightning`."""
    for short, dtype in (("f32", F32), ("bf16", BF16)):
        for suffix, kind in (("", (True, False)), ("_scalar", (True, True)), ("_lightning", (False, False))):
            rows = Steps(*kind, dtype=dtype)
            name = f"decode_steps_{short}{suffix}"
            yield variant_of(name, STEPS, steps_host, rows, uses=rows.uses)
