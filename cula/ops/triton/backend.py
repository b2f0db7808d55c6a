# SPDX-License-Identifier: Apache-2.0
"""Triton: portable GPU kernels, and what they serve. Asked on machines without Triton too: nothing here imports it."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess

import torch

from cula import settings
from cula.core import versions
from cula.core.dispatch import AnyProblem, Backend
from cula.core.problem import Problem
from cula.gdn.problem import GdnProblem
from cula.kda.problem import KdaProblem

FIRST_FOR_BLACKWELL = (3, 6)  # 3.5.0 fails in a pass of its own (docs/compatibility-tried.md)
MAX_K = 256  # a program has a row of a state, K channels, in registers; V is cut into blocks, however long it is


def why_not(op: str, problem: AnyProblem) -> str | None:
    """Why it does not take a call, in one sentence; None if it does."""
    if problem.device != "cuda" and not settings.triton_is_interpreted():
        return f"needs an NVIDIA GPU, and the tensors are on {problem.device}"
    if problem.sm is not None and problem.sm < (8, 0):
        return f"needs compute capability 8.0 or later, and this GPU has {problem.sm[0]}.{problem.sm[1]}"
    if problem.K > MAX_K:
        return f"takes head dims K up to {MAX_K}, and this call has K = {problem.K}"
    if op == "lightning_bwd" and problem.device == "cuda" and isinstance(problem, Problem) and "decay" in problem.grads:
        return "does not make the gradient of decay on a GPU yet: its kernel is miscompiled there (docs/kda-triton.md)"
    if isinstance(problem, (KdaProblem, GdnProblem)) and problem.sm in ((10, 0), (10, 3)) and problem.dtype != torch.float32:
        found = versions.installed(versions.SUPPORTED["triton"])
        if found is not None and versions.key(found) < FIRST_FOR_BLACKWELL:
            return f"Triton {found} does not compile its kernels for this GPU, and 3.6 does (pip install 'torch>=2.10' brings it)"
    if isinstance(problem, KdaProblem) and problem.K > 128 and problem.sm in ((10, 0), (10, 3)):
        if problem.dtype == torch.float32:
            return "float32 with K above 128 does not fit the tensor memory of this GPU"
        if problem.gate != "bounded" and not problem.options.safe_gate:
            return (
                "decays without a bound with K above 128 do not fit the tensor memory of this GPU: pass lower_bound or safe_gate"
            )
    return None


def lacks(may_run: bool) -> str | None:
    """Why nothing can be launched on this machine, in one sentence; None if it can, or if only compiling something would tell.

    Triton's launchers are in C. It compiles them on each machine and keeps them in its cache, for which it takes a compiler and
    Python's headers: images to serve from often have neither.
    """
    if settings.triton_is_interpreted() or not torch.cuda.is_available():
        return None
    is_known = _no_launchers.cache_info().currsize > 0
    return _no_launchers() if may_run or is_known or not _has_compiler() else None


def _has_compiler() -> bool:
    """As Triton looks for one."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


@functools.cache
def _no_launchers() -> str | None:
    """Have Triton load or compile what all of its launches go through, once."""
    try:
        importlib.import_module("triton.runtime").driver.active.utils  # noqa: B018  made when it is first asked for
    except subprocess.CalledProcessError as error:
        reason = f"{os.path.basename(str(error.cmd[0]))} ends with status {error.returncode}"
    except (AssertionError, ImportError, OSError, RuntimeError) as error:  # all that its build and its cache raise
        reason = str(error).partition("\n")[0]
    else:
        return None
    return f"cannot compile its launchers on this machine: {reason} (install gcc and Python's headers, or name a compiler in CC)"


BACKEND = Backend(
    "triton",
    "cula.ops.triton",
    "portable GPU kernels, SM80 and later",
    why_not,
    device="cuda",
    requires=("triton",),
    install="pip install triton",
    lacks=lacks,
)
