# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Blackwell: one kernel, with nothing in global memory but inputs and outputs; S stays in tensor memory.

Never run on a GPU: compiled, and its PTX run on a CPU (docs/gdn-blackwell.md).

The maths is that of Hopper's kernel (`sm90/gdn.py`). A chunk of 64 tokens of a value head, with log2 decays summed from its start
(G_t; G_C over all of it), write strengths b, unit keys and queries k, q, and the state S [128 dk, 128 dv] in float32:

    f = 2^G    r = 2^(G_C - G)    D[t, i] = 2^(G_t - G_i), i <= t               factors, all at most 1
    [A; P] = [strict(k k^T D) b; lower(q k^T D) b]     T = (I + A)^-1           one product for both, b on the columns
    R = k S    Y = v - f R    E = T Y    S <- 2^G_C S + k^T (r b E)             the chain
    o = scale (f (q S) + P E)

Keys and queries lie below each other, so that their scores are one product of 128 rows, of which a thread has one. All other
products are transposed, S^T [128 dv, 128 dk]: lane = row dv, A in tensor memory, where one thread a row puts it. Rows dv do not
mix, so what a thread does to its row needs no other thread.

| warps      | role                                                                                    | registers |
|------------|-----------------------------------------------------------------------------------------|-----------|
| 0          | `load_keys`: TMA loads of k and q; allocates tensor memory                              | 24        |
| 1          | `mma_role`: issues the products of the chain and of the output                          | 24        |
| 2          | `scores_role`: issues those of scores                                                   | 24        |
| 3          | `load_values`: TMA loads of v                                                           | 24        |
| 4-7        | `rows_role` (gdn_rows): S to 16 bits and its decay, Y, E to 16 bits; states             | 168       |
| 8-11       | `output_role` (gdn_output): adds up o, over the shared memory of q to global memory     | 112       |
| 12-15, -19 | `prepare_role` (gdn_prepare): k and q as operands, factors, T and P; every other chunk each | 88    |

