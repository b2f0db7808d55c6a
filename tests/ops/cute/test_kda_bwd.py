# SPDX-License-Identifier: Apache-2.0
"""The KDA backward on the CuTe kernels: its numbers beside float64 autograd, whom it serves, kernels broken on purpose.

The same cases run in the interpreter of compiled kernels (here, without a GPU) and on a GPU. Gradients start as NaN, and so does
the workspace: what a kernel reads before it was written shows.
"""

import contextlib
import dataclasses
import re

import pytest
import torch

from cula import reference
from cula.core.dispatch import BACKENDS, Choice, choose, choose_prefill
from cula.core.family import FAMILIES
from cula.core.operator import Attention
from cula.core.replay import cache, record
from cula.gdn.problem import GdnOptions, GdnProblem
from cula.kda.problem import KdaGrads, KdaInputs, KdaProblem
from cula.ops.cute import bwd_self_check, gdn_bwd, kda, kda_bwd, kda_bwd_call, kda_schedule
from cula.ops.cute.kda_abi import SPLIT
from cula.ops.cute.kda_bwd_abi import BACKWARD, WORKSPACE, Home, Makes, tiles_bytes
from cula.ops.cute.kda_bwd_schedule import schedule
from cula.ops.cute.toolchain import build, loader, self_check, variants
from cula.reference import relative_error
from tests.core.replay import test_training
from tests.ops.cute.test_kda import Case, kernels, make  # noqa: F401  (a fixture)
from tests.ops.cute.test_kda_dispatch import HOPPER
from tests.support.cute import needs_dsl
from tests.support.orders import in_each_order
from tests.support.replay import instead_of_launches, replay, stand_in
from tests.support.variants import HOPPER_KDA_BWD
from tools import ptx
from tools.ptx.mutate import NAMED_BARRIER, WGMMA_WAIT, Edit, without, without_wait

NUM_SMS = 132

# Rounding to bf16 alone is 1.7e-3. The others are float32, of fp16 operands.
TOLERANCE = dict.fromkeys(("dq", "dk", "dv", "dg", "dbeta"), 2.3e-3) | dict.fromkeys(
    ("dA_log", "ddt_bias", "d_initial_state"), 2e-3
)

# (A call, the size of the gradients that come in)
PACKED = Case((70, 0, 1, 64), HV=2, shift=-4.0), 1e-5
ALIKE = Case((130,), is_packed=False, shift=-8.0, are_keys_alike=True), 1e4
SERVED = [Case((70, 5, 130), HV=2), Case((30,) * 7, HV=2), Case((300, 0, 1, 40), HV=2)]
WITH_TAILS = Case((75, 90), HV=2, shift=-4.0), 1.0  # T and P lie in gradients, and value heads share keys
PLAIN = Case((70, 5), gate="log", shift=-2.0, HV=2, g=torch.float32, has_raw_beta=False, is_normalised=False), 1.0
CASES = [
    PACKED,
    ALIKE,
    (Case((90,), gate="log", decays="alternating", g=torch.float32, has_state=False), 1.0),
    (Case((1, 15, 16, 17), shift=-4.0), 1.0),
    (Case((100,), shift=-8.0, size=1e6), 1e-7),
    (Case((100,), shift=-8.0, size=1e-7), 1e6),
    (Case((90,), shift=-4.0, has_raw_beta=False, beta=torch.bfloat16), 1.0),
    (Case((70, 5), gate="softplus", shift=1.0, HV=2), 1e-3),
    (Case((70, 40), gate="log", shift=-2.0, has_scalar_gate=True, HV=2, g=torch.float32, has_raw_beta=False), 1.0),
    PLAIN,
]
OTHER_GATES = [
    (Case((130,), gate="softplus", shift=-14.0, are_keys_alike=True), 1.0),
    (Case((90,), gate="softplus", shift=0.0, g=torch.float32), 1.0),
    (Case((90,), gate="log", decays="to -50"), 1.0),
    (Case((90,), gate="log", decays="resets", g=torch.float32, has_raw_beta=False), 1.0),
    (Case((130,), is_packed=False, gate="softplus", shift=-4.0, has_scalar_gate=True), 1.0),
    (Case((100,), gate="log", shift=-1.0, has_scalar_gate=True), 1.0),
    (Case((130,), gate="softplus", shift=-6.0, has_scalar_gate=True, has_raw_beta=False, beta=torch.bfloat16, HV=2), 1.0),
    (Case((90,), gate="softplus", shift=-2.0, has_scalar_gate=True, g=torch.float32), 1.0),
    (Case((100,), shift=-6.0, has_scalar_gate=True, are_keys_alike=True), 1.0),
    (Case((100,), shift=-2.0, has_scalar_gate=True, g=torch.float32), 1.0),
    (Case((130,), shift=-8.0, are_keys_alike=True, has_raw_beta=False, HV=2), 1.0),
    (Case((70, 5), gate="log", shift=-2.0, HV=2, has_raw_beta=False, is_normalised=False), 1.0),
    (Case((70, 5), gate="log", shift=-2.0, has_scalar_gate=True, has_raw_beta=False, is_normalised=False), 1.0),
    (Case((70,), gate="log", decays="fastest", is_safe=True), 1.0),
    (Case((70,), gate="log", shift=-2.0, has_scalar_gate=True, g=torch.float32, has_raw_beta=False, is_normalised=False), 1.0),
]
MORE = [
    (Case((300,), is_packed=False, H=2, HV=2), 1.0),
    (Case((1, 15, 16, 17, 0, 63, 65), shift=-4.0), 1.0),
    (Case((390,), shift=-8.0, size=1e6), 1e-7),
    (Case((390,), shift=-8.0, size=1e-7), 1e6),
    (Case((330,), gate="log", decays="zero", g=torch.float32), 1.0),
    (Case((130,), gate="log", decays="fastest"), 1.0),
    (Case((330, 70), g=torch.float32, shift=-2.0, HV=4), 1.0),
    (Case((2000, 100), H=4, HV=4, shift=-8.0, beta=torch.bfloat16), 1.0),
]
ON_A_GPU = [*CASES, *OTHER_GATES, *MORE]


