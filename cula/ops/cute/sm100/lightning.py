# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention on Blackwell. A block goes through the chunks of one (sequence, value head); S stays in tensor memory.

Never run on a GPU: compiled, and its PTX run on a CPU (docs/lightning-blackwell.md).

`common/lightning.py` has the recurrence and says what segments are. A chunk of n <= C = 128 tokens, rows r and i from 0:

    P     = lower(scale f^(r-i) q_r . k_i)            [C, C]     A = q, B = k                        -> bf16, tensor memory
    O     = scale f^(r+1) q S^T  +  P v               [C, V]     two products: A = q, B = S in bf16; A = P, B = v
    S     = f^n S  +  v^T (f^(n-1-i) k_i)             [V, K]     A = v, B = weighed k, both as they lie, swapped

Every product has M = 128 rows, lane = row. So a thread has one token of P and O, and one factor for all of its row; of S it has
one row of V. k is weighed where it lies in shared memory, as soon as P has been made of it. Factors are powers f^m with m >= 0,
so at most 1, whatever s is. Of P a warp has 32 rows. In blocks of 32 columns left of that with the diagonal they are f^(r-i) =
f^(r-e) f^(e-i), e being the block's last column: the second are the same 32 numbers in every block.

V = 64: the 128 rows of the product for S are those of v and, beside it in shared memory, of k. What k gives is not looked at.

