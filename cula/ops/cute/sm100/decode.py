# SPDX-License-Identifier: Apache-2.0
"""Decode on Blackwell: the kernels of `common/decode_frame.py`, which no architecture owns.

They compile for it, and no call takes them yet: they have run on Hopper alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from cula.ops.cute.common.decode_frame import decode_variants
from cula.ops.cute.toolchain.variants import Variant


def variants() -> Iterator[Variant]:
    """Three tall blocks, because with four, and so 128 registers, the compiler spills ten of them."""
    yield from decode_variants(tall_blocks=3)
