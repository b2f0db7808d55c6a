# SPDX-License-Identifier: Apache-2.0
"""`python -m cula`: what this machine has and what to do next; `check`: does it work here; `warmup`: compile before serving."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import cula
from cula import install, models
from cula.core.dispatch import backend_names
from cula.integrations import overview
from cula.ops.cute.archs import ARCHS

TARGETS = tuple(target for arch in ARCHS for target in arch.targets.values())


def info() -> int:
    print(f"cuLA {cula.__version__}  (Python {platform.python_version()}, torch {torch.__version__})\n")
    rows = [install.Row("", "found", "supported", ""), *install.rows()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row.verdict]).rstrip())
    print("\nbackends, best first")
    for name, summary, status in install.backends():
        print(f"  {name:<11} {summary}\n  {'':<11} {status}")
    print("\nintegrations, and what turns them on")
    for line in overview.describe():
        print(f"  {line}")
    print("\nnext: python -m cula check (does it work here?), python -m cula warmup --model NAME (compile before serving)")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cula", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("info", help="what this machine has, and what to do next (the default)")
    check = commands.add_parser("check", help="every family against float64 on this machine, with times")
    check.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    check.add_argument("--backend", choices=("auto", *backend_names()), default="auto", help="force a backend")
    warm = commands.add_parser("warmup", help="compile what a model will call, before it serves")
    names = ", ".join(m.name.lower() for m in models.MODELS)
    warm.add_argument("--model", nargs="+", required=True, metavar="NAME", help=f"some of {names}; or their beginnings")
    warm.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism (default: %(default)s)")
    warm.add_argument("--train", action="store_true", help="training steps too")
    warm.add_argument("--arch", choices=TARGETS, help="compile CuTe kernels for this architecture; needs no GPU")
    warm.add_argument("--out", type=Path, metavar="DIR", help="with --arch: what CULA_KERNEL_DIR will name (default: the cache)")
    warm.add_argument("--jobs", type=int, metavar="N", help="processes (default: as many as cores, up to 8)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.command == "check":
            return importlib.import_module("cula.checking").main(args.device, args.backend)
        if args.command == "warmup":
            cula.warmup(args.model, args.tp, train=args.train, arch=args.arch, out=args.out, jobs=args.jobs)
            return 0
    except (ValueError, RuntimeError, OSError) as error:
        print(f"python -m cula {args.command}: {error}", file=sys.stderr)
        return 2
    return info()


if __name__ == "__main__":
    sys.exit(main())
