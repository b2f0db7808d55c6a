# SPDX-License-Identifier: Apache-2.0
"""Where a program's tokens lie: which sequence of packed input, which chunk or segment of it.

The host knows neither the lengths of packed sequences nor how many chunks they have, and does not ask the GPU for them: kernels
are launched on an upper bound, and a program finds its sequence by its id. There are two ways, because they cost differently:

* A table (`span_table_kernel`, then `chunk_span` and `chain_span`): one short kernel more, then two loads a program. KDA takes
  it, whose six kernels of a training step all ask, most of them once a chunk.
* Counting (`counted_segment`): each program compares its id with the first id of every sequence, N / 128 loads. Lightning takes
  it, which has one or two kernels of few and long programs: a launch would cost more than the counting.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel
from .memory import allocator

BN = tl.constexpr(128)  # sequences counted at once


@kernel(numbers="N capacity span")
def span_table_kernel(cu_seqlens, span_seq, span_base, N, capacity, span, BLOCK: tl.constexpr):
    """Cut every sequence into spans of `span` tokens: `span_base[n]` is the first id of sequence n, `span_seq[id]` its n.

    One program a sequence. Ids beyond the last one get -1, so that kernels launched on the host's upper bound exit.
    """
    i_n = tl.program_id(0)
    o_b = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.int32)
    for i in range(0, i_n, BLOCK):
        m_b = i + o_b < i_n
        b_lo = tl.load(cu_seqlens + i + o_b, mask=m_b, other=0)
        b_hi = tl.load(cu_seqlens + i + o_b + 1, mask=m_b, other=0)
        b_sum += (b_hi - b_lo + span - 1) // span
    base = tl.sum(b_sum)
    end = base + (tl.load(cu_seqlens + i_n + 1) - tl.load(cu_seqlens + i_n) + span - 1) // span
    tl.store(span_base + i_n, base)
    for i in range(base, end, BLOCK):
        tl.store(span_seq + i + o_b, tl.zeros([BLOCK], tl.int32) + i_n, mask=i + o_b < end)
    if i_n == N - 1:
        tl.store(span_base + N, end)
        for i in range(end, capacity, BLOCK):
            tl.store(span_seq + i + o_b, tl.full([BLOCK], -1, tl.int32), mask=i + o_b < capacity)


_span_table = span_table_kernel.variant(BLOCK=256)


def span_table(cu_seqlens: Tensor, N: int, span: int, capacity: int) -> tuple[Tensor, Tensor]:
    """`span_seq` [capacity] and `span_base` [N + 1] of the kernel, int32."""
    new = allocator(cu_seqlens.device)
    span_seq, span_base = new((capacity,), torch.int32), new((N + 1,), torch.int32)
    _span_table(N, cu_seqlens=cu_seqlens, span_seq=span_seq, span_base=span_base, N=N, capacity=capacity, span=span)
    return span_seq, span_base


@triton.jit
def chunk_span(i_c, cu_seqlens, chunk_seq, chunk_base, T, NT, IS_PACKED: tl.constexpr, C: tl.constexpr):
    """Batch row, first token in it, and number of tokens of chunk i_c; no tokens for an id beyond the last chunk."""
    if IS_PACKED:
        i_n = tl.load(chunk_seq + i_c)
        i_s = tl.maximum(i_n, 0)
        t0 = tl.load(cu_seqlens + i_s) + (i_c - tl.load(chunk_base + i_s)) * C
        num = tl.where(i_n >= 0, tl.minimum(tl.load(cu_seqlens + i_s + 1) - t0, C), 0)
        i_b = i_c * 0
    else:
        i_b = i_c // NT
        t0 = (i_c - i_b * NT) * C
        num = tl.minimum(T - t0, C)
    return i_b.to(tl.int64), t0.to(tl.int64), num


@triton.jit
def chain_span(
    i_w, cu_seqlens, chunk_base, seg_seq, seg_base, T, NT, NS, seg,
    IS_PACKED: tl.constexpr, HAS_SEG: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A chain of chunks: sequence i_w whole, or segment i_w of `seg` chunks.

    Returns batch row, first token of the sequence in it, its length, first and last + 1 chunk, id of its chunk 0, alive.
    """
    alive = True
    first = i_w * 0
    if HAS_SEG:
        if IS_PACKED:
            i_n = tl.load(seg_seq + i_w)
            alive = i_n >= 0
            i_n = tl.maximum(i_n, 0)
            first = (i_w - tl.load(seg_base + i_n)) * seg
        else:
            i_n = i_w // NS
            first = (i_w - i_n * NS) * seg
    else:
        i_n = i_w
    if IS_PACKED:
        bos = tl.load(cu_seqlens + i_n)
        length = tl.load(cu_seqlens + i_n + 1) - bos
        base = tl.load(chunk_base + i_n)
        i_b = i_n * 0
    else:
        bos = i_n * 0
        length = bos + T
        base = i_n * NT
        i_b = i_n
    last = (length + C - 1) // C
    if HAS_SEG:
        last = tl.minimum(last, first + seg)
    return i_b.to(tl.int64), bos.to(tl.int64), length, first, last, base.to(tl.int64), alive


@triton.jit
def counted_segment(i_s, cu_seqlens, T, N, length, per_row, IS_CUT: tl.constexpr):
    """Segment id -> its sequence, its place in it, the sequence's row, first token and size, the id of its segment 0.

    Packed sequence n owns the ids from cu[n] // length + n on.
    """
    if cu_seqlens is None:
        i_n = i_s // per_row
        return i_n, i_s % per_row, i_n, 0, T, i_n * per_row
    else:
        if IS_CUT:
            i_n = -1
            for n in range(0, N, BN):
                o_n = n + tl.arange(0, BN)
                m_n = o_n < N
                id_0 = tl.load(cu_seqlens + o_n, mask=m_n, other=0) // length + o_n
                i_n += tl.sum((m_n & (id_0 <= i_s)).to(tl.int32), axis=0)
        else:
            i_n = i_s
        bos = tl.load(cu_seqlens + i_n)
        size = tl.load(cu_seqlens + i_n + 1) - bos
        id_0 = (bos // length + i_n) if IS_CUT else i_n
        return i_n, i_s - id_0, 0, bos, size, id_0
