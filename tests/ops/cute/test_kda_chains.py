# SPDX-License-Identifier: Apache-2.0
"""Where chained segments of KDA's prefill begin their chains: norms of transitions, what they say is forgotten, broken kernels.

A first state of NaN shows who was told of it.
"""

import dataclasses
import itertools
import math

import pytest
import torch

from cula import reference
from cula.kda.problem import KdaInputs, KdaOptions, KdaProblem, check_kda
from cula.ops.cute import kda, kda_abi
from cula.ops.cute.kda_schedule import Schedule, split_into
from cula.ops.cute.toolchain import build
from cula.reference import relative_error
from tests.ops.cute import test_kda
from tests.ops.cute.test_kda import (
    BLACKWELL_SM,
    HOPPER_SM,
    NUM_SMS,
    STATE_TOLERANCE,
    TOLERANCE,
    D,
    exact_transition,
    section_of_workspace,
)
from tests.support.slow import slow_but
from tools.ptx import SimulationError, simulate
from tools.ptx.mutate import replace, without

interpreted, kernels = test_kda.interpreted, test_kda.kernels
of_each = pytest.mark.parametrize("sm", [HOPPER_SM, pytest.param(BLACKWELL_SM, marks=pytest.mark.slow)], ids=["sm90", "sm100"])
FORGOTTEN, ROUNDING = -24.0, 0.05

# A chunk of the first speed forgets 11 bits. The bound of four chunks does not see enough of that for a warm-up, and the norm of
# a segment of three does; that of two sees 17.
QUICK, SLOW = -0.12, -0.003


def call(
    speeds: list[list[float]],
    L: int,
    h0: torch.Tensor | None = None,
    first_size: float = 1.0,
    is_normalised: bool = True,
    device: str = "cpu",
    sm: tuple[int, int] = HOPPER_SM,
) -> tuple[KdaProblem, KdaInputs]:
    """With gates of one speed in each segment of L chunks, for each head. The last chunk is not full. Values of the first segment
    are `first_size` times as large as others. Keys are normalised in the kernel, or before."""
    random = torch.Generator().manual_seed(3)
    H, T = len(speeds), 64 * L * len(speeds[0]) - 10
    q, k, v = (torch.randn(T, H, D, generator=random) for _ in range(3))
    v[: 64 * L] *= first_size
    if not is_normalised:
        q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    g = torch.tensor(speeds).repeat_interleave(64 * L, 1)[:, :T].T[..., None].expand(T, H, D)
    tensors = (
        *(t[None].bfloat16() for t in (q, k, v)),
        g[None].contiguous(),
        torch.rand(1, T, H, generator=random),
        None,
        None,
        h0,
    )
    options = KdaOptions(use_qk_l2norm_in_kernel=is_normalised, output_final_state=True)
    p, x = check_kda(KdaInputs(*(None if t is None else t.to(device) for t in tensors), None), options)
    return dataclasses.replace(p, sm=p.sm or sm), x


def norms(x: KdaInputs, L: int) -> torch.Tensor:
    """log2 of the Frobenius norm of each segment's M, [segments, H], in float64."""
    parts = [t[0].split(64 * L) for t in (x.g, x.k, x.beta)]
    of_head = lambda h, *segment: exact_transition(*(t[:, h] for t in segment)).norm().log2()
    return torch.stack([torch.stack([of_head(h, *s) for h in range(x.g.shape[2])]) for s in zip(*parts)])


def begin_of(norms: list[float], has_h0: bool) -> int:
    """The segment whose B a chain over these begins with, or -1."""
    total = 0.0
    for j in range(len(norms) - 1, -1 if has_h0 else 0, -1):
        total += norms[j] + ROUNDING
        assert not abs(total - FORGOTTEN) < 0.1, "too close to tell"
        if total < FORGOTTEN:
            return j
    return -1 if has_h0 else 0


