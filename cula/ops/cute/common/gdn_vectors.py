# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: gates and write strengths of a chunk, as vectors in shared memory, one behind the other.

    G = cumsum of log2 decays     f = 2^G     r = 2^(G_C - G), summed from the end: no difference of large numbers     b

Two warps write them, or one, of which lane l has tokens 2 l and 2 l + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.core.constants import LOG2_E
from cula.ops.cute.common.fragments import shared_at
from cula.ops.cute.common.gate import exp2, log2, sigmoid, to_log2
from cula.ops.cute.common.gdn_items import number_in, word_at
from cula.ops.cute.common.tiles import F32, I32

# A chunk's vectors, one behind the other: log2 decays summed up, their powers, factors of E in the state and in P; all its decay.
SUM, POWER, INTO_STATE, STRENGTH, DECAY, VECTORS = 0, 64, 128, 192, 256, 264
VECTOR_STAGES = 8  # of chunks: so many that those of a chunk ahead need not wait
GONE = -128.0  # log2 of a token's decay; what is faster is 0 in float32 all the same, and sums of it keep their digits


class Ahead(NamedTuple):
    """What the vectors of a head's next chunk are made from."""

    gates: Any
    scalars: Any
    raw_g: Any  # [2], of the next chunk, which is on its way
    raw_b: Any
    a: Any  # of the gate
    bias: Any
    plan: Any


@cute.jit
def gate_of(gates: cutlass.Constexpr, scalars: cutlass.Constexpr, hv: I32):
    """e^A_log and the bias of a head."""
    a, bias = F32(0.0), F32(0.0)
    if scalars.has_gate == 1:
        a, bias = cute.math.exp2(to_log2(gates.A_log[hv])), gates.dt_bias[hv]
    return a, bias


@cute.jit
def token_of(plan: cutlass.Constexpr, chunk: I32, i: cutlass.Constexpr):
    return plan.begin + cutlass.min(chunk * 64 + 2 * cute.arch.lane_idx() + i, plan.tokens - 1)


@cute.jit
def read_words(m: cutlass.Constexpr, words: cute.Tensor, plan: cutlass.Constexpr, chunk: I32):
    """The words that numbers of our two tokens of a chunk are in; nobody waits for them yet."""
    for i in cutlass.range_constexpr(2):
        words[i] = word_at(m, token_of(plan, chunk, i), plan.hv)


@cute.jit
def softplus2(x: F32):
    """log2(1 + e^x). Its tail, log2(1 + y), by a series where 1 + y would lose digits of y: slow gates are made of it."""
    y = exp2(cute.arch.fmax(x, -x) * F32(-LOG2_E))
    series = y * (F32(1.0) - y * (F32(0.5) - y * (F32(1.0 / 3.0) - y * (F32(0.25) - y * F32(0.2)))))
    tail = to_log2(series) if y < F32(0.06) else log2(F32(1.0) + y)
    return to_log2(cute.arch.fmax(x, F32(0.0))) + tail


@cute.jit
def log_decays(m: cutlass.Constexpr, words: cute.Tensor, plan: cutlass.Constexpr, chunk: I32, has_gate: I32, a: F32, bias: F32):
    """log2 decays of our two tokens of a chunk; zero past the end."""
    x, left = cute.make_rmem_tensor((2,), F32), plan.tokens - chunk * 64
    for i in cutlass.range_constexpr(2):
        number = number_in(words[i], m, token_of(plan, chunk, i), plan.hv)
        x[i] = to_log2(number)
        if has_gate == 1:
            x[i] = -a * softplus2(number + bias)
        x[i] = cute.arch.fmax(x[i], F32(GONE)) if 2 * cute.arch.lane_idx() + i < left else F32(0.0)
    return x


@cute.jit
def scan(x: F32, is_forward: cutlass.Constexpr):
    """The sum of the lanes before this one, or of those behind it."""
    lane, total = cute.arch.lane_idx(), x
    for step in cutlass.range_constexpr(5):
        by = 1 << step if cutlass.const_expr(is_forward) else -(1 << step)
        other = cute.arch.shuffle_sync(total, (lane - by) & 31)
        total += other if lane - by >= 0 and lane - by < 32 else F32(0.0)
    by = 1 if cutlass.const_expr(is_forward) else -1
    other = cute.arch.shuffle_sync(total, (lane - by) & 31)
    return other if lane - by >= 0 and lane - by < 32 else F32(0.0)


