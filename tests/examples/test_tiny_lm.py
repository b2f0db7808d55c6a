# SPDX-License-Identifier: Apache-2.0
"""examples/tiny_lm.py as a command; tests/examples/test_demo.py has the model."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_lm


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit) as done:
        tiny_lm.main(["--help"])
    assert done.value.code == 0
    assert "--steps" in capsys.readouterr().out


def test_it_learns_and_samples(capsys):
    tiny_lm.main(["--steps", "11", "--length", "5", "--prompt", "import ", "--device", "cpu"])
    first, *_, last, sample = capsys.readouterr().out.splitlines()[:3]
    assert float(last.split()[-1]) < float(first.split()[-1])
    assert sample.startswith("import ")
