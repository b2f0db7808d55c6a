# SPDX-License-Identifier: Apache-2.0
"""Lightning prefill on Blackwell: values of every kernel and schedule against float64, and that each of its waits is needed.

On a Blackwell GPU the same bodies run there (`pytest tests/ops/cute/sm100`); elsewhere the kernels' code is interpreted. Outputs
start as NaN, so that what is not written is noticed.
"""

import pytest
import torch

from cula import reference
from cula.core.kernels import Pool
from cula.lightning.problem import LightningInputs, LightningOptions
from cula.ops.cute import lightning, lightning_self_check
from cula.ops.cute.lightning_schedule import make_schedule
from cula.ops.cute.toolchain import build, loader, self_check
from cula.reference import relative_error
from tests.ops.cute import test_lightning as hopper
from tests.ops.cute.test_compile import accesses_before_waiting, complaints
from tests.support.calls import LightningCall
from tests.support.cute import COMMIT, TMEM_LOAD_WAIT, TMEM_STORE_WAIT, count_waits, needs_dsl, removals, without_the_wait
from tests.support.variants import BLACKWELL_LIGHTNING
from tools import ptx
from tools.ptx.mutate import BLOCK_BARRIER, BULK_STORE_WAIT, MBARRIER_WAIT, NAMED_BARRIER, change, replace, without

SM, ARCH = (10, 0), "sm_100a"
# Rounding o alone is 1.7e-3, P and S in bf16 are the rest; only k, weighed, is rounded on its way into the state.
TOLERANCE, STATE_TOLERANCE = 3.5e-3, 3e-3
slow = pytest.mark.slow
pytestmark = pytest.mark.skipif(build.missing() is not None and not torch.cuda.is_available(), reason=str(build.missing()))


def check_lightning(tensors):
    return hopper.check_lightning(LightningInputs(**tensors), LightningOptions(output_final_state=True), SM)


@pytest.fixture
def use(monkeypatch):
    """How launches run in the interpreter, a function of (order, edit, races)."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return ptx.interpret(monkeypatch, lightning)


@pytest.fixture
def device(request):
    """A Blackwell GPU where there is one; otherwise the CPU, with the kernels' code interpreted."""
    if not torch.cuda.is_available():
        request.getfixturevalue("use")
        return torch.device("cpu")
    if torch.cuda.get_device_capability() not in ((10, 0), (10, 3)) or loader.missing(ARCH):
        pytest.skip(loader.missing(ARCH) or "needs a Blackwell GPU")
    return torch.device("cuda")


def errors(call: LightningCall, per_seq: int = 1, num_blocks: int = 3, device="cpu") -> tuple[float, float]:
    """Of outputs and last states; a kernel is that of the call's head dim."""
    tensors = call.tensors(device)
    p, x = check_lightning(tensors)
    ht, o = torch.full((p.N, p.HV, p.V, p.K), torch.nan, device=device), torch.full_like(x.v, torch.nan)
    assert lightning.run(p, x, make_schedule(p, f"d{p.V}", per_seq, num_blocks), ht, o) is o
    want_o, want_ht = reference.lightning(**tensors)
    return relative_error(o, want_o), relative_error(ht, want_ht)


def check(*call, **schedule) -> None:
    of_o, of_state = errors(*call, **schedule)
    assert of_o < TOLERANCE
    assert of_state < STATE_TOLERANCE


def of(D: int, **call) -> LightningCall:
    return LightningCall(**{"H": 1, "HV": 2, **call}, K=D, V=D, dtype=torch.bfloat16)


# What is compiled


@pytest.mark.slow
@needs_dsl
def test_kernels_compile_and_fit():
    """No spills, shared and tensor memory, the instructions that they declare."""
    found = ptx.compile_all(ARCH, names=BLACKWELL_LIGHTNING)
    assert {facts.name: said for facts in found if (said := complaints(facts))} == {}
    assert {facts.tmem_columns for facts in found} == {512}