def gradients_of_outputs(p: KdaProblem, size: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    do = size * torch.randn(p.B, p.T, p.HV, p.V, generator=random)
    return do.bfloat16().to(device), (0.3 * size * torch.randn(p.N, p.HV, p.V, p.K, generator=random)).to(device)


def wanted(p: KdaProblem, x: KdaInputs, do: torch.Tensor, dht: torch.Tensor | None) -> KdaGrads:
    """By autograd through the definition, in float64; that of A_log as if each channel had its own, [HV, channels]."""
    leaves = x._replace(
        **{n: None if t is None else t.double().requires_grad_() for n, t in zip(x._fields[:-1], x[:-1])}
    )  # fmt: skip
    decays, A_log = leaves.g, None
    if p.options.use_gate_in_kernel:
        if x.A_log is not None:
            A_log = leaves.A_log.detach()[:, None].repeat(1, x.g[0, 0].numel() // p.HV).requires_grad_()
        of_channels = [None if t is None else t.flatten() for t in (A_log, leaves.dt_bias)]
        decays = reference.kda_gate(leaves.g.flatten(2), *of_channels, p.options.lower_bound).view_as(leaves.g)
    o, ht = reference.kda(
        *leaves[:3],
        decays,
        leaves.beta,
        initial_state=leaves.initial_state,
        cu_seqlens=x.cu_seqlens,
        use_qk_l2norm_in_kernel=p.options.use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=p.options.use_beta_sigmoid_in_kernel,
    )
    torch.autograd.backward((o, ht), (do.double(), torch.zeros_like(ht) if dht is None else dht.double()))
    return KdaGrads(*(None if t is None else t.grad for t in leaves._replace(A_log=A_log)[:-1]))


def error_of(name: str, got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative; of dA_log to what each channel adds to it. It is one number a head, a sum over channels and tokens:
    where their signs make it cancel, as in some of the cases, no rounding is small beside what is left."""
    if name == "dA_log":
        return float((got.double() - want.sum(-1)).norm() / want.norm())
    return relative_error(got, want)


def is_right(case: Case, size: float, device: str = "cpu") -> bool:
    p, x = make(case, device)
    return are_right(p, x, *gradients_of_outputs(p, size, device))


def are_right(p: KdaProblem, x: KdaInputs, do: torch.Tensor, dht: torch.Tensor | None) -> bool:
    got, want = kda_bwd.kda_bwd(p, x, (), do, dht), wanted(p, x, do, dht)
    assert [t is None for t in got] == [t is None for t in x[:-1]]
    errors = {name: error_of(name, a, b) for name, a, b in zip(KdaGrads._fields, got, want) if a is not None}
    print(errors)
    return all(e < TOLERANCE[name] for name, e in errors.items() if (want._asdict()[name] != 0).any())


@pytest.fixture
def interpreted(monkeypatch):
    """`kda_bwd.kda_bwd` on CPU tensors, its kernels in the interpreter; for the function returned see `ptx.interpret`."""
    if build.missing() is not None:
        pytest.skip(str(build.missing()))
    empty = torch.empty

    def nothing(*shape, **kwargs):
        made = empty(*shape, **kwargs)
        return made.fill_(0xFF if made.dtype == torch.uint8 else torch.nan)

    monkeypatch.setattr(torch, "empty", nothing)
    monkeypatch.setattr(kda_bwd, "schedule_on", lambda problem, device: schedule(problem, NUM_SMS))
    return ptx.interpret(monkeypatch, kda_bwd)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param(case, size, marks=[] if f"bwd_{case.kernel}" in HOPPER_KDA_BWD else [pytest.mark.slow])
        for case, size in CASES
    ],
    ids=str,
)
def test_interpreted(interpreted, case, size):
    assert is_right(case, size)


@pytest.mark.slow
def test_what_a_call_does_not_have(interpreted):
    p, x = make(Case((70,), has_state=False), "cpu")
    assert are_right(p, x._replace(A_log=None, dt_bias=None), gradients_of_outputs(p, 1.0, "cpu")[0], None)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size"), OTHER_GATES, ids=str)
def test_interpreted_with_other_gates(interpreted, case, size):
    assert is_right(case, size)


@in_each_order
def test_order_of_asynchronous_work_does_not_matter(interpreted, order):
    interpreted(order)
    assert is_right(*ALIKE)


@pytest.mark.parametrize(
    ("case", "size"), [PACKED, *(pytest.param(*case, marks=pytest.mark.slow) for case in (WITH_TAILS, PLAIN))], ids=str
)
def test_there_are_no_races(interpreted, case, size):
    interpreted("late", races=True)
    assert is_right(case, size)


def of_kernel(name: str, edit: Edit, which: int = 0) -> Edit:
    """An edit of one kernel's text alone; of that one of several with such a name."""

    def edit_one(text: str) -> str:
        parts = re.split(r"(?=\.visible \.entry)", text)
        ours = [i for i, part in enumerate(parts) if name in part[:200]][which]
        return "".join([*parts[:ours], edit(parts[ours]), *parts[ours + 1 :]])

    return edit_one


@pytest.mark.parametrize(
    ("order", "edit"),
    [
        ("late", without(WGMMA_WAIT, -1)),
        ("first", lambda text: text.replace("bar.sync \t0;", "")),
        ("late", of_kernel("walks_kernel", without(NAMED_BARRIER, 0), -1)),
        ("late", without_wait(-1)),
    ],
    ids=["no wait for the last products", "no barriers of blocks", "no room waited for", "no wait for the last tiles"],
)
def test_broken_kernels_are_noticed(interpreted, order, edit):
    interpreted(order, edit, races=True)
    with contextlib.suppress(ptx.SimulationError):
        assert not is_right(*ALIKE)


# What the forward keeps, where it is told to


def keeping(case: Case, device: str) -> tuple[KdaProblem, KdaInputs]:
    p, x = make(case, device)
    return dataclasses.replace(p, needs_grad=True, options=p.options._replace(disable_recompute=True)), x


def step(p: KdaProblem, x: KdaInputs, do: torch.Tensor, dht: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs, last states and gradients, by the autograd node of a call whose both directions are this backend's."""
    (backend,) = (b for b in BACKENDS if b.name == "cute_sm90")
    choice = Choice("kda_fwd", backend, (), backward=Choice("kda_bwd", backend, ()), shares_saved=backend.keeps(p))
    leaves = [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in x]
    made = Attention.apply(p, choice, KdaInputs, *leaves)
    return *made, *torch.autograd.grad(made, [t for t in leaves if t is not None and t.requires_grad], (do, dht))


def check_kept_tiles(monkeypatch, case: Case, device: str) -> None:
    """Gradients from tiles that were kept are those from tiles made again, bit for bit, and once more from the same tiles, into
    which nothing is written; and tiles that were kept are read."""
    (p, x), given = keeping(case, device), []
    do, dht = gradients_of_outputs(p, 1.0, device)
    run = kda_bwd.run
    monkeypatch.setattr(kda_bwd, "run", lambda *args: given.append(args[-1]) or run(*args))
    kept = step(p, x, do, dht)[2:]
    (tiles,) = given
    before = tiles.clone()
    for tiles_of_this in (None, tiles):
        again = [t for t in run(p, x, do, dht, kda_bwd.schedule_on(p, x.q.device), tiles_of_this) if t is not None]
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert torch.equal(tiles, before)
    others = run(p, x, do, dht, kda_bwd.schedule_on(p, x.q.device), torch.zeros_like(tiles))
    assert not torch.equal(others.dq, kept[0])


@pytest.mark.slow
def test_tiles_that_were_kept(interpreted, monkeypatch):
    ptx.interpret(monkeypatch, kda)
    monkeypatch.setattr(kda, "schedule_on", lambda problem, device: kda_schedule.schedule(problem, NUM_SMS))
    check_kept_tiles(monkeypatch, Case((70, 5), shift=-4.0, HV=2), "cpu")


@pytest.mark.parametrize("case", [Case((70, 5), shift=-4.0, HV=2), Case((2000, 100), H=4, HV=4, shift=-8.0)], ids=str)
@pytest.mark.gpu
def test_tiles_that_were_kept_on_a_gpu(kernels, monkeypatch, case):  # noqa: F811
    check_kept_tiles(monkeypatch, case, "cuda")


def test_tiles_are_of_the_call(launched):
    p, x = keeping(Case((70, 5)), "cpu")
    do, dht = gradients_of_outputs(p, 1.0, "cpu")
    with pytest.raises(AssertionError, match="of another call"):
        kda_bwd.kda_bwd(p, x, (torch.zeros(tiles_bytes(2), dtype=torch.uint8),), do, dht)  # it has room for three


# Where it all lies


def homes_of(p: KdaProblem | GdnProblem, lends: bool = True) -> tuple[Home, Home]:
    sizes = kda_bwd_call.sized_by(WORKSPACE, p, schedule(p, NUM_SMS), lends).numbers
    return sizes["home_of_T"], sizes["home_of_P"]


LENGTHS = {"T": 8192, "B": 1, "N": 1, "g_dtype": torch.bfloat16}
PACK = LENGTHS | {"is_packed": True, "N": 100}
SHORT = LENGTHS | {"is_packed": True, "N": 300}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"H": 32, "HV": 32} | LENGTHS, (Home.DV, Home.DG)),
        ({"H": 8, "HV": 32} | PACK, (Home.DV, Home.DG)),
        ({"H": 32, "HV": 32} | SHORT, (Home.WORKSPACE, Home.WORKSPACE)),
        ({"H": 32, "HV": 32} | SHORT | {"g_dtype": torch.float32}, (Home.DG, Home.WORKSPACE)),
        ({"H": 32, "HV": 32, "has_scalar_gate": True} | PACK, (Home.DV, Home.DQ)),
        ({"H": 8, "HV": 32, "has_scalar_gate": True} | LENGTHS, (Home.DV, Home.WORKSPACE)),
    ],
    ids=["a gate a channel", "keys are shared", "short sequences", "short, float32", "a gate a head", "and keys are shared"],
)
def test_T_and_P_lie_in_gradients_that_have_room(changes, wanted):
    p = dataclasses.replace(HOPPER, **changes)
    assert homes_of(p) == wanted
    assert homes_of(p, lends=False) == (Home.WORKSPACE, Home.WORKSPACE)
    if p.has_scalar_gate:
        of_gdn = {name: value for name, value in vars(p).items() if name not in ("has_scalar_gate", "options")}
        assert homes_of(GdnProblem(**of_gdn, options=GdnOptions(use_qk_l2norm_in_kernel=True))) == wanted


