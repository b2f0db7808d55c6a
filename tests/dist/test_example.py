# SPDX-License-Identifier: Apache-2.0
"""The example of the README runs as it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_context_parallel_example():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "examples/context_parallel.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--lengths", "256", "510"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("4 ranks on CPUs")
    assert [line.split("|")[0].strip() for line in lines[2:4]] == ["256", "510"]
    assert all("8 KiB" in line for line in lines[2:4])
