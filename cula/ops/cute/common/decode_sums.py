# SPDX-License-Identifier: Apache-2.0
"""Decode: many sums over the lanes of a warp with few shuffles, and sums over the warps of a block."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from cula.ops.cute.common.decode_call import WARPS
from cula.ops.cute.common.decode_memory import read_four, select
from cula.ops.cute.common.tiles import I32


def sum_of_each(values: list, lane: Any, lanes: int = 32) -> tuple[Any, Any]:
    """Sums over a warp, or each half of it, of as many values or fewer, by halves: a lane sends half of them and keeps the other.
    Returns the sum that a lane has in the end, and which that is. None is a value that nobody wants."""
    half, step, which = len(values) // 2, 1, I32(0)
    while half > 0:
        is_upper = (lane & step) != 0
        which = select(is_upper, which + half, which)
        values = [_halved(x, y, is_upper, step) for x, y in zip(values[:half], values[half:])]
        half, step = half // 2, step * 2
    total = values[0]
    while step < lanes:
        total, step = total + cute.arch.shuffle_sync_bfly(total, offset=step), step * 2
    return total, which


def _halved(x: Any, y: Any, is_upper: Any, step: int) -> Any:
    """Of two values, the sum over both lanes of a pair that is this lane's."""
    if x is None or y is None:
        own = y if x is None else x
        return own if own is None else own + cute.arch.shuffle_sync_bfly(own, offset=step)
    kept, sent = select(is_upper, y, x), select(is_upper, x, y)
    return kept + cute.arch.shuffle_sync_bfly(sent, offset=step)


def sum_of_warps(table: Any, number: Any) -> Any:
    """Of a number that each of the four warps has put its part of into shared memory."""
    four = read_four(table, number * WARPS)
    return (four[0] + four[1]) + (four[2] + four[3])
