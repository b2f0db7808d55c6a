# SPDX-License-Identifier: Apache-2.0
"""The SGLang plug-in: each method against the float64 reference on pools with poisoned slots; SGLang's own registry and
dispatchers where its sources are there, with stand-ins for its heavy imports."""

import abc
import ast
import enum
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
import types
import typing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cula import reference
from cula.integrations import CALLS, changes
from cula.integrations import sglang as cula_sglang
from cula.reference import relative_error
from tests.integrations.serving import HV, SLOTS, H, K, V, log_decay, parameters, pool, rand, tokens, want


class Triton:
    """In the place of SGLang's Triton kernels, on which ours stand."""

    supports_packed_decode = True

    def packed_decode(self, *args, **kwargs):
        return "triton"

    def target_verify(self, **kwargs):
        return "triton"

    def extend(self, *args, **kwargs):
        raise AssertionError

    def decode(self, *args, **kwargs):
        raise AssertionError


@pytest.fixture(autouse=True)
def counted():
    CALLS.clear()


def kernel(mode):
    return cula_sglang.kernel_class(mode, Triton)()


@pytest.mark.parametrize("mode", ["gdn", "kda"])
@pytest.mark.parametrize("page_major", [False, True])
def test_extend(mode, page_major):
    """Packed prompts on slots, one without a slot, one empty; the other slots stay poisoned."""
    lengths, slots = [70, 5, 0, 20], [3, 7, 5, -1]
    cu = torch.tensor([0, 70, 75, 75, 95], dtype=torch.int32)
    p, (q, k, v, a, b) = parameters(mode), tokens(mode, 95)
    states = pool([3, 7, 5], page_major)
    before = states.clone()
    named = {"ssm_states": states, "cache_indices": torch.tensor(slots, dtype=torch.int32), "query_start_loc": cu}
    if mode == "gdn":
        g = log_decay(mode, a, p)
        output = torch.full((100, HV, V), float("nan"))
        o, nothing, h = kernel(mode).extend(q, k, v, g.float(), b.sigmoid(), **named, layer_id=3, output=output)
        assert nothing is None and h is None and torch.equal(output[:95], o[0])
    else:
        g = log_decay(mode, a, p, -5.0)
        o = kernel(mode).extend(q, k, v, a, b, **named, **p, lower_bound=-5.0, beta_is_raw=True, return_intermediate_states=False)
    assert o.shape == (1, 95, HV, V) and {f"sglang.{mode}.extend": 1} == CALLS
    for n, (length, slot) in enumerate(zip(lengths, slots)):
        at = slice(int(cu[n]), int(cu[n + 1]))
        h0 = before[slot : slot + 1] if slot >= 0 else torch.zeros(1, HV, V, K)
        if length:
            o_n, s_n = want(q, k, v, g, b, h0, at)
            assert relative_error(o[:, at], o_n) < 1e-5
            assert slot < 0 or relative_error(states[slot], s_n) < 1e-5
        else:
            assert torch.equal(states[slot], before[slot])
    assert all(states[slot].isnan().all() for slot in range(SLOTS) if slot not in slots)


@pytest.mark.parametrize("mode", ["gdn", "kda"])
def test_extend_tracks_states_for_prefix_caches(mode):
    """`track_state[n]` is the state at the start of 64-token chunk `track_chunk_idx[n]`; -1 leaves the row alone."""
    lengths, slots, idx = [130, 10, 130, 70], [1, 2, 3, -1], torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    p, (q, k, v, a, b) = parameters(mode), tokens(mode, 340)
    g = log_decay(mode, a, p)
    states = pool([1, 2, 3])
    before, track = states.clone(), torch.full((4, HV, V, K), float("nan"))
    named = {"ssm_states": states, "cache_indices": torch.tensor(slots), "query_start_loc": cu}
    kernel(mode).extend(q, k, v, g.float(), b.sigmoid(), **named, track_state=track, track_chunk_idx=idx)
    for n, h0 in ((0, before[1:2]), (3, torch.zeros(1, HV, V, K))):
        at = slice(int(cu[n]), int(cu[n]) + 64 * int(idx[n]))
        assert relative_error(track[n], want(q, k, v, g, b, h0, at)[1]) < 1e-5
    assert torch.equal(track[2], before[3]) and track[1].isnan().all()
    for n, slot in enumerate(slots[:3]):
        at = slice(int(cu[n]), int(cu[n + 1]))
        assert relative_error(states[slot], want(q, k, v, g, b, before[slot : slot + 1], at)[1]) < 1e-5
    assert kernel(mode).supports_track_state_snapshot


