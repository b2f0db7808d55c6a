# SPDX-License-Identifier: Apache-2.0
"""What a Lightning call is: its tensors, its options, what is checked of them, and the problem that describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core import checks
from cula.core.constants import CHUNK
from cula.core.problem import DecodeOptions, DecodeProblem, Problem, describe_tokens, normalise_tokens

DIFFERENTIABLE = ("q", "k", "v", "decay", "initial_state")
CHUNK_SIZES = (16, 32, 64, 128, 256)


class LightningInputs(NamedTuple):
    """The tensors of a Lightning call."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    decay: Tensor  # [HV] float32, s >= 0: the state's factor is exp(-s) a token
    initial_state: Tensor | None = None  # [N, HV, V, K] float32
    cu_seqlens: Tensor | None = None  # [N + 1] int32


class LightningOptions(NamedTuple):
    """The switches of a Lightning call, by their public names."""

    scale: float | None = None  # None: K ** -0.5
    chunk_size: int = CHUNK
    output_final_state: bool = False
    null_is_nonpositive: bool = False  # `null_index="nonpositive"`
    batch_invariant: bool = False


@dataclass(frozen=True, kw_only=True)
class LightningProblem(Problem):
    """Everything about a Lightning call but its data."""

    family = "lightning"

    options: LightningOptions


def check_lightning(
    x: LightningInputs, options: LightningOptions, who: str = "cula_lightning"
) -> tuple[LightningProblem, LightningInputs]:
    """Validate a Lightning call; return its problem and its normalised tensors."""
    tokens = describe_tokens(x, options, who, ("Q", "K", "V"), DIFFERENTIABLE)
    _check_decay(who, x.decay, tokens["HV"])
    checks.check_devices(who, x.q.device, decay=x.decay)
    if options.chunk_size not in CHUNK_SIZES:
        raise ValueError(f"{who}: chunk_size is {options.chunk_size!r}; expected a power of two from 16 to 256")
    return LightningProblem(**tokens), normalise_tokens(x, decay=x.decay.contiguous())


def check_lightning_values(x: LightningInputs, problem: LightningProblem, who: str = "cula_lightning") -> None:
    checks.check_finite(who, x)
    _check_decay_sign(who, x.decay)


# Decode


class LightningDecodeInputs(NamedTuple):
    """The tensors of a Lightning decode: N rows of T tokens, or as they came."""

    q: Tensor  # [N, T, H, K]
    k: Tensor  # [N, T, H, K]
    v: Tensor  # [N, T, HV, V]
    state: Tensor  # [P, HV, V, K] ([P, HV, K, V] for state_layout="kv"); updated in place
    state_indices: Tensor | None = None  # [N], or [N, T]: a slot for each draft token
    decay: Tensor | None = None  # [HV]
    num_accepted_tokens: Tensor | None = None  # [N]
    intermediate_states: Tensor | None = None  # [N, T, HV, V, K] (K, V for "kv"), or larger; read and written
    intermediate_state_indices: Tensor | None = None  # [N]: rows of it; row n without
    cu_seqlens: Tensor | None = None  # [N + 1]: rows of several lengths, packed; tokens are then [1, all of them, ...]
    out: Tensor | None = None  # [N, T, HV, V]; written


def check_lightning_decode(
    x: LightningDecodeInputs, options: DecodeOptions, dims: Any, who: str
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Validate the decay; return it as kernels take it, and no further fields of the problem."""
    checks.check_given(who, "lightning", decay=x.decay)
    assert x.decay is not None
    _check_decay(who, x.decay, dims.HV)
    return {"decay": x.decay.resolve_neg()}, {}


def check_lightning_decode_values(x: LightningDecodeInputs, problem: DecodeProblem, who: str) -> None:
    assert x.decay is not None
    _check_decay_sign(who, x.decay)


# Both


def _check_decay(who: str, decay: Tensor, HV: int) -> None:
    checks.check_shape(who, "decay", decay, "[HV]", (HV,))
    checks.check_dtype(who, "decay", decay, (torch.float32,))


def _check_decay_sign(who: str, decay: Tensor) -> None:
    if bool((decay < 0).any()):
        raise ValueError(f"{who}: decay holds {float(decay.min()):.3g}; decays are s >= 0 (the state's factor is exp(-s))")
