# SPDX-License-Identifier: Apache-2.0
"""The backward of Gated DeltaNet on the CuTe kernels: what they serve, and their launch.

`sm90/gdn_bwd.py` launches three kernels, and `gdn_bwd_abi.py` describes what they are given. The forward keeps nothing for them
but its inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cula import settings
from cula.gdn.problem import GdnInputs, GdnProblem
from cula.kda.problem import KdaGrads
from cula.ops.cute.archs import target_of
from cula.ops.cute.gdn_abi import K, V
from cula.ops.cute.gdn_bwd_abi import BACKWARD, OF_A, OF_BIAS, SHARES, workspace_bytes
from cula.ops.cute.kda_bwd_schedule import Schedule, schedule_on
from cula.ops.cute.tensors import address, as_states, as_tokens, stream_of
from cula.ops.cute.toolchain.loader import load

OPS = ("gdn_bwd", "gdn_transition", "gdn_state_grad")  # the latter two are KDA's, with one gate a head
TOKENS = ("q", "k", "v", "g", "beta")


def why_not(problem: GdnProblem) -> str | None:
    """Why the backward does not serve a call whose forward the kernels would take, as a sentence; None if it does."""
    if not settings.use_unproven():
        return "has a backward that has never run on hardware (docs/gdn-backward.md): CULA_UNPROVEN=1 uses it"
    if not problem.options.use_qk_l2norm_in_kernel:
        return "has a backward for keys that are normalised in the kernel: use_qk_l2norm_in_kernel=True"
    return None


def variant(problem: GdnProblem) -> str:
    """The name of the kernels."""
    return f"bwd_gdn_{problem.gate}"


def gdn_bwd(problem: GdnProblem, x: GdnInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """Gradients of every input from those of the outputs and (where not None) of the final states."""
    return run(problem, x, do, dht, schedule_on(problem, x.q.device))


def run(problem: GdnProblem, x: GdnInputs, do: Tensor, dht: Tensor | None, made_for: Schedule) -> KdaGrads:
    """The same with a given schedule."""
    p, device, chunks = problem, x.q.device, made_for.chunks
    x = x._replace(g=x.g.float())  # one number a token and head
    x = x._replace(
        **{name: as_tokens(getattr(x, name)) for name in TOKENS},
        initial_state=None if x.initial_state is None else as_states(x.initial_state),
    )
    do = as_tokens(do)
    dht = None if dht is None else as_states(dht.float().contiguous())

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    dq, dk = (new(p.B, p.T, p.H, K, dtype=p.dtype) for _ in range(2))
    dv = new(p.B, p.T, p.HV, V, dtype=p.dtype)
    dg, dbeta = new(p.B, p.T, p.HV), new(p.B, p.T, p.HV, dtype=p.beta_dtype)
    dh0 = None if x.initial_state is None else new(p.N, p.HV, V, K)
    shares = torch.zeros((chunks, p.HV, SHARES), device=device)  # packed sequences leave some numbers of chunks unused
    none = _no_gate(device, p.HV)
    tensors: dict[str, Tensor | None] = {name: getattr(x, name) for name in TOKENS}
    tensors |= {"A_log": none if x.A_log is None else x.A_log, "dt_bias": none if x.dt_bias is None else x.dt_bias}
    tensors |= {"do": do, "h0": x.initial_state, "dht": dht, "cu": x.cu_seqlens, "dq": dq, "dk": dk, "dv": dv, "dg": dg}
    tensors |= {"dbeta": dbeta, "shares": shares, "dh0": dh0}
    tensors["workspace"] = new(workspace_bytes(chunks * p.HV, made_for.transitions * p.HV), dtype=torch.uint8)
    addresses = BACKWARD.pack_addresses({name: address(t) for name, t in tensors.items()})
    numbers = BACKWARD.pack_numbers(_numbers(p, x, do, dht, made_for))
    load(variant(p), target_of(p.sm))(*addresses, *numbers, stream_of(device))
    of_chunks = shares.sum(0)  # [HV, SHARES]
    dA_log = None if x.A_log is None else of_chunks[:, OF_A].contiguous()
    ddt_bias = None if x.dt_bias is None else of_chunks[:, OF_BIAS].contiguous()
    return KdaGrads(dq, dk, dv, dg.to(p.g_dtype), dbeta, dA_log, ddt_bias, dh0)


def _numbers(p: GdnProblem, x: GdnInputs, do: Tensor, dht: Tensor | None, made_for: Schedule) -> dict[str, Any]:
    """The arguments that are not addresses, by name."""
    strides = {}
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("do", do)):
        strides[f"{name}_token"], strides[f"{name}_head"] = t.stride()[1:3]
    beta_top = 0.0
    if p.options.use_beta_sigmoid_in_kernel:
        beta_top = 2.0 if p.options.allow_neg_eigval else 1.0
    return strides | {
        "beta_token": x.beta.stride(1),
        "T": p.B * p.T,
        "N": p.N,
        "H": p.H,
        "HV": p.HV,
        "scale": p.scale,
        "beta_top": beta_top,
        "beta_bits": 8 * x.beta.element_size(),
        "has_h0": int(x.initial_state is not None),
        "has_dht": int(dht is not None),
        "has_dh0": int(x.initial_state is not None),
        "length": 0 if p.is_packed else p.T,
        "halvings": (p.N - 1).bit_length(),
        **made_for.numbers(),
    }


@functools.cache
def _no_gate(device: torch.device, HV: int) -> Tensor:
    """A_log and dt_bias where a call has none."""
    return torch.zeros(HV, dtype=torch.float32, device=device)
