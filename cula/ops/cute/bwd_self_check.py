# SPDX-License-Identifier: Apache-2.0
"""The calls that a backward without a recorded run on hardware is tried with: see `toolchain/self_check.py`.

Gradients of every input, from those of outputs and last states. The sequences are those of the forward's check; on a GPU there
are longer ones besides, which have more chunks than there are blocks at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cula.core.problem import Problem
from cula.gdn.problem import GdnInputs, GdnOptions, GdnProblem, check_gdn
from cula.kda.problem import KdaGrads
from cula.ops.cute import gdn_bwd, kda_bwd, kda_self_check
from cula.ops.cute.kda_self_check import Call, Flags
from cula.ops.cute.toolchain.self_check import relative_difference

CALLS = (
    Call((70, 0, 5, 100), is_packed=True, H=1, HV=2, per_segment=0, is_slow=False, has_state=True),
    Call((100, 100), is_packed=False, H=2, HV=2, per_segment=0, is_slow=True, has_state=False),
    Call((130, 33), is_packed=True, H=1, HV=2, per_segment=0, is_slow=True, has_state=True, beta=torch.bfloat16),
)
LONG = (
    Call((1500, 1, 700, 2300), is_packed=True, H=4, HV=8, per_segment=0, is_slow=False, has_state=True),
    Call((4096, 4096), is_packed=False, H=8, HV=8, per_segment=0, is_slow=True, has_state=True),
)


def worst_error(name: str, device: torch.device, sm: tuple[int, int]) -> float:
    """The largest relative difference, of all gradients of the calls."""
    calls = CALLS if device.type == "cpu" else CALLS + LONG
    return max(difference for call in calls for difference in differences(call, name, device, sm))


def differences(call: Call, name: str, device: torch.device, sm: tuple[int, int]) -> list[float]:
    """Between the kernel and the torch backend, of each gradient of a call."""
    from cula.ops.torch import gdn, kda

    p, x = make(call, name, device, sm)
    do, dht = gradients_of_outputs(p, device)
    ours, theirs = (gdn_bwd.gdn_bwd, gdn.gdn_bwd) if isinstance(p, GdnProblem) else (kda_bwd.kda_bwd, kda.kda_bwd)
    got, want = ours(p, x, (), do, dht)._asdict(), theirs(p, x, (), do, dht)._asdict()
    if want["dA_log"] is not None:  # a sum over channels and tokens, which may cancel: judged beside that of the biases
        for grads in (got, want):
            grads["dA_log"] = torch.cat([grads["dA_log"].flatten(), want["ddt_bias"].flatten()])
    return [relative_difference(got[field], want[field]) for field in KdaGrads._fields if want[field] is not None]


def make(call: Call, name: str, device: torch.device, sm: tuple[int, int]) -> tuple[Any, Any]:
    """The forward's call whose gradients a kernel makes: (problem, inputs)."""
    _, family, *rest = name.split("_")
    if family == "kda":
        return kda_self_check.make(call, Flags.of("_".join([family, *rest])), device, sm)
    (gate,) = rest
    flags = Flags(is_normalised=True, gate=gate, g=torch.float32, has_scalar_gate=True)
    p, x = kda_self_check.make(call, flags, device, sm)
    options = GdnOptions(**{field: getattr(p.options, field) for field in GdnOptions._fields})
    problem, inputs = check_gdn(GdnInputs(*x), options)
    return dataclasses.replace(problem, sm=sm), inputs


def gradients_of_outputs(p: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """Those of o and of the last states."""
    random = torch.Generator().manual_seed(1)
    do = torch.randn(p.B, p.T, p.HV, p.V, generator=random)
    return do.to(device, p.dtype), (0.3 * torch.randn(p.N, p.HV, p.V, p.K, generator=random)).to(device)