def test_extend_without_an_update():
    """Multi-item scoring reads slots, several items the same one, and leaves them."""
    p, (q, k, v, a, b) = parameters("gdn"), tokens("gdn", 30)
    states = pool([4])
    before, g = states.clone(), log_decay("gdn", a, p)
    o, _, _ = kernel("gdn").extend(
        q, k, v, g.float(), b.sigmoid(), ssm_states=states, cache_indices=torch.tensor([4, 4]),
        query_start_loc=torch.tensor([0, 10, 30], dtype=torch.int32), inplace_update=False,
    )  # fmt: skip
    for at in (slice(0, 10), slice(10, 30)):
        o_n, _ = want(q, k, v, g, b, before[4:5], at)
        assert relative_error(o[:, at], o_n) < 1e-5
    assert torch.equal(states.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("mode", ["gdn", "kda"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode(mode, packed, dtype):
    slots, lower_bound = [6, -1, 0], None if mode == "gdn" else -5.0
    p, (q, k, v, a, b) = parameters(mode), tokens(mode, 3)
    states = pool([6, 0], page_major=True).to(dtype)
    before = states.clone()
    named = {"ssm_states": states, "cache_indices": torch.tensor(slots, dtype=torch.int32)}
    bounds = {} if mode == "gdn" else {"lower_bound": lower_bound}
    if packed:
        wide = torch.cat([t.flatten(2) for t in (q, k, v)], -1)[0]
        mixed = F.pad(wide, (0, 8))[:, : wide.shape[1]]  # rows with a stride
        shapes = {"scale": K**-0.5, "num_v_heads": HV, "head_v_dim": V}
        o = kernel(mode).packed_decode(mixed, a.flatten(2)[0], b[0], **p, **named, **shapes, **bounds)
    else:
        start = torch.arange(4, dtype=torch.int32)
        o = kernel(mode).decode(q, k, v, a.flatten(2)[0], b[0], **p, **named, **bounds, query_start_loc=start)
    assert o.shape == (1, 3, HV, V) and {f"sglang.{mode}.{'packed_' if packed else ''}decode": 1} == CALLS
    g = log_decay(mode, a, p, lower_bound)
    for n, slot in enumerate(slots):
        if slot < 0:
            assert not o[:, n].any()
            continue
        at = slice(n, n + 1)
        h0 = before[slot : slot + 1].float()
        o_n, s_n = want(q, k, v, g, b, h0, at)
        assert relative_error(o[:, at], o_n) < 1e-5
        assert relative_error(states[slot].float(), s_n) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert all(states[slot].isnan().all() for slot in range(SLOTS) if slot not in slots)


@pytest.mark.parametrize("mode", ["gdn", "kda"])
@pytest.mark.parametrize("lengths", [(3, 3, 3), (1, 0, 3)])
def test_target_verify(mode, lengths):
    """Nothing is committed; the state after each draft token goes to the rows of a larger buffer that the indices name. A request
    without a slot, and tokens behind the last request."""
    slots, rows, lower_bound = [5, -1, 2], [3, 4, 0], None if mode == "gdn" else -5.0
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    p, (q, k, v, a, b) = parameters(mode), tokens(mode, 10)
    states, buffer = pool([5, 2]), torch.full((6, 4, HV, V, K), float("nan"))
    before = states.clone()
    wide = torch.cat([t.flatten(2) for t in (q, k, v)], -1)[0]  # strided views of one convolution's output
    q, k, v = (t.unflatten(-1, (-1, d))[None] for t, d in zip(wide.split([H * K, H * K, HV * V], -1), (K, K, V)))
    o = kernel(mode).target_verify(
        **p, q=q, k=k, v=v, a=a, b=b, ssm_states=states, cache_indices=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=cu, intermediate_states_buffer=buffer, lower_bound=lower_bound,
        intermediate_state_indices=torch.tensor(rows, dtype=torch.int32), cache_steps=3, retrieve_parent_token=None,
    )  # fmt: skip
    assert o.shape == v.shape and {f"sglang.{mode}.target_verify": 1} == CALLS
    g = log_decay(mode, a, p, lower_bound)
    for n, (slot, length) in enumerate(zip(slots, lengths)):
        for t in range(1, length + 1 if slot >= 0 else 0):
            at = slice(int(cu[n]), int(cu[n]) + t)
            o_n, s_n = want(q, k, v, g, b, before[slot : slot + 1], at)
            assert relative_error(buffer[rows[n], t - 1], s_n) < 1e-5
            assert relative_error(o[:, at], o_n) < 1e-5
        assert slot < 0 or buffer[rows[n], length:].isnan().all()
    assert torch.equal(states.nan_to_num(), before.nan_to_num())
    assert buffer[[1, 2, 5]].isnan().all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"retrieve_parent_token": torch.zeros(2, 3)}, "a tree"),
        ({"cache_ring": True}, "ReplaySSM"),
        ({"intermediate_states_buffer": None}, "ReplaySSM"),
        ({"cache_steps": 9}, "more than 8 draft tokens"),
    ],
)
def test_what_stays_tritons(change, reason, caplog):
    p, (q, k, v, a, b) = parameters("kda"), tokens("kda", 6)
    given = {"query_start_loc": torch.tensor([0, 3, 6]), "cache_steps": 3, "retrieve_parent_token": None}
    given |= {"ssm_states": pool([0, 1]), "cache_indices": torch.tensor([0, 1])}
    given |= {"intermediate_states_buffer": torch.zeros(2, 3, HV, V, K)} | change
    changes.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="cula"):
        assert kernel("kda").target_verify(**p, q=q, k=k, v=v, a=a, b=b, **given) == "triton"
    assert reason in caplog.text and not CALLS
    ring = {"replayssm_d": 1, "scale": 1.0, "num_v_heads": HV, "head_v_dim": V}
    assert kernel("kda").packed_decode(q, a, b, **p, ssm_states=None, cache_indices=None, **ring) == "triton"


