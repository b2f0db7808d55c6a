# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention on the CuTe kernels: what they serve, and the launches.

`common/lightning.py` and each architecture's `lightning.py` say what the kernels compute, `lightning_abi.py` what they are given,
`lightning_schedule.py` which of them takes a call. The gradient is that of `lightning_bwd.py`, where it serves a call, and
otherwise another backend's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.core.dispatch import AnyProblem
from cula.core.kernels import Forward, Pool
from cula.core.pool import Serving
from cula.core.replay.record import LaunchRecord
from cula.core.replay.sizes import Scheduled, resized
from cula.core.replay.workspace import workspace
from cula.lightning.problem import LightningInputs, LightningProblem
from cula.ops.cute import decode
from cula.ops.cute import lightning_bwd as backward
from cula.ops.cute.archs import target_of
from cula.ops.cute.decode import decode as lightning_decode
from cula.ops.cute.decode import record_decode as record_lightning_decode
from cula.ops.cute.decode import yields_to
from cula.ops.cute.launch import Launch, Operand, places, prefill_record, token_strides
from cula.ops.cute.lightning_abi import LIGHTNING
from cula.ops.cute.lightning_bwd import lightning_bwd, record_lightning_bwd
from cula.ops.cute.lightning_schedule import BACKWARD, FORWARD, Schedule, choose_schedule, schedule_on
from cula.ops.cute.states import pool_why_not, state_numbers, state_operands
from cula.ops.cute.tensors import as_states, as_tokens, empty_final_state, empty_output, sms_of, stream_of
from cula.ops.cute.toolchain.loader import load

__all__ = [
    "keeps",
    "kernels",
    "lightning_bwd",
    "lightning_decode",
    "lightning_fwd",
    "lightning_fwd_pool",
    "pool_why_not",
    "record_lightning_bwd",
    "record_lightning_decode",
    "record_lightning_fwd",
    "record_lightning_fwd_pool",
    "run",
    "spread",
    "why_not",
    "yields_to",
]

HEAD_DIMS = (64, 128)
TOKENS = ("q", "k", "v")


def why_not(op: str, problem: AnyProblem) -> str | None:
    """What the kernels do not take, as a sentence; None if they take the call."""
    if not isinstance(problem, LightningProblem):
        return decode.why_not(op, problem)
    if problem.K != problem.V or problem.K not in HEAD_DIMS:
        return f"takes head dims K = V of {HEAD_DIMS}, and this call has K = {problem.K}, V = {problem.V}"
    return backward.why_not(problem) if op == "lightning_bwd" else None


