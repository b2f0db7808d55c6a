# SPDX-License-Identifier: Apache-2.0
"""Decode of one token, KDA and Lightning: a warp, 16 rows of a bfloat16 state or 8 of a float32 one, nothing shared.

    KDA        u = b (v - S0 . (k e^g))     o = S0 . (q e^g) + u (k . q)     S = e^g S0 + u k
    Lightning  u = v                        o = d S0 . q + u (k . q)         S = d S0 + u k

The states' bytes are all the time there is, so what counts is how they are asked for, and that nothing is in the way:

* Rows are read whole: a load of a warp is 512 bytes next to each other, two rows in bfloat16 (16 lanes a row) or one in float32
  (32 lanes). With 4 lanes a row, as tensor cores want their factors, the same bytes take a tenth longer.
* A block is a warp, so no warp waits for another, and 20 blocks fit: 96 registers. A bfloat16 state stays in 16 bits and is
  widened twice, for the sums and for the update.
* 16 sums (S0 . k and S0 . q of a lane's 8 rows, of Lightning 8) are halved among the lanes of a row: 15 shuffles, not 64. Then a
  lane has one sum, of its i-th row with i as `sum_of_each` orders them.
* A lane has 8 channels of a bfloat16 row, which lane ^ 16 has too: each makes the decays of 4 and hands them over. Of a float32
  row it has 4. With one gate a head (Gated DeltaNet) every lane makes the one decay there is, in a kernel of its own: it loads 8
  words less.

Times: `docs/decode.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.core.constants import LOG2_E
from cula.ops.cute.common.decode_call import Call, D, Place
from cula.ops.cute.common.decode_gate import decays, gate_parameters, norm_factor, write_strength
from cula.ops.cute.common.decode_memory import (
    load_halves,
    load_words,
    number_at,
    number_of,
    packed,
    select,
    size_of,
    vector_at,
    widened,
)
from cula.ops.cute.common.decode_sums import sum_of_each
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.gate import exp2
from cula.ops.cute.common.tiles import BF16, F32, I32, at_address
from cula.ops.cute.decode_abi import Flag

LOADS = 8  # of 16 bytes: rows of a lane


class Token(NamedTuple):
    """Where it is, then what is there; words of numbers that lie next to each other."""

    k: Any  # of a lane's channels
    q: Any
    v: Any  # of the row whose sums the lane gets
    A: Any  # A_log, with one gate a head as `load_halves` loads it; of Lightning -log d
    g: Any = None  # KDA: of four channels, or the head's
    bias: Any = None  # likewise, the head's as A_log
    b: Any = None


@dataclass(frozen=True)
class OneToken:
    """What one token does to the rows of a warp; of states in bfloat16."""

    is_kda: bool
    is_scalar: bool = False  # KDA with one gate a head

    T = 1
    dtype = BF16  # of the states
    lanes = 16  # of a row
    warps = 1
    blocks = 20
    prefetching_blocks = 1650  # of 2640 that are there at once; 330 fewer or more gain less (`docs/decode.md`)
    tables = ()
    uses = ()

    @property
    def channels(self) -> int:
        """Of a lane."""
        return D // self.lanes

    @property
    def rows_at_once(self) -> int:
        """Of a load of the warp."""
        return 32 // self.lanes

    @property
    def warp_rows(self) -> int:
        return self.rows_at_once * LOADS

    @property
    def same_row(self) -> int:
        """A shuffle's segments."""
        return (32 - self.lanes) << 8 | 31

    def number_of_sum(self, lane: Any) -> Any:
        """Which of its 8 rows a lane has the sums of, as `sum_of_each` leaves them; of KDA's, lane ^ 1 has the other kind."""
        bits = [lane >> (n + self.is_kda) & 1 for n in range(3)]
        return bits[0] * 4 + bits[1] * 2 + bits[2]

    def lane_of_sum(self, i: int) -> int:
        """A lane that has it, among those of the row."""
        return (i >> 2 & 1 | i & 2 | (i & 1) << 2) << self.is_kda

    def first_row(self, lane: Any) -> Any:
        """The row that a lane reads v and writes o of, among its warp's."""
        return self.rows_at_once * self.number_of_sum(lane) + lane // self.lanes

    def writes_output(self, lane: Any) -> Any:
        """Of the lanes that have the row, one."""
        of_sums = LOADS << self.is_kda
        return lane % self.lanes & (self.lanes - of_sums + self.is_kda) == 0

    def first_channel(self, lane: Any) -> Any:
        """Of a lane."""
        return lane % self.lanes * self.channels

    def own_channel(self, lane: Any) -> Any:
        """The first of the four whose gate a lane makes; where it has eight, lane ^ 16 makes the others."""
        return self.first_channel(lane) + lane // self.lanes * 4

    def state_at(self, state: Any, lane: Any) -> Any:
        """A lane's part of the pool, [words of 16 bytes, loads]; `state` is where the warp's rows begin, and a load 512 bytes."""
        return cute.make_tensor(at_address(I32, state + Int64(lane * 16), 16), cute.make_layout((4, LOADS), stride=(1, 128)))

    @cute.jit
    def load_state(self, state: Int64, lane: I32):
        gS = self.state_at(state, lane)
        stored = cute.make_rmem_tensor(gS.shape, I32)
        cute.autovec_copy(gS, stored)
        return stored

    def numbers_of_row(self, stored: Any, i: int) -> Any:
        """The lane's numbers of its i-th row, in float32."""
        return widened(flat(stored, 4 * i, 4), self.channels)

    def store_row(self, row: Any, stored: Any, i: int) -> None:
        """They are new."""
        words = flat(stored, 4 * i, 4)
        for w in range(4):
            words[w] = packed(row[2 * w], row[2 * w + 1])

    def between_passes(self, stored: Any) -> None:
        """To the compiler the words are new from here on: it widens them again, where it would keep twice as many registers."""
        for i in range(cute.size(stored)):
            stored[i] = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[I32], read_only_args=[stored[i]])

    @cute.jit
    def write_zeros(self, to: Int64, o_token: I32, tokens: I32, lane: I32):
        if self.writes_output(lane):
            vector_at(BF16, to, 1)[0] = F32(0.0).to(BF16)

    @cute.jit
    def decode_rows(
        self,
        call: cutlass.Constexpr,
        stored: cute.Tensor,
        state: Int64,
        ready: cutlass.Constexpr,
        tables: cutlass.Constexpr,
        lane: I32,
        to: Int64,
    ):
        """`stored` is the lane's part of the state, `to` the address of its row of o."""
        k, q, kq, v, decay, b = ready
        vectors = [cute.make_rmem_tensor((self.channels,), F32) for _ in range(1 + self.is_kda)]
        for c in cutlass.range_constexpr(self.channels):
            for vector, x in zip(vectors, (k, q) if self.is_kda else (q,)):
                vector[c] = x[c] * decay[c]
        sums = cute.make_rmem_tensor((LOADS, len(vectors)), F32)
        sums.fill(0.0)
        for i in cutlass.range_constexpr(LOADS):
            row = self.numbers_of_row(stored, i)
            for c in cutlass.range_constexpr(self.channels):
                for n, vector in enumerate(vectors):
                    sums[i, n] += row[c] * vector[c]
        self.between_passes(stored)
        total, _ = sum_of_each([sums[i, n] for n in range(len(vectors)) for i in range(LOADS)], lane, self.lanes)
        u, query = v, total
        if cutlass.const_expr(self.is_kda):
            other = cute.arch.shuffle_sync_bfly(total, offset=1)
            is_query = lane % 2 == 1
            u, query = b * (v - select(is_query, other, total)), select(is_query, total, other)
        if self.writes_output(lane):
            vector_at(BF16, to, 1)[0] = (query + u * kq).to(BF16)

        if (call.flags & Flag.COMMIT) != 0:
            for i in cutlass.range_constexpr(LOADS):
                of_row = cute.arch.shuffle_sync(u, self.lane_of_sum(i), mask_and_clamp=self.same_row)
                row = self.numbers_of_row(stored, i)
                for c in cutlass.range_constexpr(self.channels):
                    row[c] = row[c] * decay[c] + of_row * k[c]
                self.store_row(row, stored, i)
            cute.autovec_copy(stored, self.state_at(state, lane))


