# SPDX-License-Identifier: Apache-2.0
"""Single instructions, in hand-written PTX, against numpy. The test kernels cover the ones that make a kernel; these the rest."""

import struct

import numpy as np
import pytest

from tools.ptx import SimulationError, Unsupported, launch
from tools.ptx.memory import GlobalMemory
from tools.ptx.values import bf16_to_f32, f32_to_bf16, f32_to_f16, narrow, widen

PROGRAM = """
.extern .shared .align 1024 .b8 shared[];
.entry one(.param .u64 x, .param .u64 y, .param .u64 z)
.reqntid @THREADS@, 1, 1
{
 .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .b16 %rs<9>;
 mov.u32 %r0, %tid.x;
 ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [y]; ld.param.u64 %rd2, [z];
 mul.wide.u32 %rd3, %r0, 4;
 add.s64 %rd0, %rd0, %rd3; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
 ld.global.b32 %r1, [%rd0]; ld.global.b32 %r2, [%rd1]; mov.b32 %r3, 0;
 @BODY@
 st.global.b32 [%rd2], %r3;
 ret;
}
"""


def run(body, x, y=None, smem_bytes=1024, order="late", cluster=1, races=False, threads=32, clusters=1):
    """What %r3 holds in each lane after a body that finds x in %r1 and y in %r2; all as bits."""
    gmem = GlobalMemory(1 << 16)
    x = np.ascontiguousarray(x).view(np.uint32)
    y = x if y is None else np.ascontiguousarray(y).view(np.uint32)
    (px, _), (py, _), (pz, out) = gmem.put(x), gmem.put(y), gmem.put(np.zeros(threads * cluster, np.uint32))
    parameters = [struct.pack("<Q", p) for p in (px, py, pz)]
    program, size = PROGRAM.replace("@THREADS@", str(threads)).replace("@BODY@", body), (cluster, 1, 1)
    grid = (cluster * clusters, 1, 1)
    launch.run(program, "one", parameters, grid, gmem, smem_bytes, order, cluster=size, races=races)
    return out.copy()


rng = np.random.default_rng(0)
LANE = np.arange(32)
U, V = rng.integers(0, 2**32, (2, 32), dtype=np.uint32)
S = U.view(np.int32)
F, G = (rng.standard_normal((2, 32)) * 100).astype(np.float32)
H = narrow(F, "bf16").astype(np.uint32) | narrow(G, "bf16").astype(np.uint32) << np.uint32(16)
bits = lambda x: np.ascontiguousarray(x).view(np.uint32)

INTEGER = {
    "lop3.b32 %r3, %r1, %r2, 255, 0x96;": U ^ V ^ 255,
    "lop3.b32 %r3, %r1, %r2, 0, 0xc0;": U & V,
    "prmt.b32 %r3, %r1, %r2, 0x5410;": (U & 0xFFFF) | (V & 0xFFFF) << np.uint32(16),
    "prmt.b32 %r3, %r1, 0, 0x0123;": U.byteswap(),
    "shf.l.wrap.b32 %r3, %r1, %r2, 8;": V << np.uint32(8) | U >> np.uint32(24),
    "shf.r.wrap.b32 %r3, %r1, %r2, 8;": U >> np.uint32(8) | V << np.uint32(24),
    "ld.global.s32 %rd4, [%rd0]; shr.u64 %rd4, %rd4, 32; cvt.u32.u64 %r3, %rd4;": (S >> 31).view(np.uint32),
    "ld.global.u32 %rd4, [%rd0]; shr.u64 %rd4, %rd4, 32; cvt.u32.u64 %r3, %rd4;": 0 * U,
    "mul.hi.u32 %r3, %r1, %r2;": (U.astype(np.uint64) * V >> np.uint64(32)).astype(np.uint32),
    "mul.hi.s32 %r3, %r1, 7;": (S.astype(np.int64) * 7 >> 32).astype(np.int32),
    "div.s32 %r3, %r1, 1000;": np.trunc(S / 1000).astype(np.int32),
    "rem.s32 %r3, %r1, 1000;": np.fmod(S, 1000),
    "shr.s32 %r3, %r1, 40;": S >> 31,
    "shl.b32 %r3, %r1, 32;": np.zeros(32, np.uint32),
    "shr.u32 %r3, %r1, %r0;": U >> LANE.astype(np.uint32),
    "popc.b32 %r3, %r1;": np.bitwise_count(U).astype(np.uint32),
    "min.s32 %r3, %r1, 5;": np.minimum(S, 5),
    "setp.lt.s32 %p1, %r1, 0; setp.gt.and.s32 %p2, %r0, 3, %p1; selp.b32 %r3, 1, 2, %p2;":
        np.where((S < 0) & (LANE > 3), 1, 2).astype(np.uint32),
    "setp.eq.u32 %p1, %r0, 40; @%p1 bra SKIP; SKIP: mad.lo.s32 %r3, %r0, 3, 1;": (3 * LANE + 1).astype(np.uint32),
    "mov.b64 %rd4, {%r1, %r2}; mov.b64 {%rs1, %rs2, %rs3, %rs4}, %rd4; mov.b32 %r3, {%rs4, %rs1};":
        V >> np.uint32(16) | U << np.uint32(16),
}  # fmt: skip

