# SPDX-License-Identifier: Apache-2.0
"""KDA forward on Blackwell: `common/kda.py` with the state kernel of `kda_state.py`, and its maps first where there are segments.

Never run on a GPU: compiled, and its PTX run on a CPU (docs/kda-blackwell.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.kda import Target, arguments, kda_host, kinds
from cula.ops.cute.common.kda_prepare_steps import VEC
from cula.ops.cute.common.tiles import K_MAJOR, MN_MAJOR, by_head, tile_layout, tma_load, tma_store
from cula.ops.cute.toolchain.variants import Variant

from .kda_state import STAGES, THREADS, TILES, state_kernel
from .tmem import umma


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
    has_h0, has_ht, per_segment, _, length, steps, segments, has_maps, _ = sizes
    lt, lv = tile_layout(64, 128, TILES * STAGES, dtype), tile_layout(64, 128, TILES * STAGES)
    lm, lsq, lo = tile_layout(128, 128, 2 * STAGES, dtype), tile_layout(64, 64, STAGES, dtype), tile_layout(64, 128)
    tma_tiles, gTiles = tma_load(work.tiles, lt, (64, 128))
    (tma_t, gT), (tma_p, gP) = [tma_load(t, lsq, (64, 64)) for t in (work.T, work.P)]
    tma_vec, gVec = tma_load(work.all_vecs, cute.make_layout((1, VEC)), (1, VEC))
    tma_v, gV = tma_load(by_head(mV), lv, (64, 128))
    tma_o, gO = tma_store(by_head(mO), lo, (64, 128))
    tma_m, gM = tma_load(work.all_m, lm, (128, 128))
    mmas = (umma(64, K_MAJOR, dtype), umma(64, MN_MAJOR, dtype), umma(128, MN_MAJOR, dtype))
    HV = work.vec.shape[1]
    for is_map in (True, False):
        if has_maps == 1 or cutlass.const_expr(not is_map):
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
                mCu,
                has_h0,
                has_ht,
                per_segment,
                length,
                steps,
                *mmas,
                lt,
                lv,
                lsq,
                lo,
                lm,
                dtype,
                is_map,
            ).launch(
                grid=(HV, segments, 2 if is_map else 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
            )


def variants() -> Iterator[Variant]:
    for kind in kinds():
        uses = ("tcgen05", "tma_load", "tma_store", "mma", "ldmatrix")
        yield Variant(kind.name, kda_host, (*arguments(kind), Target(launch_state, has_zeros=True, blocks=2)), uses=uses)
