# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Blackwell, the rows' role: what products of the chain take and give, between tensor memory and registers.
See `gdn.py`.

    R = k S,    Y = v - f R,    E = T Y,    S <- e_C S + k^T (r b E)

A thread has one row dv of everything, and goes over the state by pieces of 32 columns, so that few are alive at a time.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.barriers import arrive
from cula.ops.cute.common.fp16_window import inverse_of, is_outside, move_inside
from cula.ops.cute.common.gdn_items import slot_of, whole_plan
from cula.ops.cute.common.gdn_vectors import DECAY, INTO_STATE, POWER, read_vector
from cula.ops.cute.common.tiles import BF16, F32, I32
from cula.ops.cute.gdn_abi import BFLOAT16, FLOAT16, FLOAT32

from .gdn_smem import Column, Turn
from .rows import address_of_column, entry_at, largest, pieces, rounded, times, times_plus
from .tmem import PIECE, after_sync, before_sync, loaded, row_load, row_stores, stored

PIECES = 128 // PIECE  # of a row of the state


@cute.jit
def rows_role(x: cutlass.Constexpr, thread: I32):
    """A warpgroup: every head of a block from its first state to its last."""
    items, bars = x.items, x.bars
    factor = cute.make_rmem_tensor((1,), F32)  # a power of two, that our row of the state is scaled by
    n = I32(0)
    for item in cutlass.range(items.first, items.total, items.step, unroll=1):
        plan = whole_plan(items, item)
        factor[0] = F32(1.0)
        first_state(x, thread, plan)
        for chunk in cutlass.range(plan.end, unroll=1):
            if chunk > 0:
                cute.arch.mbarrier_wait(bars.s_done, (n - 1) & 1)
                after_sync()
            rows_step(x, thread, factor, n, plan.tokens - chunk * 64)
            n += 1
        if plan.end > 0:
            cute.arch.mbarrier_wait(bars.s_done, (n - 1) & 1)
            after_sync()
        last_state(x, thread, plan, inverse_of(factor[0]))


@cute.jit
def rows_step(x: cutlass.Constexpr, thread: I32, factor: cute.Tensor, n: I32, left: I32):
    """The block's n-th chunk, of which `left` tokens are the sequence's."""
    bars, vectors, sV, now = x.bars, x.storage.vectors, x.storage.v, Turn(n)
    cute.arch.mbarrier_wait(bars.v_full + now.place, now.of_place)
    values, top = read_values(sV, now.place, left, thread)
    show_state(x, thread, top, factor)
    x.storage.unit[thread, now.place] = x.scalars.scale * inverse_of(factor[0])
    announce(bars.s_ready + now.place)
    cute.arch.mbarrier_wait(bars.ready + now.stage, now.of_stage)
    decay_state(x, thread, vectors[DECAY, now.vectors])

    cute.arch.mbarrier_wait(bars.r_done, now.parity)
    after_sync()
    predict(x, thread, values, factor[0], now.vectors)
    announce(bars.y_ready)  # and of S, decayed
    arrive(bars.v_empty + now.place)  # not where v is read: until it is used, loads may be in flight

    cute.arch.mbarrier_wait(bars.e_done, now.parity)
    after_sync()
    E, into_state = cute.make_rmem_tensor((64,), F32), read_vector(vectors, INTO_STATE, now.vectors, 64)
    row_load(x.mmas.x, x.tmem + Column.E, 64, thread)(E)
    times(into_state, E)
    store_operand(x, thread, Column.W16, into_state)
    announce(bars.w_ready)
    store_operand(x, thread, Column.E16, E)
    announce(bars.e_ready)


@cute.jit
def announce(bar: cute.Pointer):
    """This warp has stored an operand to tensor memory."""
    stored()
    before_sync()
    arrive(bar)


@cute.jit
def read_values(sV: cute.Tensor, place: I32, left: I32, thread: I32):
    """(Our channel of v, zeros past the end: that is another sequence's; the largest of it)."""
    values, of_column = cute.make_rmem_tensor((64,), F32), address_of_column(sV, place, thread)
    if left < 64:
        for t in cutlass.range(left, 64, unroll=1):
            entry_at(of_column, t, BF16)[0] = BF16(0.0)
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA is going to write there again
    for t in cutlass.range_constexpr(64):
        values[t] = entry_at(of_column, t, BF16)[0].to(F32)
    return values, largest(values, F32(0.0))


