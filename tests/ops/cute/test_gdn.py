# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet's prefill on the CuTe kernels: its numbers, whole states and pieces of heads; pools; recorded calls; a kernel
broken on purpose.

The same cases run in the interpreter of compiled kernels (here, without a GPU) and on a GPU. Outputs start as NaN, and so does
the workspace.
"""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

import cula
from cula import reference
from cula.core.dispatch import choose
from cula.core.kernels import Pool
from cula.core.replay import record
from cula.gdn.problem import GdnInputs, GdnOptions, GdnProblem, check_gdn
from cula.ops.cute import gdn, gdn_self_check
from cula.ops.cute.gdn_schedule import Schedule, how, schedule
from cula.ops.cute.toolchain import loader, self_check
from cula.reference import relative_error
from tests.support.cute import skip_without_dsl
from tests.support.replay import instead_of_launches, replay
from tests.support.slow import slow_but
from tools import ptx
from tools.ptx.mutate import without, without_wait

D, NUM_SMS, HOPPER_SM = 128, 132, (9, 0)
WHOLE, HALF = Schedule(blocks=2), Schedule(blocks=0, pieces=1)

# |o - o64| / |o64| is 1.7e-3 from rounding o to bf16 alone; the rest is operands in bf16, as peers have them.
TOLERANCE, STATE_TOLERANCE = 5e-3, 4.5e-3


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    schedule: Schedule = HALF
    is_packed: bool = True
    H: int = 1
    HV: int = 1
    gate: str = "slow"  # softplus in the kernel: "slow" or "fast"; log decays: "zero", "steep", "log"
    beta: str = "sigmoid"  # or "plain", "negative"
    is_normalised: bool = True
    has_state: bool = True
    numbers: torch.dtype = torch.float32  # of g and beta
    size: float = 1.0  # of v and the states
    has_any_keys: bool = False  # keys and queries of any length, a tenth of them zero

    def __str__(self) -> str:
        default = Case(())
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ",".join(f"{k}={v}" for k, v in given.items() if v != getattr(default, k)).replace("torch.", "")


CASES = [
    Case((70, 5, 64, 0, 200), WHOLE, HV=2, gate="fast"),
    Case((130, 130), WHOLE, is_packed=False, H=1, HV=3, gate="steep", beta="plain", has_state=False),
    Case((130,), WHOLE, gate="zero", beta="negative", size=1e6, numbers=torch.bfloat16),
    Case((70, 5, 64, 0, 200), WHOLE, HV=2, is_normalised=False, gate="fast"),
    Case((130, 130), WHOLE, is_packed=False, H=1, HV=3, is_normalised=False, gate="steep", beta="plain", has_state=False),
    Case((150, 0, 70), HALF, H=2, HV=2, size=1e-7),
    Case((200,), HALF, has_any_keys=True),
    Case((330,), Schedule(blocks=1), gate="fast", has_any_keys=True),
    Case((130,), HALF, is_normalised=False, gate="log", beta="plain", numbers=torch.bfloat16),
    Case((900, 30), Schedule(0, 3)),  # maps, and a sequence that is not cut
    Case((850,), Schedule(0, 2), gate="log", beta="negative", is_packed=False, has_state=False),
    Case((900,), Schedule(0, 3), gate="fast"),  # warmed up
    Case((600,), Schedule(0, 2), is_normalised=False),
]


def make(case: Case, device: str = "cpu") -> tuple[GdnProblem, GdnInputs]:
    """A call; on a CPU, for Hopper's kernels."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    B, T = (1, sum(case.lengths)) if case.is_packed else (len(case.lengths), case.lengths[0])
    q, k, v = normal(B, T, case.H, D), normal(B, T, case.H, D), case.size * normal(B, T, case.HV, D)
    g, beta = normal(B, T, case.HV), normal(B, T, case.HV)
    if not case.is_normalised:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    if case.has_any_keys:
        sizes = 10.0 ** (8.0 * torch.rand(2, B, T, case.H, 1, generator=random) - 4.0)
        q, k = torch.stack((q, k)) * sizes * (torch.rand(2, B, T, case.H, 1, generator=random) > 0.1)
    A_log = dt_bias = None
    has_gate = case.gate in ("slow", "fast")
    if has_gate:
        A_log, dt_bias = 0.3 * normal(case.HV), 0.5 * normal(case.HV) - (8.0 if case.gate == "slow" else 0.0)
    else:
        uniform = torch.rand(B, T, case.HV, generator=random)
        g = {"zero": 0.0 * g, "log": -2e-3 * uniform, "steep": -50.0 * uniform * (g > 0)}[case.gate]
    h0 = 0.5 * case.size * normal(len(case.lengths), case.HV, D, D) if case.has_state else None
    cu = torch.tensor([0, *case.lengths]).cumsum(0).int() if case.is_packed else None
    beta = beta.sigmoid() if case.beta == "plain" else beta
    x = GdnInputs(q.bfloat16(), k.bfloat16(), v.bfloat16(), g.to(case.numbers), beta.to(case.numbers), A_log, dt_bias, h0, cu)
    options = GdnOptions(
        use_gate_in_kernel=has_gate,
        use_qk_l2norm_in_kernel=case.is_normalised,
        use_beta_sigmoid_in_kernel=case.beta != "plain",
        allow_neg_eigval=case.beta == "negative",
        output_final_state=True,
    )
    p, x = check_gdn(GdnInputs(*(None if t is None else t.to(device) for t in x)), options)
    return dataclasses.replace(p, sm=HOPPER_SM), x


