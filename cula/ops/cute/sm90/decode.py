# SPDX-License-Identifier: Apache-2.0
"""One to eight tokens a row on a pool of states: KDA and Lightning decode, one launch. K = V = 128, bf16 tokens.

All tokens of a row meet its state S0 [V, K] at once. With log2 decays summed from the first token (G_t, G_T over all T),
write strengths b and the scale inside q:

    R_t = S0 . (k_t e^{G_t})     Q_t = S0 . (q_t e^{G_t})                                        2T products a row of S0
    A[t, i] = k_t . (e^{G_t - G_i} k_i), i < t     P[t, i] = q_t . (e^{G_t - G_i} k_i), i <= t   once a (row, head)
    u_t = b_t (v_t - R_t - sum_{i < t} A[t, i] u_i)     o_t = Q_t + sum_{i <= t} P[t, i] u_i
    S_T = e^{G_T} S0 + sum_i u_i (k_i e^{G_T - G_i})

Lightning is the same with u = v, and runs as such: R and A are multiplied by zero. No exponent is positive, so any gate will do.
What depends on the state is float32 throughout: 3T + 1 multiply-adds an element, which hide behind its way in and out of memory
(for T <= 4; see `docs/decode.md`).

A block has 2 to 8 warps and 16 rows of S0 for each: 8 lanes share a row, and a lane holds four pieces of 4 columns of four rows
next to each other, 64 numbers. The state is on its way to registers while the block prepares what has no state in it:
  1. a warp a token: norms, gates, b; k, q and log2 decays to shared memory,
  2. a warp a token i: k_i and q_i with their decays, and column i of A and P.
Then, by every warp for its own rows:
  3. 2T sums of products over a lane's columns, and over the 8 lanes by halves: a lane sends half of its sums and keeps the other,
     three times, and has one left. Which sum it accumulates as its j-th depends on the lane (j ^ lane), so that all lanes send
     the same registers.
  4. The recurrence of u. Lane i has b_i (v_i - R_i), or Q_i; column i of (-b A; P) times u_i, which all lanes are told, is added.
  5. S_T.

| shared memory, float32                  | what                                                        |
|-----------------------------------------|-------------------------------------------------------------|
| `vectors` [2T, 128]                     | -b k e^G of the tokens, then q e^G                          |
| `writes` [T + 1, 128]                   | k e^{G_T - G} of the tokens, then e^{G_T}                   |
| `tokens` [3T, 128]                      | k, q, log2 decays; not for one token                        |
| `mix` [2T, T]                           | -b A, then P                                                |
| `strengths` [T]                         | b                                                           |

Channels are kept in the order in which lanes read them, 16 bytes each (`place`), so no bank is asked twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.tiles import BF16, F32, I32
from cula.ops.cute.variants import Variant

LOG2E = 1.4426950408889634
D = 128  # K and V
ROWS, LANES = 4, 8  # rows of a lane, lanes of a row
WARP_ROWS = ROWS * 32 // LANES
MAX_WARPS = D // WARP_ROWS
SEGMENT = (32 - LANES) << 8 | 31  # a shuffle's: lanes are counted within those of a row

# Bits of `flags`, here and in the host side.
IS_KDA, USE_NORM, IS_SOFTPLUS, IS_BOUNDED, G_IS_F32, BETA_IS_F32, INDEX_IS_I64, ZERO_IS_NULL, COMMIT, IS_SCALAR = (
    1 << i for i in range(10)
)


# Memory


def at_address(dtype: Any, address: Any, size: int, align: int = 0) -> Any:
    """A vector in global memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align or dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(size))


def four_at(table: Any, position: Any) -> Any:
    """16 bytes of a table in shared memory; the position is a multiple of 4."""
    pointer = table.iterator + cute.assume(position, divby=4)
    return cute.make_tensor(pointer.align(16), cute.make_layout(4))


@cute.jit
def read_four(table: cute.Tensor, position: I32):
    four = cute.make_rmem_tensor((4,), F32)
    cute.autovec_copy(four_at(table, position), four)
    return four


# What is loaded stays as it is until all loads are on their way: to widen a number is to wait for it.


