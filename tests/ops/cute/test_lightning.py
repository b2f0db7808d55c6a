# SPDX-License-Identifier: Apache-2.0
"""Lightning prefill on the CuTe kernels: what the backend takes, how it schedules sequences, and the numbers of
every kernel and schedule."""

import contextlib
import dataclasses

import pytest
import torch

import cula
from cula import reference
from cula.core.constants import CHUNK
from cula.core.dispatch import choose
from cula.core.kernels import Pool
from cula.core.replay import record
from cula.lightning import problem as lightning_problem
from cula.lightning.problem import LightningInputs, LightningOptions, LightningProblem
from cula.ops.cute import lightning
from cula.ops.cute.lightning_abi import LIGHTNING
from cula.ops.cute.lightning_schedule import choose_schedule, make_schedule
from cula.ops.cute.toolchain import build, loader
from cula.reference import relative_error
from tests.support.calls import TOLERANCE, LightningCall
from tests.support.replay import instead_of_launches, replay
from tools import ptx
from tools.ptx.mutate import WGMMA_WAIT, without, without_wait

HOPPER = LightningProblem(
    device="cuda",
    sm=(9, 0),
    dtype=torch.bfloat16,
    B=1,
    T=8192,
    N=1,
    H=64,
    HV=64,
    K=128,
    V=128,
    is_packed=False,
    has_initial_state=True,
    needs_grad=False,
    scale=1.0,
    options=LightningOptions(output_final_state=True),
)
NUM_SMS = 132


def check_lightning(inputs, options, sm=HOPPER.sm):
    """A call; on a CPU, for the kernels of `sm`."""
    problem, x = lightning_problem.check_lightning(inputs, options)
    return dataclasses.replace(problem, sm=problem.sm or sm), x


@pytest.fixture
def with_kernels(monkeypatch):
    monkeypatch.setattr(loader, "missing", lambda arch: None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"K": 64, "V": 64}, None),
        ({"needs_grad": True}, None),
        ({"dtype": torch.float16}, "takes bfloat16, and this call has float16"),
        ({"K": 64}, "takes head dims K = V of"),
        ({"K": 256, "V": 256}, "takes head dims K = V of"),
        ({"sm": (8, 0)}, "needs compute capability 9.0, and this GPU has 8.0"),
        ({"T": 0}, "at least one token"),
    ],
    ids=str,
)
def test_what_the_backend_takes(with_kernels, change, reason):
    choice = choose("lightning_fwd", dataclasses.replace(HOPPER, **change))
    if reason is None:
        assert choice.name == "cute_sm90"
    else:
        assert choice.name == "triton"
        assert reason in dict(choice.passed_over)["cute_sm90"]


def test_without_kernels_the_reason_says_what_to_do(monkeypatch):
    monkeypatch.setattr(loader, "missing", lambda arch: f"no kernels for {arch}: compile them")
    assert dict(choose("lightning_fwd", HOPPER).passed_over)["cute_sm90"] == "no kernels for sm_90a: compile them"


@pytest.mark.parametrize("T", [1, 64, 65, 1000, 8192, 131072])
@pytest.mark.parametrize(("N", "HV"), [(1, 1), (1, 8), (2, 64), (7, 96), (300, 4)])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("sm", "chunk"), [((9, 0), CHUNK), ((10, 0), 128)], ids=["sm90", "sm100"])
def test_a_schedule_covers_every_token(T, N, HV, is_packed, D, sm, chunk):
    problem = dataclasses.replace(HOPPER, sm=sm, B=1 if is_packed else N, T=T, N=N, H=HV, HV=HV, K=D, V=D, is_packed=is_packed)
    schedule = choose_schedule(problem, NUM_SMS)
    assert schedule.segment % chunk == 0
    assert 1 <= schedule.num_blocks <= NUM_SMS
    if not schedule.segment:
        assert schedule.num_ids == N
    elif is_packed:
        assert schedule.num_ids == T // schedule.segment + N  # what `locate` counts on
    else:
        assert (schedule.per_seq - 1) * schedule.segment < T <= schedule.per_seq * schedule.segment
        assert schedule.num_ids == N * schedule.per_seq


