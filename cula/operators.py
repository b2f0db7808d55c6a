# SPDX-License-Identifier: Apache-2.0
"""The operators: a checked call, its backend and its gradient put together.

Two ways in, one set of kernels:

- Eager code calls `kda`, `lightning` and `decode` below: the backend is chosen and called at once, inside one
  `autograd.Function` where a gradient is needed.
- Under `torch.compile` the same calls go through operators registered with `torch.library` (`torch.ops.cula.*`), which
  the compiler takes as they are: shapes from a fake implementation, gradients from a second operator, writes declared.
  Their bodies check the call and choose the backend when they run.

A forward saves its inputs, which any backend's backward can read; `saved` beyond that is handed over only where forward
and backward are the same backend's.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from cula.contract import (
    CHUNK,
    DecodeInputs,
    DecodeOptions,
    DecodeProblem,
    KdaInputs,
    KdaOptions,
    KdaProblem,
    LightningInputs,
    LightningProblem,
    check_decode,
    check_kda,
    check_lightning,
)
from cula.dispatch import choose, select
from cula.ops import KdaForward, Plan

# Eager


def on_device_of(t: Tensor) -> contextlib.AbstractContextManager[None]:
    """Kernels launch on the current device, so make it that of the tensors. (Autograd does so by itself.)"""
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        return torch.cuda.device(t.device)
    return contextlib.nullcontext()


def kda(problem: KdaProblem, x: KdaInputs, backend: str = "auto", out: Tensor | None = None) -> KdaForward:
    """Run a checked KDA call. Differentiable in every floating-point input and through the final state."""
    forward = choose("kda_fwd", problem, backend)
    fwd = forward.backend.load("kda_fwd")
    if not problem.needs_grad:
        with on_device_of(x.q):
            return fwd(problem, x, out)
    backward = choose("kda_bwd", problem, backend)
    shares_saved = backward.name == forward.name
    with on_device_of(x.q):
        o, final_state = _Kda.apply(problem, fwd, backward.backend.load("kda_bwd"), shares_saved, *x)
    return KdaForward(o, final_state, None)


class _Kda(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: KdaProblem, fwd: Any, bwd: Any, shares_saved: bool, *x: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        result = fwd(problem, KdaInputs(*x))  # type: ignore[arg-type]
        ctx.problem, ctx.bwd = problem, bwd
        ctx.save_for_backward(*x, *(result.saved if shares_saved else ()))
        ctx.set_materialize_grads(False)
        return result.o, result.final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # once: activation checkpointing lets each be unpacked only once
        count = len(KdaInputs._fields)
        x, saved = KdaInputs(*tensors[:count]), tensors[count:]
        if do is None:
            do = torch.zeros(x.v.shape, dtype=x.v.dtype, device=x.v.device)
        return None, None, None, None, *ctx.bwd(ctx.problem, x, saved, do, dht), None  # none for cu_seqlens


def lightning(
    problem: LightningProblem, x: LightningInputs, backend: str = "auto", out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run a checked Lightning call. Differentiable in q, k, v and initial_state, and through the final state."""
    fwd = select("lightning_fwd", problem, backend)
    with on_device_of(x.q):
        if not problem.needs_grad:
            return fwd(problem, x, out)
        return _Lightning.apply(problem, fwd, select("lightning_bwd", problem, backend), *x)


class _Lightning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: LightningProblem, fwd: Any, bwd: Any, *x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ctx.problem, ctx.bwd = problem, bwd
        ctx.save_for_backward(*x)
        ctx.set_materialize_grads(False)
        return fwd(problem, LightningInputs(*x))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Any, ...]:
        x = LightningInputs(*ctx.saved_tensors)
        if do is None:
            do = torch.zeros(x.v.shape, dtype=x.v.dtype, device=x.v.device)
        dq, dk, dv, dh0 = ctx.bwd(ctx.problem, x, do, dht)
        return None, None, None, dq, dk, dv, None, dh0, None  # none for decay and cu_seqlens


def decode(problem: DecodeProblem, x: DecodeInputs, backend: str = "auto") -> Tensor:
    """Run a checked decode call: o [N, T, HV, V]; writes x.state, x.intermediate_states and x.out in place."""
    with on_device_of(x.q):
        return select("decode", problem, backend)(problem, x)


def decode_plan(problem: DecodeProblem, x: DecodeInputs, given: DecodeInputs, backend: str = "auto") -> Plan | None:
    """A plan for decode calls like this one, whose tensors were `given` and are x now; None where the backend has none.

    A plan takes tensors as they come. They do for the kernel where normalising copied nothing: their addresses are the same, and
    so the strides that x has.
    """
    if any(a is not None and b is not None and a.data_ptr() != b.data_ptr() for a, b in zip(given, x)):
        return None
    make = choose("decode", problem, backend).backend.find("record_decode")
    if make is None:
        return None
    with on_device_of(x.q):
        return make(problem, x, given)


# Under torch.compile. An operator may not return None (an empty tensor stands for it) nor one of its inputs.


