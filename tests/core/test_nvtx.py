# SPDX-License-Identifier: Apache-2.0
"""`CULA_NVTX=1`: a range around each call of level 1; without it nothing is wrapped."""

import inspect

import pytest
import torch

import cula
from cula.core import nvtx


def some_call(x: int, *, fails: bool = False) -> int:
    if fails:
        raise ValueError("as asked")
    return x + 1


def test_without_the_setting_a_function_is_itself(monkeypatch):
    monkeypatch.delenv("CULA_NVTX", raising=False)
    assert nvtx.nvtx_range(some_call) is some_call
    for function in (cula.cula_kda, cula.cula_gdn, cula.cula_lightning, cula.cula_decode):
        assert inspect.unwrap(function) is function


@pytest.fixture
def seen(monkeypatch):
    """What a profiler would see."""
    monkeypatch.setenv("CULA_NVTX", "1")
    events = []
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end"))
    nvtx._has_nvtx.cache_clear()
    yield events
    nvtx._has_nvtx.cache_clear()


def test_a_call_is_a_range_also_where_it_fails(seen):
    ranged = nvtx.nvtx_range(some_call)
    assert ranged(1) == 2
    with pytest.raises(ValueError, match="as asked"):
        ranged(1, fails=True)
    assert seen == ["cula.some_call", "end"] * 2
    assert inspect.signature(ranged) == inspect.signature(some_call)


def test_a_torch_without_nvtx_is_said_once(seen, monkeypatch, caplog):
    def absent(name):
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", absent)
    ranged = nvtx.nvtx_range(some_call)
    assert (ranged(1), ranged(2), seen) == (2, 3, [])
    assert caplog.text.count("CULA_NVTX=1 has no effect") == 1