@dataclass(frozen=True)
class OneTokenF32(OneToken):
    """The same of states in float32."""

    dtype = F32
    lanes = 32

    def numbers_of_row(self, stored: Any, i: int) -> Any:
        return cute.recast_tensor(flat(stored, 4 * i, 4), F32)

    def store_row(self, row: Any, stored: Any, i: int) -> None:
        """They are the words."""

    def between_passes(self, stored: Any) -> None:
        """Nothing is widened."""


# The token


def addresses(rows: Any, call: Call, place: Place) -> Token:
    """Made before the kernel in front has ended."""
    n, hv, h, warp_row, _, lane = place
    q, k, v, g, beta, bias = call.q, call.k, call.v, call.g, call.beta, call.bias
    size_of_A, size_of_bias = 4, 4
    if rows.is_scalar:
        size_of_A, size_of_bias = size_of(call.flags, Flag.A_IS_F32), size_of(call.flags, Flag.BIAS_IS_F32)
    channel = rows.first_channel(lane)
    at = [
        k.at + (k.offset(n, h) + channel) * 2,
        q.at + (q.offset(n, h) + channel) * 2,
        v.at + (v.offset(n, hv) + warp_row + rows.first_row(lane)) * 2,
        call.A.at + Int64(hv * call.A.head) * size_of_A,
    ]
    if rows.is_kda:
        own = 0 if rows.is_scalar else rows.own_channel(lane)
        at += [
            g.at + (g.offset(n, hv) + own) * size_of(call.flags, Flag.G_IS_F32),
            bias.at + Int64(hv * bias.head + own * bias.channel) * size_of_bias,
            beta.at + beta.offset(n, hv) * size_of(call.flags, Flag.BETA_IS_F32),
        ]
    return Token(*at)


