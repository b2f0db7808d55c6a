# SPDX-License-Identifier: Apache-2.0
"""The life of a prefill, for every family: look for a recorded launch, check, choose, run, record.

    prefill(FAMILY, x, options, serving, ...)
      |  family.replay.run     a call like one before goes straight to its launches           core/replay
      |  describe              raise, or say what the call is: a Problem of plain values      family.check, core/checks.py
      |  choose_prefill        forward, backward and pool handling, chosen once: a Choice     core/dispatch.py
      v
    execute                    the chosen kernels, in one autograd node where a gradient is needed

Under `torch.compile` the call enters an operator instead, whose body is this same function (`core/operator.py`).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cula import settings
from cula.core import checks, operator
from cula.core.choosing import check_and_choose
from cula.core.device import running_on
from cula.core.dispatch import IN_PLACE, Choice, choose_prefill
from cula.core.explain import is_explaining
from cula.core.family import Family
from cula.core.pool import (
    Serving,
    check_checkpoint_values,
    check_checkpoints,
    check_serving,
    check_slot_values,
    checkpoint_rows,
    read_pool,
    write_checkpoints,
    write_pool,
)
from cula.core.problem import Problem, needs_grad, with_settings
from cula.core.replay.torch_internals import modes

NOTHING_TO_SERVE = Serving()


class Request(NamedTuple):
    """A checked call."""

    family: Family
    problem: Problem
    x: Any  # the family's Inputs, normalised
    serving: Serving
    options: Any  # as the caller gave them; those of the problem may ask the kernels for more
    checkpoint_every: int | None
    who: str


def call_prefill(
    family: Family,
    tensors: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    checkpoint_every: int | None,
    device: torch.device | str | None,
    backend: str,
    extra: dict[str, Any],
) -> Any:
    """`prefill` for functions of level 1: takes plain tuples, of the family's `Inputs` and `Serving` together and of its
    `Options`, so that a call seen before makes no others."""
    if not (extra or is_dynamo_compiling() or modes() or is_explaining.get() or settings.batch_invariant()):
        done = family.replay.run(tensors, (options, checkpoint_every, device, backend))
        if done is not None and done is not NotImplemented:
            return done
    x, serving = split(family, tensors)
    return prefill(
        family,
        x,
        family.Options(*options),
        serving,
        checkpoint_every=checkpoint_every,
        device=device,
        backend=backend,
        extra=extra,
    )


def split(family: Family, tensors: tuple[Tensor | None, ...]) -> tuple[Any, Serving]:
    """The tensors of a function of level 1, which stand in one order everywhere, as the family's `Inputs` and `Serving`."""
    count = len(family.Inputs._fields)
    return family.Inputs(*tensors[:count]), Serving(*tensors[count:])


def prefill(
    family: Family,
    x: Any,
    options: Any,
    serving: Serving = NOTHING_TO_SERVE,
    *,
    checkpoint_every: int | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    extra: dict[str, Any] | None = None,
    who: str = "",
) -> Any:
    """Make a call of a family: `(o, final_state)`, or `(o, final_state, states)` where the options ask for states.

    Args:
        x: the family's `Inputs`.
        options: the family's `Options`.
        extra: keywords that the function does not know, for the backend; what that does not know either is refused.
        who: how errors call the function; the family's own name by default.
    """
    who = who or family.function
    if options.scale is not None:
        options = options._replace(scale=checks.as_number(who, "scale", options.scale))
    if is_dynamo_compiling() or (modes() and not is_explaining.get()):
        return operator.call_prefill(family, x, options, serving, checkpoint_every, device, backend, extra, who)
    options = with_settings(options)
    tensors = x + serving
    static_args = None
    if not (extra or is_explaining.get()):
        static_args = (options, checkpoint_every, device, backend)
        if needs_grad(x):  # such calls have no records, but inside of their node
            is_on_gpu = getattr(x.q, "is_cuda", False) and not checks.has_no_data(x.q)
            if is_on_gpu and (found := family.chosen.find(tensors, (static_args, _grads(x)))) is not None:
                problem, choice = found
                return operator.Attention.apply(problem, choice, type(x), *x)
        else:
            done = family.replay.run(tensors, static_args)
            if done is None:  # its record does not fit, and stays as it is
                static_args = None
            elif done is not NotImplemented:
                return done
    if torch.compiler.is_compiling() or (checks.has_no_data(x.q) and not is_explaining.get()):
        # torch.export, by another way than dynamo; shapes without data
        return operator.call_prefill(family, x, options, serving, checkpoint_every, device, backend, extra, who)

    describe_this = functools.partial(describe, family, x, options, serving, checkpoint_every, device, who)
    known = family.keywords() if extra else ()
    request, choice = check_and_choose(describe_this, choose_prefill, backend, extra or (), known, who, tensors)
    check_values(request)
    result = execute(request, choice)
    if static_args is not None and not request.problem.needs_grad:
        family.replay.keep(tensors, static_args, lambda: record(request, choice, tensors))
    elif static_args is not None and x.q.is_cuda and all(a is b for a, b in zip(request.x, x)):
        family.chosen.keep(tensors, (static_args, _grads(x)), (request.problem, choice))
    return result


