# SPDX-License-Identifier: Apache-2.0
"""The vLLM plug-in: each function against the float64 reference on pools with poisoned slots; vLLM's own registry where its
sources are there, with stand-ins for its heavy imports."""

import ast
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
import types
from pathlib import Path

import pytest
import torch

from cula.integrations import CALLS, changes
from cula.integrations import vllm as cula_vllm
from cula.reference import relative_error
from tests.integrations.serving import HV, SLOTS, K, V, log_decay, parameters, pool, rand, tokens, want


@pytest.fixture(autouse=True)
def counted():
    CALLS.clear()
    yield
    cula_vllm.unregister()


def refuse(*args, **kwargs):
    raise AssertionError("vLLM's own")


op_registry_oot = {}  # as in vLLM's module of `CustomOp`


class CustomOp(torch.nn.Module):
    """As vLLM's: a class that was registered by the name of another is made in its place."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, name):
        assert name not in op_registry_oot
        return lambda replacement: op_registry_oot.update({name: replacement}) or replacement

    def forward(self, *args, **kwargs):
        return self._forward_method(*args, **kwargs)


def stand_ins(monkeypatch, custom_op=CustomOp, pluggable=CustomOp):
    """The modules of vLLM that the plug-in changes, with classes and functions of the same names."""

    class ChunkGatedDeltaRule(custom_op):
        def __init__(self):
            super().__init__()
            self._forward_method = refuse

    class QwenGatedDeltaNetAttention(pluggable):
        def __init__(self, config, prefix=""):
            torch.nn.Module.__init__(self)
            self.config, self.gdn_decode_kernel, self.enable_fused_gdn_decode = config, "cuda", True

    made = {
        cula_vllm.GDN_MODULE: {
            "CustomOp": custom_op, "PluggableLayer": pluggable, "ChunkGatedDeltaRule": ChunkGatedDeltaRule,
            "QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention, cula_vllm.PACKED_DECODE: refuse, cula_vllm.DECODE: refuse,
        },
        cula_vllm.KDA_MODULE: dict.fromkeys(cula_vllm.KDA_FUNCTIONS, refuse),
    }  # fmt: skip
    for name, contents in made.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return [sys.modules[name] for name in (cula_vllm.GDN_MODULE, cula_vllm.KDA_MODULE)]


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setenv("CULA_VLLM", "1")
    modules = stand_ins(monkeypatch)
    cula_vllm.register()
    return modules


def test_nothing_happens_unless_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("CULA_VLLM", raising=False)
    finders, (gdn, kda) = list(sys.meta_path), stand_ins(monkeypatch)
    cula_vllm.register()
    assert sys.meta_path == finders and gdn.__dict__[cula_vllm.DECODE] is refuse and kda.fused_recurrent_kda is refuse
    assert not cula_vllm.is_registered()


def test_another_vllm_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setenv("CULA_VLLM", "1")
    gdn, kda = stand_ins(monkeypatch)
    del kda.fused_recurrent_kda
    with pytest.raises(ImportError, match=r"has no fused_recurrent_kda, which cuLA would replace.*unset CULA_VLLM"):
        cula_vllm.register()
    assert not cula_vllm.is_registered() and gdn.__dict__[cula_vllm.DECODE] is refuse and not op_registry_oot


def test_one_line_says_what_was_replaced(monkeypatch, caplog):
    monkeypatch.setenv("CULA_VLLM", "1")
    gdn, _ = stand_ins(monkeypatch)
    with caplog.at_level(logging.INFO, logger="cula"):
        cula_vllm.register()
        cula_vllm.register()
    said = [words for words in caplog.messages if "cuLA in the place of" in words]
    assert len(said) == 2 and "ChunkGatedDeltaRule" in said[0] and "fused_recurrent_kda_packed_decode" in said[1]
    assert list(op_registry_oot) == ["ChunkGatedDeltaRule", "QwenGatedDeltaNetAttention"]
    layer = gdn.QwenGatedDeltaNetAttention("config", prefix="layers.0")
    assert isinstance(layer, gdn.QwenGatedDeltaNetAttention) and layer.config == "config"
    assert layer.gdn_decode_kernel == "triton" and not layer.enable_fused_gdn_decode
    cula_vllm.unregister()
    assert gdn.__dict__[cula_vllm.DECODE] is refuse and not op_registry_oot


def test_another_plug_ins_layer_stays(monkeypatch, caplog):
    monkeypatch.setenv("CULA_VLLM", "1")
    monkeypatch.setitem(op_registry_oot, "QwenGatedDeltaNetAttention", str)
    stand_ins(monkeypatch)
    with caplog.at_level(logging.INFO, logger="cula"):
        cula_vllm.register()
    assert op_registry_oot["QwenGatedDeltaNetAttention"] is str and "ChunkGatedDeltaRule" in op_registry_oot
    assert "QwenGatedDeltaNetAttention stays that of another plug-in" in caplog.text


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_gdn_prefill(engine, state_dtype):
    """vLLM normalises q and k, makes gates and gathers states before, and scatters them after."""
    gdn, _ = engine
    cu = torch.tensor([0, 70, 75, 95], dtype=torch.int32)
    p, (q, k, v, a, b) = parameters("gdn"), tokens("gdn", 95)
    g, h0 = log_decay("gdn", a, p), rand(3, HV, V, K, seed=9).to(state_dtype)
    unit = [x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)]
    out = torch.full((100, HV, V), float("nan"))
    o, state = gdn.ChunkGatedDeltaRule()(
        q=unit[0], k=unit[1], v=v, g=g.float(), beta=b.sigmoid(), initial_state=h0, output_final_state=True, cu_seqlens=cu,
        chunk_indices=None, chunk_offsets=None, use_qk_l2norm_in_kernel=False, core_attn_out=out,
    )  # fmt: skip
    assert CALLS == {"vllm.gdn.prefill": 1} and torch.equal(out[:95], o[0]) and out[95:].isnan().all()
    for n in range(3):
        at = slice(int(cu[n]), int(cu[n + 1]))
        want_o, want_state = want(q, k, v, g, b, h0[n : n + 1].float(), at)
        assert relative_error(o[:, at], want_o) < 1e-5 and relative_error(state[n], want_state) < 1e-5


@pytest.mark.parametrize("mode", ["gdn", "kda"])
def test_packed_decode(engine, mode):
    """One token a row on a pool with a padded slot stride; slot 0 is nobody's, and a row without a slot gives zeros."""
    slots, lower_bound = [6, 0, 3], None if mode == "gdn" else -5.0
    p, (q, k, v, a, b) = parameters(mode), tokens(mode, 3)
    states = pool([6, 3], page_major=True)
    before = states.clone()
    mixed = torch.nn.functional.pad(torch.cat([t.flatten(2) for t in (q, k, v)], -1)[0], (0, 8))[:, :-8]
    indices = torch.tensor([slots, slots], dtype=torch.int32).t()[:, 0]  # a column of a table
    if mode == "gdn":
        out = torch.full((3, 1, HV, V), float("nan"))
        o, states_back = engine[0].__dict__[cula_vllm.PACKED_DECODE](
            mixed_qkv=mixed, a=a[0], b=b[0], **p, scale=K**-0.5, initial_state=states, out=out, ssm_state_indices=indices,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert o is out
        o = o.transpose(0, 1)
    else:
        o, states_back = engine[1].fused_recurrent_kda_packed_decode(
            mixed_qkv=mixed, raw_g=a, raw_beta=b, **p, lower_bound=lower_bound, initial_state=states, state_indices=indices
        )
    assert states_back is states and {f"vllm.{mode}.packed_decode": 1} == CALLS
    g = log_decay(mode, a, p, lower_bound)
    for n, slot in enumerate(slots):
        if slot == 0:
            assert not o[:, n].any()
            continue
        want_o, want_state = want(q, k, v, g, b, before[slot : slot + 1], slice(n, n + 1))
        assert relative_error(o[:, n : n + 1], want_o) < 1e-5 and relative_error(states[slot], want_state) < 1e-5
    assert all(states[slot].isnan().all() for slot in range(SLOTS) if slot not in (6, 3))


@pytest.mark.parametrize("mode", ["gdn", "kda"])
def test_speculative_rows(engine, mode):
    """Rows of 0 to 3 tokens: each starts from the slot of the last token that was accepted and leaves a state in each slot.
    The vectors are longer than the rows of the call, as vLLM's are."""
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0], [0, 0, 0]], dtype=torch.int32)
    accepted, lengths = torch.tensor([1, 3, 2, 1], dtype=torch.int32), (3, 0, 2)
    cu = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    p, (q, k, v, a, b) = parameters(mode), tokens(mode, 5)
    states = pool([1, 6, 8])
    before = states.clone()
    named = {"initial_state": states, "cu_seqlens": cu, "ssm_state_indices": table, "num_accepted_tokens": accepted}
    if mode == "gdn":
        o, _ = engine[0].__dict__[cula_vllm.DECODE](
            **p, a=a[0], b=b[0], q=q, k=k, v=v, inplace_final_state=True, use_qk_l2norm_in_kernel=True, **named
        )
    else:
        out = torch.full_like(v, float("nan"))
        o, _ = engine[1].fused_recurrent_kda(q=q, k=k, v=v, raw_g=a, raw_beta=b, **p, lower_bound=None, out=out, **named)
        assert o is out
    assert {f"vllm.{mode}.decode": 1} == CALLS
    g, written = log_decay(mode, a, p), set()
    for n, length in enumerate(lengths):
        start = table[n, accepted[n] - 1]
        for t in range(length):
            at = slice(int(cu[n]), int(cu[n]) + t + 1)
            want_o, want_state = want(q, k, v, g, b, before[start : start + 1], at)
            assert relative_error(o[:, at], want_o) < 1e-5
            assert relative_error(states[table[n, t]], want_state) < 1e-5
            written.add(int(table[n, t]))
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(states[others].nan_to_num(), before[others].nan_to_num())


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_prefill(engine, lower_bound):
    cu = torch.tensor([0, 70, 75], dtype=torch.int32)
    p, (q, k, v, a, b) = parameters("kda"), tokens("kda", 75)
    h0 = rand(2, HV, V, K, seed=9)
    o, state = engine[1].chunk_kda_with_fused_gate(
        q=q, k=k, v=v, raw_g=a, raw_beta=b, A_log=p["A_log"], g_bias=p["dt_bias"], lower_bound=lower_bound, initial_state=h0,
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu,
    )  # fmt: skip
    g = log_decay("kda", a, p, lower_bound)
    assert CALLS == {"vllm.kda.prefill": 1}
    for n in range(2):
        at = slice(int(cu[n]), int(cu[n + 1]))
        want_o, want_state = want(q, k, v, g, b, h0[n : n + 1], at)
        assert relative_error(o[:, at], want_o) < 1e-5 and relative_error(state[n], want_state) < 1e-5