def run(p: KdaProblem, x: KdaInputs, made: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
    o, ht = torch.full_like(x.v, math.nan), torch.full((p.N, p.HV, D, D), math.nan, device=x.v.device)
    kda.run(p, x, made, ht, o)
    return o, ht


def words_of(p: KdaProblem, x: KdaInputs, made: Schedule, monkeypatch) -> torch.Tensor:
    """What `done` holds behind a call, [segments, HV]."""
    _, _, work = section_of_workspace("done", p, x, made, monkeypatch)
    return work[: 4 * made.segments * p.HV].view(torch.int32).view(made.segments, p.HV)


# What is forgotten, by the norms


def test_products_of_frobenius_norms_are_bounds():
    """Of what transitions in a row leave of a state, each row of it."""
    p, x = call([[QUICK, SLOW, -0.03, QUICK], [-5.0, 0.0, 0.0, -0.03]], 1)
    of_segments = norms(x, 1)
    state = torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) * torch.logspace(-6, 6, D)
    for h in range(p.H):
        left, total = state, 0.0
        for g, k, b, norm in zip(*(t[0, :, h].split(64) for t in (x.g, x.k, x.beta)), of_segments[:, h]):
            left, total = exact_transition(g, k, b) @ left, total + norm.item()
            assert (left.norm(dim=0) <= 2.0**total * state.norm(dim=0)).all()


CHAINS = [
    [],
    [0.0],
    [-30.0],
    [-30.0, 1.0],
    [-30.0, 10.0],
    [-23.9, 0.0],
    [-8.0] * 5,
    [3.5] * 40,
    [-30.0] + [0.5] * 11,
    [-2.0] * 100,
    [-2.0] * 9 + [3.0] * 60,
    [-math.inf] + [3.0] * 35,
    [-math.inf, math.inf, -3.0],
    [-30.0, math.nan, -23.0],
    [-30.0, math.nan, -24.5],
    [math.nan, -25.0, 0.0],
    [-40.0, math.inf],
    [-math.inf] * 2,
]


@pytest.mark.parametrize("has_h0", slow_but([False, True], [True]))
@pytest.mark.parametrize("waits", [False, True], ids=["made before", "waits"])
def test_a_chain_begins_where_all_before_is_forgotten(waits, has_h0):
    """Chains longer than a warp; norms that are nothing, infinite and not numbers; a first M where there is a first state."""
    if build.missing() is not None:
        pytest.skip(str(build.missing()))
    longest = max(map(len, CHAINS))
    words = torch.full((longest, len(CHAINS)), -1, dtype=torch.int32)
    for n, chain in enumerate(CHAINS):
        squares = torch.tensor([4.0**norm if norm < 60 else norm for norm in chain])
        of_chain = (squares.view(torch.int32) & ~kda_abi.COUNT) + 2
        words[: len(chain), n] = of_chain
        if chain and not has_h0:
            words[0, n] = 1
    lengths, got = torch.tensor([len(c) for c in CHAINS], dtype=torch.int32), torch.full((len(CHAINS),), -7, dtype=torch.int32)
    name = "begin_of_chain_waits" if waits else "begin_of_chain"
    simulate(name, words, lengths, got, int(has_h0), modules=("tests.support.kernels.chains",))
    assert got.tolist() == [begin_of(chain, has_h0) for chain in CHAINS]


@pytest.mark.slow
@of_each
def test_norms_are_those_of_transitions(interpreted, monkeypatch, sm):
    """With M, and only with it, as the word of a segment says; helpers make some of them."""
    speeds, L = [[QUICK, SLOW, -0.02, QUICK, SLOW], [SLOW, QUICK, SLOW, 0.0, QUICK]], 2
    for has_h0, num_sms in ((True, 8), (False, NUM_SMS)):
        p, x = call(speeds, L, torch.ones(1, 2, D, D) if has_h0 else None, sm=sm)
        words = words_of(p, x, split_into(p, L, num_sms), monkeypatch)
        made = slice(0 if has_h0 else 1, 4)  # no M of the last
        squares = (words & ~kda_abi.COUNT).view(torch.float32)[made]
        more = squares.log2() / 2 - norms(x, L)[made]
        assert more.min() > -2e-3
        assert more.max() < 0.02  # fp16 rounds what is below 2^-14 coarsely
        if sm == HOPPER_SM:
            assert (words & kda_abi.COUNT).tolist() == [[2 if has_h0 else 1] * 2, *[[2, 2]] * 3, [0, 0]]


