# SPDX-License-Identifier: Apache-2.0
"""`cula.dist` over the devices of this machine, beside one device doing the whole call.

A process a GPU (nccl); on a CPU two processes (gloo), which shows that it works rather than how fast it is. The time
is that of the slowest rank, from a barrier until its device is idle.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cula.bench import timing
from cula.bench.cases import Case
from cula.bench.check import Outputs
from cula.bench.inputs import Inputs, make
from cula.bench.ours import Cula

CPU_RANKS = 2
WARM_UP, REPEATS = 2, 9


def why_not(case: Case) -> str | None:
    if importlib.util.find_spec("cula.dist") is None:
        return "cula.dist is not part of this build"
    if case.packed or not case.op.endswith("_prefill"):
        return "the suite measures prefills of equal lengths"
    return None


def num_ranks(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else CPU_RANKS


def measure(case: Case, device: torch.device, backend: str, seed: int) -> tuple[timing.Timing, Outputs, str]:
    """The slowest rank's time, the result put together from all ranks, and how many there were."""
    world = num_ranks(device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, case.to_json(), device.type, backend, seed, folder)
        torch.multiprocessing.spawn(_rank, args=arguments, nprocs=world)
        parts = [torch.load(Path(folder) / f"{rank}.pt", map_location=device) for rank in range(world)]
    along = 2 if case.mode == "tp" else 1
    got = {"o": torch.cat([p["o"] for p in parts], dim=along)}
    states = [p["state"] for p in parts if p["state"] is not None]
    if states:
        got["state"] = torch.cat(states, dim=1) if case.mode == "tp" else states[0]
    ms = max(p["ms"] for p in parts)
    return timing.Timing(ms, "clock, slowest rank"), got, f"{world} rank{'s' if world > 1 else ''}"


def _rank(rank: int, world: int, case_json: dict[str, Any], kind: str, backend: str, seed: int, folder: str) -> None:
    case = Case.from_json(case_json)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    name = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(name, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        x = make(case, device, seed)
        run = _call(x, backend, rank, world)
        o, state = run()
        saved = {"o": o.cpu(), "state": None if state is None else state.cpu(), "ms": _slowest(run, device)}
        torch.save(saved, Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _call(x: Inputs, backend: str, rank: int, world: int) -> Any:
    """This rank's share, cut beforehand: what a model that runs in parallel has at hand."""
    from cula import dist as parallel

    function, args, options = Cula(backend).call(x)
    if x.case.mode == "tp":
        options |= {"tp_group": None, "tp_size": world, "tp_rank": rank}
        return lambda: getattr(parallel, f"{function.__name__}_tp")(*args, **options)
    T = x.q.shape[1]
    first, end = rank * T // world, (rank + 1) * T // world
    share: list[Tensor] = [t[:, first:end].contiguous() if t.shape[1:2] == (T,) else t for t in args]
    options |= {"cp_mode": x.case.mode.removeprefix("cp-"), "broadcast_final_state": True}
    options |= {"sp_group": None, "sp_size": world, "sp_rank": rank}
    return lambda: getattr(parallel, f"{function.__name__}_cp")(*share, **options)


def _slowest(run: Any, device: torch.device) -> float:
    """Median milliseconds of this rank, all starting together."""
    times = []
    for i in range(WARM_UP + REPEATS):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= WARM_UP:
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3
