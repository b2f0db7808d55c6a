# SPDX-License-Identifier: Apache-2.0
"""The simulator runs correct kernels right, in every order, and notices when one is broken."""

import re

import pytest
import torch

from cula.ops.cute.toolchain import build
from tests.tools.ptx.cases import CASES, HOPPER, check, compiled_case, orders_of
from tools.ptx import HostError, SimulationError, compile_all, compiled, simulate
from tools.ptx.mutate import (
    BLOCK_BARRIER,
    BULK_STORE_WAIT,
    CLUSTER_WAIT,
    NAMED_BARRIER,
    WGMMA_WAIT,
    change,
    replace,
    without,
    without_wait,
)

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


@pytest.fixture(scope="module", autouse=True)
def compiled_together():
    """In two processes rather than eight."""
    for modules, arch in dict.fromkeys((modules, arch) for modules, arch, *_ in CASES.values()):
        compile_all(arch, modules)


@pytest.mark.parametrize(("name", "order"), [(name, order) for name in CASES for order in orders_of(name)])
def test_kernels(name, order):
    assert check(name, order)


def test_the_calling_convention_is_checked():
    x = torch.zeros(8)
    with pytest.raises(HostError, match=r"TypeError: Expects 4 parameters.*scale_host\(mX"):
        simulate("scale", x, modules=HOPPER)
    with pytest.raises(HostError, match=r"Mismatched Tensor on argument #1.*float32"):
        simulate("scale", x, x.double(), 1.0, modules=HOPPER)
    with pytest.raises(HostError, match=r"Mismatched mY.shape\[0\] on argument #1"):
        simulate("scale", x, torch.zeros(9), 1.0, modules=HOPPER)


def test_views_of_one_storage_share_memory():
    x = torch.arange(512, dtype=torch.float32)
    simulate("scale", x[:256], x[256:], 3.0, modules=HOPPER)
    assert torch.equal(x[256:], 3 * x[:256])


def test_an_access_outside_every_array_is_an_error():
    beyond = lambda ptx: re.sub(r"(st\.global\.b32 \t\[%rd\d+)\]", r"\1+4096]", ptx)
    x = torch.zeros(128)
    with pytest.raises(SimulationError, match="outside every array"):
        simulate(compiled("scale", modules=HOPPER).edited(ptx=beyond), x, x.clone(), 1.0)


def test_a_grid_is_whole_clusters():
    x = torch.zeros(3, 1, 64, 128)
    with pytest.raises(SimulationError, match=r"a grid of \(3, 1, 1\) blocks in clusters of \(2, 1, 1\)"):
        simulate("exchange", x.bfloat16(), x, modules=HOPPER)


# Breaking kernels on purpose.

MAP = r"mapa\.shared::cluster\.u32 \t(%r\d+, %r\d+), %r\d+"  # an address of the partner's
DESCRIPTOR = r"(?<=, )(\d{19})(?=;)"  # a constant whose top bits say the swizzle
# The instruction descriptor of a tcgen05 product: one of two constants, or-ed with a third.
INSTRUCTION = r"selp\.b32 \t%r\d+, (\d+), (\d+), %p\d+;\n\tor\.b32"


def flip(bit, place=0):
    """Flip a bit of a tcgen05 instruction descriptor."""
    flipped = lambda text: str(int(text) ^ 1 << bit)
    return replace(INSTRUCTION, lambda m: m[0].replace(m[1], flipped(m[1])).replace(m[2], flipped(m[2])), place)


