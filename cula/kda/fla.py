# SPDX-License-Identifier: Apache-2.0
"""`chunk_kda` and `fused_recurrent_kda` with flash-linear-attention's signatures, defaults and state layout.

For code that calls FLA: changing the import line is all. States are `[N, HV, K, V]` unless `state_v_first=True`. Both are
dispatched like `cula_kda`, so that the fastest kernel of the machine serves them; `cula.explain(chunk_kda, ...)` says which.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from cula.core import checks
from cula.core.constants import CHUNK, LOWER_BOUND_MIN, MAX_DECODE_TOKENS
from cula.core.cp_context import from_cp_context
from cula.core.decode import decode
from cula.core.fla import (
    check_first_states,
    check_floating,
    check_state_chunks,
    is_decode_on_pool,
    of_one_dtype,
    recurrent,
    state_layout,
    swap_layout,
    warn_of_ignored,
)
from cula.core.pool import Serving
from cula.core.prefill import prefill
from cula.core.problem import DecodeOptions
from cula.kda.family import FAMILY
from cula.kda.problem import KdaDecodeInputs, KdaInputs, KdaOptions


@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, safe_gate: bool = False,
    lower_bound: float | None = None, disable_recompute: bool = False, return_intermediate_states: Literal[False] = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None,
    use_graph: bool = False, max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK, transpose_state_layout: bool | None = None, backend: str = "auto", **kwargs: Any,
) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip


@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, *, return_intermediate_states: Literal[True], **kwargs: Any,
) -> tuple[Tensor, Tensor | None, Tensor]: ...  # fmt: skip


@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, *, return_intermediate_states: bool, **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]: ...  # fmt: skip


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    transpose_state_layout: bool | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """KDA by chunks, as `fla.ops.kda.chunk_kda`.

    Args:
        q, k, v, g, beta, scale, ...: as in `cula.cula_kda`; tensors of several dtypes are brought to the widest.
        initial_state: `[N, HV, K, V]`, `[N, HV, V, K]` with `state_v_first`; of other floating point dtypes it is converted.
        lower_bound: bound of the gate; below -5 it is applied outside of the kernel. Ignored without `use_gate_in_kernel`.
        cu_seqlens: offsets `[N + 1]`, int32 or int64.
        cu_seqlens_cpu, use_graph, max_num_seqs: accepted for FLA's callers; not needed.
        chunk_size: 32 or 64, a hint: the result does not depend on it. It must be 64 with `return_intermediate_states`.
        transpose_state_layout: FLA's old name of `state_v_first`.
        backend: one by name, or "auto" for the fastest that serves the call.
        **kwargs: ignored with a warning, as FLA ignores them without one.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)` with `return_intermediate_states`, h in q's dtype; states as the layout says.
    """
    who = "chunk_kda"
    if chunk_size not in (32, 64):
        raise ValueError(f"{who}: `chunk_size` must be either 32 or 64; it is {chunk_size!r}")
    check_state_chunks(who, chunk_size, return_intermediate_states)
    warn_of_ignored(who, kwargs)
    checks.check_tokens(who, q=q, k=k, v=v)
    state_v_first = state_layout(state_v_first, transpose_state_layout)
    io_dtype = q.dtype
    q, k, v = of_one_dtype(who, q, k, v)
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None  # FLA's callers hand them over in any case
    elif not safe_gate and is_deep(who, lower_bound):
        checks.check_devices(who, q.device, g=g, A_log=A_log, dt_bias=dt_bias)
        g, use_gate_in_kernel, lower_bound = deep_gate(who, g, A_log, dt_bias, lower_bound), False, None  # type: ignore[arg-type]
        A_log = dt_bias = None
    check_first_states(who, q, v, initial_state, state_v_first, cu_seqlens)
    options = KdaOptions(
        scale=scale,
        lower_bound=lower_bound,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        output_final_state=output_final_state,
        return_intermediate_states=return_intermediate_states,
        disable_recompute=disable_recompute,
    )
    if cp_context is not None:
        x = KdaInputs(q, k, v, g, beta, A_log, dt_bias, initial_state)
        o, final_state = from_cp_context(FAMILY, x, options, Serving(), None, cp_context, None, backend, {}, who)
        return o.to(io_dtype), final_state
    x = KdaInputs(q, k, v, g, beta, A_log, dt_bias, swap_layout(initial_state, state_v_first), cu_seqlens)
    o, final_state, *states = prefill(FAMILY, x, options, backend=backend, who=who)
    final_state = swap_layout(final_state, state_v_first)
    if return_intermediate_states:
        h = states[0].to(io_dtype)
        return o.to(io_dtype), final_state, h if state_v_first else h.transpose(-1, -2).contiguous()
    return o.to(io_dtype), final_state


@torch.no_grad()
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """KDA without gradients, as `fla.ops.kda.fused_recurrent_kda`: any length, up to 8 tokens a sequence by the decode kernel.

    Args:
        q, k, v, g, beta, ...: as in `chunk_kda`.
        inplace_final_state: `initial_state` is a pool of states, which is updated in place and returned; for up to 8 tokens.
        ssm_state_indices: `[N]` slots of that pool, or `[N, T]`: one for each token; negative ones mark padding.
        num_accepted_tokens: `[N]`: how many tokens of the call before stand, with `ssm_state_indices` of shape `[N, T]`.
        out: tensor of v's shape, in the widest dtype of q, k and v, that takes o.
        **kwargs: ignored with a warning, as FLA ignores them without one.

    Returns:
        `(o, final_state)`: o in v's dtype; final_state is None unless `output_final_state` or `inplace_final_state`.
    """
    who = "fused_recurrent_kda"
    warn_of_ignored(who, kwargs, frames=2)
    checks.check_tokens(who, q=q, k=k, v=v)
    state_v_first = state_layout(state_v_first, transpose_state_layout, frames=2)
    io_dtype = getattr(out, "dtype", v.dtype)
    q, k, v = of_one_dtype(who, q, k, v)
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    elif is_deep(who, lower_bound):
        checks.check_devices(who, q.device, g=g, A_log=A_log, dt_bias=dt_bias)
        g, use_gate_in_kernel, lower_bound = deep_gate(who, g, A_log, dt_bias, lower_bound), False, None  # type: ignore[arg-type]
        A_log = dt_bias = None
    switches: dict[str, Any] = {
        "scale": scale,
        "lower_bound": lower_bound,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    if not (inplace_final_state or ssm_state_indices is not None or num_accepted_tokens is not None):
        o, state = recurrent(
            FAMILY, who, q, k, v, g, beta, A_log, dt_bias, initial_state, switches, out=out,
            output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens, backend=backend,
        )  # fmt: skip
        return o.to(io_dtype), state
    if not (inplace_final_state and initial_state is not None and is_decode_on_pool(q, cu_seqlens, ssm_state_indices)):
        raise NotImplementedError(
            f"{who}: slots of a pool go with inplace_final_state=True, initial_state= (the pool) and 1 to {MAX_DECODE_TOKENS} "
            "tokens of every sequence (of packed ones on a GPU: as ssm_state_indices [N, T] say, or that many of all together); "
            "use cula.cula_kda(..., state_pool=) for more"
        )
    rows = KdaDecodeInputs(
        q, k, v, initial_state, ssm_state_indices, g, beta, A_log, dt_bias,
        num_accepted_tokens=num_accepted_tokens, cu_seqlens=cu_seqlens, out=out,
    )  # fmt: skip
    o, pool = decode(FAMILY, rows, DecodeOptions(state_is_kv=not state_v_first, **switches), backend=backend, who=who)
    return o.to(io_dtype), pool


def is_deep(who: str, lower_bound: float | None) -> bool:
    """Whether a gate's bound is lower than kernels may rely on."""
    return lower_bound is not None and checks.as_number(who, "lower_bound", lower_bound) < LOWER_BOUND_MIN


def deep_gate(who: str, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    """The log decays of such a gate, in float32: applied outside of the kernel."""
    if checks.rank_of(who, "g", g) not in (3, 4):
        raise ValueError(f"{who}: g has shape {checks.shape_of(g)}; expected [B, T, HV, K], or [B, T, HV]: one gate a head")
    check_floating(who, g=g, A_log=A_log, dt_bias=dt_bias)
    of_head, HV = tuple(g.shape[2:]), g.shape[2]
    z = g.float()
    if dt_bias is not None:
        z = z + checks.reshaped(who, "dt_bias", dt_bias, "[HV, K]" if g.dim() == 4 else "[HV]", of_head).float()
    if A_log is not None:
        rate = checks.reshaped(who, "A_log", A_log, "[HV]", (HV,)).float().exp()
        z = z * (rate[:, None] if g.dim() == 4 else rate)
    return lower_bound * torch.sigmoid(z)
