# SPDX-License-Identifier: Apache-2.0
"""The formulas of a token, forward and backward: the decay that a gate makes, beta's activation, the norm of q and k.

    gate "log"        g itself is the log decay
    gate "softplus"   -exp(A_log) softplus(g + dt_bias)
    gate "bounded"    lower_bound sigmoid(exp(A_log) (g + dt_bias))

All kernels of this backend take them from here. Decays are in log2 units, so that each costs a single ex2.
"""

import triton
import triton.language as tl

from cula.core import constants

LOG2_E = tl.constexpr(constants.LOG2_E)
L2_NORM_EPS = tl.constexpr(constants.L2_NORM_EPS)
SOFTPLUS_THRESHOLD = tl.constexpr(constants.SOFTPLUS_THRESHOLD)
# 2^-160 is zero in float32: a stronger decay forgets no more, but would swamp the running sum (-inf included).
MIN_LOG2 = tl.constexpr(-160.0)


@triton.jit
def sigmoid(b_x):
    """1 / (1 + e^-x), by a reciprocal root and its square: a division checks ranges that cannot occur."""
    b_r = tl.rsqrt(1.0 + tl.exp2(-LOG2_E * b_x))
    return b_r * b_r


@triton.jit
def softplus(b_x):
    """log(1 + e^x), accurate for small e^x too; x itself beyond the threshold, where e^x would overflow."""
    b_e = tl.exp(tl.minimum(b_x, SOFTPLUS_THRESHOLD))
    b_log1p = tl.where(b_e < 0.01, b_e * (1.0 - b_e * (0.5 - b_e * 0.33333333)), tl.log(1.0 + b_e))
    return tl.where(b_x > SOFTPLUS_THRESHOLD, b_x, b_log1p)


@triton.jit
def gate_strength(A_log, i_h):
    """exp(A_log) of a head; 1 where there is no A_log."""
    a = 1.0
    if A_log is not None:
        a = tl.exp(tl.load(A_log + i_h).to(tl.float32))
    return a


@triton.jit
def log2_decay(b_x, a, lower_bound, GATE: tl.constexpr):
    """log2 of the decay. b_x is the log decay (GATE "log"), or raw g + dt_bias; a = exp(A_log)."""
    if GATE == "softplus":
        b_g = -a * softplus(b_x)
    elif GATE == "bounded":
        b_g = lower_bound * sigmoid(a * b_x)
    else:
        b_g = b_x
    return b_g * LOG2_E


@triton.jit
def summable_log2_decay(b_x, a, lower_bound, GATE: tl.constexpr):
    """`log2_decay`, with a bound that keeps sums over tokens finite."""
    return tl.maximum(log2_decay(b_x, a, lower_bound, GATE), MIN_LOG2)


@triton.jit
def gate_grad(b_dg, b_x, a, lower_bound, GATE: tl.constexpr):
    """From the gradient of the natural log decay: the gradient of raw g (and dt_bias), and each token's share of dA_log."""
    if GATE == "softplus":
        b_dx = -a * sigmoid(b_x) * b_dg
        b_da = b_dg * summable_log2_decay(b_x, a, lower_bound, GATE) / LOG2_E
    elif GATE == "bounded":
        b_s = sigmoid(a * b_x)
        b_dx = lower_bound * a * b_s * (1.0 - b_s) * b_dg
        b_da = b_dx * b_x
    else:
        b_dx = b_dg
        b_da = b_dg * 0.0
    return b_dx, b_da


@triton.jit
def activate_beta(b_beta, SIGMOID: tl.constexpr, BETA_MAX: tl.constexpr):
    if SIGMOID:
        b_beta = BETA_MAX * tl.sigmoid(b_beta)
    return b_beta


@triton.jit
def beta_grad(b_db, b_beta, BETA_MAX: tl.constexpr):
    """Gradient of the raw beta from that of the activated one, which is b_beta."""
    return b_db * b_beta * (1.0 - b_beta / BETA_MAX)


@triton.jit
def inverse_norm(b_square):
    """1 / sqrt(sum x^2 + eps), given the sum."""
    return tl.rsqrt(b_square + L2_NORM_EPS)


@triton.jit
def norm_grad(b_dn, b_x):
    """Gradient of the rows of x from that of n = x r, r the inverse norm: r (dn - n (n . dn))."""
    b_r = inverse_norm(tl.sum(b_x * b_x, axis=1))
    b_n = b_x * b_r[:, None]
    return (b_dn - b_n * tl.sum(b_n * b_dn, axis=1)[:, None]) * b_r[:, None]
