# SPDX-License-Identifier: Apache-2.0
"""The suites: which cases each has on a GPU and on a CPU, and the same suites over any shape a user names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cula.bench.cases import ALL_FLAGS, Case
from cula.bench.family import bench_of, with_benches

# Suites that every family has cases of; the others are a family's own.
SHARED = {
    "decode": "one token, or a few, for each row from a pool of states",
    "models": "calls that models make, as serving engines and libraries make them",
    "invariant": "what it costs that a sequence has the same bits alone, in any batch and packed",
    "dist": "context and tensor parallelism over the devices of this machine",
    "api": "host time a call: dispatch, eager, graph replay",
}


def known() -> dict[str, str]:
    """All suites and what they measure."""
    own = {suite: what for name in with_benches() for suite, what in bench_of(name).suites.items()}
    return own | SHARED


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
        if suite not in known():
            raise ValueError(f"unknown suite {suite!r}; choose from {list(known())}")
        of_suite = [c for name in with_benches() for c in bench_of(name).cases(suite, device_type == "cuda")]
        if custom.names_shape:
            of_suite = _with_shape(of_suite, custom)
        of_suite = _with_options(of_suite, custom)
        cases += list(dict.fromkeys(of_suite))[:limit]
    return cases


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
        gates = custom.gates if custom.gates and bench_of(c.family).gates else (c.gate,)
        changed += [replace(c, gate=gate) for gate in gates]
    # a suite that runs all gates, asked for one, would repeat itself
    return list(dict.fromkeys(changed))


def parse_flags(text: str) -> tuple[str, ...]:
    """ "all", "none", or names with commas between."""
    if text in ("all", "none"):
        return ALL_FLAGS if text == "all" else ()
    return tuple(name.strip() for name in text.split(",") if name.strip())
