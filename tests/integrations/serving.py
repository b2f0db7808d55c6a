# SPDX-License-Identifier: Apache-2.0
"""What tests of serving plug-ins share: pools with poisoned slots, tokens with raw gates, the definition."""

import torch
import torch.nn.functional as F

from cula import reference

H, HV, K, V, SLOTS = 2, 4, 16, 24, 9


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pool(used, page_major=False):
    """A pool whose slots are NaN but for those in use; with `page_major`, a view with a large slot stride."""
    states = torch.full((SLOTS, 2, HV, V, K) if page_major else (SLOTS, HV, V, K), float("nan"))
    states = states[:, 0] if page_major else states
    for slot in used:
        states[slot] = rand(HV, V, K, seed=100 + slot)
    return states


def parameters(mode):
    dt_bias = rand(HV, seed=8) if mode == "gdn" else rand(HV * K, seed=8)
    return {"A_log": rand(HV, seed=7), "dt_bias": dt_bias.bfloat16().float()}


def tokens(mode, T):
    q, k = rand(1, T, H, K, seed=1), rand(1, T, H, K, seed=2)
    a = rand(1, T, HV, seed=4) if mode == "gdn" else rand(1, T, HV, K, seed=4)
    return q, k, rand(1, T, HV, V, seed=3), a, rand(1, T, HV, seed=5)


def log_decay(mode, a, p, lower_bound=None):
    A, bias = p["A_log"].double().exp(), p["dt_bias"].double()
    A, bias = (A, bias) if mode == "gdn" else (A[:, None], bias.view(HV, K))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(A * (a.double() + bias))
    return -A * F.softplus(a.double() + bias)


def want(q, k, v, g, b, h0, at):
    """Tokens `at` of one sequence by the definition, from log decays and beta logits: o and the last state."""
    beta = b[:, at].double().sigmoid()
    o, state = reference.kda(
        q[:, at], k[:, at], v[:, at], g[:, at], beta, initial_state=h0, use_qk_l2norm_in_kernel=True
    )  # fmt: skip
    return o, state[0]
