# SPDX-License-Identifier: Apache-2.0
"""torch.library operators: opcheck, and models that torch.compile takes whole."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.library import opcheck

import cula
from cula.core import decode, operator
from cula.core.problem import DecodeOptions
from cula.kda.family import FAMILY as KDA
from cula.kda.problem import KdaDecodeInputs
from tests.support.calls import KdaCall, LightningCall

KDA_FLAGS = "use_gate_in_kernel use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel output_final_state"


COMMON = (None, "auto", "test", False)  # device, backend, who, needs_grad


def leaves(tensors):
    return {n: t.requires_grad_() if t is not None and t.is_floating_point() and n != "decay" else t for n, t in tensors.items()}


@pytest.mark.parametrize(
    "call", [KdaCall(T=5, gate="softplus"), KdaCall(lens=(3, 0, 4), gate="softplus", initial_state=False)], ids=str
)
def test_opcheck_kda(call):
    opcheck(torch.ops.cula.kda.default, (*leaves(call.tensors()).values(), None, None, KDA_FLAGS, *COMMON))


@pytest.mark.parametrize("call", [LightningCall(T=5), LightningCall(lens=(3, 0, 4), initial_state=False)], ids=str)
def test_opcheck_lightning(call):
    opcheck(torch.ops.cula.lightning.default, (*leaves(call.tensors()).values(), None, 64, "output_final_state", *COMMON))


@pytest.mark.parametrize("has_out", [False, True])
def test_opcheck_decode(has_out):
    t = KdaCall(T=2, B=3).tensors()
    pool = torch.randn(5, 2, 32, 32)
    buffer = torch.zeros(3, 2, 2, 32, 32)
    out = torch.zeros(3, 2, 2, 32) if has_out else None
    args = (t["q"], t["k"], t["v"], pool, torch.tensor([4, -1, 0]), t["g"], t["beta"], None, None, None, buffer, None, None, out)
    opcheck(torch.ops.cula.kda_decode.default, (*args, None, None, "commit", *COMMON))


def test_a_record_of_a_decode_is_for_tensors_that_were_not_copied():
    t = KdaCall(T=2, B=3).tensors()
    given = KdaDecodeInputs(t["q"], t["k"], t["v"], torch.randn(3, 2, 32, 32), g=t["g"], beta=t["beta"])
    request = decode.describe_decode(KDA, given, DecodeOptions(), None, "test")
    choice = SimpleNamespace(backend=SimpleNamespace(find=lambda family, name: lambda *arguments: (name, *arguments)))
    assert decode.record(request, choice, given) == ("record_kda_decode", request.problem, request.x, given)
    copied = request._replace(x=request.x._replace(k=request.x.k.clone()))
    assert decode.record(copied, choice, given) is None


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


def kda_of(pool=None, slots=None, **more):
    call = KdaCall(T=130, B=2, initial_state=False)
    return call.tensors() | {"state_pool": pool, "initial_state_indices": slots} | more


def test_compile_fullgraph_with_everything_that_is_written():
    """A pool, an output and checkpoints, written inside one graph."""

    def serve(tensors, pool, slots, out, kept):
        o, state = cula.cula_kda(
            **tensors,
            state_pool=pool,
            initial_state_indices=slots,
            out=out,
            checkpoint_every=64,
            checkpoint_states=kept,
            output_final_state=True,
        )
        return o.sum(), state, pool.sum(), kept.sum()

    torch._dynamo.reset()
    results = []
    for function in (serve, torch.compile(serve, fullgraph=True, backend="aot_eager")):
        pool = torch.randn(4, 2, 32, 32, generator=torch.Generator().manual_seed(0))
        out, kept = torch.zeros(2, 130, 2, 32), torch.zeros(5, 2, 32, 32)
        tensors = KdaCall(T=130, B=2, initial_state=False).tensors()
        with torch.no_grad():
            results.append([*function(tensors, pool, torch.tensor([3, -1]), out, kept), pool, out, kept])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    assert results[1][-1][:4].any() and not results[1][-1][4].any()


WRONG = {
    "a shape": (lambda: {"g": torch.randn(2, 130, 2, 16)}, r"g has shape \[2, 130, 2, 16\]; expected \[B, T, HV, K\]"),
    "a pool without slots": (lambda: kda_of(torch.zeros(4, 2, 32, 32)), "state_pool needs initial_state_indices"),
    "slots without a pool": (lambda: kda_of(slots=torch.tensor([0, 1])), "initial_state_indices was given without state_pool"),
    "a pool of another layout": (lambda: kda_of(torch.zeros(4, 2, 32, 16), torch.tensor([0, 1])), r"expected \[P, HV, V, K\]"),
    "a pool beside an initial state": (
        lambda: kda_of(torch.zeros(4, 2, 32, 32), torch.tensor([0, 1]), initial_state=torch.zeros(2, 2, 32, 32)),
        "initial_state and state_pool were both given",
    ),
    "a device": (lambda: {"device": "cuda:0"}, "device='cuda:0' but q is on cpu"),
    "an out of another shape": (lambda: {"out": torch.zeros(2, 130, 2, 16)}, "out has shape"),
    "checkpoints off the chunk grid": (
        lambda: {"checkpoint_every": 63, "checkpoint_states": torch.zeros(4, 2, 32, 32)},
        "checkpoint_every is 63",
    ),
    "a pool in training": (
        lambda: kda_of(torch.zeros(4, 2, 32, 32), torch.tensor([0, 1])) | {"beta": torch.rand(2, 130, 2, requires_grad=True)},
        "state_pool is updated in place and has no gradient",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_eager_and_compile_run_the_same_checks(what, compiled):
    make, message = WRONG[what]
    given = kda_of() | make()
    torch._dynamo.reset()

    def model(tensors):
        return cula.cula_kda(**tensors)[0]

    function = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with pytest.raises((ValueError, RuntimeError), match=message):
        function(given)


def test_compile_runs_the_checks_of_decode():
    torch._dynamo.reset()
    t = KdaCall(T=1, B=2, initial_state=False).tensors()
    given = {n: t[n] for n in ("q", "k", "v", "g", "beta")} | {"state": torch.zeros(2, 2, 32, 32)}
    compiled = torch.compile(lambda given: cula.cula_decode(**given)[0], fullgraph=True, backend="aot_eager")
    for change, message in (
        ({"device": "cuda:0"}, "q is on cpu"),
        ({"beta": t["beta"][..., :1]}, "beta has shape"),
        ({"q": t["q"].clone().requires_grad_()}, "decode updates its state in place"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            compiled(given | change)


def test_a_function_is_marked_as_torch_marks_those_it_calls_while_tracing():
    def other():
        pass

    torch.compiler.assume_constant_result(other)
    assert vars(operator._meant) == vars(other)


def test_a_misspelt_keyword_names_the_right_one_under_the_compiler_too():
    torch._dynamo.reset()
    t = KdaCall(T=1, B=2, initial_state=False).tensors()
    tokens = {n: t[n] for n in ("q", "k", "v", "g", "beta")}
    for function, given, message in (
        (cula.cula_kda, {"A_logs": None}, "cula_kda: unknown keyword argument 'A_logs'; did you mean 'A_log'?"),
        (
            cula.cula_decode,
            {"state": torch.zeros(2, 2, 32, 32), "state_index": None},
            "'state_index'; did you mean 'state_indices'?",
        ),
    ):
        compiled = torch.compile(lambda given, function=function: function(**given)[0], fullgraph=True, backend="aot_eager")
        with pytest.raises((TypeError, RuntimeError), match=re.escape(message)):
            compiled(tokens | given)


def test_gradient_of_only_the_final_state():
    t = leaves(KdaCall(T=20).tensors())
    inputs = [x for x in t.values() if x is not None]
    _, state = cula.cula_kda(**t, output_final_state=True)
    dq, dk, *_ = torch.autograd.grad(state.sum(), inputs)
    assert not dq.any(), "the state does not depend on q"
    assert dk.any()


@pytest.mark.parametrize("loss", [lambda o: o.square().sum(), lambda o: o.sum()], ids=["square", "sum"])
def test_second_derivatives_are_refused(loss):
    """Whether the gradient that comes in requires one or, as that of a sum, does not; gradients themselves are as ever."""
    q = torch.randn(1, 4, 1, 32, requires_grad=True)
    o, _ = cula.cula_lightning(q, q, q, torch.ones(1))
    (want,) = torch.autograd.grad(loss(o), q, retain_graph=True)
    (dq,) = torch.autograd.grad(loss(o), q, create_graph=True)
    assert torch.equal(dq, want)
    for differentiate in (lambda y: torch.autograd.grad(y, q, allow_unused=True), torch.Tensor.backward):
        with pytest.raises(NotImplementedError, match="create_graph=True"):
            differentiate(dq.sum())
