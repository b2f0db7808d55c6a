# SPDX-License-Identifier: Apache-2.0
"""KDA forward: outputs and states of a call, and the transition of each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.core.constants import CHUNK
from cula.core.kernels import Forward
from cula.core.replay.record import LaunchRecord
from cula.kda.problem import KdaInputs, KdaProblem

from .kda_launches import IntraTiles, Launches, Segments
from .memory import allocator
from .recording import record_call


def kda_fwd(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> Forward:
    """Outputs, and whatever else the options ask for."""
    p, options = problem, problem.options
    run = Launches(p, x)
    o = run.new((p.B, p.T, p.HV, p.V), p.dtype) if out is None else out
    ht = run.states(p.N) if options.output_final_state else None
    h = u = None
    if options.return_intermediate_states:
        h = run.states(run.num_chunks if x.cu_seqlens is None else _count_chunks(x.cu_seqlens))
    elif options.disable_recompute and p.needs_grad:
        h, u = run.states(run.num_chunks, p.dtype), run.new((p.HV, p.B * p.T, p.V), p.dtype)
    if p.B * p.T == 0:
        copy_state(ht, x.initial_state)
        return Forward(o, ht, h if h is None else p.by_row(h))
    tiles = run.intra()
    segments = run.forward(tiles, o=o, ht=ht, h=h, u=u)
    saved: tuple[Tensor | None, ...] = ()
    if u is not None:
        saved = (*tiles, h, u, *segments)
    elif p.needs_grad:
        saved = (None, None, None, *tiles[3:], None, None, *segments)
    return Forward(o, ht, p.by_row(h) if h is not None and options.return_intermediate_states else None, saved)


def record_kda_fwd(problem: KdaProblem, x: KdaInputs, out: Tensor | None = None) -> LaunchRecord | None:
    """A record for calls like this one; see `recording.py`."""
    p = problem
    if p.options.return_intermediate_states:
        return None
    return record_call(("kda_fwd", p), lambda: kda_fwd(p, x, out)[:2], (*x, out), p.B * p.T * p.HV, x.q.device)


Saved = tuple[IntraTiles, Tensor | None, Tensor | None, Segments]


def unpack(saved: tuple[Tensor | None, ...]) -> Saved:
    """What `kda_fwd` saved: tiles, h, u, segments."""
    num_tiles = len(IntraTiles._fields)
    h, u, *segments = saved[num_tiles:]
    return IntraTiles(*saved[:num_tiles]), h, u, Segments(*segments)  # type: ignore[arg-type]


def kda_transition(problem: KdaProblem, x: KdaInputs) -> tuple[Tensor, Tensor]:
    """The affine transition of each sequence, `ht = h0 @ M + B`: M [N, HV, K, K] and B [N, HV, V, K], float32."""
    p = problem
    if p.B * p.T == 0:
        transitions = allocator(x.q.device)((p.N, p.HV, p.V + p.K, p.K), torch.float32).zero_()
        transitions[:, :, p.V :].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    else:
        run = Launches(p, x)
        transitions = run.transitions(run.intra(), run.num_chains)
        if run.schedule.seg:
            # Composing the segments' transitions is their scan from the state [B | M] = [0 | I]: V + K rows instead of V.
            whole = run.new((p.N, p.HV, p.V + p.K, p.K), transitions.dtype)
            run.scan(transitions, first=None, last=whole, compose=True)
            transitions = whole
    return transitions[:, :, p.V :], transitions[:, :, : p.V]


def copy_state(out: Tensor | None, first: Tensor | None) -> None:
    """The last state (or the first state's gradient) of sequences without tokens."""
    if out is not None:
        out.zero_() if first is None else out.copy_(first)


def _count_chunks(cu_seqlens: Tensor) -> int:
    """Exactly, since it is the shape of a result. Waits for the GPU."""
    return int(((cu_seqlens.diff().cpu() + CHUNK - 1) // CHUNK).sum())
