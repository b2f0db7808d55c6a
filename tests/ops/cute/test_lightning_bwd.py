# SPDX-License-Identifier: Apache-2.0
"""The backward of Lightning Attention on the CuTe kernels: its numbers beside float64 autograd, whom it serves, its recorded
launches, kernels broken on purpose.

The same cases run in the interpreter of compiled kernels (here, without a GPU) and on a GPU. Gradients start as NaN, and so does
what segments leave to each other: what a kernel reads before it was written shows.
"""

import contextlib
import dataclasses

import pytest
import torch

import cula
from cula import reference
from cula.core.constants import CHUNK
from cula.core.dispatch import choose
from cula.lightning.problem import LightningInputs, LightningOptions
from cula.ops.cute import bwd_self_check, lightning, lightning_bwd
from cula.ops.cute.lightning_bwd_abi import LIGHTNING_BWD
from cula.ops.cute.lightning_schedule import BACKWARD, choose_schedule, make_schedule
from cula.ops.cute.toolchain import loader, self_check
from cula.reference import relative_error
from tests.ops.cute.test_lightning import HOPPER, NUM_SMS, check_lightning
from tests.support.calls import LightningCall
from tests.support.cute import poison_new_memory, skip_without_dsl
from tests.support.orders import in_each_order
from tests.support.replay import instead_of_launches, replay
from tools import ptx
from tools.ptx.mutate import NAMED_BARRIER, WGMMA_WAIT, without, without_wait

# Rounding to bf16 alone is 1.7e-3, and the states that gradients are made with are rounded too.
TOLERANCE = {"q": 3.5e-3, "k": 3.5e-3, "v": 3.5e-3, "initial_state": 2.5e-3}
BF16 = torch.bfloat16

# (kernel, call, segments to a sequence, whether there is a gradient of the last state)
PACKED = "d64", LightningCall(lens=(70, 0, 5, 128, 1), H=2), 1, True
SPLIT = "d64", LightningCall(lens=(300, 0, 5, 128), H=2), 3, True
SHORT = "d64", LightningCall(T=130, H=1, HV=1), 1, True
CASES = {
    "packed": PACKED,
    "split": SPLIT,
    "strong decay, split": ("d64", LightningCall(T=300, H=2, decay=40.0), 3, False),
    "128, packed": ("d128", LightningCall(lens=(70, 0, 65), H=1, initial_state=False), 1, True),
}
MORE = {
    "one token": ("d64", LightningCall(T=1, H=2), 1, True),
    "batch": ("d64", LightningCall(T=200, B=2, H=2), 1, True),
    "no states": ("d64", LightningCall(T=200, H=2, initial_state=False), 1, False),
    "no decay": ("d64", LightningCall(T=300, H=2, decay=0.0), 3, True),
    "batch, split": ("d64", LightningCall(T=500, B=2, H=2), 4, True),
    "128, split": ("d128", LightningCall(T=300, H=2), 3, True),
    "128, one token": ("d128", LightningCall(T=1, H=2), 1, True),
    "128, batch": ("d128", LightningCall(T=200, B=2, H=2), 1, False),
    "128, packed, split": ("d128", LightningCall(lens=(700, 0, 5, 128, 64, 33), H=2), 3, True),
    "128, split, no states": ("d128", LightningCall(lens=(700, 5, 128), H=2, initial_state=False), 4, False),
    "128, strong decay": ("d128", LightningCall(T=300, H=2, decay=40.0), 3, True),
}


def make(kernel, call, device):
    """Tensors of a call on such a kernel, with as many heads of keys as of values."""
    D = 64 if kernel == "d64" else 128
    return dataclasses.replace(call, dtype=BF16, HV=call.H, K=D, V=D).tensors(device)


def gradients_of_outputs(p, device):
    random = torch.Generator().manual_seed(1)
    do = torch.randn(p.B, p.T, p.HV, p.V, generator=random).to(BF16).to(device)
    return do, torch.randn(p.N, p.HV, p.V, p.K, generator=random).to(device)


