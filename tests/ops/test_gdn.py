# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on every backend: numbers and gradients against the float64 recurrence."""

import pytest
import torch

import cula
from cula import reference
from cula.core.dispatch import select
from cula.gdn.problem import GdnInputs, GdnOptions, check_gdn
from cula.reference import relative_error
from tests.support.calls import GRADIENT_TOLERANCE, TOLERANCE, GdnCall

ALL_SWITCHES = {"gate": "softplus", "norm": True, "beta": "sigmoid"}
CALLS = [
    GdnCall(),
    GdnCall(T=20, B=2, H=1, HV=2, K=32, V=64, initial_state=False),
    GdnCall(lens=(0, 65, 0, 1), **ALL_SWITCHES),
    GdnCall(T=20, decay=50.0),
    GdnCall(T=40, same_keys=True, beta="two", decay=0.01),  # post-sigmoid, up to 2
    GdnCall(T=40, gate="softplus", norm=True, beta="negative"),
    GdnCall(T=65, dtype=torch.bfloat16, gate_dtype=torch.bfloat16, parameter_dtype=torch.bfloat16, **ALL_SWITCHES),
]
TOKENS = ("q", "k", "v", "g", "beta")


def run(call, backend, tensors, **kwargs):
    return cula.cula_gdn(**tensors, **call.switches(), output_final_state=call.final_state, backend=backend, **kwargs)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_numbers_and_gradients_match_the_recurrence(backend, device, call):
    tensors = call.tensors(device)
    names = [name for name, t in tensors.items() if t is not None and t.is_floating_point()]
    for name in names:
        tensors[name].requires_grad_()
    leaves = [tensors[name] for name in names]
    with torch.no_grad():  # the kernel of a call without gradients may be another
        plain_o, plain_state = run(call, backend, tensors)
    want_o, want_state = reference.gdn(**tensors, **call.switches())
    for got, want in ((plain_o, want_o), (plain_state, want_state)):
        assert relative_error(got, want) < TOLERANCE[call.dtype]
    o, state = run(call, backend, tensors)
    assert o.dtype == call.dtype and state.dtype == torch.float32
    gen = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=gen).to(device, call.dtype)
    dht = torch.randn(state.shape, generator=gen).to(device)
    wanted = torch.autograd.grad((want_o * do).sum() + (want_state * dht).sum(), leaves)
    got = torch.autograd.grad((o.float() * do).sum() + (state * dht).sum(), leaves)
    for name, d, want in zip(names, got, wanted):
        assert d.dtype == tensors[name].dtype
        error = relative_error(d, want)
        assert error < GRADIENT_TOLERANCE[call.dtype], f"d{name}: {error:.1e}"


def test_a_gate_beyond_the_softplus_threshold(backend, device):
    """Raw gates on both sides of 20, where softplus(z) is z, and far below, where it is exp(z): decays and their gradients."""
    call = GdnCall(T=24, gate="softplus", initial_state=False)
    tensors = call.tensors(device)
    tensors["g"] = torch.linspace(-30, 40, 24, device=device)[None, :, None].repeat(1, 1, 2).requires_grad_()
    tensors["A_log"] = torch.full((2,), -7.0, device=device)  # so that the largest decays are not all of the state
    want, _ = reference.gdn(**tensors, **call.switches())
    o, _ = run(call, backend, tensors)
    assert relative_error(o, want) < TOLERANCE[call.dtype]
    dg, want_dg = (torch.autograd.grad(x.sum(), tensors["g"])[0] for x in (o, want))
    assert relative_error(dg, want_dg) < GRADIENT_TOLERANCE[call.dtype]
    assert relative_error(dg[:, :4], want_dg[:, :4]) < 1e-3, "gates that hardly decay keep their digits"


