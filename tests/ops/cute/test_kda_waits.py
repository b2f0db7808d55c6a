# SPDX-License-Identifier: Apache-2.0
"""KDA prefill on the CuTe kernels, in the simulator: any order of work, races, and kernels broken on purpose."""

import re

import pytest
import torch

from cula.ops.cute import kda_self_check
from cula.ops.cute.toolchain import self_check
from tests.ops.cute import test_kda
from tests.ops.cute.test_kda import (
    ANEW,
    BLACKWELL_SM,
    CASES,
    FUSED,
    HOPPER_SM,
    STATE_TOLERANCE,
    TOLERANCE,
    Case,
    check,
    errors,
)
from tests.support.orders import in_each_order
from tests.support.slow import slow_but
from tools import ptx
from tools.ptx.mutate import IS_OVER, MBARRIER_WAIT, replace

interpreted = test_kda.interpreted
of_each = pytest.mark.parametrize("sm", [HOPPER_SM, pytest.param(BLACKWELL_SM, marks=pytest.mark.slow)], ids=["sm90", "sm100"])


@pytest.mark.slow
@of_each
@in_each_order
def test_order_of_asynchronous_work_does_not_matter(interpreted, order, sm):
    interpreted(order)
    check(Case((330,), per_segment=1, shift=-8.0), "cpu", sm)
    if sm == HOPPER_SM:
        check(ANEW, "cpu", sm)


@pytest.mark.slow
@in_each_order
def test_order_of_asynchronous_work_does_not_matter_to_the_fused_kernel(interpreted, order):
    interpreted(order)
    check(FUSED[0], "cpu")
    check(FUSED[1], "cpu")


@pytest.mark.parametrize(
    ("order", "edit"),
    [
        ("late", lambda text: text.replace("wgmma.wait_group.sync.aligned \t1;", "", 1)),
        pytest.param(
            "late", lambda text: re.sub(r"(wgmma\.mma_async[^;]*, )1;", r"\g<1>0;", text, count=40), marks=pytest.mark.slow
        ),
        pytest.param("late", lambda text: text.replace("0fC1C00000", "0f42C80000"), marks=pytest.mark.slow),  # -24 -> 100
        ("first", lambda text: text.replace("bar.sync \t0;", "", 4)),
        pytest.param("late", lambda text: text.replace("bar.arrive 4, 288;", ""), marks=pytest.mark.slow),
        pytest.param("late", lambda text: text.replace("bar.arrive 4, 288;", "bar.sync 4, 288;"), marks=pytest.mark.slow),
    ],
    ids=[
        "a wait dropped",
        "an operand's major flipped",
        "all is forgotten",
        "barriers dropped",
        "an arrival dropped",
        "waits apart",
    ],
)
def test_broken_kernels_are_noticed(interpreted, order, edit):
    interpreted(order, edit)
    assert not is_right(HOPPER_SM)


def is_right(sm: tuple[int, int], per_segment: int = 1, clusters: int = 0) -> bool:
    """Whether a case with a state that lasts comes out right, in chained segments, whole or fused."""
    case = Case((390,), per_segment=per_segment, clusters=clusters, shift=-8.0, are_keys_alike=True)
    try:
        of_o, of_state = errors(case, "cpu", sm)
    except ptx.SimulationError:
        return False
    return of_o < TOLERANCE["f16"] and of_state < STATE_TOLERANCE["f16"]


# Kernels broken on purpose

# The waits of the fused kernel, in the order of its PTX; without any of them some order of work gives another result.
WAITS = {"half_free": (0, "late"), "g": (1, "late"), "free": (2, "early"), "k, q": (4, "late"), "taken": (6, "late"),
         "v_full": (8, "late"), "ready": (9, "early"), "arrived": (10, "early")}  # fmt: skip


@pytest.mark.parametrize("what", slow_but(WAITS, ["free"]))
def test_the_fused_kernel_waits_for_all_that_it_needs(interpreted, what):
    place, order = WAITS[what]
    interpreted(order, replace(MBARRIER_WAIT, IS_OVER, place))
    assert not is_right(HOPPER_SM, clusters=1)


# Races in shared memory


def test_the_fused_kernel_has_no_races(interpreted):
    interpreted("late", races=True)
    check(FUSED[0], "cpu")
    check(FUSED[1], "cpu")


@of_each
def test_split_kernels_have_no_races(interpreted, sm):
    interpreted("late", races=True)
    check(CASES[0], "cpu", sm)
    if sm == HOPPER_SM:
        check(ANEW, "cpu", sm)


NAMED_BARRIER, NUM_WAITS = r"bar(?:rier)?\.sync \t%?\w+, \d+;", 11
# of keys and queries, which come to two of them by different instructions
NAMED = [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7, 9), (8, 10), (11,), (12,), (13,)]


def test_the_barriers_of_the_fused_kernel_are_all_counted(interpreted):
    text = ptx.compiled("fused_kda_f16_gate_bf16").ptx
    assert len(re.findall(NAMED_BARRIER, text)) == sum(map(len, NAMED))
    assert len(re.findall(MBARRIER_WAIT, text)) == NUM_WAITS


@pytest.mark.parametrize("places", slow_but(NAMED, [(0,), (7, 9)]), ids=str)
def test_the_fused_kernel_needs_every_named_barrier(interpreted, places):
    """Without any of them there is a race, whether or not an order of work lets it show in the numbers."""
    interpreted("early", replace(NAMED_BARRIER, "", *places), races=True)
    with pytest.raises(ptx.SimulationError, match="a race: "):
        errors(FUSED[1], "cpu")


CHAINED_BY_ONE_BLOCK = Case((390,), per_segment=1, num_sms=8, shift=-8.0)  # B and M by one block, chains that use places again


