# SPDX-License-Identifier: Apache-2.0
"""The split KDA forward on Blackwell: `common/kda.py` with the intra-chunk kernel of `kda_intra.py` and the recurrence of
`kda_recurrence.py`, which is launched once for transitions where there are segments, and once more.

Never run on a GPU: compiled, and its PTX run on a CPU (docs/kda-blackwell.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.kda import variants_for
from cula.ops.cute.common.tiles import by_head, tile_layout, tma_load, tma_store
from cula.ops.cute.kda_abi import VEC
from cula.ops.cute.sm100.arch import BLACKWELL
from cula.ops.cute.toolchain.variants import Variant

from .kda_intra import intra_kernel
from .kda_recurrence import THREADS, BlockSizes, Memory, RecurrenceTma, recurrence_kernel, recurrence_mmas
from .kda_recurrence_smem import STAGES, TILES


@cute.jit
def launch_recurrence(
    work: cutlass.Constexpr, tokens: cutlass.Constexpr, sizes: cutlass.Constexpr, dtype: cutlass.Constexpr, stream
):
    """Of the transitions of segments, if there are any; then of the segments."""
    lt, lv = tile_layout(64, 128, TILES * STAGES, dtype), tile_layout(64, 128, TILES * STAGES)
    lm, lsq, lo = tile_layout(128, 128, 2 * STAGES, dtype), tile_layout(64, 64, STAGES, dtype), tile_layout(64, 128)
    tma = RecurrenceTma(
        tiles=tma_load(work.tiles, lt, (64, 128)),
        T=tma_load(work.T, lsq, (64, 64)),
        P=tma_load(work.P, lsq, (64, 64)),
        vec=tma_load(work.all_vecs, cute.make_layout((1, VEC)), (1, VEC)),
        v=tma_load(by_head(tokens.v), lv, (64, 128)),
        o=tma_store(by_head(tokens.o), lo, (64, 128)),
        m=tma_load(work.all_m, lm, (128, 128)),
    )
    mmas = recurrence_mmas(dtype)
    HV = work.vec.shape[1]
    for is_transition in (True, False):
        if sizes.has_transitions == 1 or cutlass.const_expr(not is_transition):
            recurrence_kernel(
                tma,
                Memory(by_head(tokens.o), work.vec, tokens.states, tokens.kept, work.B, work.M, work.done, tokens.cu),
                BlockSizes(sizes.per_segment, sizes.length, sizes.halvings),
                mmas,
                lt,
                lv,
                lsq,
                lo,
                lm,
                dtype,
                is_transition,
            ).launch(
                grid=(HV, sizes.segments, 2 if is_transition else 1),
                block=(THREADS, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,
                use_pdl=True,
            )


def variants() -> Iterator[Variant]:
    return variants_for(BLACKWELL, intra_kernel, launch_recurrence, uses=("tcgen05", "tma_load", "tma_store", "mma", "ldmatrix"))
