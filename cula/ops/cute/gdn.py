# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on the CuTe kernels: what they serve, and the launches. The gradient is `gdn_bwd.py`'s, where it serves a call,
and otherwise another backend's.

Hopper and Blackwell have kernels of its own: `sm90/gdn.py` and `sm100/gdn.py` say what they compute, `gdn_abi.py` what they are
given, and `gdn_schedule.py` how a call is spread over a GPU. Where states inside of sequences are kept, and on Blackwell where
heads are few, KDA's kernels serve, with one gate a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.core.dispatch import AnyProblem
from cula.core.kernels import Forward, Pool
from cula.core.pool import Serving
from cula.core.problem import beta_top
from cula.core.replay.record import LaunchRecord
from cula.core.replay.sizes import Scheduled, resized
from cula.core.replay.workspace import workspace
from cula.gdn.problem import GdnInputs, GdnProblem, by_kda, kda_problem
from cula.ops.cute import decode, kda
from cula.ops.cute import gdn_bwd as backward
from cula.ops.cute.archs import target_of
from cula.ops.cute.decode import decode as gdn_decode
from cula.ops.cute.decode import record_decode as record_gdn_decode
from cula.ops.cute.decode import yields_to
from cula.ops.cute.gdn_abi import BFLOAT16, FLOAT16, FLOAT32, GDN
from cula.ops.cute.gdn_bwd import gdn_bwd, record_gdn_bwd
from cula.ops.cute.gdn_schedule import Schedule, how, schedule_on
from cula.ops.cute.gdn_schedule import schedule as make_schedule
from cula.ops.cute.kda_schedule import are_too_many
from cula.ops.cute.launch import Launch, Operand, places, prefill_record, token_strides
from cula.ops.cute.tensors import as_states, as_tokens, empty_final_state, empty_output, sms_of, stream_of, zeros_on
from cula.ops.cute.toolchain.loader import load

__all__ = [
    "checkpoints_why_not",
    "gdn_bwd",
    "gdn_decode",
    "gdn_fwd",
    "gdn_fwd_checkpoints",
    "gdn_fwd_pool",
    "gdn_state_grad",
    "gdn_transition",
    "keeps",
    "kernels",
    "pool_why_not",
    "record_gdn_bwd",
    "record_gdn_decode",
    "record_gdn_fwd",
    "record_gdn_fwd_checkpoints",
    "record_gdn_fwd_pool",
    "run",
    "spread",
    "variant",
    "why_not",
    "yields_to",
]

BITS = {torch.float32: 32, torch.bfloat16: 16}
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

TOKENS = ("q", "k", "v", "g", "beta")

gdn_transition, gdn_state_grad = by_kda(kda.kda_transition), by_kda(kda.kda_state_grad)
_kda_fwd, _record_kda_fwd = by_kda(kda.kda_fwd), by_kda(kda.record_kda_fwd)
_kda_fwd_pool, _record_kda_fwd_pool = by_kda(kda.kda_fwd_pool), by_kda(kda.record_kda_fwd_pool)
gdn_fwd_checkpoints, record_gdn_fwd_checkpoints = by_kda(kda.kda_fwd_checkpoints), by_kda(kda.record_kda_fwd_checkpoints)


def why_not(op: str, problem: AnyProblem) -> str | None:
    """Why the kernels do not serve a call on a GPU that they are for, as a sentence; None if they do."""
    if not isinstance(problem, GdnProblem):
        return decode.why_not(op, problem)
    reason = kda.why_not("kda_fwd", kda_problem(problem))  # the backward launches KDA's kernels, too
    return backward.why_not(problem) if reason is None and op in backward.OPS else reason


def pool_why_not(problem: GdnProblem) -> str | None:
    """Why the kernels do not read and write a call's pool of states themselves, as a sentence; None if they do."""
    return kda.pool_why_not(kda_problem(problem))


def checkpoints_why_not(problem: GdnProblem) -> str | None:
    return kda.checkpoints_why_not(kda_problem(problem))


def variant(problem: GdnProblem, schedule: Schedule) -> str:
    """The name of the kernel, by whether keys and queries are normalised there."""
    return f"gdn_{'norm' if problem.options.use_qk_l2norm_in_kernel else 'plain'}_{schedule.kernel}"