def test_cases_have_them_in_gradients_and_in_the_workspace():
    """Those whose numbers are compared, in this file, and those that one record serves."""
    assert homes_of(make(PACKED[0], "cpu")[0]) == (Home.WORKSPACE, Home.WORKSPACE)
    assert homes_of(make(ALIKE[0], "cpu")[0]) == homes_of(make(WITH_TAILS[0], "cpu")[0]) == (Home.DV, Home.DG)
    of_scalar_gates = [homes_of(make(case, "cpu")[0]) for case, _ in CASES if case.has_scalar_gate]
    assert of_scalar_gates == [(Home.DV, Home.WORKSPACE)]
    served = [homes_of(make(case, "cpu")[0]) for case in SERVED]
    assert served == [(Home.DV, Home.DG), (Home.WORKSPACE, Home.WORKSPACE), (Home.DV, Home.DG)]


@pytest.mark.parametrize(
    ("change", "most"), [({"H": 32}, 608_300_000), ({"H": 16}, 697_400_000)], ids=["keys of their own", "keys are shared"]
)
def test_bytes_at_the_peak(change, most):
    """Outputs, gradients and the workspace at T=8192 and 32 value heads, where FLA took 2,022,703,104 above the inputs
    (`benchmarks/results/H200-kda-train.json`)."""
    p = dataclasses.replace(HOPPER, **LENGTHS | {"HV": 32} | change)
    made = schedule(p, NUM_SMS)
    work = kda_bwd.sized(p, made, has_tiles=False).workspace
    assert work <= most
    gradients = [shape.numel() * dtype.itemsize for shape, dtype in of_gradients(p)]
    assert work + p.T * p.HV * p.V * 2 + sum(gradients) < 2_022_703_104 / 2
    # The tiles that a forward keeps are not the backward's, and passes without gradients have nothing behind the recurrences.
    tiles = tiles_bytes(made.chunks * p.HV)
    assert kda_bwd.sized(p, made, has_tiles=True).workspace + tiles >= work
    for makes in (Makes.TRANSITION, Makes.STATE_GRAD):
        assert kda_bwd.sized(p, made, False, makes).workspace == tiles + 128