# Which segments know of a first state

SPEEDS = {
    "a segment forgets": ([[QUICK] * 4, [SLOW] * 4], 3),
    "two segments forget": ([[QUICK] * 6, [SLOW, SLOW, QUICK, QUICK, SLOW, SLOW]], 2),
}


def who_should_know(x: KdaInputs, L: int) -> list[list[bool]]:
    """Which segments, of each head, a first state reaches: those that walk from the start, and those that chain back to it."""
    is_near = lambda i: L * i <= 4
    return [[is_near(i) or begin_of(of_head[:i], True) == -1 for i in range(len(of_head))] for of_head in norms(x, L).T.tolist()]


def who_knows(kind: str, sm=HOPPER_SM, is_normalised: bool = True) -> tuple[list[list[bool]], list[list[bool]]]:
    """Who does, and who should."""
    speeds, L = SPEEDS[kind]
    p, x = call(speeds, L, torch.full((1, 2, D, D), math.nan), is_normalised=is_normalised, sm=sm)
    o, ht = run(p, x, split_into(p, L, NUM_SMS))
    knows = [[part.isnan().any().item() for part in o[0, :, h].float().split(64 * L)] for h in range(2)]
    assert ht[0].isnan().flatten(1).any(1).tolist() == [of_head[-1] for of_head in knows]
    return knows, who_should_know(x, L)


@pytest.mark.slow
@of_each
@pytest.mark.parametrize("kind", SPEEDS)
def test_chains_reach_back_as_far_as_norms_say(interpreted, kind, sm):
    """For each head as far as its own say."""
    knows, should = who_knows(kind, sm)
    assert knows == should
    assert not all(should[0]) and any(should[1])


@pytest.mark.slow
@pytest.mark.parametrize("sm", [HOPPER_SM, BLACKWELL_SM], ids=["sm90", "sm100"])
def test_chains_of_bf16_operands_reach_back_as_far(interpreted, sm):
    knows, should = who_knows("two segments forget", sm, is_normalised=False)
    assert knows == should


@of_each
@pytest.mark.parametrize("kind", [pytest.param("a segment forgets", marks=pytest.mark.slow), "two segments forget"])
def test_chains_that_begin_late_are_right(interpreted, kind, sm):
    """With both kinds of heads, an initial state that is large, and without one."""
    speeds, L = SPEEDS[kind]
    for h0 in (None, 100.0 * torch.randn(1, 2, D, D, generator=torch.Generator().manual_seed(5))):
        p, x = call(speeds, L, h0, sm=sm)
        assert not all(who_should_know(x, L)[0])
        want, want_ht = reference.kda(*x[:5], initial_state=h0, use_qk_l2norm_in_kernel=True)
        o, ht = run(p, x, split_into(p, L, NUM_SMS))
        for h, segment in itertools.product(range(2), range(len(speeds[0]))):
            tokens = slice(64 * L * segment, 64 * L * (segment + 1))
            assert relative_error(o[:, tokens, h], want[:, tokens, h]) < TOLERANCE["f16"]
        assert relative_error(ht, want_ht) < STATE_TOLERANCE["f16"]


@of_each
def test_what_chains_forget_does_not_matter(interpreted, sm):
    """A first state, and what the first segment writes, are 2^12 times as large as what follows, and only just forgotten. Outputs
    and states of the last segment, whose chain begins later, are as right as those of a whole walk."""
    check_that_what_chains_forget_does_not_matter("cpu", sm)


