# SPDX-License-Identifier: Apache-2.0
"""How a KDA problem is cut into chunks and chains, in which precision its products run, and which kernels it takes.

All of it follows from the problem, so that it is made once and found again. The kernels depend on no length: a problem that
differs from an earlier one in T or N has its schedule made anew and finds the kernels of the earlier one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from cula.core.constants import CHUNK
from cula.kda.problem import KdaProblem

from .configs import KdaConfig, kda_config, kda_segment_chunks, padded
from .kda_intra import kda_intra_fwd_kernel
from .kda_intra_bwd import kda_finish_bwd_kernel, kda_scores_bwd_kernel, kda_shares_bwd_kernel, kda_states_bwd_kernel
from .kda_pairs_bwd import kda_pairs_bwd_kernel
from .kda_recurrence import kda_recurrence_bwd_kernel, kda_recurrence_fwd_kernel, kda_scan_kernel
from .launch import Variant
from .varlen import span_table

SHARES = 64  # of dA_log and ddt_bias that a program adds at once


class Kernels(NamedTuple):
    """The kernels of a call with their constants."""

    intra: Variant
    recurrence_fwd: Variant
    recurrence_bwd: Variant
    scan: Variant
    compose: Variant  # the scan that composes transitions
    scores_bwd: Variant
    states_bwd: Variant
    pairs_bwd: Variant
    finish_bwd: Variant
    shares_bwd: Variant


class Schedule(NamedTuple):
    """How a problem is cut into chunks and chains."""

    config: KdaConfig
    kernels: Kernels
    num_chunks: int  # in all; an upper bound for packed input
    seg: int  # chunks in a segment; 0: a chain is a whole sequence
    num_chains: int
    sizes: dict[str, int]  # what kernels of chunks take, by their names
    chain_sizes: dict[str, int]  # and those of chains


class Tables(NamedTuple):
    """Which sequence a chunk and a segment of packed input belong to (`varlen.span_table`); None for dense input."""

    chunk_seq: Tensor | None = None
    chunk_base: Tensor | None = None
    seg_seq: Tensor | None = None
    seg_base: Tensor | None = None


@functools.lru_cache(maxsize=1024)
def schedule_kda(p: KdaProblem, num_sms: int) -> Schedule:
    config = kda_config(p.dtype, p.K, p.V, p.sm, is_safe(p))
    NT = -(-p.T // CHUNK)
    of_one = p.alone() if p.options.batch_invariant else p
    seg = kda_segment_chunks(of_one, num_sms, config.recurrence_fwd.BV) if p.T else 0
    NS = -(-NT // seg) if seg else 1
    if p.is_packed:
        num_chunks, num_chains, NS = p.T // CHUNK + p.N, p.T // (seg * CHUNK) + p.N if seg else p.N, 1
    else:
        num_chunks, num_chains = p.B * NT, p.B * NS
    sizes = {"T": p.T, "TT": p.B * p.T, "NT": NT}
    return Schedule(config, _kernels_of(p, seg > 0), num_chunks, seg, num_chains, sizes, sizes | {"NS": NS, "seg": seg})


def tables(s: Schedule, p: KdaProblem, cu_seqlens: Tensor | None) -> Tables:
    """Made on the device, for kernels that follow on the same stream."""
    if cu_seqlens is None:
        return Tables()
    chunks = span_table(cu_seqlens, p.N, CHUNK, s.num_chunks)
    return Tables(*chunks, *(span_table(cu_seqlens, p.N, s.seg * CHUNK, s.num_chains) if s.seg else (None, None)))


def _kernels_of(p: KdaProblem, has_segments: bool) -> Kernels:
    o = p.options
    gate = (p.gate, p.has_scalar_gate, is_safe(p), o.use_qk_l2norm_in_kernel, o.use_beta_sigmoid_in_kernel, beta_max(p))
    return _kernels(p.dtype, p.sm, (p.H, p.HV, p.K, p.V), gate, p.is_packed, has_segments)


@functools.cache
def _kernels(
    dtype: torch.dtype,
    sm: tuple[int, int] | None,
    dims: tuple[int, int, int, int],
    gate: tuple[str, bool, bool, bool, bool, float],
    is_packed: bool,
    has_segments: bool,
) -> Kernels:
    H, HV, K, V = dims
    GATE, SCALAR, SAFE, NORM, SIGMOID, BETA_MAX = gate
    config = kda_config(dtype, K, V, sm, SAFE)
    SDT, score_IP = score_precision(dtype, NORM)
    GDT, IP = decay_precision(dtype), state_precision(dtype)
    chunk = {"HV": HV, "C": CHUNK, "IS_PACKED": is_packed}
    chain = {**chunk, "K": K, "V": V, "HAS_SEG": has_segments, "IP": IP}
    gated = {**chunk, "H": H, "K": K, "GATE": GATE, "SCALAR": SCALAR}
    activated = {"NORM": NORM, "SIGMOID": SIGMOID, "BETA_MAX": BETA_MAX}
    t = config.scan
    scan = {"HV": HV, "K": K, "V": V, "BK": padded(K), "BV": t.BV, "BS": t.BK, "IS_PACKED": is_packed, **t.launch()}
    return Kernels(
        intra=kda_intra_fwd_kernel.variant(
            **gated, **activated, BK=config.intra.BK, SAFE=SAFE, GDT=GDT, SDT=SDT, IP=score_IP, **config.intra.launch()
        ),
        recurrence_fwd=kda_recurrence_fwd_kernel.variant(
            **chain, BK=config.recurrence_fwd.BK, BV=config.recurrence_fwd.BV, **config.recurrence_fwd.launch()
        ),
        recurrence_bwd=kda_recurrence_bwd_kernel.variant(
            **chain, BK=config.recurrence_bwd.BK, BV=config.recurrence_bwd.BV, **config.recurrence_bwd.launch()
        ),
        scan=kda_scan_kernel.variant(**scan, IS_TRANSITION=False),
        compose=kda_scan_kernel.variant(**scan, IS_TRANSITION=True),
        scores_bwd=kda_scores_bwd_kernel.variant(**chunk, V=V, BV=config.scores_bwd.BV, IP=IP, **config.scores_bwd.launch()),
        states_bwd=kda_states_bwd_kernel.variant(
            **chunk, K=K, V=V, BK=config.states_bwd.BK, BV=config.states_bwd.BV, IP=IP, **config.states_bwd.launch()
        ),
        pairs_bwd=kda_pairs_bwd_kernel.variant(
            **gated, BK=config.pairs_bwd.BK, GDT=GDT, SDT=pair_precision(dtype, NORM), IP=IP, **config.pairs_bwd.launch()
        ),
        finish_bwd=kda_finish_bwd_kernel.variant(
            **gated, **activated, BK=config.finish_bwd.BK, NK=-(-K // config.pairs_bwd.BK), **config.finish_bwd.launch()
        ),
        shares_bwd=kda_shares_bwd_kernel.variant(
            HV=HV, KC=1 if SCALAR else K, BK=1 if SCALAR else config.shares_bwd.BK, BR=SHARES, **config.shares_bwd.launch()
        ),
    )


def score_precision(dtype: torch.dtype, has_norm: bool) -> tuple[tl.dtype, str]:
    """Operand type of the scores. Unit vectors fit float16, which has tf32's mantissa at twice its speed."""
    if dtype == torch.float32:
        return tl.float32, "tf32x3"
    return (tl.float16 if dtype == torch.float16 or has_norm else tl.float32), "tf32"


def pair_precision(dtype: torch.dtype, has_norm: bool) -> tl.dtype:
    """Operand type of the gradients of scores, which come in units of their largest."""
    SDT, _ = score_precision(dtype, has_norm)
    return SDT if tl.float16 == SDT or dtype == torch.float32 else tl.bfloat16


def decay_precision(dtype: torch.dtype) -> tl.dtype:
    """Operand type of the sums of log decays. Rounding g to float16's mantissa changes o by 5e-5; sums stay in float32."""
    return tl.float32 if dtype == torch.float32 else tl.float16


def state_precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"  # no effect on 16-bit operands


def is_safe(p: KdaProblem) -> bool:
    return p.gate == "bounded" or p.options.safe_gate


def beta_max(p: KdaProblem) -> float:
    return 2.0 if p.options.allow_neg_eigval else 1.0
