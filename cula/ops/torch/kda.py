# SPDX-License-Identifier: Apache-2.0
"""KDA in plain PyTorch: chunked, batched over sequences, heads and chunks; any device; the default on a CPU.

One chunk of one value head, S stored [V, K], G the running sum of the log decay, q already times `scale`:

    kg = k exp(G),  qg = q exp(G),  kr = k exp(G_C - G)                    [C, K]
    A  = strict_lower(beta k k^T exp(G_t - G_i)),  T = (I + A)^-1          [C, C]
    U  = T (beta (v - kg S^T))                                             [C, V]
    o  = qg S^T + lower(q k^T exp(G_t - G_i)) U                            [C, V]
    S  <- S diag(exp(G_C)) + U^T kr                                        [V, K]

The last line is the chunk's transition, S <- S M + B with M = diag(exp(G_C)) - (kg beta)^T T^T kr: kept in this factored
form, it is applied to states here and, in `kda_transition`, to [identity; zero], which yields M and B of a whole sequence.

Schedule: chunks are visited in slabs of consecutive steps (`chunks.py`). A slab is prepared in one batch (everything
above that does not know S), then its steps run one after another, each over all sequences still alive. Slabs are
small enough for their tiles to stay in cache; memory beyond inputs and outputs does not grow with T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cula.core.constants import CHUNK
from cula.core.kernels import Forward
from cula.core.problem import DecodeProblem
from cula.kda.problem import KdaDecodeInputs, KdaGrads, KdaInputs, KdaProblem
from cula.ops.torch import gate
from cula.ops.torch.chunks import ChunkPlan, Slab
from cula.ops.torch.decode import decode_rows, for_value_heads
from cula.ops.torch.scores import Decays, Operands, choose_block, pair_scores, pair_scores_bwd
from cula.ops.torch.sequences import bwd_of_each, fwd_of_each


@fwd_of_each
def kda_fwd(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> Forward:
    """See `cula/core/kernels.py`."""
    p = problem
    plan, compute = _plan(p, x), _compute_dtype(p)
    o = x.v.new_empty(p.B, p.T, p.HV, p.V)
    states_now = plan.by_position(x.initial_state, (p.HV, p.V, p.K), compute)
    keep_states = p.options.return_intermediate_states or p.options.disable_recompute
    states = x.v.new_empty(plan.num_chunks, p.HV, p.V, p.K, dtype=compute) if keep_states else None
    slab_states = []  # the first states of each slab: all that a backward cannot make again on the spot
    for slab in plan.slabs(p.HV * max(p.K, p.V)):
        if p.needs_grad and states is None:
            slab_states.append(states_now[: slab.step_sizes[0]].clone())
        tile = _prepare(p, x, plan, slab, compute)
        o_tile = torch.empty_like(tile.v)
        for a, z in slab.steps():
            S = states_now[: z - a]
            if states is not None:
                states[slab.start + a : slab.start + z] = S
            q_S, k_S = tile.read_state(a, z, S)
            U = tile.T_beta[a:z] @ (tile.as_blocks(tile.v[a:z]) - k_S).flatten(2, 3)
            torch.add(q_S, tile.as_blocks(tile.Aqk[a:z] @ U), out=tile.as_blocks(o_tile[a:z]))
            tile.write_state(a, z, S, U)
        plan.put(o_tile, slab, o)
    if out is not None:
        o = out.copy_(o)
    h = None
    if p.options.return_intermediate_states:
        assert states is not None
        h = p.by_row(states[plan.chunk_order].float())
    return Forward(
        o,
        plan.by_sequence(states_now).float() if p.options.output_final_state else None,
        h,
        tuple(slab_states) if states is None else (states,),
    )


def kda_transition(problem: KdaProblem, x: KdaInputs) -> tuple[Tensor, Tensor]:
    """(M, B) of each sequence: its last state is h0 @ M + B. q is not read."""
    p = problem
    plan, compute = _plan(p, x), _compute_dtype(p)
    # rows 0..K-1 start as the identity and see v = 0: they become M; the other rows start at zero and become B
    maps = plan.by_position(None, (p.HV, p.K + p.V, p.K), compute)
    maps[..., : p.K, :] = torch.eye(p.K, dtype=compute, device=maps.device)
    for slab in plan.slabs(p.HV * max(p.K, p.V)):
        tile = _prepare(p, x, plan, slab, compute)
        v = torch.nn.functional.pad(tile.v, (p.K, 0))
        for a, z in slab.steps():
            S = maps[: z - a]
            R = tile.as_blocks(v[a:z]) - tile.read_state(a, z, S)[1]
            tile.write_state(a, z, S, tile.T_beta[a:z] @ R.flatten(2, 3))
    maps = plan.by_sequence(maps).float()
    return maps[..., : p.K, :].contiguous(), maps[..., p.K :, :].contiguous()


@bwd_of_each
def kda_bwd(problem: KdaProblem, x: KdaInputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """See `cula/core/kernels.py`. All but the states is made again, slab by slab.

    `saved` holds the states of all chunks (`disable_recompute`), or those at the start of each slab, or nothing.
    """
    p = problem
    plan, compute = _plan(p, x), _compute_dtype(p)
    keeps_all = p.options.disable_recompute and bool(saved)
    slab_states = list(saved or _slab_states(p, x, plan, compute))
    grads = _GradientSink(p, x, plan)
    dS = plan.by_position(dht, (p.HV, p.V, p.K), compute)
    for slab in reversed(plan.slabs(p.HV * max(p.K, p.V))):
        tile = _prepare(p, x, plan, slab, compute)
        if keeps_all:
            S = saved[0][slab.start : slab.stop]
        else:
            S = _chunk_states(tile, slab, slab_states.pop().clone())  # the saved ones may be read again
        dO = plan.take(do, slab, compute)
        # The scan backwards, X = beta (v - kg S^T). Only dS crosses chunks.
        dU = tile.Aqk.mT @ dO
        dX = torch.empty_like(dU)
        dS_next = torch.empty_like(S)
        d_reads = tile.like_reads(p.V)  # gradients of [qg S^T; kg S^T]
        d_reads_q, d_reads_k = tile.split_reads(d_reads)
        d_reads_q.copy_(tile.as_blocks(dO))
        for a, z in reversed(slab.steps()):
            here = dS[: z - a]
            dS_next[a:z] = here
            dU[a:z] += tile.kr[a:z] @ here.mT
            torch.matmul(tile.T[a:z].mT, dU[a:z], out=dX[a:z])
            torch.mul(tile.as_blocks(dX[a:z]), tile.as_blocks(-tile.beta[a:z]), out=d_reads_k[a:z])
            here.mul_(tile.chunk_decay[a:z])
            here.flatten(0, 1).baddbmm_(d_reads[a:z].flatten(0, 1).mT, tile.qg_kg[a:z].flatten(0, 1))
        # Everything else is local to a chunk.
        R = (tile.as_blocks(tile.v) - tile.read_state(0, S.shape[0], S)[1]).flatten(2, 3)  # v minus what S predicts
        U = tile.T_beta @ R
        d_scores = torch.stack([dO @ U.mT, -(dX @ U.mT)], dim=2)  # of Aqk and of A = beta kk
        d_diagonal = d_scores[:, :, 0].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # [n, HV, C, 1]
        d_scores = d_scores.tril(-1)
        dbeta = (dX * R).sum(-1) + (d_scores[:, :, 1] * tile.kk).sum(-1)
        d_scores[:, :, 1] *= tile.beta
        d_prefix = (d_reads @ S).view(tile.operands.qk_prefix.shape).mul_(tile.decays.before().unsqueeze(-3))
        d_rows, d_columns = pair_scores_bwd(tile.operands, tile.decays, d_scores.unflatten(1, (p.H, -1)), d_prefix)
        dq, dk_row = (t.flatten(1, 2).flatten(-3, -2) for t in d_rows.unbind(-3))  # [n, HV, C, K]
        dk_column = d_columns.flatten(1, 2).flatten(-3, -2)
        dk_end = (U @ dS_next).mul_(tile.decay_to_end)
        q, k = tile.q, tile.k
        # A pair (t, i) decays over i < s <= t. Rows of the scores and reads of S: a sum over t >= s, from which columns
        # i >= s take away what their rows added. Writes to the next S: a sum over i < s. From S to S: every s.
        from_here = torch.ones(tile.C, tile.C, dtype=compute, device=q.device).triu()
        dg = from_here @ (q * dq + k * (dk_row - dk_column)) + (1 - from_here) @ (k * dk_end)
        dg += tile.chunk_decay * (S * dS_next).sum(-2, keepdim=True)
        grads.add(
            slab,
            tile,
            dq=dq + d_diagonal * k,
            dk=dk_row + dk_column + dk_end + d_diagonal * q,
            dv=tile.beta * dX,
            dg=dg,
            dbeta=dbeta,
        )
    return grads.result(plan.by_sequence(dS).float() if p.has_initial_state else None)


def kda_state_grad(problem: KdaProblem, x: KdaInputs, do: Tensor, dht: Tensor | None = None) -> Tensor:
    """Gradient of each sequence's first state alone, [N, HV, V, K]: the backward scan without the rest of `kda_bwd`.

    It equals dht @ M^T + C with M of `kda_transition` and C the result at dht = 0. v and initial_state are not read.
    """
    p = problem
    plan, compute = _plan(p, x), _compute_dtype(p)
    dS = plan.by_position(dht, (p.HV, p.V, p.K), compute)
    for slab in reversed(plan.slabs(p.HV * max(p.K, p.V))):
        tile = _prepare(p, x, plan, slab, compute)
        dO = plan.take(do, slab, compute)
        dU = tile.Aqk.mT @ dO
        d_reads = tile.like_reads(p.V)  # gradients of [qg S^T; kg S^T]
        d_reads_q, d_reads_k = tile.split_reads(d_reads)
        d_reads_q.copy_(tile.as_blocks(dO))
        for a, z in reversed(slab.steps()):
            here = dS[: z - a]
            dX = tile.T[a:z].mT @ (dU[a:z] + tile.kr[a:z] @ here.mT)
            torch.mul(tile.as_blocks(dX), tile.as_blocks(-tile.beta[a:z]), out=d_reads_k[a:z])
            here.mul_(tile.chunk_decay[a:z])
            here.flatten(0, 1).baddbmm_(d_reads[a:z].flatten(0, 1).mT, tile.qg_kg[a:z].flatten(0, 1))
    return plan.by_sequence(dS).float()


@dataclass(frozen=True)
class _Tile:
    """A slab of chunks, prepared: everything that does not depend on the state. Leading dimensions [n, HV]."""

    C: int
    q: Tensor  # [n, HV, C, K], normalised and scaled; a group shares one copy
    k: Tensor  # [n, HV, C, K]
    v: Tensor  # [n, HV, C, V]
    beta: Tensor  # [n, HV, C, 1]
    qg_kg: Tensor  # [n, HV, 2C, K]: both operands that meet the state, block by block: s rows of q, s rows of k, ...
    kr: Tensor  # [n, HV, C, K]
    chunk_decay: Tensor  # [n, HV, 1, K] (one channel for a scalar gate): exp(G_C)
    kk: Tensor  # [n, HV, C, C] strictly lower k k scores
    Aqk: Tensor  # [n, HV, C, C]
    T: Tensor  # [n, HV, C, C]: (I + beta kk)^-1
    T_beta: Tensor  # [n, HV, C, C]: T diag(beta), so that U = T_beta (v - kg S^T)
    operands: Operands
    decays: Decays
    raw: tuple[Tensor, ...]  # what the gradients of norms and gates need: q norm, k norm, raw g, raw beta

    def read_state(self, a: int, z: int, S: Tensor) -> tuple[Tensor, Tensor]:
        """qg S^T and kg S^T of the chunks [a, z), views [z - a, HV, nb, s, V] of one product."""
        return self.split_reads(self.qg_kg[a:z] @ S.mT)

    def write_state(self, a: int, z: int, S: Tensor, U: Tensor) -> None:
        """S <- S diag(exp(G_C)) + U^T kr, in place."""
        S.mul_(self.chunk_decay[a:z])
        S.flatten(0, 1).baddbmm_(U.flatten(0, 1).mT, self.kr[a:z].flatten(0, 1))

    def as_blocks(self, t: Tensor) -> Tensor:
        """[n, HV, C, D] -> [n, HV, nb, s, D]."""
        return t.unflatten(2, self.decays.prefix.shape[-3:-1])

    def split_reads(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Rows laid out as in `qg_kg`, [n, HV, 2C, D], as views (q part, k part) [n, HV, nb, s, D]."""
        nb, s = self.decays.prefix.shape[-3:-1]
        q_part, k_part = t.unflatten(2, (nb, 2, s)).unbind(3)
        return q_part, k_part

    def like_reads(self, D: int) -> Tensor:
        return self.qg_kg.new_empty(*self.qg_kg.shape[:-1], D)

    @property
    def decay_to_end(self) -> Tensor:
        """exp(G_C - G), [n, HV, C, K]."""
        return (self.decays.suffix * self.decays.after()).flatten(1, 2).flatten(-3, -2)


