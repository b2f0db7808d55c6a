# SPDX-License-Identifier: Apache-2.0
"""Compile what a model will call, before it serves: `cula.warmup` and `python -m cula warmup`.

Calls are those of `cula/models.py`, at lengths that reach every schedule. On a machine with the GPU, CuTe kernels that are not
compiled yet are, in parallel; then several processes make the calls, so that Triton compiles in parallel too, and this process
makes them once more, so that all is loaded. For an architecture that is not at hand (`arch`), the calls are only described, and
the CuTe kernels that they would launch are compiled, into the cache or into a folder for `CULA_KERNEL_DIR`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cula import models, settings
from cula.bench import warm
from cula.bench.cases import Case
from cula.bench.inputs import make
from cula.bench.ours import Cula
from cula.compile import compile_each, copy_runtime, write_manifest
from cula.core.dispatch import AnyProblem
from cula.core.explain import describe_call
from cula.ops.cute.arch import Arch
from cula.ops.cute.archs import ARCHS, find_arch, of_target
from cula.ops.cute.backend import kernels, takes
from cula.ops.cute.toolchain import build, folders, loader
from cula.ops.cute.toolchain.variants import modules_of, source_hash

PROMPTS = ((1, 64), (1, 512), (1, 2048), (1, 8192), (8, 512), (8, 2048), (1, 32768))  # sequences, tokens of each
ROWS = (1, 8, 64, 256)  # of a decode
TOKENS = (1, 4)  # of a row; drafts keep their states
MAX_ROWS = 2**20  # tokens times value heads of a call that is made and not only described: a gigabyte or two of tensors
TRAINING = ("gate", "sigmoid", "norm")

Say = Callable[[str], None]


class Warmed(NamedTuple):
    """What a warm-up did."""

    kernels: tuple[str, ...]  # CuTe kernels that it compiled
    calls: int  # that it made
    seconds: float


def warmup(
    model: str | Sequence[str],
    tp: int = 1,
    *,
    train: bool = False,
    arch: str | None = None,
    out: Path | str | None = None,
    jobs: int | None = None,
    show: bool = True,
) -> Warmed:
    """`cula.warmup`, which see."""
    start, say = time.monotonic(), _say if show else _say_nothing
    if jobs is not None and jobs < 0:
        raise ValueError(f"warmup: jobs is {jobs}; expected 1 or more processes, or None for as many as cores, up to 8")
    jobs = jobs or min(8, os.cpu_count() or 1)
    cases = calls((model,) if isinstance(model, str) else model, tp, train)
    if arch is not None:
        compiled = _ahead(cases, arch, None if out is None else Path(out), jobs, say)
        return Warmed(compiled, 0, time.monotonic() - start)
    if out is not None:
        raise ValueError("warmup: out= is a folder of kernels for another machine, and needs arch=, as in arch='sm_90a'")
    if not torch.cuda.is_available():
        targets = ", ".join(t for a in ARCHS for t in a.targets.values())
        raise RuntimeError(
            "warmup: torch sees no GPU here, and on a CPU there is nothing to compile; to compile the CuTe kernels for another "
            f"machine name its architecture: --arch (arch=) one of {targets}"
        )
    compiled = _compile_missing(cases, jobs, say)
    made = _make_calls([c for c in cases if c.T * c.HV <= MAX_ROWS], jobs, say)
    seconds = time.monotonic() - start
    say(f"warm after {seconds:.0f} s: {len(compiled)} CuTe kernels compiled, {made} calls made")
    return Warmed(compiled, made, seconds)


def calls(names: Iterable[str], tp: int = 1, train: bool = False) -> list[Case]:
    """What callers of these models call on one of `tp` ranks: prefills of each caller, decodes, and training steps if asked."""
    found: dict[str, Case] = {}
    for m in (m for name in names for m in models.find(name)):
        H, HV = m.heads(tp)
        cases = [
            Case("warmup", f"{m.family}_prefill", (T,) * N, H, HV, gate=m.gate, flags=flags, packed=N > 1,
                 pool=m.pool if "pool" in flags else "float32")
            for _, flags in m.prefill for N, T in PROMPTS
        ]  # fmt: skip
        for N, T in ((N, T) for T in TOKENS for N in ROWS):
            flags = (*m.decode, "keep") if T > 1 else m.decode
            cases.append(Case("warmup", f"{m.family}_decode", (T,) * N, H, HV, gate=m.gate, flags=flags, pool=m.pool))
        if train:
            of_gate = TRAINING if m.decode else ()
            shapes = (((2048,), False), ((512,) * 4, True))
            cases += [Case("warmup", f"{m.family}_train", n, H, HV, gate=m.gate, flags=of_gate, packed=p) for n, p in shapes]
        found |= {case.id: case for case in cases}
    return list(found.values())


# CuTe kernels by name.


def kernel_names(cases: Iterable[Case], arch: Arch, sm: tuple[int, int], num_sms: Iterable[int]) -> list[str]:
    """The CuTe kernels that the calls would launch on GPUs with so many SMs."""
    found: set[str] = set()
    for case in cases:
        op, problem = describe(case)
        problem = replace(problem, device="cuda", sm=sm)
        ops = [op, op.replace("_fwd", "_bwd")] if case.is_train else [op]
        found |= {
            name for each in ops if takes(arch, each, problem) for count in num_sms for name in kernels(each, problem, count)
        }
    return sorted(found)


def describe(case: Case) -> tuple[str, AnyProblem]:
    """What a call is, made with tensors that have no data."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        ours, x = Cula(), make(case, torch.device("cpu"))
        leaves = {name: None if t is None else t.requires_grad_(case.is_train) for name, t in x.leaves().items()}
        function, args, options = ours.call(x, leaves)
        if case.has("keep"):
            pool = args[3]
            options["intermediate_states"] = pool.new_empty(case.N, case.lens[0], *pool.shape[1:])
        choice, problem = describe_call(function, *args, **options)
    return choice.op, problem


