# SPDX-License-Identifier: Apache-2.0
"""Train a model of flash-linear-attention with cuLA, on a GPU or without one.

    python examples/train_fla_model.py                          # Kimi Delta Attention, half a minute on a CPU
    python examples/train_fla_model.py --model gdn --steps 200  # Gated DeltaNet

Needs flash-linear-attention (`pip install -e '.[models]'`). The line that matters is `cula.integrations.fla.register(...)`:
without it FLA's models need a GPU.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch

import cula.integrations

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 32, "vocab_size": 256, "intermediate_size": 256}


def make(name: str) -> torch.nn.Module:
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM, KDAConfig, KDAForCausalLM

    if name == "kda":
        return KDAForCausalLM(KDAConfig(**SIZES))
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**SIZES, expand_v=1))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", choices=("kda", "gdn"), default="kda")
    arguments.add_argument("--steps", type=int, default=150)
    arguments.add_argument("--tokens", type=int, default=256, help="of each of the 4 sequences of a step")
    args = arguments.parse_args()
    warnings.filterwarnings("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cula.integrations.fla.register(cpu_modules=device == "cpu")
    torch.manual_seed(0)
    model = make(args.model).to(device)
    text = torch.frombuffer(bytearray((ROOT / "docs" / "architecture.md").read_bytes()), dtype=torch.uint8).long().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    started, losses = time.perf_counter(), []
    for step in range(args.steps):
        starts = torch.randint(0, len(text) - args.tokens, (4,)).tolist()
        batch = torch.stack([text[start : start + args.tokens] for start in starts])
        loss = model(batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == args.steps - 1:
            print(f"step {step:>4}  loss {losses[-1]:.3f}")
    rate = 4 * args.tokens * args.steps / (time.perf_counter() - started)
    prompt = text[None, :64]
    sample = model.eval().generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    print(f"{rate:.0f} tokens/s on {device}; calls that cuLA took: {dict(cula.integrations.CALLS)}")
    print(bytes(sample[0].tolist()).decode(errors="replace"))
    if losses[-1] > losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
