# SPDX-License-Identifier: Apache-2.0
"""Lightning: the items of work that blocks take one after the other, (segment, value head, block of V, attention).

A forward has one attention, a backward three (`sm90/lightning_bwd.py`), some of which go from a sequence's end to its start.
Places, starts and chunks of an item are counted in its own time, so that only what has to do with rows in memory asks which way
it goes.

Where sequences are whole, a segment is a sequence. A packed sequence n owns the ids of segments cu[n] // L + n and up, L being
the length of a segment; a warp finds n by counting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.gate import exp2, to_log2
from cula.ops.cute.common.lanes import WARP, sum_over
from cula.ops.cute.common.tiles import F32, I32

REACH = 150.0  # 2^-150 is zero in fp32
MAX_DECAY = 1e4  # exp(-1e4) is zero too; keeps inf * 0 out of the exponents
MAX_REACH = 1 << 30  # tokens; what never fades reaches this far


@dataclass(frozen=True)
class Attention:
    """One of the recurrences of a launch."""

    roles: tuple[str, ...]  # the tensors that it takes for k, v and q; the first pass over segments leaves out q
    is_reversed: bool = False  # from a sequence's end to its start
    is_swapped: bool = False  # its state is the transpose of what lies in memory


FORWARD = (Attention(("k", "v", "q")),)


class Sizes(NamedTuple):
    """Of a call, as `lightning_abi.py` describes them."""

    num_seqs: Any
    length: Any
    segment: Any
    per_seq: Any
    num_ids: Any
    group: Any


class Work(NamedTuple):
    """All there is to do."""

    cfg: Any  # the architecture's: `chunk`, `blocks_of_v`, `warpgroups` that share a block's rows of V, `only_ends`, `attentions`
    sizes: Sizes
    mDecay: Any  # [HV]
    mCu: Any  # [N + 1]


class Turn(NamedTuple):
    """Which attention an item is, and which way it goes. Plain numbers and flags where all attentions of a launch agree."""

    attention: Any
    is_reversed: Any
    is_swapped: Any


class Item(NamedTuple):
    """One item."""

    block_v: Any
    rows: Any  # which share of the rows of V is the caller's
    head: Any  # value head
    id: Any  # of the segment, among those of the states that go this way
    seq: Any
    place: Any  # of the segment in its sequence
    begin: Any  # first token of the sequence
    size: Any  # tokens of the sequence
    decay: Any  # -log2 f of the head
    reach: Any  # tokens after which a state's factor is zero in fp32
    start: Any  # first token that is to be read, counted from the sequence's, in the item's time
    tokens: Any  # that are to be read
    turn: Turn


@cute.jit
def power(decay: F32, n: I32):
    """f^n, where decay = -log2 f; zero below 2^-126."""
    return exp2(-decay * n.to(F32))


@cute.jit
def num_items(work: cutlass.Constexpr):
    """Attentions and blocks of V come fastest: blocks that read the same tensors run side by side."""
    return work.sizes.num_ids * work.mDecay.shape[0] * work.cfg.blocks_of_v * len(work.cfg.attentions)


@cute.jit
def item_at(work: cutlass.Constexpr, index: I32, share: I32):
    """The item with that number, for the warpgroup that has the block's `share`-th rows of V."""
    turn, index = turn_of(work, index)
    block_v, head, s, seq, place, begin, size = locate(work, index)
    rows = block_v * work.cfg.warpgroups + share
    decay, reach = log2_decay(work, head)
    start, tokens = span(work, place, size, reach)
    if cutlass.const_expr(turn.is_reversed is not False):
        s = s + work.sizes.num_ids if turn.is_reversed else s
    return Item(block_v, rows, head, s, seq, place, begin, size, decay, reach, start, tokens, turn)


@cute.jit
def row_of(item: cutlass.Constexpr, chunk: cutlass.Constexpr):
    """Of all tokens, the first of an item's first chunk, which has that many rows in memory."""
    row = item.begin + item.start
    if cutlass.const_expr(item.turn.is_reversed is not False):
        row = item.begin + item.size - item.start - chunk if item.turn.is_reversed else row
    return row


