# SPDX-License-Identifier: Apache-2.0
"""Tokens are divided into numbered spans, chunks of 64 tokens or segments of several chunks. Which is which needs no table.

Sequences of one length own `ceil(length / span)` numbers each. Of packed ones, sequence n owns the numbers from
`cu[n] // span + n` on: whatever the lengths are, these never collide, and no more than `T // span + N` are used. A block that
finds its number unused has nothing to do.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.tiles import I32


@cute.jit
def find_sequence(number: I32, span: I32, cu: cute.Tensor, length: I32, halvings: I32):
    """(The sequence that owns a number, its first number, its first token, its tokens). `length` is that of every sequence, or 0
    where `cu` has them, in which one is found by so many halvings."""
    seq, first, begin, tokens = I32(0), I32(0), I32(0), length
    if length > 0:
        spans = (length + span - 1) // span
        seq = number // spans
        first, begin = seq * spans, seq * length
    else:
        past = cute.size(cu) - 1
        for _ in cutlass.range(halvings, unroll=1):
            middle = (seq + past) // 2
            is_ours = cu[middle] // span + middle <= number
            seq = middle if is_ours else seq
            past = past if is_ours else middle
        begin = cu[seq]
        first, tokens = begin // span + seq, cu[seq + 1] - begin
    return seq, first, begin, tokens


@cute.jit
def first_chunk(seq: I32, begin: I32, length: I32):
    """The number of a sequence's first chunk."""
    return seq * ((length + 63) // 64) if length > 0 else begin // 64 + seq


@cute.jit
def chunk_of_block(cu: cute.Tensor, length: I32, halvings: I32):
    """Of a grid with a block for each (head, number of a chunk): (head, number, first token of the sequence, first token of the
    chunk in it, tokens of the sequence). A number that no chunk has begins where there are no tokens."""
    head, chunk, seq = cute.arch.block_idx()
    _, spans, _ = cute.arch.grid_dim()
    number, begin, tokens = seq * spans + chunk, seq * length, length
    if length == 0:  # packed: the grid has one row of numbers for all sequences
        _, first, begin, tokens = find_sequence(number, 64, cu, length, halvings)
        chunk = number - first
    return head, number, begin, chunk * 64, tokens
