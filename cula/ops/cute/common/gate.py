# SPDX-License-Identifier: Apache-2.0
"""Activations and norms of the device code, each formula once.

A gate g is a log decay: a state's channel is multiplied by e^g at each token. Kernels have it in log2, g2 = g log2(e), because
exp2 is what the hardware computes. From a raw value x, which has its bias already, and a = e^{A_log}:

    log        g = x                      the caller has activated it
    bounded    g = lower sigmoid(a x)     between `lower` and 0
    softplus   g = -a softplus(x)         no bound

Functions of tensors go through the values stage by stage, not value by value, so that the latencies of one are hidden by the
others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute

from cula.core.constants import L2_NORM_EPS, LOG2_E
from cula.ops.cute.common.fragments import flat, widen
from cula.ops.cute.common.tiles import BF16, F16, F32

NO_DECAY = -1e37  # 1 / g2 of a token that decays nothing
# log2(1 + e) / e for e from 0 to 1, in powers of e: the polynomial with the least relative error, 5.7e-5.
LOG2_ONE_PLUS = (1.442613211, -0.716987441, 0.441898888, -0.227119483, 0.059651545)


def to_log2(x: Any) -> Any:
    """A natural logarithm as one of base 2."""
    return x * F32(LOG2_E)


def exp2(x: Any) -> Any:
    """2^x by one instruction; results below 2^-126 are zero."""
    return cute.math.exp2(x, fastmath=True)


def log2(x: Any) -> Any:
    return cute.math.log2(x, fastmath=True)


def sigmoid(x: Any) -> Any:
    return cute.arch.rcp_approx(F32(1.0) + exp2(x * F32(-LOG2_E)))


def inverse_norm(square: Any) -> Any:
    """1 / |x| of a key or query whose elements' squares sum up to `square`."""
    return cute.math.rsqrt(square + F32(L2_NORM_EPS), fastmath=True)


# Gates one by one, for any kind of them: x <- g2


@cute.jit
def log_gate(x: cute.Tensor):
    for t in cutlass.range_constexpr(cute.size(x)):
        x[t] = to_log2(x[t])


@cute.jit
def bounded_gate(x: cute.Tensor, a: F32, lower: F32):
    for t in cutlass.range_constexpr(cute.size(x)):
        x[t] = exp2(x[t] * (a * F32(-LOG2_E)))
    for t in cutlass.range_constexpr(cute.size(x)):
        x[t] = to_log2(lower) * cute.arch.rcp_approx(F32(1.0) + x[t])


@cute.jit
def softplus_gate(x: cute.Tensor, a: F32):
    """By log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), which holds everywhere."""
    for t in cutlass.range_constexpr(cute.size(x)):
        size = cute.arch.fmax(x[t], -x[t])
        tail = log2(F32(1.0) + exp2(size * F32(-LOG2_E)))
        x[t] = -a * (to_log2(cute.arch.fmax(x[t], F32(0.0))) + tail)


# Gates of many tokens and channels: what does not depend on the token is multiplied in beforehand


def slope_of(A_log: Any, is_bounded: bool) -> Any:
    """What raw gates, and their bias, are multiplied by: -a log2(e) of a bounded gate, so that
    sigmoid(a x) = 1 / (1 + 2^(slope x)); log2(e) of a softplus gate."""
    return F32(-LOG2_E) * cute.math.exp2(to_log2(A_log)) if is_bounded else F32(LOG2_E)


def bounded_unit(lower: Any) -> Any:
    """1 / `lower` in log2, so that g2 = 1 / (unit + unit 2^(slope x))."""
    return cutlass.max(F32(NO_DECAY), cute.arch.rcp_approx(to_log2(lower)))


def softplus_unit(A_log: Any) -> Any:
    """-a, so that g2 = unit softplus2(y), where softplus2(y) = log2(1 + 2^y) and y = log2(e) x."""
    return -cute.math.exp2(to_log2(A_log))


