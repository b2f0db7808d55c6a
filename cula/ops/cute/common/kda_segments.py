# SPDX-License-Identifier: Apache-2.0
"""Sequences cut into segments of L chunks that run at the same time, where (sequence, head) pairs are too few to fill a GPU.

What a segment lacks is the state at its start.
  * Warm: if w <= WARM chunks before it shrink any state below 2^-24 (`kda_prepare`'s bound), it walks those first, from zero,
    without output. So it does, from the initial state, if there are no more than WARM.
  * Cold: otherwise it chains the affine maps of the segments before it, S <- M_i S + B_i. They come from the same walk in map
    mode, B from S = 0, M from S = I and v = 0 (kept as a 16-bit pair, hi + lo; Hopper reads fp16's hi alone).
Which it is, every warp finds out for itself from the data. Where all segments are warm nobody makes a map. On Hopper, where some
are not, the sequence has fewer and longer ones, and the blocks that are left over make maps (`jobs_of`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.kda_cut import first_chunk, place
from cula.ops.cute.common.kda_prepare_steps import BOUND
from cula.ops.cute.common.tiles import F32, I32

WARM = 4  # chunks that a segment may walk before its own
FORGOTTEN = -24.0  # log2 of what a state may still weigh when it is dropped


@cute.jit
def warm_chunks(mVec: cute.Tensor, hv: I32, end: I32, have: I32):
    """How many chunks to walk before number `end`: as many as forget all that came earlier, or all `have` of them, from the start
    of the sequence. 0 if that would be more than WARM."""
    bound = cute.make_rmem_tensor((WARM,), F32)
    for w in cutlass.range_constexpr(WARM):
        bound[w] = mVec[cutlass.max(end - 1 - w, 0), hv, BOUND]
    total, found = F32(0.0), I32(0)
    for w in cutlass.range_constexpr(WARM):
        total += bound[w]
        found = I32(w + 1) if found == 0 and (have == w + 1 or total < F32(FORGOTTEN)) else found
    return found


@cute.jit
def look_back(mVec: cute.Tensor, hv: I32, chunk0: I32, L: I32, segments: I32, i: I32):
    """(how many chunks segment i should walk before its own, whether any segment of its sequence starts cold), by a warp: lanes
    look at boundaries side by side."""
    lane, warm, any_cold = cute.arch.lane_idx(), I32(0), I32(0)
    for s in cutlass.range(1, segments, 32, unroll=1):
        at = cutlass.min(s + lane, segments - 1) * L
        found = warm_chunks(mVec, hv, chunk0 + at, at)
        any_cold = I32(1) if cute.arch.vote_any_sync(found == 0) else any_cold
        ours = cute.arch.shuffle_sync(found, (i - s) % 32)
        warm = ours if i >= s and i < s + 32 else warm
    return warm, any_cold


@cute.jit
def segment_at(number: I32, mCu: cute.Tensor, L: I32, length: I32, steps: I32):
    """(its sequence, first token and tokens of that, number of its first chunk, which of the segments this is, how many there
    are): what follows from sizes and offsets alone."""
    seq, first_segment, begin, tokens = place(number, 64 * L, mCu, length, steps)
    chunks = (tokens + 63) // 64
    segments = cutlass.max((chunks + L - 1) // L, 1)  # a sequence without tokens has one, empty
    return seq, begin, tokens, first_chunk(seq, begin, length), number - first_segment, segments


@cute.jit
def jobs_of(
    mVec: cute.Tensor,
    hv: I32,
    helpers: I32,
    has_h0: I32,
    L: I32,
    cold_L: I32,
    chunk0: I32,
    chunks: I32,
    i: I32,
    segments: I32,
):
    """What a block has to do, of one launch that makes maps and walks: that of segment i, or a helper, which makes maps only. A
    sequence's helpers come before its segments, so that theirs is i = -helpers, ..., -1.

    A sequence of which any segment starts cold is cut anew, into segments of cold_L >= L chunks: there are fewer maps to chain.
    Its blocks remain as many, and the first of them become helpers. All of them see the same data, and so decide alike.

    If any segment of this cut starts cold, segment i < last makes its own B. The M's are made by the helpers, as many as there
    are, and by the segments after theirs: a block makes at most one of each, and waits only for blocks before it, or itself.

    Returns (which segment this is, of how many chunks, whether it walks, over how many chunks before its own, whether it starts
    cold, the segment whose B and the one whose M it makes, or -1).
    """
    warm, any_cold = look_back(mVec, hv, chunk0, L, segments, i)
    if any_cold == 1 and cold_L > L:
        fewer = segments - (chunks + cold_L - 1) // cold_L
        i, segments, helpers, L = i - fewer, segments - fewer, helpers + fewer, cold_L
        warm, any_cold = look_back(mVec, hv, chunk0, L, segments, i)
    is_helper = i < 0
    is_walker = not is_helper and i < segments
    cold = I32(1) if is_walker and i > 0 and warm == 0 else I32(0)
    b_segment = i if any_cold == 1 and is_walker and i < segments - 1 else I32(-1)
    m_segment = i + helpers if is_helper else i - 1
    is_ours = is_helper or (is_walker and m_segment >= helpers)
    is_needed = m_segment < segments - 1 and (m_segment > 0 or has_h0 == 1)  # no M of the first without an initial state
    m_segment = m_segment if any_cold == 1 and is_ours and is_needed else I32(-1)
    return i, L, is_walker, warm if is_walker else I32(0), cold, b_segment, m_segment


@cute.jit
def segment_of(
    mVec: cute.Tensor,
    mCu: cute.Tensor,
    hv: I32,
    number: I32,
    which: I32,
    has_h0: I32,
    L: I32,
    length: I32,
    steps: I32,
    is_map: cutlass.Constexpr,
):
    """What the block of a segment's number has to do where maps and walk are launches of their own; `which` of a map's halves, 0
    for B and 1 for M.

    Returns (is_busy, its sequence, first token and tokens of that, number of its first chunk, number of its first segment, which
    of the segments this is, how many there are, the chunk to walk from, the first with output, the one after the last, whether
    it starts cold).
    """
    seq, begin, tokens, chunk0, i, segments = segment_at(number, mCu, L, length, steps)
    warm, any_cold = look_back(mVec, hv, chunk0, L, segments, i)
    is_busy, cold = i < segments, I32(0)
    if cutlass.const_expr(is_map):
        # wanted if any segment of the sequence starts cold; M of the first only for an initial state, nothing of the last
        is_needed = which == 0 or i > 0 or has_h0 == 1
        is_busy, warm = i < segments - 1 and any_cold == 1 and is_needed, I32(0)
    else:
        cold = I32(1) if is_busy and i > 0 and warm == 0 else I32(0)
    to_chunk = cutlass.min(i * L + L, (tokens + 63) // 64)
    return is_busy, seq, begin, tokens, chunk0, number - i, i, segments, i * L - warm, i * L, to_chunk, cold
