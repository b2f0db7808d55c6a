# SPDX-License-Identifier: Apache-2.0
"""The serving loop finishes every request, and each as if it had been alone."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_request_is_served_as_if_alone():
    command = [sys.executable, str(ROOT / "examples" / "serving_loop.py"), "--requests", "9", "--rows", "3", "--slots", "4"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": as when alone") == 9
    assert "9 requests in" in run.stdout
