# SPDX-License-Identifier: Apache-2.0
"""Every suite runs on a CPU and leaves a valid file; budget, resume, and peers that are absent, wrong or broken."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cula.bench import results, suites, warm
from cula.bench.cases import Case
from cula.bench.cli import main
from cula.bench.peers import PEERS
from tests.bench.conftest import FAKES

LOCAL = [name for name in suites.known() if name != "dist"]


def assert_valid(result):
    assert result["schema"] == results.SCHEMA and result["bandwidth"] > 0 and result["source"]
    assert {"device", "cpus"} <= result["machine"].keys() and result["versions"]["torch"] == str(torch.__version__)
    for row in result["rows"]:
        assert Case.from_json(row["case"]).id == row["id"]
        assert row["floor"]["ms"] == pytest.approx(row["floor"]["bytes"] / row["floor"]["bandwidth"] * 1e3)
        assert row["checked"] and row["backend"] in ("torch", "triton")
        ours = row["entries"]["cula"]
        assert ours["status"] == "ok", ours
        assert ours["time_ms"] > 0 and ours["error"]["o"] < 1e-4
        if row["metric"] == "time_ms":
            assert ours["over_floor"] == pytest.approx(ours["time_ms"] / row["floor"]["ms"])


def test_every_suite_writes_a_valid_file(run, tmp_path):
    result = run(LOCAL, peers=PEERS)
    assert_valid(result)
    assert [row["suite"] for row in result["rows"]] == LOCAL
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(result))
    assert set(result["peers"]) == {"fla", "cudnn", "flashkda", "flashqla", "flashinfer"}
    for facts in result["peers"].values():
        assert facts["status"] == "found" or "install" in facts["reason"]
    by_suite = {row["suite"]: row["entries"]["cula"] for row in result["rows"]}
    assert {"dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"} <= by_suite["kda-train"]["error"].keys()
    assert all(by_suite["api"][name] > 0 for name in ("dispatch_ms", "host_loop_ms", "add_loop_ms"))
    assert "host_loop_ms" not in by_suite["decode"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cula.dist") is None, reason="cula.dist is not part of this build")
def test_dist_over_two_processes(run):
    result = run(["dist"])
    assert_valid(result)
    (row,) = result["rows"]
    assert row["entries"]["cula"]["note"] == "2 ranks"
    assert row["entries"]["one-device"]["status"] == "ok" and set(row["ratios"]) == {"one-device"}


def test_peers_are_shown_as_they_are(run):
    result = run(["kda-prefill", "decode"], peers=FAKES)
    assert result["peers"]["absent"] == {"title": "Absent", "status": "absent", "reason": "not installed (pip install absent)"}
    for row in result["rows"]:
        entries = row["entries"]
        assert "absent" not in entries
        assert entries["twin"]["status"] == "ok" and entries["twin"]["time_ms"] > 0
        wrong = entries["wrong"]
        assert wrong["status"] == "wrong" and wrong["error"]["o"] == pytest.approx(0.5, rel=1e-2) and wrong["time_ms"] > 0
        assert entries["raising"] == {"status": "failed", "reason": "RuntimeError: no kernel image is available"}
        assert entries["declining"] == {"status": "declined", "reason": "it has other plans"}
        assert set(row["ratios"]) == {"twin"}
        assert row["ratios"]["twin"] == pytest.approx(entries["twin"]["time_ms"] / entries["cula"]["time_ms"])


def test_decode_of_several_tokens_from_bf16_states(run):
    row = next(row for row in run(["decode"], limit=3)["rows"] if row["case"]["pool"] == "bfloat16")
    assert row["label"] == "N=16 H=4 T=4, K=32 V=32, fast, bfloat16 states"
    ours = row["entries"]["cula"]
    assert ours["status"] == "ok" and ours["error"]["o"] < 1e-4 < ours["error"]["state"]  # o before the states are rounded


def test_budget_stops_cleanly_and_resume_finishes(run, tmp_path):
    first = run(["kda-prefill"], limit=1)
    cut = run(["kda-prefill", "lightning"], limit=2, resume=True, budget=0)
    assert [r["id"] for r in cut["rows"]] == [r["id"] for r in first["rows"]]
    assert len(cut["left_out"]) == 3
    whole = run(["kda-prefill", "lightning"], limit=2, resume=True)
    assert whole["left_out"] == [] and len(whole["rows"]) == 4
    assert whole["rows"][0] == first["rows"][0]
    assert whole["seconds"] > first["seconds"]
    assert_valid(whole)
    with pytest.raises(FileExistsError, match="--resume"):
        run(["kda-prefill"])


def test_resume_measures_rows_again_that_lack_a_peer(run):
    alone = run(["kda-prefill"], limit=2)
    assert all(set(row["entries"]) == {"cula"} for row in alone["rows"])
    cut = run(["kda-prefill"], limit=2, resume=True, peers=FAKES[:1], budget=0)
    assert cut["rows"] == alone["rows"] and len(cut["left_out"]) == 2
    beside = run(["kda-prefill"], limit=2, resume=True, peers=FAKES[:1])
    assert [r["id"] for r in beside["rows"]] == [r["id"] for r in alone["rows"]]
    assert all(row["entries"]["twin"]["status"] == "ok" for row in beside["rows"])
    assert run(["kda-prefill"], limit=2, resume=True)["rows"] == beside["rows"]


def test_resume_asks_a_peer_again_that_failed(run, monkeypatch):
    (raising,) = [peer for peer in FAKES if peer.name == "raising"]
    (failed,) = run(["kda-prefill"], limit=1, peers=(raising,))["rows"]
    assert failed["entries"]["raising"]["status"] == "failed" and not failed["ratios"]
    monkeypatch.setattr(type(raising), "prepare", type(raising).__mro__[1].prepare)  # mended meanwhile
    (row,) = run(["kda-prefill"], limit=1, resume=True, peers=(raising,))["rows"]
    assert row["entries"]["raising"]["status"] == "ok" and set(row["ratios"]) == {"raising"}


def test_resume_refuses_rows_of_another_backend(run):
    (row,) = run(["decode"], backend="torch")["rows"]
    assert row["forced"] == "torch"
    with pytest.raises(ValueError, match="backend 'torch'"):
        run(["decode"], limit=2, resume=True)


def test_resume_refuses_rows_of_other_source(run, tmp_path):
    run(["decode"])
    path = tmp_path / "r.json"
    stale = json.loads(path.read_text()) | {"source": "0" * 16}
    path.write_text(json.dumps(stale))
    with pytest.raises(ValueError, match="other source"):
        run(["decode"], limit=2, resume=True)


def test_command_line(tmp_path, capsys):
    out = tmp_path / "r.json"
    shape = ["--lens", "40,24", "--h", "1", "--hv", "2", "--k", "32", "--v", "32", "--gate", "slow", "--flags", "gate,h0,ht"]
    assert main(["run", "kda-prefill", *shape, "--dtype", "bfloat16", "--out", str(out), "--peers", "none"]) == 0
    (row,) = results.load(out)["rows"]
    assert row["label"] == "H=1 HV=2, [40,24], K=32 V=32, slow" and row["case"]["dtype"] == "bfloat16"
    assert 0 < row["entries"]["cula"]["error"]["o"] < 2e-2
    assert "slow gate" in capsys.readouterr().out
    assert main(["run", "kda-prefill", "--peers", "flah", "--out", str(out)]) == 2
    assert "unknown peers" in capsys.readouterr().err
    assert main(["run", "kda-prefill", "--tune-ms", "5", "--out", str(out)]) == 2
    assert "two numbers" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "kda-prefill", "--backend", "cuda", "--out", str(tmp_path / "none.json")])
    assert "invalid choice: 'cuda'" in capsys.readouterr().err


def test_forced_backend_is_recorded(run):
    (row,) = run(["lightning"], backend="torch")["rows"]
    assert row["backend"] == "torch"


def test_rich_and_matplotlib_are_not_needed():
    """As on a machine that has neither: the modules import and the plain progress prints."""
    code = (
        "import sys; sys.modules['rich'] = sys.modules['matplotlib'] = None\n"
        "from cula.bench import cli, plots, progress\n"
        "from pathlib import Path\n"
        "with progress.Progress(1) as p: p.say('plain')\n"
        "assert plots.draw([], Path('.'), 'x') == {}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "plain\n", done.stderr


def test_errors_of_zero_and_nan_survive_json(tmp_path):
    path = tmp_path / "x" / "r.json"
    results.save(path, results.new(torch.device("cpu"), {}, "a") | {"error": float("nan")})
    assert math.isnan(results.load(path)["error"])


def test_every_call_is_compiled_once():
    cases = suites.build(["kda-prefill"], "cuda")
    todo = warm.units(cases, ["fla"], "auto", "cuda")
    of_fla = [values for name, _, values, _ in todo if name == "fla"]
    heads = {(v["H"], v["packed"], v["gate"]) for v in of_fla}
    assert {v["gate"] for v in of_fla} == {"fast", "init"}  # slow gates run the kernels of fast ones
    assert max(sum(v["lens"]) * v["H"] for v in of_fla) <= warm.MAX_ROWS
    assert {H for H, _, _ in heads} == {4, 8, 10, 12, 16, 24, 32, 64, 96}
    assert len(of_fla) < len(cases) and todo[-1][0] == "fla"


def test_warming_visits_every_unit():
    cases = [Case("decode", "lightning_decode", (1,), 1, 1, K=32, V=32, gate="slopes", dtype="float32")]
    assert warm.warm(warm.units(cases, [], "auto", "cpu"), 2) == 1
    assert warm.warm(warm.units(cases, [], "auto", "cpu"), 1, seconds=0) == 0


@pytest.mark.slow
def test_compiling_only_takes_every_variant_once_and_runs_none(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.bench.tuned_kernel"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert sorted(said["loaded"]) == ["double"] * 4 + ["negate"]
    assert said["asked"] == 10  # the second walk asks for each again, and is told no
    assert said["launched"] == [] and said["verdicts"] == 0 and said["restored"]
    assert not list(tmp_path.rglob("*.autotune.json"))
    assert said["tuner"] == {"warmup": 5, "rep": 20}  # after `timing.tune_for`


def test_the_command_is_installed_under_its_name():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    module, function = re.search(r'^cula-bench = "(.*):(.*)"$', text, re.MULTILINE).groups()
    assert getattr(importlib.import_module(module), function) is main


def test_a_device_that_there_is_not_is_a_sentence(capsys):
    assert main(["run", "decode", "--device", "gpu"]) == 2
    assert "--device gpu: torch knows no such device" in capsys.readouterr().err
    assert main(["run", "decode", "--device", "meta"]) == 2
    assert "--device meta: nothing can be measured there; use --device cpu or cuda" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--t", "--h", "--hv", "--b", "--lens", "--k", "--v", "--shapes-limit"])
@pytest.mark.parametrize("value", ["0", "-2"])
def test_sizes_are_at_least_one(option, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "decode", f"{option}={value}", "--out", "unwritten.json"])
    assert f"argument {option}: expected 1 or more; got {value}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_sentence(tmp_path, capsys):
    assert main(["run", "decode", "--device", "cuda", "--out", str(tmp_path / "r.json")]) == 2
    assert "--device cuda: torch sees no GPU here; use --device cpu" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
