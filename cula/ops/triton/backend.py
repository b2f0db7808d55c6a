# SPDX-License-Identifier: Apache-2.0
"""Triton: portable GPU kernels, and what they serve. Asked on machines without Triton too: nothing here imports it."""

from __future__ import annotations

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


BACKEND = Backend(
    "triton",
    "cula.ops.triton",
    "portable GPU kernels, SM80 and later",
    why_not,
    device="cuda",
    requires=("triton",),
    install="pip install triton",
)
