# SPDX-License-Identifier: Apache-2.0
"""Where a chain of transitions begins: not at the start of the sequence, but where all that came earlier is forgotten.

A chained segment applies S <- M_j S + B_j for the segments before it (`kda_segments.py`). A state before segment j comes out of
these as M_i ... M_j S, and for each row of S^T, [dv, dk],

    |M_i ... M_j S| <= |M_i| ... |M_j| |S|

with Frobenius norms, which are no smaller than the 2-norms that this is true of. Where the product is below 2^-24, as for the
chunks of a warm-up, the state before segment j does not matter: the chain begins with S = B_j, and goes on with segment j + 1.

Who makes an M adds up its squares, of what it is and of what it is rounded to. The sum travels in the word that says that the
transition is there: its two lowest bits count B and M, the others are those of a float32.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.fp16_window import bits_of, from_bits
from cula.ops.cute.common.gate import log2
from cula.ops.cute.common.kda_segments import FORGOTTEN, ROUNDING
from cula.ops.cute.common.tiles import F16, F32, I32
from cula.ops.cute.kda_abi import COUNT


@cute.jit
def sum_of_squares(x: cute.Tensor):
    parts = cute.make_rmem_tensor((4,), F32)
    parts.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(x)):
        value = x[i].to(F32)
        parts[i % 4] += value * value
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


@cute.jit
def square_of(M: cute.Tensor, hi: cute.Tensor):
    """The sum of squares of what a thread has of M, given as it is and rounded. Where chains read hi alone, in fp16, it may below
    2^-14 be twice what it stands for, or nothing: so the larger sum counts. NaN and infinity remain."""
    square = sum_of_squares(M)
    if cutlass.const_expr(hi.element_type is F16):
        square = cute.arch.fmax(square, sum_of_squares(hi), nan=True)
    return square


@cute.jit
def norm_in_word(square: F32):
    """The square of a norm as it is kept. What its lowest bits lose is within `ROUNDING`; infinity and NaN stay what they are."""
    return bits_of(square) & ~COUNT


@cute.jit
def look_at_norms(word: I32, j: I32, first: I32, total: F32):
    """By a warp, whose lanes look at transitions j side by side, the newest in lane 0: (the newest from `first` on that, with all
    behind it, forgets any state, or -1; log2 of the norms of all of them together). `total` is that of newer ones than these.

    NaN is less than nothing, and what has infinity as a factor is not small: chains go on beyond those.
    """
    lane = cute.arch.lane_idx()
    norm = F32(0.5) * log2(from_bits(word & ~COUNT)) + F32(ROUNDING)
    for offset in (1, 2, 4, 8, 16):
        newer = cute.arch.shuffle_sync_up(norm, offset, mask_and_clamp=0)
        norm = norm + newer if lane >= offset else norm
    total += norm
    found = cute.arch.warp_redux_sync(j if j >= first and total < F32(FORGOTTEN) else I32(-1), "max")
    return found, cute.arch.shuffle_sync(total, 31)


@cute.jit
def begin_of_chain(mDone: cute.Tensor, record: I32, step: I32, n: I32, has_h0: I32, waits: cutlass.Constexpr):
    """Of the n segments before ours, the one whose B our chain begins with, by a warp; -1 if it begins with the initial state.
    `record` is the first segment's, and `step` leads to the next one's.

    If it `waits`, it does so for B and M of all of them; without an initial state nobody computes the first M. Blocks of lower
    numbers compute them. That these have begun, and so will end, relies on the order in which a GPU starts blocks: see
    `kda_segments.py`.
    """
    lane, total, nothing = cute.arch.lane_idx(), F32(0.0), -has_h0
    begin = nothing
    for s in cutlass.range(0, n, 32, unroll=1):
        j = n - 1 - s - lane
        at = mDone.iterator + (record + cutlass.max(j, 0) * step)
        word = I32(0)
        if cutlass.const_expr(waits):
            wanted = I32(2) if j > 0 or has_h0 == 1 else I32(1)
            while (word & COUNT) < wanted:
                word = cute.arch.load(at, I32, sem="acquire", scope="gpu")
            cute.arch.sync_warp()
        else:
            word = cute.arch.load(at, I32)
        found, total = look_at_norms(word, j, 1 - has_h0, total)
        begin = found if begin == nothing and found >= 0 else begin
    return cute.arch.make_warp_uniform(begin)
