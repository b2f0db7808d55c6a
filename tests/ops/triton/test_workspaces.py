# SPDX-License-Identifier: Apache-2.0
"""Everything that is read has been written: new memory holds NaN here, and no result does."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from cula.kda.problem import KdaInputs, KdaOptions, check_kda
from cula.lightning.problem import LightningInputs, LightningOptions, check_lightning
from cula.ops.triton import kda, lightning, memory
from tests.conftest import HAS_GPU
from tests.support.calls import KdaCall, LightningCall

DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []


@pytest.fixture(autouse=True)
def new_memory_is_nan(monkeypatch, request):
    if not HAS_GPU:
        request.getfixturevalue("_triton_interpreter")

    def new(shape, dtype):
        return torch.full(shape, float("nan") if dtype.is_floating_point else 2**30, dtype=dtype, device=DEVICE)

    monkeypatch.setattr(memory, "_on_gpu", new)
    monkeypatch.setattr(memory, "_elsewhere", lambda device, shape, dtype: new(shape, dtype))


KDA = {
    "a short second half": KdaCall(gate="bounded", beta="sigmoid", T=70, HV=1),
    "packed": KdaCall(gate="softplus", norm=True, lens=(70, 0, 3)),
    "packed, one gate a head": KdaCall(gate="softplus", scalar_gate=True, lens=(20, 0, 47)),
}


@pytest.mark.parametrize("name", KDA)
def test_kda(name):
    call = KDA[name]
    problem, x = check_kda(KdaInputs(**call.tensors(DEVICE)), KdaOptions(**call.switches(), output_final_state=True))
    problem = replace(problem, needs_grad=True)
    o, ht, _, saved = kda.kda_fwd(problem, x)
    grads = kda.kda_bwd(problem, x, saved, torch.ones_like(o), torch.ones_like(ht))
    for what, t in {"o": o, "ht": ht, **grads._asdict()}.items():
        assert t is None or t.isfinite().all(), what


def test_lightning():
    call = LightningCall(lens=(20, 0, 47))
    problem, x = check_lightning(LightningInputs(**call.tensors(DEVICE)), LightningOptions(output_final_state=True))
    o, ht, *_ = lightning.lightning_fwd(problem, x)
    grads = lightning.lightning_bwd(problem, x, (), torch.ones_like(o), torch.ones_like(ht))
    for t in (o, ht, *(d for d in grads if d is not None)):
        assert t is None or t.isfinite().all()
