# SPDX-License-Identifier: Apache-2.0
"""Shared memory of the intra-chunk steps: which array is where, and which take each other's place."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.inverse import blocks
from cula.ops.cute.common.kda_variant import KdaVariant
from cula.ops.cute.common.tiles import BF16, F16, F32, allocate_tile, tile_at, tile_layout
from cula.ops.cute.kda_abi import TILE_BYTES


class Full(enum.IntEnum):
    """mbarriers that say what has come."""

    G = 0
    KQ = 1


class SmemLayout(NamedTuple):
    """Arrays in shared memory. Tables have a row of 128 channels for each block of 16 tokens.

    In the split kernels results leave through shared memory. In the fused one they stay, and the recurrence reads them there.
    """

    k: Any
    q: Any
    to_q: int  # bytes from k
    kb_qg: Any  # in the places of k and q; where results stay, of g and q
    kl_ql: Any  # k e^L, q e^L between the passes: fp16 rounds them before the last factors are multiplied in, and in place
    g: Any
    steps: Any  # log2 decays of tokens, as fp16, in the place of g
    kr: Any  # in the place of g; where results stay, of k
    sums: Any  # L_16
    inverses: Any  # e^{-L_16}
    after: Any  # e^{G_C - G after the block}
    before: Any  # e^{G before the block}
    between: Any  # [3, 128], decays of the blocks between two
    halves: Any  # [4, 2, lane, block]: half of P's diagonal blocks, where the first pass alone has tables
    out: Any  # P, then T, on their way out, in the place of all tables
    keys: Any  # [8 values, lane, 16-channel step, block]: keys as B operands of a warp; or a tile of all of them
    below: Any  # A by blocks below the diagonal, in the place of `keys`
    diagonal: Any  # A's blocks on it; then their inverses
    T: Any  # in the place of `keys` too, where results stay
    decays: Any  # [128], e^{G_C}, where results stay
    bias: Any  # [128]
    norms: Any  # [64, side], inverse
    sizes: Any  # [64, 2], |kr_t| and |kb_i|
    beta: Any  # [64]
    bound: Any  # [4], of one gate a head
    full: Any  # mbarriers, by `Full`


class Arena:
    """Hands out pieces of shared memory from a pointer on, which need not be known when the kernel is compiled."""

    def __init__(self, start: Any) -> None:
        self.start, self.used = start, 0

    def allocate(self, size: int, alignment: int) -> Any:
        at = -(-self.used // alignment) * alignment
        self.used = at + size
        return (self.start + at).align(alignment)

    def allocate_tensor(self, dtype: Any, layout: Any, byte_alignment: int, swizzle: Any = None) -> Any:
        start = self.allocate(cute.cosize(layout) * dtype.width // 8, byte_alignment)
        return cute.make_tensor(cute.recast_ptr(start, swizzle, dtype), layout)

    def allocate_array(self, dtype: Any, n: int) -> Any:
        return cute.recast_ptr(self.allocate(n * dtype.width // 8, 8), dtype=dtype)


def smem_layout(smem: Any, lt: Any, variant: KdaVariant, stays: bool = False, of_keys: Any = None) -> SmemLayout:
    """Allocate the arrays. `of_keys` is the layout of a tile of keys, where those are not operands of one warp; then there are no
    places for k e^L and q e^L.

    Where results stay (`stays`), all that the recurrence reads comes first: kb, qg, kr, P, e^{G_C}, b and T, in this order and
    without gaps.
    """
    dtype, is_f16 = variant.dtype, variant.dtype is F16
    wide = F16 if is_f16 else F32
    pair, square = tile_layout(64, 128, 2), tile_layout(64, 64, dtype=dtype)
    if stays:  # g where kb will be, which the recurrence is done with first
        kb_qg, kr = allocate_tile(smem, pair, dtype), allocate_tile(smem, lt, dtype)
        kl_ql, k, q, to_q = kb_qg, tile_at(kr, lt, BF16), tile_at(kb_qg[None, None, 1], lt, BF16), -TILE_BYTES
        g = tile_at(kb_qg, lt, BF16) if variant.has_gate_tile else None
        steps = tile_at(kb_qg, lt, F16)
    else:
        kq = allocate_tile(smem, pair)
        k, q, to_q, kb_qg = kq[None, None, 0], kq[None, None, 1], TILE_BYTES, tile_at(kq, pair, dtype)
        kr = allocate_tile(smem, lt, dtype)
        g = tile_at(kr, lt, BF16) if variant.has_gate_tile else None
        kl_ql, steps = kb_qg if is_f16 else (allocate_tile(smem, pair, dtype) if of_keys is None else None), kr
    tables = smem.allocate(8 * 1024 if is_f16 else 9 * 1024, 1024)

    def table(at: int, t: Any, rows: int = 4) -> Any:
        return cute.make_tensor(cute.recast_ptr(tables + at, dtype=t), cute.make_layout((rows, 128), stride=(128, 1)))

    by_block = cute.make_layout((4, 128), stride=(128, 1))

    def vector(*shape: int) -> Any:
        return smem.allocate_tensor(F32, cute.make_layout(shape), byte_alignment=16)

    decays, beta = (vector(128), vector(128)) if stays else (None, None)
    if of_keys is None:
        by_lane = cute.make_layout((8, 32, 8, 3), stride=(1, 8, 256, 2048))
        keys = smem.allocate_tensor(dtype, by_lane, byte_alignment=1024 if stays else 16)
    else:
        keys = allocate_tile(smem, of_keys, dtype)
    diagonal = smem.allocate_tensor(F32, blocks(4), byte_alignment=16)
    bias, norms, sizes, beta = vector(128), vector(64, 2), vector(64, 2), beta or vector(64)
    bound, full = vector(4), smem.allocate_array(cutlass.Int64, len(Full))
    return SmemLayout(
        k=k,
        q=q,
        to_q=to_q,
        kb_qg=kb_qg,
        kl_ql=kl_ql,
        g=g,
        steps=steps,
        kr=kr,
        sums=cute.make_tensor(cute.recast_ptr(keys.iterator, dtype=F32), by_block) if stays else table(0, F32),
        inverses=table(2048, F32),
        after=table(4096, wide),
        before=table(4096 + 4 * 128 * wide.width // 8, wide),
        between=table(7168 if is_f16 else 8192, dtype, 3),
        halves=cute.make_tensor(cute.recast_ptr(tables, dtype=F32), cute.make_layout((4, 2, 32, 4), stride=(1, 128, 4, 512))),
        out=cute.make_tensor(cute.recast_ptr(tables, square.inner, dtype), square.outer),
        keys=keys,
        below=cute.make_tensor(cute.recast_ptr(keys.iterator, dtype=F32), blocks(6)),
        diagonal=diagonal,
        T=cute.make_tensor(cute.recast_ptr(keys.iterator, square.inner, dtype), square.outer) if stays else None,
        decays=decays,
        bias=bias,
        norms=norms,
        sizes=sizes,
        beta=beta,
        bound=bound,
        full=full,
    )