def of_gradients(p: KdaProblem) -> list[tuple[torch.Size, torch.dtype]]:
    found = kda_bwd_call.forms(p, kda_bwd_call.Present(A_log=True, dt_bias=True, initial_state=True))
    return [(torch.Size(form[0]), form[2]) for form in found if form is not None]


# Who is served

TRAINING = dataclasses.replace(
    HOPPER, needs_grad=True, options=HOPPER.options._replace(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"HV": 2 * HOPPER.HV}, None),
        ({"has_scalar_gate": True}, None),
        ({"options": TRAINING.options._replace(lower_bound=None)}, None),
        ({"options": TRAINING.options._replace(use_beta_sigmoid_in_kernel=False)}, None),
        ({"options": TRAINING.options._replace(use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False)}, None),
        ({"options": TRAINING.options._replace(use_qk_l2norm_in_kernel=False)}, "use_qk_l2norm_in_kernel=True"),
        ({"dtype": torch.float16}, "takes bfloat16"),
        ({"K": 64}, "takes K = V = 128"),
    ],
    ids=str,
)
def test_whom_the_backward_serves(monkeypatch, change, reason):
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    choice = choose("kda_bwd", dataclasses.replace(TRAINING, **change))
    if reason is None:
        assert choice.name == "cute_sm90"
    else:
        assert choice.name == "triton"
        assert reason in dict(choice.passed_over)["cute_sm90"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "name"),
    [
        (kda_bwd, "bwd_kda_f16_gate_bf16"),
        pytest.param(gdn_bwd, "bwd_gdn_log_bf16", marks=pytest.mark.slow),
        pytest.param(kda_bwd, "bwd_kda_f16_log_f32_scalar_plain", marks=pytest.mark.slow),
        pytest.param(gdn_bwd, "bwd_gdn_log_bf16_plain", marks=pytest.mark.slow),
    ],
)
def test_the_comparison_at_first_use_tells_right_from_wrong(interpreted, monkeypatch, host, name):
    ptx.interpret(monkeypatch, gdn_bwd)
    monkeypatch.setattr(bwd_self_check, "CALLS", bwd_self_check.CALLS[:1])
    made = {}  # what each function returned at first: a simulation takes seconds

    def once(function, real):
        def call(*given):
            if function not in made:
                made[function] = real(*given)
            return made[function]

        monkeypatch.setattr(host, function, call)

    for function in ("run", "transition", "state_grad") if host is kda_bwd else ("run",):
        once(function, getattr(host, function))
    error = lambda: self_check.worst_error(name, torch.device("cpu"), HOPPER.sm)
    assert error() < 2.3e-3
    made["run"] = made["run"]._replace(dv=made["run"].dv.roll(1, 1))
    assert not error() < self_check.LIMIT


