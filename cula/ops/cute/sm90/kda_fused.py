# SPDX-License-Identifier: Apache-2.0
"""KDA on Hopper, fused: the same SMs compute chunks and have a state pass over them, with nothing but shared memory between.
For calls whose (sequence, head) pairs fill the GPU, and for short ones; it needs no workspace.

The steps are those of the split kernels, `common/kda_intra.py` and `kda_recurrence.py`. Registers decide how they are arranged: a
state [128 dv, 128 dk] in float32 and what it is multiplied with leave too few for warps that compute chunks. So two SMs share a
head, a cluster of two blocks: each has 64 rows dv of the state, computes every other chunk, and sends it to its partner's shared
memory.

| warps | role                                                              | registers |
|-------|-------------------------------------------------------------------|-----------|
| 0-7   | `intra_role` (`kda_fused_intra.py`): chunks 4 m + rank            | 80        |
| 8-15  | the same: chunks 4 m + 2 + rank                                   | 80        |
| 16-19 | `recurrence_role` (`kda_fused_recurrence.py`): all chunks, 64 rows dv | 160   |

Chunks are counted through all the heads of a cluster, so that the intra-chunk warps run ahead from one to the next.

| shared memory (`kda_fused_smem.py`)                                                    | bytes |
|----------------------------------------------------------------------------------------|-------|
| two stages: inputs, results in their places, all in between                             | 152 K |
| an inbox: a chunk that the partner computed                                            | 65 K  |
| v [64 tokens, 64 dv]                                                                   | 8 K   |

What the recurrence reads of a chunk leaves for the partner as soon as it is there. A stage is free when both recurrences are done
with its chunk, which also says that the copy has been made; g comes first, to the place of kb, with which they are done first.

| mbarrier    | says                                                     | arrivals              |
|-------------|----------------------------------------------------------|-----------------------|
| `ready`     | a chunk of our own is computed, for each stage            | 256 threads           |
| `arrived`   | one of the partner's has come                            | 1, and its bytes      |
| `half_free` | both recurrences have read kb and T, for each stage       | 4 warps here, 4 there |
| `free`      | and all else                                             | 4 warps here, 4 there |
| `o_left`    | o, which was in memory of the stage that is not sent, has left it | 1             |
| `taken`     | o, which was in the partner's inbox, has left it         | 1 there               |
| `v_full`    | v has come                                               | 1, and its bytes      |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cula.ops.cute import kda_abi
from cula.ops.cute.common.arguments import variant_of
from cula.ops.cute.common.kda import operands
from cula.ops.cute.common.kda_intra import GateInputs, IntraScalars
from cula.ops.cute.common.kda_intra_smem import Full
from cula.ops.cute.common.kda_intra_steps import IntraMmas, intra_mmas
from cula.ops.cute.common.kda_lengths import leave_to_split
from cula.ops.cute.common.kda_variant import fused_variants
from cula.ops.cute.common.states import KeptStates, States, kept_states_of, states_of
from cula.ops.cute.common.tiles import BF16, F16, I32, Tma, by_head, tile_layout, tma_load, tma_store
from cula.ops.cute.sm90.kda_fused_intra import intra_role, stage_layout
from cula.ops.cute.sm90.kda_fused_recurrence import recurrence_role
from cula.ops.cute.sm90.kda_fused_smem import (
    GROUPS,
    RESULT_BYTES,
    STAGE_BYTES,
    Cluster,
    allocate_mbarriers,
    init_mbarriers,
)
from cula.ops.cute.sm90.kda_recurrence_steps import Mmas, recurrence_mmas
from cula.ops.cute.toolchain.variants import Variant

THREADS, RECURRENCE_WARP = 640, 16  # the first of its warpgroup
INTRA_REGISTERS, RECURRENCE_REGISTERS = 80, 160


class FusedTma(NamedTuple):
    """What TMA copies."""

    q: Tma
    k: Tma
    g: Tma  # one gate a channel; of one gate a head nothing is copied
    v: Tma
    o: Tma


class Memory(NamedTuple):
    """What the recurrence's threads read and write."""

    mO: Any  # [T, 128, HV]
    states: States
    kept: KeptStates
    mCu: Any  # [N + 1]


