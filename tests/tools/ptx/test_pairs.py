# SPDX-License-Identifier: Apache-2.0
"""Blocks of a cluster that share loads and products, in hand-written PTX: multicast, and tcgen05 with cta_group::2."""

import re
import struct

import numpy as np
import pytest

from tools.ptx import ORDERS, SimulationError, Unsupported, launch
from tools.ptx.memory import GlobalMemory
from tools.ptx.mutate import replace, without
from tools.ptx.values import bf16_to_f32, f32_to_bf16

SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
START = """
.extern .shared .align 1024 .b8 shared[];
.entry one(.param .u64 x, .param .u64 z)
.reqntid @THREADS@, 1, 1
{
 .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .b16 %rs<9>;
 mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; shr.u32 %r2, %r0, 5;
 ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [z];
 setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r2, 0; setp.eq.u32 %p2, %r1, 0; and.pred %p3, %p0, %p2;
"""
rng = np.random.default_rng(0)


def edited(text, edit):
    """A text broken on purpose: an edit that changes nothing is an error."""
    broken = text if edit is None else edit(text)
    if edit is not None and broken == text:
        raise ValueError("the edit changes nothing")
    return broken


def swap(old, new):
    return lambda text: text.replace(str(old), str(new))


def run(text, x, z, threads, smem_bytes, order="late", cluster=2, races=False):
    """Run a kernel on a cluster; z, as the kernel leaves it."""
    gmem = GlobalMemory(1 << 20)
    (px, _), (pz, out) = gmem.put(np.ascontiguousarray(x).view(np.uint8)), gmem.put(np.ascontiguousarray(z).view(np.uint8))
    parameters = [struct.pack("<Q", at) for at in (px, pz)]
    size = (cluster, 1, 1)
    launch.run(
        text.replace("@THREADS@", str(threads)), "one", parameters, size, gmem, smem_bytes, order, cluster=size, races=races
    )
    return out.view(z.dtype).reshape(z.shape).copy()


class TestMulticast:
    """Each of two blocks loads half of x for both."""

    TEXT = (
        START
        + """
 @%p0 mbarrier.init.shared.b64 [shared+512], 1; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [shared+512], 128;
 @SYNC@
 shl.b32 %r3, %r1, 6; cvt.u64.u32 %rd2, %r3; add.s64 %rd2, %rd0, %rd2; mov.u32 %r4, shared; add.u32 %r4, %r4, %r3;
 mov.u16 %rs0, 3;
 @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r4], [%rd2], 64, [shared+512], %rs0;
 W: mbarrier.try_wait.parity.shared.b64 %p4, [shared+512], 0; @!%p4 bra W;
 shl.b32 %r5, %r0, 2; mov.u32 %r6, shared; add.u32 %r6, %r6, %r5; ld.shared.b32 %r7, [%r6];
 mad.lo.u32 %r8, %r1, 128, %r5; cvt.u64.u32 %rd3, %r8; add.s64 %rd3, %rd1, %rd3; st.global.b32 [%rd3], %r7;
 @SYNC@
 ret;
}
""".replace("@SYNC@", SYNC)
    )
    X = rng.integers(0, 2**32, 32, dtype=np.uint32)

    def run(self, edit=None, order="late"):
        return run(edited(self.TEXT, edit), self.X, np.zeros((2, 32), np.uint32), 32, 1024, order, races=True)

    @pytest.mark.parametrize("order", ORDERS)
    def test_each_block_has_all(self, order):
        np.testing.assert_array_equal(self.run(order=order), [self.X, self.X])

    @pytest.mark.parametrize(
        ("edit", "match"),
        [
            (replace(r"%rs0, 3;", "%rs0, 0;"), "a multicast to no block"),
            (replace(r"%rs0, 3;", "%rs0, 7;"), "no block of rank 2 in a cluster of 2"),
            (replace(r"%rs0, 3;", "%rs0, 1;"), "deadlock|a race: "),
            (replace(r"64, \[shared\+512\], %rs0", "48, [shared+512], %rs0"), "deadlock"),
            (without(r"W: [^;]*; @!%p4 bra W;"), "a race: "),
            (replace(r"(\[%rd2\], 64), \[shared\+512\]", r"\1, [shared+520]"), "no mbarrier at"),
            (without(re.escape(SYNC), 0), "no mbarrier at"),
        ],
        ids=["nobody", "a third", "itself", "too few bytes", "no wait", "another mbarrier", "no barrier at the start"],
    )
    def test_what_is_wrong_is_noticed(self, edit, match):
        with pytest.raises(SimulationError, match=match):
            [self.run(edit, order) for order in ORDERS]


