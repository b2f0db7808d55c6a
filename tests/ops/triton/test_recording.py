# SPDX-License-Identifier: Apache-2.0
"""What is written down of a call: whose memory each launch is given. Without a GPU: variants that only note what comes."""

from types import SimpleNamespace

import pytest
import torch

from cula.core.replay.record import Address
from cula.ops.triton import memory, recording
from cula.ops.triton.launch import ALIGNMENT


class Variant:
    kernel = SimpleNamespace(tensors=("x", "y", "absent"), any_address=frozenset({"y"}))

    def __init__(self):
        self.recorded = []

    def record(self, grid, of, **named):
        self.recorded.append((grid, of))
        return 0, ("launch", grid)


@pytest.fixture
def no_graph(monkeypatch):
    monkeypatch.setattr(recording, "is_capturing", lambda: False)


@pytest.fixture
def written(monkeypatch, no_graph):
    monkeypatch.setattr(recording, "workspace", lambda device, size: ("workspace", size))
    monkeypatch.setattr(recording, "_has_come_before", lambda call: True)
    device = SimpleNamespace(type="cuda", index=0)

    def write(run, given):
        return recording.record_call("call", run, given, 1, device)

    return write


def new(*shape):
    return memory.allocator(torch.device("cpu"))(shape, torch.float32)


def launch(variant, grid, x, y):
    memory.current.log.launches.append((variant, grid, {"x": x, "y": y, "absent": None}))


def test_inputs_results_and_what_is_handed_on(written):
    variant, q, out = Variant(), torch.randn(4, 4), torch.randn(64)

    def run():
        first, second, o = new(100), new(3), new(4, 4)
        launch(variant, 7, q, first)
        launch(variant, 8, second, first[50:])
        launch(variant, 9, o, out)
        return o, out, None

    record = written(run, (None, q, out))
    assert record.outputs == (((4, 4), (4, 1), torch.float32), 2, None)
    assert record.workspace == ("workspace", 512 + 256) and record.device == 0
    assert record.launches == (("launch", 7), ("launch", 8), ("launch", 9))
    absent = Address(None)
    assert variant.recorded == [
        (7, {"x": Address(1, ALIGNMENT), "y": Address(~3, 1), "absent": absent}),
        (8, {"x": Address(~3, ALIGNMENT, offset=512), "y": Address(~3, 1, offset=200), "absent": absent}),
        (9, {"x": Address(~0, ALIGNMENT), "y": Address(2, 1), "absent": absent}),
    ]


def test_what_cannot_be_recorded(written):
    q, variant = torch.randn(8), Variant()
    assert written(lambda: (launch(variant, 1, q.clone(), q), new(1))[1:], (q,)) is None, "memory that nobody allocated"
    assert written(lambda: 1 / 0, (q, q)) is None, "two tensors of a call share memory: it must not even run again"
    assert written(lambda: 1 / 0, (q, q[4:])) is None, "nor where one is a part of the other, as `out` of an input"
    odd = torch.randn(9)[1:]
    assert written(lambda: (launch(variant, 1, odd, q), new(1))[1:], (q, odd)) is None, "an address that the kernel is not for"
    assert memory.current.log is None


def test_large_calls_are_not_recorded():
    device = SimpleNamespace(type="cuda", index=0)
    assert recording.record_call("call", lambda: 1 / 0, (), recording.MOST_TOKENS + 1, device) is None
    assert recording.record_call("call", lambda: 1 / 0, (), 1, torch.device("cpu")) is None


def test_a_call_runs_again_when_it_comes_again(no_graph, monkeypatch):
    """Prompts of other lengths at each step would otherwise all be computed twice."""
    monkeypatch.setattr(recording, "_seen", set())
    runs, device = [], SimpleNamespace(type="cuda", index=0)
    for T in (64, 65, 66, 64, 66):
        recording.record_call(("kda_fwd", T), lambda T=T: runs.append(T) or (), (), 1, device)
    assert runs == [64, 66]
    monkeypatch.setattr(recording, "MOST_CALLS", 3)
    recording.record_call(("kda_fwd", 67), lambda: 1 / 0, (), 1, device)
    assert recording._seen == {("kda_fwd", 67)}, "what is remembered has an end"


def test_nothing_runs_twice_in_a_graph(written, monkeypatch):
    """Its launches would be captured, too."""
    monkeypatch.setattr(recording, "is_capturing", lambda: True)
    assert written(lambda: 1 / 0, ()) is None


def test_a_call_that_raises_leaves_nothing_behind(written):
    with pytest.raises(ZeroDivisionError):
        written(lambda: 1 / 0, ())
    assert memory.current.log is None
