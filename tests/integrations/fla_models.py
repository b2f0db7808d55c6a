# SPDX-License-Identifier: Apache-2.0
"""Small models of flash-linear-attention, and its own definitions to compare them with."""

import contextlib
import functools
from unittest import mock

import torch
import torch.nn.functional as F

VOCABULARY = 97
SMALL = {
    "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "intermediate_size": 64, "num_heads": 2,
}  # fmt: skip
KDA = {"head_dim": 16, "expand_v": 1.5}
MODELS = {
    "kda": ("KDA", KDA),
    "kda-gva": ("KDA", KDA | {"num_v_heads": 4}),
    "kda-safe-gate": ("KDA", KDA | {"safe_gate": True, "lower_bound": -5.0}),
    "kda-negative-eigenvalues": ("KDA", KDA | {"allow_neg_eigval": True}),
    "gdn": ("GatedDeltaNet", {"head_dim": 16, "num_v_heads": 4, "expand_v": 2}),
    "retnet": ("RetNet", {"expand_k": 1, "expand_v": 2, "fuse_cross_entropy": False}),
}


@functools.cache
def model(name):
    """One model a process; gradients are cleared by whoever asks for them."""
    import fla.models

    kind, options = MODELS[name]
    config = getattr(fla.models, f"{kind}Config")(**SMALL, **options)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = getattr(fla.models, f"{kind}ForCausalLM")(config)
        with torch.no_grad():  # untrained weights say little: let the layers matter
            for parameter in made.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(4)
    return made


def tokens(*shape, seed=0):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def _normalized(x, switches):
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) if switches.get("use_qk_l2norm_in_kernel") else x


def _beta(beta, switches):
    if not switches.get("use_beta_sigmoid_in_kernel"):
        return beta
    return beta.sigmoid() * (2 if switches.get("allow_neg_eigval") else 1)


def naive_kda(q, k, v, g, beta, *, A_log, dt_bias, lower_bound=None, **switches):
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    assert switches["use_gate_in_kernel"] and switches.get("initial_state") is None and switches.get("cu_seqlens") is None
    g = naive_kda_gate(g, A_log, dt_bias) if lower_bound is None else naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)
    return naive_recurrent_kda(_normalized(q, switches), _normalized(k, switches), v, g, _beta(beta, switches))


def naive_gdn(q, k, v, g, beta, *, A_log, dt_bias, **switches):
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    assert switches["use_gate_in_kernel"] and switches.get("initial_state") is None and switches.get("cu_seqlens") is None
    g = -A_log.exp() * F.softplus(g + dt_bias)
    q, k = (_normalized(x, switches).repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return naive_recurrent_gated_delta_rule(q, k, v, _beta(beta, switches), g)


def naive_retention(q, k, v, **switches):
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    assert switches.get("initial_state") is None and switches.get("cu_seqlens") is None
    gamma = torch.log(1 - 2.0 ** (-5 - torch.arange(q.shape[2])))
    return naive_recurrent_simple_gla(q, k, v, gamma.expand(q.shape[:3]))[:2]


@contextlib.contextmanager
def definitions():
    """FLA's layers call FLA's definitions (token by token, float32, no cache), not what is dispatched."""
    with contextlib.ExitStack() as stack:
        for module, names, naive in (
            ("kda", ("chunk_kda", "fused_recurrent_kda"), naive_kda),
            ("gated_deltanet", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), naive_gdn),
            ("multiscale_retention", ("chunk_retention", "fused_recurrent_retention"), naive_retention),
        ):
            for name in names:
                stack.enter_context(mock.patch(f"fla.layers.{module}.{name}", naive))
        yield