def test_longer_drafts_stay_vllms(caplog):
    table = torch.zeros(2, 9, dtype=torch.int32)
    asked = []
    changes.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="cula"):
        given = dict.fromkeys(("A_log", "a", "b", "dt_bias", "q", "k", "v"))
        more = {"initial_state": 1, "cu_seqlens": torch.arange(3), "ssm_state_indices": table}
        cula_vllm._gdn_decode(lambda **kwargs: asked.append(kwargs), **given, **more)
        args = (None, None, None, None, None, None, None, None, 1, torch.arange(3), table)
        cula_vllm._kda_decode(lambda *args: asked.append(args), *args)
    assert len(asked) == 2 and asked[0]["ssm_state_indices"] is table and caplog.text.count("9 draft tokens") == 2
    assert not CALLS


def test_the_entry_point():
    found = [point for point in importlib.metadata.entry_points(group="vllm.general_plugins") if point.name == "cula"]
    if not found:
        pytest.skip("cuLA is not installed here, only on the path")
    assert found[0].load() is cula_vllm.register


def sources(name):
    """One of vLLM's files, where it is installed (its imports need not be)."""
    spec = importlib.util.find_spec("vllm")
    path = Path(spec.submodule_search_locations[0], name) if spec else None
    if path is None or not path.exists():
        pytest.skip("needs vLLM's sources")
    return path


