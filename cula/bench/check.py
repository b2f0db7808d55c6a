# SPDX-License-Identifier: Apache-2.0
"""The error of a result against float64: in training, on a GPU, of all of it; otherwise of whole sequences of the first and last
heads.

The expected values come from the recurrences of `cula.reference` in float64, 32 tokens at a time (a token loop over
131072 tokens would take minutes). It shares no code with any backend; the tests hold it to `cula.reference` itself.
A slice keeps every value head of a query/key head, so that gradients of q and k are whole, and follows its sequences
from their first token, so that nothing rests on a state that was not checked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cula import reference
from cula.bench.cases import Case
from cula.bench.family import bench_of
from cula.bench.inputs import Inputs

CHUNK = 32
SHORT = 1024  # tokens of a sequence whose chunks a gradient may keep whole
CPU_TOKENS = 4096  # of a sequence, checked on a CPU; all of them on a GPU, and in training

# beyond this a result is called wrong; rounding inputs and outputs to bf16 alone costs 2e-3 to 8e-3
TOLERANCE = {"bfloat16": 2e-2, "float16": 1e-2, "float32": 2e-3}
GRADIENT_FACTOR = 2.5

Outputs = dict[str, Tensor]  # "o", "state", and in training "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"


@dataclass(frozen=True)
class Slice:
    """Which part of a case is checked."""

    heads: tuple[int, ...]  # query/key heads
    sequences: tuple[int, ...]
    tokens: int | None  # of each sequence; None: all

    def describe(self, case: Case) -> str:
        tokens = "all tokens" if self.tokens is None else f"the first {self.tokens} tokens"
        rows = "rows" if case.is_decode else "sequences"
        if (len(self.heads), len(self.sequences), self.tokens) == (case.H, case.N, None):
            return f"all heads, {rows} and tokens"
        return (
            f"query/key heads {list(self.heads)} of {case.H} with their value heads, "
            f"{rows} {list(self.sequences)} of {case.N}, {tokens}"
        )


def choose_slice(case: Case, device: torch.device) -> Slice:
    if case.is_train and device.type == "cuda":  # parameters gather from all heads and sequences, and their sums may cancel
        return Slice(tuple(range(case.H)), tuple(range(case.N)), None)
    heads, sequences = (tuple(dict.fromkeys((0, count - 1))) for count in (case.H, case.N))
    is_long = device.type != "cuda" and not case.is_train and max(case.lens) > CPU_TOKENS
    return Slice(heads, sequences, CPU_TOKENS if is_long else None)


def tolerance(case: Case, name: str) -> float:
    return TOLERANCE[case.dtype] * (1 if name in ("o", "state") else GRADIENT_FACTOR)


def errors(got: Outputs, want: Outputs, case: Case, part: Slice) -> dict[str, float]:
    """Relative error of every output that is both expected and given; NaN stays NaN."""
    return {
        name: reference.relative_error(_cut(got[name], name, case, part), value) for name, value in want.items() if name in got
    }


def is_wrong(found: dict[str, float], case: Case) -> str | None:
    """Which outputs are out of tolerance, as a sentence; None if all are right."""
    bad = [f"{name} {e:.1e} > {tolerance(case, name):.1e}" for name, e in found.items() if not e <= tolerance(case, name)]
    return f"relative error {', '.join(bad)}" if bad else None


def expected(x: Inputs, part: Slice) -> Outputs:
    """The slice in float64: o, the last states, and in training the gradients of sum(o do)."""
    case = x.case
    leaves: dict[str, Tensor] = {}
    sources = x.leaves()
    if case.is_decode and x.h0 is not None and x.state_indices is not None:
        sources["h0"] = x.h0[x.state_indices.long()]
    for name, t in sources.items():
        if t is not None:
            leaves[name] = _cut(t, f"d{name}", case, part).double().requires_grad_(case.is_train)
    with torch.set_grad_enabled(case.is_train):
        o, state = _recurrence(x, leaves, part)
        want = {"o": o.detach()}
        if part.tokens is None and (case.is_decode or case.has("ht") or case.has("pool")):
            want["state"] = state.detach()
        if case.is_train and x.do is not None:
            grads = torch.autograd.grad(o, list(leaves.values()), _cut(x.do, "o", case, part).double())
            whole = len(part.sequences) == case.N  # parameters gather from every sequence
            for (name, _), grad in zip(leaves.items(), grads):
                if whole or name not in ("A_log", "dt_bias"):
                    want[f"d{name}"] = grad
    return want


def _recurrence(x: Inputs, at: dict[str, Tensor], part: Slice) -> tuple[Tensor, Tensor]:
    """(o [tokens, hv, V], states [n, hv, V, K]) of a slice whose tokens lie end to end."""
    case = x.case
    q, k, g, beta = bench_of(case.family).recurrence(x, at, lambda t: _value_heads(t, 0, case, part))
    outputs, states, first = [], [], 0
    for i, n in enumerate(part.sequences):
        length = case.lens[n] if part.tokens is None else min(part.tokens, case.lens[n])
        S = at["h0"][i] if "h0" in at else k.new_zeros(k.shape[1], case.V, case.K)
        for start, end in itertools.pairwise((*range(first, first + length, CHUNK), first + length)):
            chunk = [None if t is None else t[start:end].transpose(0, 1) for t in (q, k, at["v"], g, beta)]
            if case.is_train and length > SHORT:  # keeps the states alone
                o, S = checkpoint(_chunk, S, *chunk, use_reentrant=False, preserve_rng_state=False)
            else:
                o, S = _chunk(S, *chunk)  # type: ignore[arg-type]
            outputs.append(o.transpose(0, 1))
        states.append(S)
        first += length
    return torch.cat(outputs), torch.stack(states)


def _chunk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """One chunk [h, C, ...] from state S [h, V, K]. Decays are made from differences, so no exponent is positive."""
    C = q.shape[1]
    G = g.cumsum(1)  # [h, C, K]
    later = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()[:, :, None]
    pairs = k[:, None] * (G[:, :, None] - G[:, None]).masked_fill(~later, float("-inf")).exp()  # [h, i, j, K]
    u = v
    if beta is not None:
        A = beta[..., None] * (k[:, :, None] * pairs).sum(-1).tril(-1)
        seen = (k * G.exp()) @ S.mT
        u = torch.linalg.solve_triangular(A, beta[..., None] * (v - seen), upper=False, unitriangular=True)
    o = (q * G.exp()) @ S.mT + (q[:, :, None] * pairs).sum(-1) @ u
    last = G[:, -1:]
    return o, S * last.exp() + u.mT @ (k * (last - G).exp())


def _cut(t: Tensor, name: str, case: Case, part: Slice) -> Tensor:
    """The slice of a tensor: its chosen heads and, where it has tokens or states, its chosen sequences."""
    if name in ("dA_log", "ddt_bias"):
        return _value_heads(t.reshape(case.HV, -1) if t.numel() != case.HV else t, 0, case, part)
    if name in ("state", "dh0"):
        return _value_heads(t, 1, case, part)[list(part.sequences)]
    heads = list(part.heads)
    t = t[:, :, heads] if name in ("dq", "dk") else _value_heads(t, 2, case, part)
    starts = (0, *itertools.accumulate(case.lens))
    pieces = [t[0, starts[n] : starts[n + 1]] if case.packed else t[n] for n in part.sequences]
    return torch.cat([piece[: part.tokens] for piece in pieces])


def _value_heads(t: Tensor, dim: int, case: Case, part: Slice) -> Tensor:
    G = case.HV // case.H
    chosen = [h * G + i for h in part.heads for i in range(G)]
    return t.index_select(dim, torch.tensor(chosen, device=t.device))
