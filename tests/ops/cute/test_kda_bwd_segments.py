# SPDX-License-Identifier: Apache-2.0
"""The KDA backward where sequences are cut into segments, and what is made of whole ones: numbers beside float64, how segments
get what they begin with, schedules, kernels broken on purpose."""

import contextlib
import dataclasses
import math

import pytest
import torch

from cula import reference
from cula.core.constants import CHUNK
from cula.core.dispatch import choose
from cula.gdn.problem import GdnOptions, GdnProblem
from cula.kda.problem import KdaInputs, KdaProblem
from cula.ops.cute import kda_bwd
from cula.ops.cute.kda_bwd_schedule import Schedule, schedule, split_into, whole_sequences
from cula.ops.cute.toolchain import loader
from cula.reference import relative_error
from tests.ops.cute.test_kda import Case, kernels, make  # noqa: F401  (a fixture)
from tests.ops.cute.test_kda_bwd import (  # noqa: F401
    NUM_SMS,
    TOLERANCE,
    TRAINING,
    error_of,
    gradients_of_outputs,
    interpreted,
    of_kernel,
    wanted,
)
from tests.ops.cute.test_kda_dispatch import HOPPER
from tools import ptx
from tools.ptx.mutate import BLOCK_BARRIER, WGMMA_WAIT, without, without_wait

# (A call, the size of the gradients that come in, chunks of a segment). A boundary that is no further than four chunks from an
# end warms up from there, whatever the gate, so that chained sequences have more.
CHAINED = Case((390,), is_packed=False, shift=-8.0), 1.0, 2
WARM = Case((390,), is_packed=False), 1.0, 2
MORE = [
    (Case((460, 0, 70, 130), shift=-8.0, are_keys_alike=True), 1e4, 1),
    (Case((330,), shift=-8.0, size=1e6), 1e-7, 1),
    (Case((330,), gate="log", decays="zero", g=torch.float32, has_state=False), 1e-5, 1),
    (Case((520,), HV=2, slow=(100, 400)), 1.0, 2),
    (Case((450, 600), gate="softplus", shift=-4.0, has_scalar_gate=True, HV=2), 1.0, 3),
]
ON_A_GPU = [
    (Case((6000,), is_packed=False, H=2, HV=4, shift=-8.0), 1.0, 20),
    (Case((6000,), is_packed=False, H=2, HV=4), 1.0, 20),
    (Case((4000, 3, 900, 2000), H=2, HV=2, shift=-6.0), 1.0, 9),
    (Case((4000,), H=4, HV=4, gate="log", decays="to -50"), 1.0, 8),
]


def is_right(case: Case, size: float, per_segment: int, has_transitions: bool = True, device: str = "cpu") -> bool:
    p, x = make(case, device)
    do, dht = gradients_of_outputs(p, size, device)
    got = kda_bwd.run(p, x, do, dht, split_into(p, per_segment, has_transitions))
    want = wanted(p, x, do, dht)
    errors = {n: error_of(n, a, b) for n, a, b in zip(got._fields, got, want) if a is not None}
    print(errors)
    return all(e < TOLERANCE[name] for name, e in errors.items() if (want._asdict()[name] != 0).any())


# What segments begin with


@pytest.mark.parametrize(
    ("case", "size", "per_segment"), [CHAINED, WARM, *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE)], ids=str
)
def test_interpreted(interpreted, case, size, per_segment):  # noqa: F811
    assert is_right(case, size, per_segment)


def reached_by(case: Case, per_segment: int, has_transitions: bool) -> tuple[int, int]:
    """(Chunks whose dq knows the first state, chunks whose dv knows the gradient of the last one)."""
    p, x = make(case, "cpu")
    do, dht = gradients_of_outputs(p, 1.0, "cpu")
    nan = x._replace(initial_state=torch.full_like(x.initial_state, torch.nan))
    made_for = split_into(p, per_segment, has_transitions)
    grads = kda_bwd.run(p, nan, do, dht, made_for), kda_bwd.run(p, x, do, torch.full_like(dht, torch.nan), made_for)
    chunks = [t.isnan().flatten(2).any(2)[0].split(CHUNK) for t in (grads[0].dq, grads[1].dv)]
    return tuple(sum(bool(c.any()) for c in of_one) for of_one in chunks)


@pytest.mark.slow
def test_segments_that_warm_up_are_told_nothing_and_chained_ones_all(interpreted):  # noqa: F811
    """NaN, which nothing forgets, shows what a walk has begun with: seven chunks in segments of two."""
    assert reached_by(WARM[0], 2, True) == (2, 3)  # behind the last boundary there is one chunk, over which one may warm up
    assert reached_by(CHAINED[0], 2, True) == (7, 7)
    assert reached_by(CHAINED[0], 2, False) == (7, 7)


