# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models with linear attention, without cuLA and with it: the same tokens, and how fast.

    python examples/hf_generate.py                 # small random models of Qwen3.5 and Kimi-Linear
    python examples/hf_generate.py --prompt 2048

Needs transformers (`pip install -e '.[models]'`). The line that matters is `cula.integrations.transformers.patch()`.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import torch

import cula.integrations

if not torch.cuda.is_available():
    sys.modules["fla"] = None  # type: ignore[assignment]  # FLA's kernels need a GPU; transformers has its own torch functions, too

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def models() -> dict[str, torch.nn.Module]:
    """Two small models with random weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    gdn = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    qwen = transformers.Qwen3_5TextConfig(**SIZES, **TOKENS, **gdn, head_dim=64, num_hidden_layers=4)
    kda = {"linear_head_dim": 64, "linear_num_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 128}
    latent = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
    kimi = transformers.KimiLinearConfig(**SIZES, **TOKENS, **kda, **experts, **latent, num_hidden_layers=5)
    return {"Qwen3.5": transformers.Qwen3_5ForCausalLM(qwen), "Kimi-Linear": transformers.KimiLinearForCausalLM(kimi)}


def generate(model: torch.nn.Module, prompt: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, float]:
    """Greedy tokens, and the seconds that they took."""
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    model.generate(prompt[:, :64], max_new_tokens=2, **options)  # whatever is made at the first call
    started = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
    return tokens, time.perf_counter() - started


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    arguments.add_argument("--new-tokens", type=int, default=32)
    args = arguments.parse_args()
    warnings.filterwarnings("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    print(f"{args.prompt} tokens of prompt, {args.new_tokens} new ones, on {device}")
    for name, model in models().items():
        model = model.to(device).eval()
        prompt = torch.randint(2, SIZES["vocab_size"], (1, args.prompt), device=device)
        without, slow = generate(model, prompt, args.new_tokens)
        cula.integrations.transformers.patch()
        cula.integrations.CALLS.clear()
        with_cula, fast = generate(model, prompt, args.new_tokens)
        calls = sum(cula.integrations.CALLS.values())
        cula.integrations.transformers.unpatch()
        same = "the same tokens" if torch.equal(without, with_cula) else "OTHER TOKENS"
        rates = f"{args.new_tokens / slow:.1f} tokens/s without cuLA, {args.new_tokens / fast:.1f} with it ({calls} calls)"
        print(f"{name:<12} {same}: {rates}")
        if same == "OTHER TOKENS":
            raise SystemExit(1)


if __name__ == "__main__":
    main()
