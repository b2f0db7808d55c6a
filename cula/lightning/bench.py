# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention in the benchmarks. Its decays are a model's slopes, `2^(-8 (h + 1) / HV)`: a state lasts from two tokens to
hundreds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.bench.cases import Case
from cula.bench.family import FamilyBench, Leaves
from cula.bench.inputs import Inputs, Random, normalise, recurrence_operands
from cula.bench.shapes import PACKED_LENS, batch, decode_cases, host_cases, invariant_cases, model_cases, on_cpu

SLOPES = "slopes"


def cases(suite: str, is_gpu: bool) -> list[Case]:
    if suite == "decode":
        return decode_cases("lightning_decode", SLOPES, is_gpu)
    if suite == "api":
        return host_cases(("lightning_prefill",), "lightning_decode", SLOPES, is_gpu)
    if suite == "models":
        return model_cases("lightning", is_gpu)
    if suite == "invariant":
        return invariant_cases("lightning", SLOPES, ((32, 32),), is_gpu)
    if suite != "lightning":
        return []
    if not is_gpu:
        small = [batch(suite, "lightning_prefill", *s, gate=SLOPES) for s in ((1024, 4, 1), (1024, 8, 4))]
        return on_cpu([*small, batch(suite, "lightning_train", 512, 4, 1, gate=SLOPES, flags=())])
    prefill = ((8192, 64, 1), (32768, 64, 2), (32768, 16, 1), (131072, 8, 1), (2048, 32, 1), (16384, 32, 8))
    train = ((8192, 32, 1), (8192, 64, 1), (16384, 16, 4))
    found = [batch(suite, "lightning_prefill", *s, gate=SLOPES) for s in prefill]
    found.append(Case(suite, "lightning_prefill", PACKED_LENS, 64, 64, gate=SLOPES, packed=True))
    return found + [batch(suite, "lightning_train", *s, gate=SLOPES, flags=()) for s in train]


def add_inputs(x: Inputs, random: Random) -> None:
    normalise(x)
    slopes = torch.arange(1, x.case.HV + 1, device=x.device, dtype=torch.float32)
    x.decay = torch.exp2(-8.0 * slopes / x.case.HV)


def call(x: Inputs, t: Leaves) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (t["q"], t["k"], t["v"], x.decay), {}


def decode(x: Inputs, t: Leaves) -> dict[str, Any]:
    return {"decay": x.decay}


def recurrence(x: Inputs, at: dict[str, Tensor], value_heads: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    q, k = recurrence_operands(x.case, at, has_norm=False)
    assert x.decay is not None
    return q, k, -value_heads(x.decay.double())[None, :, None].expand(k.shape), None


BENCH = FamilyBench(
    suites={"lightning": "Lightning Attention: forward, and forward with backward"},
    cases=cases,
    gates=(),
    add_inputs=add_inputs,
    leaves=("q", "k", "v", "h0"),
    call=call,
    decode=decode,
    recurrence=recurrence,
    token_bytes=lambda case: 0,
)
