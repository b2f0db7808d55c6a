#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build FlashKDA from a clone of its sources, so that benchmarks have it beside cuLA. Needs nvcc; two minutes, no network.

    git clone --recursive https://github.com/MoonshotAI/FlashKDA
    python tools/flashkda.py FlashKDA --to peers                       # CUTLASS's headers are a submodule of it
    python tools/flashkda.py FlashKDA --cutlass CUTLASS --to peers     # or come from another clone
    PYTHONPATH=peers python -m cula.bench run kda-gates --peers flashkda,cudnn,fla

Nothing of it is kept in the clone, and nothing of it is part of cuLA.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HEADERS = "include/cutlass/cutlass.h"


def build(source: Path, cutlass: Path | None, to: Path, arch: str) -> int:
    """pip's exit status."""
    cutlass = cutlass or source / "cutlass"
    for path, what in ((source / "setup.py", "a clone of FlashKDA"), (cutlass / HEADERS, "CUTLASS's headers")):
        if not path.is_file():
            raise SystemExit(f"{path} is not there: expected {what}; clone with --recursive, or name a clone by --cutlass")
    with tempfile.TemporaryDirectory(prefix="flashkda-") as folder:
        copy = Path(folder) / "FlashKDA"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("cutlass", ".git"))
        (copy / "cutlass").symlink_to(cutlass.resolve())
        environment = {**os.environ, "FLASH_KDA_CUDA_ARCHS": arch, "NVCC_THREADS": str(os.cpu_count() or 1)}
        command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(to)]
        return subprocess.run([*command, str(copy)], env=environment, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the clone")
    parser.add_argument("--cutlass", type=Path, help="a clone of CUTLASS, where the submodule is not there")
    parser.add_argument("--to", type=Path, default=Path("peers"), help="the folder to put on PYTHONPATH (default: %(default)s)")
    parser.add_argument("--arch", default="90a", help="what it is compiled for (default: %(default)s)")
    args = parser.parse_args(argv)
    return build(args.source, args.cutlass, args.to, args.arch)


if __name__ == "__main__":
    sys.exit(main())
