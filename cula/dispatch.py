# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve a call: an ordered table of backends, and the reason why each one passed over was.

To add a backend: write its folder under `cula/ops/` (see there for the functions), describe here what it can do in one
`why_not` function, and put it into `BACKENDS` where its speed belongs. Nothing else changes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cula import settings
from cula.contract import DecodeProblem, KdaProblem, LightningProblem
from cula.ops.cute.toolchain import loader

logger = logging.getLogger("cula")

Problem = KdaProblem | LightningProblem | DecodeProblem

# Where an operation lives inside a backend's package.
MODULE_OF = {
    "kda_fwd": "kda",
    "record_kda_fwd": "kda",
    "kda_bwd": "kda",
    "kda_map": "kda",
    "kda_state_grad": "kda",
    "lightning_fwd": "lightning",
    "record_lightning_fwd": "lightning",
    "lightning_fwd_pool": "lightning",
    "pool_why_not": "lightning",
    "lightning_bwd": "lightning",
    "lightning_map": "lightning",
    "lightning_state_grad": "lightning",
    "decode": "decode",
    "record_decode": "decode",
}


@dataclass(frozen=True)
class Backend:
    """One implementation of the operations, and what it says about itself."""

    name: str  # the word a user passes as backend=
    package: str  # imported only when chosen
    summary: str  # what it is, one line for `python -m cula`
    why_not: Callable[[str, Problem], str | None]  # None: "I serve this"; otherwise one sentence
    device: str | None = None  # the device type it is written for; "auto" offers it no other
    requires: tuple[str, ...] = ()  # importable modules that must be installed
    install: str = ""  # how to get them
    options: frozenset[str] = frozenset()  # backend-specific keywords it takes
    how: Callable[[str, Problem], str | None] | None = None  # what it would do with a call that it takes, as a phrase

    def missing(self) -> str | None:
        """What is not installed, as a sentence; None if all is there."""
        absent = [name for name in self.requires if not _is_installed(name)]
        return f"{' and '.join(absent)} not installed ({self.install})" if absent else None

    def unavailable(self) -> str | None:
        """Why no call on this machine can use it, as a sentence; None if some can."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return self.missing() or "needs an NVIDIA GPU, and torch sees none"
        return self.missing()

    def objection(self, op: str, problem: Problem, is_forced: bool = False) -> str | None:
        """Why it does not take the call; None if it does."""
        if not is_forced and self.device not in (None, problem.device):
            return f"is for {self.device}, and the tensors are on {problem.device}"
        return self.missing() or self.why_not(op, problem)

    def load(self, op: str) -> Callable[..., Any]:
        return _load(self.package, op)

    def find(self, op: str) -> Callable[..., Any] | None:
        """The kernel of an operation that a backend may do without; None if it does."""
        return _find(self.package, op)


@dataclass(frozen=True)
class Choice:
    """The backend that takes a call and, for each better one, why it does not. `str()` of it is for people."""

    op: str
    backend: Backend
    passed_over: tuple[tuple[str, str], ...]  # (backend, reason)
    how: str | None = None  # what the backend would do with it, where it says; `cula.explain` asks

    @property
    def name(self) -> str:
        return self.backend.name

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend.name} ({self.backend.summary})"]
        lines += [f"  {self.how}"] if self.how else []
        lines += [f"  passed over {name}: {reason}" for name, reason in self.passed_over]
        return "\n".join(lines)


@functools.cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@functools.cache
def _load(package: str, op: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"{package}.{MODULE_OF[op]}"), op)


@functools.cache
def _find(package: str, op: str) -> Callable[..., Any] | None:
    module = f"{package}.{MODULE_OF[op]}"
    return getattr(importlib.import_module(module), op, None) if importlib.util.find_spec(module) is not None else None


# What each backend can do.


def _torch_why_not(op: str, problem: Problem) -> str | None:
    return None


TRITON_HEAD_DIMS = (32, 64, 128, 256)


def _triton_why_not(op: str, problem: Problem) -> str | None:
    if problem.device != "cuda" and not settings.triton_is_interpreted():
        return f"needs an NVIDIA GPU, and the tensors are on {problem.device}"
    if problem.sm is not None and problem.sm < (8, 0):
        return f"needs compute capability 8.0 or later, and this GPU has {problem.sm[0]}.{problem.sm[1]}"
    if problem.K not in TRITON_HEAD_DIMS or problem.V not in TRITON_HEAD_DIMS:
        return f"takes head dims {TRITON_HEAD_DIMS}, and this call has K = {problem.K}, V = {problem.V}"
    if isinstance(problem, KdaProblem) and problem.K == 256 and problem.sm in ((10, 0), (10, 3)):
        if problem.dtype == torch.float32:
            return "float32 with K = 256 does not fit the tensor memory of this GPU"
        if problem.gate != "bounded" and not problem.options.safe_gate:
            return "decays without a bound with K = 256 do not fit the tensor memory of this GPU: pass lower_bound or safe_gate"
    return None


def _cute_sm90_why_not(op: str, problem: Problem) -> str | None:
    if op not in ("kda_fwd", "lightning_fwd", "decode"):
        return f"has no kernel for {op}"
    from cula.ops.cute import decode, lightning  # with the kernels' host side, which most machines have no use for

    reason = _cute_why_not(problem, ((9, 0),))
    if reason is None and isinstance(problem, KdaProblem):
        reason = _cute_why_not_kda(problem)
    elif reason is None and isinstance(problem, DecodeProblem):
        reason = decode.why_not(op, problem)
    elif reason is None and isinstance(problem, LightningProblem):
        reason = lightning.why_not(op, problem)
    return reason or loader.missing("sm_90a")


def _cute_sm100_why_not(op: str, problem: Problem) -> str | None:
    if op != "kda_fwd" or not isinstance(problem, KdaProblem):
        return f"has no kernel for {op}"
    from cula.ops.cute.archs import target_of  # with the kernels' host side, which most machines have no use for
    from cula.ops.cute.toolchain import self_check

    reason = _cute_why_not(problem, ((10, 0), (10, 3))) or _cute_why_not_kda(problem)
    return reason or loader.missing(target_of(problem.sm)) or self_check.objection(problem)


def _cute_how(op: str, problem: Problem) -> str | None:
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    if not isinstance(problem, KdaProblem) or gpu is None or torch.cuda.get_device_capability(gpu) != problem.sm:
        return None
    from cula.ops.cute import kda  # see above

    return kda.how(problem, torch.cuda.get_device_properties(gpu).multi_processor_count)


def _cute_why_not(problem: Problem, sms: tuple[tuple[int, int], ...]) -> str | None:
    """What no CuTe kernel for these compute capabilities takes."""
    if problem.sm not in sms:
        where = f"the tensors are on {problem.device}" if problem.sm is None else f"this GPU has {problem.sm[0]}.{problem.sm[1]}"
        return f"needs compute capability {' or '.join(f'{major}.{minor}' for major, minor in sms)}, and {where}"
    if problem.dtype != torch.bfloat16:
        return f"takes bfloat16, and this call has {_word(problem.dtype)}"
    if not problem.T or not problem.N:
        return "takes at least one token"
    return None


def _cute_why_not_kda(p: KdaProblem) -> str | None:
    from cula.ops.cute import kda  # see above

    return kda.why_not("kda_fwd", p)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Best first: the only ranking there is.
BACKENDS: tuple[Backend, ...] = (
    Backend(
        "cute_sm90",
        "cula.ops.cute",
        "hand-tuned kernels for Hopper, CuTe DSL",
        _cute_sm90_why_not,
        device="cuda",
        requires=("tvm_ffi",),
        install="pip install 'cuda-linear-attention[cute]'",
        how=_cute_how,
    ),
    Backend(
        "cute_sm100",
        "cula.ops.cute",
        "KDA prefill for Blackwell, CuTe DSL; never run on hardware: checks itself at first use",
        _cute_sm100_why_not,
        device="cuda",
        requires=("tvm_ffi",),
        install="pip install 'cuda-linear-attention[cute]'",
        how=_cute_how,
    ),
    Backend(
        "triton",
        "cula.ops.triton",
        "portable GPU kernels, SM80 and later",
        _triton_why_not,
        device="cuda",
        requires=("triton",),
        install="pip install triton",
    ),
    Backend("torch", "cula.ops.torch", "plain PyTorch, any device", _torch_why_not),
)


def backend_names() -> list[str]:
    return [b.name for b in BACKENDS]


def choose(op: str, problem: Problem, backend: str = "auto") -> Choice:
    """The first backend of the table that has no objection to serving `op`."""
    passed_over: list[tuple[str, str]] = []
    for b in _candidates(op, backend):
        reason = b.objection(op, problem, is_forced=backend != "auto")
        if reason is None:
            choice = Choice(op, b, tuple(passed_over))
            _log(choice)
            return choice
        passed_over.append((b.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise NotImplementedError(f"{op}: no backend can serve this call. {reasons}")


def select(op: str, problem: Problem, backend: str = "auto") -> Callable[..., Any]:
    """The function that serves `op`."""
    return choose(op, problem, backend).backend.load(op)


def _candidates(op: str, backend: str) -> tuple[Backend, ...]:
    if backend == "auto":
        return BACKENDS
    named = tuple(b for b in BACKENDS if b.name == backend)
    if not named:
        raise ValueError(f"unknown backend {backend!r} for {op}; choose 'auto' or one of {backend_names()}")
    return named


_logged: set[tuple[str, str, tuple[tuple[str, str], ...]]] = set()


def _log(choice: Choice) -> None:
    """Say each distinct choice once, at INFO."""
    if not logger.isEnabledFor(logging.INFO):
        return
    key = (choice.op, choice.backend.name, choice.passed_over)
    if key not in _logged:
        _logged.add(key)
        logger.info("%s", choice)
