# SPDX-License-Identifier: Apache-2.0
"""KDA on every backend: numbers and gradients against the float64 recurrence, and the properties of the recurrence."""

import pytest
import torch

import cula
from cula import reference
from cula.core.dispatch import select
from cula.kda.problem import KdaInputs, KdaOptions, check_kda
from cula.reference import relative_error
from tests.support.calls import GRADIENT_TOLERANCE, TOLERANCE, KdaCall
from tests.support.slow import slow_but

CALLS = [
    KdaCall(),
    KdaCall(T=1),
    KdaCall(T=64, HV=1),
    KdaCall(T=130, H=2, HV=2, initial_state=False),
    KdaCall(T=33, B=2, HV=3, K=32, V=64),
    KdaCall(T=100, K=64, V=32, final_state=False),
    KdaCall(lens=(1, 63, 64, 65)),
    KdaCall(lens=(0, 70, 0, 1, 0)),
    KdaCall(decay=50.0),
    KdaCall(decay=0.0),
    KdaCall(decay=5.0, safe_gate=True),
    KdaCall(gate="softplus", norm=True, beta="sigmoid"),
    KdaCall(gate="bounded", norm=True, beta="sigmoid", lens=(17, 80)),
    KdaCall(gate="bounded", no_A_log=True, safe_gate=True),
    KdaCall(scalar_gate=True),
    KdaCall(scalar_gate=True, gate="softplus"),
    KdaCall(same_keys=True, beta="one", decay=0.01),
    KdaCall(norm=True, beta="negative"),
    KdaCall(scale=1.0, H=2, HV=4),
    KdaCall(K=60, V=100, gate="softplus", norm=True, beta="sigmoid"),
    KdaCall(K=20, V=12, gate="bounded", safe_gate=True, lens=(3, 66)),
    KdaCall(K=33, V=80, scalar_gate=True, gate="softplus", norm=True),
    KdaCall(T=40, HV=1, K=192, V=288),
    KdaCall(T=5, scale=0.0, norm=True),
]
HALF_CALLS = [
    KdaCall(dtype=torch.bfloat16, gate="bounded", norm=True, beta="sigmoid", safe_gate=True, lens=(65, 20)),
    KdaCall(dtype=torch.bfloat16, gate="softplus", norm=True, beta="sigmoid", gate_dtype=torch.bfloat16),
    KdaCall(dtype=torch.float16, decay=5.0),
]


RECOMPUTED = [KdaCall(), KdaCall(lens=(40, 70)), KdaCall(gate="softplus", K=60, V=44)]
REPEATED = [KdaCall(T=66), KdaCall(lens=(3, 64, 40))]


def run(call: KdaCall, backend: str, device, tensors=None, **kwargs):
    tensors = call.tensors(device) if tensors is None else tensors
    return cula.cula_kda(
        **tensors,
        **call.switches(),
        safe_gate=call.safe_gate,
        output_final_state=call.final_state,
        backend=backend,
        **kwargs,
    )


def run_reference(call: KdaCall, tensors):
    return reference.kda(**tensors, **call.switches())


def with_grad(tensors):
    return {
        name: t.detach().clone().requires_grad_() if t is not None and t.is_floating_point() else t for name, t in tensors.items()
    }


@pytest.mark.parametrize("call", CALLS + HALF_CALLS, ids=str)
def test_forward_matches_the_recurrence(backend, device, call):
    tensors = call.tensors(device)
    o, final_state = run(call, backend, device, tensors)
    want_o, want_state = run_reference(call, tensors)
    assert o.dtype == call.dtype
    assert relative_error(o, want_o) < TOLERANCE[call.dtype]
    if call.final_state:
        assert final_state.dtype == torch.float32
        assert relative_error(final_state, want_state) < TOLERANCE[call.dtype]
    else:
        assert final_state is None


# What a gradient takes besides: packed, each gate, head dims beside the tiles, queries that do not count, 16 bits.
QUICK_GRADIENTS = [CALLS[i] for i in (0, 1, 7, 8, 12, 15, 16, 20, 23)] + HALF_CALLS[:1]


@pytest.mark.parametrize("call", slow_but(CALLS + HALF_CALLS, QUICK_GRADIENTS), ids=str)
def test_gradients_match_autograd_through_the_recurrence(backend, device, call):
    tensors = with_grad(call.tensors(device))
    want_o, want_state = run_reference(call, tensors)
    gen = torch.Generator().manual_seed(1)
    do = torch.randn(want_o.shape, generator=gen).to(device, call.dtype)
    dht = torch.randn(want_state.shape, generator=gen).to(device)
    names = [name for name, t in tensors.items() if t is not None and t.requires_grad]
    inputs = [tensors[name] for name in names]
    loss = (want_o * do).sum() + ((want_state * dht).sum() if call.final_state else 0)
    wanted = torch.autograd.grad(loss, inputs)

    o, final_state = run(call, backend, device, tensors)
    loss = (o.float() * do).sum() + ((final_state * dht).sum() if call.final_state else 0)
    for name, got, want in zip(names, torch.autograd.grad(loss, inputs), wanted):
        assert got.dtype == tensors[name].dtype
        tolerance = GRADIENT_TOLERANCE[call.dtype]
        assert relative_error(got, want) < tolerance, f"d{name}: {relative_error(got, want):.1e} >= {tolerance:.0e}"