def kernels(op: str, problem: Any, num_sms: int) -> tuple[str, ...]:
    """The names of the kernels that a call launches on a GPU with so many SMs."""
    if not isinstance(problem, GdnProblem):
        return (decode.variant(problem),)
    if op == "gdn_bwd":
        return (backward.variant(problem),)
    if op in backward.OPS:
        return kda.kernels(op.replace("gdn", "kda"), kda_problem(problem), num_sms)
    schedule = make_schedule(problem, num_sms)
    return kda.kernels("kda_fwd", kda_problem(problem), num_sms) if schedule is None else (variant(problem, schedule),)


def spread(op: str, problem: Any, num_sms: int) -> str | None:
    """How a prefill is spread over a GPU with so many SMs, for `cula.explain`; None for other calls."""
    if op != "gdn_fwd":
        return None
    own = make_schedule(problem, num_sms) is not None
    return how(problem, num_sms) if own else kda.spread("kda_fwd", kda_problem(problem), num_sms)


def keeps(problem: GdnProblem) -> bool:
    """Whether a forward saves more for the backward than its inputs: its own kernels make no tiles that could be kept."""
    return False


def gdn_fwd(problem: GdnProblem, x: GdnInputs, out: Tensor | None = None) -> Forward:
    """Outputs and, where asked for, the final state."""
    schedule = schedule_on(problem, x.q.device)
    if schedule is None:
        return _kda_fwd(problem, x, out)
    ht = empty_final_state(problem, x.q.device)
    h0 = None if x.initial_state is None else as_states(x.initial_state)
    return Forward(run(problem, x, schedule, h0, ht, out=out), ht)


def gdn_fwd_pool(problem: GdnProblem, x: GdnInputs, pool: Pool, out: Tensor | None = None) -> Tensor:
    """Outputs; first states come from the slots and last states go there. For pools that `pool_why_not` has nothing against."""
    schedule = schedule_on(problem, x.q.device)
    if schedule is None:
        return _kda_fwd_pool(problem, x, pool, out)
    states, indices, has_initial_state, _ = pool
    write_to = indices.to(torch.int32).contiguous()
    read_from = write_to if has_initial_state is None else torch.where(has_initial_state, write_to, -1)
    return run(problem, x, schedule, states, states, read_from, write_to, out, pool.first_slot)


def run(
    problem: GdnProblem,
    x: GdnInputs,
    schedule: Schedule,
    h0: Tensor | None,
    ht: Tensor | None,
    read_from: Tensor | None = None,
    write_to: Tensor | None = None,
    out: Tensor | None = None,
    first_slot: int = 0,
) -> Tensor:
    """Launch with a given schedule; returns o."""
    p, device = problem, x.q.device
    o = empty_output(p, device, out)
    to = as_tokens(o)  # a copy where TMA cannot write to `out`
    x = x._replace(**{name: as_tokens(getattr(x, name)) for name in TOKENS})
    size = schedule.workspace_bytes(p.N * p.HV)
    work = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    _launch(p, x, schedule, to, (h0, ht), (read_from, write_to), first_slot, work).now(stream_of(device))
    if to is not o:
        o.copy_(to)
    return o


def record_gdn_fwd(problem: GdnProblem, x: GdnInputs, out: Tensor | None = None) -> LaunchRecord | None:
    """A record of this call's launch, which serves calls of other lengths too; None if some tensors would have to be copied. It
    takes those of x and then `out`, at addresses that TMA can read, and makes o and the final state."""
    p, device = problem, x.q.device
    schedule = schedule_on(p, device)
    if schedule is None:
        return _record_kda_fwd(problem, x, out)
    ht = empty_final_state(p, device)
    return _record(p, x, schedule, Serving(out), (x.initial_state, ht), ht)


def record_gdn_fwd_pool(problem: GdnProblem, x: GdnInputs, pool: Pool, out: Tensor | None) -> LaunchRecord | None:
    """The same for `gdn_fwd_pool`; None where the kernel cannot read the indices as they are."""
    schedule = schedule_on(problem, x.q.device)
    if schedule is None:
        return _record_kda_fwd_pool(problem, x, pool, out)
    states, indices, has_initial_state, _ = pool
    if indices.dtype != torch.int32 or not indices.is_contiguous() or has_initial_state is not None:
        return None
    return _record(problem, x, schedule, Serving(out, *pool[:3]), (states, states), None, pool.first_slot)


