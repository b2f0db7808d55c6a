# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper: what there is to do, and numbers and tensors that roles go by. See `gdn.py`."""

from __future__ import annotations

from typing import Any, NamedTuple


class GdnVariant(NamedTuple):
    """What the code depends on."""

    is_normalised: bool  # keys and queries are normalised here
    parts: int  # of 64 rows dv each, of a block: the whole state, or half of it

    @property
    def preparers(self) -> int:
        """Warpgroups that prepare chunks: one beside two parts of the state, two beside one."""
        return 3 - self.parts

    @property
    def has_warp_scores(self) -> bool:
        """Scores are products of warps, not of a warpgroup: `docs/log/gdn-hopper.md` has where that is faster on an H200."""
        return self.is_normalised and self.parts == 1

    @property
    def name(self) -> str:
        return f"gdn_{'norm' if self.is_normalised else 'plain'}_{'whole' if self.parts == 2 else 'half'}"


class Handed(NamedTuple):
    """What pairs of blocks hand on to the next."""

    states: Any  # [records, STATE / 2] float32
    done: Any  # [records]
