# SPDX-License-Identifier: Apache-2.0
"""Ranges that a profiler shows around the calls of level 1, with `CULA_NVTX=1`.

The variable is read when cuLA is imported: without it a decorated function is the function itself, and costs nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from cula import settings

logger = logging.getLogger("cula")

F = TypeVar("F", bound=Callable[..., Any])


def nvtx_range(function: F) -> F:
    """The function, and with `CULA_NVTX=1` the function inside of a range of its name."""
    return _inside(function) if settings.nvtx() else function


def _inside(function: Any) -> Any:
    name = f"cula.{function.__name__}"

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not _has_nvtx():  # a graph has no ranges
            return function(*args, **kwargs)
        torch.cuda.nvtx.range_push(name)
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.nvtx.range_pop()

    return inside


@functools.cache
def _has_nvtx() -> bool:
    """Whether this torch has the ranges; says so where it has not."""
    try:
        torch.cuda.nvtx.mark("cula")
    except RuntimeError as reason:
        logger.warning("CULA_NVTX=1 has no effect: this torch is built without NVTX (%s)", reason)
        return False
    return True
