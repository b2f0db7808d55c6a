# SPDX-License-Identifier: Apache-2.0
"""Shapes that suites of several families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cula import models
from cula.bench.cases import Case

PACKED_LENS = (1300, 547, 2048, 963, 271, 3063)
TRAINING = ("gate", "sigmoid", "norm")  # sequences start from zero, and nobody looks at their last state
PREPARED = ("h0", "ht")  # gate, sigmoid and norm already applied: what gated-delta-rule kernels take
STEPS = (("bfloat16", 1), ("float32", 4), ("bfloat16", 4))  # of a decode, after float32 states and one token


def batch(suite: str, op: str, total: int, H: int, N: int, HV: int | None = None, **options: object) -> Case:
    """N sequences of `total` tokens together."""
    return Case(suite, op, (total // N,) * N, H, HV or H, **options)  # type: ignore[arg-type]


def gated(cases: Sequence[Case], gates: Sequence[str]) -> list[Case]:
    """Every case at every gate, gate by gate: a cut budget then leaves whole shapes at the first gate."""
    return [replace(c, gate=gate) for gate in gates for c in cases]


def decode_cases(op: str, gate: str, is_gpu: bool) -> list[Case]:
    """The suite "decode" of a family."""
    if not is_gpu:
        small = [Case("decode", op, (1,) * N, 4, 4, gate=gate) for N in (1, 16)]
        return on_cpu([*small, replace(small[1], lens=(4,) * 16, pool="bfloat16")])
    rows = (1, 8, 64, 256)
    cases = [Case("decode", op, (1,) * N, 32, 32, gate=gate) for N in rows]
    cases += [Case("decode", op, (tokens,) * N, 32, 32, gate=gate, pool=pool) for pool, tokens in STEPS for N in rows]
    return cases + [Case("decode", op, (1,) * N, H, H, gate=gate) for N, H in ((64, 12), (256, 96))]


def host_cases(ops: Sequence[str], decode: str, gate: str, is_gpu: bool) -> list[Case]:
    """The suite "api" of a family: calls so small that the host's time is all there is."""
    cases = [Case("api", op, (64,), 4, 4, gate=gate, mode="host") for op in ops]
    again = [replace(c, mode=mode) for c in cases[:1] for mode in ("host-lengths", "host-pool")]
    cases += [again[0], replace(again[1], flags=tuple(f for f in again[1].flags if f != "ht"))]
    cases += [Case("api", decode, (1,), 4, 4, gate=gate, mode=mode) for mode in ("host", "host-o")]
    return cases if is_gpu else [replace(c, K=32, V=32, dtype="float32") for c in cases]


def invariant_cases(family: str, gate: str, heads: Sequence[tuple[int, int]], is_gpu: bool) -> list[Case]:
    """The suite "invariant" of a family: each call as it is, and with `batch_invariant=True`. Heads are those of a GPU."""
    sizes = ((1, 8192), (8, 2048), (1, 1024)) if is_gpu else ((2, 256),)
    heads = heads if is_gpu else [(2, 2 * HV // H) for H, HV in heads[:1]]
    plain = [Case("invariant", f"{family}_prefill", (T,) * N, *of, gate=gate) for of in heads for N, T in sizes]
    every = [case for c in plain for case in (c, replace(c, flags=(*c.flags, "invariant")))]
    return every if is_gpu else on_cpu(every)


def on_cpu(cases: Sequence[Case]) -> list[Case]:
    """Small heads in float32: seconds, on any machine."""
    return [replace(c, K=64, V=64, dtype="float32") for c in cases]


PROMPTS = ((1, 8192), (8, 2048), (1, 65536))  # sequences, tokens of each
ROWS = ((1, 1), (64, 1), (256, 1), (64, 4))  # of a decode: rows, tokens of each; drafts keep their states


def model_cases(family: str, is_gpu: bool) -> list[Case]:
    """The calls of real callers, as they make them. Serving engines pack sequences; the longest prompt runs on the most ranks."""
    cases: list[Case] = []
    for m in models.of_family(family):
        for ranks in m.ranks:
            H, HV = m.heads(ranks)
            for (N, T), (caller, flags) in ((p, c) for p in PROMPTS for c in m.prefill):
                if T <= 8192 or ranks == m.ranks[-1]:
                    title, packed = f"{m.name} TP{ranks} {caller}", N > 1 and caller != "HF"
                    pool = m.pool if "pool" in flags else "float32"
                    cases.append(
                        Case(
                            "models",
                            f"{family}_prefill",
                            (T,) * N,
                            H,
                            HV,
                            128,
                            128,
                            m.gate,
                            "bfloat16",
                            flags,
                            packed,
                            "",
                            pool,
                            title,
                        )
                    )
            for N, T in ROWS:
                flags = (*m.decode, "keep") if T > 1 else m.decode
                title = f"{m.name} TP{ranks} decode"
                cases.append(
                    Case("models", f"{family}_decode", (T,) * N, H, HV, gate=m.gate, flags=flags, pool=m.pool, model=title)
                )
    return (
        cases
        if is_gpu
        else on_cpu([replace(c, lens=(c.lens[0] // 64,) * min(c.N, 2) if not c.is_decode else c.lens[:2]) for c in cases[:6]])
    )
