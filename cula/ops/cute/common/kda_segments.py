# SPDX-License-Identifier: Apache-2.0
"""Sequences split into segments of L chunks that run at the same time, where (sequence, head) pairs are too few to fill a GPU.

What a segment lacks is the state at its start. It gets it in one of two ways.
  * Warm-up: if w <= MAX_WARM_UP chunks before it shrink any state below 2^-24 (by the bounds of `kda_intra_bound.py`, whose
    logarithms add up), it first runs the recurrence over those, from zero and without output. If no more than MAX_WARM_UP chunks
    come before it at all, it runs over those from the initial state.
  * Chained: otherwise it chains the transitions of the segments before it, S <- M_i S + B_i. They come from the same recurrence
    without output: B from S = 0, and M from S = I and v = 0 (kept as a 16-bit pair, hi + lo; in fp16 hi alone is read).
    The chain begins where all that came earlier is forgotten, by the norms of the M's (`kda_chain.py`).
Every warp finds out from the data which way it is. Where all segments warm up nobody computes a transition.

Chained segments wait for blocks of lower numbers in the same launch, where an architecture has one launch for both (Hopper). That
relies on the GPU starting blocks in the order of their numbers: a block that waits occupies its SM, and what it waits for must
have begun before it. No document promises that order; hardware has always kept it, and much deployed code relies on it. A ticket,
a counter in global memory that each block takes its number from, would not need it, at the price of one round trip to memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.gate import log2
from cula.ops.cute.common.tiles import F32, I32, at_address
from cula.ops.cute.common.varlen_index import find_sequence, first_chunk
from cula.ops.cute.kda_abi import BOUND

MAX_WARM_UP = 4  # chunks that a segment may run over before its own
FORGOTTEN = -24.0  # log2 of what a state may still weigh when it is dropped
# log2 of what the recurrence's roundings, and those of the bound, may add to that of a chunk; or those of a chain to a step's.
ROUNDING = 0.05


@cute.jit
def warm_up_chunks(mVec: cute.Tensor, hv: I32, end: I32, have: I32, is_reverse: cutlass.Constexpr = False):
    """How many chunks to run over before number `end`: as many as forget all that came earlier, or all `have` of them, from the
    start of the sequence. 0 if that would be more than MAX_WARM_UP. In reverse, chunks from `end` on, and `have` to the end of
    the sequence: a transition and its transpose have one norm."""
    parts = cute.make_rmem_tensor((4, MAX_WARM_UP), F32)
    for w in cutlass.range_constexpr(MAX_WARM_UP):
        number = cutlass.min(end + w, mVec.shape[0] - 1) if cutlass.const_expr(is_reverse) else cutlass.max(end - 1 - w, 0)
        at = mVec[number, hv, None].iterator + BOUND
        four = cute.make_tensor(at_address(F32, at.toint(), 16), cute.make_layout(4))
        cute.autovec_copy(four, parts[None, w])
    total, found = F32(0.0), I32(0)
    for w in cutlass.range_constexpr(MAX_WARM_UP):
        total += log2((parts[0, w] + parts[1, w]) + (parts[2, w] + parts[3, w])) + F32(ROUNDING)
        found = I32(w + 1) if found == 0 and (have == w + 1 or total < F32(FORGOTTEN)) else found
    return found


@cute.jit
def look_back(mVec: cute.Tensor, hv: I32, chunk0: I32, L: I32, segments: I32, i: I32):
    """(How many chunks segment i should run over before its own, whether any segment of its sequence is chained), by a warp:
    lanes look at boundaries side by side."""
    lane, warm_up, any_chained = cute.arch.lane_idx(), I32(0), I32(0)
    for s in cutlass.range(1, segments, 32, unroll=1):
        at = cutlass.min(s + lane, segments - 1) * L
        found = warm_up_chunks(mVec, hv, chunk0 + at, at)
        any_chained = I32(1) if cute.arch.vote_any_sync(found == 0) else any_chained
        ours = cute.arch.shuffle_sync(found, (i - s) % 32)
        warm_up = ours if i >= s and i < s + 32 else warm_up
    return warm_up, any_chained


class Segment(NamedTuple):
    """What follows of a segment's number from sizes and offsets alone."""

    seq: Any
    begin: Any  # first token of the sequence
    tokens: Any  # of the sequence
    chunk0: Any  # number of the sequence's first chunk
    i: Any  # which of the sequence's segments it is; `segments` or more if the number is unused
    segments: Any  # of the sequence


