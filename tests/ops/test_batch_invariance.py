# SPDX-License-Identifier: Apache-2.0
"""`batch_invariant=True` on every backend: a sequence has the same bits alone, in a batch, packed, and in any order."""

import itertools

import pytest
import torch

import cula
from cula.core.family import FAMILIES
from cula.reference import relative_error
from tests.support.calls import TOLERANCE, GdnCall, KdaCall, LightningCall

LENS = (70, 1, 128, 66)
SWITCHES = {"gate": "softplus", "norm": True, "beta": "sigmoid"}
CALLS = {
    "kda": KdaCall(lens=LENS, K=16, V=16, decay=3.0),
    "gdn": GdnCall(lens=LENS, K=16, V=16, **SWITCHES),
    "lightning": LightningCall(lens=LENS, K=16, V=16),
}
NAMES = {"q": "Q", "k": "K", "v": "V"}


@pytest.fixture
def segments(monkeypatch):
    """Triton's cuts of sequences follow from how many there are, as they do for longer ones."""
    pytest.importorskip("triton")
    from cula.ops.triton import kda_schedule, lightning

    monkeypatch.setattr(kda_schedule, "kda_segment_chunks", lambda p, num_sms, BV: 1 if p.N == 1 else 0)
    for cut in ("_cut_rows", "_cut_packed"):
        monkeypatch.setattr(lightning, cut, lambda rows, chunks, heads, num_sms: 2 if rows == 1 else 0)
    caches = (kda_schedule.schedule_kda, lightning.schedule_lightning)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def tokens_of(family, call, device):
    """Tensors of a call whose second sequence has far stronger decays than the others."""
    tensors = call.tensors(device)
    if family == "kda":
        tensors["g"][:, 70:71] *= 40
    return tensors


def run(family, call, tensors, backend, **options):
    """(what belongs to tokens, what belongs to sequences): o and gradients; last states and gradients of the first ones."""
    tokens = FAMILIES[family].token_inputs
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items() if n in (*tokens, "initial_state")}
    given = {n: t for n, t in (tensors | leaves).items() if t is not None}
    if family == "lightning":
        given = {NAMES.get(n, n): t for n, t in given.items()}
    else:
        options |= call.switches()
    o, state = FAMILIES[family].load_entry()(**given, **options, output_final_state=True, backend=backend)
    grads = torch.autograd.grad(o.float().square().sum() + state.square().sum(), list(leaves.values()))
    of = dict(zip(leaves, grads))
    d_first = of.pop("initial_state")
    return [o.detach(), *of.values()], [state.detach(), d_first]


