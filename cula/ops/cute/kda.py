# SPDX-License-Identifier: Apache-2.0
"""KDA on the CuTe kernels: what they serve, which variant a call takes, and its launch.

`common/kda_intra.py` and each architecture's `kda_recurrence.py` say what the split kernels compute; Hopper's `kda_fused.py` is
both in one. `kda_schedule.py` chooses between them, and `kda_abi.py` describes what they are given. The gradient is that of
`kda_bwd.py`, where it serves a call, and otherwise another backend's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.constants import CHUNK
from cula.core.dispatch import AnyProblem
from cula.core.kernels import Checkpoints, Forward, Pool
from cula.core.pool import Serving
from cula.core.problem import beta_top
from cula.core.replay.record import LaunchRecord
from cula.core.replay.sizes import Scheduled, resized
from cula.core.replay.torch_internals import Form
from cula.core.replay.workspace import workspace
from cula.kda.problem import KdaInputs, KdaProblem
from cula.ops.cute import decode, kda_abi
from cula.ops.cute import kda_bwd as backward
from cula.ops.cute.abi import Abi
from cula.ops.cute.archs import target_of
from cula.ops.cute.decode import decode as kda_decode
from cula.ops.cute.decode import record_decode as record_kda_decode
from cula.ops.cute.decode import yields_to
from cula.ops.cute.kda_abi import K, Kept, V
from cula.ops.cute.kda_bwd import kda_bwd, kda_state_grad, kda_transition, record_kda_bwd
from cula.ops.cute.kda_schedule import SHORT, Schedule, are_too_many, has_backward, how, keeps_tiles, schedule_on, variant
from cula.ops.cute.kda_schedule import schedule as make_schedule
from cula.ops.cute.launch import Launch, Operand, places, prefill_record, token_strides
from cula.ops.cute.states import KINDS, bytes_between, pool_why_not, state_numbers, state_operands
from cula.ops.cute.states_abi import StateKind
from cula.ops.cute.tensors import as_states, as_tokens, empty_final_state, empty_output, sms_of, stream_of, zeros_on
from cula.ops.cute.toolchain.loader import load

__all__ = [
    "checkpoints_why_not",
    "kda_bwd",
    "kda_decode",
    "kda_fwd",
    "kda_fwd_checkpoints",
    "kda_fwd_pool",
    "kda_state_grad",
    "kda_transition",
    "keeps",
    "kernels",
    "pool_why_not",
    "record_kda_bwd",
    "record_kda_decode",
    "record_kda_fwd",
    "record_kda_fwd_checkpoints",
    "record_kda_fwd_pool",
    "record_kda_fwd_saved",
    "run",
    "spread",
    "variant",
    "why_not",
    "yields_to",
]


TOKENS = ("q", "k", "v", "g", "beta")


def why_not(op: str, problem: AnyProblem) -> str | None:
    """Why KDA's kernels do not serve a call on a GPU that they are for, as a sentence; None if they do."""
    if not isinstance(problem, KdaProblem):
        return decode.why_not(op, problem)
    p = problem
    if p.K != K or p.V != V:
        return f"takes K = V = {K}, and this call has K = {p.K}, V = {p.V}"
    for name, dtype in (("g", p.g_dtype), ("beta", p.beta_dtype)):
        if dtype not in SHORT:
            return f"takes {name} in bfloat16 or float32, and this call has {str(dtype).removeprefix('torch.')}"
    if reason := are_too_many(p):
        return reason
    if p.options.disable_recompute and p.needs_grad and not has_backward(p):
        return "does not make this call's gradient, for which disable_recompute=True would have it keep more than the inputs"
    return backward.why_not(p) if op in backward.OPS else None


def checkpoints_why_not(problem: KdaProblem) -> str | None:
    """Why `kda_fwd_checkpoints` does not keep a call's states, as a sentence; None if it does."""
    if not problem.has_aligned_checkpoints:
        return "it writes states in pairs, and rows of checkpoint_states are not contiguous at multiples of 16 bytes"
    return None


