# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's models on a CPU with cuLA in them, beside transformers' own torch functions."""

import contextlib
import copy
import subprocess
import sys

import pytest
import torch

from cula.integrations import CALLS
from cula.integrations import fla as cula_fla
from cula.integrations import transformers as cula_hf
from cula.reference import relative_error
from tests.integrations.absent import hide
from tests.integrations.hf_models import MODELS, model, modeling, tokens, torch_functions

pytest.importorskip("transformers")

TRAINED = ["qwen3-next", "qwen3.5", "kimi-linear", "minimax"]
LAYERS = {"kimi-linear": 4, "minimax": 2}  # with linear attention; 3 in the others


@pytest.fixture(autouse=True)
def unpatched():
    CALLS.clear()
    yield
    cula_hf.unpatch()


@contextlib.contextmanager
def theirs(name):
    cula_hf.unpatch()
    CALLS.clear()
    with torch_functions(name):
        yield
    assert not CALLS


def chunk_calls():
    return CALLS["transformers.chunk"] + CALLS["transformers.minimax"]


def logits_and_gradients(m, ids):
    m.zero_grad()
    out = m(ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", TRAINED)
def test_training_as_by_transformers(name):
    m, ids = model(name), tokens(2, 100)
    cula_hf.patch()
    logits, gradients = logits_and_gradients(m, ids)
    assert chunk_calls() == LAYERS.get(name, 3)
    with theirs(name):
        want_logits, want_gradients = logits_and_gradients(m, ids)
    assert relative_error(logits, want_logits) < 1e-5
    assert gradients.keys() == want_gradients.keys()
    for n, gradient in gradients.items():  # transformers' own dA_log is 1e-4 off the recurrence in float64, ours 2e-5
        assert relative_error(gradient, want_gradients[n]) < (3e-4 if n.endswith("A_log") else 5e-5), n


@pytest.mark.parametrize("name", TRAINED)
def test_generation_as_by_transformers(name):
    """Greedy with the cache; one of the prompts is padded on the left."""
    m, prompt = model(name), tokens(2, 20, seed=1)
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    cula_hf.patch()
    got = m.generate(prompt, **options)
    if name == "minimax":
        assert CALLS == {"transformers.minimax": 2 * 32}
    else:
        layers = LAYERS.get(name, 3)
        assert {"transformers.chunk": layers, "transformers.recurrent": 31 * layers} == CALLS
    with theirs(name):
        want = m.generate(prompt, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert relative_error(torch.stack(got.logits), torch.stack(want.logits)) < 1e-4


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TRAINED])
def test_other_models(name):
    m, ids = model(name), tokens(2, 70)
    cula_hf.patch()
    with torch.no_grad():
        logits = m(ids, use_cache=False)[0]
    assert chunk_calls() == 3
    with torch.no_grad(), theirs(name):
        want = m(ids, use_cache=False)[0]
    assert relative_error(logits, want) < 1e-5


@pytest.mark.parametrize("name", TRAINED)
def test_a_prompt_in_two_parts(name):
    m, ids = model(name), tokens(2, 60)
    cula_hf.patch()
    with torch.no_grad():
        whole = m(ids).logits[:, 25:]
        cache = m(ids[:, :25], use_cache=True).past_key_values
        rest = m(ids[:, 25:], past_key_values=cache, use_cache=True).logits
    assert relative_error(rest, whole) < 1e-5


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
@pytest.mark.parametrize("name", TRAINED)
def test_less_precise_models(name, how):
    m, ids = copy.deepcopy(model(name)), tokens(2, 40)
    cula_hf.patch()
    want = m(ids, labels=ids).loss.detach()
    m = m.bfloat16() if how == "bfloat16" else m
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        loss = m(ids, labels=ids).loss
    loss.backward()
    assert chunk_calls() == 2 * LAYERS.get(name, 3)
    assert relative_error(loss.detach().float(), want) < 5e-2
    assert all(torch.isfinite(p.grad).all() for p in m.parameters() if p.grad is not None)


def test_a_token_with_gradients():
    """transformers' recurrent function is differentiable, so ours is where gradients are asked for."""
    cula_hf.patch()
    results = []
    for ours in (True, False):
        with contextlib.nullcontext() if ours else theirs("qwen3-next"):
            function = modeling("qwen3-next").torch_recurrent_gated_delta_rule
            torch.manual_seed(0)
            q, k, v = (torch.randn(2, 1, 3, 16).requires_grad_() for _ in range(3))
            g, beta, h0 = -torch.rand(2, 1, 3), torch.rand(2, 1, 3), torch.randn(2, 3, 16, 16).requires_grad_()
            o, state = function(q, k, v, g=g, beta=beta, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True)
            grads = torch.autograd.grad(o.square().sum() + state.square().sum(), (q, k, v, h0))
            results.append([o.detach(), state.detach(), *grads])
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want) < 1e-5


