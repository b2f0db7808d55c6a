# SPDX-License-Identifier: Apache-2.0
"""What an adapter hands to its library, shown by a stand-in with the library's own signature."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cula.bench.cases import Case
from cula.bench.inputs import make
from cula.bench.peers import CudnnFrontend, Fla


def kimi_delta_attention(
    q,
    k,
    v,
    g,
    beta,
    cu_seqlens,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    batch_invariant=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    gate_lower_bound=None,
    gate_domain="log",
    a_log=None,
    dt_bias=None,
):
    """Refuses what cuDNN frontend 1.32 refuses on Hopper, or would copy."""
    tokens, HV = v.shape[:2]
    assert all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in (q, k, v))
    assert g.shape == (tokens, HV, q.shape[-1]) and beta.shape == (tokens, HV)
    assert g.dtype == beta.dtype == torch.float32 and cu_seqlens.dtype == torch.int32
    assert safe_gate == (a_log is not None) == (dt_bias is not None)
    if a_log is not None:
        assert a_log.shape == (HV,) and dt_bias.shape == (HV, q.shape[-1])
    N = cu_seqlens.numel() - 1
    return v + 1, v.new_zeros(N if output_final_state else 0, HV, v.shape[-1], q.shape[-1], dtype=torch.float32)


@pytest.mark.parametrize("flags", [("gate", "sigmoid", "norm", "h0", "ht"), ()])
@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_frontend_is_called_as_it_wants(monkeypatch, packed, flags):
    module = SimpleNamespace(kimi_delta_attention=kimi_delta_attention)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(linear_attention=module))
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention", module)
    case = Case("kda-prefill", "kda_prefill", (5, 7) if packed else (6, 6), 2, 4, packed=packed, flags=flags)
    assert CudnnFrontend().why_not(case) is None
    x = make(case, torch.device("cpu"))
    call = CudnnFrontend().prepare(x)
    outputs = call.read(call.run())
    assert torch.equal(outputs["o"], x.v + 1)
    assert ("state" in outputs) == ("ht" in flags)


@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_frontend_trains_on_what_its_backward_takes(monkeypatch, packed):
    def train(q, k, v, g, beta, cu_seqlens):
        assert g.dtype == beta.dtype == torch.float32 and g.dim() == 3 and cu_seqlens[-1] == len(q)
        return v + (q * k * g).sum(-1, keepdim=True).to(v.dtype) * beta[..., None].to(v.dtype), None

    module = SimpleNamespace(kimi_delta_attention=train)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(linear_attention=module))
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention", module)
    case = Case("kda-train", "kda_train", (5, 7) if packed else (6, 6), 2, 2, packed=packed, flags=("f32",))
    assert CudnnFrontend().why_not(case) is None
    assert "float32" in CudnnFrontend().why_not(replace(case, flags=("gate", "sigmoid", "norm")))
    x = make(case, torch.device("cpu"))
    call = CudnnFrontend().prepare(x)
    outputs = call.read(call.run())
    assert set(outputs) == {"o", "dq", "dk", "dv", "dg", "dbeta"}
    assert outputs["o"].shape == x.v.shape and torch.equal(outputs["dv"], x.do) and outputs["dg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        ("kda_prefill", ("fla.ops.kda.backends.flash_kda", "FlashKDABackend")),
        ("gdn_prefill", ("fla.ops.gated_delta_rule.backends.flash_qla", "FlashQLABackend")),
    ],
)
def test_fla_is_measured_with_its_own_kernels(monkeypatch, op, backend):
    """Where other libraries are installed it would hand calls to them, and they would be measured twice."""
    for name in Fla.switches_off:
        monkeypatch.setenv(name, "1")
    module, name = backend
    other = getattr(pytest.importorskip(module), name)()
    assert other.is_enabled()
    Fla().prepare(make(Case(op.replace("_", "-"), op, (5,), 2, 2), torch.device("cpu")))
    assert not other.is_enabled()
