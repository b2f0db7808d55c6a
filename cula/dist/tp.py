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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core import checks
from cula.core.dispatch import refuse_unknown
from cula.core.family import Family
from cula.dist import handshake
from cula.dist.comm import gather_heads, resolve_group
from cula.dist.varlen import check_rank

MESH_DIMS = ("tp", "model", "tensor")


class TpOptions(NamedTuple):
    """The keywords of tensor parallelism, by their public names."""

    tp_group: Any = None
    tp_size: int = 1
    tp_rank: int = 0
    input_is_parallel: bool = False
    gather_output: bool = False
    nvshmem_backend: bool = False


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


def slice_heads(who: str, family: Family, x: Any, tp_rank: int, tp_size: int) -> Any:
    """This rank's heads of a family's inputs that hold them all."""
    share = share_heads(who, x.q, x.v, tp_rank, tp_size)
    sliced = {}
    for name, dim in family.value_head_dims.items():
        t = getattr(x, name)
        if t is not None:
            sliced[name] = share.of_value_heads(_with_heads(who, name, t, dim, share.HV), dim)
    return x._replace(q=share.of_query_heads(x.q), k=share.of_query_heads(x.k), **sliced)


def _with_heads(who: str, name: str, t: Tensor, dim: int, HV: int) -> Tensor:
    """An input with all value heads in `dim`; parameters may come flat, or with dimensions of one around them."""
    checks.check_tensor(who, name, t)
    if dim == 0 and t.numel() % HV == 0 and t.numel():
        return t if t.dim() and t.shape[0] == HV else t.reshape(HV, -1)
    if t.dim() <= dim or t.shape[dim] != HV:
        raise ValueError(f"{who}: {name} has shape {checks.shape_of(t)}; expected {HV} value heads in dimension {dim}")
    return t


def tp_call(family: Family, x: Any, tp: TpOptions, kwargs: dict[str, Any], who: str) -> tuple[Any, ...]:
    """A family's call of level 1 with its heads shared out over the ranks of a group: what `cula_<family>_tp` does.

    Args:
        x: the family's inputs as far as they are positional.
        kwargs: the keywords of level 1.
    """
    refuse_nvshmem(who, tp.nvshmem_backend)
    group = resolve_tp(who, tp)
    positional = len(family.Inputs._fields) - len(family.Inputs._field_defaults)
    x = x._replace(**{name: kwargs.pop(name) for name in family.Inputs._field_defaults if name in kwargs})
    with handshake.announced_refusal(who, group if tp.gather_output else None, device_of(x.q)):
        if not tp.input_is_parallel:
            whole = HeadShare(*_heads(x), tp.tp_rank, tp.tp_size)
            x = slice_heads(who, family, x, tp.tp_rank, tp.tp_size)
            _slice_buffers(kwargs, whole)
        _refuse_out(who, kwargs, tp.gather_output)
        try:
            outputs = family.load_entry()(*x[:positional], **_named(x, positional, kwargs))
        except TypeError:
            level1 = family.keywords()
            unknown = [name for name in kwargs if name not in level1]
            refuse_unknown(who, unknown, [*level1, *TpOptions._fields], kwargs.get("backend", "auto"))
            raise
    return gather_all(who, outputs, group, tp.tp_size) if tp.gather_output else outputs


def _named(x: Any, positional: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of level 1: what is left of the inputs, and the options."""
    return dict(zip(x._fields[positional:], x[positional:])) | kwargs


def _heads(x: Any) -> tuple[int, int]:
    """HV and H, where they can be read; what else is wrong with the tensors is for the checks to say."""
    is_right = isinstance(x.q, Tensor) and isinstance(x.v, Tensor) and x.q.dim() == 4 and x.v.dim() == 4
    return (x.v.shape[2], x.q.shape[2]) if is_right else (1, 1)


def resolve_tp(who: str, tp: TpOptions) -> Any:
    """The group, where there is one to check or to gather over."""
    if tp.tp_group is None and not tp.gather_output:
        check_rank(who, "tp", tp.tp_rank, tp.tp_size)
        return None
    return resolve_group(who, "tp", tp.tp_group, tp.tp_size, tp.tp_rank, MESH_DIMS)


def device_of(q: Any) -> torch.device:
    """Where q is, for messages about a call whose q may be no tensor at all."""
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
