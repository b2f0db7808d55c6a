# SPDX-License-Identifier: Apache-2.0
"""KDA in Triton: `kda_fwd`, `kda_bwd`, `kda_map`. Any gate, head dims that are powers of two from 32 to 256, sm_80 and later.

| module        | kernels                           | reads                        | writes                                  |
|---------------|-----------------------------------|------------------------------|-----------------------------------------|
| `kda_prepare` | prepare: chunk, head              | q, k, g, beta                | kb, kr, qg, T, Aqk, ... (`Prepared`)    |
| `kda_state`   | state_fwd: chain, head, BV rows   | Prepared, v, first state     | o, last state; or h and u; or (M, B)    |
|               | scan: sequence, head, BV rows     | (M, B) of each segment       | first state of each segment             |
|               | state_bwd: chain, head, BV rows   | Prepared, dO, last dS        | dh, dx, dv, d initial_state             |
| `kda_grads`   | scores, state, pairs, finish      | inputs, dO, h, dh, u, dx     | all other gradients                     |

A forward is prepare + state_fwd. A chain is a sequence, or a segment of one where too few sequences and heads would leave the
GPU idle (`configs.kda_segment_chunks`). A forward that will be differentiated keeps what costs most to make and little to hold:
T and Aqk (64 + 64 numbers a token and head) and the segments' maps and first states. The backward makes kb, kr, qg, the states
and U again (or takes them, too, with `disable_recompute`), then runs the chains in reverse, then the chunks.

The host reads no device memory: packed input is launched on an upper bound of its chunks, T // 64 + N, and surplus programs
find in a table made on the device that they have nothing to do. There are no atomics: every sum has a fixed order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from cula.core.kernels import Forward
from cula.kda.problem import KdaGrads, KdaInputs, KdaProblem

from .kda_common import CHUNK, NUM_SUBS
from .kda_grads import kda_grads_finish_kernel, kda_grads_pairs_kernel, kda_grads_scores_kernel, kda_grads_state_kernel
from .kda_plan import Plan, beta_max, decay_precision, is_safe, pair_precision, plan_kda, score_precision, state_precision
from .kda_prepare import kda_prepare_kernel
from .kda_state import kda_scan_kernel, kda_state_bwd_kernel, kda_state_fwd_kernel


class Prepared(NamedTuple):
    """What `kda_prepare_kernel` writes."""

    kb: Tensor | None  # [HV, B * T, K]; these three are None where a forward kept the rest for its backward
    kr: Tensor | None  # [HV, B * T, K]
    qg: Tensor | None  # [HV, B * T, K]
    t_inv: Tensor  # [HV, B * T, C]
    a_qk: Tensor  # [HV, B * T, C]
    beta: Tensor  # [HV, B * T] float32, activated
    decay: Tensor  # [chunks, HV, K] float32
    rq: Tensor  # [HV, B * T] float32: inverse norms
    rk: Tensor  # [HV, B * T] float32

    def chain(self) -> tuple[Tensor | None, ...]:
        """What the chains read."""
        return self[:7]

    def rest(self) -> tuple[Tensor, ...]:
        """What the backward inside chunks reads."""
        return self[5:]


def kda_fwd(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> Forward:
    """Outputs, and whatever else the options ask for."""
    p, options = problem, problem.options
    keep_all = options.disable_recompute and p.needs_grad
    plan = plan_kda(p, x.q.device, x.cu_seqlens)
    o = torch.empty((p.B, p.T, p.HV, p.V), dtype=p.dtype, device=x.q.device) if out is None else out
    ht = _states(p, p.N, x.q.device) if options.output_final_state else None
    h = u = None
    if options.return_intermediate_states:
        num_chunks = plan.num_chunks
        if x.cu_seqlens is not None:  # the exact number of chunks is the shape of a result
            lengths = x.cu_seqlens.diff().cpu()
            num_chunks = int(((lengths + CHUNK - 1) // CHUNK).sum())
        h = _states(p, num_chunks, x.q.device)
    elif keep_all:
        h = _states(p, plan.num_chunks, x.q.device, p.dtype)
        u = torch.empty((p.HV, p.B * p.T, p.V), dtype=p.dtype, device=x.q.device)
    if p.B * p.T == 0:
        _copy_initial_state(ht, x.initial_state)
        return Forward(o, ht, _batched(h, p))
    tiles = _prepare(p, plan, x)
    segments = _run_chains(p, plan, x, tiles, o=o, ht=ht, h=h, u=u)
    saved: tuple[Tensor | None, ...] = ()
    if u is not None:
        saved = (*tiles, h, u, *segments)
    elif p.needs_grad:
        saved = (*tiles._replace(kb=None, kr=None, qg=None), None, None, *segments)
    return Forward(o, ht, _batched(h, p) if options.return_intermediate_states else None, saved)


def kda_bwd(problem: KdaProblem, x: KdaInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """Gradients of every input from those of the outputs and (where not None) of the final states."""
    p, device = problem, x.q.device
    do = do if do.stride(-1) == 1 else do.contiguous()
    dht = None if dht is None else dht.float().contiguous()
    dh0 = None if x.initial_state is None else torch.empty_like(x.initial_state)
    if p.B * p.T == 0:
        _copy_initial_state(dh0, dht)
        return KdaGrads._make([*(None if t is None else torch.zeros_like(t) for t in x[:7]), dh0])

    plan = plan_kda(p, device, x.cu_seqlens)
    kept, (h, u, maps, seeds) = (None, (None,) * 4) if not saved else _unpack(saved)
    tiles = kept if kept is not None and kept.kb is not None else _prepare(p, plan, x, kept)
    if h is None or u is None:
        h = _states(p, plan.num_chunks, device, p.dtype)
        u = torch.empty((p.HV, p.B * p.T, p.V), dtype=p.dtype, device=device)
        maps, seeds = _run_chains(p, plan, x, tiles, h=h, u=u, segments=(maps, seeds))
    dh = torch.empty_like(h)
    dx = torch.empty_like(u)
    dv = torch.empty((p.B, p.T, p.HV, p.V), dtype=p.dtype, device=device)
    _run_chains_bwd(p, plan, x, tiles, maps, do, dht, dh, dx, dv, dh0)
    rest = tiles.rest()
    del tiles, kept, maps, seeds, saved
    return KdaGrads._make([*_grads(p, plan, x, rest, do, h, dh, u, dx), dh0])._replace(dv=dv)


def kda_map(problem: KdaProblem, x: KdaInputs) -> tuple[Tensor, Tensor]:
    """The affine map of each sequence, `ht = h0 @ M + B`: M [N, HV, K, K] and B [N, HV, V, K], float32."""
    p = problem
    plan = plan_kda(p, x.q.device, x.cu_seqlens)
    maps = torch.empty((p.N, p.HV, p.V + p.K, p.K), dtype=torch.float32, device=x.q.device)
    if p.B * p.T == 0:
        maps.zero_()
        maps[:, :, p.V :].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    else:
        tiles = _prepare(p, plan, x)
        if plan.seg == 0:
            _launch_state(p, plan, x, tiles, maps=maps)
        else:
            # Composing the segments' maps is their scan from the state [B | M] = [0 | I]: V + K rows instead of V.
            seg_maps = torch.empty((plan.num_chains, p.HV, p.V + p.K, p.K), dtype=torch.float32, device=x.q.device)
            _launch_state(p, plan, x, tiles, maps=seg_maps)
            _launch_scan(p, plan, seg_maps, first=None, last=maps, is_map=True)
    return maps[:, :, p.V :], maps[:, :, : p.V]


# Helpers


def _states(p: KdaProblem, count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty((count, p.HV, p.V, p.K), dtype=dtype, device=device)


def _batched(h: Tensor | None, p: KdaProblem) -> Tensor | None:
    return None if h is None else h.view(p.B, -1, p.HV, p.V, p.K) if p.B else h.view(0, 0, p.HV, p.V, p.K)


def _copy_initial_state(out: Tensor | None, first: Tensor | None) -> None:
    """The last state (or the first state's gradient) of sequences without tokens."""
    if out is not None:
        out.zero_() if first is None else out.copy_(first)


def _unpack(saved: tuple[Tensor | None, ...]) -> tuple[Prepared, tuple[Tensor | None, ...]]:
    """What `kda_fwd` saved: tiles; h, u, and the segments' maps and first states."""
    count = len(Prepared._fields)
    return Prepared(*saved[:count]), saved[count:]  # type: ignore[arg-type]


# Launches


def _prepare(p: KdaProblem, plan: Plan, x: KdaInputs, kept: Prepared | None = None) -> Prepared:
    """All tiles of the chunks; where some were `kept`, only kb, kr and qg are made."""
    rows, device = (p.HV, p.B * p.T), x.q.device
    kb, kr, qg = (torch.empty((*rows, p.K), dtype=p.dtype, device=device) for _ in range(3))
    if kept is None:
        t_inv, a_qk = (torch.empty((*rows, CHUNK), dtype=p.dtype, device=device) for _ in range(2))
        beta, rq, rk = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
        decay = torch.empty((plan.num_chunks, p.HV, p.K), dtype=torch.float32, device=device)
        tiles = Prepared(kb, kr, qg, t_inv, a_qk, beta, decay, rq, rk)
    else:
        tiles = kept._replace(kb=kb, kr=kr, qg=qg)
    SDT, IP = score_precision(p)
    tile = plan.config.prepare
    kda_prepare_kernel[(plan.num_chunks * p.HV,)](
        x.q,
        x.k,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        kb,
        kr,
        qg,
        tiles.t_inv if kept is None else None,
        tiles.a_qk if kept is None else None,
        tiles.beta,
        tiles.rq,
        tiles.rk,
        tiles.decay,
        x.cu_seqlens,
        plan.chunk_seq,
        plan.chunk_base,
        *x.q.stride()[:3],
        *x.k.stride()[:3],
        *x.g.stride()[:3],
        *x.beta.stride(),
        p.T,
        p.B * p.T,
        plan.NT,
        p.options.lower_bound or 0.0,
        H=p.H,
        HV=p.HV,
        K=p.K,
        C=CHUNK,
        BK=tile.BK,
        GATE=p.gate,
        SCALAR=p.has_scalar_gate,
        NORM=p.options.use_qk_l2norm_in_kernel,
        SIGMOID=p.options.use_beta_sigmoid_in_kernel,
        BETA_MAX=beta_max(p),
        IS_PACKED=p.is_packed,
        SAFE=is_safe(p),
        GDT=decay_precision(p),
        SDT=SDT,
        IP=IP,
        **tile.launch(),
    )
    return tiles


def _run_chains(
    p: KdaProblem,
    plan: Plan,
    x: KdaInputs,
    tiles: Prepared,
    o: Tensor | None = None,
    ht: Tensor | None = None,
    h: Tensor | None = None,
    u: Tensor | None = None,
    segments: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor | None, Tensor | None]:
    """Outputs and states from the initial states; returns the segments' maps and first states, if there are any.

    A backward that was handed them passes them as `segments`.
    """
    if plan.seg == 0:
        _launch_state(p, plan, x, tiles, seed=x.initial_state, o=o, ht=ht, h=h, u=u)
        return None, None
    maps, seeds = segments
    if maps is None:
        maps = torch.empty((plan.num_chains, p.HV, p.V + p.K, p.K), dtype=torch.float32, device=x.q.device)
        _launch_state(p, plan, x, tiles, maps=maps)
        seeds = _launch_scan(p, plan, maps, first=x.initial_state, last=ht)
    _launch_state(p, plan, x, tiles, seed=seeds, o=o, h=h, u=u)
    return maps, seeds


def _launch_state(
    p: KdaProblem,
    plan: Plan,
    x: KdaInputs,
    tiles: Prepared,
    seed: Tensor | None = None,
    o: Tensor | None = None,
    ht: Tensor | None = None,
    h: Tensor | None = None,
    u: Tensor | None = None,
    maps: Tensor | None = None,
) -> None:
    tile = plan.config.state
    rows = p.V if maps is None else p.V + p.K
    kda_state_fwd_kernel[(rows // tile.BV * p.HV * plan.num_chains,)](
        *tiles.chain(),
        x.v,
        seed,
        o,
        ht,
        h,
        u,
        maps,
        *_chain_arguments(p, plan, x),
        *x.v.stride()[:3],
        *((0, 0, 0) if o is None else o.stride()[:3]),
        *_chain_sizes(p, plan),
        BV=tile.BV,
        **_chain_constants(p, plan),
        **tile.launch(),
    )


def _run_chains_bwd(
    p: KdaProblem,
    plan: Plan,
    x: KdaInputs,
    tiles: Prepared,
    maps: Tensor | None,
    do: Tensor,
    dht: Tensor | None,
    dh: Tensor,
    dx: Tensor,
    dv: Tensor,
    dh0: Tensor | None,
) -> None:
    tile = plan.config.state_bwd

    def launch(seed: Tensor | None, dh: Tensor | None, dx: Tensor | None, first: Tensor | None) -> None:
        kda_state_bwd_kernel[(p.V // tile.BV * p.HV * plan.num_chains,)](
            *tiles.chain(),
            do,
            seed,
            dh,
            dx,
            dv,
            first,
            *_chain_arguments(p, plan, x),
            *do.stride()[:3],
            *_chain_sizes(p, plan),
            BV=tile.BV,
            **_chain_constants(p, plan),
            **tile.launch(),
        )

    if plan.seg == 0:
        launch(dht, dh, dx, dh0)
        return
    offsets = _states(p, plan.num_chains, do.device)
    launch(None, None, None, offsets)
    assert maps is not None
    seeds = _launch_scan(p, plan, maps, first=dht, last=dh0, offsets=offsets)
    launch(seeds, dh, dx, None)


def _grads(
    p: KdaProblem,
    plan: Plan,
    x: KdaInputs,
    rest: tuple[Tensor, ...],
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    u: Tensor,
    dx: Tensor,
) -> tuple[Tensor | None, ...]:
    """dq, dk, None for dv, dg, dbeta, dA_log, ddt_bias."""
    beta, decay, rq, rk = rest
    rows, NC, device = (p.HV, p.B * p.T), plan.num_chunks, do.device
    new = functools.partial(torch.empty, dtype=torch.float32, device=device)
    table = (x.cu_seqlens, plan.chunk_seq, plan.chunk_base)
    sizes = (p.T, p.B * p.T, plan.NT)

    da_dtype = torch.float32 if p.dtype == torch.float32 else torch.float16
    da_qk, da_kk = (torch.empty((*rows, CHUNK), dtype=da_dtype, device=device) for _ in range(2))
    da_max, db = new((NC, p.HV)), new(rows)
    tile = plan.config.grads_scores
    kda_grads_scores_kernel[(NC * p.HV,)](
        x.v,
        do,
        u,
        dx,
        da_qk,
        da_kk,
        da_max,
        db,
        *table,
        *x.v.stride()[:3],
        *do.stride()[:3],
        p.scale,
        *sizes,
        HV=p.HV,
        V=p.V,
        C=CHUNK,
        BV=tile.BV,
        IS_PACKED=p.is_packed,
        IP=state_precision(p),
        **tile.launch(),
    )
    work = functools.partial(torch.empty, (*rows, p.K), dtype=p.dtype, device=device)
    dqg, dkb, dkr, ddecay = work(), work(), work(), new((NC, p.HV, p.K))
    tile = plan.config.grads_state
    kda_grads_state_kernel[(NC * p.HV * (p.K // tile.BK),)](
        do,
        u,
        dx,
        h,
        dh,
        decay,
        dqg,
        dkb,
        dkr,
        ddecay,
        *table,
        *do.stride()[:3],
        p.scale,
        *sizes,
        HV=p.HV,
        K=p.K,
        V=p.V,
        C=CHUNK,
        BK=tile.BK,
        BV=tile.BV,
        IS_PACKED=p.is_packed,
        IP=state_precision(p),
        **tile.launch(),
    )
    dq, dk, dg, dbeta = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in (x.q, x.k, x.g, x.beta))
    tile = plan.config.pairs
    NK, scalar = p.K // tile.BK, p.has_scalar_gate
    dqn, dkn, db_part = work(), work(), new((NK, *rows))
    dg_part = new((NK, *rows)) if scalar else None
    parts = functools.partial(torch.zeros, dtype=torch.float32, device=device)  # surplus programs write nothing
    part_shape = (NC, NUM_SUBS, p.HV, 1) if scalar else (NC, 2, p.HV, p.K)
    dA_part, dbias_part = (None if t is None else parts(part_shape) for t in (x.A_log, x.dt_bias))
    kda_grads_pairs_kernel[(NC * p.HV * NK * 2,)](
        x.q,
        x.k,
        x.g,
        beta,
        x.A_log,
        x.dt_bias,
        rq,
        rk,
        dqg,
        dkb,
        dkr,
        ddecay,
        da_qk,
        da_kk,
        da_max,
        dqn,
        dkn,
        dg_part if scalar else dg,
        db_part,
        dA_part,
        dbias_part,
        *table,
        *x.q.stride()[:3],
        *x.k.stride()[:3],
        *x.g.stride()[:3],
        p.options.lower_bound or 0.0,
        *sizes,
        H=p.H,
        HV=p.HV,
        K=p.K,
        C=CHUNK,
        BK=tile.BK,
        GATE=p.gate,
        SCALAR=scalar,
        IS_PACKED=p.is_packed,
        GDT=decay_precision(p),
        SDT=pair_precision(p),
        IP=state_precision(p),
        **tile.launch(),
    )
    kda_grads_finish_kernel[(NC * p.H * NUM_SUBS,)](
        x.q,
        x.k,
        x.g,
        beta,
        x.A_log,
        x.dt_bias,
        dqn,
        dkn,
        dg_part,
        db,
        db_part,
        dq,
        dk,
        dg,
        dbeta,
        dA_part,
        dbias_part,
        *table,
        *x.q.stride()[:3],
        *x.k.stride()[:3],
        *x.g.stride()[:3],
        *sizes,
        p.options.lower_bound or 0.0,
        H=p.H,
        HV=p.HV,
        K=p.K,
        C=CHUNK,
        NK=NK,
        GATE=p.gate,
        SCALAR=scalar,
        NORM=p.options.use_qk_l2norm_in_kernel,
        SIGMOID=p.options.use_beta_sigmoid_in_kernel,
        BETA_MAX=beta_max(p),
        IS_PACKED=p.is_packed,
        **plan.config.finish.launch(),
    )
    dA_log = None if dA_part is None else dA_part.sum((0, 1, 3))
    ddt_bias = None if x.dt_bias is None or dbias_part is None else dbias_part.sum((0, 1)).reshape(x.dt_bias.shape)
    return dq, dk, None, dg, dbeta, dA_log, ddt_bias


def _launch_scan(
    p: KdaProblem,
    plan: Plan,
    maps: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    offsets: Tensor | None = None,
    is_map: bool = False,
) -> Tensor:
    """Seeds of the segments from their maps; `offsets` are those of the backward chains, which run in reverse."""
    tile = plan.config.scan
    rows = p.V + p.K if is_map else p.V
    seeds = torch.empty((plan.num_chains, p.HV, rows, p.K), dtype=torch.float32, device=maps.device)
    kda_scan_kernel[(rows // tile.BV * p.HV * p.N,)](
        maps,
        offsets,
        first,
        seeds,
        last,
        plan.seg_base,
        plan.NS,
        HV=p.HV,
        K=p.K,
        V=p.V,
        BV=tile.BV,
        BK=tile.BK,
        IS_PACKED=p.is_packed,
        IS_MAP=is_map,
        **tile.launch(),
    )
    return seeds


def _chain_arguments(p: KdaProblem, plan: Plan, x: KdaInputs) -> tuple:
    return x.cu_seqlens, plan.chunk_base, plan.seg_seq, plan.seg_base


def _chain_sizes(p: KdaProblem, plan: Plan) -> tuple:
    return p.scale, p.T, p.B * p.T, plan.NT, plan.NS, plan.seg


def _chain_constants(p: KdaProblem, plan: Plan) -> dict:
    return {
        "HV": p.HV,
        "K": p.K,
        "V": p.V,
        "C": CHUNK,
        "IS_PACKED": p.is_packed,
        "HAS_SEG": plan.seg > 0,
        "IP": state_precision(p),
    }
