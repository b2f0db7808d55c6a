# SPDX-License-Identifier: Apache-2.0
"""Proxy fences, in hand-written PTX: where the ISA asks for one, its lack is reported, and nowhere else."""

import numpy as np
import pytest

from tests.tools.ptx.test_instructions import TestClusters as Clusters
from tests.tools.ptx.test_instructions import U, V, run
from tools.ptx import SimulationError, Unsupported

MISSING = "a missing proxy fence: "
X = np.concatenate([U, V])


def needs(run, right=(), wrong=(), match=MISSING):
    """Some bodies pass, of the others each is reported."""
    for body in right:
        run(body)
    for body in wrong:
        with pytest.raises(SimulationError, match=match):
            run(body)


class TestOneBlock:
    """Two warps, of which the first thread of the first issues copies of the first 128 bytes of shared memory."""

    START = """
    and.b32 %r4, %r0, 31; shl.b32 %r4, %r4, 2; mov.u32 %r5, shared; add.u32 %r5, %r5, %r4; setp.lt.u32 %p3, %r0, 32;
    setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [shared+512], 1;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [shared+512], 128; bar.sync 0;
    """
    FENCE = "fence.proxy.async.shared::cta;"
    WRITE, WRITE_BY_OTHER = "@%p3 st.shared.b32 [%r5], %r1;", "@!%p3 st.shared.b32 [%r5], %r1;"
    SYNC = "bar.sync 0;"
    STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [shared], 128; @%p1 cp.async.bulk.commit_group;"
    READ_OUT = "@%p1 cp.async.bulk.wait_group.read 0;"
    WRITTEN_OUT = "@%p1 cp.async.bulk.wait_group 0;"
    LOAD = "@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [shared], [%rd2], 128, [shared+512];"
    ARRIVED = "W: mbarrier.try_wait.parity.shared.b64 %p2, [shared+512], 0; @!%p2 bra W;"

    @staticmethod
    def run(body, order="late", races=True):
        run(TestOneBlock.START + body, X, order=order, races=races, threads=64)

    @pytest.mark.parametrize("order", ["late", "first", "last"])
    def test_what_a_bulk_store_reads(self, order):
        out = self.STORE + self.READ_OUT
        right = [self.WRITE + fence + out for fence in (self.FENCE, "fence.proxy.async;", "fence.proxy.async.shared::cluster;")]
        wrong = [self.WRITE + fence + out for fence in ("", self.SYNC, "fence.proxy.async.global;", "fence.acq_rel.gpu;")]
        wrong += [self.FENCE + self.WRITE + out]
        needs(lambda body: self.run(body, order), right, wrong)

    @pytest.mark.parametrize("order", ["late", "first", "last"])
    def test_a_fence_anywhere_on_the_way(self, order):
        """By the writer before it arrives, or by the reader once it has waited."""
        out = self.STORE + self.READ_OUT
        right = [self.WRITE_BY_OTHER + way + out for way in (self.FENCE + self.SYNC, self.SYNC + self.FENCE)]
        by_reader = "@%p3 " + self.FENCE
        right += [self.WRITE_BY_OTHER + self.SYNC + by_reader + out]
        wrong = [self.WRITE_BY_OTHER + way + out for way in (self.SYNC, by_reader + self.SYNC, self.SYNC + "@!%p3 " + self.FENCE)]
        needs(lambda body: self.run(body, order), right, wrong)

    def test_a_fence_of_one_lane(self):
        """It is for what that lane wrote, and for what all wrote before they met."""
        fence, one, out = "@%p1 " + self.FENCE, "@%p1 st.shared.b32 [%r5], %r1;", self.STORE + self.READ_OUT
        right = [one + fence + out, self.WRITE + "bar.warp.sync -1;" + fence + out, self.WRITE_BY_OTHER + self.SYNC + fence + out]
        expect = "@%p1 mbarrier.expect_tx.shared.b64 [shared+512], 16;"  # a release, and lanes do not meet there
        needs(self.run, right, [self.WRITE + fence + out, self.WRITE + expect + fence + out])

    def test_other_generic_writes(self):
        out = self.STORE + self.READ_OUT
        for write in (
            "red.shared.add.u32 [%r5], %r1;",
            "cp.async.ca.shared.global [%r5], [%rd0], 4; cp.async.wait_all;",
            "and.b32 %r6, %r5, -128; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r1};",
        ):
            body = "@!%p3 bra A;" + write
            needs(self.run, [body + self.FENCE + "A: " + out], [body + "A: " + out])
        early = "@!%p3 bra A; cp.async.ca.shared.global [%r5], [%rd0], 4;" + self.FENCE + "cp.async.wait_all; A: " + out
        needs(self.run, wrong=[early])

    def test_a_load_over_what_was_written(self):
        """A write of either proxy, but not a read: see `proxies.py`."""
        needs(self.run, [self.WRITE + self.FENCE + self.LOAD + self.ARRIVED], [self.WRITE + self.LOAD + self.ARRIVED])
        read = self.WRITE + self.FENCE + "@%p3 ld.shared.b32 %r3, [%r5]; @%p3 add.s32 %r3, %r3, 1;"
        self.run(read + self.LOAD + self.ARRIVED)

    def test_what_a_load_wrote_needs_no_fence(self):
        out = self.STORE.replace("[%rd2]", "[%rd2+128]") + self.READ_OUT
        self.run(self.LOAD + self.ARRIVED + "@%p3 ld.shared.b32 %r3, [%r5];" + out)

    def test_global_memory(self):
        write, load = "@%p3 st.global.b32 [%rd2], %r1;", self.LOAD + self.ARRIVED
        right = [write + fence + load for fence in ("fence.proxy.async.global;", "fence.proxy.async;")]
        right += [write.replace("@%p3", "@!%p3").replace("%rd2", "%rd2+-128") + self.SYNC + "fence.proxy.async.global;" + load]
        right += ["@!%p3 st.global.b32 [%rd2], %r1;" + load]  # another place
        wrong = [write + fence + load for fence in ("", self.FENCE, self.SYNC)]
        needs(self.run, right, wrong)

    def test_what_a_bulk_store_writes(self):
        """It is there when its completion has been waited for, not yet when its source has been read."""
        before = self.WRITE + self.FENCE + self.STORE
        reads = ["@%p3 ld.global.b32 %r3, [%rd2];", self.LOAD + self.ARRIVED]
        right = [before + self.WRITTEN_OUT + read for read in reads]
        wrong = [before + self.READ_OUT + read + self.WRITTEN_OUT for read in reads]
        needs(self.run, right, wrong, "a bulk store that may not be complete: ")

    def test_fences_alone(self):
        """Without a word of races."""
        out = self.STORE + self.READ_OUT
        racy = self.WRITE_BY_OTHER + "ld.shared.b32 %r3, [%r5];"
        with pytest.raises(SimulationError, match="a race: "):
            self.run(racy)
        needs(lambda body: self.run(body, races="fences"), [racy, racy + out], [racy + self.SYNC + out])

    def test_fences_that_are_not_known(self):
        for fence in ("fence.proxy.tensormap::generic.release.gpu;", "fence.proxy.alias;"):
            with pytest.raises(Unsupported, match=r"fence\.proxy"):
                self.run(fence)


