# SPDX-License-Identifier: Apache-2.0
"""From raw inputs to what the recurrence eats: log decay, beta, normalised q and k. Each formula beside its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.core.constants import L2_NORM_EPS

MIN_LOG_DECAY = -111.0  # e^-111 is zero in float32; -inf is no stronger


def l2_normalise(x: Tensor) -> tuple[Tensor, Tensor]:
    """y = x r with r = (sum x^2 + eps)^-1/2 over the last dimension; returns (y, r)."""
    r = torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_NORM_EPS)
    return x * r, r


def l2_normalise_bwd(y: Tensor, r: Tensor, dy: Tensor) -> Tensor:
    """dx = r (dy - y <dy, y>): rescaling x does not change y (up to eps, which <y, y> < 1 accounts for)."""
    return r * (dy - y * (dy * y).sum(-1, keepdim=True))


def log_decay(gate: str, g: Tensor, A: Tensor | None, bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The log decay of a token and channel. `A` = exp(A_log) and `bias` broadcast against g."""
    if gate == "log":
        return g
    z = g if bias is None else g + bias
    if gate == "softplus":
        assert A is not None
        return -A * torch.nn.functional.softplus(z)
    assert lower_bound is not None
    return lower_bound * torch.sigmoid(z if A is None else A * z)


def summable(g: Tensor) -> Tensor:
    """Log decays whose sums over tokens keep the digits of small ones: what is stronger than this is zero in float32 anyhow."""
    return g.clamp_min(MIN_LOG_DECAY)


def log_decay_bwd(
    gate: str, g: Tensor, A: Tensor | None, bias: Tensor | None, lower_bound: float | None, d: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(dz, dA_log) from d = the gradient of the log decay; dz is the gradient of g and of dt_bias. Both unreduced."""
    if gate == "log":
        return d, None
    z = g if bias is None else g + bias
    if gate == "softplus":
        assert A is not None
        return -A * torch.sigmoid(z) * d, -A * torch.nn.functional.softplus(z) * d
    assert lower_bound is not None
    s = torch.sigmoid(z if A is None else A * z)
    dy = d * (lower_bound * s * (1 - s))  # gradient of A z
    return (dy, None) if A is None else (dy * A, dy * A * z)


def beta_value(beta: Tensor, use_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    if not use_sigmoid:
        return beta
    return torch.sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)


def beta_value_bwd(beta: Tensor, use_sigmoid: bool, allow_neg_eigval: bool, d: Tensor) -> Tensor:
    if not use_sigmoid:
        return d
    s = torch.sigmoid(beta)
    return d * s * (1 - s) * (2.0 if allow_neg_eigval else 1.0)
