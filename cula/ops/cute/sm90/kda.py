# SPDX-License-Identifier: Apache-2.0
"""KDA forward on Hopper: `common/kda.py` with the state kernel of `kda_state.py`, and its maps first where there are segments."""

from __future__ import annotations

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.kda import Target, arguments, kda_host, kinds
from cula.ops.cute.common.kda_prepare_steps import VEC
from cula.ops.cute.common.tiles import K_MAJOR, MN_MAJOR, by_head, tile_layout, tma_load, tma_store, wgmma
from cula.ops.cute.toolchain.variants import Variant

from .kda_state import STAGES, state_kernel


@cute.jit
def launch_state(
    work: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    states: cutlass.Constexpr,
    mCu: cute.Tensor,
    sizes: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    stream,
):
    """Of the maps of segments, if there are any, then of the walk."""
    mV, mO = tokens
    mH0, mHt = states
    has_h0, has_ht, per_segment, per_cold_segment, length, steps, segments, _, helpers = sizes
    lw, lv = tile_layout(64, 128, STAGES, dtype), tile_layout(64, 128, STAGES)
    lq, lo = tile_layout(32, 32, 4 * STAGES, dtype), tile_layout(64, 64, 2)
    tma_tiles, gTiles = tma_load(work.tiles, lw, (64, 128))
    (tma_t, gT), (tma_p, gP) = [tma_load(t, lq, (32, 32)) for t in (work.T, work.P)]
    tma_vec, gVec = tma_load(work.all_vecs, cute.make_layout((1, VEC)), (1, VEC))
    tma_v, gV = tma_load(by_head(mV), lv, (64, 128))
    tma_o, gO = tma_store(by_head(mO), lo, (64, 64))
    tma_m, gM = tma_load(work.all_m, lw, (64, 128))
    mmas = (wgmma(64, K_MAJOR, True, dtype), wgmma(64, MN_MAJOR, True, dtype), wgmma(128, MN_MAJOR, True, dtype))
    state_kernel(
        tma_tiles,
        gTiles,
        tma_t,
        gT,
        tma_p,
        gP,
        tma_vec,
        gVec,
        tma_v,
        gV,
        tma_o,
        gO,
        tma_m,
        gM,
        by_head(mO),
        work.vec,
        mH0,
        mHt,
        work.B,
        work.M,
        work.done,
        mCu,
        has_h0,
        has_ht,
        per_segment,
        per_cold_segment,
        length,
        steps,
        helpers,
        *mmas,
        lw,
        lv,
        lo,
        dtype,
    ).launch(
        grid=(work.vec.shape[1], helpers + segments, 1),
        block=(384, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


def variants() -> Iterator[Variant]:
    for kind in kinds():
        uses = ("wgmma", "tma_load", "tma_store", "mma", "ldmatrix")
        yield Variant(kind.name, kda_host, (*arguments(kind), Target(launch_state, has_zeros=False, blocks=3)), uses=uses)
