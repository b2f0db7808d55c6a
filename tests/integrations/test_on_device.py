# SPDX-License-Identifier: Apache-2.0
"""FLA's functions and the serving plug-ins in bfloat16 with head dims of 128, on a CPU and on a GPU, beside float64.

These need fla-core alone, so that they run where FLA's models cannot be installed.
"""

import pytest
import torch

from cula import reference
from cula.integrations import CALLS
from cula.integrations import fla as cula_fla
from cula.integrations import sglang as cula_sglang
from cula.integrations import vllm as cula_vllm
from cula.reference import relative_error
from tests.support import calls

H, HV, D = 2, 4, 128
SWITCHES = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE, GRADIENT = calls.TOLERANCE[torch.bfloat16], calls.GRADIENT_TOLERANCE[torch.bfloat16]


@pytest.fixture(autouse=True)
def counted():
    CALLS.clear()
    yield
    cula_fla.unregister()


def rand(device, *shape, seed, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def inputs(mode, device, B, T):
    gates = (B, T, HV, D) if mode == "kda" else (B, T, HV)
    return {
        "q": rand(device, B, T, H, D, seed=1),
        "k": rand(device, B, T, H, D, seed=2),
        "v": rand(device, B, T, HV, D, seed=3),
        "g": rand(device, *gates, seed=4),
        "beta": rand(device, B, T, HV, seed=5),
        "A_log": 0.3 * rand(device, HV, seed=6, dtype=torch.float32),
        "dt_bias": rand(device, HV * D if mode == "kda" else HV, seed=7, dtype=torch.float32),
    }


def definition(x, at=slice(None), h0=None):
    """Tokens `at`, in float64."""
    tokens = {name: t.double() if name in ("A_log", "dt_bias") else t[:, at].double() for name, t in x.items()}
    return reference.kda(**tokens, **SWITCHES, initial_state=None if h0 is None else h0.double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["kda", "gdn"])
def test_training_through_flas_functions(mode, device):
    pytest.importorskip("fla.ops.kda")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    cula_fla.register()
    x, do = inputs(mode, device, 1, 150), rand(device, 1, 150, HV, D, seed=8)
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    function = chunk_kda if mode == "kda" else chunk_gated_delta_rule
    o, state = function(**leaves, **SWITCHES, output_final_state=True, state_v_first=True)
    o.backward(do)
    assert {f"fla.{function.__name__}": 1} == CALLS
    exact = {name: t.double().requires_grad_() for name, t in x.items()}
    want, want_state = reference.kda(**exact, **SWITCHES)
    want.backward(do.double())
    assert (
        relative_error(o.detach(), want.detach()) < TOLERANCE and relative_error(state.detach(), want_state.detach()) < TOLERANCE
    )
    for name, leaf in leaves.items():
        assert relative_error(leaf.grad, exact[name].grad) < GRADIENT, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["kda", "gdn"])
def test_decode_through_flas_functions(mode, device):
    pytest.importorskip("fla.ops.kda")
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    cula_fla.register()
    x, h0 = inputs(mode, device, 3, 2), rand(device, 3, HV, D, D, seed=9, dtype=torch.float32)
    function = fused_recurrent_kda if mode == "kda" else fused_recurrent_gated_delta_rule
    o, state = function(**x, **SWITCHES, initial_state=h0, output_final_state=True, state_v_first=True)
    want, want_state = definition(x, h0=h0)
    assert {f"fla.{function.__name__}_fwd": 1} == CALLS
    assert relative_error(o, want) < TOLERANCE and relative_error(state, want_state) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
def test_constant_decays_through_flas_functions(device):
    pytest.importorskip("fla.ops.simple_gla")
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    cula_fla.register()
    q, k, v = (rand(device, 2, 100, HV, D, seed=seed) for seed in (1, 2, 3))
    decay = torch.tensor([0.01, 0.1, 0.3, 1.0], device=device)
    want, _ = reference.lightning(q.double(), k.double(), v.double(), decay.double())
    for function in (chunk_simple_gla, fused_recurrent_simple_gla):
        assert relative_error(function(q, k, v, g_gamma=-decay)[0], want) < TOLERANCE
    assert CALLS == {"fla.ChunkSimpleGLAFunction": 1, "fla.fused_recurrent": 1}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["kda", "gdn"])
