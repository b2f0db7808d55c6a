# SPDX-License-Identifier: Apache-2.0
"""GDN decode by the names and argument orders of vLLM and SGLang."""

import pytest
import torch

from cula import reference
from cula.gdn import fused_sigmoid_gating_delta_rule_update, gdn_packed_decode
from cula.reference import relative_error
from tests.support.calls import GdnCall, KdaCall

N, H, HV, K, V = 3, 2, 4, 32, 16
CALL = GdnCall(T=1, B=N, H=H, HV=HV, K=K, V=V, gate="softplus", norm=True, beta="sigmoid", parameter_dtype=torch.bfloat16)


def expected(call, t, pool, **more):
    own = {n: x for n, x in t.items() if n not in ("initial_state", "cu_seqlens")}
    return reference.decode(**own, **call.switches(), mode="gdn", state=pool, **more)


def update(t, *slots, **more):
    """SGLang's positional call."""
    raw = (t["A_log"], t["g"], t["dt_bias"], 1.0, 20.0, t["q"], t["k"], t["v"], t["beta"])
    return fused_sigmoid_gating_delta_rule_update(*raw, *slots, use_qk_l2norm_in_kernel=True, **more)


def test_vllms_packed_decode_reads_rows_of_a_projection_and_fills_out():
    t, pool, slots = CALL.tensors(), torch.randn(5, HV, V, K), torch.tensor([4, 0, 2], dtype=torch.int32)
    want_o, want_pool, _ = expected(CALL, t, pool, state_indices=slots, null_index="nonpositive")
    rows = torch.cat([t[n].reshape(N, -1) for n in ("q", "k", "v")], dim=-1)
    wide = torch.full((N, rows.shape[1] + 8), float("nan"))
    wide[:, :-8] = rows
    gates = torch.cat([t["g"], t["beta"]], -1)[:, 0]
    out = torch.full((N, 1, HV, V), 9.0)
    arguments = {"a": gates[:, :HV], "b": gates[:, HV:], "A_log": t["A_log"], "dt_bias": t["dt_bias"], "scale": K**-0.5}
    o, state = gdn_packed_decode(
        wide[:, :-8], **arguments, initial_state=pool, out=out, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True
    )
    assert o is out and state is pool
    assert relative_error(out, want_o) < 1e-5 and not out[1].any()
    assert relative_error(pool, want_pool) < 1e-5
    with pytest.raises(ValueError, match="mixed_qkv has 200 columns"):
        gdn_packed_decode(wide[:, :200], **arguments, initial_state=pool, out=out, ssm_state_indices=slots)


@pytest.mark.parametrize("packed", [False, True])
def test_sglangs_decode(packed):
    t, pool, slots = CALL.tensors(), torch.randn(5, HV, V, K), torch.tensor([4, -1, 2], dtype=torch.int32)
    want_o, want_pool, _ = expected(CALL, t, pool, state_indices=slots)
    if packed:
        t |= {n: t[n].transpose(0, 1) for n in ("q", "k", "v")} | {n: t[n].reshape(N, HV) for n in ("g", "beta")}
    o = update(t, pool, slots, cu_seqlens=torch.arange(N + 1, dtype=torch.int32))
    assert o.shape == t["v"].shape and relative_error(o.reshape(want_o.shape), want_o) < 1e-5
    assert relative_error(pool, want_pool) < 1e-5
    with pytest.raises(ValueError, match="one token a sequence"):
        update(t, pool, slots, cu_seqlens=torch.tensor([0, 3]))


def test_sglangs_verification_leaves_the_pool_alone_and_keeps_states_by_row():
    call = GdnCall(lens=(2, 3, 1), H=H, HV=HV, K=K, V=V, gate="softplus", norm=True, beta="sigmoid")
    t, pool, slots = call.tensors(), torch.randn(5, HV, V, K), torch.tensor([4, 1, 2], dtype=torch.int32)
    buffer, rows = torch.randn(6, 4, HV, V, K), torch.tensor([5, 0, 2], dtype=torch.int32)
    more = {"cu_seqlens": t["cu_seqlens"], "intermediate_state_indices": rows}
    want_o, want_pool, want_kept = expected(
        call, t, pool, state_indices=slots, intermediate_states=buffer, commit=False, **more
    )  # fmt: skip
    o = update(
        t, pool, slots, disable_state_update=True, intermediate_states_buffer=buffer, cache_steps=4, **more
    )  # fmt: skip
    assert relative_error(o, want_o) < 1e-5 and torch.equal(pool.double(), want_pool)
    assert relative_error(buffer, want_kept) < 1e-5
    with pytest.raises(NotImplementedError, match="tree"):
        update(t, pool, slots, retrieve_parent_token=torch.zeros(1))


