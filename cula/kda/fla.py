# SPDX-License-Identifier: Apache-2.0
"""`chunk_kda` and `fused_recurrent_kda` with flash-linear-attention's signatures, defaults and state layout.

For code that calls FLA: changing the import line is all. States are `[N, HV, K, V]` unless `state_v_first=True`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cula.core.constants import CHUNK
from cula.core.cp_context import from_cp_context
from cula.core.pool import Serving
from cula.core.prefill import prefill
from cula.kda.family import FAMILY
from cula.kda.problem import KdaInputs, KdaOptions


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
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """KDA by chunks, as `fla.ops.kda.chunk_kda`. Runs the modular kernels: Triton on a GPU, PyTorch elsewhere.

    Args:
        q, k, v, g, beta, scale, ...: as in `cula.cula_kda`.
        initial_state: `[N, HV, K, V]` float32; `[N, HV, V, K]` with `state_v_first`.
        cu_seqlens: offsets `[N + 1]`, int32 or int64.
        cu_seqlens_cpu: accepted for FLA's callers; not needed.
        chunk_size: 32 or 64, a hint: the result does not depend on it.
        transpose_state_layout: FLA's old name of `state_v_first`.
        backend: one by name, or "auto" for the fastest that serves the call; None for the modular kernels.

    Returns:
        `(o, final_state)`, or `(o, final_state, h)` with `return_intermediate_states`; states in the layout given.
    """
    who = "chunk_kda"
    if chunk_size not in (32, 64):
        raise ValueError(f"{who}: chunk_size is {chunk_size!r}; expected 32 or 64")
    if transpose_state_layout is not None:
        state_v_first = transpose_state_layout
    if use_gate_in_kernel is False:
        A_log = dt_bias = None  # FLA's callers hand them over in any case
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
        return from_cp_context(FAMILY, x, options, Serving(), None, cp_context, None, "auto", {}, who)
    x = KdaInputs(q, k, v, g, beta, A_log, dt_bias, _swap(initial_state, state_v_first), cu_seqlens)
    o, final_state, *states = prefill(FAMILY, x, options, backend=_modular_backend(q) if backend is None else backend, who=who)
    final_state = _swap(final_state, state_v_first)
    if return_intermediate_states:
        return o, final_state, states[0] if state_v_first else states[0].transpose(-1, -2).contiguous()
    return o, final_state


# The fused kernels of Hopper and Blackwell where they serve the call, with the same signature.
fused_kda = functools.partial(chunk_kda, backend="auto")


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
) -> tuple[Tensor, Tensor | None]:
    """KDA without gradients, as `fla.ops.kda.fused_recurrent_kda`: same result as `chunk_kda`, any length."""
    o, final_state, *_ = chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    return o, final_state


def _modular_backend(q: Tensor) -> str:
    return "triton" if q.is_cuda else "torch"


def _swap(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """Between the caller's layout and [N, HV, V, K]."""
    return state if state is None or state_v_first else state.transpose(-1, -2).contiguous()
