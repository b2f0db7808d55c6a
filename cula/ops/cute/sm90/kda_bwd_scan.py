# SPDX-License-Identifier: Apache-2.0
"""KDA backward on Hopper: from what segments do to a state to the states at their boundaries.

With S [dv, dk] and rows dv that do not mix, over the segments of a sequence in order, or against it:

    forward    S  <- S M_i + B_i        from B of the first segment, which began with the sequence's first state
    reverse    dS <- dS M_i^T + D_i     from D of the last one
    product    M  <- M M_i              from M of the first one: the transition of a whole sequence

Each result takes the place of B_i or D_i in `ends`, where the walks over the next segments look for it. Where whole sequences
are asked about (`Makes`), the last one is the answer.

A block is one warpgroup with 64 rows. M's come by TMA, two ahead, and are read as they are or transposed; S is float32 in
accumulators, and fp16 as an operand, in rows that are scaled by powers of two (`fp16_window.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.tiles import (
    F16,
    F32,
    I32,
    K_MAJOR,
    MN_MAJOR,
    Tma,
    allocate_tile,
    issue,
    rounded,
    rows_and_columns,
    seen_as_a,
    swapped,
    wgmma,
)
from cula.ops.cute.common.varlen_index import first_chunk
from cula.ops.cute.kda_abi import STATE
from cula.ops.cute.kda_bwd_abi import Makes
from cula.ops.cute.sm90.fp16_window import keep_in_range, scale_rows, unscale_rows
from cula.ops.cute.sm90.kda_bwd_segments import Of, WalkSizes, is_chained
from cula.ops.cute.sm90.kda_recurrence_steps import Copy, copy_of, copy_tile

THREADS = 128
PLACES = 2  # of M's in shared memory


class ScanMmas(NamedTuple):
    """[64 rows, 128] of a matrix as it is stored, and transposed; A in registers."""

    plain: Any
    transposed: Any


def scan_mmas() -> ScanMmas:
    return ScanMmas(wgmma(128, MN_MAJOR, True, F16), wgmma(128, K_MAJOR, True, F16))


class ScanMemory(NamedTuple):
    """What threads read and write."""

    mEnds: Any  # [Of, segments HV, dv, dk]
    mVec: Any  # [chunks, HV, VEC]
    mCu: Any  # [N + 1]
    mB: Any  # [N, HV, dv, dk]: of whole sequences, where asked for
    mDh0: Any
    mM: Any  # [N, HV, dk, dk]


class Rows(NamedTuple):
    """A block's, as its threads hold them."""

    mma: Any  # a thread's
    part: Any  # which 64

    def ours(self, m: Any) -> Any:
        """A thread's part of a matrix in memory."""
        return self.mma.partition_C(cute.local_tile(m, (64, 128), (self.part, 0)))


class Scan(NamedTuple):
    """What a block has to do."""

    of: Any  # an `Of`
    part: Any  # which 64 rows
    record: Any  # of the segment that it begins with
    step: Any  # from a segment's record to that of the next
    steps: Any  # results; the first is there
    sM: Any  # [128, 128, place]
    full: Any  # an mbarrier for each place


