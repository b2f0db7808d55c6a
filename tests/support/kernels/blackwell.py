# SPDX-License-Identifier: Apache-2.0
"""sm_100a: tcgen05 products with the accumulator in tensor memory, with an operand handed over there, and of a pair of blocks.
Never run on a GPU."""

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator, TmemAllocator

from cula.ops.cute.toolchain.variants import Variant
from tests.support.kernels.tiles import (
    BF16,
    F32,
    K_MAJOR,
    MN_MAJOR,
    allocate_tile,
    fake,
    init_barriers,
    reordered,
    swapped,
    tile_layout,
    tma_load,
    tma_split,
)


def umma(source, b_major):
    op = tcgen05.MmaF16BF16Op(BF16, F32, (128, 128, 16), tcgen05.CtaGroup.ONE, source, K_MAJOR, b_major)
    return cute.make_tiled_mma(op)


@cute.jit
def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, done: cute.Pointer):
    """acc = a b^T, by one warp; `done` is signalled when it is there."""
    for k in cutlass.range_constexpr(8):
        mma.set(tcgen05.Field.ACCUMULATE, k != 0)
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
    with cute.arch.elect_one():
        tcgen05.commit(done)


@cute.kernel
def chain_kernel(
    tq: cute.CopyAtom, gQ: cute.Tensor, tk: cute.CopyAtom, gK: cute.Tensor, tv: cute.CopyAtom, gV: cute.Tensor,
    gO: cute.Tensor, mma_p: cute.TiledMma, mma_o: cute.TiledMma, lt: cute.ComposedLayout, has_second: cutlass.Constexpr,
):  # fmt: skip
    tid, _, _ = cute.arch.thread_idx()
    batch, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    sQ, sK, sV = allocate_tile(smem, lt), allocate_tile(smem, lt), allocate_tile(smem, lt)
    bars = smem.allocate_array(cutlass.Int64, 3)
    loaded, p_done, o_done = bars, bars + 1, bars + 2
    address = smem.allocate_array(cutlass.Int32, 1)
    tmem = TmemAllocator(address, barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=128))
    tmem.allocate(512)  # columns: P fp32 128, O fp32 128, P bf16 64
    init_barriers(bars, warp, 3)
    tmem.wait_for_alloc()
    ptr = tmem.retrieve_ptr(F32)
    thr = mma_p.get_slice(0)
    layout = mma_p.make_fragment_C(mma_p.partition_shape_C((128, 128))).layout
    accP, accO = cute.make_tensor(ptr, layout), cute.make_tensor(ptr + 128, layout)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, 3 * cute.size_in_bytes(BF16, lt))
        for atom, s, g in ((tq, sQ, gQ), (tk, sK, gK), (tv, sV, gV)):
            sp, gp = tma_split(atom, s, g[None, None, batch])
            cute.copy(atom, gp, sp, tma_bar_ptr=loaded)
        cute.arch.mbarrier_wait(loaded, 0)
        issue(mma_p, accP, mma_p.make_fragment_A(thr.partition_A(sQ)), mma_p.make_fragment_B(thr.partition_B(sK)), p_done)
    tmem.relinquish_alloc_permit()
    cute.arch.mbarrier_wait(p_done, 0)
    # a thread takes a row: 128 columns of fp32
    load = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x128), F32), accP)
    rows = load.get_slice(tid)
    rP = cute.make_rmem_tensor(rows.partition_D(thr.partition_C(cute.make_identity_tensor((128, 128)))).shape, F32)
    cute.copy(load, rows.partition_S(accP), rP)
    cute.arch.fence_view_async_tmem_load()
    out = rows.partition_D(thr.partition_C(gO[None, None, batch]))
    if cutlass.const_expr(not has_second):
        cute.autovec_copy(rP, out)
    else:
        rB = cute.make_rmem_tensor_like(rP, BF16)
        rB.store(rP.load().to(BF16))
        half = cute.make_tensor(ptr + 256, cute.composition(layout, cute.make_layout((128, 64))))
        store = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition.x64), F32), half)
        shape = store.get_slice(tid).partition_S(cute.make_identity_tensor((128, 64))).shape
        packed = cute.make_tensor(cute.recast_ptr(rB.iterator, dtype=F32), cute.make_layout(shape))
        cute.copy(store, packed, store.get_slice(tid).partition_D(half))
        cute.arch.fence_view_async_tmem_store()
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)
        cute.arch.sync_threads()
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
        if warp == 0:
            fragment = mma_o.make_fragment_A(mma_o.partition_shape_A((128, 128))).layout
            aP = cute.make_tensor(cute.recast_ptr(ptr + 256, dtype=BF16), fragment)
            issue(mma_o, accO, aP, mma_o.make_fragment_B(mma_o.get_slice(0).partition_B(swapped(sV))), o_done)
        cute.arch.mbarrier_wait(o_done, 0)
        rO = cute.make_rmem_tensor_like(rP, F32)
        cute.copy(load, rows.partition_S(accO), rO)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(rO, out)
    cute.arch.sync_threads()
    tmem.free(ptr)


