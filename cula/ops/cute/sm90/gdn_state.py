# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper, the state's role: a warpgroup with 64 rows dv of S^T passes over chunks. See `gdn.py`.

    R = k S,    Y = v - f R,    E = T Y,    S <- e_C S + k^T (r b E)

all transposed, so that S, Y and E are left operands and stay in registers. S and E, in 16 bits, also go to shared memory, where
the output's warpgroup takes them from. What does not depend on a product is done while one runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp, warpgroup

from cula.ops.cute.common.barriers import arrive, publish
from cula.ops.cute.common.gdn_items import slot_of, whole_plan
from cula.ops.cute.common.gdn_vectors import DECAY, INTO_STATE, POWER, read_pairs
from cula.ops.cute.common.tiles import (
    BF16,
    F32,
    I32,
    issue,
    rounded,
    rows_and_columns,
    seen_as_a,
    swapped,
)
from cula.ops.cute.gdn_abi import BFLOAT16, FLOAT16, FLOAT32, TILE_BYTES
from cula.ops.cute.sm90.kda_recurrence_steps import copy_of, copy_tile, load_v

from .gdn_segments import chain, hand_on
from .gdn_smem import stage_of_k, stage_of_t


class Walker(NamedTuple):
    """What a warpgroup works with, whatever it passes over."""

    part: Any  # which 64 rows dv of those that the block has
    thread: Any  # in its warpgroup
    mmas: Any
    accS: Any  # [64, 128]
    copy_v: Any  # v^T comes in as an accumulator lies: ldmatrix turns [token, channel] tiles round
    v_s: Any

    def row(self, a: Any) -> Any:
        """Which of the 64 rows the thread's first or second is."""
        return self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * a

    def store(self, x: Any, to: Any) -> None:
        """S in 16 bits to a tile."""
        store_tile(self.mmas.s, self.thread, x, to)


@cute.jit
def state_role(
    tma_v: cutlass.Constexpr,
    states: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    part: I32,
    variant: cutlass.Constexpr,
):
    """The heads of a block, or its piece of one."""
    w = make_walker(mmas, smem, part)
    if cutlass.const_expr(variant.parts == 1):
        walk(w, tma_v, states, scalars, items, plan, smem, bars, I32(0), variant)
    else:
        n = I32(0)
        for item in cutlass.range(items.first, items.total, items.step, unroll=1):
            n = walk(w, tma_v, states, scalars, items, whole_plan(items, item), smem, bars, n, variant)


def make_walker(mmas: Any, smem: Any, part: Any) -> Walker:
    thread = cute.arch.thread_idx()[0] % 128
    thr_s = mmas.s.get_slice(thread)
    copy_v = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mmas.x).get_slice(thread)
    accS = thr_s.make_fragment_C(thr_s.partition_shape_C((64, 128)))
    return Walker(part, thread, mmas, accS, copy_v, copy_v.partition_S(swapped(smem.v)))


@cute.jit
def walk(
    w: cutlass.Constexpr,
    tma_v: cutlass.Constexpr,
    states: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    items: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    n: I32,
    variant: cutlass.Constexpr,
):
    """A head from its first state to its last, or a piece of one. The block has passed n chunks before, returns how many then."""
    wid, rows, part = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3, items.rank + w.part, w.part
    hv, tokens, end, is_half = plan.hv, plan.tokens, plan.end, cutlass.const_expr(variant.parts == 1)
    of_head = cute.domain_offset((plan.begin, 0), tma_v.coordinates[None, None, hv])
    of_v = copy_of(tma_v, smem.v, cute.local_tile(of_head, (64, 64), (None, rows)))
    if wid == 0 and plan.start < end:
        ask_for_values(of_v, bars, part, plan.start, n)
    w.accS.fill(0.0)
    if plan.start == 0 and plan.is_map == 0:
        read_state(w, states, scalars, plan.seq, hv, rows)
    if cutlass.const_expr(is_half):
        for chunk in cutlass.range(plan.start, plan.middle, unroll=1):
            if wid == 0 and chunk + 1 < end:
                ask_for_values(of_v, bars, part, chunk + 1, n + 1)
            state_step(w, smem, bars, n, None, tokens - chunk * 64, True)
            n += 1
        if plan.is_map == 1:
            chain(w, states.handed, plan.record, items.rank, smem, bars)
    for chunk in cutlass.range(plan.middle, end, unroll=1):
        if cutlass.const_expr(is_half):  # noqa: SIM102 (known when this is compiled, which the other is not)
            if chunk == plan.export_at:
                hand_on(w, states.handed, plan.record + 2)
        if wid == 0 and chunk + 1 < end:
            ask_for_values(of_v, bars, part, chunk + 1, n + 1)
        shown = chunk - plan.middle if cutlass.const_expr(is_half) else n
        state_step(w, smem, bars, n, shown, tokens - chunk * 64, True)
        n += 1
    if plan.is_last == 1:
        write_state(w, states, scalars, plan.seq, hv, rows)
    return n