def check_that_what_chains_forget_does_not_matter(device: str, sm: tuple[int, int] = HOPPER_SM) -> None:
    speeds, L = [[SLOW, -0.109, SLOW, -0.02]], 3
    h0 = 4096.0 * torch.randn(1, 1, D, D, generator=torch.Generator().manual_seed(5))
    p, x = call(speeds, L, h0, first_size=4096.0, device=device, sm=sm)
    assert -26.0 < norms(x, L)[1:3].sum() < -24.5
    want, want_ht = reference.kda(*x[:5], initial_state=x.initial_state, use_qk_l2norm_in_kernel=True)
    (o, ht), (whole, whole_ht) = (run(p, x, split_into(p, chunks, NUM_SMS)) for chunks in (L, 100))
    late = slice(64 * 3 * L, None)
    assert want[:, late].norm() < 2.0**-9 * want[:, : 64 * L].norm()
    assert relative_error(o[:, late], want[:, late]) < 2e-3
    assert relative_error(ht, want_ht) < 7e-4
    assert relative_error(o[:, late], want[:, late]) < 1.1 * relative_error(whole[:, late], want[:, late])
    assert relative_error(ht, want_ht) < 1.1 * relative_error(whole_ht, want_ht)


@pytest.mark.slow
def test_gates_that_forget_nothing_give_the_bits_of_whole_chains(interpreted):
    results = []
    for edit in (None, BROKEN["nothing is forgotten"]):
        interpreted(edit=edit)
        p, x = call(*SPEEDS["a segment forgets"])
        results.append(run(p, x, split_into(p, 3, NUM_SMS)))
    (o, ht), (whole_o, whole_ht) = results
    assert torch.equal(o[:, :, 1], whole_o[:, :, 1]) and torch.equal(ht[:, 1], whole_ht[:, 1])


# Waits, races, kernels broken on purpose


@pytest.mark.slow
@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize("kind", SPEEDS)
def test_chains_that_begin_late_have_no_races(interpreted, kind, order):
    interpreted(order, races=True)
    knows, should = who_knows(kind)
    assert knows == should


THRESHOLD, NORM = "0fC1C00000", r"and\.b32 \t(%r\d+), %r\d+, -4;"  # -24, of chains behind those of warm-ups; made, then read
BROKEN = {
    "nothing is forgotten": replace(THRESHOLD, "0fFF800000", -1),
    "all is forgotten": replace(THRESHOLD, "0f42C80000", -1),
    "norms are nothing": replace(NORM, r"mov.b32 \t\1, 0;", -1),
    "norms are not kept": replace(NORM, r"mov.b32 \t\1, 0;", 0),
    "norms are never small": replace(NORM, r"mov.b32 \t\1, 0x3F800000;", 0),
}


@pytest.mark.parametrize("what", slow_but(BROKEN, ["norms are not kept"]))
def test_chains_that_begin_elsewhere_are_noticed(interpreted, what):
    interpreted(edit=BROKEN[what])
    knows, should = who_knows("two segments forget")
    assert knows != should


@pytest.mark.parametrize("what", ["all is forgotten", "norms are nothing"])
def test_chains_that_begin_too_late_are_wrong(interpreted, what):
    interpreted(edit=BROKEN[what])
    p, x = call([[SLOW] * 6], 1)
    want, _ = reference.kda(*x[:5], use_qk_l2norm_in_kernel=True)
    o, _ = run(p, x, split_into(p, 1, NUM_SMS))
    assert relative_error(o, want) > 10 * TOLERANCE["f16"]


@of_each
def test_norms_are_added_up_behind_a_barrier(interpreted, sm):
    interpreted("late", without(r"bar\.sync \t3, 256;" if sm == HOPPER_SM else r"bar\.sync \t2, 128;", -1), races=True)
    p, x = call([[SLOW] * 6], 1, sm=sm)
    with pytest.raises(SimulationError, match="a race: "):
        run(p, x, split_into(p, 1, 8))


# On a GPU


@pytest.mark.gpu
def test_what_chains_forget_does_not_matter_on_a_gpu(kernels):
    check_that_what_chains_forget_does_not_matter("cuda")
