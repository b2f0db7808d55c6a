# SPDX-License-Identifier: Apache-2.0
"""One to eight tokens a row on a pool of states: KDA and Lightning decode, one launch. K = V = 128, bf16 tokens.

This file has the frame of all kernels. A single token is in `decode_one.py`, Lightning in `decode_lightning.py`; what follows is
several tokens of KDA.

All tokens of a row meet its state S0 [V, K] at once. With log decays summed from the first token (G_t, G_T over all T), write
strengths b and the scale inside q:

    R_t = S0 . (k_t e^{G_t})     Q_t = S0 . (q_t e^{G_t})                                        2T products a row of S0
    A[t, i] = k_t . (e^{G_t - G_i} k_i), i < t     P[t, i] = q_t . (e^{G_t - G_i} k_i), i <= t   once a (row, head)
    u_t = b_t (v_t - R_t - sum_{i < t} A[t, i] u_i)     o_t = Q_t + sum_{i <= t} P[t, i] u_i
    S_T = e^{G_T} S0 + sum_i u_i (k_i e^{G_T - G_i})

Decays are products of factors e^g in [0, 1], so any gate will do. Lightning has u = v and one decay a head, so neither R nor A
nor a recurrence.

The life of a block: addresses, until the kernel in front has ended (`places`); the slot, and what is asked for while it is on
its way (`before_the_slot`); the state, and what is asked for behind it (`behind_the_state`); what needs no state, while that is
on its way (`prepare`); the rows (`decode_rows`). The last is a class's for a kind of state, the others a module's for tokens.

Several tokens of KDA: a block has four warps. Its part of the state is on its way to registers while the block prepares what has
no state in it, with one barrier in the end (`decode_tokens.py`). Keys and queries are raw there: their norms, b and the scale are
factors of what has met the state. Then every warp has its own rows meet the vectors, in 3T + 1 multiply-adds a number of the
state: in float32 for float32 states, with 8 lanes a row, or 16 where there is little work (`decode_rows_fma.py`), on tensor cores
for bfloat16 ones (`decode_rows_mma.py`).

| shared memory, float32  | what                                                                                           |
|-------------------------|------------------------------------------------------------------------------------------------|
| `vectors` [2T, 128]     | k e^G of the tokens, then q e^G; in pairs of bfloat16 for tensor cores                         |
| `writes` [T + 1, 128]   | k e^{G_T - G} of the tokens, likewise, then e^{G_T}                                            |
| `mix` [2T, T, 4]        | k_t . (e^{G_t - G_i} k_i), then the same with q_t: sums over the channels of each warp         |
| `raw` [2T + 1, 128] + 4 | k, q, g, A_log and the bias as they came                                                       |

Times, and what was tried: `docs/decode.md`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.decode_flags import ASK_EARLY, INDEX_IS_I64, TALL_TOKENS, TOKENS, ZERO_IS_NULL
from cula.ops.cute.common.tiles import F32, I32
from cula.ops.cute.sm90 import decode_lightning, decode_one, decode_tokens
from cula.ops.cute.sm90.decode_common import D, fence, number_at, select
from cula.ops.cute.sm90.decode_lightning import LightningFma, LightningMma
from cula.ops.cute.sm90.decode_one import RowsOne
from cula.ops.cute.sm90.decode_rows_fma import RowsFma
from cula.ops.cute.sm90.decode_rows_mma import RowsMma
from cula.ops.cute.toolchain.variants import Variant


@cute.kernel
def decode_kernel(
    addresses: tuple,
    row_strides: tuple,
    strides: tuple,
    factors: tuple,
    tokens: I32,
    per_group: Int64,
    slots: I32,
    flags: I32,
    rows: cutlass.Constexpr,
):
    """A block for each (rows of a state, value head, row of the call). `per_group` is 2^30 H / HV, rounded up; `slots` are the
    pool's."""
    q, _, _, pool, indices, _, _, _, _, o = addresses
    _, _, _, o_row, _, _, slot_stride, index_stride = row_strides
    o_token, o_head = strides[3]
    block, hv, n = cute.arch.block_idx()
    tid, _, _ = cute.arch.thread_idx()
    wid, lane = tid // 32, tid % 32
    of_tokens = decode_one if rows.T == 1 else decode_tokens if rows.is_kda else decode_lightning
    warp_row = (block * rows.warps + wid) * rows.warp_rows
    tables = allocate(rows.tables)

    # This block may be here before the kernel in front has ended. Until then there are addresses to make.
    size = select((flags & INDEX_IS_I64) != 0, I32(8), I32(4))
    at_index = indices + Int64(n) * index_stride * size
    h = I32((Int64(hv) * per_group) >> 30)
    at = of_tokens.places(rows, addresses, row_strides, strides, tokens, flags, (n, hv, h, warp_row, wid, lane))
    fence(never=functools.reduce(operator.or_, all_of((at_index, at))) == 0)
    if cutlass.const_expr(rows.early_blocks > 0):
        ask_for_state(rows, at_index, indices != q, pool, slots, slot_stride, warp_row, flags, lane)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()  # its blocks may come to make theirs; they wait for the end of this kernel

    # The slot first, and what is wanted of tokens while it is on its way. A load that has not come yet holds one of a warp's six
    # scoreboards. Those that are used behind a branch (and the slot may be none) share one, so that nobody could use a token
    # before the state is there, and preparing would not fill the wait for it: KDA has several tokens copied to shared memory,
    # and loads a single one behind the state.
    slot, sign = number_at(I32, at_index, 0), number_at(I32, at_index + (size - 4), 0)  # the upper half, or again the slot
    found = of_tokens.before_the_slot(rows, at, strides, tokens, flags, wid, lane, tables)
    zero_is_null = (flags & ZERO_IS_NULL) != 0
    is_null = indices != q and (sign < 0 or (zero_is_null and slot == 0))
    to = o + (Int64(n) * o_row + hv * o_head + warp_row + rows.first_row(lane)) * 2
    # A branch would take an object whose method it calls for something that it changes.
    write_zeros, load_state, decode_rows = rows.write_zeros, rows.load_state, rows.decode_rows
    behind_the_state, prepare = of_tokens.behind_the_state, of_tokens.prepare
    if is_null:
        write_zeros(to, o_token, tokens, lane)
    else:
        slot = select(indices != q, slot, n)
        state = pool + (Int64(slot) * slot_stride + (hv * D + warp_row) * D) * (rows.dtype.width // 8)
        stored = load_state(state, lane)  # on its way while the block prepares what has no state in it
        raw = behind_the_state(rows, at, found, strides, tokens, flags, lane)
        cute.arch.sync_warp()  # the compiler moves no load past this, as it would past branches
        ready = prepare(rows, addresses, raw, factors, tokens, flags, wid, lane, tables)
        decode_rows(stored, state, ready, tables, tokens, flags, lane, to, o_token)


@cute.jit
def ask_for_state(
    rows: cutlass.Constexpr,
    at_index: Int64,
    has_indices: cutlass.Boolean,
    pool: Int64,
    slots: I32,
    slot_stride: Int64,
    warp_row: I32,
    flags: I32,
    lane: I32,
):
    """Have the L2 fetch the warp's rows of the slot that is named now, before the kernel in front has ended: then the memory has
    little to do. That kernel may yet write the state, which the L2 sees, or name another slot. So this is a hint; the slot is
    read again. For the first blocks of a call that has more than are there at once."""
    block, hv, n = cute.arch.block_idx()
    if (flags & ASK_EARLY) != 0 and lane == 0:
        per_state, heads, _ = cute.arch.grid_dim()
        if (n * heads + hv) * per_state + block < rows.early_blocks:
            load = "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];"  # not from the L1, nor into it
            named = cute.arch.inline_ptx(load, write_only_types=[I32], read_only_args=[at_index])
            slot = select(has_indices, named, n)
            if slot >= 0 and slot < slots:
                width = rows.dtype.width // 8
                state = pool + (Int64(slot) * slot_stride + (hv * D + warp_row) * D) * width
                size = I32(rows.warp_rows * D * width)
                cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[state, size])


