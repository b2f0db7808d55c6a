# SPDX-License-Identifier: Apache-2.0
"""Layers beside flash-linear-attention's and Hugging Face's with the same parameters, and themselves cut, packed, compiled."""

import pytest
import torch

from cula import layers
from cula.reference import relative_error
from tests.dist.harness import assert_passed, run_cases
from tests.layers import parallel_cases
from tests.layers.parallel_cases import LAYERS, make, rand
from tests.support.once import once_a_run


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FLA = {name: (kind, options) for name, (kind, options) in LAYERS.items() if kind != "LightningAttention"}


@pytest.mark.parametrize("name", FLA)
def test_flas_checkpoints_load_and_mean_the_same(name):
    """Names and shapes of parameters, outputs, every gradient."""
    fla_layers = pytest.importorskip("fla.layers")
    from cula.integrations import fla as cula_fla

    kind, options = FLA[name]
    torch.manual_seed(0)
    theirs = getattr(fla_layers, kind)(**options, layer_idx=0)
    ours = make(name)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    x, dy = rand(2, 70, 32), rand(2, 70, 32, seed=1)
    cula_fla.register(cpu_modules=True)
    try:
        want = theirs(x)[0]
        want.backward(dy)
    finally:
        cula_fla.unregister()
    got = ours(x)
    got.backward(dy)
    assert relative_error(got.detach(), want.detach()) < 1e-5
    of_theirs = dict(theirs.named_parameters())
    for n, p in ours.named_parameters():
        assert relative_error(p.grad, of_theirs[n].grad) < 5e-5, n
        assert getattr(p, "_no_weight_decay", False) == getattr(of_theirs[n], "_no_weight_decay", False), n


def test_lightning_is_minimax_layer():
    transformers = pytest.importorskip("transformers")
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = transformers.MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8, num_hidden_layers=3, block_size=16
    )
    torch.manual_seed(0)
    theirs = MiniMaxLightningAttention(config, layer_idx=1)
    ours = layers.LightningAttention(32, 4, 8, layer_idx=1, num_layers=3, norm_eps=theirs.norm.variance_epsilon)
    q, k, v = theirs.qkv_proj.weight.detach().view(4, 3, 8, 32).unbind(1)
    state = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
    state = {name: w.reshape(32, 32) for name, w in state.items()}
    state |= {
        "g_proj.weight": theirs.output_gate.weight,
        "o_proj.weight": theirs.out_proj.weight,
        "o_norm.weight": theirs.norm.weight,
    }
    ours.load_state_dict(state)
    x = rand(2, 50, 32)
    with torch.no_grad():
        want, _ = theirs(x, None, None)
        assert relative_error(ours(x), want) < 1e-5


@pytest.mark.parametrize("name", LAYERS)
def test_a_sequence_in_parts(name):
    """A prompt, more of it, several tokens at once, one at a time: as all of it at once."""
    layer, x = make(name), rand(2, 30, 32)
    with torch.no_grad():
        whole, cache = layer(x), layer.new_cache(2)
        parts = [layer(part, cache=cache) for part in x.split([12, 2, 10, 0, 3, 1, 1, 1], 1)]
    assert relative_error(torch.cat(parts, 1), whole) < 1e-5


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("lengths", [(12, 1, 0, 17), (2, 28)])
def test_packed_sequences(name, lengths):
    """Packed sequences as each alone; and continued from a cache by more packed tokens of other lengths."""
    layer = make(name)
    more = tuple(reversed(lengths))
    xs, ys = ([rand(1, n, 32, seed=seed + n) for n in ns] for seed, ns in ((0, lengths), (50, more)))
    offsets = [torch.tensor([0, *torch.tensor(ns).cumsum(0).tolist()], dtype=torch.int32) for ns in (lengths, more)]
    with torch.no_grad():
        cache = layer.new_cache(len(lengths))
        first = layer(torch.cat(xs, 1), cache=cache, cu_seqlens=offsets[0])
        second = layer(torch.cat(ys, 1), cache=cache, cu_seqlens=offsets[1])
        alone = [layer(torch.cat([x, y], 1)) for x, y in zip(xs, ys)]
    assert relative_error(first, torch.cat([a[:, :n] for a, n in zip(alone, lengths)], 1)) < 1e-5
    assert relative_error(second, torch.cat([a[:, n:] for a, n in zip(alone, lengths)], 1)) < 1e-5


