# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet's prefill kernel on Blackwell: values against float64, and that each of its waits is needed.

On a Blackwell GPU the same bodies run there (`pytest tests/ops/cute/sm100`); elsewhere the kernels' code is interpreted. Cases,
and what is wanted of them, are those of Hopper's kernel. Outputs start as NaN, so that what is not written is noticed.
"""

import dataclasses

import pytest
import torch

from cula.core.dispatch import choose
from cula.core.kernels import Pool
from cula.gdn.problem import GdnOptions
from cula.ops.cute import backend, gdn, gdn_self_check
from cula.ops.cute.gdn_schedule import Schedule, how, schedule
from cula.ops.cute.sm100.arch import BLACKWELL
from cula.ops.cute.toolchain import build, loader, self_check
from cula.reference import relative_error
from tests.ops.cute import test_gdn as hopper
from tests.ops.cute.test_compile import accesses_before_waiting, complaints
from tests.ops.cute.test_gdn import Case, D
from tests.support.cute import COMMIT, TMEM_LOAD_WAIT, TMEM_STORE_WAIT, count_waits, needs_dsl, removals, without_the_wait
from tests.support.variants import BLACKWELL_GDN
from tools import ptx
from tools.ptx.mutate import BLOCK_BARRIER, BULK_STORE_WAIT, MBARRIER_WAIT, NAMED_BARRIER, change, replace, without

SM, ARCH, NUM_SMS = (10, 0), "sm_100a", 148
# Of o and states, by whether keys are normalised in the kernel: then operands are fp16. Rounding o alone is 1.7e-3.
TOLERANCE, STATE_TOLERANCE = {True: 2e-3, False: 8e-3}, {True: 1.5e-3, False: 8e-3}
slow = pytest.mark.slow
pytestmark = pytest.mark.skipif(build.missing() is not None and not torch.cuda.is_available(), reason=str(build.missing()))


def make(case: Case, device="cpu"):
    p, x = hopper.make(case, device)
    return dataclasses.replace(p, sm=SM if torch.device(device).type == "cpu" else torch.cuda.get_device_capability()), x


@pytest.fixture
def use(monkeypatch):
    """How launches run in the interpreter, a function of (order, edit, races)."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return ptx.interpret(monkeypatch, gdn)


@pytest.fixture
def device(request):
    """A Blackwell GPU where there is one; otherwise the CPU, with the kernels' code interpreted."""
    if not torch.cuda.is_available():
        request.getfixturevalue("use")
        return torch.device("cpu")
    if torch.cuda.get_device_capability() not in BLACKWELL.targets or loader.missing(ARCH):
        pytest.skip(loader.missing(ARCH) or "needs a Blackwell GPU")
    return torch.device("cuda")


def errors(case: Case, device="cpu") -> tuple[float, float]:
    """Of outputs and last states."""
    p, x = make(case, device)
    (o, ht), (want_o, want_ht) = hopper.computed(p, x, case.schedule), hopper.wanted(p, x)
    return relative_error(o, want_o), relative_error(ht, want_ht)


def check(case: Case, device="cpu") -> None:
    of_o, of_state = errors(case, device)
    assert of_o < TOLERANCE[case.is_normalised]
    assert of_state < STATE_TOLERANCE[case.is_normalised]


# What is compiled


@pytest.mark.slow
@needs_dsl
def test_kernels_compile_and_fit():
    """No spills, shared and tensor memory, the instructions that they declare."""
    found = ptx.compile_all(ARCH, names=BLACKWELL_GDN)
    assert {facts.name: said for facts in found if (said := complaints(facts))} == {}
    assert {facts.tmem_columns for facts in found} == {512}


@needs_dsl
@pytest.mark.parametrize("name", BLACKWELL_GDN)
def test_kernels_wait_before_they_touch_memory(name):
    assert accesses_before_waiting(ptx.compiled(name, ARCH).ptx) == []


@slow
@needs_dsl
@pytest.mark.parametrize("name", BLACKWELL_GDN)
def test_one_code_serves_both_blackwells(name):
    one, other = (ptx.compiled(name, arch).ptx for arch in (ARCH, "sm_103a"))
    assert one.replace(".target sm_100a", ".target sm_103a") == other


# Values


def by(blocks: int) -> Schedule:
    return Schedule(blocks=blocks)


CASES = [
    Case((70, 5, 64, 0, 200), by(3), HV=2, gate="fast"),
    Case((130, 130), by(2), is_packed=False, H=1, HV=3, gate="steep", beta="plain", has_state=False),
    Case((130,), by(1), gate="zero", beta="negative", size=1e6, numbers=torch.bfloat16),
    Case((150, 0, 70), by(4), H=2, HV=2, size=1e-7),
    Case((1,) * 6, by(4), is_packed=False, H=2, HV=4),
    Case((256,), by(1), gate="log", is_packed=False),
    Case((130,), by(1), is_normalised=False, gate="log", beta="plain", numbers=torch.bfloat16),
    Case((90, 0, 64, 200), by(2), HV=2, is_normalised=False),
    Case((1500,), by(1), gate="log", beta="plain"),
]
QUICK = (0, 2, 6)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if i in QUICK else [slow], id=str(case)) for i, case in enumerate(CASES)]
)
def test_the_kernel_matches_the_recurrence(device, case):
    check(case, device)