def wanted(p: GdnProblem, x: GdnInputs) -> tuple[torch.Tensor, torch.Tensor]:
    names = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    switches = {name: getattr(p.options, name) for name in names}
    given = {name: getattr(x, name) for name in ("initial_state", "cu_seqlens", "A_log", "dt_bias")}
    return reference.gdn(*x[:5], **given, **switches)


def computed(p: GdnProblem, x: GdnInputs, made: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
    o = torch.full((p.B, p.T, p.HV, D), torch.nan, dtype=torch.bfloat16, device=x.q.device)
    ht = torch.full((p.N, p.HV, D, D), torch.nan, device=x.q.device)
    assert gdn.run(p, x, made, x.initial_state, ht, out=o) is o
    return o, ht


def check(case: Case, device: str = "cpu") -> None:
    p, x = make(case, device)
    (o, ht), (want_o, want_ht) = computed(p, x, case.schedule), wanted(p, x)
    assert relative_error(o, want_o) < TOLERANCE
    assert relative_error(ht, want_ht) < STATE_TOLERANCE


@pytest.fixture
def interpreted(monkeypatch):
    """`gdn.run` on CPU tensors, its kernels in the interpreter; for the function returned see `ptx.interpret`."""
    skip_without_dsl()
    full = torch.empty

    def empty(*shape, **kwargs):
        made = full(*shape, **kwargs)
        return made.fill_(0xFF) if made.dtype == torch.uint8 else made

    monkeypatch.setattr(torch, "empty", empty)
    return ptx.interpret(monkeypatch, gdn)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(interpreted, case):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case):
    if torch.cuda.get_device_capability() != HOPPER_SM or loader.missing("sm_90a"):
        pytest.skip(loader.missing("sm_90a") or "needs a Hopper GPU")
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("made", [WHOLE, HALF, Schedule(0, 5)], ids=str)
def test_many_runs_on_a_gpu_give_the_same_bits(made):
    p, x = make(Case((2000, 700), HV=4), "cuda")
    first = computed(p, x, made)
    assert all(torch.equal(a, b) for _ in range(30) for a, b in zip(first, computed(p, x, made)))


