# SPDX-License-Identifier: Apache-2.0
"""Rows that go together, as they do off the CPU, and rows one by one: the same outputs and states."""

import pytest
import torch

import cula
from cula.ops.torch import decode
from cula.reference import relative_error


def arguments(mode, N, T, HV=2, K=16, V=8):
    gen = torch.Generator().manual_seed(0)
    given = {name: torch.randn(N, T, HV, size, generator=gen) for name, size in (("q", K), ("k", K), ("v", V))}
    if mode == "lightning":
        return given | {"decay": torch.tensor([0.1, 0.5])}
    return given | {"g": -torch.rand(N, T, HV, K, generator=gen), "beta": torch.rand(N, T, HV, generator=gen)}


@pytest.mark.parametrize("mode", ["kda", "lightning"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("how", ["slots", "token slots", "rows", "drafts", "kept", "half"])
def test_rows_together_and_one_by_one_agree(mode, layout, how, monkeypatch):
    N, T = 3, 2
    given, dtype = arguments(mode, N, T), torch.bfloat16 if how == "half" else torch.float32
    inner = (2, 16, 8) if layout == "kv" else (2, 8, 16)
    pool = torch.randn(3 if how == "rows" else 7, *inner, generator=torch.Generator().manual_seed(1)).to(dtype)
    more = {"state_indices": torch.tensor([5, -1, 2])}
    if how == "rows":
        more = {}
    elif how == "token slots":
        more = {"state_indices": torch.tensor([[5, 0], [-1, 1], [2, -1]]), "num_accepted_tokens": torch.tensor([2, 0, 1])}
    elif how in ("drafts", "kept"):
        more |= {"num_accepted_tokens": torch.tensor([0, 0, 2]), "commit": how == "drafts"}
    made = []
    for together in (False, True):
        if together:
            monkeypatch.setattr(decode, "_row_by_row", decode._all_rows)
        state = pool.clone()
        if how in ("drafts", "kept"):
            more["intermediate_states"] = torch.ones(N, T, *inner)
        o, _ = cula.cula_decode(**given, **more, state=state, mode=mode, state_layout=layout)
        live = [0, 2] if "intermediate_states" in more else []
        made.append((o, state, *(more["intermediate_states"][n] for n in live)))
    for one, other in zip(*made, strict=True):
        assert relative_error(one, other.double()) < (1e-2 if how == "half" else 1e-6)
    assert not torch.equal(made[0][0], torch.zeros_like(made[0][0]))
