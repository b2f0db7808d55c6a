# SPDX-License-Identifier: Apache-2.0
"""KDA backward: what the forward did not keep is made again, then the chains run in reverse, then the chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.core.replay.record import LaunchRecord
from cula.kda.problem import KdaGrads, KdaInputs, KdaProblem

from .kda_fwd import copy_state, unpack
from .kda_launches import IntraTiles, Launches, Segments
from .recording import record_call


def kda_bwd(problem: KdaProblem, x: KdaInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """Gradients of every input from those of the outputs and (where not None) of the final states."""
    p = problem
    do = do if do.stride(-1) == 1 else do.contiguous()
    dht = None if dht is None else dht.float().contiguous()
    if p.B * p.T == 0:
        dh0 = None if x.initial_state is None else torch.empty_like(x.initial_state)
        copy_state(dh0, dht)
        return KdaGrads._make([*(None if t is None else torch.zeros_like(t) for t in x[:7]), dh0])

    run = Launches(p, x)
    dh0 = None if x.initial_state is None else run.states(p.N)
    kept, h, u, segments = unpack(saved) if saved else (None, None, None, Segments())
    tiles = kept if kept is not None and kept.kb is not None else run.intra(kept)
    if h is None or u is None:
        h, u = run.states(run.num_chunks, p.dtype), run.new((p.HV, p.B * p.T, p.V), p.dtype)
        segments = run.forward(tiles, h=h, u=u, segments=segments)
    dh, dx, dv = run.backward(tiles, segments, do, dht, h, u, dh0)
    tiles = IntraTiles(None, None, None, None, None, *tiles[5:])  # their memory is free for what comes
    del kept, segments, saved
    dq, dk, dg, dbeta, dA_log, ddt_bias = _intra_bwd(run, tiles, do, h, dh, u, dx)
    return KdaGrads(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0)


def record_kda_bwd(
    problem: KdaProblem, x: KdaInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None
) -> LaunchRecord | None:
    """A record for backwards like this one; see `recording.py`. It takes the tensors of x, what was saved, do and dht."""
    p, given = problem, (*x, *saved, do, dht)
    return record_call(("kda_bwd", p), lambda: kda_bwd(p, x, saved, do, dht), given, p.B * p.T * p.HV, x.q.device)


def _intra_bwd(
    run: Launches, tiles: IntraTiles, do: Tensor, h: Tensor, dh: Tensor, u: Tensor, dx: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dg, dbeta, dA_log, ddt_bias."""
    x = run.x
    grads = run.scores_bwd(do, u, dx)
    db = grads.pop("db")
    grads |= run.states_bwd(do, u, dx, h, dh, tiles.decay)
    dg = run.new(tuple(x.g.shape), x.g.dtype)
    parts = run.pairs_bwd(tiles, grads, dg)
    del grads
    dq, dk, dbeta = run.finish_bwd(tiles.beta, db, dg, parts)
    return dq, dk, dg, dbeta, *run.shares_bwd(parts)
