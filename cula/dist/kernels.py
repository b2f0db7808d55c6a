# SPDX-License-Identifier: Apache-2.0
"""The four passes over a rank's own tokens that context parallelism is made of, for any family.

    forward      outputs and last states, given first states
    transition   (M, B) of each sequence: last state = first state @ M + B
    backward     gradients of all inputs and of the first states, given gradients of outputs and last states
    state_grad   gradients of the first states alone

Each is a kernel of `cula.ops`, chosen as for a call of level 1. Where the backend of the backward has no `state_grad` of its
own, its whole backward gives the same number; where that of the forward has no `transition` and the family's M is a formula, a
forward from zero gives B. A rank without tokens needs none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cula import settings
from cula.core.dispatch import Choice, choose
from cula.core.family import Family
from cula.core.problem import Problem

Inputs = Any  # of a family; all have q, v, initial_state and cu_seqlens


@dataclass(frozen=True)
class LocalKernels:
    """The passes of one call. Inputs are the tensors of level 1 with local tokens and first states."""

    family: Family
    options: Any
    backend: str
    grads: tuple[str, ...]  # names of the inputs that need a gradient
    who: str

    @property
    def needs_grad(self) -> bool:
        return bool(self.grads)

    @property
    def has_dense_transition(self) -> bool:
        return self.family.transition.is_dense

    def check_values(self, x: Inputs, counts_initial_state: bool) -> None:
        """With CULA_CHECK=1, what needs data, as level 1 checks it. An `initial_state` that does not count may hold anything."""
        if settings.check_values():
            problem, local = self._problem(x._replace(initial_state=None, cu_seqlens=None))
            h0 = x.initial_state if counts_initial_state else None
            self.family.check_values(local._replace(initial_state=h0), problem, self.who)

    def piece(self, x: Inputs, tokens: slice) -> Inputs:
        """Some of the tokens, as one sequence (or one batch) without a first state. `transition` and `state_grad` take these."""
        cut = {name: getattr(x, name)[:, tokens] for name in self.family.token_inputs}
        return x._replace(**cut, initial_state=None, cu_seqlens=None)

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """(o, last states, what the backward wants kept)."""
        if x.q.shape[1] == 0:
            return x.v.new_empty(x.v.shape), _unchanged(x, x.initial_state), ()
        problem, x = self._problem(x)
        chosen = self._choose("fwd", problem)
        # what a forward keeps is for the backward of the same backend
        keeps = self.needs_grad and self._choose("bwd", problem).name == chosen.name
        if not keeps and getattr(problem.options, "disable_recompute", False):
            problem = replace(problem, options=problem.options._replace(disable_recompute=False))
        result = self._load(chosen, "fwd")(problem, x)
        return result.o, result.final_state, result.saved if keeps else ()

    def transition(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """(M, B) of each sequence."""
        if x.q.shape[1] == 0:
            B, K = _unchanged(x, None), x.q.shape[3]
            one = torch.eye(K, device=B.device) if self.has_dense_transition else torch.ones(1, 1, device=B.device)
            return one.expand(*B.shape[:2], *one.shape), B
        problem, x = self._problem(x)
        factor = self.family.transition.factor
        if factor is None:
            return self._load(self._choose("transition", problem), "transition")(problem, x)
        chosen = self._choose("fwd", problem)
        kernel = chosen.backend.find(self.family.name, self._op("transition"))
        if kernel is not None:
            return kernel(problem, x)
        return factor(problem, x), self._load(chosen, "fwd")(problem, x).final_state

    def backward(
        self, x: Inputs, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """(gradients of the inputs before initial_state, gradient of initial_state)."""
        given = x[:-2]
        if x.q.shape[1] == 0:
            return [torch.zeros_like(t) if self._has_grad(i, t) else None for i, t in enumerate(given)], _unchanged(x, dht)
        problem, x = self._problem(x)
        *grads, dh0 = self._load(self._choose("bwd", problem), "bwd")(problem, x, saved, do, dht)
        return [None if t is None or d is None else d.view(t.shape).to(t.dtype) for d, t in zip(grads, given)], dh0

    def state_grad(self, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
        """The gradient of the first states."""
        if x.q.shape[1] == 0:
            return _unchanged(x, dht)
        problem, x = self._problem(x._replace(initial_state=_unchanged(x, None)))
        chosen = self._choose("bwd", problem)
        kernel = chosen.backend.find(self.family.name, self._op("state_grad"))
        if kernel is None:
            return self._load(chosen, "bwd")(problem, x, (), do, dht)[-1]
        return kernel(problem, x, do, dht)

    def _problem(self, x: Inputs) -> tuple[Problem, Inputs]:
        problem, x = self.family.check(x, self.options._replace(output_final_state=True), self.who)
        return replace(problem, needs_grad=self.needs_grad, grads=self.grads), x

    def _op(self, name: str) -> str:
        return f"{self.family.name}_{name}"

    def _choose(self, name: str, problem: Problem) -> Choice:
        return choose(self._op(name), problem, self.backend, who=self.who)

    def _load(self, choice: Choice, name: str) -> Any:
        return choice.backend.load(self.family.name, self._op(name))

    def _has_grad(self, i: int, t: Tensor | None) -> bool:
        return t is not None and self.family.Inputs._fields[i] in self.family.differentiable


def _unchanged(x: Inputs, state: Tensor | None) -> Tensor:
    """What no token does to a state, or to its gradient: nothing. None stands for zeros."""
    if state is not None:
        return state.clone()
    num = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return torch.zeros(num, *x.v.shape[2:], x.q.shape[3], dtype=torch.float32, device=x.v.device)
