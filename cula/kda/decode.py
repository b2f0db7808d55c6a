# SPDX-License-Identifier: Apache-2.0
"""KDA decode by the names serving engines import. Each is `cula_decode` with that caller's argument order and defaults."""

from __future__ import annotations

from torch import Tensor

from cula.api import cula_decode

_SOFTPLUS_THRESHOLD = 20.0  # beyond it softplus(x) is x to float32's last bit, so a threshold changes nothing


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
    softplus_threshold: float = _SOFTPLUS_THRESHOLD,
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
    _check_softplus("kda_decode", softplus_beta, softplus_threshold)
    K = q.shape[-1]
    o, _ = cula_decode(
        q,
        k,
        v,
        initial_state_source,
        mode="kda",
        state_indices=_one_token_each(initial_state_indices, cu_seqlens, "kda_decode"),
        scale=scale,
        g=a.reshape(*v.shape[:3], K),
        beta=b.reshape(v.shape[:3]),
        A_log=A_log.reshape(-1),
        dt_bias=dt_bias,
        use_gate_in_kernel=True,
        lower_bound=lower_bound,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=True,
        out=out,
        state_layout=state_layout,
    )
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
    N, width = mixed_qkv.shape
    H, K = num_heads, head_dim_k
    HV = initial_state_source.shape[1]
    V = initial_state_source.shape[3 if state_layout == "kv" else 2]
    if width != 2 * H * K + HV * V:
        raise ValueError(
            f"{who}: mixed_qkv has {width} columns; {H} heads of {K} twice and {HV} of {V} make {2 * H * K + HV * V}"
        )
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=-1)
    o, _ = cula_decode(
        q.unflatten(-1, (H, K)).unsqueeze(0),
        k.unflatten(-1, (H, K)).unsqueeze(0),
        v.unflatten(-1, (HV, V)).unsqueeze(0),
        initial_state_source,
        mode="kda",
        state_indices=initial_state_indices,
        scale=scale,
        g=a.reshape(1, N, HV, K),
        beta=b.reshape(1, N, HV),
        A_log=None if A_log is None else A_log.reshape(-1),
        dt_bias=dt_bias,
        use_gate_in_kernel=True,
        lower_bound=lower_bound,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=True,
        out=out,
        null_index=null_index,
        state_layout=state_layout,
    )
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
    _check_softplus(who, softplus_beta, softplus_threshold)
    gate_shape = (*v.shape[:3], q.shape[-1]) if is_kda else tuple(v.shape[:3])
    o, _ = cula_decode(
        q,
        k,
        v,
        initial_state_source,
        mode="kda",
        state_indices=_one_token_each(initial_state_indices, cu_seqlens, who),
        scale=scale,
        g=a.reshape(gate_shape),
        beta=b.reshape(v.shape[:3]),
        A_log=A_log.reshape(-1),
        dt_bias=dt_bias,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=True,
        out=out,
        state_layout=state_layout,
    )
    return o


def _check_softplus(who: str, beta: float, threshold: float) -> None:
    if beta != 1.0:
        raise NotImplementedError(f"{who}: softplus_beta is {beta}; the gate's softplus has beta 1")
    if threshold < _SOFTPLUS_THRESHOLD:
        raise NotImplementedError(f"{who}: softplus_threshold is {threshold}; below 20 it would change the gate")


def _one_token_each(indices: Tensor, cu_seqlens: Tensor | None, who: str) -> Tensor:
    """The slots of the rows; refuses offsets that could mean anything but one token a sequence."""
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.shape[0] != indices.shape[0] + 1):
        raise ValueError(
            f"{who}: cu_seqlens has shape {list(cu_seqlens.shape)}; decode takes one token a sequence, [N + 1] = "
            f"[{indices.shape[0] + 1}] offsets"
        )
    return indices