@needs_dsl
@pytest.mark.parametrize("name", BLACKWELL_LIGHTNING)
def test_kernels_wait_before_they_touch_memory(name):
    assert accesses_before_waiting(ptx.compiled(name, ARCH).ptx) == []


@slow
@needs_dsl
def test_one_code_serves_both_blackwells():
    one, other = (ptx.compiled("lightning_d128", arch).ptx for arch in (ARCH, "sm_103a"))
    assert one.replace(".target sm_100a", ".target sm_103a") == other


# Values

CASES = {
    "whole": dict(T=300, B=2),
    "one token": dict(T=1),
    "whole chunks": dict(T=384),
    "packed": dict(lens=(70, 0, 5, 256, 130)),
    "no state": dict(lens=(70, 5, 130), initial_state=False),
    "grouped": dict(lens=(150, 40), H=2, HV=6),
    "strong decay": dict(T=500, decay=20.0, per_seq=2),
    "no decay": dict(T=500, decay=0.0, per_seq=3),
    "split": dict(T=700, B=2, per_seq=4),
    "packed, split": dict(lens=(900, 0, 5, 128, 64, 33), per_seq=2),
    "packed, split, no state": dict(lens=(700, 5, 128), initial_state=False, per_seq=3),
}
QUICK = {(128, "packed"), (64, "split")}


@pytest.mark.parametrize(
    ("D", "name"),
    [pytest.param(D, name, marks=[] if (D, name) in QUICK else [slow]) for D in (128, 64) for name in CASES],
)
def test_every_kernel_and_schedule_matches_the_recurrence(device, D, name):
    case = dict(CASES[name])
    check(of(D, **{k: case[k] for k in case if k != "per_seq"}), per_seq=case.get("per_seq", 1), device=device)


@pytest.mark.parametrize("D", [pytest.param(128, marks=slow), 64])
def test_another_sequences_nan_stays_there(device, D):
    """Last chunks read on into the next sequence; nothing of it may come through, not even times zero."""
    tensors = of(D, lens=(70, 40, 150), HV=1).tensors(device)
    want_o, want_state = reference.lightning(**tensors)
    for name in ("q", "k", "v"):
        tensors[name][:, 70:110] = float("nan")
    p, x = check_lightning(tensors)
    state = torch.empty(3, 1, D, D, device=device)
    o = lightning.run(p, x, make_schedule(p, f"d{D}", 1, 2), state)
    healthy = [*range(70), *range(110, 260)]
    assert relative_error(o[:, healthy], want_o[:, healthy]) < TOLERANCE
    assert relative_error(state[[0, 2]], want_state[[0, 2]]) < STATE_TOLERANCE


def pools():
    for D in (128, 64):
        for per_seq in (1, 2):
            for dtype, index in ((torch.float32, torch.int64), (torch.bfloat16, torch.int32), (torch.float16, torch.int64)):
                is_quick = (D, per_seq, dtype) == (128, 1, torch.bfloat16)
                yield pytest.param(D, per_seq, dtype, index, marks=[] if is_quick else [slow])


@pytest.mark.parametrize(("D", "per_seq", "dtype", "index"), [*pools()])
def test_a_pool_is_updated_in_place_and_nothing_else_is_touched(device, D, per_seq, dtype, index):
    tensors = of(D, lens=(300, 64, 0, 5, 70), initial_state=False).tensors(device)
    p, x = check_lightning(tensors)
    least = int(dtype == torch.float16)  # where index 0 is null
    slots = torch.tensor([6, 0, 2, 1, 4] if least else [6, -1, 2, 0, 4], device=device).to(index)
    fresh = torch.tensor([True, True, True, True, False], device=device)
    pool = torch.randn(8, 2, D, D, device=device).to(dtype)
    unlisted = [slot for slot in range(8) if slot < least or slot not in slots.tolist()]
    pool[unlisted] = float("nan")
    before = pool.clone()
    o = lightning.run(p, x, make_schedule(p, f"d{D}", per_seq, 3), None, None, Pool(pool, slots, fresh, least == 1))
    live = slots >= least
    first = torch.where((live & fresh)[:, None, None, None], before[slots.clamp(min=0).long()].float(), 0)
    want_o, want_state = reference.lightning(**{**tensors, "initial_state": first})
    assert relative_error(o, want_o) < TOLERANCE
    assert relative_error(pool[slots[live].long()], want_state[live]) < 4e-3  # rounded to what a pool holds
    assert torch.equal(pool[unlisted].view(torch.uint8), before[unlisted].view(torch.uint8))


