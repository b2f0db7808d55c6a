# SPDX-License-Identifier: Apache-2.0
"""Lightning on Blackwell, the state: a thread has one row of V of S, and one token of k.

Never run on a GPU: see `lightning.py`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.lightning_items import item_at, num_items, power
from cula.ops.cute.common.lightning_states import read_first_state, read_seeds, write_last_state
from cula.ops.cute.common.tiles import BF16, F32, I32

from .lightning_smem import C, Column
from .rows import put_row, rounded, row_of
from .tmem import PIECE, after_sync, before_sync, row_load, row_stores, stored


@cute.jit
def state_role(x: cutlass.Constexpr, thread: I32):
    """A warpgroup: S between tensor memory, where it is added to, and everything else; and k, weighed."""
    work, bars, cfg = x.work, x.bars, x.cfg
    stages, it = cfg.depth, I32(0)
    has_row = cute.arch.make_warp_uniform(thread // 32) < cfg.V // 32
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(first, num_items(work), step, unroll=1):
        item = item_at(work, index, I32(0))
        if has_row:
            first_state(x, thread, item)
        for chunk in cutlass.range((item.tokens + C - 1) // C, unroll=1):
            s, n = it % stages, cutlass.min(item.tokens - chunk * C, C)
            if chunk > 0:
                cute.arch.mbarrier_wait(bars.s_done, (it + 1) % 2)
                after_sync()
            if has_row:
                decay_state(x, thread, power(item.decay, n))
            cute.arch.fence_proxy("async.shared", space="cta")
            before_sync()
            cute.arch.mbarrier_arrive(bars.s_ready)
            cute.arch.mbarrier_wait(bars.full + s, it // stages % 2)
            if cutlass.const_expr(not cfg.only_ends):
                cute.arch.mbarrier_wait(bars.p_done, it % 2)
            weigh_keys(x.storage.sVK, s, item.decay, n, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(bars.k_ready)
            it += 1
        if item.tokens > 0:
            cute.arch.mbarrier_wait(bars.s_done, (it + 1) % 2)
            after_sync()
        if has_row:
            last_state(x, thread, item)


def piece_of(thread: Any, p: Any) -> Any:
    """32 columns of a thread's row of a matrix in memory."""
    return lambda m: cute.local_tile(m[thread, None], (PIECE,), (p,))


@cute.jit
def first_state(x: cutlass.Constexpr, thread: I32, item: cutlass.Constexpr):
    """S <- the state that an item starts from. The first pass over segments starts from zero, and hands on a sequence's first."""
    states, cfg = x.states, x.cfg
    for p in cutlass.range(cfg.K // PIECE, unroll=1):
        piece, ours = cute.make_rmem_tensor((PIECE,), F32), piece_of(thread, p)
        if cutlass.const_expr(cfg.only_ends):
            if (item.place == 0) & (states.ends.has_h0 != 0):
                read_first_state(piece, ours, states, item)
                cute.autovec_copy(piece, ours(states.seed(item.id, item.head)))
            piece.fill(0.0)
        else:
            if x.work.sizes.segment == 0:
                read_first_state(piece, ours, states, item)
            else:
                read_seeds(piece, ours, states, item, x.work.sizes.segment)
        row_stores(x.mmas.p, x.tmem + (Column.S + PIECE * p), PIECE, thread)[0](piece)
        stored()


@cute.jit
def decay_state(x: cutlass.Constexpr, thread: I32, factor: F32):
    """S to shared memory in bf16, as an operand; S <- factor S."""
    for p in cutlass.range_constexpr(x.cfg.K // PIECE):
        piece, at = cute.make_rmem_tensor((PIECE,), F32), x.tmem + (Column.S + PIECE * p)
        row_load(x.mmas.p, at, PIECE, thread)(piece)
        if cutlass.const_expr(not x.cfg.only_ends):
            put_row(row_of(x.storage.sS, 0, thread)[4 * p : 4 * p + 4], rounded(piece, BF16))
        piece.store(piece.load() * factor)
        row_stores(x.mmas.p, at, PIECE, thread)[0](piece)
    stored()


@cute.jit
def weigh_keys(sVK: cute.Tensor, s: I32, decay: F32, n: I32, thread: I32):
    """k_i <- f^(n-1-i) k_i, in place, in a stage with a chunk of n tokens; k_i, v_i <- 0 from n on."""
    of_v, of_k = row_of(sVK, 2 * s, thread), row_of(sVK, 2 * s + 1, thread)
    keys = cute.make_rmem_tensor((8,), BF16)
    if thread < n:
        factor = power(decay, n - 1 - thread)
        for j in cutlass.range_constexpr(len(of_k)):
            cute.autovec_copy(of_k[j], keys)
            keys.store((keys.load().to(F32) * factor).to(BF16))
            cute.autovec_copy(keys, of_k[j])
    else:
        keys.fill(0.0)
        for j in cutlass.range_constexpr(len(of_k)):
            cute.autovec_copy(keys, of_k[j])
            cute.autovec_copy(keys, of_v[j])


@cute.jit
def last_state(x: cutlass.Constexpr, thread: I32, item: cutlass.Constexpr):
    """S to the sequence's last state, if this is its last segment; from the first pass to the next segment's seed."""
    states, cfg = x.states, x.cfg
    for p in cutlass.range(cfg.K // PIECE, unroll=1):
        piece, ours = cute.make_rmem_tensor((PIECE,), F32), piece_of(thread, p)
        row_load(x.mmas.p, x.tmem + (Column.S + PIECE * p), PIECE, thread)(piece)
        if cutlass.const_expr(cfg.only_ends):
            if item.tokens > 0:
                cute.autovec_copy(piece, ours(states.seed(item.id + 1, item.head)))
        else:
            write_last_state(lambda piece=piece: piece, ours, states, item, item.tokens)