def prefill_by(backend: str, family: Family, x: Any, options: Any, out: Tensor | None, who: str) -> tuple[Tensor, Tensor | None]:
    """A prefill by one backend and no other, for the functions of level 0 that name hardware: forward only, int32 offsets."""
    if x.cu_seqlens is not None:
        checks.check_int32_offsets(who, x.cu_seqlens)
    with torch.no_grad():
        return prefill(family, x, options, Serving(out=out), backend=backend, who=who)


def _grads(x: Any) -> tuple[bool, ...]:
    """Which inputs require a gradient: a backend may have those of some and not of others."""
    return tuple([t is not None and t.requires_grad for t in x])


def describe(
    family: Family,
    x: Any,
    options: Any,
    serving: Serving,
    checkpoint_every: int | None,
    device: torch.device | str | None,
    who: str,
    trains: bool | None = None,
) -> Request:
    """Raise on anything wrong, or return the checked call. Reads no data.

    Args:
        trains: what the problem is to say of gradients; None to read it off the tensors, which an operator's fake cannot.
    """
    checkpoints = serving.checkpoints(checkpoint_every)
    keeps_checkpoints = checkpoints is not None or checkpoint_every is not None
    if checkpoints is None and serving.checkpoint_offsets is not None:
        raise ValueError(f"{who}: checkpoint_offsets needs checkpoint_states [N, HV, V, K], which take the states")
    if keeps_checkpoints and not family.keeps_states:
        raise TypeError(f"{who}: checkpoint_every and checkpoint_states are not arguments of this family")
    of_kernel = options
    if keeps_checkpoints:
        of_kernel = of_kernel._replace(return_intermediate_states=True, output_final_state=True)
    elif serving.state_pool is not None:
        of_kernel = of_kernel._replace(output_final_state=True)
    problem, normalised = family.check(x, of_kernel, who)
    if trains is not None:
        problem = replace(problem, needs_grad=trains)
    checks.check_device_argument(device, x.q, who)
    check_serving(serving, problem, x.q, who)
    check_checkpoints(checkpoints, checkpoint_every, problem, x.q, who)
    if problem.needs_grad and getattr(options, "return_intermediate_states", False):
        raise ValueError(
            f"{who}: return_intermediate_states=True is for inference, but an input requires grad; "
            "call under torch.no_grad() or torch.inference_mode()"
        )
    if serving.state_pool is not None:
        pool = serving.state_pool
        problem = replace(problem, pool_dtype=pool.dtype, has_aligned_slots=checks.has_aligned_slots(pool))
    if checkpoints is not None:
        kept = checkpoints.states
        is_aligned = checks.has_contiguous_slots(kept) and checks.has_aligned_slots(kept)
        problem = replace(problem, checkpoint_dtype=kept.dtype, has_aligned_checkpoints=is_aligned)
    return Request(family, problem, normalised, serving, options, checkpoint_every, who)


def check_values(request: Request) -> None:
    """With CULA_CHECK=1, everything that needs values; on a CPU, where they are at hand, always offsets and slots."""
    x, who = request.x, request.who
    if settings.check_values():
        request.family.check_values(x, request.problem, who)
    elif x.q.device.type != "cpu":
        return
    checks.check_cu_seqlens_values(x.cu_seqlens, x.q, who)
    check_slot_values(request.serving.pool(request.options), who)
    check_checkpoint_values(request.serving.checkpoints(request.checkpoint_every), request.problem, x.cu_seqlens, who)


