# SPDX-License-Identifier: Apache-2.0
"""The backward of Lightning Attention on the CuTe kernels: what they serve, and the launches.

`sm90/lightning_bwd.py` says what the kernels compute, `lightning_bwd_abi.py` what they are given, `lightning_schedule.py` how
work is split. The forward keeps nothing for them but its inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cula.core.replay.record import LaunchRecord
from cula.core.replay.torch_internals import form_of
from cula.core.replay.workspace import workspace
from cula.lightning.problem import LightningInputs, LightningProblem
from cula.ops.cute.archs import target_of
from cula.ops.cute.launch import Launch, Operand, token_strides
from cula.ops.cute.lightning_bwd_abi import LIGHTNING_BWD, OUTPUTS
from cula.ops.cute.lightning_schedule import BACKWARD, Schedule, schedule_on
from cula.ops.cute.tensors import as_states, as_tokens, stream_of
from cula.ops.cute.toolchain.loader import load


class Gradients(NamedTuple):
    """Gradients of every input but `cu_seqlens`."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_decay: None
    dh0: Tensor | None


def why_not(problem: LightningProblem) -> str | None:
    """Why the backward does not serve a call whose forward the kernels would take, as a sentence; None if it does."""
    p = problem
    if "decay" in p.grads:
        return "has no kernel for the gradient of decay"
    if p.H != p.HV:
        return f"has no backward for value heads that share keys, and this call has H = {p.H}, HV = {p.HV}"
    return None


def lightning_bwd(
    problem: LightningProblem, x: LightningInputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
) -> Gradients:
    """Gradients of q, k and v in bfloat16, and of the initial state in float32, where there is one."""
    return run(problem, x, schedule_on(problem, x.q.device, BACKWARD), do, dht)


def run(problem: LightningProblem, x: LightningInputs, schedule: Schedule, do: Tensor, dht: Tensor | None) -> Gradients:
    """Launch with a given schedule."""
    p, device = problem, x.q.device
    h0 = None if x.initial_state is None else as_states(x.initial_state)
    dht = None if dht is None else as_states(dht.float().contiguous())
    x, do = x._replace(q=as_tokens(x.q), k=as_tokens(x.k), v=as_tokens(x.v), initial_state=h0), as_tokens(do)
    made, size = _outputs(p, x), schedule.workspace_bytes(p)
    seeds = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    for launch in _launches(p, x, schedule, do, dht, made, seeds):
        launch.now(stream_of(device))
    return made


def record_lightning_bwd(
    problem: LightningProblem, x: LightningInputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
) -> LaunchRecord | None:
    """A record of this backward's launches, for calls of the same sizes; None if some tensors would have to be copied. It takes
    those of x, then do and dht, at addresses that TMA can read."""
    p, device = problem, x.q.device
    is_plain = dht is None or (dht.dtype == torch.float32 and dht.is_contiguous())
    if not is_plain or any(as_tokens(t) is not t for t in (x.q, x.k, x.v, do)):
        return None
    schedule, made = schedule_on(p, device, BACKWARD), _outputs(p, x)
    launches = tuple(launch.recorded() for launch in _launches(p, x, schedule, do, dht, made))
    outputs = tuple(None if t is None else form_of(t) for t in made)
    size = schedule.workspace_bytes(p)
    return LaunchRecord(device.index, launches, outputs, workspace(device.index, size) if size else None)


def _launches(
    p: LightningProblem,
    x: LightningInputs,
    schedule: Schedule,
    do: Tensor,
    dht: Tensor | None,
    made: Gradients,
    seeds: Tensor | None = None,
) -> list[Launch]:
    """What a call launches, on tensors that kernels can read as they are."""
    given = x._asdict() | {"do": do, "dht": dht}
    operands = {name: Operand(t, i) for i, (name, t) in enumerate(given.items())}
    operands["h0"] = operands.pop("initial_state")
    operands |= {name: Operand(t, ~i) for i, (name, t) in enumerate(made._asdict().items()) if name != "d_decay"}
    operands["seeds"] = Operand(seeds, ~len(made) if schedule.segment else None)
    has_h0, target = int(x.initial_state is not None), target_of(p.sm)
    numbers: dict[str, int | float | bool] = {**token_strides(q=x.q, k=x.k, v=x.v, do=do), "H": p.H, "scale": p.scale}
    numbers |= {"has_h0": has_h0, "has_dht": int(dht is not None), "has_dh0": has_h0, **schedule.numbers(p)}
    return [Launch(LIGHTNING_BWD, load(name, target), operands, numbers) for name in schedule.kernels]


def _outputs(p: LightningProblem, x: LightningInputs) -> Gradients:
    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.q.device)

    dq, dk, dv = (new(p.B, p.T, p.H, p.K, dtype=p.dtype) for _ in OUTPUTS)
    return Gradients(dq, dk, dv, None, new(p.N, p.HV, p.V, p.K, dtype=torch.float32) if p.has_initial_state else None)
