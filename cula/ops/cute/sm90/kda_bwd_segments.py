# SPDX-License-Identifier: Apache-2.0
"""KDA backward on Hopper: what a block of the recurrences does, where segments of a sequence run at the same time.

A segment of L chunks lacks the state at its start, and against the sequence the gradient of the state at its end. It gets them
as the forward's segments do (`common/kda_segments.py`), but the ways are not mixed: all segments of a head's sequence go one.
  * Warm-up: if at every boundary up to MAX_WARM_UP chunks forget all that is beyond them, in either direction, walks begin so
    many chunks earlier, from zero, and keep nothing of those.
  * Chained: otherwise a launch before has made what each segment does to a state, S <- M S + B, and to a gradient,
    dS <- M^T dS + D, by walks that keep nothing: B and D from zero, M from the identity without v. `kda_bwd_scan.py` makes the
    states and gradients at the boundaries from them. First and last segments begin with what is given, so that nobody needs
    their M.
Where there was no such launch, because two segments that are chained gain nothing over one, a block walks the whole sequence and
the others have nothing to do. All of this follows from sizes and from bounds that all blocks see, and so they decide alike.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.kda_segments import segment_at, warm_up_chunks
from cula.ops.cute.common.tiles import I32
from cula.ops.cute.kda_bwd_abi import Makes

FORWARD, REVERSE = 0, 1


class Of(enum.IntEnum):
    """What a walk that keeps nothing makes of a segment; what `ends` has of it."""

    B = 0
    D = 1
    M = 2


class Start(enum.IntEnum):
    """What a walk begins with."""

    ZERO = 0
    GIVEN = 1  # the sequence's first state, or the gradient of its last one, where there is one
    ENDS = 2  # what the walk over the neighbouring segment would end with
    IDENTITY = 3


class End(enum.IntEnum):
    """Where what it ends with goes."""

    NOWHERE = 0
    DH0 = 1
    ENDS = 2
    M = 3


class WalkSizes(NamedTuple):
    """Numbers that a block goes by."""

    has_h0: Any
    has_dht: Any
    has_dh0: Any
    length: Any
    HV: Any
    halvings: Any
    L: Any  # chunks of a segment
    has_transitions: Any  # there is a launch that makes them
    makes: Any  # a `Makes`


class Walk(NamedTuple):
    """What a block's roles know of its work."""

    direction: Any
    hv: Any
    seq: Any
    begin: Any  # first token of the sequence
    tokens: Any  # of the sequence
    first_record: Any  # of the sequence
    HV: Any
    chunk: Any  # the first one, in the direction of the walk
    steps: Any  # chunks; 0 where the block has nothing to do
    silent: Any  # the first so many of them are not kept
    sees_v: Any
    start: Any  # a `Start`
    start_record: Any  # in `ends`
    end: Any  # an `End`
    end_record: Any


@cute.jit
def is_chained(mVec: cute.Tensor, hv: I32, chunk0: I32, chunks: I32, L: I32, segments: I32):
    """Whether some boundary of a sequence does not forget, in one direction or the other; by a warp, whose lanes look at
    boundaries side by side."""
    lane, found = cute.arch.lane_idx(), I32(0)
    for s in cutlass.range(1, segments, 32, unroll=1):
        at = cutlass.min(s + lane, segments - 1) * L
        before = warm_up_chunks(mVec, hv, chunk0 + at, at)
        behind = warm_up_chunks(mVec, hv, chunk0 + at, chunks - at, is_reverse=True)
        found = I32(1) if cute.arch.vote_any_sync(before == 0 or behind == 0) else found
    return found


