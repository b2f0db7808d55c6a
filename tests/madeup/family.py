# SPDX-License-Identifier: Apache-2.0
"""The family: inputs, options, checks, level 1, level 2, transition, decode, benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core import checks
from cula.core.family import Decode, Family, Transition
from cula.core.pool import Serving
from cula.core.prefill import prefill
from cula.core.problem import Problem, describe_tokens, normalise_tokens
from cula.core.reference import first_state, sequences, stack
from cula.dist.cp import cp_call
from cula.dist.plan import CpOptions


class FadingInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    rate: Tensor  # [B, T, HV]
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None


class FadingOptions(NamedTuple):
    scale: float | None = None
    strength: int = 1  # of the rate
    double: bool = False  # twice the rate
    output_final_state: bool = False


@dataclass(frozen=True, kw_only=True)
class FadingProblem(Problem):
    family = "fading"

    @property
    def factor(self) -> int:
        return self.options.strength * (2 if self.options.double else 1)


def check(x, options, who):
    tokens = describe_tokens(x, options, who, ("q", "k", "v"), FAMILY.differentiable)
    checks.check_shape(who, "rate", x.rate, "[B, T, HV]", (tokens["B"], tokens["T"], tokens["HV"]))
    return FadingProblem(**tokens), normalise_tokens(x, rate=x.rate.contiguous())


def check_values(x, problem, who):
    if bool((x.rate < 0).any()):
        raise ValueError(f"{who}: rate holds a negative number")


class FadingDecodeInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor
    state_indices: Tensor | None = None
    rate: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    intermediate_states: Tensor | None = None
    intermediate_state_indices: Tensor | None = None
    cu_seqlens: Tensor | None = None
    out: Tensor | None = None


def check_decode(x, options, dims, who):
    if x.rate is None:
        raise ValueError(f"{who}: mode 'fading' needs rate=")
    checks.check_shape(who, "rate", x.rate, dims.lead_name + ", HV]", (*dims.lead, dims.HV))
    return {"rate": x.rate}, {}


FAMILY = Family(
    name="fading",
    entry="tests.madeup.family:cula_fading",
    Inputs=FadingInputs,
    Options=FadingOptions,
    check=check,
    check_values=check_values,
    differentiable=("q", "k", "v", "rate", "initial_state"),
    token_inputs=("q", "k", "v", "rate"),
    value_head_dims={"v": 2, "rate": 2, "initial_state": 1},
    transition=Transition(is_dense=False),
    decode=Decode(FadingDecodeInputs, check_decode, lambda x, problem, who: None),
    bench="tests.madeup.bench",
)


def cula_fading(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    *,
    scale: float | None = None,
    strength: int = 1,
    double: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    out: Tensor | None = None,
    device: Any = None,
    backend: str = "auto",
    **kwargs: Any,
):
    serving = Serving(out, state_pool, initial_state_indices)
    options = FadingOptions(scale, strength, double, output_final_state)
    x = FadingInputs(q, k, v, rate, initial_state, cu_seqlens)
    return prefill(FAMILY, x, options, serving, device=device, backend=backend, extra=kwargs)


def cula_fading_cp(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, *, sp_group: Any, sp_size: int, sp_rank: int, **kwargs: Any):
    x, cp = FadingInputs(q, k, v, rate), CpOptions.taken_from(kwargs)
    return cp_call(FAMILY, x, (sp_group, sp_size, sp_rank), cp, kwargs, "cula_fading_cp")


def reference(q, k, v, rate, *, scale=None, initial_state=None, cu_seqlens=None):
    """The definition in float64."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, v, rate = q.double() * (K**-0.5 if scale is None else scale), k.double(), v.double(), rate.double()
    outputs, states = [], []
    for row, start, end in sequences(B, T, cu_seqlens):
        S = first_state(initial_state, len(states), HV, V, K, q.device)
        for t in range(start, end):
            q_t, k_t = (x[row, t].repeat_interleave(HV // H, dim=0) for x in (q, k))
            S = S * torch.exp(-rate[row, t])[:, None, None] + v[row, t][:, :, None] * k_t[:, None, :]
            outputs.append((S * q_t[:, None, :]).sum(-1))
        states.append(S)
    return stack(outputs, B, T, HV, V, q), torch.stack(states)
