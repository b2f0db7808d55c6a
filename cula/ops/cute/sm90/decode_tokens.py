# SPDX-License-Identifier: Apache-2.0
"""Decode, what has no state in it: norms, gates, decays, and what the tokens of a row are to each other."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.decode_flags import BETA_IS_F32, G_IS_F32, IS_BOUNDED, IS_KDA, IS_SCALAR, IS_SOFTPLUS, USE_NORM
from cula.ops.cute.common.tiles import F32, I32, LOG2E
from cula.ops.cute.sm90.decode_common import (
    D,
    four_at,
    load_words,
    read_four,
    vector_at,
    widened,
)

# Activation


@cute.jit
def sigmoid(x: F32):
    return cute.arch.rcp_approx(F32(1.0) + cute.math.exp2(x * F32(-LOG2E), fastmath=True))


@cute.jit
def log2_decays(x: cute.Tensor, of_gate: cute.Tensor, lower: F32, flags: I32):
    """In place, of g: a log decay, -exp(A) softplus(g + bias) or lower sigmoid(exp(A) (g + bias))."""
    slope = cute.math.exp2(of_gate[0] * F32(LOG2E), fastmath=True)
    for e in cutlass.range_constexpr(4):
        x[e] += of_gate[1 + e]
    if (flags & IS_BOUNDED) != 0:
        for e in cutlass.range_constexpr(4):
            x[e] = cute.math.exp2(x[e] * (slope * F32(-LOG2E)), fastmath=True)
        for e in cutlass.range_constexpr(4):
            x[e] = (lower * F32(LOG2E)) * cute.arch.rcp_approx(F32(1.0) + x[e])
    else:
        if (flags & IS_SOFTPLUS) != 0:
            for e in cutlass.range_constexpr(4):
                size = cute.arch.fmax(x[e], -x[e])
                tail = cute.math.log2(F32(1.0) + cute.math.exp2(size * F32(-LOG2E), fastmath=True), fastmath=True)
                x[e] = -slope * (cute.arch.fmax(x[e], F32(0.0)) * F32(LOG2E) + tail)
        else:
            for e in cutlass.range_constexpr(4):
                x[e] = x[e] * F32(LOG2E)


@cute.jit
def unit(k: cute.Tensor, q: cute.Tensor, scale: F32, flags: I32):
    """In place: of length 1 and `scale` where the call asks for norms, else as long as before and `scale` times as long."""
    of_k, of_q = F32(1.0), scale
    if (flags & USE_NORM) != 0:
        kk, qq = dot_of_four(k, k), dot_of_four(q, q)
        for step in cutlass.range_constexpr(5):
            other_k, other_q = [cute.arch.shuffle_sync_bfly(x, offset=1 << step) for x in (kk, qq)]
            kk, qq = kk + other_k, qq + other_q
        of_k = cute.math.rsqrt(kk + F32(1e-6), fastmath=True)
        of_q = scale * cute.math.rsqrt(qq + F32(1e-6), fastmath=True)
    for e in cutlass.range_constexpr(4):
        k[e], q[e] = k[e] * of_k, q[e] * of_q


@cute.jit
def gates(
    of_g: cute.Tensor, of_b: cute.Tensor, of_gate: cute.Tensor, lower: F32, beta_top: F32, flags: I32, is_there: cutlass.Boolean
):
    """Log2 decays of a lane's four channels, and b; zeros of a token that is not there."""
    rg, b = cute.make_rmem_tensor((4,), F32), F32(0.0)
    rg.fill(0.0)
    if is_there:
        if (flags & IS_KDA) != 0:
            rg.store(widened(of_g, flags & G_IS_F32, 4).load())
            if (flags & IS_SCALAR) != 0:
                rg.fill(widened(of_g, flags & G_IS_F32, 1)[0])
            log2_decays(rg, of_gate, lower, flags)
            b = widened(of_b, flags & BETA_IS_F32, 1)[0]
            if beta_top > F32(0.0):
                b = beta_top * sigmoid(b)
        else:
            rg.fill(of_gate[0] * F32(-LOG2E))
            b = F32(1.0)
    return rg, b


