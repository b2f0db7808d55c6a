# SPDX-License-Identifier: Apache-2.0
"""Kernels that have never run on hardware, met by the hardware they are for.

Before dispatch lets such a kernel take its first call on a machine, the kernel computes a few small calls there and is compared
with the torch backend: packed and fixed-length, grouped heads, states, whole sequences and segments, warmed up and chained. If it
is off, the backend declines with the figure, and the next one of the table serves.

It runs in a process of its own, because a kernel that faults takes its process's GPU with it, and one that hangs must be stopped.
That takes as long as importing torch; the calls themselves well under a second. The result is kept in the cache, by kernel,
sources and GPU, so a machine does it once. `CULA_SELF_CHECK=0` leaves it out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula import settings
from cula.kda.problem import KdaInputs, KdaOptions, KdaProblem, check_kda
from cula.lightning.problem import LightningProblem
from cula.ops.cute import kda, lightning, lightning_self_check
from cula.ops.cute.archs import arch_of, target_of
from cula.ops.cute.kda_abi import K, V
from cula.ops.cute.kda_schedule import split_into
from cula.ops.cute.toolchain import loader
from cula.ops.cute.toolchain.build import locked
from cula.ops.cute.toolchain.variants import modules_of, source_hash

# |o - o_torch| / |o_torch|, and of states. Rounding o to bfloat16 is 1.7e-3 of it, bfloat16 operands are up to 6e-3.
LIMIT = 1e-2
SECONDS = 120.0  # for the process: several times what a busy machine needs


def kernel_of(problem: KdaProblem | LightningProblem) -> str:
    """The kernel that a call's agreement is asked of."""
    return lightning.variant(problem) if isinstance(problem, LightningProblem) else kda.variant(problem)


def objection(problem: KdaProblem | LightningProblem, may_run: bool = True) -> str | None:
    """Why the kernel for this call should not be used on this machine, as a sentence; None if it may be.

    Args:
        may_run: False to go by what this machine has found before, and to start nothing.
    """
    if arch_of(problem.sm).has_run:
        return None
    arch = target_of(problem.sm)
    gpu = _gpu_with(problem.sm)
    if gpu is None:
        return None  # the call is only described; nothing will run
    if not settings.self_check():
        _warn(arch, "and CULA_SELF_CHECK=0 leaves out comparing them with the torch backend here")
        return None
    if not may_run:
        found = known(kernel_of(problem), arch, torch.cuda.get_device_name(gpu))
        return None if found is None else _judge(kernel_of(problem), found)
    reason = _objection(kernel_of(problem), arch, gpu)
    if reason is None:
        _warn(arch, f"but agree with the torch backend on this {torch.cuda.get_device_name(gpu)}")
    return reason


@functools.cache
def _gpu_with(sm: tuple[int, int] | None) -> int | None:
    return next((i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) == sm), None)


@functools.cache
def _warn(arch: str, rest: str) -> None:
    """Once a process."""
    warnings.warn(f"cuLA's {arch} kernels were written without such a GPU: never run on hardware, {rest}", stacklevel=2)


@functools.cache
def _objection(name: str, arch: str, gpu: int) -> str | None:
    return _judge(name, recorded(name, arch, torch.cuda.get_device_name(gpu), gpu))


def _judge(name: str, found: dict) -> str | None:
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
            if path.is_file():
                return json.loads(path.read_text())
            found = _measure(name, arch, gpu)
            if "error" in found:  # a failure may be the machine's and pass
                path.write_text(json.dumps(found))
            return found
    except OSError:  # no place to keep it: once a process, then
        return _measure(name, arch, gpu)


def known(name: str, arch: str, gpu_name: str) -> dict | None:
    """What the check found on this machine, if it has run."""
    path = _path(name, arch, gpu_name)
    return json.loads(path.read_text()) if path.is_file() else None


def _path(name: str, arch: str, gpu_name: str) -> Path:
    slug = re.sub(r"\W+", "-", gpu_name)
    return settings.cache_dir() / "self-check" / f"{name}-{arch}-{source_hash(modules_of(arch))}-{slug}.json"


def _measure(name: str, arch: str, gpu: int) -> dict:
    """Run `main` in a process."""
    loader.locate(name, arch, modules_of(arch))  # compiled here, where an error is shown as it is
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


# The calls. Those of Lightning are in `lightning_self_check.py`.


