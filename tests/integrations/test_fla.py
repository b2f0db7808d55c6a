# SPDX-License-Identifier: Apache-2.0
"""FLA's models on a CPU with cuLA registered, beside FLA's own definitions; and what cuLA leaves to FLA."""

import copy
import importlib
import inspect
import itertools
import logging
import sys
import types

import pytest
import torch

from cula import reference
from cula.integrations import CALLS
from cula.integrations import fla as cula_fla
from cula.reference import relative_error
from tests.integrations.absent import hide
from tests.integrations.fla_models import MODELS, definitions, model, tokens
from tests.support.calls import KdaCall, LightningCall

pytest.importorskip("fla.layers", reason="needs flash-linear-attention")

COUNTERS = {
    "kda": ("fla.chunk_kda", "fla.fused_recurrent_kda_fwd"),
    "gdn": ("fla.chunk_gated_delta_rule", "fla.fused_recurrent_gated_delta_rule_fwd"),
    "retnet": ("fla.ChunkSimpleGLAFunction", "fla.fused_recurrent"),
}


@pytest.fixture(autouse=True)
def registered():
    cula_fla.register(cpu_modules=True)
    CALLS.clear()
    yield
    cula_fla.unregister()


def counters(name):
    return COUNTERS[name.split("-")[0]]


