# SPDX-License-Identifier: Apache-2.0
"""Models whose calls are known: heads of a layer, and how their callers hand over a prefill and a decode.

The suite "models" of the benchmarks measures these calls, and `cula.warmup` compiles what they need. K = V = 128 in all of them.
Flags are those of `cula/bench/cases.py`, gates those of a family's `bench.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    name: str
    family: str
    H: int  # heads of queries and keys
    HV: int  # heads of values
    ranks: tuple[int, ...]  # of tensor parallelism, which heads are shared among, that are measured
    gate: str
    prefill: tuple[tuple[str, tuple[str, ...]], ...]  # of each caller: its name, the flags of its call
    decode: tuple[str, ...]  # flags
    pool: str = "float32"  # the dtype of states between calls

    def heads(self, tp: int) -> tuple[int, int]:
        """(H, HV) of one of so many ranks."""
        if tp < 1 or self.H % tp or self.HV % tp:
            raise ValueError(f"{self.name} has {self.H} heads ({self.HV} of values), which {tp} ranks cannot share evenly")
        return self.H // tp, self.HV // tp


# vLLM and Hugging Face hand over finished log decays in float32, also of bounded gates; SGLang hands over the raw ones, and all
# decode from those. For GDN vLLM normalises q and k itself, and SGLang leaves that to the kernel; both have dt_bias in the
# model's dtype.
FINISHED, RAW = ("norm", "h0", "ht", "f32"), ("gate", "sigmoid", "norm")
GDN_CALLERS = (("vLLM", ("h0", "ht")), ("SGLang", ("norm", "pool")))
GDN_RAW = (*RAW, "bias")

MODELS = (
    Model("Kimi-Linear-48B", "kda", 32, 32, (1, 2, 4), "init", (("vLLM", FINISHED), ("SGLang", (*RAW, "pool"))), RAW),
    Model("Kimi-K3", "kda", 96, 96, (2, 4, 8), "fast", (("vLLM", (*RAW, "h0", "ht")), ("HF", FINISHED)), RAW),
    Model("Ling-3.0-Flash", "kda", 32, 32, (1,), "fast", (("HF", ("norm", "h0", "ht")),), RAW, "bfloat16"),
    Model("Qwen3-Next-80B", "gdn", 16, 32, (1, 2, 4), "init", GDN_CALLERS, GDN_RAW, "bfloat16"),
    Model("Qwen3.5-397B", "gdn", 16, 64, (2, 4, 8), "init", GDN_CALLERS, GDN_RAW),
    Model("Qwen3.5-35B", "gdn", 16, 32, (), "init", GDN_CALLERS, GDN_RAW),
    Model("Qwen3.5-27B", "gdn", 16, 48, (), "init", GDN_CALLERS, GDN_RAW),
    Model("MiniMax-Text-01", "lightning", 64, 64, (1, 8), "slopes", (("SGLang", ("pool",)), ("HF", ("h0", "ht"))), ()),
)


def of_family(family: str) -> tuple[Model, ...]:
    return tuple(m for m in MODELS if m.family == family)


def find(name: str) -> tuple[Model, ...]:
    """The model of that name, or all whose names begin with it: "qwen3.5". Case does not matter."""
    found = tuple(m for m in MODELS if m.name.lower().startswith(name.lower()))
    exact = tuple(m for m in found if m.name.lower() == name.lower())
    if not found or not name:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(m.name.lower() for m in MODELS)}, and their beginnings")
    return exact or found
