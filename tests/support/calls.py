# SPDX-License-Identifier: Apache-2.0
"""Random calls with known answers: inputs by description, and the tolerance each dtype deserves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# Relative error against float64 on the same (rounded) inputs. float32 is the torch backend's promise.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class KdaCall:
    """A KDA call to be made. `lens` packs sequences; `decay` scales the log decays of a gate that is not in-kernel."""

    T: int = 70
    B: int = 1
    H: int = 1
    HV: int = 2
    K: int = 32
    V: int = 32
    lens: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    gate: str = "log"  # "log", "softplus", "bounded"
    decay: float = 1.0
    scalar_gate: bool = False
    norm: bool = False
    beta: str = "plain"  # "plain", "one", "two" (up to two, post-sigmoid), "sigmoid", "negative"
    same_keys: bool = False
    initial_state: bool = True
    final_state: bool = True
    safe_gate: bool = False
    no_A_log: bool = False
    gate_dtype: torch.dtype | None = None
    parameter_dtype: torch.dtype = torch.float32  # of A_log, dt_bias and the initial state
    scale: float | None = None
    seed: int = 0

    def with_(self, **changes: Any) -> KdaCall:
        return replace(self, **changes)

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor | None]:
        gen = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen)

        B, T = self.B, self.T if self.lens is None else sum(self.lens)
        N = B if self.lens is None else len(self.lens)
        q, k, v = normal(B, T, self.H, self.K), normal(B, T, self.H, self.K), normal(B, T, self.HV, self.V)
        if self.same_keys:
            k = k[:, :1].expand_as(k).clone()
        if not self.norm:
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        gate_shape = (B, T, self.HV) if self.scalar_gate else (B, T, self.HV, self.K)
        g = normal(*gate_shape) if self.gate != "log" else -self.decay * torch.rand(gate_shape, generator=gen)
        beta = normal(B, T, self.HV)
        if self.beta == "plain":
            beta = beta.sigmoid()
        elif self.beta == "one":
            beta = torch.ones_like(beta)
        elif self.beta == "two":
            beta = 2 * beta.sigmoid()
        in_kernel = self.gate != "log"
        bias_shape = (self.HV,) if self.scalar_gate else (self.HV, self.K)
        out: dict[str, Tensor | None] = {
            "q": q.to(self.dtype),
            "k": k.to(self.dtype),
            "v": v.to(self.dtype),
            "g": g.to(self.gate_dtype or torch.float32),
            "beta": beta.to(self.gate_dtype or torch.float32),
            "A_log": torch.rand(self.HV, generator=gen) - 0.5 if in_kernel and not self.no_A_log else None,
            "dt_bias": normal(*bias_shape) if in_kernel else None,
            "initial_state": normal(N, self.HV, self.V, self.K) if self.initial_state else None,
            "cu_seqlens": None,
        }
        for name in ("A_log", "dt_bias", "initial_state"):
            out[name] = None if (t := out[name]) is None else t.to(self.parameter_dtype)
        if self.lens is not None:
            out["cu_seqlens"] = torch.tensor([0, *self.lens]).cumsum(0).to(torch.int32)
        return {name: None if t is None else t.to(device) for name, t in out.items()}

    def switches(self) -> dict[str, Any]:
        """The keywords that the reference takes too."""
        return {
            "use_gate_in_kernel": self.gate != "log",
            "lower_bound": -5.0 if self.gate == "bounded" else None,
            "use_qk_l2norm_in_kernel": self.norm,
            "use_beta_sigmoid_in_kernel": self.beta in ("sigmoid", "negative"),
            "allow_neg_eigval": self.beta == "negative",
            "scale": self.scale,
        }

    def __str__(self) -> str:
        default = type(self)()
        changed = [f"{n}={v}" for n, v in vars(self).items() if v != getattr(default, n)]
        return ",".join(changed).replace("torch.", "").replace(" ", "") or "plain"


@dataclass(frozen=True)
class LightningCall:
    """A Lightning call to be made."""

    T: int = 70
    B: int = 1
    H: int = 1
    HV: int = 2
    K: int = 32
    V: int = 32
    lens: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    decay: float = 0.5
    initial_state: bool = True
    seed: int = 0

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor | None]:
        gen = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen)

        B, T = self.B, self.T if self.lens is None else sum(self.lens)
        N = B if self.lens is None else len(self.lens)
        out: dict[str, Tensor | None] = {
            "q": normal(B, T, self.H, self.K).to(self.dtype),
            "k": normal(B, T, self.H, self.K).to(self.dtype),
            "v": normal(B, T, self.HV, self.V).to(self.dtype),
            "decay": self.decay * torch.arange(self.HV) / self.HV,  # the first head never forgets
            "initial_state": normal(N, self.HV, self.V, self.K) if self.initial_state else None,
            "cu_seqlens": None,
        }
        if self.lens is not None:
            out["cu_seqlens"] = torch.tensor([0, *self.lens]).cumsum(0).to(torch.int32)
        return {name: None if t is None else t.to(device) for name, t in out.items()}

    with_ = KdaCall.with_
    __str__ = KdaCall.__str__


@dataclass(frozen=True)
class GdnCall(KdaCall):
    """A GDN call to be made: KDA's with one gate a head, and no bound."""

    scalar_gate: bool = True

    def switches(self) -> dict[str, Any]:
        return {name: value for name, value in super().switches().items() if name != "lower_bound"}
