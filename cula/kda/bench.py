# SPDX-License-Identifier: Apache-2.0
"""KDA in the benchmarks.

| gate | log decay of a channel | how long a state lasts |
|---|---|---|
| `fast` | `-5 sigmoid(N(0, 1))` | about ten tokens |
| `slow` | `-5 sigmoid(N(0, 1) - 10)` | thousands of tokens |
| `init` | `-A softplus(N(0, 1) + b)`, A ~ U(1, 16), softplus(b) log-uniform in [1e-3, 1e-1] | how a Kimi model starts |
| `slopes` | `-5 sigmoid(e^A (N(0, 1) + b))`, A ~ U(0, 1) a head, b ~ U(0, 1) a channel | ten tokens; single ones keep all |
| `mixed` | `-5 sigmoid(N(0, 1) + b)`; heads in turn b = -10 for 8 channels and 0 for others, b ~ U(-10, 0) for all | both |
| `softplus` | `-A softplus(N(0, 1) + b)`, A ~ U(1, 16) a head, b ~ U(-6, 1) a channel | less than a token to hundreds |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cula.bench.cases import Case
from cula.bench.family import FamilyBench, Leaves
from cula.bench.inputs import Inputs, Random, normalise, recurrence_operands
from cula.bench.shapes import (
    PACKED_LENS,
    PREPARED,
    TRAINING,
    batch,
    decode_cases,
    gated,
    host_cases,
    invariant_cases,
    model_cases,
    on_cpu,
)
from cula.kda.reference import kda_gate

GATES = ("fast", "slow", "init")
MORE_GATES = ("slopes", "mixed", "softplus")
LOWER_BOUND = -5.0
SLOW_BIAS = -10.0
SLOW_CHANNELS = 8  # of a head, in gates that are mixed

# (total tokens, heads, sequences)
CUDNN_TEN = (
    (2048, 12, 1),
    (2048, 16, 1),
    (4096, 8, 1),
    (4096, 12, 1),
    (8192, 12, 4),
    (8192, 16, 1),
    (1024, 4, 1),
    (3072, 10, 1),
    (8192, 24, 1),
    (16384, 16, 8),
)
LARGE = (
    (8192, 64, 1),
    (8192, 96, 1),
    (8192, 96, 8),
    (8192, 64, 2),
    (32768, 64, 2),
    (131072, 8, 1),
    (65536, 32, 1),
)


def cases(suite: str, is_gpu: bool) -> list[Case]:
    if suite == "decode":
        return decode_cases("kda_decode", "fast", is_gpu)
    if suite == "models":
        return model_cases("kda", is_gpu)
    if suite == "invariant":
        return invariant_cases("kda", "fast", ((16, 16), (64, 64)), is_gpu)
    if suite == "api":
        small = host_cases(("kda_prefill", "kda_train"), "kda_decode", "fast", is_gpu)
        longer = replace(small[0], lens=(1024,))  # on Hopper split, where 64 tokens are fused
        return [*small[:2], longer, replace(longer, mode="host-lengths"), *small[2:]]
    return _on_gpu(suite) if is_gpu else on_cpu(_small(suite))


def _on_gpu(suite: str) -> list[Case]:
    if suite in ("kda-prefill", "kda-gates"):
        shapes = [batch(suite, "kda_prefill", *s) for s in CUDNN_TEN + LARGE]
        shapes.insert(12, Case(suite, "kda_prefill", PACKED_LENS, 96, 96, packed=True))
        return gated(shapes, GATES if suite == "kda-prefill" else MORE_GATES)
    if suite == "kda-train":
        sizes = ((8192, 32, 1), (8192, 64, 2), (32768, 16, 1))
        shapes = [batch(suite, "kda_train", *s, flags=TRAINING) for s in sizes]
        shapes.append(Case(suite, "kda_train", PACKED_LENS, 32, 32, packed=True, flags=TRAINING))
        prepared = [replace(c, flags=("f32",)) for c in shapes[:2]]  # what cuDNN's backward takes
        return gated(shapes, GATES) + gated(prepared, ("fast", "slow"))
    if suite == "gva":
        shapes = [batch(suite, "kda_prefill", *s, HV=32) for s in ((8192, 16, 1), (4096, 16, 1), (16384, 16, 8), (8192, 8, 1))]
        scalar = [replace(c, flags=(*PREPARED, "scalar")) for c in (*shapes[:1], *shapes[2:3])]
        both = batch(suite, "kda_train", 8192, 16, 1, HV=32, flags=TRAINING)
        first, *others = gated(shapes, ("fast", "slow"))
        return [first, *scalar, *others, both, replace(both, flags=("scalar",))]
    if suite == "segments":
        by_t = [batch(suite, "kda_prefill", t, 8, 1) for t in (8192, 16384, 32768, 65536, 131072)]
        by_h = [batch(suite, "kda_prefill", 32768, h, 1) for h in (1, 2, 4, 16)]
        return gated(by_t + by_h, ("fast", "slow"))
    return _dist_modes(batch(suite, "kda_prefill", 65536, 32, 1)) if suite == "dist" else []


def _small(suite: str) -> list[Case]:
    if suite == "kda-prefill":
        shapes = gated([batch(suite, "kda_prefill", *s) for s in ((512, 4, 1), (1024, 4, 4))], GATES)
        return [*shapes, Case(suite, "kda_prefill", (300, 47, 165), 4, 4, packed=True)]
    if suite == "kda-gates":
        return gated([batch(suite, "kda_prefill", 512, 4, 1)], MORE_GATES)
    if suite == "kda-train":
        return gated([batch(suite, "kda_train", 256, 2, 1, flags=TRAINING)], ("fast", "slow"))
    if suite == "gva":
        grouped = batch(suite, "kda_prefill", 512, 2, 1, HV=4)
        return [grouped, replace(grouped, flags=(*PREPARED, "scalar"))]
    if suite == "segments":
        return gated([batch(suite, "kda_prefill", t, 1, 1) for t in (1024, 4096)], ("fast", "slow"))
    return _dist_modes(batch(suite, "kda_prefill", 1024, 4, 1)) if suite == "dist" else []


def _dist_modes(case: Case) -> list[Case]:
    return [replace(case, mode=mode) for mode in ("cp-ring", "cp-scan", "tp")]


def add_inputs(x: Inputs, random: Random) -> None:
    """g and beta, and the gate's parameters or the log decays they make."""
    case = x.case
    if not case.has("norm"):
        normalise(x)
    tail = (case.HV,) if case.has("scalar") else (case.HV, case.K)
    g = random.normal(*x.q.shape[:2], *tail)
    A_log, dt_bias, lower_bound = gate_parameters(case, tail, random)
    if case.has("gate"):
        x.g, x.A_log, x.dt_bias, x.lower_bound = g, A_log, dt_bias, lower_bound
    else:
        x.g = kda_gate(g, A_log, dt_bias, lower_bound).to(case.torch_dtype)
    x.beta = random.normal(*x.q.shape[:2], case.HV)
    if not case.has("sigmoid"):
        x.beta = x.beta.sigmoid()


