# SPDX-License-Identifier: Apache-2.0
"""The calls that a KDA prefill kernel without a recorded run on hardware is tried with: see `toolchain/self_check.py`.

Packed and fixed-length, grouped heads, states, whole sequences and segments, warmed up and chained.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.kda.problem import KdaInputs, KdaOptions, KdaProblem, check_kda
from cula.ops.cute import kda
from cula.ops.cute.kda_abi import K, V
from cula.ops.cute.kda_schedule import split_into
from cula.ops.cute.toolchain.self_check import relative_difference


class Flags(NamedTuple):
    """What a kernel's name says about its calls."""

    is_normalised: bool
    gate: str  # "gate", "softplus", "log", "safe"
    g: torch.dtype
    has_scalar_gate: bool

    @classmethod
    def of(cls, name: str) -> Flags:
        dtypes = {short: dtype for dtype, short in kda.SHORT.items()}
        _, dtype, gate, g, *rest = name.split("_")
        return cls(dtype == "f16", gate, dtypes[g], rest == ["scalar"])


class Call(NamedTuple):
    lengths: tuple[int, ...]
    is_packed: bool
    H: int
    HV: int
    per_segment: int  # chunks
    is_slow: bool  # the gate forgets in thousands of tokens, not in ten: from the sixth on segments are chained
    has_state: bool
    beta: torch.dtype = torch.float32


CALLS = (
    Call((70, 0, 5, 100), is_packed=True, H=1, HV=2, per_segment=100, is_slow=False, has_state=True),
    Call((100, 100), is_packed=False, H=2, HV=2, per_segment=1, is_slow=True, has_state=False),
    Call((350, 33), is_packed=True, H=1, HV=2, per_segment=1, is_slow=True, has_state=True, beta=torch.bfloat16),
    Call((200,), is_packed=False, H=1, HV=1, per_segment=2, is_slow=False, has_state=True),
)


def make(call: Call, flags: Flags, device: torch.device, sm: tuple[int, int]) -> tuple[KdaProblem, KdaInputs]:
    random = torch.Generator().manual_seed(0)
    D = K

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    B, T = (1, sum(call.lengths)) if call.is_packed else (len(call.lengths), call.lengths[0])
    q, k = normal(B, T, call.H, D), normal(B, T, call.H, D)
    if not flags.is_normalised:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    of_gate = () if flags.has_scalar_gate else (D,)
    g, shift = normal(B, T, call.HV, *of_gate), -8.0 if call.is_slow else 0.0
    is_raw, fastest = flags.gate in ("gate", "softplus"), -50.0 if flags.gate == "log" else -5.0
    x = KdaInputs(
        q=q.bfloat16(),
        k=k.bfloat16(),
        v=normal(B, T, call.HV, D).bfloat16(),
        g=(g if is_raw else fastest * torch.sigmoid(g + shift)).to(flags.g),
        beta=normal(B, T, call.HV).to(call.beta),
        A_log=0.1 * normal(call.HV) if is_raw else None,
        dt_bias=0.1 * normal(call.HV, *of_gate) + shift if is_raw else None,
        initial_state=normal(len(call.lengths), call.HV, D, D) if call.has_state else None,
        cu_seqlens=torch.tensor([0, *call.lengths]).cumsum(0).int() if call.is_packed else None,
    )
    options = KdaOptions(
        lower_bound=-5.0 if flags.gate == "gate" else None,
        use_gate_in_kernel=is_raw,
        use_qk_l2norm_in_kernel=flags.is_normalised,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=flags.gate == "safe",
        output_final_state=True,
    )
    moved: Any = (None if t is None else t.to(device) for t in x)
    problem, x = check_kda(KdaInputs(*moved), options)
    return dataclasses.replace(problem, sm=sm), x


def worst_error(name: str, device: torch.device, sm: tuple[int, int]) -> float:
    """The largest relative difference, of outputs and last states of the calls."""
    from cula.ops.torch.kda import kda_fwd

    worst = 0.0
    for call in CALLS:
        p, x = make(call, Flags.of(name), device, sm)
        ht = torch.full((p.N, p.HV, V, K), torch.nan, device=device)
        o = torch.full_like(x.v, torch.nan)
        kda.run(p, x, split_into(p, call.per_segment, num_sms=0), ht, o)
        want = kda_fwd(p, x)
        assert want.final_state is not None
        worst = max(worst, relative_difference(o, want.o), relative_difference(ht, want.final_state))
    return worst
