# SPDX-License-Identifier: Apache-2.0
"""Level 2 of Kimi Delta Attention: `cula.dist` has these. See there for what every rank holds before and after."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cula.dist.cost import Schedule
from cula.dist.cp import cp_call, tp_cp_call
from cula.dist.plan import CpOptions
from cula.dist.tp import TpOptions, tp_call
from cula.kda.family import FAMILY
from cula.kda.problem import KdaInputs


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
    tp = TpOptions(tp_group, tp_size, tp_rank, input_is_parallel, gather_output, nvshmem_backend)
    return tp_call(FAMILY, KdaInputs(q, k, v, g, beta), tp, kwargs, "cula_kda_tp")


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
        cp_mode: "ring" hands the state on, one rank after another; "scan" lets all ranks make the transitions of their
            tokens at once, and scans those; "auto" takes the cheaper by `cula.dist.cost`.
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
    x = KdaInputs(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    cp = CpOptions(cp_mode, sp_mode, output_final_state, broadcast_final_state, schedule)
    kwargs["nvshmem_backend"] = nvshmem_backend
    return cp_call(FAMILY, x, (sp_group, sp_size, sp_rank), cp, kwargs, "cula_kda_cp")


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
    tp = TpOptions(tp_group, tp_size, tp_rank, input_is_parallel, gather_output)
    return tp_cp_call(FAMILY, KdaInputs(q, k, v, g, beta), tp, (sp_group, sp_size, sp_rank), kwargs, "cula_kda_tp_cp")
