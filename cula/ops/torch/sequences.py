# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant calls in plain PyTorch: a sequence at a time, so that nothing of one depends on which others there are.

Otherwise it does: slabs of chunks take their block size from the strongest decay among them, and products of a batch may be
summed in another order than those of a single matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.family import FAMILIES
from cula.core.kernels import Forward
from cula.core.problem import Problem


class Sequence(NamedTuple):
    """One sequence of a call, as a call of its own."""

    n: slice  # where it is among the states
    where: tuple[slice, slice]  # where its tokens are, [B, T]
    problem: Problem
    x: Any


def fwd_of_each(fwd: Callable[..., Forward]) -> Callable[..., Forward]:
    """A family's forward (`core/kernels.py`) that takes the sequences of a batch-invariant call one by one."""

    @functools.wraps(fwd)
    def call(problem: Problem, x: Any, out: Tensor | None = None) -> Forward:
        p = problem
        if not _is_split(p):
            return fwd(p, x, out)
        o = x.v.new_empty(p.B, p.T, p.HV, p.V) if out is None else out
        last, states = [], []
        for sequence in _sequences(p, x):
            made = fwd(sequence.problem, sequence.x)
            o[sequence.where] = made.o
            last.append(made.final_state)
            states.append(made.states)
        return Forward(o, _cat(last), _cat(states, dim=1 if p.is_packed else 0))

    return call


def bwd_of_each(bwd: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a backward. Forwards of several sequences keep nothing for it."""

    @functools.wraps(bwd)
    def call(problem: Problem, x: Any, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> Any:
        p = problem
        if not _is_split(p):
            return bwd(p, x, saved, do, dht)
        tokens = FAMILIES[p.family].token_inputs
        grads: dict[str, Any] = {name: torch.empty_like(getattr(x, name)) for name in tokens}
        d_first = []
        for sequence in _sequences(p, x):
            made = bwd(sequence.problem, sequence.x, (), do[sequence.where], None if dht is None else dht[sequence.n])
            of_sequence = dict(zip(x._fields, made))
            d_first.append(of_sequence.pop("initial_state"))
            for name, d in of_sequence.items():
                if name in tokens:
                    grads[name][sequence.where] = d
                else:  # a parameter, which all sequences share
                    grads[name] = d if grads.get(name) is None else grads[name] + d
        grads["initial_state"] = _cat(d_first)
        return tuple(grads[name] for name in x._fields[:-1])

    return call


def _is_split(p: Problem) -> bool:
    """Whether a call has to be made sequence by sequence; one of a single sequence that is not packed is what those calls are."""
    return p.options.batch_invariant and (p.is_packed or p.N > 1)


def _sequences(p: Problem, x: Any) -> Iterator[Sequence]:
    offsets = None if x.cu_seqlens is None else x.cu_seqlens.tolist()
    for n in range(p.N):
        row, start, stop = (n, 0, p.T) if offsets is None else (0, offsets[n], offsets[n + 1])
        of, where = slice(n, n + 1), (slice(row, row + 1), slice(start, stop))
        tokens = {name: getattr(x, name)[where] for name in FAMILIES[p.family].token_inputs}
        first = None if x.initial_state is None else x.initial_state[of]
        problem = replace(p, B=1, T=stop - start, N=1, is_packed=False)
        yield Sequence(of, where, problem, x._replace(**tokens, initial_state=first, cu_seqlens=None))


def _cat(parts: list[Tensor | None], dim: int = 0) -> Tensor | None:
    there = [t for t in parts if t is not None]
    return torch.cat(there, dim) if there else None
