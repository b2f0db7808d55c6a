# SPDX-License-Identifier: Apache-2.0
"""Launching around Triton's launcher passes on exactly what that would."""

import types

import pytest
import torch

from cula.ops.triton import launch


@pytest.fixture
def launcher():
    """Triton's own, with a function that records in place of the compiled one."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    made = object.__new__(driver.CudaLauncher)
    sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    aligns = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    made.__dict__.update(num_ctas=1, launch_cooperative_grid=False, launch_pdl=True, **sizes, **aligns)
    made.calls = []
    made.launch = lambda *passed: made.calls.append(passed)
    return made


AFTER_STREAM = ("function", "metadata", None, None, None)
ARGUMENTS = (10, 20, None, (1, 2), 0.5)


def test_the_same_is_passed_on(launcher):
    run, before, after = launch._unwrapped(launcher, (7, 1, 1), AFTER_STREAM, ARGUMENTS)
    assert run is launcher.launch
    assert not launcher.calls, "nothing is launched to find out"
    run(*before, "stream", *after, *ARGUMENTS)
    launcher(7, 1, 1, "stream", *AFTER_STREAM, *ARGUMENTS)
    assert launcher.calls[0] == launcher.calls[1]


def test_a_kernel_that_needs_scratch_memory_keeps_its_launcher(launcher, monkeypatch):
    launcher.global_scratch_size = 16
    allocation = pytest.importorskip("triton.runtime._allocation")
    monkeypatch.setattr(allocation, "_allocator", types.SimpleNamespace(get=lambda: lambda *_: torch.empty(16)))
    run, before, after = launch._unwrapped(launcher, (7, 1, 1), AFTER_STREAM, ARGUMENTS)
    assert (run, before, after) == (launcher, (7, 1, 1), AFTER_STREAM)


def test_an_unknown_launcher_is_called_itself():
    def run(*_):
        raise AssertionError("not asked")

    assert launch._unwrapped(run, (7, 1, 1), AFTER_STREAM, ARGUMENTS) == (run, (7, 1, 1), AFTER_STREAM)