@pytest.mark.parametrize("is_gdn", [False, True])
def test_nothing_is_kept_for_it(monkeypatch, is_gdn):
    """So that a training step's forward is recorded as any other is."""
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    of_gdn = {name: value for name, value in vars(TRAINING).items() if name not in ("has_scalar_gate", "options")}
    options = GdnOptions(use_qk_l2norm_in_kernel=True)
    choice = choose_prefill(GdnProblem(**of_gdn, options=options) if is_gdn else TRAINING)
    assert choice.name == choice.backward.name == "cute_sm90"
    assert not choice.shares_saved


def test_who_keeps_tiles(monkeypatch):
    """KDA's forward, if it is told to, and if the backward is this backend's too; it then is the split one, and says so."""
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    told = TRAINING.options._replace(disable_recompute=True)
    keeps = dataclasses.replace(TRAINING, H=64, HV=64, options=told)
    choice = choose_prefill(keeps)
    assert choice.name == choice.backward.name == "cute_sm90"
    assert choice.shares_saved
    assert "disable_recompute=True" in kda_schedule.how(keeps, NUM_SMS)
    for change in ({"options": TRAINING.options}, {"needs_grad": False}):
        other = dataclasses.replace(keeps, **change)
        assert kda_schedule.schedule(other, NUM_SMS).is_fused
        assert not choose_prefill(other).shares_saved
    of_gdn = {name: value for name, value in vars(keeps).items() if name not in ("has_scalar_gate", "options")}
    gdn = GdnProblem(**of_gdn, options=GdnOptions(use_qk_l2norm_in_kernel=True, disable_recompute=True))
    choice = choose_prefill(gdn)
    assert choice.name == choice.backward.name == "cute_sm90"
    assert not choice.shares_saved
    assert choose_prefill(dataclasses.replace(keeps, sm=(10, 0))).name == "triton"


