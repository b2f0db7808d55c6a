# SPDX-License-Identifier: Apache-2.0
"""y [row, j] = 2 x [row, 127 - j]: a bulk copy that an mbarrier counts, and a barrier between the threads of a block."""

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from cula.ops.cute.toolchain.variants import Variant

F32 = cutlass.Float32
COLUMNS = 128  # of a row, and threads of a block
ROW_BYTES = 4 * COLUMNS


@cute.kernel
def reverse_kernel(gX: cute.Tensor, gY: cute.Tensor):
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    sX, sY = (smem.allocate_tensor(F32, cute.make_layout(COLUMNS), byte_alignment=128) for _ in range(2))
    loaded = smem.allocate_array(cutlass.Int64, 1)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(loaded, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, ROW_BYTES)
            cute.copy(cute.make_copy_atom(cpasync.CopyBulkG2SOp(), F32), gX[row, None], sX, mbar_ptr=loaded)
    cute.arch.mbarrier_wait(loaded, 0)
    sY[tid] = F32(2.0) * sX[tid]
    cute.arch.sync_threads()
    gY[row, tid] = sY[COLUMNS - 1 - tid]


@cute.jit
def reverse_host(mX: cute.Tensor, mY: cute.Tensor, stream):
    reverse_kernel(mX, mY).launch(grid=(mX.shape[0], 1, 1), block=(COLUMNS, 1, 1), stream=stream)


def variants() -> Iterator[Variant]:
    rows = cute.sym_int()
    fake = lambda: make_fake_compact_tensor(F32, (rows, COLUMNS), stride_order=(1, 0), assumed_align=16)
    yield Variant("reverse", reverse_host, (fake(), fake(), make_fake_stream()))
