# SPDX-License-Identifier: Apache-2.0
"""Level 1 of Kimi Delta Attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from cula.core.checks import is_null_nonpositive
from cula.core.cp_context import from_cp_context
from cula.core.nvtx import nvtx_range
from cula.core.prefill import call_prefill, split
from cula.kda.family import FAMILY
from cula.kda.problem import KdaOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class KdaKeywords(TypedDict, total=False):
    """The keywords of `cula_kda` that do not decide what it returns."""

    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    cu_seqlens: Tensor | None
    safe_gate: bool
    lower_bound: float | None
    disable_recompute: bool
    device: torch.device | str | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_pool: Tensor | None
    initial_state_indices: Tensor | None
    has_initial_state: Tensor | None
    null_index: Literal["negative", "nonpositive"]
    checkpoint_every: int | None
    checkpoint_states: Tensor | None
    checkpoint_offsets: Tensor | None
    out: Tensor | None
    batch_invariant: bool
    backend: str
    cp_context: Any


@overload
def cula_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    return_intermediate_states: Literal[False] = False,
    **keywords: Unpack[KdaKeywords],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def cula_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    return_intermediate_states: Literal[True],
    **keywords: Unpack[KdaKeywords],
) -> tuple[Tensor, Tensor | None, Tensor]: ...


@overload
def cula_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    return_intermediate_states: bool,
    **keywords: Unpack[KdaKeywords],
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]: ...


@nvtx_range
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
    null_index: Literal["negative", "nonpositive"] = "negative",
    checkpoint_every: int | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
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
        safe_gate: promises log decays within about [-5, 0), which makes some kernels faster and changes nothing else.
        lower_bound: bound of the gate, in [-5, 0).
        disable_recompute: keep more for the backward (states at chunk starts, or what is inside of chunks) than it must have.
        return_intermediate_states: also return the state at the start of each 64-token chunk (inference only).
        device: the device the tensors are expected on; a mismatch is an error, nothing is moved.
        A_log: HV elements in any shape, in fp32, bf16 or fp16; may be None with `lower_bound` (factor 1).
        dt_bias: `[HV, K]` or `[HV * K]` (`[HV]` with one gate a head), in the same dtypes, or None.
        use_beta_sigmoid_in_kernel: beta is `sigmoid(beta)`.
        allow_neg_eigval: beta is `2 * sigmoid(beta)`.
        state_pool: `[P, HV, V, K]` fp32, bf16 or fp16; sequence n starts from slot `initial_state_indices[n]` and leaves
            its last state there (inference only). A null index starts at zero and writes nothing.
        initial_state_indices: `[N]` int32 or int64.
        has_initial_state: `[N]` bool; False starts from zero and still writes the slot.
        null_index: "negative", or "nonpositive" where index 0 is null too.
        checkpoint_every: keep the state after every so many tokens of a sequence (a multiple of 64), for prefix caches.
        checkpoint_states: `[M, HV, V, K]` buffer for them, fp32, bf16 or fp16; sequence n has `length // checkpoint_every`
            rows, in order. On a GPU the lengths of packed sequences are not read back: checkpoints beyond its M rows are
            not kept, and `CULA_CHECK=1` raises.
        checkpoint_offsets: `[N]` int32, instead of `checkpoint_every`: row n of `checkpoint_states` takes the state after
            so many tokens of sequence n, a multiple of 64; 0 leaves the row as it is.
        out: `[B, T, HV, V]` tensor that takes o (inference only).
        batch_invariant: give a sequence the same bits alone and in any batch or pack, at the cost of schedules that fill the
            GPU less well; `CULA_BATCH_INVARIANT=1` asks for it in every call.
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
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,  # KdaInputs
        out, state_pool, initial_state_indices, has_initial_state, checkpoint_states, checkpoint_offsets,  # Serving
    )  # fmt: skip
    options = (
        scale, lower_bound, use_gate_in_kernel, safe_gate, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        output_final_state, return_intermediate_states, disable_recompute,
        null_index != "negative" and is_null_nonpositive(FAMILY.function, null_index), batch_invariant,
    )  # fmt: skip
    if cp_context is not None:
        x, serving = split(FAMILY, tensors)
        return from_cp_context(FAMILY, x, KdaOptions(*options), serving, checkpoint_every, cp_context, device, backend, kwargs)
    return call_prefill(FAMILY, tensors, options, checkpoint_every, device, backend, kwargs)
