# SPDX-License-Identifier: Apache-2.0
"""KDA prefill of packed sequences whose lengths the GPU looks at: the fused kernel serves them, or the split ones.

Which calls these are is in test_kda_dispatch.py, and recorded ones in test_kda.py.
"""

import re

import pytest
import torch

from cula.ops.cute import kda, kda_abi, kda_schedule
from cula.ops.cute.kda_schedule import fused, schedule, split_into
from cula.reference import relative_error
from tests.ops.cute import test_kda
from tests.ops.cute.test_kda import NUM_SMS, STATE_TOLERANCE, TOLERANCE, Case, check, make, schedule_of, wanted
from tests.support.slow import slow_but

interpreted, kernels, fused_kernel = test_kda.interpreted, test_kda.kernels, test_kda.fused_kernel

MANY = (1, 0) * 16  # a warp looks at so many at once, and then at the next

# Each with the longest sequence just short enough for the fused kernel, and one token too long; the first, the last or one that
# only the second look finds.
CASES = [
    Case((130, 100, 120), clusters=2, longest=130, shift=-4.0),
    Case((130, 100, 120), clusters=2, longest=129, shift=-4.0),
    Case((20, 0, 90), clusters=3, longest=90, HV=2, per_segment=1),
    Case((20, 0, 90), clusters=3, longest=89, HV=2, per_segment=1),
    Case((*MANY, 70), clusters=2, longest=70, has_state=False),
    Case((*MANY, 70), clusters=2, longest=69, has_state=False),
]


def run(p, x, made):
    o, ht = torch.full_like(x.v, torch.nan), torch.full((p.N, p.HV, 128, 128), torch.nan, device=x.q.device)
    kda.run(p, x, made, ht, o)
    return o, ht


def is_even(case: Case) -> bool:
    return max(case.lengths) <= case.longest


@pytest.mark.parametrize("case", slow_but(CASES, CASES[:2]), ids=str)
def test_one_of_them_serves_a_call(interpreted, case):
    """To the bit, and right."""
    p, x = make(case, "cpu")
    alone = fused(case.clusters) if is_even(case) else split_into(p, case.per_segment, NUM_SMS)
    both = run(p, x, schedule_of(case, p))
    assert all(torch.equal(a, b) for a, b in zip(both, run(p, x, alone)))
    for got, want, tolerance in zip(both, wanted(p, x), (TOLERANCE["f16"], STATE_TOLERANCE["f16"])):
        assert relative_error(got, want) < tolerance


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_others_touch_nothing(interpreted, monkeypatch, case):
    """Neither outputs nor the workspace."""
    p, x = make(case, "cpu")
    made, poisoned, works = schedule_of(case, p), torch.empty, []

    def empty(*shape, **kwargs):
        t = poisoned(*shape, **kwargs)
        works.extend([t] if t.dtype == torch.uint8 and shape == (made.workspace_bytes(p.HV),) else [])
        return t

    monkeypatch.setattr(torch, "empty", empty)
    others = made._replace(clusters=0) if is_even(case) else fused(case.clusters)._replace(longest=case.longest)
    assert others.kernels == (("split",) if is_even(case) else ("fused",))
    assert all(t.isnan().all() for t in run(p, x, others))
    assert len(works) == is_even(case)
    assert all((work == 0xFF).all() for work in works)


@pytest.mark.slow
def test_there_are_no_races(interpreted):
    interpreted("late", races=True)
    check(CASES[2], "cpu")
    check(CASES[3], "cpu")


@pytest.mark.parametrize(
    ("longest", "edit"),
    [
        (89, lambda text: text.replace("redux.sync.max.s32", "redux.sync.min.s32")),
        (90, lambda text: re.sub(r"@%p\d+ exit;", "", text)),
    ],
    ids=["the shortest sequence decides", "nobody leaves"],
)
def test_broken_kernels_are_noticed(interpreted, longest, edit):
    case = Case((20, 0, 90), clusters=3, longest=longest, HV=2, per_segment=1)
    p, x = make(case, "cpu")
    right = run(p, x, schedule_of(case, p))
    interpreted("late", edit)
    assert not all(torch.equal(a, b) for a, b in zip(right, run(p, x, schedule_of(case, p))))


@pytest.mark.parametrize("lengths", [(65, 70, 66, 50), (200, 1, 0, 50)], ids=["even", "uneven"])
def test_what_the_schedule_says_is_done(interpreted, monkeypatch, lengths):
    """On a small GPU, whose four clusters are filled by four sequences."""
    monkeypatch.setattr(kda_schedule, "WORTH_A_LOOK", 1)
    p, x = make(Case(lengths), "cpu")
    made = schedule(p, 8)
    assert (made.kernels, made.clusters, made.longest) == (("fused", "split"), 4, 128)
    alone = fused(4) if max(lengths) <= 128 else made._replace(clusters=0, longest=kda_abi.NO_LENGTH)
    assert all(torch.equal(a, b) for a, b in zip(run(p, x, made), run(p, x, alone)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(fused_kernel, case):
    check(case, "cuda")


@pytest.mark.gpu
def test_lengths_that_change_between_replays_of_a_graph(fused_kernel):
    """Each replay does what a call with the lengths of the day does, to the bit, many times."""
    lengths = [(2048,) * 8, (2000, 2096) * 4, (9006, *(1054,) * 7), (2048,) * 8, (16384, *(0,) * 7)]
    p, x = make(Case(lengths[0], H=16, HV=16), "cuda")
    made = schedule(p, NUM_SMS)
    assert made.kernels == ("fused", "split")
    offsets = [torch.tensor([0, *of]).cumsum(0).int().cuda() for of in lengths]
    by_fused, by_split = fused(made.clusters), made._replace(clusters=0, longest=kda_abi.NO_LENGTH)
    alone = [by_fused if max(of) <= made.longest else by_split for of in lengths]
    assert by_fused in alone and by_split in alone
    want = [run(p, x._replace(cu_seqlens=cu), schedule) for cu, schedule in zip(offsets, alone)]
    o, ht = (torch.empty_like(t) for t in want[0])
    kda.run(p, x, made, ht, o)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda.run(p, x, made, ht, o)
    for i in [*range(len(lengths))] * 10:
        x.cu_seqlens.copy_(offsets[i])
        o.fill_(torch.nan)
        ht.fill_(torch.nan)
        graph.replay()
        assert torch.equal(o, want[i][0]) and torch.equal(ht, want[i][1])