@pytest.mark.parametrize("is_normalised", [pytest.param(True, marks=slow), False])
def test_another_sequences_nan_stays_there(device, is_normalised):
    """Last chunks read on into the next sequence; nothing of it may come through, not even times zero."""
    p, x = make(Case((70, 40, 66), by(2), is_normalised=is_normalised), device)
    want_o, want_ht = hopper.wanted(p, x)
    for t in (x.q, x.k, x.v, x.g, x.beta):
        t[:, 70:110] = torch.nan
    o, ht = hopper.computed(p, x, by(2))
    healthy = [*range(70), *range(110, 176)]
    assert relative_error(o[:, healthy], want_o[:, healthy]) < TOLERANCE[is_normalised]
    assert relative_error(ht[[0, 2]], want_ht[[0, 2]]) < STATE_TOLERANCE[is_normalised]


@slow
def test_rows_of_zeros_and_of_very_different_sizes(device):
    """A channel of v that is always zero never leaves the window of fp16, and does not keep others from moving."""
    p, x = make(Case((200,), by(1), gate="log", has_state=False), device)
    x.v[..., 3] = 0.0
    x.v[..., 40:64] *= 1e5
    x.v[..., 64:] *= 1e-6
    (o, ht), (want_o, want_ht) = hopper.computed(p, x, by(1)), hopper.wanted(p, x)
    for part in (slice(4, 40), slice(40, 64), slice(64, 128)):
        assert relative_error(o[..., part], want_o[..., part]) < 2.2e-3
        assert relative_error(ht[:, :, part], want_ht[:, :, part]) < STATE_TOLERANCE[True]
    assert not o[..., 3].any() and not ht[:, :, 3].any()


@pytest.mark.parametrize(
    ("dtype", "null_is_nonpositive"),
    [(torch.bfloat16, False), pytest.param(torch.float32, True, marks=slow), pytest.param(torch.float16, True, marks=slow)],
    ids=str,
)
def test_a_pool_is_updated_in_place_and_nothing_else_is_touched(device, monkeypatch, dtype, null_is_nonpositive):
    """Slots that are not there, both conventions of null, and a sequence that does not read its slot."""
    monkeypatch.setattr(gdn, "schedule_on", lambda problem, device: by(3))
    p, x = make(Case((100, 64, 0, 5, 70), HV=2, has_state=False), device)
    least = int(null_is_nonpositive)
    slots = torch.tensor([6, 8, 2, 0, 4], device=device)
    fresh = torch.tensor([True, True, True, True, False], device=device)
    live = (slots < 8) & (slots >= least)
    pool = torch.randn(8, 2, D, D, device=device).to(dtype)
    unlisted = [slot for slot in range(8) if slot not in slots[live].tolist()]
    pool[unlisted] = torch.nan
    before = pool.clone()
    o = gdn.gdn_fwd_pool(p, x, Pool(pool, slots, fresh, null_is_nonpositive))
    first = torch.where((live & fresh)[:, None, None, None], before[slots.clamp(max=7)].float(), 0.0)
    want_o, want_ht = hopper.wanted(p, x._replace(initial_state=first))
    assert relative_error(o, want_o) < TOLERANCE[True]
    assert relative_error(pool[slots[live]], want_ht[live]) < (STATE_TOLERANCE[True] if dtype == torch.float32 else 4e-3)
    assert torch.equal(pool[unlisted].view(torch.uint8), before[unlisted].view(torch.uint8))


# Orders, races, and kernels broken on purpose. All that there is to use again is, twelve chunks of a block, of two sequences; and
# rows of the state are so large that they move in the window of fp16.

AGAIN = Case((520, 130), by(1), gate="log", size=1e4)


@slow
@pytest.mark.parametrize("order", ptx.ORDERS)
@pytest.mark.parametrize("is_normalised", [True, False])
def test_order_of_asynchronous_work_does_not_matter(use, order, is_normalised):
    use(order)
    check(dataclasses.replace(AGAIN, is_normalised=is_normalised))


@pytest.mark.parametrize("order", ["early", pytest.param("late", marks=slow), pytest.param("last", marks=slow)])
def test_there_are_no_races(use, order):
    use(order, races=True)
    check(AGAIN)


def is_right(use, edit, orders) -> bool:
    """Whether a broken kernel gives the right numbers in all of these orders, the first of them with a look for races."""
    for i, order in enumerate(orders):
        use(order, edit, i == 0)
        try:
            of_o, of_state = errors(AGAIN)
        except ptx.SimulationError:
            return False
        if not (of_o < TOLERANCE[True] and of_state < STATE_TOLERANCE[True]):
            return False
    return True


