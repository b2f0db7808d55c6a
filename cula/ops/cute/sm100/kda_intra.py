# SPDX-License-Identifier: Apache-2.0
"""KDA on Blackwell, the intra-chunk kernel: `common/kda_intra.py`, of which it has the maths and most steps, with the products
that tcgen05 can take moved there (`kda_intra_scores.py`).

Never run on a GPU: compiled, and its PTX run on a CPU (docs/kda-blackwell.md).

| step                                                                | by                     | waits for       |
|---------------------------------------------------------------------|------------------------|-----------------|
| `sum_gates`: decays, their sums over blocks                         | half of the channels   | g               |
| squares of k and q                                                  | tcgen05                | k, q            |
| `write_strengths`; `leave_norms`                                    | k or q                 | the squares     |
| `factors`: decays from block to block                               | a thread a channel     | all warps       |
| the first pass: operands of the scores, kb, qg, kr, diagonal blocks | half of the channels   | all warps       |
| scores below the diagonal; then squares of kr and kb                | tcgen05                | all warps       |
| `join_halves`; inverses of A's diagonal blocks                      | the last block of rows | diagonal blocks |
| `place_a`; sizes of kr and kb                                       | A and kr, or kb        | tcgen05         |
| `invert`, `place_t`, `bound_by_pairs`; `place_p`                    | T, or P                | all warps       |

k e^L and q e^L are in tensor memory alone. So the places of k and q take kb and qg in the first pass, and all tiles leave behind
it. Products of float32 are in pairs where their registers are neighbours on both sides.

| shared memory                                                                      | bytes            |
|------------------------------------------------------------------------------------|------------------|
| q, k, g; then qg, kb, kr in their places                                           | 48 K             |
| keys, six blocks of 16 (`Scores`); then A below the diagonal, and T on its way out | 24 K             |
| A on the diagonal; then T there                                                    | 5 K              |
| sums and factors a block and channel; then P on its way out                        | 8 K, 9 K in bf16 |
| bias, norms, sizes of kb and kr, beta                                              | 2 K              |

Two blocks share an SM, which has registers for no more.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.fragments import store_rows
from cula.ops.cute.common.inverse import inverse_pair
from cula.ops.cute.common.kda_intra import (
    LOAD_WARP,
    GateInputs,
    IntraResults,
    IntraScalars,
    IntraTma,
    Place,
    clear_done,
    finish_loads,
    head_of,
    read_ahead,
    start_loads,
    store_tile,
    write_strengths,
)
from cula.ops.cute.common.kda_intra_bound import bound_by_pairs, leave_head_bound, leave_largest_decay, leave_roots
from cula.ops.cute.common.kda_intra_smem import Full, SmemLayout, smem_layout
from cula.ops.cute.common.kda_intra_steep import first_pass_of
from cula.ops.cute.common.kda_intra_steps import (
    KEYS,
    Chunk,
    IntraMmas,
    factors,
    invert,
    join_halves,
    leave_norms,
    place_a,
    place_p,
    place_t,
    sum_gates,
    sums_of,
)
from cula.ops.cute.common.tiles import I32, tile_layout
from cula.ops.cute.common.varlen_index import chunk_of_block
from cula.ops.cute.kda_abi import BETA, BOUND

from .kda_intra_scores import COLUMNS, key_tile, multiply_scores, multiply_squares, read_scores, read_squares, scores_of
from .tmem import after_sync, before_sync, commit, pointer_at, stored

ALLOCATING_WARP, STORE_WARP, MMA_WARP = 1, 5, 6  # neither these nor the one that loads have inverses to compute
INVERTING = 3  # the block of rows whose warps do: it leaves no keys in the first pass
DIAGONAL = 1  # a named barrier: A's diagonal blocks are whole; the warps of the keys, and the last of the queries


class Done(enum.IntEnum):
    """mbarriers that say which products are done."""

    NORMS = 0
    SCORES = 1
    SIZES = 2


class Storage(NamedTuple):
    """What the kernel has besides the arrays of `common/kda_intra_smem.py`."""

    smem: SmemLayout
    T: Any  # T on its way out, behind A, where keys were
    done: Any  # mbarriers, by `Done`
    tmem: Any  # [1], gets the address of tensor memory


def allocate(lt: Any, variant: Any) -> Storage:
    allocator = SmemAllocator()
    smem = smem_layout(allocator, lt, variant, of_keys=key_tile(variant.dtype))
    square = tile_layout(64, 64, dtype=variant.dtype)
    behind_a = cute.recast_ptr(smem.keys.iterator, dtype=cutlass.Int8) + 8 * 1024
    T = cute.make_tensor(cute.recast_ptr(behind_a.align(1024), square.inner, variant.dtype), square.outer)
    done = allocator.allocate_array(cutlass.Int64, len(Done))
    return Storage(smem, T, done, allocator.allocate_tensor(I32, cute.make_layout(1), byte_alignment=16))


@cute.kernel
def intra_kernel(
    tma: IntraTma,
    gates: GateInputs,
    results: IntraResults,
    mCu: cute.Tensor,
    scalars: IntraScalars,
    length: I32,
    halvings: I32,
    group: I32,
    mmas: IntraMmas,
    lt: cute.ComposedLayout,
    variant: cutlass.Constexpr,
    has_whole_squares: cutlass.Constexpr,
):
    """A block for each (value head, number of a chunk). T and P are written as whole squares."""
    assert has_whole_squares
    cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended
    hv, number, begin, start, tokens = chunk_of_block(mCu, length, halvings)
    clear_done(results, hv, number)
    if start < tokens:
        place = Place(hv, head_of(hv, group), number, begin + start, tokens - start)
        intra_chunk(tma, gates, results, scalars, mmas, lt, variant, place)


@cute.jit
def set_up(storage: cutlass.Constexpr, wid: I32):
    """mbarriers and tensor memory, whose address this returns."""
    if wid == LOAD_WARP:
        with cute.arch.elect_one():
            for bars, names in ((storage.smem.full, Full), (storage.done, Done)):
                for which in names:
                    cute.arch.mbarrier_init(bars + which, 1)
    if wid == ALLOCATING_WARP:
        cute.arch.alloc_tmem(COLUMNS, storage.tmem.iterator)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.mbarrier_init_fence()
    before_sync()
    cute.arch.sync_threads()
    after_sync()
    # The next kernel may set itself up; it waits for our end. Not before: it takes all tensor memory, and would not give it back
    # to one that still has to get some.
    cute.arch.griddepcontrol_launch_dependents()
    return storage.tmem[0]


@cute.jit
def intra_chunk(
    tma: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    results: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    lt: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    place: cutlass.Constexpr,
):
    """One chunk by the eight warps of a block."""
    hv, number, t0, left = place.hv, place.number, place.t0, place.left
    vec = results.mVec[number, hv, None]
    record = cute.arch.make_warp_uniform(number * results.mVec.shape[1] + hv)
    tid, _, _ = cute.arch.thread_idx()
    wid = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    side, block_row = wid >> 2, wid & 3
    lane = cute.arch.lane_idx()
    r, c = lane >> 2, lane & 3
    storage = allocate(lt, variant)
    smem, done = storage.smem, storage.done
    tmem = set_up(storage, wid)
    x = Chunk(smem, variant, mmas, side, block_row, lane, r, c, left)
    x = x._replace(scores=scores_of(x, tmem), has_pairs=True)

    loads = start_loads(x, tma, place, wid)
    raw_b, raw_g, A_log, slope = read_ahead(x, gates, scalars.beta_bits, tid, hv, t0)  # nobody waits for them yet
    until, after = sums_of(variant, r, c)
    finish_loads(x, loads, place, tid, wid, are_operands=True)

    # -- decays, norms, write strengths
    L, rest = sum_gates(x, raw_g, A_log, slope, scalars.lower, until, after)
    if wid == MMA_WARP:
        cute.arch.mbarrier_wait(smem.full + Full.KQ, 0)
        multiply_squares(x, smem.k, smem.q)
        commit(done + Done.NORMS)
    b = write_strengths(x, raw_b, scalars.beta_top)
    if c == 0 and side == KEYS:
        for i in cutlass.range_constexpr(2):
            vec[BETA + 16 * block_row + r + 8 * i] = b[i]
    cute.arch.mbarrier_wait(smem.full + Full.KQ, 0)  # over: it shows what TMA wrote to those who read it in the first pass
    cute.arch.mbarrier_wait(done + Done.NORMS, 0)
    after_sync()
    size = read_squares(x)
    inverse = leave_norms(x, size, scalars.scale)
    cute.arch.sync_threads()
    kept = factors(x, tid % 128, vec)
    if side == KEYS:
        leave_largest_decay(x, kept, b, size, inverse)
    before_sync()  # squares have been read: those of kr and kb take their place
    cute.arch.sync_threads()
    if cutlass.const_expr(variant.is_scalar):
        leave_head_bound(x, tid, vec)

    # -- scores and tiles
    diagonal_a, diagonal_p = first_pass_of(x, until, after, L, rest, b)
    stored()
    cute.arch.fence_proxy("async.shared", space="cta")
    before_sync()
    cute.arch.sync_threads()
    after_sync()
    if wid == MMA_WARP:
        multiply_scores(x)
        commit(done + Done.SCORES)
        if cutlass.const_expr(not variant.is_scalar):
            multiply_squares(x, smem.kr, smem.kb_qg[None, None, 0])
            commit(done + Done.SIZES)
    if wid == STORE_WARP:
        for i in cutlass.range_constexpr(2):
            store_tile(tma.tiles, smem.kb_qg[None, None, i], record, i)
        store_tile(tma.tiles, smem.kr, record, 2)
        cute.arch.cp_async_bulk_commit_group()
    for i in cutlass.range_constexpr(2):
        b[i] = smem.beta[16 * block_row + r + 8 * i]  # not kept in registers through the first pass
    join_halves(x, diagonal_a, diagonal_p, b, L)
    joined = NamedBarrier(barrier_id=DIAGONAL, num_threads=160)
    if block_row == INVERTING:
        joined.arrive_and_wait()
        inverse_pair(smem.diagonal, side, 3 - side, lane)
    elif side == KEYS:
        joined.arrive()
    cute.arch.mbarrier_wait(done + Done.SCORES, 0)
    after_sync()
    scores = read_scores(x)
    if side == KEYS:
        place_a(x, scores, b)  # where keys were, which have been read
    if cutlass.const_expr(not variant.is_scalar):
        cute.arch.mbarrier_wait(done + Done.SIZES, 0)
        after_sync()
        leave_roots(x, read_squares(x), block_row, side)
    before_sync()
    cute.arch.sync_threads()  # A and the sizes are in place, tables and tensor memory have been read

    # -- P and T
    if wid == ALLOCATING_WARP:
        after_sync()
        cute.arch.dealloc_tmem(pointer_at(tmem), COLUMNS)
    if side == KEYS:
        cols = cute.make_rmem_tensor((32,), variant.dtype)
        invert(x, cols)
        place_t(x, cols, storage.T)
        store_rows(storage.T, results.mT, block_row, lane, record)
        if cutlass.const_expr(not variant.is_scalar):
            bound = bound_by_pairs(x, cols)
            if lane == 0:
                vec[BOUND + block_row] = bound
    else:
        place_p(x, scores, diagonal_p, L)
        store_rows(smem.out, results.mP, block_row, lane, record)
        if wid == STORE_WARP:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
