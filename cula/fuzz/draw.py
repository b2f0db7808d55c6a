# SPDX-License-Identifier: Apache-2.0
"""Numbers and tensors drawn from a seed. Every tensor is a view into a larger buffer that is poison around it.

A kernel that reads outside its tensors meets NaN (or an absurd integer), and one that writes there is found by comparing the
buffer with a copy of it, bit for bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from cula.core.checks import dtype_name

T = TypeVar("T")

INDEX_DTYPES = (torch.int32, torch.int64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of pools and checkpoints
MARGIN = 256  # elements of poison before and behind a tensor; a multiple of 16 bytes in every dtype
POISON_INTEGER = 1 << 30


@dataclass
class Buffer:
    """The memory around one tensor of a call, and what was in it before."""

    name: str
    memory: Tensor
    before: Tensor
    view: Tensor

    def outside_is_untouched(self) -> bool:
        """Whether all but the tensor itself is as it was."""
        restored = self.memory.clone()
        as_before = self.before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        restored.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).copy_(as_before)
        return same_bits(restored, self.before)

    def is_untouched(self) -> bool:
        return same_bits(self.memory, self.before)

    def original(self) -> Tensor:
        """The tensor as it was."""
        return self.before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


@dataclass
class Draw:
    """What a call is drawn from: the same seed draws the same call on the same kind of device.

    What a kernel is compiled for is drawn by `switch` and `chance_of`: calls of one `kind` agree in it, and differ in the rest.
    """

    seed: str
    device: torch.device
    kind: str = ""  # left out, it is the seed: each call is of its own kind
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kind = self.kind or self.seed
        self.random = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(62))

    # numbers

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return self.random.randint(low, high)

    def one_of(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    # what a kernel is compiled for

    def switch(self, name: str, choices: Sequence[T]) -> T:
        return random.Random(f"{self.kind}/{name}").choice(choices)

    def chance_of(self, name: str, probability: float) -> bool:
        return random.Random(f"{self.kind}/{name}").random() < probability

    # values, in float32 on the host: all devices get the same

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    # tensors

    def place(self, name: str, values: Tensor, dtype: torch.dtype | None = None, layout: str = "any") -> Tensor:
        """The values on the device, in poisoned memory.

        `layout`: "any" draws strides (padded rows, heads in front of tokens) and, rarely, an odd address; "slots" pads the first
        dimension alone, to multiples of 16 bytes, as state pools are; "plain" is contiguous.
        """
        dtype = values.dtype if dtype is None else dtype
        strides = self._strides(name, values.shape, layout, dtype)
        extent = 1 + sum((n - 1) * s for n, s in zip(values.shape, strides)) if values.numel() else 0
        odd = layout == "any" and self.chance_of(f"odd address of {name}", 0.05)
        memory = _poison(MARGIN + extent + MARGIN + 1, dtype, self.device)
        view = memory.as_strided(values.shape, strides, MARGIN + (1 if odd else 0))
        view.copy_(values.to(dtype))
        self.buffers[name] = Buffer(name, memory, memory.clone(), view)
        return view

    def _strides(self, name: str, shape: torch.Size, layout: str, dtype: torch.dtype) -> tuple[int, ...]:
        dims = list(range(len(shape)))
        padding = [0] * len(shape)
        if layout == "any" and len(shape) > 1:
            if len(shape) > 2 and self.chance_of(f"heads first in {name}", 0.15):
                dims[1], dims[2] = dims[2], dims[1]  # heads in front of tokens
            unit = max(1, 16 // dtype.itemsize)
            for d in range(1, len(shape)):
                padding[d] = self.switch(f"padding {d} of {name}", (0, 0, 0, unit, 3 * unit, 1))
        elif layout == "slots":
            padding[1] = self.switch(f"padding of {name}", (0, 0, 1, 5)) * (16 // dtype.itemsize)
        strides, step = [0] * len(shape), 1
        for d in reversed(dims):
            strides[d] = step
            step = step * max(shape[d], 1) + padding[d]
        return tuple(strides)


def _poison(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.bool:
        return torch.ones(n, dtype=dtype, device=device)
    return torch.full((n,), math.nan if dtype.is_floating_point else POISON_INTEGER, dtype=dtype, device=device)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal with NaN equal to itself. Neither tensor overlaps itself."""
    return bool(torch.equal(_bits(a), _bits(b)))


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dim() and t.numel() else t.reshape(-1)


def keywords(call: dict[str, Any]) -> str:
    """A call in a line: shapes and dtypes of tensors, the rest as it is."""

    def word(value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        return f"{dtype_name(value.dtype)}{list(value.shape)}"

    return ", ".join(f"{name}={word(value)}" for name, value in call.items() if value is not None and value is not False)
