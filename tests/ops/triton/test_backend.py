# SPDX-License-Identifier: Apache-2.0
"""What the backend says of itself, which a machine without Triton asks too."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cula.ops.triton import backend
from tests.ops.cute.test_kda_dispatch import HOPPER

ROOT = Path(__file__).resolve().parents[3]


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
