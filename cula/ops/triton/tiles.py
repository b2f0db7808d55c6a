# SPDX-License-Identifier: Apache-2.0
"""Tiles whose channels end before their block does: head dims that are no powers of two.

Blocks are powers of two, tensors have the head dims that the call has. What lies past the end is read as zero and not written:
a zero channel of q, k and v adds nothing to a product, a norm or a state. SIZE is the head dim, BLOCK the block's; where SIZE is
a multiple of BLOCK, which the compiler knows, there is no mask of channels, and the code is that of whole tiles.

Rows are tokens, or channels of V where the tile is one of a state; IS_TAIL says whether m_r leaves out any.
"""

import triton
import triton.language as tl


@triton.jit
def tile_mask(m_r, o_c, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of a tile [rows, channels]; [rows, 1] where no channel is past the end."""
    if SIZE % BLOCK == 0:
        return m_r[:, None]
    else:
        return m_r[:, None] & (o_c < SIZE)[None, :]


@triton.jit
def tile_mask_t(m_r, o_c, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of a transposed tile, [channels, rows]; [1, rows] where no channel is past the end."""
    if SIZE % BLOCK == 0:
        return m_r[None, :]
    else:
        return m_r[None, :] & (o_c < SIZE)[:, None]


@triton.jit
def load_rows(p, m_r, o_c, IS_TAIL: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile; zeros in rows that are not its own and in channels past the end. Whole tiles need no predicates."""
    if IS_TAIL:
        return tl.load(p, mask=tile_mask(m_r, o_c, SIZE, BLOCK), other=0.0)
    elif SIZE % BLOCK == 0:
        return tl.load(p)
    else:
        return tl.load(p, mask=(o_c < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(p, b_x, m_r, o_c, IS_TAIL: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    if IS_TAIL:
        tl.store(p, b_x, mask=tile_mask(m_r, o_c, SIZE, BLOCK))
    elif SIZE % BLOCK == 0:
        tl.store(p, b_x)
    else:
        tl.store(p, b_x, mask=(o_c < SIZE)[None, :])


@triton.jit
def load_channels(p, o_c, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One value a channel."""
    if SIZE % BLOCK == 0:
        return tl.load(p)
    else:
        return tl.load(p, mask=o_c < SIZE, other=0.0)


@triton.jit
def store_channels(p, b_x, o_c, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    if SIZE % BLOCK == 0:
        tl.store(p, b_x)
    else:
        tl.store(p, b_x, mask=o_c < SIZE)
