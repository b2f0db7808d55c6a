# SPDX-License-Identifier: Apache-2.0
"""The KDA backward on the CuTe kernels: what they serve, their launch, and a record of it; transitions, and gradients of first
states alone, by the same kernels.

`sm90/kda_bwd.py` launches three kernels and a short one, and two more where few heads are cut into segments that have to be
chained. `kda_bwd_schedule.py` says how long segments are, `kda_bwd_abi.py` what the kernels are given, and `kda_bwd_call.py` how
that is made of a call. The forward saves its inputs and, with `disable_recompute=True`, what the first of the kernels would make.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.replay.record import LaunchRecord
from cula.kda.problem import KdaGrads, KdaInputs, KdaProblem
from cula.ops.cute.abi import Abi
from cula.ops.cute.archs import target_of
from cula.ops.cute.kda_abi import K, V, of_gates
from cula.ops.cute.kda_bwd_abi import BACKWARD, WITHOUT_GRADIENTS, WORKSPACE, WRITTEN, Makes
from cula.ops.cute.kda_bwd_call import (
    GivenGrads,
    Sized,
    as_read,
    check_tiles,
    empty_gradients,
    is_as_read,
    numbers_of,
    operands_of,
    record_of,
    sized_by,
)
from cula.ops.cute.kda_bwd_schedule import Schedule, schedule_on, whole_on
from cula.ops.cute.kda_schedule import SHORT, why_no_backward
from cula.ops.cute.kda_schedule import variant as forward_variant
from cula.ops.cute.launch import Launch, Operand, places
from cula.ops.cute.tensors import stream_of
from cula.ops.cute.toolchain.loader import load

OPS = ("kda_bwd", "kda_transition", "kda_state_grad")  # which these kernels do


class Kept(NamedTuple):
    """What a forward may have kept for a backward."""

    tiles: Tensor


def why_not(problem: KdaProblem) -> str | None:
    """Why the backward does not serve a call whose forward the kernels would take, as a sentence; None if it does."""
    return why_no_backward(problem)


def kda_bwd(problem: KdaProblem, x: KdaInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """Gradients of every input from those of the outputs and (where not None) of the final states."""
    return run(problem, x, do, dht, schedule_on(problem, x.q.device), saved[0] if saved else None)


def run(
    problem: KdaProblem, x: KdaInputs, do: Tensor, dht: Tensor | None, schedule: Schedule, tiles: Tensor | None = None
) -> KdaGrads:
    """The same with a given schedule, and with the tiles that the forward kept."""
    grads = empty_gradients(problem, x)
    _run(problem, x, do, dht, grads, schedule, Makes.GRADIENTS, tiles)
    return KdaGrads(*grads.values())  # type: ignore[arg-type]  # some may be None


def kda_transition(problem: KdaProblem, x: KdaInputs) -> tuple[Tensor, Tensor]:
    """The affine transition of each sequence, `ht = h0 @ M + B`: M [N, HV, K, K] and B [N, HV, V, K], float32."""
    return transition(problem, x, whole_on(problem, x.q.device))


def transition(problem: KdaProblem, x: KdaInputs, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """The same with a given schedule."""
    p = problem
    M, B = (torch.empty((p.N, p.HV, rows, K), dtype=torch.float32, device=x.q.device) for rows in (K, V))
    _run(p, x, x.v, None, {"M": M, "B": B}, schedule, Makes.TRANSITION)  # v stands for do, which nobody reads
    return M, B


def kda_state_grad(problem: KdaProblem, x: KdaInputs, do: Tensor, dht: Tensor | None = None) -> Tensor:
    """The gradient of the first states, and nothing else."""
    return state_grad(problem, x, do, dht, whole_on(problem, x.q.device))


def state_grad(problem: KdaProblem, x: KdaInputs, do: Tensor, dht: Tensor | None, schedule: Schedule) -> Tensor:
    """The same with a given schedule."""
    p = problem
    dh0 = torch.empty((p.N, p.HV, V, K), dtype=torch.float32, device=x.q.device)
    _run(p, x._replace(initial_state=None), do, dht, {"dh0": dh0}, schedule, Makes.STATE_GRAD)
    return dh0


def _run(
    p: KdaProblem,
    x: KdaInputs,
    do: Tensor,
    dht: Tensor | None,
    written: Mapping[str, Tensor | None],
    schedule: Schedule,
    makes: Makes,
    tiles: Tensor | None = None,
) -> None:
    """Launch the kernels, which write to some tensors, given by their names."""
    device = x.q.device
    check_tiles(p, schedule, None if tiles is None else tiles.numel())
    x, do, dht = as_read(x, do, dht)
    work = torch.empty(sized(p, schedule, tiles is not None, makes).workspace, dtype=torch.uint8, device=device)
    _launch(p, x, GivenGrads(do, dht), written, schedule, makes, tiles, work).now(stream_of(device))


def record_kda_bwd(
    problem: KdaProblem, x: KdaInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None
) -> LaunchRecord | None:
    """A record of this call's launch, which serves calls of other lengths too; None if some tensors would have to be copied. It
    takes those of x, what was saved, do and dht, and makes the gradients."""
    p, given = problem, GivenGrads(do, dht)
    if not is_as_read(x, do, dht):
        return None
    schedule = schedule_on(p, x.q.device)
    launch = _launch(p, x, given, {}, schedule, Makes.GRADIENTS, saved[0] if saved else None)
    has_tiles = bool(saved)
    return record_of(launch, p, x, given, schedule, functools.partial(sized, has_tiles=has_tiles), has_tiles)


def _launch(
    p: KdaProblem,
    x: KdaInputs,
    given: GivenGrads,
    written: Mapping[str, Tensor | None],
    schedule: Schedule,
    makes: Makes,
    tiles: Tensor | None = None,
    work: Tensor | None = None,
) -> Launch:
    """A call's launch, on tensors that the kernels can read as they are, and on those that they write to, by their names."""
    between = () if tiles is None else (Kept,)
    operands = operands_of(x, between, given, written, (K,), work)
    operands["tiles"] = Operand(tiles, places(x, *between).get("tiles"))
    operands |= {name: Operand(written.get(name)) for name in WRITTEN if name not in operands}  # which no record makes
    sizes = sized(p, schedule, tiles is not None, makes).numbers
    numbers = numbers_of(p, x, given) | sizes
    numbers |= {"lower": p.options.lower_bound or 0.0, "has_tiles": int(tiles is not None), "makes": makes}
    return Launch(_abi(p), _kernel(p), operands, numbers, tuple(sizes))


def variant(problem: KdaProblem) -> str:
    """The name of the kernels."""
    if problem.options.use_qk_l2norm_in_kernel:
        return f"bwd_{forward_variant(problem)}"
    return f"bwd_kda_f16_log_{SHORT[problem.g_dtype]}{'_scalar' if problem.has_scalar_gate else ''}_plain"


def _kernel(p: KdaProblem) -> Any:
    return load(variant(p), target_of(p.sm))


def _abi(p: KdaProblem) -> Abi:
    return of_gates(BACKWARD, p.has_scalar_gate, p.g_dtype.itemsize)


def sized(p: KdaProblem, schedule: Schedule, has_tiles: bool, makes: Makes = Makes.GRADIENTS) -> Sized:
    """What follows from the sizes of a call. T and P may lie where gradients will be, if the call makes them and those."""
    if makes == Makes.GRADIENTS:
        return sized_by(WORKSPACE, p, schedule, lends=not has_tiles, has_tiles=has_tiles)
    return sized_by(WITHOUT_GRADIENTS, p, schedule, lends=False, has_tiles=has_tiles)