def gate_parameters(case: Case, tail: tuple[int, ...], random: Random) -> tuple[Tensor, Tensor, float | None]:
    """(A_log, dt_bias, lower_bound) of a case's gate."""
    if case.gate in ("init", "softplus"):
        A_log = (1 + 15 * random.uniform(case.HV)).log()
        if case.gate == "softplus":
            return A_log, 7 * random.uniform(*tail) - 6, None
        dt = (math.log(1e-3) + random.uniform(*tail) * (math.log(1e-1) - math.log(1e-3))).exp()
        return A_log, dt + (-torch.expm1(-dt)).log(), None  # softplus(dt_bias) == dt
    if case.gate == "slopes":
        return random.uniform(case.HV), random.uniform(*tail), LOWER_BOUND
    A_log = 0.1 * (random.uniform(case.HV) - 0.5)
    dt_bias = 0.1 * (random.uniform(*tail) - 0.5)
    if case.gate == "slow":
        dt_bias = dt_bias + SLOW_BIAS
    elif case.gate == "mixed":
        dt_bias[1::2] += SLOW_BIAS * random.uniform(*dt_bias[1::2].shape[:1], *(1 for _ in tail[1:]))
        if len(tail) > 1:
            dt_bias[0::2, :SLOW_CHANNELS] += SLOW_BIAS
    return A_log, dt_bias, LOWER_BOUND


def call(x: Inputs, t: Leaves) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = x.switches() | {"A_log": t["A_log"], "dt_bias": t["dt_bias"]}
    options["safe_gate"] = x.case.has("gate") and x.lower_bound is not None
    return (t["q"], t["k"], t["v"], t["g"], t["beta"]), options


def decode(x: Inputs, t: Leaves) -> dict[str, Any]:
    return x.switches() | {"g": t["g"], "beta": t["beta"]}


def recurrence(x: Inputs, at: dict[str, Tensor], value_heads: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    case, g, beta = x.case, at["g"], at["beta"]
    q, k = recurrence_operands(case, at, has_norm=case.has("norm"))
    if case.has("gate"):
        g = kda_gate(g[None], at.get("A_log"), at.get("dt_bias"), x.lower_bound)[0]
    g = g[..., None].expand(k.shape) if g.dim() == 2 else g
    return q, k, g, beta.sigmoid() if case.has("sigmoid") else beta


def token_bytes(case: Case) -> int:
    """Bytes of the gates and betas of a token."""
    return case.HV * (1 if case.has("scalar") else case.K) * case.torch_dtype.itemsize + case.HV * case.torch_dtype.itemsize


BENCH = FamilyBench(
    suites={
        "kda-prefill": "KDA forward over whole sequences",
        "kda-gates": "the same with gates of other kinds: steep slopes, slow channels among fast ones, without a bound",
        "kda-train": "KDA forward and backward, with peak memory",
        "gva": "grouped value heads, and one gate a head (gated delta rule)",
        "segments": "KDA forward, few heads and long sequences: the sequence itself must be cut",
    },
    cases=cases,
    gates=(*GATES, *MORE_GATES),
    add_inputs=add_inputs,
    leaves=("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0"),
    call=call,
    decode=decode,
    recurrence=recurrence,
    token_bytes=token_bytes,
)
