# SPDX-License-Identifier: Apache-2.0
"""Two to eight tokens a row on a pool of states: KDA and Lightning decode, one launch. K = V = 128, bf16 tokens.

All tokens of a row meet its state S0 [V, K] at once. With log2 decays summed from the first token (G_t, G_T over all T),
write strengths b and the scale inside q:

    R_t = S0 . (k_t e^{G_t})     Q_t = S0 . (q_t e^{G_t})                                        2T products a row of S0
    A[t, i] = k_t . (e^{G_t - G_i} k_i), i < t     P[t, i] = q_t . (e^{G_t - G_i} k_i), i <= t   once a (row, head)
    u_t = b_t (v_t - R_t - sum_{i < t} A[t, i] u_i)     o_t = Q_t + sum_{i <= t} P[t, i] u_i
    S_T = e^{G_T} S0 + sum_i u_i (k_i e^{G_T - G_i})

Lightning is the same with u = v, and runs as such: R and A are multiplied by zero. No exponent is positive, so any gate will do.

A block has 2 to 8 warps and 16 rows of S0 for each. The state is on its way to registers while the block prepares what has no
state in it (`decode_tokens.py`):
  1. a warp a token: norms, gates, b; k, q and log2 decays to shared memory,
  2. a warp a token i: k_i and q_i with their decays, and column i of A and P.
Then every warp has its own rows meet them: 3T + 1 multiply-adds a number of the state, in float32 for float32 states
(`decode_rows_fma.py`), on tensor cores for bfloat16 ones (`decode_rows_mma.py`).

| shared memory, float32  | what                                                                                       |
|-------------------------|--------------------------------------------------------------------------------------------|
| `vectors` [2T, 128]     | -b k e^G of the tokens, then q e^G; in pairs of bfloat16 for tensor cores                  |
| `writes` [T + 1, 128]   | k e^{G_T - G} of the tokens, likewise, then e^{G_T}                                        |
| `mix` [2T, T]           | -b A, then P                                                                               |
| `strengths` [T]         | b                                                                                          |
| `kept` [3T, 128]        | k, q, log2 decays                                                                          |

Times, and what was tried: `docs/decode.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.decode_flags import INDEX_IS_I64, TOKENS, ZERO_IS_NULL
from cula.ops.cute.common.tiles import BF16, F32, I32
from cula.ops.cute.sm90 import decode_rows_fma, decode_rows_mma
from cula.ops.cute.sm90.decode_common import MAX_WARPS, WARP_ROWS, D, vector_at
from cula.ops.cute.sm90.decode_tokens import load_tokens, prepare
from cula.ops.cute.variants import Variant


@cute.kernel
def decode_kernel(
    addresses: tuple,
    row_strides: tuple,
    strides: tuple,
    factors: tuple,
    tokens: I32,
    group: I32,
    flags: I32,
    T: cutlass.Constexpr,
    pool_type: cutlass.Constexpr,
):
    """A block for each (rows of a state, value head, row of the call)."""
    _, _, v, pool, indices, _, _, _, _, _, o = addresses
    _, _, v_row, o_row, _, _, slot_stride, index_stride = row_strides
    (v_token, v_head), (o_token, o_head) = strides[2:4]
    split, hv, n = cute.arch.block_idx()
    tid, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    wid = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    rows = rows_of(pool_type)
    row = (split * (threads // 32) + wid) * WARP_ROWS + rows.first_row(lane)

    # The slot first, then all that does not depend on it.
    slot = cute.make_rmem_tensor((2,), I32)
    slot[0], slot[1] = n, I32(0)
    if indices != 0:
        if (flags & INDEX_IS_I64) != 0:
            cute.autovec_copy(vector_at(I32, indices + Int64(n) * index_stride * 8, 2, 8), slot)
        else:
            slot[0] = vector_at(I32, indices + Int64(n) * index_stride * 4, 1)[0]
    at_v = v + (Int64(n) * v_row + hv * v_head + row) * 2
    values = rows.load_values(at_v, v_token, tokens, T, lane)
    raw = load_tokens(addresses, row_strides, strides, tokens, group, flags, T, n, hv, wid, lane)

    sign = slot[1] if (flags & INDEX_IS_I64) != 0 else slot[0]
    is_null = sign < 0
    if (flags & ZERO_IS_NULL) != 0:
        is_null = sign < 0 or slot[0] == 0
    to = o + (Int64(n) * o_row + hv * o_head + row) * 2
    if indices != 0 and is_null:
        write_zeros(pool_type, to, o_token, tokens, lane)
    else:
        state = pool + (Int64(slot[0]) * slot_stride + (hv * D + row) * D) * (pool_type.width // 8)
        decode_rows(raw, values, factors, tokens, flags, T, pool_type, wid, lane, state, to, o_token)


@cute.jit
def decode_rows(
    raw: cutlass.Constexpr,
    values: cute.Tensor,
    factors: tuple,
    tokens: I32,
    flags: I32,
    T: cutlass.Constexpr,
    pool_type: cutlass.Constexpr,
    wid: I32,
    lane: I32,
    state: Int64,
    to: Int64,
    o_token: I32,
):
    """The block's rows. `state` and `to` are the addresses of the lane's first row in its slot and, for token 0, in o."""
    rows = rows_of(pool_type)
    gS = rows.state_at(state, lane)
    stored = cute.make_rmem_tensor(gS.shape, pool_type)
    cute.autovec_copy(gS, stored)  # on its way while the block prepares what has no state in it
    tables = allocate(T)
    prepare(raw, factors, tokens, flags, T, rows, wid, lane, tables)
    rows.decode_rows(stored, gS, values, tables, tokens, flags, T, lane, to, o_token)


def write_zeros(pool_type: Any, *arguments: Any) -> None:
    """As `put` of decode_tokens.py: a branch would take a module whose method it calls for something that it changes."""
    rows_of(pool_type).write_zeros(*arguments)


def rows_of(pool_type: Any) -> Any:
    """The module that has what meets the state."""
    return decode_rows_mma if pool_type is BF16 else decode_rows_fma


def allocate(T: int) -> Any:
    """The tables in shared memory, in the order of the header."""
    smem = SmemAllocator()
    table = lambda rows, columns: smem.allocate_tensor(F32, cute.make_layout(rows * columns), byte_alignment=16)
    vectors, writes, mix, strengths = table(2 * T, D), table(T + 1, D), table(2 * T, T), table(1, max(T, 4))
    return vectors, writes, mix, strengths, table(3 * T, D)


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
    flags: I32,
    warps: I32,
    stream,
    T: cutlass.Constexpr,
    pool_type: cutlass.Constexpr,
):
    """Addresses, 0 for what is absent, then strides in elements: numbers only, because to hand over a tensor costs the caller
    microseconds. `beta_top` is 0 for a beta that is activated already, `group` HV / H, `tokens` at most T."""
    decode_kernel(
        (q, k, v, pool, indices, g, beta, A_log, dt_bias, decay, o),
        (q_row, k_row, v_row, o_row, g_row, beta_row, slot_stride, index_stride),
        (
            (q_token, q_head),
            (k_token, k_head),
            (v_token, v_head),
            (o_token, o_head),
            (g_token, g_head),
            (beta_token, beta_head),
            A_head,
            (bias_head, bias_channel),
            decay_head,
        ),
        (scale, lower, beta_top),
        tokens,
        group,
        flags,
        T,
        pool_type,
    ).launch(
        grid=(MAX_WARPS // warps, HV, N),
        block=(32 * warps, 1, 1),
        max_number_threads=(32 * MAX_WARPS, 1, 1),
        min_blocks_per_mp=1 if cutlass.const_expr(T == 8) else 2,
        preferred_smem_carveout=50 if cutlass.const_expr(T == 8) else 28,  # percent: the blocks that registers let in
        stream=stream,
    )


def variants() -> Iterator[Variant]:
    """`decode_<tokens>_<states>`"""
    for T in TOKENS:
        for name, pool_type in (("f32", F32), ("bf16", BF16)):
            strides = (*(Int64(8) for _ in range(8)), *(I32(8) for _ in range(16)))
            numbers = (F32(1.0), F32(-5.0), F32(1.0), *(I32(1) for _ in range(6)))
            arguments = (*(Int64(0) for _ in range(11)), *strides, *numbers, make_fake_stream(), T, pool_type)
            yield Variant(f"decode_{T}_{name}", decode_host, arguments, uses=("mma",) if pool_type is BF16 else ())
