# SPDX-License-Identifier: Apache-2.0
"""The backward of Gated DeltaNet on the CuTe kernels: its numbers beside float64 autograd, whom it serves, kernels broken on
purpose.

The same cases run in the interpreter of compiled kernels (here, without a GPU) and on a GPU. Gradients start as NaN, and so does
the workspace: what a kernel reads before it was written shows.
"""

import contextlib
import dataclasses

import pytest
import torch

from cula import reference
from cula.core.dispatch import choose
from cula.core.replay import record
from cula.gdn.problem import GdnInputs, GdnProblem
from cula.kda.problem import KdaGrads
from cula.ops.cute import gdn_bwd, kda_bwd_call
from cula.ops.cute.gdn_bwd_abi import BACKWARD
from cula.ops.cute.kda_bwd_schedule import schedule, split_into
from cula.ops.cute.toolchain import loader, variants
from cula.reference import relative_error
from tests.ops.cute.test_gdn import Case, make
from tests.ops.cute.test_kda_bwd import FRESH, of_kernel
from tests.support.cute import needs_dsl, poison_new_memory, skip_without_dsl
from tests.support.replay import instead_of_launches
from tools import ptx
from tools.ptx.mutate import BLOCK_BARRIER, WGMMA_WAIT, without, without_wait

NUM_SMS = 132

# Rounding to bf16 alone is 1.7e-3. The others are float32, of fp16 operands.
TOLERANCE = dict.fromkeys(("dq", "dk", "dv", "dg", "dbeta"), 2.3e-3) | dict.fromkeys(
    ("dA_log", "ddt_bias", "d_initial_state"), 2e-3
)

# (A call, the size of the gradients that come in)
PACKED = Case((40, 0, 1), HV=3, beta="plain"), 1e-5
PLAIN = Case((70, 0, 5), gate="log", beta="plain", HV=2, is_normalised=False), 1.0
STEEP = Case((90,), gate="steep", beta="plain", is_packed=False, numbers=torch.bfloat16), 1e4
MORE = [
    (Case((130, 130), is_packed=False, H=2, HV=4, gate="log", beta="plain"), 1.0),
    (Case((100,), HV=4, gate="fast", has_state=False), 1.0),
    (Case((200, 64), H=2, HV=2, beta="negative", numbers=torch.bfloat16), 1.0),
    (Case((1, 15, 16, 17, 0, 63, 65), HV=3, numbers=torch.bfloat16), 1.0),
    (Case((330,), gate="zero", size=1e4, beta="plain"), 1e-4),
]
ON_A_GPU = [
    PACKED,
    STEEP,
    PLAIN,
    *MORE,
    (Case((130, 70), gate="log", beta="plain", HV=2, is_normalised=False, numbers=torch.bfloat16), 1.0),
    (Case((390,), size=1e6), 1e-7),
    (Case((390,), size=1e-7), 1e6),
    (Case((2000, 100), H=4, HV=16, gate="fast", numbers=torch.bfloat16), 1.0),
    (Case((2000, 100), H=4, HV=8, beta="plain"), 1.0),
]


def call(case: Case, device: str = "cpu") -> tuple[GdnProblem, GdnInputs]:
    """One whose keys are alike, but where raw strengths reach 2; of those that come as they are some are 0 and some nearly 2.
    Keys that the kernel does not normalise are as long as 0.3 to 1."""
    p, x = make(case, device)
    k, beta = x.k.float(), x.beta
    k = k if case.beta == "negative" else k + 2.0 * k[:, :1]
    if not case.is_normalised:
        k *= (0.3 + 0.1 * (torch.arange(p.T, device=device) % 8))[:, None, None] / k.norm(dim=-1, keepdim=True)
    k = k.bfloat16()
    if case.beta == "plain":
        beta = beta.clone()
        beta[:, 3::7], beta[:, 5::11] = 0.0, 1.9
    return p, x._replace(k=k, beta=beta)


