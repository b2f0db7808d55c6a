# SPDX-License-Identifier: Apache-2.0
"""The launches of a KDA call, each a method: it makes the tensors that its kernel writes and hands them on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.constants import CHUNK
from cula.kda.problem import KdaInputs, KdaProblem

from .configs import multiprocessors
from .kda_levels import NUM_SUBS
from .kda_schedule import schedule_kda, tables
from .memory import allocator

Strides = tuple[int, ...]


class IntraTiles(NamedTuple):
    """What the intra-chunk kernel writes."""

    kb: Tensor | None  # [HV, B * T, K]; these three are None where a forward kept the rest for its backward
    kr: Tensor | None  # [HV, B * T, K]
    qg: Tensor | None  # [HV, B * T, K]
    t_inv: Tensor | None  # [HV, B * T, C]; and these two where the recurrence is done with them
    a_qk: Tensor | None  # [HV, B * T, C]
    beta: Tensor  # [HV, B * T] float32, activated
    decay: Tensor  # [chunks, HV, K] float32
    rq: Tensor  # [HV, B * T] float32: inverse norms
    rk: Tensor  # [HV, B * T] float32

    def for_chains(self) -> dict[str, Tensor | None]:
        """What the recurrence reads, by its kernels' names."""
        kb, kr, qg, t_inv, a_qk, beta, decay, _, _ = self
        return {"kb": kb, "kr": kr, "qg": qg, "t_inv": t_inv, "a_qk": a_qk, "beta": beta, "decay": decay}


class Segments(NamedTuple):
    """Where chains are segments: their transitions and first states. None where they are whole sequences."""

    transitions: Tensor | None = None  # [chains, HV, V + K, K]: B above M
    first_states: Tensor | None = None  # [chains, HV, V, K]