def test_packed_sequences():
    """`cu_seqlens` reaches the kernel (transformers' own torch functions refuse it)."""
    cula_hf.patch()
    chunk = modeling("qwen3.5").torch_chunk_gated_delta_rule
    torch.manual_seed(0)
    q, k, v, g, beta = *(torch.randn(1, 50, 2, 16) for _ in range(3)), -torch.rand(1, 50, 2), torch.rand(1, 50, 2)
    packed, _ = chunk(q, k, v, g=g, beta=beta, cu_seqlens=torch.tensor([0, 20, 50]), position_ids=None)
    apart = [chunk(*(x[:, a:b] for x in (q, k, v)), g=g[:, a:b], beta=beta[:, a:b])[0] for a, b in ((0, 20), (20, 50))]
    assert relative_error(packed, torch.cat(apart, 1)) < 1e-6


@pytest.mark.parametrize("name", ["kimi-linear", "glm-5.3-flash", "ling-3.0"])
def test_packed_sequences_by_the_models_keyword(name):
    """Layers of KDA hand the keywords of the model on as they are."""
    cula_hf.patch()
    functions = modeling(name)
    torch.manual_seed(0)
    q, k, v, g = *(torch.randn(1, 50, 2, 16) for _ in range(3)), -torch.rand(1, 50, 2, 16)
    beta, offsets = torch.rand(1, 50, 2), torch.tensor([0, 20, 50], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 30, "max_length_k": 30}
    for function in (functions.chunk_kimi_delta_attention, functions.recurrent_kimi_delta_attention):
        state = {"initial_state": None, "output_final_state": True}
        o, states = function(q, k, v, g=g, beta=beta, **state, **packed)
        for n, (a, b) in enumerate(((0, 20), (20, 50))):
            want = function(*(x[:, a:b] for x in (q, k, v)), g=g[:, a:b], beta=beta[:, a:b], **state)
            assert relative_error(o[:, a:b], want[0]) < 1e-6 and relative_error(states[n : n + 1], want[1]) < 1e-6
    rows = [x[:, :4].transpose(0, 1) for x in (q, k, v, g, beta)]  # a token for each of four prompts
    o, _ = function(*rows, **state, cu_seq_lens_q=torch.arange(5, dtype=torch.int32))
    assert torch.equal(o, function(*rows, **state)[0])


def test_patch_before_a_modeling_file_is_imported(monkeypatch):
    name = "transformers.models.olmo_hybrid.modeling_olmo_hybrid"
    monkeypatch.delitem(sys.modules, name, raising=False)
    finders = list(sys.meta_path)
    cula_hf.patch()
    module = modeling("olmo-hybrid")
    inside = module.torch_chunk_gated_delta_rule
    CALLS.clear()
    x = torch.rand(1, 3, 1, 8)
    inside(x, x, x, g=-x[..., 0], beta=x[..., 0])
    assert CALLS == {"transformers.chunk": 1}
    cula_hf.unpatch()
    assert module.torch_chunk_gated_delta_rule is not inside
    assert sys.meta_path == finders


