# SPDX-License-Identifier: Apache-2.0
"""From arguments to a context-parallel call: what this rank checks by itself, and what the ranks must have in common."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cula.core import checks
from cula.core.dispatch import choose_prefill, refuse_unknown
from cula.core.explain import explained, is_explaining
from cula.core.family import Family
from cula.core.pool import Serving
from cula.core.problem import PUBLIC_NAMES, needs_grad, with_settings
from cula.dist import handshake
from cula.dist.call import Call, next_number, run
from cula.dist.cost import NOMINAL_TOKENS, Load, Schedule, cheapest
from cula.dist.kernels import Inputs, LocalKernels
from cula.dist.varlen import SP_MODES, batch_layout, host_offsets, packed_layout

CP_MODES = ("auto", "ring", "scan")
EXCHANGES = ("ring", "chain", "gather")
SERVING = (*Serving._fields, "checkpoint_every")


@dataclass(frozen=True)
class Ranks:
    """A checked group, its size and this process's place in it."""

    group: dist.ProcessGroup | None  # None: a single rank
    size: int
    rank: int


class CpOptions(NamedTuple):
    """The options of context parallelism that all ranks must have in common, by their public names."""

    cp_mode: str = "auto"
    sp_mode: str = "complete"
    output_final_state: bool = True
    broadcast_final_state: bool = False
    schedule: Schedule | None = None

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any]) -> CpOptions:
        """The options among the keywords of a call, taken out of them."""
        return cls(**{name: kwargs.pop(name) for name in cls._fields if name in kwargs})


# What the parallel functions take beside the keywords of level 1.
KEYWORDS = (
    "sp_group", "sp_size", "sp_rank", *CpOptions._fields, "nvshmem_backend", "input_is_parallel", "gather_output", "device",
    "backend",
)  # fmt: skip


class Plan(NamedTuple):
    """A call that this rank has checked by itself, before the ranks compare."""

    call: Call
    signature: handshake.Signature


