# SPDX-License-Identifier: Apache-2.0
"""Level 1's signatures and bookkeeping: pools, checkpoints, out=, threads. (Numbers: tests/ops; errors: core/test_checks.py.)"""

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cula
from cula import reference
from cula.core.decode import CALL_FIELDS
from cula.core.family import FAMILIES
from cula.core.pool import Serving
from cula.core.problem import PUBLIC_NAMES, DecodeOptions
from cula.gdn.api import GdnKeywords
from cula.kda.api import KdaKeywords
from cula.lightning.api import LightningKeywords
from cula.reference import relative_error
from tests.support.calls import KdaCall
from tests.support.slow import slow_but

TOKENS = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize(
    ("function", "keywords"),
    [(cula.cula_kda, KdaKeywords), (cula.cula_gdn, GdnKeywords), (cula.cula_lightning, LightningKeywords)],
)
def test_type_checkers_know_every_keyword(function, keywords):
    """The keywords of the overloads are those of the function, but for those that the overloads name themselves."""
    named = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert set(keywords.__annotations__) == named - {"return_intermediate_states", "q", "k", "v"}


@pytest.mark.parametrize("name", ["kda", "gdn", "lightning"])
def test_tensors_and_options_are_handed_on_in_order(name, monkeypatch):
    """Level 1 makes plain tuples, which are in the order of `Inputs`, `Serving` and `Options`."""
    family = FAMILIES[name]
    function = family.load_entry()
    monkeypatch.setitem(function.__globals__, "call_prefill", lambda *handed: handed)
    aliases = {"q": "Q", "k": "K", "v": "V"} if name == "lightning" else {}
    given = {name: name for name in family.keywords() if name not in {"cp_context", *aliases}}
    _, tensors, options, every, device, backend, others = function(**given | {"null_index": "nonpositive"}, other=1)
    names = [*family.Inputs._fields, *Serving._fields]
    assert [*tensors] == [aliases.get(name, name) if aliases.get(name, name) in given else None for name in names]
    assert [*options] == [True if name == "null_is_nonpositive" else name for name in family.Options._fields]
    assert (device, backend, others) == ("device", "backend", {"other": 1})
    assert every == given.get("checkpoint_every")


def test_a_decode_hands_its_tensors_and_options_on_in_order(monkeypatch):
    function = cula.cula_decode
    monkeypatch.setitem(function.__globals__, "call_decode", lambda *handed: handed)
    given = {name: name for name in (*CALL_FIELDS, *DecodeOptions._fields, "mode", "device", "backend")}
    for name, public in PUBLIC_NAMES.items():
        del given[name]
        given[public] = {"null_index": "nonpositive", "state_layout": "kv"}[public]
    mode, tensors, options, device, backend, others, _ = function(**given, other=1)
    assert [*tensors] == [*CALL_FIELDS]
    assert [*options] == [True if name in PUBLIC_NAMES else name for name in DecodeOptions._fields]
    assert (mode, device, backend, others) == ("mode", "device", "backend", {"other": 1})


def test_kda_reads_and_updates_a_pool_in_place(backend, device):
    call = KdaCall(lens=(20, 30, 0, 5), initial_state=False)
    tensors = call.tensors(device)
    pool = torch.randn(6, call.HV, call.V, call.K).to(device)
    before = pool.clone()
    indices = torch.tensor([4, -1, 2, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([True, True, True, False], device=device)
    o, state = cula.cula_kda(**tensors, state_pool=pool, initial_state_indices=indices, has_initial_state=starts, backend=backend)
    assert state is None
    zero = torch.zeros_like(before[0])
    want_o, want_state = reference.kda(**tensors | {"initial_state": torch.stack([before[4], zero, before[2], zero])})
    assert relative_error(o, want_o) < 1e-5
    assert relative_error(pool[[4, 2, 0]], want_state[[0, 2, 3]]) < 1e-5
    assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])