@pytest.mark.slow
def test_sequences_that_do_not_forget_are_not_cut_where_nobody_makes_transitions(interpreted):  # noqa: F811
    """Bit by bit."""
    case, size, per_segment = CHAINED
    p, x = make(case, "cpu")
    do, dht = gradients_of_outputs(p, size, "cpu")
    cut, whole, chained = (
        kda_bwd.run(p, x, do, dht, made_for)
        for made_for in (
            split_into(p, per_segment, False),
            split_into(p, 100, False),
            split_into(p, per_segment, True),
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(cut, whole))
    assert not torch.equal(chained.d_initial_state, whole.d_initial_state)


# What is made of whole sequences


def last_states(p: KdaProblem, x: KdaInputs, h0: torch.Tensor) -> torch.Tensor:
    """In float64, by the definition."""
    x = x._replace(**{n: None if t is None else t.double() for n, t in zip(x._fields[:-1], x[:-1])})
    decays = x.g
    if p.options.use_gate_in_kernel:
        parameters = [None if t is None else t.flatten() for t in (x.A_log, x.dt_bias)]
        if not p.has_scalar_gate:
            parameters[0] = parameters[0].repeat_interleave(p.K)
        decays = reference.kda_gate(x.g.flatten(2), *parameters, p.options.lower_bound).view_as(x.g)
    switches = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": p.options.use_beta_sigmoid_in_kernel}
    return reference.kda(*x[:3], decays, x.beta, initial_state=h0.double(), cu_seqlens=x.cu_seqlens, **switches)[1]


def errors_of_whole(case: Case, size: float, per_segment: int, device: str = "cpu") -> dict[str, float]:
    """Of M, B and gradients of first states, with and without one that comes in. What an M leaves of a state below 2^-24 is
    forgotten, and not judged beside itself."""
    p, x = make(case, device)
    do, dht = gradients_of_outputs(p, size, device)
    made_for = split_into(p, per_segment, True)
    M, B = kda_bwd.transition(p, x, made_for)
    ones = torch.eye(p.K, device=device).expand(p.N, p.HV, p.K, p.K)
    want_B = last_states(p, x, torch.zeros_like(ones))
    want, want_M = {"B": (B, want_B)}, last_states(p, x, ones) - want_B
    of_both = x if x.initial_state is not None else x._replace(initial_state=torch.zeros_like(ones))
    for name, given in (("C", None), ("dh0", dht)):
        want[name] = kda_bwd.state_grad(p, x, do, given, made_for), wanted(p, of_both, do, given).d_initial_state
    of_M = float((M.double() - want_M).norm() / max(want_M.norm(), 2**-24 * ones.norm()))
    return {"M": of_M} | {name: relative_error(a, b) for name, (a, b) in want.items()}


def are_whole_right(*case) -> bool:
    errors = errors_of_whole(*case)
    print(errors)
    return all(e < TOLERANCE["d_initial_state"] for e in errors.values())


WHOLE = [
    (Case((390,), is_packed=False, shift=-8.0), 1.0, 2),
    (Case((100,), HV=2, shift=-6.0), 1e-5, 100),
    (Case((330, 0, 70), shift=-8.0, are_keys_alike=True), 1e4, 1),
    (Case((450, 60), gate="softplus", shift=-14.0, has_scalar_gate=True, HV=2, has_state=False), 1.0, 3),
    (Case((130, 130), is_packed=False, gate="log", decays="zero", g=torch.float32, size=1e4, has_raw_beta=False), 1e-4, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_of_whole_sequences(interpreted, case):  # noqa: F811
    assert are_whole_right(*case)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["early", "first", "last"])
def test_order_does_not_matter_for_whole_sequences(interpreted, order):  # noqa: F811
    interpreted(order, races=True)
    assert are_whole_right(Case((330,), is_packed=False, shift=-8.0), 1.0, 1)


@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_context_parallelism_finds_them(monkeypatch, family):
    """A scan's backward is a short pass for C and one backward, of one backend."""
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    problem = TRAINING
    if family == "gdn":
        of_gdn = {name: value for name, value in vars(TRAINING).items() if name not in ("has_scalar_gate", "options")}
        problem = GdnProblem(**of_gdn, options=GdnOptions(use_qk_l2norm_in_kernel=True))
    for op in ("transition", "bwd"):
        chosen = choose(f"{family}_{op}", problem)
        assert chosen.name == "cute_sm90"
    assert chosen.backend.find(family, f"{family}_state_grad") is not None


# The simulator's orders, and faults


@pytest.mark.slow
@pytest.mark.parametrize("order", ["early", "first", "last"])
def test_order_of_asynchronous_work_does_not_matter(interpreted, order):  # noqa: F811
    interpreted(order)
    assert is_right(*CHAINED)


@pytest.mark.slow
def test_there_are_no_races(interpreted):  # noqa: F811
    interpreted("late", races=True)
    assert is_right(*CHAINED)


FAULTS = {
    **{f"scan: no wait for M, {i}": ("late", of_kernel("scan_kernel", without_wait(i))) for i in range(2)},
    **{f"scan: no wait for products, {i}": ("late", of_kernel("scan_kernel", without(WGMMA_WAIT, i))) for i in range(2)},
    **{f"scan: M's place taken too early, {i}": ("first", of_kernel("scan_kernel", without(BLOCK_BARRIER, i))) for i in (1, 2)},
    **{f"transitions: no wait for tiles, {i}": ("late", of_kernel("walks_kernel", without_wait(i))) for i in (2, 3)},
    **{f"transitions: tiles come too early, {i}": ("early", of_kernel("walks_kernel", without_wait(i))) for i in (0, 1)},
    **{f"transitions: no wait for products, {i}": ("late", of_kernel("walks_kernel", without(WGMMA_WAIT, i))) for i in range(6)},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_broken_kernels_are_noticed(interpreted, fault):  # noqa: F811
    """With six segments, so that places of M's are used again; or three chunks in a segment, so that those of tiles are."""
    order, edit = FAULTS[fault]
    tokens, per_segment = (550, 3) if order == "early" else (330, 1)
    interpreted(order, edit, races=True)
    with contextlib.suppress(ptx.SimulationError):
        assert not is_right(Case((tokens,), is_packed=False, shift=-8.0), 1.0, per_segment)


# Schedules

LONG = dataclasses.replace(HOPPER, B=1, N=1)


@pytest.mark.parametrize(
    ("T", "HV", "wanted"),
    [
        (32768, 16, Schedule(512, 4, 128, True)),
        (8192, 8, Schedule(128, 6, 22, True)),
        (8192, 4, Schedule(128, 12, 11, True)),
        (8192, 1, Schedule(128, 16, 8, True)),
        (8192, 32, Schedule(128, 2, 64, False)),
        (8192, 64, Schedule(128, 1, 129, False)),
        (1024, 4, Schedule(16, 2, 8, False)),
        (960, 4, Schedule(15, 1, 16, False)),
    ],
)
def test_segments_fill_a_gpu_once(T, HV, wanted):
    assert schedule(dataclasses.replace(LONG, T=T, H=HV, HV=HV), NUM_SMS) == wanted


@pytest.mark.parametrize("num_sms", [78, 114, 132])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_schedule_has_room_for_all_chunks_and_every_block_an_sm(num_sms, is_packed):
    for HV in (1, 2, 3, 4, 8, 16, 24, 32, 33, 48, 64):
        for B, T in ((1, 100), (1, 5000), (2, 4096), (3, 20000), (1, 65536)):
            N, tokens = (B, B * T) if is_packed else (B, T)
            p = dataclasses.replace(HOPPER, B=1 if is_packed else B, N=N, T=tokens, H=HV, HV=HV, is_packed=is_packed)
            for made in (schedule(p, num_sms), whole_sequences(p, num_sms)):
                per_sequence = math.ceil(math.ceil(T / CHUNK) / made.per_segment)
                assert made.segments >= N * per_sequence
                assert made.chunks >= N * -(-T // CHUNK)
                if per_sequence > 1:
                    assert 2 * N * HV * per_sequence <= num_sms
                if made.has_transitions and made == schedule(p, num_sms):
                    assert N * HV * (3 * per_sequence - 4) <= num_sms


def test_batch_invariant_calls_have_segments_of_one_length():
    options = HOPPER.options._replace(batch_invariant=True)
    made = [
        schedule(dataclasses.replace(HOPPER, B=B, N=B, T=T, H=4, HV=4, options=options), NUM_SMS)
        for B, T in ((1, 8192), (5, 8192), (2, 300), (1, 50000))
    ]
    assert len({(s.per_segment, s.has_transitions) for s in made}) == 1


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "size", "per_segment"), [CHAINED, WARM, *MORE, *ON_A_GPU], ids=str)
@pytest.mark.parametrize("has_transitions", [True, False])
def test_on_a_gpu(kernels, case, size, per_segment, has_transitions):  # noqa: F811
    assert is_right(case, size, per_segment, has_transitions, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*WHOLE, *ON_A_GPU], ids=str)
def test_of_whole_sequences_on_a_gpu(kernels, case):  # noqa: F811
    assert are_whole_right(*case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("has_scalar_gate", [False, True])
def test_passes_of_context_parallelism_on_a_gpu(kernels, has_scalar_gate):  # noqa: F811
    """By the schedules that calls have: M, B and C beside a forward and a backward of the whole."""
    p, x = make(Case((3000,), H=2, HV=4, shift=-8.0, has_scalar_gate=has_scalar_gate), "cuda")
    do, dht = gradients_of_outputs(p, 1.0, "cuda")
    M, B = kda_bwd.kda_transition(p, x)
    assert relative_error(x.initial_state.double() @ M.double() + B.double(), last_states(p, x, x.initial_state)) < 2e-3
    C, want = kda_bwd.kda_state_grad(p, x, do), wanted(p, x, do, dht).d_initial_state
    assert relative_error(dht.double() @ M.double().mT + C.double(), want) < 2e-3
    assert relative_error(kda_bwd.kda_state_grad(p, x, do, dht), want) < 2e-3
