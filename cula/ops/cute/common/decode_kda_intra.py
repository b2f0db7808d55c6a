# SPDX-License-Identifier: Apache-2.0
"""Decode, several tokens of KDA: what the tokens of a row are to each other, without any state.

A block's four warps have 32 channels each, a lane one channel of all tokens. So decays multiply up within a lane, and the vectors
go to shared memory without a wait for any other lane: k e^G, q e^G and k e^{G_T - G} of raw k and q. Decays from token to token
are products of factors e^g in [0, 1], of which 0 (g = -inf) is as good as any.

What is summed over channels, k_t . (e^{G_t - G_i} k_i), q_t . (e^{G_t - G_i} k_i) and the squares of q_t, is summed within each
warp. Whoever needs a sum adds those of the four warps. Norms are factors of R, Q, A and P (`mixing`), and nobody waits for them
before that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.decode_call import WARPS, Call, D, Place
from cula.ops.cute.common.decode_gate import decays, gate_parameters, norm_factor, write_strength
from cula.ops.cute.common.decode_memory import (
    always_there,
    copy_to,
    fence,
    load_halves,
    number_of,
    select,
    size_of,
)
from cula.ops.cute.common.decode_sums import sum_of_each, sum_of_warps
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.tiles import F32, I32
from cula.ops.cute.decode_abi import Flag

# Tokens on their way. A warp has k, q, g and the gate's parameters of its 32 channels copied to shared memory while the slot's
# number is being loaded, and a lane reads its channel of them there. A copy shares no scoreboard with a load, so who waits for
# tokens does not wait for the state. A tensor that the call does not have is read from elsewhere and not used; a token that a row
# does not have is copied as the last one.


class RawTable(NamedTuple):
    """The table of tokens as they come, in words: k [T, 64], q [T, 64], g [T, 128] (bfloat16: half of each), bias [128],
    A_log [4]."""

    T: int

    @property
    def gates(self) -> int:
        return self.T * D

    @property
    def bias(self) -> int:
        return 2 * self.T * D

    @property
    def slope(self) -> int:
        """A_log, one for each warp."""
        return self.bias + D

    @property
    def size(self) -> int:
        return self.slope + WARPS

    @property
    def rounds(self) -> range:
        """In each a lane copies 16 bytes of k or q, and 16 of g."""
        return range(max(self.T // 4, 1))


def table_sizes(T: int) -> tuple[int, ...]:
    """Numbers in `vectors`, `writes`, `mix` and `raw` (`decode_frame.py`)."""
    return 2 * T * D, (T + 1) * D, 2 * T * T * WARPS, RawTable(T).size


class TokenAddresses(NamedTuple):
    """Where a lane finds its part of the tokens."""

    vectors: Any  # what it copies of k and q, in each round
    gates: Any  # likewise of g
    gate: Any  # g of the first token
    A: Any
    bias: Any  # at the lane's channel
    v: Any  # of the first token, at the lane's rows
    b: Any  # likewise


class RawTokens(NamedTuple):
    """v and b of the token whose v a lane wants, as they come."""

    values: Any
    b: Any


def gate_piece(lane: Any, r: int, flags: Any) -> tuple[Any, Any, Any]:
    """Which 16 bytes of g a lane copies in a round: the token, and which of the 4 or 8 pieces that a warp's channels are; then
    log2 of 4 or 8."""
    log_pieces = select((flags & Flag.G_IS_F32) != 0, I32(3), I32(2))
    token = (lane + 32 * r) >> log_pieces
    return token, (lane + 32 * r) - (token << log_pieces), log_pieces


def addresses(rows: Any, call: Call, place: Place) -> TokenAddresses:
    """Made before the kernel in front has ended."""
    n, hv, h, warp_row, wid, lane = place
    q, k, v, g, beta, flags = call.q, call.k, call.v, call.g, call.beta, call.flags
    raw, first, last = RawTable(rows.T), wid * 32, call.tokens - 1
    first_k = k.at + (k.offset(n, h) + first + lane % 4 * 8) * 2
    first_q = q.at + (q.offset(n, h) + first + lane % 4 * 8) * 2
    of_vectors, of_gates = [], []
    size = size_of(flags, Flag.G_IS_F32)
    gate = g.at + (g.offset(n, hv) + select((flags & Flag.IS_SCALAR) != 0, I32(0), first)) * size
    for r in raw.rounds:
        vector = (lane + 32 * r) // 4  # k of the tokens, then q
        token = cutlass.min(vector % rows.T, last)
        of_k, of_q = first_k + Int64(token * k.token) * 2, first_q + Int64(token * q.token) * 2
        of_vectors.append(select(vector < rows.T, of_k, of_q))
        token, piece, _ = gate_piece(lane, r, flags)
        of_gates.append(gate + Int64(cutlass.min(token, last) * g.token) * size + Int64(piece * 16))
    return TokenAddresses(
        of_vectors,
        of_gates,
        gate,
        call.A.at + Int64(hv * call.A.head) * 4,
        call.bias.at + Int64(hv * call.bias.head + (first + lane) * call.bias.channel) * 4,
        v.at + (v.offset(n, hv) + warp_row + rows.first_row(lane)) * 2,
        beta.at + beta.offset(n, hv) * size_of(flags, Flag.BETA_IS_F32),
    )


@cute.jit
def load_before_slot(
    rows: cutlass.Constexpr, call: cutlass.Constexpr, at: cutlass.Constexpr, place: cutlass.Constexpr, tables: cutlass.Constexpr
):
    """Have the warp's channels copied. Gates a head may have two bytes, which cannot be copied: they are loaded, are here when
    the slot's number is, and are waited for now, so that nobody waits for them with the state."""
    T, of, table, wid, lane, flags = rows.T, RawTable(rows.T), tables[3], place.wid, place.lane, call.flags
    for r in cutlass.range_constexpr(len(of.rounds)):
        vector = (lane + 32 * r) // 4
        if vector < 2 * T:
            copy_to(table, vector * (D // 2) + wid * 16 + lane % 4 * 4, at.vectors[r], 16)
    copy_to(table, of.bias + wid * 32 + lane, at.bias, 4)
    if lane == 0:
        copy_to(table, of.slope + wid, at.A, 4)
    if (flags & Flag.IS_SCALAR) != 0:
        is_f32 = (flags & Flag.G_IS_F32) != 0
        numbers = load_halves(at.gate, [cutlass.min(I32(t), call.tokens - 1) * call.g.token for t in range(T)], is_f32)
        for t in cutlass.range_constexpr(T):
            table[of.gates + t * D + wid * 32 + lane] = number_of(numbers[t], is_f32)
    else:
        for r in cutlass.range_constexpr(len(of.rounds)):
            token, piece, log_pieces = gate_piece(lane, r, flags)
            if token < T:
                copy_to(table, of.gates + token * D + (wid << (log_pieces + 2)) + piece * 4, at.gates[r], 16)
    cute.arch.cp_async_commit_group()


def load_behind_state(rows: Any, call: Call, at: TokenAddresses, found: None, place: Place) -> RawTokens:
    token = cutlass.min(rows.token_of_v(place.lane), call.tokens - 1)
    values = rows.load_values(at.v + Int64(token * call.v.token) * 2)
    return RawTokens(values, load_halves(at.b, [token * call.beta.token], (call.flags & Flag.BETA_IS_F32) != 0)[0])


@cute.jit
def at_channel(rows: cutlass.Constexpr, flags: I32, wid: I32, lane: I32, table: cute.Tensor):
    """What was copied, of a lane's channel: k, q and g [3, T], then A_log and the bias."""
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_warp()
    T, of, channel = rows.T, RawTable(rows.T), wid * 32 + lane
    halves = cute.make_tensor(cute.recast_ptr(table.iterator, dtype=cutlass.Uint16), cute.make_layout(2 * of.gates))
    words = cute.make_tensor(cute.recast_ptr(table.iterator, dtype=I32), cute.make_layout(of.size))
    numbers = cute.make_rmem_tensor((T, 3), F32)
    bits = cute.recast_tensor(numbers, I32)
    is_f32 = (flags & (Flag.G_IS_F32 | Flag.IS_SCALAR)) != 0
    place, left = select(is_f32, channel, channel // 2), select(is_f32, I32(0), (1 - lane % 2) * 16)
    mask = select(is_f32, I32(-1), I32(-65536))
    for t in cutlass.range_constexpr(T):
        bits[t, 0], bits[t, 1] = (halves[(n * T + t) * D + channel].to(I32) << 16 for n in range(2))
        bits[t, 2] = (words[of.gates + t * D + place] << left) & mask
    return numbers, table[of.slope + wid], table[of.bias + channel]


# Sums over channels: k_t . (e^{G_t - G_i} k_i) is number t T + i, q_t . (e^{G_t - G_i} k_i) number (T + t) T + i, i <= t. So the
# square of k_t is among them; those of q have places that no pair needs, number t T + T - 1, and T T + T - 1 for the last.


def number_of_square(role: Any, T: int) -> Any:
    """Of k_t for role t < T, of q_t for role T + t."""
    of_q = select(role < 2 * T - 1, role - T, I32(T)) * T + (T - 1)
    return select(role < T, role * (T + 1), of_q)


def products(t: int, k: list, q: list, keys: list) -> tuple[list, list]:
    """At a lane's channel, what is to be summed of numbers t T .. and (T + t) T ..; `keys` are k_i e^{G_t - G_i}, i <= t."""
    nobody_wants = [None] * (len(k) - len(keys))
    of_k, of_q = ([x * key for key in keys] + nobody_wants for x in (k[t], q[t]))
    if t < len(k) - 1:
        of_k[-1] = q[t] * q[t]
    if t == 0:
        of_q[-1] = q[-1] * q[-1]
    return of_k, of_q


def intra(rows: Any, call: Call, raw: RawTokens, place: Place, tables: Any) -> tuple:
    """Fill the tables, with vectors as `rows` wants them; ends with the block's one barrier. Returns v, b and the scale."""
    wid, lane, tokens, flags = place.wid, place.lane, call.tokens, call.flags
    T, channel, (_, writes, mix, table) = rows.T, wid * 32 + lane, tables
    numbers, *of_gate = at_channel(rows, flags, wid, lane, table)
    k, q = ([numbers[t, n] for t in range(T)] for n in range(2))
    A, bias = gate_parameters(call, *of_gate)
    g = flat(numbers, 2 * T, T)
    for t in range(T):
        g[t] += bias
    decay = decays(g, A, call.lower_bound, flags)
    decay = [decay[t] if always_there(t, T) else select(tokens > t, decay[t], F32(1.0)) for t in range(T)]
    since_start, keys, of_keys, of_queries = None, [], [], []  # e^{G_t}; k_i e^{G_t - G_i}; what is to be summed
    for t in range(T):
        since_start = decay[t] if t == 0 else since_start * decay[t]
        keys = [*(key * decay[t] for key in keys), k[t]]
        rows.put_vectors(tables, t, channel, k[t] * since_start, q[t] * since_start)
        more_keys, more_queries = products(t, k, q, keys)
        of_keys, of_queries = of_keys + more_keys, of_queries + more_queries
        if len(of_keys) == 16 or t == T - 1:  # as many as a warp has lanes
            total, which = sum_of_each(of_keys + of_queries, lane)
            is_query, count = which >= len(of_keys), len(of_keys)
            number = select(is_query, which - count + T * T, which) + ((t + 1) * T - count)
            mix[number * WARPS + wid] = total
            of_keys, of_queries = [], []
    for i in range(T):
        rows.put_write(tables, i, channel, keys[i])
    writes[T * D + channel] = since_start
    cute.arch.sync_threads()
    fence(never=tokens < 0)  # v and b are waited for with the state, so here at the earliest
    b = write_strength(number_of(raw.b, (flags & Flag.BETA_IS_F32) != 0), call.beta_top)
    return raw.values, select(rows.token_of_v(lane) < tokens, b, F32(0.0)), call.scale


# What meets the state


def mixing(mix: Any, role: Any, b: Any, scale: Any, T: int, flags: Any) -> tuple[Any, Any, list]:
    """Of role t < T, with x = S0 . (k_t e^{G_t}) and u_i as a multiple of raw k_i, u_t = of_x x + of_v v_t + sum_i of_u[i] u_i;
    of role T + t the same for o_t, where b is 0. Returns of_x, of_v and of_u [T]."""
    is_q = role >= T
    norm = norm_factor(sum_of_warps(mix, number_of_square(role, T)), flags)
    of_v = b * norm
    of_x = norm * select(is_q, scale, -of_v)
    until = select(is_q, role - T + 1, role)  # the tokens before, a query's own among them
    of_u = [select(until > i, of_x * sum_of_warps(mix, role * T + i), F32(0.0)) for i in range(T)]
    return of_x, of_v, of_u
