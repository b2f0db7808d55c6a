# SPDX-License-Identifier: Apache-2.0
"""sm_90a: a plain kernel, a TMA pipeline in and out, wgmma from shared memory and from registers, mma.sync with its copies,
blocks of a cluster that exchange tiles, or load them for each other."""

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu import warp as warp_mma
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cula.ops.cute.toolchain.variants import Variant
from tests.support.kernels.tiles import (
    BF16,
    F16,
    F32,
    K_MAJOR,
    MN_MAJOR,
    allocate_tile,
    as_a_operand,
    fake,
    init_barriers,
    reordered,
    rows_and_columns,
    swapped,
    tile_layout,
    tma_load,
    tma_split,
    tma_store,
)


@cute.kernel
def scale_kernel(gX: cute.Tensor, gY: cute.Tensor, a: F32):
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + tid
    if i < gX.shape[0]:
        gY[i] = a * gX[i]


@cute.jit
def scale_host(mX: cute.Tensor, mY: cute.Tensor, a: F32, stream):
    """y [n] = a x [n]"""
    scale_kernel(mX, mY, a).launch(grid=(cute.ceil_div(mX.shape[0], 128), 1, 1), block=(128, 1, 1), stream=stream)


@cute.kernel
def shift_kernel(gY: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 64 + tid
    if i < gY.shape[0]:
        gY[i] = gY[i] + F32(1.0)


@cute.jit
def two_kernels_host(mX: cute.Tensor, mY: cute.Tensor, a: F32, stream):
    """y [n] = a x [n] + 1, in two launches of different kernels"""
    n = mX.shape[0]
    scale_kernel(mX, mY, a).launch(grid=(cute.ceil_div(n, 128), 1, 1), block=(128, 1, 1), stream=stream)
    shift_kernel(mY).launch(grid=(cute.ceil_div(n, 64), 1, 1), block=(64, 1, 1), stream=stream)


@cute.kernel
def pipeline_kernel(
    load: cute.CopyAtom, gX: cute.Tensor, store: cute.CopyAtom, gY: cute.Tensor, gS: cute.Tensor, a: F32,
    lx: cute.ComposedLayout, ly: cute.ComposedLayout, stages: cutlass.Constexpr,
):  # fmt: skip
    tid, _, _ = cute.arch.thread_idx()
    head, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    sX, sY = allocate_tile(smem, lx), allocate_tile(smem, ly)
    pipe = pipeline.PipelineTmaAsync.create(
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4),  # a release counts once a warp
        tx_count=cute.size_in_bytes(BF16, cute.slice_(lx, (None, None, 0))),
        barrier_storage=smem.allocate_array(cutlass.Int64, 2 * stages),
    )
    producer, consumer = pipe.make_participants()
    tiles = cute.local_tile(gX[None, None, head], (64, 128), (None, 0))
    sXp, gXp = tma_split(load, sX, tiles)
    sYp, gYp = tma_split(store, sY, cute.local_tile(gY[None, None, head], (64, 128), (None, 0)))
    n = cute.size(tiles, mode=[2])
    if warp == 4:
        for i in cutlass.range(n, unroll=1):
            h = producer.acquire_and_advance()
            cute.copy(load, gXp[None, i], sXp[None, h.index], tma_bar_ptr=h.barrier)
        producer.tail()
    else:
        consumers = pipeline.NamedBarrier(barrier_id=1, num_threads=128)
        for i in cutlass.range(n, unroll=1):
            h = consumer.wait_and_advance()
            if warp == 0:  # the store before must have read sY
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            consumers.arrive_and_wait()
            total = F32(0.0)
            for r in cutlass.range(64, unroll=8):  # a thread takes a channel
                x = sX[r, tid, h.index].to(F32)
                total += x
                sY[r, tid] = (a * x + (i * 64 + r).to(F32) * F32(1.0 / 64)).to(BF16)
            gS[i, head, tid] = total
            cute.arch.fence_proxy("async.shared", space="cta")
            consumers.arrive_and_wait()
            h.release()
            if warp == 0:
                cute.copy(store, sYp, gYp[None, i])
                cute.arch.cp_async_bulk_commit_group()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def pipeline_host(mX: cute.Tensor, mY: cute.Tensor, mS: cute.Tensor, a: F32, stream, stages: cutlass.Constexpr):
    """y [T, H, 128] = a x + t / 64, and s [chunks, H, 128], the sum of x over 64 tokens. A block walks a head."""
    lx, ly = tile_layout(64, 128, stages), tile_layout(64, 128)
    load, gX = tma_load(reordered(mX, 0, 2, 1), lx, (64, 128))
    store, gY = tma_store(reordered(mY, 0, 2, 1), ly, (64, 128))
    pipeline_kernel(load, gX, store, gY, mS, a, lx, ly, stages).launch(grid=(mX.shape[1], 1, 1), block=(160, 1, 1), stream=stream)


