# SPDX-License-Identifier: Apache-2.0
"""Calls that must fail, and fail alike on all ranks; each returns the error it met."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cula.dist import Schedule, cula_kda_cp, cula_kda_tp, cula_kda_tp_cp, cula_lightning_cp, handshake
from tests.dist.problems import TOKENS, Spec, make

LAST_ONLY: dict[str, dict[str, Any]] = {  # what the last rank does differently
    "K": {"K": 8},
    "heads": {"HV": 4},
    "batch": {"B": 2},
    "dtype": {"dtype": torch.bfloat16},
    "scale": {"options": {"scale": 0.5}},
    "cp_mode": {"options": {"cp_mode": "ring"}},
    "schedule": {"options": {"schedule": Schedule("gather")}},
    "broadcast": {"options": {"broadcast_final_state": True}},
    "no-final-state": {"options": {"output_final_state": False}},
    "cu_seqlens": {"lengths": (9, 11)},
    "one-packs": {"lengths": (20,)},
    "wants-grad": {"needs_grad": True},
    "initial-state": {"lengths": (12, 8), "has_h0": True},
    "other-family": {"family": "lightning"},
    "refused": {"break": "beta"},
    "unknown-keyword": {"options": {"sp_modus": "split"}},
}
SAME = {"cu_seqlens": {"lengths": (12, 8)}, "initial-state": {"lengths": (12, 8)}}  # what all ranks do, if not a batch


def cases(world: int) -> dict[str, Callable[[int, int], Any]]:
    out: dict[str, Callable[[int, int], Any]] = {
        name: functools.partial(disagree, name) for name in LAST_ONLY
    }  # fmt: skip
    out["first-rank-refuses"] = functools.partial(disagree, "refused", odd_rank=0)
    out["all-refuse"] = all_refuse
    out["bad-sizes"] = bad_sizes
    out["remembered"] = remembered
    out["gather-disagrees"] = gather_disagrees
    out["hybrid-refused"] = hybrid_refused
    out["hybrid-all-refuse"] = hybrid_all_refuse
    if world == 4:
        out["mesh-refused"] = mesh_refused
    return out


def disagree(name: str, rank: int, world: int, odd_rank: int | None = None) -> dict[str, Any]:
    """One rank's call differs; then all make the same good call, which must work."""
    is_odd = rank == (world - 1 if odd_rank is None else odd_rank)
    change = dict(SAME.get(name, {}))
    change |= LAST_ONLY[name] if is_odd else {}
    started = time.monotonic()
    error = _error_of(functools.partial(_call, change, rank, world))
    seconds = time.monotonic() - started
    _call({}, rank, world)
    return {"error": error, "seconds": seconds, "is_odd": is_odd}


def all_refuse(rank: int, world: int) -> dict[str, Any]:
    """A call that no rank accepts: each raises by itself, at once, and nothing is left behind."""
    started = time.monotonic()
    error = _error_of(functools.partial(_call, {"break": "beta"}, rank, world))
    seconds = time.monotonic() - started
    if rank == 0:
        time.sleep(0.3)
    _call({"options": {"scale": 0.7}}, rank, world)
    return {"error": error, "seconds": seconds}


def hybrid_refused(rank: int, world: int) -> dict[str, Any]:
    """Heads that cannot be shared out, on the last rank of those that share tokens."""
    sizes = {"tp_group": None, "tp_size": 2, "tp_rank": 0, "sp_group": None, "sp_size": world, "sp_rank": rank}
    is_odd = rank == world - 1
    error = _error_of(lambda: cula_kda_tp_cp(*_tokens(HV=3 if is_odd else 4), **sizes))
    cula_kda_tp_cp(*_tokens(HV=4), **sizes)
    return {"error": error, "is_odd": is_odd}


def hybrid_all_refuse(rank: int, world: int) -> dict[str, Any]:
    """A `tp_size` that does not divide the heads: each rank raises by itself, at once."""
    sizes = {"tp_group": None, "tp_size": 3, "tp_rank": 0, "sp_group": None, "sp_size": world, "sp_rank": rank}
    started = time.monotonic()
    error = _error_of(lambda: cula_kda_tp_cp(*_tokens(HV=4), **sizes))
    return {"error": error, "seconds": time.monotonic() - started}