@pytest.fixture
def chosen(monkeypatch):
    """What SGLang was started with."""
    mamba = types.SimpleNamespace(linear_attn_backend="cula", linear_attn_decode_backend=None, linear_attn_prefill_backend=None)
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_exec = lambda: types.SimpleNamespace(mamba=mamba)
    monkeypatch.setitem(sys.modules, context.__name__, context)
    return mamba


def lightning_call(lengths, slots, *, has_state=None):
    """Tokens [T, H, D], a pool [slots, H, K, V] and SGLang's description of the batch: `has_state` of a prefill's sequences."""
    T, N = sum(lengths), len(lengths)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    states = torch.full((SLOTS, 2, HV, K, K), float("nan"))[:, 0]
    for slot in slots:
        if slot >= 0:
            states[slot] = rand(HV, K, K, seed=100 + slot)
    meta = types.SimpleNamespace(
        batch_size=N, q_offsets=cu, s_offsets=torch.tensor(slots, dtype=torch.int32), mask=None,
        s_scales=torch.ones(N, dtype=torch.int64) if has_state is None else torch.tensor(has_state) > 0,
    )  # fmt: skip
    qkv = [rand(T, HV, K, seed=seed) for seed in (1, 2, 3)]
    return qkv, states, torch.tensor([0.01, 0.1, 0.3, 1.0]).view(-1, 1, 1), meta


