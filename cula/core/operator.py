# SPDX-License-Identifier: Apache-2.0
"""A family's autograd node and its `torch.library` operators, made from its description.

Eager code runs the chosen kernels at once, inside one autograd node (`Attention`) where a gradient is needed. Under
`torch.compile` the same call goes through operators that the compiler takes as they are:

| operator               | what                                                                                                  |
|------------------------|-------------------------------------------------------------------------------------------------------|
| `cula::<family>`       | a prefill; its gradient is `cula::<family>_bwd`                                                       |
| `cula::<family>_serve` | a prefill that writes: a pool, checkpoints, `out`                                                     |
| `cula::<family>_decode`| a decode; writes its pool                                                                             |

The body of each is the eager call itself, so that checks, choice and kernels are the same. Its fake, which gives shapes to the
compiler, runs the same checks on tensors without data. An operator may not return None (an empty tensor stands for it) nor one of
its inputs.

A forward saves its inputs, which any backend's backward can read; `saved` beyond that is handed over only where forward and
backward are the same backend's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from cula.core import checks
from cula.core.constants import CHUNK
from cula.core.device import running_on
from cula.core.dispatch import Choice, choose
from cula.core.family import FAMILIES, Family
from cula.core.pool import Serving
from cula.core.problem import DecodeOptions, Problem, encoding_of, needs_grad, with_settings

DECODE_ENCODING = encoding_of(DecodeOptions)


# Eager


def without_gradient(grads: Sequence[Tensor | None], of: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Gradients that a backward has made of these tensors, and that have no gradient of their own: who differentiates them
    (`create_graph=True`) is told so.

    torch's `once_differentiable` tells where the incoming gradient requires one. That of a plain sum does not, and a penalty on
    the gradients of such a loss would be a constant, without a word.
    """
    if not torch.is_grad_enabled():
        return grads
    needing = [t for t in of if t is not None and t.requires_grad]
    needing.append(torch.zeros((), requires_grad=True))  # activation checkpointing hands over tensors that are detached
    return _Gradients.apply(len(needing), *needing, *grads)


class _Gradients(torch.autograd.Function):
    """Gradients as they are, behind the tensors that they depend on."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[count:]

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(
            "the gradients of an attention call of cuLA are not differentiable: second derivatives (create_graph=True) are not "
            "supported; use cula.reference for them"
        )


class Attention(torch.autograd.Function):
    """One call of any family, with its gradient. Arguments are the problem, the choice, the type of the inputs, and the
    inputs."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, choice: Choice, Inputs: Any, *x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        o, final_state, saved = _forward(problem, choice, Inputs(*x))
        ctx.problem, ctx.choice, ctx.Inputs = problem, choice, Inputs
        ctx.save_for_backward(*x, *saved)
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # once: activation checkpointing lets each be unpacked only once
        count = len(ctx.Inputs._fields)
        x, saved, given = ctx.Inputs(*tensors[:count]), tensors[count:], (do, dht)
        with torch.no_grad():
            if do is None:
                do = torch.zeros(x.v.shape, dtype=x.v.dtype, device=x.v.device)
            grads = _backward(ctx.problem, ctx.choice.backward, x, saved, do, dht)
        return None, None, None, *without_gradient(grads, (*x, *given)), None  # none for cu_seqlens


def _forward(problem: Problem, choice: Choice, x: Any) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """(o, final state, what the backward wants saved), by a record where there is one. For autograd, which has gradients off."""
    name, replay = problem.family, FAMILIES[problem.family].replay
    static_args, tensors = ("training", problem.options, choice.name, choice.shares_saved), x + Serving()
    make = choice.backend.find(name, f"record_{name}_fwd_saved" if choice.shares_saved else f"record_{name}_fwd")
    done = NotImplemented if make is None else replay.run(tensors, static_args)
    if done is not None and done is not NotImplemented:
        o, final_state, *saved = done
        return o, final_state, tuple(saved) if choice.shares_saved else ()  # another backend's backward would take it for its own
    with running_on(x.q):
        result = choice.backend.load(name, f"{name}_fwd")(problem, x)
        if done is NotImplemented and make is not None:
            replay.keep(tensors, static_args, lambda: make(problem, x, None))
    return result.o, result.final_state, result.saved if choice.shares_saved else ()


