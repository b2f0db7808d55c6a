# SPDX-License-Identifier: Apache-2.0
"""Level 2 of Lightning Attention: `cula.dist` has these. See there for what every rank holds before and after."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cula.core.checks import one_of
from cula.dist.cost import Schedule
from cula.dist.cp import cp_call, tp_cp_call
from cula.dist.plan import CpOptions
from cula.dist.tp import TpOptions, tp_call
from cula.lightning.family import FAMILY
from cula.lightning.problem import LightningInputs


def cula_lightning_tp(
    Q: Tensor | None = None,
    K: Tensor | None = None,
    V: Tensor | None = None,
    decay: Tensor | None = None,
    *,
    tp_group: Any = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    input_is_parallel: bool = False,
    gather_output: bool = False,
    nvshmem_backend: bool = False,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """`cula_lightning` with its heads shared out over the ranks of a group; arguments as in `cula_kda_tp`, q, k and v by either
    spelling."""
    tp = TpOptions(tp_group, tp_size, tp_rank, input_is_parallel, gather_output, nvshmem_backend)
    x = _inputs("cula_lightning_tp", Q, K, V, decay, q, k, v)
    return tp_call(FAMILY, x, tp, kwargs, "cula_lightning_tp")


def cula_lightning_cp(
    Q: Tensor | None = None,
    K: Tensor | None = None,
    V: Tensor | None = None,
    decay: Tensor | None = None,
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
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`cula_lightning` over sequences whose tokens lie on several ranks; arguments as in `cula_kda_cp`, q, k and v by either
    spelling."""
    cp = CpOptions(cp_mode, sp_mode, output_final_state, broadcast_final_state, schedule)
    kwargs["nvshmem_backend"] = nvshmem_backend
    x = _inputs("cula_lightning_cp", Q, K, V, decay, q, k, v)._replace(initial_state=initial_state, cu_seqlens=cu_seqlens)
    return cp_call(FAMILY, x, (sp_group, sp_size, sp_rank), cp, kwargs, "cula_lightning_cp")


def cula_lightning_tp_cp(
    Q: Tensor | None = None,
    K: Tensor | None = None,
    V: Tensor | None = None,
    decay: Tensor | None = None,
    *,
    tp_group: Any,
    sp_group: Any,
    tp_size: int,
    sp_size: int,
    tp_rank: int,
    sp_rank: int,
    input_is_parallel: bool = False,
    gather_output: bool = False,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`cula_lightning_cp` on this rank's heads; see `cula_kda_tp_cp`. q, k and v go by either spelling."""
    tp = TpOptions(tp_group, tp_size, tp_rank, input_is_parallel, gather_output)
    x = _inputs("cula_lightning_tp_cp", Q, K, V, decay, q, k, v)
    return tp_cp_call(FAMILY, x, tp, (sp_group, sp_size, sp_rank), kwargs, "cula_lightning_tp_cp")


def _inputs(who: str, Q: Any, K: Any, V: Any, decay: Any, q: Any, k: Any, v: Any) -> LightningInputs:
    """The tensors of a call by either of their names, as `cula_lightning` takes them."""
    pairs: tuple[dict[str, Any], ...] = ({"Q": Q, "q": q}, {"K": K, "k": k}, {"V": V, "v": v}, {"decay": decay})
    return LightningInputs(*(one_of(who, pair) for pair in pairs))