def multiply(x: Any, factors: Any, which: Callable[[int], int], has_pairs: bool) -> None:
    """x[e] <- x[e] factors[which(e)]; in pairs, where there is an instruction for them."""
    n = cute.size(x)
    if has_pairs:
        y = cute.make_rmem_tensor((n,), F32)
        for e in range(n):
            y[e] = factors[which(e)]
        x.store(x.load() * y.load())
    else:
        for e in range(n):
            x[e] = x[e] * factors[which(e)]


def multiply_add(x: Any, factor: Callable[[int], Any], plus: Callable[[int], Any], has_pairs: bool) -> None:
    """x[e] <- x[e] factor(e) + plus(e); in pairs, where there is an instruction for them."""
    n = cute.size(x)
    if has_pairs:
        y, z = cute.make_rmem_tensor((n,), F32), cute.make_rmem_tensor((n,), F32)
        for e in range(n):
            y[e], z[e] = factor(e), plus(e)
        x.store(x.load() * y.load() + z.load())
    else:
        for e in range(n):
            x[e] = x[e] * factor(e) + plus(e)


@cute.jit
def softplus2(y: cute.Tensor, has_pairs: cutlass.Constexpr = False):
    """y <- log2(1 + 2^y) = max(y, 0) + log2(1 + e), e = 2^-|y|; the latter is e times a polynomial in e, to 6e-5 of itself
    however small e is, where log2 of the rounded 1 + e would lose what slow gates are made of."""
    n = cute.size(y)
    e, p = cute.make_rmem_tensor((n,), F32), cute.make_rmem_tensor((n,), F32)
    for i in cutlass.range_constexpr(n):
        e[i] = exp2(-cute.math.absf(y[i]))
    p.fill(LOG2_ONE_PLUS[-1])
    for coefficient in LOG2_ONE_PLUS[-2::-1]:
        multiply_add(p, lambda i: e[i], lambda i, c=coefficient: F32(c), has_pairs)
    if cutlass.const_expr(has_pairs):
        multiply_add(p, lambda i: e[i], lambda i: cute.arch.fmax(y[i], F32(0.0)), has_pairs)
        y.store(p.load())
    else:
        for i in cutlass.range_constexpr(n):
            y[i] = p[i] * e[i] + cute.arch.fmax(y[i], F32(0.0))


@cute.jit
def gates_of_channels(
    raw: cute.Tensor,
    out: cute.Tensor,
    slope: F32,
    bias: cutlass.Constexpr,
    unit: cute.Tensor,
    gate: cutlass.Constexpr,
    fastest: cutlass.Constexpr = None,
    has_pairs: cutlass.Constexpr = False,
):
    """out <- g2, as fp16, of four tokens of each channel that `bias` has.

    `unit` is that of each token: `bounded_unit`, `softplus_unit`, or log2(e) for log gates. Decays faster than `fastest` are
    taken for it; NaN stays NaN. `has_pairs`: there are instructions for two numbers at once.
    """
    n = 4 * len(bias)
    x = cute.make_rmem_tensor((n,), F32)
    if cutlass.const_expr(raw.element_type is BF16):
        widen(raw, x)
    else:
        for e in cutlass.range_constexpr(n):
            x[e] = raw[e]
    if cutlass.const_expr(gate in ("gate", "softplus")):
        multiply_add(x, lambda e: slope, lambda e: bias[e // 4], has_pairs)
    if cutlass.const_expr(gate == "gate"):
        for e in cutlass.range_constexpr(n):
            x[e] = exp2(x[e])
        multiply_add(x, lambda e: unit[e % 4], lambda e: unit[e % 4], has_pairs)
        for e in cutlass.range_constexpr(n):
            x[e] = cute.arch.rcp_approx(x[e])
    else:
        if cutlass.const_expr(gate == "softplus"):
            softplus2(x, has_pairs)
        multiply(x, unit, lambda e: e % 4, has_pairs)
    if cutlass.const_expr(fastest is not None):
        for e in cutlass.range_constexpr(n):
            x[e] = cute.arch.fmax(x[e], F32(fastest), nan=True)
    flat(out, 0, n).store(x.load().to(F16))
