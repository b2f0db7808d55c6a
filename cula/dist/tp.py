# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: heads shared out over ranks. The operators need no communication; gathering their outputs does.

Rank r of t takes value heads [r HV / t, (r + 1) HV / t) and the query/key heads that those read: a slice of H / t of
them where the cut falls between groups, the one they share where it falls inside a group, otherwise one copy for each
value head.

| | before | after |
|---|---|---|
| `input_is_parallel=False` | every rank holds all heads of every tensor | rank r has its heads of o and final_state |
| `input_is_parallel=True` | every rank holds its own heads of every tensor | the same |
| `gather_output=True` | either | every rank has all heads |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cula.api import cula_kda, cula_lightning
from cula.contract import KdaInputs, LightningInputs
from cula.dist import handshake
from cula.dist.comm import gather_heads, resolve_group
from cula.dist.varlen import check_rank

MESH_DIMS = ("tp", "model", "tensor")


@dataclass(frozen=True)
class HeadShare:
    """Which heads a rank takes."""

    HV: int
    H: int
    rank: int
    size: int

    @property
    def first(self) -> int:
        return self.rank * (self.HV // self.size)

    def of_value_heads(self, t: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that has HV heads in `dim`."""
        return t.narrow(dim, self.first, self.HV // self.size)

    def of_query_heads(self, t: Tensor) -> Tensor:
        """The heads of q or k [B, T, H, K] that this rank's value heads read."""
        group = self.HV // self.H
        stop = self.first + self.HV // self.size
        heads = [hv // group for hv in range(self.first, stop)]
        if heads[0] == heads[-1] or (self.first % group == 0 and stop % group == 0):
            return t.narrow(2, heads[0], heads[-1] - heads[0] + 1)
        return t.index_select(2, torch.tensor(heads, device=t.device))


def share_heads(who: str, q: Tensor, v: Tensor, tp_rank: int, tp_size: int) -> HeadShare:
    if not isinstance(q, Tensor) or not isinstance(v, Tensor) or q.dim() != 4 or v.dim() != 4:
        raise ValueError(f"{who}: q and v must be tensors [B, T, heads, dim]")
    H, HV = q.shape[2], v.shape[2]
    if H == 0 or HV % H != 0:
        raise ValueError(f"{who}: {HV} value heads are not a multiple of {H} query/key heads")
    if HV % tp_size != 0:
        raise ValueError(f"{who}: tp_size = {tp_size} does not divide the {HV} value heads")
    return HeadShare(HV, H, tp_rank, tp_size)


def slice_kda(who: str, x: KdaInputs, tp_rank: int, tp_size: int) -> KdaInputs:
    """This rank's heads of KDA tensors that hold them all."""
    share = share_heads(who, x.q, x.v, tp_rank, tp_size)
    dt_bias = x.dt_bias
    if dt_bias is not None and dt_bias.dim() == 1 and dt_bias.numel() != share.HV:
        dt_bias = dt_bias.view(share.HV, -1)
    return KdaInputs(
        share.of_query_heads(x.q),
        share.of_query_heads(x.k),
        share.of_value_heads(x.v, 2),
        share.of_value_heads(x.g, 2),
        share.of_value_heads(x.beta, 2),
        None if x.A_log is None else share.of_value_heads(x.A_log, 0),
        None if dt_bias is None else share.of_value_heads(dt_bias, 0),
        None if x.initial_state is None else share.of_value_heads(x.initial_state, 1),
        x.cu_seqlens,
    )


def slice_lightning(who: str, x: LightningInputs, tp_rank: int, tp_size: int) -> LightningInputs:
    """This rank's heads of Lightning tensors that hold them all."""
    share = share_heads(who, x.q, x.v, tp_rank, tp_size)
    return LightningInputs(
        share.of_query_heads(x.q),
        share.of_query_heads(x.k),
        share.of_value_heads(x.v, 2),
        share.of_value_heads(x.decay, 0),
        None if x.initial_state is None else share.of_value_heads(x.initial_state, 1),
        x.cu_seqlens,
    )


def cula_kda_tp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    tp_group: Any = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    input_is_parallel: bool = False,
    gather_output: bool = False,
    nvshmem_backend: bool = False,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """`cula_kda` with its heads shared out over the ranks of a group.

    Args:
        q, k, v, g, beta: as in `cula_kda`; all heads, or this rank's with `input_is_parallel`.
        tp_group: a process group or a `DeviceMesh`; needed for `gather_output` only, checked where given.
        tp_size, tp_rank: how many ranks share the heads, and which this is. `tp_size` must divide HV.
        input_is_parallel: every tensor already holds this rank's heads alone (states, `A_log` and `dt_bias` too).
        gather_output: return all heads on every rank instead of this rank's.
        nvshmem_backend: not available; see the error.
        **kwargs: to `cula_kda`, tensors with a head dimension sliced like the others.

    Returns:
        What `cula_kda` returns, with this rank's `HV / tp_size` heads, or all of them with `gather_output`.

    Gradients: each rank gets those of its own heads, so over full inputs the sum of the ranks' gradients is the whole
    one. Through `gather_output` they follow tensor parallelism's custom: every rank computes the same loss from the
    gathered tensor, and its heads take their slice of the gradient.

    Example:
        >>> o, state = cula_kda_tp(q, k, v, g, beta, tp_group=group, tp_size=2, tp_rank=rank)  # doctest: +SKIP
    """
    who = "cula_kda_tp"
    refuse_nvshmem(who, nvshmem_backend)
    group = resolve_tp(who, tp_group, tp_size, tp_rank, gather_output)
    x = KdaInputs(q, k, v, g, beta, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None), kwargs.pop("initial_state", None))
    with handshake.announced_refusal(who, group if gather_output else None, device_of(q)):
        if not input_is_parallel:
            x = slice_kda(who, x, tp_rank, tp_size)
            _slice_buffers(kwargs, HeadShare(v.shape[2], q.shape[2], tp_rank, tp_size))
        _refuse_out(who, kwargs, gather_output)
        outputs = cula_kda(*x[:5], A_log=x.A_log, dt_bias=x.dt_bias, initial_state=x.initial_state, **kwargs)
    return gather_all(who, outputs, group, tp_size) if gather_output else outputs


def cula_lightning_tp(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    *,
    tp_group: Any = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    input_is_parallel: bool = False,
    gather_output: bool = False,
    nvshmem_backend: bool = False,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """`cula_lightning` with its heads shared out over the ranks of a group; arguments as in `cula_kda_tp`."""
    who = "cula_lightning_tp"
    refuse_nvshmem(who, nvshmem_backend)
    group = resolve_tp(who, tp_group, tp_size, tp_rank, gather_output)
    x = LightningInputs(Q, K, V, decay, kwargs.pop("initial_state", None))
    with handshake.announced_refusal(who, group if gather_output else None, device_of(Q)):
        if not input_is_parallel:
            x = slice_lightning(who, x, tp_rank, tp_size)
            _slice_buffers(kwargs, HeadShare(V.shape[2], Q.shape[2], tp_rank, tp_size))
        _refuse_out(who, kwargs, gather_output)
        outputs = cula_lightning(*x[:4], initial_state=x.initial_state, **kwargs)
    return gather_all(who, outputs, group, tp_size) if gather_output else outputs


def resolve_tp(who: str, tp_group: Any, tp_size: int, tp_rank: int, gather_output: bool) -> Any:
    """The group, where there is one to check or to gather over."""
    if tp_group is None and not gather_output:
        check_rank(who, "tp", tp_rank, tp_size)
        return None
    return resolve_group(who, "tp", tp_group, tp_size, tp_rank, MESH_DIMS)


def device_of(q: Any) -> torch.device:
    """For messages about a call that may be bad."""
    return q.device if isinstance(q, Tensor) else torch.device("cpu")


def refuse_nvshmem(who: str, nvshmem_backend: bool) -> None:
    if nvshmem_backend:
        raise NotImplementedError(
            f"{who}: nvshmem_backend=True is not available; use a torch.distributed process group (NCCL between GPUs, "
            "which uses NVLink and GPUDirect itself) and leave the flag out"
        )


@torch.compiler.disable
def gather_all(who: str, outputs: tuple[Tensor | None, ...], group: Any, tp_size: int) -> tuple[Any, ...]:
    """All heads of (o, final_state or None, h if any): heads are dim 2 of o and h, dim 1 of final_state."""
    if tp_size == 1:
        return outputs
    signature = tuple(
        (name, None if t is None else (tuple(t.shape), str(t.dtype)))
        for name, t in zip(("o", "final_state", "h"), outputs, strict=False)
    )
    assert outputs[0] is not None
    handshake.agree(who, signature, group, outputs[0].device)
    dims = (2, 1, 2)
    return tuple(None if t is None else gather_heads(t, dim, group) for t, dim in zip(outputs, dims, strict=False))


def _slice_buffers(kwargs: dict[str, Any], share: HeadShare) -> None:
    """The tensors with heads that level 1 writes to: this rank's heads of them, as views."""
    for name, dim in (("state_pool", 1), ("checkpoint_states", 1), ("out", 2)):
        if isinstance(kwargs.get(name), Tensor):
            kwargs[name] = share.of_value_heads(kwargs[name], dim)


def _refuse_out(who: str, kwargs: dict[str, Any], gather_output: bool) -> None:
    if gather_output and kwargs.get("out") is not None:
        raise ValueError(f"{who}: out= takes this rank's heads; it does not go with gather_output=True")