def test_rows_of_one_projection_are_read_in_place(backend, device):
    """q, k and v as views of one convolution's output, a and b of another: no copy, and the right numbers."""
    call = GdnCall(T=50, H=2, HV=4, K=32, V=32, **ALL_SWITCHES)
    tensors = call.tensors(device)
    rows = torch.cat([*(tensors[n].flatten(2) for n in ("q", "k", "v")), torch.full((1, 50, 8), torch.nan, device=device)], -1)
    q, k, v, _ = rows.split([64, 64, 128, 8], dim=-1)
    gates = torch.cat([tensors["g"], tensors["beta"]], -1)
    views = {"q": q.unflatten(-1, (2, 32)), "k": k.unflatten(-1, (2, 32)), "v": v.unflatten(-1, (4, 32))}
    views |= {"g": gates[..., :4], "beta": gates[..., 4:]}
    _, x = check_gdn(GdnInputs(**tensors | views), GdnOptions(**call.switches()))
    assert all(getattr(x, n).data_ptr() == t.data_ptr() for n, t in views.items())
    for a, b in zip(run(call, backend, tensors | views), run(call, backend, tensors)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pool_is_updated_in_place(backend, device, pool_dtype):
    """Slots that are named, one of them by a sequence that starts from zero; 0 is null, and so are negative ones."""
    call = GdnCall(lens=(20, 0, 33, 7, 3), initial_state=False, **ALL_SWITCHES)
    tensors = call.tensors(device)
    gen = torch.Generator().manual_seed(3)
    pool = torch.full((6, call.HV, call.V, call.K), torch.nan)
    pool[[4, 1]] = torch.randn(2, call.HV, call.V, call.K, generator=gen)
    pool = pool.to(device, pool_dtype)
    before = pool.clone()
    slots = torch.tensor([4, 1, 2, -1, 0], device=device)
    has = torch.tensor([True, True, False, False, True], device=device)
    call = call.with_(final_state=False)
    of_pool = {"state_pool": pool, "initial_state_indices": slots, "has_initial_state": has, "null_index": "nonpositive"}
    o, _ = run(call, backend, tensors, **of_pool)
    first = torch.stack([before[4].float(), before[1].float(), *torch.zeros(3, *pool.shape[1:], device=device)])
    want_o, want = reference.gdn(**tensors | {"initial_state": first}, **call.switches())
    tolerance = max(TOLERANCE[call.dtype], TOLERANCE[pool_dtype])
    assert relative_error(o, want_o) < TOLERANCE[call.dtype]
    assert relative_error(pool[[4, 1, 2]], want[:3]) < tolerance
    assert torch.equal(pool[1], before[1]) and bool(pool[[0, 3, 5]].isnan().all())


@pytest.mark.parametrize("by", ["every", "offsets"])
def test_states_inside_of_prompts_are_kept(backend, device, by):
    call = GdnCall(lens=(130, 20, 64), norm=True)
    tensors = call.tensors(device)
    kept = torch.full((3, call.HV, call.V, call.K), 7.0, device=device)
    which = {"checkpoint_every": 64} if by == "every" else {"checkpoint_offsets": torch.tensor([128, 0, 64], device=device).int()}
    run(call, backend, tensors, checkpoint_states=kept, **which)
    ends = [(0, 64), (0, 128), (2, 64)] if by == "every" else [(0, 128), None, (2, 64)]
    for row, end in zip(kept, ends):
        if end is None:
            assert bool((row == 7).all())
            continue
        n, length = end
        first = int(tensors["cu_seqlens"][n])
        part = {k: t[:, first : first + length] if k in TOKENS else t for k, t in tensors.items()}
        part |= {"cu_seqlens": None, "initial_state": tensors["initial_state"][n : n + 1]}
        assert relative_error(row, reference.gdn(**part, **call.switches())[1][0]) < TOLERANCE[call.dtype]


def test_the_affine_map_and_chunk_states(backend, device):
    call = GdnCall(T=100, **ALL_SWITCHES)
    tensors = call.tensors(device)
    problem, x = check_gdn(GdnInputs(**tensors), GdnOptions(**call.switches()))
    want = reference.gdn(**tensors, **call.switches())[1]
    M, B = select("gdn_transition", problem, backend)(problem, x)
    assert relative_error(x.initial_state @ M + B, want) < TOLERANCE[call.dtype]
    h = run(call, backend, tensors, return_intermediate_states=True)[2]
    assert torch.equal(h[:, 0], tensors["initial_state"])
    head = {n: t[:, :64] if n in TOKENS else t for n, t in tensors.items()}
    assert relative_error(h[:, 1], reference.gdn(**head, **call.switches())[1]) < TOLERANCE[call.dtype]


@pytest.mark.parametrize("T", [1, 3])
def test_decode_matches_the_recurrence(backend, device, T):
    call = GdnCall(T=T, B=3, H=1, HV=2, **ALL_SWITCHES)
    tensors = {n: t for n, t in call.tensors(device).items() if n not in ("initial_state", "cu_seqlens")}
    tensors |= {n: tensors[n].bfloat16() for n in ("A_log", "dt_bias")}
    gen = torch.Generator().manual_seed(3)
    pool = torch.randn(5, call.HV, call.V, call.K, generator=gen).to(device)
    slots = torch.tensor([4, 0, 2], device=device)
    common = {"mode": "gdn", "state_indices": slots, "null_index": "nonpositive"}
    want_o, want_pool, _ = reference.decode(**tensors, **call.switches(), state=pool, **common)
    o, _ = cula.cula_decode(**tensors, **call.switches(), state=pool, **common, backend=backend)
    assert relative_error(o, want_o) < TOLERANCE[call.dtype] and not o[1].any()
    assert relative_error(pool, want_pool) < TOLERANCE[call.dtype]
