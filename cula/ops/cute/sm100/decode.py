# SPDX-License-Identifier: Apache-2.0
"""Decode on Blackwell: the kernels of `common/decode_frame.py` and `common/decode_steps.py`, which no architecture owns.

Some have run on Hopper, none here. Which of them takes a call is chosen by what was measured there (`decode.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from cula.ops.cute.common.decode_frame import decode_variants
from cula.ops.cute.common.decode_steps import steps_variants
from cula.ops.cute.toolchain.variants import Variant


def variants() -> Iterator[Variant]:
    """Three tall blocks, because with four, and so 128 registers, the compiler spills ten of them."""
    yield from decode_variants(tall_blocks=3)
    yield from steps_variants()
