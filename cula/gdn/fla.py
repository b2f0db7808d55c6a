# SPDX-License-Identifier: Apache-2.0
"""`chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule` with flash-linear-attention's signatures and defaults.

For code that calls FLA: changing the import line is all. States are `[N, HV, K, V]` unless `state_v_first=True`. Both are
dispatched like `cula_gdn`, so that the fastest kernel of the machine serves them; `cula.explain` says which. What FLA reads from
its `**kwargs` is named here, so that callers who filter by name (Hugging Face) hand it over.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from cula.core import checks
from cula.core.constants import CHUNK
from cula.core.cp_context import from_cp_context
from cula.core.fla import (
    check_first_states,
    check_floating,
    check_state_chunks,
    of_one_dtype,
    recurrent,
    refuse_head_first,
    state_layout,
    swap_layout,
    warn_of_ignored,
)
from cula.core.pool import Serving
from cula.core.prefill import prefill
from cula.gdn.family import FAMILY
from cula.gdn.problem import GdnInputs, GdnOptions
from cula.kda.family import FAMILY as KDA


@overload
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None, cp_context: Any = None, *,
    use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = CHUNK,
    transpose_state_layout: bool | None = None, head_first: bool | None = None, initial_state_indices: None = None,
    return_intermediate_states: bool = False, backend: str = "auto", **kwargs: Any,
) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip


@overload
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, *, initial_state_indices: Tensor, **kwargs: Any,
) -> tuple[Tensor, None, Tensor | None]: ...  # fmt: skip


@overload
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, *, initial_state_indices: Tensor | None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, None, Tensor | None]: ...  # fmt: skip


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = CHUNK,
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
    initial_state_indices: Tensor | None = None,
    return_intermediate_states: bool = False,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, None, Tensor | None]:
    """Gated DeltaNet by chunks, as `fla.ops.gated_delta_rule.chunk_gated_delta_rule`; SGLang's function of this name as well.

    Args:
        q, k, v, g, beta, scale, ...: as in `cula.cula_gdn`; tensors of several dtypes are brought to the widest.
        initial_state: `[N, HV, K, V]`, `[N, HV, V, K]` with `state_v_first`, in any floating point dtype.
        cu_seqlens: offsets `[N + 1]`, int32 or int64.
        cu_seqlens_cpu, chunk_indices: accepted for FLA's callers; not needed.
        cp_context: FLA's context-parallel context; deprecated, use `cula.dist.cula_gdn_cp`.
        chunk_size: 16, 32 or 64, a hint: the result does not depend on it. It must be 64 with `return_intermediate_states`.
        transpose_state_layout: FLA's old name of `state_v_first`.
        initial_state_indices: SGLang's form. `initial_state` is then a pool `[P, HV, V, K]`, of which sequence n reads and
            writes slot `initial_state_indices[n]` (a negative one starts at zero and writes nothing).
        return_intermediate_states: of SGLang's form: also return the states at chunk starts, in q's dtype.
        backend: one by name, or "auto" for the fastest that serves the call.
        **kwargs: ignored with a warning, as FLA ignores them without one.

    Returns:
        `(o, final_state)`, the state float32 in the layout of `initial_state`. In SGLang's form `(o, None, h)`, h
        `[B, NT, HV, V, K]` with `return_intermediate_states`, otherwise None.
    """
    who = "chunk_gated_delta_rule"
    refuse_head_first(head_first)
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"`chunk_size` must be 16, 32, or 64 for Gated Delta Rule, got {chunk_size}.")
    check_state_chunks(who, chunk_size, return_intermediate_states)
    warn_of_ignored(who, kwargs)
    checks.check_tokens(who, q=q, k=k, v=v)
    state_v_first = state_layout(state_v_first, transpose_state_layout)
    if not use_gate_in_kernel:
        A_log = dt_bias = None  # FLA's callers hand them over in any case
    options = GdnOptions(
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        output_final_state=output_final_state,
    )
    io_dtype = q.dtype
    q, k, v = of_one_dtype(who, q, k, v)
    if cp_context is not None:
        x = GdnInputs(q, k, v, g, beta, A_log, dt_bias, initial_state)
        o, final_state = from_cp_context(FAMILY, x, options, Serving(), None, cp_context, None, backend, {}, who)
        return o.to(io_dtype), final_state
    if initial_state_indices is not None:
        if initial_state is None:
            raise ValueError(f"{who}: initial_state_indices names slots of initial_state, a pool [P, HV, V, K], which is None")
        options = options._replace(output_final_state=False, return_intermediate_states=return_intermediate_states)
        x, pool = GdnInputs(q, k, v, g, beta, A_log, dt_bias, None, cu_seqlens), initial_state
        serving = Serving(state_pool=pool, initial_state_indices=initial_state_indices)
        o, _, *states = prefill(FAMILY, x, options, serving, backend=backend, who=who)
        return o.to(io_dtype), None, states[0].to(io_dtype) if states else None
    check_first_states(who, q, v, initial_state, state_v_first, cu_seqlens)
    if return_intermediate_states:
        raise ValueError(f"{who}: return_intermediate_states=True goes with initial_state_indices=; or use cula.cula_gdn")
    x = GdnInputs(q, k, v, g, beta, A_log, dt_bias, swap_layout(initial_state, state_v_first), cu_seqlens)
    o, final_state = prefill(FAMILY, x, options, backend=backend, who=who)
    return o.to(io_dtype), swap_layout(final_state, state_v_first)


@torch.no_grad()
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet without gradients, as FLA's function of this name: any length, up to 8 tokens a sequence by the decode
    kernel. Mind the order: g, gk and gv stand before beta.

    Args:
        q, k, v, scale, ...: as in `chunk_gated_delta_rule`.
        g: log decays `[B, T, HV]`, raw gates with `use_gate_in_kernel`; None for none.
        gk: log decays `[B, T, HV, K]`, one a channel, which KDA's kernels serve; with g too, both apply.
        gv: decays of value channels; not served.
        beta: write strengths `[B, T, HV]`; None for ones.
        **kwargs: ignored with a warning, as FLA ignores them without one.

    Returns:
        `(o, final_state)`; o in v's dtype, final_state a new float32 tensor, or None unless `output_final_state`.
    """
    who = "fused_recurrent_gated_delta_rule"
    warn_of_ignored(who, kwargs, frames=2)
    checks.check_tokens(who, q=q, k=k, v=v)
    state_v_first = state_layout(state_v_first, transpose_state_layout, frames=2)
    if gv is not None:
        raise NotImplementedError(f"{who}: gv= (a decay for each value channel) is not served; g and gk are")
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError("`A_log` must be provided when `use_gate_in_kernel=True`.")
        if g is None:
            raise ValueError("`g` (raw pre-activation) must be provided when `use_gate_in_kernel=True`.")
    else:
        A_log = dt_bias = None
    io_dtype = v.dtype
    q, k, v = of_one_dtype(who, q, k, v)
    if beta is None:
        beta = v.new_ones(v.shape[:3])
    switches: dict[str, Any] = {
        "scale": scale,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    if gk is not None:
        if use_gate_in_kernel:
            raise NotImplementedError(f"{who}: gk= with use_gate_in_kernel=True is not served; use cula.kda.fused_recurrent_kda")
        checks.check_shape(
            who, "gk", gk, "[B, T, HV, K] (g, gk and gv stand before beta)", (*v.shape[:3], q.shape[-1])
        )  # fmt: skip
        if g is not None:
            checks.check_shape(who, "g", g, "[B, T, HV]", tuple(v.shape[:3]))
            checks.check_devices(who, q.device, g=g, gk=gk)
            check_floating(who, g=g, gk=gk)
            gk = gk.float() + g.float()[..., None]
    elif g is None:
        g = v.new_zeros(v.shape[:3])
    family, gates = (FAMILY, g) if gk is None else (KDA, gk)
    o, final_state = recurrent(
        family, who, q, k, v, gates, beta, A_log, dt_bias, initial_state, switches,  # type: ignore[arg-type]
        output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens, backend=backend,
    )  # fmt: skip
    return o.to(io_dtype), final_state


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
