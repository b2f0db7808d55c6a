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


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("q", lambda t: t[0], r"q has shape \[2, 8\]; expected three dimensions"),
        ("out", lambda _: None, "out is NoneType; expected a torch.Tensor"),
        ("s", lambda t: t[0, 0], r"s has shape \[16, 8\]; expected a pool"),
        ("decay_scales", lambda t: t[1:], r"decay_scales has shape \[1\]; expected the elements of \[H\] = \[2\]"),
    ],
)
def test_bad_tensors_are_named(name, bad, words):
    t = {"q": torch.randn(3, 2, 8), "k": torch.randn(3, 2, 8), "v": torch.randn(3, 2, 16), "s": torch.zeros(5, 2, 16, 8)}
    t |= {"out": torch.zeros(3, 2, 16), "s_offsets": torch.arange(3), "decay_scales": torch.ones(2), "softmax_scale": 1.0}
    unread = dict.fromkeys(
        ("stride_q", "stride_k", "stride_v", "stride_s", "stride_o", "HEAD_DIM", "K_SPLIT_DIM", "V_SPLIT_DIM"), 0
    )
    linear_attention_decode(**t, **unread)
    before = t["s"].clone()
    with pytest.raises(ValueError, match=f"linear_attention_decode: {words}"):
        linear_attention_decode(**t | {name: bad(t[name])}, **unread)
    assert torch.equal(t["s"], before)