def test_with_vllms_own_registry(monkeypatch):
    """`custom_op.py` as it is: a layer made by vLLM's name is ours, and its forward is cuLA's."""
    config = types.SimpleNamespace(
        enabled_custom_ops=set(), disabled_custom_ops=set(), custom_ops=["all"]
    )  # fmt: skip
    platform = {f"is_{name}": (lambda: False) for name in ("rocm", "cpu", "tpu", "xpu", "out_of_tree")}
    heavy = {
        "vllm.config": {"get_cached_compilation_config": lambda: config},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.utils": {"maybe_disable_graph_partition": lambda backend: {}},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(**platform)},
    }
    path = sources("model_executor/custom_op.py")
    for name, contents in heavy.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("vllm.model_executor.custom_op", path)
    custom_op = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, custom_op)
    spec.loader.exec_module(custom_op)
    monkeypatch.setenv("CULA_VLLM", "1")
    gdn, _ = stand_ins(monkeypatch, custom_op.CustomOp, custom_op.PluggableLayer)
    cula_vllm.register()
    op, layer = gdn.ChunkGatedDeltaRule(), gdn.QwenGatedDeltaNetAttention("config")
    assert type(op).__name__ == "CulaChunkGatedDeltaRule" and type(layer).__name__ == "CulaQwenGatedDeltaNetAttention"
    assert not layer.enable_fused_gdn_decode
    q, k, v, a, b = tokens("gdn", 20)
    o, _ = op(q, k, v, -a.abs(), b.sigmoid(), torch.zeros(1, HV, V, K), True, torch.tensor([0, 20]))
    assert o.shape == v.shape and CALLS == {"vllm.gdn.prefill": 1}
    cula_vllm.unregister()
    assert not custom_op.op_registry_oot


def test_our_functions_take_what_vllms_do():
    """Names and order of parameters, read off vLLM's sources."""
    places = {
        "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py": {"forward_native": cula_vllm._gdn_prefill},
        "third_party/flash_linear_attention/ops/fused_sigmoid_gating.py": {cula_vllm.DECODE: cula_vllm._gdn_decode},
        "models/kimi_k3/nvidia/ops/third_party/kda/chunk.py": {"chunk_kda_with_fused_gate": cula_vllm._kda_prefill},
        "models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py": {
            "fused_recurrent_kda": cula_vllm._kda_decode,
            "fused_recurrent_kda_packed_decode": cula_vllm._kda_packed_decode,
        },
    }
    for file, functions in places.items():
        tree = ast.parse(sources(file).read_text())
        for name, ours in functions.items():
            theirs = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
            names = [argument.arg for argument in theirs.args.args if argument.arg != "self"]
            mine = [n for n, p in inspect.signature(ours).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert mine[1:] == names, name
