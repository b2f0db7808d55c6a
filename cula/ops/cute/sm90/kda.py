# SPDX-License-Identifier: Apache-2.0
"""The split KDA forward on Hopper: `common/kda.py` with the recurrence of `kda_recurrence.py`, which computes transitions too."""

from __future__ import annotations

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.kda import variants_for
from cula.ops.cute.common.kda_intra import intra_kernel
from cula.ops.cute.common.tiles import by_head, tile_layout, tma_load, tma_store
from cula.ops.cute.kda_abi import VEC
from cula.ops.cute.sm90.arch import HOPPER
from cula.ops.cute.toolchain.variants import Variant

from .kda_recurrence import THREADS, BlockSizes, Memory, RecurrenceTma, recurrence_kernel
from .kda_recurrence_steps import STAGES, recurrence_mmas


@cute.jit
def launch_recurrence(
    work: cutlass.Constexpr, tokens: cutlass.Constexpr, sizes: cutlass.Constexpr, dtype: cutlass.Constexpr, stream
):
    """A block for each segment, and for each helper."""
    lw, lv = tile_layout(64, 128, STAGES, dtype), tile_layout(64, 128, STAGES)
    lq, lo = tile_layout(32, 32, 4 * STAGES, dtype), tile_layout(64, 64, 2)
    tma = RecurrenceTma(
        tiles=tma_load(work.tiles, lw, (64, 128)),
        T=tma_load(work.T, lq, (32, 32)),
        P=tma_load(work.P, lq, (32, 32)),
        vec=tma_load(work.all_vecs, cute.make_layout((1, VEC)), (1, VEC)),
        v=tma_load(by_head(tokens.v), lv, (64, 128)),
        o=tma_store(by_head(tokens.o), lo, (64, 64)),
        m=tma_load(work.all_m, lw, (64, 128)),
    )
    recurrence_kernel(
        tma,
        Memory(by_head(tokens.o), work.vec, tokens.states, tokens.kept, work.B, work.M, work.done, tokens.cu),
        BlockSizes(
            sizes.per_segment,
            sizes.per_chained_segment,
            sizes.length,
            sizes.halvings,
            sizes.helpers,
            sizes.longest,
        ),
        recurrence_mmas(dtype),
        lw,
        lv,
        lo,
        dtype,
    ).launch(
        grid=(work.vec.shape[1], sizes.helpers + sizes.segments, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


def variants() -> Iterator[Variant]:
    return variants_for(HOPPER, intra_kernel, launch_recurrence, uses=("wgmma", "tma_load", "tma_store", "mma", "ldmatrix"))
