# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: graph capture, no hidden synchronisation, huge tensors, and FLA as a second opinion."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cula
from cula import reference
from cula.core.replay.cache import ReplayCache
from cula.reference import relative_error
from tests.support.calls import GRADIENT_TOLERANCE, KdaCall, LightningCall

pytest.importorskip("triton")

from triton import knobs

from cula.ops.triton import launch

pytestmark = pytest.mark.gpu

FULL = KdaCall(
    dtype=torch.bfloat16, H=2, HV=4, K=128, V=128, gate="bounded", norm=True, beta="sigmoid", gate_dtype=torch.bfloat16
)


def kda(tensors, call, **kwargs):
    return cula.cula_kda(**tensors, **call.switches(), output_final_state=True, backend="triton", **kwargs)


@pytest.fixture
def no_synchronisation():
    """Any call that waits for the GPU raises."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("lens", [None, (300, 0, 65, 1000)])
@pytest.mark.parametrize("safe_gate", [True, False])
def test_forward_and_backward_never_wait_for_the_gpu(lens, safe_gate, no_synchronisation):
    torch.cuda.set_sync_debug_mode("default")  # making the inputs may wait
    call = FULL.with_(T=1000, lens=lens)
    tensors = {n: t.requires_grad_() if t is not None and t.is_floating_point() else t for n, t in call.tensors("cuda").items()}
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    kda(tensors, call, safe_gate=safe_gate)  # compile
    torch.cuda.set_sync_debug_mode("error")
    o, state = kda(tensors, call, safe_gate=safe_gate)
    torch.autograd.grad([o, state], leaves, [torch.ones_like(o), torch.ones_like(state)])


def gradients(call, tensors):
    """o, the final state, and all gradients."""
    leaves = {n: t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for n, t in tensors.items()}
    o, state = kda(leaves, call)
    wanted = [t for t in leaves.values() if t is not None and t.requires_grad]
    return [o, state, *torch.autograd.grad([o, state], wanted, [torch.ones_like(o), torch.ones_like(state)])]


@pytest.fixture
def through_triton(monkeypatch):
    """The launches that Triton's JIT made."""
    seen, usual = [], launch.Variant._by_triton

    def by_triton(self, grid, arguments):
        seen.append(self.kernel.name)
        return usual(self, grid, arguments)

    monkeypatch.setattr(launch.Variant, "_by_triton", by_triton)
    return seen


@pytest.mark.parametrize("lens", [None, (300, 0, 65, 135)])
def test_launches_by_the_driver_equal_tritons(lens, through_triton, monkeypatch):
    call = FULL.with_(T=500, lens=lens)
    tensors = call.tensors("cuda")
    gradients(call, tensors)
    through_triton.clear()
    direct = gradients(call, tensors)
    assert not through_triton
    monkeypatch.setattr(launch, "can_launch_directly", lambda kernel, first: False)
    monkeypatch.setattr(ReplayCache, "run", lambda self, tensors, static_args: None)  # which would launch without asking
    for a, b in zip(direct, gradients(call, tensors)):
        assert torch.equal(a, b)
    assert len(through_triton) >= 10


def test_a_new_length_goes_to_the_driver(through_triton):
    for T in (64, 65, 1, 333, 777, 1024):
        gradients(FULL.with_(T=T), FULL.with_(T=T).tensors("cuda"))
        if T == 64:
            through_triton.clear()
    assert not through_triton


def test_tensors_at_odd_addresses():
    call = FULL.with_(T=130)
    tensors = call.tensors("cuda")
    want = gradients(call, tensors)
    odd = {}
    for name, t in tensors.items():
        if t is not None and t.is_floating_point():
            moved = torch.empty(t.numel() + 1, dtype=t.dtype, device="cuda")[1:].view(t.shape)
            odd[name] = moved.copy_(t)
        else:
            odd[name] = t
    for _ in range(2):  # the first compiles
        for a, b in zip(gradients(call, odd), want):
            assert relative_error(a, b) < 1e-2  # sums in another order


def test_threads_and_streams_of_their_own():
    calls = [FULL.with_(T=T, seed=T) for T in (64, 100, 333, 500)]
    inputs = [c.tensors("cuda") for c in calls]
    want = [gradients(c, t) for c, t in zip(calls, inputs)]
    torch.cuda.synchronize()

    def run(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            got = gradients(calls[i % 4], inputs[i % 4])
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(a, b) for a, b in zip(got, want[i % 4]))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(64)))


def test_a_profilers_hooks_hear_of_launches():
    call = FULL.with_(T=64)
    tensors = call.tensors("cuda")
    gradients(call, tensors)
    names = []
    hook = lambda metadata: names.append(metadata.get()["name"])
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        gradients(call, tensors)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert {"kda_intra_fwd_kernel", "kda_recurrence_fwd_kernel", "kda_pairs_bwd_kernel"} <= {*names}


