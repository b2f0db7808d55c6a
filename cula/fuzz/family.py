# SPDX-License-Identifier: Apache-2.0
"""What a family brings to the fuzzer: how its own tensors and switches are drawn, and the definition that judges them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cula.core.family import FAMILIES
from cula.fuzz.draw import Draw


@dataclass(frozen=True)
class Shape:
    """The sizes of a call: of a prefill `[B, T]` tokens in N sequences, of a decode N = B rows of T."""

    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    lens: tuple[int, ...] | None = None  # of packed sequences
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class FamilyFuzz:
    """A family's module `fuzz` has one of these, `FUZZ`."""

    definition: Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, **tensors, **switches) -> o, final state; float64
    switches: Callable[[Draw], dict[str, Any]]  # keywords that are the same for many calls: a compiled variant
    # (draw, shape, switches) -> its tensors by name: values in float32, and the dtype to round them to
    tensors: Callable[[Draw, Shape, dict[str, Any]], dict[str, tuple[Tensor, torch.dtype]]]
    hints: Callable[[Draw, dict[str, Any]], dict[str, Any]] = lambda draw, switches: {}  # keywords that change no result
    arguments: tuple[str, str, str] = ("q", "k", "v")  # what its level 1 calls them


@functools.cache
def fuzz_of(family: str) -> FamilyFuzz:
    return importlib.import_module(FAMILIES[family].fuzz).FUZZ


def with_fuzz() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.fuzz]