@cute.kernel
def scan_kernel(tma: Tma, memory: ScanMemory, sizes: WalkSizes, mmas: ScanMmas, lm: cute.ComposedLayout):
    """A block for each (`Of` and value head, 64 rows, sequence)."""
    kind, part, seq = cute.arch.block_idx()
    of, hv, HV, L = kind % len(Of), kind // len(Of), sizes.HV, sizes.L
    smem = SmemAllocator()
    sM, full = allocate_tile(smem, lm, F16), smem.allocate_array(cutlass.Int64, PLACES)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for place in cutlass.range_constexpr(PLACES):
                cute.arch.mbarrier_init(full + place, 1)
        cpasync.prefetch_descriptor(tma.atom)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()  # for the kernel before: this one was launched before it ended

    begin, tokens = seq * sizes.length, sizes.length
    if sizes.length == 0:
        begin = memory.mCu[seq]
        tokens = memory.mCu[seq + 1] - begin
    chunks = (tokens + 63) // 64
    segments = cutlass.max((chunks + L - 1) // L, 1)
    number = seq * segments if sizes.length > 0 else begin // (64 * L) + seq
    steps = segments - 1
    if sizes.makes == Makes.GRADIENTS:
        # what a sequence ends with is nobody's start, and with two segments there is nothing to chain
        is_busy = segments > 2 and of != Of.M
        if is_busy:
            is_busy = is_chained(memory.mVec, hv, first_chunk(seq, begin, sizes.length), chunks, L, segments) == 1
        steps = steps if is_busy else I32(0)
    else:
        is_wanted = of == Of.D if sizes.makes == Makes.STATE_GRAD else of != Of.D
        steps = segments if is_wanted else I32(0)
    if steps > 0:
        first = number + segments - 1 if of == Of.D else number
        scan = Scan(of, part, first * HV + hv, -HV if of == Of.D else HV, steps, sM, full)
        if of == Of.D:
            run_scan(scan, tma, memory, (seq, hv), sizes.makes, mmas.transposed, True)
        else:
            run_scan(scan, tma, memory, (seq, hv), sizes.makes, mmas.plain, False)


@cute.jit
def load_m(copy: cutlass.Constexpr, scan: cutlass.Constexpr, n: I32):
    """The M of step n, by one warp."""
    bar = scan.full + n % PLACES
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bar, 2 * STATE)
    copy_tile(copy, scan.record + n * scan.step, n % PLACES, bar)


@cute.jit
def run_scan(
    scan: cutlass.Constexpr,
    tma: cutlass.Constexpr,
    memory: cutlass.Constexpr,
    place: cutlass.Constexpr,
    makes: I32,
    mma: cutlass.Constexpr,
    is_transposed: cutlass.Constexpr,
):
    """All results of a block; `place` is the sequence and its head."""
    thread = cute.arch.thread_idx()[0]
    is_loader = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
    thr = mma.get_slice(thread)
    bM = thr.make_fragment_B(thr.partition_B(scan.sM if cutlass.const_expr(is_transposed) else swapped(scan.sM)))
    accS, factor = thr.make_fragment_C(thr.partition_shape_C((64, 128))), cute.make_rmem_tensor((2,), F32)
    copy: Copy = copy_of(tma, scan.sM, cute.local_tile(tma.coordinates, (128, 128), (None, 0)))

    rows = Rows(thr, scan.part)
    if is_loader:
        for n in cutlass.range(1, cutlass.min(scan.steps, 1 + PLACES), unroll=1):
            load_m(copy, scan, n)
    factor.fill(1.0)
    cute.autovec_copy(rows.ours(memory.mEnds[scan.of, scan.record, None, None]), accS)
    for n in cutlass.range(1, scan.steps, unroll=1):
        record = scan.record + n * scan.step
        half, added, out = rounded(accS, F16), cute.make_rmem_tensor_like(accS), cute.make_rmem_tensor_like(accS)
        keep_in_range(accS, half, None, factor)
        added.fill(0.0)
        if scan.of != Of.M:
            cute.autovec_copy(rows.ours(memory.mEnds[scan.of, record, None, None]), added)
        accS.store(added.load())
        scale_rows(rows_and_columns(accS), factor)
        cute.arch.mbarrier_wait(scan.full + n % PLACES, (n - 1) // PLACES % 2)
        issue(mma, accS, seen_as_a(half), bM[None, None, None, n % PLACES], True)
        warpgroup.wait_group(0)
        out.store(accS.load())
        unscale_rows(rows_and_columns(out), factor)
        cute.autovec_copy(out, rows.ours(memory.mEnds[scan.of, record, None, None]))
        cute.arch.sync_threads()  # all have read this M
        if is_loader and n + PLACES < scan.steps:
            load_m(copy, scan, n + PLACES)
    if makes != Makes.GRADIENTS:
        unscale_rows(rows_and_columns(accS), factor)
        seq, hv = place
        if cutlass.const_expr(is_transposed):
            cute.autovec_copy(accS, rows.ours(memory.mDh0[seq, hv, None, None]))
        elif scan.of == Of.B:
            cute.autovec_copy(accS, rows.ours(memory.mB[seq, hv, None, None]))
        else:
            cute.autovec_copy(accS, rows.ours(memory.mM[seq, hv, None, None]))
