# SPDX-License-Identifier: Apache-2.0
"""`chunk_kda` and `fused_recurrent_kda` as a user of flash-linear-attention calls them."""

import inspect

import pytest
import torch

import cula.gdn
import cula.lightning
from cula import reference
from cula.core.decode import decode
from cula.core.fla import is_decode, is_decode_on_pool
from cula.kda import chunk_kda, fused_recurrent_kda, kda_prefill_blackwell, kda_prefill_hopper
from cula.reference import relative_error
from tests.support.calls import KdaCall

OURS = {"A_log", "dt_bias", "chunk_size", "transpose_state_layout", "backend"}  # named here, in FLA's **kwargs or ours alone
OURS |= {"inplace_final_state", "ssm_state_indices", "num_accepted_tokens", "out"}


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_the_signature_is_flas(function):
    """Names, order and defaults of the installed FLA: a release that changes them fails here."""
    theirs = getattr(pytest.importorskip("fla.ops.kda"), function.__name__)
    assert signature(function) == signature(theirs)


def signature(function):
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_state_layout(function, v_first):
    call = KdaCall(T=40, K=32, V=64, gate="softplus", norm=True)
    t = call.tensors()
    want_o, want_state = reference.kda(**t, **call.switches())
    if not v_first:
        t["initial_state"] = t["initial_state"].transpose(-1, -2)
        want_state = want_state.transpose(-1, -2)
    o, state = function(**t, **call.switches(), output_final_state=True, state_v_first=v_first)
    assert state.shape == want_state.shape
    assert relative_error(o, want_o) < 1e-5
    assert relative_error(state, want_state) < 1e-5


def test_gradients_through_flas_layout():
    t = KdaCall(T=20, K=32, V=64).tensors()
    h0 = t["initial_state"].transpose(-1, -2).contiguous().requires_grad_()
    o, state = chunk_kda(**t | {"initial_state": h0}, output_final_state=True)
    (o.sum() + state.sum()).backward()
    h0_ref = t["initial_state"].double().requires_grad_()
    want_o, want_state = reference.kda(**t | {"initial_state": h0_ref})
    (want_o.sum() + want_state.sum()).backward()
    assert relative_error(h0.grad, h0_ref.grad.transpose(-1, -2)) < 1e-5


def test_intermediate_states_follow_the_layout():
    t = KdaCall(T=100, K=32, V=64, initial_state=False).tensors()
    *_, h_kv = chunk_kda(**t, return_intermediate_states=True)
    *_, h_vk = chunk_kda(**t, return_intermediate_states=True, state_v_first=True)
    assert h_kv.shape == (1, 2, 2, 32, 64)
    assert torch.equal(h_kv, h_vk.transpose(-1, -2))


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gated_delta_rule"])
def test_intermediate_states_of_other_chunks_are_refused(name):
    """FLA has a state every `chunk_size` tokens, cuLA one every 64."""
    t = KdaCall(T=70, scalar_gate="kda" not in name, initial_state=False).tensors()
    more = {"return_intermediate_states": True}
    if name == "chunk_gated_delta_rule":
        more |= {"initial_state": torch.zeros(1, 2, 32, 32), "initial_state_indices": torch.tensor([0])}
    assert FLAS[name](**t | more, chunk_size=64)[2].shape[1] == 2
    with pytest.raises(ValueError, match=f"{name}: return_intermediate_states=True .* every 64 tokens; chunk_size is 32"):
        FLAS[name](**t | more, chunk_size=32)


def test_gate_parameters_may_come_along_unused():
    t = KdaCall(T=10).tensors()
    o, _ = chunk_kda(**t | {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2, 32)})
    assert torch.equal(o, chunk_kda(**t)[0])


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize("bound", [-6.0, -2.0, 0.0])
def test_a_bound_without_a_gate_to_make_is_ignored(function, bound):
    t = KdaCall(T=10).tensors()
    assert torch.equal(function(**t, lower_bound=bound)[0], function(**t)[0])


