# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention on Hopper. A warpgroup goes through the chunks of one (sequence, value head) with 64 rows of S in
registers.

`common/lightning.py` has the recurrence and says what segments are. A chunk of n <= C = 64 tokens, rows r and i from 0,
everything transposed so that what stays in registers is always the A operand of a wgmma, which alone may come from there:

    P     = lower(scale f^(r-i) q_r . k_i)                             [C, C]    A = q, B = k tiles         -> bf16, shared
    O^T   = S q^T scale f^(r+1)  +  V^T P^T                            [64, C]   A = S, then V^T; B = q, P
    S     = f^n S  +  (V^T f^(n-1-i)) k                                [64, K]   A = weighted V^T, B = k swapped

Factors are powers f^m with m >= 0, so at most 1, whatever s is. P needs 18 of them a thread: row and column enter an
accumulator element's lag r - i only as 8 (a - b) + const. Both warpgroups of a block make P for themselves: that costs a
seventh of the tensor cores' time, which the memory leaves idle, and they never wait for each other.

Last chunks. TMA reads on into the next sequence, so rows of k past the end are zeroed in shared memory and columns of V^T
in registers (a NaN there is another sequence's); o leaves by predicated stores, since TMA would clip at T only.

| warps      | role                                                                                 | registers |
|------------|--------------------------------------------------------------------------------------|-----------|
| 0          | `load`: TMA loads of q, k, v into a ring of `stages`                                 | 24 or 40  |
| 4-7, 8-11  | 64 value channels each (`warpgroups` of 1 or 2): `recurrence` (lightning_recurrence) | 240       |
|            | or, in the first pass over segments, `segment_ends` (lightning_ends)                 |           |

| shared memory, K = V = 128 | bytes                   | two warpgroups | one               |
|----------------------------|-------------------------|----------------|-------------------|
| q, k, v                    | stages C (2K + 64W) 2   | 4 x 48 K       | 4 x 40 K          |
| P, O^T                     | W C (C + 64) 2          | 32 K           | 16 K              |

One warpgroup a block: for V = 64, and where the two halves of V are given to two blocks so that more of the GPU works; the
second reading of q and k is the L2's business.

Both roles take the items of `common/lightning_items.py` one after the other, and have the steps of a chunk in
`lightning_chunk.py`. The backward (`lightning_bwd.py`) is the same kernel on other tensors, three recurrences side by side, two
of them backward in time.

Limits: bf16; K = V = 64 or 128; a slot of a pool is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.lightning import variants_for
from cula.ops.cute.common.lightning_items import Attention, Item, Sizes, Work, at_attention, item_at, nth, num_items, row_of
from cula.ops.cute.common.lightning_states import LightningStates
from cula.ops.cute.common.tiles import (
    BF16,
    F32,
    I32,
    K_MAJOR,
    MN_MAJOR,
    Tma,
    allocate_tile,
    by_head,
    tile_layout,
    tma_load,
    tma_split,
    tma_store,
    wgmma,
)
from cula.ops.cute.toolchain.variants import Variant

from .lightning_config import LANES, C, Config
from .lightning_ends import segment_ends
from .lightning_recurrence import Output, recurrence

REGISTERS = 65536  # of a multiprocessor


class Tiles(NamedTuple):
    """Shared memory, stages last."""

    sK: Any
    sV: Any
    sQ: Any = None
    sP: Any = None
    sO: Any = None


@cute.jit
def load(work: cutlass.Constexpr, reads: cutlass.Constexpr, tiles: cutlass.Constexpr, producer):
    """A producer's role: every chunk of every item, k, v and q, through the ring."""
    cfg = work.cfg
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(first, num_items(work), step, unroll=1):
        item = item_at(work, index, I32(0))
        copies = [copies_of(attention, reads, tiles, item, work) for attention in cfg.attentions]
        for chunk in cutlass.range((item.tokens + C - 1) // C, unroll=1):
            slot = producer.acquire_and_advance()
            load_chunk(copies, item.turn, chunk, slot)
    producer.tail()


def copies_of(attention: Attention, reads: dict[str, Tma], tiles: Tiles, item: Item, work: Work) -> list[Any]:
    """The TMA copies of an attention's k, v and q, for all chunks of an item."""
    cfg, found = work.cfg, []
    for i, (name, s) in enumerate(zip(attention.roles[: cfg.num_tiles], tiles)):
        is_v = i == 1
        rows = reads[name].coordinates[None, None, item.head if is_v else item.head // work.sizes.group]
        shape = (C, cfg.channels if is_v else cfg.K)
        block = item.block_v if is_v else 0
        of = cute.local_tile(cute.domain_offset((row_of(item, C), 0), rows), shape, (None, block))
        found.append((reads[name].atom, *tma_split(reads[name].atom, s, of)))
    return found


@cute.jit
def load_chunk(copies: cutlass.Constexpr, turn: cutlass.Constexpr, chunk: I32, slot: cutlass.Constexpr):
    """The tiles of an item's attention, of all whose copies are given."""
    at = nth(turn, chunk)

    def load_tiles(i: int) -> None:
        for atom, ps, pg in copies[i]:
            cute.copy(atom, pg[None, at], ps[None, slot.index], tma_bar_ptr=slot.barrier)

    at_attention(turn, len(copies), load_tiles)


class LightningSm90:
    """The recurrences of a launch and, with `cfg.only_ends`, the first pass over segments."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        # A launch gives every thread the same number; what it does not give cannot be asked for, and asking would hang.
        given = REGISTERS // (cfg.blocks * cfg.num_threads) // 8 * 8 * cfg.num_threads
        assert 128 * (cfg.registers[0] + cfg.warpgroups * cfg.registers[1]) <= given, f"{cfg} asks for too many registers"

    @cute.jit
    def launch(self, x: cutlass.Constexpr, scale: F32, sizes: cutlass.Constexpr, num_blocks: I32, stream):
        """The kernel, on the tensors [T, heads, channels] that `cfg` names; x has the heads' decay, states and offsets too."""
        cfg = self.cfg
        l_qk, l_v = tile_layout(C, cfg.K, cfg.stages), tile_layout(C, cfg.channels, cfg.stages)
        l_p, l_o = tile_layout(C, C, 2 * cfg.warpgroups), tile_layout(C, LANES, 2 * cfg.warpgroups)
        loads = []
        for name in cfg.inputs:
            layout, channels = (l_v, cfg.channels) if name == "v" else (l_qk, cfg.K)
            loads.append(tma_load(by_head(getattr(x, name)), layout, (C, channels)))
        writes = [by_head(getattr(x, name)) for name in cfg.outputs]
        stores = [Output(*tma_store(m, l_o, (C, LANES)), m) for m in writes]
        self.kernel(
            tuple(loads), tuple(stores), x.decay, x.states, x.cu, scale, tuple(sizes),
            wgmma(C, K_MAJOR, False), wgmma(C, K_MAJOR, True), wgmma(cfg.K, MN_MAJOR, True), l_qk, l_v, l_p, l_o,
        ).launch(
            grid=(num_blocks, 1, 1), block=(cfg.num_threads, 1, 1), stream=stream, min_blocks_per_mp=cfg.blocks, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        loads: tuple, outputs: tuple, mDecay: cute.Tensor, states: LightningStates, mCu: cute.Tensor, scale: F32, sizes: tuple,
        mma_p: cute.TiledMma, mma_o: cute.TiledMma, mma_s: cute.TiledMma,
        l_qk: cute.ComposedLayout, l_v: cute.ComposedLayout, l_p: cute.ComposedLayout, l_o: cute.ComposedLayout,
    ):  # fmt: skip
        cfg = self.cfg
        thread, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_id = cute.arch.make_warp_uniform(thread // 128)
        work, reads = Work(cfg, Sizes(*sizes), mDecay, mCu), dict(zip(cfg.inputs, loads))
        mmas = (mma_p, mma_o, mma_s)

        smem = SmemAllocator()
        tiles = Tiles(allocate_tile(smem, l_qk), allocate_tile(smem, l_v))
        if cutlass.const_expr(not cfg.only_ends):
            tiles = Tiles(*tiles[:2], allocate_tile(smem, l_qk), allocate_tile(smem, l_p), allocate_tile(smem, l_o))
        if warp_id == 0:
            for name in cfg.reads:
                cpasync.prefetch_descriptor(reads[name].atom)
        bytes_qk = cute.size_in_bytes(BF16, cute.slice_(l_qk, (None, None, 0)))
        bytes_v = cute.size_in_bytes(BF16, cute.slice_(l_v, (None, None, 0)))
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=cfg.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * cfg.warpgroups),  # a release counts once a warp
            tx_count=(cfg.num_tiles - 1) * bytes_qk + bytes_v,
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * cfg.stages),
        )
        producer, _ = ring.make_participants()
        cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended

        if warpgroup_id == 0:
            cute.arch.setmaxregister_decrease(cfg.registers[0])
            if warp_id == 0:
                load(work, reads, tiles, producer)
        else:
            cute.arch.setmaxregister_increase(cfg.registers[1])
            if cutlass.const_expr(cfg.only_ends):
                segment_ends(work, ring, tiles, states, scale, mmas)
            else:
                recurrence(work, ring, tiles, outputs, states, scale, mmas)


# What is compiled


CONFIGS = {
    "d128": Config(128, 128, warpgroups=2, depth=3, blocks=1, registers=(24, 240)),
    "d128_half": Config(128, 128, warpgroups=1, depth=4, blocks=1, registers=(40, 240)),
    "d64": Config(64, 64, warpgroups=1, depth=4, blocks=1, registers=(40, 240)),
}
USES = ("wgmma", "tma_load", "tma_store", "ldmatrix", "stmatrix", "setmaxnreg")
USES_OF_ENDS = ("wgmma", "tma_load", "ldmatrix", "setmaxnreg")


def variants() -> Iterator[Variant]:
    return variants_for(LightningSm90, CONFIGS, USES, USES_OF_ENDS)
