# SPDX-License-Identifier: Apache-2.0
"""What a family is, as the rest of the package sees it; `cula/registry.py` lists the families there are.

Everything that is the same for all families (dispatch, autograd, `torch.library` operators, pools, checkpoints, context and
tensor parallelism, benchmarks) is made from a `Family`. Its kernels are found by its name: module `<backend's package>.<name>`,
functions `<name>_fwd`, `<name>_bwd`, ... of the table in `cula/core/kernels.py`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cula.core.problem import PUBLIC_NAMES, DecodeOptions, DecodeProblem, Encoding, Problem, encoding_of
from cula.core.replay.cache import ChoiceCache, ReplayCache


@dataclass(frozen=True)
class Transition:
    """What a run of tokens does to a state, `S -> S M + B`: the form of M. Segments and ranks compose these."""

    is_dense: bool  # M is [N, HV, K, K]; otherwise one number a head, [N, HV, 1, 1]
    # M of each sequence by a formula, where none of its kernels is needed for that: (problem, inputs) -> [N, HV, 1, 1]
    factor: Callable[[Any, Any], Tensor] | None = None


@dataclass(frozen=True)
class Decode:
    """A family's decode: its tensors, and what is to be checked of those that are its own."""

    # NamedTuple: q, k, v, state, state_indices; the family's own; num_accepted_tokens, intermediate_states,
    # intermediate_state_indices, cu_seqlens, out
    Inputs: Any
    # (inputs, options, dims, who) -> (the family's own tensors, normalised; fields of DecodeProblem that are its own)
    check: Callable[[Any, DecodeOptions, Any, str], tuple[dict[str, Tensor | None], dict[str, Any]]]
    check_values: Callable[[Any, DecodeProblem, str], None]
    own: tuple[str, ...] = field(init=False)  # names of the family's own tensors
    replay: ReplayCache = field(default_factory=ReplayCache, compare=False)
    chosen: ChoiceCache = field(default_factory=ChoiceCache, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", self.Inputs._fields[5:-5])

    def keywords(self) -> tuple[str, ...]:
        """What `cula_decode` takes for the family, by name."""
        options = (PUBLIC_NAMES.get(name, name) for name in DecodeOptions._fields)
        return (*self.Inputs._fields, *options, "mode", "device", "backend")


@dataclass(frozen=True)
class Family:
    name: str  # "kda"
    entry: str  # its function of level 1, "cula.kda.api:cula_kda"
    Inputs: Any  # NamedTuple: q, k, v; the family's own; initial_state, cu_seqlens
    Options: Any  # NamedTuple of plain values; has scale and output_final_state
    check: Callable[[Any, Any, str], tuple[Problem, Any]]  # (inputs, options, who) -> problem, normalised inputs
    check_values: Callable[[Any, Any, str], None]  # what needs reading data
    differentiable: tuple[str, ...]  # names of inputs that have a gradient
    token_inputs: tuple[str, ...]  # names of inputs [B, T, ...]
    value_head_dims: dict[str, int]  # for tensor parallelism: in which dimension an input has HV heads
    transition: Transition
    state_dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # that an initial state may have
    decode: Decode | None = None
    bench: str = ""  # module with its benchmark, "cula.kda.bench"
    fuzz: str = ""  # module that draws its calls for the fuzzer, "cula.kda.fuzz"
    replay: ReplayCache = field(default_factory=ReplayCache, compare=False)
    chosen: ChoiceCache = field(default_factory=ChoiceCache, compare=False)
    function: str = field(init=False)  # how errors call it: "cula_kda"
    encoding: Encoding = field(init=False)  # of its options, for operators
    own: tuple[str, ...] = field(init=False)  # names of the inputs that only it has: gates and the like
    keeps_states: bool = field(init=False)  # it can return the states at chunk starts, which checkpoints are taken from

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", self.entry.partition(":")[2])
        object.__setattr__(self, "encoding", encoding_of(self.Options))
        object.__setattr__(self, "own", self.Inputs._fields[3:-2])
        object.__setattr__(self, "keeps_states", "return_intermediate_states" in self.Options._fields)

    def load_entry(self) -> Callable[..., Any]:
        module, _, name = self.entry.partition(":")
        return getattr(importlib.import_module(module), name)

    def keywords(self) -> tuple[str, ...]:
        """What its function of level 1 takes, by name."""
        parameters = inspect.signature(self.load_entry()).parameters.values()
        return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


FAMILIES: dict[str, Family] = {}  # by name, in order; filled by `cula/registry.py`


def register_family(family: Family) -> Family:
    """Make a family known: its operators, its mode of decode, its benchmarks."""
    from cula.core.operator import define_operators

    FAMILIES[family.name] = family
    define_operators(family)
    return family


def decode_modes() -> tuple[str, ...]:
    """What `cula_decode` takes as its mode."""
    return tuple(name for name, family in FAMILIES.items() if family.decode is not None)