# Recorded calls


@pytest.fixture(params=["python", "c"])
def launched(monkeypatch, request):
    """The arguments of every launch, by name, instead of launches."""
    by_name = lambda name, arguments: (name, dict(zip([a.name for a in BACKWARD.args], arguments[:-1])))
    monkeypatch.setattr(kda_bwd, "schedule_on", lambda problem, device: schedule(problem, NUM_SMS))
    monkeypatch.setattr(kda_bwd_call, "sms_of", lambda device: NUM_SMS)
    return instead_of_launches(monkeypatch, kda_bwd, request.param, by_name)


FRESH = {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0", "workspace"}  # allocated by each call


@pytest.mark.parametrize(
    ("case", "others"),
    [
        (SERVED[0], SERVED[1:]),
        (Case((70, 40), gate="softplus", has_scalar_gate=True),
         [Case((500,), gate="softplus", has_scalar_gate=True), Case((3000, 64), gate="softplus", has_scalar_gate=True)]),
        (Case((200, 200), is_packed=False, gate="log", has_state=False, g=torch.float32, has_raw_beta=False),
         [Case((165,) * 3, is_packed=False, gate="log", has_state=False, g=torch.float32, has_raw_beta=False)]),
    ],
    ids=["value heads share keys", "one gate a head", "log decays"],
)  # fmt: skip
@pytest.mark.parametrize("has_dht", [False, True])
def test_a_record_launches_what_a_call_launches(launched, case, others, has_dht):
    """For calls of its own lengths, and of others."""
    repeat = None
    for other in (case, *others):
        p, x = make(other, "cpu")
        do, dht = gradients_of_outputs(p, 1.0, "cpu")
        dht = dht if has_dht else None
        launched.clear()
        want = kda_bwd.kda_bwd(p, x, (), do, dht)
        repeat = repeat or record.replayer((*x, do, dht), kda_bwd.record_kda_bwd(p, x, (), do, dht))
        got = repeat((*x, do, dht))
        for a, b in zip(got, want):
            assert (a is None) == (b is None)
            assert a is None or (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        (name, arguments), (same_name, same) = launched
        assert name == same_name
        assert {n: v for n, v in arguments.items() if n not in FRESH} == {n: v for n, v in same.items() if n not in FRESH}
        made = dict(zip(("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"), got))
        assert all(same[n] == (0 if t is None else t.data_ptr()) for n, t in made.items())


def test_a_call_is_recorded_for_tensors_that_need_no_copy(launched):
    p, x = make(Case((100, 100), is_packed=False), "cpu")
    do, dht = gradients_of_outputs(p, 1.0, "cpu")
    repeat = kda_bwd.record_kda_bwd(p, x, (), do, dht)
    assert replay(repeat, (*x, do, dht)) is not None
    odd = torch.empty(do.numel() + 1, dtype=do.dtype)[1:].view(do.shape)
    assert replay(repeat, (*x, odd, dht)) is None
    assert kda_bwd.record_kda_bwd(p, x, (), do[:, :, :, :1].expand_as(do), dht) is None
    assert kda_bwd.record_kda_bwd(p, x, (), do, dht.transpose(2, 3)) is None
    assert kda_bwd.record_kda_bwd(p, x, (), do, dht.double()) is None


def test_steps_that_keep_tiles_are_recorded(launched, request, monkeypatch):
    """Of whatever length; a backward is given the workspace of its own forward."""
    names, kernel = [a.name for a in SPLIT.args], stand_in(request.node.callspec.params["launched"])
    forward = kernel(lambda *given: launched.append(("forward", dict(zip(names, given[:-1])))))
    monkeypatch.setattr(kda, "load", lambda name, arch: forward)
    monkeypatch.setattr(kda, "stream_of", lambda device: 0)
    monkeypatch.setattr(kda, "schedule_on", lambda problem, device: kda_schedule.schedule(problem, NUM_SMS))
    monkeypatch.setattr(kda, "sms_of", lambda device: NUM_SMS)
    monkeypatch.setattr(cache, "signature", record.signature)  # as if on a GPU
    replay = FAMILIES["kda"].replay
    replay.forget()
    for lengths in ((70, 5, 130), (70, 5, 130), (300, 0, 1, 40), (30,) * 7):
        p, x = keeping(Case(lengths, HV=2), "cpu")
        launched.clear()
        _, _, *grads = step(p, x, *gradients_of_outputs(p, 1.0, "cpu"))
        assert [t.shape for t in grads] == [t.shape for t in x[:-1] if t is not None]
        (_, of_forward), (_, of_backward) = launched
        assert of_backward["has_tiles"] == 1
        assert of_backward["tiles"] == of_forward["workspace"] != 0
        assert all(of_forward[name] == of_backward[name] for name in ("T", "N", "chunks"))
        monkeypatch.setattr(kda, "run", None)  # from here on by records
        monkeypatch.setattr(kda_bwd, "run", None)
    replay.forget()


# On a GPU


@needs_dsl
def test_cases_on_a_gpu_take_every_variant():
    """One that they leave out has no run on hardware, and belongs to those that check themselves."""
    taken = {kda_bwd.variant(make(case, "cpu")[0]) for case, _ in ON_A_GPU}
    assert taken == {v.name for v in variants.collect(["cula.ops.cute.sm90.kda_bwd"])}


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "size"), ON_A_GPU, ids=str)
def test_on_a_gpu(kernels, case, size):  # noqa: F811
    assert is_right(case, size, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kda", "kda, softplus", "kda, packed", "kda, segments", "kda, more kept"])
def test_training_steps_by_record(kernels, monkeypatch, name):  # noqa: F811
    test_training.test_steps_by_record_are_steps(name, "cute_sm90", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0.0, -8.0])
def test_long_and_repeatable(kernels, shift):  # noqa: F811
    """Thirty runs give the same bits."""
    p, x = make(Case((20000,), is_packed=False, H=2, HV=4, shift=shift), "cuda")
    do, dht = gradients_of_outputs(p, 1.0, "cuda")
    first = kda_bwd.kda_bwd(p, x, (), do, dht)
    for _ in range(29):
        again = kda_bwd.kda_bwd(p, x, (), do, dht)
        assert all(torch.equal(a, b) for a, b in zip(first, again) if a is not None)