def test_what_fla_ignores_is_ignored_with_a_warning():
    t = KdaCall(T=10).tensors()
    with pytest.warns(UserWarning, match="chunk_kda: ignores output_final_stat, as flash-linear-attention does"):
        _, state = chunk_kda(**t, output_final_stat=True, use_graph=True, max_num_seqs=3)
    assert state is None
    with pytest.raises(ValueError, match="`chunk_size` must be either 32 or 64"):
        chunk_kda(**t, chunk_size=48)


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_the_old_name_of_the_layout(function):
    t = KdaCall(T=10).tensors()
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        o, state = function(**t, output_final_state=True, transpose_state_layout=True)
    want = function(**t, output_final_state=True, state_v_first=True)
    assert torch.equal(o, want[0]) and torch.equal(state, want[1])
    with pytest.raises(ValueError, match="Cannot pass both"):
        function(**t, state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("T", [1, 8, 40])
def test_a_recurrent_call_of_few_tokens_is_a_decode(T, monkeypatch):
    """With the same numbers; and the initial state stays as it is."""
    call = KdaCall(T=T, B=2, K=32, V=64, gate="bounded", norm=True, beta="sigmoid")
    t = call.tensors()
    want_o, want_state = reference.kda(**t, **call.switches())
    before = t["initial_state"].clone()
    taken = []
    monkeypatch.setattr("cula.core.fla.decode", lambda *a, **kw: taken.append(1) or decode(*a, **kw))
    o, state = fused_recurrent_kda(**t, **call.switches(), output_final_state=True, state_v_first=True)
    assert relative_error(o, want_o) < 1e-5 and relative_error(state, want_state) < 1e-5
    assert torch.equal(t["initial_state"], before) and bool(taken) == (T <= 8)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("lens", [(1,), (1, 1, 1), (3, 0, 1), (8, 2, 5), (9, 1), (1,) * 12])
def test_packed_rows_of_few_tokens_are_a_decode(lens, has_state, v_first, monkeypatch):
    """As FLA's layers pack each step of a generation. On a CPU lengths are looked at."""
    call = KdaCall(lens=lens, K=32, V=64, gate="bounded", norm=True, beta="sigmoid", initial_state=has_state)
    t = call.tensors()
    want_o, want_state = reference.kda(**t, **call.switches())
    if has_state and not v_first:
        t["initial_state"] = t["initial_state"].mT.contiguous()
    before = t["initial_state"].clone() if has_state else None
    taken = []
    monkeypatch.setattr("cula.core.fla.decode", lambda *a, **kw: taken.append(1) or decode(*a, **kw))
    o, state = fused_recurrent_kda(**t, **call.switches(), output_final_state=True, state_v_first=v_first)
    alone, none = fused_recurrent_kda(**t, **call.switches(), state_v_first=v_first)
    assert relative_error(o, want_o) < 1e-5 and torch.equal(o, alone) and none is None
    assert relative_error(state if v_first else state.mT, want_state) < 1e-5
    assert not has_state or torch.equal(t["initial_state"], before)
    assert bool(taken) == (max(lens) <= 8)


def test_wrong_offsets_of_few_tokens_are_refused():
    t = KdaCall(lens=(2, 3), initial_state=False).tensors()
    for offsets, match in (((0, 3, 2), "cu_seqlens"), ((0, 2, 4), "cu_seqlens"), ((1, 2, 5), "cu_seqlens")):
        with pytest.raises(ValueError, match=match):
            fused_recurrent_kda(**t | {"cu_seqlens": torch.tensor(offsets)})


def test_lengths_that_a_gpu_has_are_not_read():
    """What is known without them: all tokens together are few, or there is one sequence."""
    meta = {"device": "meta"}
    for tokens, rows, wanted in ((8, 3, True), (8, 8, True), (9, 9, False), (9, 1, False)):
        q, offsets = torch.empty(1, tokens, 2, 4, **meta), torch.empty(rows + 1, dtype=torch.int32, **meta)
        assert is_decode(q, offsets) is wanted
        slots = torch.empty(rows, 4, dtype=torch.int32, **meta)  # each row has at most four tokens
        assert is_decode_on_pool(q, offsets, slots) and is_decode_on_pool(q, offsets, slots[:, 0]) is wanted


def test_packed_rows_on_a_pool():
    """vLLM's form: a slot for each token of a row, rows of several lengths."""
    call = KdaCall(lens=(3, 1, 2), K=32, V=32, initial_state=False)
    t = call.tensors()
    pool, slots = torch.randn(9, 2, 32, 32), torch.tensor([[4, 5, 6], [0, 1, 2], [7, 8, 3]])
    tokens = {n: t[n] for n in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    want_o, want_pool, _ = reference.decode(**tokens, state=pool, state_indices=slots)
    o, state = fused_recurrent_kda(
        **tokens, initial_state=pool, ssm_state_indices=slots, state_v_first=True, inplace_final_state=True
    )
    assert state is pool
    assert relative_error(o, want_o) < 1e-5 and relative_error(pool, want_pool) < 1e-5


def test_a_recurrent_call_on_a_pool():
    call = KdaCall(T=2, B=3, initial_state=False)
    t = call.tensors()
    pool, slots = torch.randn(5, 2, 32, 32), torch.tensor([4, -1, 0])
    want_o, want_pool, _ = reference.decode(**{n: t[n] for n in ["q", "k", "v", "g", "beta"]}, state=pool, state_indices=slots)
    given = {n: x for n, x in t.items() if n not in ("initial_state", "cu_seqlens")}
    more = {"initial_state": pool, "ssm_state_indices": slots, "state_v_first": True}
    with pytest.raises(NotImplementedError, match="inplace_final_state=True"):
        fused_recurrent_kda(**given, **more)
    o, state = fused_recurrent_kda(**given, **more, inplace_final_state=True)
    assert state is pool
    assert relative_error(o, want_o) < 1e-5 and relative_error(pool, want_pool) < 1e-5


def test_first_states_of_one_value_channel_may_be_transposed():
    """torch takes them for contiguous as they are: the stride of a dimension of one is never taken."""
    t = KdaCall(T=1, V=1).tensors()
    states = {
        v_first: t | {"initial_state": t["initial_state"] if v_first else t["initial_state"].mT} for v_first in (True, False)
    }
    (o, state), (o_kv, state_kv) = (
        fused_recurrent_kda(**of, output_final_state=True, state_v_first=v_first) for v_first, of in states.items()
    )
    assert torch.equal(o, o_kv) and torch.equal(state, state_kv.mT)


def test_initial_states_of_other_dtypes_are_converted():
    t = KdaCall(T=20).tensors()
    h0 = t["initial_state"].bfloat16()
    o, _ = chunk_kda(**t | {"initial_state": h0}, state_v_first=True)
    assert relative_error(o, reference.kda(**t | {"initial_state": h0})[0]) < 1e-5


FLAS = {
    "chunk_kda": chunk_kda,
    "fused_recurrent_kda": fused_recurrent_kda,
    "chunk_gated_delta_rule": cula.gdn.chunk_gdn,
    "fused_recurrent_gated_delta_rule": cula.gdn.fused_recurrent_gdn,
    "chunk_simple_gla": cula.lightning.chunk_simple_gla,
}


@pytest.mark.parametrize("T", [3, 20])
@pytest.mark.parametrize("name", FLAS)
def test_first_states_are_named_as_they_came(name, T):
    """In the layout that the caller has, not as they are seen further down."""
    t = KdaCall(T=T, V=16, scalar_gate="kda" not in name).tensors()  # K is 32
    if "simple_gla" in name:
        t = {n: t[n] for n in ("q", "k", "v", "initial_state")}
    h0 = t.pop("initial_state")  # [1, 2, 16, 32]
    with pytest.raises(ValueError, match=rf"{name}: initial_state has shape \[1, 2, 16, 32\], .* pass state_v_first=True"):
        FLAS[name](**t, initial_state=h0)
    with pytest.raises(ValueError, match=rf"{name}: initial_state has shape \[1, 2, 32, 16\], .* pass state_v_first=False"):
        FLAS[name](**t, initial_state=h0.mT, state_v_first=True)
    with pytest.raises(
        ValueError, match=rf"{name}: initial_state .* \[3, 2, 32, 16\]; expected \[N, HV, K, V\] = \[1, 2, 32, 16\]"
    ):
        FLAS[name](**t, initial_state=h0.mT.expand(3, -1, -1, -1))
    with pytest.raises(TypeError, match=f"{name}: initial_state is list"):
        FLAS[name](**t, initial_state=[0])


@pytest.mark.parametrize("T", [3, 20])
@pytest.mark.parametrize("name", [*FLAS, "fused_recurrent_simple_gla", "chunk_lightning_attn"])
def test_tokens_of_several_dtypes_are_brought_to_the_widest(name, T):
    """FLA's kernels read each as it is. o is in v's dtype where FLA makes it like v, in q's elsewhere."""
    function = FLAS.get(name) or getattr(cula.lightning, name)
    t = KdaCall(T=T, H=2, scalar_gate="kda" not in name, initial_state=False).tensors()
    t = {n: t[n] for n in (("q", "k", "v", "g", "beta") if "kda" in name or "delta" in name else ("q", "k", "v"))}
    more = {"layer_idx": 0, "num_layers": 2} if "lightning" in name else {}
    for n, dtype in (("q", torch.bfloat16), ("v", torch.float16)):
        t[n] = t[n].to(dtype)
    want, _ = function(**t | {n: t[n].float() for n in "qkv"}, **more)
    o, _ = function(**t, **more)
    of_v = name in ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule")
    assert o.dtype == (torch.float16 if of_v else torch.bfloat16)
    assert torch.equal(o, want.to(o.dtype))
    with pytest.raises(TypeError, match=f"{name}: v has dtype int8; expected bfloat16, float16, float32"):
        function(**t | {"v": t["v"].to(torch.int8)}, **more)


def test_gradients_and_states_of_tokens_of_several_dtypes():
    t = KdaCall(T=70, initial_state=False).tensors()
    t["q"], t["v"] = t["q"].bfloat16(), t["v"].half().requires_grad_()
    (dv,) = torch.autograd.grad(chunk_kda(**t)[0].sum(), t["v"])
    assert dv.dtype == torch.float16
    with torch.no_grad():
        assert chunk_kda(**t, return_intermediate_states=True)[2].dtype == torch.bfloat16
        out = torch.empty(1, 70, 2, 32)
        assert fused_recurrent_kda(**t, out=out)[0] is out
    rows = {n: t[n][:, :2] for n in ("q", "k", "v", "g", "beta")}
    o, _ = fused_recurrent_kda(**rows, initial_state=torch.zeros(1, 2, 32, 32), inplace_final_state=True)
    assert o.dtype == torch.float16 and relative_error(o, fused_recurrent_kda(**rows)[0]) < 1e-3


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_warnings_point_at_the_caller(function):
    t = KdaCall(T=3).tensors()
    with pytest.warns(UserWarning, match="ignores tune") as ignored:
        function(**t, tune=3)
    with pytest.warns(DeprecationWarning, match="renamed") as renamed:
        function(**t, transpose_state_layout=True)
    assert {warning.filename for warning in (*ignored, *renamed)} == {__file__}


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_bounds_below_those_of_a_safe_gate(function):
    call = KdaCall(T=70, gate="bounded", initial_state=False)
    t = call.tensors()
    switches = call.switches() | {"lower_bound": -12.0}
    want, _ = reference.kda(**t, **switches)
    assert relative_error(function(**t, **switches)[0], want) < 1e-5


def test_intermediate_states_come_in_the_io_dtype():
    t = KdaCall(T=100, dtype=torch.bfloat16, initial_state=False).tensors()
    assert chunk_kda(**t, return_intermediate_states=True)[2].dtype == torch.bfloat16


def test_compile_without_a_graph_break():
    t = KdaCall(T=20).tensors()
    torch._dynamo.reset()

    def both(t):
        o, state = chunk_kda(**t, output_final_state=True)
        o2, _ = fused_recurrent_kda(**{n: x[:, :2] if n in ["q", "k", "v", "g", "beta"] else x for n, x in t.items()})
        return o, state, o2

    for a, b in zip(both(t), torch.compile(both, fullgraph=True, backend="aot_eager")(t)):
        torch.testing.assert_close(a, b)


OLD_NAME = ("chunk_kda", "fused_recurrent_kda", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")


@pytest.mark.filterwarnings("ignore:.*renamed to `state_v_first`")
@pytest.mark.parametrize("name", FLAS)
def test_keywords_that_get_a_warning_are_no_graph_break(name):
    t = KdaCall(T=3, scalar_gate="kda" not in name, initial_state=False).tensors()
    t = {n: t[n] for n in (("q", "k", "v") if "simple_gla" in name else ("q", "k", "v", "g", "beta"))}
    more = {"tune": 3} | ({"transpose_state_layout": True} if name in OLD_NAME else {})
    torch._dynamo.reset()

    def call(t):
        return FLAS[name](**t, output_final_state=True, **more)

    with pytest.warns(UserWarning, match="ignores tune"):
        want = call(t)
    for a, b in zip(want, torch.compile(call, fullgraph=True, backend="eager")(t)):
        torch.testing.assert_close(a, b)


def test_named_hardware_that_is_missing_is_a_clear_error():
    q = torch.randn(1, 4, 1, 128)
    with pytest.raises(RuntimeError, match=r"needs a Hopper GPU.*this is cpu"):
        kda_prefill_hopper(q, q, q, q, q[..., 0])
    with pytest.raises(RuntimeError, match=r"needs a Blackwell GPU.*this is cpu"):
        kda_prefill_blackwell(q, q, q, q, q[..., 0])


def test_a_context_goes_to_the_backend_that_is_named(monkeypatch):
    taken = []
    monkeypatch.setattr("cula.kda.fla.from_cp_context", lambda *args: taken.append(args) or (q, None))
    q = torch.zeros(1, 4, 1, 8)
    chunk_kda(q, q, q, q, q[..., 0], cp_context=object(), backend="triton")
    assert "triton" in taken[0]


@pytest.mark.parametrize("T", [3, 20])
@pytest.mark.parametrize("name", FLAS)
@pytest.mark.parametrize("bad", ["q", "k", "v"])
def test_tokens_that_are_none_or_of_another_rank_are_named(name, bad, T):
    t = KdaCall(T=T, scalar_gate="kda" not in name, initial_state=False).tensors()
    t = {n: t[n] for n in (("q", "k", "v") if "simple_gla" in name else ("q", "k", "v", "g", "beta"))}
    with pytest.raises(TypeError, match=f"{name}: {bad} is NoneType; expected a torch.Tensor"):
        FLAS[name](**t | {bad: None})
    with pytest.raises(ValueError, match=f"{name}: {bad} has shape .*; expected four dimensions"):
        FLAS[name](**t | {bad: t[bad][0]})


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_what_is_wrong_with_a_deep_gate_is_named(function):
    t = KdaCall(T=4).tensors() | {"use_gate_in_kernel": True, "lower_bound": -9.0}
    with pytest.raises(ValueError, match=r"A_log has shape \[3\]; expected the elements of \[HV\] = \[2\]"):
        function(**t | {"A_log": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"dt_bias has shape \[2\]; expected the elements of \[HV, K\] = \[2, 32\]"):
        function(**t | {"dt_bias": torch.zeros(2)})
    with pytest.raises(TypeError, match="lower_bound is 'deep'; expected a number"):
        function(**t | {"lower_bound": "deep"})


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_a_deep_gate_takes_real_numbers_on_one_device(function):
    t = KdaCall(T=4, gate="softplus").tensors() | {"use_gate_in_kernel": True, "lower_bound": -9.0, "state_v_first": True}
    function(**t)
    for name in ("g", "A_log", "dt_bias"):
        with pytest.raises(TypeError, match=f"{function.__name__}: {name} has dtype int8; expected floating point numbers"):
            function(**t | {name: t[name].to(torch.int8)})
        with pytest.raises(ValueError, match=f"{function.__name__}: {name} is on meta but q is on cpu"):
            function(**t | {name: t[name].to("meta")})


@pytest.mark.parametrize("T", [3, 20])
@pytest.mark.parametrize("name", FLAS)
def test_first_states_of_integers_are_refused(name, T):
    t = KdaCall(T=T, scalar_gate="kda" not in name).tensors()
    names = ("q", "k", "v") if "simple_gla" in name else ("q", "k", "v", "g", "beta")
    of = {n: t[n] for n in names} | {"initial_state": t["initial_state"].long()}
    with pytest.raises(TypeError, match=f"{name}: initial_state has dtype int64; expected floating point numbers"):
        FLAS[name](**of)


def test_names_are_the_callers():
    t = KdaCall(T=20, scalar_gate=True, initial_state=False).tensors()
    with pytest.raises(ValueError, match=r"initial_state_indices names slots of initial_state, .* which is None"):
        cula.gdn.chunk_gdn(**{n: t[n] for n in ("q", "k", "v", "g", "beta")}, initial_state_indices=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"chunk_simple_gla: g_gamma has shape \[3\]; expected the elements of \[H\] = \[2\]"):
        cula.lightning.chunk_simple_gla(t["q"], t["k"], t["v"], g_gamma=torch.zeros(3))
