# SPDX-License-Identifier: Apache-2.0
"""Decode on Hopper: the kernels of `common/decode_frame.py` and `common/decode_steps.py`, which no architecture owns."""

from __future__ import annotations

from collections.abc import Iterator

from cula.ops.cute.common.decode_frame import decode_variants
from cula.ops.cute.common.decode_steps import steps_variants
from cula.ops.cute.toolchain.variants import Variant


def variants() -> Iterator[Variant]:
    yield from decode_variants()
    yield from steps_variants()
