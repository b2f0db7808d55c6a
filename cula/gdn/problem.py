# SPDX-License-Identifier: Apache-2.0
"""What a call of Gated DeltaNet is: its tensors, its options, what is checked of them, and the problem that describes it.

It is KDA with one gate a head instead of one a channel, and with one gate formula less: there is no bounded gate. So its checks
are KDA's, and `kda_problem` says which KDA call does the same, for backends whose KDA kernels take one gate a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core import checks
from cula.core.checks import IO_DTYPES
from cula.core.problem import DecodeOptions, Problem
from cula.kda.problem import (
    DIFFERENTIABLE,
    KdaDecodeInputs,
    KdaInputs,
    KdaOptions,
    KdaProblem,
    check_kda,
    check_kda_decode,
    check_kda_decode_values,
    check_kda_values,
)

__all__ = [
    "DIFFERENTIABLE",
    "GdnDecodeInputs",
    "GdnInputs",
    "GdnOptions",
    "GdnProblem",
    "by_kda",
    "check_gdn",
    "check_gdn_decode",
    "check_gdn_decode_values",
    "check_gdn_values",
    "kda_options",
    "kda_problem",
]


class GdnInputs(NamedTuple):
    """The tensors of a GDN call: those of `KdaInputs`, in the same order."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV]
    beta: Tensor  # [B, T, HV]
    A_log: Tensor | None = None  # [HV] float32 once checked; as models keep it, before
    dt_bias: Tensor | None = None  # [HV] float32; likewise
    initial_state: Tensor | None = None  # [N, HV, V, K] float32 once checked; bfloat16 or float16 before, as some pools are
    cu_seqlens: Tensor | None = None  # [N + 1] int32


class GdnOptions(NamedTuple):
    """The switches of a GDN call, by their public names."""

    scale: float | None = None  # None: K ** -0.5
    use_gate_in_kernel: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    output_final_state: bool = False
    return_intermediate_states: bool = False
    disable_recompute: bool = False
    null_is_nonpositive: bool = False  # `null_index="nonpositive"`
    batch_invariant: bool = False


@dataclass(frozen=True, kw_only=True)
class GdnProblem(Problem):
    """Everything about a GDN call but its data."""

    family = "gdn"

    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    options: GdnOptions

    @property
    def gate(self) -> str:
        """Which formula makes the log decay: `"log"` (g is it already) or `"softplus"`."""
        return "softplus" if self.options.use_gate_in_kernel else "log"


def kda_options(options: GdnOptions) -> KdaOptions:
    return KdaOptions(**options._asdict())


@functools.lru_cache(maxsize=1024)
def kda_problem(problem: GdnProblem) -> KdaProblem:
    """The KDA call, with one gate a head, that does the same."""
    return KdaProblem(**vars(problem) | {"options": kda_options(problem.options), "has_scalar_gate": True})


def by_kda(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel function of KDA (`core/kernels.py`) as the function of GDN that takes the same arguments."""

    @functools.wraps(kernel)
    def of_gdn(problem: GdnProblem, x: GdnInputs, *rest: Any) -> Any:
        return kernel(kda_problem(problem), KdaInputs(*x), *rest)

    return of_gdn


def check_gdn(x: GdnInputs, options: GdnOptions, who: str = "cula_gdn") -> tuple[GdnProblem, GdnInputs]:
    """Validate a GDN call; return its problem and its tensors, normalised (int32 offsets, unit last strides, float32 states)."""
    if checks.rank_of(who, "g", x.g) == 4:
        raise ValueError(
            f"{who}: g has shape {checks.shape_of(x.g)}, one gate a channel; the gated delta rule has one a head, [B, T, HV]: "
            "use cula_kda for gates [B, T, HV, K]"
        )
    _check_has_rates(who, options, x.A_log)
    if x.initial_state is not None:
        checks.check_tensor(who, "initial_state", x.initial_state)
        checks.check_dtype(who, "initial_state", x.initial_state, IO_DTYPES)
        x = x._replace(initial_state=x.initial_state.float())
    of_kda, normalised = check_kda(KdaInputs(*x), kda_options(options), who)
    fields = {name: value for name, value in vars(of_kda).items() if name != "has_scalar_gate"}
    return GdnProblem(**fields | {"options": options}), GdnInputs(*normalised)


def check_gdn_values(x: GdnInputs, problem: GdnProblem, who: str = "cula_gdn") -> None:
    """The checks that read data: NaN and Inf, the sign of a log decay. Synchronises on a GPU."""
    check_kda_values(KdaInputs(*x), kda_problem(problem), who)


# Decode: the tensors are those of KDA, with g [N, T, HV] and dt_bias [HV]

GdnDecodeInputs = KdaDecodeInputs
check_gdn_decode_values = check_kda_decode_values


def check_gdn_decode(
    x: GdnDecodeInputs, options: DecodeOptions, dims: Any, who: str
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Validate the tensors that are GDN's own; return them normalised, and the fields of the problem that follow from them."""
    checks.check_given(who, "gdn", g=x.g, beta=x.beta)
    assert x.g is not None
    if checks.rank_of(who, "g", x.g) == 4:
        raise ValueError(
            f"{who}: g has shape {checks.shape_of(x.g)}, one gate a channel; mode 'gdn' has one a head, "
            f"{dims.lead_name}, HV]: use mode='kda'"
        )
    _check_has_rates(who, options, x.A_log)
    return check_kda_decode(x, options, dims, who)


def _check_has_rates(who: str, options: GdnOptions | DecodeOptions, A_log: Tensor | None) -> None:
    """KDA's gate may do without, where it has a bound."""
    if options.use_gate_in_kernel and A_log is None:
        raise ValueError(f"{who}: use_gate_in_kernel=True needs A_log [HV], which is None")