def captured(function):
    """A graph of `function` and what it returned while it was captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize("lens", [None, (300, 0, 65, 135)])
def test_a_prefill_is_captured_and_sees_new_data(lens):
    call = FULL.with_(T=500, lens=lens)
    static = call.tensors("cuda")
    graph, (o, state) = captured(lambda: kda(static, call))
    fresh = call.with_(seed=9).tensors("cuda")
    for name, t in static.items():
        if t is not None:
            t.copy_(fresh[name])
    graph.replay()
    want_o, want_state = kda(fresh, call)
    assert torch.equal(o, want_o)
    assert torch.equal(state, want_state)


@pytest.mark.parametrize("mode", ["kda", "gdn", "lightning"])
def test_decode_is_captured_and_sees_new_slots(mode):
    call = FULL.with_(T=1, B=4, scalar_gate=mode == "gdn", gate="softplus" if mode == "gdn" else FULL.gate)
    t = call.tensors("cuda")
    decay = torch.tensor([0.0, 0.1, 0.5, 2.0], device="cuda")
    pool = torch.randn(8, call.HV, call.V, call.K, device="cuda")
    start = pool.clone()
    slots = torch.full((4,), -1, dtype=torch.int32, device="cuda")
    common = {"state": pool, "state_indices": slots, "mode": mode, "backend": "triton"}
    if mode != "lightning":
        arguments = {n: t[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")} | call.switches()
    else:
        arguments = {n: t[n] for n in ("q", "k", "v")} | {"decay": decay}
    graph, (o, _) = captured(lambda: cula.cula_decode(**arguments, **common))
    assert torch.equal(pool, start), "padded rows write nothing"
    for rows in ([7, -1, 0, 3], [1, 2, -1, -1]):
        pool.copy_(start)
        slots.copy_(torch.tensor(rows))
        graph.replay()
        replayed, after = o.clone(), pool.clone()
        pool.copy_(start)
        want, _ = cula.cula_decode(**arguments, **common)
        assert torch.equal(replayed, want)
        assert torch.equal(after, pool)


def test_more_than_2_to_the_31_elements():
    """The last head of a tensor of 2.2e9 elements, beside the same head alone."""
    T, H, D = 4096, 4200, 128
    assert T * H * D > 2**31
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v, g = (torch.randn(1, T, H, D, generator=gen, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    beta = torch.randn(1, T, H, generator=gen, device="cuda", dtype=torch.bfloat16)
    switches = {"use_gate_in_kernel": True, "lower_bound": -5.0, "use_qk_l2norm_in_kernel": True, "safe_gate": True}
    switches |= {"use_beta_sigmoid_in_kernel": True, "output_final_state": True, "backend": "triton"}
    o, state = cula.cula_kda(q, k, v, g, beta, **switches)
    last = slice(H - 4, H)
    o_last, state_last = cula.cula_kda(*(x[:, :, last].contiguous() for x in (q, k, v, g, beta)), **switches)
    assert relative_error(o[:, :, last], o_last) < 1e-3
    assert relative_error(state[:, last], state_last) < 1e-3
    del o, o_last
    decay = torch.rand(H, device="cuda")
    o, _ = cula.cula_lightning(q, k, v, decay, backend="triton")
    o_last, _ = cula.cula_lightning(*(x[:, :, last].contiguous() for x in (q, k, v)), decay[last], backend="triton")
    assert relative_error(o[:, :, last], o_last) < 1e-3


WIDE_HEADS = {
    "bounded": FULL.with_(T=150, H=2, HV=2),
    "bounded, packed": FULL.with_(lens=(70, 0, 129, 1), H=2, HV=2),
    "softplus, grouped heads": FULL.with_(T=150, H=1, HV=2, gate="softplus"),
    "log decays, no norm": FULL.with_(T=150, H=1, HV=1, gate="log", norm=False, beta="plain"),
    "strong decays": FULL.with_(T=150, H=1, HV=1, gate="log", decay=30.0),
    "one gate a head": FULL.with_(T=150, H=1, HV=2, gate="softplus", scalar_gate=True),
    "64": FULL.with_(T=33, H=1, HV=1, K=64, V=64),
    "256": FULL.with_(T=100, H=1, HV=1, K=256, V=256),
}


@pytest.mark.parametrize("name", WIDE_HEADS)
def test_gradients_with_wide_heads(name):
    """From 64 channels on, products take other instructions than in the tests that the interpreter shares."""
    call = WIDE_HEADS[name]
    tensors = {n: t.requires_grad_() if t is not None and t.is_floating_point() else t for n, t in call.tensors("cuda").items()}
    names = [n for n, t in tensors.items() if t is not None and t.requires_grad]
    leaves = [tensors[n] for n in names]
    want = reference.kda(**tensors, **call.switches())
    gen = torch.Generator("cuda").manual_seed(1)
    do, dht = (torch.randn(t.shape, generator=gen, device="cuda").to(d) for t, d in zip(want, (call.dtype, torch.float32)))
    wanted = torch.autograd.grad(want, leaves, [do.double(), dht.double()])
    first, second = (torch.autograd.grad(kda(tensors, call), leaves, [do, dht]) for _ in range(2))
    for n, got, again, grad in zip(names, first, second, wanted):
        assert torch.equal(got, again), f"d{n} differs between runs"
        assert relative_error(got, grad) < GRADIENT_TOLERANCE[call.dtype], f"d{n}: {relative_error(got, grad):.1e}"


GATES = {
    "fast": {"gate": "bounded"},
    "softplus": {"gate": "softplus"},
    "none": {"gate": "log", "decay": 0.0},
    "strong": {"gate": "log", "decay": 5.0},
    "unbounded": {"gate": "log", "decay": 50.0},
}


@pytest.fixture
def untuned(monkeypatch):
    """FLA's kernels take one variant that fits, four warps if they can: each computes the same, and tuning takes minutes."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        for config in sorted(self.prune_configs(kwargs), key=lambda c: (abs(c.num_warps - 4), c.num_stages)):
            try:
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
            except OutOfResources:
                continue
        raise RuntimeError(f"{self.base_fn.__name__}: no variant fits this GPU")

    monkeypatch.setattr(Autotuner, "run", run)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("lens", [None, (700, 1, 300, 23)])