@cute.jit
def show_state(x: cutlass.Constexpr, thread: I32, top: F32, factor: cute.Tensor):
    """S in 16 bits as an operand. In fp16 the row moves if it, or v with which it is to meet, has left what that holds well."""
    store_half = row_stores(x.mmas.x, x.tmem + Column.S16, 64, thread, PIECE // 2)
    store = row_stores(x.mmas.s, x.tmem + Column.S, 128, thread)
    top = top * factor[0]
    piece = cute.make_rmem_tensor((PIECE,), F32)
    for p in cutlass.range_constexpr(PIECES):
        ask(x, thread, p, piece)
        loaded()
        store_half[p](rounded(piece, x.dtype))
        if cutlass.const_expr(x.is_f16):
            top = largest(piece, top)
    if cutlass.const_expr(x.is_f16):  # noqa: SIM102 (known when this is compiled, which the other is not)
        if cute.arch.vote_any_sync(is_outside(top, factor[0])):
            move = move_inside(top, factor[0]) if is_outside(top, factor[0]) else F32(1.0)
            factor[0] = factor[0] * move
            for p in cutlass.range_constexpr(PIECES):
                ask(x, thread, p, piece)
                loaded()
                piece.store(piece.load() * move)
                store[p](piece)
                store_half[p](rounded(piece, x.dtype))


@cute.jit
def decay_state(x: cutlass.Constexpr, thread: I32, decay: F32):
    """S <- decay S, while the first product of the chunk runs, which does not see it."""
    store = row_stores(x.mmas.s, x.tmem + Column.S, 128, thread)
    piece = cute.make_rmem_tensor((PIECE,), F32)
    for p in cutlass.range_constexpr(PIECES):
        ask(x, thread, p, piece)
        loaded()
        times(piece, decay)
        store[p](piece)


def ask(x: Any, thread: Any, p: int, piece: Any) -> None:
    """For a piece of our row of the state, to be waited for by `loaded`."""
    row_load(x.mmas.s, x.tmem + (Column.S + PIECE * p), PIECE, thread, waits=False)(piece)


@cute.jit
def predict(x: cutlass.Constexpr, thread: I32, values: cute.Tensor, factor: F32, place: I32):
    """Y = v, in the state's scale, less what was predicted of it, as an operand where R was."""
    store = row_stores(x.mmas.x, x.tmem + Column.Y16, 32, thread, PIECE // 2)
    for p in cutlass.range_constexpr(2):
        R, f = cute.make_rmem_tensor((PIECE,), F32), read_vector(x.storage.vectors, POWER + PIECE * p, place, PIECE)
        row_load(x.mmas.x, x.tmem + (Column.R + PIECE * p), PIECE, thread)(R)
        v = pieces(values)[p]
        if cutlass.const_expr(x.is_f16):
            times(v, factor)
        times(f, F32(-1.0))
        times_plus(R, f, v)
        store[p](rounded(R, x.dtype))


@cute.jit
def store_operand(x: cutlass.Constexpr, thread: I32, column: cutlass.Constexpr, row: cute.Tensor):
    """64 values in 16 bits."""
    store = row_stores(x.mmas.x, x.tmem + column, 32, thread, PIECE // 2)
    for p in cutlass.range_constexpr(2):
        store[p](rounded(pieces(row)[p], x.dtype))


# States in memory


@cute.jit
def first_state(x: cutlass.Constexpr, thread: I32, plan: cutlass.Constexpr):
    """S <- a sequence's first state, or zero."""
    states, scalars = x.states, x.scalars
    slot = slot_of(states.read_from, scalars, plan.seq)
    store = row_stores(x.mmas.s, x.tmem + Column.S, 128, thread)
    for p in cutlass.range_constexpr(PIECES):
        piece = cute.make_rmem_tensor((PIECE,), F32)
        piece.fill(0.0)
        for kind in (FLOAT32, BFLOAT16, FLOAT16):
            if scalars.h0_kind == kind and slot >= 0:
                m = states.h0[kind - 1]
                given = cute.make_rmem_tensor((PIECE,), m.element_type)
                cute.autovec_copy(cute.local_tile(m[slot, plan.hv, thread, None], (PIECE,), (p,)), given)
                piece.store(given.load().to(F32))
        store[p](piece)
    stored()


@cute.jit
def last_state(x: cutlass.Constexpr, thread: I32, plan: cutlass.Constexpr, back: F32):
    """S, out of its scale, to a sequence's last state."""
    states, scalars = x.states, x.scalars
    slot = slot_of(states.write_to, scalars, plan.seq)
    for p in cutlass.range_constexpr(PIECES):
        piece = cute.make_rmem_tensor((PIECE,), F32)
        ask(x, thread, p, piece)
        loaded()
        piece.store(piece.load() * back)
        for kind in (FLOAT32, BFLOAT16, FLOAT16):
            if scalars.ht_kind == kind and slot >= 0:
                m = states.ht[kind - 1]
                out = cute.make_rmem_tensor((PIECE,), m.element_type)
                out.store(piece.load().to(m.element_type))
                cute.autovec_copy(out, cute.local_tile(m[slot, plan.hv, thread, None], (PIECE,), (p,)))
