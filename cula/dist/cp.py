# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: tokens shared out over ranks, states handed from rank to rank. Alone or with tensor parallelism.

What rank r of P holds, before and after a call:

| | tokens in, o out | initial_state | final_state |
|---|---|---|---|
| a batch | the r-th slice of every sequence, lengths may differ | counts on rank 0 | on rank P - 1 |
| packed, "complete" | the tokens of its own sequences (`split_cu_seqlens_for_sp`) | rank 0's, sent to where a sequence begins | \
sent to rank P - 1 |
| packed, "split" | packed tokens [r T // P, (r + 1) T // P) | the same | the same |

States are whole, `[N, HV, V, K]` float32, with N counted over all ranks; `final_state` is None on the other ranks unless
`broadcast_final_state=True`. docs/distributed.md explains the exchange and its cost. Under `torch.compile` these calls run
as they are, between compiled graphs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cula.core.family import Family
from cula.dist import handshake
from cula.dist.call import Call
from cula.dist.comm import resolve_group
from cula.dist.cost import Load, Schedule, cheapest
from cula.dist.plan import CpOptions, Plan, Ranks, check_tokens, local_kernels, make_plan, public_options, run_plan, signature_of
from cula.dist.tp import TpOptions, device_of, gather_all, refuse_nvshmem, resolve_tp, slice_heads
from cula.dist.varlen import Layout, Share, host_offsets

MESH_DIMS = ("cp", "sp", "context", "sequence")


@torch.compiler.disable
def context_parallel(
    family: Family,
    x: Any,
    options: Any,
    ranks: tuple[Any, int, int],
    cp: CpOptions,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    extra: dict[str, Any] | None = None,
    who: str,
    nvshmem_backend: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A family's call over sequences whose tokens lie on several ranks: what `cula_<family>_cp` does.

    Args:
        x: the family's inputs, with this rank's tokens and global offsets.
        ranks: the group (or mesh, or None), its size, and this process's rank in it.
    """
    refuse_nvshmem(who, nvshmem_backend)
    group, size, rank = ranks
    here = Ranks(resolve_group(who, "sp", group, size, rank, MESH_DIMS), size, rank)
    with handshake.announced_refusal(who, here.group, device_of(x.q)):
        kernels = local_kernels(who, family, x, options, device, backend, extra or {})
        if x.initial_state is not None:  # states travel, and kernels take them, in float32
            x = x._replace(initial_state=x.initial_state.float())
        plan = make_plan(who, x, kernels, here, cp)
        kernels.check_values(x, counts_initial_state=here.rank == plan.call.first)
    return run_plan(who, x, plan)


def split_options(family: Family, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Keywords of a parallel function as (tensors of the family's inputs, its options, the others)."""
    tensors = {name: kwargs.pop(name) for name in family.Inputs._fields if name in kwargs}
    options = family.Options(**{name: kwargs.pop(name) for name in public_options(family) if name in kwargs})
    return tensors, options, kwargs


def cp_call(
    family: Family, x: Any, ranks: tuple[Any, int, int], cp: CpOptions, kwargs: dict[str, Any], who: str
) -> tuple[Tensor, Tensor | None]:
    """What every `cula_<family>_cp` does: `context_parallel`, with the keywords of level 1 sorted.

    Args:
        x: the family's inputs as far as they are named; others are among the keywords.
        ranks: `sp_group`, `sp_size` and `sp_rank`.
        kwargs: the keywords of level 1, and `nvshmem_backend`.
    """
    place = {name: kwargs.pop(name) for name in ("device", "backend", "nvshmem_backend") if name in kwargs}
    tensors, options, extra = split_options(family, kwargs)
    return context_parallel(family, x._replace(**tensors), options, ranks, cp, extra=extra, who=who, **place)


def tp_cp_call(
    family: Family, x: Any, tp: TpOptions, ranks: tuple[Any, int, int], kwargs: dict[str, Any], who: str
) -> tuple[Tensor, Tensor | None]:
    """What every `cula_<family>_tp_cp` does: `cp_call` on this rank's heads.

    Args:
        x, ranks: as in `cp_call`.
        kwargs: the keywords of `cula_<family>_cp`.
    """
    group, of_tokens = resolve_tp(who, tp), resolve_group(who, "sp", *ranks, MESH_DIMS)
    device = device_of(x.q)
    with_heads = [name for name in family.value_head_dims if name in kwargs]
    x = x._replace(**{name: kwargs.pop(name) for name in with_heads})
    with handshake.announced_refusal(who, group if tp.gather_output else None, device):
        if not tp.input_is_parallel:
            with handshake.announced_refusal(who, of_tokens, device):
                x = slice_heads(who, family, x, tp.tp_rank, tp.tp_size)
        outputs = cp_call(family, x, ranks, CpOptions.taken_from(kwargs), kwargs, who)
    return gather_all(who, outputs, group, tp.tp_size) if tp.gather_output else outputs


@torch.compiler.disable
def from_cp_context(
    family: Family,
    x: Any,
    options: Any,
    cp_context: Any,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    extra: dict[str, Any],
    who: str,
) -> tuple[Tensor, Tensor | None]:
    """The deprecated `cp_context=` of flash-linear-attention, as a scan over its ranks.

    Args:
        x: the family's inputs: this rank's even slice of the packed tokens, B == 1. Their `cu_seqlens` are the context's and are
            not read; `initial_state` and a final state are not for a context, `cula.dist` has them.
        cp_context: an object with `group`, `cu_seqlens` (offsets of this rank's tokens) and either `pre_num_ranks` and
            `post_num_ranks` or `is_first_rank` and `is_last_rank`: how far the first and the last local sequence reach.

    Returns:
        `(o, None)`.
    """
    parallel = f"cula.dist.{family.function}_cp"
    warnings.warn(
        f"{who}: cp_context= is deprecated; call {parallel}(..., sp_group=group, sp_mode='split') with the global cu_seqlens",
        DeprecationWarning,
        stacklevel=5,  # the caller of level 1; one frame is that of torch.compiler.disable
    )
    if x.initial_state is not None or options.output_final_state:
        raise ValueError(f"{who}: cp_context= takes no initial_state and gives no final state; use {parallel}")
    x = x._replace(cu_seqlens=None)
    group, offsets = getattr(cp_context, "group", None), getattr(cp_context, "cu_seqlens", None)
    if group is None or offsets is None:
        raise ValueError(f"{who}: cp_context must have a group and cu_seqlens; it is {type(cp_context).__name__}")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    ranks = Ranks(resolve_group(who, "cp", group, size, rank, MESH_DIMS), size, rank)
    with handshake.announced_refusal(who, ranks.group, device_of(x.q)):
        kernels = local_kernels(who, family, x, options, device, backend, extra)
        on_host = getattr(cp_context, "cu_seqlens_cpu", None)
        local = host_offsets(offsets if on_host is None else on_host, who)
        check_tokens(who, x, local[-1], "cp_context.cu_seqlens")
        kernels.check_values(x, counts_initial_state=False)
        share = Share(tuple(range(len(local) - 1)), local, *_reach(who, cp_context, rank, size))
        # FLA's ranks hold equally many tokens. A chain needs to know a rank's neighbours only.
        sizes = (size, 1, x.v.shape[2], x.q.shape[3], x.v.shape[3], x.q.shape[1])
        load = Load(*sizes, kernels.has_dense_transition, kernels.needs_grad)
        schedule = Schedule("chain", cheapest(load, "scan").blocks)
        signature = signature_of(x, kernels, ranks, CpOptions(output_final_state=False, schedule=schedule))
        call = Call(
            kernels=kernels,
            layout=Layout(share, (), (), size),
            schedule=schedule,
            group=ranks.group,
            rank=rank,
            size=size,
            has_initial_state=False,
            output_final_state=False,
            broadcast_final_state=False,
        )
    return run_plan(who, x, Plan(call, signature))


def _reach(who: str, cp_context: Any, rank: int, size: int) -> tuple[int, int]:
    """How many ranks before hold the first local sequence, and after the last one; 1 stands for any number."""
    counts = []
    for count, flag in (("pre_num_ranks", "is_first_rank"), ("post_num_ranks", "is_last_rank")):
        found = getattr(cp_context, count, None)
        if found is None:
            is_end = getattr(cp_context, flag, None)
            if is_end is None:
                raise ValueError(f"{who}: cp_context has neither {count} nor {flag}")
            found = 0 if is_end else 1
        counts.append(int(found))
    before, after = counts
    if not 0 <= before <= rank or not 0 <= after <= size - 1 - rank:
        raise ValueError(f"{who}: cp_context says {before} ranks before and {after} after rank {rank} of {size}")
    return before, after
