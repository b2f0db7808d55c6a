# SPDX-License-Identifier: Apache-2.0
"""What the memory lets a decode do: its states read and written in place, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.bench import timing

PIECE = 4096  # bytes that a program of one warp reads and writes


def measure(pool: Tensor, slots: Tensor) -> dict[str, float]:
    """Milliseconds for as many states next to each other, by torch's `mul_`, and on a GPU for the slots themselves in the order
    in which they are named, `slots_ms`: memory that is walked through in order is a few percent faster."""
    states = pool[: len(slots)]
    found = {"states_ms": timing.measure(lambda: states.mul_(1.0), pool.device).time_ms}
    if pool.device.type == "cuda":
        found["slots_ms"] = timing.measure(lambda: touch(pool, slots), pool.device).time_ms
    return found


def touch(pool: Tensor, slots: Tensor, factor: float = 1.0) -> None:
    """Multiply those slots of a contiguous pool, each in pieces by programs of one warp."""
    from cula.bench.states_kernel import touch_kernel  # the suites run on machines without Triton too

    size, piece = pool[0].numel(), PIECE // pool.element_size()
    if size % piece or not pool.is_contiguous():
        raise ValueError(f"touch takes contiguous pools whose slots are multiples of {PIECE} bytes, got {list(pool.shape)}")
    is_early = pool.is_cuda and torch.cuda.get_device_capability(pool.device) >= (9, 0)
    early = {"launch_pdl": True} if is_early else {}
    touch_kernel[(len(slots) * (size // piece),)](pool, slots, factor, size, piece, is_early, num_warps=1, **early)
