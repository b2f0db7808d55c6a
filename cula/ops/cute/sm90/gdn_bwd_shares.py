# SPDX-License-Identifier: Apache-2.0
"""The backward of Gated DeltaNet on Hopper, the last kernel: sums of the shares of A_log's and dt_bias's gradients that chunks
leave, in a fixed order."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.lanes import WARP, sum_over
from cula.ops.cute.common.tiles import F32
from cula.ops.cute.gdn_bwd_abi import OF_A, OF_BIAS

THREADS = 256  # half of them for either parameter


class Sums(NamedTuple):
    """What is summed, and where to."""

    mShares: Any  # [chunks, HV, 2]
    mDa: Any  # [HV]
    mDbias: Any
    has_A: Any  # whether they are asked for
    has_bias: Any


@cute.kernel
def shares_kernel(of: Sums):
    """A block for each value head."""
    hv, tid = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    parts = SmemAllocator().allocate_tensor(F32, cute.make_layout(THREADS // 32), byte_alignment=16)
    cute.arch.griddepcontrol_wait()  # for the kernel before: this one may be launched before it has ended
    total, half = F32(0.0), THREADS // 2
    for n in cutlass.range(tid % half, of.mShares.shape[0], half, unroll=4):
        total += of.mShares[n, hv, tid // half]
    total = sum_over(WARP, total)
    if tid % 32 == 0:
        parts[tid // 32] = total
    cute.arch.sync_threads()
    if tid == 0:
        sums = [parts[4 * which] + parts[4 * which + 1] + parts[4 * which + 2] + parts[4 * which + 3] for which in range(2)]
        if of.has_A == 1:
            of.mDa[hv] = sums[OF_A]
        if of.has_bias == 1:
            of.mDbias[hv] = sums[OF_BIAS]