def _prepare(p: KdaProblem, x: KdaInputs, plan: ChunkPlan, slab: Slab, compute: torch.dtype) -> _Tile:
    C, G = plan.C, p.HV // p.H
    opt = p.options
    q, k = plan.take(x.q, slab, compute), plan.take(x.k, slab, compute)  # [n, H, C, K]
    q_norm = k_norm = q.new_ones(1)
    if opt.use_qk_l2norm_in_kernel:
        q, q_norm = gate.l2_normalise(q)
        k, k_norm = gate.l2_normalise(k)
    q = q.mul_(p.scale).unsqueeze(2)  # [n, H, 1, C, K]
    k = k.unsqueeze(2)
    v = plan.take(x.v, slab, compute)
    raw_beta = plan.take(x.beta, slab, compute).unsqueeze(-1)  # [n, HV, C, 1]
    beta = gate.beta_value(raw_beta, opt.use_beta_sigmoid_in_kernel, opt.allow_neg_eigval)
    raw_g = plan.take(x.g, slab, compute)
    raw_g = raw_g.unsqueeze(-1) if p.has_scalar_gate else raw_g  # [n, HV, C, K or 1]
    g = gate.log_decay(p.gate, raw_g, *_gate_parameters(p, x, compute), opt.lower_bound)
    if p.gate != "bounded":
        g = gate.summable(g)
    pads = plan.pads(slab)
    if pads is not None and p.gate != "log":
        g = g.masked_fill(pads[:, None, :, None], 0)  # no token, no decay (where g is raw, a zero is not that)
    g = g.unflatten(1, (p.H, G))  # [n, H, G, C, K]

    s, is_product = choose_block(g, C, p.gate == "bounded" or opt.safe_gate)
    decays = Decays.of(g, s, is_product)
    operands = Operands.of(q, k, decays)
    qg_kg = operands.qk_prefix * decays.before().unsqueeze(-3)
    kr = operands.k_suffix * decays.after()
    Aqk, kk = pair_scores(operands, decays).flatten(1, 2).unbind(2)
    T = _inverse(beta * kk)
    return _Tile(
        C=C,
        q=_for_value_heads(q, G),
        k=_for_value_heads(k, G),
        v=v,
        beta=beta,
        qg_kg=qg_kg.flatten(3, 5).flatten(1, 2),
        kr=kr.flatten(3, 4).flatten(1, 2),
        chunk_decay=decays.block.prod(-3).flatten(1, 2),
        kk=kk,
        Aqk=Aqk,
        T=T,
        T_beta=T * beta.mT,
        operands=operands,
        decays=decays,
        raw=(q_norm, k_norm, raw_g, raw_beta),
    )