def logits_and_gradients(m, ids):
    m.train().zero_grad()
    out = m(ids, labels=ids)
    out.loss.backward()
    with torch.no_grad():
        logits = m(ids, use_cache=False).logits
    return out.loss.detach(), logits, {n: p.grad.clone() for n, p in m.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_training_as_by_flas_definitions(name):
    """70 tokens: more than a chunk, and more than FLA's layers hand to the recurrent form."""
    m, ids = model(name), tokens(2, 70)
    loss, logits, gradients = logits_and_gradients(m, ids)
    assert CALLS[counters(name)[0]] == 4  # 2 layers, with and without gradients
    CALLS.clear()
    with definitions():
        want_loss, want_logits, want_gradients = logits_and_gradients(m, ids)
    assert not CALLS
    assert relative_error(loss, want_loss) < 1e-6
    assert relative_error(logits, want_logits) < 1e-5
    for n, gradient in gradients.items():
        assert relative_error(gradient, want_gradients[n]) < 5e-5, n


@pytest.mark.parametrize("name", MODELS)
def test_generation_as_by_flas_definitions(name):
    """Greedy, 32 tokens with the cache: each step's logits are those of the whole sequence by the definition, without a cache."""
    m, prompt = model(name).eval(), tokens(2, 20, seed=1)
    out = generate(m, prompt, 32, output_logits=True, return_dict_in_generate=True)
    assert CALLS[counters(name)[1]] == 2 * 32
    with torch.no_grad(), definitions():
        want = m(out.sequences[:, :-1], use_cache=False).logits[:, 19:]
    assert relative_error(torch.stack(out.logits, 1), want) < 1e-5
    assert torch.equal(out.sequences[:, 20:], want.argmax(-1))


def generate(m, prompt, steps, mask=None, **options):
    mask = torch.ones_like(prompt) if mask is None else mask
    return m.generate(
        prompt, attention_mask=mask, max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )


@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_left_padding(name):
    m, ids = model(name).eval(), tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    padded = generate(m, ids, 4, mask)
    assert torch.equal(padded[0, 30:], generate(m, ids[:1, 7:], 4)[0, 23:])
    assert torch.equal(padded[1, 30:], generate(m, ids[1:], 4)[0, 30:])


@pytest.mark.parametrize("name", ["kda", "kda-gva", "gdn"])
def test_packed_sequences(name):
    m, ids = model(name).train(), tokens(1, 90)
    cuts = [0, 30, 31, 90]
    packed = m(ids, cu_seqlens=torch.tensor(cuts), use_cache=False).logits
    apart = torch.cat([m(ids[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(cuts)], 1)
    assert relative_error(packed, apart) < 1e-5


@pytest.mark.parametrize("how", ["bfloat16", "autocast", "checkpointing"])
@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_ways_to_train(name, how):
    m, ids = copy.deepcopy(model(name)).train(), tokens(2, 40)
    m.zero_grad()
    want = m(ids, labels=ids).loss.detach()
    CALLS.clear()
    if how == "bfloat16":
        m = m.bfloat16()  # the gate's parameters too
    if how == "checkpointing":
        m.gradient_checkpointing_enable()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        loss = m(ids, labels=ids).loss
    loss.backward()
    assert CALLS[counters(name)[0]] == (4 if how == "checkpointing" else 2)
    assert relative_error(loss.detach().float(), want) < (1e-6 if how == "checkpointing" else 3e-2)
    assert all(torch.isfinite(p.grad).all() for p in m.parameters())


def backend_of(entry):
    """cuLA's backend in the registry of one of FLA's functions or operations."""
    import fla.backends as registries

    if isinstance(entry, str):
        return registries._operation_registries[entry]
    return registries._function_registries[inspect.unwrap(entry)]


def test_cula_is_asked_first():
    from fla.ops.kda import chunk_kda

    for entry in (chunk_kda, "kda", "gated_delta_rule"):
        order = [b.backend_type for b in backend_of(entry)._get_sorted_backends() if b.backend_type != "triton_ascend"]
        assert order[0] == "cula", entry


@pytest.mark.parametrize(
    ("entry", "function", "change", "reason"),
    [
        ("chunk_kda", "chunk_kda", {"cp_context": object()}, "use cula.dist"),
        ("chunk_kda", "chunk_kda", {"use_graph": True}, "use_graph=True asks for FLA's CUDA graphs"),
        ("chunk_kda", "chunk_kda", {"return_intermediate_states": True, "chunk_size": 32}, "states every 32 tokens"),
        ("chunk_kda", "chunk_kda", {"beta": torch.ones(1, 10, 2, 32)}, "one value a channel"),
        ("kda", "fused_recurrent_kda_fwd", {"inplace_final_state": True}, "slots of a pool go with 1 to 8 tokens"),
        ("gated_delta_rule", "chunk_gated_delta_rule", {"cp_context": object()}, "use cula.dist"),
    ],
)
def test_what_is_declined_has_a_reason(entry, function, change, reason):
    from fla.ops.kda import chunk_kda

    backend = backend_of(chunk_kda if entry == "chunk_kda" else entry)._backends["cula"]
    t = KdaCall(T=10).tensors()
    positional = [t.pop(name) for name in ("q", "k", "v", "g")]
    good = {"beta": t["beta"], "inplace_final_state": False}
    assert backend.verify(function, *positional, **good) == (True, None)
    accepted, why = backend.verify(function, *positional, **good | change)
    assert not accepted and reason in why


def test_what_a_gpu_kernel_cannot_hold_is_declined():
    on_gpu = types.SimpleNamespace(shape=(1, 10, 2, 512), device=torch.device("cuda"))
    assert "cuLA's GPU kernels take K up to 256" in cula_fla._dims_objection({"q": on_gpu, "v": on_gpu})
    on_cpu = torch.empty(1, 10, 2, 512)
    assert cula_fla._dims_objection({"q": on_cpu, "v": on_cpu}) is None


@pytest.mark.parametrize(
    ("module", "name", "change", "reason"),
    [
        ("gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule_fwd", {"gv": 1}, "gv"),
        ("gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule_fwd", {"gk": 1, "A_log": 1}, "gk beside"),
        ("simple_gla.chunk", "ChunkSimpleGLAFunction", {"g": 1}, "decays depend on data"),
        ("simple_gla.fused_recurrent", "fused_recurrent", {"reverse": True}, "reverse=True"),
    ],
)
def test_what_is_declined_without_a_registry_goes_to_fla(module, name, change, reason, caplog):
    served = next(s for s in cula_fla.SERVED if s.module == f"fla.ops.{module}" and s.name == name)
    asked = []

    def default(q, k, v, **kwargs):
        asked.append(kwargs)
        return "FLA's"

    ours = cula_fla._replacement(
        served,
        type("F", (), {"forward": lambda ctx, q, k, v: None, "apply": staticmethod(default)}) if "Function" in name else default,
        cula_fla._backend_class(cula_fla._backend_api()[0]),
    )
    with caplog.at_level(logging.INFO, logger="cula"):
        result = (ours.apply if "Function" in name else ours)(None, None, None, **change)
    assert result == "FLA's" and asked == [change]
    assert "stays FLA's: " in caplog.text and reason in caplog.text


def test_off_by_environment(monkeypatch):
    monkeypatch.setenv("FLA_CULA", "0")
    assert not backend_of("kda")._backends["cula"].is_enabled()
    backend = cula_fla._backend_class(cula_fla._backend_api()[0])
    replaced = cula_fla._replacement(cula_fla.SERVED[5], lambda q, g_gamma: "FLA's", backend)
    assert replaced(1, g_gamma=2) == "FLA's"
    assert not CALLS


def test_unregister_restores():
    import fla.ops.gated_delta_rule.fused_recurrent as gdn
    import fla.ops.simple_gla.chunk as simple_gla
    from fla.modules.fused_cross_entropy.ops import FusedCrossEntropyLoss

    places = [(gdn, "fused_recurrent_gated_delta_rule_fwd"), (simple_gla, "ChunkSimpleGLAFunction")]
    places.append((FusedCrossEntropyLoss, "forward"))
    inside = [getattr(*place) for place in places]
    cula_fla.unregister()
    outside = [getattr(*place) for place in places]
    assert all(a is not b for a, b in zip(inside, outside))
    assert not any(backend_of(entry)._backends["cula"].is_enabled() for entry in ("kda", "gated_delta_rule"))
    assert cula_fla.register()  # some, and no CPU modules this time
    assert getattr(*places[0]) is not outside[0] and getattr(*places[2]) is outside[2]
    assert cula_fla.register() == []
    assert all("fla.modules" in name for name in cula_fla.register(cpu_modules=True))
    cula_fla.unregister()
    assert [getattr(*place) for place in places] == outside


def test_flas_functions_called_by_position():
    """As in FLA's own order, with a state in its default layout [K, V]."""
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    t = KdaCall(T=40, K=32, V=64).tensors()
    h0 = t["initial_state"].transpose(-1, -2)
    o, state = chunk_kda(t["q"], t["k"], t["v"], t["g"], t["beta"], 0.5, h0, True)
    want, want_state = reference.kda(**t, scale=0.5)
    assert relative_error(o, want) < 1e-5 and relative_error(state.transpose(-1, -2), want_state) < 1e-5
    t = LightningCall(T=40, H=2, HV=2).tensors()
    o, _ = chunk_simple_gla(t["q"], t["k"], t["v"], None, -t["decay"], 0.5)
    want, _ = reference.lightning(t["q"], t["k"], t["v"], t["decay"], scale=0.5)
    assert relative_error(o, want) < 1e-5
    assert CALLS == {"fla.chunk_kda": 1, "fla.ChunkSimpleGLAFunction": 1}


def test_flas_gates_a_channel_in_the_gated_delta_rule():
    """`gk` of the recurrent gated delta rule is KDA's gate."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    t = KdaCall(T=5, K=32, V=64).tensors()
    h0 = t["initial_state"].transpose(-1, -2).contiguous()
    o, state = fused_recurrent_gated_delta_rule(
        t["q"], t["k"], t["v"], gk=t["g"], beta=t["beta"], initial_state=h0, output_final_state=True
    )
    want, want_state = reference.kda(**t)
    assert relative_error(o, want) < 1e-5 and relative_error(state.transpose(-1, -2), want_state) < 1e-5
    assert CALLS == {"fla.fused_recurrent_gated_delta_rule_fwd": 1}


@pytest.mark.parametrize("names", [(), ("g",), ("g", "gk")])
def test_flas_gates_of_both_kinds_or_none(names):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    t = KdaCall(T=5, initial_state=False).tensors()
    gates = {"g": -torch.rand(1, 5, 2), "gk": t["g"]}
    log_decay = sum((gates[n] if n == "gk" else gates[n][..., None] for n in names), torch.zeros_like(t["g"]))
    tokens = {n: t[n] for n in ("q", "k", "v", "beta")}
    o, _ = fused_recurrent_gated_delta_rule(**tokens, **{n: gates[n] for n in names})
    assert relative_error(o, reference.kda(**tokens, g=log_decay)[0]) < 1e-5
    assert CALLS == {"fla.fused_recurrent_gated_delta_rule_fwd": 1}


@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 0, 1), (1,), (9, 0)])
@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_packed_steps_of_a_generation(name, lengths, monkeypatch):
    """Packed sequences of few tokens each are a decode."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    decodes = []
    for module in ("cula.kda.fla", "cula.core.fla"):
        theirs = importlib.import_module(module).decode
        monkeypatch.setattr(f"{module}.decode", lambda *a, theirs=theirs, **kw: decodes.append(1) or theirs(*a, **kw))
    t = KdaCall(lens=lengths, K=32, V=64, scalar_gate=name == "gdn").tensors()
    h0 = t["initial_state"].transpose(-1, -2).contiguous()
    named = {n: t[n] for n in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    function = fused_recurrent_kda if name == "kda" else fused_recurrent_gated_delta_rule
    o, state = function(**named, initial_state=h0, output_final_state=True)
    want, want_state = reference.kda(**t)
    assert relative_error(o, want) < 1e-5 and relative_error(state.transpose(-1, -2), want_state) < 1e-5
    assert len(decodes) == (max(lengths) <= 8)


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 20, 20, 64], dtype=torch.int32)])
def test_megatrons_call(cu_seqlens):
    """Megatron-LM trains through FLA's function: keywords, heads repeated, q and k normalised outside, log decays, bf16 beta."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    call = KdaCall(T=64, B=1, H=4, HV=4, initial_state=False)
    t = call.tensors()
    q, k = (torch.nn.functional.normalize(t[name], dim=-1).bfloat16().requires_grad_() for name in ("q", "k"))
    v, g, beta = t["v"].bfloat16().requires_grad_(), t["g"][..., 0].contiguous().requires_grad_(), t["beta"].bfloat16()
    o, state = chunk_gated_delta_rule(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    assert state is None and o.dtype == torch.bfloat16 and CALLS == {"fla.chunk_gated_delta_rule": 1}
    o.float().square().sum().backward()
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, g)]
    wq, wk, wv, wg = leaves
    want, _ = reference.kda(wq, wk, wv, wg, beta, cu_seqlens=cu_seqlens)
    want.square().sum().backward()
    assert relative_error(o.detach(), want.detach()) < 1e-2
    for ours, ref in zip((q, k, v, g), leaves):
        assert relative_error(ours.grad, ref.grad) < 3e-2


def test_the_registry_of_fla_05(monkeypatch):
    """0.5 has registries by operation alone, in `fla.ops.backends`, and another order of arguments."""
    registered = {}

    class BaseBackend:
        pass

    class BackendRegistry:
        _registries = {"kda": types.SimpleNamespace(register=lambda backend: registered.update(kda=backend))}

        @staticmethod
        def ensure_initialized(operation):
            assert operation == "kda"

    def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, state_v_first=False, **kwargs):
        raise AssertionError("FLA's own")

    def fused_recurrent_kda_fwd(q, k, v, g, beta, initial_state=None):
        return "FLA's"

    modules = {
        "fla.ops.backends": {"BaseBackend": BaseBackend, "BackendRegistry": BackendRegistry, "_DISPATCH_DISABLED": False},
        "fla.ops.kda.chunk": {"chunk_kda": chunk_kda},
        "fla.ops.kda.fused_recurrent": {"fused_recurrent_kda_fwd": fused_recurrent_kda_fwd},
    }
    cula_fla.unregister()
    for name, contents in modules.items():
        stand_in = types.ModuleType(name)
        stand_in.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setitem(sys.modules, "fla.backends", None)
    monkeypatch.setattr(cula_fla, "SERVED", cula_fla.SERVED[:2])
    with pytest.raises(NotImplementedError, match=r"cpu_modules needs flash-linear-attention 0\.6"):
        cula_fla.register(cpu_modules=True)
    assert len(cula_fla.register()) == 2
    t = KdaCall(T=6, K=32, V=64).tensors()
    args = [t[name] for name in ("q", "k", "v", "g", "beta")]
    want, want_state = reference.kda(**t, scale=0.5)
    ours = registered["kda"]
    assert ours.is_enabled() and ours.chunk_kda_verifier(*args) == (True, None)
    o, state = ours.chunk_kda(*args, 0.5, t["initial_state"], True, True)
    assert relative_error(o, want) < 1e-5 and relative_error(state, want_state) < 1e-5
    o, _ = sys.modules["fla.ops.kda.fused_recurrent"].fused_recurrent_kda_fwd(*args, scale=0.5, inplace_final_state=False)
    assert CALLS == {"fla.chunk_kda": 1, "fla.fused_recurrent_kda_fwd": 1}
    cula_fla.unregister()
    assert not ours.is_enabled()
    assert sys.modules["fla.ops.kda.fused_recurrent"].fused_recurrent_kda_fwd is fused_recurrent_kda_fwd


def test_without_fla(monkeypatch):
    cula_fla.unregister()
    hide(monkeypatch, "fla")
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        cula_fla.register()


def test_dispatch_taken_out_of_fla(monkeypatch):
    import fla.backends

    monkeypatch.setattr(fla.backends, "_DISPATCH_DISABLED", True)
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH=1"):
        cula_fla.register()
