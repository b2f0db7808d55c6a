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

from typing import Any

import cutlass
import cutlass.cute as cute

from cula.core.constants import L2_NORM_EPS, LOG2_E
from cula.ops.cute.common.fragments import flat, widen
from cula.ops.cute.common.tiles import BF16, F16, F32

NO_DECAY = -1e37  # 1 / g2 of a token that decays nothing


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


# Gates of many tokens and channels, log or bounded: what does not depend on the token is multiplied in beforehand


def bounded_slope(A_log: Any) -> Any:
    """-a log2(e), so that sigmoid(a x) = 1 / (1 + 2^(slope x)). The bias is to be multiplied by it too."""
    return F32(-LOG2_E) * cute.math.exp2(to_log2(A_log))


def bounded_unit(lower: Any) -> Any:
    """1 / `lower` in log2, so that g2 = 1 / (unit + unit 2^(slope x))."""
    return cutlass.max(F32(NO_DECAY), cute.arch.rcp_approx(to_log2(lower)))


@cute.jit
def gates_of_channels(
    raw: cute.Tensor,
    out: cute.Tensor,
    slope: F32,
    bias: cutlass.Constexpr,
    unit: cute.Tensor,
    top: cute.Tensor,
    is_bounded: cutlass.Constexpr,
    fastest: cutlass.Constexpr = None,
):
    """out <- g2, as fp16, of four tokens of each channel that `bias` has; `top` keeps the largest of each token.

    `unit` is that of each token: `bounded_unit`, or log2(e) for log gates. Decays faster than `fastest` are taken for it.
    """
    n = 4 * len(bias)
    x = cute.make_rmem_tensor((n,), F32)
    if cutlass.const_expr(raw.element_type is BF16):
        widen(raw, x)
    else:
        for e in cutlass.range_constexpr(n):
            x[e] = raw[e]
    if cutlass.const_expr(is_bounded):
        for e in cutlass.range_constexpr(n):
            x[e] = slope * x[e] + bias[e // 4]
        for e in cutlass.range_constexpr(n):
            x[e] = exp2(x[e])
        for e in cutlass.range_constexpr(n):
            x[e] = x[e] * unit[e % 4] + unit[e % 4]
        for e in cutlass.range_constexpr(n):
            x[e] = cute.arch.rcp_approx(x[e])
    else:
        for e in cutlass.range_constexpr(n):
            x[e] = x[e] * unit[e % 4]
    if cutlass.const_expr(fastest is not None):
        for e in cutlass.range_constexpr(n):
            x[e] = cute.arch.fmax(x[e], F32(fastest))
    for e in cutlass.range_constexpr(n):
        top[e % 4] = cute.arch.fmax(top[e % 4], x[e])
    flat(out, 0, n).store(x.load().to(F16))
