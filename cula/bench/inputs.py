# SPDX-License-Identifier: Apache-2.0
"""The tensors of a case: random, never zeros, with gates as models have them.

| gate | log decay of a channel | how long a state lasts |
|---|---|---|
| `fast` | `-5 sigmoid(N(0, 1))` | about ten tokens |
| `slow` | `-5 sigmoid(N(0, 1) - 10)` | thousands of tokens |
| `init` | `-A softplus(N(0, 1) + b)`, A ~ U(1, 16), softplus(b) log-uniform in [1e-3, 1e-1] | how a Kimi model starts |
| `slopes` | Lightning: `-2^(-8 (h + 1) / HV)` | from two tokens to hundreds |

Without a flag the tensor comes as the kernel then needs it: log decays instead of raw gates, betas in (0, 1), unit q and k.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cula import reference
from cula.bench.cases import DTYPES, Case

LOWER_BOUND = -5.0
SLOW_BIAS = -10.0
SPARE_SLOTS = 3  # of a decode pool, so that slots and rows never coincide by accident


@dataclass
class Inputs:
    """Shapes as in `cula.contract`. For decode, B is N and `h0` is the pool, read through `state_indices`."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    decay: Tensor | None = None
    h0: Tensor | None = None
    cu_seqlens: Tensor | None = None  # int32
    state_indices: Tensor | None = None  # int32
    do: Tensor | None = None  # training: the gradient of o
    lower_bound: float | None = None

    @property
    def device(self) -> torch.device:
        return self.q.device

    def switches(self) -> dict[str, Any]:
        """The gate, norm and sigmoid keywords, by the names that cuLA and FLA share."""
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound,
            "use_gate_in_kernel": self.case.has("gate"),
            "use_beta_sigmoid_in_kernel": self.case.has("sigmoid"),
            "use_qk_l2norm_in_kernel": self.case.has("norm"),
        }

    def offsets(self, dtype: torch.dtype) -> Tensor:
        """cu_seqlens of the flattened tokens, for libraries that know only packed sequences."""
        return torch.tensor([0, *itertools.accumulate(self.case.lens)], dtype=dtype, device=self.device)

    def packed(self, t: Tensor) -> Tensor:
        """[B, T, ...] as [tokens, ...]."""
        return t.reshape(-1, *t.shape[2:])


def make(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """The tensors of a case; the same case and seed give the same values on the same kind of device."""
    gen = torch.Generator(device).manual_seed(seed)
    dtype = case.torch_dtype

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=gen, device=device, dtype=dtype)

    B, T = (1, case.T) if case.packed else (case.N, case.lens[0])
    q, k, v = normal(B, T, case.H, case.K), normal(B, T, case.H, case.K), normal(B, T, case.HV, case.V)
    if not (case.is_kda and case.has("norm")):
        q, k = (torch.nn.functional.normalize(t.float(), dim=-1).to(dtype) for t in (q, k))
    x = Inputs(case, q, k, v)
    if case.is_kda:
        _add_gate(x, gen)
        assert x.g is not None
        x.beta = normal(B, T, case.HV)
        if not case.has("sigmoid"):
            x.beta = x.beta.sigmoid()
    else:
        slopes = torch.arange(1, case.HV + 1, device=device, dtype=torch.float32)
        x.decay = torch.exp2(-8.0 * slopes / case.HV)
    if case.is_decode:
        slots = case.N + SPARE_SLOTS
        x.h0 = normal(slots, case.HV, case.V, case.K, dtype=DTYPES[case.pool])
        x.state_indices = torch.randperm(slots, generator=gen, device=device)[: case.N].to(torch.int32)
    elif case.has("h0"):
        x.h0 = normal(case.N, case.HV, case.V, case.K, dtype=torch.float32)
    if case.packed:
        x.cu_seqlens = x.offsets(torch.int32)
    if case.is_train:
        x.do = normal(B, T, case.HV, case.V)
    return x


def _add_gate(x: Inputs, gen: torch.Generator) -> None:
    """g, and the gate's parameters or the log decays they make."""
    case = x.case
    tail = (case.HV,) if case.has("scalar") else (case.HV, case.K)
    g = torch.randn((*x.q.shape[:2], *tail), generator=gen, device=x.device, dtype=case.torch_dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=gen, device=x.device)

    lower_bound: float | None = LOWER_BOUND
    A_log = 0.1 * (uniform(case.HV) - 0.5)
    dt_bias = 0.1 * (uniform(*tail) - 0.5)
    if case.gate == "slow":
        dt_bias = dt_bias + SLOW_BIAS
    elif case.gate == "init":
        lower_bound = None
        A_log = (1 + 15 * uniform(case.HV)).log()
        dt = (math.log(1e-3) + uniform(*tail) * (math.log(1e-1) - math.log(1e-3))).exp()
        dt_bias = dt + (-torch.expm1(-dt)).log()  # softplus(dt_bias) == dt
    if case.has("gate"):
        x.g, x.A_log, x.dt_bias, x.lower_bound = g, A_log, dt_bias, lower_bound
    else:
        x.g = reference.kda_gate(g, A_log, dt_bias, lower_bound).to(case.torch_dtype)
