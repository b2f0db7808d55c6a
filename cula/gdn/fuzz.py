# SPDX-License-Identifier: Apache-2.0
"""How the fuzzer draws a call of Gated DeltaNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula.fuzz.draw import Draw
from cula.fuzz.family import FamilyFuzz, Shape
from cula.gdn.reference import gdn

STRENGTHS = (0.0, 0.02, 1.0, 8.0, 50.0)  # the strongest log decay of a call that is given log decays


def switches(draw: Draw) -> dict[str, Any]:
    with_sigmoid = draw.chance(0.3)
    return {
        "use_gate_in_kernel": draw.chance(0.5),
        "use_qk_l2norm_in_kernel": draw.chance(0.7),
        "use_beta_sigmoid_in_kernel": with_sigmoid,
        "allow_neg_eigval": with_sigmoid and draw.chance(0.3),
    }


def tensors(draw: Draw, shape: Shape, switches: dict[str, Any]) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Slow heads and fast ones side by side; gates and betas in the dtype of q or in float32."""
    s, f32 = shape, torch.float32
    dtype, beta = draw.switch("gates", (s.dtype, f32)), draw.normal(s.B, s.T, s.HV)
    made = {"beta": (beta if switches["use_beta_sigmoid_in_kernel"] else beta.sigmoid(), dtype)}
    if not switches["use_gate_in_kernel"]:
        g = -draw.one_of(STRENGTHS) * draw.uniform(s.B, s.T, s.HV) * draw.uniform(s.HV) ** 2
        return made | {"g": (g, dtype)}
    of_parameters = draw.switch("parameters of gates", (f32, f32, s.dtype))
    made |= {"g": (draw.normal(s.B, s.T, s.HV) * draw.one_of((0.1, 1.0, 10.0)), dtype)}
    made |= {"A_log": (2 * draw.uniform(s.HV) - 1, of_parameters)}
    return made | ({"dt_bias": (draw.normal(s.HV), of_parameters)} if draw.chance_of("dt_bias", 0.8) else {})


FUZZ = FamilyFuzz(definition=gdn, switches=switches, tensors=tensors)
