# SPDX-License-Identifier: Apache-2.0
"""KDA on the CuTe kernels: which variant, how sequences are cut, and the launch.

`common/kda_prepare.py` and `sm90/kda_state.py` say what the kernels compute. Forward only: the gradient is another backend's.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from cula.contract import KdaInputs, KdaProblem
from cula.ops import KdaForward
from cula.ops.cute.loader import load
from cula.ops.cute.tensors import as_tokens, no_places, no_states, stream_of

ARCH = "sm_90a"
CHUNK, K, V = 64, 128, 128
CHUNK_BYTES = 3 * CHUNK * K * 2 + 2 * CHUNK * CHUNK * 2 + 256 * 4  # of the workspace, for each chunk and head: see common/kda.py
MAP_BYTES = V * K * 4 + 2 * K * K * 2  # for each segment and head: B float32, M as a pair of 16-bit values

SHORT = {torch.bfloat16: "bf16", torch.float32: "f32"}


class Cut(NamedTuple):
    """How many numbers chunks and segments take (`common/kda_cut.py`)."""

    chunks: int
    segments: int
    per_segment: int  # chunks
    has_maps: bool  # some sequence may be cut

    def bytes(self, HV: int) -> int:
        return HV * (self.chunks * CHUNK_BYTES + (self.segments * MAP_BYTES if self.has_maps else 0))


def cut(problem: KdaProblem, num_sms: int) -> Cut:
    """Segments enough to give every multiprocessor one, but no more than about the square root of a sequence's chunks: each
    costs the later ones a step where the gate forgets slowly, and a chunk or two walked twice where it forgets fast."""
    p = problem
    mean = -(-p.T // (CHUNK * (p.N if p.is_packed else 1)))  # chunks of a sequence, as if all were alike
    room = num_sms // (p.N * p.HV)
    wanted = max(1, min(room, -(-mean // max(1, round(0.75 * math.sqrt(mean))))))
    per_segment = -(-mean // wanted)
    if p.is_packed:
        longest = -(-p.T // CHUNK)
        chunks = p.T // CHUNK + p.N
        if wanted == 1:
            return Cut(chunks, p.N, longest + 1, False)  # longer than any sequence
        return Cut(chunks, p.T // (CHUNK * per_segment) + p.N, per_segment, True)
    return Cut(p.B * mean, p.B * -(-mean // per_segment), per_segment, wanted > 1)


@functools.lru_cache(maxsize=1024)
def _cut_on(problem: KdaProblem, device: torch.device) -> Cut:
    return cut(problem, torch.cuda.get_device_properties(device).multi_processor_count)


def variant(problem: KdaProblem) -> str:
    """The kernel's name. fp16 operands where keys and queries are normalised, and so within their range."""
    dtype = "f16" if problem.options.use_qk_l2norm_in_kernel else "bf16"
    gate = "gate" if problem.options.use_gate_in_kernel else "log"
    return f"kda_{dtype}_{gate}_{SHORT[problem.g_dtype]}_beta_{SHORT[problem.beta_dtype]}"


def kda_fwd(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> KdaForward:
    """Outputs and, where asked for, the final state."""
    ht = None
    if problem.options.output_final_state:
        ht = torch.empty((problem.N, problem.HV, V, K), dtype=torch.float32, device=x.q.device)
    return KdaForward(run(problem, x, _cut_on(problem, x.q.device), ht, out), ht, None)


def run(problem: KdaProblem, x: KdaInputs, cut: Cut, ht: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Launch with a given cut; returns o."""
    p, options, device = problem, problem.options, x.q.device
    o = torch.empty((p.B, p.T, p.HV, V), dtype=torch.bfloat16, device=device) if out is None else out
    o_tokens = as_tokens(o)  # a copy where TMA cannot write to `out`
    work = torch.empty(cut.bytes(p.HV), dtype=torch.uint8, device=device)
    beta_top = 0.0
    if options.use_beta_sigmoid_in_kernel:
        beta_top = 2.0 if options.allow_neg_eigval else 1.0
    no_A_log, no_bias = _no_gate(device, p.HV)
    load(variant(p), ARCH)(
        as_tokens(x.q),
        as_tokens(x.k),
        as_tokens(x.v),
        as_tokens(x.g),
        as_tokens(x.beta),
        no_A_log if x.A_log is None else x.A_log,
        no_bias if x.dt_bias is None else x.dt_bias,
        o_tokens,
        no_states(device, V, K) if x.initial_state is None else x.initial_state.contiguous(),
        no_states(device, V, K) if ht is None else ht,
        no_places(device) if x.cu_seqlens is None else x.cu_seqlens,
        work,
        p.scale,
        options.lower_bound or 0.0,
        beta_top,
        int(x.initial_state is not None),
        int(ht is not None),
        0 if p.is_packed else p.T,
        (p.N - 1).bit_length(),
        cut.chunks,
        cut.segments,
        cut.per_segment,
        int(cut.has_maps),
        stream_of(device),
    )
    if o_tokens is not o:
        o.copy_(o_tokens)
    return o


@functools.cache
def _no_gate(device: torch.device, HV: int) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias where a call has none."""
    return torch.zeros(HV, dtype=torch.float32, device=device), torch.zeros((HV, K), dtype=torch.float32, device=device)
