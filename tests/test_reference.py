# SPDX-License-Identifier: Apache-2.0
"""The identities that everything is built on, checked in float64 on the reference itself."""

import torch

from cula import reference
from tests.support.calls import GdnCall, KdaCall, LightningCall


def double(tensors):
    return {n: t.double() if t is not None and t.is_floating_point() else t for n, t in tensors.items()}


def head(tensors):
    """Tensors of the one head of a call with H = HV = 1, [T, *], and its first state as [K, V]."""
    t = double(tensors)
    return (*(t[n][0, :, 0] for n in ("q", "k", "v", "g", "beta")), t["initial_state"][0, 0].T)


def close(a, b, tolerance=1e-11):
    assert reference.relative_error(a, b) < tolerance


def pair_scores(x, k, G):
    return torch.einsum("tc,ic,tic->ti", x, k, (G[:, None] - G[None]).clamp(max=0).exp()).tril()


def chunk_map(k, v, g, b):
    """(M, B) with S_out = M S_in + B, S as [K, V]."""
    C = k.shape[0]
    G = g.cumsum(0)
    T = torch.linalg.inv(torch.eye(C, dtype=k.dtype) + (b[:, None] * pair_scores(k, k, G)).tril(-1))
    to_end = (k * (G[-1] - G).exp()).T
    M = torch.diag(G[-1].exp()) - to_end @ T @ (b[:, None] * k * G.exp())
    return M, to_end @ T @ (b[:, None] * v)


def test_one_step_by_hand():
    """Two tokens, K = V = 1, worked out with a pencil."""
    q = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
    k = torch.tensor([1.0, 1.0]).view(1, 2, 1, 1)
    v = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    g = torch.tensor([0.5, 0.5]).log().view(1, 2, 1, 1)
    beta = torch.tensor([1.0, 0.5]).view(1, 2, 1)
    h0 = torch.tensor([8.0]).view(1, 1, 1, 1)
    # token 0: S = 4, S += 1 (3 - 4) = 3, o = 3.  token 1: S = 1.5, S += 0.5 (5 - 1.5) = 3.25, o = 6.5
    o, state = reference.kda(q, k, v, g, beta, scale=1.0, initial_state=h0)
    close(o.flatten(), torch.tensor([3.0, 6.5]), 1e-7)
    close(state.flatten(), torch.tensor([3.25]), 1e-7)
    # the same with one gate a head
    o, state = reference.gdn(q, k, v, g[..., 0], beta, scale=1.0, initial_state=h0)
    close(o.flatten(), torch.tensor([3.0, 6.5]), 1e-7)
    close(state.flatten(), torch.tensor([3.25]), 1e-7)
    # Lightning: S = 4 + 3 = 7, o = 7; S = 3.5 + 5 = 8.5, o = 17
    o, state = reference.lightning(q, k, v, torch.tensor([2.0]).log(), scale=1.0, initial_state=h0)
    close(o.flatten(), torch.tensor([7.0, 17.0]), 1e-7)
    close(state.flatten(), torch.tensor([8.5]), 1e-7)


def test_a_chunk_in_closed_form():
    for decay in (5.0, 0.01):
        tensors = KdaCall(T=50, HV=1, K=24, V=16, decay=decay).tensors()
        q, k, v, g, b, S0 = head(tensors)
        o, state = reference.kda(**double(tensors))
        G = g.cumsum(0)
        A = (b[:, None] * pair_scores(k, k, G)).tril(-1)
        U = torch.linalg.solve(torch.eye(50, dtype=k.dtype) + A, b[:, None] * (v - (k * G.exp()) @ S0))
        close(24**-0.5 * ((q * G.exp()) @ S0 + pair_scores(q, k, G) @ U), o[0, :, 0])
        close(G[-1].exp()[:, None] * S0 + (k * (G[-1] - G).exp()).T @ U, state[0, 0].T)


def test_segments_compose_as_affine_maps():
    tensors = KdaCall(T=60, HV=1, K=24, V=16).tensors()
    _, k, v, g, b, S0 = head(tensors)
    S = S0
    for rows in (slice(0, 7), slice(7, 40), slice(40, 60)):
        M, B = chunk_map(k[rows], v[rows], g[rows], b[rows])
        S = M @ S + B
    close(S, reference.kda(**double(tensors))[1][0, 0].T)
    M, B = chunk_map(k, v, g, b)
    close(M @ S0 + B, S)


