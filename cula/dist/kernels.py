# SPDX-License-Identifier: Apache-2.0
"""The four passes over a rank's own tokens that context parallelism is made of, for KDA and for Lightning.

    forward      outputs and last states, given first states
    map          (M, B) of each sequence: last state = first state @ M + B
    backward     gradients of all inputs and of the first states, given gradients of outputs and last states
    state_grad   gradients of the first states alone

Each is a kernel of `cula.ops`, chosen by `cula.dispatch` as for a call of level 1. Where the backend of the backward has
no `state_grad` of its own, its whole backward gives the same number; where that of Lightning's forward has no `map`, a
forward from zero does. A rank without tokens needs none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cula.contract import (
    KdaInputs,
    KdaOptions,
    KdaProblem,
    LightningInputs,
    LightningProblem,
    check_kda,
    check_lightning,
)
from cula.dispatch import choose, select

Inputs = Any  # KdaInputs or LightningInputs: both have q, v, initial_state and cu_seqlens


class Kernels(Protocol):
    """What KDA and Lightning have in common here. x are the tensors of level 1 with local tokens and first states."""

    has_dense_map: bool

    def piece(self, x: Inputs, tokens: slice) -> Inputs:
        """Some of the tokens, as one sequence (or one batch) without a first state. `map` and `state_grad` take these."""

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """(o, last states, what the backward wants kept)."""

    def map(self, x: Inputs) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """(gradients of the inputs before initial_state, gradient of initial_state)."""

    def state_grad(self, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class KdaKernels:
    """See `Kernels`."""

    options: KdaOptions
    backend: str
    needs_grad: bool
    who: str
    has_dense_map = True

    def piece(self, x: KdaInputs, tokens: slice) -> KdaInputs:
        q, k, v, g, beta = (t[:, tokens] for t in x[:5])
        return KdaInputs(q, k, v, g, beta, x.A_log, x.dt_bias)

    def forward(self, x: KdaInputs) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if x.q.shape[1] == 0:
            return _no_outputs(x), _unchanged(x, x.initial_state), ()
        problem, x = self._problem(x)
        chosen = choose("kda_fwd", problem, self.backend)
        # what a forward keeps is for the backward of the same backend
        keeps = self.needs_grad and choose("kda_bwd", problem, self.backend).name == chosen.name
        if not keeps:
            problem = replace(problem, options=replace(problem.options, disable_recompute=False))
        result = chosen.backend.load("kda_fwd")(problem, x)
        return result.o, result.final_state, result.saved if keeps else ()

    def map(self, x: KdaInputs) -> tuple[Tensor, Tensor]:
        K = x.q.shape[3]
        if x.q.shape[1] == 0:
            B = _unchanged(x, None)
            return torch.eye(K, device=B.device).expand(*B.shape[:2], K, K), B
        problem, x = self._problem(x)
        return select("kda_transition", problem, self.backend)(problem, x)

    def backward(
        self, x: KdaInputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        if x.q.shape[1] == 0:
            return [None if t is None else torch.zeros_like(t) for t in x[:7]], _unchanged(x, dht)
        dt_bias = x.dt_bias
        problem, x = self._problem(x)
        grads = list(select("kda_bwd", problem, self.backend)(problem, x, saved, do, dht))
        if dt_bias is not None:
            grads[6] = grads[6].view(dt_bias.shape)
        return grads[:7], grads[7]

    def state_grad(self, x: KdaInputs, do: Tensor, dht: Tensor | None) -> Tensor:
        if x.q.shape[1] == 0:
            return _unchanged(x, dht)
        problem, x = self._problem(x._replace(initial_state=_unchanged(x, None)))
        backend = choose("kda_bwd", problem, self.backend).backend
        kernel = backend.find("kda_state_grad")
        if kernel is None:
            return backend.load("kda_bwd")(problem, x, (), do, dht).d_initial_state
        return kernel(problem, x, do, dht)

    def _problem(self, x: KdaInputs) -> tuple[KdaProblem, KdaInputs]:
        problem, x = check_kda(x, replace(self.options, output_final_state=True), self.who)
        return replace(problem, needs_grad=self.needs_grad), x


@dataclass(frozen=True)
class LightningKernels:
    """See `Kernels`."""

    scale: float | None
    chunk_size: int
    backend: str
    needs_grad: bool
    who: str
    has_dense_map = False

    def piece(self, x: LightningInputs, tokens: slice) -> LightningInputs:
        return LightningInputs(x.q[:, tokens], x.k[:, tokens], x.v[:, tokens], x.decay)

    def forward(self, x: LightningInputs) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if x.q.shape[1] == 0:
            return _no_outputs(x), _unchanged(x, x.initial_state), ()
        problem, x = self._problem(x)
        o, final_state = select("lightning_fwd", problem, self.backend)(problem, x)
        return o, final_state, ()

    def map(self, x: LightningInputs) -> tuple[Tensor, Tensor]:
        if x.q.shape[1] == 0:
            B = _unchanged(x, None)
            return B.new_ones(*B.shape[:2], 1, 1), B
        problem, x = self._problem(x)
        backend = choose("lightning_fwd", problem, self.backend).backend
        kernel = backend.find("lightning_transition")
        if kernel is not None:
            return kernel(problem, x)
        _, B = backend.load("lightning_fwd")(problem, x)
        return torch.exp(-x.decay * problem.T).view(1, -1, 1, 1).expand(problem.N, -1, 1, 1), B

    def backward(
        self, x: LightningInputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        if x.q.shape[1] == 0:
            return [*(torch.zeros_like(t) for t in x[:3]), None], _unchanged(x, dht)
        problem, x = self._problem(x)
        dq, dk, dv, dh0 = select("lightning_bwd", problem, self.backend)(problem, x, do, dht)
        return [dq, dk, dv, None], dh0

    def state_grad(self, x: LightningInputs, do: Tensor, dht: Tensor | None) -> Tensor:
        if x.q.shape[1] == 0:
            return _unchanged(x, dht)
        problem, x = self._problem(x._replace(initial_state=_unchanged(x, None)))
        backend = choose("lightning_bwd", problem, self.backend).backend
        kernel = backend.find("lightning_state_grad")
        if kernel is None:
            return backend.load("lightning_bwd")(problem, x, do, dht)[3]
        return kernel(problem, x, do, dht)

    def _problem(self, x: LightningInputs) -> tuple[LightningProblem, LightningInputs]:
        problem, x = check_lightning(x, scale=self.scale, output_final_state=True, chunk_size=self.chunk_size, who=self.who)
        return replace(problem, needs_grad=self.needs_grad), x


def _no_outputs(x: Inputs) -> Tensor:
    return x.v.new_empty(x.v.shape)


def _unchanged(x: Inputs, state: Tensor | None) -> Tensor:
    """What no token does to a state, or to its gradient: nothing. None stands for zeros."""
    if state is not None:
        return state.clone()
    num = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return torch.zeros(num, *x.v.shape[2:], x.q.shape[3], dtype=torch.float32, device=x.v.device)