def all_of(addresses: Any) -> list:
    """Of a tuple or list that has lists in it, and None for what is not there."""
    if isinstance(addresses, (tuple, list)):
        return [one for part in addresses for one in all_of(part)]
    return [] if addresses is None else [addresses]


def allocate(sizes: tuple[int, ...]) -> Any:
    """Tables in shared memory, 4-byte numbers."""
    smem = SmemAllocator()
    return tuple(smem.allocate_tensor(F32, cute.make_layout(size), byte_alignment=16) for size in sizes)


# The launch


@cute.jit
def decode_host(
    q: Int64,
    k: Int64,
    v: Int64,
    pool: Int64,
    indices: Int64,
    g: Int64,
    beta: Int64,
    A_log: Int64,
    dt_bias: Int64,
    decay: Int64,
    o: Int64,
    q_row: Int64,
    k_row: Int64,
    v_row: Int64,
    o_row: Int64,
    g_row: Int64,
    beta_row: Int64,
    slot_stride: Int64,
    index_stride: Int64,
    q_token: I32,
    q_head: I32,
    k_token: I32,
    k_head: I32,
    v_token: I32,
    v_head: I32,
    o_token: I32,
    o_head: I32,
    g_token: I32,
    g_head: I32,
    beta_token: I32,
    beta_head: I32,
    A_head: I32,
    bias_head: I32,
    bias_channel: I32,
    decay_head: I32,
    scale: F32,
    lower: F32,
    beta_top: F32,
    N: I32,
    HV: I32,
    group: I32,
    tokens: I32,
    slots: I32,
    flags: I32,
    stream,
    rows: cutlass.Constexpr,
):
    """Addresses, 0 for what is absent, then strides in elements: numbers only, because to hand over a tensor costs the caller
    microseconds. `beta_top` is 0 for a beta that is activated already, `group` HV / H, `tokens` at most T."""
    decode_kernel(
        (q, k, v, pool, *(select(x != 0, x, q) for x in (indices, g, beta, A_log + decay, dt_bias)), o),
        (q_row, k_row, v_row, o_row, g_row, beta_row, slot_stride, index_stride),
        (
            (q_token, q_head),
            (k_token, k_head),
            (v_token, v_head),
            (o_token, o_head),
            (g_token, g_head),
            (beta_token, beta_head),
            A_head + decay_head,
            (bias_head, bias_channel),
        ),
        (scale, lower, beta_top),
        tokens,
        (Int64(2**30) + group - 1) // group,
        slots,
        flags,
        rows,
    ).launch(
        grid=(D // rows.warp_rows // rows.warps, HV, N),
        block=(32 * rows.warps, 1, 1),
        min_blocks_per_mp=rows.blocks,
        preferred_smem_carveout=28 if rows.T < 8 else 44,  # percent, 64 or 100 KB: room for the blocks; the rest is L1
        use_pdl=True,
        stream=stream,
    )


def variants() -> Iterator[Variant]:
    """`decode_<tokens>_<states>`; with 16 lanes a row `decode_<tokens>_f32_wide`, 32 rows a warp `decode_<tokens>_bf16_tall`;
    of Lightning the same with `_lightning`. One token has states in bfloat16 alone; several of Lightning on those have one
    kernel for all numbers of tokens."""
    yield _variant("decode_1_bf16", RowsOne(is_kda=True))
    yield _variant("decode_1_bf16_lightning", RowsOne(is_kda=False))
    for T in TOKENS:
        yield _variant(f"decode_{T}_bf16", RowsMma(T))
        if T in TALL_TOKENS:
            yield _variant(f"decode_{T}_bf16_tall", RowsMma(T, sides=4))
        for name, lanes in (("f32", 8), ("f32_wide", 16)):
            yield _variant(f"decode_{T}_{name}", RowsFma(T, lanes))
            yield _variant(f"decode_{T}_{name}_lightning", LightningFma(T, lanes))
    yield _variant("decode_8_bf16_lightning", LightningMma(8))


def _variant(name: str, rows: Any) -> Variant:
    strides = (*(Int64(8) for _ in range(8)), *(I32(8) for _ in range(16)))
    numbers = (F32(1.0), F32(-5.0), F32(1.0), *(I32(1) for _ in range(6)))
    arguments = (*(Int64(0) for _ in range(11)), *strides, *numbers, make_fake_stream(), rows)
    uses = () if rows.T == 1 or (rows.is_kda and rows.dtype is F32) else ("mma",)
    return Variant(name, decode_host, arguments, uses=uses)
