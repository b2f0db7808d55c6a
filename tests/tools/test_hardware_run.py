# SPDX-License-Identifier: Apache-2.0
"""`tools/hardware_run.py` without a GPU: steps end in time, and what they came to is in the report."""

import json
import shutil
import sys
import time
import types
import zipfile

import pytest
import torch

from cula.bench import suites
from cula.ops.cute.toolchain import build, self_check
from tools import hardware_run
from tools.hardware_run import NO_GPU, Outcome, Step

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


def step(code: str, seconds: float = 30.0) -> Step:
    return Step("made-up", "made-up", (sys.executable, "-c", code), seconds)


def test_what_a_step_comes_to(tmp_path):
    assert hardware_run.run(step("print('fine')"), tmp_path).what == "ok"
    assert (tmp_path / "made-up.log").read_text() == "fine\n"
    failed = hardware_run.run(step("print('a' * 10); raise SystemExit(3)"), tmp_path)
    assert (failed.what, failed.tail) == ("failed (exit status 3)", ("a" * 10,))
    left_out = Step("made-up", "made-up", ("no such command",), 1.0, left_out="of a reason")
    assert hardware_run.run(left_out, tmp_path) == Outcome("made-up", "left out: of a reason")


def test_a_benchmark_that_is_not_through_is_not_done(tmp_path):
    bench = Step("bench", "bench-some", (sys.executable, "-c", "print()"), 30.0)
    assert hardware_run.run(bench, tmp_path).what == "ok"
    (tmp_path / "some.json").write_text('{"rows": [], "left_out": ["a case"]}')
    assert hardware_run.run(bench, tmp_path).what == hardware_run.PARTLY


def test_a_step_that_hangs_is_stopped_with_what_it_started(tmp_path):
    code = "import subprocess; print('begins', flush=True); subprocess.run(['sleep', '100'])"
    start = time.monotonic()
    hung = hardware_run.run(step(code, 1.0), tmp_path)
    assert (hung.what, hung.tail) == ("stopped after 1 s", ("begins",))
    assert time.monotonic() - start < 50, "not that of its child"


@needs_no_gpu
def test_the_report_says_that_there_is_no_gpu(tmp_path):
    out = tmp_path / "report"
    assert hardware_run.main(["--out", str(out), "--steps", "compile,self-checks,tests"]) == 0
    page = (out / "summary.md").read_text()
    assert page.startswith("# cuLA on a machine without a GPU\n\nTorch sees no GPU on this machine: ")
    for name in ("compile", "self-checks", "tests-kda", "tests-decode", "tests-others"):
        assert f"| {name} | left out: {NO_GPU} | 0 |" in page
    steps = json.loads((out / "summary.json").read_text())["steps"]
    assert all(of["what"] == f"left out: {NO_GPU}" for of in steps)
    with zipfile.ZipFile(tmp_path / "report.zip") as sent:
        assert {"report/summary.md", "report/summary.json"} <= set(sent.namelist())


@needs_no_gpu
@pytest.mark.slow
def test_without_a_gpu_the_rest_runs_on_the_cpu(tmp_path):
    out = tmp_path / "report"
    assert hardware_run.main(["--out", str(out), "--most", "120"]) == 0
    steps = {of["name"]: of["what"] for of in json.loads((out / "summary.json").read_text())["steps"]}
    assert {name for name, what in steps.items() if what == "ok"} >= {"machine", "bench-kda-gates", "fuzz"}
    assert json.loads((out / "kda-gates.json").read_text())["rows"]
    assert "0 wrong" in (out / "fuzz.log").read_text()


def test_unknown_steps_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        hardware_run.main(["--out", str(tmp_path), "--steps", "tests,nothing"])
    assert "--steps nothing: there are machine, compile, self-checks, tests, sanitizers, bench, fuzz" in capsys.readouterr().err