def test_a_patch_that_fails_leaves_nothing(monkeypatch):
    modeling("kimi-linear")
    finders = list(sys.meta_path)
    with monkeypatch.context() as broken:
        broken.setattr(cula_hf, "_same_name", lambda theirs, ours: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cula_hf.patch()
    assert not cula_hf.is_patched() and sys.meta_path == finders
    assert cula_hf.patch()
    cula_hf.unpatch()


def test_unpatch_restores():
    module = modeling("kimi-linear")
    before = module.chunk_kimi_delta_attention, modeling("minimax").MiniMaxLightningAttention.forward
    assert any("kimi_linear" in name for name in cula_hf.patch())
    assert module.chunk_kimi_delta_attention is not before[0]
    assert cula_hf.patch() == [] and cula_hf.is_patched()
    cula_hf.unpatch()
    assert (module.chunk_kimi_delta_attention, modeling("minimax").MiniMaxLightningAttention.forward) == before
    assert not cula_hf.is_patched()


@pytest.mark.parametrize("name", ["qwen3-next", "kimi-linear"])
def test_through_fla(name):
    """transformers binds FLA's functions where FLA is installed; FLA asks cuLA."""
    pytest.importorskip("fla")
    m, ids = model(name), tokens(2, 40)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cula_fla.register()
    try:
        with torch.no_grad():
            logits = m(ids).logits
            assert CALLS[{"kimi-linear": "fla.chunk_kda"}.get(name, "fla.chunk_gated_delta_rule")] == LAYERS.get(name, 3)
        got = m.generate(ids, attention_mask=torch.ones_like(ids), **options)
    finally:
        cula_fla.unregister()
    with torch.no_grad(), theirs(name):
        assert relative_error(logits, m(ids).logits) < 1e-5
        assert torch.equal(got, m.generate(ids, attention_mask=torch.ones_like(ids), **options))


@pytest.mark.parametrize("name", ["qwen3.5", "kimi-linear"])
@pytest.mark.parametrize("mode", ["INFERENCE", "TRAINING"])
def test_through_kernels(name, mode):
    kernels = pytest.importorskip("kernels")
    m, ids = model(name), tokens(2, 40)
    functions = [f for layer in m.modules() for f in layer.__dict__.get("_kernel_funcs", {}).values()]
    with kernels.use_kernel_mapping(cula_hf.kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(m.train(mode == "TRAINING"), mode=kernels.Mode[mode], device="cpu")
    try:
        logits, gradients = logits_and_gradients(m, ids)
        assert {"transformers.chunk": LAYERS.get(name, 3)} == CALLS
    finally:  # what was kernelized is shared by all models of the file
        m.eval()
        for function in functions:
            function.__dict__.pop("forward", None)
    with theirs(name):
        want, want_gradients = logits_and_gradients(m, ids)
    assert relative_error(logits, want) < 1e-5
    assert all(relative_error(gradients[n], want_gradients[n]) < 1e-4 for n in gradients)


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("kimi-linear", marks=pytest.mark.slow)])
def test_compiled_whole(name):
    """`torch.compile(fullgraph=True)`: prefill, a step of generation, training; cuLA's operators are in the graph."""
    config = copy.deepcopy(model(name).config)
    config.num_hidden_layers, config.mlp_layer_types = 2, ["dense", "dense"]
    config.layer_types = ["linear_attention", "full_attention"]
    torch.manual_seed(2)  # of the gradients, dt_bias's is a sum over tokens that cancels, by other amounts for other seeds
    m, ids = type(model(name))(config).eval(), tokens(1, 70)
    cula_hf.patch()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    def operators():
        return {target for graph in graphs for target in graph if target.startswith("cula.")}

    torch._dynamo.reset()
    compiled = torch.compile(m, backend=backend, fullgraph=True)
    with torch.no_grad():
        want = m(ids, use_cache=False).logits
        assert relative_error(compiled(ids, use_cache=False).logits, want) < 1e-5
        assert operators()
        graphs.clear()
        caches = [m(ids, use_cache=True).past_key_values for _ in range(2)]
        want = m(ids[:, :1], past_key_values=caches[0], use_cache=True).logits
        assert relative_error(compiled(ids[:, :1], past_key_values=caches[1], use_cache=True).logits, want) < 1e-5
        assert operators()
    graphs.clear()
    want, want_gradients = logits_and_gradients(m, ids)
    m.zero_grad()
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    assert operators()
    for n, p in m.named_parameters():
        assert p.grad is None or relative_error(p.grad, want_gradients[n]) < 1e-5, n
    torch._dynamo.reset()


WITHOUT_FLA = """
import sys, pytest, torch, transformers
from tests.integrations.absent import hide
monkeypatch = pytest.MonkeyPatch()
hide(monkeypatch, "fla")
hide(monkeypatch, "kernels")
import cula.integrations.transformers as cula_hf
from cula.integrations import CALLS
torch.set_num_threads(1)
assert cula_hf.patch() == []
from tests.integrations.hf_models import model, tokens, torch_functions
m, ids = model("qwen3.5"), tokens(2, 70)
with torch.no_grad():
    got = m(ids, use_cache=False).logits
    assert CALLS == {"transformers.chunk": 3}, CALLS
    cula_hf.unpatch()
    want = m(ids, use_cache=False).logits
assert CALLS == {"transformers.chunk": 3}, CALLS
assert "fla" not in sys.modules
error = ((got - want).norm() / want.norm()).item()
assert 0 < error < 1e-5, error
"""


@pytest.mark.slow
def test_without_fla_and_kernels_before_anything_is_imported():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_FLA], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_transformers(monkeypatch):
    hide(monkeypatch, "transformers")
    with pytest.raises(ImportError, match="needs transformers: pip install transformers"):
        cula_hf.patch()