@pytest.mark.parametrize("call", slow_but(RECOMPUTED, RECOMPUTED[:1]), ids=str)
def test_disable_recompute_changes_no_bit(backend, device, call):
    grads = []
    for flag in (False, True):
        tensors = with_grad(call.tensors(device))
        o, final_state = run(call, backend, device, tensors, disable_recompute=flag)
        leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
        grads.append([o, final_state, *torch.autograd.grad(o.float().sum() + final_state.sum(), leaves)])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("call", slow_but(REPEATED, REPEATED[:1]), ids=str)
def test_two_runs_give_the_same_bits(backend, device, call):
    runs = []
    for _ in range(2):
        tensors = with_grad(call.tensors(device))
        o, final_state = run(call, backend, device, tensors)
        leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
        runs.append([o, final_state, *torch.autograd.grad(o.float().sum() + final_state.sum(), leaves)])
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cut", slow_but([1, 16, 37, 64, 69], [37, 64]))
@pytest.mark.parametrize("gate", ["log", "bounded"])
def test_a_sequence_may_be_split_anywhere(backend, device, cut, gate):
    call = KdaCall(T=70, gate=gate)
    tensors = call.tensors(device)
    o, final_state = run(call, backend, device, tensors)
    per_token = ("q", "k", "v", "g", "beta")
    first = {n: t[:, :cut] if n in per_token else t for n, t in tensors.items()}
    o_first, state = run(call, backend, device, first)
    second = {n: t[:, cut:] if n in per_token else t for n, t in tensors.items()} | {"initial_state": state}
    o_second, last_state = run(call, backend, device, second)
    assert relative_error(torch.cat([o_first, o_second], 1), o) < TOLERANCE[call.dtype]
    assert relative_error(last_state, final_state) < TOLERANCE[call.dtype]


def test_packed_equals_separate(backend, device):
    call = KdaCall(lens=(5, 0, 70, 33))
    tensors = call.tensors(device)
    o, final_state = run(call, backend, device, tensors)
    start = 0
    for n, length in enumerate(call.lens):
        rows = slice(start, start + length)
        alone = {k: t[:, rows] if k in ("q", "k", "v", "g", "beta") else t for k, t in tensors.items()}
        alone |= {"cu_seqlens": None, "initial_state": tensors["initial_state"][n : n + 1]}
        o_alone, state_alone = run(call, backend, device, alone)
        if length:
            assert relative_error(o[:, rows], o_alone) < TOLERANCE[call.dtype]
        assert relative_error(final_state[n], state_alone[0]) < TOLERANCE[call.dtype]
        start += length


def test_grouped_heads_equal_repeated_heads(backend, device):
    call = KdaCall(H=2, HV=6, T=40)
    tensors = call.tensors(device)
    repeated = tensors | {n: tensors[n].repeat_interleave(3, dim=2) for n in ("q", "k")}
    for a, b in zip(run(call, backend, device, tensors), run(call, backend, device, repeated)):
        assert relative_error(a, b) < TOLERANCE[call.dtype]


def test_strided_views_are_read_right(backend, device):
    call = KdaCall(H=2, HV=2, T=50)
    tensors = call.tensors(device)
    qkv = torch.stack([tensors[n] for n in ("q", "k", "v")], dim=2)  # [B, T, 3, H, K]
    views = tensors | {n: qkv[:, :, i] for i, n in enumerate(("q", "k", "v"))}
    views["g"] = tensors["g"].transpose(-1, -2).contiguous().transpose(-1, -2)  # last dimension not contiguous
    views["beta"] = tensors["beta"].transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(run(call, backend, device, views), run(call, backend, device, tensors)):
        assert torch.equal(a, b)


