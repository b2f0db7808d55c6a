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
from cula.ops.cute.common.tiles import F32, I32, LOG2E
from cula.ops.cute.sm90.decode_common import (
    WARPS,
    D,
    always_there,
    load_halves,
    made_here,
    number_at,
    number_of,
    read_four,
    select,
    size_of,
    widened_here,
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


@cute.jit
def decays_of(of_g: cutlass.Constexpr, of_gate: cutlass.Constexpr, lower: F32, flags: I32):
    """Of the tokens at a channel."""
    A, bias = of_gate
    x = cute.make_rmem_tensor((len(of_g),), F32)
    for t in cutlass.range_constexpr(len(of_g)):
        x[t] = number_of(of_g[t], (flags & G_IS_F32) != 0) + bias
    return decays(x, A, lower, flags)


# Tokens. Loads have no branches between them: a wait at the first would be in the way of the next. What is not there is read
# from elsewhere, and not used.


class Places(NamedTuple):
    """Addresses of the first token's: those of a lane's channel, v of its rows."""

    k: Any
    q: Any
    g: Any
    A: Any
    bias: Any
    v: Any
    b: Any


class Tokens(NamedTuple):
    """As they come; tokens that are not there come as the last."""

    values: Any  # v of the lane's token, as the rows want it
    b: Any
    is_there: Any
    k: Any  # of all tokens at a channel, as q and g
    q: Any
    g: Any
    gate: Any  # its two parameters


def before_the_slot(rows: Any, addresses: Any, row_strides: Any, strides: Any, tokens: Any, flags: Any, place: tuple) -> Places:
    n, hv, h, warp_row, wid, lane = place
    q, k, v, _, _, g, beta, A, dt_bias, _ = addresses
    q_row, k_row, v_row, _, g_row, beta_row, _, _ = row_strides
    (_, q_head), (_, k_head), (_, v_head), _, (_, g_head), (_, beta_head), A_head, bias = strides
    channel = wid * 32 + lane
    of_channel = select((flags & IS_SCALAR) != 0, I32(0), channel)
    at = Places(
        k + (Int64(n) * k_row + h * k_head + channel) * 2,
        q + (Int64(n) * q_row + h * q_head + channel) * 2,
        g + (Int64(n) * g_row + hv * g_head + of_channel) * size_of(flags, G_IS_F32),
        A + Int64(hv * A_head) * 4,
        dt_bias + Int64(hv * bias[0] + channel * bias[1]) * 4,
        v + (Int64(n) * v_row + hv * v_head + warp_row + rows.first_row(lane)) * 2,
        beta + (Int64(n) * beta_row + hv * beta_head) * size_of(flags, BETA_IS_F32),
    )
    return Places(*map(made_here, at))


def behind_the_state(rows: Any, at: Places, strides: Any, tokens: Any, flags: Any, wid: Any, lane: Any) -> Tokens:
    T, token = rows.T, rows.token_of_v(lane)
    (q_token, _), (k_token, _), (v_token, _), _, (g_token, _), (beta_token, _), _, _ = strides
    is_there = token < tokens
    token = select(is_there, token, I32(0))
    of_each = [I32(t) if always_there(t, T) else select(tokens > t, I32(t), tokens - 1) for t in range(T)]
    of_k = [number_at(cutlass.Uint16, at.k, t * k_token) for t in of_each]
    of_q = [number_at(cutlass.Uint16, at.q, t * q_token) for t in of_each]
    of_g = load_halves(at.g, [t * g_token for t in of_each], (flags & G_IS_F32) != 0)
    of_gate = number_at(F32, at.A, 0), number_at(F32, at.bias, 0)
    values = rows.load_values(at.v + Int64(token * v_token) * 2)
    of_b = load_halves(at.b, [token * beta_token], (flags & BETA_IS_F32) != 0)[0]
    return Tokens(values, of_b, is_there, of_k, of_q, of_g, of_gate)


def gate_parameters(addresses: Any, of_gate: Any) -> Any:
    """A_log and the bias; 0 where not given."""
    q, A, bias = addresses[0], addresses[7], addresses[8]
    return select(q != A, of_gate[0], F32(0.0)), select(q != bias, of_gate[1], F32(0.0))


def strength(of_b: Any, beta_top: Any, flags: Any) -> Any:
    """b of a token."""
    b = number_of(of_b, (flags & BETA_IS_F32) != 0)
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
    T, channel, (_, writes, mix) = rows.T, wid * 32 + lane, tables
    scale, lower, beta_top = factors
    k, q = [[widened_here(x) for x in halves] for halves in (raw.k, raw.q)]
    b = select(raw.is_there, strength(raw.b, beta_top, flags), F32(0.0))
    decay = decays_of(raw.g, gate_parameters(addresses, raw.gate), lower, flags)
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
    return raw.values, b, scale


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
