# SPDX-License-Identifier: Apache-2.0
"""How many steps the chains of KDA's segments take on a Hopper, from the start of a sequence and from where it is forgotten.

    python benchmarks/kda_chains.py [--heads 4] [--sms 132]

Counted on a CPU, in float64, for the gates and shapes of `cula/kda/bench.py`; nothing is timed. A step applies one transition,
1.5 us on an H200 (docs/log/kda-hopper.md). Of each head the longest chain counts: its segment ends last.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cula.bench.cases import Case
from cula.bench.inputs import Random
from cula.bench.shapes import batch
from cula.core.constants import CHUNK
from cula.kda.bench import gate_parameters
from cula.kda.problem import KdaInputs, KdaOptions, check_kda
from cula.kda.reference import kda_gate
from cula.ops.cute.kda_schedule import Schedule, schedule

K = 128
MAX_WARM_UP, FORGOTTEN, ROUNDING = 4, -24.0, 0.05  # of `cula/ops/cute/common/kda_segments.py`, which needs the DSL
SHAPES = ((1024, 4), (2048, 12), (3072, 10), (4096, 8), (8192, 16), (8192, 8), (8192, 1), (32768, 4), (32768, 1), (65536, 8))
GATES = ("fast", "slopes", "softplus", "init", "mixed", "slow")


class Chunks(NamedTuple):
    """Of one head."""

    M: Tensor  # [chunks, K, K]
    bound: Tensor  # [chunks], log2


def chunks_of(g: Tensor, k: Tensor, beta: Tensor) -> Chunks:
    """Transitions and their bounds, of log decays [T, K], unit keys [T, K] and write strengths [T]."""
    Ms, bounds = [], []
    for g_c, k_c, b in zip(*(t.double().split(CHUNK) for t in (g, k, beta))):
        G = g_c.cumsum(0)
        decays = (G[:, None] - G).clamp(max=0.0).exp_()  # [t, i, K]
        A = b[:, None] * torch.einsum("tk,tik,ik->ti", k_c, decays, k_c).tril(-1)
        T = torch.linalg.solve_triangular(torch.eye(CHUNK, dtype=A.dtype) + A, torch.eye(CHUNK, dtype=A.dtype), upper=False)
        kb, kr = b[:, None] * k_c * G.exp(), k_c * (G[-1] - G).exp()
        Ms.append(G[-1].exp().diag() - kr.T @ T @ kb)
        bounds.append(G[-1].max().exp() + kr.norm(dim=1) @ T.abs() @ kb.norm(dim=1))
    return Chunks(torch.stack(Ms), torch.stack(bounds).log2())


def warms_up(bound: Tensor, chunk: int) -> bool:
    """Whether a segment that begins with a chunk needs no chain."""
    return chunk <= MAX_WARM_UP or any((bound[chunk - w : chunk] + ROUNDING).sum() < FORGOTTEN for w in range(1, MAX_WARM_UP + 1))


def longest_chains(chunks: Chunks, made: Schedule) -> tuple[int, int] | None:
    """Steps of the longest chain with an initial state: from the start, and from where it is forgotten. None if all warm up."""
    total, L = len(chunks.M), made.per_segment
    if all(warms_up(chunks.bound, at) for at in range(L, total, L)):
        return None
    L = made.per_chained_segment
    norms = [whole(chunks.M[at : at + L]).norm().log2().item() + ROUNDING for at in range(0, total, L)]
    chained = [i for i in range(1, len(norms)) if not warms_up(chunks.bound, i * L)]
    return max(chained, default=0), max((steps(norms[:i]) for i in chained), default=0)


def whole(Ms: Tensor) -> Tensor:
    M = Ms[0]
    for other in Ms[1:]:
        M = other @ M
    return M


def steps(norms: list[float]) -> int:
    """Transitions that a chain over these applies."""
    total = 0.0
    for n, norm in enumerate(reversed(norms)):
        total += norm
        if total < FORGOTTEN:
            return n
    return len(norms)


def schedule_of(T: int, H: int, num_sms: int) -> Schedule:
    tokens, per_head = torch.empty(1, T, H, K, dtype=torch.bfloat16, device="meta"), torch.empty(1, T, H, device="meta")
    options = KdaOptions(lower_bound=-5.0, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, safe_gate=True)
    parameters = torch.empty(H, device="meta"), torch.empty(H, K, device="meta")
    problem, _ = check_kda(KdaInputs(tokens, tokens, tokens, tokens, per_head, *parameters), options)
    return schedule(replace(problem, sm=(9, 0)), num_sms)


def row(case: Case, made: Schedule, heads: int) -> str:
    """How many heads are chained; steps of their longest chains, before, and now by median and maximum."""
    random = Random(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)
    A_log, dt_bias, lower = gate_parameters(case, (case.HV, K), random)
    found = []
    for h in range(0, case.HV, max(1, case.HV // heads)):
        k = torch.nn.functional.normalize(random.normal(case.T, K).double(), dim=-1)
        g = kda_gate(random.normal(1, case.T, 1, K), A_log[h : h + 1], dt_bias[h : h + 1], lower)[0, :, 0]
        found.append(longest_chains(chunks_of(g, k, random.normal(case.T).sigmoid()), made))
    chained = [f for f in found if f is not None]
    text = f"{len(chained)} of {len(found)}"
    if chained:
        before, after = zip(*chained)
        middle, most = sorted(after)[len(after) // 2], max(after)
        text += f"; {max(before)} -> {middle}" + (f" to {most}" if most > middle else "")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=4, help="of each shape, at most (default: 4)")
    parser.add_argument("--sms", type=int, default=132, help="of the GPU (default: 132)")
    parser.add_argument("--tokens", type=int, default=10**9, help="of a shape, at most")
    args = parser.parse_args()
    print("| tokens, heads | segments, chained | " + " | ".join(GATES) + " |\n" + "|---" * (2 + len(GATES)) + "|")
    for T, H in SHAPES:
        made = schedule_of(T, H, args.sms)
        if made.is_fused or args.tokens < T:
            continue
        chunks = math.ceil(T / CHUNK)
        of_l = [f"{math.ceil(chunks / L)} of {L}" for L in (made.per_segment, made.per_chained_segment)]
        cells = [row(replace(batch("kda-gates", "kda_prefill", T, H, 1), gate=gate), made, args.heads) for gate in GATES]
        print(f"| {T}, {H} | {', '.join(of_l)} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