def part(family, tensors, spans, is_packed):
    """The sequences at these places of packed tokens, as a batch or packed."""
    tokens = FAMILIES[family].token_inputs
    pick = lambda t: torch.cat([t[:, a:b] for _, a, b in spans], 1 if is_packed else 0)
    given = {n: pick(t) if n in tokens else t for n, t in tensors.items()}
    offsets = torch.tensor([0, *(b - a for _, a, b in spans)], device=tensors["q"].device).cumsum(0).int()
    first = tensors["initial_state"][[n for n, _, _ in spans]]
    return given | {"initial_state": first, "cu_seqlens": offsets if is_packed else None}


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("family", list(CALLS))
def test_a_sequence_has_the_same_bits_in_every_company(backend, device, family):
    is_interpreted = backend == "triton" and device.type == "cpu"
    if is_interpreted and family == "gdn":
        pytest.skip("Triton's functions of GDN are KDA's")
    call = CALLS[family].with_(HV=1) if is_interpreted else CALLS[family]
    tensors = tokens_of(family, call, device)
    ends = [0, *tensors["cu_seqlens"].tolist()[1:]]
    spans = [(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(ends))]
    alone = {}
    for order in ([1, 0],) if is_interpreted else ([2, 0, 3, 1], [2]):
        made = run(family, call, part(family, tensors, [spans[n] for n in order], True), backend, batch_invariant=True)
        start = 0
        for i, n in enumerate(order):
            if n not in alone:
                alone[n] = run(family, call, part(family, tensors, [spans[n]], False), backend, batch_invariant=True)
            end = start + LENS[n]
            assert all(torch.equal(a[:, start:end], b) for a, b in zip(made[0], alone[n][0])), (order, n)
            assert all(torch.equal(a[i : i + 1], b) for a, b in zip(made[1], alone[n][1])), (order, n)
            start = end
    if is_interpreted:
        return
    rows = [(n, a, a + 66) for n, a, b in spans if b - a >= 66]
    batch = run(family, call, part(family, tensors, rows, False), backend, batch_invariant=True)
    for i, row in enumerate(rows):
        one = run(family, call, part(family, tensors, [row], False), backend, batch_invariant=True)
        assert all(torch.equal(a[i : i + 1], b) for of, of_one in zip(batch, one) for a, b in zip(of, of_one))
    whole = run(family, call, tensors, backend)
    packed = run(family, call, tensors, backend, batch_invariant=True)
    for a, b in zip((*packed[0], *packed[1]), (*whole[0], *whole[1])):
        assert relative_error(a, b.double()) < 2 * TOLERANCE[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("family", list(CALLS))
@pytest.mark.parametrize("on", ["auto", "triton"])
def test_long_sequences_on_a_gpu(device, family, on):
    """With the schedules as they are, of few heads: sequences alone are split, and a batch of them is not, but for the option."""
    lens = (9000, 64, 130, 3000)
    call = CALLS[family].with_(lens=lens, H=2, HV=2, K=128, V=128, dtype=torch.bfloat16)
    tensors = call.tensors(device)
    ends = [0, *tensors["cu_seqlens"].tolist()[1:]]
    spans = [(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(ends))]
    together = run(family, call, tensors, on, batch_invariant=True)
    for n, a, b in spans:
        of_tokens, of_states = run(family, call, part(family, tensors, [(n, a, b)], False), on, batch_invariant=True)
        assert all(torch.equal(x[:, a:b], y) for x, y in zip(together[0], of_tokens)), n
        assert all(torch.equal(x[n : n + 1], y) for x, y in zip(together[1], of_states)), n


def test_the_environment_asks_for_it(device, monkeypatch):
    """In every call, and only while it is set."""
    call = CALLS["kda"]
    tensors = tokens_of("kda", call, device)
    lone = part("kda", tensors, [(0, 0, 70)], False)
    given = {n: t for n, t in tensors.items() if t is not None}
    one = {n: t for n, t in lone.items() if t is not None}
    want = cula.cula_kda(**one, backend="torch")[0]
    assert not torch.equal(cula.cula_kda(**given, backend="torch")[0][:, :70], want)
    monkeypatch.setenv("CULA_BATCH_INVARIANT", "1")
    assert torch.equal(cula.cula_kda(**given, backend="torch")[0][:, :70], want)
    monkeypatch.setenv("CULA_BATCH_INVARIANT", "0")
    assert not torch.equal(cula.cula_kda(**given, backend="torch")[0][:, :70], want)


def test_states_at_chunk_starts_and_outputs_that_are_given(device):
    call = CALLS["gdn"]
    tensors = {n: t for n, t in call.tensors(device).items() if t is not None}
    out = torch.empty_like(tensors["v"])
    common = {**call.switches(), "output_final_state": True, "return_intermediate_states": True, "backend": "torch"}
    made = cula.cula_gdn(**tensors, **common, out=out, batch_invariant=True)
    assert made[0] is out
    for a, b in zip(made, cula.cula_gdn(**tensors, **common), strict=True):
        assert a.shape == b.shape and relative_error(a, b.double()) < 1e-5


@pytest.mark.parametrize("mode", ["kda", "lightning"])
def test_rows_of_a_decode(backend, device, mode):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 2, 2, 16, generator=gen).to(device) for _ in range(3))
    pool = torch.randn(5, 2, 16, 16, generator=gen).to(device)
    own = {"decay": torch.tensor([0.1, 0.5], device=device)}
    if mode == "kda":
        own = {"g": -torch.rand(5, 2, 2, 16, generator=gen).to(device), "beta": torch.rand(5, 2, 2, generator=gen).to(device)}
    for layout in ("vk", "kv"):
        common = {"mode": mode, "state_layout": layout, "batch_invariant": True, "backend": backend}
        together = pool.clone()
        o, _ = cula.cula_decode(q, k, v, together, **own, **common)
        for n in range(5):
            row, one = slice(n, n + 1), pool[n : n + 1].clone()
            of_row = {name: t[row] if t.dim() > 1 else t for name, t in own.items()}
            assert torch.equal(cula.cula_decode(q[row], k[row], v[row], one, **of_row, **common)[0], o[row])
            assert torch.equal(one, together[row])