def run_plan(who: str, x: Inputs, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Agree with the other ranks, then make the call."""
    call, signature = plan
    handshake.agree(who, signature, call.group, x.q.device)
    return run(replace(call, number=next_number(call.group)), x, call.kernels.needs_grad)


def make_plan(who: str, x: Inputs, kernels: LocalKernels, ranks: Ranks, options: CpOptions) -> Plan:
    """Where the tokens lie, how the states cross, and what all ranks must have in common."""
    checks.check_choice(who, "cp_mode", options.cp_mode, CP_MODES)
    checks.check_choice(who, "sp_mode", options.sp_mode, SP_MODES)
    if not isinstance(options.schedule, Schedule | None):
        raise checks.ArgumentTypeError(f"{who}: schedule is {options.schedule!r}; expected a cula.dist.Schedule")
    if options.schedule is not None and (options.schedule.exchange not in EXCHANGES or options.schedule.blocks < 1):
        raise ValueError(f"{who}: schedule is {options.schedule}; expected one of {list(EXCHANGES)} and blocks >= 1")
    B, _, HV, V = x.v.shape
    K = x.q.shape[3]
    offsets: tuple[int, ...] = ()
    if x.cu_seqlens is None:
        N, states, tokens = B, B, B * NOMINAL_TOKENS
        layout = batch_layout(N, ranks.rank, ranks.size)
    else:
        if B != 1:
            raise ValueError(f"{who}: cu_seqlens packs sequences along T and needs B == 1, but q has shape {list(x.q.shape)}")
        offsets = host_offsets(x.cu_seqlens, who)
        N, states, tokens = len(offsets) - 1, 1, max(1, offsets[-1] // ranks.size)
        layout = packed_layout(offsets, options.sp_mode, ranks.rank, ranks.size)
        assert layout.share.cu_seqlens is not None
        check_tokens(who, x, layout.share.cu_seqlens[-1], f"cu_seqlens and sp_mode={options.sp_mode!r}")
    # of a batch only rank 0 reads it, and the others need not know
    has_initial_state = x.initial_state is not None and (x.cu_seqlens is not None or ranks.rank == 0)
    if has_initial_state and x.initial_state.shape != (N, HV, V, K):
        raise ValueError(
            f"{who}: initial_state has shape {list(x.initial_state.shape)}; expected [N, HV, V, K] = {[N, HV, V, K]}"
        )
    load = Load(layout.longest_chain, states, HV, K, V, tokens, kernels.has_dense_transition, kernels.needs_grad)
    call = Call(
        kernels=kernels,
        layout=layout,
        schedule=options.schedule or cheapest(load, options.cp_mode),
        group=ranks.group,
        rank=ranks.rank,
        size=ranks.size,
        has_initial_state=has_initial_state,
        output_final_state=options.output_final_state,
        broadcast_final_state=options.broadcast_final_state,
    )
    return Plan(call, signature_of(x, kernels, ranks, options, offsets))


def signature_of(
    x: Inputs, kernels: LocalKernels, ranks: Ranks, options: CpOptions, offsets: tuple[int, ...] = ()
) -> handshake.Signature:
    """What must be equal on all ranks. The number of tokens of a batch need not be, nor who has an initial state."""
    if ranks.group is None:
        return ()
    H, K = x.q.shape[2:]
    HV, V = x.v.shape[2:]
    common: list[tuple[str, Any]] = [("H", H), ("HV", HV), ("K", K), ("V", V), ("dtype", str(x.q.dtype))]
    common += options._asdict().items()
    common += [("backend", kernels.backend), ("needs_grad", kernels.needs_grad)]
    common += [(name, value) for name, value in kernels.options._asdict().items() if name != "output_final_state"]
    for name in kernels.family.own:
        t = getattr(x, name)
        common.append((name, None if t is None else (t.dim(), str(t.dtype))))
    if offsets:
        digest = hashlib.sha256(repr(offsets).encode()).hexdigest()[:12]
        common.append(("cu_seqlens", f"{len(offsets) - 1} sequences, {offsets[-1]} tokens, digest {digest}"))
        common.append(("initial_state", x.initial_state is not None))
    else:
        common += [("B", x.q.shape[0]), ("cu_seqlens", None)]
    return tuple(common)


def public_options(family: Family) -> list[str]:
    """The options of a family that are keywords over ranks: all but those of pools, which are kept under other names."""
    return [name for name in family.Options._fields if name not in PUBLIC_NAMES]


def local_kernels(
    who: str, family: Family, x: Inputs, options: Any, device: torch.device | str | None, backend: str, extra: dict[str, Any]
) -> LocalKernels:
    """A call of level 1 on this rank's tokens, checked as level 1 does. What that does not know is refused by name.

    Where the call is only to be explained, `Explained` says what would serve these tokens, before ranks speak to each other.
    """
    if getattr(options, "return_intermediate_states", False):
        raise NotImplementedError(f"{who}: return_intermediate_states=True is not available over ranks; use {family.function}")
    if getattr(with_settings(options), "batch_invariant", False):
        raise NotImplementedError(
            f"{who}: batch_invariant=True (or CULA_BATCH_INVARIANT=1) is not available over ranks, "
            "which say how sequences are split"
        )
    checks.refuse_transforms(who, x)
    _refuse_serving(who, extra)
    known = (*x._fields, *public_options(family), *KEYWORDS)
    try:
        problem, _ = family.check(x._replace(initial_state=None, cu_seqlens=None), options, who)
    except (TypeError, ValueError):
        refuse_unknown(who, extra, known, backend)
        raise
    checks.check_device_argument(device, x.q, who)
    _check_initial_state(who, family, x)
    chosen = choose_prefill(problem, backend, not is_explaining.get(), who)
    checks.refuse_keywords(who, extra, known, chosen.name, chosen.backend.options)
    if is_explaining.get():
        raise explained(chosen, problem)
    of_state = ("initial_state",) if needs_grad([x.initial_state]) else ()
    return LocalKernels(family, options, backend, (*problem.grads, *of_state), who)


def _refuse_serving(who: str, kwargs: dict[str, Any]) -> None:
    for name in SERVING:
        if kwargs.pop(name, None) is not None:
            raise NotImplementedError(
                f"{who}: {name}= is not available over ranks; pass initial_state= and write final_state to the pool yourself"
            )


def _check_initial_state(who: str, family: Family, x: Inputs) -> None:
    h0 = x.initial_state
    if h0 is None:
        return
    checks.check_tensor(who, "initial_state", h0)
    checks.check_dtype(who, "initial_state", h0, family.state_dtypes)
    checks.check_devices(who, x.q.device, initial_state=h0)


def check_tokens(who: str, x: Inputs, expected: int, by: str) -> None:
    if x.q.shape[1] != expected:
        raise ValueError(f"{who}: this rank's tensors hold {x.q.shape[1]} tokens; {by} give it {expected}")