def _or_empty(t: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if t is None else t


def _empty_states(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


@custom_op("cula::kda", mutates_args=())
def kda_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    lower_bound: float | None,
    flags: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = KdaOptions.from_flags(flags, scale=scale, lower_bound=lower_bound)
    problem, x = check_kda(KdaInputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens), options)
    with on_device_of(q):
        result = select("kda_fwd", problem, backend)(problem, x)
    return result.o, _or_empty(result.final_state, q), _or_empty(result.states, q)


@kda_op.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, lower_bound, flags, backend):
    options = KdaOptions.from_flags(flags, scale=scale, lower_bound=lower_bound)
    p, _ = check_kda(KdaInputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens), options)
    final_state = states = None
    if options.output_final_state:
        final_state = _empty_states(q, p.N, p.HV, p.V, p.K)
    if options.return_intermediate_states:
        if p.is_packed:
            raise NotImplementedError(
                "cula_kda: return_intermediate_states with cu_seqlens has a shape that depends on data; "
                "call it outside torch.compile"
            )
        states = _empty_states(q, p.B, -(-p.T // CHUNK), p.HV, p.V, p.K)
    return v.new_empty(p.B, p.T, p.HV, p.V), _or_empty(final_state, q), _or_empty(states, q)


@custom_op("cula::kda_bwd", mutates_args=())
def kda_bwd_op(
    do: Tensor,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    lower_bound: float | None,
    flags: str,
    backend: str,
) -> list[Tensor]:
    options = KdaOptions.from_flags(flags, scale=scale, lower_bound=lower_bound)
    raw = KdaInputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    problem, x = check_kda(raw, options)
    grads = select("kda_bwd", problem, backend)(problem, x, (), do.contiguous(), dht)
    return [_or_empty(d, q) if t is None else d.reshape(t.shape) for d, t in zip(grads, raw[:8], strict=True)]


@kda_bwd_op.register_fake
def _(do, dht, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, lower_bound, flags, backend):
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return [q.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs]


def _kda_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.constants = inputs[9:]
    ctx.set_materialize_grads(False)


def _kda_backward(ctx: Any, do: Tensor | None, dht: Tensor | None, _dstates: Tensor | None) -> tuple[Any, ...]:
    x = KdaInputs(*ctx.saved_tensors)
    if do is None:
        do = torch.zeros(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    has_final_state = "output_final_state" in ctx.constants[2].split()
    grads = torch.ops.cula.kda_bwd(do, dht if has_final_state else None, *x, *ctx.constants)
    return *(None if t is None else d for d, t in zip(grads, x[:8], strict=True)), None, None, None, None, None


kda_op.register_autograd(_kda_backward, setup_context=_kda_setup)


@custom_op("cula::lightning", mutates_args=())
def lightning_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    output_final_state: bool,
    chunk_size: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    problem, x = check_lightning(
        LightningInputs(q, k, v, decay, initial_state, cu_seqlens),
        scale=scale,
        output_final_state=output_final_state,
        chunk_size=chunk_size,
    )
    with on_device_of(q):
        o, final_state = select("lightning_fwd", problem, backend)(problem, x)
    return o, _or_empty(final_state, q)


@lightning_op.register_fake
def _(q, k, v, decay, initial_state, cu_seqlens, scale, output_final_state, chunk_size, backend):
    x = LightningInputs(q, k, v, decay, initial_state, cu_seqlens)
    p, _ = check_lightning(x, scale=scale, output_final_state=output_final_state, chunk_size=chunk_size)
    final_state = _empty_states(q, p.N, p.HV, p.V, p.K) if output_final_state else q.new_empty(0)
    return v.new_empty(p.B, p.T, p.HV, p.V), final_state


@custom_op("cula::lightning_bwd", mutates_args=())
def lightning_bwd_op(
    do: Tensor,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    output_final_state: bool,
    chunk_size: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, x = check_lightning(
        LightningInputs(q, k, v, decay, initial_state, cu_seqlens),
        scale=scale,
        output_final_state=output_final_state,
        chunk_size=chunk_size,
    )
    dq, dk, dv, dh0 = select("lightning_bwd", problem, backend)(problem, x, do.contiguous(), dht)
    return dq, dk, dv, _or_empty(dh0, q)


@lightning_bwd_op.register_fake
def _(do, dht, q, k, v, decay, initial_state, cu_seqlens, scale, output_final_state, chunk_size, backend):
    dh0 = q.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dh0


def _lightning_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.constants = inputs[6:]
    ctx.set_materialize_grads(False)


def _lightning_backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Any, ...]:
    x = LightningInputs(*ctx.saved_tensors)
    if do is None:
        do = torch.zeros(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    output_final_state = ctx.constants[1]
    dq, dk, dv, dh0 = torch.ops.cula.lightning_bwd(do, dht if output_final_state else None, *x, *ctx.constants)
    return dq, dk, dv, None, (None if x.initial_state is None else dh0), None, None, None, None, None


lightning_op.register_autograd(_lightning_backward, setup_context=_lightning_setup)


@custom_op("cula::decode", mutates_args=("state", "intermediate_states", "out"))
def decode_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    decay: Tensor | None,
    num_accepted_tokens: Tensor | None,
    intermediate_states: Tensor | None,
    out: Tensor | None,
    scale: float | None,
    lower_bound: float | None,
    flags: str,
    backend: str,
) -> Tensor:
    """Returns o in v's layout, or an empty tensor where `out` takes it."""
    options = DecodeOptions.from_flags(flags, scale=scale, lower_bound=lower_bound)
    x = DecodeInputs(q, k, v, state, state_indices, g, beta, A_log, dt_bias, decay, num_accepted_tokens, intermediate_states, out)
    problem, x, _ = check_decode(x, options)
    o = decode(problem, x, backend)
    return o.reshape(v.shape) if out is None else q.new_empty(0)


@decode_op.register_fake
def _(
    q, k, v, state, state_indices, g, beta, A_log, dt_bias, decay, num_accepted_tokens, intermediate_states, out, *rest
):  # fmt: skip
    return v.new_empty(v.shape) if out is None else q.new_empty(0)