def kernels(op: str, problem: Any, num_sms: int) -> tuple[str, ...]:
    """The names of the kernels that a call launches on a GPU with so many SMs."""
    if not isinstance(problem, KdaProblem):
        return (decode.variant(problem),)
    if op in backward.OPS:
        return (backward.variant(problem),)
    return tuple(_name(problem, which) for which in make_schedule(problem, num_sms).kernels)


def spread(op: str, problem: Any, num_sms: int) -> str | None:
    """How a prefill is spread over a GPU with so many SMs, for `cula.explain`; None for other calls, of which there is nothing to
    tell."""
    return how(problem, num_sms) if op == "kda_fwd" else None


def keeps(problem: KdaProblem) -> bool:
    """Whether a forward saves more for the backward than its inputs: its workspace, where it is told to."""
    return keeps_tiles(problem)


def _name(problem: KdaProblem, which: str) -> str:
    return f"fused_{variant(problem)}" if which == "fused" else variant(problem)


def _kernel(problem: KdaProblem, which: str) -> Any:
    """One of `Schedule.kernels`."""
    return load(_name(problem, which), target_of(problem.sm))


class KeptStates(NamedTuple):
    """States inside of the sequences, and which they are."""

    states: Tensor  # [rows, HV, V, K]
    mode: Kept
    every: int  # chunks
    offsets: Tensor | None  # [N] int32