def lightning_want(qkv, decay, h0, at):
    q, k, v = (t[None, at].double() for t in qkv)
    o, state = reference.lightning(q, k, v, decay.reshape(-1).double(), scale=0.5, initial_state=h0.transpose(-1, -2)[None])
    return o[0], state[0].transpose(-1, -2)


@pytest.mark.parametrize("lengths", [[70, 5, 20], [1, 1, 1], [1, 2, 0], [1, 0, 0]], ids=str)
def test_lightning_prefill(chosen, lengths):
    """On a pool with K in front; a prompt that starts anew in a used slot, one without a slot. As many tokens as prompts, or
    fewer, are no decode."""
    slots = [3, 7, -1]
    qkv, states, decay, meta = lightning_call(lengths, slots, has_state=[1, 0, 1])
    before = states.clone()
    o = cula_sglang._seg_la(None, *qkv, states, decay, meta, softmax_scale=0.5)
    assert CALLS == {"sglang.lightning.prefill": 1} and o.shape == qkv[2].shape
    for n, slot in enumerate(slots):
        at = slice(int(meta.q_offsets[n]), int(meta.q_offsets[n + 1]))
        h0 = before[slot] if n == 0 else torch.zeros(HV, K, K)
        want_o, want_state = lightning_want(qkv, decay, h0, at)
        assert lengths[n] == 0 or relative_error(o[at], want_o) < 1e-5
        assert slot < 0 or torch.allclose(states[slot], want_state.float(), atol=1e-5)
    assert all(states[slot].isnan().all() for slot in range(SLOTS) if slot not in slots)


@pytest.mark.parametrize("steps", [1, 3])
def test_lightning_decode_and_drafts(chosen, steps):
    """One token each updates the pool; drafts leave it and fill the buffer's rows."""
    slots, rows = [6, -1, 0], [2, 1, 4]
    qkv, states, decay, meta = lightning_call([steps] * 3, slots)
    before, buffer = states.clone(), torch.full((5, 4, HV, K, K), float("nan"))
    drafts = {} if steps == 1 else {"caches": buffer, "cache_indices": torch.tensor(rows)}
    o = cula_sglang._seg_la(None, *qkv, states, decay, meta, **drafts, softmax_scale=0.5, decouple=True)
    assert CALLS == {"sglang.lightning.decode": 1}
    for n, slot in enumerate(slots):
        for t in range(1, steps + 1 if slot >= 0 else 0):
            at = slice(n * steps, n * steps + t)
            want_o, want_state = lightning_want(qkv, decay, before[slot], at)
            assert relative_error(o[at], want_o) < 1e-5
            assert relative_error(states[slot] if steps == 1 else buffer[rows[n], t - 1], want_state) < 1e-5
    if steps > 1:
        assert torch.equal(states.nan_to_num(), before.nan_to_num()) and buffer[:, steps:].isnan().all()
    assert not o[steps : 2 * steps].any()


@pytest.mark.parametrize("what", ["another choice", "a tree", "states for prefix caches", "long drafts"])
def test_lightning_that_stays_sglangs(chosen, what):
    lengths, has_state = ([9, 9], None) if what == "long drafts" else ([5, 5], [1, 1])
    qkv, states, decay, meta = lightning_call(lengths, [0, 1], has_state=has_state)
    before, given = states.clone(), {}
    if what == "another choice":
        chosen.linear_attn_prefill_backend = "triton"
    elif what == "a tree":
        meta.mask = torch.ones(2, 5)
    elif what == "long drafts":
        given = {"caches": torch.zeros(2, 9, HV, K, K), "cache_indices": torch.arange(2)}
    else:
        given = {"track_lens": torch.ones(2), "track_state_indices": torch.ones(2)}
    asked = []
    cula_sglang._seg_la(lambda *args, **more: asked.append((*args, more)), *qkv, states, decay, meta, **given, decouple=True)
    assert len(asked) == 1 and asked[0][5] is meta and asked[0][-1] == {"decouple": True} and not CALLS
    assert torch.equal(states.nan_to_num(), before.nan_to_num())


