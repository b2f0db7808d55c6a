# SPDX-License-Identifier: Apache-2.0
"""The family in the benchmarks."""

from __future__ import annotations

from cula.bench.family import FamilyBench
from cula.bench.shapes import batch, on_cpu


def cases(suite, is_gpu):
    return on_cpu([batch(suite, "fading_prefill", 64, 2, 1, flags=("ht",))]) if suite == "fading" else []


def add_inputs(x, random):
    x.own["rate"] = random.uniform(*x.q.shape[:2], x.case.HV)


def recurrence(x, at, value_heads):
    q, k = (t.repeat_interleave(x.case.HV // x.case.H, dim=1) for t in (at["q"] * x.case.K**-0.5, at["k"]))
    return q, k, -at["rate"][..., None].expand(k.shape), None


BENCH = FamilyBench(
    suites={"fading": "a made-up family"},
    cases=cases,
    gates=(),
    add_inputs=add_inputs,
    leaves=("q", "k", "v", "rate", "h0"),
    call=lambda x, t: ((t["q"], t["k"], t["v"], t["rate"]), {}),
    decode=lambda x, t: {"rate": t["rate"]},
    recurrence=recurrence,
    token_bytes=lambda case: 4 * case.HV,
)
