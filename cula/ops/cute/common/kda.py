# SPDX-License-Identifier: Apache-2.0
"""The KDA forward of every architecture: one host function that cuts the workspace, launches `kda_prepare` and hands over to the
architecture's own launch of the state kernel.

bf16 q, k, v, o with K = V = 128.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_stream

from cula.ops.cute.common.kda_prepare import VEC, Kind, prepare_kernel
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    by_head,
    fake_compact,
    fake_strided,
    fake_vector,
    tile_layout,
    tma_load,
    tma_store,
)

TILE, SQUARE, STATE = 64 * 128, 64 * 64, 128 * 128


class Work(NamedTuple):
    """The workspace between the kernels. A record is a chunk's of one head, a map a segment's."""

    tiles: Any  # [192 records, 128]: kb, qg, kr
    T: Any  # [64 records, 64], transposed
    P: Any  # [64 records, 64]
    vec: Any  # [chunks, HV, VEC]
    all_vecs: Any  # the same as [records, VEC]
    B: Any  # [maps, 128, 128]
    M: Any  # [2 maps, 128, 128]: hi, lo
    all_m: Any  # the same as [256 maps, 128]


def tokens_first(t: Any) -> Any:
    """[B, T, ...] -> [B T, ...]."""
    shape, stride = t.layout.shape, t.layout.stride
    return cute.make_tensor(t.iterator, cute.make_layout((shape[0] * shape[1], *shape[2:]), stride=(stride[1], *stride[2:])))


@cute.jit
def kda_host(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    mV: cute.Tensor,
    mG: cute.Tensor,
    mBeta: cute.Tensor,
    mA: cute.Tensor,
    mBias: cute.Tensor,
    mO: cute.Tensor,
    mH0: cute.Tensor,
    mHt: cute.Tensor,
    mCu: cute.Tensor,
    mWork: cute.Tensor,
    scale: F32,
    lower: F32,
    beta_top: F32,
    has_h0: I32,
    has_ht: I32,
    length: I32,
    steps: I32,
    chunks: I32,
    segments: I32,
    per_segment: I32,
    has_maps: I32,
    stream,
    kind: cutlass.Constexpr,
    launch_state: cutlass.Constexpr,
):
    """q, k [B, T, H, 128], v, g, o [B, T, HV, 128], beta [B, T, HV], of which B and T flatten into one; states [N, HV, dv, dk].

    `chunks` and `segments` are how many numbers there are (`kda_cut`), `length` is that of every sequence or 0 (then `mCu` has
    them), `beta_top` is 0 for a beta that is activated already. `launch_state(work, (v, o), (h0, ht), cu, (has_h0, has_ht,
    per_segment, length, steps, segments, has_maps), dtype, stream)` is the architecture's.
    """
    dtype = kind.dtype
    mQ, mK, mV, mG, mBeta, mO = [tokens_first(t) for t in (mQ, mK, mV, mG, mBeta, mO)]
    HV = mV.shape[1]
    records = chunks * HV
    maps = segments * HV
    records64, maps64 = cutlass.Int64(records), cutlass.Int64(maps)
    base = mWork.iterator.toint()
    part = lambda t, at: cute.make_ptr(t, base + at, cute.AddressSpace.gmem, assumed_align=128)
    tiles = cute.make_tensor(part(dtype, 0), cute.make_layout((records * 192, 128), stride=(128, 1)))
    at = records64 * (3 * TILE * 2)
    square = cute.make_layout((records * 64, 64), stride=(64, 1))
    mT = cute.make_tensor(part(dtype, at), square)
    at += records64 * (SQUARE * 2)
    mP = cute.make_tensor(part(dtype, at), square)
    at += records64 * (SQUARE * 2)
    mVec = cute.make_tensor(part(F32, at), cute.make_layout((chunks, HV, VEC), stride=(HV * VEC, VEC, 1)))
    all_vecs = cute.make_tensor(part(F32, at), cute.make_layout((records, VEC), stride=(VEC, 1)))
    at += records64 * (VEC * 4)
    mB = cute.make_tensor(part(F32, at), cute.make_layout((maps, 128, 128), stride=(STATE, 128, 1)))
    at += maps64 * (STATE * 4)
    mM = cute.make_tensor(part(dtype, at), cute.make_layout((2 * maps, 128, 128), stride=(STATE, 128, 1)))
    all_m = cute.make_tensor(part(dtype, at), cute.make_layout((2 * maps * 128, 128), stride=(128, 1)))

    lt, lg = tile_layout(64, 128), tile_layout(64, 128, dtype=kind.g_type)
    (tma_q, gQ), (tma_k, gK) = [tma_load(by_head(t), lt, (64, 128)) for t in (mQ, mK)]
    tma_g, gG = tma_load(by_head(mG), lg, (64, 128))
    tma_out, gOut = tma_store(tiles, tile_layout(64, 128, dtype=dtype), (64, 128))
    of_mma = lambda t: cute.make_tiled_mma(warp.MmaF16BF16Op(t, F32, (16, 8, 16)), (1, 1, 1), permutation_mnk=(16, 16, 16))
    mma_tf32 = cute.make_tiled_mma(warp.MmaTF32Op((16, 8, 8)), (1, 1, 1))
    prepare_kernel(
        tma_q,
        gQ,
        tma_k,
        gK,
        tma_g,
        gG,
        tma_out,
        gOut,
        mBeta,
        mA,
        mBias,
        mT,
        mP,
        mVec,
        mCu,
        scale,
        lower,
        beta_top,
        length,
        steps,
        HV // mK.shape[1],
        of_mma(F16),
        of_mma(BF16),
        mma_tf32,
        lt,
        lg,
        kind,
    ).launch(
        grid=(HV, chunks, 1),
        block=(128, 1, 1),
        stream=stream,
        min_blocks_per_mp=3 if cutlass.const_expr(dtype is F16 and kind.g_type.width == 16) else 2,
        preferred_smem_carveout=100,
    )

    launch_state(
        Work(tiles, mT, mP, mVec, all_vecs, mB, mM, all_m),
        (mV, mO),
        (mH0, mHt),
        mCu,
        (has_h0, has_ht, per_segment, length, steps, segments, has_maps),
        dtype,
        stream,
    )


def arguments(kind: Kind) -> tuple[Any, ...]:
    """What `kda_host` is compiled for, but for the last."""
    size = cute.sym_int
    B, T, H, HV = size(), size(), size(), size()
    return (
        fake_strided(BF16, (B, T, H, 128), 1),
        fake_strided(BF16, (B, T, H, 128), 1),
        fake_strided(BF16, (B, T, HV, 128), 1),
        fake_strided(kind.g_type, (B, T, HV, 128), 1),
        fake_strided(kind.beta_type, (B, T, HV), 1, align=kind.beta_type.width // 8),
        fake_vector(F32),
        fake_compact(F32, size(), 128, align=4),
        fake_strided(BF16, (B, T, HV, 128), 1),
        fake_compact(F32, size(), size(), 128, 128),
        fake_compact(F32, size(), size(), 128, 128),
        fake_vector(I32),
        fake_compact(cutlass.Uint8, cute.sym_int64(), align=128),
        F32(1.0),
        F32(-5.0),
        F32(1.0),
        *(I32(1) for _ in range(8)),
        make_fake_stream(),
        kind,
    )


def kinds() -> Iterator[Kind]:
    """All that are compiled."""
    for dtype, g_type, beta_type, has_gate in itertools.product((F16, BF16), (BF16, F32), (F32, BF16), (True, False)):
        yield Kind(dtype, g_type, beta_type, has_gate)
