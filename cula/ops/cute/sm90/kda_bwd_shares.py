# SPDX-License-Identifier: Apache-2.0
"""KDA backward on Hopper: gradients of dt_bias and A_log, from the shares that chunks left, in a fixed order."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.tiles import F32, I32

THREADS = 1024
PARTS = THREADS // 256  # of the chunks, each summed by threads of its own


@cute.kernel
def shares_kernel(mShares: cute.Tensor, mDa: cute.Tensor, mDbias: cute.Tensor):
    """A block for each value head: mShares [chunks, HV, 2, 128] to mDbias [HV, 128] and, summed over channels too, mDa [HV]."""
    cute.arch.griddepcontrol_wait()  # for the kernel before: this one may be launched before it has ended
    hv, _, _ = cute.arch.block_idx()
    tid, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator()
    parts = smem.allocate_tensor(F32, cute.make_layout(THREADS), byte_alignment=16)
    of_warps = smem.allocate_tensor(F32, cute.make_layout(8), byte_alignment=16)
    which, channel, total = tid // 128 % 2, tid % 128, F32(0.0)
    for n in cutlass.range(tid // 256, mShares.shape[0], PARTS, unroll=8):
        total += mShares[n, hv, which, channel]
    parts[tid] = total
    cute.arch.sync_threads()
    if tid < 256:
        total = F32(0.0)
        for part in cutlass.range_constexpr(PARTS):
            total += parts[256 * part + tid]
        if which == 0:
            mDbias[hv, channel] = total
        for off in (1, 2, 4, 8, 16):
            total += cute.arch.shuffle_sync_bfly(total, offset=off)
        if tid % 32 == 0:
            of_warps[tid // 32] = total
    cute.arch.sync_threads()
    if tid == 0:
        mDa[hv] = of_warps[4] + of_warps[5] + of_warps[6] + of_warps[7]


@cute.jit
def launch_shares(mShares: cute.Tensor, mDa: cute.Tensor, mDbias: cute.Tensor, HV: I32, stream):
    shares_kernel(mShares, mDa, mDbias).launch(grid=(HV, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)
