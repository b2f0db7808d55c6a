# SPDX-License-Identifier: Apache-2.0
"""The scripts of benchmarks/ that need a GPU for their figures run on a CPU too, small, and write what they measured."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = {"width": 32, "heads": 2, "head-dim": 16, "tokens": 40, "device": "cpu"}


def run(monkeypatch, script, *flags, **options):
    given = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | options).items()]
    monkeypatch.setattr(sys, "argv", [script, *given, *flags])
    runpy.run_path(str(BENCHMARKS / script), run_name="__main__")


def test_train_model(monkeypatch, tmp_path):
    out, picture = tmp_path / "model.json", tmp_path / "model.png"
    run(monkeypatch, "train_model.py", "--no-compile", layers=1, steps=3, warm_up=1, out=out, picture=picture)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["kernels"]) for row in rows] == [("kda", "cula"), ("gdn", "cula")]
    for row in rows:
        assert len(row["losses"]) == 4 and row["tokens_a_second"] > 0
        assert all(abs(loss - math.log(4096)) < 1 for loss in row["losses"]), "that of a model which has learnt little yet"
    assert picture.stat().st_size > 1000


def test_fla_layers(monkeypatch, tmp_path, capsys):
    pytest.importorskip("fla.layers")
    out = tmp_path / "layers.json"
    run(monkeypatch, "fla_layers.py", repeats=1, out=out)
    rows = json.loads(out.read_text())["rows"]
    assert [row["layer"] for row in rows] == ["kda", "gdn"]
    assert all(row["calls_that_cula_took"] > 0 and row["cula"]["training_ms"] > 0 for row in rows)
    before = out.read_text()
    with pytest.raises(SystemExit):
        run(monkeypatch, "fla_layers.py", "--layers=gdn", repeats=1, tokens=20, out=out)
    assert "has rows with other sizes" in capsys.readouterr().err and out.read_text() == before
    run(monkeypatch, "fla_layers.py", "--layers=kda", repeats=1, out=out)
    assert [row["layer"] for row in json.loads(out.read_text())["rows"]] == ["gdn", "kda"]
    run(monkeypatch, "fla_layers.py", repeats=1, tokens=20, out=out)
    assert json.loads(out.read_text())["sizes"]["tokens"] == 20


def test_kda_chains(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kda_chains.py", "--tokens=1024", "--heads=1"])
    runpy.run_path(str(BENCHMARKS / "kda_chains.py"), run_name="__main__")
    names, _, row = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    cells = dict(zip(names, row))
    assert cells["segments, chained"] == "16 of 1, 6 of 3"
    assert cells["fast"] == "0 of 1" and cells["slow"] == "1 of 1; 5 -> 5"


def test_gdn_pieces(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gdn_pieces.py", "--tokens=2048"])
    runpy.run_path(str(BENCHMARKS / "gdn_pieces.py"), run_name="__main__")
    names, _, row = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    cells = dict(zip(names, row))
    assert (cells["pieces"], cells["mapped"]) == ("8", "14")
    assert cells["fast"] == "9 -> 5 (9 -> 5)" and cells["slow"] == "14 -> 14 (14 -> 14)"
