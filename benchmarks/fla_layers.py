# SPDX-License-Identifier: Apache-2.0
"""FLA's own KDA and Gated DeltaNet layers with and without `cula.integrations.fla.register()`: times, and how far apart they are.

    python benchmarks/fla_layers.py --out benchmarks/results/H200-fla-layers.json

Needs flash-linear-attention. The layer is the same object in both runs, so that its parameters are. Without a GPU FLA's kernels
do not run, and cuLA's alone are measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cula.integrations.fla
from cula.bench.timing import tune_for
from cula.reference import relative_error
from cula.utils import describe_device


def make(name: str, args: argparse.Namespace) -> nn.Module:
    from fla.layers import GatedDeltaNet, KimiDeltaAttention

    torch.manual_seed(0)
    sizes = {"hidden_size": args.width, "head_dim": args.head_dim, "num_heads": args.heads, "layer_idx": 0}
    layer = KimiDeltaAttention(**sizes) if name == "kda" else GatedDeltaNet(**sizes, expand_v=1)
    return layer.to(args.device, torch.bfloat16 if args.device != "cpu" else torch.float32)


def milliseconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """The median of calls one by one, host included."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def measure(layer: nn.Module, x: Tensor, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Times of a forward, and of one with its backward; the output and every gradient."""

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)[0]

    def step() -> Tensor:
        layer.zero_grad()
        x.grad = None
        o = layer(x)[0]
        o.float().square().mean().backward()
        return o.detach()

    times = {
        "forward_ms": milliseconds(forward, args.device, args.repeats),
        "training_ms": milliseconds(step, args.device, args.repeats),
    }
    found = {"o": step(), "dx": x.grad.clone()}
    found |= {f"d {name}": p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return times, found


def measure_theirs(layer: nn.Module, x: Tensor, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same of FLA's kernels, of which one may refuse: its sentence, and what there was before."""
    try:
        return measure(layer, x, args)
    except RuntimeError as error:
        with torch.no_grad():
            times = {"forward_ms": milliseconds(lambda: layer(x)[0], args.device, args.repeats)}
            return {**times, "training_ms": None, "refused": str(error).splitlines()[0]}, {"o": layer(x)[0]}


def rows_of_others(path: Path | None, layers: list[str], head: dict[str, Any]) -> list[dict[str, Any]]:
    """What the file has of other layers, which stays, if all else of it is as it would be now."""
    before = {"rows": []} if path is None or not path.exists() else json.loads(path.read_text())
    rows = [row for row in before["rows"] if row["layer"] not in layers]
    others = [name for name in head if rows and before.get(name) != head[name]]
    if others:
        raise ValueError(f"--out {path} has rows with other {', '.join(others)}: give another file, or all layers")
    return rows


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=("kda", "gdn"), default=["kda", "gdn"])
    for name, default in (("width", 2048), ("heads", 16), ("head-dim", 128), ("batch", 1), ("tokens", 8192), ("repeats", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    times = ("WARMUP", "REPEAT")
    parser.add_argument("--tune-ms", nargs=2, type=int, metavar=times, help="of FLA's tuner, a variant (Triton: 25 100)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tune_ms:
        tune_for(*args.tune_ms)
    if args.device != "cpu" and not on_gpu:
        parser.error(f"--device {args.device}: torch sees no GPU here; use --device cpu")
    head = {
        "script": "benchmarks/fla_layers.py",
        "what": __doc__.splitlines()[0],
        "machine": describe_device(args.device),
        "tune_ms": args.tune_ms,
        "torch": torch.__version__,
        "sizes": {k: v for k, v in vars(args).items() if isinstance(v, int)},
    }
    try:
        rows = rows_of_others(args.out, args.layers, head)
    except ValueError as error:
        parser.error(str(error))
    for name in args.layers:
        layer = make(name, args)
        x = torch.randn(args.batch, args.tokens, args.width, device=args.device, dtype=next(layer.parameters()).dtype)
        row: dict[str, Any] = {"layer": name}
        x.requires_grad_()
        theirs: dict[str, Tensor] = {}
        if args.device != "cpu":
            row["fla"], theirs = measure_theirs(layer, x, args)
        before = sum(cula.integrations.CALLS.values())
        cula.integrations.fla.register(cpu_modules=args.device == "cpu")
        try:
            row["cula"], ours = measure(layer, x, args)
        finally:
            cula.integrations.fla.unregister()
        row["calls_that_cula_took"] = sum(cula.integrations.CALLS.values()) - before
        row["apart"] = {key: relative_error(ours[key], theirs[key]) for key in theirs}
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "apart"}), flush=True)
        if args.out:  # whoever ends this early has what was measured
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