class TestSeveralBlocks:
    OUT = """
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [shared], 128; @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
    """

    @pytest.mark.parametrize("order", ["late", "early", "last"])
    def test_what_a_partner_stores(self, order):
        """The fence is wanted in the block whose memory it is: behind the wait, and for `st.async` it cannot be before."""
        sync, fence = Clusters.SYNC, "fence.proxy.async;"
        store = "st.shared::cluster.b32 [%r10], %r1;"
        stores = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r10], %r1, [%r12];"
        for write, wait in ((store, sync), (stores, Clusters.WAIT)):
            right = [write + wait + f + self.OUT + sync for f in (fence, "fence.proxy.async.shared::cta;")]
            wrong = [write + wait + self.OUT + sync, write + fence + wait + self.OUT + sync]
            needs(lambda body: Clusters().run(body, order, races=True), right, wrong)

    def test_what_a_partner_pushes_needs_no_fence(self):
        push = "st.shared.b32 [%r5+128], %r1; fence.proxy.async.shared::cta;"
        push += Clusters.PUSH.format(128).replace("[shared]", "[shared+128]")
        Clusters().run(push + Clusters.WAIT + self.OUT + Clusters.SYNC, races=True)

    def test_what_another_cluster_wrote(self):
        """The first block writes x and then a flag; the second waits for the flag, and has x loaded."""
        start = """
        mov.u32 %r6, %ctaid.x; setp.eq.u32 %p1, %r0, 0; setp.eq.u32 %p3, %r6, 0; @!%p3 bra READER;
        st.global.b32 [%rd2], %r1; bar.warp.sync -1; @%p1 red.release.gpu.global.add.u32 [%rd1+256], 1; bra.uni END;
        READER: @%p1 mbarrier.init.shared.b64 [shared+512], 1;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [shared+512], 128;
        """
        flag, fence = "ld.acquire.gpu.global.b32 %r7, [%rd1+256];", "fence.proxy.async.global;"
        end = TestOneBlock.LOAD + TestOneBlock.ARRIVED + "ld.shared.b32 %r3, [shared]; END: nanosleep.u32 1;"
        y = np.zeros(128, np.uint32)
        needs(
            lambda body: run(start + body + end, U, y, races=True, clusters=2),
            [flag + fence, flag + "bar.warp.sync -1; fence.proxy.async;"],
            [flag, fence, "", fence + flag, flag + TestOneBlock.FENCE],
        )