def gradients_of_outputs(p: GdnProblem, size: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    do = size * torch.randn(p.B, p.T, p.HV, p.V, generator=random)
    return do.bfloat16().to(device), (0.3 * size * torch.randn(p.N, p.HV, p.V, p.K, generator=random)).to(device)


def wanted(p: GdnProblem, x: GdnInputs, do: torch.Tensor, dht: torch.Tensor) -> KdaGrads:
    """By autograd through the definition, in float64."""
    leaves = x._replace(
        **{n: None if t is None else t.double().requires_grad_() for n, t in zip(x._fields[:-1], x[:-1])}
    )  # fmt: skip
    names = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    switches = {name: getattr(p.options, name) for name in names}
    given = {name: getattr(leaves, name) for name in ("initial_state", "cu_seqlens", "A_log", "dt_bias")}
    o, ht = reference.gdn(*leaves[:5], **given, **switches)
    torch.autograd.backward((o, ht), (do.double(), dht.double()))
    return KdaGrads(*(None if t is None else t.grad for t in leaves[:-1]))


def is_right(case: Case, size: float, device: str = "cpu", per_segment: int | None = None) -> bool:
    p, x = call(case, device)
    do, dht = gradients_of_outputs(p, size, device)
    if per_segment is None:
        got = gdn_bwd.gdn_bwd(p, x, (), do, dht)
    else:
        got = gdn_bwd.run(p, x, do, dht, split_into(p, per_segment, True))
    want = wanted(p, x, do, dht)
    assert [t is None for t in got] == [t is None for t in x[:-1]]
    assert all(a is None or (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(got, x))
    errors = {name: relative_error(a, b) for name, a, b in zip(KdaGrads._fields, got, want) if a is not None}
    print(case, {name: f"{1e3 * e:.2f}" for name, e in errors.items()})
    return all(e < TOLERANCE[name] for name, e in errors.items())


@pytest.fixture
def interpreted(monkeypatch):
    """`gdn_bwd.gdn_bwd` on CPU tensors, its kernels in the interpreter; for the function returned see `ptx.interpret`."""
    skip_without_dsl()
    poison_new_memory(monkeypatch)
    monkeypatch.setattr(gdn_bwd, "schedule_on", lambda problem, device: schedule(problem, NUM_SMS))
    return ptx.interpret(monkeypatch, gdn_bwd)


@pytest.mark.parametrize(("case", "size"), [STEEP, PLAIN, *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE)], ids=str)
def test_interpreted(interpreted, case, size):
    assert is_right(case, size)


SEGMENTS = [  # and chunks of one
    (Case((390,), is_packed=False, HV=2), 1.0, 2),
    (Case((330, 70, 0), gate="fast"), 1e-5, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size", "per_segment"), SEGMENTS, ids=str)
def test_segments(interpreted, case, size, per_segment):
    """The kernels are KDA's (`test_kda_bwd_segments.py`)."""
    assert is_right(case, size, per_segment=per_segment)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["early", "first", "last"])
def test_order_of_asynchronous_work_does_not_matter(interpreted, order):
    interpreted(order)
    assert is_right(*PACKED)


@pytest.mark.parametrize(("case", "size"), [PACKED, pytest.param(*PLAIN, marks=pytest.mark.slow)], ids=str)
def test_numbers_are_right_without_races(interpreted, case, size):
    interpreted("late", races=True)
    assert is_right(case, size)


@pytest.mark.slow
def test_numbers_in_bfloat16_cost_nothing_but_the_rounding_of_their_gradients(interpreted):
    """Those of A_log and dt_bias are summed before dg is rounded."""
    p, x = call(Case((70,), HV=2, numbers=torch.bfloat16))
    do, dht = gradients_of_outputs(p, 1.0, "cpu")
    got = gdn_bwd.gdn_bwd(p, x, (), do, dht)
    wide = dataclasses.replace(p, g_dtype=torch.float32, beta_dtype=torch.float32)
    want = gdn_bwd.gdn_bwd(wide, x._replace(g=x.g.float(), beta=x.beta.float()), (), do, dht)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, want))


def test_gradients_of_shared_keys_are_sums_over_their_value_heads(interpreted):
    """Those of one value head, twice, are twice those of one: no order of additions, and no rounding, is in between."""
    p, x = call(Case((40,)))
    do, dht = gradients_of_outputs(p, 1.0, "cpu")
    one = gdn_bwd.gdn_bwd(p, x, (), do, dht)
    heads = {"v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1}  # which of the dimensions they are
    twice = {name: getattr(x, name).repeat_interleave(2, at) for name, at in heads.items()}
    given = x._replace(**twice), (), do.repeat_interleave(2, 2), dht.repeat_interleave(2, 1)
    two = gdn_bwd.gdn_bwd(dataclasses.replace(p, HV=2), *given)
    assert torch.equal(two.dq, 2 * one.dq) and torch.equal(two.dk, 2 * one.dk)
    assert all(torch.equal(two.dv[:, :, i], one.dv[:, :, 0]) for i in range(2))


# The first wait for products is for the compiler, which would not have any in flight where a loop begins; the second covers it.
FAULTS = {
    **{f"no wait for products, {i}": ("late", without(WGMMA_WAIT, i)) for i in range(1, 6)},
    **{f"no wait for tiles, {i}": ("late", without_wait(i)) for i in range(3)},
    **{f"no barrier, {i}": ("late", without(BLOCK_BARRIER, i)) for i in range(1, 9)},
}
QUICK = ("no wait for products, 2", "no barrier, 4")


@pytest.mark.parametrize("fault", [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in FAULTS if f not in QUICK)])
def test_broken_kernels_are_noticed(interpreted, fault):
    order, edit = FAULTS[fault]
    interpreted(order, of_kernel("chunk_kernel", edit), races=True)  # which is the one that is not KDA's
    with contextlib.suppress(ptx.SimulationError):
        assert not is_right(Case((40,), HV=3), 1.0)


