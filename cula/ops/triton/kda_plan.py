# SPDX-License-Identifier: Apache-2.0
"""How a KDA problem is cut into chunks and chains, and in which precision its products run."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cula.kda.problem import KdaProblem

from .configs import KdaConfig, kda_config, kda_segment_chunks, multiprocessors
from .kda_common import CHUNK, span_table_kernel


class Plan(NamedTuple):
    """How a problem is cut into chunks and chains."""

    config: KdaConfig
    NT: int  # chunks of a sequence (dense input)
    num_chunks: int  # in all; an upper bound for packed input
    chunk_seq: Tensor | None  # packed: sequence of each chunk, and first chunk of each sequence
    chunk_base: Tensor | None
    seg: int  # chunks in a segment; 0: a chain is a whole sequence
    NS: int  # segments of a sequence (dense input)
    num_chains: int
    seg_seq: Tensor | None
    seg_base: Tensor | None


def plan_kda(p: KdaProblem, device: torch.device, cu_seqlens: Tensor | None) -> Plan:
    config = kda_config(p.dtype, p.K, p.V, p.sm, is_safe(p))
    NT = triton.cdiv(p.T, CHUNK)
    seg = kda_segment_chunks(p, multiprocessors(device), config.state.BV) if p.T else 0
    if not p.is_packed:
        NS = triton.cdiv(NT, seg) if seg else 1
        return Plan(config, NT, p.B * NT, None, None, seg, NS, p.B * NS, None, None)
    assert cu_seqlens is not None
    num_chunks = p.T // CHUNK + p.N
    chunk_seq, chunk_base = _span_table(cu_seqlens, p.N, CHUNK, num_chunks)
    num_chains, seg_seq, seg_base = p.N, None, None
    if seg:
        num_chains = p.T // (seg * CHUNK) + p.N
        seg_seq, seg_base = _span_table(cu_seqlens, p.N, seg * CHUNK, num_chains)
    return Plan(config, NT, num_chunks, chunk_seq, chunk_base, seg, 1, num_chains, seg_seq, seg_base)


def _span_table(cu_seqlens: Tensor, N: int, span: int, capacity: int) -> tuple[Tensor, Tensor]:
    span_seq = torch.empty(capacity, dtype=torch.int32, device=cu_seqlens.device)
    span_base = torch.empty(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    span_table_kernel[(N,)](cu_seqlens, span_seq, span_base, N, capacity, span, BLOCK=256)
    return span_seq, span_base


def score_precision(p: KdaProblem) -> tuple[tl.dtype, str]:
    """Operand type of the scores. Unit vectors fit float16, which has tf32's mantissa at twice its speed."""
    if p.dtype == torch.float32:
        return tl.float32, "tf32x3"
    if p.dtype == torch.float16 or p.options.use_qk_l2norm_in_kernel:
        return tl.float16, "tf32"
    return tl.float32, "tf32"


def pair_precision(p: KdaProblem) -> tl.dtype:
    """Operand type of the gradients of scores, which come in units of their largest."""
    SDT, _ = score_precision(p)
    return SDT if tl.float16 == SDT or p.dtype == torch.float32 else tl.bfloat16


def decay_precision(p: KdaProblem) -> tl.dtype:
    """Operand type of the sums of log decays. Rounding g to float16's mantissa changes o by 5e-5; sums stay in float32."""
    return tl.float32 if p.dtype == torch.float32 else tl.float16


def state_precision(p: KdaProblem) -> str:
    return "tf32x3" if p.dtype == torch.float32 else "tf32"  # no effect on 16-bit operands


def is_safe(p: KdaProblem) -> bool:
    return p.gate == "bounded" or p.options.safe_gate


def beta_max(p: KdaProblem) -> float:
    return 2.0 if p.options.allow_neg_eigval else 1.0