def test_what_forgetting_leaves_is_bounded():
    """|M|_2 <= exp(sum_t max_c g): what an exact segment scan may rely on to skip M."""
    for decay in (1.0, 0.05):
        _, k, v, g, b, _ = head(KdaCall(T=40, HV=1, decay=decay).tensors())
        M, _ = chunk_map(k, v, g, b)
        assert torch.linalg.norm(M, 2) <= g.max(1).values.sum().exp() * (1 + 1e-9)


def test_the_gradient_of_a_boundary_is_the_transposed_map():
    tensors = KdaCall(T=30, HV=1, K=24, V=16).tensors()
    _, k, v, g, b, _ = head(tensors)
    h0 = tensors["initial_state"].double().requires_grad_()
    _, state = reference.kda(**double(tensors) | {"initial_state": h0})
    d = torch.randn_like(state)
    state.backward(d)
    close(h0.grad[0, 0], d[0, 0] @ chunk_map(k, v, g, b)[0])


def test_lightning_is_a_sum_over_the_past():
    tensors = double(LightningCall(T=20, HV=1).tensors() | {"decay": torch.tensor([0.3])})
    o, state = reference.lightning(**tensors)
    q, k, v = (tensors[n][0, :, 0] for n in ("q", "k", "v"))
    t = torch.arange(20.0, dtype=torch.float64)
    decay = (-tensors["decay"] * (t[:, None] - t[None]).clamp(min=0)).exp().tril()
    first = (-tensors["decay"] * (t + 1)).exp()[:, None] * (q @ tensors["initial_state"][0, 0].T)
    close(o[0, :, 0], 32**-0.5 * ((q @ k.T * decay) @ v + first))
    last = (-tensors["decay"] * (19 - t)).exp()[:, None]
    close(state[0, 0], (-tensors["decay"] * 20).exp() * tensors["initial_state"][0, 0] + v.T @ (k * last))


def test_gate_formulas():
    g = torch.randn(1, 3, 2, 4)
    A_log, dt_bias = torch.randn(2), torch.randn(2, 4)
    z = g.double() + dt_bias.double()
    rate = A_log.double().exp()[:, None]
    close(reference.kda_gate(g, A_log, dt_bias), -rate * torch.log1p(z.exp()))
    close(reference.kda_gate(g, A_log, dt_bias, -5.0), -5 / (1 + (-rate * z).exp()))
    close(reference.kda_gate(g, None, None, -5.0), -5 * torch.sigmoid(g.double()))
    close(reference.kda_gate(g[..., 0], A_log, dt_bias[:, 0]), reference.kda_gate(g[..., :1], A_log, dt_bias[:, :1])[..., 0])


def test_a_scalar_gate_is_one_gate_for_every_channel():
    tensors = KdaCall(scalar_gate=True, T=20).tensors()
    spread = tensors | {"g": tensors["g"][..., None].expand(1, 20, 2, 32)}
    for a, b in zip(reference.kda(**tensors), reference.kda(**spread)):
        assert torch.equal(a, b)


def test_packed_and_grouped_calls_are_what_they_say():
    call = KdaCall(lens=(3, 0, 9), H=2, HV=4)
    tensors = call.tensors()
    o, states = reference.kda(**tensors)
    start = 0
    for n, length in enumerate(call.lens):
        part = {k: t[:, start : start + length] if k in ("q", "k", "v", "g", "beta") else t for k, t in tensors.items()}
        part |= {"cu_seqlens": None, "initial_state": tensors["initial_state"][n : n + 1]}
        part |= {k: part[k].repeat_interleave(2, dim=2) for k in ("q", "k")}
        o_alone, state_alone = reference.kda(**part)
        assert torch.equal(o[:, start : start + length], o_alone)
        assert torch.equal(states[n : n + 1], state_alone)
        start += length


def test_gdn_is_kda_with_one_gate_for_all_channels():
    call = GdnCall(lens=(20, 0, 9), gate="softplus", norm=True, beta="negative", H=1, HV=2)
    t = call.tensors()
    t["g"] = 30 * t["g"]  # far beyond softplus' threshold too
    spread = t | {"g": t["g"][..., None].expand(-1, -1, -1, call.K), "dt_bias": t["dt_bias"][:, None].expand(-1, call.K)}
    for a, b in zip(reference.gdn(**t, **call.switches()), reference.kda(**spread, **call.switches())):
        close(a, b)