@cute.jit
def segment_at(number: I32, mCu: cute.Tensor, L: I32, length: I32, halvings: I32):
    """The segment of a number."""
    seq, first_segment, begin, tokens = find_sequence(number, 64 * L, mCu, length, halvings)
    chunks = (tokens + 63) // 64
    segments = cutlass.max((chunks + L - 1) // L, 1)  # a sequence without tokens has one, empty
    return Segment(seq, begin, tokens, first_chunk(seq, begin, length), number - first_segment, segments)


class Tasks(NamedTuple):
    """What a block does in a launch that computes transitions and runs the recurrence."""

    i: Any  # which of the sequence's segments is its own
    L: Any  # chunks of a segment
    has_segment: Any  # whether it runs over a segment; a helper has none
    warm_up: Any  # over how many chunks before that
    is_chained: Any
    b_segment: Any  # the segment whose B it computes, or -1
    m_segment: Any  # the segment whose M it computes, or -1


@cute.jit
def tasks_of(mVec: cute.Tensor, hv: I32, helpers: I32, has_h0: I32, L: I32, chained_L: I32, segment: cutlass.Constexpr, i: I32):
    """The tasks of a block whose own is segment i, or of a helper, which computes transitions only. A sequence's helpers come
    before its segments, so that theirs is i = -helpers, ..., -1.

    A sequence of which any segment is chained is split anew, into segments of chained_L >= L chunks: then there are fewer
    transitions to chain. Its blocks remain as many, and the first of them become helpers. All of them see the same data, and so
    decide alike.

    If any segment of this split is chained, each but the last computes its own B. The M's are computed by the helpers, as many as
    there are, and by the segments after theirs: a block computes at most one of each. It waits only for blocks of lower numbers,
    or for itself (see above for what that relies on).
    """
    chunk0, segments, chunks = segment.chunk0, segment.segments, (segment.tokens + 63) // 64
    warm_up, any_chained = look_back(mVec, hv, chunk0, L, segments, i)
    if any_chained == 1 and chained_L > L:
        fewer = segments - (chunks + chained_L - 1) // chained_L
        i, segments, helpers, L = i - fewer, segments - fewer, helpers + fewer, chained_L
        warm_up, any_chained = look_back(mVec, hv, chunk0, L, segments, i)
    is_helper = i < 0
    has_segment = not is_helper and i < segments
    is_chained = I32(1) if has_segment and i > 0 and warm_up == 0 else I32(0)
    b_segment = i if any_chained == 1 and has_segment and i < segments - 1 else I32(-1)
    m_segment = i + helpers if is_helper else i - 1
    is_ours = is_helper or (has_segment and m_segment >= helpers)
    is_needed = m_segment < segments - 1 and (m_segment > 0 or has_h0 == 1)  # no M of the first without an initial state
    m_segment = m_segment if any_chained == 1 and is_ours and is_needed else I32(-1)
    return Tasks(i, L, has_segment, warm_up if has_segment else I32(0), is_chained, b_segment, m_segment)


class Span(NamedTuple):
    """What a block does where transitions and the recurrence are launches of their own."""

    is_busy: Any
    from_chunk: Any  # of the sequence
    out_from: Any  # the first chunk with output
    to_chunk: Any  # the one after the last
    is_chained: Any


@cute.jit
def span_of(
    mVec: cute.Tensor, hv: I32, which: I32, has_h0: I32, L: I32, segment: cutlass.Constexpr, is_transition: cutlass.Constexpr
):
    """The chunks of a segment's block; `which` of a transition's halves, 0 for B and 1 for M."""
    i, segments = segment.i, segment.segments
    warm_up, any_chained = look_back(mVec, hv, segment.chunk0, L, segments, i)
    is_busy, is_chained = i < segments, I32(0)
    if cutlass.const_expr(is_transition):
        # wanted if any segment of the sequence is chained; M of the first only for an initial state, nothing of the last
        is_needed = which == 0 or i > 0 or has_h0 == 1
        is_busy, warm_up = i < segments - 1 and any_chained == 1 and is_needed, I32(0)
    else:
        is_chained = I32(1) if is_busy and i > 0 and warm_up == 0 else I32(0)
    to_chunk = cutlass.min(i * L + L, (segment.tokens + 63) // 64)
    return Span(is_busy, i * L - warm_up, i * L, to_chunk, is_chained)