@pytest.mark.parametrize("name", ["kda", "gdn-plain", "lightning"])
def test_compiled_whole(name):
    """`torch.compile(fullgraph=True)`: training, and a step of generation."""
    layer, x = make(name), rand(2, 20, 32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    layer(x).square().sum().backward()
    want = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    compiled(x).square().sum().backward()
    assert all(relative_error(p.grad, want[n]) < 1e-5 for n, p in layer.named_parameters())
    with torch.no_grad():
        caches = [layer.new_cache(2), layer.new_cache(2)]
        for step in (x[:, :1], x[:, 1:2]):
            assert relative_error(compiled(step, cache=caches[0]), layer(step, cache=caches[1])) < 1e-5
        assert relative_error(caches[0].recurrent, caches[1].recurrent) < 1e-5
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_bfloat16(name):
    layer, x = make(name), rand(2, 40, 32)
    with torch.no_grad():
        want = layer(x)
        got = layer.bfloat16()(x.bfloat16())
        cache = layer.new_cache(2)
        steps = torch.cat([layer(t.bfloat16(), cache=cache) for t in x.split([30, 5, 5], 1)], 1)
    assert got.dtype == torch.bfloat16 and relative_error(got.float(), want) < 3e-2
    assert relative_error(steps.float(), want) < 3e-2


@pytest.mark.parametrize("name", LAYERS)
def test_made_without_data_and_filled_from_a_checkpoint(name):
    """As large models are: on the "meta" device, then empty, then loaded."""
    layer, x = make(name), rand(2, 20, 32)
    with torch.device("meta"):
        empty = make(name)
    filled = empty.to_empty(device="cpu")
    for t in filled.buffers():
        assert bool(t.isfinite().all())
    filled.load_state_dict(layer.state_dict())
    assert torch.equal(filled(x), layer(x))


def test_constants_stay_exact():
    """Decays, and the gate's parameters of a model that is made in another dtype, which FLA too keeps in float32."""
    layer = layers.LightningAttention(32, 4, layer_idx=1, num_layers=3)
    exact = layer.decay.clone()
    assert torch.equal(layer.bfloat16().decay, exact) and exact.dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = [make("kda"), make("gdn"), layers.LightningAttention(32, 4, layer_idx=1, num_layers=3)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(t.dtype == torch.float32 for layer in made[:2] for t in (layer.A_log, layer.dt_bias))
    assert torch.equal(made[2].decay, exact)


BAD_OFFSETS = {
    "falling": (torch.tensor([0, 9, 5, 20]), r"cu_seqlens is \[0, 9, 5, 20\]; expected non-decreasing offsets"),
    "too short": (torch.tensor([0, 5, 5, 19]), "from 0 to T = 20"),
    "not integers": (torch.tensor([0.0, 5, 5, 20]), "cu_seqlens has dtype float32"),
    "of a batch": (torch.tensor([0, 5, 5, 20]), r"needs B == 1, but hidden_states has shape \[2, 20, 32\]"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("bad", BAD_OFFSETS)
def test_bad_offsets_are_named_and_change_no_cache(name, bad):
    layer, (offsets, words) = make(name), BAD_OFFSETS[bad]
    x, cache = rand(2 if bad == "of a batch" else 1, 20, 32), layer.new_cache(3)
    with torch.no_grad(), pytest.raises(ValueError, match=f"{type(layer).__name__}: .*{words}"):
        layer(x, cache=cache, cu_seqlens=offsets)
    assert not any(t.any() for t in (*cache.conv, cache.recurrent))


def frozen(part):
    """A layer of which a part is not trained."""
    layer = make("kda")
    layer.get_submodule(part).requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda: make("kda")(rand(2, 5, 31)), ValueError, r"expected \[B, T, 32\]"),
        (lambda: make("kda")(rand(2, 5, 32), cache=make("kda").new_cache(2)), ValueError, "a cache is for inference"),
        (lambda: layers.KimiDeltaAttention(32, num_heads=2, num_v_heads=3), ValueError, "a multiple of num_heads"),
        (lambda: layers.KimiDeltaAttention(32, safe_gate=True), ValueError, "needs lower_bound"),
        (lambda: layers.KimiDeltaAttention(32, safe_gate=True, lower_bound=-9), ValueError, "safe_gate=True promises -5 or more"),
        (lambda: layers.KimiDeltaAttention(32, num_heads=0), ValueError, "num_heads is 0; expected 1 or more"),
        (lambda: layers.KimiDeltaAttention(32, conv_size=0), ValueError, "conv_size is 0; expected 1 or more"),
        (lambda: layers.GatedDeltaNet(32, head_dim=16, expand_v=1.3), ValueError, "expected an integer"),
        (lambda: layers.GatedDeltaNet(32, output_gate_activation="relu"), ValueError, "activation is 'relu'"),
        (lambda: frozen("q_proj")(rand(2, 30, 32), cache=make("kda").new_cache(2)), ValueError, "a cache is for inference"),
        (lambda: make("kda").load_whole({}), ValueError, "are in one of both only"),
    ],
)
def test_what_is_refused(act, error, words):
    with pytest.raises(error, match=words):
        act()


@pytest.mark.parametrize("other", [{"hidden_size": 64}, {"num_heads": 4}, {"head_dim": 8}])
def test_parameters_of_another_layer_are_refused_and_change_nothing(other):
    """Larger or smaller ones: neither is cut to size."""
    layer = make("kda-grouped")
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    options = LAYERS["kda-grouped"][1] | other
    with pytest.raises(ValueError, match=r"KimiDeltaAttention: \w+(\.\w+)* has shape .*; the layer's is "):
        layer.load_whole(layers.KimiDeltaAttention(**options).state_dict())
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_a_cache_of_other_sequences_is_refused_and_left_alone():
    layer = make("gdn")
    cache = layer.new_cache(3)
    with torch.no_grad(), pytest.raises(ValueError, match="the cache is of 3 sequences; the call has 2"):
        layer(rand(2, 5, 32), cache=cache)
    assert not any(t.any() for t in (*cache.conv, cache.recurrent))


def of_kda(**change):
    return layers.KimiDeltaAttention(**LAYERS["kda"][1] | change)


@pytest.mark.parametrize(
    ("cache", "error", "words"),
    [
        (lambda: {}, TypeError, "cache is dict; expected a LayerCache"),
        (lambda: make("lightning").new_cache(2), ValueError, "the cache is another layer's"),
        (lambda: layers.KimiDeltaAttention(32, head_dim=4, num_heads=2).new_cache(2), ValueError, "the cache is another layer's"),
        (lambda: of_kda(conv_size=3).new_cache(2), ValueError, r"the cache is another layer's: convolutions .* \[\(32, 3\), "),
        (lambda: of_kda(use_short_conv=False).new_cache(2), ValueError, "the cache is another layer's: convolutions"),
    ],
)
def test_a_cache_of_another_layer_is_refused(cache, error, words):
    with torch.no_grad(), pytest.raises(error, match=f"KimiDeltaAttention: {words}"):
        make("kda")(rand(2, 5, 32), cache=cache())


@pytest.fixture(scope="module")
def ranks():
    return once_a_run("layers-2", lambda: run_cases("tests.layers.parallel_cases", world=2))


@pytest.mark.parametrize("name", parallel_cases.cases(2))
def test_on_two_ranks(ranks, name):
    assert_passed(ranks, name)
