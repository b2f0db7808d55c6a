# SPDX-License-Identifier: Apache-2.0
"""The kernel of `states.py`."""

import triton
import triton.language as tl


@triton.jit
def touch_kernel(pool, slots, factor, SIZE: tl.constexpr, PIECE: tl.constexpr, IS_EARLY: tl.constexpr):
    """A piece of a slot of SIZE numbers; launched early as decode is."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    slot = tl.load(slots + i // (SIZE // PIECE)).to(tl.int64)
    p = pool + slot * SIZE + i % (SIZE // PIECE) * PIECE + tl.arange(0, PIECE)
    tl.store(p, (tl.load(p) * factor).to(pool.dtype.element_ty))