FLOAT = {
    "fma.rn.f32 %r3, %r1, %r2, 0f3F800000;": np.float32(F.astype(np.float64) * G + 1),
    "max.f32 %r3, %r1, %r2;": np.maximum(F, G),
    "mov.b32 %r3, 0f7FC00000; max.NaN.f32 %r3, %r1, %r3;": np.full(32, np.nan, np.float32),
    "mov.b32 %r3, 0f7FC00000; max.f32 %r3, %r1, %r3;": F,
    "neg.f32 %r3, %r1;": -F,
    "cvt.rn.bf16x2.f32 %r3, %r1, %r2;": f32_to_bf16(G).astype(np.uint32) | f32_to_bf16(F).astype(np.uint32) << np.uint32(16),
    "cvt.rn.f16x2.f32 %r3, %r1, %r2;": f32_to_f16(G).astype(np.uint32) | f32_to_f16(F).astype(np.uint32) << np.uint32(16),
    "cvt.rn.f16.f32 %rs1, %r1; cvt.f32.f16 %r3, %rs1;": F.astype(np.float16).astype(np.float32),
    "cvt.rzi.s32.f32 %r3, %r1;": F.astype(np.int32),
    "cvt.rni.f32.f32 %r3, %r1;": np.rint(F),
    "cvt.rn.f32.s32 %r3, %r0;": LANE.astype(np.float32),
    "setp.gtu.f32 %p1, %r1, %r2; selp.f32 %r3, 0f3F800000, 0f00000000, %p1;": (F > G).astype(np.float32),
}  # fmt: skip


@pytest.mark.parametrize("body", INTEGER)
def test_integers(body):
    np.testing.assert_array_equal(run(body, U, V), bits(INTEGER[body]))


@pytest.mark.parametrize("body", FLOAT)
def test_floats(body):
    np.testing.assert_array_equal(run(body, F, G), bits(FLOAT[body]))


def test_packed_arithmetic():
    both = lambda words: np.stack([bf16_to_f32(words & 0xFFFF), bf16_to_f32(words >> np.uint32(16))]).astype(np.float64)
    got = both(run("fma.rn.bf16x2 %r3, %r1, %r2, %r1;", H, H[::-1].copy()))
    x, y = both(H), both(H[::-1])
    np.testing.assert_array_equal(got, bf16_to_f32(f32_to_bf16((x * y + x).astype(np.float32))))
    np.testing.assert_array_equal(run("neg.bf16x2 %r3, %r1;", H), H ^ np.uint32(0x80008000))


def test_rounding_to_tf32():
    got = run("cvt.rna.tf32.f32 %r3, %r1;", F).view(np.float32)
    assert not (got.view(np.uint32) & 0x1FFF).any()
    assert (np.abs(got - F) <= np.abs(F) * 2.0**-11).all()


def test_formats():
    for form in ("bf16", "f16"):
        x = np.arange(0, 65536, 7, dtype=np.uint16)
        wide = widen(x, form)
        good = ~np.isnan(wide)
        np.testing.assert_array_equal(narrow(wide, form)[good], x[good])
    # halfway between two neighbours: to the even one
    np.testing.assert_array_equal(f32_to_bf16(np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)), [0x3F80, 0x3F82])


