# SPDX-License-Identifier: Apache-2.0
"""`chunk_kda` and `fused_recurrent_kda` as a user of flash-linear-attention calls them."""

import inspect

import pytest
import torch

from cula import reference
from cula.kda import chunk_kda, fused_recurrent_kda, kda_prefill_blackwell, kda_prefill_hopper
from cula.kda.fla import fused_kda
from cula.reference import relative_error
from tests.support.calls import KdaCall

# The order of FLA's positional parameters (0.5 and 0.6): positional callers rely on it.
FLA_ORDER = """
q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel
use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states
state_v_first cu_seqlens cu_seqlens_cpu cp_context
"""


def test_the_signature_is_flas():
    parameters = inspect.signature(chunk_kda).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == FLA_ORDER.split()


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda, fused_kda])
def test_state_layout(function, v_first):
    call = KdaCall(T=40, K=32, V=64, gate="softplus", norm=True)
    t = call.tensors()
    want_o, want_state = reference.kda(**t, **call.switches())
    if not v_first:
        t["initial_state"] = t["initial_state"].transpose(-1, -2)
        want_state = want_state.transpose(-1, -2)
    o, state = function(**t, **call.switches(), output_final_state=True, state_v_first=v_first)
    assert state.shape == want_state.shape
    assert relative_error(o, want_o) < 1e-5
    assert relative_error(state, want_state) < 1e-5


def test_gradients_through_flas_layout():
    t = KdaCall(T=20, K=32, V=64).tensors()
    h0 = t["initial_state"].transpose(-1, -2).contiguous().requires_grad_()
    o, state = chunk_kda(**t | {"initial_state": h0}, output_final_state=True)
    (o.sum() + state.sum()).backward()
    h0_ref = t["initial_state"].double().requires_grad_()
    want_o, want_state = reference.kda(**t | {"initial_state": h0_ref})
    (want_o.sum() + want_state.sum()).backward()
    assert relative_error(h0.grad, h0_ref.grad.transpose(-1, -2)) < 1e-5


def test_intermediate_states_follow_the_layout():
    t = KdaCall(T=100, K=32, V=64, initial_state=False).tensors()
    *_, h_kv = chunk_kda(**t, return_intermediate_states=True)
    *_, h_vk = chunk_kda(**t, return_intermediate_states=True, state_v_first=True)
    assert h_kv.shape == (1, 2, 2, 32, 64)
    assert torch.equal(h_kv, h_vk.transpose(-1, -2))


def test_gate_parameters_may_come_along_unused():
    t = KdaCall(T=10).tensors()
    o, _ = chunk_kda(**t | {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2, 32)})
    assert torch.equal(o, chunk_kda(**t)[0])


def test_misspelt_keywords_are_refused():
    t = KdaCall(T=10).tensors()
    with pytest.raises(TypeError, match="output_final_stat"):
        chunk_kda(**t, output_final_stat=True)
    with pytest.raises(ValueError, match="chunk_size"):
        chunk_kda(**t, chunk_size=48)


def test_named_hardware_that_is_missing_is_a_clear_error():
    q = torch.randn(1, 4, 1, 128)
    with pytest.raises(RuntimeError, match=r"needs a Hopper GPU.*this is cpu"):
        kda_prefill_hopper(q, q, q, q, q[..., 0])
    with pytest.raises(RuntimeError, match=r"needs a Blackwell GPU.*this is cpu"):
        kda_prefill_blackwell(q, q, q, q, q[..., 0])