def _record(
    p: GdnProblem,
    x: GdnInputs,
    schedule: Schedule,
    serving: Serving,
    states: tuple[Tensor | None, Tensor | None],
    ht: Tensor | None,
    first_slot: int = 0,
) -> LaunchRecord | None:
    """A record of a call with these states, first and last; ht is one that it makes."""
    device, indices = x.q.device, serving.initial_state_indices
    o = empty_output(p, device, serving.out)
    if any(as_tokens(t) is not t for t in (*x[:5], o)):
        return None
    launch = _launch(p, x, schedule, o, states, (indices, indices), first_slot)
    size = schedule.workspace_bytes(p.N * p.HV)
    work = workspace(device.index, size) if size else None
    return prefill_record(p, x, serving, TOKENS, (o, ht), (launch,), work, _schedule_of(p, device, schedule))


def _launch(
    p: GdnProblem,
    x: GdnInputs,
    schedule: Schedule,
    o: Tensor,
    states: tuple[Tensor | None, Tensor | None],
    slots: tuple[Tensor | None, Tensor | None],
    first_slot: int,
    work: Tensor | None = None,
) -> Launch:
    """A call's launch, on tensors that the kernel can read as they are; states, and slots of them, are first and last ones."""
    (h0, ht), (read_from, write_to), of = states, slots, places(x, Serving)
    is_indexed, has_workspace = write_to is not None, bool(schedule.workspace_bytes(p.N * p.HV))
    operands = {name: Operand(getattr(x, name), of[name]) for name in (*TOKENS, "A_log")}
    operands["dt_bias"] = Operand(x.dt_bias, of["dt_bias"], zeros_on(x.q.device, p.HV))
    operands |= {"o": Operand(o, ~0), "cu": Operand(x.cu_seqlens, of["cu_seqlens"])}
    operands["h0"] = Operand(h0, of["state_pool" if is_indexed else "initial_state"])
    operands["ht"] = Operand(ht, of["state_pool"] if is_indexed else ~1)
    operands |= {"read_from": Operand(read_from, of["initial_state_indices"])}
    operands |= {"write_to": Operand(write_to, of["initial_state_indices"])}
    operands["workspace"] = Operand(work, ~2 if has_workspace else None)
    numbers = _numbers(p, x, schedule, o, h0, ht, is_indexed, first_slot)
    return Launch(GDN, load(variant(p, schedule), target_of(p.sm)), operands, numbers, tuple(_sizes(p, schedule)))


def _schedule_of(p: GdnProblem, device: torch.device, schedule: Schedule) -> Callable[[int, int, int], Scheduled | None]:
    """What a record needs for other numbers of tokens and sequences; None where another kernel serves those."""
    num_sms, HV, has_workspace = sms_of(device), p.HV, bool(schedule.workspace_bytes(p.N * p.HV))

    def schedule_of(B: int, T: int, N: int) -> Scheduled | None:
        other = resized(p, B, T, N)
        made = make_schedule(other, num_sms)
        if made is None or made.kernel != schedule.kernel or are_too_many(other):
            return None
        size = made.workspace_bytes(N * HV)
        if bool(size) != has_workspace:
            return None
        return Scheduled(tuple(_sizes(other, made).values()), workspace(device.index, size) if size else None)

    return schedule_of


def _numbers(
    p: GdnProblem,
    x: GdnInputs,
    schedule: Schedule,
    o: Tensor,
    h0: Tensor | None,
    ht: Tensor | None,
    is_indexed: bool,
    first_slot: int,
) -> dict[str, Any]:
    """The arguments that are not addresses, by name."""
    numbers: dict[str, Any] = {**token_strides(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, o=o)}
    for name, states in (("h0", h0), ("ht", ht)):
        numbers[f"{name}_slot"] = 0 if states is None else states.stride(0)
        numbers[f"{name}_kind"] = 0 if states is None else KINDS[states.dtype]
    numbers |= {"H": p.H, "HV": p.HV, "scale": p.scale, "beta_top": beta_top(p.options), "is_indexed": is_indexed}
    numbers |= {"first_slot": first_slot, "num_slots": h0.shape[0] if is_indexed and h0 is not None else 0}
    numbers |= {"g_bits": BITS[x.g.dtype], "beta_bits": BITS[x.beta.dtype], "has_gate": p.gate == "softplus"}
    return numbers | _sizes(p, schedule)


def _sizes(p: GdnProblem, schedule: Schedule) -> dict[str, int]:
    """The arguments that follow from the numbers of tokens and sequences, by name."""
    sizes = {"T": p.B * p.T, "N": p.N, "length": 0 if p.is_packed else p.T}
    return sizes | {"blocks": schedule.blocks, "pieces": schedule.pieces}
