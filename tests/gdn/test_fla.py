# SPDX-License-Identifier: Apache-2.0
"""`chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule` as users of FLA and Hugging Face call them."""

import inspect

import pytest
import torch

import cula
from cula import reference
from cula.core.decode import decode
from cula.gdn import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    gdn_prefill_blackwell,
    gdn_prefill_hopper,
)
from cula.reference import relative_error
from tests.support.calls import GdnCall, KdaCall

FUNCTIONS = [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule]
RAW = {"gate": "softplus", "norm": True, "beta": "sigmoid"}


def signature(function):
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_signature_is_flas(function):
    """Names, order and defaults of the installed FLA: a release that changes them fails here."""
    theirs = getattr(pytest.importorskip("fla.ops.gated_delta_rule"), function.__name__)
    assert signature(function) == signature(theirs)


def test_what_fla_reads_from_its_keywords_is_named():
    """Hugging Face drops what a signature does not name."""
    named = inspect.signature(chunk_gated_delta_rule).parameters
    assert {"use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout"} <= named.keys()
    assert chunk_gdn is chunk_gated_delta_rule and fused_recurrent_gdn is fused_recurrent_gated_delta_rule


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_state_layout(function, v_first):
    call = GdnCall(T=40, K=32, V=64, **RAW)
    t = call.tensors()
    want_o, want_state = reference.gdn(**t, **call.switches())
    if not v_first:
        t["initial_state"] = t["initial_state"].transpose(-1, -2)
        want_state = want_state.transpose(-1, -2)
    o, state = function(**t, **call.switches(), output_final_state=True, state_v_first=v_first)
    assert relative_error(o, want_o) < 1e-5
    assert relative_error(state, want_state) < 1e-5


def test_gradients_through_flas_layout_and_a_half_state():
    t = GdnCall(T=20, K=32, V=64).tensors()
    h0 = t["initial_state"].transpose(-1, -2).half().requires_grad_()
    o, state = chunk_gated_delta_rule(**t | {"initial_state": h0}, output_final_state=True)
    (o.sum() + state.sum()).backward()
    h0_ref = h0.detach().double().transpose(-1, -2).requires_grad_()
    want_o, want_state = reference.gdn(**t | {"initial_state": h0_ref})
    (want_o.sum() + want_state.sum()).backward()
    assert h0.grad.dtype == torch.float16
    assert relative_error(h0.grad, h0_ref.grad.transpose(-1, -2)) < 1e-3


