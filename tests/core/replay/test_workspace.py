# SPDX-License-Identifier: Apache-2.0
"""Workspaces: whose they are, and when there is none."""

import threading
import weakref

import pytest
import torch

from cula.core.replay import workspace as module
from cula.core.replay.workspace import MAX_BYTES, workspace


@pytest.fixture
def made(monkeypatch):
    """How many bytes were asked for, each time."""
    sizes = []

    def empty(shape, strides, dtype):
        assert strides == (1,) and dtype == torch.uint8
        sizes.append(shape[0])
        return torch.empty(min(shape[0], 1 << 20), dtype=dtype)

    monkeypatch.setattr(module, "empty", empty)
    monkeypatch.setattr(module, "is_capturing", lambda: False)
    module._kept_on.cache_clear()
    yield sizes
    module._kept_on.cache_clear()


def test_it_is_kept(made):
    on = workspace(0, 1000)
    assert on(0) is on(0)
    assert workspace(0, 400)(0) is on(0), "for others that need no more"
    assert made == [1000]


def test_it_grows_and_is_not_multiplied(made):
    small, large = workspace(0, 1000), workspace(0, 3000)
    first = weakref.ref(small(0))
    assert large(0) is small(0) is large(0)
    assert made == [1000, 3000]
    assert first() is None


def test_streams_and_devices_have_their_own(made):
    on, elsewhere = workspace(0, 1000), workspace(1, 1000)
    assert len({id(t) for t in (on(0), on(7), on(8), elsewhere(0), elsewhere(7))}) == 5
    assert len(made) == 5
    assert on(7) is on(7)


def test_threads_have_their_own(made):
    on, seen = workspace(0, 1000), []

    def work():
        t = on(0)
        assert on(0) is t
        seen.append(weakref.ref(t))

    mine = on(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(made) == 2
    assert seen[0]() is None, "gone with its thread"
    assert on(0) is mine


def test_graphs_get_theirs_from_torch(made, monkeypatch):
    on = workspace(0, 1000)
    kept = on(7)
    monkeypatch.setattr(module, "is_capturing", lambda: True)
    assert len({id(t) for t in (kept, on(7), on(7), on(9))}) >= 2
    assert on(7) is not kept
    assert on(0) is on(0), "the default stream is never captured"
    monkeypatch.setattr(module, "is_capturing", lambda: False)
    assert on(7) is kept
    assert 9 not in module._kept_on(0).by_stream


def test_much_is_not_kept(made):
    on = workspace(0, MAX_BYTES + 1)
    assert on(0) is not on(0)
    assert not module._kept_on(0).by_stream
    assert workspace(0, MAX_BYTES)(0) is workspace(0, MAX_BYTES)(0)


def test_memory_that_cannot_be_had(made, monkeypatch):
    small, large = workspace(0, 1000), workspace(0, 3000)
    small(0)

    def fail(*_):
        raise torch.OutOfMemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr(module, "empty", fail)
        with pytest.raises(torch.OutOfMemoryError):
            large(0)
    assert large(0) is small(0)