class Backend(enum.Enum):
    """As SGLang's: a word it does not know is CUSTOM."""

    TRITON = "triton"
    FLASHINFER = "flashinfer"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value):
        return cls.CUSTOM

    def is_custom(self):
        return self is Backend.CUSTOM

    def is_triton(self):
        return self is Backend.TRITON


@pytest.fixture
def stand_ins(monkeypatch):
    """SGLang as far as `register` sees it."""
    hooks = {}
    modules = {
        "sglang.srt.arg_groups.choices": {"LINEAR_ATTN_KERNEL_BACKEND_CHOICES": ["triton"]},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": types.SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: (hook, kind)})),
            "HookType": types.SimpleNamespace(AROUND="around"),
        },
        "sglang.srt.layers.attention.linear.kernels.gdn_triton": {"TritonGDNKernel": Triton},
        "sglang.srt.layers.attention.linear.kernels.kda_triton": {"TritonKDAKernel": Triton},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    choices = sys.modules["sglang.srt.arg_groups.choices"]
    choices.add_linear_attn_kernel_backend_choices = choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES.extend
    monkeypatch.setattr(cula_sglang, "_registered", [])
    return types.SimpleNamespace(hooks=hooks, choices=choices)


def test_register(stand_ins):
    cula_sglang.register()
    cula_sglang.register()
    assert stand_ins.choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES == ["triton", "cula"]
    assert list(stand_ins.hooks) == [*cula_sglang.DISPATCHERS, cula_sglang.LIGHTNING]
    assert all(kind == "around" for _, kind in stand_ins.hooks.values())


@pytest.mark.parametrize("which", ["gdn", "kda"])
def test_dispatchers(stand_ins, which):
    """What is asked of cuLA by name is cuLA's, the rest is what SGLang made of it."""
    cula_sglang.register()
    hook = next(hook for target, (hook, _) in stand_ins.hooks.items() if which.upper() in target)

    def original(self, decode_backend, prefill_backend, verify_backend=None):
        self.made = (decode_backend, prefill_backend, verify_backend)
        self.decode_kernel = self.extend_kernel = self.verify_kernel = "SGLang's"
        self.supports_packed_decode = False

    def dispatcher(*backends):
        self = types.SimpleNamespace()
        hook(original, self, *backends)
        kernels = (self.decode_kernel, self.extend_kernel, self.verify_kernel)
        return self, ["cuLA" if isinstance(kernel, cula_sglang._Kernels) else kernel for kernel in kernels]

    cula, triton, other = Backend("cula"), Backend.TRITON, Backend.FLASHINFER
    self, kernels = dispatcher(cula, cula, triton)
    assert kernels == ["cuLA"] * 3 and self.made == (triton, triton, triton) and self.supports_packed_decode
    assert dispatcher(triton, cula, triton)[1] == ["SGLang's", "cuLA", "SGLang's"]
    assert dispatcher(cula, other, other)[1] == ["cuLA", "SGLang's", "SGLang's"]
    self, kernels = dispatcher(other, triton, other)
    assert kernels == ["SGLang's"] * 3 and self.made == (other, triton, other)
    assert isinstance(dispatcher(cula, cula, triton)[0].decode_kernel, Triton)  # SGLang looks for its own class in places


def test_the_entry_point():
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    found = [point for point in points if point.name == "cula"]
    if not found:
        pytest.skip("cuLA is not installed here, only on the path")
    assert found[0].load() is cula_sglang.register


def sources(name):
    """One of SGLang's files, where it is installed (its imports need not be)."""
    spec = importlib.util.find_spec("sglang")
    path = Path(spec.submodule_search_locations[0], name) if spec else None
    if path is None or not path.exists():
        pytest.skip("needs SGLang's sources")
    return path


