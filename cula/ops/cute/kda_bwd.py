# SPDX-License-Identifier: Apache-2.0
"""The KDA backward on the CuTe kernels: what they serve, and their launch.

`sm90/kda_bwd.py` launches three kernels, and `kda_bwd_abi.py` describes what they are given. The forward keeps nothing for them
but its inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cula import settings
from cula.core.constants import CHUNK
from cula.kda.problem import KdaGrads, KdaInputs, KdaProblem
from cula.ops.cute.archs import target_of
from cula.ops.cute.kda_abi import K, V
from cula.ops.cute.kda_bwd_abi import BACKWARD, workspace_bytes
from cula.ops.cute.tensors import address, as_states, as_tokens, stream_of
from cula.ops.cute.toolchain.loader import load

SHORT = {torch.bfloat16: "bf16", torch.float32: "f32"}


def why_not(problem: KdaProblem) -> str | None:
    """Why the backward does not serve a call whose forward the kernels would take, as a sentence; None if it does."""
    p = problem
    if not settings.use_hopper_backward():
        return "has a backward whose present form has not run on hardware (docs/kda-backward.md): CULA_HOPPER_BWD=1 uses it"
    if p.gate == "softplus":
        return "has no backward for a softplus gate: pass lower_bound, or log decays"
    if p.has_scalar_gate:
        return "has no backward for one gate a head"
    if not p.options.use_qk_l2norm_in_kernel:
        return "has a backward for keys that are normalised in the kernel: use_qk_l2norm_in_kernel=True"
    if not p.options.use_beta_sigmoid_in_kernel:
        return "has a backward for raw beta: use_beta_sigmoid_in_kernel=True"
    return None


def variant(problem: KdaProblem) -> str:
    """The name of the kernels."""
    p = problem
    log = "safe" if p.options.safe_gate and p.g_dtype is torch.bfloat16 else "log"
    return f"bwd_kda_f16_{'gate' if p.gate == 'bounded' else log}_{SHORT[p.g_dtype]}"


def num_chunks(problem: KdaProblem) -> int:
    """The numbers that chunks take; an upper bound of packed ones (`common/varlen_index.py`)."""
    p = problem
    return p.T // CHUNK + p.N if p.is_packed else p.B * -(-p.T // CHUNK)


def kda_bwd(problem: KdaProblem, x: KdaInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """Gradients of every input from those of the outputs and (where not None) of the final states."""
    p, device = problem, x.q.device
    x = x._replace(
        q=as_tokens(x.q),
        k=as_tokens(x.k),
        v=as_tokens(x.v),
        g=as_tokens(x.g),
        beta=as_tokens(x.beta),
        initial_state=None if x.initial_state is None else as_states(x.initial_state),
    )
    do = as_tokens(do)
    dht = None if dht is None else as_states(dht.float().contiguous())
    chunks, is_shared = num_chunks(p), p.H != p.HV

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    of_keys = (p.B, p.T, p.HV if is_shared else p.H, K)
    dq, dk = (new(*of_keys, dtype=torch.float32 if is_shared else p.dtype) for _ in range(2))
    dv, dg = new(p.B, p.T, p.HV, V, dtype=p.dtype), new(p.B, p.T, p.HV, K, dtype=p.g_dtype)
    dbeta, dA_log, ddt_bias = new(p.B, p.T, p.HV, dtype=p.beta_dtype), new(p.HV), new(p.HV, K)
    dh0 = None if x.initial_state is None else new(p.N, p.HV, V, K)
    no_A, no_bias = _no_gate(device, p.HV)
    tensors: dict[str, Tensor | None] = {
        **{name: getattr(x, name) for name in ("q", "k", "v", "g", "beta")},
        "A_log": no_A if x.A_log is None else x.A_log,
        "dt_bias": no_bias if x.dt_bias is None else x.dt_bias,
        "do": do,
        "h0": x.initial_state,
        "dht": dht,
        "cu": x.cu_seqlens,
        "dq": dq,
        "dk": dk,
        "dv": dv,
        "dg": dg,
        "dbeta": dbeta,
        "dA_log": dA_log,
        "ddt_bias": ddt_bias,
        "dh0": dh0,
        "workspace": new(workspace_bytes(chunks * p.HV), dtype=torch.uint8),
    }
    addresses = BACKWARD.pack_addresses({name: address(t) for name, t in tensors.items()})
    numbers = BACKWARD.pack_numbers(_numbers(p, x, do, dht, chunks))
    load(variant(p), target_of(p.sm))(*addresses, *numbers, stream_of(device))
    del tensors
    if is_shared:
        dq, dk = (t.view(p.B, p.T, p.H, -1, K).sum(-2).to(p.dtype) for t in (dq, dk))
    return KdaGrads(
        dq, dk, dv, dg, dbeta, None if x.A_log is None else dA_log, None if x.dt_bias is None else ddt_bias, dh0
    )  # fmt: skip


def _numbers(p: KdaProblem, x: KdaInputs, do: Tensor, dht: Tensor | None, chunks: int) -> dict[str, Any]:
    """The arguments that are not addresses, by name."""
    strides = {}
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("do", do)):
        strides[f"{name}_token"], strides[f"{name}_head"] = t.stride()[1:3]
    return strides | {
        "beta_token": x.beta.stride(1),
        "T": p.B * p.T,
        "N": p.N,
        "H": p.H,
        "HV": p.HV,
        "scale": p.scale,
        "lower": p.options.lower_bound or 0.0,
        "beta_top": 2.0 if p.options.allow_neg_eigval else 1.0,
        "beta_bits": 8 * x.beta.element_size(),
        "has_h0": int(x.initial_state is not None),
        "has_dht": int(dht is not None),
        "has_dh0": int(x.initial_state is not None),
        "length": 0 if p.is_packed else p.T,
        "halvings": (p.N - 1).bit_length(),
        "chunks": chunks,
    }


@functools.cache
def _no_gate(device: torch.device, HV: int) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias where a call has none."""
    return torch.zeros(HV, dtype=torch.float32, device=device), torch.zeros((HV, K), dtype=torch.float32, device=device)
