# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper: what there is to do, and numbers and tensors that roles go by. See `gdn.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass


class GdnVariant(NamedTuple):
    """What the code depends on."""

    dtype: Any  # of operands: fp16 for keys and queries that are normalised here, otherwise bf16
    parts: int  # of 64 rows dv each, of a block: the whole state, or half of it

    @property
    def is_normalised(self) -> bool:
        return self.dtype is cutlass.Float16

    @property
    def preparers(self) -> int:
        """Warpgroups that prepare chunks: one beside two parts of the state, two beside one."""
        return 3 - self.parts

    @property
    def name(self) -> str:
        return f"gdn_{'f16' if self.is_normalised else 'bf16'}_{'whole' if self.parts == 2 else 'half'}"


class Handed(NamedTuple):
    """What pairs of blocks hand on to the next."""

    states: Any  # [records, STATE / 2] float32
    done: Any  # [records]
