# SPDX-License-Identifier: Apache-2.0
"""Training steps by records: the same gradients as the long way, bit for bit. On a GPU; what is recorded is tested without one in
`tests/ops/triton/test_recording.py`."""

from types import SimpleNamespace

import pytest
import torch

import cula
from cula.core import operator
from cula.core.family import FAMILIES
from cula.core.replay.cache import ReplayCache
from cula.kda.problem import KdaInputs, KdaOptions
from tests.support.calls import GdnCall, KdaCall, LightningCall

NAMES = {"q": "Q", "k": "K", "v": "V"}
BF16 = torch.bfloat16
WIDE = {"dtype": BF16, "K": 128, "V": 128}
CALLS = {
    "kda": KdaCall(T=100, H=2, HV=4, gate="bounded", norm=True, beta="sigmoid", gate_dtype=BF16, **WIDE),
    "kda, softplus": KdaCall(T=65, H=2, HV=2, gate="softplus", norm=True, beta="sigmoid", initial_state=False, **WIDE),
    "kda, packed": KdaCall(lens=(70, 0, 3, 64), H=1, HV=2, gate="bounded", norm=True, beta="sigmoid", **WIDE),
    "kda, segments": KdaCall(T=2048, H=1, HV=1, gate="bounded", norm=True, beta="sigmoid", **WIDE),
    "kda, more kept": KdaCall(lens=(70, 0, 3, 640), H=1, HV=2, gate="bounded", norm=True, beta="sigmoid", **WIDE),
    "kda, other head dims": KdaCall(T=65, H=1, HV=2, K=60, V=100, gate="softplus", norm=True, beta="sigmoid", dtype=BF16),
    "gdn": GdnCall(T=100, H=2, HV=4, gate="softplus", norm=True, beta="sigmoid", gate_dtype=BF16, **WIDE),
    "gdn, keys that come normalised": GdnCall(T=100, H=2, HV=4, initial_state=False, **WIDE),
    "lightning": LightningCall(T=100, H=2, HV=2, **WIDE),
    "lightning, packed": LightningCall(lens=(70, 0, 3, 64), H=2, HV=2, **WIDE),
}


def step(call, seed, backend, **options):
    """Outputs and gradients of one step, from inputs and gradients of outputs that the seed gives."""
    is_kda = isinstance(call, KdaCall)
    tensors = (call.with_(seed=seed) if is_kda else type(call)(**vars(call) | {"seed": seed})).tensors("cuda")
    leaves = {n: t for n, t in tensors.items() if t is not None and t.is_floating_point()}
    leaves.pop("decay", None)  # whose gradient triton does not make yet
    for t in leaves.values():
        t.requires_grad_()
    if is_kda:
        function = cula.cula_gdn if isinstance(call, GdnCall) else cula.cula_kda
        o, state = function(**tensors, **call.switches(), output_final_state=True, backend=backend, **options)
    else:
        o, state = cula.cula_lightning(
            **{NAMES.get(n, n): t for n, t in tensors.items()}, output_final_state=True, backend=backend
        )
    torch.manual_seed(seed)
    given = [torch.randn_like(o), torch.randn_like(state)]
    return [o, state, *torch.autograd.grad([o, state], list(leaves.values()), given)]


@pytest.mark.parametrize("shares_saved", [False, True])
def test_what_a_record_saves_is_for_the_same_backend(monkeypatch, shares_saved):
    """A forward may keep more, and the backward be another backend's after all: that is not handed what it did not make."""
    call = KdaCall(T=3)
    problem, x = FAMILIES["kda"].check(KdaInputs(**call.tensors()), KdaOptions(**call.switches()), "cula_kda")
    o, saved = torch.zeros(1), torch.ones(1)
    monkeypatch.setattr(ReplayCache, "run", lambda self, tensors, static_args: (o, None, saved))
    choice = SimpleNamespace(name="cute_sm90", shares_saved=shares_saved, backend=SimpleNamespace(find=lambda *names: print))
    assert operator._forward(problem, choice, x) == (o, None, (saved,) if shares_saved else ())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_steps_by_record_are_steps(name, backend, monkeypatch):
    call, options = CALLS[name], {"disable_recompute": True} if name.endswith("more kept") else {}
    replay = FAMILIES[name.split(",")[0]].replay
    replay.forget()
    by_record = [step(call, seed, backend, **options) for seed in (0, 1, 2, 0)]
    assert replay._records or replay._of_any_size, "nothing was recorded"
    monkeypatch.setattr(ReplayCache, "run", lambda self, tensors, static_args: None)
    for seed, got in zip((0, 1, 2, 0), by_record):
        for a, b in zip(got, step(call, seed, backend, **options)):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_gradients_in_another_layout_have_a_record_of_their_own():
    call = CALLS["kda"]
    t = {n: x.requires_grad_() if x is not None and x.is_floating_point() else x for n, x in call.tensors("cuda").items()}
    leaves = [x for x in t.values() if x is not None and x.requires_grad]
    want = None
    for do in (
        torch.ones(1, 100, 4, 128, device="cuda", dtype=BF16),
        torch.ones(1, 1, 1, 1, device="cuda", dtype=BF16).expand(1, 100, 4, 128),
    ):
        for _ in range(3):
            o, _ = cula.cula_kda(**t, **call.switches())
            got = torch.autograd.grad(o, leaves, do, allow_unused=True)
            want = got if want is None else want
            for a, b in zip(got, want):
                assert a is b is None or torch.equal(a, b)


@pytest.mark.gpu
def test_a_step_that_asks_for_another_gradient_is_another_call():
    """After steps without it, the gradient of decay is there when it is asked for."""
    for learns in (False, False, True, False, True):
        t = CALLS["lightning"].tensors("cuda")
        leaves = [t["q"].requires_grad_(), *([t["decay"].requires_grad_()] if learns else [])]
        o, _ = cula.cula_lightning(**{NAMES.get(n, n): x for n, x in t.items()})
        grads = torch.autograd.grad(o.float().square().sum(), leaves)
        assert all(g is not None and bool(g.any()) for g in grads)
