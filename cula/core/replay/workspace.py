# SPDX-License-Identifier: Apache-2.0
"""Memory that the kernels of a repeated call hand on to each other, kept for the next call.

To ask torch for it takes the host a third of the time of a launch. What is kept belongs to one thread and one stream: streams do
one thing after the other, so a call may write where the one before has read; and threads are kept apart because two may launch on
one stream in turns. A stream that is gone leaves its workspace to the next one with its number, as it does in torch's allocator.

A CUDA graph remembers addresses, so under capture the workspace is torch's to give, from the memory of the graph. The long way
asks torch too: it is what torch.compile runs, which accounts for all that is allocated while it prepares graphs of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from cula.core.replay.torch_internals import empty, is_capturing

# For each device, thread and stream at most. Kernels that need more take the GPU longer than a call takes the host.
MAX_BYTES = 16 << 20


class _Kept(threading.local):
    """The workspaces that are kept on one device. Each thread has its own."""

    def __init__(self) -> None:
        self.by_stream: dict[int, tuple[int, Tensor | None]] = {}  # bytes and where


_kept_on = functools.cache(lambda device: _Kept())
_NOTHING: tuple[int, Tensor | None] = (0, None)


def workspace(device: int | None, num_bytes: int) -> Callable[[int], Tensor]:
    """A function that returns at least so many bytes for kernels launched next, by this thread, on a stream of the device, both
    current."""
    form = ((num_bytes,), (1,), torch.uint8)
    kept = _kept_on(device)

    def on(stream: int) -> Tensor:
        if num_bytes > MAX_BYTES or (stream and is_capturing()):  # stream 0 cannot be captured
            return empty(*form)
        size, there = kept.by_stream.get(stream, _NOTHING)
        if there is None or size < num_bytes:
            kept.by_stream.pop(stream, None)
            there = None  # before there is a new one, so that torch may take its memory for that
            there = empty(*form)
            kept.by_stream[stream] = num_bytes, there
        return there

    return on
