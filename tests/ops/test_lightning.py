# SPDX-License-Identifier: Apache-2.0
"""Lightning on every backend: numbers and gradients against the float64 recurrence, and its properties."""

import pytest
import torch

import cula
from cula import reference
from cula.reference import relative_error
from tests.support.calls import GRADIENT_TOLERANCE, TOLERANCE, LightningCall
from tests.support.slow import slow_but

CALLS = [
    LightningCall(),
    LightningCall(T=1),
    LightningCall(T=64, HV=1, initial_state=False),
    LightningCall(T=130, H=2, HV=2),
    LightningCall(T=33, B=2, HV=3, V=64),
    LightningCall(K=64, T=100),
    LightningCall(lens=(1, 63, 64, 65)),
    LightningCall(lens=(0, 70, 0, 1, 0)),
    LightningCall(decay=20.0),
    LightningCall(decay=0.0),
    LightningCall(dtype=torch.bfloat16, lens=(65, 20)),
    LightningCall(dtype=torch.float16),
    LightningCall(K=60, V=100),
    LightningCall(K=20, V=12, lens=(3, 66)),
    LightningCall(T=20, H=2, K=33, V=300),
]


def run(tensors, backend, **kwargs):
    names = {"q": "Q", "k": "K", "v": "V"}
    return cula.cula_lightning(
        **{names.get(n, n): t for n, t in tensors.items()}, output_final_state=True, backend=backend, **kwargs
    )


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_forward_and_gradients_match_the_recurrence(backend, device, call):
    tensors = call.tensors(device)
    leaves = [n for n in ("q", "k", "v", "initial_state") if tensors[n] is not None]
    for n in leaves:
        tensors[n].requires_grad_()
    want_o, want_state = reference.lightning(**tensors)
    o, state = run(tensors, backend)
    assert o.dtype == call.dtype
    assert relative_error(o, want_o) < TOLERANCE[call.dtype]
    assert relative_error(state, want_state) < TOLERANCE[call.dtype]
    gen = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=gen).to(device, call.dtype)
    dht = torch.randn(state.shape, generator=gen).to(device)
    wanted = torch.autograd.grad((want_o * do).sum() + (want_state * dht).sum(), [tensors[n] for n in leaves])
    got = torch.autograd.grad((o * do).sum() + (state * dht).sum(), [tensors[n] for n in leaves])
    for name, a, b in zip(leaves, got, wanted):
        assert relative_error(a, b) < GRADIENT_TOLERANCE[call.dtype], name


@pytest.mark.parametrize("chunk_size", [16, 32, 128])
def test_the_chunk_size_does_not_matter(backend, device, chunk_size):
    tensors = LightningCall(T=150).tensors(device)
    for a, b in zip(run(tensors, backend, chunk_size=chunk_size), run(tensors, backend)):
        assert relative_error(a, b) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("cut", [1, 37, 64])
def test_a_sequence_may_be_split_anywhere(backend, device, cut):
    tensors = LightningCall().tensors(device)
    o, final_state = run(tensors, backend)
    parts = []
    state = tensors["initial_state"]
    for rows in (slice(0, cut), slice(cut, None)):
        part = {n: t[:, rows] if n in ("q", "k", "v") else t for n, t in tensors.items()} | {"initial_state": state}
        o_part, state = run(part, backend)
        parts.append(o_part)
    assert relative_error(torch.cat(parts, 1), o) < TOLERANCE[torch.float32]
    assert relative_error(state, final_state) < TOLERANCE[torch.float32]


def test_grouped_heads_equal_repeated_heads(backend, device):
    tensors = LightningCall(H=2, HV=4).tensors(device)
    repeated = tensors | {n: tensors[n].repeat_interleave(2, dim=2) for n in ("q", "k")}
    for a, b in zip(run(tensors, backend), run(repeated, backend)):
        assert relative_error(a, b) < TOLERANCE[torch.float32]


def test_the_pool_is_updated_in_place_and_only_where_asked(backend, device):
    call = LightningCall(lens=(20, 30, 0, 5), initial_state=False)
    tensors = call.tensors(device)
    pool = torch.randn(6, call.HV, call.V, call.K).to(device)
    before = pool.clone()
    indices = torch.tensor([4, -1, 2, 0], dtype=torch.int32, device=device)
    o, _ = run(tensors, backend, state_pool=pool, initial_state_indices=indices)
    first = torch.stack([before[4], torch.zeros_like(before[0]), before[2], before[0]])
    want_o, want_state = reference.lightning(**tensors | {"initial_state": first})
    assert relative_error(o, want_o) < TOLERANCE[call.dtype]
    assert relative_error(pool[[4, 2, 0]], want_state[[0, 2, 3]]) < TOLERANCE[call.dtype]
    assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])


OTHERS = [(), ("q",), ("k", "v"), ("q", "k", "v", "initial_state")]  # that want gradients besides decay


@pytest.mark.parametrize("others", slow_but(OTHERS, OTHERS[1::2]), ids=str)
@pytest.mark.parametrize(
    "call",
    [
        LightningCall(T=130, H=2, HV=4),
        LightningCall(lens=(65, 0, 3)),
        LightningCall(decay=20.0),
        LightningCall(K=60, V=100),
    ],
    ids=str,
)
def test_the_gradient_of_decay(backend, device, call, others):
    """Whatever else requires one; through o and through the final state."""
    if backend == "triton" and torch.device(device).type == "cuda":
        pytest.skip("triton does not make it on a GPU yet")
    tensors = call.tensors(device)
    names = ["decay", *others]
    exact = {n: t.detach().double().requires_grad_() if n in names else t for n, t in tensors.items()}
    for n in names:
        tensors[n].requires_grad_()
    o, state = run(tensors, backend)
    want_o, want_state = reference.lightning(**exact)
    torch.manual_seed(0)
    do, dht = torch.randn(o.shape, device=device), torch.randn(state.shape, device=device)
    got = torch.autograd.grad([o, state], [tensors[n] for n in names], [do, dht])
    want = torch.autograd.grad([want_o, want_state], [exact[n] for n in names], [do.double(), dht.double()])
    for n, a, b in zip(names, got, want):
        assert relative_error(a, b) < GRADIENT_TOLERANCE[call.dtype] * (1 if n != "decay" else 3), n


def test_decay_learns_under_compile():
    def loss(tensors):
        return run(tensors, "auto")[0].square().sum()

    results = []
    torch._dynamo.reset()
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        tensors = LightningCall(T=20).tensors()
        tensors["decay"].requires_grad_()
        results.append(torch.autograd.grad(function(tensors), tensors["decay"])[0])
    torch.testing.assert_close(*results)
    assert results[0].any()