def mesh_refused(rank: int, world: int) -> dict[str, Any]:
    """The same, and a call that level 1 refuses, with gathered heads: ranks that share heads with the refused ones hear of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    sp_rank, tp_rank = mesh.get_local_rank("cp"), mesh.get_local_rank("tp")
    sizes = {"tp_group": mesh, "tp_size": 2, "tp_rank": tp_rank, "sp_group": mesh, "sp_size": 2, "sp_rank": sp_rank}
    bad = _tokens(HV=4)
    bad[4] = bad[4][:, 1:]
    errors = []
    for odd in (_tokens(HV=3), bad):
        x = odd if rank == 3 else _tokens(HV=4)
        errors.append(_error_of(functools.partial(cula_kda_tp_cp, *x, gather_output=True, **sizes)))
        cula_kda_tp_cp(*_tokens(HV=4), gather_output=True, **sizes)
    return {"errors": errors}


def _tokens(**spec: Any) -> list[Any]:
    return [make(Spec(slices=(20,), **spec))[name] for name in TOKENS["kda"]]


def bad_sizes(rank: int, world: int) -> dict[str, str]:
    """ValueError before any message: only rank 0 makes these calls."""
    if rank != 0:
        return {}
    x = _tokens()
    cp = functools.partial(cula_kda_cp, *x)
    tp = functools.partial(cula_kda_tp, *x)
    mesh = {"sp_group": None, "sp_size": world, "sp_rank": 0}
    calls: dict[str, Callable[[], Any]] = {
        "sp_size": lambda: cp(sp_group=None, sp_size=world + 1, sp_rank=0),
        "sp_size of one": lambda: cp(sp_group=dist.group.WORLD, sp_size=1, sp_rank=0),
        "sp_rank": lambda: cp(sp_group=None, sp_size=world, sp_rank=1),
        "sp_rank range": lambda: cp(sp_group=None, sp_size=world, sp_rank=world),
        "group": lambda: cp(sp_group="world", sp_size=world, sp_rank=0),
        "not in the group": lambda: cp(sp_group=dist.GroupMember.NON_GROUP_MEMBER, sp_size=world, sp_rank=0),
        "tp_size": lambda: tp(tp_size=3, tp_rank=0),
        "tp_group": lambda: tp(tp_size=world + 1, tp_rank=0, tp_group=dist.group.WORLD),
        "tp_rank": lambda: tp(tp_size=2, tp_rank=2),
        "tp_rank in both": lambda: cula_kda_tp_cp(*x, tp_group=None, tp_size=2, tp_rank=2, **mesh),
        "nvshmem": lambda: cp(nvshmem_backend=True, **mesh),
        "nvshmem in tp": lambda: tp(nvshmem_backend=True),
    }
    return {name: _error_of(call) or "" for name, call in calls.items()}


def remembered(rank: int, world: int) -> int:
    """Where not every call is compared, repeated ones are not. Returns how many comparisons 20 calls made."""
    every_call, handshake._compares_every_call = handshake._compares_every_call, lambda group: False
    try:
        _call({"options": {"scale": 0.9}}, rank, world)
        before = handshake._agreed(dist.group.WORLD).comparisons
        for _ in range(20):
            _call({"options": {"scale": 0.9}}, rank, world)
        return handshake._agreed(dist.group.WORLD).comparisons - before
    finally:
        handshake._compares_every_call = every_call


def gather_disagrees(rank: int, world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    tensors = _tokens(HV=4, V=8 if rank == 1 else 12)
    options = {"tp_group": mesh, "tp_size": world, "tp_rank": rank, "gather_output": True}
    return {"error": _error_of(lambda: cula_kda_tp(*tensors, **options))}


def _call(change: dict[str, Any], rank: int, world: int) -> None:
    change = dict(change)
    needs_grad, broken = change.pop("needs_grad", False), change.pop("break", None)
    lengths = change.pop("lengths", None)
    spec = Spec(lengths=lengths, slices=None if lengths else (20,), **change)
    x = make(spec)
    if broken:
        x[broken] = x[broken][:, 1:]
    options = dict(spec.options)
    if lengths is not None:
        options |= {"sp_mode": "split", "cu_seqlens": spec.cu_seqlens}
        tokens = slice(rank * spec.T // world, (rank + 1) * spec.T // world)
        x = {name: t[:, tokens] if name in TOKENS[spec.family] else t for name, t in x.items()}
    if needs_grad:
        x["q"].requires_grad_()
    if "initial_state" in x:
        options["initial_state"] = x["initial_state"]
    positional = [x[name] for name in TOKENS[spec.family]] + ([x["decay"]] if spec.family == "lightning" else [])
    function = cula_kda_cp if spec.family == "kda" else cula_lightning_cp
    function(*positional, sp_group=None, sp_size=world, sp_rank=rank, **options)


def _error_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
