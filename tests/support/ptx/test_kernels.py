# SPDX-License-Identifier: Apache-2.0
"""The simulator runs correct kernels right, in every order, and notices when one is broken."""

import re

import pytest
import torch

from cula.ops.cute.toolchain import build
from tests.support.ptx import HostError, SimulationError, compile_all, compiled, simulate
from tests.support.ptx.cases import CASES, HOPPER, check, compiled_case, orders_of

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

WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 \S+, [^;]*;"
MAP = r"mapa\.shared::cluster\.u32 \t(%r\d+, %r\d+), %r\d+"  # an address of the partner's
DESCRIPTOR = r"(?<=, )(\d{19})(?=;)"  # a constant whose top bits say the swizzle
# The instruction descriptor of a tcgen05 product: one of two constants, or-ed with a third.
INSTRUCTION = r"selp\.b32 \t%r\d+, (\d+), (\d+), %p\d+;\n\tor\.b32"


def replace(pattern, by, nth=None):
    """Replace all matches, or the nth alone."""

    def edit(text):
        for n, m in reversed(list(enumerate(re.finditer(pattern, text)))):
            if nth in (None, n):
                text = text[: m.start()] + (by(m) if callable(by) else m.expand(by)) + text[m.end() :]
        return text

    return edit


def change(pattern, f, nth=None):
    """Replace the number that a pattern's first group holds."""
    return replace(pattern, lambda m: m[0].replace(m[1], str(f(int(m[1])))), nth)


def flip(bit, nth=0):
    """Flip a bit of a tcgen05 instruction descriptor."""
    flipped = lambda text: str(int(text) ^ 1 << bit)
    return replace(INSTRUCTION, lambda m: m[0].replace(m[1], flipped(m[1])).replace(m[2], flipped(m[2])), nth)


def never_wait(m):
    """A wait that is over at once."""
    predicate = re.match(r"mbarrier\S+ (\S+),", m[0])[1]
    return f"setp.eq.b32 {predicate}, 0, 0;"


PTX = {
    "a major bit of wgmma": ("product_nt", replace(r"(wgmma\.mma_async[^;]*), 0;", r"\1, 1;")),
    "the swizzle in wgmma descriptors": ("product_nt", change(DESCRIPTOR, lambda d: d ^ 3 << 62)),
    "the stride in wgmma descriptors": ("product_tn", change(DESCRIPTOR, lambda d: d + (32 << 32))),
    "a step of k that reads elsewhere": ("product_nn", change(DESCRIPTOR, lambda d: d + 2, nth=4)),
    "no wait for the loads": ("product_nt", replace(WAIT, never_wait)),
    "no wait for the first wgmma": ("chain", replace(r"wgmma\.wait_group\.sync\.aligned \t?0;", "", nth=0)),
    "no wait for bulk stores": ("tma_pipeline", replace(r"cp\.async\.bulk\.wait_group(\.read)? \t?0;", "")),
    "a barrier's count": ("tma_pipeline", replace(r"bar\.sync \t1, 128", "bar.sync \t1, 160")),
    "no wait until the partner's buffer is free": ("exchange", replace(WAIT, never_wait, nth=0)),
    "no wait for the partner's bytes": ("exchange", replace(WAIT, never_wait, nth=3)),
    "no barrier of the cluster at the start": ("exchange", replace(r"barrier\.cluster\.arrive\.relaxed;\s*barrier\S+;", "")),
    "no barrier of the cluster at the end": ("exchange", replace(r"barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;", "")),
    "arrivals of the cluster without waits": ("exchange", replace(r"barrier\.cluster\.wait;", "")),
    "the partner's bytes count here": ("exchange", replace(MAP, r"mov.b32 \1", nth=0)),
    "a tile pushed to oneself": ("exchange", replace(MAP, r"mov.b32 \1", nth=1)),
    "one's own buffer called free": ("exchange", replace(MAP, r"mov.b32 \1", nth=2)),
    "half of a tile pushed": ("exchange", replace(r"16384;(\s*cp\.async\.bulk\.shared::cluster)", r"8192;\1")),
    "ldmatrix without its transposition": ("warp_product", replace(r"ldmatrix(\S*)\.trans", r"ldmatrix\1")),
    "stmatrix with a transposition": ("warp_product", replace(r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.", r"\1.trans.")),
    "the type of mma.sync": ("warp_product_fp16", replace(r"f32\.f16\.f16\.f32", "f32.bf16.bf16.f32")),
    "B's major bit of tcgen05": ("umma_product", flip(16)),
    "A's major bit with A in tensor memory": ("umma_chain", flip(15, nth=1)),
    "B's format of tcgen05": ("umma_product", flip(10)),
    "B negated": ("umma_product", flip(14)),
    "M of tcgen05": ("umma_product", flip(26)),
    "the swizzle in tcgen05 descriptors": ("umma_product", change(DESCRIPTOR, lambda d: d ^ 6 << 61)),
    "one step of k reads another": ("umma_product", change(DESCRIPTOR, lambda d: d + 2, nth=3)),
    "the first step accumulates": ("umma_product", replace(r"mov\.pred \t(%p\d+), 0;", r"mov.pred \t\1, -1;", nth=0)),
    "no wait for the commit": ("umma_product", replace(WAIT, never_wait, nth=1)),
    "no commit": ("umma_product", replace(r"tcgen05\.commit[^;]*;", "", nth=0)),
    "two commits": ("umma_product", replace(r"(tcgen05\.commit[^;]*;)", r"\1 \1", nth=0)),
    "no lane window": ("umma_product", replace(r"shl\.b32 \t(%r\d+), (%r\d+), 21;", r"mov.b32 \t\1, 0;")),
    "a load one column on": ("umma_chain", replace(r"(tcgen05\.ld[^;]*)\];", r"\1+1];", nth=0)),
    "too few columns allocated": ("umma_chain", replace(r"mov\.b32 \t(%r\d+), 512;", r"mov.b32 \t\1, 256;")),
    "96 columns allocated": ("umma_chain", replace(r"mov\.b32 \t(%r\d+), 512;", r"mov.b32 \t\1, 96;")),
    "no wait for a load of tensor memory": ("umma_product", replace(r"tcgen05\.wait::ld\.sync\.aligned;", "")),
    "no wait for a store to tensor memory": ("umma_chain", replace(r"tcgen05\.wait::st\.sync\.aligned;", "")),
    "tensor memory never freed": ("umma_product", replace(r"tcgen05\.dealloc[^;]*;", "")),
}
HOST = {
    "a TMA box one row short": ("tma_pipeline", replace(r"constant\(63 : i64\)", "constant(62 : i64)", nth=0)),
    "the swizzle in a TMA descriptor": ("product_nt", change(r"constant\((288034) : i64\)", lambda n: n ^ 0x2000, nth=0)),
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
    "the partner may write before all have read": ("exchange", replace(r"bar\.sync \t0;", "", nth=1)),
    "no wait until the partner's buffer is free": ("exchange", replace(WAIT, never_wait, nth=0)),
    "no wait for the partner's bytes": ("exchange", replace(WAIT, never_wait, nth=3)),
    "the next tile is written while one is stored": ("tma_pipeline", replace(r"bar\.sync \t1, 128;", "", nth=0)),
    "a tile is stored before all have written": ("tma_pipeline", replace(r"bar\.sync \t1, 128;", "", nth=1)),
    "a product is stored before all have written": ("warp_product", replace(r"bar\.sync \t0;", "", nth=1)),
}


@pytest.mark.parametrize("what", RACY)
def test_a_race_is_reported(what):
    name, edit = RACY[what]
    with pytest.raises(
        SimulationError, match=r"a race: warp \d+ of block \(\d, 0, 0\) at .* not ordered before it, (warp|a copy)"
    ):
        check(name, "late", compiled_case(name).edited(ptx=edit), races=True)