class Launches:
    """The kernels of one call. What they have in common is gathered here once."""

    def __init__(self, p: KdaProblem, x: KdaInputs):
        q, k, _, g, _, A_log, dt_bias, _, cu_seqlens = x
        self.p, self.x = p, x
        self.schedule = s = schedule_kda(p, multiprocessors(q.device))
        self.kernels, self.num_chunks, self.num_chains = s.kernels, s.num_chunks, s.num_chains
        self.new = allocator(q.device)
        self.rows = (p.HV, p.B * p.T)
        table = tables(s, p, cu_seqlens)
        where = {"cu_seqlens": cu_seqlens, "chunk_base": table.chunk_base}
        self.seg_base = table.seg_base
        self.chunks = {**where, "chunk_seq": table.chunk_seq, **s.sizes}
        self.chains = {**where, "seg_seq": table.seg_seq, "seg_base": table.seg_base, **s.chain_sizes, "scale": p.scale}
        self.gated: dict[str, Any] = {
            "q": q,
            "k": k,
            "g": g,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "lower_bound": float(p.options.lower_bound or 0),
        }
        self.gated |= {"q_strides": q.stride(), "k_strides": k.stride(), "g_strides": g.stride(), **self.chunks}

    def states(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        p = self.p
        return self.new((count, p.HV, p.V, p.K), dtype)

    def intra(self, kept: IntraTiles | None = None) -> IntraTiles:
        """All tiles of the chunks; where some were `kept`, only kb, kr and qg are made."""
        p, new, rows = self.p, self.new, self.rows
        wide, score, f32 = (*rows, p.K), (*rows, CHUNK), torch.float32
        kb, kr, qg = new(wide, p.dtype), new(wide, p.dtype), new(wide, p.dtype)
        if kept is None:
            t_inv, a_qk = new(score, p.dtype), new(score, p.dtype)
            beta, decay = new(rows, f32), new((self.num_chunks, p.HV, p.K), f32)
            tiles = IntraTiles(kb, kr, qg, t_inv, a_qk, beta, decay, new(rows, f32), new(rows, f32))
        else:
            tiles = IntraTiles(kb, kr, qg, *kept[3:])
        raw_beta = self.x.beta
        beta_sb, beta_st, beta_sh = raw_beta.stride()
        self.kernels.intra(
            self.num_chunks * p.HV,
            **self.gated,
            beta=raw_beta,
            beta_sb=beta_sb,
            beta_st=beta_st,
            beta_sh=beta_sh,
            kb=kb,
            kr=kr,
            qg=qg,
            t_inv=tiles.t_inv if kept is None else None,
            a_qk=tiles.a_qk if kept is None else None,
            b_out=tiles.beta,
            rq_out=tiles.rq,
            rk_out=tiles.rk,
            decay=tiles.decay,
        )
        return tiles

    # Along a sequence

    def forward(
        self,
        tiles: IntraTiles,
        o: Tensor | None = None,
        ht: Tensor | None = None,
        h: Tensor | None = None,
        u: Tensor | None = None,
        segments: Segments | None = None,
    ) -> Segments:
        """Outputs and states from the initial states; returns the segments, which a backward that was handed them passes."""
        if not self.schedule.seg:
            self._recurrence_fwd(tiles, self.x.initial_state, o, ht, h, u)
            return Segments()
        if segments is None or segments.transitions is None:
            transitions = self.transitions(tiles, self.num_chains)
            segments = Segments(transitions, self.scan(transitions, first=self.x.initial_state, last=ht))
        self._recurrence_fwd(tiles, segments.first_states, o, None, h, u)
        return segments

    def transitions(self, tiles: IntraTiles, count: int) -> Tensor:
        """Of each chain, of which there are `count`: [count, HV, V + K, K], B above M."""
        p = self.p
        out = self.new((count, p.HV, p.V + p.K, p.K), torch.float32)
        self._recurrence_fwd(tiles, transitions=out)
        return out

    def _recurrence_fwd(
        self,
        tiles: IntraTiles,
        first_state: Tensor | None = None,
        o: Tensor | None = None,
        ht: Tensor | None = None,
        h: Tensor | None = None,
        u: Tensor | None = None,
        transitions: Tensor | None = None,
    ) -> None:
        p, v = self.p, self.x.v
        num_rows = p.V if transitions is None else p.V + p.K
        self.kernels.recurrence_fwd(
            -(-num_rows // self.schedule.config.recurrence_fwd.BV) * p.HV * self.num_chains,
            **tiles.for_chains(),
            **self.chains,
            v=v,
            v_strides=v.stride(),
            first_state=first_state,
            o=o,
            o_strides=None if o is None else o.stride(),
            ht=ht,
            h=h,
            u=u,
            transitions=transitions,
        )

    def backward(
        self, tiles: IntraTiles, segments: Segments, do: Tensor, dht: Tensor | None, h: Tensor, u: Tensor, dh0: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dh (as h), dx (as u) and dv, from the gradients of outputs and last states; writes dh0."""
        p = self.p
        dh, dx = self.new(tuple(h.shape), h.dtype), self.new(tuple(u.shape), u.dtype)
        dv = self.new((p.B, p.T, p.HV, p.V), p.dtype)
        if not self.schedule.seg:
            self._recurrence_bwd(tiles, do, dv, dht, dh, dx, dh0)
            return dh, dx, dv
        offsets = self.states(self.num_chains)
        self._recurrence_bwd(tiles, do, dv, None, None, None, offsets)
        assert segments.transitions is not None
        dlast = self.scan(segments.transitions, first=dht, last=dh0, offsets=offsets)
        self._recurrence_bwd(tiles, do, dv, dlast, dh, dx, None)
        return dh, dx, dv

    def _recurrence_bwd(
        self,
        tiles: IntraTiles,
        do: Tensor,
        dv: Tensor,
        dlast: Tensor | None,
        dh: Tensor | None,
        dx: Tensor | None,
        dfirst: Tensor | None,
    ) -> None:
        p = self.p
        self.kernels.recurrence_bwd(
            -(-p.V // self.schedule.config.recurrence_bwd.BV) * p.HV * self.num_chains,
            **tiles.for_chains(),
            **self.chains,
            do=do,
            do_strides=do.stride(),
            dlast=dlast,
            dh=dh,
            dx=dx,
            dv=dv,
            dfirst=dfirst,
        )

    def scan(
        self, transitions: Tensor, first: Tensor | None, last: Tensor | None, offsets: Tensor | None = None, compose: bool = False
    ) -> Tensor:
        """First states of the segments from their transitions, and `last`. `compose`: the transitions of whole sequences.

        With `offsets`, those of the backward chains, it runs in reverse and makes the gradients of the segments' last states.
        """
        p = self.p
        num_rows = p.V + p.K if compose else p.V
        states = self.new((self.num_chains, p.HV, num_rows, p.K), torch.float32)
        launch = self.kernels.compose if compose else self.kernels.scan
        launch(
            -(-num_rows // self.schedule.config.scan.BV) * p.HV * p.N,
            transitions=transitions,
            offsets=offsets,
            first=first,
            states=states,
            last=last,
            seg_base=self.seg_base,
            NS=self.chains["NS"],
        )
        return states

    # Backward, inside chunks

    def scores_bwd(self, do: Tensor, u: Tensor, dx: Tensor) -> dict[str, Tensor]:
        """dAqk and dA in units of da_max, and the first term of dbeta."""
        p, v, new = self.p, self.x.v, self.new
        dtype = torch.float32 if p.dtype == torch.float32 else torch.float16
        score = (*self.rows, CHUNK)
        scores = {
            "da_qk": new(score, dtype),
            "da_kk": new(score, dtype),
            "da_max": new((self.num_chunks, p.HV), torch.float32),
        }
        db = new(self.rows, torch.float32)
        self.kernels.scores_bwd(
            self.num_chunks * p.HV,
            **scores,
            **self.chunks,
            v=v,
            v_strides=v.stride(),
            do=do,
            do_strides=do.stride(),
            u=u,
            dx=dx,
            db=db,
            scale=p.scale,
        )
        return {**scores, "db": db}

    def states_bwd(self, do: Tensor, u: Tensor, dx: Tensor, h: Tensor, dh: Tensor, decay: Tensor) -> dict[str, Tensor]:
        """Gradients of the decayed q and k through the states, and of the chunks' decays."""
        p, new = self.p, self.new
        wide = (*self.rows, p.K)
        grads = {
            "dqg": new(wide, p.dtype),
            "dkb": new(wide, p.dtype),
            "dkr": new(wide, p.dtype),
            "ddecay": new((self.num_chunks, p.HV, p.K), torch.float32),
        }
        self.kernels.states_bwd(
            self.num_chunks * p.HV * -(-p.K // self.schedule.config.states_bwd.BK),
            **grads,
            **self.chunks,
            do=do,
            do_strides=do.stride(),
            u=u,
            dx=dx,
            h=h,
            dh=dh,
            decay=decay,
            scale=p.scale,
        )
        return grads

    def pairs_bwd(self, tiles: IntraTiles, grads: dict[str, Tensor], dg: Tensor) -> dict[str, Tensor | None]:
        """Gradients of the normalised q and k, and shares of all that is summed over channels; writes dg of a gate a channel."""
        p, x, new, f32 = self.p, self.x, self.new, torch.float32
        NK = -(-p.K // self.schedule.config.pairs_bwd.BK)
        wide = (*self.rows, p.K)
        part = (self.num_chunks, NUM_SUBS, p.HV, 1) if p.has_scalar_gate else (self.num_chunks, 2, p.HV, p.K)
        made = {
            "dqn": new(wide, p.dtype),
            "dkn": new(wide, p.dtype),
            "db_part": new((NK, *self.rows), f32),
            "dA_part": None if x.A_log is None else new(part, f32),
            "dbias_part": None if x.dt_bias is None else new(part, f32),
        }
        dg_part = new((NK, *self.rows), f32) if p.has_scalar_gate else None
        self.kernels.pairs_bwd(
            self.num_chunks * p.HV * NK * 2,
            **self.gated,
            **grads,
            **made,
            beta=tiles.beta,
            rq=tiles.rq,
            rk=tiles.rk,
            dg=dg if dg_part is None else dg_part,
        )
        return {**made, "dg_part": dg_part}

    def finish_bwd(self, beta: Tensor, db: Tensor, dg: Tensor, parts: dict[str, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dbeta; writes dg of one gate a head."""
        p, x, new = self.p, self.x, self.new
        dq, dk, dbeta = (new(tuple(t.shape), t.dtype) for t in (x.q, x.k, x.beta))
        self.kernels.finish_bwd(
            self.num_chunks * p.H * NUM_SUBS, **self.gated, **parts, beta=beta, db=db, dq=dq, dk=dk, dg=dg, dbeta=dbeta
        )
        return dq, dk, dbeta

    def shares_bwd(self, parts: dict[str, Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """dA_log and ddt_bias from the shares of them."""
        p, x = self.p, self.x
        dA_part, dbias_part = parts["dA_part"], parts["dbias_part"]
        if dA_part is None and dbias_part is None:
            return None, None
        dA_log = None if x.A_log is None else self.new((p.HV,), torch.float32)
        ddt_bias = None if x.dt_bias is None else self.new(tuple(x.dt_bias.shape), torch.float32)
        num_shares = self.num_chunks * (NUM_SUBS if p.has_scalar_gate else 2)
        self.kernels.shares_bwd(p.HV, dA_part=dA_part, dbias_part=dbias_part, dA_log=dA_log, ddt_bias=ddt_bias, R=num_shares)
        return dA_log, ddt_bias