def wgmma(n, a_major, b_major, source=warpgroup.OperandSource.SMEM, warpgroups=1, dtype=BF16):
    op = warpgroup.MmaF16BF16Op(dtype, F32, (64, n, 16), source, a_major, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (warpgroups, 1, 1))


@cute.jit
def issue(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """acc = a b^T, asynchronous"""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.kernel
def product_kernel(
    ta: cute.CopyAtom, gA: cute.Tensor, tb: cute.CopyAtom, gB: cute.Tensor, gC: cute.Tensor, mma: cute.TiledMma,
    la: cute.ComposedLayout, lb: cute.ComposedLayout, form: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):  # fmt: skip
    tid, _, _ = cute.arch.thread_idx()
    batch, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    sA, sB = allocate_tile(smem, la, dtype), allocate_tile(smem, lb, dtype)
    bar = smem.allocate_array(cutlass.Int64, 1)
    init_barriers(bar, warp, 1)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, cute.size_in_bytes(BF16, la) + cute.size_in_bytes(BF16, lb))
        for atom, s, g in ((ta, sA, gA), (tb, sB, gB)):
            sp, gp = tma_split(atom, s, g[None, None, batch])
            cute.copy(atom, gp, sp, tma_bar_ptr=bar)
    cute.arch.mbarrier_wait(bar, 0)
    thr = mma.get_slice(tid)
    a = thr.make_fragment_A(thr.partition_A(sA if cutlass.const_expr(form[0] == "n") else swapped(sA)))
    b = thr.make_fragment_B(thr.partition_B(sB if cutlass.const_expr(form[1] == "t") else swapped(sB)))
    out = thr.partition_C(gC[None, None, batch])
    acc = thr.make_fragment_C(out.shape)
    issue(mma, acc, a, b)
    warpgroup.wait_group(0)
    cute.autovec_copy(acc, out)


@cute.jit
def product_host(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream, form: cutlass.Constexpr):
    """c [B, m, n] = op(a) op(b): form "nt" is a b^T, "nn" a b, "tn" a^T b"""
    vA, vB, vC = [reordered(t, 1, 2, 0) for t in (mA, mB, mC)]
    dtype = mA.element_type
    la, lb = (tile_layout(t.shape[1], t.shape[2], dtype=dtype) for t in (mA, mB))
    ta, gA = tma_load(vA, la, (mA.shape[1], mA.shape[2]))
    tb, gB = tma_load(vB, lb, (mB.shape[1], mB.shape[2]))
    groups = mC.shape[1] // 64
    majors = (K_MAJOR if form[0] == "n" else MN_MAJOR, K_MAJOR if form[1] == "t" else MN_MAJOR)
    product_kernel(ta, gA, tb, gB, vC, wgmma(mC.shape[2], *majors, warpgroups=groups, dtype=dtype), la, lb, form, dtype).launch(
        grid=(mA.shape[0], 1, 1), block=(128 * groups, 1, 1), stream=stream
    )


