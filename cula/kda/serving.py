# SPDX-License-Identifier: Apache-2.0
"""KDA decode by the names serving engines import. Each is a decode with that caller's argument order and defaults."""

from __future__ import annotations

from torch import Tensor

from cula.core import checks
from cula.core.constants import SOFTPLUS_THRESHOLD
from cula.core.decode import decode
from cula.core.problem import DecodeOptions
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
    check_softplus("kda_decode", softplus_beta, softplus_threshold)
    slots = one_token_each(initial_state_indices, cu_seqlens, "kda_decode")
    g, beta = raw_gates("kda_decode", q, v, a, b, has_channels=True)
    x = KdaDecodeInputs(q, k, v, initial_state_source, slots, g, beta, A_log, dt_bias, out=out)
    return _decode("kda_decode", x, scale, lower_bound, use_qk_l2norm_in_kernel, state_layout)


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
    q, k, v = split_packed(who, mixed_qkv, H, K, HV, V)
    g, beta = raw_gates(who, q, v, a, b, has_channels=True)
    x = KdaDecodeInputs(q, k, v, initial_state_source, initial_state_indices, g, beta, A_log, dt_bias, out=out)
    return _decode(who, x, scale, lower_bound, use_qk_l2norm_in_kernel, state_layout, null_index)


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
    return _decode(who, x, scale, None, use_qk_l2norm_in_kernel, state_layout)


def _decode(
    who: str,
    x: KdaDecodeInputs,
    scale: float | None,
    lower_bound: float | None,
    use_norm: bool,
    state_layout: str,
    null_index: str = "negative",
) -> Tensor:
    """With raw gates and raw beta logits, as all of these callers have them; returns o."""
    checks.check_choice(who, "null_index", null_index, ("negative", "nonpositive"))
    checks.check_choice(who, "state_layout", state_layout, ("vk", "kv"))
    options = DecodeOptions(
        scale=scale,
        lower_bound=lower_bound,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=use_norm,
        use_beta_sigmoid_in_kernel=True,
        null_is_nonpositive=null_index == "nonpositive",
        state_is_kv=state_layout == "kv",
    )
    return decode(FAMILY, x, options, who=who)[0]


def raw_gates(who: str, q: Tensor, v: Tensor, a: Tensor, b: Tensor, *, has_channels: bool) -> tuple[Tensor, Tensor]:
    """Gates and beta logits of the rows of q and v, which callers hand over in any shape."""
    for name, t in (("q", q), ("v", v)):
        if checks.rank_of(who, name, t) != 4:
            raise ValueError(f"{who}: {name} has shape {checks.shape_of(t)}; expected four dimensions [N, T, heads, dim]")
    rows = tuple(v.shape[:3])
    if has_channels:
        return checks.reshaped(who, "a", a, "[N, T, HV, K]", (*rows, q.shape[3])), checks.reshaped(
            who, "b", b, "[N, T, HV]", rows
        )
    return checks.reshaped(who, "a", a, "[N, T, HV]", rows), checks.reshaped(who, "b", b, "[N, T, HV]", rows)


def check_packed(who: str, mixed_qkv: Tensor, pool: Tensor, name: str) -> None:
    if checks.rank_of(who, "mixed_qkv", mixed_qkv) != 2:
        raise ValueError(f"{who}: mixed_qkv has shape {checks.shape_of(mixed_qkv)}; expected [N, 2 * H * K + HV * V]")
    if checks.rank_of(who, name, pool) != 4:
        raise ValueError(f"{who}: {name} has shape {checks.shape_of(pool)}; expected a pool of states, [P, HV, V, K]")


def split_packed(who: str, mixed_qkv: Tensor, H: int, K: int, HV: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v `[1, N, heads, dim]` of rows `[N, 2 * H * K + HV * V]`, as views."""
    width = mixed_qkv.shape[-1]
    if width != 2 * H * K + HV * V:
        raise ValueError(
            f"{who}: mixed_qkv has {width} columns; {H} heads of {K} twice and {HV} of {V} make {2 * H * K + HV * V}"
        )
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=-1)
    q, k, v = (t.unflatten(-1, shape).unsqueeze(0) for t, shape in ((q, (H, K)), (k, (H, K)), (v, (HV, V))))
    return q, k, v


def check_softplus(who: str, beta: float, threshold: float) -> None:
    if beta != 1.0:
        raise NotImplementedError(f"{who}: softplus_beta is {beta}; the gate's softplus has beta 1")
    if threshold < SOFTPLUS_THRESHOLD:
        raise NotImplementedError(f"{who}: softplus_threshold is {threshold}; below 20 it would change the gate")


def one_token_each(indices: Tensor, cu_seqlens: Tensor | None, who: str) -> Tensor:
    """The slots of the rows; refuses offsets that could mean anything but one token a sequence."""
    checks.check_tensor(who, "initial_state_indices", indices)
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.shape[0] != indices.shape[0] + 1):
        raise ValueError(
            f"{who}: cu_seqlens has shape {list(cu_seqlens.shape)}; decode takes one token a sequence, [N + 1] = "
            f"[{indices.shape[0] + 1}] offsets"
        )
    return indices