| barrier    | arrives            | waits            | says                                                               |
|------------|--------------------|------------------|--------------------------------------------------------------------|
| full[4]    | TMA                | 12-19            | k and q of a chunk have come                                       |
| ready[4]   | 12-19              | 1, 2, 4-7, 8-11  | they are operands, and the chunk's vectors are in place            |
| empty[4]   | 8-11               | 0                | all have read both, and o, that took the place of q, has left      |
| v_full[2]  | TMA                | 4-7              | v has come                                                         |
| v_empty[2] | 4-7                | 3                | it has been read                                                   |
| a_done[2]  | 2 (commit)         | 12-19            | scores, for each preparer                                          |
| a_free     | 12-19              | 2                | they have been read                                                |
| t_ready[2] | 12-19              | 1                | T and P are operands                                               |
| s_ready[2] | 4-7                | 1, 8-11          | S is an operand (and the rows' units are there)                    |
| r_done     | 1 (commit)         | 4-7              | R                                                                  |
| y_ready    | 4-7                | 1                | Y is an operand; the decayed S is in place                         |
| e_done     | 1 (commit)         | 4-7              | E                                                                  |
| w_ready    | 4-7                | 1                | r b E is an operand                                                |
| e_ready    | 4-7                | 1                | E is one                                                           |
| s_done     | 1 (commit)         | 4-7              | S after the chunk                                                  |
| o_done[2]  | 1 (commit)         | 8-11, 12-19      | both parts of o, and so everything of the chunk; T and P are free  |
| o_free     | 8-11               | 1                | they have been read                                                |

| tensor memory                            | columns   | | shared memory              | bytes  |
|------------------------------------------|-----------|-|----------------------------|--------|
| S                                        | 0 - 127   | | k, q, then o: four stages  | 128 K  |
| S in 16 bits                             | 128 - 191 | | v: two stages              | 32 K   |
| R, then Y in 16 bits                     | 192 - 255 | | T, P: two of each          | 32 K   |
| E, then r b E and E in 16 bits           | 256 - 319 | | A, to be inverted, two     | 25 K   |
| q S                                      | 320 - 383 | | vectors of eight chunks    | 8.25 K |
| P E                                      | 384 - 447 | | units of rows, two         | 1 K    |
| scores                                   | 448 - 511 | |                            |        |

The precision is `dtype`: fp16 operands where keys and queries are normalised here, rows of the state then run in the window of
`common/fp16_window.py`; bf16 otherwise. Blocks take heads of sequences in turns: few heads leave SMs without work, and KDA's
kernels, with segments, serve those (`gdn_schedule.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp

from cula.ops.cute.common.arguments import variant_of
from cula.ops.cute.common.gdn_items import GateInputs, GdnTma, Items, Scalars, States, items_of, operands
from cula.ops.cute.common.registers import set_registers
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    K_MAJOR,
    MN_MAJOR,
    by_head,
    tile_layout,
    tma_load,
    tma_store,
)
from cula.ops.cute.gdn_abi import GDN
from cula.ops.cute.toolchain.variants import Variant

from .gdn_issue import load_keys, load_values, mma_role, scores_role
from .gdn_output import output_role
from .gdn_prepare import prepare_role
from .gdn_rows import rows_role
from .gdn_smem import Mbarriers, Storage, allocate, init_mbarriers, mbarriers_at
from .tmem import COLUMNS, after_sync, before_sync, umma, umma_of_tiles

THREADS, LAUNCH_REGISTERS = 640, 96
# Of the roles' threads: 480 in all, of five warpgroups.
ISSUE_REGISTERS, ROW_REGISTERS, OUTPUT_REGISTERS, PREPARE_REGISTERS = 24, 168, 112, 88


class Mmas(NamedTuple):
    """Products, by their results."""

    scores: Any  # [128, 64], both operands in shared memory
    x: Any  # [128 dv, 64] of a K-major tile, A in tensor memory like those below
    t: Any  # [128 dv, 64] of an MN-major tile
    s: Any  # [128 dv, 128] of an MN-major tile
    tf32: Any  # of a warp, for the inverse


def gdn_mmas(dtype: Any) -> Mmas:
    return Mmas(
        umma_of_tiles(64, K_MAJOR, K_MAJOR, dtype),
        umma(64, K_MAJOR, dtype),
        umma(64, MN_MAJOR, dtype),
        umma(128, MN_MAJOR, dtype),
        cute.make_tiled_mma(warp.MmaTF32Op((16, 8, 8)), (1, 1, 1)),
    )


class Block(NamedTuple):
    """What the roles of a block share."""

    tma: GdnTma
    mO: Any  # [T, 128, HV]
    gates: GateInputs
    states: States
    scalars: Scalars
    items: Items
    mmas: Mmas
    storage: Storage
    bars: Mbarriers
    tmem: Any
    dtype: Any

    @property
    def is_f16(self) -> bool:
        return self.dtype is F16


@cute.kernel
def gdn_kernel(
    tma: GdnTma,
    mO: cute.Tensor,
    gates: GateInputs,
    states: States,
    scalars: Scalars,
    items: Items,
    mmas: Mmas,
    dtype: cutlass.Constexpr,
):
    storage = allocate(dtype)
    bars = mbarriers_at(storage.bars)
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp_id == 0:
        cute.arch.alloc_tmem(COLUMNS, storage.tmem)
        cute.arch.relinquish_tmem_alloc_permit()
        with cute.arch.elect_one():
            init_mbarriers(bars)
        for of in tma:
            cpasync.prefetch_descriptor(of.atom)
    cute.arch.mbarrier_init_fence()
    cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended
    before_sync()
    cute.arch.sync_threads()
    after_sync()
    tmem = cute.arch.retrieve_tmem_ptr(F32, 16, storage.tmem)
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warpgroup_id = cute.arch.make_warp_uniform(tid // 128)
    thread = tid % 128  # in its warpgroup: the lane of tensor memory that it sees
    ours = items._replace(first=block)  # their step is an argument, not the size of the grid: that takes no register
    x = Block(tma, mO, gates, states, scalars, ours, mmas, storage, bars, tmem, dtype)
    if warpgroup_id == 0:
        set_registers(ISSUE_REGISTERS, LAUNCH_REGISTERS)
        if warp_id == 0:
            load_keys(x)
        elif warp_id == 1:
            mma_role(x)
        elif warp_id == 2:
            scores_role(x)
        else:
            load_values(x)
    elif warpgroup_id == 1:
        set_registers(ROW_REGISTERS, LAUNCH_REGISTERS)
        rows_role(x, thread)
    elif warpgroup_id == 2:
        set_registers(OUTPUT_REGISTERS, LAUNCH_REGISTERS)
        output_role(x, thread)
    else:
        set_registers(PREPARE_REGISTERS, LAUNCH_REGISTERS)
        prepare_role(x, thread, warpgroup_id - 3)
    before_sync()
    cute.arch.sync_threads()
    after_sync()
    if warp_id == 0:
        cute.arch.dealloc_tmem(tmem, COLUMNS)


@cute.jit
def gdn_host(x: cutlass.Constexpr, stream, dtype: cutlass.Constexpr):
    """The arguments of `gdn_abi.GDN`; there are no pieces here, and no workspace."""
    of, half = operands(x), tile_layout(64, 64)
    tma = GdnTma(
        q=tma_load(by_head(of.q), half, (64, 64)),
        k=tma_load(by_head(of.k), half, (64, 64)),
        v=tma_load(by_head(of.v), tile_layout(64, 128), (64, 128)),
        o=tma_store(by_head(of.o), half, (64, 64)),
    )
    items = items_of(x, of.cu, step=x.blocks)
    gdn_kernel(tma, by_head(of.o), of.gates, of.states, of.scalars, items, gdn_mmas(dtype), dtype).launch(
        grid=(x.blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
    )


def variants() -> Iterator[Variant]:
    uses = ("tcgen05", "tma_load", "tma_store", "mma", "stmatrix", "setmaxnreg")
    for dtype, name in ((F16, "gdn_norm_whole"), (BF16, "gdn_plain_whole")):
        yield variant_of(name, GDN, gdn_host, dtype, uses=uses)
