# SPDX-License-Identifier: Apache-2.0
"""Lightning on Hopper, the first pass over segments: what each leaves when it starts from zero."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass.cute.nvgpu import warp, warpgroup

from cula.ops.cute.common.lightning_items import item_at, num_items
from cula.ops.cute.common.lightning_states import ends_of, read_first_state
from cula.ops.cute.common.tiles import BF16, F32, I32, issue, seen_as_a, swapped

from .lightning_chunk import factors_of, our_rows, weighed
from .lightning_config import LANES, C


@cute.jit
def segment_ends(
    work: cutlass.Constexpr,
    ring,
    tiles: cutlass.Constexpr,
    states: cutlass.Constexpr,
    scale: F32,
    mmas: cutlass.Constexpr,
):
    """A consumer's role: seeds[id + 1] <- what a segment leaves when it starts from zero; seeds[id of the first] <- the first
    state."""
    cfg, (_, mma_o, mma_s) = work.cfg, mmas
    thread, _, _ = cute.arch.thread_idx()
    lanes = cute.arch.make_warp_uniform(thread // 128) - 1
    thread = thread % 128
    thr_o, thr_s = mma_o.get_slice(thread), mma_s.get_slice(thread)
    accS = thr_s.make_fragment_C(thr_s.partition_shape_C((LANES, cfg.K)))
    bK_swapped = thr_s.make_fragment_B(thr_s.partition_B(swapped(tiles.sK)))
    load_v = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_o).get_slice(thread)
    tVs = load_v.partition_S(swapped(cute.local_tile(tiles.sV, (C, LANES, cfg.stages), (0, lanes, 0))))
    like_o = thr_o.make_fragment_C(thr_o.partition_shape_C((LANES, C)))
    column = 2 * (thread % 4)
    ahead = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)  # to be waited for next
    behind = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cfg.stages)  # to be released next

    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(first, num_items(work), step, unroll=1):
        item = item_at(work, index, lanes)
        tokens, turn, ours = item.tokens, item.turn, our_rows(thr_s, item.rows)
        if (item.place == 0) & (ends_of(states, turn).has_h0 != 0):
            read_first_state(accS, ours, states, item)
            cute.autovec_copy(accS, ours(states.seed(item.id, item.head)))
        if tokens > 0:
            accS.fill(0.0)
            by = factors_of(item.decay, scale, column, turn)
            num_chunks = tokens // C
            rV = cute.make_rmem_tensor_like(like_o, BF16)
            ring.consumer_wait(ahead)
            cute.copy(load_v, tVs[None, None, None, ahead.index], load_v.retile(rV))
            rW = weighed(rV, I32(C), column, by, turn)
            ahead.advance()
            for chunk in cutlass.range(num_chunks, unroll=1):
                accS.store(accS.load() * by.chunk)
                issue(mma_s, accS, seen_as_a(rW), bK_swapped[None, None, None, behind.index], True)
                # Meanwhile the next chunk's v; after the last one, that of some chunk, for nothing.
                stage = behind.index
                if chunk + 1 < num_chunks:
                    ring.consumer_wait(ahead)
                    stage = ahead.index
                    ahead.advance()
                cute.copy(load_v, tVs[None, None, None, stage], load_v.retile(rV))
                rN = weighed(rV, I32(C), column, by, turn)
                warpgroup.wait_group(0)
                ring.consumer_release(behind)
                behind.advance()
                rW.store(rN.load())
            cute.autovec_copy(accS, ours(states.seed(item.id + 1, item.head)))
