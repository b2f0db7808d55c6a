# SPDX-License-Identifier: Apache-2.0
"""Level 1: one function a family. Each checks the call, picks the best kernel for the device and does the bookkeeping.

The life of a call: `contract` validates and describes it, `dispatch` chooses a backend for that description,
`operators` run the backend and its gradient. Under `torch.compile` the same steps happen inside one operator.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cula import contract, operators, plans, settings
from cula.contract import DecodeInputs, DecodeOptions, KdaInputs, KdaOptions, KdaProblem, LightningInputs, LightningProblem
from cula.dispatch import Choice, Problem, choose
from cula.ops import Plan
from cula.ops.native import Tensors
from cula.state_pool import checkpoint_places, read_pool, write_checkpoints, write_pool


def cula_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    device: torch.device | str | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_every: int | None = None,
    checkpoint_states: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention over whole sequences, on the fastest kernel that can serve the call.

    For each token of a value head, with a state S [V, K] and log decays g <= 0:

        S <- S diag(exp(g_t));   S <- S + beta_t (v_t - S k_t) k_t^T;   o_t = scale * S q_t

    Differentiable in q, k, v, g, beta, A_log, dt_bias and initial_state, and through final_state.

    Args:
        q, k: queries and keys, `[B, T, H, K]`, bf16, fp16 or fp32. Value head hv reads head `hv // (HV // H)`.
        v: values, `[B, T, HV, V]`, the dtype of q.
        g: log decays, `[B, T, HV, K]`, or `[B, T, HV]` for one decay a head; raw gates with `use_gate_in_kernel`.
        beta: write strengths, `[B, T, HV]`; logits with `use_beta_sigmoid_in_kernel`.
        scale: factor on o; `K ** -0.5` by default.
        initial_state: `[N, HV, V, K]` float32 (K last); zeros by default.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: divide q and k by `sqrt(sum x^2 + 1e-6)`.
        use_gate_in_kernel: the log decay is `-exp(A_log) * softplus(g + dt_bias)` or, with `lower_bound`,
            `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
        cu_seqlens: offsets `[N + 1]` of sequences packed along T (then B == 1); int32 or int64.
        safe_gate: promises log decays within about [-5, 0), which lets more of the work run on tensor cores.
        lower_bound: bound of the gate, in [-5, 0).
        disable_recompute: keep the chunk states for the backward instead of making them again.
        return_intermediate_states: also return the state at the start of each 64-token chunk (inference only).
        device: the device the tensors are expected on; a mismatch is an error, nothing is moved.
        A_log: `[HV]` float32; may be None with `lower_bound` (factor 1).
        dt_bias: `[HV, K]` or `[HV * K]` float32 (`[HV]` with one gate a head), or None.
        use_beta_sigmoid_in_kernel: beta is `sigmoid(beta)`.
        allow_neg_eigval: beta is `2 * sigmoid(beta)`.
        state_pool: `[P, HV, V, K]` fp32 or bf16; sequence n starts from slot `initial_state_indices[n]` and leaves its
            last state there (inference only). A negative index starts at zero and writes nothing.
        initial_state_indices: `[N]` int32 or int64.
        has_initial_state: `[N]` bool; False starts from zero and still writes the slot.
        checkpoint_every: keep the state after every so many tokens of a sequence (a multiple of 64), for prefix caches.
        checkpoint_states: `[M, HV, V, K]` buffer for them; sequence n has `length // checkpoint_every` rows, in order.
        out: `[B, T, HV, V]` tensor that takes o (inference only).
        backend: force a backend by name; "auto" takes the best that can.
        cp_context: flash-linear-attention's context-parallel context; deprecated, use `cula.dist.cula_kda_cp`.
        **kwargs: options of the chosen backend; any other keyword is a TypeError.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in q's dtype; final_state `[N, HV, V, K]` float32, or None unless
        `output_final_state`. With `return_intermediate_states`, `(o, final_state, h)`, h `[B, NT, HV, V, K]`.

    Example:
        >>> import torch, cula
        >>> q, k, v = (torch.randn(1, 100, 2, 32) for _ in range(3))
        >>> g, beta = -torch.rand(1, 100, 2, 32), torch.rand(1, 100, 2)
        >>> o, state = cula.cula_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    who = "cula_kda"
    if cp_context is not None:
        from cula.dist.cp import kda_from_cp_context

        kwargs |= {"return_intermediate_states": return_intermediate_states, "disable_recompute": disable_recompute}
        kwargs |= {"state_pool": state_pool, "initial_state_indices": initial_state_indices, "out": out}
        kwargs |= {"has_initial_state": has_initial_state, "checkpoint_every": checkpoint_every}
        return kda_from_cp_context(
            q,
            k,
            v,
            g,
            beta,
            cp_context,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            safe_gate=safe_gate,
            lower_bound=lower_bound,
            device=device,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            checkpoint_states=checkpoint_states,
            backend=backend,
            **kwargs,
        )
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, out, state_pool, initial_state_indices, has_initial_state
    )  # fmt: skip
    words: Any = None
    if not (kwargs or checkpoint_every or checkpoint_states is not None or is_dynamo_compiling()):
        scale = scale if scale is None else float(scale)
        words = (
            scale, lower_bound, use_gate_in_kernel, safe_gate, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, output_final_state, return_intermediate_states, disable_recompute, device, backend,
        )  # fmt: skip
        done = _kda_plans.run(tensors, words)
        if done is not None:
            return done
    x = KdaInputs(*tensors[:9])
    uses_pool, keeps_checkpoints = state_pool is not None, checkpoint_states is not None
    options = KdaOptions(
        scale=scale,
        lower_bound=lower_bound,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        output_final_state=output_final_state or uses_pool or keeps_checkpoints,
        return_intermediate_states=return_intermediate_states or keeps_checkpoints,
        disable_recompute=disable_recompute,
    )
    places: list[int] = []
    if torch.compiler.is_compiling():
        _refuse_under_compile(who, kwargs, out=out, checkpoint_states=checkpoint_states)
        if state_pool is not None and initial_state_indices is not None:
            x = x._replace(initial_state=read_pool(state_pool, initial_state_indices, has_initial_state))
        o, final_state, states = torch.ops.cula.kda(*x, options.scale, options.lower_bound, options.flags(), backend)
    else:
        given = x
        problem, x = contract.check_kda(x, options, who)
        contract.check_device_argument(device, q, who)
        contract.check_state_pool(problem, state_pool, initial_state_indices, has_initial_state, q.device, who)
        contract.check_out(out, v, problem, who)
        _check_values(x, state_pool, initial_state_indices, lambda: contract.check_kda_values(x, options, who), who)
        places = checkpoint_places(checkpoint_every, checkpoint_states, problem, x.cu_seqlens, who)
        choice = choose("kda_fwd", problem, backend)
        _refuse_unknown(who, kwargs, choice)
        if words is not None and not problem.needs_grad and _is_as_given(x, given):
            make = choice.backend.find("record_kda_fwd") if state_pool is None else None
            again: Plan | None = None if make is None else make(problem, x, out)
            if again is None:
                again = functools.partial(_infer_kda, problem, choice, output_final_state, return_intermediate_states)
            _kda_plans.keep(tensors, words, again)
        if state_pool is not None and initial_state_indices is not None:
            x = x._replace(initial_state=read_pool(state_pool, initial_state_indices, has_initial_state))
        result = operators.kda(problem, x, backend, out)
        o, final_state, states = result.o, result.final_state, result.states
    if state_pool is not None and initial_state_indices is not None:
        write_pool(state_pool, initial_state_indices, final_state)
    if checkpoint_states is not None:
        write_checkpoints(checkpoint_states, places, states, final_state)
    final_state = final_state if output_final_state else None
    return (o, final_state, states) if return_intermediate_states else (o, final_state)


_kda_plans = plans.Plans()


def _infer_kda(
    problem: KdaProblem,
    choice: Choice,
    output_final_state: bool,
    with_states: bool,
    tensors: Tensors,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Run a checked call that needs no gradient; tensors are `KdaInputs`, then out, a pool and its two vectors."""
    x, (out, pool, indices, has_initial_state) = KdaInputs(*tensors[:9]), tensors[9:]  # type: ignore[arg-type]
    with operators.on_device_of(x.q):
        if pool is not None and indices is not None:
            x = x._replace(initial_state=read_pool(pool, indices, has_initial_state))
        o, final_state, states, _ = choice.backend.load("kda_fwd")(problem, x, out)
        if pool is not None and indices is not None:
            write_pool(pool, indices, final_state)
    final_state = final_state if output_final_state else None
    return (o, final_state, states) if with_states else (o, final_state)


