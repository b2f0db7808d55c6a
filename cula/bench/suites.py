# SPDX-License-Identifier: Apache-2.0
"""The suites: which cases each has on a GPU and on a CPU, and the same suites over any shape a user names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cula.bench.cases import ALL_FLAGS, GATES, Case

SUITES = {
    "kda-prefill": "KDA forward over whole sequences",
    "kda-train": "KDA forward and backward, with peak memory",
    "lightning": "Lightning Attention: forward, and forward with backward",
    "decode": "one token, or a few, for each row from a pool of states",
    "gva": "grouped value heads, and one gate a head (gated delta rule)",
    "segments": "KDA forward, few heads and long sequences: the sequence itself must be cut",
    "dist": "context and tensor parallelism over the devices of this machine",
    "api": "host time a call: dispatch, eager, graph replay",
}

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
PACKED_LENS = (1300, 547, 2048, 963, 271, 3063)
SLOPES = "slopes"
STEPS = (("bfloat16", 1), ("float32", 4), ("bfloat16", 4))  # of a decode, after float32 states and one token
TRAINING = ("gate", "sigmoid", "norm")  # sequences start from zero, and nobody looks at their last state
PREPARED = ("h0", "ht")  # gate, sigmoid and norm already applied: what gated-delta-rule kernels take


@dataclass(frozen=True)
class Custom:
    """A shape from the command line. Empty fields keep the suite's own choice."""

    t: tuple[int, ...] = ()
    h: tuple[int, ...] = ()
    hv: int | None = None
    b: int | None = None
    lens: tuple[int, ...] = ()
    k: int | None = None
    v: int | None = None
    gates: tuple[str, ...] = ()
    dtype: str | None = None
    flags: tuple[str, ...] | None = None

    @property
    def names_shape(self) -> bool:
        return bool(self.t or self.h or self.hv or self.b or self.lens or self.k or self.v)


def build(suites: Sequence[str], device_type: str, custom: Custom | None = None, limit: int | None = None) -> list[Case]:
    """The cases of the named suites, in order, without repeats; at most `limit` of each suite."""
    custom = custom or Custom()
    cases: list[Case] = []
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"unknown suite {suite!r}; choose from {list(SUITES)}")
        of_suite = _on_gpu(suite) if device_type == "cuda" else _on_cpu(suite)
        if custom.names_shape:
            of_suite = _with_shape(of_suite, custom)
        of_suite = _with_options(of_suite, custom)
        cases += list(dict.fromkeys(of_suite))[:limit]
    return cases