def test_on_a_gpu_everything_is_run_within_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    listed = {step.name: step for step in hardware_run.steps(tmp_path, "sm_100a", 200.0)}
    listed.pop("nvidia-smi")
    assert all(step.left_out is None and step.seconds <= 200.0 for step in listed.values())
    tests = [step for step in listed.values() if step.group == "tests"]
    assert {"tests-kda", "tests-lightning", "tests-sm100-gdn", "tests-others"} <= {step.name for step in tests}
    assert len({step.name for step in listed.values()}) == len(listed)
    assert all("-m gpu" in " ".join(step.command) for step in tests)
    bench = [step for step in listed.values() if step.group == "bench"]
    assert {step.command[4] for step in bench[: -len(hardware_run.SCRIPTS)]} == set(suites.known())
    assert all((hardware_run.ROOT / step.command[1]).is_file() for step in bench[-len(hardware_run.SCRIPTS) :])
    assert "cuda" in listed["fuzz"].command
    other = {step.name: step for step in hardware_run.steps(tmp_path, None, 200.0)}
    assert other["self-checks"].left_out == "there are no CuTe kernels for this GPU"


def test_the_calls_of_kernels_are_made_in_one_process_for_cudas_checkers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: (9, 0))
    monkeypatch.setattr(self_check, "worst_error", lambda name, device, sm: 2e-3 if name == "kda_good" else 1.0)
    monkeypatch.setattr(hardware_run, "kernels_of", lambda target: ["kda_good", "kda_off", "gdn_off"])
    assert hardware_run.make_calls("sm_90a", "kda") == 1
    said = capsys.readouterr().out
    assert "kda_good: 2.0e-03" in said and "kda_off: on this GPU kda_off differs" in said and "gdn" not in said
    assert hardware_run.make_calls("sm_90a", "kda_good") == 0
    assert hardware_run.make_calls("sm_90a", "kdaa") == 1, "nothing was looked at"


def test_every_kernel_is_checked_and_the_worst_decides(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: "NVIDIA B200")
    finds = {"kda_a": {"error": 2e-3}, "kda_b": {"error": 0.5}, "decode_c": {"failure": "an illegal memory access"}}
    monkeypatch.setattr(hardware_run, "collect", lambda modules: [types.SimpleNamespace(name=n) for n in [*finds, "kda_d"]])

    def recorded(name, arch, gpu_name, gpu):
        if name == "kda_d":
            raise build.CompileError("spills")
        return finds[name]

    monkeypatch.setattr(self_check, "recorded", recorded)
    assert hardware_run.check_kernels("sm_100a", tmp_path) == 1
    written = json.loads((tmp_path / "self-checks.json").read_text())
    assert written["kda_a"] == {"error": 2e-3, "objection": None}
    assert "differs from the torch backend by 5.0e-01" in written["kda_b"]["objection"]
    assert "an illegal memory access" in written["decode_c"]["objection"] and "spills" in written["kda_d"]["objection"]
    assert "kda_a: 2.0e-03" in capsys.readouterr().out
    finds.pop("kda_b"), finds.pop("decode_c")
    monkeypatch.setattr(hardware_run, "collect", lambda modules: [types.SimpleNamespace(name="kda_a")])
    assert hardware_run.check_kernels("sm_100a", tmp_path) == 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: (9, 0))
    finds["kda_a"] = {"error": 0.3}
    assert hardware_run.check_kernels("sm_90a", tmp_path) == 0, "Hopper has a recorded run of it"


@needs_no_gpu
def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    out = tmp_path / "report"
    ran = []

    def run(step, folder):
        ran.append((step.name, step.seconds))
        return Outcome(step.name, "failed (exit status 1)" if step.name == "b" and len(ran) < 3 else "ok")

    listed = [Step("made-up", name, ("true",), 30.0) for name in ("a", "b", "c")]
    monkeypatch.setattr(hardware_run, "steps", lambda *given: iter(listed))
    monkeypatch.setattr(hardware_run, "run", run)
    assert hardware_run.main(["--out", str(out), "--budget", "0"]) == 0 and not ran
    assert hardware_run.main(["--out", str(out), "--budget", "10"]) == 1
    assert [name for name, _ in ran] == ["a", "b", "c"] and all(seconds <= 10 for _, seconds in ran)
    assert hardware_run.main(["--out", str(out)]) == 0
    assert [name for name, _ in ran[3:]] == ["b"], "what was good is not repeated"
    monkeypatch.setattr(hardware_run, "source_digest", lambda: "other")
    assert hardware_run.main(["--out", str(out)]) == 0
    assert [name for name, _ in ran[4:]] == ["a", "b", "c"], "of other sources it is"