def cula_lightning(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    chunk_size: int = contract.CHUNK,
    device: torch.device | str | None = None,
    has_initial_state: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Lightning Attention over whole sequences, on the fastest kernel that can serve the call.

    For each token of a value head, with a state S [V, K]:  S <- exp(-s) S + v_t k_t^T;   o_t = scale * S q_t

    Differentiable in Q, K, V and initial_state, and through final_state.

    Args:
        Q, K: queries and keys, `[B, T, H, K]`, bf16, fp16 or fp32. Value head hv reads head `hv // (HV // H)`.
        V: values, `[B, T, HV, V]`, the dtype of Q.
        decay: s >= 0 of each value head, `[HV]` float32 (HV is H in the ordinary case).
        scale: factor on o; `K ** -0.5` by default.
        initial_state: `[N, HV, V, K]` float32; zeros by default.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: offsets `[N + 1]` of sequences packed along T (then B == 1); int32 or int64.
        state_pool: `[P, HV, V, K]` fp32 or bf16; sequence n starts from slot `initial_state_indices[n]` and leaves its
            last state there (inference only). A negative index starts at zero and writes nothing.
        initial_state_indices: `[N]` int32 or int64.
        chunk_size: tokens handled at once, a power of two from 16 to 256; the result does not depend on it.
        device: the device the tensors are expected on; a mismatch is an error, nothing is moved.
        has_initial_state: `[N]` bool; False starts from zero and still writes the slot.
        out: `[B, T, HV, V]` tensor that takes o (inference only).
        backend: force a backend by name; "auto" takes the best that can.
        **kwargs: options of the chosen backend; any other keyword is a TypeError.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in Q's dtype; final_state `[N, HV, V, K]` float32, or None unless
        `output_final_state`.

    Example:
        >>> import torch, cula
        >>> q, k, v = (torch.randn(1, 100, 2, 32) for _ in range(3))
        >>> o, state = cula.cula_lightning(q, k, v, torch.tensor([0.1, 0.5]), output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    who = "cula_lightning"
    tensors = (Q, K, V, decay, initial_state, cu_seqlens, out, state_pool, initial_state_indices, has_initial_state)
    words: Any = None
    if not (kwargs or is_dynamo_compiling()):
        scale = scale if scale is None else float(scale)
        words = (scale, output_final_state, chunk_size, device, backend)
        done = _lightning_plans.run(tensors, words)
        if done is not None:
            return done
    x = LightningInputs(*tensors[:6])
    wants_state = output_final_state or state_pool is not None
    if torch.compiler.is_compiling():
        _refuse_under_compile(who, kwargs, out=out)
        if state_pool is not None and initial_state_indices is not None:
            x = x._replace(initial_state=read_pool(state_pool, initial_state_indices, has_initial_state))
        o, final_state = torch.ops.cula.lightning(*x, scale, wants_state, chunk_size, backend)
        if state_pool is not None and initial_state_indices is not None:
            write_pool(state_pool, initial_state_indices, final_state)
        return o, final_state if output_final_state else None

    given = x
    problem, x = contract.check_lightning(x, scale=scale, output_final_state=wants_state, chunk_size=chunk_size, who=who)
    contract.check_device_argument(device, Q, who)
    contract.check_state_pool(problem, state_pool, initial_state_indices, has_initial_state, Q.device, who)
    contract.check_out(out, V, problem, who)
    _check_values(x, state_pool, initial_state_indices, lambda: contract.check_lightning_values(x, who), who)
    choice = choose("lightning_fwd", problem, backend)
    _refuse_unknown(who, kwargs, choice)
    if problem.needs_grad:
        o, final_state = operators.lightning(problem, x, backend, out)
        return o, final_state if output_final_state else None
    run = functools.partial(_infer_lightning, problem, choice, output_final_state)
    if words is not None and _is_as_given(x, given):
        make = choice.backend.find("record_lightning_fwd") if state_pool is None else None
        again = None if make is None else make(problem, x, out)
        _lightning_plans.keep(tensors, words, run if again is None else again)
    return run((*x, *tensors[6:]))


_lightning_plans = plans.Plans()


def _infer_lightning(
    problem: LightningProblem, choice: Choice, output_final_state: bool, tensors: Tensors
) -> tuple[Tensor, Tensor | None]:
    """Run a checked call that needs no gradient; tensors are `LightningInputs`, then out, a pool and its two vectors."""
    x, (out, pool, indices, has_initial_state) = LightningInputs(*tensors[:6]), tensors[6:]  # type: ignore[arg-type]
    with operators.on_device_of(x.q):
        if pool is None or indices is None:
            o, final_state = choice.backend.load("lightning_fwd")(problem, x, out)
            return o, final_state if output_final_state else None
        in_place = None if output_final_state else choice.backend.find("lightning_fwd_pool")
        if in_place is not None and not choice.backend.load("pool_why_not")(problem, pool.dtype, pool.stride(0), pool.data_ptr()):
            return in_place(problem, x, pool, indices, has_initial_state, out), None
        x = x._replace(initial_state=read_pool(pool, indices, has_initial_state))
        o, final_state = choice.backend.load("lightning_fwd")(problem, x, out)
        write_pool(pool, indices, final_state)
        return o, final_state if output_final_state else None


_decode_plans = plans.Plans()


def cula_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    mode: str = "kda",
    state_indices: Tensor | None = None,
    scale: float | None = None,
    device: torch.device | str | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    decay: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    out: Tensor | None = None,
    null_index: str = "negative",
    commit: bool = True,
    state_layout: str = "vk",
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Continue sequences by 1 to 8 tokens each, from states in a pool that is updated in place.

    The recurrences are those of `cula_kda` (mode "kda": g, beta and the gate's keywords) and `cula_lightning`
    (mode "lightning": decay). Inference only.

    Row n starts from slot `state_indices[n]` (slot n without indices) and leaves its last state there. Drafts that were
    rejected are undone by the next call: with `num_accepted_tokens[n] = a >= 1` row n starts from the state after the
    a-th token of the previous call instead, which stands in `intermediate_states[n, a - 1]` or, with indices `[N, T]`,
    in slot `state_indices[n, a - 1]`. a = 0 starts from the slot as usual.

    Args:
        q, k: `[N, T, H, K]`, or packed `[1, N, H, K]` (N rows of one token); bf16, fp16 or fp32.
        v: `[N, T, HV, V]` or `[1, N, HV, V]`, the dtype of q.
        state: pool `[P, HV, V, K]`, fp32 or bf16; slots contiguous, their stride may be padded.
        mode: "kda" or "lightning".
        state_indices: `[N]`, int32 or int64, any stride; a negative one marks a padded row, whose slot is neither read
            nor written and whose output is zero. `[N, T]`: the state after token t goes to slot `[n, t]`.
        scale: factor on o; `K ** -0.5` by default.
        device: the device the tensors are expected on; a mismatch is an error, nothing is moved.
        g, beta, A_log, dt_bias, use_gate_in_kernel, lower_bound, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval: as in `cula_kda`, for mode "kda".
        decay: as in `cula_lightning`, for mode "lightning".
        num_accepted_tokens: `[N]` int32 or int64, 0 to T: how many tokens of the previous call stand.
        intermediate_states: `[N, T, HV, V, K]` buffer that receives the state after each token.
        out: tensor of v's shape that takes o.
        null_index: "negative", or "nonpositive" where slot 0 marks padding too.
        commit: False verifies without writing the pool.
        state_layout: "vk", or "kv" for pools and buffers `[..., K, V]`.
        backend: force a backend by name; "auto" takes the best that can.
        **kwargs: options of the chosen backend; any other keyword is a TypeError.

    Returns:
        `(o, state)`: o of v's shape in q's dtype, and the pool that was passed in.

    Example:
        >>> import torch, cula
        >>> pool = torch.zeros(8, 2, 32, 32)
        >>> q, k, v = (torch.randn(3, 1, 2, 32) for _ in range(3))
        >>> o, pool = cula.cula_decode(
        ...     q, k, v, pool, mode="lightning", decay=torch.tensor([0.1, 0.5]), state_indices=torch.tensor([5, -1, 0])
        ... )
        >>> o.shape
        torch.Size([3, 1, 2, 32])
    """
    who = "cula_decode"
    tensors = (q, k, v, state, state_indices, g, beta, A_log, dt_bias, decay, num_accepted_tokens, intermediate_states, out)
    words: Any = None
    if not (kwargs or is_dynamo_compiling()):
        scale = scale if scale is None else float(scale)
        words = (
            mode, scale, device, use_gate_in_kernel, lower_bound, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, null_index, commit, state_layout, backend,
        )  # fmt: skip
        done = _decode_plans.run(tensors, words)
        if done is not None:
            return done
    x = DecodeInputs(*tensors)
    for name, given, known in (
        ("mode", mode, ("kda", "lightning")),
        ("null_index", null_index, ("negative", "nonpositive")),
        ("state_layout", state_layout, ("vk", "kv")),
    ):
        if given not in known:
            raise ValueError(f"{who}: {name} is {given!r}; expected one of {list(known)}")
    options = DecodeOptions(
        scale=scale,
        lower_bound=lower_bound,
        is_kda=mode == "kda",
        use_gate_in_kernel=use_gate_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        null_is_nonpositive=null_index == "nonpositive",
        commit=commit,
        state_is_kv=state_layout == "kv",
    )
    if torch.compiler.is_compiling():
        _refuse_under_compile(who, kwargs)
        o = torch.ops.cula.decode(*x, options.scale, options.lower_bound, options.flags(), backend)
        return (o if out is None else out), state
    problem, rows, is_packed = contract.check_decode(x, options, who)
    contract.check_device_argument(device, q, who)
    if settings.check_values() or (q.device.type == "cpu" and state_indices is not None):
        contract.check_decode_values(rows, problem, who)
    _refuse_unknown(who, kwargs, choose("decode", problem, backend))
    o = operators.decode(problem, rows, backend)
    if words is not None and q.is_cuda:
        _decode_plans.keep(tensors, words, operators.decode_plan(problem, rows, x, backend))
    if out is not None:
        return out, state
    return o.view(v.shape) if is_packed else o, state


_EXPLAINED: dict[str, tuple[Callable[..., Any], str]] = {
    "kda": (cula_kda, "kda_fwd"),
    "lightning": (cula_lightning, "lightning_fwd"),
    "decode": (cula_decode, "decode"),
}


def explain(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Choice:
    """Which backend would take this call and, for each better one, why not. Nothing runs and nothing is written.

    Args:
        function: `cula_kda`, `cula_lightning` or `cula_decode`, or "kda", "lightning", "decode".
        *args, **kwargs: the arguments of the call; tensors on the "meta" device will do.

    Returns:
        A `Choice`: `.name` of the backend, `.how` it would go about it where it says, `.passed_over` with reasons, and a
        readable `str()`.

    Example:
        >>> import torch, cula
        >>> q = torch.empty(1, 64, 2, 32)
        >>> print(cula.explain("lightning", q, q, q, torch.ones(2)).name)
        torch
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", "").removeprefix("cula_")
    if name not in _EXPLAINED:
        raise ValueError(f"explain: {function!r} is not one of cula_kda, cula_lightning, cula_decode")
    target, op = _EXPLAINED[name]
    bound = inspect.signature(target).bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    problem: Problem
    if name == "kda":
        options = KdaOptions(**{f.name: a[f.name] for f in fields(KdaOptions)})
        problem, _ = contract.check_kda(KdaInputs(*(a[f] for f in KdaInputs._fields)), options)
        if problem.needs_grad:
            choose("kda_bwd", problem, a["backend"])
    elif name == "lightning":
        x = LightningInputs(a["Q"], a["K"], a["V"], a["decay"], a["initial_state"], a["cu_seqlens"])
        problem, _ = contract.check_lightning(
            x, scale=a["scale"], output_final_state=a["output_final_state"], chunk_size=a["chunk_size"]
        )
    else:
        shared = {f.name: a[f.name] for f in fields(DecodeOptions) if f.name in a}
        decode_options = DecodeOptions(
            **shared,
            is_kda=a["mode"] == "kda",
            null_is_nonpositive=a["null_index"] == "nonpositive",
            state_is_kv=a["state_layout"] == "kv",
        )
        problem, _, _ = contract.check_decode(DecodeInputs(*(a[f] for f in DecodeInputs._fields)), decode_options)
    choice = choose(op, problem, a["backend"])
    _refuse_unknown(f"cula_{name}", a["kwargs"], choice)
    return replace(choice, how=choice.backend.how(op, problem)) if choice.backend.how else choice


def _check_values(
    x: KdaInputs | LightningInputs,
    state_pool: Tensor | None,
    indices: Tensor | None,
    check_all: Callable[[], None],
    who: str,
) -> None:
    """With CULA_CHECK=1, everything that needs values; on a CPU, where they are at hand, always offsets and slots."""
    if settings.check_values():
        check_all()
    elif x.q.device.type == "cpu":
        contract.check_cu_seqlens_values(x.cu_seqlens, x.q, who)
    else:
        return
    if state_pool is not None and indices is not None:
        contract.check_state_pool_values(state_pool, indices, who)


def _is_as_given(x: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> bool:
    """Whether the contract left every tensor as it came, so that a plan may take those of the next call as they come."""
    return all(a is b for a, b in zip(x, given))


def _refuse_unknown(who: str, kwargs: dict[str, Any], choice: Choice) -> None:
    for name in kwargs:
        if name not in choice.backend.options:
            known = sorted(choice.backend.options)
            raise TypeError(
                f"{who}: unknown keyword argument {name!r}; backend {choice.name!r} takes "
                f"{'no options of its own' if not known else 'the options ' + ', '.join(known)}"
            )


def _refuse_under_compile(who: str, kwargs: dict[str, Any], **unsupported: Any) -> None:
    for name in kwargs:
        raise TypeError(f"{who}: unknown keyword argument {name!r} (backend options are not taken under torch.compile)")
    for name, given in unsupported.items():
        if given is not None:
            raise NotImplementedError(f"{who}: {name}= cannot be captured by torch.compile; call outside the compiled region")