def test_no_worse_than_fla(gate, lens, untuned):
    """Relative errors against float64 beside FLA's on the same inputs, forward and every gradient."""
    fla_kda = pytest.importorskip("fla.ops.kda", reason="fla-core is not installed").chunk_kda
    call = FULL.with_(T=1024, lens=lens, gate_dtype=torch.float32, HV=2, **GATES[gate])
    tensors = {n: t.requires_grad_() if t is not None and t.is_floating_point() else t for n, t in call.tensors("cuda").items()}
    names = [n for n, t in tensors.items() if t is not None and t.requires_grad]
    leaves = [tensors[n] for n in names]
    safe_gate = call.gate == "bounded"
    want = reference.kda(**tensors, **call.switches())
    gen = torch.Generator("cuda").manual_seed(1)
    do = torch.randn(want[0].shape, generator=gen, device="cuda").bfloat16()
    dht = torch.randn(want[1].shape, generator=gen, device="cuda")
    wanted = [*want, *torch.autograd.grad(want, leaves, [do.double(), dht.double()])]

    def errors(run):
        o, state = run()
        grads = torch.autograd.grad([o, state], leaves, [do, dht])
        return {n: relative_error(a, b) for n, a, b in zip(["o", "state", *names], [o, state, *grads], wanted)}

    ours = errors(lambda: kda(tensors, call, safe_gate=safe_gate))
    bias = tensors.get("dt_bias")
    flat = {**tensors, "dt_bias": None if bias is None else bias.reshape(-1)}  # as FLA's backward wants it
    fla = errors(lambda: fla_kda(**flat, **call.switches(), safe_gate=safe_gate, output_final_state=True, state_v_first=True))
    for name, error in ours.items():
        assert error < max(1.2 * fla[name], 5e-3), f"{name}: {error:.1e}, FLA {fla[name]:.1e}"


def test_lightning_no_worse_than_fla(untuned):
    simple_gla = pytest.importorskip("fla.ops.simple_gla", reason="fla-core is not installed").chunk_simple_gla
    t = LightningCall(T=1000, B=2, H=4, HV=4, K=128, V=128, dtype=torch.bfloat16).tensors("cuda")
    want, want_state = reference.lightning(**t)
    ours, state = cula.cula_lightning(
        t["q"], t["k"], t["v"], t["decay"], initial_state=t["initial_state"], output_final_state=True, backend="triton"
    )
    h0 = t["initial_state"].transpose(-1, -2).contiguous()
    theirs, _ = simple_gla(t["q"], t["k"], t["v"], g_gamma=-t["decay"], initial_state=h0, output_final_state=True)
    assert relative_error(ours, want) < max(1.2 * relative_error(theirs, want), 3e-3)
    assert relative_error(state, want_state) < 3e-3


@pytest.mark.parametrize("T", [1, 63, 64, 65, 1000, 20000])
def test_long_and_odd_lengths(T):
    call = FULL.with_(T=T, H=1, HV=1)
    tensors = call.tensors("cuda")
    o, state = kda(tensors, call, safe_gate=True)
    tail = slice(max(0, T - 2000), T)  # what came before is in the state that our own run of the prefix leaves
    part = {n: t[:, tail] if n in ("q", "k", "v", "g", "beta") else t for n, t in tensors.items()}
    if tail.start:
        before = {n: t[:, : tail.start] if n in ("q", "k", "v", "g", "beta") else t for n, t in tensors.items()}
        part["initial_state"] = kda(before, call, safe_gate=True)[1]
    want_o, want_state = reference.kda(**part, **call.switches())
    assert relative_error(o[:, tail], want_o) < 1e-2
    assert relative_error(state, want_state) < 1e-2