def _ahead(cases: Sequence[Case], target: str, out: Path | None, jobs: int, say: Say) -> tuple[str, ...]:
    """Compile for an architecture, without a GPU."""
    modules = modules_of(target)
    lacking = build.missing()
    if lacking is not None:
        raise RuntimeError(f"warmup: cannot compile kernels for {target}: {lacking}")
    arch = of_target(target)
    sm = next(capability for capability, name in arch.targets.items() if name == target)
    names = kernel_names(cases, arch, sm, arch.num_sms)
    folder = out / target if out is not None else folders.writable(loader.cache_folder(target, modules), settings.cache_dir())
    kept: list[build.Facts] = []
    if out is not None and (folder / loader.MANIFEST).is_file():  # of other models, from the same sources
        manifest = loader.read_manifest(out, target)
        if manifest["sources"] == source_hash(modules):
            kept = [build.read_facts(folder, name) for name in manifest["kernels"] if name not in names]
        else:
            for stale in folder.glob("*.so"):
                stale.unlink()
    compiled = _compile(target, folder, names, jobs, say)
    if out is None:
        say(f"{len(names)} kernels for {target} are in {folder}")
    else:
        write_manifest(target, modules, folder, [*kept, *(build.read_facts(folder, name) for name in names)])
        copy_runtime(out)
        say(f"{len(names)} kernels for {target} are in {out}; to use them: export CULA_KERNEL_DIR={out.absolute()}")
    say("Triton's kernels are compiled where they run: python -m cula warmup, there, or the first calls")
    return compiled


def _compile_missing(cases: Sequence[Case], jobs: int, say: Say) -> tuple[str, ...]:
    """Compile what the GPU at hand lacks."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    sm = (properties.major, properties.minor)
    arch = find_arch(sm)
    if (
        arch is None
        or settings.kernel_dir() is not None
        or loader.has_wheel_kernels(arch.targets[sm], modules_of(arch.targets[sm]))
    ):
        return ()  # there are none, or they came compiled
    reason = loader.missing(arch.targets[sm])
    if reason is not None:
        say(f"cute_{arch.name} serves nothing here: {reason}")
        return ()
    target, names = arch.targets[sm], kernel_names(cases, arch, sm, [properties.multi_processor_count])
    folder = folders.writable(loader.cache_folder(target, modules_of(target)), settings.cache_dir())
    return _compile(target, folder, names, jobs, say)


def _compile(target: str, folder: Path, names: Sequence[str], jobs: int, say: Say) -> tuple[str, ...]:
    """Compile those of the named that a folder does not have, and say how far it is."""
    todo = [name for name in names if not (folder / f"{name}.so").is_file()]
    if not todo:
        return ()
    about = -(-len(todo) // jobs) * loader.SECONDS
    say(f"compiling {len(todo)} kernels for {target} in {jobs} processes: about {about} s, once; kept in {folder}")
    behind: list[str] = []

    def done(facts: build.Facts) -> None:
        behind.append(facts.name)
        say(f"  [{len(behind)}/{len(todo)}] {facts.name} ({facts.seconds:.0f} s)")

    compile_each(target, modules_of(target), folder, todo, jobs, done)
    return tuple(todo)


# Calls that are made.


def _make_calls(cases: Sequence[Case], jobs: int, say: Say) -> int:
    """Each in one of several processes, which compile, and then all in this one, which loads."""
    say(f"making {len(cases)} calls in {jobs} processes, so that Triton compiles what it serves: a minute or two the first time")
    warm.warm(warm.units(cases, (), "auto", "cuda"), jobs)
    for i, case in enumerate(cases):
        with torch.set_grad_enabled(case.is_train):
            Cula().prepare(make(case, torch.device("cuda"))).run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if (i + 1) % 10 == 0 or i + 1 == len(cases):
            say(f"  [{i + 1}/{len(cases)}] {case.op} {case.label}")
    return len(cases)


def _say(text: str) -> None:
    print(f"cuLA: {text}", file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass
