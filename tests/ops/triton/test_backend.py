# SPDX-License-Identifier: Apache-2.0
"""What the backend says of itself, which a machine without Triton asks too."""

import dataclasses
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from cula.ops.triton import backend
from tests.ops.cute.test_kda_dispatch import HOPPER

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_what_it_serves_is_known_without_triton():
    code = "import sys; sys.modules['triton'] = None; from cula.ops.triton import backend; print(backend.MAX_K)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.stdout.strip() == "256", run.stderr


@pytest.mark.parametrize(
    ("release", "sm", "dtype", "is_declined"),
    [
        ("3.5.1", (10, 0), torch.bfloat16, True),
        ("3.5.1", (10, 3), torch.float16, True),
        ("3.5.1", (10, 0), torch.float32, False),
        ("3.5.1", (9, 0), torch.bfloat16, False),
        ("3.6.0", (10, 0), torch.bfloat16, False),
        (None, (10, 0), torch.bfloat16, False),
    ],
)
def test_a_release_that_does_not_compile_for_blackwell_is_declined(monkeypatch, release, sm, dtype, is_declined):
    monkeypatch.setattr(backend.versions, "installed", lambda wanted: release)
    reason = backend.why_not("kda_fwd", dataclasses.replace(HOPPER, sm=sm, dtype=dtype))
    assert (reason is not None) == is_declined
    assert not is_declined or f"Triton {release} does not compile its kernels for this GPU, and 3.6 does" in str(reason)


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU: a function that sets what Triton's build raises there, and whether there is a compiler. Returns what
    Triton has been asked for."""
    asked = []

    def fake(error: Exception | None, compiler: str | None) -> list:
        class Driver:
            @property
            def utils(self):
                asked.append("utils")
                if error is not None:
                    raise error

        runtime = types.SimpleNamespace(driver=types.SimpleNamespace(active=Driver()))
        monkeypatch.setattr(backend.importlib, "import_module", lambda name: {"triton.runtime": runtime}[name])
        monkeypatch.setattr(backend.shutil, "which", lambda name: compiler if compiler and name in compiler else None)
        return asked

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend.settings, "triton_is_interpreted", lambda: False)
    monkeypatch.delenv("CC", raising=False)
    backend._no_launchers.cache_clear()
    yield fake
    backend._no_launchers.cache_clear()


NO_HEADERS = subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"])


@pytest.mark.parametrize(
    ("error", "compiler", "sentence"),
    [
        (None, "/usr/bin/gcc", None),
        (None, None, None),  # its cache has the launchers
        (RuntimeError("Failed to find C compiler. Please\nspecify"), None, "Failed to find C compiler. Please (install gcc"),
        (NO_HEADERS, "/usr/bin/gcc", "gcc ends with status 1 (install gcc and Python's headers, or name a compiler in CC)"),
        (PermissionError(13, "Permission denied", "/home/.triton"), "/usr/bin/gcc", "Permission denied"),
        (AssertionError("libcuda.so cannot found!"), "/usr/bin/clang", "libcuda.so cannot found!"),
    ],
    ids=str,
)
def test_a_machine_that_cannot_launch_is_told_once(machine, error, compiler, sentence):
    asked = machine(error, compiler)
    for _ in range(2):
        reason = backend.lacks(True)
        assert reason is None if sentence is None else sentence in reason
    assert asked == ["utils"]


def test_nothing_is_compiled_to_explain_a_call(machine):
    asked = machine(NO_HEADERS, "/usr/bin/gcc")
    assert backend.lacks(False) is None and not asked  # who knows
    assert backend.lacks(True) is not None
    assert "gcc ends with status 1" in backend.lacks(False)


def test_without_a_compiler_there_is_nothing_to_compile(machine):
    asked = machine(RuntimeError("Failed to find C compiler."), None)
    assert "Failed to find C compiler." in backend.lacks(False)
    assert asked == ["utils"]


def test_what_no_gpu_can_launch_is_only_described(machine, monkeypatch):
    asked = machine(RuntimeError("Failed to find C compiler."), None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.lacks(True) is None and not asked
