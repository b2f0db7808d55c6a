# SPDX-License-Identifier: Apache-2.0
"""What one row of a benchmark measures: an operation, a shape, a gate, a dtype and flags. Plain values, no tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from cula.bench.family import bench_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# name on the command line -> what it switches on
FLAGS = {
    "gate": "the gate's formula in the kernel",
    "sigmoid": "beta's sigmoid in the kernel",
    "norm": "the L2 norm of q and k in the kernel",
    "h0": "start from a state",
    "ht": "return the last state",
    "scalar": "one gate a head (gated delta rule) instead of one a channel",
    "f32": "gates and betas in float32 beside tokens in another dtype",
    "bias": "the gate's bias in the dtype of the tokens, as engines have Qwen's",
    "pool": "first and last states in slots of a pool, in place (prefill)",
    "keep": "the states after each draft token are kept (decode)",
    "invariant": "the same bits alone, in any batch and packed",
}
# What a case of the suite "api" does beyond repeating one call.
HOST_MODES = {"host": "", "host-o": "makes o", "host-lengths": "another length each time", "host-pool": "on a pool"}
LABELLED = {
    "scalar": "one gate a head",
    "f32": "float32 gates",
    "bias": "16-bit bias",
    "pool": "on a pool",
    "keep": "states kept",
    "invariant": "batch invariant",
}
ALL_FLAGS = ("gate", "sigmoid", "norm", "h0", "ht")


@dataclass(frozen=True)
class Case:
    """One row. `op` is `<family>_prefill`, `<family>_train` or `<family>_decode`.

    `lens` holds the length of every sequence; a decode has N = len(lens) rows of lens[0] tokens.
    """

    suite: str
    op: str
    lens: tuple[int, ...]
    H: int
    HV: int
    K: int = 128
    V: int = 128
    gate: str = "fast"  # a distribution of gates, by the names of the family
    dtype: str = "bfloat16"
    flags: tuple[str, ...] = ALL_FLAGS
    packed: bool = False  # along T with cu_seqlens; otherwise a batch of equal lengths
    mode: str = ""  # dist: "cp-ring", "cp-scan", "tp"; api: one of HOST_MODES
    pool: str = "float32"  # the dtype of the states of a decode, or of a prefill on a pool
    model: str = ""  # models: whose call it is

    def __post_init__(self) -> None:
        if not self.lens or min(self.lens) < 1:
            raise ValueError(f"sequence lengths must be positive; got {self.lens}")
        if self.HV % self.H:
            raise ValueError(f"{self.HV} value heads are not a multiple of {self.H} query/key heads")
        if not self.packed and len(set(self.lens)) != 1:
            raise ValueError(f"sequences of different lengths {self.lens} must be packed")
        unknown = set(self.flags) - set(FLAGS)
        if unknown:
            raise ValueError(f"unknown flags {sorted(unknown)}; choose from {sorted(FLAGS)}")

    @property
    def N(self) -> int:
        return len(self.lens)

    @property
    def T(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lens)

    @property
    def is_decode(self) -> bool:
        return self.op.endswith("decode")

    @property
    def is_train(self) -> bool:
        return self.op.endswith("train")

    @property
    def family(self) -> str:
        return self.op.rpartition("_")[0]

    @property
    def is_host(self) -> bool:
        """Whether it measures what a call costs the host."""
        return self.mode.startswith("host")

    @property
    def is_ours_alone(self) -> bool:
        """Whether it compares cuLA with itself."""
        return self.suite == "invariant" or self.mode in ("host-lengths", "host-pool")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def has(self, flag: str) -> bool:
        return flag in self.flags

    @property
    def shape(self) -> str:
        """ "H=12, 1x2048": what a reader calls it."""
        heads = f"H={self.H}" if self.H == self.HV else f"H={self.H} HV={self.HV}"
        if self.is_decode:
            return f"N={self.N} {heads}" + (f" T={self.lens[0]}" if self.lens[0] > 1 else "")
        lens = f"[{','.join(map(str, self.lens))}]" if self.packed else f"{self.N}x{self.lens[0]}"
        return f"{heads}, {lens}"

    @property
    def label(self) -> str:
        parts = [self.model, self.shape] if self.model else [self.shape]
        if (self.K, self.V) != (128, 128):
            parts.append(f"K={self.K} V={self.V}")
        if bench_of(self.family).gates:
            parts.append(self.gate)
        if self.pool != "float32":
            parts.append(f"{self.pool} states")
        parts += [text for flag, text in LABELLED.items() if self.has(flag)]
        if self.is_decode and self.is_host:
            parts.append(HOST_MODES[self.mode] or "out=")
        elif self.mode in HOST_MODES:
            parts += [HOST_MODES[self.mode]] if HOST_MODES[self.mode] else []
        elif self.mode:
            parts.append(self.mode)
        return ", ".join(parts)

    @property
    def id(self) -> str:
        """Names the case in result files: equal ids are the same work."""
        lens = ",".join(map(str, self.lens)) if self.packed else f"{self.N}x{self.lens[0]}"
        head = f"{self.suite}/{self.op}" + (f"/{self.mode}" if self.mode else "")
        flags = "+".join(self.flags) or "none"
        pool = "" if self.pool == "float32" else f"/pool-{self.pool}"
        head += f"/{self.model.replace(' ', '-')}" if self.model else ""
        return f"{head}/{lens}/h{self.H}/hv{self.HV}/k{self.K}/v{self.V}/{self.gate}/{self.dtype}/{flags}{pool}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"lens": list(self.lens), "flags": list(self.flags)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        return cls(**(values | {"lens": tuple(values["lens"]), "flags": tuple(values["flags"])}))