def _for_value_heads(x: Tensor, G: int) -> Tensor:
    """[n, H, 1, C, K] -> [n, HV, C, K]."""
    return x.expand(-1, -1, G, -1, -1).flatten(1, 2)


def _inverse(A: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower A: substitution on the two halves, then the corner -X22 A21 X11.

    Never by a Neumann series: the powers of A that it needs may be huge where the inverse is not.
    """
    half = A.shape[-1] // 2
    eye = torch.eye(half, dtype=A.dtype, device=A.device).expand(*A.shape[:-2], 2, half, half)
    corners = torch.stack([A[..., :half, :half], A[..., half:, half:]], dim=-3)
    X11, X22 = torch.linalg.solve_triangular(corners, eye, upper=False, unitriangular=True).unbind(-3)
    X = torch.zeros_like(A)
    X[..., :half, :half] = X11
    X[..., half:, half:] = X22
    X[..., half:, :half] = -(X22 @ (A[..., half:, :half] @ X11))
    return X


class _GradientSink:
    """Collects the gradients of slabs into whole tensors, through norms, gates and groups back to the raw inputs."""

    def __init__(self, p: KdaProblem, x: KdaInputs, plan: ChunkPlan):
        self.p, self.x, self.plan = p, x, plan
        self.dq, self.dk, self.dv, self.dg, self.dbeta = (t.new_empty(t.shape) for t in x[:5])
        compute = _compute_dtype(p)
        self.dA_log = None if x.A_log is None else torch.zeros_like(x.A_log, dtype=compute)
        self.ddt_bias = None if x.dt_bias is None else torch.zeros_like(x.dt_bias, dtype=compute)

    def add(self, slab: Slab, tile: _Tile, *, dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, dbeta: Tensor) -> None:
        p, opt = self.p, self.p.options
        q_norm, k_norm, raw_g, raw_beta = tile.raw
        grouped = (p.H, p.HV // p.H)
        dq = dq.unflatten(1, grouped).sum(2) * p.scale
        dk = dk.unflatten(1, grouped).sum(2)
        if opt.use_qk_l2norm_in_kernel:
            unit_q = tile.operands.q.squeeze(2).flatten(-3, -2) / (p.scale or 1.0)  # a scale of 0 leaves none, and dq is 0
            dq = gate.l2_normalise_bwd(unit_q, q_norm, dq)
            dk = gate.l2_normalise_bwd(tile.operands.k.squeeze(2).flatten(-3, -2), k_norm, dk)
        if p.has_scalar_gate:
            dg = dg.sum(-1, keepdim=True)
        pads = self.plan.pads(slab)
        if pads is not None:
            dg = dg.masked_fill(pads[:, None, :, None], 0)
        dz, dA = gate.log_decay_bwd(p.gate, raw_g, *_gate_parameters(p, self.x, dg.dtype), opt.lower_bound, dg)
        if self.dA_log is not None and dA is not None:
            self.dA_log += dA.sum((0, 2, 3))
        if self.ddt_bias is not None:
            self.ddt_bias += dz.sum((0, 2)).view_as(self.ddt_bias)
        dbeta = gate.beta_value_bwd(raw_beta.squeeze(-1), opt.use_beta_sigmoid_in_kernel, opt.allow_neg_eigval, dbeta)
        for value, whole in ((dq, self.dq), (dk, self.dk), (dv, self.dv), (dbeta, self.dbeta)):
            self.plan.put(value, slab, whole)
        self.plan.put(dz.squeeze(-1) if p.has_scalar_gate else dz, slab, self.dg)

    def result(self, d_h0: Tensor | None) -> KdaGrads:
        A_log, dt_bias = self.x.A_log, self.x.dt_bias
        return KdaGrads(
            self.dq,
            self.dk,
            self.dv,
            self.dg,
            self.dbeta,
            None if self.dA_log is None or A_log is None else self.dA_log.to(A_log.dtype),
            None if self.ddt_bias is None or dt_bias is None else self.ddt_bias.to(dt_bias.dtype),
            d_h0,
        )


def _slab_states(p: KdaProblem, x: KdaInputs, plan: ChunkPlan, compute: torch.dtype) -> list[Tensor]:
    """The first states of each slab, as `kda_fwd` saves them."""
    states_now = plan.by_position(x.initial_state, (p.HV, p.V, p.K), compute)
    first = []
    for slab in plan.slabs(p.HV * max(p.K, p.V)):
        first.append(states_now[: slab.step_sizes[0]].clone())
        _chunk_states(_prepare(p, x, plan, slab, compute), slab, states_now)
    return first


def _chunk_states(tile: _Tile, slab: Slab, states_now: Tensor) -> Tensor:
    """Run a slab's steps over `states_now` in place; returns the state before each chunk, [n, HV, V, K]."""
    before = states_now.new_empty(slab.stop - slab.start, *states_now.shape[1:])
    for a, z in slab.steps():
        S = states_now[: z - a]
        before[a:z] = S
        R = tile.as_blocks(tile.v[a:z]) - tile.read_state(a, z, S)[1]
        tile.write_state(a, z, S, tile.T_beta[a:z] @ R.flatten(2, 3))
    return before


def _plan(p: KdaProblem, x: KdaInputs) -> ChunkPlan:
    return ChunkPlan(p.B, p.T, x.cu_seqlens, CHUNK, x.q.device)


def _compute_dtype(p: KdaProblem) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32  # float64 only in tests of the formulas


def _gate_parameters(p: KdaProblem, x: KdaInputs, compute: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """exp(A_log) and dt_bias, shaped against [n, HV, C, K]."""
    A = None if x.A_log is None else x.A_log.to(compute).exp().view(1, p.HV, 1, 1)
    bias = None if x.dt_bias is None else x.dt_bias.to(compute).view(1, p.HV, 1, -1)
    return A, bias


# Decode


def kda_decode(problem: DecodeProblem, x: KdaDecodeInputs) -> Tensor:
    """See `cula/core/kernels.py`."""
    assert x.g is not None and x.beta is not None
    p, opt = problem, problem.options
    q, k = x.q.float(), x.k.float()
    if opt.use_qk_l2norm_in_kernel:
        q, k = gate.l2_normalise(q)[0], gate.l2_normalise(k)[0]
    q, k = (for_value_heads(t, p.HV // p.H) for t in (q, k))  # [N, T, HV, K]
    g = x.g.float().unsqueeze(-1) if p.has_scalar_gate else x.g.float()  # [N, T, HV, K or 1]
    A = None if x.A_log is None else x.A_log.float().exp().view(p.HV, 1)
    bias = None if x.dt_bias is None else x.dt_bias.float().view(p.HV, -1)
    decay = gate.log_decay(p.gate, g, A, bias, opt.lower_bound).exp()  # [N, T, HV, K or 1]
    beta = gate.beta_value(x.beta.float(), opt.use_beta_sigmoid_in_kernel, opt.allow_neg_eigval).unsqueeze(-1)
    return decode_rows(problem, x, q, k, decay, beta)