@pytest.mark.parametrize("is_normalised", [True, False])
def test_whole_states_and_halves_give_the_same_bits(interpreted, is_normalised):
    """Rows of a state do not meet, and where nothing is cut chunks are the same."""
    p, x = make(Case((150, 70), HV=2, is_normalised=is_normalised))
    assert all(torch.equal(a, b) for a, b in zip(computed(p, x, WHOLE), computed(p, x, HALF)))


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("made", [WHOLE, HALF], ids=str)
def test_another_sequences_nan_stays_there(interpreted, made, is_normalised):
    """Last chunks read on into the next sequence; nothing of it may come through, not even times zero."""
    p, x = make(Case((70, 40, 66), is_normalised=is_normalised))
    want_o, want_ht = wanted(p, x)
    for t in (x.q, x.k, x.v, x.g, x.beta):
        t[:, 70:110] = torch.nan
    o, ht = computed(p, x, made)
    healthy = [*range(70), *range(110, 176)]
    assert relative_error(o[:, healthy], want_o[:, healthy]) < TOLERANCE
    assert relative_error(ht[[0, 2]], want_ht[[0, 2]]) < STATE_TOLERANCE


@pytest.mark.parametrize(("made", "dtype"), [(WHOLE, torch.float32), (HALF, torch.bfloat16), (HALF, torch.float16)], ids=str)
def test_a_pool_is_updated_in_place_and_nothing_else_is_touched(interpreted, monkeypatch, made, dtype):
    monkeypatch.setattr(gdn, "schedule_on", lambda problem, device: made)
    p, x = make(Case((100, 64, 0, 5), HV=2, has_state=False))
    slots, fresh = torch.tensor([6, 8, 2, 0]), torch.tensor([True, True, True, False])  # there is no slot 8
    pool = torch.randn(8, 2, D, D).to(dtype)
    unlisted = [1, 3, 4, 5, 7]
    pool[unlisted] = torch.nan
    before = pool.clone()
    o = gdn.gdn_fwd_pool(p, x, Pool(pool, slots, fresh))
    live = slots < 8
    first = before[slots.clamp(max=7)].float().nan_to_num() * (live & fresh)[:, None, None, None]
    want_o, want_ht = wanted(p, x._replace(initial_state=first))
    assert relative_error(o, want_o) < TOLERANCE
    assert relative_error(pool[slots[live]], want_ht[live]) < (STATE_TOLERANCE if dtype == torch.float32 else 1e-2)
    assert torch.equal(pool[unlisted].view(torch.uint8), before[unlisted].view(torch.uint8))


# Synchronisation

# Some of the mbarrier waits of the kernels with whole states that nothing else makes superfluous, in the order of their PTX.
WAITS = (1, 3, 6, 9, 12, 17)


@pytest.mark.parametrize("case", slow_but([CASES[0], CASES[3], CASES[10]], [CASES[0]]), ids=str)
def test_no_races_in_any_order(interpreted, case):
    interpreted("early", races=True)
    check(case)


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("place", WAITS)
def test_a_wait_less_is_noticed(interpreted, place, is_normalised):
    """As a race, or a barrier gets too many arrivals, or nothing goes on."""
    interpreted("early", without_wait(place), races=True)
    with pytest.raises(ptx.SimulationError):
        check(Case((330,), Schedule(blocks=1), is_normalised=is_normalised))


# And of the kernel with halves, with keys as they came: for T's place, the partner's room and a place of keys among them.
WAITS_OF_HALVES = (18, 23, 24, 25)


@pytest.mark.parametrize("place", WAITS_OF_HALVES)
def test_a_wait_less_between_partners_is_noticed(interpreted, place):
    interpreted("early", without_wait(place), races=True)
    with pytest.raises(ptx.SimulationError):
        check(Case((590,), HALF, is_normalised=False))


# Schedules and dispatch

TABLE = GdnProblem(
    device="cuda",
    sm=HOPPER_SM,
    dtype=torch.bfloat16,
    B=1,
    T=8192,
    N=1,
    H=16,
    HV=32,
    K=D,
    V=D,
    is_packed=False,
    has_initial_state=True,
    needs_grad=False,
    scale=D**-0.5,
    options=GdnOptions(use_qk_l2norm_in_kernel=True),
    g_dtype=torch.float32,
    beta_dtype=torch.float32,
)


# The first use on a machine


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdn_norm_half", "gdn_plain_half", "gdn_norm_whole", "gdn_plain_whole"])
def test_the_comparison_at_first_use_finds_kernels_right(interpreted, name):
    assert self_check.worst_error(name, torch.device("cpu"), HOPPER_SM) < self_check.LIMIT / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdn_norm_half", "gdn_plain_half"])
