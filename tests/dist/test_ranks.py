# SPDX-License-Identifier: Apache-2.0
"""`cula.dist` on real gloo processes: values and gradients against float64, and calls that must fail.

The calls are in `*_cases.py`; here they are started, two and four processes at a time, and looked at one by one.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.dist.harness import assert_passed, run_cases
from tests.dist.problems import Spec, check_cp
from tests.support.once import once_a_run

WORLDS = (2, 4)
MODULES = ("tests.dist.cp_cases", "tests.dist.tp_cases", "tests.dist.fault_cases")


@functools.cache
def results_of(world: int) -> dict[str, list[dict[str, Any]]]:
    """All cases, run once a session by one group of processes: to start these takes longer than most of them."""
    return once_a_run(f"ranks-{world}", lambda: run_cases(*MODULES, world=world))


def all_cases(module: str) -> list:
    """Those of four processes are slow. All but meshes, which need four, run with two as well."""
    marks = {2: [], 4: [pytest.mark.slow]}
    cases = importlib.import_module(f"tests.dist.{module}").cases
    return [pytest.param(world, name, marks=marks[world]) for world in WORLDS for name in cases(world)]


@pytest.mark.parametrize(("world", "name"), all_cases("cp_cases"))
def test_context_parallel(world, name):
    assert_passed(results_of(world), name)


@pytest.mark.parametrize(("world", "name"), all_cases("tp_cases"))
def test_tensor_parallel_and_hybrid(world, name):
    assert_passed(results_of(world), name)


@pytest.mark.parametrize(("world", "name"), all_cases("fault_cases"))
def test_faults(world, name):
    results = results_of(world)
    assert_passed(results, name)
    values = [r["value"] for r in results[name]]
    if name == "bad-sizes":
        errors = values[0]
        for what, error in errors.items():
            expected = "NotImplementedError" if "nvshmem" in what else "ValueError"
            assert error.startswith(expected), f"{what}: {error}"
        assert "use a torch.distributed process group" in errors["nvshmem"]
        assert "does not divide the 2 value heads" in errors["tp_size"]
        assert "this process is not in sp_group" in errors["not in the group"]
    elif name == "remembered":
        assert values == [0] * world
    elif name in ("all-refuse", "hybrid-all-refuse"):
        words = "kda_cp: beta has shape" if name == "all-refuse" else "kda_tp_cp: tp_size = 3 does not divide the 4 value heads"
        assert all(v["error"].startswith(f"ValueError: cula_{words}") and v["seconds"] < 5 for v in values)
    elif name == "mesh-refused":
        heads, beta = zip(*(v["errors"] for v in values))
        assert all("tp_size = 2 does not divide the 3 value heads" in error for error in heads), heads
        assert all("beta has shape [1, 19, 2]" in error for error in beta), beta
    elif name in ("refused", "first-rank-refuses", "unknown-keyword", "hybrid-refused"):
        others = {v["error"] for v in values if not v["is_odd"]}
        (own,) = (v["error"] for v in values if v["is_odd"])
        assert len(others) == 1
        assert "refused the call: " + own in others.pop()
        assert own.startswith("TypeError" if name == "unknown-keyword" else "ValueError")
    else:
        errors = {v["error"] for v in values}
        assert len(errors) == 1, errors
        assert errors.pop().startswith("ValueError: cula")
        assert all(v.get("seconds", 0) < 10 for v in values)


def _lose_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)
    check_cp(Spec(slices=(20, 20)), rank, 2)
    is_through = Path(folder) / "through"  # no collective: the last bytes of one may be lost with the rank
    if rank == 1:
        while not is_through.exists():
            time.sleep(0.01)
        os._exit(0)
    is_through.touch()
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        check_cp(Spec(slices=(20, 20)), rank, 2)
    assert time.monotonic() - started < 60
    os._exit(0)  # no orderly end of a group that has lost a rank


def test_a_lost_rank_is_an_error_of_the_group(tmp_path):
    mp.start_processes(_lose_a_rank, (str(tmp_path),), nprocs=2, join=True, start_method="spawn")


def _share_a_gpu(rank: int, world: int, folder: str, backend: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    modes = ("ring", "scan") if world > 1 else ("auto",)
    for family in ("kda", "gdn", "lightning"):
        for cp_mode in modes:
            options = {"cp_mode": cp_mode, "broadcast_final_state": True}
            spec = Spec(family, slices=(100, 64, 33, 59)[:world], H=1, HV=2, K=64, V=64, has_h0=True, options=options)
            check_cp(spec, rank, world, device="cuda", tolerance=5e-3)
            spec = Spec(
                family, lengths=(50, 130, 0, 40), H=1, HV=2, K=64, V=64, has_h0=True, options=options | {"sp_mode": "split"}
            )
            check_cp(spec, rank, world, device="cuda", tolerance=5e-3)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("world", "backend"), [(2, "gloo"), (4, "gloo"), (1, "nccl")])
def test_ranks_that_share_a_gpu(world, backend, tmp_path):
    mp.start_processes(_share_a_gpu, (world, str(tmp_path), backend), nprocs=world, join=True, start_method="spawn")
