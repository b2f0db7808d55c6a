# SPDX-License-Identifier: Apache-2.0
"""Lightning by flash-linear-attention's names."""

import pytest
import torch

from cula import lightning, reference
from cula.core.decode import decode
from cula.lightning import chunk_lightning_attn, chunk_simple_gla, fused_recurrent_simple_gla
from cula.reference import relative_error
from tests.kda.test_fla import signature
from tests.support.calls import LightningCall

MODULES = {"chunk_simple_gla": "simple_gla", "fused_recurrent_simple_gla": "simple_gla", "chunk_lightning_attn": "lightning_attn"}


@pytest.mark.parametrize("name", MODULES)
def test_the_signature_is_flas(name):
    theirs = getattr(pytest.importorskip(f"fla.ops.{MODULES[name]}"), name)
    assert signature(getattr(lightning, name)) == signature(theirs)


@pytest.mark.parametrize("function", [chunk_simple_gla, fused_recurrent_simple_gla])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("call", [LightningCall(T=40, H=2, HV=2), LightningCall(lens=(5, 0, 20), H=2, HV=2, V=64)], ids=str)
def test_simple_gla_with_one_decay_a_head(function, v_first, call):
    t = call.tensors()
    want_o, want_state = reference.lightning(**t)
    swap = (lambda s: s) if v_first else (lambda s: s.transpose(-1, -2))
    named = {"g_gamma": -t["decay"], "initial_state": swap(t["initial_state"]), "cu_seqlens": t["cu_seqlens"]}
    o, state = function(t["q"], t["k"], t["v"], **named, output_final_state=True, state_v_first=v_first)
    assert relative_error(o, want_o) < 1e-5 and relative_error(state, swap(want_state)) < 1e-5


def test_lightning_attn_has_the_slopes_of_its_layer():
    t = LightningCall(T=30, H=4, HV=4, initial_state=False).tensors()
    o, _ = chunk_lightning_attn(t["q"], t["k"], t["v"], layer_idx=3, num_layers=12)
    want, _ = reference.lightning(t["q"], t["k"], t["v"], 8 / 4 * (1 - 3 / 12) * torch.arange(4.0))
    assert relative_error(o, want) < 1e-5


def test_what_is_not_served_is_said():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="g_gamma="):
        chunk_simple_gla(q, q, q, g=q[..., 0])
    with pytest.raises(NotImplementedError, match="reverse=True"):
        fused_recurrent_simple_gla(q, q, q, g_gamma=torch.zeros(2), reverse=True)


FUNCTIONS = {
    "chunk_simple_gla": lambda q, **kwargs: chunk_simple_gla(q, q, q, **kwargs),
    "fused_recurrent_simple_gla": lambda q, **kwargs: fused_recurrent_simple_gla(q, q, q, **kwargs),
    "chunk_lightning_attn": lambda q, **kwargs: chunk_lightning_attn(q, q, q, 0, 2, **kwargs),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_keyword_passes_in_silence(name):
    """A backend is forced or refused by name, and what FLA ignores gets a warning."""
    function, q = FUNCTIONS[name], torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="unknown backend 'fastest'"):
        function(q, backend="fastest")
    with pytest.warns(UserWarning, match=f"{name}: ignores output_final_stat, as flash-linear-attention does"):
        _, state = function(q, backend="torch", output_final_stat=True)
    assert state is None


@pytest.mark.parametrize("name", ["chunk_simple_gla", "chunk_lightning_attn"])
def test_heads_in_front_are_flas_error(name):
    with pytest.raises(DeprecationWarning, match="head_first"):
        FUNCTIONS[name](torch.randn(1, 4, 2, 8), head_first=True)


@pytest.mark.parametrize("name", ["chunk_simple_gla", "chunk_lightning_attn"])
def test_chunk_sizes_that_are_no_powers_of_two_are_flas_error(name):
    q = torch.randn(1, 4, 2, 8)
    FUNCTIONS[name](q, chunk_size=32)
    for size in (0, 48, -16):
        with pytest.raises(ValueError, match=f"`chunk_size` must be a power of 2, got {size}."):
            FUNCTIONS[name](q, chunk_size=size)


def test_flas_old_name_of_the_states_layout():
    q, v = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 16)
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        _, state = fused_recurrent_simple_gla(q, q, v, output_final_state=True, transpose_state_layout=True)
    assert state.shape == (1, 2, 16, 8)
    with pytest.raises(ValueError, match="Cannot pass both"):
        fused_recurrent_simple_gla(q, q, v, state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("lens", [None, (1, 1, 1), (3, 0, 1), (9, 1)])
def test_a_recurrent_call_of_few_tokens_is_a_decode(lens, monkeypatch):
    """Without a gradient; and the initial state stays as it is."""
    B, T = (2, 3) if lens is None else (1, sum(lens))
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, 2, 32, generator=gen) for _ in range(3))
    gamma = -torch.rand(2, generator=gen)
    cu = None if lens is None else torch.tensor([0, *lens]).cumsum(0)
    h0 = torch.randn(2 if lens is None else len(lens), 2, 32, 32, generator=gen)
    before, taken = h0.clone(), []
    monkeypatch.setattr("cula.core.fla.decode", lambda *a, **kw: taken.append(1) or decode(*a, **kw))
    options = {"g_gamma": gamma, "initial_state": h0, "output_final_state": True, "cu_seqlens": cu}
    o, state = fused_recurrent_simple_gla(q, k, v, **options)
    assert bool(taken) == (lens is None or max(lens) <= 8)
    want_o, want_state = chunk_simple_gla(q, k, v, **options)
    assert relative_error(o, want_o) < 1e-5 and relative_error(state, want_state) < 1e-5 and torch.equal(h0, before)
    taken.clear()
    o, _ = fused_recurrent_simple_gla(q.requires_grad_(), k, v, **options)
    o.sum().backward()
    assert q.grad is not None and not taken
