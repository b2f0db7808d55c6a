# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve a call: an ordered list of backends, and the reason why each one passed over was.

A backend says itself what it serves: `why_not` of its `Backend` for all of its kernels, `why_not` of a kernel module for those
of a family. A kernel module may also have `yields_to`: calls that it takes, and that another backend runs better as far as
anybody has measured. `choose` asks them once a call, and the `Choice` travels down to the launch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cula.core import checks, versions
from cula.core.problem import DecodeProblem, Problem

logger = logging.getLogger("cula")

AnyProblem = Problem | DecodeProblem


def _serves(op: str, problem: AnyProblem) -> str | None:
    return None


def _keeps(problem: AnyProblem) -> bool:
    return True


@dataclass(frozen=True)
class Backend:
    """One implementation of the families, and what it says about itself."""

    name: str  # the word a user passes as backend=
    package: str  # has a module for each family; imported only when asked
    summary: str  # what it is, one line for `python -m cula`
    why_not: Callable[[str, AnyProblem], str | None] = _serves  # None: "I serve this"; otherwise one sentence
    device: str | None = None  # the device type it is written for; "auto" offers it no other
    requires: tuple[str, ...] = ()  # importable modules that must be installed
    install: str = ""  # how to get them
    options: frozenset[str] = frozenset()  # backend-specific keywords it takes
    # Whether a forward keeps more for its own backward than its inputs; such calls have records of their own, or none.
    keeps: Callable[[AnyProblem], bool] = _keeps
    how: Callable[[str, AnyProblem], str | None] | None = None  # what it would do with a call that it takes, as a phrase
    # Last word before a kernel runs, for kernels that check themselves at their first use on a machine. Not asked by `explain`
    # but for what is known already: (op, problem, may_run) -> reason.
    self_check: Callable[[str, AnyProblem, bool], str | None] | None = None
    # What this machine lacks beside packages, as a sentence, where it has the device. It may be found out by compiling something
    # only where it says so: (may_run) -> reason.
    lacks: Callable[[bool], str | None] | None = None

    def missing(self) -> str | None:
        """What is not installed, or too old, as a sentence; None if all is there."""
        absent = [name for name in self.requires if not _is_installed(name)]
        if absent:
            return f"{' and '.join(absent)} not installed ({self.install})"
        return next((reason for name in self.requires if (reason := versions.objection(name)) is not None), None)

    def unavailable(self) -> str | None:
        """Why no call on this machine can use it, as a sentence; None if some can."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return self.missing() or "needs an NVIDIA GPU, and torch sees none"
        return self.missing() or (None if self.lacks is None else self.lacks(True))

    def objection(self, op: str, problem: AnyProblem, is_forced: bool = False, may_run: bool = True) -> str | None:
        """Why it does not take the call; None if it does."""
        if not is_forced and self.device not in (None, problem.device):
            return f"is for {self.device}, and the tensors are on {problem.device}"
        reason = self.missing()
        if reason is None and self.find(problem.family, op) is None:
            reason = f"has no kernel for {op}"
        reason = reason or self.why_not(op, problem)
        if reason is None:
            of_kernel = self.find(problem.family, "why_not")
            reason = None if of_kernel is None else of_kernel(op, problem)
        if reason is None and not is_forced:
            reason = self._yields(op, problem, may_run)
        if reason is None and self.lacks is not None:
            reason = self.lacks(may_run)
        if reason is None and self.self_check is not None:
            reason = self.self_check(op, problem, may_run)
        return reason

    def _yields(self, op: str, problem: AnyProblem, may_run: bool) -> str | None:
        """Why a call that it takes goes to another backend, which takes it too; None if it keeps it."""
        of_kernel = self.find(problem.family, "yields_to")
        found = None if of_kernel is None else of_kernel(op, problem)
        if found is None:
            return None
        name, reason = found
        other = next((b for b in BACKENDS if b.name == name), None)
        return reason if other is not None and other.objection(op, problem, may_run=may_run) is None else None

    def find(self, family: str, name: str) -> Callable[..., Any] | None:
        """A function of its module for a family; None where it has none."""
        return _find(f"{self.package}.{family}", name)

    def load(self, family: str, name: str) -> Callable[..., Any]:
        """The same where it must be there, because `objection` had nothing to say."""
        found = self.find(family, name)
        assert found is not None, f"{self.name} has no {name}"
        return found


@functools.cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@functools.cache
def _find(module: str, name: str) -> Callable[..., Any] | None:
    return getattr(importlib.import_module(module), name, None) if importlib.util.find_spec(module) is not None else None


# Best first: the only ranking there is. Filled by `cula/registry.py`.
BACKENDS: list[Backend] = []


def register_backend(backend: Backend, before: str | None = None) -> Backend:
    """Put a backend last, or before one by name."""
    place = len(BACKENDS) if before is None else backend_names().index(before)
    BACKENDS.insert(place, backend)
    return backend


def backend_names() -> list[str]:
    return [b.name for b in BACKENDS]


@dataclass(frozen=True)
class Choice:
    """What serves a call and, for each better backend, why it does not. `str()` of it is for people.

    One of these is made a call and travels down to the kernels: forward, backward, how a pool is read and written.
    """

    op: str
    backend: Backend
    passed_over: tuple[tuple[str, str], ...]  # (backend, reason)
    how: str | None = None  # what the backend would do with it, where it says; `cula.explain` asks
    backward: Choice | None = None  # where a gradient is needed
    pool: str | None = None  # a prefill's pool: IN_PLACE, or why it is read and written around the kernel
    checkpoints: str | None = None  # the same of states that are kept
    shares_saved: bool = False  # the forward saves more than its inputs, for the backward of the same backend

    @property
    def name(self) -> str:
        return self.backend.name

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend.name} ({self.backend.summary})"]
        lines += [f"  {self.how}"] if self.how else []
        if self.pool is not None:
            lines.append(f"  the pool is read and written {self.pool}")
        if self.checkpoints is not None:
            lines.append(f"  checkpoints are written {self.checkpoints}")
        lines += [f"  passed over {name}: {reason}" for name, reason in self.passed_over]
        if self.backward is not None:
            lines += [str(self.backward)]
        return "\n".join(lines)


IN_PLACE = "by the kernel, in place"


def choose(op: str, problem: AnyProblem, backend: str = "auto", may_run: bool = True, who: str = "") -> Choice:
    """The first backend of the list that has no objection to serving one operation, "kda_fwd". Errors name `who`, the function
    that was called, where it is given."""
    passed_over: list[tuple[str, str]] = []
    for b in _candidates(who or op, backend):
        reason = b.objection(op, problem, is_forced=backend != "auto", may_run=may_run)
        if reason is None:
            return Choice(op, b, tuple(passed_over))
        passed_over.append((b.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    of = f"{who} (its gradient)" if who and op.endswith("_bwd") else who or op
    raise NotImplementedError(f"{of}: no backend can serve this call. {reasons}")


def select(op: str, problem: AnyProblem, backend: str = "auto") -> Callable[..., Any]:
    """The function that serves one operation."""
    return choose(op, problem, backend).backend.load(problem.family, op)


def refuse_unknown(who: str, given: Iterable[str], known: Iterable[str], backend: str) -> None:
    """TypeError for a keyword that neither the function nor any backend knows, before one of them has the call.

    Of a call that is wrong in other ways as well: what it lacks may be what was misspelt.
    """
    checks.refuse_keywords(who, given, known, backend, {name for b in BACKENDS for name in b.options})


def choose_prefill(problem: Problem, backend: str = "auto", may_run: bool = True, who: str = "") -> Choice:
    """The whole choice of a prefill: forward, backward where a gradient is needed, and how its pool is handled."""
    family = problem.family
    forward = choose(f"{family}_fwd", problem, backend, may_run, who)
    backward = pool = checkpoints = None
    shares_saved = False
    if problem.needs_grad:  # now, so that a missing one is not a surprise inside autograd
        backward = choose(f"{family}_bwd", problem, backend, may_run, who)
        shares_saved = backward.name == forward.name and forward.backend.keeps(problem)
    if problem.pool_dtype is not None:
        pool = _in_place(forward.backend, problem, "pool")
    if problem.checkpoint_dtype is not None:
        checkpoints = _in_place(forward.backend, problem, "checkpoints")
    return _logged(Choice(forward.op, forward.backend, forward.passed_over, None, backward, pool, checkpoints, shares_saved))


def choose_decode(problem: DecodeProblem, backend: str = "auto", may_run: bool = True, who: str = "") -> Choice:
    return _logged(choose(f"{problem.family}_decode", problem, backend, may_run, who))


def _in_place(backend: Backend, problem: Problem, what: str) -> str:
    """Who reads and writes a call's "pool" or "checkpoints": IN_PLACE, or why not."""
    if backend.find(problem.family, f"{problem.family}_fwd_{what}") is None:
        return f"around the kernel: {backend.name} has no kernel that does it"
    of_kernel = backend.find(problem.family, f"{what}_why_not")
    reason = None if of_kernel is None else of_kernel(problem)
    return IN_PLACE if reason is None else f"around the kernel: {reason}"


def _candidates(who: str, backend: str) -> list[Backend]:
    if backend == "auto":
        return BACKENDS
    named = [b for b in BACKENDS if b.name == backend]
    if not named:
        raise ValueError(f"{who}: unknown backend {backend!r}; choose 'auto' or one of {backend_names()}")
    return named


_seen: set[str] = set()


def _logged(choice: Choice) -> Choice:
    """Say each distinct choice once, at INFO."""
    if logger.isEnabledFor(logging.INFO):
        text = str(choice)
        if text not in _seen:
            _seen.add(text)
            logger.info("%s", text)
    return choice
