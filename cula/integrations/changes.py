# SPDX-License-Identifier: Apache-2.0
"""What integrations have in common: changes to another package that can be taken back, and counts of the calls that cuLA took."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("cula")

CALLS: Counter[str] = Counter()
"""How many calls came through each integration since the process started: `CALLS["fla.chunk_kda"]`, for example.

Calls inside of a graph of `torch.compile` are not counted: they are operators `torch.ops.cula.*` there.
"""


def count(name: str) -> None:
    if not torch.compiler.is_compiling():
        CALLS[name] += 1


class Changes:
    """Attributes of other packages that were set, in order, so that they can be set back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`setattr(owner, name, value)` until `undo`."""
        before = owner.__dict__[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def on_undo(self, action: Callable[[], None]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
