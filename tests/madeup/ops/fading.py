# SPDX-License-Identifier: Apache-2.0
"""The backend's kernels for the family: float32 token loops."""

from __future__ import annotations

import itertools

import torch

from cula.core.kernels import Forward
from cula.ops.torch.decode import decode_rows, for_value_heads


def why_not(op, problem):
    return "fades no faster than 100" if getattr(problem, "factor", 1) > 100 else None


def fading_fwd(problem, x, out=None):
    o, states = _run(problem, x)
    o = o.to(x.q.dtype)
    return Forward(o if out is None else out.copy_(o), states if problem.options.output_final_state else None)


def fading_bwd(problem, x, saved, do, dht):
    """The loop backwards: dS_t = scale do_t q_t^T + f_{t+1} dS_{t+1}, f = exp(-factor rate)."""
    p, G = problem, problem.HV // problem.H
    fade = torch.exp(-p.factor * x.rate.float())[..., None, None]
    q, k = (t.float().repeat_interleave(G, dim=2) for t in (x.q, x.k))
    dq, dk, dv, drate = (torch.zeros(t.shape) for t in (q, k, x.v, x.rate))
    dh0 = None if x.initial_state is None else torch.zeros_like(x.initial_state)
    for n, (row, a, z) in enumerate(_spans(p, x)):
        states = [x.v.new_zeros(p.HV, p.V, p.K, dtype=torch.float32) if x.initial_state is None else x.initial_state[n]]
        for t in range(a, z):
            states.append(states[-1] * fade[row, t] + x.v[row, t].float()[:, :, None] * k[row, t][:, None, :])
        dS = torch.zeros_like(states[0]) if dht is None else dht[n].clone()
        for t in reversed(range(a, z)):
            before, after, do_t = states[t - a], states[t - a + 1], p.scale * do[row, t].float()
            dS = dS + do_t[:, :, None] * q[row, t][:, None, :]
            dq[row, t] = (after * do_t[:, :, None]).sum(1)
            dk[row, t] = (dS * x.v[row, t].float()[:, :, None]).sum(1)
            dv[row, t] = (dS * k[row, t][:, None, :]).sum(2)
            dS = dS * fade[row, t]
            drate[row, t] = -p.factor * (dS * before).sum((1, 2))
        if dh0 is not None:
            dh0[n] = dS
    dq, dk = (d.unflatten(2, (p.H, G)).sum(3) for d in (dq, dk))
    return *(d.to(t.dtype) for d, t in zip((dq, dk, dv, drate), x)), dh0


def fading_transition(problem, x):
    lengths = _spans(problem, x)
    total = torch.stack([x.rate[row, a:z].float().sum(0) for row, a, z in lengths])
    B = _run(problem, x._replace(initial_state=None))[1]
    return torch.exp(-problem.factor * total)[:, :, None, None], B


def fading_decode(problem, x):
    q, k = (for_value_heads(t.float(), problem.HV // problem.H) for t in (x.q, x.k))
    return decode_rows(problem, x, q, k, torch.exp(-x.rate.float())[..., None], None)


def _spans(p, x):
    if x.cu_seqlens is None:
        return [(b, 0, p.T) for b in range(p.B)]
    return [(0, a, z) for a, z in itertools.pairwise(x.cu_seqlens.tolist())]


def _run(p, x):
    q, k = (t.float().repeat_interleave(p.HV // p.H, dim=2) for t in (x.q, x.k))
    rows, states = [], []
    for n, (row, a, z) in enumerate(_spans(p, x)):
        S = x.v.new_zeros(p.HV, p.V, p.K, dtype=torch.float32) if x.initial_state is None else x.initial_state[n]
        for t in range(a, z):
            fade = torch.exp(-p.factor * x.rate[row, t].float())[:, None, None]
            S = S * fade + x.v[row, t].float()[:, :, None] * k[row, t][:, None, :]
            rows.append((S * (p.scale * q[row, t])[:, None, :]).sum(-1))
        states.append(S)
    o = torch.stack(rows).view(p.B, p.T, p.HV, p.V) if rows else x.v.new_zeros(x.v.shape, dtype=torch.float32)
    return o, torch.stack(states)