@cute.kernel
def chain_kernel(
    tq: cute.CopyAtom, gQ: cute.Tensor, tk: cute.CopyAtom, gK: cute.Tensor, tv: cute.CopyAtom, gV: cute.Tensor,
    gO: cute.Tensor, mma_p: cute.TiledMma, mma_o: cute.TiledMma, lt: cute.ComposedLayout,
):  # fmt: skip
    tid, _, _ = cute.arch.thread_idx()
    chunk, head, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    sQ, sK, sV = allocate_tile(smem, lt), allocate_tile(smem, lt), allocate_tile(smem, lt)
    bar = smem.allocate_array(cutlass.Int64, 1)
    init_barriers(bar, warp, 1)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, 3 * cute.size_in_bytes(BF16, lt))
        for atom, s, g in ((tq, sQ, gQ), (tk, sK, gK), (tv, sV, gV)):
            sp, gp = tma_split(atom, s, cute.local_tile(g[None, None, head], (64, 128), (chunk, 0)))
            cute.copy(atom, gp, sp, tma_bar_ptr=bar)
    cute.arch.mbarrier_wait(bar, 0)
    tp, to = mma_p.get_slice(tid), mma_o.get_slice(tid)
    accP = tp.make_fragment_C(tp.partition_shape_C((64, 64)))
    accO = to.make_fragment_C(to.partition_shape_C((64, 128)))
    issue(mma_p, accP, tp.make_fragment_A(tp.partition_A(sQ)), tp.make_fragment_B(tp.partition_B(sK)))
    warpgroup.wait_group(0)
    where, P = rows_and_columns(tp.partition_C(cute.make_identity_tensor((64, 64)))), rows_and_columns(accP)
    for i in cutlass.range_constexpr(cute.size(P, mode=[0])):
        for j in cutlass.range_constexpr(cute.size(P, mode=[1])):
            row, column = where[i, j]
            P[i, j] = P[i, j] if column <= row else F32(0.0)
    issue(mma_o, accO, as_a_operand(accP), to.make_fragment_B(to.partition_B(swapped(sV))))
    warpgroup.wait_group(0)
    out = rows_and_columns(to.partition_C(cute.local_tile(gO[None, None, head], (64, 128), (chunk, 0))))
    where, O = rows_and_columns(to.partition_C(cute.make_identity_tensor((64, 128)))), rows_and_columns(accO)
    for i in cutlass.range_constexpr(cute.size(O, mode=[0])):
        if where[i, 0][0] + chunk * 64 < gO.shape[0]:
            cute.autovec_copy(O[i, None], out[i, None])


@cute.jit
def chain_host(mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, stream):
    """o [T, H, 128] = lower(q k^T) v in chunks of 64 tokens; the scores go from accumulator to operand in registers."""
    lt = tile_layout(64, 128)
    (tq, gQ), (tk, gK), (tv, gV) = [tma_load(reordered(t, 0, 2, 1), lt, (64, 128)) for t in (mQ, mK, mV)]
    mma_p, mma_o = wgmma(64, K_MAJOR, K_MAJOR), wgmma(128, K_MAJOR, MN_MAJOR, warpgroup.OperandSource.RMEM)
    chain_kernel(tq, gQ, tk, gK, tv, gV, reordered(mO, 0, 2, 1), mma_p, mma_o, lt).launch(
        grid=(cute.ceil_div(mQ.shape[0], 64), mQ.shape[1], 1), block=(128, 1, 1), stream=stream
    )


