# SPDX-License-Identifier: Apache-2.0
"""The family over ranks."""

from __future__ import annotations

import torch

import tests.madeup.register  # noqa: F401
from cula.reference import relative_error
from tests.madeup.calls import tensors
from tests.madeup.family import cula_fading_cp, reference


def cases(world):
    return {mode: lambda rank, world, mode=mode: _run(mode, rank, world) for mode in ("ring", "scan")}


def _run(mode, rank, world):
    whole = tensors(T=40)
    h0 = torch.randn(2, 2, 8, 16, generator=torch.Generator().manual_seed(1))
    leaves = {n: t.double().requires_grad_() for n, t in whole.items()}
    want, want_state = reference(**leaves, initial_state=h0)
    want_grads = torch.autograd.grad(want.sum() + want_state.sum(), list(leaves.values()))
    cut = slice(rank * 40 // world, (rank + 1) * 40 // world)
    mine = {n: t[:, cut].clone().requires_grad_() for n, t in whole.items()}
    o, state = cula_fading_cp(
        **mine, initial_state=h0, sp_group=None, sp_size=world, sp_rank=rank, cp_mode=mode, broadcast_final_state=True
    )
    assert relative_error(o, want[:, cut]) < 1e-5
    assert relative_error(state, want_state) < 1e-5
    (o.sum() + state.sum() / world).backward()
    for (name, leaf), grad in zip(mine.items(), want_grads):
        assert relative_error(leaf.grad, grad[:, cut]) < 1e-5, name
