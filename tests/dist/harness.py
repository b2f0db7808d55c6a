# SPDX-License-Identifier: Apache-2.0
"""Real processes on gloo for tests: start P of them once, run many cases in one group, bring back what each rank says.

A module of cases marks functions `case(rank, world)` with `@case(...)`; a test module calls `run_cases` in a fixture and
looks at one case in each test. A case that fails on some rank is reported by name and does not end the others.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=90)  # a loaded machine may start one process well after another
Cases = dict[str, Callable[[int, int], Any]]


def run_cases(*modules: str, world: int, timeout: timedelta = TIMEOUT, backend: str = "gloo") -> dict[str, list[dict[str, Any]]]:
    """name -> for each rank {"error": text or None, "value": what the case returned, "seconds": ...}."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, folder, modules, timeout.total_seconds(), backend)
        with contextlib.suppress(mp.ProcessExitedException):  # what a lost rank had to say is in the files
            mp.start_processes(_worker, arguments, nprocs=world, join=True, start_method="spawn")
        files = [Path(folder, f"rank{rank}.json") for rank in range(world)]
        ranks = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return {name: [r.get(name, {"error": "did not run", "value": None}) for r in ranks] for name in cases_of(modules, world)}


def cases_of(modules: tuple[str, ...], world: int) -> Cases:
    """Those of all modules, whose names are different."""
    cases: Cases = {}
    for module in modules:
        more = importlib.import_module(module).cases(world)
        assert cases.keys().isdisjoint(more), f"{module} has a case of a name that is taken"
        cases |= more
    return cases


def _worker(rank: int, world: int, folder: str, modules: tuple[str, ...], timeout: float, backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    results: dict[str, dict[str, Any]] = {}
    for name, function in cases_of(modules, world).items():
        started = time.monotonic()
        error, value = None, None
        try:
            value = function(rank, world)
        except Exception:
            error = traceback.format_exc()
        results[name] = {"error": error, "value": value, "seconds": time.monotonic() - started}
        Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
        try:
            failed = torch.tensor([error is not None])
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        except RuntimeError:
            break
    dist.destroy_process_group()


def assert_passed(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    errors = [f"rank {rank}:\n{r['error']}" for rank, r in enumerate(results[name]) if r["error"]]
    assert not errors, "\n".join(errors)
