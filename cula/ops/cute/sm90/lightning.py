# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention on Hopper. A warpgroup walks the chunks of one (sequence, value head) with 64 rows of S in registers.

Recurrence of a head, f = exp(-s):   S_t = f S_{t-1} + v_t k_t^T   [V, K],      o_t = scale S_t q_t   [V]

A chunk of n <= C = 64 tokens, rows r and i from 0, everything transposed so that what stays in registers is always the A
operand of a wgmma, which alone may come from there:

    P     = lower(scale f^(r-i) q_r . k_i)                             [C, C]    A = q, B = k tiles         -> bf16, shared
    O^T   = S q^T scale f^(r+1)  +  V^T P^T                            [64, C]   A = S, then V^T; B = q, P
    S     = f^n S  +  (V^T f^(n-1-i)) k                                [64, K]   A = weighted V^T, B = k swapped

Factors are powers f^m with m >= 0, so at most 1, whatever s is. P needs 18 of them a thread: row and column enter an
accumulator element's lag r - i only as 8 (a - b) + const. Both warpgroups of a block make P for themselves: that costs a
seventh of the tensor cores' time, which the memory leaves idle, and they never wait for each other.

Segments. Where (sequence, head) pairs are too few to fill the GPU, sequences are cut into segments of L tokens (a multiple
of C). `ends` makes the state that each segment but the last leaves when it starts from zero: k and v are read twice, q and
o once. seeds[id of segment 0] is the sequence's first state, seeds[id of segment j] the end of segment j - 1, and a walk
of segment j starts from sum_{i<=j} f^((j-i)L) seeds[i]. Terms below 2^-REACH, zero in fp32, are neither made nor read. Packed
sequence n owns the ids cu[n] // L + n and up; a block finds n by counting.