@pytest.mark.parametrize("T", [1, 3, 8, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recurrent_call_of_few_tokens_is_a_decode(T, dtype, monkeypatch):
    """With the same numbers, in Hugging Face's layout; the initial state stays as it is, and the last one is new."""
    call = GdnCall(T=T, B=2, H=1, HV=2, K=32, V=64, **RAW)
    t = call.tensors()
    h0 = t["initial_state"].transpose(-1, -2).contiguous().to(dtype)
    before = h0.clone()
    want_o, want_state = reference.gdn(**t | {"initial_state": h0.mT}, **call.switches())
    taken = []
    monkeypatch.setattr("cula.core.fla.decode", lambda *a, **kw: taken.append(1) or decode(*a, **kw))
    t |= {"initial_state": h0}
    o, state = fused_recurrent_gated_delta_rule(**t, **call.switches(), output_final_state=True)
    assert relative_error(o, want_o) < 1e-5 and relative_error(state, want_state.mT) < 1e-5
    assert state.dtype == torch.float32 and torch.equal(h0, before) and bool(taken) == (T <= 8)
    o, state = fused_recurrent_gated_delta_rule(**t, **call.switches())
    assert relative_error(o, want_o) < 1e-5 and state is None and torch.equal(h0, before)
    fresh, _ = fused_recurrent_gated_delta_rule(**t | {"initial_state": None}, **call.switches())
    assert relative_error(fresh, reference.gdn(**t | {"initial_state": None}, **call.switches())[0]) < 1e-5


@pytest.mark.parametrize("T", [3, 20])
def test_gates_a_channel_are_kdas(T):
    """gk stands where a careless caller has beta; g and gk together are their sum; gv is refused."""
    t = KdaCall(T=T, B=2).tensors()
    t = {n: t[n] for n in ("q", "k", "v", "g", "beta")}
    gk, scalar = t.pop("g"), -torch.rand(2, T, 2)
    o, _ = fused_recurrent_gated_delta_rule(t["q"], t["k"], t["v"], None, gk, None, t["beta"])
    assert relative_error(o, reference.kda(**t, g=gk)[0]) < 1e-5
    o, _ = fused_recurrent_gated_delta_rule(**t, g=scalar, gk=gk)
    assert relative_error(o, reference.kda(**t, g=gk + scalar[..., None])[0]) < 1e-5
    with pytest.raises(NotImplementedError, match="gv="):
        fused_recurrent_gated_delta_rule(**t, g=scalar, gv=torch.zeros(2, T, 2, 32))


def test_no_gate_and_no_beta():
    t = GdnCall(T=12, H=1, HV=2).tensors()
    bare = {n: t[n] for n in ("q", "k", "v")}
    o, _ = fused_recurrent_gated_delta_rule(**bare)
    assert relative_error(o, reference.gdn(**bare, g=torch.zeros(1, 12, 2), beta=torch.ones(1, 12, 2))[0]) < 1e-5


def test_tensors_of_several_dtypes():
    """FLA's recurrent tests hand q and k over in float32 and v in float16: o is v's dtype there, q's by chunks."""
    t = GdnCall(T=12).tensors()
    t["v"] = t["v"].half()
    t["initial_state"] = None
    want, _ = reference.gdn(**t)
    o, _ = fused_recurrent_gated_delta_rule(**{n: x for n, x in t.items()})
    assert o.dtype == torch.float16 and relative_error(o, want) < 1e-3
    o, _ = chunk_gated_delta_rule(**t)
    assert o.dtype == torch.float32 and relative_error(o, want) < 1e-5


def test_flas_errors():
    t = GdnCall(T=10).tensors()
    with pytest.raises(ValueError, match="chunk_size"):
        chunk_gated_delta_rule(**t, chunk_size=48)
    with pytest.raises(DeprecationWarning, match="head_first"):
        chunk_gated_delta_rule(**t, head_first=False)
    with pytest.raises(ValueError, match=r"chunk_gated_delta_rule: use_gate_in_kernel=True needs A_log \[HV\], which is None"):
        chunk_gated_delta_rule(**t, use_gate_in_kernel=True)
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match="use_beta_sigmoid_in_kernel"):
            function(**t, allow_neg_eigval=True)
        with pytest.raises(ValueError, match="Cannot pass both"):
            function(**t, state_v_first=True, transpose_state_layout=True)
        with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
            o, _ = function(**t, transpose_state_layout=True)
        assert relative_error(o, reference.gdn(**t)[0]) < 1e-5
        with pytest.warns(UserWarning, match="ignores tune"):
            function(**t, tune=3)
    with pytest.raises(ValueError, match="`A_log` must be provided"):
        fused_recurrent_gated_delta_rule(**t, use_gate_in_kernel=True)


@pytest.mark.parametrize("T", [3, 20])
def test_beta_in_the_place_of_gk_is_named(T):
    t = GdnCall(T=T).tensors()
    with pytest.raises(ValueError, match=r"gk has shape .*; expected \[B, T, HV, K\] \(g, gk and gv stand before beta\)"):
        fused_recurrent_gated_delta_rule(t["q"], t["k"], t["v"], t["g"], t["beta"])


@pytest.mark.parametrize("T", [3, 20])
def test_what_is_wrong_beside_gk_is_told_of_the_function_that_was_called(T):
    t = GdnCall(T=T, initial_state=False).tensors()
    t = {n: t[n] for n in ("q", "k", "v", "g", "beta")}
    t["gk"] = -torch.rand(*t["v"].shape[:3], t["q"].shape[-1])
    for wrong, message in (
        ({"beta": t["beta"][..., :1]}, "beta has shape"),
        ({"q": t["q"].double()}, "q has dtype float64"),
        ({"gk": t["gk"].to("meta")}, "gk is on meta but q is on cpu"),
        ({"g": t["g"].to(torch.complex64)}, "g has dtype complex64; expected floating point numbers"),
    ):
        with pytest.raises(ValueError, match=f"fused_recurrent_gated_delta_rule: {message}"):
            fused_recurrent_gated_delta_rule(**t | wrong)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_integers_are_not_brought_to_the_widest_dtype(function):
    t = GdnCall(T=3, initial_state=False).tensors()
    t = {n: t[n] for n in ("q", "k", "v", "g", "beta")}
    for name in "qkv":
        with pytest.raises(TypeError, match=f"{function.__name__}: {name} has dtype int8; expected bfloat16, float16, float32"):
            function(**t | {name: t[name].to(torch.int8)})


def test_chunk_sizes_and_unused_arguments_change_nothing():
    t = GdnCall(lens=(7, 13)).tensors() | {"initial_state": None}
    want, _ = chunk_gated_delta_rule(**t)
    t["A_log"] = torch.zeros(2)
    o, _ = chunk_gated_delta_rule(**t, chunk_size=16, cu_seqlens_cpu=t["cu_seqlens"], chunk_indices=torch.zeros(2, 2))
    assert torch.equal(o, want)


@pytest.mark.parametrize("keeps", [False, True])
def test_sglangs_form_works_on_a_pool(keeps):
    call = GdnCall(lens=(70, 20), initial_state=False, norm=True)
    t = {n: x for n, x in call.tensors().items() if n != "initial_state"}
    pool = torch.randn(4, 2, 32, 32)
    want_o, want = reference.gdn(**t, initial_state=pool[[3, 1]], **call.switches())
    slots, switches = torch.tensor([3, 1], dtype=torch.int32), {"use_qk_l2norm_in_kernel": True}
    o, none, h = chunk_gated_delta_rule(
        **t, initial_state=pool, initial_state_indices=slots, return_intermediate_states=keeps, **switches
    )
    assert none is None and (h is None) == (not keeps) and (h is None or h.shape == (1, 3, 2, 32, 32))
    assert relative_error(o, want_o) < 1e-5 and relative_error(pool[[3, 1]], want) < 1e-5


def test_explain_and_compile():
    t = GdnCall(T=20).tensors()
    assert cula.explain(chunk_gated_delta_rule, **t).op == "gdn_fwd"
    short = {n: x[:, :2] if n in ("q", "k", "v", "g", "beta") else x for n, x in t.items()}
    assert cula.explain(fused_recurrent_gated_delta_rule, **short).op == "gdn_decode"
    torch._dynamo.reset()

    def both(t, short):
        return *chunk_gated_delta_rule(**t, output_final_state=True), fused_recurrent_gated_delta_rule(**short)[0]

    for a, b in zip(both(t, short), torch.compile(both, fullgraph=True, backend="aot_eager")(t, short)):
        torch.testing.assert_close(a, b)


def test_named_hardware_that_is_missing_is_a_clear_error():
    q, g = torch.randn(1, 4, 1, 128), torch.randn(1, 4, 1)
    with pytest.raises(RuntimeError, match=r"needs a Hopper GPU.*this is cpu"):
        gdn_prefill_hopper(q, q, q, g, g)
    with pytest.raises(RuntimeError, match=r"needs a Blackwell GPU.*this is cpu"):
        gdn_prefill_blackwell(q, q, q, g, g)