def wanted(tensors, do, dht):
    """By autograd through the definition, in float64; by name."""
    leaves = {n: t.double().requires_grad_() if n in TOLERANCE and t is not None else t for n, t in tensors.items()}
    o, ht = reference.lightning(**leaves)
    torch.autograd.backward((o, ht), (do.double(), torch.zeros_like(ht) if dht is None else dht.double()))
    return {n: None if leaves[n] is None else leaves[n].grad for n in TOLERANCE}


def errors(kernel, call, per_seq, has_dht, device):
    """Of every gradient that there is, by the name of its input."""
    tensors = make(kernel, call, device)
    p, x = check_lightning(LightningInputs(**tensors), LightningOptions(output_final_state=True))
    do, dht = gradients_of_outputs(p, device)
    dht = dht if has_dht else None
    got = lightning_bwd.run(p, x, make_schedule(p, kernel, per_seq, NUM_SMS, BACKWARD), do, dht)
    want = wanted(tensors, do, dht)
    given = {"q": got.dq, "k": got.dk, "v": got.dv, "initial_state": got.dh0}
    assert [t is None for t in given.values()] == [t is None for t in want.values()] and got.d_decay is None
    return {name: relative_error(t, want[name]) for name, t in given.items() if t is not None}


def is_right(kernel, call, per_seq, has_dht, device="cpu"):
    found = errors(kernel, call, per_seq, has_dht, device)
    print(found)
    return all(error < TOLERANCE[name] for name, error in found.items())


@pytest.fixture
def interpreted(monkeypatch):
    """`lightning_bwd.run` on CPU tensors, its kernels in the interpreter; for the function returned see `ptx.interpret`."""
    skip_without_dsl()
    poison_new_memory(monkeypatch)
    return ptx.interpret(monkeypatch, lightning_bwd)


@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted, name):
    assert is_right(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_interpreted_more(interpreted, name):
    assert is_right(*MORE[name])


@in_each_order
def test_order_of_asynchronous_work_does_not_matter(interpreted, order):
    interpreted(order)
    assert is_right(*SHORT)


def test_there_are_no_races(interpreted):
    interpreted("late", races=True)
    assert is_right(*PACKED)


@pytest.mark.parametrize(
    ("order", "edit"),
    [
        ("late", without(WGMMA_WAIT, 1)),
        ("first", without(NAMED_BARRIER)),
        ("late", without_wait(-1)),
        ("late", lambda text: text.replace("ex2.approx.ftz.f32", "neg.f32")),
    ],
    ids=["no wait for products", "no barriers of warpgroups", "no wait for the last tiles", "no powers"],
)
def test_broken_kernels_are_noticed(interpreted, order, edit):
    interpreted(order, edit, races=True)
    with contextlib.suppress(ptx.SimulationError):
        assert not is_right(*SHORT)


def test_another_sequences_nan_stays_there(interpreted):
    """Chunks at a sequence's ends read on into its neighbours; nothing of them may come through, not even times zero."""
    tensors = make("d64", LightningCall(lens=(70, 40, 66), H=1), "cpu")
    p, x = check_lightning(LightningInputs(**tensors), LightningOptions(output_final_state=True))
    do, dht = gradients_of_outputs(p, "cpu")
    want = wanted(tensors, do, dht)
    for t in (x.q, x.k, x.v, do):
        t[:, 70:110] = float("nan")
    got = lightning_bwd.run(p, x, make_schedule(p, "d64", 1, NUM_SMS, BACKWARD), do, dht)
    healthy = [*range(70), *range(110, 176)]
    for name, t in zip("qkv", got):
        assert relative_error(t[:, healthy], want[name][:, healthy]) < TOLERANCE[name]
    assert relative_error(got.dh0[[0, 2]], want["initial_state"][[0, 2]]) < TOLERANCE["initial_state"]


def test_gradients_that_were_expanded_are_read(interpreted):
    """As those of a sum are: one number for all."""
    tensors = make("d64", LightningCall(T=70, H=1), "cpu")
    p, x = check_lightning(LightningInputs(**tensors), LightningOptions(output_final_state=True))
    do, dht = torch.ones((), dtype=BF16).expand(x.v.shape), torch.ones(()).expand(p.N, p.HV, p.V, p.K)
    got = lightning_bwd.run(p, x, make_schedule(p, "d64", 1, NUM_SMS, BACKWARD), do, dht)
    want = wanted(tensors, do, dht)
    assert all(relative_error(t, want[name]) < TOLERANCE[name] for name, t in zip("qkv", got))


# Who is served

TRAINING = dataclasses.replace(HOPPER, needs_grad=True, grads=("q", "k", "v"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"K": 64, "V": 64, "is_packed": True}, None),
        ({"grads": ("q", "decay")}, "has no kernel for the gradient of decay"),
        ({"H": 32}, "value heads that share keys, and this call has H = 32, HV = 64"),
        ({"dtype": torch.float16}, "takes bfloat16"),
        ({"K": 64}, "takes head dims K = V of"),
        ({"sm": (10, 0)}, "needs compute capability 9.0"),
    ],
    ids=str,
)
def test_whom_the_backward_serves(monkeypatch, change, reason):
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    choice = choose("lightning_bwd", dataclasses.replace(TRAINING, **change))
    if reason is None:
        assert choice.name == "cute_sm90"
    else:
        assert choice.name != "cute_sm90"
        assert reason in dict(choice.passed_over)["cute_sm90"]


