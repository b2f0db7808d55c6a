# SPDX-License-Identifier: Apache-2.0
"""KDA decode by the names serving engines import. Each is a decode with that caller's argument order and defaults."""

from __future__ import annotations

from torch import Tensor

from cula.core.constants import SOFTPLUS_THRESHOLD
from cula.core.serving import check_packed, check_softplus, decode_raw, one_token_each, raw_gates, split_packed
from cula.kda.family import FAMILY
from cula.kda.problem import KdaDecodeInputs


def kda_decode(
    A_log: Tensor,
    dt_bias: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = SOFTPLUS_THRESHOLD,
    out: Tensor | None = None,
    state_layout: str = "vk",
    *,
    lower_bound: float | None = None,
) -> Tensor:
    """One token a row with raw gates and raw beta logits; the pool is updated in place.

    Args:
        A_log: `[HV]` float32 (other shapes of HV elements are flattened).
        dt_bias: `[HV * K]` or `[HV, K]` float32, or None.
        q, k: `[N, 1, H, K]` or `[1, N, H, K]`.
        v: `[N, 1, HV, V]` or `[1, N, HV, V]`.
        a: raw gates, HV * K numbers a row in any shape (`[N, HV, K]`, `[N, 1, HV * K]`, `[1, N, HV, K]`).
        b: beta logits, HV numbers a row in any shape.
        initial_state_source: pool `[P, HV, V, K]` (`[P, HV, K, V]` for state_layout "kv").
        initial_state_indices: `[N]` slots; a negative one marks a padded row, whose output is zero.
        cu_seqlens: accepted where it says one token a sequence, `[N + 1]`.
        softplus_beta, softplus_threshold: the softplus of the unbounded gate; only beta = 1 is supported.
        lower_bound: bound of the gate; None for the softplus gate.

    Returns:
        o, of v's shape.
    """
    who = "kda_decode"
    check_softplus(who, softplus_beta, softplus_threshold)
    slots = one_token_each(initial_state_indices, cu_seqlens, who)
    g, beta = raw_gates(who, q, v, a, b, has_channels=True)
    x = KdaDecodeInputs(q, k, v, initial_state_source, slots, g, beta, A_log, dt_bias, out=out)
    o, _ = decode_raw(
        FAMILY, x, who=who, scale=scale, lower_bound=lower_bound, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_layout=state_layout,
    )  # fmt: skip
    return o


def kda_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    *,
    num_heads: int,
    head_dim_k: int,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    out: Tensor | None = None,
    null_index: str = "negative",
    state_layout: str = "vk",
) -> Tensor:
    """`kda_decode` on a packed projection, without copying it apart.

    Args:
        mixed_qkv: `[N, 2 * H * K + HV * V]`: the row's q heads, then k heads, then v heads; rows may be strided.
        a: raw gates, HV * K numbers a row in any shape.
        b: beta logits, HV numbers a row in any shape.
        initial_state_source: pool `[P, HV, V, K]`; updated in place.
        initial_state_indices: `[N]` slots; null ones (see `null_index`) mark padded rows.
        num_heads: H, the number of query/key heads.
        head_dim_k: K.

    Returns:
        o `[1, N, HV, V]`.
    """
    who = "kda_packed_decode"
    check_packed(who, mixed_qkv, initial_state_source, "initial_state_source")
    H, K = num_heads, head_dim_k
    HV = initial_state_source.shape[1]
    V = initial_state_source.shape[3 if state_layout == "kv" else 2]
    q, k, v = split_packed(who, mixed_qkv, HV, V, K, H)
    g, beta = raw_gates(who, q, v, a, b, has_channels=True)
    slots = one_token_each(initial_state_indices, None, who)
    x = KdaDecodeInputs(q, k, v, initial_state_source, slots, g, beta, A_log, dt_bias, out=out)
    o, _ = decode_raw(
        FAMILY, x, who=who, scale=scale, lower_bound=lower_bound, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        null_index=null_index, state_layout=state_layout,
    )  # fmt: skip
    return o


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor | None,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    out: Tensor | None = None,
    state_layout: str = "vk",
) -> Tensor:
    """SGLang's decode entry: `kda_decode` with `is_kda=True`; without it one gate a head (the gated delta rule).

    Args: as `kda_decode`; with `is_kda=False`, `a` holds HV gates a row and `dt_bias` is `[HV]`.
    """
    who = "fused_sigmoid_gating_delta_rule_update"
    check_softplus(who, softplus_beta, softplus_threshold)
    slots = one_token_each(initial_state_indices, cu_seqlens, who)
    g, beta = raw_gates(who, q, v, a, b, has_channels=is_kda)
    x = KdaDecodeInputs(q, k, v, initial_state_source, slots, g, beta, A_log, dt_bias, out=out)
    o, _ = decode_raw(
        FAMILY, x, who=who, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_layout=state_layout
    )  # fmt: skip
    return o