# How many of each there are, and those that nothing here notices when they are gone:
# - mbarriers: that the output's vectors are in place, which a product that it waits for has waited for;
# - stores to tensor memory: that of r b E, behind which comes that of E;
# - bulk stores: that at the end, behind one a chunk.
WAITS = {
    MBARRIER_WAIT: (23, (17,)),
    TMEM_LOAD_WAIT: (25, ()),
    TMEM_STORE_WAIT: (5, (3,)),
    COMMIT: (5, ()),
    NAMED_BARRIER: (4, ()),
    BLOCK_BARRIER: (2, ()),
    BULK_STORE_WAIT: (2, (1,)),
}


def test_waits_are_all_counted(use):
    text = ptx.compiled("gdn_norm_whole", ARCH).ptx
    assert count_waits(text, WAITS) == {what: count for what, (count, _) in WAITS.items()}


@pytest.mark.parametrize(("what", "place"), removals(WAITS, quick=()))
def test_every_wait_is_needed(use, what, place):
    assert not is_right(use, without_the_wait(what, place), ptx.ORDERS)


@slow
@pytest.mark.parametrize(
    "edit",
    [
        replace(r"(tcgen05\.ld[^;]*)\];", r"\1+1];", 0),
        replace(r"(tcgen05\.st[^;]*\[%\w+)", r"\1+16", 4),
        change(r"mov\.b32 \t%r\d+, (13\d{7});", lambda descriptor: descriptor ^ 1 << 16),
    ],
    ids=["scores one column on", "a window of an operand sixteen columns on", "B's major in the products"],
)
def test_broken_kernels_are_noticed(use, edit):
    assert not is_right(use, edit, ("late",))


# Which calls are its own


TABLE = dataclasses.replace(hopper.TABLE, sm=SM)


def made(**sizes) -> Schedule | None:
    return schedule(dataclasses.replace(TABLE, **sizes), NUM_SMS)


def test_many_heads_are_its_own_and_few_are_for_kdas_kernels():
    assert made() is None and made(HV=64) is None and made(HV=1, H=1) is None
    assert made(B=4, N=4) == by(128)
    assert made(B=8, N=8, T=2048) == by(148)
    assert made(N=5, HV=32, is_packed=True) is None, "160 heads for 148 SMs: most would wait for twelve"
    assert made(B=8, N=8, options=GdnOptions(return_intermediate_states=True)) is None
    assert made(B=8, N=8, checkpoint_dtype=torch.float32) is None


@pytest.mark.parametrize("norm", [False, True])
def test_a_batch_invariant_call_is_its_own_whatever_its_size(norm):
    options = GdnOptions(use_qk_l2norm_in_kernel=norm, batch_invariant=True)
    for sizes in ({"T": 64}, {"HV": 4, "H": 4}, {"B": 8, "N": 8}, {"N": 5, "T": 40000, "is_packed": True}):
        found = made(**sizes, options=options)
        assert found is not None and found.kernel == "whole"


@pytest.mark.parametrize("sm", BLACKWELL.targets)
def test_the_kernels_of_a_call_are_named(sm):
    def names(**sizes):
        return backend.kernels("gdn_fwd", dataclasses.replace(TABLE, sm=sm, **sizes), NUM_SMS)

    assert names(B=8, N=8) == ("gdn_norm_whole",)
    assert names(B=8, N=8, options=GdnOptions()) == ("gdn_plain_whole",)
    assert names() == ("kda_f16_log_f32_scalar",)
    assert names(B=8, N=8, checkpoint_dtype=torch.bfloat16) == ("kda_f16_log_f32_scalar",)


def test_how_a_call_is_served_is_told(monkeypatch):
    many = dataclasses.replace(TABLE, B=8, N=8)
    assert how(many, NUM_SMS) == "one kernel, 256 heads of sequences by 148 blocks, no workspace"
    monkeypatch.setattr(backend, "_num_sms", lambda problem: NUM_SMS)
    assert backend.how(BLACKWELL, "gdn_fwd", many) == how(many, NUM_SMS)
    assert "segment" in backend.how(BLACKWELL, "gdn_fwd", TABLE)


# The first use on a machine


@pytest.mark.parametrize(("sizes", "kernel"), [({"B": 8, "N": 8}, "gdn_norm_whole"), ({}, "kda_f16_log_f32_scalar")], ids=str)
def test_the_kernel_that_takes_a_call_is_the_one_that_is_checked(monkeypatch, sizes, kernel):
    asked = []
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    monkeypatch.setattr(self_check, "_gpu_with", lambda sm: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: "NVIDIA B200")
    monkeypatch.setattr(self_check, "_objection", lambda name, arch, gpu: asked.append((name, arch)) or "it is off")
    assert choose("gdn_fwd", dataclasses.replace(TABLE, **sizes)).name == "triton"
    assert asked == [(kernel, ARCH)]


@slow
@pytest.mark.parametrize("name", BLACKWELL_GDN)
def test_the_comparison_at_self_check_tells_right_from_wrong(use, monkeypatch, name):
    error = lambda: self_check.worst_error(name, torch.device("cpu"), SM)
    assert error() < 5e-3
    monkeypatch.setattr(gdn_self_check, "CALLS", gdn_self_check.CALLS[:1])
    use(edit=without(TMEM_STORE_WAIT, 1))
    assert not error() < self_check.LIMIT
