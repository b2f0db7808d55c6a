# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention in plain PyTorch: chunked, batched over sequences, heads and chunks; any device.

One chunk of `size` tokens of one value head, state factor exp(-s) a token, S stored [V, K], q already times `scale`:

    A = q k^T * exp(-s (t - i)) for i <= t                                  [C, C]
    o = A v + (q exp(-s (t + 1))) S^T                                       [C, V]
    S <- exp(-s size) S + v^T (k exp(-s (size - 1 - i)))                    [V, K]

The last line is the chunk's transition S <- M S + B, whose M is one number a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cula.core.kernels import Forward
from cula.core.problem import DecodeProblem
from cula.lightning.problem import LightningDecodeInputs, LightningInputs, LightningProblem
from cula.ops.torch.chunks import ChunkPlan, Slab
from cula.ops.torch.decode import decode_rows, for_value_heads
from cula.ops.torch.gate import l2_normalise


def lightning_fwd(problem: LightningProblem, x: LightningInputs, out: Tensor | None = None) -> Forward:
    """See `cula/core/kernels.py`."""
    p = problem
    plan, compute = _plan(p, x), _compute_dtype(p)
    o = x.v.new_empty(p.B, p.T, p.HV, p.V)
    states = plan.by_position(x.initial_state, (p.HV, p.V, p.K), compute)
    for slab in plan.slabs(p.HV * max(p.K, p.V)):
        tile = _prepare(p, x, plan, slab, compute)
        before = _scan(tile, slab, states)
        plan.put(tile.A @ tile.v + tile.q_decayed @ before.mT, slab, o)
    if out is not None:
        o = out.copy_(o)
    return Forward(o, plan.by_sequence(states).float() if p.options.output_final_state else None)


