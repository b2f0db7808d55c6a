# SPDX-License-Identifier: Apache-2.0
"""Packed sequences whose lengths the host does not know, where heads of sequences of one length would fill the fused kernel's
clusters: the host launches the fused kernel and, behind it, the split ones, and the GPU finds out whose call it is.

Every warp looks for the longest sequence. The fused kernel serves a call if that has at most `longest` tokens, and the split ones
if it has more. All of them read the same offsets and so decide alike; there is no flag in memory. Where lengths do not matter,
`longest` says so, and no offset is read for it.

Kernels start before the one in front has ended, and a kernel's end has to say that all before it have ended, too: the next call's
waits for the last one only. With X in front of the call:
  * Fused: every block waits for X, which may have written the offsets, and then reads them. If the call is its own it lets the
    intra-chunk kernel start. No more than one of its blocks fits on an SM and all have begun by then, so that nobody takes its
    room: those that come take SMs that have no head, or no head any more.
  * Intra-chunk: X has ended before any of its blocks begins, by the fused kernel's wait, so that offsets are read at once. If the
    call is the fused kernel's, its blocks end there, hidden behind it where SMs are free; but for the first, which lets the
    recurrence start and then waits for the fused kernel's end. Otherwise all wait as ever, and write nothing before.
  * Recurrence: likewise, and it lets nobody start, as ever. Its first block waits for the end of the intra-chunk kernel, hence of
    the fused one, whose results everybody sees then.
Of a kernel that has nothing to do one block that waits is enough: it has not ended before that block has.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.tiles import I32
from cula.ops.cute.kda_abi import ANY_LENGTH


@cute.jit
def longest_sequence(mCu: cute.Tensor):
    """Tokens of the longest, by a warp. Offsets are read past the L1 cache, since split kernels read them before their wait."""
    N, longest = cute.size(mCu) - 1, I32(0)
    for first in cutlass.range(0, N, 32, unroll=1):
        n = cutlass.min(first + cute.arch.lane_idx(), N - 1)
        begin, end = (cute.arch.load(mCu.iterator + (n + i), I32, sem="relaxed", scope="gpu") for i in range(2))
        longest = cutlass.max(longest, end - begin)
    return cute.arch.warp_redux_sync(longest, "max")


def end_if(condition: Any) -> None:
    """The thread ends here."""
    cute.arch.inline_ptx("exit;", predicate=condition)


@cute.jit
def leave_to_split(mCu: cute.Tensor, longest: I32):
    """The fused kernel, behind its wait: end where the split kernels serve the call, and otherwise let them start."""
    if longest < ANY_LENGTH:
        end_if(longest_sequence(mCu) > longest)
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def leave_to_fused(mCu: cute.Tensor, longest: I32, is_last: cutlass.Constexpr):
    """A split kernel, before its wait: end where the fused kernel serves the call. The last kernel lets nobody start."""
    if longest >= 0:
        is_idle = longest_sequence(mCu) <= longest
        x, y, z = cute.arch.block_idx()
        if is_idle and x + y + z == 0:
            if cutlass.const_expr(not is_last):
                cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        end_if(is_idle)
