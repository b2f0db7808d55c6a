# SPDX-License-Identifier: Apache-2.0
"""The backward of Lightning Attention on the CuTe kernels: what they serve, and the launches.

`sm90/lightning_bwd.py` says what the kernels compute, `lightning_bwd_abi.py` what they are given, `lightning_schedule.py` how
work is split. The forward keeps nothing for them but its inputs. Never run on hardware.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.replay.record import LaunchRecord
from cula.core.replay.torch_internals import form_of
from cula.core.replay.workspace import workspace
from cula.lightning.problem import LightningInputs, LightningProblem
from cula.ops.cute.archs import target_of
from cula.ops.cute.launch import Launch, Operand, token_strides
from cula.ops.cute.lightning_bwd_abi import LIGHTNING_BWD, OUTPUTS
from cula.ops.cute.lightning_schedule import BACKWARD, Schedule, choose_schedule
from cula.ops.cute.tensors import as_states, as_tokens, sms_of, stream_of
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


@functools.lru_cache(maxsize=1024)
def _schedule_on(problem: LightningProblem, device: torch.device) -> Schedule:
    return choose_schedule(problem, sms_of(device), BACKWARD)


def lightning_bwd(
    problem: LightningProblem, x: LightningInputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
) -> Gradients:
    """Gradients of q, k and v in bfloat16, and of the initial state in float32, where there is one."""
    return run(problem, x, _schedule_on(problem, x.q.device), do, dht)


def run(problem: LightningProblem, x: LightningInputs, schedule: Schedule, do: Tensor, dht: Tensor | None) -> Gradients:
    """Launch with a given schedule."""
    p, device = problem, x.q.device
    h0 = None if x.initial_state is None else as_states(x.initial_state)
    dht = None if dht is None else as_states(dht.float().contiguous())
    x, do = x._replace(q=as_tokens(x.q), k=as_tokens(x.k), v=as_tokens(x.v), initial_state=h0), as_tokens(do)
    made = _outputs(p, x)
    seeds = torch.empty(_seeds_shape(p, schedule), dtype=torch.float32, device=device) if schedule.segment else None
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
    schedule, made = _schedule_on(p, device), _outputs(p, x)
    launches = tuple(launch.recorded() for launch in _launches(p, x, schedule, do, dht, made))
    outputs = tuple(None if t is None else form_of(t) for t in made)
    return LaunchRecord(device.index, launches, outputs, _seeds(p, device, schedule))


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
    numbers = _numbers(p, x, schedule, do, dht)
    return [Launch(LIGHTNING_BWD, kernel, operands, numbers) for kernel in _kernels(p, schedule)]


def _outputs(p: LightningProblem, x: LightningInputs) -> Gradients:
    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.q.device)

    dq, dk, dv = (new(p.B, p.T, p.H, p.K, dtype=p.dtype) for _ in OUTPUTS)
    return Gradients(dq, dk, dv, None, new(p.N, p.HV, p.V, p.K, dtype=torch.float32) if p.has_initial_state else None)


def _seeds_shape(p: LightningProblem, schedule: Schedule) -> tuple[int, ...]:
    """The shape of what segments leave to each other: states S, and gradients of states."""
    return BACKWARD.states * schedule.num_ids, p.HV, p.V, p.K


def _seeds(p: LightningProblem, device: torch.device, schedule: Schedule) -> Callable[[int], Tensor] | None:
    if not schedule.segment:
        return None
    ids, *shape = _seeds_shape(p, schedule)
    return workspace(device.index, 4 * ids * shape[0] * shape[1] * shape[2])


def names(schedule: Schedule) -> tuple[str, ...]:
    """The names of the kernels that a schedule launches."""
    recurrence = f"bwd_lightning_{schedule.kernel}"
    return (f"bwd_lightning_ends_{schedule.kernel}", recurrence) if schedule.segment else (recurrence,)


def _kernels(p: LightningProblem, schedule: Schedule) -> tuple[Callable[..., Any], ...]:
    """What a schedule launches."""
    return tuple(load(name, target_of(p.sm)) for name in names(schedule))


def _numbers(
    p: LightningProblem, x: LightningInputs, schedule: Schedule, do: Tensor, dht: Tensor | None
) -> dict[str, int | float | bool]:
    """The arguments behind the addresses, by name."""
    numbers: dict[str, int | float | bool] = {**token_strides(q=x.q, k=x.k, v=x.v, do=do)}
    has_h0 = int(x.initial_state is not None)
    numbers |= {"T": p.B * p.T, "H": p.H, "scale": p.scale, "num_seqs": p.N, "length": 0 if p.is_packed else p.T}
    numbers |= {"has_h0": has_h0, "has_dht": int(dht is not None), "has_dh0": has_h0}
    return numbers | {name: getattr(schedule, name) for name in ("segment", "per_seq", "num_ids", "num_blocks")}