class TestLanes:
    def test_shuffles(self):
        np.testing.assert_array_equal(run("shfl.sync.bfly.b32 %r3, %r1, 5, 31, -1;", U), U[LANE ^ 5])
        np.testing.assert_array_equal(run("shfl.sync.idx.b32 %r3, %r1, 7, 31, -1;", U), np.full(32, U[7]))
        np.testing.assert_array_equal(
            run("shfl.sync.down.b32 %r3, %r1, 3, 31, -1;", U), U[np.where(LANE + 3 < 32, LANE + 3, LANE)]
        )
        up = "shfl.sync.up.b32 %r3|%p1, %r1, 3, 0, -1; @!%p1 mov.b32 %r3, 0;"
        np.testing.assert_array_equal(run(up, U), np.where(LANE >= 3, U[LANE - 3], 0))

    def test_a_shuffle_in_segments_of_eight(self):
        got = run("shfl.sync.up.b32 %r3, %r1, 1, 6144, -1;", U)  # segment mask 24 in bits 8 to 12
        np.testing.assert_array_equal(got, U[np.where(LANE % 8, LANE - 1, LANE)])

    def test_votes(self):
        ballot = "setp.gt.s32 %p1, %r1, 0; vote.sync.ballot.b32 %r3, %p1, -1;"
        assert (run(ballot, U) == sum(1 << int(lane) for lane in LANE[S > 0])).all()
        reduction = "redux.sync.add.s32 %r3, %r0, -1;"
        assert (run(reduction, U) == 31 * 16).all()

    def test_divergent_code_reconverges(self):
        body = (
            "setp.lt.u32 %p1, %r0, 9; @%p1 bra A; add.s32 %r3, %r3, 5; bra B; A: add.s32 %r3, %r3, 7; B: add.s32 %r3, %r3, 100;"
        )
        np.testing.assert_array_equal(run(body, U), np.where(LANE < 9, 107, 105))

    def test_a_collective_in_divergent_code_is_an_error(self):
        body = "setp.lt.u32 %p1, %r0, 9; @%p1 bra A; shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1; A: nanosleep.u32 20;"
        with pytest.raises(SimulationError, match="collective in divergent code"):
            run(body, U)


class TestMemory:
    def test_an_address_of_32_bits_wraps(self):
        body = """mov.u32 %r4, shared; shl.b32 %r5, %r0, 2; add.s32 %r4, %r4, %r5; st.shared.b32 [%r4], %r1;
            add.s32 %r4, %r4, -262144; ld.shared.b32 %r3, [%r4+262144];"""
        assert (run(body, U) == U).all()

    def test_shared_memory_is_nan_until_written(self):
        assert np.isnan(run("ld.shared.b32 %r3, [shared];", U).view(np.float32)).all()

    def test_reductions(self):
        body = "red.global.add.u32 [%rd2], %r0; bar.sync 0; ld.global.b32 %r3, [%rd2];"
        np.testing.assert_array_equal(run(body, U), LANE)

    def test_small_copies_land_at_their_wait(self):
        at = "shl.b32 %r4, %r0, 2; mov.u32 %r5, shared; add.u32 %r5, %r5, %r4;"
        copy = at + "cp.async.ca.shared.global [%r5], [%rd0], 4; cp.async.commit_group;"
        read = "ld.shared.b32 %r3, [%r5];"
        assert np.isnan(run(copy + read + "cp.async.wait_group 0;", U).view(np.float32)).all()
        np.testing.assert_array_equal(run(copy + "cp.async.wait_group 0;" + read, U), U)

    def test_bulk_copies(self):
        body = """
        mov.u32 %r5, shared; setp.eq.u32 %p1, %r0, 0; add.u32 %r6, %r5, 512;
        @%p1 mbarrier.init.shared.b64 [%r6], 1; bar.sync 0;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r6], 128;
        @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r5], [%rd0], 128, [%r6];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [%r6], 0; @!%p2 bra W;
        shl.b32 %r4, %r0, 2; add.u32 %r5, %r5, %r4; ld.shared.b32 %r3, [%r5];
        """
        np.testing.assert_array_equal(run(body, U), U)

    def test_what_is_not_there_is_an_error(self):
        for body, match in {
            "ld.shared.b32 %r3, [shared+1024];": "no shared memory at",
            "ld.global.b32 %r3, [%rd0+4096];": "outside every array",
            "ld.global.b64 %rd4, [%rd0+4];": "misaligned",
            "mbarrier.arrive.shared.b64 _, [shared];": "no mbarrier at",
        }.items():
            with pytest.raises(SimulationError, match=match):
                run(body, U)


