# SPDX-License-Identifier: Apache-2.0
"""`cula.explain` is the call itself, up to its choice."""

from dataclasses import replace

import pytest
import torch

import cula
from cula.core import prefill
from cula.core.dispatch import IN_PLACE, choose_prefill
from cula.core.pool import Serving
from cula.kda.family import FAMILY as KDA
from cula.kda.problem import KdaInputs, KdaOptions
from cula.lightning.family import FAMILY as LIGHTNING
from cula.lightning.problem import LightningInputs, LightningOptions
from cula.ops.cute.toolchain import loader
from tests.support.calls import KdaCall

BF16, ONE = torch.bfloat16, torch.ones(1, dtype=torch.int32)


@pytest.fixture
def on_hopper(monkeypatch):
    """The choice of a described call, as if its tensors were on a Hopper with all that its kernels need."""
    monkeypatch.setattr(loader, "missing", lambda arch: None)

    def choose(request):
        return choose_prefill(replace(request.problem, device="cuda", sm=(9, 0)), may_run=False)

    return choose


def kda_request(serving=prefill.NOTHING_TO_SERVE, every=None):
    q = torch.randn(1, 128, 2, 128).to(BF16)
    x = KdaInputs(q, q, q, q, q[..., 0], torch.zeros(2), torch.zeros(2, 128))
    options = KdaOptions(lower_bound=-5.0, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)
    return prefill.describe(KDA, x, options, serving, every, None, "test")


def test_checkpoints_are_part_of_the_choice(on_hopper):
    assert on_hopper(kda_request()).checkpoints is None
    buffer = torch.zeros(2, 2, 128, 128)
    for serving, every in (
        (Serving(checkpoint_states=buffer), 64),
        (Serving(checkpoint_states=buffer, checkpoint_offsets=ONE), None),
    ):
        choice = on_hopper(kda_request(serving, every))
        assert choice.name == "cute_sm90"
        assert choice.checkpoints == IN_PLACE and "checkpoints are written by the kernel, in place" in str(choice)
    apart = torch.zeros(2, 128, 2, 128).transpose(1, 2)
    choice = on_hopper(kda_request(Serving(checkpoint_states=apart), 64))
    assert choice.checkpoints.startswith("around the kernel: it writes states in pairs, and rows of checkpoint_states are not")


def test_how_a_pool_is_handled_is_part_of_the_choice(on_hopper):
    pool = Serving(state_pool=torch.zeros(3, 2, 128, 128), initial_state_indices=torch.tensor([1]))
    choice = on_hopper(kda_request(pool))
    assert choice.pool == IN_PLACE and choice.checkpoints is None
    odd = Serving(state_pool=torch.zeros(3 * 2 * 128 * 128 + 1)[1:].view(3, 2, 128, 128), initial_state_indices=torch.tensor([1]))
    assert on_hopper(kda_request(odd)).pool.startswith("around the kernel: it reads states in pairs")
    q = torch.randn(1, 64, 2, 128).to(BF16)
    request = prefill.describe(LIGHTNING, LightningInputs(q, q, q, torch.ones(2)), LightningOptions(), pool, None, None, "test")
    choice = on_hopper(request)
    assert choice.pool == IN_PLACE and "the pool is read and written by the kernel, in place" in str(choice)


def test_nothing_is_written_and_bad_calls_are_refused():
    t = KdaCall(T=5, initial_state=False).tensors()
    pool, out = torch.ones(2, 2, 32, 32), torch.full((1, 5, 2, 32), 7.0)
    slots = torch.tensor([1])
    choice = cula.explain(cula.cula_kda, **t, state_pool=pool, initial_state_indices=slots, out=out)
    assert choice.name == "torch" and choice.op == "kda_fwd"
    assert bool((pool == 1).all()) and bool((out == 7).all())
    with pytest.raises(ValueError, match="state_pool needs initial_state_indices"):
        cula.explain("kda", **t, state_pool=pool)
    with pytest.raises(ValueError, match="made no call that is dispatched"):
        cula.explain(torch.ones, 3)


def test_the_backward_is_explained_too():
    t = KdaCall(T=5).tensors()
    t["q"].requires_grad_()
    choice = cula.explain("kda", **t)
    assert choice.backward.op == "kda_bwd" and "kda_bwd: torch" in str(choice)


def test_functions_of_every_level_are_explained():
    from cula.kda import chunk_kda

    t = KdaCall(T=5, initial_state=False).tensors()
    assert cula.explain(chunk_kda, t["q"], t["k"], t["v"], t["g"], t["beta"]).name == "torch"
