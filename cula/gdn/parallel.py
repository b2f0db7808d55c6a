# SPDX-License-Identifier: Apache-2.0
"""Level 2 of Gated DeltaNet: `cula.dist` has these. See there for what every rank holds before and after."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cula.dist.cost import Schedule
from cula.dist.cp import cp_call, tp_cp_call
from cula.dist.plan import CpOptions
from cula.dist.tp import TpOptions, tp_call
from cula.gdn.family import FAMILY
from cula.gdn.problem import GdnInputs


def cula_gdn_tp(
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
    """`cula_gdn` with its heads shared out over the ranks of a group.

    Arguments, results and gradients are those of `cula_kda_tp`, with `cula_gdn` in the place of `cula_kda`.

    Example:
        >>> o, state = cula_gdn_tp(q, k, v, g, beta, tp_group=group, tp_size=2, tp_rank=rank)  # doctest: +SKIP
    """
    tp = TpOptions(tp_group, tp_size, tp_rank, input_is_parallel, gather_output, nvshmem_backend)
    return tp_call(FAMILY, GdnInputs(q, k, v, g, beta), tp, kwargs, "cula_gdn_tp")


def cula_gdn_cp(
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
    """`cula_gdn` over sequences whose tokens lie on several ranks.

    Arguments, results and gradients are those of `cula_kda_cp`, with `cula_gdn` in the place of `cula_kda`; `initial_state` may
    be float32, bfloat16 or float16.

    Example:
        >>> o, state = cula_gdn_cp(q, k, v, g, beta, sp_group=group, sp_size=4, sp_rank=rank)  # doctest: +SKIP
    """
    x = GdnInputs(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    cp = CpOptions(cp_mode, sp_mode, output_final_state, broadcast_final_state, schedule)
    kwargs["nvshmem_backend"] = nvshmem_backend
    return cp_call(FAMILY, x, (sp_group, sp_size, sp_rank), cp, kwargs, "cula_gdn_cp")


def cula_gdn_tp_cp(
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
    """`cula_gdn_cp` on this rank's heads: heads shared out over `tp_group`, tokens over `sp_group`.

    Arguments and results are those of `cula_kda_tp_cp`, with `cula_gdn_cp` in the place of `cula_kda_cp`.
    """
    tp = TpOptions(tp_group, tp_size, tp_rank, input_is_parallel, gather_output)
    return tp_cp_call(FAMILY, GdnInputs(q, k, v, g, beta), tp, (sp_group, sp_size, sp_rank), kwargs, "cula_gdn_tp_cp")