@cute.jit
def read_ahead(ahead: cutlass.Constexpr, chunk: I32, wid: I32):
    """What the warps that write vectors need of a chunk."""
    if wid >= 2:
        read_numbers(ahead, chunk)


@cute.jit
def read_numbers(ahead: cutlass.Constexpr, chunk: I32):
    """The same, by any warp."""
    read_words(ahead.gates.g, ahead.raw_g, ahead.plan, chunk)
    read_words(ahead.gates.beta, ahead.raw_b, ahead.plan, chunk)


@cute.jit
def write_vectors(ahead: cutlass.Constexpr, vectors: cute.Tensor, chunk: I32, n: I32, wid: I32):
    """Of a chunk, the n-th of the block. Warp 2: G, f, and the decay of the whole chunk. Warp 3: r b and b."""
    if wid >= 2:
        write_half_of_vectors(ahead, vectors, chunk, n, wid - 2)


@cute.jit
def write_half_of_vectors(ahead: cutlass.Constexpr, vectors: cute.Tensor, chunk: I32, n: I32, half: I32):
    """The one or the other, by any warp."""
    x = log_decays(ahead.gates.g, ahead.raw_g, ahead.plan, chunk, ahead.scalars.has_gate, ahead.a, ahead.bias)
    if half == 0:
        write_sums(vectors, n & 7, x)
    else:
        write_strengths(ahead, vectors, n & 7, x, chunk)


@cute.jit
def write_all_vectors(ahead: cutlass.Constexpr, vectors: cute.Tensor, chunk: I32, n: I32):
    """The same by one warp."""
    x = log_decays(ahead.gates.g, ahead.raw_g, ahead.plan, chunk, ahead.scalars.has_gate, ahead.a, ahead.bias)
    write_sums(vectors, n & 7, x)
    write_strengths(ahead, vectors, n & 7, x, chunk)


@cute.jit
def write_sums(vectors: cute.Tensor, place: I32, x: cute.Tensor):
    """G, f, and the decay of the whole chunk."""
    lane, total = cute.arch.lane_idx(), scan(x[0] + x[1], True)
    for i in cutlass.range_constexpr(2):
        total += x[i]
        vectors[SUM + 2 * lane + i, place] = total
        vectors[POWER + 2 * lane + i, place] = exp2(total)
    if lane == 31:
        vectors[DECAY, place] = exp2(total)


@cute.jit
def write_strengths(ahead: cutlass.Constexpr, vectors: cute.Tensor, place: I32, x: cute.Tensor, chunk: I32):
    """r b and b."""
    lane, left = cute.arch.lane_idx(), ahead.plan.tokens - chunk * 64
    after, beta_top = scan(x[0] + x[1], False), ahead.scalars.beta_top
    for i in cutlass.range_constexpr(1, -1, -1):
        b = number_in(ahead.raw_b[i], ahead.gates.beta, token_of(ahead.plan, chunk, i), ahead.plan.hv)
        if beta_top > F32(0.0):  # beta is raw
            b = beta_top * sigmoid(b)
        b = b if 2 * lane + i < left else F32(0.0)
        vectors[STRENGTH + 2 * lane + i, place] = b
        vectors[INTO_STATE + 2 * lane + i, place] = b * exp2(after)
        after += x[i]


@cute.jit
def read_pairs(vectors: cute.Tensor, which: cutlass.Constexpr, place: I32, c: I32, n: cutlass.Constexpr = 8):
    """One of a chunk's vectors at the tokens of this thread's columns, 8 j + 2 c and + 1, for j < n."""
    out = cute.make_rmem_tensor((2 * n,), F32)
    at = I32(vectors.iterator.toint()) + 4 * (place * VECTORS + which + 2 * c)
    for j in cutlass.range_constexpr(n):
        cute.autovec_copy(shared_at(at + 32 * j, F32, 2, 8), cute.make_tensor(out.iterator + 2 * j, cute.make_layout((2, 1))))
    return out


@cute.jit
def read_vector(vectors: cute.Tensor, which: cutlass.Constexpr, place: I32, n: cutlass.Constexpr):
    """n values of a chunk's vectors from number `which` on, a multiple of four."""
    out, at = cute.make_rmem_tensor((n,), F32), I32(vectors.iterator.toint()) + 4 * (place * VECTORS + which)
    for j in cutlass.range_constexpr(0, n, 4):
        cute.autovec_copy(shared_at(at + 4 * j, F32, 4, 16), cute.make_tensor(out.iterator + j, cute.make_layout((4, 1))))
    return out
