# SPDX-License-Identifier: Apache-2.0
"""GDN decode by the names serving engines import. Each is a decode with that caller's argument order and defaults."""

from __future__ import annotations

from torch import Tensor

from cula.core import checks
from cula.core.constants import SOFTPLUS_THRESHOLD
from cula.core.serving import check_packed, check_softplus, decode_raw, one_token_each, raw_gates, split_packed
from cula.gdn.family import FAMILY
from cula.gdn.problem import GdnDecodeInputs
from cula.kda.family import FAMILY as KDA


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    scale: float | None,
    initial_state: Tensor,
    out: Tensor | None,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    null_index: str = "nonpositive",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """vLLM's decode of one token a row on a packed projection, which is not copied apart.

    Args:
        mixed_qkv: `[N, 2 * H * K + HV * V]`: the row's q heads, then k heads, then v heads; rows may be strided.
        a, b: raw gates and beta logits, `[N, HV]`; rows may be strided.
        A_log, dt_bias: `[HV]`, in float32 or the dtype of the model.
        initial_state: pool `[P, HV, V, K]`; updated in place.
        out: `[N, 1, HV, V]`, which takes o; None to make one.
        ssm_state_indices: `[N]` slots; a null one marks a padded row, whose output is zero.
        null_index: vLLM keeps slot 0 as null ("nonpositive"); "negative" for callers that do not.

    Returns:
        `(out, initial_state)`.
    """
    who = "fused_recurrent_gated_delta_rule_packed_decode"
    check_packed(who, mixed_qkv, initial_state, "initial_state")
    HV, V, K = initial_state.shape[1:]
    q, k, v = (t.transpose(0, 1) for t in split_packed(who, mixed_qkv, HV, V, K))  # [N, 1, heads, dim]
    g, beta = raw_gates(who, q, v, a, b, has_channels=False)
    x = GdnDecodeInputs(q, k, v, initial_state, ssm_state_indices, g, beta, A_log, dt_bias, out=out)
    return decode_raw(
        FAMILY, x, who=who, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, null_index=null_index, backend=backend
    )


gdn_packed_decode = fused_recurrent_gated_delta_rule_packed_decode


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = SOFTPLUS_THRESHOLD,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    b: Tensor | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    *,
    beta: float = 1.0,
    threshold: float = SOFTPLUS_THRESHOLD,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    null_index: str | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The decode of SGLang and of vLLM, which have different functions of this name: 1 to 8 tokens a row with raw gates and raw
    beta logits, on a pool that is updated in place.

    The order is SGLang's. A call with `initial_state=` is vLLM's, which calls by keyword.

    Args:
        A_log: `[HV]` (other shapes of HV elements are flattened), in float32 or the dtype of the model.
        a: raw gates, HV numbers a token in any shape.
        dt_bias: `[HV]` or None.
        softplus_beta, softplus_threshold (vLLM: beta, threshold): of the gate's softplus; only beta = 1 is served.
        q, k: `[N, T, H, K]`, `[1, N, H, K]`, or with `cu_seqlens` `[1, tokens, H, K]`.
        v: likewise, with HV heads of V.
        b: beta logits, HV numbers a token in any shape.
        initial_state_source (vLLM: initial_state): pool `[P, HV, V, K]`.
        initial_state_indices (vLLM: ssm_state_indices): `[N]` slots, or `[N, T]`: one for each draft token. Null ones mark
            padding: negative ones, and for vLLM slot 0 too (`null_index` says otherwise).
        cu_seqlens: offsets `[N + 1]`: of rows of 0 to 8 tokens for vLLM and for SGLang's verification, and for SGLang's decode
            of one token each.
        is_kda: `a` has HV * K gates a token, one a channel, and dt_bias as many; `lower_bound` is theirs.
        disable_state_update: verify without writing the pool.
        intermediate_states_buffer: `[rows, steps, HV, V, K]`, takes the state after each token.
        intermediate_state_indices: `[N]` rows of that buffer.
        cache_steps: what the buffer's shape says; not needed.
        retrieve_parent_token: trees of drafts; not served.
        inplace_final_state: must be True.
        num_accepted_tokens: `[N]`: how many tokens of the call before stand, with slots `[N, T]` (vLLM).

    Returns:
        o of v's shape; for vLLM `(o, pool)`.
    """
    who = "fused_sigmoid_gating_delta_rule_update"
    is_vllm = initial_state is not None
    if is_vllm:
        softplus_beta, softplus_threshold = beta, threshold
        initial_state_source, initial_state_indices = initial_state, ssm_state_indices
    given = {"q": q, "k": k, "v": v, "b": b, "initial_state_source": initial_state_source}
    for name, t in given.items():
        checks.check_tensor(who, name, t)
    assert q is not None and k is not None and v is not None and b is not None and initial_state_source is not None
    check_softplus(who, softplus_beta, softplus_threshold)
    if retrieve_parent_token is not None:
        raise NotImplementedError(f"{who}: retrieve_parent_token= (a tree of drafts) is not served; drafts are chains")
    if not inplace_final_state:
        raise NotImplementedError(f"{who}: inplace_final_state=False is not served; the pool is updated in place")
    if lower_bound is not None and not is_kda:
        raise ValueError(f"{who}: lower_bound= is of gates a channel, is_kda=True; the gate of the gated delta rule has no bound")
    is_draft = is_vllm or disable_state_update or intermediate_states_buffer is not None
    if cu_seqlens is not None and not is_draft and initial_state_indices is not None:
        initial_state_indices, cu_seqlens = one_token_each(initial_state_indices, cu_seqlens, who), None
    g, logits = raw_gates(who, q, v, a, b, has_channels=is_kda)
    x = GdnDecodeInputs(
        q, k, v, initial_state_source, initial_state_indices, g, logits, A_log, dt_bias, num_accepted_tokens,
        intermediate_states_buffer, intermediate_state_indices, cu_seqlens, out,
    )  # fmt: skip
    o, pool = decode_raw(
        KDA if is_kda else FAMILY, x, who=who, scale=scale, lower_bound=lower_bound, commit=not disable_state_update,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, backend=backend,
        null_index=null_index or ("nonpositive" if is_vllm else "negative"),
    )  # fmt: skip
    return (o, pool) if is_vllm else o
