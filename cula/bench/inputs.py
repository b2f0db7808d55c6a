# SPDX-License-Identifier: Apache-2.0
"""The tensors of a case: random, never zeros, with gates as models have them (a family's `bench.py` lists those).

Without a flag the tensor comes as the kernel then needs it: log decays instead of raw gates, betas in (0, 1), unit q and k.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cula.bench.cases import DTYPES, Case
from cula.bench.family import bench_of
from cula.core.constants import L2_NORM_EPS

SPARE_SLOTS = 3  # of a decode pool, so that slots and rows never coincide by accident


@dataclass
class Inputs:
    """Shapes as in a family's inputs. For decode, B is N and `h0` is the pool, read through `state_indices`; for a prefill on a
    pool, `h0` is the slots' states in the order of the sequences, and `pool()` makes one.

    Gates, betas and decays are None where a family has none; what has no field here is in `own`.
    """

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
    own: dict[str, Tensor] = field(default_factory=dict)

    def leaves(self) -> dict[str, Tensor | None]:
        """The tensors that training differentiates, by name."""
        return {name: self.tensor(name) for name in bench_of(self.case.family).leaves}

    def tensor(self, name: str) -> Tensor | None:
        return self.own[name] if name in self.own else getattr(self, name)

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

    def pool(self) -> Tensor:
        """A pool with the first states of a prefill in their slots."""
        assert self.h0 is not None and self.state_indices is not None
        pool = self.h0.new_zeros((len(self.h0) + SPARE_SLOTS, *self.h0.shape[1:]))
        pool[self.state_indices.long()] = self.h0
        return pool

    def packed(self, t: Tensor) -> Tensor:
        """[B, T, ...] as [tokens, ...]."""
        return t.reshape(-1, *t.shape[2:])


@dataclass
class Random:
    """Random tensors of one case, in the order in which they are asked for."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)


def make(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """The tensors of a case; the same case and seed give the same values on the same kind of device."""
    random = Random(torch.Generator(device).manual_seed(seed), device, case.torch_dtype)
    B, T = (1, case.T) if case.packed else (case.N, case.lens[0])
    q, k = random.normal(B, T, case.H, case.K), random.normal(B, T, case.H, case.K)
    x = Inputs(case, q, k, random.normal(B, T, case.HV, case.V))
    bench_of(case.family).add_inputs(x, random)
    if case.has("f32"):
        x.g, x.beta = (None if t is None else t.float() for t in (x.g, x.beta))
    if case.has("bias") and x.dt_bias is not None:
        x.dt_bias = x.dt_bias.to(case.torch_dtype)
    if case.is_decode:
        slots = case.N + SPARE_SLOTS
        x.h0 = random.normal(slots, case.HV, case.V, case.K, dtype=DTYPES[case.pool])
        x.state_indices = torch.randperm(slots, generator=random.generator, device=device)[: case.N].to(torch.int32)
    elif case.has("h0") or case.has("pool"):
        x.h0 = random.normal(case.N, case.HV, case.V, case.K, dtype=DTYPES[case.pool])
    if case.has("pool"):
        x.state_indices = torch.randperm(case.N + SPARE_SLOTS, generator=random.generator, device=device)[: case.N].to(
            torch.int32
        )
    if case.packed:
        x.cu_seqlens = x.offsets(torch.int32)
    if case.is_train:
        x.do = random.normal(B, T, case.HV, case.V)
    return x


def recurrence_operands(case: Case, at: dict[str, Tensor], has_norm: bool) -> tuple[Tensor, Tensor]:
    """q times the scale and k of a slice in float64, as each of its value heads reads them, [tokens, hv, K]; normalised where the
    kernel does that."""
    q, k = at["q"], at["k"]
    if has_norm:
        q, k = (t / (t.square().sum(-1, keepdim=True) + L2_NORM_EPS).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(case.HV // case.H, dim=1) for t in (q * case.K**-0.5, k))
    return q, k


def normalise(x: Inputs) -> None:
    """Unit q and k, for families and flags that do not normalise in the kernel."""
    x.q, x.k = (torch.nn.functional.normalize(t.float(), dim=-1).to(t.dtype) for t in (x.q, x.k))
