# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a call that was made, as sentences."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.fuzz.draw import Draw, same_bits

# Relative error against float64 on the same (rounded) inputs, over a whole tensor and over one head of one sequence.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-3, torch.bfloat16: 1.2e-2}
ON_TORCH = {torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 1.2e-2}
GRADIENT_FACTOR = 3.0
PART_FACTOR = 5.0


def tolerance(dtype: torch.dtype, backend: str) -> float:
    return (ON_TORCH if backend == "torch" else TOLERANCE)[dtype]


def error_of(name: str, got: Tensor, want: Tensor, limit: float, largest: float = 0.0) -> str | None:
    """What is wrong with a tensor; `largest` is a norm beside which this one may be small."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.shape != want.shape:
        return f"{name} has shape {list(got.shape)}, expected {list(want.shape)}"
    if not bool(torch.isfinite(got).all()):
        return f"{name} holds {int((~torch.isfinite(got)).sum())} values that are not finite"
    size = max(float(want.norm()), 1e-2 * largest, 1e-30)
    error = float((got - want).norm()) / size
    return (
        None
        if error <= limit or float((got - want).abs().max()) < 1e-30
        else f"{name} is off by {error:.1e}, allowed {limit:.1e}"
    )


def error_of_parts(name: str, parts: list[tuple[str, Tensor, Tensor]], limit: float) -> str | None:
    """Likewise for each of several parts (heads of sequences), against the size of a typical part."""
    if not parts:
        return None
    norms = sorted(float(want.detach().double().norm()) for _, _, want in parts)
    typical = norms[len(norms) // 2]
    for where, got, want in parts:
        difference = float((got.detach().double().cpu() - want.detach().double().cpu()).norm())
        size = max(float(want.detach().double().norm()), 0.3 * typical, 1e-30)
        if difference > PART_FACTOR * limit * size:
            return f"{name} of {where} is off by {difference / size:.1e}, allowed {PART_FACTOR * limit:.1e}"
    return None


def heads_of(got: Tensor, want: Tensor, spans: list[tuple[int, int, int]], dim: int) -> list[tuple[str, Tensor, Tensor]]:
    """The heads (in `dim`) of each sequence, which is (batch row, first token, end)."""
    parts = []
    for n, (row, start, end) in enumerate(spans):
        if start == end:
            continue
        for h in range(got.shape[dim]):
            parts.append(
                (f"sequence {n}, head {h}", got[row, start:end].select(dim - 1, h), want[row, start:end].select(dim - 1, h))
            )
    return parts


def damage(draw: Draw, written: set[str]) -> str | None:
    """Memory that the call should have left alone: all but the tensors it writes, and what lies around those."""
    for name, buffer in draw.buffers.items():
        if not (buffer.outside_is_untouched() if name in written else buffer.is_untouched()):
            return f"memory around {name} was written" if name in written else f"{name} was changed"
    return None


def changed_slots(before: Tensor, after: Tensor, allowed: set[int]) -> str | None:
    """Slots of a pool that changed and should not have."""
    for slot in range(before.shape[0]):
        if slot not in allowed and not same_bits(before[slot], after[slot]):
            return f"slot {slot} was changed, and the call writes {sorted(allowed)}"
    return None