def test_vllms_speculative_decode_of_ragged_rows():
    call = GdnCall(lens=(3, 0, 2), H=H, HV=HV, K=K, V=V, gate="softplus", norm=True, beta="sigmoid")
    t, pool = call.tensors(), torch.randn(9, HV, V, K)
    slots = torch.tensor([[4, 1, 2], [0, 0, 0], [7, 8, 6]], dtype=torch.int32)
    more = {"cu_seqlens": t["cu_seqlens"], "num_accepted_tokens": torch.tensor([2, 1, 1], dtype=torch.int32)}
    want_o, want_pool, _ = expected(call, t, pool, state_indices=slots, null_index="nonpositive", **more)
    o, state = fused_sigmoid_gating_delta_rule_update(
        A_log=t["A_log"], a=t["g"][0], b=t["beta"][0], dt_bias=t["dt_bias"], q=t["q"], k=t["k"], v=t["v"],
        initial_state=pool, inplace_final_state=True, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True, **more,
    )  # fmt: skip
    assert state is pool
    assert relative_error(o, want_o) < 1e-5 and relative_error(pool, want_pool) < 1e-5


@pytest.mark.parametrize("lower_bound", [None, -4.0])
def test_gates_a_channel_are_verified_too(lower_bound):
    """SGLang's function of KDA's models is the same one: drafts, rows of a buffer, and a bounded gate."""
    call = KdaCall(lens=(2, 3, 1), H=H, HV=HV, K=K, V=V, gate="softplus", norm=True, beta="sigmoid")
    t, pool, slots = call.tensors(), torch.randn(5, HV, V, K), torch.tensor([4, 0, 2], dtype=torch.int32)
    buffer, rows = torch.randn(6, 4, HV, V, K), torch.tensor([5, 0, 2], dtype=torch.int32)
    more = {"cu_seqlens": t["cu_seqlens"], "intermediate_state_indices": rows, "null_index": "nonpositive"}
    own = {n: x for n, x in t.items() if n not in ("initial_state", "cu_seqlens")}
    switches = call.switches() | {"lower_bound": lower_bound}
    want_o, want_pool, want_kept = reference.decode(
        **own, **switches, state=pool, state_indices=slots, intermediate_states=buffer, commit=False, **more
    )  # fmt: skip
    drafts = {"disable_state_update": True, "intermediate_states_buffer": buffer, "backend": "torch"}
    o = update(t | {"g": t["g"].flatten(2)}, pool, slots, is_kda=True, lower_bound=lower_bound, **drafts, **more)
    assert relative_error(o, want_o) < 1e-5 and torch.equal(pool.double(), want_pool)
    assert relative_error(buffer, want_kept) < 1e-5


def test_what_is_not_served_says_so():
    t, pool, slots = CALL.tensors(), torch.randn(5, HV, V, K), torch.tensor([4, 1, 2])
    with pytest.raises(NotImplementedError, match="inplace_final_state"):
        update(t, pool, slots, inplace_final_state=False)
    with pytest.raises(NotImplementedError, match="softplus_threshold"):
        fused_sigmoid_gating_delta_rule_update(
            t["A_log"], t["g"], t["dt_bias"], 1.0, 5.0, t["q"], t["k"], t["v"], t["beta"], pool
        )
    with pytest.raises(ValueError, match="lower_bound"):
        update(t, pool, slots, lower_bound=-5.0)
    with pytest.raises(TypeError, match="initial_state_source is NoneType"):
        update(t)
    with pytest.raises(ValueError, match=r"a has shape \[3, 1, 3\]; expected the elements of \[N, T, HV\] = \[3, 1, 4\]"):
        update(t | {"g": t["g"][..., 1:]}, pool, slots)
    rows = torch.cat([t[n].reshape(N, -1) for n in ("q", "k", "v")], dim=-1)
    with pytest.raises(ValueError, match=r"b has shape \[2, 1, 4\]; expected the elements of"):
        gdn_packed_decode(rows, t["g"], t["beta"][1:], t["A_log"], t["dt_bias"], None, pool, None, slots)