class TestClusters:
    """Two blocks of a warp each; a block finds its own x in %r1, its partner's rank in %r7, and its lane's word in %r5."""

    START = """
    mov.u32 %r6, %cluster_ctarank; xor.b32 %r7, %r6, 1; mul.wide.u32 %rd4, %r6, 128;
    add.s64 %rd0, %rd0, %rd4; add.s64 %rd2, %rd2, %rd4; ld.global.b32 %r1, [%rd0];
    shl.b32 %r4, %r0, 2; mov.u32 %r5, shared; add.u32 %r5, %r5, %r4; setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared.b64 [shared+512], 1; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [shared+512], 128;
    """
    SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    # the partner's word of this lane, its start of shared memory, its mbarrier
    MAP = """
    mapa.shared::cluster.u32 %r10, %r5, %r7; mov.u32 %r11, shared; mapa.shared::cluster.u32 %r11, %r11, %r7;
    add.u32 %r12, %r11, 512;
    """
    WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [shared+512], 0; @!%p2 bra W;"
    PUSH = "@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r11], [shared], {}, [%r12];"
    X = np.concatenate([U, V])

    def run(self, body, order="late", races=False):
        return run(self.START + self.SYNC + self.MAP + body, self.X, order=order, cluster=2, races=races)

    def test_registers(self):
        for name, want in {
            "cluster_ctarank": [0, 1], "cluster_ctaid.x": [0, 1], "cluster_ctaid.y": [0, 0], "cluster_nctarank": [2, 2],
            "cluster_nctaid.x": [2, 2], "clusterid.x": [0, 0], "nclusterid.x": [1, 1], "ctaid.x": [0, 1],
        }.items():  # fmt: skip
            np.testing.assert_array_equal(self.run(f"mov.u32 %r3, %{name};"), np.repeat(want, 32))

    def test_loads_and_stores(self):
        swapped = np.concatenate([V, U])
        there = "st.shared::cluster.b32 [%r10], %r1;" + self.SYNC + "ld.shared.b32 %r3, [%r5];"
        here = "st.shared::cta.b32 [%r5], %r1;" + self.SYNC + "ld.shared::cluster.b32 %r3, [%r10];" + self.SYNC
        for body in (there, here):
            np.testing.assert_array_equal(self.run(body), swapped)
        own = "st.shared::cluster.b32 [%r5], %r1; ld.shared.b32 %r3, [%r5];"  # an ordinary address is a block's own
        np.testing.assert_array_equal(self.run(own), self.X)

    @pytest.mark.parametrize("order", ["late", "early", "last"])
    def test_races(self, order):
        store, load = "st.shared::cluster.b32 [%r10], %r1;", "ld.shared.b32 %r3, [%r5];"
        add = "red.shared::cluster.add.u32 [%r10], %r1; red.shared::cta.add.u32 [%r5], %r1;"
        push = "st.shared.b32 [%r5+128], %r1; fence.proxy.async.shared::cta;"
        push += self.PUSH.format(128).replace("[shared]", "[shared+128]")
        for body in (store + self.SYNC + load, load + self.SYNC + store, add, push + self.WAIT + load):
            self.run(body + self.SYNC, order, races=True)
        for body in (
            store + load,
            load + store,
            store + add,
            add + self.SYNC + add + load,
            push + load,
            load + push,
            push + store,
        ):
            with pytest.raises(SimulationError, match="a race: "):
                self.run(body + self.WAIT * ("cp" in body) + self.SYNC, order, races=True)

    @pytest.mark.parametrize("order", ["late", "early", "last"])
    def test_asynchronous_stores(self, order):
        body = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r10], %r1, [%r12]; mov.b32 %r1, 0;"
        got = self.run(body + self.WAIT + "ld.shared.b32 %r3, [%r5];" + self.SYNC, order)
        np.testing.assert_array_equal(got, np.concatenate([V, U]))

    def test_a_copy_to_another_block_may_read_late(self):
        push = "st.shared.b32 [%r5], %r1;" + self.PUSH.format(128).replace("[%r11]", "[%r11+128]")
        read = self.WAIT + "ld.shared.b32 %r3, [%r5+128];" + self.SYNC
        for order in ("late", "early"):
            np.testing.assert_array_equal(self.run(push + read, order), np.concatenate([V, U]))
        assert (self.run(push + "st.shared.b32 [%r5], 7;" + read) == 7).all()

    def test_a_global_load_to_another_block(self):
        load = "@%p1 cp.async.bulk.shared::{}.global.mbarrier::complete_tx::bytes [%r11], [%rd0], 128, [%r12];"
        body = load + self.WAIT + "ld.shared.b32 %r3, [%r5];" + self.SYNC
        np.testing.assert_array_equal(self.run(body.format("cluster")), np.concatenate([V, U]))
        with pytest.raises(SimulationError, match="bulk copy: 128 bytes at shared memory address"):
            self.run(body.format("cta"))

    def test_what_is_not_allowed_is_an_error(self):
        arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];"
        for body, match in {
            "ld.shared.b32 %r3, [%r10];": "no shared memory at",
            "ld.shared::cluster.b32 %r3, [%r10+1024];": "no shared::cluster memory at",
            "mapa.shared::cluster.u32 %r10, %r5, 2; st.shared::cluster.b32 [%r10], %r1;": "no block of rank 2 in a cluster of 2",
            self.PUSH.format(100): "100 bytes: must be a multiple of 16",
            self.PUSH.format(128).replace("[shared]", "[shared+8]"): "source of a bulk copy: 128 bytes at",
            self.PUSH.format(128).replace("[%r11]", "[%r11+960]"): "bulk copy: 128 bytes at",
            self.PUSH.format(128).replace("[%r11]", "[shared]"): "to the block's own shared memory",
            self.PUSH.format(128).replace("[%r12]", "[shared+512]"): r"bytes go to block \(\d, 0, 0\), and the mbarrier",
            self.PUSH.format(128) + self.SYNC: "when one of them has ended",
            arrive.replace("%r12", "%r11"): r"no mbarrier at 0x400 in block \(\d, 0, 0\)",
            arrive.replace("shared::cluster", "shared::cta"): "no mbarrier at",
            # whoever came last to the barrier goes on first
            "setp.eq.u32 %p2, %r6, 1; @%p2 bra END;" + arrive + "END: nanosleep.u32 20;": r"block \(1, 0, 0\) has ended",
            "barrier.cluster.wait;": "arrive and wait must take turns",
            "barrier.cluster.arrive; barrier.cluster.arrive;": "arrive and wait must take turns",
            self.WAIT: r"deadlock in block \(0, 0, 0\): warp 0 at mbarrier.*; in block \(1, 0, 0\): warp 0 at mbarrier",
        }.items():
            with pytest.raises(SimulationError, match=match):
                self.run(body)

    def test_who_has_ended_is_not_waited_for(self):
        body = "setp.eq.u32 %p2, %r6, 0; @%p2 bra END;" + self.SYNC + "END: mov.b32 %r3, %r1;"
        np.testing.assert_array_equal(self.run(body), self.X)


