# SPDX-License-Identifier: Apache-2.0
"""How the fuzzer draws a Lightning call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula.fuzz.draw import Draw
from cula.fuzz.family import FamilyFuzz, Shape
from cula.lightning.reference import lightning


def tensors(draw: Draw, shape: Shape, switches: dict[str, Any]) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Decays of the heads, some of which are zero."""
    strength = draw.one_of((0.0, 0.05, 1.0, 8.0))
    decay = strength * draw.uniform(shape.HV) * (draw.uniform(shape.HV) > 0.2)
    return {"decay": (decay, torch.float32)}


FUZZ = FamilyFuzz(definition=lightning, switches=lambda draw: {}, tensors=tensors, arguments=("Q", "K", "V"))
