# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention on the CuTe kernels: what they serve, and the launches.

`sm90/lightning.py` says what the kernels compute, `lightning_abi.py` what they are given, `lightning_schedule.py` which of them
takes a call. Forward only: the gradient is another backend's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.core.checks import word
from cula.core.dispatch import AnyProblem
from cula.core.kernels import Forward, Pool
from cula.core.pool import Serving
from cula.core.replay.record import LaunchRecord, Resized, Sizes
from cula.core.replay.sizes import by_chunks, prefill_labels, resized
from cula.core.replay.torch_internals import form_of
from cula.core.replay.workspace import workspace
from cula.lightning.problem import LightningInputs, LightningProblem
from cula.ops.cute import decode
from cula.ops.cute.decode import decode as lightning_decode
from cula.ops.cute.decode import record_decode as record_lightning_decode
from cula.ops.cute.launch import record
from cula.ops.cute.lightning_abi import LIGHTNING
from cula.ops.cute.lightning_schedule import Schedule, choose_schedule
from cula.ops.cute.tensors import address, as_states, as_tokens, sms_of, stream_of
from cula.ops.cute.toolchain.loader import load

__all__ = [
    "lightning_decode",
    "lightning_fwd",
    "lightning_fwd_pool",
    "pool_why_not",
    "record_lightning_decode",
    "record_lightning_fwd",
    "record_lightning_fwd_pool",
    "run",
    "why_not",
]

ARCH = "sm_90a"
HEAD_DIMS = (64, 128)
NUM_LENGTHS = 3  # of the arguments that follow from lengths, those that are no schedule: T, num_seqs, length
STATE_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def why_not(op: str, problem: AnyProblem) -> str | None:
    """What the kernels do not take, as a sentence; None if they take the call."""
    if not isinstance(problem, LightningProblem):
        return decode.why_not(op, problem)
    if problem.K != problem.V or problem.K not in HEAD_DIMS:
        return f"takes head dims K = V of {HEAD_DIMS}, and this call has K = {problem.K}, V = {problem.V}"
    return None


def pool_why_not(problem: LightningProblem) -> str | None:
    """Why `lightning_fwd_pool` does not take a call's pool of states, as a sentence; None if it does."""
    if problem.pool_dtype is not None and problem.pool_dtype not in STATE_DTYPES:
        return f"it takes pools in float32 or bfloat16, and this one is in {word(problem.pool_dtype)}"
    if not problem.has_aligned_slots:
        return "it reads states in pairs, and slots of the pool do not begin at multiples of 16 bytes"
    return None


@functools.lru_cache(maxsize=1024)
def _schedule_on(problem: LightningProblem, device: torch.device) -> Schedule:
    return choose_schedule(problem, sms_of(device))


