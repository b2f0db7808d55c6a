# SPDX-License-Identifier: Apache-2.0
"""The fused KDA kernel, the intra-chunk role: eight warps compute every fourth chunk in their stage, and send it to the partner.

The steps are those of `common/kda_intra_steps.py`. At each barrier all warps of a group wait, also where some need not: where
warps pass by one, compute-sanitizer's racecheck takes others for broken, in kernels of ten lines, too. What it costs could not be
measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm
from cutlass.pipeline import NamedBarrier

from cula.ops.cute.common.fragments import shared_at
from cula.ops.cute.common.inverse import inverse_pair
from cula.ops.cute.common.kda_intra import clear_past_end, load_tiles, read_ahead, write_strengths
from cula.ops.cute.common.kda_intra_smem import Arena, Full, SmemLayout, smem_layout
from cula.ops.cute.common.kda_intra_steep import first_pass_of
from cula.ops.cute.common.kda_intra_steps import (
    KEYS,
    Chunk,
    address,
    factors,
    invert,
    join_halves,
    norms,
    place_a,
    place_p,
    place_t,
    scale_rows,
    second_pass,
    sum_gates,
    sums_of,
)
from cula.ops.cute.common.tiles import F32, I32
from cula.ops.cute.kda_abi import TILE_BYTES
from cula.ops.cute.sm90.kda_fused_smem import INBOX, P_AT, RESULT_BYTES, STAGE_BYTES, Barrier, send

SEND_WARP = 4  # of a group


class Group(NamedTuple):
    """Eight warps and their stage."""

    number: Any
    thread: Any  # in the group
    smem: SmemLayout
    start: Any  # of the stage
    inbox: Any
    bars: Any  # `Mbarriers`
    partner: Any  # its rank


def stage_layout(stages: Any, stage: Any, lt: Any, variant: Any) -> SmemLayout:
    return smem_layout(Arena(stages + stage * STAGE_BYTES), lt, variant, stays=True)


def wait_in_a_branch(barrier: Any) -> None:
    """Warps may come to it by different instructions, which `bar.sync` does not promise to bear."""
    number, threads = [I32(n).ir_value() for n in (barrier.barrier_id, barrier.num_threads)]
    nvvm.barrier_cta_sync(number, thread_count=threads, aligned=False)


@cute.jit
def intra_role(
    tma: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    items: cutlass.Constexpr,
    mCu: cute.Tensor,
    mmas: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    stages: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
    lt: cutlass.Constexpr,
):
    """A group: chunks 2 group + rank, + 4, ..., counted through all the heads of a cluster."""
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) >> 3
    thread = cute.arch.thread_idx()[0] & 255
    smem = stage_layout(stages, number, lt, variant)
    start, inbox = stages + number * STAGE_BYTES, stages + INBOX * STAGE_BYTES
    group = Group(number, thread, smem, start, inbox, bars, cluster.partner)
    item, chunk, use = cluster.number, 2 * number + cluster.rank, I32(0)
    while item < items.total:
        _, hv, begin, tokens = items.at(mCu, item)
        if chunk * 64 < tokens:
            h = hv if items.group_of_heads == 1 else hv // items.group_of_heads
            place = (hv, h, begin + chunk * 64, tokens - chunk * 64)
            intra_chunk(tma, gates, scalars, mmas, variant, group, place, use)
            chunk, use = chunk + 4, use + 1
        else:
            chunk, item = chunk - (tokens + 63) // 64, item + cluster.clusters


@cute.jit
def intra_chunk(
    tma: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    mmas: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    group: cutlass.Constexpr,
    place: cutlass.Constexpr,
    use: I32,
):
    """The chunk of a `place`: (value head, head, first token, tokens from there to the sequence's end). It is computed in the
    group's stage, which has been used `use` times."""
    hv, h, t0, left = place
    smem, bars, stage, thread = group.smem, group.bars, group.number, group.thread
    wid = cute.arch.make_warp_uniform(thread // 32)
    side, block_row = wid >> 2, wid & 3
    lane = cute.arch.lane_idx()
    r, c = lane >> 2, lane & 3
    everyone = NamedBarrier(barrier_id=Barrier.GROUP + stage, num_threads=256)
    x = Chunk(smem, variant, mmas, side, block_row, lane, r, c, left)
    has_gate_tile = variant.has_gate_tile

    # -- inputs: g to where kb was, then k and q
    of_g = [(tma.g, smem.g, hv, Full.G)] if cutlass.const_expr(has_gate_tile) else []
    of_kq = [(tma.k, smem.k, h, Full.KQ), (tma.q, smem.q, h, Full.KQ)]
    if wid == 0:
        cute.arch.mbarrier_wait(bars.half_free + stage, (use + 1) & 1)
        if cutlass.const_expr(has_gate_tile):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(smem.full + Full.G, TILE_BYTES)
            load_tiles(of_g, t0, smem.full)
    raw_b, raw_g, A_log, slope = read_ahead(x, gates, scalars.beta_bits, thread, hv, t0)
    until, after = sums_of(variant, r, c)
    if cutlass.const_expr(has_gate_tile):
        cute.arch.mbarrier_wait(smem.full + Full.G, use & 1)
    everyone.arrive_and_wait()  # the bias is there, too
    if wid == 0:
        cute.arch.mbarrier_wait(bars.free + stage, (use + 1) & 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(smem.full + Full.KQ, 2 * TILE_BYTES)
        load_tiles(of_kq, t0, smem.full)
    if left < 64:
        cute.arch.mbarrier_wait(smem.full + Full.KQ, use & 1)
        clear_past_end(of_g + of_kq, thread, left)
        everyone.arrive_and_wait()

    # -- decays, norms, write strengths
    L, rest = sum_gates(x, raw_g, A_log, slope, scalars.lower, until, after)
    cute.arch.mbarrier_wait(smem.full + Full.KQ, use & 1)
    norms(x, scalars.scale)
    b = write_strengths(x, raw_b, scalars.beta_top)
    everyone.arrive_and_wait()
    factors(x, thread & 127, smem.decays)
    everyone.arrive_and_wait()

    # -- scores and tiles
    cute.arch.mbarrier_wait(bars.o_left + stage, (use + 1) & 1)  # the first pass writes to where it was
    diagonal_a, diagonal_p = first_pass_of(x, until, after, L, rest, b)
    everyone.arrive_and_wait()
    for i in cutlass.range_constexpr(2):
        b[i] = smem.beta[16 * block_row + r + 8 * i]
    join_halves(x, diagonal_a, diagonal_p, b, L)
    everyone.arrive_and_wait()
    if block_row == 0:
        if cutlass.const_expr(variant.is_steep):
            park(x, diagonal_p)
        inverse_pair(smem.diagonal, side, 3 - side, lane)
        if cutlass.const_expr(variant.is_steep):
            cute.arch.sync_warp()
            fetch(x, diagonal_p)
    scores = second_pass(x)
    scale_rows(x, None)
    for i in cutlass.range_constexpr(2):
        b[i] = smem.beta[16 * block_row + r + 8 * i]  # not kept in registers
    cute.arch.fence_proxy("async.shared", space="cta")
    everyone.arrive_and_wait()
    if wid == SEND_WARP:  # tiles are complete; T and P follow
        cute.arch.mbarrier_wait(bars.taken, (stage + 1) & 1)
        with cute.arch.elect_one():
            send(group.start, group.inbox, P_AT, bars.arrived, group.partner)

    # -- P and T
    if cutlass.const_expr(variant.is_steep):  # lest the compiler keep addresses made of the lane through all of the above
        x = x._replace(lane=thread & 31)
    if side == KEYS:
        place_a(x, scores, b)
        wait_in_a_branch(everyone)
        cols = cute.make_rmem_tensor((32,), variant.dtype)
        invert(x, cols, b)
        wait_in_a_branch(everyone)  # nobody reads A any more, T takes its place
        place_t(x, cols, smem.T)
    else:
        place_p(x, scores, diagonal_p, L)
        for _ in range(2):
            wait_in_a_branch(everyone)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.mbarrier_arrive(bars.ready + stage)  # each thread for itself: so racecheck can follow
    if wid == SEND_WARP:
        cute.arch.mbarrier_wait(bars.ready + stage, use & 1)
        with cute.arch.elect_one():
            send(group.start + P_AT, group.inbox + P_AT, RESULT_BYTES - P_AT, bars.arrived, group.partner)


def place_to_park(x: Chunk, j: int) -> Any:
    """Memory for four registers of the first block row's warps, in gaps of `halves` where no table is that is still read."""
    return shared_at(address(x.smem.halves) + 1024 + 2048 * x.side + 512 * j + 16 * x.lane, F32, 4, 16)


@cute.jit
def park(x: cutlass.Constexpr, diagonal: cute.Tensor):
    """Eight registers out of the way of the inverses."""
    for j in cutlass.range_constexpr(2):
        cute.autovec_copy(cute.make_tensor(diagonal.iterator + 4 * j, cute.make_layout((4, 1))), place_to_park(x, j))


@cute.jit
def fetch(x: cutlass.Constexpr, diagonal: cute.Tensor):
    """What `park` put away."""
    for j in cutlass.range_constexpr(2):
        cute.autovec_copy(place_to_park(x, j), cute.make_tensor(diagonal.iterator + 4 * j, cute.make_layout((4, 1))))