def test_the_comparison_at_first_use_meets_chained_pieces(interpreted, monkeypatch, name):
    monkeypatch.setattr(gdn_self_check, "CALLS", ())
    interpreted(edit=without(r"wgmma\.mma_async\S*\.f32\.f16\.f16[^;]*;", 0))  # of S M, the only product in fp16
    assert not self_check.worst_error(name, torch.device("cpu"), HOPPER_SM) < self_check.LIMIT


def test_few_heads_are_cut_and_many_are_not():
    def made(**change):
        return schedule(dataclasses.replace(TABLE, **change), NUM_SMS)

    assert made() == Schedule(blocks=0, pieces=2)
    assert made(HV=64) == Schedule(blocks=0, pieces=1)
    assert made(B=8, N=8, T=2048) == Schedule(blocks=132)
    assert made(B=1, N=8, T=16384, is_packed=True) == Schedule(blocks=0, pieces=1)  # one of them may be all
    assert made(B=1, N=40, T=81920, is_packed=True) == Schedule(blocks=132)
    assert made(HV=8, H=2).pieces == 8
    assert [made(HV=4, H=1, T=T).pieces for T in (64, 2048, 8192)] == [1, 8, 16]
    assert made(HV=4, H=1, T=8192, N=2, is_packed=True).pieces == 8
    assert made(B=8, N=8, T=2048, options=GdnOptions()) == Schedule(blocks=132)  # keys as they came
    assert made().workspace_bytes(32) == 32 * 2 * 2 * (4 * 64 * D + 4) and made(HV=64).workspace_bytes(64) == 0


@pytest.mark.parametrize("norm", [False, True])
def test_a_batch_invariant_sequence_is_one_piece(norm):
    for change in ({"T": 64}, {"HV": 4, "H": 4}, {"B": 8, "N": 8}, {"N": 5, "T": 40000, "is_packed": True}):
        options = GdnOptions(use_qk_l2norm_in_kernel=norm, batch_invariant=True)
        made = schedule(dataclasses.replace(TABLE, **change, options=options), NUM_SMS)
        assert made.kernel == "whole" and made.pieces == 0


def test_a_record_serves_no_more_tokens_than_a_first_call(monkeypatch):
    monkeypatch.setattr(gdn, "sms_of", lambda device: NUM_SMS)
    heads = dataclasses.replace(TABLE, B=1, N=1, H=1, HV=132)
    schedule_of = gdn._schedule_of(heads, torch.device("cuda", 0), schedule(heads, NUM_SMS))
    assert schedule_of(1, 200_000, 1) is not None and schedule_of(1, 300_000, 1) is None
    assert "fewer than 2^25 tokens times value heads" in gdn.why_not("gdn_fwd", dataclasses.replace(heads, T=300_000))


def test_how_a_call_is_served_is_told():
    assert "2 pairs of blocks each" in how(TABLE, NUM_SMS)
    assert "no workspace" in how(dataclasses.replace(TABLE, HV=64), NUM_SMS)
    assert "132 blocks" in how(dataclasses.replace(TABLE, B=8, N=8), NUM_SMS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"options": GdnOptions(use_gate_in_kernel=True)}, None),
        ({"K": 64}, "takes K = V = 128"),
        ({"g_dtype": torch.float16}, "takes g in bfloat16 or float32, and this call has float16"),
    ],
    ids=str,
)
def test_what_the_backend_takes(monkeypatch, change, reason):
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    p = dataclasses.replace(TABLE, **change)
    found = gdn.why_not("gdn_fwd", p)
    assert found is None if reason is None else found.startswith(reason)
    assert (choose("gdn_fwd", p).name == "cute_sm90") == (reason is None)


def test_states_inside_of_sequences_are_for_kdas_kernels():
    keeps = dataclasses.replace(TABLE, options=GdnOptions(use_qk_l2norm_in_kernel=True, return_intermediate_states=True))
    for p, name in ((TABLE, "gdn_norm_half"), (keeps, "kda_f16_log_f32_scalar")):
        assert gdn.kernels("gdn_fwd", p, NUM_SMS) == (name,)
        assert ("pairs of blocks" in gdn.spread("gdn_fwd", p, NUM_SMS)) == (p is TABLE)


