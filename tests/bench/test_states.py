# SPDX-License-Identifier: Apache-2.0
"""The kernel that only reads and writes states: it touches those named, and all of them."""

import pytest
import torch

from cula.bench import states


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_states_named_are_touched_and_no_others(backend, device):
    pool = torch.randn(4, 2, 32, 64, generator=torch.Generator().manual_seed(0)).to(device)
    before = pool.clone()
    states.touch(pool, torch.tensor([2, 0], dtype=torch.int32, device=device), factor=2.0)
    assert torch.equal(pool[[0, 2]], 2 * before[[0, 2]])
    assert torch.equal(pool[[1, 3]], before[[1, 3]])


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="multiples of 4096 bytes"):
        states.touch(torch.zeros(2, 1, 3, 5), torch.zeros(1, dtype=torch.int32))


def test_on_a_cpu_there_is_torch_alone():
    pool = torch.zeros(3, 1, 8, 8)
    assert set(states.measure(pool, torch.tensor([1]))) == {"states_ms"}