@cute.jit
def walk_with_results(mVec: cute.Tensor, mCu: cute.Tensor, hv: I32, direction: I32, number: I32, sizes: cutlass.Constexpr):
    """The walk over a segment in a direction, whose states and tokens are kept."""
    segment = segment_at(number, mCu, sizes.L, sizes.length, sizes.halvings)
    i, segments, chunks, L = segment.i, segment.segments, (segment.tokens + 63) // 64, sizes.L
    first, past, chained, warm_up = i * L, cutlass.min(i * L + L, chunks), I32(0), I32(0)
    if segments > 1 and i < segments:
        chained = is_chained(mVec, hv, segment.chunk0, chunks, L, segments)
        if chained == 1 and sizes.has_transitions == 0:
            past, chained = chunks if i == 0 else first, I32(0)
            i = i if i == 0 else segments
        elif chained == 0 and direction == FORWARD:
            warm_up = warm_up_chunks(mVec, hv, segment.chunk0 + first, first) if i > 0 else I32(0)
        elif chained == 0:
            behind = warm_up_chunks(mVec, hv, segment.chunk0 + past, chunks - past, is_reverse=True)
            warm_up = behind if past < chunks else I32(0)
    is_busy, is_forward = i < segments, direction == FORWARD
    chunk = first - warm_up if is_forward else past - 1 + warm_up
    start = I32(Start.ENDS) if chained == 1 else I32(Start.ZERO)
    start = I32(Start.GIVEN) if chunk == (I32(0) if is_forward else chunks - 1) else start
    end = I32(End.DH0) if not is_forward and first == 0 and sizes.has_dh0 == 1 else I32(End.NOWHERE)
    return Walk(
        direction=direction,
        hv=hv,
        seq=segment.seq,
        begin=segment.begin,
        tokens=segment.tokens,
        first_record=segment.chunk0 * sizes.HV + hv,
        HV=sizes.HV,
        chunk=chunk,
        steps=past - first + warm_up if is_busy else I32(0),
        silent=warm_up,
        sees_v=I32(1),
        start=start if is_busy else I32(Start.ZERO),
        start_record=(number + (I32(-1) if is_forward else I32(1))) * sizes.HV + hv,
        end=end if is_busy else I32(End.NOWHERE),
        end_record=I32(0),
    )


@cute.jit
def is_needed(of: I32, i: I32, segments: I32, makes: I32):
    """Whether somebody reads a segment's B, D or M, unless all segments warm up."""
    is_first, is_last = i == 0, i == segments - 1
    needed = not (is_first or is_last)  # M
    needed = not is_last if of == Of.B else needed
    needed = not is_first if of == Of.D else needed
    if makes == Makes.TRANSITION:
        needed = of != Of.D
    if makes == Makes.STATE_GRAD:
        needed = of == Of.D or (of == Of.M and not is_last)
    return needed and i < segments


@cute.jit
def walk_for_transition(mVec: cute.Tensor, mCu: cute.Tensor, hv: I32, of: I32, number: I32, sizes: cutlass.Constexpr):
    """The walk that makes a segment's B, D or M."""
    segment = segment_at(number, mCu, sizes.L, sizes.length, sizes.halvings)
    i, segments, chunks, L = segment.i, segment.segments, (segment.tokens + 63) // 64, sizes.L
    first, past = i * L, cutlass.min(i * L + L, chunks)
    is_busy = is_needed(of, i, segments, sizes.makes)
    if is_busy and sizes.makes == Makes.GRADIENTS:
        is_busy = is_chained(mVec, hv, segment.chunk0, chunks, L, segments) == 1
    is_reverse, record = of == Of.D, number * sizes.HV + hv
    begins = i == segments - 1 if is_reverse else i == 0 and sizes.makes == Makes.GRADIENTS
    start = I32(Start.GIVEN) if begins else I32(Start.ZERO)
    end = I32(End.M) if of == Of.M else I32(End.ENDS)
    return Walk(
        direction=I32(REVERSE) if is_reverse else I32(FORWARD),
        hv=hv,
        seq=segment.seq,
        begin=segment.begin,
        tokens=segment.tokens,
        first_record=segment.chunk0 * sizes.HV + hv,
        HV=sizes.HV,
        chunk=past - 1 if is_reverse else first,
        steps=past - first if is_busy else I32(0),
        silent=past - first,
        sees_v=I32(0) if of == Of.M else I32(1),
        start=I32(Start.IDENTITY) if of == Of.M else start,
        start_record=record,
        end=end if is_busy else I32(End.NOWHERE),
        end_record=record,
    )
