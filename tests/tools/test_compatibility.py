# SPDX-License-Identifier: Apache-2.0
"""`tools/compatibility.py`: its words and its page. What it tries takes gigabytes and minutes, and runs by hand."""

import json
import os
import subprocess
import sys

import pytest

from cula.core.versions import SUPPORTED
from tools import compatibility
from tools.compatibility import Outcome

KERNEL = {"call": "kda", "name": "kda_fwd", "registers": 100, "spill_bytes": 0, "shared_bytes": 1, "fits": True, "faults": 0}


def test_kernels_in_words():
    kernels = [KERNEL, KERNEL | {"registers": 200, "spill_bytes": 8}, KERNEL | {"spill_bytes": 24}]
    said = compatibility.in_words(kernels, [])
    assert said == "3 kernels, 133 registers on average; spilled a thread: `kda_fwd` up to 24 B"
    said = compatibility.in_words([KERNEL | {"fits": False, "faults": 2}], ["KDA fp32 (RuntimeError: no)"])
    assert "do not fit: kda_fwd; 2 misplaced descriptors; **do not compile**: KDA fp32 (RuntimeError: no)" in said
    assert compatibility.in_words([], ["a", "b"]) == "none compiles: a; b"


@pytest.mark.slow
def test_what_is_run_with_each_triton_runs_with_this_one(tmp_path):
    pytest.importorskip("triton")
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0", "PYTHONPATH": str(compatibility.ROOT)}
    command = [sys.executable, "-c", compatibility.COMPILE, "90"]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=compatibility.ROOT, env={**os.environ, **cache}, check=False
    )
    report = json.loads(compatibility.report_in(ran.stdout) or ran.stderr[-2000:])
    assert not report["failed"] and len(report["kernels"]) > 10
    assert all(kernel["fits"] and not kernel["faults"] for kernel in report["kernels"])


def test_a_page_keeps_the_tables_that_are_not_tried_again(tmp_path):
    tables = {"torch": compatibility.table([Outcome("2.9.0", "tests", "3 passed | 1 failed")]), "Triton": "| a |\n|---|\n| b |"}
    (tmp_path / "page.md").write_text(compatibility.page(tables))
    assert compatibility.read_tables(tmp_path / "page.md") == tables
    assert "| 2.9.0 | tests | 3 passed / 1 failed |" in tables["torch"]


def test_the_releases_are_the_ends_of_what_is_supported():
    for module, (oldest, newest) in compatibility.RELEASES.items():
        assert SUPPORTED[module].objection(oldest) is None
        assert SUPPORTED[module].doubt(newest) is None
        assert oldest.startswith(SUPPORTED[module].oldest) and newest.startswith(SUPPORTED[module].newest)


def test_what_cannot_be_had_is_an_outcome(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compatibility, "install", lambda *_: "could not be installed: no such release")
    page = tmp_path / "page.md"
    assert compatibility.main(["--folder", str(tmp_path), "--only", "tvm_ffi", "--page", str(page)]) == 0
    assert page.read_text().count("| installing | could not be installed: no such release |") == 2
    assert "tvm_ffi 0.1.9, installing: could not be installed" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "last"), [("a\nb \n\n", "b"), ("", "nothing was said")])
def test_the_last_line(text, last):
    assert compatibility.last_line(text) == last