def test_few_long_sequences_are_split_and_many_are_not():
    def schedule(**change):
        return choose_schedule(dataclasses.replace(HOPPER, **change), NUM_SMS)

    assert schedule(T=131072, H=8, HV=8).segment
    assert not schedule(B=2, N=2, T=16384).segment
    assert not schedule(B=64, N=64, T=1024).segment


def test_how_a_call_is_spread_is_told():
    few, many = dataclasses.replace(HOPPER, T=131072, H=8, HV=8), dataclasses.replace(HOPPER, B=64, N=64, T=1024)
    made = choose_schedule(few, NUM_SMS)
    told = f"two kernels, segments of {made.segment} tokens, on {made.num_blocks} blocks"
    assert lightning.spread("lightning_fwd", few, NUM_SMS) == told
    assert lightning.spread("lightning_fwd", many, NUM_SMS).startswith("one kernel, whole sequences, on 132 blocks")
    assert lightning.spread("lightning_bwd", few, NUM_SMS) is None


def test_a_batch_invariant_sequence_is_split_by_its_own_length():
    def made(is_invariant):
        options = HOPPER.options._replace(batch_invariant=is_invariant)
        calls = [{"B": 1, "N": 1, "T": 500}, {"B": 1, "N": 1, "T": 131072}, {"B": 16, "N": 16, "T": 2048}]
        calls.append({"B": 1, "N": 5, "T": 40000, "is_packed": True})
        problems = [dataclasses.replace(HOPPER, H=8, HV=8, options=options, **call) for call in calls]
        return {(s.kernel, s.segment) for s in (choose_schedule(p, NUM_SMS) for p in problems)}

    assert len(made(True)) == 1 and len(made(False)) > 1


CASES = {
    "whole": dict(call=LightningCall(T=200, B=2)),
    "one token": dict(call=LightningCall(T=1)),
    "packed": dict(call=LightningCall(lens=(70, 0, 5, 128, 64))),
    "no state": dict(call=LightningCall(lens=(70, 5), initial_state=False)),
    "strong decay": dict(call=LightningCall(T=300, decay=20.0), per_seq=3),
    "no decay": dict(call=LightningCall(T=300, decay=0.0), per_seq=3),
    "split": dict(call=LightningCall(T=500, B=2), per_seq=4),
    "packed, split": dict(call=LightningCall(lens=(700, 0, 5, 128, 64, 33)), per_seq=3),
    "packed, split, no state": dict(call=LightningCall(lens=(700, 5, 128), initial_state=False), per_seq=4),
}


@pytest.fixture
def device(monkeypatch):
    """A Hopper GPU where there is one; otherwise the CPU, with the kernels' code interpreted."""
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() != (9, 0) or loader.missing("sm_90a"):
            pytest.skip(loader.missing("sm_90a") or "needs a Hopper GPU")
        return torch.device("cuda")
    if build.missing():
        pytest.skip(build.missing())
    ptx.interpret(monkeypatch, lightning)
    return torch.device("cpu")


def run(call, kernel, per_seq, device):
    """Outputs and last states of a call, and the same from the recurrence. On a GPU it runs twice."""
    tensors = call.tensors(device)
    problem, x = check_lightning(LightningInputs(**tensors), LightningOptions(output_final_state=True))
    schedule = make_schedule(problem, kernel, per_seq, NUM_SMS)
    state = torch.full((problem.N, problem.HV, problem.V, problem.K), float("nan"), device=device)
    out = torch.full_like(x.v, float("nan"))
    o = lightning.run(problem, x, schedule, state, out)
    assert o is out
    if device.type == "cuda":
        again = lightning.run(problem, x, schedule, torch.empty_like(state))
        assert torch.equal(o, again), "two runs give the same bits"
    return (o, state), reference.lightning(**tensors)