PTX = {
    "a major bit of wgmma": ("product_nt", replace(r"(wgmma\.mma_async[^;]*), 0;", r"\1, 1;")),
    "the swizzle in wgmma descriptors": ("product_nt", change(DESCRIPTOR, lambda d: d ^ 3 << 62)),
    "the stride in wgmma descriptors": ("product_tn", change(DESCRIPTOR, lambda d: d + (32 << 32))),
    "a step of k that reads elsewhere": ("product_nn", change(DESCRIPTOR, lambda d: d + 2, 4)),
    "no wait for the loads": ("product_nt", without_wait()),
    "no wait for the first wgmma": ("chain", without(WGMMA_WAIT, 0)),
    "no wait for bulk stores": ("tma_pipeline", without(BULK_STORE_WAIT)),
    "a barrier's count": ("tma_pipeline", replace(r"bar\.sync \t1, 128", "bar.sync \t1, 160")),
    "no wait until the partner's buffer is free": ("exchange", without_wait(0)),
    "no wait for the partner's bytes": ("exchange", without_wait(3)),
    "no barrier of the cluster at the start": ("exchange", without(r"barrier\.cluster\.arrive\.relaxed;\s*barrier\S+;")),
    "no barrier of the cluster at the end": ("exchange", without(r"barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;")),
    "arrivals of the cluster without waits": ("exchange", without(CLUSTER_WAIT)),
    "the partner's bytes count here": ("exchange", replace(MAP, r"mov.b32 \1", 0)),
    "a tile pushed to oneself": ("exchange", replace(MAP, r"mov.b32 \1", 1)),
    "one's own buffer called free": ("exchange", replace(MAP, r"mov.b32 \1", 2)),
    "half of a tile pushed": ("exchange", replace(r"16384;(\s*cp\.async\.bulk\.shared::cluster)", r"8192;\1")),
    "no wait until both have read": ("share", without_wait(0)),
    "no wait for both halves": ("share", without_wait(1)),
    "a half for oneself alone": ("share", replace(r"(mov\.b16 \t%rs\d+), 3;", r"\1, 1;", 0)),
    "a half for a third block": ("share", replace(r"(mov\.b16 \t%rs\d+), 3;", r"\1, 5;", 1)),
    "both halves from the first block's place": ("share", replace(r"(multicast\S+ \[%r\d+\], \[%rd\d+, \{)%r\d+", r"\1 0", 1)),
    "only one block says that it has read": ("share", without(r"mbarrier\.arrive\.release\.cluster[^;]*;", 1)),
    "no barrier of a sharing cluster at the start": ("share", without(r"barrier\.cluster\.arrive\.relaxed;\s*barrier\S+;")),
    "ldmatrix without its transposition": ("warp_product", replace(r"ldmatrix(\S*)\.trans", r"ldmatrix\1")),
    "stmatrix with a transposition": ("warp_product", replace(r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.", r"\1.trans.")),
    "the type of mma.sync": ("warp_product_fp16", replace(r"f32\.f16\.f16\.f32", "f32.bf16.bf16.f32")),
    "B's major bit of tcgen05": ("umma_product", flip(16)),
    "A's major bit with A in tensor memory": ("umma_chain", flip(15, place=1)),
    "B's format of tcgen05": ("umma_product", flip(10)),
    "B negated": ("umma_product", flip(14)),
    "M of tcgen05": ("umma_product", flip(26)),
    "the swizzle in tcgen05 descriptors": ("umma_product", change(DESCRIPTOR, lambda d: d ^ 6 << 61)),
    "one step of k reads another": ("umma_product", change(DESCRIPTOR, lambda d: d + 2, 3)),
    "the first step accumulates": ("umma_product", replace(r"mov\.pred \t(%p\d+), 0;", r"mov.pred \t\1, -1;", 0)),
    "no wait for the commit": ("umma_product", without_wait(1)),
    "no commit": ("umma_product", without(r"tcgen05\.commit[^;]*;", 0)),
    "two commits": ("umma_product", replace(r"(tcgen05\.commit[^;]*;)", r"\1 \1", 0)),
    "no lane window": ("umma_product", replace(r"shl\.b32 \t(%r\d+), (%r\d+), 21;", r"mov.b32 \t\1, 0;")),
    "a load one column on": ("umma_chain", replace(r"(tcgen05\.ld[^;]*)\];", r"\1+1];", 0)),
    "too few columns allocated": ("umma_chain", replace(r"mov\.b32 \t(%r\d+), 512;", r"mov.b32 \t\1, 256;")),
    "96 columns allocated": ("umma_chain", replace(r"mov\.b32 \t(%r\d+), 512;", r"mov.b32 \t\1, 96;")),
    "no wait for a load of tensor memory": ("umma_product", without(r"tcgen05\.wait::ld\.sync\.aligned;")),
    "no wait for a store to tensor memory": ("umma_chain", without(r"tcgen05\.wait::st\.sync\.aligned;")),
    "tensor memory never freed": ("umma_product", without(r"tcgen05\.dealloc[^;]*;")),
    "no wait for the loads of a pair": ("umma_pair", without_wait(0)),
    "the partner's halves are not waited for": ("umma_pair", without(r"barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;")),
    "no wait for the product of a pair": ("umma_pair", without_wait(1)),
    "the commit of a pair tells one block": ("umma_pair", replace(r"(mov\.b16 \t%rs\d+), 3;", r"\1, 1;")),
    "B's major bit of a pair": ("umma_pair", flip(16)),
    "the swizzle in descriptors of a pair": ("umma_pair", change(DESCRIPTOR, lambda d: d ^ 6 << 61)),
    "a load of a pair one column on": ("umma_pair", replace(r"(tcgen05\.ld[^;]*)\];", r"\1+1];")),
    "a product of one block among those of a pair": ("umma_pair", replace(r"mma\.cta_group::2", "mma.cta_group::1", 3)),
    "nobody allocates for a pair": ("umma_pair", replace(r"(tcgen05\.alloc[^;]*;)", r"@P1 \1")),
}
HOST = {
    "a TMA box one row short": ("tma_pipeline", replace(r"constant\(63 : i64\)", "constant(62 : i64)", 0)),
    "the swizzle in a TMA descriptor": ("product_nt", change(r"constant\((288034) : i64\)", lambda n: n ^ 0x2000, 0)),
}


def is_noticed(name, code):
    for order in orders_of(name):
        try:
            if not check(name, order, code):
                return True
        except (SimulationError, HostError):
            return True
    return False


@pytest.mark.parametrize("what", PTX)
def test_a_wrong_kernel_is_noticed(what):
    name, edit = PTX[what]
    assert is_noticed(name, compiled_case(name).edited(ptx=edit))


@pytest.mark.parametrize("what", HOST)
def test_wrong_host_code_is_noticed(what):
    name, edit = HOST[what]
    assert is_noticed(name, compiled_case(name).edited(host=edit))


@pytest.mark.parametrize("order", ["late", "first"])
@pytest.mark.parametrize("name", CASES)
def test_no_kernel_has_a_race(name, order):
    assert check(name, order, races=True)


# Whether or not the order lets them show in the numbers.
RACY = {
    "the partner may write before all have read": ("exchange", without(BLOCK_BARRIER, 1)),
    "no wait until the partner's buffer is free": ("exchange", without_wait(0)),
    "no wait for the partner's bytes": ("exchange", without_wait(3)),
    "a half may come before both have read": ("share", without_wait(0)),
    "no wait for both halves": ("share", without_wait(1)),
    "the next tile is written while one is stored": ("tma_pipeline", without(NAMED_BARRIER, 0)),
    "a tile is stored before all have written": ("tma_pipeline", without(NAMED_BARRIER, 1)),
    "a product is stored before all have written": ("warp_product", without(BLOCK_BARRIER, 1)),
}


@pytest.mark.parametrize("what", RACY)
def test_a_race_is_reported(what):
    name, edit = RACY[what]
    with pytest.raises(
        SimulationError, match=r"a race: warp \d+ of block \(\d, 0, 0\) at .* not ordered before it, (warp|a copy)"
    ):
        check(name, "late", compiled_case(name).edited(ptx=edit), races=True)