def lightning_fwd(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> Forward:
    """Outputs `[B, T, HV, V]` (written to `out` where given) and, where asked for, the final state `[N, HV, V, K]` float32."""
    ht = _final_state(problem, x)
    return Forward(run(problem, x, _schedule_on(problem, x.q.device), x.initial_state, ht, out=out), ht)


def lightning_fwd_pool(problem: LightningProblem, x: LightningInputs, pool: Pool, out: Tensor | None = None) -> Tensor:
    """Outputs; first states come from the slots and last states go there. For pools that `pool_why_not` has nothing against."""
    states, indices, has_initial_state, null_is_nonpositive = pool
    write_to = indices.to(torch.int32).contiguous()
    if null_is_nonpositive:
        write_to = torch.where(write_to > 0, write_to, -1)
    read_from = write_to if has_initial_state is None else torch.where(has_initial_state, write_to, -1)
    return run(problem, x, _schedule_on(problem, x.q.device), states, states, read_from, write_to, out)


def run(
    problem: LightningProblem,
    x: LightningInputs,
    schedule: Schedule,
    h0: Tensor | None,
    ht: Tensor | None,
    read_from: Tensor | None = None,
    write_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Launch with a given schedule; returns o."""
    device = x.q.device
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=device) if out is None else out
    to = as_tokens(o)  # a copy where TMA cannot write to `out`
    x = x._replace(q=as_tokens(x.q), k=as_tokens(x.k), v=as_tokens(x.v))
    h0 = h0 if h0 is None or write_to is not None else as_states(h0)  # a pool must do as it is
    seeds = None
    if schedule.segment:
        seeds = torch.empty((schedule.num_ids, problem.HV, problem.V, problem.K), dtype=torch.float32, device=device)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "o": to, "decay": x.decay, "h0": h0, "ht": ht, "seeds": seeds}
    tensors |= {"cu_seqlens": x.cu_seqlens, "read_from": read_from, "write_to": write_to}
    addresses = LIGHTNING.pack_addresses({name: address(t) for name, t in tensors.items()})
    numbers = LIGHTNING.pack_numbers(_numbers(problem, x, schedule, to, h0, ht, write_to is not None))
    for kernel in _kernels(schedule, h0 if h0 is not None else ht):
        kernel(*addresses, *numbers, stream_of(device))
    if to is not o:
        o.copy_(to)
    return o


def record_lightning_fwd(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> LaunchRecord | None:
    """A record of this call's launches, which serves calls of other lengths too; None if some tensors would have to be copied. It
    takes those of x and then `out`, at addresses that TMA can read, and makes o and the final state."""
    p, device = problem, x.q.device
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=device) if out is None else out
    ht = _final_state(p, x)
    if any(as_tokens(t) is not t for t in (x.q, x.k, x.v, o)):
        return None
    sources: dict[str, int | None] = {"h0": x._fields.index("initial_state"), "ht": ~1, "read_from": None, "write_to": None}
    return _record(p, x, sources, (x.initial_state, ht), o, Serving(out), ht)


def record_lightning_fwd_pool(
    problem: LightningProblem, x: LightningInputs, pool: Pool, out: Tensor | None
) -> LaunchRecord | None:
    """The same for `lightning_fwd_pool`; None where the kernel cannot read the indices as they are."""
    p, indices = problem, pool.indices
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.q.device) if out is None else out
    is_readable = indices.dtype == torch.int32 and indices.is_contiguous() and pool.has_initial_state is None
    is_readable = is_readable and not pool.null_is_nonpositive
    if not is_readable or any(as_tokens(t) is not t for t in (x.q, x.k, x.v, o)):
        return None
    states, slots = len(x) + Serving._fields.index("state_pool"), len(x) + Serving._fields.index("initial_state_indices")
    sources: dict[str, int | None] = {"h0": states, "ht": states, "read_from": slots, "write_to": slots}
    return _record(p, x, sources, (pool.states, pool.states), o, Serving(out, pool.states, indices), None)


def _record(
    p: LightningProblem,
    x: LightningInputs,
    of_states: dict[str, int | None],
    states: tuple[Tensor | None, Tensor | None],
    o: Tensor,
    serving: Serving,
    ht: Tensor | None,
) -> LaunchRecord:
    """A record whose states, first and last, come from where `of_states` says; ht is one that it makes."""
    device, is_indexed = x.q.device, of_states["write_to"] is not None
    schedule, of = _schedule_on(p, device), x._fields.index
    sources = of_states | {name: of(name) for name in ("q", "k", "v", "decay", "cu_seqlens")}
    sources |= {"o": ~0, "seeds": ~2 if schedule.segment else None}
    numbers, varying = _numbers(p, x, schedule, o, *states, is_indexed), tuple(_sizes(p, schedule))
    kernels = _kernels(schedule, states[0] if states[0] is not None else states[1])
    launches = tuple(record(LIGHTNING, kernel, sources, numbers, varying) for kernel in kernels)
    place_of_out = None if serving.out is None else len(x)
    outputs = (form_of(o) if place_of_out is None else place_of_out, None if ht is None else form_of(ht))
    labels = prefill_labels(x, serving, ("q", "k", "v"), p.is_packed)
    sizes = Sizes(labels, _resize(p, x.v.dtype, device, schedule, place_of_out, ht is not None))
    return LaunchRecord(device.index, launches, outputs, _seeds(p, device, schedule), sizes=sizes)


def _resize(
    p: LightningProblem, dtype: torch.dtype, device: torch.device, schedule: Schedule, place_of_out: int | None, has_ht: bool
) -> Callable[[int, int], Resized | None]:
    """What a record needs for other numbers of tokens and sequences; None where other kernels serve those."""
    num_sms, is_packed, HV, K, V = sms_of(device), p.is_packed, p.HV, p.K, p.V
    of_ht = (HV * V * K, V * K, K, 1)

    def schedule_of(B: int, T: int, N: int) -> tuple[tuple[int, ...], Callable[[int], Tensor] | None] | None:
        """The schedule's arguments and the workspace; None where other kernels serve such a call."""
        other = resized(p, B, T, N)
        made = choose_schedule(other, num_sms)
        if made.kernel != schedule.kernel or bool(made.segment) != bool(schedule.segment):
            return None
        return tuple(_sizes(other, made).values())[NUM_LENGTHS:], _seeds(other, device, made)

    scheduled = by_chunks(schedule_of)

    def resize(first: int, second: int) -> Resized | None:
        B, T, N = (1, first, second) if is_packed else (first, second, first)
        found = scheduled(B, T, N) if T and N else None
        if found is None:
            return None
        numbers, seeds = found
        o = ((B, T, HV, V), (T * HV * V, HV * V, V, 1), dtype) if place_of_out is None else place_of_out
        ht = ((N, HV, V, K), of_ht, torch.float32) if has_ht else None
        return Resized((B * T, N, 0 if is_packed else T, *numbers), (o, ht), seeds)

    return resize


def _seeds(p: LightningProblem, device: torch.device, schedule: Schedule) -> Callable[[int], Tensor] | None:
    """Memory that segments leave their states in."""
    return workspace(device.index, 4 * schedule.num_ids * p.HV * p.V * p.K) if schedule.segment else None


def _final_state(p: LightningProblem, x: LightningInputs) -> Tensor | None:
    if not p.options.output_final_state:
        return None
    return torch.empty((p.N, p.HV, p.V, p.K), dtype=torch.float32, device=x.q.device)


def _kernels(schedule: Schedule, states: Tensor | None) -> tuple[Callable[..., Any], ...]:
    """What a schedule launches, for states of this dtype."""
    of = f"{schedule.kernel}_{STATE_DTYPES[torch.float32 if states is None else states.dtype]}"
    recurrence = load(f"lightning_{of}", ARCH)
    return (load(f"lightning_ends_{of}", ARCH), recurrence) if schedule.segment else (recurrence,)


def _numbers(
    p: LightningProblem, x: LightningInputs, schedule: Schedule, o: Tensor, h0: Tensor | None, ht: Tensor | None, is_indexed: bool
) -> dict[str, int | float | bool]:
    """The arguments behind the addresses, by name."""
    numbers: dict[str, int | float | bool] = {}
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("o", o)):
        numbers[f"{name}_token"], numbers[f"{name}_head"] = t.stride()[1:3]
    for name, states in (("h0", h0), ("ht", ht)):
        numbers[f"{name}_slot"] = 0 if states is None else states.stride(0)
        numbers[f"has_{name}"] = states is not None
    numbers |= {"H": p.H, "HV": p.HV, "group": p.HV // p.H, "scale": p.scale, "is_indexed": is_indexed}
    return numbers | _sizes(p, schedule)


def _sizes(p: LightningProblem, schedule: Schedule) -> dict[str, int]:
    """The arguments that follow from the numbers of tokens and sequences, by name."""
    sizes = {"T": p.B * p.T, "num_seqs": p.N, "length": 0 if p.is_packed else p.T}
    return sizes | {name: getattr(schedule, name) for name in ("segment", "per_seq", "num_ids", "num_blocks")}
