# SPDX-License-Identifier: Apache-2.0
"""The backward of Gated DeltaNet on the CuTe kernels: what they serve, their launch, and a record of it.

`sm90/gdn_bwd.py` launches three kernels and a short one, `kda_bwd_schedule.py` says how long segments are where heads are few,
and `gdn_bwd_abi.py` what the kernels are given; `kda_bwd_call.py` has what KDA's backward has, too. The forward saves nothing but
its inputs, even with `disable_recompute=True`: its own kernels make no tiles that could be kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cula.core.replay.record import LaunchRecord
from cula.gdn.problem import GdnInputs, GdnProblem
from cula.kda.problem import KdaGrads
from cula.ops.cute.archs import target_of
from cula.ops.cute.gdn_bwd_abi import BACKWARD, WORKSPACE
from cula.ops.cute.kda_abi import of_gates
from cula.ops.cute.kda_bwd_call import (
    GivenGrads,
    Sized,
    as_read,
    empty_gradients,
    is_as_read,
    numbers_of,
    operands_of,
    record_of,
    sized_by,
)
from cula.ops.cute.kda_bwd_schedule import Schedule, schedule_on
from cula.ops.cute.kda_schedule import SHORT, why_no_backward
from cula.ops.cute.launch import Launch
from cula.ops.cute.tensors import stream_of
from cula.ops.cute.toolchain.loader import load

OPS = ("gdn_bwd", "gdn_transition", "gdn_state_grad")  # the latter two are KDA's, with one gate a head


def why_not(problem: GdnProblem) -> str | None:
    """Why the backward does not serve a call whose forward the kernels would take, as a sentence; None if it does."""
    return why_no_backward(problem)


def variant(problem: GdnProblem) -> str:
    """The name of the kernels."""
    plain = "" if problem.options.use_qk_l2norm_in_kernel else "_plain"
    return f"bwd_gdn_{problem.gate}_{SHORT[problem.g_dtype]}{plain}"


def gdn_bwd(problem: GdnProblem, x: GdnInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """Gradients of every input from those of the outputs and (where not None) of the final states."""
    return run(problem, x, do, dht, schedule_on(problem, x.q.device))


def run(problem: GdnProblem, x: GdnInputs, do: Tensor, dht: Tensor | None, schedule: Schedule) -> KdaGrads:
    """The same with a given schedule."""
    p, device = problem, x.q.device
    x, do, dht = as_read(x, do, dht)
    grads = empty_gradients(p, x)
    work = torch.empty(sized(p, schedule).workspace, dtype=torch.uint8, device=device)
    _launch(p, x, GivenGrads(do, dht), schedule, grads, work).now(stream_of(device))
    return KdaGrads(*grads.values())  # type: ignore[arg-type]  # some may be None


def record_gdn_bwd(
    problem: GdnProblem, x: GdnInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None
) -> LaunchRecord | None:
    """A record of this call's launch, which serves calls of other lengths too; None if some tensors would have to be copied. It
    takes those of x, do and dht, and makes the gradients."""
    p, given = problem, GivenGrads(do, dht)
    if saved or not is_as_read(x, do, dht):
        return None
    schedule = schedule_on(p, x.q.device)
    return record_of(_launch(p, x, given, schedule, {}), p, x, given, schedule, sized)


def _launch(
    p: GdnProblem,
    x: GdnInputs,
    given: GivenGrads,
    schedule: Schedule,
    written: Mapping[str, Tensor | None],
    work: Tensor | None = None,
) -> Launch:
    """A call's launch, on tensors that the kernels can read as they are, and on those that they write to, by their names."""
    abi, sizes = of_gates(BACKWARD, True, p.g_dtype.itemsize), sized(p, schedule).numbers
    operands = operands_of(x, (), given, written, (), work)
    return Launch(abi, load(variant(p), target_of(p.sm)), operands, numbers_of(p, x, given) | sizes, tuple(sizes))


def sized(p: GdnProblem, schedule: Schedule) -> Sized:
    """What follows from the sizes of a call."""
    return sized_by(WORKSPACE, p, schedule, lends=True)