@cute.jit
def load_words(words: cute.Tensor, address: Int64, offset: I32, is_f32: I32):
    """float32 or bfloat16 numbers, as many as `words`, at a multiple of their size."""
    count = cute.size(words)
    if is_f32 != 0:
        cute.autovec_copy(at_address(I32, address + Int64(offset) * 4, count, 4 * count), words)
    else:
        if cutlass.const_expr(count == 1):
            words[0] = at_address(cutlass.Uint16, address + Int64(offset) * 2, 1)[0].to(I32)
        else:
            half = cute.make_tensor(words.iterator, cute.make_layout(count // 2))
            cute.autovec_copy(at_address(I32, address + Int64(offset) * 2, count // 2, 2 * count), half)


@cute.jit
def widened(words: cute.Tensor, is_f32: I32, count: cutlass.Constexpr):
    """The numbers in what `load_words` left."""
    out = cute.make_rmem_tensor((count,), F32)
    bits = cute.recast_tensor(out, I32)
    for e in cutlass.range_constexpr(count):
        word = words[e // 2]
        bits[e] = word << 16 if cutlass.const_expr(e % 2 == 0) else word & I32(-65536)
    if is_f32 != 0:
        for e in cutlass.range_constexpr(count):
            bits[e] = words[e]
    return out


# Activation


@cute.jit
def sigmoid(x: F32):
    return cute.arch.rcp_approx(F32(1.0) + cute.math.exp2(x * F32(-LOG2E), fastmath=True))


@cute.jit
def sum_of_warp(x: F32):
    for step in cutlass.range_constexpr(5):
        x += cute.arch.shuffle_sync_bfly(x, offset=1 << step)
    return x


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


def dot_of_four(x: Any, y: Any) -> Any:
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3]


# Sums over lanes


@cute.jit
def sum_by_halves(sums: cute.Tensor, count: cutlass.Constexpr, r: cutlass.Constexpr):
    """The sum of row r that is this lane's: sums[r, j] of a lane belongs to vector j ^ lane. `count` of them, 2, 4 or 8."""
    half = count // 2
    while cutlass.const_expr(half > 0):
        for j in cutlass.range_constexpr(half):
            sums[r, j] += cute.arch.shuffle_sync_bfly(sums[r, j + half], offset=half)
        half //= 2
    whole = count
    while cutlass.const_expr(whole < LANES):
        sums[r, 0] += cute.arch.shuffle_sync_bfly(sums[r, 0], offset=whole)
        whole *= 2


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


# The kernel


@cute.kernel
def decode_kernel(
    addresses: tuple,
    row_strides: tuple,
    strides: tuple,
    factors: tuple,
    tokens: I32,
    group: I32,
    flags: I32,
    T: cutlass.Constexpr,
    pool_type: cutlass.Constexpr,
):
    """A block for each (rows of a state, value head, row of the call)."""
    _, _, v, pool, indices, _, _, _, _, _, o = addresses
    _, _, v_row, o_row, _, _, slot_stride, index_stride = row_strides
    (v_token, v_head), (o_token, o_head) = strides[2:4]
    split, hv, n = cute.arch.block_idx()
    tid, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    wid = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    row = (split * (threads // 32) + wid) * WARP_ROWS + lane // LANES * ROWS  # the first of the lane's four

    # The slot first, then all that does not depend on it.
    slot = cute.make_rmem_tensor((2,), I32)
    slot[0], slot[1] = n, I32(0)
    if indices != 0:
        if (flags & INDEX_IS_I64) != 0:
            cute.autovec_copy(at_address(I32, indices + Int64(n) * index_stride * 8, 2, 8), slot)
        else:
            slot[0] = at_address(I32, indices + Int64(n) * index_stride * 4, 1)[0]
    # Of v, lane i of a row wants token i. With one to four tokens lanes have roles 0..2T-1: R of the tokens, then Q.
    role = lane % min(2 * T, LANES)
    values = cute.make_rmem_tensor((ROWS // 2,), I32)
    values.fill(0)
    if role < tokens and role < T:
        v_at = v + (Int64(n) * v_row + role * v_token + hv * v_head + row) * 2
        cute.autovec_copy(at_address(I32, v_at, ROWS // 2, 8), values)
    raw = load_tokens(addresses, row_strides, strides, tokens, group, flags, T, n, hv, wid, lane)

    sign = slot[1] if (flags & INDEX_IS_I64) != 0 else slot[0]
    is_null = sign < 0
    if (flags & ZERO_IS_NULL) != 0:
        is_null = sign < 0 or slot[0] == 0
    to = o + (Int64(n) * o_row + hv * o_head + row) * 2
    if indices != 0 and is_null:
        zeros = cute.make_rmem_tensor((ROWS,), BF16)
        zeros.fill(0.0)
        token = lane % LANES
        if token < tokens:
            cute.autovec_copy(zeros, at_address(BF16, to + Int64(token * o_token) * 2, ROWS, 8))
    else:
        state = pool + (Int64(slot[0]) * slot_stride + (hv * D + row) * D) * (pool_type.width // 8)
        decode_rows(raw, values, factors, tokens, flags, T, pool_type, wid, lane, role, state, to, o_token)


@cute.jit
def decode_rows(
    raw: cutlass.Constexpr,
    values: cute.Tensor,
    factors: tuple,
    tokens: I32,
    flags: I32,
    T: cutlass.Constexpr,
    pool_type: cutlass.Constexpr,
    wid: I32,
    lane: I32,
    role: I32,
    state: Int64,
    to: Int64,
    o_token: I32,
):
    """The block's rows. `state` and `to` are the addresses of the lane's first row in its slot and, for token 0, in o."""
    per_load = 128 // pool_type.width  # numbers in 16 bytes
    loads = D // (LANES * per_load)
    of_row = lane % LANES

    rows_of_state = cute.make_layout((per_load, loads, ROWS), stride=(1, LANES * per_load, D))
    first = cute.make_ptr(pool_type, state + Int64(of_row * 16), cute.AddressSpace.gmem, assumed_align=16)
    gS = cute.make_tensor(first, rows_of_state)
    stored = cute.make_rmem_tensor((per_load, loads, ROWS), pool_type)
    cute.autovec_copy(gS, stored)

    smem = SmemAllocator()
    table = lambda rows, columns: smem.allocate_tensor(F32, cute.make_layout(rows * columns), byte_alignment=16)
    vectors, writes, mix, strengths = table(2 * T, D), table(T + 1, D), table(2 * T, T), table(1, max(T, 4))
    kept = table(3 * T, D) if cutlass.const_expr(T > 1) else vectors
    prepare(raw, factors, tokens, flags, T, pool_type, wid, lane, (vectors, writes, mix, strengths, kept))

    S = cute.make_rmem_tensor((D // LANES, ROWS), F32)
    if cutlass.const_expr(pool_type is F32):
        S.store(stored.load().reshape((D // LANES, ROWS)))
    else:
        words, size = cute.recast_tensor(stored, I32), D // LANES * ROWS
        flat = lambda t, n: cute.make_tensor(t.iterator, cute.make_layout(n))
        S.store(widened(flat(words, size // 2), I32(0), size).load().reshape((D // LANES, ROWS)))

    # R and Q: 2T sums, 8 at a time
    count = min(2 * T, LANES)
    x = cute.make_rmem_tensor((ROWS, 2 * T // count), F32)
    for part in cutlass.range_constexpr(2 * T // count):
        sums = cute.make_rmem_tensor((ROWS, count), F32)
        sums.fill(0.0)
        for c in cutlass.range_constexpr(D // (4 * LANES)):
            for j in cutlass.range_constexpr(count):
                which = part * count + (j ^ role)
                four = read_four(vectors, which * D + of_row * 4 + c * 4 * LANES)
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(4):
                        sums[r, j] += S[4 * c + e, r] * four[e]
        for r in cutlass.range_constexpr(ROWS):
            sum_by_halves(sums, count, r)
            x[r, part] = sums[r, 0]

    # u and o
    strength = strengths[role] if role < T else F32(0.0)
    of_v = widened(values, I32(0), ROWS)
    for r in cutlass.range_constexpr(ROWS):
        x[r, 0] += strength * of_v[r]
    u = cute.make_rmem_tensor((ROWS, T), F32)
    for i in cutlass.range_constexpr(T):
        for r in cutlass.range_constexpr(ROWS):
            u[r, i] = cute.arch.shuffle_sync(x[r, 0], i, mask_and_clamp=SEGMENT)
        for part in cutlass.range_constexpr(2 * T // count):
            m = mix[(part * count + role) * T + i]
            for r in cutlass.range_constexpr(ROWS):
                x[r, part] += m * u[r, i]
    token = of_row if cutlass.const_expr(2 * T > LANES) else of_row - T
    if token >= 0 and token < tokens:
        out = cute.make_rmem_tensor((ROWS,), BF16)
        for r in cutlass.range_constexpr(ROWS):
            out[r] = x[r, 2 * T // count - 1].to(BF16)
        cute.autovec_copy(out, at_address(BF16, to + Int64(token * o_token) * 2, ROWS, 8))

    # The state after the last token
    if (flags & COMMIT) != 0:
        for c in cutlass.range_constexpr(D // (4 * LANES)):
            decay = read_four(writes, T * D + of_row * 4 + c * 4 * LANES)
            for r in cutlass.range_constexpr(ROWS):
                for e in cutlass.range_constexpr(4):
                    S[4 * c + e, r] *= decay[e]
            for i in cutlass.range_constexpr(T):
                four = read_four(writes, i * D + of_row * 4 + c * 4 * LANES)
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(4):
                        S[4 * c + e, r] += u[r, i] * four[e]
        stored.store(S.load().to(pool_type).reshape((per_load, loads, ROWS)))
        cute.autovec_copy(stored, gS)


# What has no state in it


def jobs(T: int) -> int:
    """Tokens of a warp where a block has the fewest warps (`min_warps`): warp w has tokens w, w + warps, ..."""
    return T // min_warps(T)


def min_warps(T: int) -> int:
    return min((T + 1) // 2, 4)


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
    """k, q and g of every token that is the warp's, four channels a lane; b; the gate's parameters. As they come, 0 if they do not."""
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
            cute.autovec_copy(at_address(I32, at_k, 2, 8), of_k)
            cute.autovec_copy(at_address(I32, at_q, 2, 8), of_q)
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
                of_gate[0] = at_address(F32, A_log + Int64(hv * A_head) * 4, 1)[0]
            if dt_bias != 0:
                for e in cutlass.range_constexpr(4):
                    at = Int64(hv * bias[0] + (channel + e) * bias[1])
                    of_gate[1 + e] = at_address(F32, dt_bias + at * 4, 1)[0]
        else:
            of_gate[0] = at_address(F32, decay + Int64(hv * decay_head) * 4, 1)[0]
    return found, of_gate


@cute.jit
def prepare(
    raw: cutlass.Constexpr,
    factors: tuple,
    tokens: I32,
    flags: I32,
    T: cutlass.Constexpr,
    pool_type: cutlass.Constexpr,
    wid: I32,
    lane: I32,
    tables: cutlass.Constexpr,
):
    """Fill the tables; ends with a barrier."""
    found, of_gate = raw
    scale, lower, beta_top = factors
    vectors, writes, mix, strengths, kept = tables
    threads, _, _ = cute.arch.block_dim()
    place = place_of(lane, pool_type)
    kda = F32(1.0) if (flags & IS_KDA) != 0 else F32(0.0)

    for job in cutlass.range_constexpr(jobs(T)):
        t = wid + job * (threads // 32)
        of_k, of_q, of_g, of_b = found[job]
        if t < T:
            rk, rq = widened(of_k, I32(0), 4), widened(of_q, I32(0), 4)
            unit(rk, rq, scale, flags)
            rg, b = cute.make_rmem_tensor((4,), F32), F32(0.0)
            rg.fill(0.0)
            if t < tokens:
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
            if cutlass.const_expr(T > 1):
                for j, part in enumerate((rk, rq, rg)):
                    cute.autovec_copy(part, four_at(kept, (j * T + t) * D + place))
            else:
                decay, key, query = [cute.make_rmem_tensor((4,), F32) for _ in range(3)]
                for e in cutlass.range_constexpr(4):
                    decay[e] = cute.math.exp2(rg[e], fastmath=True)
                for e in cutlass.range_constexpr(4):
                    key[e], query[e] = (-b * kda) * (rk[e] * decay[e]), rq[e] * decay[e]
                kq = sum_of_warp(dot_of_four(rk, rq))
                for part, to, at in ((key, vectors, 0), (query, vectors, 1), (rk, writes, 0), (decay, writes, 1)):
                    cute.autovec_copy(part, four_at(to, at * D + place))
                if lane == 0:
                    mix[0], mix[1] = F32(0.0), kq
            if lane == 0:
                strengths[t] = b
    cute.arch.sync_threads()

    if cutlass.const_expr(T > 1):
        for i in cutlass.range(wid, T, threads // 32, unroll=1):
            column(i, T, kda, lane, place, tables)
        cute.arch.sync_threads()


def place_of(lane: Any, pool_type: Any) -> Any:
    """Where channels 4 lane .. 4 lane + 3 are in a table. A lane of a row reads 16 bytes of a pool at a time: four channels of
    float32, eight of bfloat16. The first four of all lanes come first, then the others."""
    if pool_type.width == 32:
        return lane * 4
    return (lane // 16 * 2 + lane % 2) * (4 * LANES) + lane // 2 % LANES * 4


@cute.jit
def column(i: I32, T: cutlass.Constexpr, kda: F32, lane: I32, place: I32, tables: cutlass.Constexpr):
    """Token i's vectors and its column of `mix`."""
    vectors, writes, mix, strengths, kept = tables
    b = strengths[i] * kda
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
    cute.autovec_copy(decayed, four_at(writes, i * D + place))
    for e in cutlass.range_constexpr(4):
        decay[e] = cute.math.exp2(until[e], fastmath=True)
        key[e] = -b * key[e] * decay[e]
        query[e] = query[e] * decay[e]
    cute.autovec_copy(key, four_at(vectors, i * D + place))
    cute.autovec_copy(query, four_at(vectors, (T + i) * D + place))
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


# The launch


@cute.jit
def decode_host(
    q: Int64,
    k: Int64,
    v: Int64,
    pool: Int64,
    indices: Int64,
    g: Int64,
    beta: Int64,
    A_log: Int64,
    dt_bias: Int64,
    decay: Int64,
    o: Int64,
    q_row: Int64,
    k_row: Int64,
    v_row: Int64,
    o_row: Int64,
    g_row: Int64,
    beta_row: Int64,
    slot_stride: Int64,
    index_stride: Int64,
    q_token: I32,
    q_head: I32,
    k_token: I32,
    k_head: I32,
    v_token: I32,
    v_head: I32,
    o_token: I32,
    o_head: I32,
    g_token: I32,
    g_head: I32,
    beta_token: I32,
    beta_head: I32,
    A_head: I32,
    bias_head: I32,
    bias_channel: I32,
    decay_head: I32,
    scale: F32,
    lower: F32,
    beta_top: F32,
    N: I32,
    HV: I32,
    group: I32,
    tokens: I32,
    flags: I32,
    warps: I32,
    stream,
    T: cutlass.Constexpr,
    pool_type: cutlass.Constexpr,
):
    """Addresses, 0 for what is absent, then strides in elements: numbers only, because to hand over a tensor costs the caller
    microseconds. `beta_top` is 0 for a beta that is activated already, `group` HV / H, `tokens` at most T."""
    decode_kernel(
        (q, k, v, pool, indices, g, beta, A_log, dt_bias, decay, o),
        (q_row, k_row, v_row, o_row, g_row, beta_row, slot_stride, index_stride),
        (
            (q_token, q_head),
            (k_token, k_head),
            (v_token, v_head),
            (o_token, o_head),
            (g_token, g_head),
            (beta_token, beta_head),
            A_head,
            (bias_head, bias_channel),
            decay_head,
        ),
        (scale, lower, beta_top),
        tokens,
        group,
        flags,
        T,
        pool_type,
    ).launch(
        grid=(MAX_WARPS // warps, HV, N),
        block=(32 * warps, 1, 1),
        max_number_threads=(32 * MAX_WARPS, 1, 1),
        min_blocks_per_mp=1 if cutlass.const_expr(T == 8) else 2,
        preferred_smem_carveout=50,
        stream=stream,
    )


TOKENS = (1, 2, 4, 8)  # that are compiled; a call of another number takes the next


def variants() -> Iterator[Variant]:
    """`decode_<tokens>_<states>`"""
    for T in TOKENS:
        for name, pool_type in (("f32", F32), ("bf16", BF16)):
            strides = (*(Int64(8) for _ in range(8)), *(I32(8) for _ in range(16)))
            numbers = (F32(1.0), F32(-5.0), F32(1.0), *(I32(1) for _ in range(6)))
            arguments = (*(Int64(0) for _ in range(11)), *strides, *numbers, make_fake_stream(), T, pool_type)
            yield Variant(f"decode_{T}_{name}", decode_host, arguments)