def test_chained_segments_have_no_races(interpreted):
    interpreted("late", races=True)
    check(CHAINED_BY_ONE_BLOCK, "cpu")


NUM_SPLIT_WAITS = 10


@pytest.mark.parametrize("place", slow_but(range(NUM_SPLIT_WAITS), [0]))
def test_split_kernels_need_every_wait(interpreted, place):
    assert len(re.findall(MBARRIER_WAIT, ptx.compiled("kda_f16_gate_bf16").ptx)) == NUM_SPLIT_WAITS
    interpreted("early", replace(MBARRIER_WAIT, IS_OVER, place), races=True)
    with pytest.raises(ptx.SimulationError, match=r"a race: |too many arrivals"):
        errors(CHAINED_BY_ONE_BLOCK, "cpu")


@pytest.mark.parametrize("place", slow_but(range(NUM_WAITS), [0]))
def test_the_fused_kernel_needs_every_wait(interpreted, place):
    """Likewise, but that without one of them a barrier gets too many arrivals before anything else."""
    interpreted("early", replace(MBARRIER_WAIT, IS_OVER, place), races=True)
    with pytest.raises(ptx.SimulationError, match=r"a race: |too many arrivals"):
        errors(FUSED[1], "cpu")


def with_the_barrier_behind_the_reads(text: str) -> str:
    """Of v, before anything uses what they read."""
    before, barrier, after = text.partition("bar.sync \t4, 128;")
    end = list(re.finditer(r"ldmatrix\S+trans[^;]*;", before))[-1].end()
    return before[:end] + barrier + before[end:] + after


def test_v_has_been_used_when_the_next_may_come(interpreted):
    """A barrier does not wait for what is being read, nor does a copy wait behind that: on a GPU it once came too early."""
    interpreted("late", with_the_barrier_behind_the_reads, races=True)
    with pytest.raises(ptx.SimulationError, match=r"a race: .* at cp\.async\.bulk\.tensor.* at ldmatrix.* may still be reading"):
        errors(FUSED[0], "cpu")


def flipped(bit: int, *places: int):
    """A bit of tcgen05 instruction descriptors."""

    def edit(text: str) -> str:
        matches = list(re.finditer(r"mov\.b32 \t%r\d+, (\d+);\n\ttcgen05\.mma", text))
        for m in reversed([matches[i] for i in places] if places else matches):
            text = text[: m.start(1)] + str(int(m[1]) ^ 1 << bit) + text[m.end(1) :]
        return text

    return edit


# The recurrence of Blackwell. Its PTX has the intra-chunk kernel, transitions and the recurrence in this order.
BROKEN = {
    "B's major in the descriptor of a product": flipped(16, -4),
    "the swizzle in descriptors": replace(r"\b461\d{16};", lambda m: f"{int(m[0][:-1]) ^ 6 << 61};"),
    "no wait for R": replace(MBARRIER_WAIT, IS_OVER, -5),
    "no wait for o": replace(MBARRIER_WAIT, IS_OVER, -2),
    "no wait for the chunk": replace(MBARRIER_WAIT, IS_OVER, -14, -8),
    "no wait for stores to tensor memory": replace(r"tcgen05\.wait::st\.sync\.aligned;", "", -1),
    "no commit of the state": replace(r"tcgen05\.commit[^;]*;", "", -3),
    "another warp's lanes": replace(r"(and\.b32 \t%r\d+, %r\d+), 6291456;", r"\1, 0;"),
    "a window one column on": replace(r"(tcgen05\.ld[^;]*)\];", r"\1+1];", -1),
}


@pytest.mark.parametrize("what", slow_but(BROKEN, ["no wait for o"]))
def test_broken_blackwell_kernels_are_noticed(interpreted, what):
    interpreted("late", BROKEN[what])
    assert not is_right(BLACKWELL_SM, per_segment=100)


@pytest.mark.slow
def test_the_comparison_at_self_check_tells_right_from_wrong(interpreted, monkeypatch):
    error = lambda: self_check.worst_error("kda_f16_gate_bf16", torch.device("cpu"), BLACKWELL_SM)
    assert error() < 2.2e-3
    monkeypatch.setattr(kda_self_check, "CALLS", kda_self_check.CALLS[:1])
    interpreted(edit=BROKEN["a window one column on"])
    assert not error() < self_check.LIMIT


of_either = pytest.mark.parametrize(
    "name", ["kda_f16_gate_bf16", pytest.param("fused_kda_f16_gate_bf16", marks=pytest.mark.slow)]
)


def error_on_hopper(name: str) -> float:
    return self_check.worst_error(name, torch.device("cpu"), HOPPER_SM)


@pytest.mark.slow
@of_either
def test_the_comparison_on_hopper_tells_right_from_wrong(interpreted, monkeypatch, name):
    """Also of a kernel that serves calls that are not its own, or leaves its own alone."""
    monkeypatch.setattr(kda_self_check, "CALLS", [call for call in kda_self_check.CALLS if call.is_looked_at])
    assert error_on_hopper(name) < 2.2e-3
    for edit in (
        lambda text: re.sub(r"@%p\d+ exit;", "", text),
        lambda text: re.sub(r"@%p\d+ exit;", "exit;", text),
        lambda text: text.replace("wgmma.wait_group.sync.aligned \t1;", "", 1),
    ):
        interpreted(edit=edit)
        assert not error_on_hopper(name) < self_check.LIMIT


@pytest.mark.slow
@of_either
def test_all_that_the_comparison_on_hopper_compares_is_right(interpreted, name):
    assert error_on_hopper(name) < 2.2e-3