def lightning_fwd(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> Forward:
    """Outputs `[B, T, HV, V]` (written to `out` where given) and, where asked for, the final state `[N, HV, V, K]` float32."""
    ht = empty_final_state(problem, x.q.device)
    return Forward(run(problem, x, schedule_on(problem, x.q.device), ht, out), ht)


def lightning_fwd_pool(problem: LightningProblem, x: LightningInputs, pool: Pool, out: Tensor | None = None) -> Tensor:
    """Outputs; first states come from the slots and last states go there. For pools that `pool_why_not` has nothing against."""
    return run(problem, x, schedule_on(problem, x.q.device), None, out, pool)


def run(
    problem: LightningProblem,
    x: LightningInputs,
    schedule: Schedule,
    ht: Tensor | None = None,
    out: Tensor | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """Launch with a given schedule; returns o."""
    device = x.q.device
    o = empty_output(problem, device, out)
    to = as_tokens(o)  # a copy where TMA cannot write to `out`
    h0 = None if x.initial_state is None else as_states(x.initial_state)
    x = x._replace(q=as_tokens(x.q), k=as_tokens(x.k), v=as_tokens(x.v), initial_state=h0)
    size = schedule.workspace_bytes(problem)
    seeds = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    for launch in _launches(problem, x, schedule, to, ht, pool, seeds):
        launch.now(stream_of(device))
    if to is not o:
        o.copy_(to)
    return o


def record_lightning_fwd(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> LaunchRecord | None:
    """A record of this call's launches, which serves calls of other lengths too; None if some tensors would have to be copied. It
    takes those of x and then `out`, at addresses that TMA can read, and makes o and the final state."""
    return _record(problem, x, Serving(out), None)


def record_lightning_fwd_pool(
    problem: LightningProblem, x: LightningInputs, pool: Pool, out: Tensor | None
) -> LaunchRecord | None:
    """The same for `lightning_fwd_pool`, of the tensors of x and then those of `Serving`."""
    return _record(problem, x, Serving(out, *pool[:3]), pool)


def _record(p: LightningProblem, x: LightningInputs, serving: Serving, pool: Pool | None) -> LaunchRecord | None:
    device = x.q.device
    o = empty_output(p, device, serving.out)
    ht = None if pool is not None else empty_final_state(p, device)
    if any(as_tokens(t) is not t for t in (x.q, x.k, x.v, o)):
        return None
    schedule = schedule_on(p, device)
    size, launches = schedule.workspace_bytes(p), _launches(p, x, schedule, o, ht, pool)
    seeds = workspace(device.index, size) if size else None
    return prefill_record(p, x, serving, TOKENS, (o, ht), launches, seeds, _schedule_of(p, device, schedule))


def _launches(
    p: LightningProblem,
    x: LightningInputs,
    schedule: Schedule,
    o: Tensor,
    ht: Tensor | None,
    pool: Pool | None,
    seeds: Tensor | None = None,
) -> list[Launch]:
    """What a call launches, on tensors that kernels can read as they are."""
    of = places(x, Serving)
    operands = {name: Operand(getattr(x, name), of[name]) for name in (*TOKENS, "decay", "cu_seqlens")}
    operands |= {"o": Operand(o, ~0), "seeds": Operand(seeds, ~2 if schedule.segment else None)}
    operands |= state_operands(of, x.initial_state, ht, pool, ~1)
    numbers: dict[str, int | float | bool] = {**token_strides(q=x.q, k=x.k, v=x.v, o=o)}
    numbers |= {"H": p.H, "HV": p.HV, "group": p.HV // p.H, "scale": p.scale}
    numbers |= state_numbers(p, x.initial_state, ht, pool)
    sizes, target = schedule.numbers(p), target_of(p.sm)
    return [Launch(LIGHTNING, load(name, target), operands, numbers | sizes, tuple(sizes)) for name in schedule.kernels]


def _schedule_of(p: LightningProblem, device: torch.device, schedule: Schedule) -> Callable[[int, int, int], Scheduled | None]:
    """What a record needs for other numbers of tokens and sequences; None where other kernels serve those."""
    num_sms = sms_of(device)

    def schedule_of(B: int, T: int, N: int) -> Scheduled | None:
        other = resized(p, B, T, N)
        made = choose_schedule(other, num_sms)
        if made.kernels != schedule.kernels:
            return None
        size = made.workspace_bytes(other)
        return Scheduled(tuple(made.numbers(other).values()), workspace(device.index, size) if size else None)

    return schedule_of


def kernels(op: str, problem: Any, num_sms: int) -> tuple[str, ...]:
    """The names of the kernels that a call launches on a GPU with so many SMs."""
    if not isinstance(problem, LightningProblem):
        return (decode.variant(problem),)
    return choose_schedule(problem, num_sms, BACKWARD if op == "lightning_bwd" else FORWARD).kernels


def spread(op: str, problem: Any, num_sms: int) -> str | None:
    """How a prefill is spread over a GPU with so many SMs, for `cula.explain`; None for other calls."""
    if op != "lightning_fwd":
        return None
    made = choose_schedule(problem, num_sms)
    parts = f"two kernels, segments of {made.segment} tokens" if made.segment else "one kernel, whole sequences"
    return f"{parts}, on {made.num_blocks} blocks"


def keeps(problem: LightningProblem) -> bool:
    """Whether a forward saves more for the backward than its inputs: never."""
    return False