def kda_fwd(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> Forward:
    """Outputs and, where asked for, the final state and those at chunk starts."""
    p, states, kept = problem, None, None
    if p.options.return_intermediate_states:
        chunks = p.B * -(-p.T // CHUNK) if x.cu_seqlens is None else int(((x.cu_seqlens.diff() + (CHUNK - 1)) // CHUNK).sum())
        states = torch.empty((p.B, chunks // p.B, p.HV, V, K), dtype=torch.float32, device=x.q.device)
        kept = KeptStates(states.flatten(0, 1), Kept.STARTS, 1, None)
    ht, schedule = empty_final_state(p, x.q.device), schedule_on(p, x.q.device)
    work = _empty_workspace(p, schedule, x.q.device) if keeps_tiles(p) else None
    o = run(p, x, schedule, ht, out, kept=kept, work=work)
    return Forward(o, ht, states, () if work is None else (work,))


def kda_fwd_pool(problem: KdaProblem, x: KdaInputs, pool: Pool, out: Tensor | None = None) -> Tensor:
    """Outputs; first states come from the slots and last states go there. For pools that `pool_why_not` has nothing against."""
    return run(problem, x, schedule_on(problem, x.q.device), None, out, pool)


def kda_fwd_checkpoints(
    problem: KdaProblem, x: KdaInputs, pool: Pool | None, checkpoints: Checkpoints, out: Tensor | None = None
) -> Forward:
    """Outputs and, where asked for, the final state; states inside of the sequences are kept, and first and last ones are those
    of a pool, if there is one. For what `checkpoints_why_not` has nothing against."""
    ht = None if pool is not None else empty_final_state(problem, x.q.device)
    return Forward(run(problem, x, schedule_on(problem, x.q.device), ht, out, pool, _kept(checkpoints)), ht)


def _kept(checkpoints: Checkpoints | None) -> KeptStates | None:
    if checkpoints is None:
        return None
    states, every, offsets = checkpoints
    if every is not None:
        return KeptStates(states, Kept.EVERY, every // CHUNK, None)
    assert offsets is not None
    return KeptStates(states, Kept.OFFSETS, 0, offsets.contiguous())


def _empty_workspace(p: KdaProblem, schedule: Schedule, device: torch.device) -> Tensor:
    return torch.empty(schedule.workspace_bytes(p.HV), dtype=torch.uint8, device=device)


def run(
    problem: KdaProblem,
    x: KdaInputs,
    schedule: Schedule,
    ht: Tensor | None = None,
    out: Tensor | None = None,
    pool: Pool | None = None,
    kept: KeptStates | None = None,
    work: Tensor | None = None,
) -> Tensor:
    """Launch with a given schedule, and with a workspace that is wanted afterwards; returns o."""
    p, device = problem, x.q.device
    o = empty_output(p, device, out)
    to = as_tokens(o)  # a copy where TMA cannot write to `out`
    h0 = None if x.initial_state is None else as_states(x.initial_state)
    x = x._replace(initial_state=h0, **{name: as_tokens(getattr(x, name)) for name in TOKENS})
    if work is None and not schedule.is_fused:
        work = _empty_workspace(p, schedule, device)
    for launch in _launches(p, x, schedule, to, ht, pool, kept, work):
        launch.now(stream_of(device))
    if to is not o:
        o.copy_(to)
    return o


def record_kda_fwd(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> LaunchRecord | None:
    """A record of this call's launch, which serves calls of other lengths too; None if some tensors would have to be copied, or
    states at chunk starts are asked for, whose number depends on data. It takes those of x and then `out`, at addresses that TMA
    can read, and makes o and the final state."""
    return None if problem.options.return_intermediate_states else _record(problem, x, Serving(out), None, None)


def record_kda_fwd_saved(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> LaunchRecord | None:
    """The same for a forward that saves its workspace, which it makes too."""
    return record_kda_fwd(problem, x, out)


def record_kda_fwd_pool(problem: KdaProblem, x: KdaInputs, pool: Pool, out: Tensor | None) -> LaunchRecord | None:
    """The same for `kda_fwd_pool`, of the tensors of x and then those of `Serving`."""
    return _record(problem, x, Serving(out, *pool[:3]), pool, None)


def record_kda_fwd_checkpoints(
    problem: KdaProblem, x: KdaInputs, pool: Pool | None, checkpoints: Checkpoints, out: Tensor | None
) -> LaunchRecord | None:
    """The same for `kda_fwd_checkpoints`."""
    if checkpoints.offsets is not None and not checkpoints.offsets.is_contiguous():
        return None
    serving = Serving(out) if pool is None else Serving(out, *pool[:3])
    serving = serving._replace(checkpoint_states=checkpoints.states, checkpoint_offsets=checkpoints.offsets)
    return _record(problem, x, serving, pool, _kept(checkpoints))


def _record(p: KdaProblem, x: KdaInputs, serving: Serving, pool: Pool | None, kept: KeptStates | None) -> LaunchRecord | None:
    device = x.q.device
    o = empty_output(p, device, serving.out)
    ht = None if pool is not None else empty_final_state(p, device)
    if any(as_tokens(t) is not t for t in (*x[:5], o)):
        return None
    schedule = schedule_on(p, device)
    size, saves = schedule.workspace_bytes(p.HV), keeps_tiles(p)
    work = None if saves or not size else workspace(device.index, size)
    launches = _launches(p, x, schedule, o, ht, pool, kept)
    schedule_of = _schedule_of(p, device, schedule.kernels)
    return prefill_record(p, x, serving, TOKENS, (o, ht), launches, work, schedule_of, _saved_form(size) * saves)


def _launches(
    p: KdaProblem,
    x: KdaInputs,
    schedule: Schedule,
    o: Tensor,
    ht: Tensor | None,
    pool: Pool | None,
    kept: KeptStates | None,
    work: Tensor | None = None,
) -> list[Launch]:
    """What a call launches, on tensors that kernels can read as they are. A workspace that is saved is the third of a record's
    outputs, and one that is not comes after two."""
    of, device = places(x, Serving), x.q.device
    operands = {name: Operand(getattr(x, name), of[name]) for name in TOKENS}
    operands["A_log"] = Operand(x.A_log, of["A_log"], zeros_on(device, p.HV))
    operands["dt_bias"] = Operand(x.dt_bias, of["dt_bias"], zeros_on(device, p.HV, K))
    operands |= {"o": Operand(o, ~0), "cu": Operand(x.cu_seqlens, of["cu_seqlens"])}
    operands |= state_operands(of, x.initial_state, ht, pool, ~1)
    operands["kept"] = Operand(None if kept is None else kept.states, of["checkpoint_states"])
    operands["kept_offsets"] = Operand(None if kept is None else kept.offsets, of["checkpoint_offsets"])
    numbers = _numbers(p, x, o) | state_numbers(p, x.initial_state, ht, pool) | _kept_numbers(kept)
    varying = tuple(_all_sizes(p, schedule))
    launches = []
    for which in schedule.kernels:
        of_kernel = operands if which == "fused" else operands | {"workspace": Operand(work, ~2)}
        sizes = _sizes(p, schedule, which)
        launches.append(Launch(_abi(p, which), _kernel(p, which), of_kernel, numbers | sizes, varying))
    return launches


def _schedule_of(p: KdaProblem, device: torch.device, kernels: tuple[str, ...]) -> Callable[[int, int, int], Scheduled | None]:
    """What a record needs for other numbers of tokens and sequences; None where other kernels serve those."""
    num_sms, saves = sms_of(device), keeps_tiles(p)

    def schedule_of(B: int, T: int, N: int) -> Scheduled | None:
        other = resized(p, B, T, N)
        made = make_schedule(other, num_sms)
        if made.kernels != kernels or are_too_many(other):
            return None
        size = made.workspace_bytes(p.HV)
        work = None if saves or not size else workspace(device.index, size)
        return Scheduled(tuple(_all_sizes(other, made).values()), work, _saved_form(size) * saves)

    return schedule_of


def _saved_form(size: int) -> tuple[Form, ...]:
    """That of a workspace of so many bytes that is saved."""
    return (((size,), (1,), torch.uint8),)


def _abi(problem: KdaProblem, which: str) -> Abi:
    return _abi_of(which, problem.has_scalar_gate, problem.g_dtype)


@functools.cache
def _abi_of(which: str, has_scalar_gate: bool, g_dtype: torch.dtype) -> Abi:
    return kda_abi.of_gates(kda_abi.FUSED if which == "fused" else kda_abi.SPLIT, has_scalar_gate, g_dtype.itemsize)


def _kept_numbers(kept: KeptStates | None) -> dict[str, int | float]:
    """The arguments about states that are kept, but for addresses, by name."""
    if kept is None:
        return {"kept_step": 0, "kept_kind": StateKind.F32, "kept_mode": Kept.NOTHING, "kept_every": 0, "kept_rows": 0}
    return {
        "kept_step": bytes_between(kept.states),
        "kept_kind": KINDS[kept.states.dtype],
        "kept_mode": kept.mode,
        "kept_every": kept.every,
        "kept_rows": kept.states.shape[0],
    }


def _numbers(p: KdaProblem, x: KdaInputs, o: Tensor) -> dict[str, int | float]:
    """The other arguments that are not addresses and do not follow from sizes, by name."""
    return {
        **token_strides(q=x.q, k=x.k, v=x.v, g=x.g, o=o),  # of one gate a head too
        "beta_token": x.beta.stride(1),
        "H": p.H,
        "HV": p.HV,
        "scale": p.scale,
        "lower": p.options.lower_bound or 0.0,
        "beta_top": beta_top(p.options),
        "beta_bits": 8 * x.beta.element_size(),
    }


def _all_sizes(p: KdaProblem, schedule: Schedule) -> dict[str, int]:
    """The arguments of all kernels of a call that follow from the numbers of tokens and sequences, by name."""
    return functools.reduce(operator.or_, (_sizes(p, schedule, which) for which in schedule.kernels))


def _sizes(p: KdaProblem, schedule: Schedule, which: str) -> dict[str, int]:
    """Those of one of them."""
    sizes = {"T": p.B * p.T, "N": p.N, "length": 0 if p.is_packed else p.T, "longest": schedule.longest}
    if which == "fused":
        return sizes | {"clusters": schedule.clusters}
    return sizes | {
        "halvings": (p.N - 1).bit_length(),
        "chunks": schedule.chunks,
        "segments": schedule.segments,
        "per_segment": schedule.per_segment,
        "per_chained_segment": schedule.per_chained_segment,
        "has_transitions": int(schedule.has_transitions),
        "helpers": schedule.helpers,
    }