class Flags(NamedTuple):
    """What a kernel's name says about its calls."""

    is_normalised: bool
    gate: str  # "gate", "softplus", "log", "safe"
    g: torch.dtype
    has_scalar_gate: bool

    @classmethod
    def of(cls, name: str) -> Flags:
        dtypes = {short: dtype for dtype, short in kda.SHORT.items()}
        _, dtype, gate, g, *rest = name.split("_")
        return cls(dtype == "f16", gate, dtypes[g], rest == ["scalar"])


class Call(NamedTuple):
    lengths: tuple[int, ...]
    is_packed: bool
    H: int
    HV: int
    per_segment: int  # chunks
    is_slow: bool  # the gate forgets in thousands of tokens, not in ten: from the sixth on segments are chained
    has_state: bool
    beta: torch.dtype = torch.float32


CALLS = (
    Call((70, 0, 5, 100), is_packed=True, H=1, HV=2, per_segment=100, is_slow=False, has_state=True),
    Call((100, 100), is_packed=False, H=2, HV=2, per_segment=1, is_slow=True, has_state=False),
    Call((350, 33), is_packed=True, H=1, HV=2, per_segment=1, is_slow=True, has_state=True, beta=torch.bfloat16),
    Call((200,), is_packed=False, H=1, HV=1, per_segment=2, is_slow=False, has_state=True),
)


def make(call: Call, flags: Flags, device: torch.device, sm: tuple[int, int]) -> tuple[KdaProblem, KdaInputs]:
    random = torch.Generator().manual_seed(0)
    D = K

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    B, T = (1, sum(call.lengths)) if call.is_packed else (len(call.lengths), call.lengths[0])
    q, k = normal(B, T, call.H, D), normal(B, T, call.H, D)
    if not flags.is_normalised:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    of_gate = () if flags.has_scalar_gate else (D,)
    g, shift = normal(B, T, call.HV, *of_gate), -8.0 if call.is_slow else 0.0
    is_raw, fastest = flags.gate in ("gate", "softplus"), -50.0 if flags.gate == "log" else -5.0
    x = KdaInputs(
        q=q.bfloat16(),
        k=k.bfloat16(),
        v=normal(B, T, call.HV, D).bfloat16(),
        g=(g if is_raw else fastest * torch.sigmoid(g + shift)).to(flags.g),
        beta=normal(B, T, call.HV).to(call.beta),
        A_log=0.1 * normal(call.HV) if is_raw else None,
        dt_bias=0.1 * normal(call.HV, *of_gate) + shift if is_raw else None,
        initial_state=normal(len(call.lengths), call.HV, D, D) if call.has_state else None,
        cu_seqlens=torch.tensor([0, *call.lengths]).cumsum(0).int() if call.is_packed else None,
    )
    options = KdaOptions(
        lower_bound=-5.0 if flags.gate == "gate" else None,
        use_gate_in_kernel=is_raw,
        use_qk_l2norm_in_kernel=flags.is_normalised,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=flags.gate == "safe",
        output_final_state=True,
    )
    moved: Any = (None if t is None else t.to(device) for t in x)
    problem, x = check_kda(KdaInputs(*moved), options)
    return dataclasses.replace(problem, sm=sm), x


def worst_error(name: str, device: torch.device, sm: tuple[int, int]) -> float:
    """The largest relative difference, of outputs and last states of the calls."""
    if name.startswith("lightning_"):
        return lightning_self_check.worst_error(name, device, sm)
    from cula.ops.torch.kda import kda_fwd

    worst = 0.0
    for call in CALLS:
        p, x = make(call, Flags.of(name), device, sm)
        ht = torch.full((p.N, p.HV, V, K), torch.nan, device=device)
        o = torch.full_like(x.v, torch.nan)
        kda.run(p, x, split_into(p, call.per_segment, num_sms=0), ht, o)
        want = kda_fwd(p, x)
        assert want.final_state is not None
        for got, right in ((o, want.o), (ht, want.final_state)):
            difference = torch.linalg.norm(got.double() - right.double()) / torch.linalg.norm(right.double())
            worst = max(worst, difference.nan_to_num(torch.inf).item())
    return worst


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cula.ops.cute.toolchain.self_check", description="The process of the check.")
    parser.add_argument("kernel")
    parser.add_argument("gpu", type=int)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    device = torch.device("cuda", args.gpu)
    torch.cuda.set_device(device)
    args.out.write_text(json.dumps({"error": worst_error(args.kernel, device, torch.cuda.get_device_capability(device))}))


if __name__ == "__main__":
    main()
