# SPDX-License-Identifier: Apache-2.0
"""Small models of Hugging Face transformers with random weights, and transformers' own torch functions to compare with."""

import contextlib
import functools
import importlib
import inspect

import torch

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GDN = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SOFTMAX = {"num_key_value_heads": 2, "head_dim": 12}
KDA = {"linear_head_dim": 16, "linear_num_heads": 4}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {  # file, model, configuration, options
    "qwen3-next": (
        "qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig",
        GDN | SOFTMAX | EXPERTS | {"shared_expert_intermediate_size": 16},
    ),
    "qwen3.5": ("qwen3_5", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", GDN | SOFTMAX),
    "kimi-linear": (
        "kimi_linear", "KimiLinearForCausalLM", "KimiLinearConfig",
        KDA | LATENT | {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "num_hidden_layers": 5},
    ),
    "minimax": (
        "minimax", "MiniMaxForCausalLM", "MiniMaxConfig",
        SOFTMAX | {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 32, "num_hidden_layers": 4},
    ),
    "olmo-hybrid": ("olmo_hybrid", "OlmoHybridForCausalLM", "OlmoHybridConfig", GDN | {"num_key_value_heads": 2}),
    "ling-3.0": (
        "bailing_hybrid", "BailingHybridForCausalLM", "BailingHybridConfig",
        KDA | LATENT | {
            "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "num_expert_group": 1, "topk_group": 1,
            "head_dim": 8, "layer_group_size": 4,
        },
    ),
}  # fmt: skip
MODELS["glm-5.3-flash"] = (
    "glm5_next", "Glm5NextTextModel", "Glm5NextTextConfig",
    KDA | LATENT | {
        "qk_rope_head_dim": 0, "q_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "index_head_dim": 8, "index_n_heads": 2, "index_topk": 128, "hc_mult": 2, "num_hidden_layers": 4,
    },
)  # fmt: skip
NAMES = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention",
)  # fmt: skip


@functools.cache
def model(name):
    """One model a process; gradients are cleared by whoever asks for them."""
    import transformers

    transformers.logging.set_verbosity_error()
    _, kind, config, options = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        made = getattr(transformers, kind)(getattr(transformers, config)(**SMALL | options))
        with torch.no_grad():
            for parameter_name, parameter in made.named_parameters():
                if "A_log" in parameter_name or "dt_bias" in parameter_name:
                    parameter.copy_(torch.rand_like(parameter))
                elif parameter.dim() >= 2:  # untrained weights say little: let the layers matter
                    parameter.mul_(4)
    return made.eval()


def modeling(name):
    file = MODELS[name][0]
    return importlib.import_module(f"transformers.models.{file}.modeling_{file}")


def tokens(*shape, seed=0):
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def torch_functions(name):
    """transformers' layers call its own torch functions, whatever is installed."""
    module = modeling(name)
    before = {n: module.__dict__[n] for n in NAMES if n in module.__dict__}
    for n, decorated in before.items():
        if not inspect.isfunction(decorated):  # the `kernels` package makes a module of the function
            decorated = inspect.getclosurevars(type(decorated).forward).nonlocals["func"]
        setattr(module, n, inspect.unwrap(decorated))
    try:
        yield
    finally:
        for n, decorated in before.items():
            setattr(module, n, decorated)