def test_the_comparison_at_first_use_tells_right_from_wrong(interpreted, monkeypatch):
    monkeypatch.setattr(bwd_self_check, "OF_LIGHTNING", bwd_self_check.OF_LIGHTNING[:1])
    error = lambda: self_check.worst_error("bwd_lightning_d64", torch.device("cpu"), HOPPER.sm)
    assert error() < 3e-3
    real = lightning_bwd.run
    monkeypatch.setattr(lightning_bwd, "run", lambda *given: (made := real(*given))._replace(dv=made.dv.roll(1, 1)))
    assert not error() < self_check.LIMIT


# How it is launched


@pytest.mark.parametrize("T", [1, 65, 8192, 131072])
@pytest.mark.parametrize(("N", "H"), [(1, 1), (1, 32), (4, 16), (300, 4)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_schedule_covers_every_token(T, N, H, is_packed):
    p = dataclasses.replace(TRAINING, B=1 if is_packed else N, T=T, N=N, H=H, HV=H, is_packed=is_packed)
    s = choose_schedule(p, NUM_SMS, BACKWARD)
    assert s.kernel == "d128" and s.segment % CHUNK == 0
    assert s.num_blocks == min(3 * s.num_ids * H, NUM_SMS)
    tokens = s.segment * s.num_ids if s.segment else T * s.num_ids
    assert tokens >= T * (1 if is_packed else N)


def test_few_heads_are_split_and_many_are_not():
    def segment(**change):
        return choose_schedule(dataclasses.replace(TRAINING, **change), NUM_SMS, BACKWARD).segment

    assert segment(T=131072, H=8, HV=8)
    assert not segment(T=8192, H=32, HV=32)
    assert not segment(B=64, N=64, T=1024)


def test_a_batch_invariant_sequence_is_split_by_its_own_length():
    def made(is_invariant):
        options = TRAINING.options._replace(batch_invariant=is_invariant)
        calls = [{"B": 1, "N": 1, "T": 131072}, {"B": 16, "N": 16, "T": 2048}, {"N": 5, "T": 40000, "is_packed": True}]
        problems = [dataclasses.replace(TRAINING, H=8, HV=8, options=options, **call) for call in calls]
        return {(s.kernel, s.segment) for s in (choose_schedule(p, NUM_SMS, BACKWARD) for p in problems)}

    assert len(made(True)) == 1 and len(made(False)) > 1


@pytest.mark.parametrize(("T", "H", "names"), [(8192, 32, ["bwd_lightning_d128"]),
                                               (131072, 8, ["bwd_lightning_ends_d128", "bwd_lightning_d128"])])  # fmt: skip
def test_the_kernels_of_a_call_are_named(T, H, names):
    assert list(lightning.kernels("lightning_bwd", dataclasses.replace(TRAINING, T=T, H=H, HV=H), NUM_SMS)) == names


@pytest.fixture(params=["python", "c"])
def launched(monkeypatch, request):
    """The name and the arguments of every launch, instead of launches."""
    return instead_of_launches(monkeypatch, lightning_bwd, request.param)


def force(monkeypatch, kernel, per_seq):
    """A schedule with so many segments to a sequence, whatever is cheapest."""
    made = lambda problem, device, of: make_schedule(problem, kernel, per_seq, NUM_SMS, of)
    monkeypatch.setattr(lightning_bwd, "schedule_on", made)


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_launch_is_that_of_a_call(launched, monkeypatch, name):
    kernel, call, per_seq, has_dht = CASES[name]
    force(monkeypatch, kernel, per_seq)
    p, x = check_lightning(LightningInputs(**make(kernel, call, "cpu")), LightningOptions(output_final_state=True))
    do, dht = gradients_of_outputs(p, "cpu")
    dht = dht if has_dht else None
    want = lightning_bwd.lightning_bwd(p, x, (), do, dht)
    first = launched.copy()
    launched.clear()
    got = replay(lightning_bwd.record_lightning_bwd(p, x, (), do, dht), (*x, do, dht))
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous())
    names = [a.name for a in LIGHTNING_BWD.addresses]
    fresh = [1 + names.index(name) for name in ("dq", "dk", "dv", "dh0", "seeds")]  # new each time
    for before, after in zip(first, launched, strict=True):
        assert [a for i, a in enumerate(before) if i not in fresh] == [a for i, a in enumerate(after) if i not in fresh]
        assert [before[i] == 0 for i in fresh] == [after[i] == 0 for i in fresh]


def test_a_recorded_launch_is_for_tensors_that_need_no_copy(launched, monkeypatch):
    force(monkeypatch, "d64", 1)
    p, x = check_lightning(LightningInputs(**make("d64", LightningCall(T=70, H=1), "cpu")), LightningOptions())
    do, dht = gradients_of_outputs(p, "cpu")
    assert lightning_bwd.record_lightning_bwd(p, x, (), do, dht) is not None
    assert lightning_bwd.record_lightning_bwd(p, x, (), torch.ones((), dtype=BF16).expand(do.shape), dht) is None
    assert lightning_bwd.record_lightning_bwd(p, x, (), do, torch.ones(()).expand(dht.shape)) is None


# On a GPU


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or loader.missing("sm_90a"):
        pytest.skip(loader.missing("sm_90a") or "needs a Hopper GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES | MORE)
def test_on_a_gpu(hopper, name):
    assert is_right(*(CASES | MORE)[name], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("per_seq", [1, 7])
@pytest.mark.parametrize("kernel", ["d64", "d128"])
def test_long_and_repeatable(hopper, kernel, per_seq):
    """Thirty runs give the same bits, and those are right."""
    case = kernel, LightningCall(lens=(20000, 12345), H=4), per_seq, True
    assert is_right(*case, "cuda")
    p, x = check_lightning(LightningInputs(**make(kernel, case[1], "cuda")), LightningOptions(output_final_state=True))
    do, dht = gradients_of_outputs(p, "cuda")
    schedule = make_schedule(p, kernel, per_seq, NUM_SMS, BACKWARD)
    first = lightning_bwd.run(p, x, schedule, do, dht)
    for _ in range(29):
        again = lightning_bwd.run(p, x, schedule, do, dht)
        assert all(torch.equal(a, b) for a, b in zip(first, again) if a is not None)


@pytest.mark.gpu
def test_the_public_call_has_this_backward(hopper):
    tensors = make("d128", LightningCall(T=1000, B=2, H=8), "cuda")
    want = None
    for _ in range(3):  # the second and the third are recorded
        leaves = {n: t.detach().requires_grad_() if n in TOLERANCE and t is not None else t for n, t in tensors.items()}
        given = [leaves.pop(n) for n in ("q", "k", "v", "decay")]
        o, ht = cula.cula_lightning(*given, **leaves, output_final_state=True)
        do, dht = torch.ones_like(o), torch.ones_like(ht)
        torch.autograd.backward((o, ht), (do, dht))
        want = want or wanted(tensors, do, dht)
        for name, t in zip(TOLERANCE, (*given[:3], leaves["initial_state"])):
            assert relative_error(t.grad, want[name]) < TOLERANCE[name]