def load_before_slot(*_: Any) -> None:
    """Nothing: what is loaded before the state would be waited for with it."""


def load_behind_state(rows: Any, call: Call, at: Token, found: None, place: Place) -> Token:
    words = rows.channels // 2
    token = [load_words(at.k, words), load_words(at.q, words), number_at(cutlass.Uint16, at.v, 0)]
    if rows.is_scalar:
        for address, is_f32 in ((at.A, Flag.A_IS_F32), (at.g, Flag.G_IS_F32), (at.bias, Flag.BIAS_IS_F32)):
            token += load_halves(address, [I32(0)], (call.flags & is_f32) != 0)
    else:
        token.append(number_at(F32, at.A, 0))
        if rows.is_kda:
            upper = (size_of(call.flags, Flag.G_IS_F32) - 2) * 4  # of 8 bytes the same twice, of 16 the others
            token.append((load_words(at.g, 2), load_words(at.g + upper, 2)))
            token.append(load_words(at.bias, 4))
    if rows.is_kda:
        token += load_halves(at.b, [I32(0)], (call.flags & Flag.BETA_IS_F32) != 0)
    return Token(*token)


@cute.jit
def intra(
    rows: cutlass.Constexpr, call: cutlass.Constexpr, raw: cutlass.Constexpr, place: cutlass.Constexpr, tables: cutlass.Constexpr
):
    """k and q with norms and scale, k . q, v, and the decays of a lane's channels; of KDA b."""
    scale, flags = call.scale, call.flags
    k, q = widened(raw.k, rows.channels), widened(raw.q, rows.channels)
    sums = cute.make_rmem_tensor((3,), F32)
    sums.fill(0.0)
    for c in cutlass.range_constexpr(rows.channels):
        for n, (x, y) in enumerate(((k, q), (k, k), (q, q))):
            sums[n] += x[c] * y[c]
    offset = rows.lanes // 2
    while cutlass.const_expr(offset > 0):
        for n in cutlass.range_constexpr(3):
            sums[n] += cute.arch.shuffle_sync_bfly(sums[n], offset=offset)
        offset //= 2
    norms = [norm_factor(square, flags) for square in (sums[1], sums[2])]
    for c in cutlass.range_constexpr(rows.channels):
        k[c] *= norms[0]
        q[c] *= norms[1] * scale
    decay = decays_of_channels(rows, call, raw, place.lane)
    b = F32(1.0)
    if cutlass.const_expr(rows.is_kda):
        b = write_strength(number_of(raw.b, (flags & Flag.BETA_IS_F32) != 0), call.beta_top)
    return k, q, sums[0] * (norms[0] * norms[1] * scale), number_of((raw.v, raw.v), False), decay, b


@cute.jit
def decays_of_channels(rows: cutlass.Constexpr, call: cutlass.Constexpr, raw: cutlass.Constexpr, lane: I32):
    """Of a lane's channels: it makes four, and gets others that it has from lane ^ 16; or the head's, for all of them."""
    decay = cute.make_rmem_tensor((rows.channels,), F32)
    if cutlass.const_expr(rows.is_scalar):
        A = number_of(raw.A, (call.flags & Flag.A_IS_F32) != 0)
        A, bias = gate_parameters(call, A, number_of(raw.bias, (call.flags & Flag.BIAS_IS_F32) != 0))
        number = cute.make_rmem_tensor((1,), F32)
        number[0] = number_of(raw.g, (call.flags & Flag.G_IS_F32) != 0) + bias
        decay.fill(decays(number, A, call.lower_bound, call.flags)[0])
    elif cutlass.const_expr(rows.is_kda):
        low, high = raw.g
        numbers, bias = cute.make_rmem_tensor((4,), F32), cute.recast_tensor(raw.bias, F32)
        bits, halves = cute.recast_tensor(numbers, I32), cute.recast_tensor(widened(low, 4), I32)
        for c in cutlass.range_constexpr(4):
            bits[c] = select((call.flags & Flag.G_IS_F32) != 0, (low, high)[c // 2][c % 2], halves[c])
            A, bias_c = gate_parameters(call, raw.A, bias[c])
            numbers[c] += bias_c
        own = decays(numbers, A, call.lower_bound, call.flags)
        if cutlass.const_expr(rows.channels == 4):
            decay = own
        else:
            is_upper = lane >= rows.lanes
            for c in cutlass.range_constexpr(4):
                other = cute.arch.shuffle_sync_bfly(own[c], offset=rows.lanes)
                decay[c], decay[c + 4] = select(is_upper, other, own[c]), select(is_upper, own[c], other)
    else:
        decay.fill(exp2(raw.A * F32(-LOG2_E)))
    return decay
