# SPDX-License-Identifier: Apache-2.0
"""The backward of Gated DeltaNet on the CuTe kernels: what they serve, their launch, and a record of it.

`sm90/gdn_bwd.py` launches three kernels and a short one, `kda_bwd_schedule.py` says how long segments are where heads are few,
and `gdn_bwd_abi.py` what the kernels are given. The forward keeps nothing for them but its inputs,
with `disable_recompute=True` too: its own kernels make no tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cula.core.replay.record import LaunchRecord, Resized, Sizes
from cula.core.replay.sizes import prefill_labels, resized
from cula.core.replay.workspace import workspace
from cula.gdn.problem import GdnInputs, GdnProblem, kda_problem
from cula.kda.problem import KdaGrads
from cula.ops.cute.abi import Abi
from cula.ops.cute.archs import target_of
from cula.ops.cute.gdn_bwd_abi import BACKWARD, WORKSPACE
from cula.ops.cute.kda_abi import of_gates
from cula.ops.cute.kda_bwd import (
    MADE,
    GivenGrads,
    as_read,
    bytes_of,
    forms,
    is_as_read,
    numbers_of,
    operands_of,
    parameters_there,
    sizes_of,
)
from cula.ops.cute.kda_bwd_schedule import Schedule, schedule, schedule_on
from cula.ops.cute.kda_schedule import SHORT, are_too_many
from cula.ops.cute.launch import Launch
from cula.ops.cute.tensors import sms_of, stream_of
from cula.ops.cute.toolchain.loader import load

OPS = ("gdn_bwd", "gdn_transition", "gdn_state_grad")  # the latter two are KDA's, with one gate a head
TOKENS = ("q", "k", "v", "g", "beta", "do")


def why_not(problem: GdnProblem) -> str | None:
    """Why the backward does not serve a call whose forward the kernels would take, as a sentence; None if it does."""
    if not problem.options.use_qk_l2norm_in_kernel:
        return "has a backward for keys that are normalised in the kernel: use_qk_l2norm_in_kernel=True"
    return None


def variant(problem: GdnProblem) -> str:
    """The name of the kernels."""
    return f"bwd_gdn_{problem.gate}_{SHORT[problem.g_dtype]}"


def gdn_bwd(problem: GdnProblem, x: GdnInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """Gradients of every input from those of the outputs and (where not None) of the final states."""
    return run(problem, x, do, dht, schedule_on(problem, x.q.device))


def run(problem: GdnProblem, x: GdnInputs, do: Tensor, dht: Tensor | None, made_for: Schedule) -> KdaGrads:
    """The same with a given schedule."""
    p, device = problem, x.q.device
    x, do, dht = as_read(x, do, dht)
    made = [None if f is None else torch.empty(f[0], dtype=f[2], device=device) for f in forms(p, parameters_there(x))]
    grads = KdaGrads(*made)  # type: ignore[arg-type]  # some may be None
    written = {MADE.get(name, name): t for name, t in zip(KdaGrads._fields, grads)}
    work = torch.empty(_workspace_bytes(p, made_for), dtype=torch.uint8, device=device)
    _launch(p, x, GivenGrads(do, dht), made_for, written, work).now(stream_of(device))
    return grads


def record_gdn_bwd(
    problem: GdnProblem, x: GdnInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None
) -> LaunchRecord | None:
    """A record of this call's launch, which serves calls of other lengths too; None if some tensors would have to be copied. It
    takes those of x, do and dht, and makes the gradients."""
    p, device, given = problem, x.q.device, GivenGrads(do, dht)
    if saved or not is_as_read(x, do, dht):
        return None
    made_for, there = schedule_on(p, device), parameters_there(x)
    launch = _launch(p, x, given, made_for, {})
    labels = prefill_labels(x, given, TOKENS, p.is_packed)
    work = workspace(device.index, _workspace_bytes(p, made_for))
    return LaunchRecord(device.index, (launch.recorded(),), forms(p, there), work, sizes=Sizes(labels, _resize(p, there, device)))


def _launch(
    p: GdnProblem,
    x: GdnInputs,
    given: GivenGrads,
    made_for: Schedule,
    made: Mapping[str, Tensor | None],
    work: Tensor | None = None,
) -> Launch:
    """A call's launch, on tensors that the kernels can read as they are; `made` are those that they write to, by their names."""
    none, sizes = _no_gate(x.q.device, p.HV), sizes_of(p, made_for, lends=True)
    operands = operands_of(x, (), given, made, (none, none), work)
    return Launch(_abi(p), _kernel(p), operands, numbers_of(p, x, *given) | sizes, tuple(sizes))


def _resize(p: GdnProblem, there: tuple[bool, bool, bool], device: torch.device) -> Callable[[int, int], Resized | None]:
    """What a record needs for other numbers of tokens and sequences; None where other kernels serve those."""
    is_packed, num_sms = p.is_packed, sms_of(device)

    def resize(first: int, second: int) -> Resized | None:
        B, T, N = (1, first, second) if is_packed else (first, second, first)
        other = resized(p, B, T, N)
        if not (B * T and N) or are_too_many(kda_problem(other)):
            return None
        made = schedule(other, num_sms)
        work = workspace(device.index, _workspace_bytes(other, made))
        return Resized(tuple(sizes_of(other, made, lends=True).values()), forms(other, there), work)

    return resize


def _kernel(p: GdnProblem) -> Any:
    return load(variant(p), target_of(p.sm))


def _abi(p: GdnProblem) -> Abi:
    return of_gates(BACKWARD, True, p.g_dtype.itemsize)


def _workspace_bytes(p: GdnProblem, made_for: Schedule) -> int:
    return bytes_of(WORKSPACE, p, made_for, sizes_of(p, made_for, lends=True))


@functools.cache
def _no_gate(device: torch.device, HV: int) -> Tensor:
    """A_log and dt_bias where a call has none."""
    return torch.zeros(HV, dtype=torch.float32, device=device)
