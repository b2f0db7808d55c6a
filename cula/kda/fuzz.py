# SPDX-License-Identifier: Apache-2.0
"""How the fuzzer draws a KDA call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula.core.constants import LOWER_BOUND_MIN
from cula.fuzz.draw import Draw
from cula.fuzz.family import FamilyFuzz, Shape
from cula.kda.reference import kda

STRENGTHS = (0.0, 0.02, 1.0, 5.0, 50.0)  # the strongest log decay of a call that is given log decays


def switches(draw: Draw) -> dict[str, Any]:
    gate = draw.one_of(("log", "softplus", "bounded"))
    with_sigmoid = draw.chance(0.5)
    return {
        "use_gate_in_kernel": gate != "log",
        "lower_bound": draw.one_of((LOWER_BOUND_MIN, LOWER_BOUND_MIN, -2.5)) if gate == "bounded" else None,
        "use_qk_l2norm_in_kernel": draw.chance(0.6),
        "use_beta_sigmoid_in_kernel": with_sigmoid,
        "allow_neg_eigval": with_sigmoid and draw.chance(0.2),
    }


def tensors(draw: Draw, shape: Shape, switches: dict[str, Any]) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Gates one a channel or one a head, slow and fast channels side by side, in the dtype of q or in float32."""
    s, f32 = shape, torch.float32
    tail = (s.HV,) if draw.chance_of("one gate a head", 0.3) else (s.HV, s.K)
    dtype = draw.switch("gates", (s.dtype, f32))
    in_kernel = switches["use_gate_in_kernel"]
    if in_kernel:
        g = draw.normal(s.B, s.T, *tail) * draw.one_of((0.1, 1.0, 3.0))
    else:
        g = -draw.one_of(STRENGTHS) * draw.uniform(s.B, s.T, *tail) * draw.uniform(*tail) ** 2
    beta = draw.normal(s.B, s.T, s.HV)
    made = {"g": (g, dtype), "beta": (beta if switches["use_beta_sigmoid_in_kernel"] else beta.sigmoid(), dtype)}
    if in_kernel:
        of_parameters = draw.switch("parameters of gates", (f32, f32, torch.bfloat16))
        if switches["lower_bound"] is None or draw.chance_of("A_log", 0.8):
            made["A_log"] = (draw.uniform(s.HV) - 0.5, of_parameters)
        if draw.chance_of("dt_bias", 0.8):
            made["dt_bias"] = (draw.normal(*tail), of_parameters)
    return made


def hints(draw: Draw, switches: dict[str, Any]) -> dict[str, Any]:
    return {
        "safe_gate": switches["lower_bound"] is not None and draw.chance_of("safe_gate", 0.5),
        "disable_recompute": draw.chance_of("disable_recompute", 0.2),
    }


FUZZ = FamilyFuzz(definition=kda, switches=switches, tensors=tensors, hints=hints)
