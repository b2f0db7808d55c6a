# SPDX-License-Identifier: Apache-2.0
"""Kernels that have never run on hardware, met by the hardware they are for.

An architecture names those (`Arch.new`). Before dispatch lets one take its first call on a machine, the kernel computes a few
small calls there and is compared with the torch backend. If it is off, the backend declines with the figure, and the next one of
the table serves. The calls are beside the host code, in `<kind>_self_check.py`: its `worst_error(kernel, device, capability)`
makes them. A kind is the first word of its kernels' names.

It runs in a process of its own, because a kernel that faults takes its process's GPU with it, and one that hangs must be stopped.
That takes as long as importing torch; the calls themselves well under a second. The result is kept in the cache, by kernel,
sources and GPU, so a machine does it once. `CULA_SELF_CHECK=0` leaves it out, and `CULA_SELF_CHECK=decline` such kernels.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from cula import settings
from cula.core.dispatch import logger
from cula.ops.cute.archs import target_of
from cula.ops.cute.toolchain import loader
from cula.ops.cute.toolchain.build import locked
from cula.ops.cute.toolchain.variants import modules_of, source_hash

# |o - o_torch| / |o_torch|, and of states. Rounding o to bfloat16 is 1.7e-3 of it, bfloat16 operands are up to 6e-3.
LIMIT = 1e-2
SECONDS = 120.0  # for the process: several times what a busy machine needs


def objection(name: str, sm: tuple[int, int], may_run: bool = True) -> str | None:
    """Why a kernel that is new should not be used on this machine, as a sentence; None if it may be.

    Args:
        may_run: False to go by what this machine has found before, and to start nothing.
    """
    arch, mode = target_of(sm), settings.self_check()
    if mode == "decline":
        return f"has {name} for it, which never ran on hardware, and CULA_SELF_CHECK=decline asks for others"
    gpu = _gpu_with(sm)
    if gpu is None:
        return None  # the call is only described; nothing will run
    if mode == "0":
        _warn(arch, "and CULA_SELF_CHECK=0 leaves out comparing them with the torch backend here")
        return None
    if not may_run:
        found = known(name, arch, torch.cuda.get_device_name(gpu))
        return None if found is None else judge(name, found)
    reason = _objection(name, arch, gpu)
    if reason is None:
        _warn(arch, f"but agree with the torch backend on this {torch.cuda.get_device_name(gpu)}")
    return reason


def worst_error(name: str, device: torch.device, sm: tuple[int, int]) -> float:
    """The largest relative difference between a kernel and the torch backend, of outputs and states of its calls."""
    return importlib.import_module(f"cula.ops.cute.{name.split('_')[0]}_self_check").worst_error(name, device, sm)


def relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|, zero where both are zeros; infinite where a number is none or infinite, in either, and where
    something came and nothing should have. Never NaN, of which a maximum would know nothing."""
    difference, size = (torch.linalg.norm(t.double()).item() for t in (got.double() - want.double(), want))
    if difference == size == 0.0:
        return 0.0
    relative = difference / size if size else math.inf
    return relative if math.isfinite(relative) else math.inf


@functools.cache
def _gpu_with(sm: tuple[int, int]) -> int | None:
    return next((i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) == sm), None)


@functools.cache
def _warn(arch: str, rest: str) -> None:
    """Once a process."""
    warnings.warn(f"cuLA uses {arch} kernels that were never run on hardware, {rest}", stacklevel=2)


@functools.cache
def _objection(name: str, arch: str, gpu: int) -> str | None:
    return judge(name, recorded(name, arch, torch.cuda.get_device_name(gpu), gpu))


def judge(name: str, found: dict) -> str | None:
    """Why a kernel of which a check found this should not be used; None if it may be."""
    if "failure" in found:
        return f"its first run on this GPU failed: {found['failure']}"
    if not found["error"] < LIMIT:  # NaN too
        return f"on this GPU {name} differs from the torch backend by {found['error']:.1e} (limit {LIMIT:.0e})"
    return None


def recorded(name: str, arch: str, gpu_name: str, gpu: int) -> dict:
    """What the check found, {"error": figure} or {"failure": sentence}; runs it unless this machine has."""
    path = _path(name, arch, gpu_name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):  # other ranks wait for the first
            if (kept := _read(path)) is not None:
                return kept
            found = _measure(name, arch, gpu)
            if "error" in found:  # a failure may be the machine's and pass
                whole = path.with_suffix(f".{os.getpid()}")  # appears whole or not at all, to those who read without the lock
                whole.write_text(json.dumps(found))
                whole.replace(path)
            return found
    except OSError:  # no place to keep it: once a process, then
        return _measure(name, arch, gpu)


def known(name: str, arch: str, gpu_name: str) -> dict | None:
    """What the check found on this machine, if it has run."""
    return _read(_path(name, arch, gpu_name))


def _read(path: Path) -> dict | None:
    """What is kept there; None if nothing is, or only a part of it: a full disk, or a process that was ended, leaves that."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _path(name: str, arch: str, gpu_name: str) -> Path:
    slug = re.sub(r"\W+", "-", gpu_name)
    return settings.cache_dir() / "self-check" / f"{name}-{arch}-{source_hash(modules_of(arch))}-{slug}.json"


def _measure(name: str, arch: str, gpu: int) -> dict:
    """Run `main` in a process."""
    loader.locate(name, arch, modules_of(arch))  # compiled here, where an error is shown as it is
    logger.warning("comparing the kernel %s, which never ran on hardware, with the torch backend: some seconds, once", name)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "found.json"
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        command = [sys.executable, "-m", "cula.ops.cute.toolchain.self_check", name, str(gpu), str(out)]
        try:
            run = subprocess.run(
                command,
                cwd=scratch,
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"not done after {SECONDS:.0f} s"}
        if run.returncode or not out.is_file():
            lines = run.stdout.strip().splitlines()
            return {"failure": lines[-1] if lines else f"exit status {run.returncode}"}
        return json.loads(out.read_text())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cula.ops.cute.toolchain.self_check", description="The process of the check.")
    parser.add_argument("kernel")
    parser.add_argument("gpu", type=int)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")  # torch's side is what is right, whatever the environment says of TF32
    device = torch.device("cuda", args.gpu)
    torch.cuda.set_device(device)
    args.out.write_text(json.dumps({"error": worst_error(args.kernel, device, torch.cuda.get_device_capability(device))}))


if __name__ == "__main__":
    main()
