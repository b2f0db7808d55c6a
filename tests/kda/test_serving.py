# SPDX-License-Identifier: Apache-2.0
"""Decode by the names and argument orders that serving engines use."""

import pytest
import torch

from cula import reference
from cula.kda import fused_sigmoid_gating_delta_rule_update, kda_decode, kda_packed_decode
from cula.reference import relative_error
from tests.support.calls import KdaCall

N, H, HV, K, V = 3, 2, 4, 32, 16


@pytest.fixture
def step():
    call = KdaCall(T=1, B=N, H=H, HV=HV, K=K, V=V, gate="softplus", norm=True, beta="sigmoid")
    t = call.tensors()
    pool = torch.randn(5, HV, V, K)
    return call, t, pool, torch.tensor([4, 0, 2], dtype=torch.int32)


def expected(call, t, pool, slots, **changes):
    return reference.kda(**t | {"initial_state": pool[slots.long()]}, **call.switches() | changes)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_decode(step, packed, lower_bound):
    call, t, pool, slots = step
    want_o, want_state = expected(call, t, pool, slots, lower_bound=lower_bound)
    q, k, v = (t[n].transpose(0, 1) if packed else t[n] for n in ("q", "k", "v"))
    o = kda_decode(
        t["A_log"].view(1, 1, HV, 1),
        t["dt_bias"].flatten(),
        q,
        k,
        v,
        t["g"].reshape(N, 1, HV * K),
        t["beta"].reshape(N, HV),
        pool,
        slots,
        lower_bound=lower_bound,
        cu_seqlens=torch.arange(N + 1, dtype=torch.int32),
    )
    assert o.shape == v.shape
    assert relative_error(o.view(N, 1, HV, V), want_o) < 1e-5
    assert relative_error(pool[slots.long()], want_state) < 1e-5


def test_kda_packed_decode_reads_strided_rows(step):
    call, t, pool, slots = step
    want_o, want_state = expected(call, t, pool, slots)
    rows = torch.cat([t[n].reshape(N, -1) for n in ("q", "k", "v")], dim=-1)
    wide = torch.full((N, rows.shape[1] + 8), float("nan"))
    wide[:, :-8] = rows
    o = kda_packed_decode(wide[:, :-8], t["g"], t["beta"], t["A_log"], t["dt_bias"], pool, slots, num_heads=H, head_dim_k=K)
    assert o.shape == (1, N, HV, V)
    assert relative_error(o[0], want_o[:, 0]) < 1e-5
    assert relative_error(pool[slots.long()], want_state) < 1e-5
    with pytest.raises(ValueError, match="mixed_qkv has 10 columns"):
        kda_packed_decode(rows[:, :10], t["g"], t["beta"], t["A_log"], t["dt_bias"], pool, slots, num_heads=H, head_dim_k=K)


@pytest.mark.parametrize("is_kda", [True, False])
def test_fused_sigmoid_gating_delta_rule_update(step, is_kda):
    call, t, pool, slots = step
    if not is_kda:
        t = t | {"g": t["g"][..., 0], "dt_bias": t["dt_bias"][:, 0]}
    want_o, want_state = expected(call, t, pool, slots)
    o = fused_sigmoid_gating_delta_rule_update(
        t["A_log"],
        t["g"],
        t["dt_bias"],
        1.0,
        20.0,
        t["q"],
        t["k"],
        t["v"],
        t["beta"],
        pool,
        slots,
        use_qk_l2norm_in_kernel=True,
        is_kda=is_kda,
    )
    assert relative_error(o, want_o) < 1e-5
    assert relative_error(pool[slots.long()], want_state) < 1e-5