# Recorded calls

NOT_SERVED = (None,) * 5  # tensors of a call behind `out`


@pytest.fixture(params=["python", "c"])
def launched(monkeypatch, request):
    """The name and the arguments of every launch, instead of launches."""
    calls = instead_of_launches(monkeypatch, gdn, request.param)
    monkeypatch.setattr(gdn, "sms_of", lambda device: NUM_SMS)
    monkeypatch.setattr(gdn, "schedule_on", lambda problem, device: schedule(problem, NUM_SMS))
    return calls


FRESH = (10, 14)  # places of the final state and the workspace, which are new each time


def without_fresh(arguments):
    return [a for i, a in enumerate(arguments) if i not in FRESH]


@pytest.mark.parametrize("case", [Case((300, 64), HV=2), Case((100, 100), is_packed=False, gate="log", has_state=False)], ids=str)
def test_a_recorded_launch_is_that_of_a_call(launched, case):
    p, x = make(case)
    out = torch.empty_like(x.v)
    want = gdn.gdn_fwd(p, x, out).final_state
    first = launched.copy()
    launched.clear()
    o, state = replay(gdn.record_gdn_fwd(p, x, out), (*x, out, *NOT_SERVED))
    assert o is out and state.shape == want.shape
    assert [without_fresh(a) for a in first] == [without_fresh(a) for a in launched]


def test_a_recorded_launch_serves_other_lengths(launched):
    inputs = [make(Case(lengths, HV=2)) for lengths in ((300, 64), (800, 90), (700, 10))]
    p, x = inputs[0]
    again = record.replayer((*x, None, *NOT_SERVED), gdn.record_gdn_fwd(p, x))
    for p, x in inputs:
        launched.clear()
        want = gdn.gdn_fwd(p, x)
        first = launched.copy()
        launched.clear()
        o, state = again((*x, None, *NOT_SERVED))
        assert o.shape == want.o.shape and state.shape == want.final_state.shape
        varying = {8, *FRESH}  # and o
        assert [[a for i, a in enumerate(c) if i not in varying] for c in first] == [
            [a for i, a in enumerate(c) if i not in varying] for c in launched
        ]


def test_a_recorded_launch_on_a_pool_is_that_of_a_call(launched):
    states, slots = torch.zeros(9, 2, D, D), torch.arange(2, dtype=torch.int32)
    p, x = make(Case((300, 64), HV=2, has_state=False))
    pool, out = Pool(states, slots, None), torch.empty_like(x.v)
    gdn.gdn_fwd_pool(p, x, pool, out)
    o, state = replay(gdn.record_gdn_fwd_pool(p, x, pool, out), (*x, out, states, slots, None, None, None))
    assert o is out and state is None
    assert without_fresh(launched[0]) == without_fresh(launched[1])
    assert gdn.record_gdn_fwd_pool(p, x, Pool(states, slots.long(), None), out) is None


@pytest.mark.gpu
def test_the_public_call_updates_a_pool_in_place():
    _, x = make(Case((300, 5, 70), H=2, HV=4, has_state=False), "cuda")
    slots = torch.tensor([3, -1, 0], device="cuda", dtype=torch.int32)
    pools = [torch.randn(5, 4, D, D, device="cuda")]
    pools += [pools[0].clone(), pools[0].clone()]
    switches = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    results = [
        cula.cula_gdn(
            *x[:5], A_log=x.A_log, dt_bias=x.dt_bias, cu_seqlens=x.cu_seqlens, state_pool=pool, initial_state_indices=slots,
            backend=backend, **switches,
        )
        for pool, backend in zip(pools, ("cute_sm90", "cute_sm90", "triton"))
    ]  # fmt: skip
    assert torch.equal(results[0][0], results[1][0]), "the second call, recorded, gives the same bits"
    assert torch.equal(pools[0], pools[1])
    assert relative_error(results[0][0], results[2][0]) < 1e-2
    assert relative_error(pools[0], pools[2]) < 1e-2
