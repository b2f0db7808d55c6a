# SPDX-License-Identifier: Apache-2.0
"""Level 1 of Gated DeltaNet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from cula.core.checks import is_null_nonpositive
from cula.core.nvtx import nvtx_range
from cula.core.prefill import call_prefill
from cula.gdn.family import FAMILY

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GdnKeywords(TypedDict, total=False):
    """The keywords of `cula_gdn` that do not decide what it returns."""

    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    A_log: Tensor | None
    dt_bias: Tensor | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    cu_seqlens: Tensor | None
    state_pool: Tensor | None
    initial_state_indices: Tensor | None
    has_initial_state: Tensor | None
    null_index: Literal["negative", "nonpositive"]
    checkpoint_every: int | None
    checkpoint_states: Tensor | None
    checkpoint_offsets: Tensor | None
    out: Tensor | None
    batch_invariant: bool
    disable_recompute: bool
    device: torch.device | str | None
    backend: str


@overload
def cula_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    return_intermediate_states: Literal[False] = False,
    **keywords: Unpack[GdnKeywords],
) -> tuple[Tensor, Tensor | None]: ...


@overload
def cula_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    return_intermediate_states: Literal[True],
    **keywords: Unpack[GdnKeywords],
) -> tuple[Tensor, Tensor | None, Tensor]: ...


@overload
def cula_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    return_intermediate_states: bool,
    **keywords: Unpack[GdnKeywords],
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]: ...


@nvtx_range
def cula_gdn(
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
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: Literal["negative", "nonpositive"] = "negative",
    checkpoint_every: int | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    device: torch.device | str | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Gated DeltaNet over whole sequences, on the fastest kernel that can serve the call.

    For each token of a value head, with a state S [V, K] and one log decay g <= 0 a head:

        S <- exp(g_t) S;   S <- S + beta_t (v_t - S k_t) k_t^T;   o_t = scale * S q_t

    Differentiable in q, k, v, g, beta, A_log, dt_bias and initial_state, and through final_state.

    Args:
        q, k: queries and keys, `[B, T, H, K]`, bf16, fp16 or fp32. Value head hv reads head `hv // (HV // H)`.
        v: values, `[B, T, HV, V]`, the dtype of q.
        g: log decays, `[B, T, HV]`; raw gates with `use_gate_in_kernel`. (For one a channel there is `cula_kda`.)
        beta: write strengths up to 2, `[B, T, HV]`; logits with `use_beta_sigmoid_in_kernel`.
        scale: factor on o; `K ** -0.5` by default.
        initial_state: `[N, HV, V, K]` (K last) in fp32, bf16 or fp16, read as fp32; zeros by default.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: divide q and k by `sqrt(sum x^2 + 1e-6)`.
        use_gate_in_kernel: the log decay is `-exp(A_log) * softplus(g + dt_bias)`.
        A_log: HV elements in any shape, in fp32, bf16 or fp16.
        dt_bias: `[HV]`, in the same dtypes, or None.
        use_beta_sigmoid_in_kernel: beta is `sigmoid(beta)`.
        allow_neg_eigval: beta is `2 * sigmoid(beta)`.
        cu_seqlens: offsets `[N + 1]` of sequences packed along T (then B == 1); int32 or int64.
        state_pool: `[P, HV, V, K]` fp32, bf16 or fp16; sequence n starts from slot `initial_state_indices[n]` and leaves
            its last state there (inference only). A null index starts at zero and writes nothing.
        initial_state_indices, has_initial_state, null_index: as in `cula_kda`.
        checkpoint_every, checkpoint_states, checkpoint_offsets: states inside of a prompt, as in `cula_kda`.
        out: `[B, T, HV, V]` tensor that takes o (inference only).
        batch_invariant: give a sequence the same bits alone and in any batch or pack, at the cost of schedules that fill the
            GPU less well; `CULA_BATCH_INVARIANT=1` asks for it in every call.
        disable_recompute: keep the chunk states for the backward instead of making them again, where kernels can.
        return_intermediate_states: also return the state at the start of each 64-token chunk (inference only).
        device: the device the tensors are expected on; a mismatch is an error, nothing is moved.
        backend: force a backend by name; "auto" takes the best that can.
        **kwargs: options of the chosen backend; any other keyword is a TypeError.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in q's dtype; final_state `[N, HV, V, K]` float32, or None unless
        `output_final_state`. With `return_intermediate_states`, `(o, final_state, h)`, h `[B, NT, HV, V, K]`.

    Example:
        >>> import torch, cula
        >>> q, k = (torch.randn(1, 100, 2, 32) for _ in range(2))
        >>> v, g, beta = torch.randn(1, 100, 4, 32), -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
        >>> o, state = cula.cula_gdn(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 4, 32]), torch.Size([1, 4, 32, 32]))
    """
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,  # GdnInputs
        out, state_pool, initial_state_indices, has_initial_state, checkpoint_states, checkpoint_offsets,  # Serving
    )  # fmt: skip
    options = (
        scale, use_gate_in_kernel, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        output_final_state, return_intermediate_states, disable_recompute,
        null_index != "negative" and is_null_nonpositive(FAMILY.function, null_index), batch_invariant,
    )  # fmt: skip
    return call_prefill(FAMILY, tensors, options, checkpoint_every, device, backend, kwargs)
