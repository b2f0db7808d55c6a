# SPDX-License-Identifier: Apache-2.0
"""What is known about a KDA call when its kernels are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from cula.ops.cute.common.tiles import BF16, F16, F32

GATES = ("gate", "softplus", "log")
"""What g is: raw, with a bound when activated; raw, without; or log decays of any size. `safe` log decays, in bf16, have the
bound of `gate`, by the caller's promise."""


class KdaVariant(NamedTuple):
    """One of the codes that kernels are compiled to."""

    dtype: type  # of all 16-bit operands; float16 where nothing exceeds its range, because q and k are normalised
    g_type: type
    gate: str  # one of `GATES`, or `safe`
    is_scalar: bool = False  # there is one gate a head, not one a channel
    is_plain: bool = False  # with float16, q and k come normalised; otherwise the kernel does it

    @property
    def name(self) -> str:
        short = {BF16: "bf16", F16: "f16", F32: "f32"}
        words = ["kda", short[self.dtype], self.gate, short[self.g_type]]
        return "_".join([*words, *["scalar"] * self.is_scalar, *["plain"] * self.is_plain])

    @property
    def is_normalised(self) -> bool:
        """The kernel normalises q and k."""
        return self.dtype is F16 and not self.is_plain

    @property
    def is_raw(self) -> bool:
        """g is activated in the kernel, by A_log and dt_bias."""
        return self.gate in ("gate", "softplus")

    @property
    def is_steep(self) -> bool:
        """Channels may decay at any speed. What float32 gates could gain from a bound is not worth codes of their own."""
        return not self.is_scalar and (self.gate in ("softplus", "log") or self.g_type is F32)

    @property
    def has_gate_tile(self) -> bool:
        """Gates come by TMA, to shared memory; others are read by the threads that activate them."""
        return not self.is_scalar and self.g_type is BF16


def split_variants() -> Iterator[KdaVariant]:
    """Those of the split kernels: all that there are."""
    for dtype, g_type in itertools.product((F16, BF16), (BF16, F32)):
        for gate in (*GATES, "safe") if g_type is BF16 else GATES:
            yield KdaVariant(dtype, g_type, gate)
        for gate in GATES:
            yield KdaVariant(dtype, g_type, gate, is_scalar=True)


def backward_variants() -> Iterator[KdaVariant]:
    """Those of the backward: fp16 operands, and log decays with keys that come normalised."""
    for variant in fused_variants():
        yield variant
        if variant.gate == "log":
            yield variant._replace(is_plain=True)


def fused_variants() -> Iterator[KdaVariant]:
    """Those of the fused kernel: fp16 operands."""
    return (variant for variant in split_variants() if variant.dtype is F16)