@cute.jit
def ask_for_values(of_v: cutlass.Constexpr, bars: cutlass.Constexpr, part: I32, chunk: I32, n: I32):
    """v of a chunk, the n-th of this block, is to come. By a warp."""
    at = 2 * part + (n & 1)
    cute.arch.mbarrier_wait(bars.v_empty + at, ((n >> 1) + 1) & 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full + at, TILE_BYTES // 2)
    copy_tile(of_v, chunk, at, bars.v_full + at)


@cute.jit
def state_step(
    w: cutlass.Constexpr,
    smem: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    n: I32,
    shown: cutlass.Constexpr,
    left: I32,
    sees_v: cutlass.Constexpr,
):
    """The state over the block's n-th chunk. `shown` is how many before it had an output; None: this one has none. M of a map
    sees no v."""
    part, mmas, accS, has_output = w.part, w.mmas, w.accS, cutlass.const_expr(shown is not None)
    of_vectors, of_v, c = n & 7, 2 * w.part + (n & 1), w.thread % 4
    (stage, k_turn), (place, turn) = stage_of_k(smem, n), stage_of_t(smem, n)
    thr_x, thr_t, thr_s = mmas.x.get_slice(w.thread), mmas.t.get_slice(w.thread), mmas.s.get_slice(w.thread)
    accX = thr_x.make_fragment_C(thr_x.partition_shape_C((64, 64)))
    accE = thr_t.make_fragment_C(thr_t.partition_shape_C((64, 64)))
    k = thr_x.make_fragment_B(thr_x.partition_B(smem.k))  # [N = token, K = dk]
    T = thr_t.make_fragment_B(thr_t.partition_B(swapped(smem.T)))  # [N = t, K = i], stored [i, t]
    k_swapped = thr_s.make_fragment_B(thr_s.partition_B(swapped(smem.k)))  # [N = dk, K = token]
    if cutlass.const_expr(sees_v):
        cute.arch.mbarrier_wait(bars.v_full + of_v, (n >> 1) & 1)
    half = rounded(accS)

    if cutlass.const_expr(has_output):
        cute.arch.mbarrier_wait(bars.s_empty + part, (shown + 1) & 1)
    cute.arch.mbarrier_wait(bars.k_ready + stage, k_turn)
    issue(mmas.x, accX, seen_as_a(half), k[None, None, None, stage], False)
    # No branch while the product runs, or the compiler waits for it there. It would where S decays, too, which comes later.
    if cutlass.const_expr(has_output):
        w.store(half, smem.S[None, None, part])
        cute.arch.fence_proxy("async.shared", space="cta")
    warpgroup.wait_group(0)
    if cutlass.const_expr(has_output):
        arrive(bars.s_full + part)
    power = read_pairs(smem.vectors, POWER, of_vectors, c)  # not before, and v once more: there are no registers
    predict(values(w, accX, of_v, left) if cutlass.const_expr(sees_v) else None, accX, power)
    if cutlass.const_expr(sees_v):
        arrive(bars.v_empty + of_v)

    cute.arch.mbarrier_wait(bars.t_ready + place, turn)
    issue(mmas.t, accE, seen_as_a(rounded(accX)), T[None, None, None, place], False)
    accS.store(accS.load() * smem.vectors[DECAY, of_vectors])
    into_state = read_pairs(smem.vectors, INTO_STATE, of_vectors, c)
    warpgroup.wait_group(0)
    error = rounded(accE)
    E = rows_and_columns(accE)
    for j in cutlass.range_constexpr(16):
        for a in cutlass.range_constexpr(2):
            E[a, j] = E[a, j] * into_state[j]
    issue(mmas.s, accS, seen_as_a(rounded(accE)), k_swapped[None, None, None, stage], True)
    if cutlass.const_expr(has_output):
        cute.arch.mbarrier_wait(bars.e_empty + part, (shown + 1) & 1)
        store_tile(mmas.t, w.thread, error, smem.E[None, None, part])
        publish(bars.e_full + part)
    warpgroup.wait_group(0)
    arrive(bars.k_empty + stage)


@cute.jit
def values(w: cutlass.Constexpr, accX: cute.Tensor, of_v: I32, left: I32):
    """v^T of a chunk, as an accumulator lies; zeros past the end of the sequence."""
    rV = cute.make_rmem_tensor_like(accX, BF16)
    load_v(w, rV, of_v, left, I32(1))
    return rV


@cute.jit
def predict(rV: cutlass.Constexpr, accX: cute.Tensor, power: cute.Tensor):
    """X <- v^T less what was predicted of it."""
    X, both = rows_and_columns(accX), cute.make_rmem_tensor((2,), F32)
    if cutlass.const_expr(rV is None):
        for j in cutlass.range_constexpr(16):
            for a in cutlass.range_constexpr(2):
                X[a, j] = -power[j] * X[a, j]
    else:
        words, bits = cute.recast_tensor(rV, I32), cute.recast_tensor(both, I32)
        for j in cutlass.range_constexpr(0, 16, 2):
            for a in cutlass.range_constexpr(2):
                bits[0], bits[1] = words[j + a] << 16, words[j + a] & I32(-0x10000)
                for i in cutlass.range_constexpr(2):
                    X[a, j + i] = both[i] - power[j + i] * X[a, j + i]


def store_tile(mma: Any, thread: Any, x: Any, to: Any) -> None:
    """16-bit registers, laid out like an accumulator, to a tile of as many rows and columns."""
    copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), to.element_type), mma).get_slice(thread)
    cute.copy(copy, copy.retile(x), copy.partition_D(to))