def _backward(problem: Problem, choice: Choice, x: Any, saved: Any, do: Tensor, dht: Tensor | None) -> Any:
    """Gradients of the inputs, by a record where there is one."""
    name, replay = problem.family, FAMILIES[problem.family].replay
    static_args, tensors = ("backward", problem.options, problem.grads, choice.name), (*x, *saved, do, dht)
    done = replay.run(tensors, static_args)
    if done is not None and done is not NotImplemented:
        return done
    with running_on(x.q):
        grads = choice.backend.load(name, f"{name}_bwd")(problem, x, saved, do, dht)
        make = choice.backend.find(name, f"record_{name}_bwd")
        if done is NotImplemented and make is not None:
            replay.keep(tensors, static_args, lambda: make(problem, x, saved, do, dht))
    return grads


# Under torch.compile: the calls that are traced


def call_prefill(
    family: Family,
    x: Any,
    options: Any,
    serving: Serving,
    checkpoint_every: int | None,
    device: torch.device | str | None,
    backend: str,
    extra: dict[str, Any] | None,
    who: str,
) -> Any:
    _refuse_extra(who, extra, family.name, is_decode=False)
    place = None if device is None else str(device)
    ops = torch.ops.cula
    trains = needs_grad(x)
    rest = (*family.encoding.encode(options), place, backend, who, trains)
    serves = len([t for t in serving if t is not None]) > 0  # not by a property: TorchDynamo of torch 2.9 takes that for a tensor
    if not serves and checkpoint_every is None:
        o, final_state, states = getattr(ops, family.name)(*x, *rest)
    else:
        o, final_state, states = getattr(ops, f"{family.name}_serve")(*x, *serving, checkpoint_every, *rest)
        o = o if serving.out is None else serving.out
    final_state = final_state if options.output_final_state else None
    return (o, final_state, states) if getattr(options, "return_intermediate_states", False) else (o, final_state)


def call_decode(
    family: Family,
    x: Any,
    options: DecodeOptions,
    device: torch.device | str | None,
    backend: str,
    extra: dict[str, Any] | None,
    who: str,
) -> tuple[Tensor, Tensor]:
    _refuse_extra(who, extra, family.name, is_decode=True)
    place = None if device is None else str(device)
    rest = (*DECODE_ENCODING.encode(options), place, backend, who, needs_grad(x))
    o = getattr(torch.ops.cula, f"{family.name}_decode")(*x, *rest)
    return (o if x.out is None else x.out), x.state


def _refuse_extra(who: str, extra: dict[str, Any] | None, family: str, is_decode: bool) -> None:
    for name in extra or ():
        meant = _meant(name, family, is_decode)
        raise TypeError(f"{who}: unknown keyword argument {name!r}{meant} (backend options are not taken under torch.compile)")


def _meant(name: str, family: str, is_decode: bool) -> str:
    """What a misspelt keyword meant. Called as it is, with plain values, where TorchDynamo traces: it reads signatures."""
    of = FAMILIES[family]
    return checks.meant_by(name, of.decode.keywords() if is_decode and of.decode is not None else of.keywords())


# As `torch.compiler.assume_constant_result` does, which would import the compiler with cula: a second.
_meant._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Under torch.compile: the operators

_COMMON = "str? device, str backend, str who, bool needs_grad"
NUM_COMMON = 4
_SERVING = (
    "Tensor(a!)? out, Tensor(b!)? state_pool, Tensor? initial_state_indices, Tensor? has_initial_state, "
    "Tensor(c!)? checkpoint_states, Tensor? checkpoint_offsets, int? checkpoint_every"
)