def test_strided_parameters_and_offsets_are_read_right(backend, device):
    call = KdaCall(gate="softplus", lens=(40, 0, 30), HV=2)
    tensors = call.tensors(device)
    tensors["dt_bias"] = tensors["dt_bias"][:1].expand(2, -1)
    views = dict(tensors)
    tensors["dt_bias"] = tensors["dt_bias"].contiguous()
    for name in ("A_log", "cu_seqlens"):
        views[name] = torch.stack([tensors[name], tensors[name] + 1], dim=1)[:, 0]  # every second number
        assert not views[name].is_contiguous()
    for a, b in zip(run(call, backend, device, views), run(call, backend, device, tensors)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("call", [KdaCall(T=130, B=2), KdaCall(lens=(130, 0, 64, 10)), KdaCall(K=20, V=44)], ids=str)
def test_intermediate_states_are_those_at_chunk_starts(backend, device, call):
    tensors = call.tensors(device)
    _, _, h = run(call, backend, device, tensors, return_intermediate_states=True)
    lengths = [call.T] * call.B if call.lens is None else list(call.lens)
    wanted = []
    for n, length in enumerate(lengths):
        row, start = (n, 0) if call.lens is None else (0, sum(lengths[:n]))
        for cut in range(0, length, 64):
            part = {
                k: t[row : row + 1, start : start + cut] if k in ("q", "k", "v", "g", "beta") else t for k, t in tensors.items()
            }
            part |= {"cu_seqlens": None, "initial_state": tensors["initial_state"][n : n + 1]}
            wanted.append(run_reference(call, part)[1][0])
    assert h.flatten(0, 1).shape == (len(wanted), call.HV, call.V, call.K)
    assert relative_error(h.flatten(0, 1), torch.stack(wanted)) < 2 * TOLERANCE[call.dtype]


@pytest.mark.parametrize(
    "call",
    [KdaCall(T=100), KdaCall(lens=(10, 0, 90), K=64), KdaCall(T=40, gate="softplus", norm=True), KdaCall(K=60, V=44)],
    ids=str,
)
def test_the_affine_map_takes_first_states_to_last_ones(backend, device, call):
    tensors = call.tensors(device)
    options = KdaOptions(**{n: v for n, v in call.switches().items()})
    problem, x = check_kda(KdaInputs(**tensors), options)
    M, B = select("kda_transition", problem, backend)(problem, x)
    assert relative_error(x.initial_state @ M + B, run_reference(call, tensors)[1]) < TOLERANCE[call.dtype]


@pytest.mark.parametrize("decay", [1e-4, 50.0])
def test_gates_that_alternate_between_channels(backend, device, decay):
    """Token by token, half of the channels keep everything and the other half nothing."""
    call = KdaCall(T=80, decay=decay)
    tensors = with_grad(call.tensors(device))
    with torch.no_grad():
        token = torch.arange(80, device=device)[None, :, None, None]
        channel = torch.arange(call.K, device=device)
        tensors["g"].mul_((token + channel) % 2)
    want_o, want_state = run_reference(call, tensors)
    o, state = run(call, backend, device, tensors)
    assert relative_error(o, want_o) < TOLERANCE[call.dtype]
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    wanted = torch.autograd.grad(want_o.sum() + want_state.sum(), leaves)
    for got, want in zip(torch.autograd.grad(o.sum() + state.sum(), leaves), wanted):
        assert relative_error(got, want) < GRADIENT_TOLERANCE[call.dtype]


@pytest.mark.parametrize("scalar_gate", [False, True])
@pytest.mark.parametrize("strongest", [torch.finfo(torch.float32).min, -float("inf")])
def test_a_token_may_forget_everything(backend, device, strongest, scalar_gate):
    """As callers do that begin anew inside of a sequence: weak decays around it keep their digits."""
    call = KdaCall(T=70, decay=0.01, scalar_gate=scalar_gate, K=16, V=16, HV=1)
    tensors = call.tensors(device)
    tensors["g"][:, [0, 9, 40, 66]] = strongest
    want_o, want_state = run_reference(call, tensors)
    o, state = run(call, backend, device, tensors)
    assert relative_error(o, want_o) < TOLERANCE[call.dtype] and relative_error(state, want_state) < TOLERANCE[call.dtype]


def test_no_tokens_at_all(backend, device):
    call = KdaCall(T=0)
    tensors = call.tensors(device)
    o, final_state = run(call, backend, device, tensors)
    assert o.shape == (1, 0, call.HV, call.V)
    assert torch.equal(final_state, tensors["initial_state"])


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 70)])
def test_a_batch_without_tokens_or_rows_on_a_pool(backend, device, B, T):
    """Nothing to do, also for a pool; states at chunk starts have the shape that B and T say."""
    call = KdaCall(B=B, T=T, initial_state=False)
    pool = torch.randn(3, call.HV, call.V, call.K, device=device)
    before = pool.clone()
    of_pool = {"state_pool": pool, "initial_state_indices": torch.arange(B, device=device)}
    tensors = {name: t for name, t in call.tensors(device).items() if t is not None}
    o, _, h = cula.cula_kda(**tensors, **of_pool, return_intermediate_states=True, backend=backend)
    assert o.shape == (B, T, call.HV, call.V) and h.shape == (B, -(-T // 64), call.HV, call.V, call.K)
    assert torch.equal(pool, before)
