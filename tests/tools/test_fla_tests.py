# SPDX-License-Identifier: Apache-2.0
"""`tools/fla_tests.py` on a made-up checkout: imports are replaced, tests left out by their whole names, changes noticed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import fla_tests

ROOT = Path(__file__).resolve().parents[2]
KDA = """
from fla.ops.kda import chunk_kda, fused_recurrent_kda

def test_chunk():
    assert chunk_kda.__module__ == fused_recurrent_kda.__module__ == "cula.kda.fla"

def test_flash_kda_chunk_of_another_kind():
    pass

def test_fails():
    assert 1 + 1 == 3
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "tests/ops").mkdir(parents=True)
    (tmp_path / "tests/conftest.py").write_text("")
    for name, tests in fla_tests.LEFT_OUT.items():
        # what is imported here is there in the environment or not; only test_kda.py is imported with success
        imports = "" if name == "test_kda.py" else "\n".join(f"{old} something" for old in fla_tests.IMPORTS[name])
        body = KDA if name == "test_kda.py" else f"import pytest\npytest.skip(allow_module_level=True)\n{imports}\n"
        (tmp_path / "tests/ops" / name).write_text(body + "".join(f"\ndef {test}():\n    assert False\n" for test in tests))
    return tmp_path


def run(checkout, *more):
    command = [sys.executable, "tools/fla_tests.py", str(checkout), "-p", "no:xdist", *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.mark.slow
def test_it_runs_what_is_ours_and_counts(checkout):
    done = run(checkout)
    assert done.returncode == 1
    assert "1 failed, 2 passed, 4 skipped, 6 deselected" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert "left out: test_kda.py test_flash_kda_chunk: FlashKDA: needs hardware or a package of others" in done.stdout
    assert run(checkout, "-k", "not test_fails").returncode == 0


def test_a_change_of_flas_is_noticed(checkout):
    path = checkout / "tests/ops/test_kda.py"
    text = path.read_text()
    path.write_text(text.replace("fla.ops.kda", "fla.ops.kda.api"))
    assert "FLA has changed" in run(checkout).stderr
    path.write_text(text.replace("test_naive_chunk", "test_naive"))
    assert "test_kda.py has no test_naive_chunk: FLA has changed" in run(checkout).stderr