def schedules():
    """Every kernel with every case; of the kernels beside the first those that take other ways are enough for a quick run."""
    for kernel in ("d128", "d128_half", "d64"):
        for name in CASES:
            is_quick = kernel == "d128" or name == "packed"
            yield pytest.param(kernel, name, marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.parametrize(("kernel", "name"), [*schedules()])
def test_every_kernel_and_schedule_matches_the_recurrence(device, kernel, name):
    D = 64 if kernel == "d64" else 128
    call = dataclasses.replace(CASES[name]["call"], dtype=torch.bfloat16, H=1, HV=2, K=D, V=D)
    (o, state), (want_o, want_state) = run(call, kernel, CASES[name].get("per_seq", 1), device)
    assert relative_error(o, want_o) < TOLERANCE[torch.bfloat16]
    assert relative_error(state, want_state) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("edit", [without_wait(-1), without(WGMMA_WAIT, 1)], ids=["no wait for tiles", "no wait for products"])
def test_a_broken_kernel_is_noticed(monkeypatch, edit):
    if build.missing() or torch.cuda.is_available():
        pytest.skip(build.missing() or "the interpreter is for machines without a GPU")
    ptx.interpret(monkeypatch, lightning)(edit=edit)
    call = LightningCall(dtype=torch.bfloat16, T=200, H=1, HV=1, K=64, V=64)
    with contextlib.suppress(ptx.SimulationError):
        (o, _), (want, _) = run(call, "d64", 1, torch.device("cpu"))
        assert not relative_error(o, want) < TOLERANCE[torch.bfloat16]


def test_another_sequences_nan_stays_there(device):
    """Last chunks read on into the next sequence; nothing of it may come through, not even times zero."""
    call = LightningCall(dtype=torch.bfloat16, lens=(70, 40, 66), H=1, HV=1, K=128, V=128)
    tensors = call.tensors(device)
    want_o, want_state = reference.lightning(**tensors)
    for name in ("q", "k", "v"):
        tensors[name][:, 70:110] = float("nan")
    problem, x = check_lightning(LightningInputs(**tensors), LightningOptions(output_final_state=True))
    state = torch.empty(3, 1, 128, 128, device=device)
    o = lightning.run(problem, x, make_schedule(problem, "d128", 1, NUM_SMS), state)
    healthy = [*range(70), *range(110, 176)]
    assert relative_error(o[:, healthy], want_o[:, healthy]) < TOLERANCE[torch.bfloat16]
    assert relative_error(state[[0, 2]], want_state[[0, 2]]) < TOLERANCE[torch.bfloat16]


def force(monkeypatch, per_seq):
    """A schedule with so many segments to a sequence, whatever is cheapest."""
    choose = lambda problem, num_sms: make_schedule(problem, "d128", per_seq, NUM_SMS)
    monkeypatch.setattr(lightning, "schedule_on", lambda problem, device: choose(problem, NUM_SMS))
    monkeypatch.setattr(lightning, "choose_schedule", choose)
    monkeypatch.setattr(lightning, "sms_of", lambda device: NUM_SMS)


@pytest.mark.parametrize("per_seq", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pool_is_updated_in_place_and_nothing_else_is_touched(device, per_seq, dtype, monkeypatch):
    force(monkeypatch, per_seq)
    call = LightningCall(dtype=torch.bfloat16, lens=(300, 64, 0, 5, 70), H=1, HV=2, K=128, V=128, initial_state=False)
    t = call.tensors(device)
    problem, x = check_lightning(LightningInputs(**t), LightningOptions(output_final_state=True))
    slots = torch.tensor([6, 0, 2, 1, 4] if dtype == torch.float16 else [6, -1, 2, 0, 4], device=device)
    fresh = torch.tensor([True, True, True, True, False], device=device)
    pool = torch.randn(8, 2, 128, 128, device=device).to(dtype)
    least = int(dtype == torch.float16)  # where index 0 is null
    unlisted = [slot for slot in range(8) if slot < least or slot not in slots.tolist()]
    pool[unlisted] = float("nan")
    before = pool.clone()
    o = lightning.lightning_fwd_pool(problem, x, Pool(pool, slots, fresh, least == 1))
    live = slots >= least
    first = torch.where((live & fresh)[:, None, None, None], before[slots.clamp(min=0)].float(), 0)
    want_o, want_state = reference.lightning(**{**t, "initial_state": first})
    assert relative_error(o, want_o) < TOLERANCE[torch.bfloat16]
    assert relative_error(pool[slots[live]], want_state[live]) < TOLERANCE[torch.bfloat16]
    assert torch.equal(pool[unlisted].view(torch.uint8), before[unlisted].view(torch.uint8))


def test_which_pools_are_updated_in_place():
    for changes, reason in (
        ({"pool_dtype": torch.float32}, None),
        ({"pool_dtype": torch.bfloat16}, None),
        ({"pool_dtype": torch.bfloat16, "has_aligned_slots": False}, "it reads states in pairs"),
        ({"pool_dtype": torch.float16}, None),
    ):
        found = lightning.pool_why_not(dataclasses.replace(HOPPER, **changes))
        assert found is None if reason is None else found.startswith(reason)


def test_a_strided_packed_projection_is_read_as_it_lies(device):
    B, T, H, D = 2, 100, 2, 128
    mixed = torch.randn(B, T, 3 * H * D, dtype=torch.bfloat16).to(device)
    q, k, v = (part.unflatten(-1, (H, D)) for part in mixed.chunk(3, dim=-1))
    decay = torch.tensor([0.1, 0.5], device=device)
    problem, x = check_lightning(LightningInputs(q, k, v, decay), LightningOptions())
    o = lightning.run(problem, x, make_schedule(problem, "d128", 1, NUM_SMS))
    want, _ = reference.lightning(q, k, v, decay)
    assert relative_error(o, want) < TOLERANCE[torch.bfloat16]


NOT_SERVED = (None,) * 5  # tensors of a call behind `out`


@pytest.fixture(params=["python", "c"])
def launched(monkeypatch, request):
    """The name and the arguments of every launch, instead of launches."""
    return instead_of_launches(monkeypatch, lightning, request.param)


@pytest.mark.parametrize("name", ["whole", "packed", "no state", "packed, split"])
def test_a_recorded_launch_is_that_of_a_call(launched, monkeypatch, name):
    per_seq = CASES[name].get("per_seq", 1)
    force(monkeypatch, per_seq)
    call = dataclasses.replace(CASES[name]["call"], dtype=torch.bfloat16, H=1, HV=2, K=128, V=128)
    problem, x = check_lightning(LightningInputs(**call.tensors("cpu")), LightningOptions(output_final_state=True))
    out = torch.empty_like(x.v)
    want_state = lightning.lightning_fwd(problem, x, out).final_state
    first = launched.copy()
    launched.clear()
    o, state = replay(lightning.record_lightning_fwd(problem, x, out), (*x, out, *NOT_SERVED))
    assert o is out and state.shape == want_state.shape and state.is_contiguous()
    fresh = [1 + [a.name for a in LIGHTNING.addresses].index(name) for name in ("ht", "seeds")]  # new each time
    for before, after in zip(first, launched, strict=True):
        assert [a for i, a in enumerate(before) if i not in fresh] == [a for i, a in enumerate(after) if i not in fresh]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("index", "has_mask"), [(torch.int32, False), (torch.int64, True)])
def test_a_recorded_launch_on_a_pool_is_that_of_a_call(launched, monkeypatch, dtype, index, has_mask):
    force(monkeypatch, 1)
    states = torch.zeros(9, 2, 128, 128, dtype=dtype)
    again = None
    for lens in ((300, 64), (7,) * 5):
        call = LightningCall(lens=lens, dtype=torch.bfloat16, H=1, HV=2, K=128, V=128, initial_state=False)
        p, x = check_lightning(LightningInputs(**call.tensors("cpu")), LightningOptions(output_final_state=True))
        slots = torch.stack([torch.arange(len(lens))] * 2, 1).to(index)[:, 0]
        pool, out = Pool(states, slots, torch.ones(len(lens), dtype=torch.bool) if has_mask else None), torch.empty_like(x.v)
        lightning.lightning_fwd_pool(p, x, pool, out)
        given = (*x, out, *pool[:3], None, None)
        if again is None:
            again = record.replayer(given, lightning.record_lightning_fwd_pool(p, x, pool, out))
        o, state = again(given)
        assert o is out and state is None
        before, after = launched
        assert before == after
        launched.clear()


@pytest.mark.parametrize("per_seq", [1, 3])
def test_a_recorded_launch_serves_other_lengths(launched, monkeypatch, per_seq):
    force(monkeypatch, per_seq)
    calls = [
        LightningCall(lens=lens, dtype=torch.bfloat16, H=1, HV=2, K=128, V=128) for lens in ((300, 64), (7,) * 5, (900, 0, 2))
    ]
    inputs = [check_lightning(LightningInputs(**c.tensors("cpu")), LightningOptions(output_final_state=True)) for c in calls]
    p, x = inputs[0]
    again = record.replayer((*x, None, *NOT_SERVED), lightning.record_lightning_fwd(p, x))
    for p, x in inputs:
        launched.clear()
        want = lightning.lightning_fwd(p, x)
        first = launched.copy()
        launched.clear()
        o, state = again((*x, None, *NOT_SERVED))
        assert o.shape == want.o.shape and state.shape == want.final_state.shape
        for before, after in zip(first, launched, strict=True):
            assert [a for i, a in enumerate(before) if i not in (4, 7, 8)] == [
                a for i, a in enumerate(after) if i not in (4, 7, 8)
            ]


def test_a_recorded_launch_is_for_tensors_that_need_no_copy(launched, monkeypatch):
    force(monkeypatch, 1)
    call = LightningCall(T=100, B=2, dtype=torch.bfloat16, H=2, HV=2, K=128, V=128)
    problem, x = check_lightning(LightningInputs(**call.tensors("cpu")), LightningOptions(output_final_state=True))
    again = lightning.record_lightning_fwd(problem, x)
    o, state = replay(again, (*x, None, *NOT_SERVED))
    assert o.shape == x.v.shape and o.dtype == torch.bfloat16 and state.dtype == torch.float32
    odd = torch.empty(x.q.numel() + 1, dtype=x.q.dtype)[1:].view(x.q.shape)
    assert replay(again, (*x._replace(q=odd), None, *NOT_SERVED)) is None
    assert lightning.record_lightning_fwd(problem, x._replace(q=torch.cat([x.q, x.q], dim=1)[:, :100])) is None


@pytest.mark.gpu
def test_the_public_call_updates_a_pool_in_place(device):
    call = LightningCall(dtype=torch.bfloat16, lens=(300, 5, 70), H=2, HV=4, K=128, V=128, initial_state=False)
    t = call.tensors(device)
    slots = torch.tensor([3, -1, 0], device=device)
    pools = [torch.randn(5, 4, 128, 128, device=device)]
    pools += [pools[0].clone(), pools[0].clone()]
    given = (t["q"], t["k"], t["v"], t["decay"])
    results = [
        cula.cula_lightning(*given, cu_seqlens=t["cu_seqlens"], state_pool=pool, initial_state_indices=slots, backend=backend)
        for pool, backend in zip(pools, ("cute_sm90", "cute_sm90", "triton"))
    ]
    assert torch.equal(results[0][0], results[1][0]), "the second call, recorded, gives the same bits"
    assert torch.equal(pools[0], pools[1])
    assert relative_error(results[0][0], results[2][0]) < TOLERANCE[torch.bfloat16]
    assert relative_error(pools[0], pools[2]) < TOLERANCE[torch.bfloat16]
