# SPDX-License-Identifier: Apache-2.0
"""Blackwell's intra-chunk kernel of KDA, broken on purpose: each wait, commit and barrier removed, windows of tensor memory and
descriptors that are wrong. What it computes is compared with float64 in `tests/ops/cute/test_kda.py`."""

import re
from dataclasses import dataclass

import pytest
import torch

from cula.ops.cute.kda_schedule import split_into
from cula.reference import relative_error
from tests.ops.cute.test_kda import BLACKWELL_SM, NUM_SMS, Case, check, chunk_bounds, interpreted, make  # noqa: F401
from tools import ptx
from tools.ptx.mutate import IS_OVER, MBARRIER_WAIT, replace

NAME = "kda_f16_gate_bf16"
CASE = Case((64, 66), shift=-6.0)  # a whole chunk, another, and one with two tokens
CLOSE = 1e-3
WANTED: list[torch.Tensor] = []  # what the kernel gives, when it has once been asked


@pytest.fixture(scope="module")
def intra():
    """The PTX of the kernel, the first of three."""
    return re.split(r"(?=\.entry\b)", ptx.compiled(NAME, "sm_100a").ptx)[1]


@pytest.mark.slow
def test_two_blocks_share_an_sm(intra):
    """Its registers, its shared memory, of which a block costs 1 KB more than it asks for, and its tensor memory."""
    (facts,) = ptx.compile_all("sm_100a", names=[NAME])
    constants = [int(n) for n in re.findall(r"constant\((\d+) : i64\)", ptx.compiled(NAME, "sm_100a").host)]
    (asked_for,) = [n for n in constants if 80_000 < n < 120_000]  # the recurrence asks for more
    (columns,) = re.findall(r"mov\.b32 \t%r\d+, (\d+);\n\ttcgen05\.alloc", intra)
    assert 2 * 256 * -(-facts.kernels[0].registers // 8) * 8 <= 65536
    assert 2 * (-(-asked_for // 128) * 128 + 1024) <= 228 * 1024
    assert 2 * int(columns) <= 512


def results(monkeypatch):
    """o, the last states, and the bounds of chunks that there are."""
    p, x = make(CASE, "cpu", BLACKWELL_SM)
    o, ht, bounds = chunk_bounds(p, x, split_into(p, CASE.per_segment, NUM_SMS), monkeypatch)
    return o, ht, bounds[[0, 2, 3]]


@pytest.fixture
def is_right(interpreted, monkeypatch):  # noqa: F811
    """Whether a kernel edited so gives in some order of work what the kernel gives."""
    interpreted("late")
    wanted = WANTED or WANTED.extend(results(monkeypatch)) or WANTED

    def compare(order, edit, races=False):
        interpreted(order, edit, races)
        try:
            found = results(monkeypatch)
        except ptx.SimulationError:
            return False
        return all(relative_error(a, b.double()) < CLOSE for a, b in zip(found, wanted))

    return compare


@pytest.mark.parametrize(
    "order", ["products", "loads", *(pytest.param(order, marks=pytest.mark.slow) for order in ("late", "early", "first", "last"))]
)
def test_no_order_of_work_matters_and_nothing_races(interpreted, order):  # noqa: F811
    interpreted(order, races=True)
    check(CASE, "cpu", BLACKWELL_SM)


@pytest.mark.slow
@pytest.mark.parametrize("gate", [
    {"gate": "softplus", "shift": 1.0}, {"gate": "log", "decays": "to -50", "g": torch.float32, "is_normalised": False},
    {"has_scalar_gate": True, "shift": -4.0},
])  # fmt: skip
def test_no_order_of_work_matters_to_other_gates(interpreted, gate):  # noqa: F811
    for order in ptx.ORDERS:
        interpreted(order, races=True)
        check(Case((64, 66), **gate), "cpu", BLACKWELL_SM)


@dataclass(frozen=True)
class Removal:
    """Instructions of which each is removed in turn."""

    pattern: str
    by: str
    orders: tuple[tuple[str, bool], ...]  # for each of them, an order of work that shows it, and whether as a race
    quick: tuple[int, ...] = ()  # that are tried in short runs, too


LATE, RACE, FIRST, PRODUCTS = ("late", False), ("late", True), ("first", False), ("products", False)
COMMIT, TENSOR_LOAD, TENSOR_STORE = (
    r"tcgen05\.commit[^;]*;",
    r"tcgen05\.wait::ld\.sync\.aligned;",
    r"tcgen05\.wait::st\.sync\.aligned;",
)
# All but the wait for k and q that every warp has beside the one before the squares, which shows them what TMA wrote: to the
# simulator those squares show it too.
DOUBLED = 3
REMOVALS = {
    "wait": Removal(MBARRIER_WAIT, IS_OVER, (RACE, RACE, PRODUCTS, LATE, LATE, LATE, LATE), (4,)),
    "wait for loads from tensor memory": Removal(TENSOR_LOAD, "", (LATE, LATE, LATE), (1,)),
    "wait for stores to tensor memory": Removal(TENSOR_STORE, "", (LATE,), (0,)),
    "commit": Removal(COMMIT, "", (LATE, LATE, LATE), (1,)),
    "barrier of all": Removal(r"bar\.sync \t0;", "", (FIRST, RACE, RACE, RACE, RACE, RACE), (4,)),
    "barrier of some": Removal(r"bar\.(?:sync|arrive)\S* \t?%?\w+, \d+;", "", (RACE, RACE)),
}


def removed():
    for what, removal in REMOVALS.items():
        for place in range(len(removal.orders)):
            if (what, place) != ("wait", DOUBLED):
                yield pytest.param(what, place, marks=[] if place in removal.quick else [pytest.mark.slow])


@pytest.mark.parametrize(("what", "place"), [*removed()])
def test_it_needs_all_that_it_waits_for(is_right, what, place):
    removal = REMOVALS[what]
    order, races = removal.orders[place]
    assert not is_right(order, replace(removal.pattern, removal.by, place), races)


@pytest.mark.parametrize("what", REMOVALS)
def test_all_of_them_are_counted(intra, what):
    assert len(re.findall(REMOVALS[what].pattern, intra)) == len(REMOVALS[what].orders)


def flipped(bit, first, last):
    """A bit of the instruction descriptors of products first .. last - 1."""
    return replace(
        r"mov\.b32 \t(%r\d+), (\d+);\n\ttcgen05\.mma",
        lambda m: f"mov.b32 \t{m[1]}, {int(m[2]) ^ 1 << bit};\n\ttcgen05.mma",
        *range(first, last),
    )


# Products, in their order: squares of k and q, scores, squares of kr and kb; eight instructions each.
WRONG = {
    "scores of eight columns less": flipped(17, 16, 24),
    "scores of bf16": flipped(7, 16, 24),
    "keys that lie the other way": flipped(16, 16, 24),
    "squares of fp16": flipped(10, 0, 16),
    "squares of kr that lie the other way": flipped(15, 24, 32),
    "rows of scores a column on": replace(r"(tcgen05\.st\.[^;]*?)\],", r"\1+1],", 0),
    "queries in the place of keys": replace(r"(add\.s32 \t%r\d+, %r\d+), 1048576;", r"\1, 0;", 0),
    "squares a column on": replace(r"(tcgen05\.ld[^;]*)\];", r"\1+1];", 0),
    "scores a column on": replace(r"(tcgen05\.ld[^;]*)\];", r"\1+1];", 1),
    "sizes a column on": replace(r"(tcgen05\.ld[^;]*)\];", r"\1+1];", 4),
    "an operand's next block of channels": replace(
        r"(add\.s64 \t%rd\d+, %rd\d+), 4611756662049538050;", r"\1, 4611756662049538052;", 2
    ),
}
QUICK = ("queries in the place of keys",)


@pytest.mark.parametrize("what", [pytest.param(what, marks=[] if what in QUICK else [pytest.mark.slow]) for what in WRONG])
def test_wrong_products_and_windows_are_noticed(is_right, what):
    assert not is_right("late", WRONG[what])
