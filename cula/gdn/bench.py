# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet in the benchmarks.

| gate | log decay of a head | how long a state lasts |
|---|---|---|
| `fast` | `-softplus(N(0, 1))`, 0.8 on average | one or two tokens |
| `slow` | `-softplus(N(0, 1) - 4.2)`, 0.025 on average | about forty tokens |
| `init` | `-A softplus(N(0, 1) + b)`, A ~ U(1, 16), softplus(b) log-uniform in [1e-3, 1e-1] | how a Qwen model starts |

Heads are those of models (queries and keys / values), whole and divided by tensor parallelism. Without the flags `gate` and
`sigmoid` gates come as log decays and betas as numbers up to one, both in float32, as serving engines and Hugging Face hand them
over; with them raw and in the dtype of q.
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
    STEPS,
    TRAINING,
    batch,
    gated,
    host_cases,
    invariant_cases,
    model_cases,
    on_cpu,
)
from cula.gdn.reference import gdn_gate

GATES = ("fast", "slow", "init")
SLOW_BIAS = -4.2
HEADS = ((16, 32), (16, 64))  # Qwen3-Next and Qwen3.5-35B; Qwen3.5-397B
# (total tokens, sequences) of (H, HV): whole models first, then what tensor parallelism leaves of them
TABLE = (
    ((8192, 1), (16, 32)),
    ((16384, 8), (16, 32)),
    ((8192, 1), (16, 64)),
    ((8192, 1), (4, 16)),
    ((8192, 1), (2, 8)),
    ((32768, 1), (2, 8)),
)
TRAINED = (((8192, 1), (16, 32)), ((16384, 8), (16, 32)), ((8192, 1), (16, 64)), ((32768, 1), (2, 8)))
OTHER_HEADS = ((16, 48), (8, 24), (8, 32), (16, 16))
OTHER_SIZES = ((2048, 1), (8192, 1), (16384, 16))


def cases(suite: str, is_gpu: bool) -> list[Case]:
    if suite == "decode":
        return _decode_cases(is_gpu)
    if suite == "api":
        return host_cases(("gdn_prefill", "gdn_train"), "gdn_decode", "fast", is_gpu)
    if suite == "models":
        return model_cases("gdn", is_gpu)
    if suite == "invariant":
        return invariant_cases("gdn", "slow", ((16, 32),), is_gpu)
    return _on_gpu(suite) if is_gpu else on_cpu(_small(suite))


def _decode_cases(is_gpu: bool) -> list[Case]:
    if not is_gpu:
        return on_cpu([Case("decode", "gdn_decode", (1,) * N, 2, 4) for N in (1, 16)])
    rows = (1, 64, 256)
    one = [Case("decode", "gdn_decode", (1,) * N, H, HV) for H, HV in HEADS for N in rows]
    return one + [replace(c, lens=(tokens,) * c.N, pool=pool) for pool, tokens in STEPS for c in one]


def _on_gpu(suite: str) -> list[Case]:
    op = "gdn_prefill"
    if suite == "gdn-prefill":
        shapes = [batch(suite, op, total, H, N, HV=HV, flags=PREPARED) for (total, N), (H, HV) in TABLE]
        shapes += [batch(suite, op, *_of(size, heads), flags=PREPARED) for heads in OTHER_HEADS for size in OTHER_SIZES]
        shapes += [Case(suite, op, PACKED_LENS, H, HV, flags=PREPARED, packed=True) for H, HV in ((16, 32), *OTHER_HEADS)]
        return gated(shapes, ("fast", "slow")) + [
            replace(c, gate="init", flags=("gate", "sigmoid", "norm", "h0", "ht")) for c in shapes[:6]
        ]
    if suite == "gdn-train":
        shapes = [batch(suite, "gdn_train", *_of(size, (16, 32)), flags=TRAINING) for size in ((8192, 1), (16384, 8))]
        shapes.append(Case(suite, "gdn_train", PACKED_LENS, 16, 32, packed=True, flags=TRAINING))
        # gates and strengths applied beforehand: what libraries without them in their kernels can be compared on
        prepared = [batch(suite, "gdn_train", total, H, N, HV=HV, flags=("norm",)) for (total, N), (H, HV) in TRAINED]
        outside = [replace(prepared[0], flags=())]  # keys too, as Megatron-LM has it
        return gated(prepared, ("fast", "slow")) + gated(outside, ("slow",)) + gated(shapes, GATES)
    return []