class TestReadsInFlight:
    """Two warps: the first reads, both come to a barrier, the second overwrites what was read, by a copy or by stores."""

    START = """
    and.b32 %r4, %r0, 31; shl.b32 %r4, %r4, 2; mov.u32 %r5, shared; add.u32 %r5, %r5, %r4; setp.lt.u32 %p3, %r0, 32;
    setp.eq.u32 %p1, %r0, 32; @%p1 mbarrier.init.shared.b64 [shared+512], 1; bar.sync 0;
    """
    LOAD = "ld.shared.b32 %r6, [%r5];"
    MATRIX = """
    shl.b32 %r8, %r0, 4; and.b32 %r8, %r8, 112; add.u32 %r8, %r8, shared;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r8];
    """
    FIRST, USE, SYNC = "@!%p3 bra A;", "add.s32 %r3, %r6, 1;", "A: bar.sync 0;"
    COPY = """
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [shared+512], 128;
    @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [shared], [%rd0+-128], 128, [shared+512];
    """
    STORE = "@!%p3 st.shared.b32 [%r5], %r1;"
    WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [shared+512], 0; @!%p2 bra W;"

    def run(self, body, order="late"):
        run(self.START + body, np.concatenate([U, V]), order=order, races=True, threads=64)

    @pytest.mark.parametrize("order", ["late", "first"])
    def test_a_copy_may_come_before_what_nobody_has_used(self, order):
        move, again, end = "mov.b32 %r7, %r6;", "bar.sync 0;", self.COPY + self.WAIT
        for read in (self.FIRST + self.LOAD, self.FIRST + self.MATRIX):
            for right in (
                self.USE + self.SYNC,
                move + "add.s32 %r3, %r7, 1;" + self.SYNC,
                self.SYNC + self.USE + again,
            ):
                self.run(read + right + end, order)
            for wrong in (self.SYNC, self.SYNC + again, move + self.SYNC):
                with pytest.raises(SimulationError, match=r"a race: warp 1 .* at ld.* which may still be reading"):
                    self.run(read + wrong + end + self.USE, order)

    def test_stores_queue_behind_a_read(self):
        self.run(self.FIRST + self.LOAD + self.SYNC + self.STORE + self.USE)

    def test_an_arrival_does_not_wait_for_reads_either(self):
        start = "@%p1 mbarrier.init.shared.b64 [shared+520], 32; bar.sync 0;"
        arrive = "mbarrier.arrive.shared.b64 _, [shared+520]; bra B;"
        end = self.WAIT.replace("W", "A").replace("512", "520") + self.COPY + self.WAIT + "B: " + self.USE
        self.run(start + self.FIRST + self.LOAD + self.USE + arrive + end)
        with pytest.raises(SimulationError, match="which may still be reading"):
            self.run(start + self.FIRST + self.LOAD + arrive + end)

    def test_a_read_of_the_round_before_has_been_made(self):
        """A loop whose reads are used behind its barrier, one round's place overwritten in the next."""
        body = """
        mov.b32 %r7, 0;
        L: @!%p3 bra A; ld.shared.b32 %r6, [%r5]; A: bar.sync 0; add.s32 %r3, %r3, %r6;
        xor.b32 %r5, %r5, 128; add.s32 %r7, %r7, 1; setp.lt.u32 %p4, %r7, 2; @%p4 bra L;
        """
        self.run(body + self.COPY + self.WAIT)
        with pytest.raises(SimulationError, match="which may still be reading"):
            self.run(body + self.COPY.replace("[shared],", "[shared+128],") + self.WAIT)

    def test_a_warp_may_overtake_itself(self):
        read, wait = "setp.eq.u32 %p1, %r0, 0;" + self.FIRST + self.LOAD, "A: " + self.WAIT
        copy = self.COPY.replace("+-128", "")
        self.run(read + self.USE + copy + wait)
        with pytest.raises(SimulationError, match=r"a race: warp 0 .* warp 0 .* which may still be reading"):
            self.run(read + copy + wait + self.USE)


def test_a_hang_is_reported():
    body = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [shared], 2; @%p1 mbarrier.arrive.shared.b64 _, [shared];"
    body += "W: mbarrier.try_wait.parity.shared.b64 %p2, [shared], 0; @!%p2 bra W;"
    with pytest.raises(SimulationError, match=r"deadlock in block \(0, 0, 0\): warp 0 at mbarrier.try_wait"):
        run(body, U)


def test_an_unknown_instruction_is_named():
    with pytest.raises(Unsupported, match=r"bfind\.u32 %r3, %r1"):
        run("bfind.u32 %r3, %r1;", U)
    with pytest.raises(Unsupported, match=r"add\.sat\.f32"):
        run("add.sat.f32 %r3, %r1, %r2;", F)