def define_operators(family: Family) -> None:
    """Register the operators of a family, once."""
    if hasattr(torch.ops.cula, family.name):
        return
    _define_prefill(family)
    _define_serve(family)
    if family.decode is not None:
        _define_decode(family)


def _tensors(Inputs: Any, written: tuple[str, ...] = ()) -> str:
    """Declares the tensors of a NamedTuple, those with a default as optional."""
    declared = []
    for letter, name in zip("abcdefghijklmnopqrstuvwxyz", Inputs._fields):
        alias = f"({letter}!)" if name in written else ""
        declared.append(f"Tensor{alias}{'?' if name in Inputs._field_defaults else ''} {name}")
    return ", ".join(declared)


def _or_empty(t: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if t is None else t


def _fake_outputs(request: Any, has_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors of the shapes of o, the final state and the states at chunk starts."""
    p, x, options = request.problem, request.x, request.options
    final_state = states = None
    if options.output_final_state:
        final_state = x.q.new_empty((p.N, p.HV, p.V, p.K), dtype=torch.float32)
    if getattr(options, "return_intermediate_states", False):
        if p.is_packed:
            raise NotImplementedError(
                f"{request.who}: return_intermediate_states with cu_seqlens has a shape that depends on data; "
                "call it on tensors with data, outside torch.compile"
            )
        states = x.q.new_empty((p.B, -(-p.T // CHUNK), p.HV, p.V, p.K), dtype=torch.float32)
    o = None if has_out else x.v.new_empty(p.B, p.T, p.HV, p.V)
    return _or_empty(o, x.q), _or_empty(final_state, x.q), _or_empty(states, x.q)


def _define_prefill(family: Family) -> None:
    from cula.core.prefill import NOTHING_TO_SERVE, describe, prefill

    Inputs, encoding, name = family.Inputs, family.encoding, family.name
    count = len(Inputs._fields)
    arguments = f"{_tensors(Inputs)}, {encoding.schema}, {_COMMON}"

    def split(args: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
        return Inputs(*args[:count]), encoding.decode(args[count:-NUM_COMMON]), args[-NUM_COMMON:]

    @custom_op(f"cula::{name}", mutates_args=(), schema=f"({arguments}) -> (Tensor, Tensor, Tensor)")
    def forward_op(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, options, (device, backend, who, _) = split(args)
        o, final_state, *states = prefill(family, x, options, device=device, backend=backend, who=who)
        return o, _or_empty(final_state, x.q), _or_empty(states[0] if states else None, x.q)

    @forward_op.register_fake
    def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, options, (device, _, who, trains) = split(args)
        return _fake_outputs(describe(family, x, options, NOTHING_TO_SERVE, None, device, who, trains), has_out=False)

    @custom_op(f"cula::{name}_bwd", mutates_args=(), schema=f"(Tensor do, Tensor? dht, str wanted, {arguments}) -> Tensor[]")
    def backward_op(do: Tensor, dht: Tensor | None, wanted: str, *args: Any) -> list[Tensor]:
        raw, options, (_, backend, who, _) = split(args)
        problem, x = family.check(raw, with_settings(options), who)
        problem = replace(problem, grads=tuple(wanted.split()))
        kernel = choose(f"{name}_bwd", problem, backend, who=who).backend.load(name, f"{name}_bwd")
        with running_on(x.q):
            grads = kernel(problem, x, (), do.contiguous(), dht)
        return [
            x.q.new_empty(0) if t is None or d is None or name not in problem.grads else d.reshape(t.shape).to(t.dtype)
            for name, d, t in zip(Inputs._fields, grads, raw)
        ]

    @backward_op.register_fake
    def _(do: Tensor, dht: Tensor | None, wanted: str, *args: Any) -> list[Tensor]:
        x, names = split(args)[0], wanted.split()
        inputs = [getattr(x, name) if name in names else None for name in Inputs._fields[:-1]]
        return [x.q.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.constants = inputs[count:]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None, _dstates: Tensor | None) -> tuple[Any, ...]:
        x = Inputs(*ctx.saved_tensors)
        if do is None:
            do = torch.zeros(x.v.shape, dtype=x.v.dtype, device=x.v.device)
        has_final_state = encoding.decode(ctx.constants[:-NUM_COMMON]).output_final_state
        names = [f for f, needs in zip(Inputs._fields, ctx.needs_input_grad) if needs and f in family.differentiable]
        given = (do, dht if has_final_state else None, " ".join(names))
        grads = getattr(torch.ops.cula, f"{name}_bwd")(*given, *x, *ctx.constants)
        of_inputs = [d if f in names else None for f, d in zip(Inputs._fields, grads)]
        return *of_inputs, None, *[None] * len(ctx.constants)  # none for cu_seqlens

    forward_op.register_autograd(backward, setup_context=setup_context)


def _define_serve(family: Family) -> None:
    from cula.core.prefill import describe, prefill

    Inputs, encoding = family.Inputs, family.encoding
    count, count_serving = len(Inputs._fields), len(Serving._fields)
    arguments = f"{_tensors(Inputs)}, {_SERVING}, {encoding.schema}, {_COMMON}"

    def split(args: tuple[Any, ...]) -> tuple[Any, Serving, int | None, Any, tuple[Any, ...]]:
        x, rest = Inputs(*args[:count]), args[count:]
        serving, (every, *numbers) = Serving(*rest[:count_serving]), rest[count_serving:-NUM_COMMON]
        return x, serving, every, encoding.decode(tuple(numbers)), rest[-NUM_COMMON:]

    written = ("out", "state_pool", "checkpoint_states")

    @custom_op(f"cula::{family.name}_serve", mutates_args=written, schema=f"({arguments}) -> (Tensor, Tensor, Tensor)")
    def serve_op(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, serving, every, options, (device, backend, who, _) = split(args)
        made = prefill(family, x, options, serving, checkpoint_every=every, device=device, backend=backend, who=who)
        o, final_state, *states = made
        o = o if serving.out is None else None
        return _or_empty(o, x.q), _or_empty(final_state, x.q), _or_empty(states[0] if states else None, x.q)

    @serve_op.register_fake
    def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, serving, every, options, (device, _, who, trains) = split(args)
        return _fake_outputs(describe(family, x, options, serving, every, device, who, trains), serving.out is not None)


def _define_decode(family: Family) -> None:
    from cula.core.decode import decode
    from cula.core.decode_checks import describe_decode

    assert family.decode is not None
    Inputs, written = family.decode.Inputs, ("state", "intermediate_states", "out")
    count = len(Inputs._fields)
    arguments = f"{_tensors(Inputs, written)}, {DECODE_ENCODING.schema}, {_COMMON}"

    def split(args: tuple[Any, ...]) -> tuple[Any, DecodeOptions, tuple[Any, ...]]:
        return Inputs(*args[:count]), DECODE_ENCODING.decode(args[count:-NUM_COMMON]), args[-NUM_COMMON:]

    @custom_op(f"cula::{family.name}_decode", mutates_args=written, schema=f"({arguments}) -> Tensor")
    def decode_op(*args: Any) -> Tensor:
        x, options, (device, backend, who, _) = split(args)
        o, _ = decode(family, x, options, device=device, backend=backend, who=who)
        return o if x.out is None else x.q.new_empty(0)

    @decode_op.register_fake
    def _(*args: Any) -> Tensor:
        x, options, (device, _, who, trains) = split(args)
        describe_decode(family, x, options, device, who, trains)
        return x.v.new_empty(x.v.shape) if x.out is None else x.q.new_empty(0)
