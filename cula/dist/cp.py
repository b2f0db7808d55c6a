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

from cula.contract import KdaInputs, LightningInputs
from cula.dist import handshake
from cula.dist.comm import resolve_group
from cula.dist.cost import Load, Schedule, cheapest
from cula.dist.plan import (
    Plan,
    Ranks,
    Wishes,
    check_tokens,
    kda_kernels,
    lightning_kernels,
    make_plan,
    run_plan,
    signature_of,
)
from cula.dist.tp import device_of, gather_all, refuse_nvshmem, resolve_tp, slice_kda, slice_lightning
from cula.dist.varlen import Layout, Share, host_offsets

MESH_DIMS = ("cp", "sp", "context", "sequence")


@torch.compiler.disable
def cula_kda_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    sp_group: Any,
    sp_size: int,
    sp_rank: int,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cp_mode: str = "auto",
    cu_seqlens: Tensor | None = None,
    sp_mode: str = "complete",
    broadcast_final_state: bool = False,
    schedule: Schedule | None = None,
    nvshmem_backend: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`cula_kda` over sequences whose tokens lie on several ranks.

    Args:
        q, k, v, g, beta: this rank's tokens, as in `cula_kda`; T may differ from rank to rank, and be 0.
        sp_group: a process group, a `DeviceMesh` (one dimension, or several with one named "cp" or "sp"), or None for
            the default group.
        sp_size, sp_rank: its size, and this process's rank in it.
        initial_state: `[N, HV, V, K]` float32 of all sequences; counts on rank 0. Of a batch the other ranks may pass
            None; of packed sequences every rank passes a tensor or none does.
        output_final_state: return the states after the last tokens, on the last rank.
        cp_mode: "ring" hands the state on, one rank after another; "scan" lets all ranks work at once on the maps of
            their tokens and scans those; "auto" takes the cheaper by `cula.dist.cost`.
        cu_seqlens: *global* offsets `[N + 1]` of packed sequences, int32 or int64, on the CPU or on q's device.
        sp_mode: "complete" (a sequence on one rank) or "split" (the packed range cut evenly).
        broadcast_final_state: return `final_state` on every rank.
        schedule: the exchange itself, instead of one chosen by `cp_mode`: `Schedule("chain", 4)`.
        nvshmem_backend: not available; see the error.
        **kwargs: to the operator, as for `cula_kda`.

    Returns:
        `(o, final_state)`: o for this rank's tokens; final_state `[N, HV, V, K]` on the last rank (on all with
        `broadcast_final_state`), otherwise None.

    Differentiable as `cula_kda` is. Every rank runs the backward (see `tie`); the loss is the sum of the ranks' losses;
    gradients of `A_log` and `dt_bias` are this rank's share, to be summed; that of `initial_state` is whole, on rank 0.

    Example:
        >>> o, state = cula_kda_cp(q, k, v, g, beta, sp_group=group, sp_size=4, sp_rank=rank)  # doctest: +SKIP
    """
    who = "cula_kda_cp"
    refuse_nvshmem(who, nvshmem_backend)
    ranks = Ranks(resolve_group(who, "sp", sp_group, sp_size, sp_rank, MESH_DIMS), sp_size, sp_rank)
    wishes = Wishes(cp_mode, sp_mode, output_final_state, broadcast_final_state, schedule)
    x = KdaInputs(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    x = x._replace(A_log=kwargs.pop("A_log", None), dt_bias=kwargs.pop("dt_bias", None))
    with handshake.announced_refusal(who, ranks.group, device_of(q)):
        kernels = kda_kernels(who, x, kwargs)
        plan = make_plan(who, x, kernels, ranks, wishes)
    return run_plan(who, x, plan, ranks)


@torch.compiler.disable
def cula_lightning_cp(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    *,
    sp_group: Any,
    sp_size: int,
    sp_rank: int,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cp_mode: str = "auto",
    cu_seqlens: Tensor | None = None,
    sp_mode: str = "complete",
    broadcast_final_state: bool = False,
    schedule: Schedule | None = None,
    nvshmem_backend: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`cula_lightning` over sequences whose tokens lie on several ranks; arguments as in `cula_kda_cp`."""
    who = "cula_lightning_cp"
    refuse_nvshmem(who, nvshmem_backend)
    ranks = Ranks(resolve_group(who, "sp", sp_group, sp_size, sp_rank, MESH_DIMS), sp_size, sp_rank)
    wishes = Wishes(cp_mode, sp_mode, output_final_state, broadcast_final_state, schedule)
    x = LightningInputs(Q, K, V, decay, initial_state, cu_seqlens)
    with handshake.announced_refusal(who, ranks.group, device_of(Q)):
        kernels = lightning_kernels(who, x, kwargs)
        plan = make_plan(who, x, kernels, ranks, wishes)
    return run_plan(who, x, plan, ranks)