Last chunks. TMA reads on into the next sequence, so rows of k and v past the end are zeroed in shared memory (a NaN there is
another sequence's), and o leaves by predicated stores, since TMA would clip at T only.

| warps | role                                                                                                           |
|-------|----------------------------------------------------------------------------------------------------------------|
| 0     | `load_role`: TMA loads of q, k, v; allocates tensor memory                                                     |
| 1     | `mma_role`: issues every product                                                                               |
| 4-7   | `state_role` (lightning_state): first and last states, S to bf16 and its decay, weighs k                       |
| 8-11  | `scores_role` (lightning_tokens): decays P, to bf16                                                            |
| 12-15 | `output_role` (lightning_tokens): adds up o, over the shared memory of q to global memory                      |

The first pass over segments has the first eight warps, k and v, and of the products that for S.

| barrier  | arrives                         | waits     | says                                               |
|----------|---------------------------------|-----------|----------------------------------------------------|
| full[]   | TMA                             | 1, 4-7    | a chunk is in the ring                             |
| empty[]  | 12-15; 1 (commit) in first pass | 0         | it has been read, and o that took the place of q   |
| p_done   | 1 (commit)                      | 4-7, 8-11 | q k^T is there, and k may be weighed               |
| p_ready  | 8-11                            | 1         | P is an operand                                    |
| s_ready  | 4-7                             | 1         | S in bf16 is an operand, and S has decayed         |
| k_ready  | 4-7                             | 1         | k is weighed; k and v are zero behind the end      |
| s_done   | 1 (commit)                      | 4-7       | S after the chunk; its bf16 copy has been read     |
| o_done   | 1 (commit)                      | 1, 12-15  | both parts of o, and so everything of the chunk    |
| o_free   | 12-15                           | 1         | they have been read                                |

| tensor memory             | columns   | | shared memory, D = 128 (64)       | bytes               |
|---------------------------|-----------|-|-----------------------------------|---------------------|
| S                         | 0 - 127   | | v, k of a stage                   | 2 x 64 K (4 x 32 K) |
| P, and then P in bf16     | 128 - 255 | | q of a stage, then o              | 2 x 32 K (4 x 16 K) |
| q S^T                     | 256 - 383 | | S in bf16                         | 32 K (8 K)          |
| P v                       | 384 - 511 | |                                   |                     |

Limits: bf16; K = V = 64 or 128; a slot of a pool is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.lightning import variants_for
from cula.ops.cute.common.lightning_items import Sizes, Work, item_at, num_items
from cula.ops.cute.common.lightning_states import LightningStates
from cula.ops.cute.common.tiles import BF16, F32, I32, K_MAJOR, MN_MAJOR, Tma, by_head, swapped, tma_load, tma_split, tma_store
from cula.ops.cute.toolchain.variants import Variant

from .lightning_smem import C, Column, Config, Layouts, Mbarriers, Storage, allocate, init_mbarriers, layouts, mbarriers_at
from .lightning_state import state_role
from .lightning_tokens import chunks_of, output_role, scores_role
from .tmem import COLUMNS, accumulator, after_sync, before_sync, commit, issue, operand_a, umma, umma_of_tiles

ISSUE_REGISTERS, ROW_REGISTERS = 56, 152  # of a thread, where there are four warpgroups


class Mmas(NamedTuple):
    """Products, by their results."""

    p: Any
    inter: Any
    intra: Any  # A in tensor memory
    s: Any


class LightningTma(NamedTuple):
    """What TMA copies."""

    q: Tma
    k: Tma
    v: Tma
    o: Tma


class Block(NamedTuple):
    """What the roles of a block share."""

    work: Work
    tma: LightningTma
    mO: Any  # [T, V, HV]
    states: LightningStates
    scale: Any
    mmas: Mmas
    storage: Storage
    bars: Mbarriers
    tmem: Any

    @property
    def cfg(self) -> Config:
        return self.work.cfg


class LightningSm100:
    """The recurrence and, with `cfg.only_ends`, the first pass over segments."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @cute.jit
    def launch(self, x: cutlass.Constexpr, scale: F32, sizes: cutlass.Constexpr, num_blocks: I32, stream):
        cfg, D = self.cfg, self.cfg.D
        of = layouts(cfg)
        q, k, v, o = [by_head(t) for t in (x.q, x.k, x.v, x.o)]
        tma = LightningTma(
            tma_load(q, of.q, (C, D)), tma_load(k, of.vk, (C, D)), tma_load(v, of.vk, (C, D)), tma_store(o, of.q, (C, D))
        )
        mmas = Mmas(
            p=umma_of_tiles(C, K_MAJOR, K_MAJOR, BF16),
            inter=umma_of_tiles(D, K_MAJOR, K_MAJOR, BF16),
            intra=umma(D, MN_MAJOR, BF16),
            s=umma_of_tiles(D, MN_MAJOR, MN_MAJOR, BF16),
        )
        self.kernel(tma, o, x.decay, x.states, x.cu, scale, sizes, mmas, of).launch(
            grid=(num_blocks, 1, 1), block=(cfg.num_threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        tma: LightningTma,
        mO: cute.Tensor,
        mDecay: cute.Tensor,
        states: LightningStates,
        mCu: cute.Tensor,
        scale: F32,
        sizes: Sizes,
        mmas: Mmas,
        of: Layouts,
    ):
        cfg = self.cfg
        storage = allocate(of, cfg)
        bars = mbarriers_at(storage.bars, cfg)
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_id == 0:
            cute.arch.alloc_tmem(COLUMNS, storage.tmem)
            cute.arch.relinquish_tmem_alloc_permit()
            with cute.arch.elect_one():
                init_mbarriers(bars, cfg)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended
        before_sync()
        cute.arch.sync_threads()
        after_sync()
        tmem = cute.arch.retrieve_tmem_ptr(F32, 16, storage.tmem)
        tid, _, _ = cute.arch.thread_idx()
        warpgroup_id = cute.arch.make_warp_uniform(tid // 128)
        thread = tid % 128  # in its warpgroup: the lane of tensor memory that it sees
        x = Block(Work(cfg, sizes, mDecay, mCu), tma, mO, states, scale, mmas, storage, bars, tmem)
        if warpgroup_id == 0:
            if cutlass.const_expr(not cfg.only_ends):
                cute.arch.setmaxregister_decrease(ISSUE_REGISTERS)
            if warp_id == 0:
                load_role(x)
            elif warp_id == 1:
                mma_role(x)
        elif cutlass.const_expr(cfg.only_ends):
            state_role(x, thread)
        else:
            cute.arch.setmaxregister_increase(ROW_REGISTERS)
            if warpgroup_id == 1:
                state_role(x, thread)
            elif warpgroup_id == 2:
                scores_role(x, thread)
            else:
                output_role(x, thread)
        before_sync()
        cute.arch.sync_threads()
        after_sync()
        if warp_id == 0:
            cute.arch.dealloc_tmem(tmem, COLUMNS)


@cute.jit
def load_role(x: cutlass.Constexpr):
    """A warp: every chunk of every item to the ring."""
    work, tma, storage, bars, cfg = x.work, x.tma, x.storage, x.bars, x.cfg
    stages, it = cfg.depth, I32(0)
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(first, num_items(work), step, unroll=1):
        item = item_at(work, index, I32(0))
        at, of_keys = item.begin + item.start, item.head // work.sizes.group
        v_s, v_g = tma_split(tma.v.atom, storage.sVK, chunks_of(tma.v.coordinates, item.head, at))
        k_s, k_g = tma_split(tma.k.atom, storage.sVK, chunks_of(tma.k.coordinates, of_keys, at))
        for chunk in cutlass.range((item.tokens + C - 1) // C, unroll=1):
            s = it % stages
            bar = bars.full + s
            cute.arch.mbarrier_wait(bars.empty + s, (it // stages + 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, cfg.chunk_bytes)
            cute.copy(tma.k.atom, k_g[None, chunk], k_s[None, 2 * s + 1], tma_bar_ptr=bar)
            if cutlass.const_expr(not cfg.only_ends):
                q_s, q_g = tma_split(tma.q.atom, storage.sQ, chunks_of(tma.q.coordinates, of_keys, at))
                cute.copy(tma.q.atom, q_g[None, chunk], q_s[None, s], tma_bar_ptr=bar)
            cute.copy(tma.v.atom, v_g[None, chunk], v_s[None, 2 * s], tma_bar_ptr=bar)
            it += 1


@cute.jit
def mma_role(x: cutlass.Constexpr):
    """A warp: every product, each when its operands are there."""
    work, mmas, storage, bars, tmem, cfg = x.work, x.mmas, x.storage, x.bars, x.tmem, x.cfg
    D, stages, it = cfg.D, cfg.depth, I32(0)
    accS = accumulator(mmas.s, tmem + Column.S, D)
    thr_s = mmas.s.get_slice(0)
    aV = mmas.s.make_fragment_A(thr_s.partition_A(swapped(storage.wide)))  # [M = channel, K = token]
    bK = mmas.s.make_fragment_B(thr_s.partition_B(swapped(storage.sVK)))  # [N = key channel, K = token]
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(first, num_items(work), step, unroll=1):
        item = item_at(work, index, I32(0))
        for _ in cutlass.range((item.tokens + C - 1) // C, unroll=1):
            s, turn = it % stages, it % 2
            cute.arch.mbarrier_wait(bars.full + s, it // stages % 2)
            if cutlass.const_expr(not cfg.only_ends):
                multiply_queries(x, s, it)
            else:
                cute.arch.mbarrier_wait(bars.s_ready, turn)
            cute.arch.mbarrier_wait(bars.k_ready, turn)
            after_sync()
            issue(mmas.s, accS, aV[None, None, None, s * (D // 64)], bK[None, None, None, 2 * s + 1], True)
            commit(bars.s_done)
            if cutlass.const_expr(not cfg.only_ends):
                multiply_values(x, s, it)
            else:
                commit(bars.empty + s)
            it += 1


@cute.jit
def multiply_queries(x: cutlass.Constexpr, s: I32, it: I32):
    """q k^T and q S^T."""
    mmas, storage, bars, tmem, cfg = x.mmas, x.storage, x.bars, x.tmem, x.cfg
    thr_p, thr_o = mmas.p.get_slice(0), mmas.inter.get_slice(0)
    accP, accO = accumulator(mmas.p, tmem + Column.P, C), accumulator(mmas.inter, tmem + Column.INTER, cfg.D)
    aQ = mmas.p.make_fragment_A(thr_p.partition_A(storage.sQ))
    bK = mmas.p.make_fragment_B(thr_p.partition_B(storage.sVK))  # [N = token, K = key channel]
    aQ_o = mmas.inter.make_fragment_A(thr_o.partition_A(storage.sQ))
    bS = mmas.inter.make_fragment_B(thr_o.partition_B(storage.sS))  # [N = value channel, K = key channel]
    cute.arch.mbarrier_wait(bars.o_done, (it + 1) % 2)  # the last P has been multiplied with: it lies there
    after_sync()
    issue(mmas.p, accP, aQ[None, None, None, s], bK[None, None, None, 2 * s + 1], False)
    commit(bars.p_done)
    cute.arch.mbarrier_wait(bars.s_ready, it % 2)
    cute.arch.mbarrier_wait(bars.o_free, (it + 1) % 2)
    after_sync()
    issue(mmas.inter, accO, aQ_o[None, None, None, s], bS, False)


@cute.jit
def multiply_values(x: cutlass.Constexpr, s: I32, it: I32):
    """P v."""
    mma, storage, bars, tmem = x.mmas.intra, x.storage, x.bars, x.tmem
    acc, aP = accumulator(mma, tmem + Column.INTRA, x.cfg.D), operand_a(mma, tmem + Column.P, C, BF16)
    bV = mma.make_fragment_B(mma.get_slice(0).partition_B(swapped(storage.sVK)))  # [N = value channel, K = token]
    cute.arch.mbarrier_wait(bars.p_ready, it % 2)
    after_sync()
    issue(mma, acc, aP, bV[None, None, None, 2 * s], False)
    commit(bars.o_done)


# What is compiled


CONFIGS = {"d128": Config(128, stages=2, stages_of_ends=3), "d64": Config(64, stages=4, stages_of_ends=6)}
USES, USES_OF_ENDS = ("tcgen05", "tma_load", "tma_store"), ("tcgen05", "tma_load")


def variants() -> Iterator[Variant]:
    return variants_for(LightningSm100, CONFIGS, USES, USES_OF_ENDS)
