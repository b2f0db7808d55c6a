# SPDX-License-Identifier: Apache-2.0
"""What the backend says of itself, which a machine without Triton asks too."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_what_it_serves_is_known_without_triton():
    code = "import sys; sys.modules['triton'] = None; from cula.ops.triton import backend; print(backend.MAX_K)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.stdout.strip() == "256", run.stderr