def lightning_bwd(
    problem: LightningProblem, x: LightningInputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, d_decay, d_initial_state. Chunk states are made again first.

    A chunk's outputs and last state depend on its log decay -s through exp(-s t) with q and exp(s t) with k, t being a token's
    place in the chunk, and its last state as a whole through exp(-s size). So, summed over chunks,

        ds = -sum_t (t + 1) (q_t . dq_t - k_t . dk_t) - size <S_end, dS_end>
    """
    p = problem
    plan, compute = _plan(p, x), _compute_dtype(p)
    slabs = plan.slabs(p.HV * max(p.K, p.V))
    states = plan.by_position(x.initial_state, (p.HV, p.V, p.K), compute)
    before = [_scan(_prepare(p, x, plan, slab, compute), slab, states) for slab in slabs]
    dq, dk, dv = (t.new_empty(t.shape) for t in (x.q, x.k, x.v))
    d_decay = torch.zeros_like(x.decay, dtype=torch.float64) if "decay" in p.grads else None
    dS = plan.by_position(dht, (p.HV, p.V, p.K), compute)
    for slab, S in zip(reversed(slabs), reversed(before), strict=True):
        tile = _prepare(p, x, plan, slab, compute)
        dO = plan.take(do, slab, compute)
        local = dO.mT @ tile.q_decayed  # what a chunk's own outputs ask of its first state
        dS_next = torch.empty_like(S)
        for a, z in reversed(slab.steps()):
            here = dS[: z - a]
            dS_next[a:z] = here
            here.mul_(tile.chunk_decay[a:z]).add_(local[a:z])
        dA = (dO @ tile.v.mT) * tile.D
        q, k = (t.unsqueeze(2).expand(-1, -1, p.HV // p.H, -1, -1).flatten(1, 2) for t in (tile.q, tile.k))
        grouped = (p.H, p.HV // p.H)
        dq_tile = dA @ k + (dO @ S) * tile.row_decay  # of q times `scale`
        dk_tile = dA.mT @ q + (tile.v @ dS_next) * tile.column_decay
        if d_decay is not None:
            place = torch.arange(1, plan.C + 1, device=q.device, dtype=compute).view(1, 1, -1, 1)
            S_end = tile.chunk_decay * S + tile.v.mT @ tile.k_decayed
            size = plan.sizes(slab).to(compute).view(-1, 1, 1, 1)
            d_decay -= (place * (q * dq_tile - k * dk_tile)).sum((0, 2, 3), dtype=torch.float64)
            d_decay -= (size * S_end * dS_next).sum((0, 2, 3), dtype=torch.float64)
        plan.put((dq_tile * p.scale).unflatten(1, grouped).sum(2), slab, dq)
        plan.put(dk_tile.unflatten(1, grouped).sum(2), slab, dk)
        plan.put(tile.A.mT @ dO + tile.k_decayed @ dS_next.mT, slab, dv)
    d_initial_state = plan.by_sequence(dS).float() if p.has_initial_state else None
    return dq, dk, dv, None if d_decay is None else d_decay.to(x.decay.dtype), d_initial_state


def lightning_transition(problem: LightningProblem, x: LightningInputs) -> tuple[Tensor, Tensor]:
    """(M, B) of each sequence: its last state is M h0 + B, with M [N, HV, 1, 1] one number a head. q is not read."""
    p = problem
    plan, compute = _plan(p, x), _compute_dtype(p)
    states = plan.by_position(None, (p.HV, p.V, p.K), compute)
    for slab in plan.slabs(p.HV * max(p.K, p.V)):
        _scan(_prepare(p, x, plan, slab, compute), slab, states)
    if x.cu_seqlens is None:
        lengths = torch.full((p.N,), p.T, dtype=compute, device=x.q.device)
    else:
        lengths = x.cu_seqlens.diff().to(compute)
    M = torch.exp(-x.decay.to(compute) * lengths[:, None])  # [N, HV]
    return M[:, :, None, None].float(), plan.by_sequence(states).float()


def lightning_state_grad(problem: LightningProblem, x: LightningInputs, do: Tensor, dht: Tensor | None = None) -> Tensor:
    """Gradient of each sequence's first state alone, [N, HV, V, K]: M dht + C. k, v and initial_state are not read."""
    p = problem
    plan, compute = _plan(p, x), _compute_dtype(p)
    dS = plan.by_position(dht, (p.HV, p.V, p.K), compute)
    for slab in reversed(plan.slabs(p.HV * max(p.K, p.V))):
        tile = _prepare(p, x, plan, slab, compute)
        local = plan.take(do, slab, compute).mT @ tile.q_decayed
        for a, z in reversed(slab.steps()):
            dS[: z - a].mul_(tile.chunk_decay[a:z]).add_(local[a:z])
    return plan.by_sequence(dS).float()


@dataclass(frozen=True)
class _Tile:
    """A slab of chunks, prepared. Leading dimensions [n, HV], except q and k [n, H]."""

    q: Tensor  # [n, H, C, K], scaled
    k: Tensor  # [n, H, C, K]
    v: Tensor  # [n, HV, C, V]
    D: Tensor  # [HV, C, C] exp(-s (t - i)), zero above the diagonal
    A: Tensor  # [n, HV, C, C]
    row_decay: Tensor  # [HV, C, 1] exp(-s (t + 1))
    column_decay: Tensor  # [n, HV, C, 1] exp(-s (size - 1 - i))
    chunk_decay: Tensor  # [n, HV, 1, 1] exp(-s size)
    q_decayed: Tensor  # [n, HV, C, K]
    k_decayed: Tensor  # [n, HV, C, K]


def _prepare(p: LightningProblem, x: LightningInputs, plan: ChunkPlan, slab: Slab, compute: torch.dtype) -> _Tile:
    q = plan.take(x.q, slab, compute).mul_(p.scale)
    k, v = plan.take(x.k, slab, compute), plan.take(x.v, slab, compute)
    s = x.decay.to(compute).view(p.HV, 1, 1)
    t = torch.arange(plan.C, device=q.device, dtype=compute)
    distance = t[:, None] - t[None, :]
    D = torch.where(distance >= 0, (-s * distance.clamp(min=0)).exp(), 0)
    size = plan.sizes(slab).to(compute).view(-1, 1, 1, 1)
    row_decay = (-s * (t[:, None] + 1)).exp()
    column_decay = (-s * (size - 1 - t[:, None]).clamp(min=0)).exp()  # rows past the end hold k = 0
    per_value_head = (p.H, p.HV // p.H)

    def spread(head_tile: Tensor, factor: Tensor) -> Tensor:
        """[n, H, C, *] times a factor [(n,) HV, C, *] -> [n, HV, C, *]."""
        return (head_tile.unsqueeze(2) * factor.unflatten(-3, per_value_head)).flatten(1, 2)

    return _Tile(
        q=q,
        k=k,
        v=v,
        D=D,
        A=spread(q @ k.mT, D),
        row_decay=row_decay,
        column_decay=column_decay,
        chunk_decay=(-s * size).exp(),
        q_decayed=spread(q, row_decay),
        k_decayed=spread(k, column_decay),
    )


def _scan(tile: _Tile, slab: Slab, states: Tensor) -> Tensor:
    """Run a slab's steps over `states` in place; returns the state before each chunk, [n, HV, V, K]."""
    added = tile.v.mT @ tile.k_decayed
    before = torch.empty_like(added)
    for a, z in slab.steps():
        S = states[: z - a]
        before[a:z] = S
        S.mul_(tile.chunk_decay[a:z]).add_(added[a:z])
    return before


def _plan(p: LightningProblem, x: LightningInputs) -> ChunkPlan:
    return ChunkPlan(p.B, p.T, x.cu_seqlens, p.options.chunk_size, x.q.device)


def _compute_dtype(p: LightningProblem) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32  # float64 only in tests of the formulas


# Decode: the state's factor is the same for every token, and what enters it is v itself.


def lightning_decode(problem: DecodeProblem, x: LightningDecodeInputs) -> Tensor:
    """See `cula/core/kernels.py`."""
    assert x.decay is not None
    p = problem
    q, k = (for_value_heads(t.float(), p.HV // p.H) for t in (x.q, x.k))
    if p.options.use_qk_l2norm_in_kernel:
        q, k = l2_normalise(q)[0], l2_normalise(k)[0]
    decay = (-x.decay).exp().view(p.HV, 1).expand(p.N, p.T, -1, -1)
    return decode_rows(problem, x, q, k, decay, None)
