# SPDX-License-Identifier: Apache-2.0
"""What is known about a KDA call when its kernels are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from cula.ops.cute.common.tiles import BF16, F16, F32


class KdaVariant(NamedTuple):
    """One of the codes that kernels are compiled to."""

    dtype: type  # of all 16-bit operands; float16 also means that q and k are normalised in the kernel
    g_type: type
    has_gate: bool  # g is raw and bounded when activated; otherwise it is the log decay
    is_scalar: bool = False  # there is one gate a head, not one a channel

    @property
    def name(self) -> str:
        short = {BF16: "bf16", F16: "f16", F32: "f32"}
        words = ["kda", short[self.dtype], "gate" if self.has_gate else "log", short[self.g_type]]
        return "_".join([*words, "scalar"] if self.is_scalar else words)


def split_variants() -> Iterator[KdaVariant]:
    """Those of the split kernels: all that there are."""
    for dtype, g_type, has_gate in itertools.product((F16, BF16), (BF16, F32), (True, False)):
        yield KdaVariant(dtype, g_type, has_gate)
        yield KdaVariant(dtype, g_type, has_gate, is_scalar=True)


def fused_variants() -> Iterator[KdaVariant]:
    """Those of the fused kernel, what fits its shared memory: fp16 operands, and gates of 16 bits or one a head."""
    for has_gate in (True, False):
        yield KdaVariant(F16, BF16, has_gate)
    for g_type, has_gate in itertools.product((BF16, F32), (True, False)):
        yield KdaVariant(F16, g_type, has_gate, is_scalar=True)
