# SPDX-License-Identifier: Apache-2.0
"""What fp16 can hold: rows of a state that run scaled by a power of two.

The recurrence is linear in (v, S) and rows dv do not mix, so a row may run scaled by a factor if its v is too and what leaves is
divided by it. A row moves when its largest value leaves a window that has room for what one chunk can add. Small rows are
scaled up by no more than 2^24 in all.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.tiles import F32, I32

HIGH, LOW, MOST = 256.0, 1.0 / 256, 2.0**24


@cute.jit
def is_outside(top: F32, factor: F32):
    """Whether a row whose largest value is `top`, scaled by `factor` already, should move."""
    is_small = top < F32(LOW) and top > F32(0.0) and factor < F32(MOST)
    return top > F32(HIGH) or is_small


@cute.jit
def move_inside(top: F32, factor: F32):
    """The power of two to multiply such a row by: 2^-floor(log2 top), as far as `MOST` lets it; 1 for 0, infinity and NaN."""
    exponent = bits_of(top) >> 23
    most = I32(254 + 24) - (bits_of(factor) >> 23)  # the exponent of 2^24 / factor
    power = cutlass.min(cutlass.max(I32(254) - exponent, I32(1)), most)
    power = power if top > F32(0.0) and exponent < 255 else I32(127)
    return from_bits(power << 23)


@cute.jit
def inverse_of(power: F32):
    """1 / a power of two, exactly."""
    return from_bits(I32(254 << 23) - bits_of(power))


@cute.jit
def bits_of(x: F32):
    one = cute.make_rmem_tensor((1,), F32)
    one[0] = x
    return cute.recast_tensor(one, I32)[0]


@cute.jit
def from_bits(bits: I32):
    one = cute.make_rmem_tensor((1,), I32)
    one[0] = bits
    return cute.recast_tensor(one, F32)[0]