# Orders, races, and kernels broken on purpose. All that there is to use again is: fourteen chunks of a block.

TWICE = dict(lens=(520, 130), decay=0.01)


@slow
@pytest.mark.parametrize("D", [128, 64])
@pytest.mark.parametrize("order", ptx.ORDERS)
def test_order_of_asynchronous_work_does_not_matter(use, D, order):
    use(order)
    check(of(D, **TWICE), num_blocks=1)
    check(of(D, **TWICE), per_seq=2, num_blocks=1)


@pytest.mark.parametrize("D", [128, pytest.param(64, marks=slow)])
def test_there_are_no_races(use, D):
    use("late", races=True)
    check(of(D, **TWICE), per_seq=2, num_blocks=1)


def is_right(use, edit, orders, per_seq: int = 1) -> bool:
    """Whether a broken kernel gives the right numbers in all of these orders, the first of them with a look for races."""
    for i, order in enumerate(orders):
        use(order, edit, i == 0)
        try:
            of_o, of_state = errors(of(128, **TWICE), per_seq=per_seq, num_blocks=1)
        except ptx.SimulationError:
            return False
        if not (of_o < TOLERANCE and of_state < STATE_TOLERANCE):
            return False
    return True


# How many of each there are in the recurrence, and those that nothing here notices when they are gone:
# - mbarriers: that P may be written over (products of one thread run in order here), and that k has come (P is made of it);
# - bulk stores: that at the end, behind one a chunk.
WAITS = {
    MBARRIER_WAIT: (13, (2, 8)),
    TMEM_LOAD_WAIT: (13, ()),
    TMEM_STORE_WAIT: (3, ()),
    COMMIT: (3, ()),
    NAMED_BARRIER: (1, ()),
    BLOCK_BARRIER: (2, ()),
    BULK_STORE_WAIT: (2, (1,)),
}


def test_waits_are_all_counted(use):
    text = ptx.compiled("lightning_d128", ARCH).ptx
    assert count_waits(text, WAITS) == {what: count for what, (count, _) in WAITS.items()}


@pytest.mark.parametrize(("what", "place"), removals(WAITS, quick={(MBARRIER_WAIT, 9)}))
def test_every_wait_is_needed(use, what, place):
    assert not is_right(use, without_the_wait(what, place), ptx.ORDERS)


@slow
@pytest.mark.parametrize(
    "edit",
    [
        replace(r"(tcgen05\.ld[^;]*)\];", r"\1+1];", 0),
        change(r"mov\.b32 \t%r\d+, (136414352);", lambda descriptor: descriptor ^ 1 << 15),
        replace(r"\b461\d{16};", lambda m: f"{int(m[0][:-1]) ^ 6 << 61};"),
    ],
    ids=["a window one column on", "A's major in the products for S", "the swizzle in descriptors"],
)
def test_broken_kernels_are_noticed(use, edit):
    assert not is_right(use, edit, ("late",))


# The first use on a machine


@slow
@pytest.mark.parametrize("D", [128, 64])
def test_the_comparison_at_self_check_tells_right_from_wrong(use, monkeypatch, D):
    error = lambda: self_check.worst_error(f"lightning_d{D}", torch.device("cpu"), SM)
    assert error() < 5e-3
    monkeypatch.setattr(lightning_self_check, "CALLS", lightning_self_check.CALLS[:1])
    use(edit=without(TMEM_STORE_WAIT, 1))
    assert not error() < self_check.LIMIT
