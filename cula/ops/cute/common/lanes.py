# SPDX-License-Identifier: Apache-2.0
"""Sums and largest values over lanes of a warp, in a fixed order: every lane that takes part has the result.

Which lanes meet is said by the distances between them. An accumulator of mma.sync or wgmma has a row in four neighbouring lanes,
and a column in the eight that are four apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import cutlass.cute as cute

WARP = (1, 2, 4, 8, 16)
HALF_WARP = WARP[:4]  # sixteen neighbours
ROW, COLUMN = WARP[:2], WARP[2:]  # of an accumulator


def sum_over(lanes: Iterable[int], x: Any) -> Any:
    """The sum of a number that each of the lanes has."""
    return sums_over(lanes, x)[0]


def sums_over(lanes: Iterable[int], *numbers: Any) -> Sequence[Any]:
    """The sums of several numbers. None waits for another's shuffle."""
    sums: Sequence[Any] = numbers
    for distance in lanes:
        sums = [x + cute.arch.shuffle_sync_bfly(x, offset=distance) for x in sums]
    return sums


def largest_over(lanes: Iterable[int], x: Any) -> Any:
    """The largest of the lanes' numbers, in float32."""
    for distance in lanes:
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=distance))
    return x
