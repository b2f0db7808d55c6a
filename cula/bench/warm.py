# SPDX-License-Identifier: Apache-2.0
"""Compile before measuring, in many processes: kernels land in the compilers' caches on disk, where the run finds them.

Libraries that tune themselves compile a hundred variants for each number of heads, one after another: minutes, in which
nothing is measured. Here each process calls the contenders once on a few cases. What is *tuned* here is not kept (the
processes disturb each other); the run tunes again, alone on the device, from compiled variants.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cula.bench.cases import Case
from cula.bench.inputs import make
from cula.bench.ours import Cula
from cula.bench.peers import PEERS

MAX_TOKENS, MAX_SEQUENCES = 1024, 2  # what peers tune for depends on heads, not on lengths
SECONDS = 300.0  # unless the run's budget says otherwise

Unit = tuple[str, str, dict[str, Any], str]  # contender, cuLA's backend, case, device


def units(cases: Sequence[Case], peers: Sequence[str], backend: str, device: str) -> list[Unit]:
    """Every kernel once: cuLA on its true shapes, a peer on one short shape for each number of heads."""
    found: dict[tuple[Any, ...], Unit] = {}
    for case in (c for c in cases if c.suite != "dist"):
        case = replace(case, suite="warm", mode="", gate="fast" if case.gate == "slow" else case.gate)
        found.setdefault(("cula", case.id), ("cula", backend, case.to_json(), device))
        short = case if case.packed else replace(case, lens=(min(case.lens[0], MAX_TOKENS),) * min(case.N, MAX_SEQUENCES))
        for name in peers:
            key = (name, case.packed, replace(short, lens=short.lens[:1], packed=False).id)
            found.setdefault(key, (name, "", short.to_json(), device))
    # peers first: theirs take longest
    return sorted(found.values(), key=lambda unit: unit[0] == "cula")


def warm(todo: Sequence[Unit], processes: int, seconds: float = SECONDS) -> int:
    """Visit the units in so many processes; how many were done when all were, or time was up."""
    began, done = time.perf_counter(), 0
    with multiprocessing.get_context("spawn").Pool(processes, _keep_nothing_tuned) as pool:
        visits = pool.imap_unordered(_visit, todo)
        for _ in todo:
            left = seconds - (time.perf_counter() - began)
            try:
                visits.next(max(left, 0.01))
            except multiprocessing.TimeoutError:
                break
            done += 1
    return done


def _keep_nothing_tuned() -> None:
    os.environ |= {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}


def _visit(unit: Unit) -> None:
    name, backend, values, device = unit
    case = Case.from_json(values)
    contender = Cula(backend) if name == "cula" else next(p for p in PEERS if p.name == name)
    if contender.why_not(case) is not None:
        return
    try:
        with torch.set_grad_enabled(case.is_train):
            contender.prepare(make(case, torch.device(device))).run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:  # the run meets the same exception and shows it in its row
        return
