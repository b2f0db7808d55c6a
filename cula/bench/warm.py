# SPDX-License-Identifier: Apache-2.0
"""Compile before measuring, in many processes: kernels land in the compilers' caches on disk, where the run finds them.

Libraries that tune themselves compile about a hundred variants for each number of heads, one after another: minutes, in
which nothing is measured. Here every process walks the same list of calls. Such a library's call only compiles
(`compile_only`), and each of its variants goes to the process that asks for it first, so that the work divides evenly
however few calls there are. Calls that tune nothing, cuLA's among them, each run in one process. No verdict of a tuner
comes from here: the run times the variants itself, alone on the device.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cula.bench.cases import Case
from cula.bench.inputs import make
from cula.bench.ours import Cula
from cula.bench.peers import PEERS

SAME_KERNELS = {"slow": "fast", "mixed": "fast", "softplus": "init"}  # gates, and those that run the same
MAX_ROWS = 2**20  # tokens x heads of a peer's call: every process allocates its tensors
SECONDS = 300.0  # unless the run's budget says otherwise

Unit = tuple[str, str, dict[str, Any], str]  # contender, cuLA's backend, case, device


def units(cases: Sequence[Case], peers: Sequence[str], backend: str, device: str) -> list[Unit]:
    """Every call once, whatever the decay: cuLA's as it is, a peer's at most `MAX_ROWS` long."""
    found: dict[tuple[Any, ...], Unit] = {}
    for case in (c for c in cases if c.suite != "dist"):
        case = replace(case, suite="warm", mode="", gate=SAME_KERNELS.get(case.gate, case.gate))
        found.setdefault(("cula", case.id), ("cula", backend, case.to_json(), device))
        if not case.packed:
            case = replace(case, lens=(max(min(case.lens[0], MAX_ROWS // (case.HV * case.N)), 1),) * case.N)
        for name in peers:
            found.setdefault((name, case.id), (name, "", case.to_json(), device))
    # cuLA's first: each occupies one process, and the others go on to what can be divided
    return sorted(found.values(), key=lambda unit: unit[0] != "cula")


def warm(todo: Sequence[Unit], processes: int, seconds: float = SECONDS) -> int:
    """Walk the units in so many processes; how many were compiled when all were, or time was up."""
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    passed = [context.Value("i", 0, lock=False) for _ in range(processes)]  # units that a process has behind it
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=_walk, args=(todo, count, folder), daemon=True) for count in passed]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(end - time.monotonic(), 0))
        for worker in workers:
            worker.terminate()
            worker.join()
    return min(count.value for count in passed)  # a unit is whole when every process has left it


def _walk(todo: Sequence[Unit], passed: Any, folder: str) -> None:
    first = functools.partial(claim, Path(folder))
    for unit in todo:
        _visit(unit, first)
        passed.value += 1


def claim(folder: Path, what: str) -> bool:
    """Whether this process is the first to name the work; a file in a folder that all share says so."""
    try:
        (folder / hashlib.sha256(what.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _visit(unit: Unit, first: Callable[[str], bool]) -> None:
    name, backend, values, device = unit
    case = Case.from_json(values)
    contender = Cula(backend) if name == "cula" else next(p for p in PEERS if p.name == name)
    if contender.why_not(case) is not None or (not contender.tunes and not first(f"{name} {case.id}")):
        return
    try:
        with torch.set_grad_enabled(case.is_train), compile_only(first) if contender.tunes else contextlib.nullcontext():
            contender.prepare(make(case, torch.device(device))).run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:  # the run meets the same exception and shows it in its row
        return


@contextlib.contextmanager
def compile_only(first: Callable[[str], bool]) -> Iterator[None]:
    """Inside, a Triton launch compiles, with every variant its tuner would try, and runs nothing.

    Variants for which `first` says no are left to whoever was told yes. Written for Triton 3.6.
    """
    try:
        from triton import knobs
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.errors import OutOfResources
        from triton.runtime.jit import JITFunction
    except ImportError:  # then there is nothing to compile either
        yield
        return
    launch, tune = JITFunction.run, Autotuner.run

    def compile_kernel(self: Any, *args: Any, grid: Any = None, warmup: bool = True, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None:
            with contextlib.suppress(OutOfResources):  # a variant that does not fit; its tuner skips it too
                kernel.run  # noqa: B018  builds the launcher, which is compiled and cached as well
        return kernel

    def compile_variants(self: Any, *args: Any, grid: Any = None, warmup: bool = True, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args))
        for config in self.prune_configs(kwargs):
            with contextlib.suppress(Exception):  # as its tuner does, which takes another
                self.fn.run(*args, grid=grid, warmup=True, **kwargs, **config.all_kwargs())

    def is_taken(*, key: Any, fn: Any, **_: Any) -> bool:
        return not first(f"{fn.module}.{fn.name} {key}")

    JITFunction.run, Autotuner.run = compile_kernel, compile_variants
    try:
        with knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = is_taken
            yield
    finally:
        JITFunction.run, Autotuner.run = launch, tune
