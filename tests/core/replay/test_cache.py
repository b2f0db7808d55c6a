# SPDX-License-Identifier: Apache-2.0
"""Replay: a call seen before takes a short cut, any other and every bad one does not."""

import gc
import weakref

import pytest
import torch

import cula
from cula.core.replay import cache, record
from cula.kda.family import FAMILY as KDA
from tests.core.replay.test_record import CHANGES, tensors
from tests.support.calls import KdaCall


def forget(monkeypatch, owner):
    """Empties the records of a family's prefill or decode for a test."""
    known = owner.replay
    monkeypatch.setattr(known, "_records", {})
    monkeypatch.setattr(known, "_latest", ())
    monkeypatch.setattr(known, "_first", None)
    return known


@pytest.fixture
def on_cpu(monkeypatch):
    """Plans for CPU tensors, which have none otherwise."""
    real = cache.signature

    def signature(given):
        try:
            return real([AsCuda(given[0]), *given[1:]])
        except AttributeError:
            return None

    class AsCuda:
        is_cuda = True

        def __init__(self, t):
            self.t = t

        def __getattr__(self, name):
            return getattr(self.t, name)

    monkeypatch.setattr(cache, "signature", signature)


def compare_in_python(monkeypatch):
    monkeypatch.setattr(record, "_compiled", lambda: None)