def test_sglangs_calls(mode, device):
    """Prompts on slots with a tracked state, then drafts of several lengths; what is not in use stays poisoned."""
    x = inputs(mode, device, 1, 300)
    p = {"A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    states = torch.full((9, HV, D, D), float("nan"), device=device)
    for slot in (3, 5):
        states[slot] = rand(device, HV, D, D, seed=slot, dtype=torch.float32)
    before, track = states.clone(), torch.zeros(3, HV, D, D, device=device)
    on = {"ssm_states": states, "cache_indices": torch.tensor([3, -1, 5], dtype=torch.int32, device=device)}
    cu = torch.tensor([0, 130, 200, 300], dtype=torch.int32, device=device)
    tracked = {"track_state": track, "track_chunk_idx": torch.tensor([2, -1, 1], dtype=torch.int32, device=device)}
    kernel = cula_sglang.kernel_class(mode, object)()
    if mode == "kda":
        o = kernel.extend(x["q"], x["k"], x["v"], x["g"], x["beta"], **on, **p, query_start_loc=cu, beta_is_raw=True, **tracked)
    else:
        g = -x["A_log"].exp() * torch.nn.functional.softplus(x["g"].float() + x["dt_bias"])
        o, _, _ = kernel.extend(x["q"], x["k"], x["v"], g, x["beta"].float().sigmoid(), **on, query_start_loc=cu, **tracked)
    for at, slot in ((slice(0, 130), 3), (slice(130, 200), None), (slice(200, 300), 5)):
        want, want_state = definition(x, at, None if slot is None else before[slot : slot + 1])
        assert relative_error(o[:, at], want) < TOLERANCE
        assert slot is None or relative_error(states[slot], want_state[0]) < TOLERANCE
    assert relative_error(track[0], definition(x, slice(0, 128), before[3:4])[1][0]) < TOLERANCE
    assert states[[0, 1, 2, 4, 6, 7, 8]].isnan().all()
    now, buffer = states.clone(), torch.zeros(4, 3, HV, D, D, device=device)
    rows = torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=device)
    few = {name: x[name][:, :5] for name in ("q", "k", "v")}
    o = kernel.target_verify(
        **p, **few, a=x["g"][:, :5], b=x["beta"][:, :5], **on, query_start_loc=rows, intermediate_states_buffer=buffer,
        intermediate_state_indices=torch.tensor([2, 0, 1], dtype=torch.int32, device=device), cache_steps=3,
        retrieve_parent_token=None,
    )  # fmt: skip
    for at, slot, row, last in ((slice(0, 3), 3, 2, 2), (slice(3, 5), 5, 1, 1)):
        want, want_state = definition(x, at, now[slot : slot + 1])
        assert relative_error(o[:, at], want) < TOLERANCE and relative_error(buffer[row, last], want_state[0]) < TOLERANCE
    assert torch.equal(states.nan_to_num(), now.nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["kda", "gdn"])
def test_vllms_speculative_rows(mode, device):
    x = inputs(mode, device, 1, 5)
    p = {"A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0]], dtype=torch.int32, device=device)
    accepted = torch.tensor([1, 3, 2], dtype=torch.int32, device=device)
    rows = torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=device)
    states = rand(device, 9, HV, D, D, seed=9, dtype=torch.float32)
    before = states.clone()
    named = {"initial_state": states, "cu_seqlens": rows, "ssm_state_indices": table, "num_accepted_tokens": accepted}
    if mode == "kda":
        o, _ = cula_vllm._kda_decode(None, x["q"], x["k"], x["v"], x["g"], x["beta"], **p, lower_bound=None, **named)
    else:
        qkv = {name: x[name] for name in ("q", "k", "v")}
        o, _ = cula_vllm._gdn_decode(None, a=x["g"][0], b=x["beta"][0], **p, **qkv, use_qk_l2norm_in_kernel=True, **named)
    for at, start, end in ((slice(0, 3), 1, 3), (slice(3, 5), 8, 8)):
        want, want_state = definition(x, at, before[start : start + 1])
        assert relative_error(o[:, at], want) < TOLERANCE and relative_error(states[end], want_state[0]) < TOLERANCE
    assert torch.equal(states[[0, 4, 5, 6]], before[[0, 4, 5, 6]])