# States in memory


@cute.jit
def read_state(w: cutlass.Constexpr, states: cutlass.Constexpr, scalars: cutlass.Constexpr, seq: I32, hv: I32, rows: I32):
    """accS, which is zero, <- our rows of a first state, where there is one."""
    slot = slot_of(states.read_from, scalars, seq)
    for kind in (FLOAT32, BFLOAT16, FLOAT16):
        if scalars.h0_kind == kind and slot >= 0:
            m = states.h0[kind - 1]
            given = cute.make_rmem_tensor_like(w.accS, m.element_type)
            cute.autovec_copy(ours(w, m, slot, hv, rows), given)
            w.accS.store(given.load().to(F32))


@cute.jit
def write_state(w: cutlass.Constexpr, states: cutlass.Constexpr, scalars: cutlass.Constexpr, seq: I32, hv: I32, rows: I32):
    slot = slot_of(states.write_to, scalars, seq)
    for kind in (FLOAT32, BFLOAT16, FLOAT16):
        if scalars.ht_kind == kind and slot >= 0:
            m = states.ht[kind - 1]
            cute.autovec_copy(rounded(w.accS, m.element_type), ours(w, m, slot, hv, rows))


def ours(w: Walker, m: Any, slot: Any, hv: Any, rows: Any) -> Any:
    """Our rows of a state in memory."""
    return w.mmas.s.get_slice(w.thread).partition_C(cute.local_tile(m[slot, hv, None, None], (64, 128), (rows, 0)))