class Items(NamedTuple):
    """The pieces of work of a launch, heads of sequences, and numbers that blocks go by."""

    length: Any
    group_of_heads: Any  # value heads of each head of q and k
    HV: Any
    total: Any  # N HV
    longest: Any  # see `kda_lengths.py`

    def at(self, mCu: Any, item: Any) -> Any:
        """(Sequence, value head, first token, tokens) of one of them."""
        return item_at(item, self.HV, mCu, self.length)


@cute.jit
def item_at(item: I32, HV: I32, mCu: cute.Tensor, length: I32):
    seq = item // HV
    begin, tokens = seq * length, length
    if length == 0:
        begin = mCu[seq]
        tokens = mCu[seq + 1] - begin
    return seq, item - seq * HV, begin, tokens


@cute.jit
def set_up(
    stages: cutlass.Constexpr, bars: cutlass.Constexpr, tma: cutlass.Constexpr, lt: cutlass.Constexpr, variant: cutlass.Constexpr
):
    """Barriers and descriptors, by one warp."""
    for g in cutlass.range_constexpr(GROUPS):
        full = stage_layout(stages, g, lt, variant).full
        with cute.arch.elect_one():
            for which in Full:
                cute.arch.mbarrier_init(full + which, 1)
    with cute.arch.elect_one():
        init_mbarriers(bars)
    for of in tma:
        cpasync.prefetch_descriptor(of.atom)


@cute.kernel
def fused_kernel(
    tma: FusedTma,
    gates: GateInputs,
    memory: Memory,
    scalars: IntraScalars,
    items: Items,
    mmas: IntraMmas,
    recurrence: Mmas,
    lt: cute.ComposedLayout,
    lv: cute.ComposedLayout,
    variant: cutlass.Constexpr,
):
    """Cluster i takes the pieces of work i, i + clusters, ..."""
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    rank = block & 1
    cluster = Cluster(rank=rank, number=block >> 1, clusters=blocks >> 1, partner=1 - rank)
    smem = SmemAllocator()
    stages = smem.allocate(GROUPS * STAGE_BYTES + RESULT_BYTES, 1024)
    sV = smem.allocate_tensor(BF16, lv.outer, byte_alignment=1024, swizzle=lv.inner)
    bars = allocate_mbarriers(smem)
    if warp_id == 0:
        set_up(stages, bars, tma, lt, variant)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended
    leave_to_split(memory.mCu, items.longest)

    if warp_id < RECURRENCE_WARP:
        cute.arch.setmaxregister_decrease(INTRA_REGISTERS)
        intra_role(tma, gates, scalars, items, memory.mCu, mmas, variant, stages, bars, cluster, lt)
    else:
        cute.arch.setmaxregister_increase(RECURRENCE_REGISTERS)
        recurrence_role(tma, memory, items, recurrence, stages, sV, bars, cluster)
    cute.arch.cluster_arrive()  # the partner may still send
    cute.arch.cluster_wait()


@cute.jit
def fused_host(x: cutlass.Constexpr, stream, variant: cutlass.Constexpr):
    """The arguments of `kda_abi.FUSED`; so many clusters take N HV heads in waves."""
    of, lt, lv = operands(kda_abi.FUSED, x, variant), tile_layout(64, 128), tile_layout(64, 64, 1)
    tma = FusedTma(
        q=tma_load(by_head(of.q), lt, (64, 128)),
        k=tma_load(by_head(of.k), lt, (64, 128)),
        g=tma_load(by_head(of.gate), lt, (64, 128)),
        v=tma_load(by_head(of.v), lv, (64, 64)),
        o=tma_store(by_head(of.o), tile_layout(64, 64), (64, 64)),
    )
    fused_kernel(
        tma,
        of.gates,
        Memory(by_head(of.o), states_of(x), kept_states_of(x), of.cu),
        IntraScalars(x.scale, x.lower, x.beta_top, x.beta_bits),
        Items(x.length, x.HV // x.H, x.HV, x.N * x.HV, x.longest),
        intra_mmas(),
        recurrence_mmas(F16),
        lt,
        lv,
        variant,
    ).launch(
        grid=(2 * x.clusters, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(2, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


def variants() -> Iterator[Variant]:
    uses = ("wgmma", "tma_load", "tma_store", "mma", "ldmatrix")
    for variant in fused_variants():
        yield variant_of(f"fused_{variant.name}", kda_abi.FUSED, fused_host, variant, uses=uses)
