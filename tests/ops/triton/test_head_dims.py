# SPDX-License-Identifier: Apache-2.0
"""Head dims that are no powers of two in what only this backend has: segments, their scan, and parameters in their own dtypes.

That such dims are right elsewhere is among the calls of `tests/ops/`.
"""

import pytest
import torch

pytest.importorskip("triton")

from cula import reference
from cula.core.decode_checks import describe_decode
from cula.core.problem import DecodeOptions
from cula.kda.family import FAMILY
from cula.kda.problem import KdaDecodeInputs, KdaInputs, KdaOptions, check_kda
from cula.ops.triton import decode, kda, kda_schedule
from cula.reference import relative_error
from tests.conftest import HAS_GPU
from tests.support.calls import GRADIENT_TOLERANCE, TOLERANCE, KdaCall
from tests.support.slow import slow_but

pytestmark = [pytest.mark.usefixtures("interpreted"), *([pytest.mark.gpu] if HAS_GPU else [])]


ROUNDING = 1e-5


@pytest.fixture
def interpreted(request):
    if not HAS_GPU:
        request.getfixturevalue("_triton_interpreter")


@pytest.fixture
def in_segments(monkeypatch):
    """Every chunk is a segment."""
    kda_schedule.schedule_kda.cache_clear()
    monkeypatch.setattr(kda_schedule, "kda_segment_chunks", lambda problem, num_sms, BV: 1)
    yield
    kda_schedule.schedule_kda.cache_clear()


@pytest.mark.parametrize(
    "call",
    [
        KdaCall(T=150, HV=1, K=60, V=44),
        pytest.param(KdaCall(lens=(0, 66, 3, 130), HV=1, K=20, V=100, gate="bounded"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_segments(in_segments, device, call):
    tensors = call.tensors(device)
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if t is not None and t.is_floating_point()}
    problem, x = check_kda(KdaInputs(**tensors), KdaOptions(**call.switches(), output_final_state=True))
    want_o, want_state = reference.kda(**tensors, **call.switches())
    torch.manual_seed(0)
    do, dht = torch.randn(want_o.shape, device=device), torch.randn(want_state.shape, device=device)
    wanted = torch.autograd.grad([want_o, want_state], [*leaves.values()], [do.to(want_o.dtype), dht.to(want_state.dtype)])
    with torch.no_grad():
        forward = kda.kda_fwd(problem, x)
        grads = kda.kda_bwd(problem, x, (), do, dht)
        M, B = kda.kda_transition(problem, x)
    assert relative_error(forward.o, want_o) < TOLERANCE[call.dtype]
    assert relative_error(forward.final_state, want_state) < TOLERANCE[call.dtype]
    assert relative_error(x.initial_state @ M + B, want_state) < TOLERANCE[call.dtype]
    got = dict(zip(KdaInputs._fields, grads))
    for name, want in zip(leaves, wanted):
        assert relative_error(got[name], want) < GRADIENT_TOLERANCE[call.dtype], name


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16, torch.float16], [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("scalar_gate", [False, True])
def test_parameters_are_read_in_their_own_dtype(device, dtype, scalar_gate):
    """No copy of them in float32 is needed: the bits are those of one, but where a GPU's compiler makes other kernels."""
    call = KdaCall(T=5, K=36, gate="softplus", scalar_gate=scalar_gate)
    problem, x = check_kda(KdaInputs(**call.tensors(device)), KdaOptions(**call.switches(), output_final_state=True))
    short = x._replace(A_log=x.A_log.to(dtype), dt_bias=x.dt_bias.to(dtype))
    long = x._replace(A_log=short.A_log.float(), dt_bias=short.dt_bias.float())
    do = torch.ones_like(x.v)
    runs = [(*kda.kda_fwd(problem, x)[:2], *kda.kda_bwd(problem, x, (), do, None)) for x in (short, long)]
    for a, b in zip(*runs):
        assert relative_error(a, b) < ROUNDING if HAS_GPU else torch.equal(a, b)

    outputs = []
    for x in (short, long):
        pool = torch.ones(1, call.HV, call.V, call.K, device=device)
        rows = KdaDecodeInputs(x.q, x.k, x.v, pool, None, x.g, x.beta, x.A_log, x.dt_bias)
        _, problem, y, *_ = describe_decode(FAMILY, rows, DecodeOptions(use_gate_in_kernel=True), None, "test")
        y = y._replace(A_log=x.A_log, dt_bias=x.dt_bias)
        outputs.append((decode.decode(problem, y), pool))
    for a, b in zip(*outputs):
        assert torch.equal(a, b)