@pytest.mark.parametrize("by", [lambda _: None, compare_in_python], ids=["c", "python"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_record_runs_for_the_same_signature_only(on_cpu, monkeypatch, change, by):
    by(monkeypatch)
    known = cache.ReplayCache()
    known.keep(tensors(), ("word", None), lambda: lambda given: given)
    given = tensors()
    for _ in range(2):
        assert known.run(given, ("word", None)) is given
    assert known.run(given, ("word", 1)) is NotImplemented
    assert known.run(CHANGES[change](*given), ("word", None)) is NotImplemented


def test_many_shapes_share_their_static_arguments(on_cpu):
    known = cache.ReplayCache()
    given = {n: (torch.empty(n, 2), torch.empty(n)) for n in range(1, 21)}
    for n in range(1, 20):
        known.keep(given[n], "static", lambda n=n: lambda tensors: n)
    for n in range(1, 20):
        assert known.run(given[n], "static") == n
    assert known.run(given[20], "static") is NotImplemented


def test_a_full_memory_starts_over(on_cpu, monkeypatch):
    monkeypatch.setattr(cache, "CAPACITY", 3)
    known = cache.ReplayCache()
    for n in range(4):
        known.keep((torch.empty(n, 2), torch.empty(n)), "static", lambda: lambda t: t)
    assert known.run((torch.empty(3, 2), torch.empty(3)), "static") is not NotImplemented
    assert known.run((torch.empty(1, 2), torch.empty(1)), "static") is NotImplemented


def test_checks_of_values_are_not_skipped(on_cpu, monkeypatch):
    known = cache.ReplayCache()
    known.keep(tensors(), "static", lambda: lambda t: t)
    monkeypatch.setenv("CULA_CHECK", "1")
    assert known.run(tensors(), "static") is NotImplemented


def test_forward_mode_goes_the_long_way(on_cpu):
    """A tangent is no part of a signature."""
    known, chosen = cache.ReplayCache(), cache.ChoiceCache()
    known.keep(tensors(), "static", lambda: lambda t: t)
    chosen.keep(tensors(), "static", "found")
    assert known.run(tensors(), "static") is not NotImplemented and chosen.find(tensors(), "static") == "found"
    with torch.autograd.forward_ad.dual_level():
        assert known.run(tensors(), "static") is NotImplemented and chosen.find(tensors(), "static") is None


def test_tensors_of_an_export_have_no_records(on_cpu, monkeypatch):
    """Their sizes may be symbols, which are no part of a signature."""
    known = cache.ReplayCache()
    known.keep(tensors(), "static", lambda: lambda t: t)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    monkeypatch.setattr(cache, "signature", lambda tensors: 1 / 0)
    other = torch.randn(5)
    assert known.run((other, None, other), "static") is NotImplemented


def test_a_record_that_does_not_fit_is_asked_once(on_cpu):
    known, asked = cache.ReplayCache(), []
    known.keep(tensors(), "static", lambda: lambda t: asked.append(t))
    assert known.run(tensors(), "static") is None
    assert len(asked) == 1


def test_a_call_that_does_not_fit_leaves_the_record_as_it_is(on_cpu, monkeypatch):
    known = forget(monkeypatch, KDA)
    call = KdaCall(T=10, K=16, V=16)
    cula.cula_kda(**call.tensors())
    before = dict(known._records)
    assert len(before) == 1
    monkeypatch.setattr(known, "run", lambda tensors, static_args: None)  # as for an address that will not do
    cula.cula_kda(**call.tensors())
    assert known._records == before


def test_misaligned_tensors_have_records_of_their_own(on_cpu):
    known = cache.ReplayCache()
    known.keep(tensors(), "static", lambda: lambda given: "aligned")
    _, _, last = given = tensors()
    odd = (*given[:2], torch.randn(5)[1:])
    assert odd[2].data_ptr() % 16 and last.data_ptr() % 16 == 0
    assert known.run(odd, "static") is NotImplemented
    known.keep(odd, "static", lambda: lambda given: "odd")
    assert known.run(odd, "static") == "odd"
    assert known.run(given, "static") == "aligned"


def test_cpu_calls_have_no_records():
    assert cache.signature(tensors()) is None


@pytest.mark.parametrize("with_states", [False, True])
def test_kda_by_record_is_kda(on_cpu, monkeypatch, with_states):
    known = forget(monkeypatch, KDA)
    call = KdaCall(T=70, B=2, dtype=torch.float32, H=2, HV=4, K=16, V=16, gate="bounded", norm=True, beta="sigmoid")
    given = call.tensors("cpu") | call.switches() | {"output_final_state": True, "return_intermediate_states": with_states}
    first = cula.cula_kda(**given)
    (again,) = known._records.values()
    taken = []
    monkeypatch.setattr(known, "run", lambda tensors, static_args: taken.append(1) or again(tensors))
    for a, b in zip(cula.cula_kda(**given), first, strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(known, "run", lambda tensors, static_args: taken.append(2) or NotImplemented)  # none: the long way
    for a, b in zip(cula.cula_kda(**given), first, strict=True):
        assert torch.equal(a, b)
    assert taken[0] == 1 and set(taken[1:]) == {2}


def test_nothing_keeps_the_tensors_of_a_call_alive(on_cpu, monkeypatch):
    """A cache remembers what a call was like, not the call's memory: neither a prefill's nor a decode's, pools included."""
    forget(monkeypatch, KDA)
    forget(monkeypatch, KDA.decode)
    t = KdaCall(T=10, initial_state=False).tensors()
    pool = torch.zeros(2, 2, 32, 32)
    with torch.no_grad():
        for _ in range(2):
            cula.cula_kda(**t, state_pool=pool, initial_state_indices=torch.tensor([1]))
            token = {n: t[n][:, :1] for n in ("q", "k", "v", "g", "beta")}
            cula.cula_decode(**token, state=pool, state_indices=torch.tensor([1]))
    assert KDA.replay._records and KDA.decode.chosen._known
    seen = [weakref.ref(x) for x in (*t.values(), *token.values(), pool) if x is not None]
    del t, token, pool
    gc.collect()
    assert not [r for r in seen if r() is not None]


# On a GPU


def decode_call(dtype=torch.bfloat16, rows=3):
    call = KdaCall(T=1, B=rows, dtype=dtype, H=2, HV=4, K=64, V=64, gate="bounded", norm=True, beta="sigmoid")
    given = {n: t for n, t in call.tensors("cuda").items() if n not in ("initial_state", "cu_seqlens")}
    return given | call.switches() | {"state_indices": torch.tensor([4, -1, 2][:rows], device="cuda")}


@pytest.fixture
def forgetful(monkeypatch):
    known = forget(monkeypatch, KDA.decode)
    return lambda: len(known._records)


@pytest.mark.gpu
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_second_call_is_the_first_again(forgetful, with_out, packed):
    given = decode_call()
    if packed:
        given |= {n: given[n].transpose(0, 1) for n in ("q", "k", "v", "g", "beta")}
    start = torch.randn(6, 4, 64, 64, device="cuda")
    results = []
    for _ in range(3):
        pool = start.clone()
        out = torch.full_like(given["v"], float("nan")) if with_out else None
        o, returned = cula.cula_decode(**given, state=pool, out=out, backend="triton")
        assert returned is pool
        assert o.shape == given["v"].shape
        assert not with_out or o is out
        results.append((o, pool))
    assert forgetful() == 1
    for o, pool in results[1:]:
        assert torch.equal(o, results[0][0])
        assert torch.equal(pool, results[0][1])


@pytest.mark.gpu
def test_bad_calls_after_a_good_one_are_refused_as_ever(forgetful):
    given, pool = decode_call(), torch.randn(6, 4, 64, 64, device="cuda")
    cula.cula_decode(**given, state=pool)
    with pytest.raises(ValueError, match="is on cpu"):
        cula.cula_decode(**{**given, "A_log": given["A_log"].cpu()}, state=pool)
    with pytest.raises(ValueError, match="beta has shape"):
        cula.cula_decode(**{**given, "beta": given["beta"][:2]}, state=pool)
    with pytest.raises(TypeError, match="state has dtype"):
        cula.cula_decode(**given, state=pool.double())
    with pytest.raises(ValueError, match="requires grad"):
        cula.cula_decode(**{**given, "q": given["q"].clone().requires_grad_()}, state=pool)
    with pytest.raises(TypeError, match="tile"):
        cula.cula_decode(**given, state=pool, tile=3)
    with pytest.raises(ValueError, match="mode"):
        cula.cula_decode(**given, state=pool, mode="kimi")


@pytest.mark.gpu
def test_addresses_a_record_was_not_made_for(forgetful):
    """A kernel compiled for aligned addresses must not meet others."""
    given, start = decode_call(), torch.randn(6, 4, 64, 64, device="cuda")
    want_pool = start.clone()
    want, _ = cula.cula_decode(**given, state=want_pool)
    shifted = torch.empty(given["q"].numel() + 1, dtype=given["q"].dtype, device="cuda")[1:].view(given["q"].shape)
    shifted.copy_(given["q"])
    pool = start.clone()
    o, _ = cula.cula_decode(**{**given, "q": shifted}, state=pool)
    assert torch.equal(o, want)
    assert torch.equal(pool, want_pool)


@pytest.mark.gpu
def test_a_graph_replays_with_other_slots(forgetful):
    """Indices change between replays; padded rows and slots that no row names stay as they are."""
    given = decode_call()
    slots = given["state_indices"]
    pool = torch.randn(6, 4, 64, 64, device="cuda")
    out = torch.empty_like(given["v"])
    scratch = pool.clone()
    for _ in range(2):
        cula.cula_decode(**given, state=scratch, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cula.cula_decode(**given, state=pool, out=out)
    for rows in ([0, 5, -1], [-1, -1, 3], [-1, -1, -1], [1, 2, 3]):
        slots.copy_(torch.tensor(rows))
        start = torch.randn_like(pool)
        named = [r for r in rows if r >= 0]
        unnamed = [s for s in range(6) if s not in named]
        start[unnamed] = float("nan")  # whatever reads them shows
        pool.copy_(start)
        out.fill_(float("nan"))
        graph.replay()
        want_pool = start.clone()
        want, _ = cula.cula_decode(**given, state=want_pool)
        assert torch.equal(out, want)
        assert not torch.isnan(out).any()
        assert not out[[n for n, r in enumerate(rows) if r < 0]].any()
        assert torch.equal(pool.view(torch.uint8), want_pool.view(torch.uint8))
        assert torch.equal(pool[unnamed].view(torch.uint8), start[unnamed].view(torch.uint8))