def test_another_softplus_is_refused(step):
    _, t, pool, slots = step
    args = (t["A_log"], t["dt_bias"], t["q"], t["k"], t["v"], t["g"], t["beta"], pool, slots)
    with pytest.raises(NotImplementedError, match="softplus_beta"):
        kda_decode(*args, softplus_beta=2.0)
    with pytest.raises(NotImplementedError, match="softplus_threshold"):
        kda_decode(*args, softplus_threshold=5.0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        kda_decode(*args, cu_seqlens=torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("g", lambda t: t[..., 1:], r"a has shape \[3, 1, 4, 31\]; expected the elements of \[N, T, HV, K\] = \[3, 1, 4, 32\]"),
        ("beta", lambda t: t[:, :, 1:], r"b has shape \[3, 1, 3\]; expected the elements of \[N, T, HV\] = \[3, 1, 4\]"),
        ("beta", lambda _: None, "b is NoneType; expected a torch.Tensor"),
        ("v", lambda t: t[0], r"v has shape \[1, 4, 16\]; expected four dimensions"),
        ("A_log", lambda t: t[1:], r"A_log has shape \[3\]; expected HV = 4 elements"),
        ("A_log", lambda _: None, "needs A_log"),
    ],
)
def test_bad_tensors_are_named(step, name, bad, words):
    _, t, pool, slots = step
    t, before = t | {name: bad(t[name])}, pool.clone()
    with pytest.raises(ValueError, match=f"kda_decode: .*{words}"):
        kda_decode(t["A_log"], t["dt_bias"], t["q"], t["k"], t["v"], t["g"], t["beta"], pool, slots)
    raw = (t["A_log"], t["g"], t["dt_bias"], 1.0, 20.0, t["q"], t["k"], t["v"], t["beta"], pool, slots)
    with pytest.raises(ValueError, match=f"fused_sigmoid_gating_delta_rule_update: .*{words}"):
        fused_sigmoid_gating_delta_rule_update(*raw, is_kda=True)
    assert torch.equal(pool, before)


def test_a_packed_call_names_what_is_not_packed(step):
    _, t, pool, slots = step
    rows, sizes = torch.randn(N, 2 * H * K + HV * V), {"num_heads": H, "head_dim_k": K}
    gates = (t["g"], t["beta"], t["A_log"], t["dt_bias"])
    with pytest.raises(ValueError, match=r"mixed_qkv has shape \[192\]; expected"):
        kda_packed_decode(rows[0], *gates, pool, slots, **sizes)
    with pytest.raises(ValueError, match=r"initial_state_source has shape \[4, 16, 32\]; expected a pool"):
        kda_packed_decode(rows, *gates, pool[0], slots, **sizes)
    with pytest.raises(ValueError, match="kda_packed_decode: a has shape"):
        kda_packed_decode(rows, t["g"][1:], *gates[1:], pool, slots, **sizes)
    with pytest.raises(ValueError, match=r"initial_state_source has shape \[4, 4, 16, 0\]; \[HV, V, K\] must be positive"):
        kda_packed_decode(rows, *gates, pool[:4, ..., :0], slots, **sizes)


def test_slots_and_offsets_say_one_token_a_row(step):
    """Slots `[1, N]` would be those of N tokens of one row."""
    _, t, pool, slots = step
    tokens = {n: t[n].transpose(0, 1) for n in ("q", "k", "v", "g", "beta")}
    packed = [t["A_log"], t["dt_bias"], *tokens.values(), pool]
    rows = torch.randn(N, 2 * H * K + HV * V)
    before = pool.clone()
    for bad, shape in ((slots[None], r"\[1, 3\]"), (slots[0], r"\[\]")):
        with pytest.raises(ValueError, match=rf"kda_decode: initial_state_indices has shape {shape}; expected \[N\]"):
            kda_decode(*packed, bad)
        with pytest.raises(ValueError, match=rf"kda_packed_decode: initial_state_indices has shape {shape}; expected \[N\]"):
            kda_packed_decode(rows, t["g"], t["beta"], t["A_log"], t["dt_bias"], pool, bad, num_heads=H, head_dim_k=K)
    with pytest.raises(TypeError, match=r"kda_decode: cu_seqlens is list; expected a torch\.Tensor"):
        kda_decode(*packed, slots, cu_seqlens=[0, 1, 2, 3])
    assert torch.equal(pool, before)