def dot_of_four(x: Any, y: Any) -> Any:
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3]


# Sums over a warp


@cute.jit
def sum_of_each(values: cute.Tensor, lane: I32, count: cutlass.Constexpr):
    """Sums over a warp of `count` values; the one that a lane gets, and which it is."""
    half, step, which = count // 2, 1, I32(0)
    while cutlass.const_expr(half > 0):
        is_upper = (lane & step) != 0
        which = which + half if is_upper else which
        for j in cutlass.range_constexpr(half):
            lower, upper = values[j], values[j + half]
            kept, sent = (upper if is_upper else lower), (lower if is_upper else upper)
            values[j] = kept + cute.arch.shuffle_sync_bfly(sent, offset=step)
        half, step = half // 2, step * 2
    total = values[0]
    while cutlass.const_expr(step < 32):
        total += cute.arch.shuffle_sync_bfly(total, offset=step)
        step *= 2
    return total, which


# Tokens


def jobs(T: int) -> int:
    """Tokens of a warp where a block has the fewest warps (`min_warps`): warp w has tokens w, w + warps, ..."""
    return T // min_warps(T)


def min_warps(T: int) -> int:
    return min(T, 4)


@cute.jit
def load_tokens(
    addresses: tuple,
    row_strides: tuple,
    strides: tuple,
    tokens: I32,
    group: I32,
    flags: I32,
    T: cutlass.Constexpr,
    n: I32,
    hv: I32,
    wid: I32,
    lane: I32,
):
    """k, q and g of every token that is the warp's, four channels a lane; b; the gate's parameters. As they come, or zeros."""
    q, k, _, _, _, g, beta, A_log, dt_bias, decay, _ = addresses
    q_row, k_row, _, _, g_row, beta_row, _, _ = row_strides
    (q_token, q_head), (k_token, k_head), _, _, (g_token, g_head), (beta_token, beta_head), A_head, bias, decay_head = strides
    threads, _, _ = cute.arch.block_dim()
    is_kda, is_scalar = (flags & IS_KDA) != 0, (flags & IS_SCALAR) != 0
    h, channel = hv // group, lane * 4
    found = []
    for job in cutlass.range_constexpr(jobs(T)):
        t = wid + job * (threads // 32)
        of_k, of_q, of_g, of_b = [cute.make_rmem_tensor((size,), I32) for size in (2, 2, 4, 1)]
        for part in (of_k, of_q, of_g, of_b):
            part.fill(0)
        if t < tokens:
            at_k = k + (Int64(n) * k_row + t * k_token + h * k_head + channel) * 2
            at_q = q + (Int64(n) * q_row + t * q_token + h * q_head + channel) * 2
            cute.autovec_copy(vector_at(I32, at_k, 2, 8), of_k)
            cute.autovec_copy(vector_at(I32, at_q, 2, 8), of_q)
            if is_kda:
                is_f32 = flags & G_IS_F32
                row = g + Int64(n) * g_row * (4 if is_f32 != 0 else 2)
                if is_scalar:
                    load_words(cute.make_tensor(of_g.iterator, cute.make_layout(1)), row, t * g_token + hv * g_head, is_f32)
                else:
                    load_words(of_g, row, t * g_token + hv * g_head + channel, is_f32)
                is_f32 = flags & BETA_IS_F32
                row = beta + Int64(n) * beta_row * (4 if is_f32 != 0 else 2)
                load_words(of_b, row, t * beta_token + hv * beta_head, is_f32)
        found.append((of_k, of_q, of_g, of_b))
    of_gate = cute.make_rmem_tensor((5,), F32)  # A_log or -(log decay of Lightning), then the bias
    of_gate.fill(0.0)
    if wid < T:
        if is_kda:
            if A_log != 0:
                of_gate[0] = vector_at(F32, A_log + Int64(hv * A_head) * 4, 1)[0]
            if dt_bias != 0:
                for e in cutlass.range_constexpr(4):
                    at = Int64(hv * bias[0] + (channel + e) * bias[1])
                    of_gate[1 + e] = vector_at(F32, dt_bias + at * 4, 1)[0]
        else:
            of_gate[0] = vector_at(F32, decay + Int64(hv * decay_head) * 4, 1)[0]
    return found, of_gate


@cute.jit
def prepare(
    raw: cutlass.Constexpr,
    factors: tuple,
    tokens: I32,
    flags: I32,
    T: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    wid: I32,
    lane: I32,
    tables: cutlass.Constexpr,
):
    """Fill the tables, vectors as the module `rows` wants them; ends with a barrier."""
    found, of_gate = raw
    scale, lower, beta_top = factors
    _, _, _, strengths, kept = tables
    threads, _, _ = cute.arch.block_dim()
    kda = F32(1.0) if (flags & IS_KDA) != 0 else F32(0.0)

    for job in cutlass.range_constexpr(jobs(T)):
        t = wid + job * (threads // 32)
        of_k, of_q, of_g, of_b = found[job]
        if t < T:
            rk, rq = widened(of_k, I32(0), 4), widened(of_q, I32(0), 4)
            unit(rk, rq, scale, flags)
            rg, b = gates(of_g, of_b, of_gate, lower, beta_top, flags, t < tokens)
            for j, part in enumerate((rk, rq, rg)):
                cute.autovec_copy(part, four_at(kept, (j * T + t) * D + 4 * lane))
            if lane == 0:
                strengths[t] = b
    cute.arch.sync_threads()

    for i in cutlass.range(wid, T, threads // 32, unroll=1):
        column(i, T, rows, kda, lane, tables)
    cute.arch.sync_threads()


def put(rows: Any, *arguments: Any) -> None:
    """`rows.put`; a branch would take a module whose method it calls for something that it changes."""
    rows.put(*arguments)


@cute.jit
def column(
    i: I32,
    T: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    kda: F32,
    lane: I32,
    tables: cutlass.Constexpr,
):
    """Token i's vectors and its column of `mix`."""
    _, writes, mix, strengths, kept = tables
    b, place = strengths[i] * kda, 4 * lane
    key, query = read_four(kept, i * D + place), read_four(kept, (T + i) * D + place)
    until, since, decay = [cute.make_rmem_tensor((4,), F32) for _ in range(3)]  # i's decay since the start; t's since i
    decayed = cute.make_rmem_tensor((4,), F32)  # k_i e^{G_t - G_i}
    until.fill(0.0)
    since.fill(0.0)
    parts = cute.make_rmem_tensor((2 * T,), F32)
    for t in cutlass.range_constexpr(T):
        key_t, query_t = read_four(kept, t * D + place), read_four(kept, (T + t) * D + place)
        g = read_four(kept, (2 * T + t) * D + place)
        is_after = F32(1.0) if t > i else F32(0.0)
        for e in cutlass.range_constexpr(4):
            until[e] += g[e] * (F32(1.0) - is_after)
            since[e] += g[e] * is_after
        for e in cutlass.range_constexpr(4):
            decay[e] = cute.math.exp2(since[e], fastmath=True)
        for e in cutlass.range_constexpr(4):
            decayed[e] = key[e] * decay[e]
        parts[t], parts[T + t] = dot_of_four(key_t, decayed), dot_of_four(query_t, decayed)
    for e in cutlass.range_constexpr(4):
        decay[e] = cute.math.exp2(until[e], fastmath=True)
        key[e] = -b * key[e] * decay[e]
        query[e] = query[e] * decay[e]
    put(rows, tables, T, i, lane, key, query, decayed)
    if i == T - 1:
        cute.autovec_copy(decay, four_at(writes, T * D + place))
    total, which = sum_of_each(parts, lane, 2 * T)
    if lane < 2 * T:
        factor = F32(0.0)  # of what does not come before
        if which >= T:
            factor = F32(1.0) if which - T >= i else F32(0.0)
        else:
            factor = -kda * strengths[which] if which > i else F32(0.0)
        mix[which * T + i] = factor * total