def _batch(suite: str, op: str, total: int, H: int, N: int, HV: int | None = None, **options: object) -> Case:
    return Case(suite, op, (total // N,) * N, H, HV or H, **options)  # type: ignore[arg-type]


def _gated(cases: Sequence[Case], gates: Sequence[str] = GATES) -> list[Case]:
    """Every case at every gate, gate by gate: a cut budget then leaves whole shapes at the first gate."""
    return [replace(c, gate=gate) for gate in gates for c in cases]


def _on_gpu(suite: str) -> list[Case]:
    if suite == "kda-prefill":
        shapes = [_batch(suite, "kda_prefill", *s) for s in CUDNN_TEN + LARGE]
        shapes.insert(12, Case(suite, "kda_prefill", PACKED_LENS, 96, 96, packed=True))
        return _gated(shapes)
    if suite == "kda-train":
        sizes = ((8192, 32, 1), (8192, 64, 2), (32768, 16, 1))
        shapes = [_batch(suite, "kda_train", *s, flags=TRAINING) for s in sizes]
        shapes.append(Case(suite, "kda_train", PACKED_LENS, 32, 32, packed=True, flags=TRAINING))
        return _gated(shapes)
    if suite == "lightning":
        prefill = ((8192, 64, 1), (32768, 64, 2), (32768, 16, 1), (131072, 8, 1), (2048, 32, 1), (16384, 32, 8))
        train = ((8192, 32, 1), (8192, 64, 1), (16384, 16, 4))
        cases = [_batch(suite, "lightning_prefill", *s, gate=SLOPES) for s in prefill]
        cases.append(Case(suite, "lightning_prefill", PACKED_LENS, 64, 64, gate=SLOPES, packed=True))
        return cases + [_batch(suite, "lightning_train", *s, gate=SLOPES, flags=()) for s in train]
    if suite == "decode":
        rows = (1, 8, 64, 256)
        kda = [Case(suite, "kda_decode", (1,) * N, 32, 32) for N in rows]
        kda += [Case(suite, "kda_decode", (tokens,) * N, 32, 32, pool=pool) for pool, tokens in STEPS for N in rows]
        kda += [Case(suite, "kda_decode", (1,) * N, H, H) for N, H in ((64, 12), (256, 96))]
        lightning = [replace(c, op="lightning_decode", gate=SLOPES) for c in kda]
        return [c for pair in zip(kda, lightning) for c in pair]
    if suite == "gva":
        shapes = [_batch(suite, "kda_prefill", *s, HV=32) for s in ((8192, 16, 1), (4096, 16, 1), (16384, 16, 8), (8192, 8, 1))]
        scalar = [replace(c, flags=(*PREPARED, "scalar")) for c in (*shapes[:1], *shapes[2:3])]
        both = _batch(suite, "kda_train", 8192, 16, 1, HV=32, flags=TRAINING)
        first, *others = _gated(shapes, ("fast", "slow"))
        return [first, *scalar, *others, both, replace(both, flags=("scalar",))]
    if suite == "segments":
        by_t = [_batch(suite, "kda_prefill", t, 8, 1) for t in (8192, 16384, 32768, 65536, 131072)]
        by_h = [_batch(suite, "kda_prefill", 32768, h, 1) for h in (1, 2, 4, 16)]
        return _gated(by_t + by_h, ("fast", "slow"))
    if suite == "dist":
        return _dist_modes(_batch(suite, "kda_prefill", 65536, 32, 1))
    small = [Case(suite, op, (64,), 4, 4, mode="host") for op in ("kda_prefill", "kda_train")]
    longer = replace(small[0], lens=(1024,))  # on Hopper two kernels, where 64 tokens are one
    lightning_host = Case(suite, "lightning_prefill", (64,), 4, 4, gate=SLOPES, mode="host")
    decode = [Case(suite, "kda_decode", (1,), 4, 4, mode=mode) for mode in ("host", "host-o")]
    return [*small, longer, lightning_host, *decode, *(replace(c, op="lightning_decode", gate=SLOPES) for c in decode)]


def _on_cpu(suite: str) -> list[Case]:
    """Small shapes in float32: seconds, on any machine."""
    if suite == "kda-prefill":
        shapes = _gated([_batch(suite, "kda_prefill", *s) for s in ((512, 4, 1), (1024, 4, 4))])
        shapes.append(Case(suite, "kda_prefill", (300, 47, 165), 4, 4, packed=True))
    elif suite == "kda-train":
        shapes = _gated([_batch(suite, "kda_train", 256, 2, 1, flags=TRAINING)], ("fast", "slow"))
    elif suite == "lightning":
        shapes = [_batch(suite, "lightning_prefill", *s, gate=SLOPES) for s in ((1024, 4, 1), (1024, 8, 4))]
        shapes.append(_batch(suite, "lightning_train", 512, 4, 1, gate=SLOPES, flags=()))
    elif suite == "decode":
        shapes = [Case(suite, "kda_decode", (1,) * N, 4, 4) for N in (1, 16)]
        shapes.append(replace(shapes[1], lens=(4,) * 16, pool="bfloat16"))
        shapes += [replace(c, op="lightning_decode", gate=SLOPES) for c in shapes]
    elif suite == "gva":
        shapes = [_batch(suite, "kda_prefill", 512, 2, 1, HV=4)]
        shapes.append(replace(shapes[0], flags=(*PREPARED, "scalar")))
    elif suite == "segments":
        shapes = _gated([_batch(suite, "kda_prefill", t, 1, 1) for t in (1024, 4096)], ("fast", "slow"))
    elif suite == "dist":
        shapes = _dist_modes(_batch(suite, "kda_prefill", 1024, 4, 1))
    else:
        return [replace(c, K=32, V=32, dtype="float32") for c in _on_gpu(suite)]
    return [replace(c, K=64, V=64, dtype="float32") for c in shapes]


def _dist_modes(case: Case) -> list[Case]:
    return [replace(case, mode=mode) for mode in ("cp-ring", "cp-scan", "tp")]


def _with_shape(cases: Sequence[Case], custom: Custom) -> list[Case]:
    """The user's shape for every operation, mode, gate and set of flags of a suite."""
    if custom.lens and (custom.t or custom.b):
        raise ValueError("--lens gives every sequence its length; leave out --t and --b")
    shaped: list[Case] = []
    for c in cases:
        for t, h in itertools.product(custom.t or (c.lens[0],), custom.h or (c.H,)):
            N = custom.b or (1 if custom.t and not c.is_decode else c.N)
            ratio = c.HV // c.H
            HV = custom.hv or h * ratio
            c = replace(c, H=h, HV=HV, K=custom.k or c.K, V=custom.v or c.V)
            if custom.lens and not c.is_decode:
                shaped.append(replace(c, lens=custom.lens, packed=True))
            elif custom.t or custom.b or not c.packed:
                shaped.append(replace(c, lens=(t,) * N, packed=False))
            else:
                shaped.append(c)
    return shaped


def _with_options(cases: Sequence[Case], custom: Custom) -> list[Case]:
    changed: list[Case] = []
    for c in cases:
        if custom.dtype is not None:
            c = replace(c, dtype=custom.dtype)
        if custom.flags is not None:
            c = replace(c, flags=custom.flags)
        gates = custom.gates if custom.gates and c.is_kda else (c.gate,)
        changed += [replace(c, gate=gate) for gate in gates]
    # a suite that runs all gates, asked for one, would repeat itself
    return list(dict.fromkeys(changed))


def parse_flags(text: str) -> tuple[str, ...]:
    """ "all", "none", or names with commas between."""
    if text in ("all", "none"):
        return ALL_FLAGS if text == "all" else ()
    return tuple(name.strip() for name in text.split(",") if name.strip())
