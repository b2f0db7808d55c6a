# SPDX-License-Identifier: Apache-2.0
"""Every kernel's arguments arrive at the driver as they were given, and a new length compiles nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from cula.core.replay import record as native

ROOT = Path(__file__).resolve().parents[3]


def test_direct_launches():
    if native._compiled() is None:
        pytest.skip("native.c cannot be compiled here")
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.direct_launches"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    for name, seen in json.loads(run.stdout).items():
        launched, direct = seen["first"]
        assert launched > direct, f"{name}: nothing was compiled"
        assert all(launched == direct for launched, direct in seen["again"]), f"{name}: {seen['again']}"
        assert not seen["wrong"], f"{name}: arguments of {seen['wrong']} arrive otherwise than they were given"