@cute.jit
def chain_host(mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, stream, has_second: cutlass.Constexpr):
    """o [B, 128, 128] = q k^T, or (q k^T) v with the scores rounded to bf16 and handed over in tensor memory."""
    views = [reordered(t, 1, 2, 0) for t in (mQ, mK, mV, mO)]
    lt = tile_layout(128, 128)
    (tq, gQ), (tk, gK), (tv, gV) = [tma_load(view, lt, (128, 128)) for view in views[:3]]
    mma_p = umma(tcgen05.OperandSource.SMEM, K_MAJOR)
    mma_o = umma(tcgen05.OperandSource.TMEM, MN_MAJOR)
    chain_kernel(tq, gQ, tk, gK, tv, gV, views[3], mma_p, mma_o, lt, has_second).launch(
        grid=(mQ.shape[0], 1, 1), block=(128, 1, 1), stream=stream
    )


@cute.kernel
def pair_kernel(
    ta: cute.CopyAtom, gA: cute.Tensor, tb: cute.CopyAtom, gB: cute.Tensor, gC: cute.Tensor, pair: cute.TiledMma,
    one: cute.TiledMma, half: cute.TiledMma, la: cute.ComposedLayout, lb: cute.ComposedLayout,
):  # fmt: skip
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = SmemAllocator()
    sA, sB = allocate_tile(smem, la), allocate_tile(smem, lb)
    bars = smem.allocate_array(cutlass.Int64, 3)
    loaded, done, freed = bars, bars + 1, bars + 2
    retrieve = pipeline.NamedBarrier(barrier_id=1, num_threads=128)
    address = smem.allocate_array(cutlass.Int32, 1)
    tmem = TmemAllocator(address, barrier_for_retrieve=retrieve, is_two_cta=True, two_cta_tmem_dealloc_mbar_ptr=freed)
    tmem.allocate(128)
    init_barriers(bars, warp, 2)
    tmem.wait_for_alloc()
    ptr = tmem.retrieve_ptr(F32)
    thr = one.get_slice(0)
    acc = cute.make_tensor(ptr, one.make_fragment_C(one.partition_shape_C((128, 128))).layout)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, cute.size_in_bytes(BF16, la) + cute.size_in_bytes(BF16, lb))
        for atom, s, g in ((ta, sA, gA), (tb, sB, gB)):
            sp, gp = tma_split(atom, s, g[None, None, block])
            cute.copy(atom, gp, sp, tma_bar_ptr=loaded)
    cute.arch.mbarrier_wait(loaded, 0)
    cute.arch.cluster_arrive()  # the block that multiplies knows that both have their halves
    cute.arch.cluster_wait()
    if warp == 0 and rank == 0:
        both = cute.make_tensor(ptr, pair.make_fragment_C(pair.partition_shape_C((256, 128))).layout)
        a = pair.make_fragment_A(thr.partition_A(sA))
        b = pair.make_fragment_B(half.get_slice(0).partition_B(sB))
        for k in cutlass.range_constexpr(8):
            pair.set(tcgen05.Field.ACCUMULATE, k != 0)
            cute.gemm(pair, both, a[None, None, k], b[None, None, k], both)
        with cute.arch.elect_one():
            tcgen05.commit(done, 3, tcgen05.CtaGroup.TWO)
    tmem.relinquish_alloc_permit()
    cute.arch.mbarrier_wait(done, 0)
    load = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x128), F32), acc)
    rows = load.get_slice(tid)
    out = rows.partition_D(thr.partition_C(gC[None, None, block]))
    r = cute.make_rmem_tensor(out.shape, F32)
    cute.copy(load, rows.partition_S(acc), r)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(r, out)
    cute.arch.sync_threads()
    tmem.free(ptr)


@cute.jit
def pair_host(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
    """c [2 B, 128, 128]: of each pair of blocks, 256 rows of a [2 B, 128, 128] times 128 rows of b [2 B, 64, 128]."""
    vA, vB, vC = [reordered(t, 1, 2, 0) for t in (mA, mB, mC)]
    la, lb = tile_layout(128, 128), tile_layout(64, 128)
    (ta, gA), (tb, gB) = tma_load(vA, la, (128, 128)), tma_load(vB, lb, (64, 128))
    smem = tcgen05.OperandSource.SMEM
    pair, one, half = [
        cute.make_tiled_mma(tcgen05.MmaF16BF16Op(BF16, F32, (M, N, 16), group, smem, K_MAJOR, K_MAJOR))
        for M, N, group in ((256, 128, tcgen05.CtaGroup.TWO), (128, 128, tcgen05.CtaGroup.ONE), (128, 64, tcgen05.CtaGroup.ONE))
    ]
    pair_kernel(ta, gA, tb, gB, vC, pair, one, half, la, lb).launch(
        grid=(mA.shape[0], 1, 1), block=(128, 1, 1), cluster=(2, 1, 1), stream=stream
    )


def variants() -> Iterator[Variant]:
    B = cute.sym_int()
    args = (fake(BF16, B, 128, 128), fake(BF16, B, 64, 128), fake(F32, B, 128, 128), make_fake_stream())
    yield Variant("umma_pair", pair_host, args, uses=("tcgen05", "tma_load"))
    for name, has_second in (("umma_product", False), ("umma_chain", True)):
        matrices = [fake(BF16, B, 128, 128) for _ in range(3)]
        args = (*matrices, fake(F32, B, 128, 128), make_fake_stream(), has_second)
        yield Variant(name, chain_host, args, uses=("tcgen05", "tma_load"))