def _of(size: tuple[int, int], heads: tuple[int, int]) -> tuple[int, int, int, int]:
    """Arguments of `batch`: total tokens, H, sequences, HV."""
    return size[0], heads[0], size[1], heads[1]


def _small(suite: str) -> list[Case]:
    if suite == "gdn-prefill":
        shapes = gated([batch(suite, "gdn_prefill", 512, 2, N, HV=4, flags=PREPARED) for N in (1, 4)], ("fast", "slow"))
        return [*shapes, Case(suite, "gdn_prefill", (300, 47, 165), 2, 4, gate="init", packed=True)]
    if suite == "gdn-train":
        return gated([batch(suite, "gdn_train", 256, 1, 1, HV=2, flags=TRAINING)], ("fast", "slow"))
    return []


def add_inputs(x: Inputs, random: Random) -> None:
    """g and beta, and the gate's parameters or the log decays they make."""
    case = x.case
    if not case.has("norm"):
        normalise(x)
    g = random.normal(*x.q.shape[:2], case.HV)
    A_log = 0.1 * (random.uniform(case.HV) - 0.5)
    dt_bias = 0.1 * (random.uniform(case.HV) - 0.5)
    if case.gate == "slow":
        dt_bias = dt_bias + SLOW_BIAS
    elif case.gate == "init":
        A_log = (1 + 15 * random.uniform(case.HV)).log()
        dt = (math.log(1e-3) + random.uniform(case.HV) * (math.log(1e-1) - math.log(1e-3))).exp()
        dt_bias = dt + (-torch.expm1(-dt)).log()  # softplus(dt_bias) == dt
    if case.has("gate"):
        x.g, x.A_log, x.dt_bias = g, A_log, dt_bias
    else:
        x.g = gdn_gate(g, A_log, dt_bias).float()
    x.beta = random.normal(*x.q.shape[:2], case.HV)
    if not case.has("sigmoid"):
        x.beta = x.beta.float().sigmoid()


def call(x: Inputs, t: Leaves) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (t["q"], t["k"], t["v"], t["g"], t["beta"]), _switches(x) | {"A_log": t["A_log"], "dt_bias": t["dt_bias"]}


def decode(x: Inputs, t: Leaves) -> dict[str, Any]:
    return _switches(x) | {"g": t["g"], "beta": t["beta"]}


def _switches(x: Inputs) -> dict[str, Any]:
    return {name: value for name, value in x.switches().items() if name != "lower_bound"}


def recurrence(x: Inputs, at: dict[str, Tensor], value_heads: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    case, g, beta = x.case, at["g"], at["beta"]
    q, k = recurrence_operands(case, at, has_norm=case.has("norm"))
    if case.has("gate"):
        g = gdn_gate(g, at["A_log"], at["dt_bias"])
    return q, k, g[..., None].expand(k.shape), beta.sigmoid() if case.has("sigmoid") else beta


def token_bytes(case: Case) -> int:
    """Bytes of the gates and betas of a token: raw ones in q's dtype, others in float32."""
    return case.HV * sum(case.torch_dtype.itemsize if case.has(flag) else 4 for flag in ("gate", "sigmoid"))


BENCH = FamilyBench(
    suites={
        "gdn-prefill": "Gated DeltaNet forward over whole sequences, heads of the Qwen models",
        "gdn-train": "Gated DeltaNet forward and backward, with peak memory",
    },
    cases=cases,
    gates=GATES,
    add_inputs=add_inputs,
    leaves=("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0"),
    call=call,
    decode=decode,
    recurrence=recurrence,
    token_bytes=token_bytes,
)
