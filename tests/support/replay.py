# SPDX-License-Identifier: Apache-2.0
"""Records without a cache, and on a CPU."""

import pytest
import torch

from cula.core.replay import record, workspace


def replay(recorded, tensors):
    """What a record makes of these tensors."""
    tensors = tuple(tensors)
    done = record.replayer(tensors, recorded)(tensors)
    assert done is not NotImplemented
    return done


def addresses(tensors):
    """Of tensors as a launcher takes them."""
    return record.guard(tensors)(tensors)


def stand_in(by: str):
    """How a test's function stands in for a kernel: called by Python, or by C as one of tvm-ffi's."""
    if by == "python":
        return lambda function: function
    return pytest.importorskip("tvm_ffi").convert


def instead_of_launches(monkeypatch, host, by, keep=lambda name, arguments: (name, *arguments)):
    """Launches of a host module (`ops/cute/kda.py` and the like) go into a list instead, and so do those of its records, which
    find themselves on a CPU: what `keep` makes of a kernel's name and its arguments. `by` as in `stand_in`."""
    calls, kernel = [], stand_in(by)
    monkeypatch.setattr(host, "load", lambda name, target: kernel(lambda *arguments: calls.append(keep(name, arguments))))
    monkeypatch.setattr(host, "stream_of", lambda device: 0)
    replay_on_cpu(monkeypatch)
    return calls


def replay_on_cpu(monkeypatch, device=None, stream=0):
    """Records find themselves on this device and stream, and what they make is on the CPU. Workspaces are a test's own."""

    def empty(shape, strides, dtype):
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(record, "current_device", lambda: device)
    monkeypatch.setattr(record, "current_stream", lambda device: stream)
    monkeypatch.setattr(record, "empty", empty)
    monkeypatch.setattr(workspace, "empty", empty)
    kept = workspace._Kept()
    monkeypatch.setattr(workspace, "_kept_on", lambda device: kept)