@cute.jit
def turn_of(work: cutlass.Constexpr, index: I32):
    """Which attention an item is, and its number among those of that attention."""
    attentions = work.cfg.attentions
    if cutlass.const_expr(len(attentions) == 1):
        return Turn(0, attentions[0].is_reversed, attentions[0].is_swapped), index
    attention = cute.arch.make_warp_uniform(index % len(attentions))
    flags = [is_one_of(attention, [getattr(a, name) for a in attentions]) for name in ("is_reversed", "is_swapped")]
    return Turn(attention, *flags), index // len(attentions)


def is_one_of(attention: Any, flags: list[bool]) -> Any:
    """The flag of an attention."""
    if len(set(flags)) == 1:
        return flags[0]
    found = cutlass.Boolean(False)
    for i, flag in enumerate(flags):
        found = found | (attention == i) if flag else found
    return found


@cute.jit
def at_attention(turn: cutlass.Constexpr, count: cutlass.Constexpr, act: cutlass.Constexpr):
    """`act(i)`, where an item is the i-th of so many attentions."""
    for i in cutlass.range_constexpr(count):
        if cutlass.const_expr(count == 1):
            act(i)
        else:
            if turn.attention == i:
                act(i)


@cute.jit
def at_swapped(turn: cutlass.Constexpr, act: cutlass.Constexpr):
    """`act(is_swapped)`."""
    if cutlass.const_expr(isinstance(turn.is_swapped, bool)):
        act(turn.is_swapped)
    else:
        if turn.is_swapped:
            act(True)
        else:
            act(False)


@cute.jit
def in_time(turn: cutlass.Constexpr, row: I32, last: I32):
    """The place in the item's time of a row, of which one is the last; its own inverse."""
    if cutlass.const_expr(turn.is_reversed is not False):
        row = last - row if turn.is_reversed else row
    return row


@cute.jit
def nth(turn: cutlass.Constexpr, chunk: I32):
    """Where the item's chunk of that number lies, counted from its first."""
    if cutlass.const_expr(turn.is_reversed is not False):
        chunk = -chunk if turn.is_reversed else chunk
    return chunk


@cute.jit
def locate(work: cutlass.Constexpr, index: I32):
    """Which block of V, value head, segment id and sequence it is, its place there, the sequence's first token and its size."""
    num_seqs, length, segment, per_seq, _, _ = work.sizes
    mDecay, mCu, blocks_of_v = work.mDecay, work.mCu, work.cfg.blocks_of_v
    block_v = index % blocks_of_v
    head = index // blocks_of_v % mDecay.shape[0]
    s = index // blocks_of_v // mDecay.shape[0]
    seq, place, begin, size = s, I32(0), I32(0), length
    if length > 0:
        seq, place = s // per_seq, s % per_seq
        begin = seq * length
    else:
        if segment > 0:
            # The last sequence whose first id is not beyond s; the warp counts 32 at a time.
            count = I32(0)
            for n in cutlass.range(cute.arch.lane_idx(), num_seqs, 32, unroll=1):
                if mCu[n] // segment + n <= s:
                    count += 1
            seq = sum_over(WARP, count) - 1
        begin = mCu[seq]
        size = mCu[seq + 1] - begin
        if segment > 0:
            place = s - (begin // segment + seq)
    return block_v, head, s, seq, place, begin, size


@cute.jit
def log2_decay(work: cutlass.Constexpr, head: I32):
    """-log2 f of a head, and the tokens after which a state's factor is zero in fp32."""
    decay = to_log2(cutlass.min(work.mDecay[head], F32(MAX_DECAY)))
    return decay, cutlass.min(REACH / cutlass.max(decay, F32(1e-7)), F32(MAX_REACH)).to(I32)


@cute.jit
def span(work: cutlass.Constexpr, place: I32, size: I32, reach: I32):
    """First token and number of tokens of a segment that are to be read, counted from the sequence's start."""
    segment = work.sizes.segment
    start, tokens = I32(0), size
    if segment > 0:
        start = place * segment
        tokens = cutlass.max(cutlass.min(segment, size - start), 0)
    if cutlass.const_expr(work.cfg.only_ends):
        # Only what the end still feels, in whole chunks; and nothing of a sequence's last segment.
        kept = cutlass.min(tokens, (reach // work.cfg.chunk + 1) * work.cfg.chunk)
        start, tokens = start + tokens - kept, kept
        if (place + 1) * segment >= size:
            tokens = I32(0)
    return start, tokens
