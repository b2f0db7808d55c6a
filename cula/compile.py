# SPDX-License-Identifier: Apache-2.0
"""`python -m cula.compile --arch sm_90a --out DIR`: compile the CuTe kernels ahead of time, on a machine without a GPU.

DIR then has, for each architecture, a folder of libraries with a manifest, and beside those the CuTe runtime library. On the
machine with the GPU, set `CULA_KERNEL_DIR=DIR`: all it needs is torch and apache-tvm-ffi.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cula.ops.cute.toolchain import build, loader
from cula.ops.cute.toolchain.variants import MODULES, modules_of, source_hash
from cula.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cula.compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", required=True, choices=list(MODULES), help="the architecture to compile for")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="what CULA_KERNEL_DIR will name")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these kernels instead of all")
    parser.add_argument("--modules", nargs="+", metavar="MODULE", help="kernel modules to use instead of cuLA's own")
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), metavar="N", help="processes (default: %(default)s)"
    )
    parser.add_argument("--no-runtime", action="store_true", help=f"do not copy {loader.RUNTIME} (43 MB)")
    parser.add_argument("--keep-text", action="store_true", help="leave PTX, machine code and host code beside the libraries")
    args = parser.parse_args(argv)
    modules = tuple(args.modules) if args.modules else modules_of(args.arch)
    if not modules:
        print(f"cula.compile: cuLA has no CuTe kernels for {args.arch} yet", file=sys.stderr)
        return 1
    lacking = build.missing()
    if lacking is not None:
        print(f"cula.compile: {lacking}", file=sys.stderr)
        return 1
    try:
        facts = compile_all(args.arch, modules, args.out, args.only, args.jobs, args.keep_text)
    except build.CompileError as error:
        print(f"cula.compile: {error}", file=sys.stderr)
        return 1
    if not args.no_runtime:
        copy_runtime(args.out)
    print(table(facts))
    print(f"\n{len(facts)} kernels for {args.arch} in {args.out}; to use them: export CULA_KERNEL_DIR={args.out.absolute()}")
    return 0


def compile_all(
    arch: str, modules: tuple[str, ...], out: Path, only: Sequence[str] | None = None, jobs: int = 1, keep_text: bool = False
) -> list[build.Facts]:
    """Compile into `out/arch` and write its manifest, which is removed first: a folder half made is not taken for whole."""
    folder = out / arch
    (folder / loader.MANIFEST).unlink(missing_ok=True)
    if only is not None:
        jobs = min(jobs, len(only))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(lambda i: build.build(arch, modules, folder, only, keep_text, (i, jobs)), range(jobs))
        facts = sorted((f for part in parts for f in part), key=lambda f: f.name)
    write_manifest(arch, modules, folder, facts)
    return facts


def compile_each(
    arch: str, modules: tuple[str, ...], folder: Path, names: Sequence[str], jobs: int, done: Callable[[build.Facts], None]
) -> list[build.Facts]:
    """Compile the named into a folder that may have some of them, each in a process of its own; `done` hears of each."""
    facts = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        parts = [pool.submit(build.build, arch, modules, folder, [name], reuse=True) for name in names]
        for part in concurrent.futures.as_completed(parts):
            facts += part.result()
            done(facts[-1])
    return sorted(facts, key=lambda f: f.name)


def write_manifest(arch: str, modules: tuple[str, ...], folder: Path, facts: Sequence[build.Facts]) -> None:
    """What `loader.py` reads: which kernels a folder has, and of which sources."""
    manifest = {
        "arch": arch,
        "sources": source_hash(modules),
        "modules": modules,
        "versions": {"cula": __version__, build.DSL: build.dsl_version()},
        "kernels": {f.name: dataclasses.asdict(f) for f in facts},
    }
    (folder / loader.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def copy_runtime(out: Path) -> None:
    library = loader.installed_runtime()
    if library is None:
        raise FileNotFoundError(f"{loader.RUNTIME} is not in the installed {build.DSL}; --no-runtime does without")
    shutil.copy(library, out / loader.RUNTIME)


def table(facts: Sequence[build.Facts]) -> str:
    """A line a kernel, for people."""
    head = ("kernel", "threads", "registers", "stack", "shared", "seconds", "instructions")
    rows = [
        (f.name, str(f.threads), str(f.registers), str(f.stack_bytes), str(f.smem_bytes), f"{f.seconds:.1f}",
         " ".join(f"{name}:{n}" for name, n in f.instructions.items()))
        for f in facts
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *rows])


if __name__ == "__main__":
    sys.exit(main())
