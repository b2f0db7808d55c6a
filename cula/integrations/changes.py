# SPDX-License-Identifier: Apache-2.0
"""What integrations have in common: changes to another package that can be taken back, and counts of the calls that cuLA took."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
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


@functools.cache
def log_once(sentence: str) -> None:
    """Log a sentence at INFO, once a process: what is true of one call is true of the others."""
    logger.info("%s", sentence)


class Changes:
    """Attributes of other packages that were set, in order, so that they can be set back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`setattr(owner, name, value)` until `undo`."""
        before = owner.__dict__[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def on_undo(self, action: Callable[[], Any]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    @contextlib.contextmanager
    def or_none(self) -> Iterator[None]:
        """All changes that are made inside, or none: an error undoes them."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def on_import(self, wanted: Callable[[str], Any], patch: Callable[[ModuleType], None]) -> None:
        """Call `patch` with each module whose name is `wanted`: at once if it is imported, otherwise when it is, until `undo`."""
        hook = _ImportHook(wanted, patch)
        sys.meta_path.insert(0, hook)
        self._undo.append(hook.remove)
        for name, module in list(sys.modules.items()):
            if module is not None and wanted(name):
                patch(module)


class _ImportHook(importlib.abc.MetaPathFinder):
    def __init__(self, wanted: Callable[[str], Any], patch: Callable[[ModuleType], None]) -> None:
        self.wanted, self.patch, self.is_on = wanted, patch, True

    def remove(self) -> None:
        self.is_on = False
        if self in sys.meta_path:  # others change that list, too
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not self.wanted(name):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._patch_after(spec.loader)
        return spec

    def _patch_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self.is_on:
                self.patch(module)

        loader.exec_module = exec_module
