# SPDX-License-Identifier: Apache-2.0
"""One to eight tokens a row on a pool of states: KDA and Lightning decode, one launch. K = V = 128, bf16 tokens.

This file has the frame of all kernels, their host function and their variants. It uses nothing that only one architecture has:
`sm90/decode.py` and `sm100/decode.py` list the same variants. A single token is in `decode_one.py`, Lightning in
`decode_lightning.py`; what follows is several tokens of KDA.

All tokens of a row meet its state S0 [V, K] at once. With log decays summed from the first token (G_t, G_T over all T), write
strengths b and the scale inside q:

    R_t = S0 . (k_t e^{G_t})     Q_t = S0 . (q_t e^{G_t})                                        2T products a row of S0
    A[t, i] = k_t . (e^{G_t - G_i} k_i), i < t     P[t, i] = q_t . (e^{G_t - G_i} k_i), i <= t   once a (row, head)
    u_t = b_t (v_t - R_t - sum_{i < t} A[t, i] u_i)     o_t = Q_t + sum_{i <= t} P[t, i] u_i
    S_T = e^{G_T} S0 + sum_i u_i (k_i e^{G_T - G_i})

Decays are products of factors e^g in [0, 1], so any gate will do. Lightning has u = v and one decay a head, so neither R nor A
nor a recurrence.

The life of a block, in the order of `decode_kernel`. Steps in the left column are functions of a module for tokens (`decode_one`,
`decode_kda_intra`, `decode_lightning`), `decode_rows` is a method of the class for a kind of state:

| step                | what                                                                                              |
|---------------------|---------------------------------------------------------------------------------------------------|
| `addresses`         | all of them are made before the kernel in front has ended                                         |
| `load_before_slot`  | what is loaded while the slot's number is on its way                                              |
| `load_behind_state` | the state is loaded, and behind it the rest of the tokens                                         |
| `intra`             | what tokens are to each other, while the state is on its way                                      |
| `decode_rows`       | the rows of the state: outputs, and the state after the last token                                |

Several tokens of KDA: a block has four warps. Its part of the state is on its way to registers while the block does what needs
no state, with one barrier in the end (`decode_kda_intra.py`). Keys and queries are raw there: their norms, b and the scale are
factors of what has met the state. Then every warp has its own rows meet the vectors, in 3T + 1 multiply-adds a number of the
state: in float32 for float32 states, with 8 lanes a row, or 16 where there is little work (`decode_kda_f32.py`), on tensor cores
for bfloat16 ones (`decode_kda_bf16.py`).

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
from cutlass.memory import SmemAllocator

from cula.ops.cute.common import decode_kda_intra, decode_lightning, decode_one
from cula.ops.cute.common.arguments import variant_of
from cula.ops.cute.common.decode_call import BLOCKS, Call, D, Place
from cula.ops.cute.common.decode_kda_bf16 import KdaBf16
from cula.ops.cute.common.decode_kda_f32 import KdaF32
from cula.ops.cute.common.decode_lightning_bf16 import LightningBf16
from cula.ops.cute.common.decode_lightning_f32 import LightningF32
from cula.ops.cute.common.decode_memory import fence, number_at, select
from cula.ops.cute.common.decode_one import OneToken, OneTokenF32
from cula.ops.cute.common.tiles import F32, I32
from cula.ops.cute.decode_abi import DECODE, TALL_TOKENS, TOKEN_TENSORS, TOKENS, Flag
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
    call = Call.of(addresses, row_strides, strides, factors, slots, tokens, flags)
    indices, o, o_token = call.indices, call.o, call.o.token
    block, hv, n = cute.arch.block_idx()
    tid, _, _ = cute.arch.thread_idx()
    wid, lane = tid // 32, tid % 32
    of_tokens = tokens_module(rows)
    warp_row = (block * rows.warps + wid) * rows.warp_rows
    tables = allocate(rows.tables)

    # This block may be here before the kernel in front has ended. Until then there are addresses to make.
    size = select((flags & Flag.INDEX_IS_I64) != 0, I32(8), I32(4))
    at_index = indices.at + Int64(n) * indices.stride * size
    h = I32((Int64(hv) * per_group) >> 30)
    place = Place(n, hv, h, warp_row, wid, lane)
    at = of_tokens.addresses(rows, call, place)
    fence(never=functools.reduce(operator.or_, all_of((at_index, at))) == 0)
    has_indices = indices.at != call.q.at
    if cutlass.const_expr(rows.prefetching_blocks > 0):
        prefetch_state(rows, call.state, at_index, has_indices, warp_row, flags, lane)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()  # its blocks may come to make theirs; they wait for the end of this kernel

    # The slot first, and what is wanted of tokens while it is on its way. A load that has not come yet holds one of a warp's six
    # scoreboards. Those that are used behind a branch (and the slot may be none) share one, so that nobody could use a token
    # before the state is there, and nothing could be done during the wait for it. Therefore KDA has several tokens copied to
    # shared memory, and loads a single one behind the state.
    slot, sign = number_at(I32, at_index, 0), number_at(I32, at_index + (size - 4), 0)  # the upper half, or again the slot
    found = of_tokens.load_before_slot(rows, call, at, place, tables)
    zero_is_null = (flags & Flag.ZERO_IS_NULL) != 0
    is_null = has_indices and (sign < 0 or (zero_is_null and slot == 0))
    to = o.at + (o.offset(n, hv) + warp_row + rows.first_row(lane)) * 2
    # A branch would take an object whose method it calls for something that it changes.
    write_zeros, load_state, decode_rows = rows.write_zeros, rows.load_state, rows.decode_rows
    load_behind_state, intra = of_tokens.load_behind_state, of_tokens.intra
    if is_null:
        write_zeros(to, o_token, tokens, lane)
    else:
        slot = select(has_indices, slot, n)
        state = state_address(rows, call.state, slot, hv, warp_row)
        stored = load_state(state, lane)  # on its way while the block does what needs no state
        raw = load_behind_state(rows, call, at, found, place)
        cute.arch.sync_warp()  # the compiler moves no load past this, as it would past branches
        ready = intra(rows, call, raw, place, tables)
        decode_rows(call, stored, state, ready, tables, lane, to)


def tokens_module(rows: Any) -> Any:
    """The module with the steps for the tokens of a kernel."""
    if rows.T == 1:
        return decode_one
    return decode_kda_intra if rows.is_kda else decode_lightning


def state_address(rows: Any, pool: Any, slot: Any, hv: Any, warp_row: Any) -> Any:
    """Of a warp's rows."""
    return pool.at + (Int64(slot) * pool.stride + (hv * D + warp_row) * D) * (rows.dtype.width // 8)


@cute.jit
def prefetch_state(
    rows: cutlass.Constexpr,
    pool: cutlass.Constexpr,
    at_index: Int64,
    has_indices: cutlass.Boolean,
    warp_row: I32,
    flags: I32,
    lane: I32,
):
    """Have the L2 fetch the warp's rows of the slot that is named now, before the kernel in front has ended.

    The memory has little to do then. The kernel in front may yet write the state, which the L2 sees, or name another slot. So
    this is a hint; the slot's number is read again. It is for the first blocks of a call that has more than are there at once.
    """
    block, hv, n = cute.arch.block_idx()
    if (flags & Flag.PREFETCH) != 0 and lane == 0:
        per_state, heads, _ = cute.arch.grid_dim()
        if (n * heads + hv) * per_state + block < rows.prefetching_blocks:
            load = "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];"  # not from the L1, nor into it
            named = cute.arch.inline_ptx(load, write_only_types=[I32], read_only_args=[at_index])
            slot = select(has_indices, named, n)
            if slot >= 0 and slot < pool.slots:
                state = state_address(rows, pool, slot, hv, warp_row)
                size = I32(rows.warp_rows * D * (rows.dtype.width // 8))
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
def decode_host(x: cutlass.Constexpr, stream, rows: cutlass.Constexpr):
    """The arguments that `DECODE` describes. `tokens` is at most the kernel's T."""
    decode_kernel(*tensors_of(x), *numbers_of(x), rows).launch(
        grid=(D // rows.warp_rows // rows.warps, x.HV, x.N),
        block=(32 * rows.warps, 1, 1),
        min_blocks_per_mp=rows.blocks,
        preferred_smem_carveout=28 if rows.T < 8 else 44,  # percent, 64 or 100 KB, for all blocks; the rest is L1
        use_pdl=True,
        stream=stream,
    )


def tensors_of(x: Any) -> tuple[Any, ...]:
    """Addresses, strides in elements of rows and slots, and of all else, and factors: what kernels take of a call first. They are
    numbers, because to hand over a tensor costs the caller microseconds."""
    others = (select(at != 0, at, x.q) for at in (x.state_indices, x.g, x.beta, x.A_log + x.decay, x.dt_bias))
    of_tokens = [(getattr(x, f"{name}_token"), getattr(x, f"{name}_head")) for name in TOKEN_TENSORS]
    return (
        (x.q, x.k, x.v, x.state, *others, x.o),
        (*(getattr(x, f"{name}_row") for name in TOKEN_TENSORS), x.slot_stride, x.index_stride),
        (*of_tokens, x.A_head + x.decay_head, (x.bias_head, x.bias_channel)),
        (x.scale, x.lower_bound, x.beta_top),
    )


def numbers_of(x: Any) -> tuple[Any, ...]:
    """And last: tokens, what a value head is multiplied by to find its head of keys, slots, flags."""
    return x.tokens, (Int64(2**30) + x.group - 1) // x.group, x.slots, x.flags


def decode_variants(tall_blocks: int = BLOCKS) -> Iterator[Variant]:
    """The kernels for an architecture, on which that many blocks with 32 rows a warp are to fit a multiprocessor.

    `decode_<tokens>_<states>`; with 16 lanes a row `decode_<tokens>_f32_wide`, 32 rows a warp `decode_<tokens>_bf16_tall`;
    of Lightning the same with `_lightning`. One token has a kernel for one gate a head, `_scalar` (several tokens take either
    gate); several of Lightning on states in bfloat16 have one kernel for all numbers of tokens.
    """
    for name, rows in (("bf16", OneToken), ("f32", OneTokenF32)):
        yield _variant(f"decode_1_{name}", rows(is_kda=True))
        yield _variant(f"decode_1_{name}_scalar", rows(is_kda=True, is_scalar=True))
        yield _variant(f"decode_1_{name}_lightning", rows(is_kda=False))
    for T in TOKENS:
        yield _variant(f"decode_{T}_bf16", KdaBf16(T))
        if T in TALL_TOKENS:
            yield _variant(f"decode_{T}_bf16_tall", KdaBf16(T, sides=4, tall_blocks=tall_blocks))
        for name, lanes in (("f32", 8), ("f32_wide", 16)):
            yield _variant(f"decode_{T}_{name}", KdaF32(T, lanes))
            yield _variant(f"decode_{T}_{name}_lightning", LightningF32(T, lanes))
    yield _variant("decode_8_bf16_lightning", LightningBf16(8))


def _variant(name: str, rows: Any) -> Variant:
    return variant_of(name, DECODE, decode_host, rows, uses=rows.uses)