@cute.kernel
def warp_product_kernel(
    ta: cute.CopyAtom, gA: cute.Tensor, tb: cute.CopyAtom, gB: cute.Tensor, tc: cute.CopyAtom, gC: cute.Tensor,
    mma: cute.TiledMma, la: cute.ComposedLayout, lb: cute.ComposedLayout, lc: cute.ComposedLayout, dtype: cutlass.Constexpr,
):  # fmt: skip
    tid, _, _ = cute.arch.thread_idx()
    batch, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    sA, sB, sC = (allocate_tile(smem, layout, dtype) for layout in (la, lb, lc))
    bar = smem.allocate_array(cutlass.Int64, 1)
    init_barriers(bar, warp, 1)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, cute.size_in_bytes(dtype, la) + cute.size_in_bytes(dtype, lb))
        for atom, s, g in ((ta, sA, gA), (tb, sB, gB)):
            sp, gp = tma_split(atom, s, g[None, None, batch])
            cute.copy(atom, gp, sp, tma_bar_ptr=bar)
    cute.arch.mbarrier_wait(bar, 0)
    thr, opB = mma.get_slice(tid), swapped(sB)
    a, b = thr.make_fragment_A(thr.partition_A(sA)), thr.make_fragment_B(thr.partition_B(opB))
    load_a = cute.make_tiled_copy_A(cute.make_copy_atom(warp_mma.LdMatrix8x8x16bOp(False, 4), dtype), mma)
    load_b = cute.make_tiled_copy_B(cute.make_copy_atom(warp_mma.LdMatrix8x8x16bOp(True, 4), dtype), mma)
    cute.copy(load_a, load_a.get_slice(tid).partition_S(sA), load_a.get_slice(tid).retile(a))
    cute.copy(load_b, load_b.get_slice(tid).partition_S(opB), load_b.get_slice(tid).retile(b))
    acc = thr.make_fragment_C(thr.partition_shape_C((64, 64)))
    acc.fill(0.0)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
    out = cute.make_rmem_tensor_like(acc, dtype)
    out.store(acc.load().to(dtype))
    store = cute.make_tiled_copy_C(cute.make_copy_atom(warp_mma.StMatrix8x8x16bOp(False, 4), dtype), mma)
    cute.copy(store, store.get_slice(tid).retile(out), store.get_slice(tid).partition_D(sC))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if warp == 0:
        sp, gp = tma_split(tc, sC, gC[None, None, batch])
        cute.copy(tc, sp, gp)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def warp_product_host(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
    """c [B, 64, 64] = a [B, 64, 64] b [B, 64, 64] by mma.sync; a warp takes 16 rows."""
    dtype, tile = mA.element_type, (64, 64)
    vA, vB, vC = [reordered(t, 1, 2, 0) for t in (mA, mB, mC)]
    layout = tile_layout(64, 64, dtype=dtype)
    ta, gA = tma_load(vA, layout, tile)
    tb, gB = tma_load(vB, layout, tile)
    tc, gC = tma_store(vC, layout, tile)
    op = warp_mma.MmaF16BF16Op(dtype, F32, (16, 8, 16))
    mma = cute.make_tiled_mma(op, (4, 1, 1), permutation_mnk=(64, 16, 16))
    warp_product_kernel(ta, gA, tb, gB, tc, gC, mma, layout, layout, layout, dtype).launch(
        grid=(mA.shape[0], 1, 1), block=(128, 1, 1), stream=stream
    )


@cute.kernel
def exchange_kernel(load: cute.CopyAtom, gX: cute.Tensor, gY: cute.Tensor, layout: cute.ComposedLayout):
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    partner = cute.arch.block_idx_in_cluster() ^ 1
    smem = SmemAllocator()
    sX, sP = allocate_tile(smem, layout), allocate_tile(smem, layout)
    bars = smem.allocate_array(cutlass.Int64, 3)
    loaded, came, free = bars, bars + 1, bars + 2
    init_barriers(bars, warp, 3)
    cute.arch.cluster_arrive_relaxed()  # init_barriers has fenced
    cute.arch.cluster_wait()
    sXp, gXp = tma_split(load, sX, gX[None, None, None, block])
    bytes = cute.size_in_bytes(BF16, layout)
    push = cute.make_copy_atom(cpasync.CopyBulkS2SOp(), BF16)
    rounds = cute.size(gX, mode=[2])
    for i in cutlass.range(rounds, unroll=1):
        if warp == 0:
            if i > 0:  # the partner has read what was pushed: its buffer is free, and so is what it was pushed from
                cute.arch.mbarrier_wait(free, (i - 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, bytes)
                cute.arch.mbarrier_arrive_and_expect_tx(came, bytes)
            cute.copy(load, gXp[None, i], sXp, tma_bar_ptr=loaded)
            cute.arch.mbarrier_wait(loaded, i % 2)
            with cute.arch.elect_one():
                flat = cute.make_layout(cute.cosize(layout.outer))
                source, to = (cute.make_tensor(cute.recast_ptr(s.iterator, dtype=BF16), flat) for s in (sX, sP))
                # The copy maps where the tile goes, and not the barrier, whose address it takes for one of shared memory.
                there = cute.make_ptr(cutlass.Int64, cute.arch.map_dsmem_ptr(came, partner).toint(), cute.AddressSpace.smem)
                cute.copy(push, source, to, mbar_ptr=there, cta_rank=partner)
        cute.arch.mbarrier_wait(loaded, i % 2)
        cute.arch.mbarrier_wait(came, i % 2)
        for r in cutlass.range(64, unroll=8):  # a thread takes a column
            gY[r, tid, i, block] = sX[r, tid].to(F32) + sP[r, tid].to(F32)
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(free, peer_cta_rank_in_cluster=partner, scope=nvvm.MemScopeKind.CLUSTER)
    cute.arch.cluster_arrive()  # nobody leaves while the partner may still arrive on its barrier
    cute.arch.cluster_wait()


@cute.jit
def exchange_host(mX: cute.Tensor, mY: cute.Tensor, stream):
    """y [B, rounds, 64, 128] = x [b] + x [b ^ 1]: clusters of two blocks, which push their tiles to each other."""
    vX, vY = [reordered(t, 2, 3, 1, 0) for t in (mX, mY)]
    layout = tile_layout(64, 128)
    load, gX = tma_load(vX, layout, (64, 128))
    exchange_kernel(load, gX, vY, layout).launch(grid=(mX.shape[0], 1, 1), block=(128, 1, 1), cluster=(2, 1, 1), stream=stream)


@cute.kernel
def share_kernel(load: cute.CopyAtom, gX: cute.Tensor, gY: cute.Tensor, layout: cute.ComposedLayout):
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = SmemAllocator()
    sX = allocate_tile(smem, layout)
    bars = smem.allocate_array(cutlass.Int64, 2)
    loaded, free = bars, bars + 1
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(loaded, 1)
            cute.arch.mbarrier_init(free, 2)  # a block that loads waits until both have read
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    sXp, gXp = cpasync.tma_partition(
        load, rank, cute.make_layout(2), cute.group_modes(sX, 0, 2), cute.group_modes(gX[None, None, None, block // 2], 0, 2)
    )
    rounds = cute.size(gX, mode=[2])
    for i in cutlass.range(rounds, unroll=1):
        if warp == 0:
            if i > 0:
                cute.arch.mbarrier_wait(free, (i - 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, cute.size_in_bytes(BF16, layout))
            cute.copy(load, gXp[None, i], sXp, tma_bar_ptr=loaded, mcast_mask=cutlass.Int16(3))
        cute.arch.mbarrier_wait(loaded, i % 2)
        for r in cutlass.range(64, unroll=8):  # a thread takes a column
            gY[r, tid, i, block] = sX[r, tid].to(F32)
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                for to in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_arrive(free, peer_cta_rank_in_cluster=to, scope=nvvm.MemScopeKind.CLUSTER)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def share_host(mX: cute.Tensor, mY: cute.Tensor, stream):
    """y [2 B, rounds, 64, 128] = x [B, rounds, 64, 128] twice: each of two blocks of a cluster loads half of a tile for both."""
    vX, vY = [reordered(t, 2, 3, 1, 0) for t in (mX, mY)]
    layout = tile_layout(64, 128)
    op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    load, gX = cpasync.make_tiled_tma_atom(op, vX, layout, (64, 128), num_multicast=2)
    share_kernel(load, gX, vY, layout).launch(grid=(mY.shape[0], 1, 1), block=(128, 1, 1), cluster=(2, 1, 1), stream=stream)


PRODUCTS = {  # form: shapes of a, b, c
    "nt": ((64, 128), (128, 128), (64, 128)),
    "nn": ((64, 128), (128, 128), (64, 128)),
    "tn": ((64, 128), (64, 128), (128, 128)),
}


def variants() -> Iterator[Variant]:
    size = cute.sym_int
    n, T, H, B = size(), size(), size(), size()
    yield Variant("scale", scale_host, (fake(F32, n), fake(F32, n), F32(1.0), make_fake_stream()))
    yield Variant("two_kernels", two_kernels_host, (fake(F32, n), fake(F32, n), F32(1.0), make_fake_stream()))
    tokens = lambda dtype=BF16: fake(dtype, T, H, 128)
    args = (tokens(), tokens(), fake(F32, size(), H, 128), F32(1.0), make_fake_stream(), 4)
    yield Variant("tma_pipeline", pipeline_host, args, uses=("tma_load", "tma_store"))
    for form, (a, b, c) in PRODUCTS.items():
        for dtype, suffix in ((BF16, ""), (F16, "_fp16")) if form == "nn" else ((BF16, ""),):
            args = (fake(dtype, B, *a), fake(dtype, B, *b), fake(F32, B, *c), make_fake_stream(), form)
            yield Variant(f"product_{form}{suffix}", product_host, args, uses=("wgmma", "tma_load"))
    for dtype, suffix in ((BF16, ""), (F16, "_fp16")):
        args = (*(fake(dtype, B, 64, 64) for _ in range(3)), make_fake_stream())
        uses = ("mma", "tma_load", "tma_store", "ldmatrix", "stmatrix")
        yield Variant(f"warp_product{suffix}", warp_product_host, args, uses=uses)
    rounds = size()
    args = (fake(BF16, B, rounds, 64, 128), fake(F32, B, rounds, 64, 128), make_fake_stream())
    yield Variant("exchange", exchange_host, args, uses=("tma_load",))
    args = (fake(BF16, B, rounds, 64, 128), fake(F32, size(), rounds, 64, 128), make_fake_stream())
    yield Variant("share", share_host, args, uses=("tma_load",))
    args = (tokens(), tokens(), tokens(), tokens(F32), make_fake_stream())
    yield Variant("chain", chain_host, args, uses=("wgmma", "tma_load"))
