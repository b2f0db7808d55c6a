# SPDX-License-Identifier: Apache-2.0
"""What an ordinary training loop does around a call: autocast, parameters in other dtypes, graphs that run twice, transforms."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cula
from cula import reference
from cula.core import checks, dispatch
from cula.kda import fused_recurrent_kda
from cula.ops.torch import kda as torch_kda
from cula.reference import relative_error
from tests.support.calls import GRADIENT_TOLERANCE, TOLERANCE, GdnCall, KdaCall, LightningCall
from tests.support.slow import slow_but

NAMES = {"q": "Q", "k": "K", "v": "V"}


def kda(tensors, backend, **more):
    return cula.cula_kda(**tensors, backend=backend, output_final_state=True, **more)


def lightning(tensors, backend, **more):
    named = {NAMES.get(n, n): t for n, t in tensors.items()}
    return cula.cula_lightning(**named, backend=backend, output_final_state=True, **more)


def gdn(tensors, backend, **more):
    return cula.cula_gdn(**tensors, backend=backend, output_final_state=True, **more)


GATED = KdaCall(T=70, gate="softplus", norm=True, beta="sigmoid")
GATED_BY_HEAD = GdnCall(T=20, gate="softplus", norm=True, beta="sigmoid")
CALLS = {
    "kda": (kda, GATED, GATED.switches()),
    "gdn": (gdn, GATED_BY_HEAD, GATED_BY_HEAD.switches()),
    "lightning": (lightning, LightningCall(T=70), {}),
}


def as_taken(described, backend):
    """A call in the sizes and the dtype that hand-tuned kernels take, where one of those is asked."""
    return described.with_(dtype=torch.bfloat16, K=128, V=128) if backend.startswith("cute") else described


@pytest.fixture(params=CALLS)
def call(request, device):
    function, described, switches = CALLS[request.param]

    def run(backend, leaves=()):
        t = as_taken(described, backend).tensors(device)
        t = {n: x.requires_grad_() if n in leaves and x is not None else x for n, x in t.items()}
        return t, function(t, backend, **switches)

    return run


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16, torch.float16], [torch.bfloat16]))
def test_autocast_changes_nothing(backend, device, call, dtype):
    leaves = ("q", "k", "v", "g", "beta", "initial_state")
    results = []
    for enabled in (False, True):
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            t, (o, state) = call(backend, leaves)
            wanted = [t[n] for n in leaves if t.get(n) is not None]
            grads = torch.autograd.grad(o.square().sum() + state.sum(), wanted)
        results.append([o, state, *grads])
    for a, b in zip(*results):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("family", CALLS)
def test_another_default_device_changes_nothing(family, is_packed):
    """Tensors that a call makes for itself follow its own tensors, not `torch.set_default_device`."""
    function, described, switches = CALLS[family]
    t = {n: x if x is None or n in ("A_log", "dt_bias", "decay") else x[:1] for n, x in described.tensors().items()}
    T = t["q"].shape[1]
    packed = {"cu_seqlens": torch.tensor([0, 3, 3, T]), "initial_state": None} if is_packed else {}
    leaves = [t[n].requires_grad_() for n in ("q", "v")]
    results = []
    for default in ("cpu", "meta"):
        with torch.device(default):
            o, state = function(t | packed, "torch", **switches)
            results.append([o, state, *torch.autograd.grad(o.square().sum() + state.sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_another_default_device_changes_no_decode():
    T, slots = 2, torch.tensor([[1, 0], [-1, 3]])
    call = KdaCall(B=2, T=T).tensors()
    tokens, pool = [call[n] for n in "qkv"], torch.randn(4, *call["initial_state"].shape[1:])
    results = []
    for default in ("cpu", "meta"):
        states = pool.clone()
        of_rows = {"g": call["g"], "beta": call["beta"], "state_indices": slots, "num_accepted_tokens": torch.tensor([1, 2])}
        with torch.device(default), torch.no_grad():
            o, _ = cula.cula_decode(*tokens, states, **of_rows)
            more, _ = cula.cula_decode(*tokens, states[:2], g=call["g"], beta=call["beta"])
        results.append((o, more, states))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("family", CALLS)
def test_tensors_without_data_give_shapes(family, kind):
    """On the "meta" device and under `FakeTensorMode`: outputs, gradients and errors, and nothing is computed."""
    function, described, switches = CALLS[family]
    real = described.tensors()
    want = function(real, "torch", **switches)
    with FakeTensorMode() if kind == "fake" else nullcontext() as mode:
        t = {n: x if x is None else x.to("meta") if kind == "meta" else mode.from_tensor(x) for n, x in real.items()}
        t["q"].requires_grad_()
        got = function(t, "auto", **switches)
        (dq,) = torch.autograd.grad(got[0].sum() + got[1].sum(), t["q"])
        with pytest.raises(ValueError, match=r"[vV] has shape"):
            function(t | {"v": t["v"][:, 1:]}, "auto", **switches)
    for a, b in zip((*got, dq), (*want, real["q"])):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and checks.has_no_data(a)


def test_states_of_packed_sequences_without_data_have_no_shape():
    t = {n: x if x is None else x.to("meta") for n, x in KdaCall(lens=(3, 70), initial_state=False).tensors().items()}
    with pytest.raises(NotImplementedError, match="depends on data; call it on tensors with data, outside"):
        cula.cula_kda(**t, return_intermediate_states=True)


@pytest.mark.parametrize("family", CALLS)
def test_a_traced_call_is_an_operator(family):
    """`make_fx` on tensors with data, twice, so that a call seen before is traced too: the graph serves other data."""
    function, described, switches = CALLS[family]
    names = [n for n, x in described.tensors().items() if x is not None]

    def run(*tensors):
        return function(dict(zip(names, tensors)), "auto", **switches)[0]

    first = [described.tensors()[n] for n in names]
    other = [x.flip(0) if x.dim() == 4 else x for x in first]
    run(*first)
    graph = make_fx(run)(*first)
    assert next(n.target for n in graph.graph.nodes if n.op == "call_function") is getattr(torch.ops.cula, family).default
    assert torch.equal(graph(*other), run(*other))


def test_a_traced_decode_is_an_operator():
    t = KdaCall(T=1).tensors()

    def run(pool):
        return cula.cula_decode(*(t[n] for n in "qkv"), pool, g=t["g"], beta=t["beta"])[0]

    pools = [torch.randn_like(t["initial_state"]) for _ in range(2)]
    run(pools[0].clone())
    graph = make_fx(run)(pools[0].clone())
    assert any(n.target is torch.ops.cula.kda_decode.default for n in graph.graph.nodes)
    assert torch.equal(graph(pools[1].clone()), run(pools[1].clone()))


def test_selective_checkpointing_may_keep_a_calls_outputs(monkeypatch, request):
    """A policy that keeps `cula::kda` runs its forward once, and recomputes what is around it."""
    made = []
    right = torch_kda.kda_fwd
    monkeypatch.setattr(torch_kda, "kda_fwd", lambda *a, **kw: made.append(1) or right(*a, **kw))
    request.addfinalizer(dispatch._find.cache_clear)
    dispatch._find.cache_clear()
    t = GATED.tensors()

    def layer(q):
        return kda(t | {"q": q.sin()}, "torch", **GATED.switches())[0].cos()

    grads, counts = [], []
    for kept in ([], [torch.ops.cula.kda.default]):
        made.clear()
        q = t["q"].clone().requires_grad_()
        contexts = functools.partial(create_selective_checkpoint_contexts, kept)
        checkpoint(layer, q, use_reentrant=False, context_fn=contexts).sum().backward()
        grads.append(q.grad)
        counts.append(len(made))
    assert counts == [2, 1] and torch.equal(*grads)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_decode_without_data_gives_shapes(kind):
    call = KdaCall(T=1).tensors()
    with FakeTensorMode() if kind == "fake" else nullcontext() as mode:
        t = {n: x if x is None else x.to("meta") if kind == "meta" else mode.from_tensor(x) for n, x in call.items()}
        o, state = cula.cula_decode(*(t[n] for n in "qkv"), t["initial_state"], g=t["g"], beta=t["beta"])
    assert o.shape == t["v"].shape and state is t["initial_state"] and checks.has_no_data(o)


def test_autocast_around_decode_changes_nothing(backend, device):
    described = as_taken(KdaCall(T=2, B=3, gate="bounded"), backend)
    t = {n: x for n, x in described.tensors(device).items() if n not in ("initial_state", "cu_seqlens")}
    results = []
    for enabled in (False, True):
        pool = torch.ones(3, 2, described.V, described.K, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            o, _ = cula.cula_decode(**t, **described.switches(), state=pool, backend=backend)
        results.append((o, pool))
    for a, b in zip(*results):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16, torch.float16], [torch.bfloat16]))
@pytest.mark.parametrize("shape", [(-1,), (1, 1, -1, 1)], ids=["flat", "kimi"])
def test_parameters_in_other_dtypes_and_shapes(backend, device, dtype, shape):
    """`model.bfloat16()`, FSDP2's mixed precision, and Kimi-Linear's A_log [1, 1, H, 1]."""
    described = as_taken(GATED, backend)
    t = described.tensors(device)
    t["A_log"], t["dt_bias"] = t["A_log"].to(dtype).reshape(shape), t["dt_bias"].to(dtype)
    leaves = {n: x.requires_grad_() for n, x in t.items() if n in ("A_log", "dt_bias", "q")}
    o, _ = kda(t, backend, **GATED.switches())
    grads = torch.autograd.grad(o.square().sum(), list(leaves.values()))
    exact = {n: x.detach().double().requires_grad_() if n in leaves else x for n, x in t.items()}
    want, _ = reference.kda(**exact | {"A_log": exact["A_log"].reshape(-1)}, **GATED.switches())
    want_grads = torch.autograd.grad(want.square().sum(), [exact[n] for n in leaves])
    assert relative_error(o, want) < TOLERANCE[described.dtype]
    of_q = 1e-5 if described.dtype == torch.float32 else GRADIENT_TOLERANCE[described.dtype]
    for name, got, right in zip(leaves, grads, want_grads):
        assert got.dtype == t[name].dtype and got.shape == t[name].shape, name
        assert relative_error(got, right) < (GRADIENT_TOLERANCE[dtype] if name != "q" else of_q), name


def test_parameters_in_bfloat16_in_decode(backend, device):
    described = as_taken(KdaCall(T=1, B=3, gate="softplus"), backend)
    t = {n: x for n, x in described.tensors(device).items() if n not in ("initial_state", "cu_seqlens")}
    t["A_log"], t["dt_bias"] = t["A_log"].bfloat16(), t["dt_bias"].bfloat16()
    pool = torch.randn(3, 2, described.V, described.K, device=device)
    want, *_ = reference.decode(**t, **described.switches(), state=pool)
    o, _ = cula.cula_decode(**t, **described.switches(), state=pool, backend=backend)
    assert relative_error(o, want) < (1e-5 if described.dtype == torch.float32 else TOLERANCE[described.dtype])


def test_a_graph_runs_backward_twice(backend, call):
    leaves = ("q", "k", "v", "initial_state")
    t, (o, state) = call(backend, leaves)
    loss, wanted = o.square().sum() + state.sum(), [t[n] for n in leaves]
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    second = torch.autograd.grad(loss, wanted)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_reentrant", slow_but([False, True], [False]))
def test_activation_checkpointing(backend, device, use_reentrant):
    results = []
    for again in (False, True):
        t = as_taken(GATED, backend).tensors(device)
        q = t.pop("q").requires_grad_()
        run = lambda q, t=t: kda({"q": q, **t}, backend, **GATED.switches())[0]
        o = checkpoint(run, q, use_reentrant=use_reentrant) if again else run(q)
        results.append((o, *torch.autograd.grad(o.square().sum(), [q])) if not use_reentrant else (o, _backward(o, q)))
    for a, b in zip(*results):
        assert torch.equal(a, b)


def _backward(o, q):
    o.square().sum().backward()
    return q.grad


GRADIENTS = {
    "expanded": lambda like: like.new_ones(()).expand(like.shape),
    "a transposed view": lambda like: torch.randn_like(like.transpose(1, -1).contiguous()).transpose(1, -1),
    "every other number": lambda like: torch.randn_like(like[..., None].expand(*like.shape, 2).contiguous())[..., 0],
}


@pytest.mark.parametrize("kind", slow_but(GRADIENTS, ["a transposed view"]))
def test_gradients_come_in_any_layout(backend, call, kind):
    leaves = ("q", "k", "v", "initial_state")
    t, (o, state) = call(backend, leaves)
    wanted = [t[n] for n in leaves]
    torch.manual_seed(0)
    do, dht = GRADIENTS[kind](o), GRADIENTS[kind](state)
    got = torch.autograd.grad([o, state], wanted, [do, dht], retain_graph=True)
    want = torch.autograd.grad([o, state], wanted, [do.contiguous(), dht.contiguous()], retain_graph=True)
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    for outputs, given in (([o], [do]), ([state], [dht])):  # the other one is None
        assert all(g is not None for g in torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=False))


def test_transforms_get_one_clear_error():
    given, q = KdaCall(T=5).tensors(), torch.randn(1, 5, 1, 32)

    def run(q):
        return kda(given | {"q": q}, "auto")[0].sum()

    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(NotImplementedError, match=r"torch\.autograd\.grad"):
            transform(run)(q if transform is torch.func.grad else q[None])


@pytest.mark.parametrize("name", ["prefill", "decode", "fla's", "compiled"])
def test_forward_mode_gets_the_same_error(name):
    """Also of a call that has been made before, and only where there is a tangent to lose."""
    t = KdaCall(T=2).tensors()
    q, pool = t.pop("q"), t.pop("initial_state")
    rows = {n: x for n, x in t.items() if n != "cu_seqlens"}
    torch._dynamo.reset()
    call = {
        "prefill": lambda q: cula.cula_kda(q, **t),
        "decode": lambda q: cula.cula_decode(q, **rows, state=pool),
        "fla's": lambda q: fused_recurrent_kda(q, **rows),
        "compiled": torch.compile(lambda q: cula.cula_kda(q, **t), fullgraph=True, backend="eager"),
    }[name]
    call(q)
    with forward_ad.dual_level():
        call(q)
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=r"forward-mode .* torch\.autograd\.grad"):
                call(dual)
        with torch.inference_mode():  # nothing is differentiated in it
            call(dual)


@pytest.mark.parametrize("name", ["out", "state_pool"])
def test_what_is_written_must_not_require_grad(name):
    t = KdaCall(T=5, initial_state=False).tensors()
    given = {
        "out": {"out": torch.zeros(1, 5, 2, 32, requires_grad=True)},
        "state_pool": {
            "state_pool": torch.zeros(1, 2, 32, 32, requires_grad=True),
            "initial_state_indices": torch.tensor([0]),
        },
    }[name]
    with pytest.raises(ValueError, match=f"{name} is written in place and requires grad"):
        cula.cula_kda(**t, **given)


def test_a_misspelt_keyword_names_the_right_one():
    t = KdaCall(T=5).tensors()
    with pytest.raises(TypeError, match="'use_gate_in_kernal'; did you mean 'use_gate_in_kernel'"):
        cula.cula_kda(**t, use_gate_in_kernal=True)
    with pytest.raises(TypeError, match="'inital_state_indices'; did you mean 'initial_state_indices'"):
        cula.cula_kda(**t, inital_state_indices=True)


def test_only_keywords_of_the_function_are_proposed():
    t, lightning = KdaCall(T=1).tensors(), LightningCall(T=5).tensors()
    q, k, v, decay = (lightning[name] for name in ("q", "k", "v", "decay"))
    with pytest.raises(TypeError, match=r"unknown keyword argument 'checkpoint_every' \(backend"):
        cula.cula_lightning(q, k, v, decay, checkpoint_every=64)
    with pytest.raises(TypeError, match="'null_indx'; did you mean 'null_index'"):
        cula.cula_kda(**t, null_indx="nonpositive")
    pool = t.pop("initial_state")
    t.pop("cu_seqlens", None)
    with pytest.raises(TypeError, match="'state_lay_out'; did you mean 'state_layout'"):
        cula.cula_decode(**t, state=pool, state_lay_out="kv")


def test_a_misspelt_keyword_is_named_before_what_is_missing_without_it():
    t = KdaCall(T=1).tensors()
    pool = torch.zeros(4, *t["initial_state"].shape[1:])
    h0 = t.pop("initial_state")
    with pytest.raises(TypeError, match="'initial_state_index'; did you mean 'initial_state_indices'"):
        cula.cula_kda(**t, state_pool=pool, initial_state_index=torch.zeros(len(h0), dtype=torch.int32))
    with pytest.raises(TypeError, match="'A_logs'; did you mean 'A_log'"):
        cula.cula_kda(**t, use_gate_in_kernel=True, A_logs=torch.zeros(t["v"].shape[2]))
    tokens, gates = [t[n] for n in "qkv"], {n: t[n] for n in ("g", "beta")}
    with pytest.raises(TypeError, match="cula_decode: unknown keyword argument 'state_index'; did you mean 'state_indices'"):
        cula.cula_decode(*tokens, pool, **gates, state_index=torch.tensor([0, 1]))


def test_cula_check_finds_decays_that_break_the_promise(monkeypatch):
    t = KdaCall(T=5).tensors()
    t["g"] = torch.full_like(t["g"], -6.0)
    cula.cula_kda(**t, safe_gate=True)
    monkeypatch.setenv("CULA_CHECK", "1")
    with pytest.raises(ValueError, match="log decay of -6, and safe_gate=True promises -5 or more"):
        cula.cula_kda(**t, safe_gate=True)
