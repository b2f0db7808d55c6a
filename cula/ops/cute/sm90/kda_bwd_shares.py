# SPDX-License-Identifier: Apache-2.0
"""KDA backward on Hopper, the last kernel: sums of shares, in a fixed order. Chunks leave shares of the gradients of dt_bias and
A_log, and value heads that share keys leave shares of dq and dk."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.lanes import WARP, sum_over
from cula.ops.cute.common.tiles import F32, I32

THREADS = 1024
PARTS = THREADS // 256  # of the chunks, each summed by threads of its own
ROWS = THREADS // 16  # rows of dq and dk that a block sums


class GateSums(NamedTuple):
    """The parameters of gates."""

    mShares: Any  # [chunks, HV, 2, 128]
    mDa: Any  # [HV]
    mDbias: Any  # [HV, 128]
    has_A: Any  # whether they are asked for
    has_bias: Any


class KeySums(NamedTuple):
    """Keys and queries; heads come last."""

    mShareQ: Any  # [T, 128, HV], float32
    mShareK: Any
    mDq: Any  # [T, 128, H]
    mDk: Any


@cute.jit
def sum_gates(of: cutlass.Constexpr, hv: I32, tid: I32, is_scalar: cutlass.Constexpr):
    """By a block for each value head. With one gate a head its bias is, like A_log, one for all channels."""
    smem, mShares, mDa, mDbias = SmemAllocator(), of.mShares, of.mDa, of.mDbias
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
        if cutlass.const_expr(not is_scalar) and which == 0 and of.has_bias == 1:
            mDbias[hv, channel] = total
        total = sum_over(WARP, total)
        if tid % 32 == 0:
            of_warps[tid // 32] = total
    cute.arch.sync_threads()
    if tid == 0:
        if of.has_A == 1:
            mDa[hv] = of_warps[4] + of_warps[5] + of_warps[6] + of_warps[7]
        if cutlass.const_expr(is_scalar) and of.has_bias == 1:
            mDbias[hv, 0] = of_warps[0] + of_warps[1] + of_warps[2] + of_warps[3]


@cute.jit
def sum_heads(of: cutlass.Constexpr, block: I32, rows: I32, tid: I32):
    """By blocks of rows (token, head of keys), sixteen threads each."""
    H, HV = of.mDq.shape[2], of.mShareQ.shape[2]
    row, group = block * ROWS + tid // 16, HV // H
    if row < rows:
        t, h = row // H, row % H
        for share, made in ((of.mShareQ, of.mDq), (of.mShareK, of.mDk)):
            total, part = cute.make_rmem_tensor((1, 8), F32), cute.make_rmem_tensor((1, 8), F32)
            out = cute.make_rmem_tensor((1, 8), made.element_type)
            total.fill(0.0)
            for j in cutlass.range(group, unroll=1):
                cute.autovec_copy(cute.local_tile(share[None, None, h * group + j], (1, 8), (t, tid % 16)), part)
                total.store(total.load() + part.load())
            out.store(total.load().to(made.element_type))
            cute.autovec_copy(out, cute.local_tile(made[None, None, h], (1, 8), (t, tid % 16)))


@cute.kernel
def shares_kernel(gates: GateSums, keys: KeySums, of_gates: I32, rows: I32, variant: cutlass.Constexpr):
    """`of_gates` blocks, and then those of `rows`."""
    cute.arch.griddepcontrol_wait()  # for the kernel before: this one may be launched before it has ended
    block, (tid, _, _) = cute.arch.block_idx()[0], cute.arch.thread_idx()
    if block >= of_gates:
        sum_heads(keys, block - of_gates, rows, tid)
    elif cutlass.const_expr(variant.is_raw):
        sum_gates(gates, block, tid, variant.is_scalar)


@cute.jit
def launch_shares(gates: cutlass.Constexpr, keys: cutlass.Constexpr, T: I32, H: I32, HV: I32, stream, variant: cutlass.Constexpr):
    """Where there is nothing to sum, one block that does nothing."""
    of_gates = HV if cutlass.const_expr(variant.is_raw) else I32(0)
    rows = T * H if HV != H else I32(0)
    blocks = cutlass.max(of_gates + (rows + (ROWS - 1)) // ROWS, I32(1))
    shares_kernel(gates, keys, of_gates, rows, variant).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )
