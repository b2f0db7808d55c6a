# SPDX-License-Identifier: Apache-2.0
"""Proxy fences of the CuTe kernels, in the simulator: none is missing, and without any of them one is (`tools/ptx/proxies.py`).

The tests of each family that look for races look for fences too. Here are the removals, and Lightning's prefill on Hopper, which
has a race that does no harm.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from cula.reference import relative_error
from tests.ops.cute import (
    test_gdn,
    test_gdn_bwd,
    test_kda,
    test_kda_bwd,
    test_kda_bwd_segments,
    test_lightning,
    test_lightning_bwd,
)
from tests.ops.cute.sm100 import test_gdn as blackwell_gdn
from tests.ops.cute.sm100 import test_lightning as blackwell_lightning
from tests.ops.cute.sm100.test_gdn import use as use_gdn  # noqa: F401
from tests.ops.cute.sm100.test_lightning import use as use_lightning  # noqa: F401
from tests.ops.cute.test_gdn_bwd import interpreted as use_gdn_bwd  # noqa: F401
from tests.ops.cute.test_kda import BLACKWELL_SM, FUSED
from tests.ops.cute.test_kda import interpreted as use_kda  # noqa: F401
from tests.ops.cute.test_kda_bwd import interpreted as use_kda_bwd  # noqa: F401
from tests.ops.cute.test_lightning_bwd import interpreted as use_lightning_bwd  # noqa: F401
from tests.support.calls import TOLERANCE, LightningCall
from tools import ptx
from tools.ptx.mutate import PROXY_FENCE, without

HOPPER, BLACKWELL = "sm_90a", "sm_100a"


@dataclass(frozen=True)
class Kernels:
    """The kernels of a variant, and calls that between them come to all of their fences."""

    name: str
    arch: str
    use: str  # the fixture that has them simulated
    calls: tuple[Callable[[], object], ...]
    count: int  # of fences
    quick: int  # the fence that is removed in short runs, too
    kept: tuple[int, ...] = ()  # of which nothing is noticed, see below

    def run(self) -> None:
        for call in self.calls:
            call()


def lightning(kernel: str, T: int) -> None:
    D = 64 if kernel == "d64" else 128
    call = LightningCall(dtype=torch.bfloat16, T=T, H=1, HV=1, K=D, V=D)
    (o, state), (want_o, want_state) = test_lightning.run(call, kernel, 1, torch.device("cpu"))
    assert max(relative_error(o, want_o), relative_error(state, want_state)) < TOLERANCE[torch.bfloat16]


CHAINED = test_kda.Case((390,), per_segment=1, num_sms=8, shift=-8.0)
CHAINED_BF16 = test_kda.Case((390,), per_segment=1, num_sms=8, shift=-8.0, is_normalised=False)
BACK = test_kda.Case((130,), is_packed=False, shift=-8.0), 1.0
GDN = test_gdn.Case((330,), test_gdn.Schedule(blocks=1))
GDN_BACK, GDN_SEGMENTS = test_gdn.Case((90,), HV=3), test_gdn.Case((330,), is_packed=False)

LENGTHS = (40, 130, 128)  # part of a chunk, chunks and part of one, whole ones

# Kept are fences that nothing here notices when they are gone:
# - bf16 operands: the second of the intra-chunk kernel, before which only fp16 tiles are scaled once more;
# - the backwards of KDA and GDN: one between reads and TMA loads into the same places, which is not looked at.
KERNELS = {
    "kda": Kernels("kda_f16_gate_bf16", HOPPER, "use_kda", (lambda: test_kda.errors(CHAINED, "cpu"),), 5, quick=3),
    "kda, bf16": Kernels(
        "kda_bf16_gate_bf16", HOPPER, "use_kda", (lambda: test_kda.errors(CHAINED_BF16, "cpu"),), 5, quick=-1, kept=(1,)
    ),
    "kda, fused": Kernels("fused_kda_f16_gate_bf16", HOPPER, "use_kda", (lambda: test_kda.errors(FUSED[1], "cpu"),), 3, quick=1),
    "kda, backward": Kernels(
        "bwd_kda_f16_gate_bf16", HOPPER, "use_kda_bwd",
        (lambda: test_kda_bwd.is_right(*BACK), lambda: test_kda_bwd_segments.errors_of_whole(*BACK, 1)), 10, quick=4, kept=(9,),
    ),
    "gdn, whole states": Kernels("gdn_norm_whole", HOPPER, "use_gdn", (lambda: test_gdn.check(GDN),), 5, quick=3),
    "gdn, halves": Kernels("gdn_norm_half", HOPPER, "use_gdn", (lambda: test_gdn.check(test_gdn.CASES[10]),), 6, quick=-1),
    "gdn, backward": Kernels(
        "bwd_gdn_softplus_f32", HOPPER, "use_gdn_bwd",
        (lambda: test_gdn_bwd.is_right(GDN_BACK, 1.0), lambda: test_gdn_bwd.is_right(GDN_SEGMENTS, 1.0, per_segment=1)),
        12, quick=-1, kept=(10,),
    ),
    "lightning": Kernels(
        "lightning_d64", HOPPER, "use_lightning", tuple(lambda T=T: lightning("d64", T) for T in LENGTHS), 4, quick=1
    ),
    "lightning, half": Kernels(
        "lightning_d128_half", HOPPER, "use_lightning", tuple(lambda T=T: lightning("d128_half", T) for T in LENGTHS), 4, quick=-1
    ),
    "lightning, backward": Kernels(
        "bwd_lightning_d64", HOPPER, "use_lightning_bwd",
        tuple(lambda T=T: test_lightning_bwd.is_right("d64", LightningCall(T=T, H=1), 1, True) for T in LENGTHS), 4, quick=2,
    ),
    "kda on Blackwell": Kernels(
        "kda_f16_gate_bf16", BLACKWELL, "use_kda",
        (lambda: test_kda.errors(test_kda.Case((64, 66), shift=-6.0), "cpu", BLACKWELL_SM),), 3, quick=1,
    ),
    "gdn on Blackwell": Kernels(
        "gdn_norm_whole", BLACKWELL, "use_gdn", (lambda: blackwell_gdn.errors(blackwell_gdn.AGAIN),), 4, quick=3
    ),
    "lightning on Blackwell": Kernels(
        "lightning_d128", BLACKWELL, "use_lightning",
        (lambda: blackwell_lightning.errors(blackwell_lightning.of(128, lens=(260, 130)), num_blocks=1),), 3, quick=1,
    ),
}  # fmt: skip
REMOVALS = [
    pytest.param(of, place, marks=[] if place == kernels.quick else [pytest.mark.slow])
    for of, kernels in KERNELS.items()
    for place in range(kernels.count)
    if place not in kernels.kept
]


@pytest.mark.parametrize("of", KERNELS)
def test_fences_are_all_counted(use_kda, of):  # noqa: F811
    kernels = KERNELS[of]
    assert len(re.findall(PROXY_FENCE, ptx.compiled(kernels.name, kernels.arch).ptx)) == kernels.count


@pytest.mark.parametrize(("of", "place"), REMOVALS)
def test_a_fence_less_is_noticed(request, of, place):
    kernels = KERNELS[of]
    request.getfixturevalue(kernels.use)("early", without(PROXY_FENCE, place), races="fences")
    with pytest.raises(ptx.SimulationError, match="a missing proxy fence: "):
        kernels.run()


@pytest.mark.parametrize(
    ("kernel", "T"), [("d128", 200), *(pytest.param(k, T, marks=pytest.mark.slow) for k in ("d64", "d128_half") for T in LENGTHS)]
)
def test_lightning_misses_none(use_lightning, kernel, T):  # noqa: F811
    """Both consumers of `d128` write zeros past a sequence's end, to the same places: a race that does no harm."""
    use_lightning("late", races="fences")
    lightning(kernel, T)
