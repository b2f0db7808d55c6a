# SPDX-License-Identifier: Apache-2.0
"""What a family brings to the benchmarks: its suites, its tensors, its call, and the recurrence that its results are held to."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cula.core.family import FAMILIES

if TYPE_CHECKING:
    from cula.bench.cases import Case
    from cula.bench.inputs import Inputs, Random

Leaves = dict[str, "Tensor | None"]


@dataclass(frozen=True)
class FamilyBench:
    """A family's module `bench` has one of these, `BENCH`."""

    suites: dict[str, str]  # suites that are its own: name -> what they measure
    cases: Callable[[str, bool], Sequence[Case]]  # (suite, is_gpu) -> its cases, of suites that all families share too
    gates: tuple[str, ...]  # distributions of gates that its cases name; () where it has no gates
    add_inputs: Callable[[Inputs, Random], None]  # its own tensors, into the inputs of a case
    leaves: tuple[str, ...]  # tensors that training differentiates, by their names among the inputs
    call: Callable[[Inputs, Leaves], tuple[tuple[Any, ...], dict[str, Any]]]  # arguments of its prefill
    decode: Callable[[Inputs, Leaves], dict[str, Any]]  # keywords of its decode
    # (inputs, float64 leaves of a slice, value heads of that) -> q and k [tokens, hv, K], log decays alike, beta or None
    recurrence: Callable[[Inputs, dict[str, Tensor], Callable[[Tensor], Tensor]], tuple[Any, ...]]
    token_bytes: Callable[[Case], int]  # of a token, beyond q, k, v and o


@functools.cache
def bench_of(family: str) -> FamilyBench:
    return importlib.import_module(FAMILIES[family].bench).BENCH


def with_benches() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.bench]


def all_gates() -> tuple[str, ...]:
    return tuple(dict.fromkeys(gate for name in with_benches() for gate in bench_of(name).gates))
