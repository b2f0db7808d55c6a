# SPDX-License-Identifier: Apache-2.0
"""What functions with serving engines' signatures share: raw gates and logits in any shape, and projections that are packed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cula.core import checks
from cula.core.constants import SOFTPLUS_THRESHOLD
from cula.core.decode import decode
from cula.core.family import Family
from cula.core.problem import DecodeOptions


def decode_raw(
    family: Family,
    x: Any,
    *,
    who: str,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    lower_bound: float | None = None,
    null_index: str = "negative",
    state_layout: str = "vk",
    commit: bool = True,
    backend: str = "auto",
) -> Any:
    """A decode of a family with raw gates and raw beta logits, as all engines have them: `(o, pool)`."""
    options = DecodeOptions(
        scale=scale,
        lower_bound=lower_bound,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=True,
        null_is_nonpositive=checks.is_null_nonpositive(who, null_index),
        commit=commit,
        state_is_kv=checks.is_state_kv(who, state_layout),
    )
    return decode(family, x, options, backend=backend, who=who)


def raw_gates(who: str, q: Tensor, v: Tensor, a: Tensor, b: Tensor, *, has_channels: bool) -> tuple[Tensor, Tensor]:
    """Gates (one a channel, or one a head) and beta logits of the rows of q and v, which engines hand over in any shape."""
    for name, t in (("q", q), ("v", v)):
        if checks.rank_of(who, name, t) != 4:
            raise ValueError(f"{who}: {name} has shape {checks.shape_of(t)}; expected four dimensions [N, T, heads, dim]")
    heads = tuple(v.shape[:3])
    letters, shape = ("[N, T, HV, K]", (*heads, q.shape[3])) if has_channels else ("[N, T, HV]", heads)
    return checks.reshaped(who, "a", a, letters, shape), checks.reshaped(who, "b", b, "[N, T, HV]", heads)


def check_softplus(who: str, beta: float, threshold: float) -> None:
    if beta != 1.0:
        raise NotImplementedError(f"{who}: softplus_beta is {beta}; the gate's softplus has beta 1")
    if threshold < SOFTPLUS_THRESHOLD:
        raise NotImplementedError(f"{who}: softplus_threshold is {threshold}; below 20 it would change the gate")


def check_packed(who: str, mixed_qkv: Tensor, pool: Tensor, name: str) -> None:
    """The ranks of a packed projection and of the pool, from whose shapes its heads are read."""
    if checks.rank_of(who, "mixed_qkv", mixed_qkv) != 2:
        raise ValueError(f"{who}: mixed_qkv has shape {checks.shape_of(mixed_qkv)}; expected [N, 2 * H * K + HV * V]")
    if checks.rank_of(who, name, pool) != 4:
        raise ValueError(f"{who}: {name} has shape {checks.shape_of(pool)}; expected a pool of states, [P, HV, V, K]")
    if 0 in pool.shape[1:]:
        raise ValueError(f"{who}: {name} has shape {checks.shape_of(pool)}; [HV, V, K] must be positive")


def split_packed(who: str, mixed_qkv: Tensor, HV: int, V: int, K: int, H: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v `[1, N, heads, dim]` of rows `[N, 2 * H * K + HV * V]`, as views: q heads, then k heads, then v heads.

    H is what the columns leave for queries and keys where it is not given.
    """
    width = mixed_qkv.shape[-1]
    if H is None:
        H, left = divmod(width - HV * V, 2 * K)
        if left or H <= 0:
            raise ValueError(
                f"{who}: mixed_qkv has {width} columns; beside {HV} value heads of {V} they hold no queries and keys of {K}"
            )
    elif width != 2 * H * K + HV * V:
        raise ValueError(
            f"{who}: mixed_qkv has {width} columns; {H} heads of {K} twice and {HV} of {V} make {2 * H * K + HV * V}"
        )
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=-1)
    q, k, v = (t.unflatten(-1, shape).unsqueeze(0) for t, shape in ((q, (H, K)), (k, (H, K)), (v, (HV, V))))
    return q, k, v


def one_token_each(indices: Tensor, cu_seqlens: Tensor | None, who: str) -> Tensor:
    """The slots of the rows; refuses slots and offsets that could mean anything but one token a sequence."""
    checks.check_tensor(who, "initial_state_indices", indices)
    if indices.dim() == 0 or indices.shape[1:].numel() != 1:
        raise ValueError(f"{who}: initial_state_indices has shape {checks.shape_of(indices)}; expected [N], a slot a row")
    if cu_seqlens is None:
        return indices
    checks.check_tensor(who, "cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] != indices.shape[0] + 1:
        raise ValueError(
            f"{who}: cu_seqlens has shape {checks.shape_of(cu_seqlens)}; decode takes one token a sequence, [N + 1] = "
            f"[{indices.shape[0] + 1}] offsets"
        )
    return indices
