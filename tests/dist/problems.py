# SPDX-License-Identifier: Apache-2.0
"""Small whole problems, their float64 answers and gradients, and what each rank should hold of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cula import dist as cula_dist
from cula import reference
from cula.core.family import FAMILIES
from cula.dist.varlen import packed_layout, split_bounds
from cula.reference import relative_error

TOKENS = {"kda": ("q", "k", "v", "g", "beta"), "gdn": ("q", "k", "v", "g", "beta"), "lightning": ("q", "k", "v")}


@dataclass(frozen=True)
class Spec:
    """A call, seen from outside the ranks. `lengths` of packed sequences, or `slices`: tokens of each rank's slice."""

    family: str = "kda"
    lengths: tuple[int, ...] | None = None
    slices: tuple[int, ...] | None = None
    B: int = 1
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 12
    has_h0: bool = False
    state_dtype: torch.dtype = torch.float32  # of initial_state
    scalar_gate: bool = False
    gate: str = "log"  # "bounded", "softplus"
    decay: float = 0.05  # size of the log decays: small, so that what crosses ranks matters
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)  # to the call on ranks

    @property
    def T(self) -> int:
        return sum(self.lengths if self.lengths is not None else self.slices or ())

    @property
    def N(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.lengths is None else torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()])


def make(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of the whole call."""
    gen = torch.Generator().manual_seed(seed)
    s = spec

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    x = {"q": rand(s.B, s.T, s.H, s.K), "k": rand(s.B, s.T, s.H, s.K), "v": rand(s.B, s.T, s.HV, s.V)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    if s.family != "lightning":
        shape = (s.B, s.T, s.HV) if s.scalar_gate or s.family == "gdn" else (s.B, s.T, s.HV, s.K)
        x["g"] = rand(*shape) - 4 if s.gate != "log" else -s.decay * torch.rand(*shape, generator=gen)
        x["beta"] = rand(s.B, s.T, s.HV) if s.gate != "log" else torch.rand(s.B, s.T, s.HV, generator=gen)
        if s.gate != "log":
            x["A_log"] = 0.3 * rand(s.HV)
            x["dt_bias"] = 0.3 * rand(*shape[2:])
    else:
        x["decay"] = torch.linspace(0.02, 0.3, s.HV)
    x = {name: t if name in ("A_log", "dt_bias", "decay") else t.to(s.dtype) for name, t in x.items()}
    if s.has_h0:
        x["initial_state"] = rand(s.N, s.HV, s.V, s.K).to(s.state_dtype)
    return x


def operator_options(spec: Spec) -> dict[str, Any]:
    if spec.gate == "log":
        return {}
    options = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return options | ({"lower_bound": -3.0} if spec.gate == "bounded" else {})


def answer(spec: Spec, x: dict[str, Tensor], weights: tuple[Tensor, Tensor], single: bool = False) -> dict[str, Tensor]:
    """o, final_state and all gradients of (o w_o + final_state w_s): in float64, or by one process with `single`."""
    x = {name: t.detach().clone().requires_grad_(name != "decay") for name, t in x.items()}
    named = {name: x[name] for name in ("A_log", "dt_bias", "initial_state") if name in x}
    named |= {"cu_seqlens": spec.cu_seqlens, **operator_options(spec)}
    tokens = [x[name] for name in TOKENS[spec.family]] + ([x["decay"]] if spec.family == "lightning" else [])
    if single:
        o, state = FAMILIES[spec.family].load_entry()(*tokens, output_final_state=True, **named)
    else:
        o, state = getattr(reference, spec.family)(*tokens, **named)
    ((o * weights[0]).sum() + (state * weights[1]).sum()).backward()
    out = {"o": o.detach(), "final_state": state.detach()}
    return out | {"d" + name: t.grad for name, t in x.items() if t.grad is not None}


def token_index(spec: Spec, rank: int, world: int) -> Tensor:
    """The tokens of the whole call that a rank holds, in its order."""
    if spec.lengths is None:
        assert spec.slices is not None
        first = sum(spec.slices[:rank])
        return torch.arange(first, first + spec.slices[rank])
    assert spec.cu_seqlens is not None
    offsets = tuple(spec.cu_seqlens.tolist())
    if spec.options.get("sp_mode") == "split":
        return torch.arange(*split_bounds(offsets[-1], rank, world))
    ids = packed_layout(offsets, "complete", rank, world).share.ids
    return torch.cat([torch.arange(offsets[n], offsets[n + 1]) for n in ids] or [torch.arange(0)])


def check_cp(
    spec: Spec, rank: int, world: int, device: str = "cpu", group: Any = None, tolerance: float = 2e-5
) -> dict[str, float]:
    """Run a call on ranks and compare o, final_state and every gradient with float64; returns relative errors.

    Each rank's loss is its part of o (weighted) and, where it has one, final_state (weighted; a share of the weight on
    every rank when it is broadcast).
    """
    gen = torch.Generator().manual_seed(7)
    w_o = torch.randn(spec.B, spec.T, spec.HV, spec.V, generator=gen)
    w_s = torch.randn(spec.N, spec.HV, spec.V, spec.K, generator=gen)
    if not spec.options.get("output_final_state", True):
        w_s.zero_()
    whole = make(spec)
    want = answer(spec, whole, (w_o, w_s))
    index = token_index(spec, rank, world)
    is_broadcast = spec.options.get("broadcast_final_state", False)

    leaves = {}
    for name, t in whole.items():
        part = t[:, index] if name in TOKENS[spec.family] else t
        leaves[name] = part.to(device).clone().requires_grad_(name != "decay")
    if spec.lengths is None and rank != 0:
        leaves.pop("initial_state", None)
    named = {name: leaves[name] for name in ("A_log", "dt_bias", "initial_state") if name in leaves}
    named |= {"cu_seqlens": spec.cu_seqlens, **operator_options(spec), **spec.options}
    tokens = [leaves[name] for name in TOKENS[spec.family]] + ([leaves["decay"]] if spec.family == "lightning" else [])
    function = getattr(cula_dist, f"cula_{spec.family}_cp")
    o, state = function(*tokens, sp_group=group, sp_size=world, sp_rank=rank, **named)

    has_state = spec.options.get("output_final_state", True) and (is_broadcast or rank == world - 1)
    assert (state is not None) == has_state
    loss = (o * w_o[:, index].to(device)).sum()
    if state is not None:
        share = (rank + 1) / (world * (world + 1) / 2) if is_broadcast else 1.0
        loss = loss + share * (state * w_s.to(device)).sum()
    loss.backward()

    errors = {"o": _error(o, want["o"][:, index])}
    if state is not None:
        errors["final_state"] = _error(state, want["final_state"])
    for name, leaf in leaves.items():
        if name in TOKENS[spec.family]:
            whole_scale = want["d" + name].abs().max()
            got = leaf.grad.double().cpu()
            errors["d" + name] = float((got - want["d" + name][:, index]).abs().max() / whole_scale) if len(index) else 0.0
        elif name in ("A_log", "dt_bias"):
            total = leaf.grad.cpu()
            dist.all_reduce(total)
            errors["d" + name] = relative_error(total, want["d" + name])
    if "initial_state" in leaves and rank == 0:
        got, exact = leaves["initial_state"].grad.cpu(), want["dinitial_state"]
        assert got.dtype == spec.state_dtype
        if spec.state_dtype != torch.float32:  # two roundings of nearly the same number may be neighbours
            step = torch.finfo(spec.state_dtype).eps * exact.double().abs()
            exact = torch.where((got - exact).double().abs() <= step, got, exact)
        errors["dinitial_state"] = relative_error(got, exact)
    one = answer(spec, whole, (w_o, w_s), single=True)
    errors["o of one process"] = _error(o, one["o"][:, index])
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < tolerance, f"{worst} is off by {errors[worst]:.2e}: {errors}"
    return errors


def _error(got: Tensor, want: Tensor) -> float:
    return relative_error(got.cpu(), want) if got.numel() else 0.0