Last chunks. TMA reads on into the next sequence, so rows of k past the end are zeroed in shared memory and columns of V^T
in registers (a NaN there is another sequence's); o leaves by predicated stores, since TMA would clip at T only.

| warps      | role                                                             | registers |
|------------|------------------------------------------------------------------|-----------|
| 0          | TMA loads of q, k, v into a ring of `stages`                     | 24 or 40  |
| 4-7, 8-11  | a walk each: 64 value channels (`warpgroups` of 1 or 2)          | 240       |

| shared memory, K = V = 128 | bytes                   | two warpgroups | one               |
|----------------------------|-------------------------|----------------|-------------------|
| q, k, v                    | stages C (2K + 64W) 2   | 4 x 48 K       | 4 x 40 K          |
| P, O^T                     | W C (C + 64) 2          | 32 K           | 16 K              |

One warpgroup a block: for V = 64, and where the two halves of V are given to two blocks so that more of the GPU works; the
second reading of q and k is the L2's business.

Limits: bf16; K = V = 64 or 128; states float32 or bfloat16, a slot contiguous.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.tiles import (
    BF16,
    F32,
    I32,
    K_MAJOR,
    LOG2E,
    MN_MAJOR,
    allocate_tile,
    at_address,
    by_head,
    issue,
    of_tokens,
    rounded,
    rows_and_columns,
    seen_as_a,
    swapped,
    tile_layout,
    tma_load,
    tma_split,
    tma_store,
    wgmma,
)
from cula.ops.cute.toolchain.variants import Variant

C = 64  # tokens in a chunk
LANES = 64  # value channels of a warpgroup
REACH = 150.0  # 2^-150 is zero in fp32
MAX_DECAY = 1e4  # exp(-1e4) is zero too; keeps inf * 0 out of the exponents
REGISTERS = 65536  # of a multiprocessor
MAX_SLOTS = 1 << 30  # of a pool, as far as a layout must say
MAX_REACH = 1 << 30  # tokens; what never fades reaches this far


class Barrier(enum.IntEnum):
    """Named barriers of a block; 0 is sync_threads'."""

    WALK = 1  # and 2: the four warps of a walk


@dataclass(frozen=True)
class Config:
    K: int
    V: int
    warpgroups: int  # that walk; each takes 64 value channels
    stages: int
    blocks: int  # on a multiprocessor
    registers: tuple[int, int]  # of a thread that loads, of one that walks
    state: Any = F32  # dtype of first and last states


@cute.jit
def power(decay: F32, n: I32):
    """f^n, where decay = -log2 f; zero below 2^-126."""
    return cute.math.exp2(-decay * n.to(F32), fastmath=True)


class LightningSm90:
    """The walk and, with `only_ends`, the first pass over segments."""

    def __init__(self, cfg: Config, only_ends: bool = False):
        self.cfg, self.only_ends = cfg, only_ends
        self.num_threads = 128 * (1 + cfg.warpgroups)
        self.channels = LANES * cfg.warpgroups  # of a block
        self.blocks_of_v = cfg.V // self.channels
        self.stages = 2 * cfg.stages if only_ends else cfg.stages  # no q, P and O take room there
        # A launch gives every thread the same number; what it does not give cannot be asked for, and asking would hang.
        given = REGISTERS // (cfg.blocks * self.num_threads) // 8 * 8 * self.num_threads
        assert 128 * (cfg.registers[0] + cfg.warpgroups * cfg.registers[1]) <= given, f"{cfg} asks for too many registers"

    @cute.jit
    def __call__(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        o: Int64,
        decay: Int64,
        h0: Int64,
        ht: Int64,
        seeds: Int64,
        cu: Int64,
        read_from: Int64,
        write_to: Int64,
        q_token: Int64,
        q_head: Int64,
        k_token: Int64,
        k_head: Int64,
        v_token: Int64,
        v_head: Int64,
        o_token: Int64,
        o_head: Int64,
        h0_slot: Int64,
        ht_slot: Int64,
        T: I32,
        H: I32,
        HV: I32,
        scale: F32,
        num_seqs: I32,
        length: I32,  # tokens of every sequence; 0: packed
        segment: I32,  # tokens of a segment; 0: sequences are whole
        per_seq: I32,  # segments of every sequence, where `length` is given
        num_ids: I32,  # segments in all, or sequences
        group: I32,  # value heads that share a head of q and k
        has_h0: I32,
        has_ht: I32,
        is_indexed: I32,
        num_blocks: I32,
        stream,
    ):
        """Addresses of q, k [T, H, K] (batches follow one another along T), v, o [T, HV, V], decay [HV], first and last states
        [slots, HV, V, K], seeds [ids, HV, V, K] fp32, offsets [N + 1], which are read where `length` is 0, and, where
        `is_indexed`, the slots [N] of first states, negative for zeros, and of last ones, negative to drop them. Then strides.
        """
        cfg = self.cfg
        mQ, mK = [of_tokens(at_address(BF16, a, 16), T, H, cfg.K, s) for a, s in ((q, (q_token, q_head)), (k, (k_token, k_head)))]
        mV, mO = [
            of_tokens(at_address(BF16, a, 16), T, HV, cfg.V, s) for a, s in ((v, (v_token, v_head)), (o, (o_token, o_head)))
        ]
        mDecay, mCu, mIn, mOut = [
            cute.make_tensor(at_address(dtype, a, 4), cute.make_layout((n,), stride=(1,)))
            for dtype, a, n in ((F32, decay, HV), (I32, cu, num_seqs + 1), (I32, read_from, num_seqs), (I32, write_to, num_seqs))
        ]
        mH0, mHt, mSeeds = [
            self.of_states(dtype, a, HV, slot)
            for dtype, a, slot in ((cfg.state, h0, h0_slot), (cfg.state, ht, ht_slot), (F32, seeds, Int64(HV) * (cfg.V * cfg.K)))
        ]
        l_qk, l_v = tile_layout(C, cfg.K, self.stages), tile_layout(C, self.channels, self.stages)
        l_p, l_o = tile_layout(C, C, 2 * cfg.warpgroups), tile_layout(C, LANES, 2 * cfg.warpgroups)
        tma_q, gQ = tma_load(by_head(mQ), l_qk, (C, cfg.K))
        tma_k, gK = tma_load(by_head(mK), l_qk, (C, cfg.K))
        tma_v, gV = tma_load(by_head(mV), l_v, (C, self.channels))
        tma_o, gO = tma_store(by_head(mO), l_o, (C, LANES))
        sizes = (num_seqs, length, segment, per_seq, num_ids, group)
        self.kernel(
            tma_q, gQ, tma_k, gK, tma_v, gV, tma_o, gO, by_head(mO), mDecay, mH0, mHt, mSeeds, mCu, mIn, mOut,
            scale, sizes, has_h0, has_ht, is_indexed,
            wgmma(C, K_MAJOR, False), wgmma(C, K_MAJOR, True), wgmma(cfg.K, MN_MAJOR, True), l_qk, l_v, l_p, l_o,
        ).launch(
            grid=(num_blocks, 1, 1), block=(self.num_threads, 1, 1), stream=stream, min_blocks_per_mp=cfg.blocks, use_pdl=True
        )  # fmt: skip

    def of_states(self, dtype: Any, address: Int64, HV: I32, slot: Int64) -> Any:
        """[slots, HV, V, K], any number of slots. Read and written in pairs: a slot's stride is even."""
        V, K = self.cfg.V, self.cfg.K
        layout = cute.make_layout((MAX_SLOTS, HV, V, K), stride=(cute.assume(slot, divby=2), V * K, K, 1))
        return cute.make_tensor(at_address(dtype, address, dtype.width // 4), layout)

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom, gQ: cute.Tensor, tma_k: cute.CopyAtom, gK: cute.Tensor, tma_v: cute.CopyAtom, gV: cute.Tensor,
        tma_o: cute.CopyAtom, gO: cute.Tensor, mO: cute.Tensor, mDecay: cute.Tensor, mH0: cute.Tensor, mHt: cute.Tensor,
        mSeeds: cute.Tensor, mCu: cute.Tensor, mIn: cute.Tensor, mOut: cute.Tensor,
        scale: F32, sizes: tuple, has_h0: I32, has_ht: I32, is_indexed: I32,
        mma_p: cute.TiledMma, mma_o: cute.TiledMma, mma_s: cute.TiledMma,
        l_qk: cute.ComposedLayout, l_v: cute.ComposedLayout, l_p: cute.ComposedLayout, l_o: cute.ComposedLayout,
    ):  # fmt: skip
        cfg = self.cfg
        thread, _, _ = cute.arch.thread_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_id = cute.arch.make_warp_uniform(thread // 128)

        smem = SmemAllocator()
        sK, sV = allocate_tile(smem, l_qk), allocate_tile(smem, l_v)
        loads = ((tma_k, sK, gK), (tma_v, sV, gV))
        sQ = sP = sO = None
        if cutlass.const_expr(not self.only_ends):
            sQ, sP, sO = allocate_tile(smem, l_qk), allocate_tile(smem, l_p), allocate_tile(smem, l_o)
            loads = (*loads, (tma_q, sQ, gQ))
        if warp_id == 0:
            for atom, _, _ in loads:
                cpasync.prefetch_descriptor(atom)
        bytes_qk = cute.size_in_bytes(BF16, cute.slice_(l_qk, (None, None, 0)))
        bytes_v = cute.size_in_bytes(BF16, cute.slice_(l_v, (None, None, 0)))
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * cfg.warpgroups),  # a release counts once a warp
            tx_count=(1 if self.only_ends else 2) * bytes_qk + bytes_v,
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * self.stages),
        )
        producer, _ = ring.make_participants()
        cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended

        if warpgroup_id == 0:
            cute.arch.setmaxregister_decrease(cfg.registers[0])
            if warp_id == 0:
                self.load(loads, producer, mDecay, mCu, sizes)
        else:
            cute.arch.setmaxregister_increase(cfg.registers[1])
            if cutlass.const_expr(self.only_ends):
                self.ends(ring, sK, sV, mDecay, mH0, mSeeds, mCu, mIn, sizes, has_h0, is_indexed, mma_o, mma_s)
            else:
                self.walk(
                    ring, sQ, sK, sV, sP, sO, tma_o, gO, mO, mDecay, mH0, mHt, mSeeds, mCu, mIn, mOut,
                    scale, sizes, has_h0, has_ht, is_indexed, mma_p, mma_o, mma_s,
                )  # fmt: skip

    # What a block does when

    @cute.jit
    def num_items(self, mDecay: cute.Tensor, sizes: tuple):
        """(segment, value head, block of V), the last fastest: blocks that read the same q and k run side by side."""
        return sizes[4] * mDecay.shape[0] * self.blocks_of_v

    @cute.jit
    def locate(self, item: I32, mDecay: cute.Tensor, mCu: cute.Tensor, sizes: tuple):
        """Item -> block of V, value head, segment id, sequence, place in it, its first token and its size."""
        num_seqs, length, segment, per_seq, _, _ = sizes
        block_v = item % self.blocks_of_v
        head = item // self.blocks_of_v % mDecay.shape[0]
        s = item // self.blocks_of_v // mDecay.shape[0]
        seq, place, begin, size = s, I32(0), I32(0), length
        if length > 0:
            seq, place = s // per_seq, s % per_seq
            begin = seq * length
        else:
            if segment > 0:
                # The last sequence whose first id is not beyond s; the warp counts 32 at a time.
                count = I32(0)
                for n in cutlass.range(cute.arch.lane_idx(), num_seqs, 32, unroll=1):
                    if mCu[n] // segment + n <= s:
                        count += 1
                for step in cutlass.range_constexpr(5):
                    count += cute.arch.shuffle_sync_bfly(count, 1 << step)
                seq = count - 1
            begin = mCu[seq]
            size = mCu[seq + 1] - begin
            if segment > 0:
                place = s - (begin // segment + seq)
        return block_v, head, s, seq, place, begin, size

    @cute.jit
    def span(self, place: I32, size: I32, segment: I32, reach: I32):
        """First token and number of tokens of a segment that are to be read, counted from the sequence's start."""
        start, tokens = I32(0), size
        if segment > 0:
            start = place * segment
            tokens = cutlass.max(cutlass.min(segment, size - start), 0)
        if cutlass.const_expr(self.only_ends):
            # Only what the end still feels, in whole chunks; and nothing of a sequence's last segment.
            kept = cutlass.min(tokens, (reach // C + 1) * C)
            start, tokens = start + tokens - kept, kept
            if (place + 1) * segment >= size:
                tokens = I32(0)
        return start, tokens

    @cute.jit
    def log2_decay(self, mDecay: cute.Tensor, head: I32):
        """-log2 f of a head, and the tokens after which a state's factor is zero in fp32."""
        decay = cutlass.min(mDecay[head], F32(MAX_DECAY)) * LOG2E
        return decay, cutlass.min(REACH / cutlass.max(decay, F32(1e-7)), F32(MAX_REACH)).to(I32)

    @cute.jit
    def load(self, loads: tuple, producer, mDecay: cute.Tensor, mCu: cute.Tensor, sizes: tuple):
        """Warp 0: every chunk of every item, k, v and q, through the ring."""
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        for item in cutlass.range(first, self.num_items(mDecay, sizes), step, unroll=1):
            block_v, head, _, _, place, begin, size = self.locate(item, mDecay, mCu, sizes)
            _, reach = self.log2_decay(mDecay, head)
            start, tokens = self.span(place, size, sizes[2], reach)
            parts = []
            for i in cutlass.range_constexpr(len(loads)):
                atom, s, g = loads[i]
                is_v = i == 1
                rows = g[None, None, head if is_v else head // sizes[5]]
                width = self.channels if is_v else self.cfg.K
                tiles = cute.local_tile(cute.domain_offset((begin + start, 0), rows), (C, width), (None, block_v if is_v else 0))
                parts.append((atom, *tma_split(atom, s, tiles)))
            for chunk in cutlass.range((tokens + C - 1) // C, unroll=1):
                slot = producer.acquire_and_advance()
                for i in cutlass.range_constexpr(len(parts)):
                    atom, ps, pg = parts[i]
                    cute.copy(atom, pg[None, chunk], ps[None, slot.index], tma_bar_ptr=slot.barrier)
        producer.tail()

    # The state

    @cute.jit
    def state_rows(self, mH: cute.Tensor, slot: I32, head: I32, rows: I32, thr):
        """This thread's elements of the 64 rows of a state."""
        return thr.partition_C(cute.local_tile(mH[slot, head, None, None], (LANES, self.cfg.K), (rows, 0)))

    @cute.jit
    def first_state(self, acc: cute.Tensor, thr, mH0: cute.Tensor, mIn: cute.Tensor, seq: I32, head: I32, rows: I32,
                    has_h0: I32, is_indexed: I32):  # fmt: skip
        """acc <- the sequence's first state, zeros where it has none."""
        acc.fill(0.0)
        slot = seq
        if is_indexed != 0:
            slot = mIn[seq]
        if (has_h0 != 0) & (slot >= 0):
            given = cute.make_rmem_tensor_like(acc, self.cfg.state)
            cute.autovec_copy(self.state_rows(mH0, slot, head, rows, thr), given)
            acc.store(given.load().to(F32))

    @cute.jit
    def weighed(self, v: cute.Tensor, decay: F32, n: I32, column: I32, f8: F32, even: F32, odd: F32):
        """V^T with column i times f^(n-1-i), rounded to bf16; columns from n on hold zeros.

        `even` and `odd` are the factors of this thread's last two columns in a whole chunk.
        """
        exact = cute.make_rmem_tensor_like(v, F32)
        exact.store(v.load().to(F32))
        x = rows_and_columns(exact)
        if n == C:
            for a in cutlass.range_constexpr(C // 8 - 1, -1, -1):
                for i in cutlass.range_constexpr(2):
                    x[i, 2 * a], x[i, 2 * a + 1] = x[i, 2 * a] * even, x[i, 2 * a + 1] * odd
                even, odd = even * f8, odd * f8
        else:
            for j in cutlass.range_constexpr(C // 4):
                w = power(decay, cutlass.max(n - 1 - (8 * (j // 2) + column + j % 2), 0))
                for i in cutlass.range_constexpr(2):
                    x[i, j] = x[i, j] * w
        return rounded(exact)

    @cute.jit
    def clear_columns(self, v: cute.Tensor, n: I32, column: I32):
        x = rows_and_columns(v)
        for j in cutlass.range_constexpr(C // 4):
            for i in cutlass.range_constexpr(2):
                x[i, j] = x[i, j] if 8 * (j // 2) + column + j % 2 < n else BF16(0.0)

    @cute.jit
    def clear_rows(self, tile: cute.Tensor, n: I32, thread: I32):
        """Zero the rows of a [C, K] tile from n on; this warpgroup's wgmma sees it after a barrier."""
        zeros = cute.make_rmem_tensor((1, 8), BF16)
        zeros.fill(0.0)
        per_row = self.cfg.K // 8
        for p in cutlass.range_constexpr(C * per_row // 128):
            row = (p * 128 + thread) // per_row
            if row >= n:
                cute.autovec_copy(zeros, cute.local_tile(tile, (1, 8), (row, (p * 128 + thread) % per_row)))
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def decayed(self, accP: cute.Tensor, lags: cute.Tensor):
        """q k^T -> P."""
        P = rows_and_columns(accP)
        for i in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(C // 4):
                P[i, j] = P[i, j] * lags[i - j // 2 + 7, j % 2]

    # The first pass over segments

    @cute.jit
    def ends(self, ring, sK: cute.Tensor, sV: cute.Tensor, mDecay: cute.Tensor, mH0: cute.Tensor, mSeeds: cute.Tensor,
             mCu: cute.Tensor, mIn: cute.Tensor, sizes: tuple, has_h0: I32, is_indexed: I32,
             mma_o: cute.TiledMma, mma_s: cute.TiledMma):  # fmt: skip
        """seeds[id + 1] <- what a segment leaves when it starts from zero; seeds[id of the first] <- the first state."""
        thread, _, _ = cute.arch.thread_idx()
        lanes = cute.arch.make_warp_uniform(thread // 128) - 1
        thread = thread % 128
        thr_o, thr_s = mma_o.get_slice(thread), mma_s.get_slice(thread)
        accS = thr_s.make_fragment_C(thr_s.partition_shape_C((LANES, self.cfg.K)))
        bK_swapped = thr_s.make_fragment_B(thr_s.partition_B(swapped(sK)))
        load_v = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_o).get_slice(thread)
        tVs = load_v.partition_S(swapped(cute.local_tile(sV, (C, LANES, self.stages), (0, lanes, 0))))
        like_o = thr_o.make_fragment_C(thr_o.partition_shape_C((LANES, C)))
        column = 2 * (thread % 4)
        ahead = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)  # to be waited for next
        behind = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)  # to be released next

        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        for item in cutlass.range(first, self.num_items(mDecay, sizes), step, unroll=1):
            block_v, head, s, seq, place, _, size = self.locate(item, mDecay, mCu, sizes)
            rows = block_v * self.cfg.warpgroups + lanes
            decay, reach = self.log2_decay(mDecay, head)
            _, tokens = self.span(place, size, sizes[2], reach)
            if (place == 0) & (has_h0 != 0):
                self.first_state(accS, thr_s, mH0, mIn, seq, head, rows, has_h0, is_indexed)
                cute.autovec_copy(accS, self.state_rows(mSeeds, s, head, rows, thr_s))
            if tokens > 0:
                accS.fill(0.0)
                f8, f_chunk = power(decay, I32(8)), power(decay, I32(C))
                into_even, into_odd = power(decay, 7 - column), power(decay, 6 - column)
                num_chunks = tokens // C
                rV = cute.make_rmem_tensor_like(like_o, BF16)
                ring.consumer_wait(ahead)
                cute.copy(load_v, tVs[None, None, None, ahead.index], load_v.retile(rV))
                rW = self.weighed(rV, decay, I32(C), column, f8, into_even, into_odd)
                ahead.advance()
                for chunk in cutlass.range(num_chunks, unroll=1):
                    accS.store(accS.load() * f_chunk)
                    issue(mma_s, accS, seen_as_a(rW), bK_swapped[None, None, None, behind.index], True)
                    # Meanwhile the next chunk's v; after the last one, that of some chunk, for nothing.
                    stage = behind.index
                    if chunk + 1 < num_chunks:
                        ring.consumer_wait(ahead)
                        stage = ahead.index
                        ahead.advance()
                    cute.copy(load_v, tVs[None, None, None, stage], load_v.retile(rV))
                    rN = self.weighed(rV, decay, I32(C), column, f8, into_even, into_odd)
                    warpgroup.wait_group(0)
                    ring.consumer_release(behind)
                    behind.advance()
                    rW.store(rN.load())
                cute.autovec_copy(accS, self.state_rows(mSeeds, s + 1, head, rows, thr_s))

    # The walk

    @cute.jit
    def walk(self, ring, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, sP: cute.Tensor, sO: cute.Tensor,
             tma_o: cute.CopyAtom, gO: cute.Tensor, mO: cute.Tensor, mDecay: cute.Tensor, mH0: cute.Tensor, mHt: cute.Tensor,
             mSeeds: cute.Tensor, mCu: cute.Tensor, mIn: cute.Tensor, mOut: cute.Tensor, scale: F32, sizes: tuple,
             has_h0: I32, has_ht: I32, is_indexed: I32,
             mma_p: cute.TiledMma, mma_o: cute.TiledMma, mma_s: cute.TiledMma):  # fmt: skip
        """Outputs of an item and, from a sequence's last segment, its last state."""
        thread, _, _ = cute.arch.thread_idx()
        lanes = cute.arch.make_warp_uniform(thread // 128) - 1  # which 64 channels of the block are ours
        thread = thread % 128
        is_storing = thread // 32 == 0  # the warp that issues TMA stores
        ours = pipeline.NamedBarrier(barrier_id=Barrier.WALK + lanes, num_threads=128)

        thr_p, thr_o, thr_s = mma_p.get_slice(thread), mma_o.get_slice(thread), mma_s.get_slice(thread)
        accP = thr_p.make_fragment_C(thr_p.partition_shape_C((C, C)))
        accO = thr_o.make_fragment_C(thr_o.partition_shape_C((LANES, C)))
        accS = thr_s.make_fragment_C(thr_s.partition_shape_C((LANES, self.cfg.K)))
        aQ, bK = thr_p.make_fragment_A(thr_p.partition_A(sQ)), thr_p.make_fragment_B(thr_p.partition_B(sK))
        bQ = thr_o.make_fragment_B(thr_o.partition_B(sQ))  # [N = token, K = key channel]
        bP = thr_o.make_fragment_B(thr_o.partition_B(sP))  # [N = r, K = i]
        bK_swapped = thr_s.make_fragment_B(thr_s.partition_B(swapped(sK)))  # [N = key channel, K = token]
        # v^T comes in, and o^T leaves, as an accumulator lies; (st/ld)matrix turns the [token, channel] tiles round.
        load_v = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_o).get_slice(thread)
        store_o = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BF16), mma_o).get_slice(thread)
        store_p = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BF16), mma_p).get_slice(thread)
        tVs = load_v.partition_S(swapped(cute.local_tile(sV, (C, LANES, self.stages), (0, lanes, 0))))
        tOs, tPs = store_o.partition_D(swapped(sO)), store_p.partition_D(sP)

        row = 16 * (thread // 32) + thread % 32 // 4  # of an accumulator's first element; see rows_and_columns
        column = 2 * (thread % 4)
        ahead = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)  # to be waited for next
        behind = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)  # to be released next
        now = 2 * lanes  # which of all buffers of P and O this chunk has; the next one has the other of our two

        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        for item in cutlass.range(first, self.num_items(mDecay, sizes), step, unroll=1):
            block_v, head, s, seq, place, begin, size = self.locate(item, mDecay, mCu, sizes)
            segment = sizes[2]
            rows = block_v * self.cfg.warpgroups + lanes
            decay, reach = self.log2_decay(mDecay, head)
            start, tokens = self.span(place, size, segment, reach)

            if segment == 0:
                self.first_state(accS, thr_s, mH0, mIn, seq, head, rows, has_h0, is_indexed)
            else:
                accS.fill(0.0)
                from_seed = cutlass.max(place - reach // segment, 1 - has_h0)
                factor = power(decay, segment)
                for i in cutlass.range(from_seed, place + 1, unroll=1):
                    seed = cute.make_rmem_tensor_like(accS)
                    cute.autovec_copy(self.state_rows(mSeeds, s - place + i, head, rows, thr_s), seed)
                    accS.store(accS.load() * factor + seed.load())

            # f^(r-i) scale at [r - i == 8 m + row - column - b], zero above the diagonal
            lags = cute.make_rmem_tensor((9, 2), F32)
            for m in cutlass.range_constexpr(9):
                for b in cutlass.range_constexpr(2):
                    lag = row - column - b + 8 * (m - 7)
                    factor = power(decay, cutlass.max(lag, 0)) * scale
                    lags[m, b] = factor if lag >= 0 else F32(0.0)
            f8, f_chunk = power(decay, I32(8)), power(decay, I32(C))
            into_even, into_odd = power(decay, 7 - column), power(decay, 6 - column)
            out_even, out_odd = power(decay, column + 1) * scale, power(decay, column + 2) * scale

            pO, gO_tiles = tma_split(
                tma_o, sO, cute.local_tile(cute.domain_offset((begin + start, 0), gO[None, None, head]), (C, LANES), (None, rows))
            )
            o_rows = cute.local_tile(cute.domain_offset((begin + start, 0), mO[None, None, head]), (C, LANES), (None, rows))

            # No wgmma may start or end in a branch: the compiler would wait after each. So P is made even for no tokens, and
            # once more after the last chunk, of whatever is there.
            tokens = cute.arch.make_warp_uniform(tokens)
            num_chunks = cute.arch.make_warp_uniform((tokens + C - 1) // C)
            stage = ahead.index
            if num_chunks > 0:
                ring.consumer_wait(ahead)
                if tokens < C:
                    self.clear_rows(sK[None, None, stage], tokens, thread)
                    ours.arrive_and_wait()
                ahead.advance()
            issue(mma_p, accP, aQ[None, None, None, stage], bK[None, None, None, stage], False)

            # On the tensor cores, one after the other: O = S q^T | O += V^T P^T, S += V^T k, P of the next chunk.
            for chunk in cutlass.range(num_chunks, unroll=1):
                n = cutlass.min(tokens - chunk * C, C)
                other = 4 * lanes + 1 - now
                aS = seen_as_a(rounded(accS))
                issue(mma_o, accO, aS, bQ[None, None, None, behind.index], False)

                warpgroup.wait_group(1)  # P
                self.decayed(accP, lags)
                cute.copy(store_p, store_p.retile(rounded(accP)), tPs[None, None, None, now])
                cute.arch.fence_proxy("async.shared", space="cta")
                if is_storing:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)  # this chunk's buffer of O is free again
                ours.arrive_and_wait()
                if is_storing & (chunk > 0):
                    cute.copy(tma_o, pO[None, other], gO_tiles[None, chunk - 1])
                    cute.arch.cp_async_bulk_commit_group()

                rV = cute.make_rmem_tensor_like(accO, BF16)
                cute.copy(load_v, tVs[None, None, None, behind.index], load_v.retile(rV))
                if n < C:
                    self.clear_columns(rV, n, column)
                rW = self.weighed(rV, decay, n, column, f8, into_even, into_odd)
                factor = f_chunk
                if n < C:
                    factor = power(decay, n)
                accS.store(accS.load() * factor)

                warpgroup.wait_group(0)  # O
                O = rows_and_columns(accO)
                even, odd = out_even, out_odd
                for a in cutlass.range_constexpr(C // 8):
                    for i in cutlass.range_constexpr(2):
                        O[i, 2 * a], O[i, 2 * a + 1] = O[i, 2 * a] * even, O[i, 2 * a + 1] * odd
                    even, odd = even * f8, odd * f8
                issue(mma_o, accO, seen_as_a(rV), bP[None, None, None, now], True)
                issue(mma_s, accS, seen_as_a(rW), bK_swapped[None, None, None, behind.index], True)
                stage = behind.index
                left = tokens - (chunk + 1) * C
                if left > 0:
                    ring.consumer_wait(ahead)
                    stage = ahead.index
                    if left < C:
                        self.clear_rows(sK[None, None, stage], left, thread)
                        ours.arrive_and_wait()
                    ahead.advance()
                issue(mma_p, accP, aQ[None, None, None, stage], bK[None, None, None, stage], False)

                warpgroup.wait_group(2)  # O
                cute.copy(store_o, store_o.retile(rounded(accO)), tOs[None, None, None, now])
                warpgroup.wait_group(1)  # S
                ring.consumer_release(behind)
                behind.advance()
                now = other

            warpgroup.wait_group(0)
            if num_chunks > 0:
                cute.arch.fence_proxy("async.shared", space="cta")
                ours.arrive_and_wait()
                last = 4 * lanes + 1 - now
                n = tokens - (num_chunks - 1) * C
                if n == C:
                    if is_storing:
                        cute.copy(tma_o, pO[None, last], gO_tiles[None, num_chunks - 1])
                        cute.arch.cp_async_bulk_commit_group()
                else:
                    for p in cutlass.range_constexpr(C // 16):
                        r = p * 16 + thread // 8
                        if r < n:
                            cute.autovec_copy(
                                cute.local_tile(sO[None, None, last], (1, 8), (r, thread % 8)),
                                cute.local_tile(o_rows[None, None, num_chunks - 1], (1, 8), (r, thread % 8)),
                            )

            if (has_ht != 0) & (start + tokens >= size) & ((place == 0) | (start < size)):
                target = seq
                if is_indexed != 0:
                    target = mOut[seq]
                if target >= 0:
                    kept = cute.make_rmem_tensor_like(accS, self.cfg.state)
                    kept.store(accS.load().to(self.cfg.state))
                    cute.autovec_copy(kept, self.state_rows(mHt, target, head, rows, thr_s))
        if is_storing:
            cute.arch.cp_async_bulk_wait_group(0)


# What is compiled


CONFIGS = {
    "d128": Config(128, 128, warpgroups=2, stages=3, blocks=1, registers=(24, 240)),
    "d128_half": Config(128, 128, warpgroups=1, stages=4, blocks=1, registers=(40, 240)),
    "d64": Config(64, 64, warpgroups=1, stages=4, blocks=1, registers=(40, 240)),
}
STATE_DTYPES = {"fp32": F32, "bf16": BF16}


ARGUMENTS = (*(Int64(0) for _ in range(11)), *(Int64(8) for _ in range(10)), *(I32(1) for _ in range(3)), F32(1.0))
ARGUMENTS += (*(I32(1) for _ in range(10)), make_fake_stream())


def variants() -> Iterator[Variant]:
    """`lightning_<config>_<states>`, and `lightning_ends_...` for the first pass over segments."""
    walk = ("wgmma", "tma_load", "tma_store", "ldmatrix", "stmatrix", "setmaxnreg")
    for name, config in CONFIGS.items():
        for states, dtype in STATE_DTYPES.items():
            cfg = replace(config, state=dtype)
            yield Variant(f"lightning_{name}_{states}", LightningSm90(cfg), ARGUMENTS, uses=walk)
            ends = LightningSm90(cfg, only_ends=True)
            yield Variant(
                f"lightning_ends_{name}_{states}", ends, ARGUMENTS, uses=("wgmma", "tma_load", "ldmatrix", "setmaxnreg")
            )