@pytest.mark.parametrize("indices", [[-1, -1], [0, -1], [-1, 0]])
def test_rows_without_a_slot_write_nothing(indices):
    tensors = KdaCall(lens=(3, 4), initial_state=False).tensors()
    pool = torch.randn(2, 2, 32, 32)
    before = pool.clone()
    _, state = cula.cula_kda(**tensors, state_pool=pool, initial_state_indices=torch.tensor(indices), output_final_state=True)
    assert torch.equal(pool[1], before[1])
    if 0 in indices:
        assert torch.equal(pool[0], state[indices.index(0)])
    else:
        assert torch.equal(pool[0], before[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pool_of_16_bits_keeps_its_dtype(dtype):
    tensors = KdaCall(T=10, initial_state=False).tensors()
    pool = torch.randn(1, 2, 32, 32).to(dtype)
    want = reference.kda(**tensors | {"initial_state": pool.clone()})[1]
    cula.cula_kda(**tensors, state_pool=pool, initial_state_indices=torch.tensor([0]))
    assert pool.dtype == dtype and relative_error(pool, want) < 5e-3


def test_index_0_is_null_where_the_caller_says_so(backend, device):
    """It starts from zero and writes nothing; for Lightning and GDN too."""
    call = KdaCall(lens=(20, 30), initial_state=False)
    t = call.tensors(device)
    gates = {"g": t["g"][..., 0].contiguous()}
    for run, given in (
        (cula.cula_kda, t),
        (cula.cula_gdn, t | gates),
        (
            cula.cula_lightning,
            {"Q": t["q"], "K": t["k"], "V": t["v"], "decay": torch.ones(call.HV), "cu_seqlens": t["cu_seqlens"]},
        ),
    ):
        given = {name: x if x is None else x.to(device) for name, x in given.items()}
        pool = torch.randn(3, call.HV, call.V, call.K).to(device)
        before, zeros = pool.clone(), torch.zeros_like(pool)
        slots = torch.tensor([2, 0], device=device)
        o, _ = run(**given, state_pool=pool, initial_state_indices=slots, null_index="nonpositive", backend=backend)
        first = torch.stack([before[2], zeros[0]])
        want, state = run(**given | {"initial_state": first}, output_final_state=True, backend=backend)
        assert relative_error(o, want.double()) < 1e-6
        assert relative_error(pool[2], state[0].double()) < 1e-6 and torch.equal(pool[:2], before[:2])
        with pytest.raises(ValueError, match="null_index is 'zero'; expected one of"):
            run(**given, state_pool=pool, initial_state_indices=slots, null_index="zero")


@pytest.mark.parametrize("call", [KdaCall(lens=(130, 10, 128, 0)), KdaCall(T=192, B=2)], ids=str)
def test_checkpoints_are_states_inside_the_prompt(backend, device, call):
    tensors = call.tensors(device)
    buffer = torch.full((8, call.HV, call.V, call.K), float("nan"), device=device)
    cula.cula_kda(**tensors, checkpoint_every=64, checkpoint_states=buffer, backend=backend)
    lengths = [call.T] * call.B if call.lens is None else list(call.lens)
    row = 0
    for n, length in enumerate(lengths):
        b, start = (n, 0) if call.lens is None else (0, sum(lengths[:n]))
        for end in range(64, length + 1, 64):
            part = {k: t[b : b + 1, start : start + end] if k in TOKENS else t for k, t in tensors.items()}
            part |= {"cu_seqlens": None, "initial_state": tensors["initial_state"][n : n + 1]}
            assert relative_error(buffer[row], reference.kda(**part)[1][0]) < 1e-5
            row += 1
    assert bool(buffer[row:].isnan().all()), "rows beyond the checkpoints are untouched"


@pytest.mark.parametrize("call", [KdaCall(lens=(130, 10, 128, 0, 70)), KdaCall(T=192, B=2)], ids=str)
@pytest.mark.parametrize("dtype", slow_but([torch.float32, torch.float16], [torch.float16]))
def test_checkpoints_at_offsets_are_one_state_a_sequence(backend, device, call, dtype):
    """Of whole chunks, up to the end of a sequence; a row without one is left as it is."""
    tensors = call.tensors(device)
    lengths = [call.T] * call.B if call.lens is None else list(call.lens)
    at = [128, 0, 128, 0, 64] if call.lens else [64, 192]
    buffer = torch.full((len(lengths), call.HV, call.V, call.K), float("nan"), dtype=dtype, device=device)
    offsets = torch.tensor(at, dtype=torch.int32, device=device)
    o, state = cula.cula_kda(**tensors, checkpoint_offsets=offsets, checkpoint_states=buffer, backend=backend)
    assert state is None and torch.equal(o, cula.cula_kda(**tensors, backend=backend)[0])
    for n, tokens in enumerate(at):
        b, start = (n, 0) if call.lens is None else (0, sum(lengths[:n]))
        part = {k: t[b : b + 1, start : start + tokens] if k in TOKENS else t for k, t in tensors.items()}
        part |= {"cu_seqlens": None, "initial_state": tensors["initial_state"][n : n + 1]}
        if tokens:
            assert relative_error(buffer[n], reference.kda(**part)[1][0]) < (1e-5 if dtype == torch.float32 else 5e-4)
        else:
            assert bool(buffer[n].isnan().all())


def test_checkpoints_beside_intermediate_states_and_a_pool():
    """All that a call may write and return, at once."""
    call = KdaCall(T=130, B=2, initial_state=False)
    t, pool = call.tensors(), torch.randn(3, 2, 32, 32)
    before, kept, slots = pool.clone(), torch.zeros(4, 2, 32, 32), torch.tensor([2, 0])
    more = {"return_intermediate_states": True, "output_final_state": True}
    want = cula.cula_kda(**t | {"initial_state": before[slots]}, **more)
    found = cula.cula_kda(**t, state_pool=pool, initial_state_indices=slots, checkpoint_every=64, checkpoint_states=kept, **more)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(pool[slots], found[1]) and torch.equal(pool[1], before[1])
    assert torch.equal(kept.view(2, 2, 2, 32, 32), found[2][:, 1:])


def test_out_takes_the_result(backend, device):
    tensors = KdaCall(T=30).tensors(device)
    out = torch.full((1, 30, 2, 64), 7.0, device=device)[..., :32]
    o, _ = cula.cula_kda(**tensors, out=out, backend=backend)
    assert o is out
    assert torch.equal(out, cula.cula_kda(**tensors, backend=backend)[0])


def test_many_short_sequences_take_one_pass():
    """256 sequences cost far fewer operator calls than 256: no loop over sequences in Python."""
    call = KdaCall(lens=(17,) * 256, HV=1, initial_state=False)
    tensors = call.tensors()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        o, _ = cula.cula_kda(**tensors)
    assert len(trace.events()) < 2000
    first = {n: t[:, :17] if n in TOKENS else t for n, t in tensors.items()} | {"cu_seqlens": None}
    assert relative_error(o[:, :17], reference.kda(**first)[0]) < 1e-5


def test_calls_from_several_threads_agree():
    tensors = KdaCall(lens=(40, 30)).tensors()
    want, _ = cula.cula_kda(**tensors)
    with ThreadPoolExecutor(4) as threads:
        for o, _ in threads.map(lambda _: cula.cula_kda(**tensors), range(16)):
            assert torch.equal(o, want)


def test_inputs_are_never_written():
    for call in (KdaCall(T=64, H=1, HV=1, norm=True, gate="softplus"), KdaCall(lens=(5, 70))):
        tensors = call.tensors()
        before = {n: None if t is None else t.clone() for n, t in tensors.items()}
        cula.cula_kda(**tensors, **call.switches(), output_final_state=True)
        for n, t in tensors.items():
            assert t is None or torch.equal(t, before[n]), n


def test_int64_offsets_are_taken():
    tensors = KdaCall(lens=(5, 20)).tensors()
    as_int64 = tensors | {"cu_seqlens": tensors["cu_seqlens"].long()}
    assert torch.equal(cula.cula_kda(**tensors)[0], cula.cula_kda(**as_int64)[0])