def cula_kda_tp_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    tp_group: Any,
    sp_group: Any,
    tp_size: int,
    sp_size: int,
    tp_rank: int,
    sp_rank: int,
    input_is_parallel: bool = False,
    gather_output: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`cula_kda_cp` on this rank's heads: heads shared out over `tp_group`, tokens over `sp_group`.

    Only the states of the local heads cross ranks of `sp_group`.

    Args:
        q, k, v, g, beta: this rank's tokens, all heads; this rank's heads with `input_is_parallel`.
        tp_group, tp_size, tp_rank, input_is_parallel, gather_output: as in `cula_kda_tp`.
        sp_group, sp_size, sp_rank: as in `cula_kda_cp`. One `DeviceMesh` of two dimensions named "tp" and "cp" may be
            given for both groups.
        **kwargs: to `cula_kda_cp`, tensors with a head dimension sliced like the others.

    Returns:
        What `cula_kda_cp` returns, with this rank's heads, or all of them with `gather_output`.
    """
    who = "cula_kda_tp_cp"
    heads = resolve_tp(who, tp_group, tp_size, tp_rank, gather_output)
    x = KdaInputs(q, k, v, g, beta, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None), kwargs.pop("initial_state", None))
    if not input_is_parallel:
        x = slice_kda(who, x, tp_rank, tp_size)
    kwargs |= {"A_log": x.A_log, "dt_bias": x.dt_bias, "initial_state": x.initial_state}
    outputs = cula_kda_cp(*x[:5], sp_group=sp_group, sp_size=sp_size, sp_rank=sp_rank, **kwargs)
    return gather_all(who, outputs, heads, tp_size) if gather_output else outputs


def cula_lightning_tp_cp(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    decay: Tensor,
    *,
    tp_group: Any,
    sp_group: Any,
    tp_size: int,
    sp_size: int,
    tp_rank: int,
    sp_rank: int,
    input_is_parallel: bool = False,
    gather_output: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`cula_lightning_cp` on this rank's heads; see `cula_kda_tp_cp`."""
    who = "cula_lightning_tp_cp"
    heads = resolve_tp(who, tp_group, tp_size, tp_rank, gather_output)
    x = LightningInputs(Q, K, V, decay, kwargs.pop("initial_state", None))
    if not input_is_parallel:
        x = slice_lightning(who, x, tp_rank, tp_size)
    kwargs["initial_state"] = x.initial_state
    outputs = cula_lightning_cp(*x[:4], sp_group=sp_group, sp_size=sp_size, sp_rank=sp_rank, **kwargs)
    return gather_all(who, outputs, heads, tp_size) if gather_output else outputs


@torch.compiler.disable
def kda_from_cp_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cp_context: Any,
    *,
    who: str = "cula_kda",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The deprecated `cp_context=` of flash-linear-attention, as a scan over its ranks.

    Args:
        q, k, v, g, beta: this rank's even slice of the packed tokens, B == 1.
        cp_context: an object with `group`, `cu_seqlens` (offsets of this rank's tokens) and either `pre_num_ranks` and
            `post_num_ranks` or `is_first_rank` and `is_last_rank`: how far the first and the last local sequence reach.
        initial_state, output_final_state: as in FLA, not with a context; `cula.dist.cula_kda_cp` has them.
        **kwargs: options of `cula_kda`; `cu_seqlens` among them is the context's and is not read.

    Returns:
        `(o, None)`.
    """
    warnings.warn(
        f"{who}: cp_context= is deprecated; call cula.dist.cula_kda_cp(..., sp_group=group, sp_mode='split') with the "
        "global cu_seqlens",
        DeprecationWarning,
        stacklevel=4,  # the caller of level 1; one frame is that of torch.compiler.disable
    )
    if initial_state is not None or output_final_state:
        raise ValueError(f"{who}: cp_context= takes no initial_state and gives no final state; use cula.dist.cula_kda_cp")
    kwargs.pop("cu_seqlens", None)
    group, offsets = getattr(cp_context, "group", None), getattr(cp_context, "cu_seqlens", None)
    if group is None or offsets is None:
        raise ValueError(f"{who}: cp_context must have a group and cu_seqlens; it is {type(cp_context).__name__}")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    ranks = Ranks(resolve_group(who, "cp", group, size, rank, MESH_DIMS), size, rank)
    x = KdaInputs(q, k, v, g, beta, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None))
    with handshake.announced_refusal(who, ranks.group, device_of(q)):
        kernels = kda_kernels(who, x, kwargs)
        on_host = getattr(cp_context, "cu_seqlens_cpu", None)
        local = host_offsets(offsets if on_host is None else on_host, who)
        check_tokens(who, x, local[-1], "cp_context.cu_seqlens")
        share = Share(tuple(range(len(local) - 1)), local, *_reach(who, cp_context, rank, size))
        # FLA's ranks hold equally many tokens. A chain needs to know a rank's neighbours only.
        load = Load(size, 1, x.v.shape[2], x.q.shape[3], x.v.shape[3], x.q.shape[1], True, kernels.needs_grad)
        schedule = Schedule("chain", cheapest(load, "scan").blocks)
        signature = signature_of(x, kernels, ranks, Wishes(output_final_state=False, schedule=schedule), ())
        plan = Plan(kernels, Layout(share, (), (), size), schedule, False, False, False, signature)
    return run_plan(who, x, plan, ranks)


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