def execute(request: Request, choice: Choice) -> Any:
    """Run the chosen kernels. What they do not do to a pool and to checkpoints themselves is done around them."""
    family, p, x, serving, options, every, who = request
    out, pool, kept = serving.out, serving.pool(options), serving.checkpoints(every)
    has_pool, has_checkpoints = _served_by_kernel(request, choice)
    rows = None if kept is None or has_checkpoints else checkpoint_rows(kept, p, x.cu_seqlens, who)
    kernel = lambda suffix: choice.backend.load(family.name, f"{family.name}_{suffix}")
    states = None
    with running_on(x.q):
        if p.needs_grad:
            o, final_state = operator.Attention.apply(p, choice, type(x), *x)
        elif has_pool and kept is None:
            o, final_state = kernel("fwd_pool")(p, x, pool, out), None
        else:
            around = None if has_pool else pool
            if around is not None:
                x = x._replace(initial_state=read_pool(around))
            if has_checkpoints:
                asked = _as_asked(p, options, around is not None)
                made = kernel("fwd_checkpoints")(asked, x, pool if has_pool else None, kept, out)
            else:
                made = kernel("fwd")(p, x, out)
            o, final_state, states, _ = made
            if around is not None:
                write_pool(around, final_state)
            if kept is not None and not has_checkpoints:
                write_checkpoints(kept, rows, p, x.cu_seqlens, states, final_state)
    final_state = final_state if options.output_final_state else None
    return (o, final_state, states) if getattr(options, "return_intermediate_states", False) else (o, final_state)


def _served_by_kernel(request: Request, choice: Choice) -> tuple[bool, bool]:
    """Whether the chosen kernels read and write the call's pool, and whether they write its checkpoints. A kernel writes the last
    states once, and states inside of sequences once."""
    options, serving = request.options, request.serving
    has_checkpoints = serving.checkpoint_states is not None and choice.checkpoints == IN_PLACE
    has_checkpoints = has_checkpoints and not getattr(options, "return_intermediate_states", False)
    has_pool = serving.state_pool is not None and choice.pool == IN_PLACE and not options.output_final_state
    return has_pool and (has_checkpoints or serving.checkpoint_states is None), has_checkpoints


def _as_asked(problem: Problem, options: Any, wants_last: bool) -> Problem:
    """The problem for kernels that write checkpoints themselves. `describe` has the options ask for states at chunk starts and
    last states, from which checkpoints are otherwise taken. Here they ask for what the caller did, and for last states where
    those go to a pool around the kernels."""
    return replace(problem, options=options._replace(output_final_state=options.output_final_state or wants_last))


def _launch_record(request: Request, choice: Choice) -> Any:
    """The backend's record of a call, where it makes one for it."""
    name, serving, problem, x = request.family.name, request.serving, request.problem, request.x
    pool, kept = serving.pool(request.options), serving.checkpoints(request.checkpoint_every)
    has_pool, has_checkpoints = _served_by_kernel(request, choice)
    if (pool is not None and not has_pool) or (kept is not None and not has_checkpoints):
        return None
    suffix = "_checkpoints" if kept is not None else "_pool" if pool is not None else ""
    make = choice.backend.find(name, f"record_{name}_fwd{suffix}")
    if make is None:
        return None
    if kept is not None:
        return make(_as_asked(problem, request.options, False), x, pool, kept, serving.out)
    return make(problem, x, serving.out) if pool is None else make(problem, x, pool, serving.out)


def record(request: Request, choice: Choice, given: tuple[Tensor | None, ...]) -> Any:
    """What makes calls like this one: a record of launches where the backend has one for it, otherwise the chosen kernels without
    a choice, and without checks where those left every tensor as it came. A record takes tensors as they come, so it is for calls
    whose tensors were not copied."""
    family, x = request.family, request.x
    is_copied = any(a is not None and b is not None and a.data_ptr() != b.data_ptr() for a, b in zip(x, given))
    is_as_given = all(a is b for a, b in zip(x, given))
    if not is_copied and (made := _launch_record(request, choice)) is not None:
        return made

    # Without the tensors of this call, which would live as long as the record.
    bare = request._replace(x=None, serving=NOTHING_TO_SERVE)

    def replay(tensors: tuple[Tensor | None, ...]) -> Any:
        others, serving = split(family, tensors)
        if not is_as_given:
            others = family.check(others, bare.problem.options, bare.who)[1]
        return execute(bare._replace(x=others, serving=serving), choice)

    return replay
