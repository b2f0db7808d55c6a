# SPDX-License-Identifier: Apache-2.0
"""Decode, what has no state in it, for KDA: gates, decays, norms, and what the tokens of a row are to each other.

A block's four warps have 32 channels each, a lane one channel of all tokens. So decays multiply up within a lane, and the vectors
go to shared memory without a wait for any other lane: k e^G, q e^G and k e^{G_T - G} of raw k and q. Decays from token to token
are products of factors e^g in [0, 1], of which 0 (g = -inf) is as good as any.

What is summed over channels, k_t . (e^{G_t - G_i} k_i), q_t . (e^{G_t - G_i} k_i) and the squares of q_t, is summed within each
warp; who needs a sum adds the four. Norms are factors of R, Q, A and P (`mixing`), and nobody waits for them before that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.decode_flags import BETA_IS_F32, G_IS_F32, IS_BOUNDED, IS_SCALAR, IS_SOFTPLUS, USE_NORM
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.tiles import F32, I32, LOG2E
from cula.ops.cute.sm90.decode_common import (
    WARPS,
    D,
    always_there,
    copy_to,
    fence,
    load_halves,
    number_of,
    read_four,
    select,
    size_of,
)

# Activation


def sigmoid(x: Any) -> Any:
    return cute.arch.rcp_approx(F32(1.0) + cute.math.exp2(x * F32(-LOG2E), fastmath=True))


@cute.jit
def decays(x: cute.Tensor, A: F32, lower: F32, flags: I32):
    """e^g, where g is x itself, -exp(A) softplus(x) or lower sigmoid(exp(A) x); the bias is in x, which is overwritten."""
    T = cute.size(x)
    slope = cute.math.exp2(A * F32(LOG2E), fastmath=True)
    if (flags & IS_BOUNDED) != 0:
        for t in cutlass.range_constexpr(T):
            x[t] = cute.math.exp2(x[t] * (slope * F32(-LOG2E)), fastmath=True)
        for t in cutlass.range_constexpr(T):
            x[t] = (lower * F32(LOG2E)) * cute.arch.rcp_approx(F32(1.0) + x[t])
    else:
        if (flags & IS_SOFTPLUS) != 0:
            for t in cutlass.range_constexpr(T):
                size = cute.arch.fmax(x[t], -x[t])
                tail = cute.math.log2(F32(1.0) + cute.math.exp2(size * F32(-LOG2E), fastmath=True), fastmath=True)
                x[t] = -slope * (cute.arch.fmax(x[t], F32(0.0)) * F32(LOG2E) + tail)
        else:
            for t in cutlass.range_constexpr(T):
                x[t] = x[t] * F32(LOG2E)
    for t in cutlass.range_constexpr(T):
        x[t] = cute.math.exp2(x[t], fastmath=True)
    return x


# Tokens. A warp has k, q, g and the gate's parameters of its 32 channels copied to shared memory while the slot is on its way,
# and a lane reads its channel of them there: a copy shares no scoreboard with a load, so that who waits for tokens does not wait
# for the state. What is not there is read from elsewhere, and not used; tokens that are not there come as the last.


class Raw(NamedTuple):
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


class Places(NamedTuple):
    """Addresses."""

    vectors: Any  # what a lane copies of k and q, in each round
    gates: Any  # likewise of g
    gate: Any  # g of the first token
    A: Any
    bias: Any  # at the lane's channel
    v: Any  # of the first token, at the lane's rows
    b: Any  # likewise


class Tokens(NamedTuple):
    """Of the token whose v a lane wants, as they come."""

    values: Any
    b: Any


def gate_piece(lane: Any, r: int, flags: Any) -> tuple[Any, Any, Any]:
    """Which 16 bytes of g a lane copies in a round: the token, and which of the 4 or 8 pieces that a warp's channels are; then
    log2 of 4 or 8."""
    log_pieces = select((flags & G_IS_F32) != 0, I32(3), I32(2))
    token = (lane + 32 * r) >> log_pieces
    return token, (lane + 32 * r) - (token << log_pieces), log_pieces


def places(rows: Any, addresses: Any, row_strides: Any, strides: Any, tokens: Any, flags: Any, place: tuple) -> Places:
    n, hv, h, warp_row, wid, lane = place
    q, k, v, _, _, g, beta, A, dt_bias, _ = addresses
    q_row, k_row, v_row, _, g_row, beta_row, _, _ = row_strides
    (q_token, q_head), (k_token, k_head), (_, v_head), _, (g_token, g_head), (_, beta_head), A_head, bias = strides
    raw, first, last = Raw(rows.T), wid * 32, tokens - 1
    first_k = k + (Int64(n) * k_row + h * k_head + first + lane % 4 * 8) * 2
    first_q = q + (Int64(n) * q_row + h * q_head + first + lane % 4 * 8) * 2
    of_vectors, of_gates = [], []
    size = size_of(flags, G_IS_F32)
    gate = g + (Int64(n) * g_row + hv * g_head + select((flags & IS_SCALAR) != 0, I32(0), first)) * size
    for r in raw.rounds:
        vector = (lane + 32 * r) // 4  # k of the tokens, then q
        token = cutlass.min(vector % rows.T, last)
        of_k, of_q = first_k + Int64(token * k_token) * 2, first_q + Int64(token * q_token) * 2
        of_vectors.append(select(vector < rows.T, of_k, of_q))
        token, piece, _ = gate_piece(lane, r, flags)
        of_gates.append(gate + Int64(cutlass.min(token, last) * g_token) * size + Int64(piece * 16))
    return Places(
        of_vectors,
        of_gates,
        gate,
        A + Int64(hv * A_head) * 4,
        dt_bias + Int64(hv * bias[0] + (first + lane) * bias[1]) * 4,
        v + (Int64(n) * v_row + hv * v_head + warp_row + rows.first_row(lane)) * 2,
        beta + (Int64(n) * beta_row + hv * beta_head) * size_of(flags, BETA_IS_F32),
    )


@cute.jit
def before_the_slot(
    rows: cutlass.Constexpr,
    at: cutlass.Constexpr,
    strides: cutlass.Constexpr,
    tokens: I32,
    flags: I32,
    wid: I32,
    lane: I32,
    tables: cutlass.Constexpr,
):
    """Have the warp's channels copied. Gates a head may have two bytes, which cannot be: they are loaded, are here when the slot
    is, and are waited for, so that nobody waits for them with the state."""
    T, of, table = rows.T, Raw(rows.T), tables[3]
    for r in cutlass.range_constexpr(len(of.rounds)):
        vector = (lane + 32 * r) // 4
        if vector < 2 * T:
            copy_to(table, vector * (D // 2) + wid * 16 + lane % 4 * 4, at.vectors[r], 16)
    copy_to(table, of.bias + wid * 32 + lane, at.bias, 4)
    if lane == 0:
        copy_to(table, of.slope + wid, at.A, 4)
    if (flags & IS_SCALAR) != 0:
        is_f32, g_token = (flags & G_IS_F32) != 0, strides[4][0]
        numbers = load_halves(at.gate, [cutlass.min(I32(t), tokens - 1) * g_token for t in range(T)], is_f32)
        for t in cutlass.range_constexpr(T):
            table[of.gates + t * D + wid * 32 + lane] = number_of(numbers[t], is_f32)
    else:
        for r in cutlass.range_constexpr(len(of.rounds)):
            token, piece, log_pieces = gate_piece(lane, r, flags)
            if token < T:
                copy_to(table, of.gates + token * D + (wid << (log_pieces + 2)) + piece * 4, at.gates[r], 16)
    cute.arch.cp_async_commit_group()


def behind_the_state(rows: Any, at: Places, found: None, strides: Any, tokens: Any, flags: Any, lane: Any) -> Tokens:
    token, v_token, beta_token = cutlass.min(rows.token_of_v(lane), tokens - 1), strides[2][0], strides[5][0]
    values = rows.load_values(at.v + Int64(token * v_token) * 2)
    return Tokens(values, load_halves(at.b, [token * beta_token], (flags & BETA_IS_F32) != 0)[0])


@cute.jit
def at_channel(rows: cutlass.Constexpr, flags: I32, wid: I32, lane: I32, table: cute.Tensor):
    """What was copied, of a lane's channel: k, q and g [3, T], then A_log and the bias."""
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_warp()
    T, of, channel = rows.T, Raw(rows.T), wid * 32 + lane
    halves = cute.make_tensor(cute.recast_ptr(table.iterator, dtype=cutlass.Uint16), cute.make_layout(2 * of.gates))
    words = cute.make_tensor(cute.recast_ptr(table.iterator, dtype=I32), cute.make_layout(of.size))
    numbers = cute.make_rmem_tensor((T, 3), F32)
    bits = cute.recast_tensor(numbers, I32)
    is_f32 = (flags & (G_IS_F32 | IS_SCALAR)) != 0
    place, left = select(is_f32, channel, channel // 2), select(is_f32, I32(0), (1 - lane % 2) * 16)
    mask = select(is_f32, I32(-1), I32(-65536))
    for t in cutlass.range_constexpr(T):
        bits[t, 0], bits[t, 1] = (halves[(n * T + t) * D + channel].to(I32) << 16 for n in range(2))
        bits[t, 2] = (words[of.gates + t * D + place] << left) & mask
    return numbers, table[of.slope + wid], table[of.bias + channel]


def gate_parameters(addresses: Any, of_gate: Any) -> Any:
    """A_log and the bias; 0 where not given."""
    q, A, bias = addresses[0], addresses[7], addresses[8]
    return select(q != A, of_gate[0], F32(0.0)), select(q != bias, of_gate[1], F32(0.0))


def strength(b: Any, beta_top: Any) -> Any:
    """b of a token, activated."""
    return select(beta_top > F32(0.0), beta_top * sigmoid(b), b)


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


def sum_of_each(values: list, lane: Any, lanes: int = 32) -> tuple[Any, Any]:
    """Sums over a warp, or each half of it, of as many values or fewer, by halves: a lane sends half of them and keeps the other.
    The sum that it has in the end, and which that is. None is a value that nobody wants."""
    half, step, which = len(values) // 2, 1, I32(0)
    while half > 0:
        is_upper = (lane & step) != 0
        which = select(is_upper, which + half, which)
        values = [_halved(x, y, is_upper, step) for x, y in zip(values[:half], values[half:])]
        half, step = half // 2, step * 2
    total = values[0]
    while step < lanes:
        total, step = total + cute.arch.shuffle_sync_bfly(total, offset=step), step * 2
    return total, which


def _halved(x: Any, y: Any, is_upper: Any, step: int) -> Any:
    """Of two values, the sum over both lanes of a pair that is this lane's."""
    if x is None or y is None:
        own = y if x is None else x
        return own if own is None else own + cute.arch.shuffle_sync_bfly(own, offset=step)
    kept, sent = select(is_upper, y, x), select(is_upper, x, y)
    return kept + cute.arch.shuffle_sync_bfly(sent, offset=step)


def prepare(
    rows: Any, addresses: Any, raw: Tokens, factors: tuple, tokens: Any, flags: Any, wid: Any, lane: Any, tables: Any
) -> tuple:
    """Fill the tables, vectors as `rows` wants them; ends with the block's one barrier. Returns v, b and the scale."""
    T, channel, (_, writes, mix, table) = rows.T, wid * 32 + lane, tables
    scale, lower, beta_top = factors
    numbers, *of_gate = at_channel(rows, flags, wid, lane, table)
    k, q = ([numbers[t, n] for t in range(T)] for n in range(2))
    A, bias = gate_parameters(addresses, of_gate)
    g = flat(numbers, 2 * T, T)
    for t in range(T):
        g[t] += bias
    decay = decays(g, A, lower, flags)
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
    b = strength(number_of(raw.b, (flags & BETA_IS_F32) != 0), beta_top)
    return raw.values, select(rows.token_of_v(lane) < tokens, b, F32(0.0)), scale


# For what meets the state


def mixing(mix: Any, role: Any, b: Any, scale: Any, T: int, flags: Any) -> tuple[Any, Any, list]:
    """Of role t < T, with x = S0 . (k_t e^{G_t}) and u_i as a multiple of raw k_i, u_t = of_x x + of_v v_t + sum_i of_u[i] u_i;
    of role T + t the same for o_t, where b is 0. Returns of_x, of_v and of_u [T]."""
    is_q = role >= T
    square = sum_of_warps(mix, number_of_square(role, T)) + F32(1e-6)
    norm = select((flags & USE_NORM) != 0, cute.math.rsqrt(square, fastmath=True), F32(1.0))
    of_v = b * norm
    of_x = norm * select(is_q, scale, -of_v)
    until = select(is_q, role - T + 1, role)  # the tokens before, a query's own among them
    of_u = [select(until > i, of_x * sum_of_warps(mix, role * T + i), F32(0.0)) for i in range(T)]
    return of_x, of_v, of_u


def sum_of_warps(mix: Any, number: Any) -> Any:
    four = read_four(mix, number * WARPS)
    return (four[0] + four[1]) + (four[2] + four[3])