# A product that two blocks share, each with half of A, of B and of D


def operand(rows):
    """[rows, 16] in bf16 as a K-major operand without a swizzle: pieces of 8 rows times 16 bytes, and two of them for 8 rows."""
    return f32_to_bf16(rows).reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3).ravel()


def descriptor(at):
    """Of such an operand: 128 bytes to the next piece along K, 256 to the next eight rows; version 1, no swizzle."""
    return at >> 4 | (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46


N, A_AT, B_AT, LOADED, DONE, COLUMN = 64, 0x400, 0x400 + 4096, "[shared+8192]", "[shared+8200]", "[shared+8208]"


def program(M):
    """Both blocks load, the one with rank 0 multiplies for both, and both store what is in their tensor memory."""
    columns, a_bytes, b_bytes = (N if M == 256 else N // 2), M // 2 * 32, N // 2 * 32
    form = 1 << 4 | 1 << 7 | 1 << 10 | N // 8 << 17 | M // 16 << 24  # sums in float32 of bfloat16 operands
    registers = lambda first: "{" + ", ".join(f"%r{first + j}" for j in range(32)) + "}"
    load = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
    store = lambda c: "".join(f" st.global.b32 [%rd4+{4 * (c + j)}], %r{20 + j};" for j in range(32))
    fetch = lambda c: f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(20)}, [%r6+{c}]; tcgen05.wait::ld.sync.aligned;"
    out = [fetch(c) + store(c) for c in range(0, columns, 32)]
    body = f"""
 @%p0 mbarrier.init.shared.b64 {LOADED}, 1; @%p0 mbarrier.init.shared.b64 {DONE}, 1;
 @!%p1 bra ALLOCATED;
 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 {COLUMN}, 64;
 tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
 ALLOCATED: bar.sync 0;
 ld.shared.b32 %r5, {COLUMN};
 mul.lo.u32 %r3, %r1, {a_bytes}; cvt.u64.u32 %rd2, %r3; add.s64 %rd2, %rd0, %rd2;
 mul.lo.u32 %r4, %r1, {b_bytes}; cvt.u64.u32 %rd3, %r4; add.s64 %rd3, %rd0, %rd3;
 @%p0 mbarrier.arrive.expect_tx.shared.b64 _, {LOADED}, {a_bytes + b_bytes};
 @%p0 {load} [shared], [%rd2], {a_bytes}, {LOADED};
 @%p0 {load} [shared+4096], [%rd3+{2 * a_bytes}], {b_bytes}, {LOADED};
 L: mbarrier.try_wait.parity.shared.b64 %p4, {LOADED}, 0; @!%p4 bra L;
 {SYNC}
 @!%p3 bra ISSUED;
 mov.b64 %rd5, {descriptor(A_AT)}; mov.b64 %rd6, {descriptor(B_AT)}; mov.b32 %r7, {form}; setp.ne.u32 %p5, %r0, %r0;
 tcgen05.mma.cta_group::2.kind::f16 [%r5], %rd5, %rd6, %r7, %p5;
 setp.eq.u32 %p5, %r0, %r0;
 tcgen05.mma.cta_group::2.kind::f16 [%r5], %rd5, %rd6, %r7, %p5;
 mov.u16 %rs0, 3;
 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 {DONE}, %rs0;
 ISSUED: bar.sync 0;
 D: mbarrier.try_wait.parity.shared.b64 %p4, {DONE}, 0; @!%p4 bra D;
 shl.b32 %r6, %r2, 21; add.u32 %r6, %r6, %r5;
 mad.lo.u32 %r8, %r1, 128, %r0; mul.wide.u32 %rd4, %r8, {4 * columns}; add.s64 %rd4, %rd1, %rd4;
 {" ".join(out)}
 bar.sync 0;
 @!%p1 bra FREED;
 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r5, 64;
 FREED: {SYNC}
 ret;
}}
"""
    return START + body


def multiply(M, edit=None, order="late", cluster=2):
    """(What the blocks hold, what they should)."""
    A, B = bf16_to_f32(f32_to_bf16(rng.standard_normal((M, 16)))), bf16_to_f32(f32_to_bf16(rng.standard_normal((N, 16))))
    halves = [*np.split(A, 2), *np.split(B, 2)]
    x, columns = np.concatenate([operand(half.astype(np.float32)) for half in halves]), N if M == 256 else N // 2
    z = np.full((cluster, 128, columns), np.nan, np.float32)
    got = run(edited(program(M), edit), x, z, 128, 9216, order, cluster)
    D = np.split(2 * A.astype(np.float64) @ B.astype(np.float64).T, 2)  # the second product adds the same once more
    if M == 128:  # 64 rows: the second half of the columns in the upper lanes
        D = [np.concatenate(np.split(rows, 2, axis=1)) for rows in D]
    return got, np.stack(D)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("M", [128, 256])
def test_a_pair_shares_a_product(M, order):
    got, want = multiply(M, order=order)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


def check(edit, order):
    np.testing.assert_allclose(*multiply(256, edit, order), rtol=1e-6, atol=1e-5)


FORM = 1 << 4 | 1 << 7 | 1 << 10 | N // 8 << 17 | 16 << 24
BROKEN = {
    "no wait for the loads": without(r"L: [^;]*; @!%p4 bra L;"),
    "no barrier before the product": without(re.escape(SYNC), 0),
    "no wait for the product": without(r"D: [^;]*; @!%p4 bra D;"),
    "no commit": without(r"tcgen05\.commit[^;]*;"),
    "only rank 0 is told": swap("%rs0, 3", "%rs0, 1"),
    "only rank 1 is told": swap("%rs0, 3", "%rs0, 2"),
    "B one piece on": swap(descriptor(B_AT), descriptor(B_AT + 128)),
    "A and B exchanged": swap("%rd5, %rd6, %r7", "%rd6, %rd5, %r7"),
    "the distance between rows": swap(descriptor(A_AT), descriptor(A_AT) ^ (256 >> 4 ^ 128 >> 4) << 32),
    "no wait for a load of tensor memory": without(r"tcgen05\.wait::ld\.sync\.aligned;", 0),
    "a window one column on": replace(r"(tcgen05\.ld[^;]*)\+0\];", r"\1+1];"),
    "another warp's lanes": swap("%r6, %r2, 21", "%r6, %r2, 20"),
    "the sum one column on": replace(r"(kind::f16 )\[%r5\]", r"\1[%r5+1]"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_pair_is_noticed(what):
    with pytest.raises((SimulationError, AssertionError)):
        [check(BROKEN[what], order) for order in ORDERS]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (swap("%p2, %r1, 0;", "%p2, %r1, 1;"), r"issued by block \(1, 0, 0\), which has an odd rank"),
        (swap("and.pred %p3, %p0, %p2;", "and.pred %p3, %p0, %p0;"), "which has an odd rank"),
        (swap(FORM, FORM ^ (16 ^ 4) << 24), "M 64 N 64 of a pair"),
        (swap(FORM, FORM ^ (N // 8 ^ 6) << 17), "M 256 N 48 of a pair"),
        (replace(r"mma\.cta_group::2", "mma.cta_group::1"), "in a kernel that has used cta_group::2"),
        (replace(r"\[shared\+8208\], 64;", "[shared+8208], %r9;"), "must be a power of two"),
        (swap("@!%p1 bra ALLOCATED;", "@!%p1 bra ALLOCATED; @!%p2 bra ALLOCATED;"), "deadlock|not allocated"),
        (swap("@!%p1 bra FREED;", "@!%p1 bra FREED; @!%p2 bra FREED;"), "deadlock"),
        (without(r"tcgen05\.dealloc[^;]*;"), "tensor memory is not freed at exit"),
        (lambda text: swap("@!%p3 bra ISSUED;", "@%p3 bra GO; @!%p2 bra END; bra ISSUED; GO:")(text).replace("ret;", "END: ret;"),
         "has ended"),
    ],
    ids=["the odd one issues", "both issue", "M", "N", "another group", "columns", "one allocates", "one frees", "nobody frees",
         "the partner has ended"],
)  # fmt: skip
def test_what_a_pair_may_not_do_is_an_error(edit, match):
    with pytest.raises(SimulationError, match=match):
        [multiply(256, edit, order) for order in ("late", "last")]


def test_a_block_without_a_partner_has_no_pair():
    with pytest.raises(SimulationError, match=r"has no partner in a cluster of 1"):
        multiply(256, cluster=1)


def test_what_is_not_known_of_pairs_is_said():
    with pytest.raises(Unsupported, match="of a pair with A in tensor memory"):
        multiply(256, swap("[%r5], %rd5, %rd6", "[%r5], [%r5], %rd6"))
