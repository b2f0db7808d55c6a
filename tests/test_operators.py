# SPDX-License-Identifier: Apache-2.0
"""torch.library operators: opcheck, and models that torch.compile takes whole."""

from types import SimpleNamespace

import pytest
import torch
from torch.library import opcheck

import cula
from cula import operators
from cula.contract import DecodeInputs, DecodeOptions, check_decode
from tests.support.calls import KdaCall, LightningCall

KDA_FLAGS = "use_gate_in_kernel use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel output_final_state"


def leaves(tensors):
    return {n: t.requires_grad_() if t is not None and t.is_floating_point() and n != "decay" else t for n, t in tensors.items()}


@pytest.mark.parametrize(
    "call", [KdaCall(T=5, gate="softplus"), KdaCall(lens=(3, 0, 4), gate="softplus", initial_state=False)], ids=str
)
def test_opcheck_kda(call):
    opcheck(torch.ops.cula.kda.default, (*leaves(call.tensors()).values(), None, None, KDA_FLAGS, "auto"))


@pytest.mark.parametrize("call", [LightningCall(T=5), LightningCall(lens=(3, 0, 4), initial_state=False)], ids=str)
def test_opcheck_lightning(call):
    opcheck(torch.ops.cula.lightning.default, (*leaves(call.tensors()).values(), None, True, 64, "auto"))


@pytest.mark.parametrize("has_out", [False, True])
def test_opcheck_decode(has_out):
    t = KdaCall(T=2, B=3).tensors()
    pool = torch.randn(5, 2, 32, 32)
    buffer = torch.zeros(3, 2, 2, 32, 32)
    out = torch.zeros(3, 2, 2, 32) if has_out else None
    args = (t["q"], t["k"], t["v"], pool, torch.tensor([4, -1, 0]), t["g"], t["beta"], None, None, None, None, buffer, out)
    opcheck(torch.ops.cula.decode.default, (*args, None, None, "is_kda commit", "auto"))


def test_a_decode_plan_is_for_tensors_that_were_not_copied(monkeypatch):
    t = KdaCall(T=2, B=3).tensors()
    given = DecodeInputs(t["q"], t["k"], t["v"], torch.randn(3, 2, 32, 32), g=t["g"], beta=t["beta"])
    problem, x, _ = check_decode(given, DecodeOptions())
    backend = SimpleNamespace(find=lambda name: lambda *arguments: (name, *arguments))
    monkeypatch.setattr(operators, "choose", lambda *arguments: SimpleNamespace(backend=backend))
    assert operators.decode_plan(problem, x, given) == ("record_decode", problem, x, given)
    assert operators.decode_plan(problem, x._replace(k=x.k.clone()), given) is None


def model(q, k, v, g, beta, A_log, dt_bias, decay, h0):
    o, state = cula.cula_kda(
        q * 1.5,
        k,
        v.tanh(),
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=h0,
        output_final_state=True,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    o2, state2 = cula.cula_lightning(q, k, o, decay, initial_state=state, output_final_state=True)
    return o2.sin().sum() + state2.square().sum()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_fullgraph_training(compiler):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for T in (5, 9) if compiler == "inductor" else (5, 70, 9):
        results = []
        for function in (model, compiled):
            t = KdaCall(T=T, H=2, HV=2, gate="softplus").tensors()
            decay = torch.tensor([0.1, 0.7])
            inputs = [t[n].requires_grad_() for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")]
            h0 = t["initial_state"].requires_grad_()
            loss = function(*inputs, decay, h0)
            results.append([loss.detach(), *torch.autograd.grad(loss, [*inputs, h0])])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)


def test_compile_fullgraph_serving():
    """Prefill into a pool and decode from it, in one graph; the graph sees what the pool holds afterwards."""

    def serve(tensors, token, pool, slots):
        o, _ = cula.cula_kda(**tensors, state_pool=pool, initial_state_indices=slots)
        o2, _ = cula.cula_decode(**token, state=pool, state_indices=slots)
        return o, o2, pool.sum()

    torch._dynamo.reset()
    compiled = torch.compile(serve, fullgraph=True, backend="aot_eager")
    prompt = KdaCall(lens=(7, 5), initial_state=False).tensors()
    step = KdaCall(T=1, B=2).tensors()
    step.pop("initial_state")
    step.pop("cu_seqlens")
    slots = torch.tensor([3, -1])
    results = []
    for function in (serve, compiled):
        pool = torch.randn(4, 2, 32, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            results.append([*function(prompt, step, pool, slots), pool])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_compile_says_what_is_wrong():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, g: cula.cula_kda(q, q, q, g, g[..., 0])[0], fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"g has shape \[1, 4, 1, 16\]; expected \[B, T, HV, K\]"):
        compiled(torch.randn(1, 4, 1, 32), torch.randn(1, 4, 1, 16))


def test_gradient_of_only_the_final_state():
    t = leaves(KdaCall(T=20).tensors())
    inputs = [x for x in t.values() if x is not None]
    _, state = cula.cula_kda(**t, output_final_state=True)
    dq, dk, *_ = torch.autograd.grad(state.sum(), inputs)
    assert not dq.any(), "the state does not depend on q"
    assert dk.any()


def test_second_derivatives_are_refused():
    q = torch.randn(1, 4, 1, 32, requires_grad=True)
    o, _ = cula.cula_lightning(q, q, q, torch.ones(1))
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()