# Who is served

TRAINING = dataclasses.replace(call(Case((128,), HV=2))[0], needs_grad=True, device="cuda")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"HV": 8}, None),
        ({"options": TRAINING.options._replace(use_beta_sigmoid_in_kernel=False, use_gate_in_kernel=False)}, None),
        ({"options": TRAINING.options._replace(use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False)}, None),
        ({"options": TRAINING.options._replace(use_qk_l2norm_in_kernel=False)}, "use_qk_l2norm_in_kernel=True"),
        ({"dtype": torch.float16}, "takes bfloat16"),
        ({"K": 64}, "takes K = V = 128"),
        ({"sm": (10, 0)}, "needs compute capability 9.0"),
    ],
    ids=str,
)
def test_whom_the_backward_serves(monkeypatch, change, reason):
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    choice = choose("gdn_bwd", dataclasses.replace(TRAINING, **change))
    if reason is None:
        assert choice.name == "cute_sm90"
        assert choice.backend.load("gdn", "gdn_bwd") is gdn_bwd.gdn_bwd
    else:
        assert choice.name == "triton"
        assert reason in dict(choice.passed_over)["cute_sm90"]


# Recorded calls


@pytest.fixture(params=["python", "c"])
def launched(monkeypatch, request):
    """The arguments of every launch, by name, instead of launches."""
    by_name = lambda name, arguments: (name, dict(zip([a.name for a in BACKWARD.args], arguments[:-1])))
    monkeypatch.setattr(gdn_bwd, "schedule_on", lambda problem, device: schedule(problem, NUM_SMS))
    monkeypatch.setattr(kda_bwd_call, "sms_of", lambda device: NUM_SMS)
    return instead_of_launches(monkeypatch, gdn_bwd, request.param, by_name)


@pytest.mark.parametrize(
    ("case", "others"),
    [
        (Case((70, 5, 130), HV=2), [Case((30,) * 7, HV=2), Case((3000, 0, 1, 40), HV=2)]),
        (
            Case((200, 200), is_packed=False, gate="log", beta="plain", has_state=False, numbers=torch.bfloat16),
            [Case((165,) * 3, is_packed=False, gate="log", beta="plain", has_state=False, numbers=torch.bfloat16)],
        ),
    ],
    ids=["packed", "log decays"],
)
@pytest.mark.parametrize("has_dht", [False, True])
def test_a_record_launches_what_a_call_launches(launched, case, others, has_dht):
    """For calls of its own lengths, and of others."""
    repeat = None
    for other in (case, *others):
        p, x = call(other)
        do, dht = gradients_of_outputs(p, 1.0, "cpu")
        dht = dht if has_dht else None
        launched.clear()
        want = gdn_bwd.gdn_bwd(p, x, (), do, dht)
        repeat = repeat or record.replayer((*x, do, dht), gdn_bwd.record_gdn_bwd(p, x, (), do, dht))
        got = repeat((*x, do, dht))
        for a, b in zip(got, want):
            assert (a is None) == (b is None)
            assert a is None or (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        (name, arguments), (same_name, same) = launched
        assert name == same_name
        assert {n: v for n, v in arguments.items() if n not in FRESH} == {n: v for n, v in same.items() if n not in FRESH}
        made = dict(zip(("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"), got))
        assert all(same[n] == (0 if t is None else t.data_ptr()) for n, t in made.items())


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "size", "per_segment"), SEGMENTS, ids=str)
def test_segments_on_a_gpu(kernels, case, size, per_segment):
    assert is_right(case, size, "cuda", per_segment)


@pytest.fixture
def kernels():
    problem = dataclasses.replace(call(Case((64,)), "cuda")[0], sm=torch.cuda.get_device_capability())
    choice = choose("gdn_fwd", problem)
    if choice.name != "cute_sm90":
        pytest.skip(str(choice))


@needs_dsl
def test_cases_on_a_gpu_take_every_variant():
    taken = {gdn_bwd.variant(call(case)[0]) for case, _ in ON_A_GPU}
    assert taken == {v.name for v in variants.collect(["cula.ops.cute.sm90.gdn_bwd"])}


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "size"), ON_A_GPU, ids=str)
def test_on_a_gpu(kernels, case, size):
    assert is_right(case, size, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["slow", "fast"])
def test_long_and_repeatable(kernels, gate):
    """Thirty runs give the same bits."""
    p, x = call(Case((20000,), is_packed=False, H=2, HV=8, gate=gate), "cuda")
    do, dht = gradients_of_outputs(p, 1.0, "cuda")
    first = gdn_bwd.gdn_bwd(p, x, (), do, dht)
    for _ in range(29):
        again = gdn_bwd.gdn_bwd(p, x, (), do, dht)
        assert all(torch.equal(a, b) for a, b in zip(first, again) if a is not None)