def classes_of(path, namespace, *names):
    """Some classes of a file, without its imports."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names]
    exec(compile(tree, str(path), "exec"), namespace)
    return [namespace[name] for name in names]


def test_with_sglangs_own_registry_and_dispatchers(monkeypatch):
    """Its hook registry and its choices as they are; its dispatcher and its enum without their files' imports."""
    linear = "srt/layers/attention/linear"
    monkeypatch.setattr(cula_sglang, "_registered", [])
    modules = {}
    for name, file in (
        ("arg_groups.choices", "srt/arg_groups/choices.py"),
        ("plugins.hook_registry", "srt/plugins/hook_registry.py"),
    ):
        spec = importlib.util.spec_from_file_location(f"sglang.srt.{name}", sources(file))
        modules[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, modules[name])
        spec.loader.exec_module(modules[name])
    namespace = {"Enum": enum.Enum, "Optional": typing.Optional, "torch": torch, "rank0_log": lambda words: None}
    (backend,) = classes_of(sources(f"{linear}/utils.py"), namespace, "LinearAttnKernelBackend")
    for mode, file in (("gdn", "gdn_backend"), ("kda", "kda_backend")):
        namespace[f"Triton{mode.upper()}Kernel"] = Triton
        name = f"{mode.upper()}KernelDispatcher"
        (dispatcher,) = classes_of(sources(f"{linear}/{file}.py"), namespace, name)
        module = types.ModuleType(f"sglang.{linear.replace('/', '.')}.{file}")
        setattr(module, name, dispatcher)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent = types.ModuleType(f"sglang.{linear.replace('/', '.')}.kernels.{mode}_triton")
        setattr(parent, f"Triton{mode.upper()}Kernel", Triton)
        monkeypatch.setitem(sys.modules, parent.__name__, parent)
    for package in (
        "sglang",
        "sglang.srt",
        "sglang.srt.layers",
        "sglang.srt.layers.attention",
        "sglang.srt.layers.attention.linear",
    ):
        stand_in = types.ModuleType(package)
        stand_in.__path__ = []
        monkeypatch.setitem(sys.modules, package, stand_in)
    lightning = types.ModuleType(f"sglang.{linear.replace('/', '.')}.lightning_backend")
    lightning.seg_la_fwd = lambda *args: "SGLang's"
    monkeypatch.setitem(sys.modules, lightning.__name__, lightning)
    cula_sglang.register()
    assert "cula" in modules["arg_groups.choices"].LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    registry = modules["plugins.hook_registry"].HookRegistry
    registry.apply_hooks()
    assert registry._patched == {*cula_sglang.DISPATCHERS, cula_sglang.LIGHTNING}
    cula, triton = backend("cula"), backend.TRITON
    assert cula.is_custom()
    for mode in ("gdn", "kda"):
        made = namespace[f"{mode.upper()}KernelDispatcher"](cula, cula, triton)
        assert {type(k).__name__ for k in (made.decode_kernel, made.extend_kernel, made.verify_kernel)} == {
            f"Cula{mode.upper()}Kernel"
        }
        assert made.supports_packed_decode
        plain = namespace[f"{mode.upper()}KernelDispatcher"](triton, triton, triton)
        assert type(plain.decode_kernel) is Triton
        p, (q, k, v, a, b) = parameters(mode), tokens(mode, 3)
        bounds = {} if mode == "gdn" else {"lower_bound": None}
        o = made.decode(
            q,
            k,
            v,
            a,
            b,
            **p,
            ssm_states=pool([0, 1, 2]),
            cache_indices=torch.arange(3),
            query_start_loc=torch.arange(4),
            **bounds,
        )
        assert o.shape == v.shape


def test_the_methods_take_what_sglangs_base_class_says():
    path = sources("srt/layers/attention/linear/kernels/kernel_backend.py")
    (base,) = classes_of(path, {"ABC": abc.ABC, "abstractmethod": abc.abstractmethod, "torch": torch}, "LinearAttnKernelBase")
    for method in ("decode", "extend", "target_verify"):
        theirs = inspect.signature(getattr(base, method)).parameters
        ours = inspect.signature(getattr(cula_sglang._Kernels, method)).parameters
        named = [name for name, p in theirs.items() if p.kind is not p.VAR_KEYWORD]
        assert [name for name in ours if name in named] == named
        assert all(ours[name].kind == theirs[name].kind for name in named)
