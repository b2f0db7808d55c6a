# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from cula import reference
from cula.lightning import linear_attention_decode
from cula.reference import relative_error
from tests.support.calls import LightningCall


@pytest.mark.parametrize("flat_pool", [False, True])
def test_linear_attention_decode_honours_slots(flat_pool):
    call = LightningCall(T=1, B=3, H=2, HV=2, K=16, V=16)
    t = call.tensors()
    pool = torch.randn(6, 2, 16, 16)
    slots = torch.tensor([5, -1, 2], dtype=torch.int32)
    want_o, want_state = reference.lightning(t["q"], t["k"], t["v"], t["decay"], initial_state=pool[[5, 0, 2]], scale=0.5)
    before = pool.clone()
    q, k, v = (t[n][:, 0].contiguous() for n in ("q", "k", "v"))
    out = torch.full_like(v, float("nan"))
    s = pool.view(-1, 16, 16) if flat_pool else pool
    strides = [x.stride(0) for x in (q, k, v, s, out)]
    linear_attention_decode(q, k, v, s, out, 0.5, *strides, slots, t["decay"].view(2, 1, 1), 16, 16, 16)
    assert relative_error(out[[0, 2]], want_o[[0, 2], 0]) < 1e-5
    assert not out[1].any()
    assert relative_error(pool[[5, 2]], want_state[[0, 2]]) < 1e-5
    assert torch.equal(pool[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
