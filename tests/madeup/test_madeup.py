# SPDX-License-Identifier: Apache-2.0
"""All that a family and a backend get by describing themselves: run in a process of its own, which alone knows of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slow import slow_but

ROOT = Path(__file__).parents[2]
PARTS = ("checks dispatch explain autograd pools decode bench", "operators compile", "ranks")  # a process for each line


@pytest.mark.parametrize("parts", slow_but(PARTS, PARTS[:2]))
def test_a_made_up_family_gets(parts):
    command = [sys.executable, "-m", "tests.madeup.parts", *parts.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_shared_knows_of_it():
    files = [*(ROOT / "cula").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    assert not [path for path in files if "madeup" in path.read_text() or "fading" in path.read_text()]
