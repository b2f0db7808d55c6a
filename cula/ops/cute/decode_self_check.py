# SPDX-License-Identifier: Apache-2.0
"""The calls that a decode kernel without a recorded run on hardware is tried with: see `toolchain/self_check.py`.

Each kernel takes every gate and dtype of tokens, so all of those are among its calls: rows with slots, padding and no slots at
all, grouped heads, as many tokens as the kernel has and one fewer. Slots that no row names must stay as they are. A kernel that
goes token by token keeps the states of all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.decode_checks import describe_decode
from cula.core.family import FAMILIES
from cula.core.problem import DecodeOptions, DecodeProblem
from cula.ops.cute import decode
from cula.ops.cute.toolchain.self_check import relative_difference

D, SLOTS = 128, 4


class Kernel(NamedTuple):
    """What a kernel's name says about its calls."""

    family: str
    tokens: int
    keeps: bool  # states after each token
    pool: torch.dtype
    takes_scalar_gates: bool
    takes_channel_gates: bool

    @classmethod
    def of(cls, name: str) -> Kernel:
        _, tokens, pool, *rest = name.split("_")
        dtype = {short: dtype for dtype, short in decode.SHORT.items()}[pool]
        family, is_scalar = "lightning" if "lightning" in rest else "kda", "scalar" in rest
        if tokens == "steps":  # for any number of them, with one gate a head in a kernel of its own
            return cls(family, 3, True, dtype, is_scalar, not is_scalar)
        return cls(family, int(tokens), False, dtype, is_scalar or int(tokens) > 1, not is_scalar)


class Call(NamedTuple):
    slots: tuple[int, ...] | None  # of each row; None: rows have the slots in order
    gate: str  # "bounded", "softplus", "log"
    is_scalar: bool  # one gate a head, where the kernel takes such
    H: int = 1
    HV: int = 2
    fewer: int = 0  # tokens than the kernel has, where it has several
    g: torch.dtype = torch.bfloat16
    beta: torch.dtype = torch.float32
    parameters: torch.dtype = torch.float32
    indices: torch.dtype = torch.int32
    zero_is_null: bool = False
    is_normalised: bool = True
    has_raw_beta: bool = True


CALLS = (
    Call((2, -1, 0), "bounded", is_scalar=False),
    Call(
        (0, 3, 1), "softplus", is_scalar=True, fewer=1, g=torch.float32, parameters=torch.bfloat16, indices=torch.int64,
        zero_is_null=True,
    ),
    Call(None, "log", is_scalar=False, H=2, beta=torch.bfloat16, is_normalised=False, has_raw_beta=False),
)  # fmt: skip


def make(call: Call, kernel: Kernel, device: torch.device, sm: tuple[int, int]) -> tuple[DecodeProblem, Any]:
    """A call of a kernel's family, on random tokens and states."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    N, T, H, HV = SLOTS if call.slots is None else len(call.slots), kernel.tokens, call.H, call.HV
    T = max(T - call.fewer, min(T, 2))
    q, k, v = normal(N, T, H, D), normal(N, T, H, D), normal(N, T, HV, D)
    if not call.is_normalised:
        q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    tensors: dict[str, Tensor | None] = {name: t.bfloat16() for name, t in (("q", q), ("k", k), ("v", v))}
    tensors["state"] = normal(SLOTS, HV, D, D).to(kernel.pool)
    tensors["state_indices"] = None if call.slots is None else torch.tensor(call.slots, dtype=call.indices)
    if kernel.keeps:
        tensors["intermediate_states"] = torch.zeros(N, T, HV, D, D, dtype=kernel.pool)
    is_raw, has_gates = call.gate != "log", kernel.family != "lightning"
    if has_gates:
        is_scalar = kernel.takes_scalar_gates and (call.is_scalar or not kernel.takes_channel_gates)
        of_gate = () if is_scalar else (D,)
        g, beta = normal(N, T, HV, *of_gate), normal(N, T, HV)
        tensors["g"] = (g if is_raw else -5.0 * torch.sigmoid(g)).to(call.g)
        tensors["beta"] = (beta if call.has_raw_beta else torch.sigmoid(beta)).to(call.beta)
        tensors["A_log"] = (0.1 * normal(HV)).to(call.parameters) if is_raw else None
        tensors["dt_bias"] = (0.1 * normal(HV, *of_gate)).to(call.parameters) if is_raw else None
    else:
        tensors["decay"] = 0.3 * torch.rand(HV, generator=random)
    options = DecodeOptions(
        lower_bound=-5.0 if has_gates and call.gate == "bounded" else None,
        use_gate_in_kernel=has_gates and is_raw,
        use_qk_l2norm_in_kernel=call.is_normalised,
        use_beta_sigmoid_in_kernel=has_gates and call.has_raw_beta,
        null_is_nonpositive=call.zero_is_null,
    )
    family = FAMILIES[kernel.family]
    assert family.decode is not None
    moved = {name: None if t is None else t.to(device) for name, t in tensors.items()}
    request = describe_decode(family, family.decode.Inputs(**moved), options, None, "self-check")
    return dataclasses.replace(request.problem, sm=sm), request.x


def worst_error(name: str, device: torch.device, sm: tuple[int, int]) -> float:
    """The largest relative difference, of outputs and pools after the calls."""
    from cula.ops.torch.kda import kda_decode
    from cula.ops.torch.lightning import lightning_decode

    kernel, worst = Kernel.of(name), 0.0
    for call in CALLS:
        p, x = make(call, kernel, device, sm)
        out = torch.full((p.N, p.T, p.HV, D), torch.nan, dtype=p.dtype, device=device)
        own, right = (x._replace(**{key: getattr(x, key).clone() for key in written(kernel)}) for _ in range(2))
        decode.run(p, own._replace(out=out), name)
        want = (lightning_decode if kernel.family == "lightning" else kda_decode)(p, right)
        pairs = [(out, want), *((getattr(own, key), getattr(right, key)) for key in written(kernel))]
        worst = max(worst, *(relative_difference(*pair) for pair in pairs))
    return worst


def written(kernel: Kernel) -> tuple[str, ...]:
    """The tensors that a call changes, besides its output."""
    return ("state", "intermediate_states") if kernel.keeps else ("state",)
