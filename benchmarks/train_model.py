# SPDX-License-Identifier: Apache-2.0
"""A language model of KDA or Gated DeltaNet layers trained with cuLA's kernels and with FLA's: tokens a second, memory, losses.

    python benchmarks/train_model.py --out benchmarks/results/H200-train-model.json --picture docs/benchmarks/H200-train-model.png

Both models have the same parameters at the start, see the same random tokens, and differ in the one function that their layers
call. Each is trained eagerly and compiled. FLA's kernels need a GPU; without one, cuLA's alone run.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cula.layers import GatedDeltaNet, KimiDeltaAttention
from cula.utils import describe_device

VOCABULARY = 4096


class FlaKda(KimiDeltaAttention):
    """The same layer on FLA's kernels."""

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, h0: Any, final: bool, cu_seqlens: Any) -> Any:
        from fla.ops.kda import chunk_kda

        return chunk_kda(q, k, v, **gates, safe_gate=self.safe_gate, initial_state=h0, output_final_state=final)


class FlaGdn(GatedDeltaNet):
    """The same layer on FLA's kernels."""

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, h0: Any, final: bool, cu_seqlens: Any) -> Any:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(q, k, v, **gates, initial_state=h0, output_final_state=final)


MIXERS: dict[tuple[str, str], type[nn.Module]] = {
    ("kda", "cula"): KimiDeltaAttention,
    ("kda", "fla"): FlaKda,
    ("gdn", "cula"): GatedDeltaNet,
    ("gdn", "fla"): FlaGdn,
}


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, width: int):
        super().__init__()
        self.mixer_norm, self.mixer = nn.RMSNorm(width), mixer
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """Tokens in, the loss of predicting the next ones out."""

    def __init__(self, mixer: type[nn.Module], layers: int, width: int, heads: int, head_dim: int):
        super().__init__()
        make = lambda: mixer(hidden_size=width, head_dim=head_dim, num_heads=heads, expand_v=1)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(make(), width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def random_tokens(step: int, batch: int, length: int, device: str) -> Tensor:
    """Of a steep distribution, so that there is something to learn."""
    random = torch.Generator().manual_seed(step)
    return (VOCABULARY * torch.rand(batch, length + 1, generator=random) ** 4).long().to(device)


def train(model: nn.Module, is_compiled: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Steps of AdamW: the loss of each, the median rate of those behind the warm-up, and the peak of memory."""
    on_gpu = args.device != "cpu"
    run = torch.compile(model) if is_compiled else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, seconds = [], []
    for step in range(args.warm_up + args.steps):
        tokens = random_tokens(step, args.batch, args.tokens, args.device)
        if on_gpu:
            torch.cuda.synchronize()
            if step == args.warm_up:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast(torch.device(args.device).type, torch.bfloat16):
            loss = run(tokens)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    rate = args.batch * args.tokens / statistics.median(seconds[args.warm_up :])
    return {"tokens_a_second": rate, "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None, "losses": losses}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Models, one by one."""
    for family in args.models:
        torch.manual_seed(0)
        sizes = (args.layers, args.width, args.heads, args.head_dim)
        first = Model(MIXERS[family, "cula"], *sizes).state_dict()
        for kernels in args.kernels:
            for is_compiled in (False, True) if args.compile else (False,):
                model = Model(MIXERS[family, kernels], *sizes)
                model.load_state_dict(copy.deepcopy(first))
                row = {"model": family, "kernels": kernels, "compiled": is_compiled}
                try:
                    row |= train(model.to(args.device), is_compiled, args)
                except Exception as error:  # a peer's is a result too
                    if kernels == "cula":
                        raise
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
                say = row.get("error") or f"{row['tokens_a_second']:.0f} tokens/s, loss {row['losses'][-1]:.4f}"
                print(f"{family} {kernels:>4} {'compiled' if is_compiled else 'eager':>8}: {say}", flush=True)
                yield row


def draw(rows: list[dict[str, Any]], title: str, to: Path) -> None:
    """Rates beside each other, and the losses, which should be one curve a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    done = [row for row in rows if "error" not in row]
    names = [f"{row['model']} {row['kernels']}{' compiled' if row['compiled'] else ''}" for row in done]
    colours = ["#1b6ca8" if row["kernels"] == "cula" else "#d1495b" for row in done]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    left.barh(names[::-1], [row["tokens_a_second"] for row in done][::-1], color=colours[::-1])
    left.set_xlabel("tokens a second, training")
    for row, name, colour in zip(done, names, colours):
        style = ":" if row["compiled"] else "-" if row["kernels"] == "cula" else "--"
        right.plot(row["losses"], label=name, color=colour, linestyle=style)
    right.set_xlabel("step")
    right.set_ylabel("loss")
    right.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=130)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("kda", "gdn"), default=["kda", "gdn"])
    parser.add_argument("--kernels", nargs="+", choices=("cula", "fla"), default=["cula", "fla"] if on_gpu else ["cula"])
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train eagerly only")
    for name, default in (("layers", 12), ("width", 1024), ("heads", 16), ("head-dim", 128), ("batch", 1), ("tokens", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5, help="steps before those that are timed")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if args.device != "cpu" and not on_gpu:
        parser.error(f"--device {args.device}: torch sees no GPU here; use --device cpu")
    rows: list[dict[str, Any]] = []
    sizes = {name: getattr(args, name) for name in ("layers", "width", "heads", "head_dim", "batch", "tokens")}
    machine = describe_device(args.device)
    for row in measure(args):
        rows.append(row)
        if args.out:  # whoever ends this early has what was measured
            result = {"script": "benchmarks/train_model.py", "what": __doc__.splitlines()[0], "machine": machine}
            result |= {"torch": torch.__version__, "sizes": sizes, "rows": rows}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.picture:
        draw(rows, ", ".join(f"{name.replace('_', ' ')} {x}" for name, x in sizes.items()) + f" ({machine})", args.picture)


if __name__ == "__main__":
    main()
