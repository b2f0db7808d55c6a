# SPDX-License-Identifier: Apache-2.0
"""Pictures show the right results of the rows, each where it belongs, and nothing else. None is drawn to a file here."""

import copy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from cula.bench import plots, report, results, summary

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows():
    found = [results.read(path) for path in sorted((ROOT / "benchmarks" / "results").glob("H200-*.json"))]
    return [row for row in report.merge(found) if not row.get("forced")]


@pytest.fixture
def marks(monkeypatch):
    made = []
    monkeypatch.setattr(plots, "_mark", lambda axes, library, x, y, size=0: made.append((library, x, y)))
    return made


def paint(key, rows):
    (picture,) = [picture for picture in plots.PICTURES if picture.key == key]
    figure = Figure()
    return figure if picture.paint(figure, rows) else None


def test_every_committed_picture_is_one_that_is_drawn(rows):
    there = {path.name for path in (ROOT / "docs" / "benchmarks").glob("H200-*.*")}
    drawn = {f"H200-{picture.key}.png" for picture in plots.PICTURES if paint(picture.key, rows) is not None}
    assert there == drawn | {"H200-train-model.png"}  # which benchmarks/train_model.py draws


@pytest.mark.parametrize("key", ["kda-prefill", "kda-train", "lightning", "decode"])
def test_a_family_shows_every_right_time_over_the_floor(key, rows, marks):
    figure = paint(key, rows)
    ops = {"kda-prefill": ["kda_prefill"], "kda-train": ["kda_train"]}.get(key, [f"lightning_{p}" for p in ("prefill", "train")])
    ops = ["kda_decode", "gdn_decode", "lightning_decode"] if key == "decode" else ops
    suites = ("kda-train", "gva") if key == "kda-train" else (key,)
    mine = [row for row in rows if row["op"] in ops and row["suite"] in suites]
    wanted = [(n, e["over_floor"]) for row in mine for n, e in row["entries"].items() if e["status"] == "ok"]
    assert sorted((library, x) for library, x, _ in marks) == sorted(wanted) and len(wanted) > 3
    assert all(axes.get_xscale() == "log" for axes in figure.axes)


def test_wrong_results_are_not_shown(rows, marks):
    changed = copy.deepcopy([row for row in rows if row["suite"] == "kda-prefill"])
    for row in changed:
        row["entries"]["fla"]["status"] = "wrong"
    paint("kda-prefill", changed)
    assert {library for library, *_ in marks} == {"cula", "cudnn"}


def test_gpu_times_and_host_times_are_apart(rows, marks):
    beside_peers = results.read(ROOT / "benchmarks" / "results" / "history" / "H200-api-2ac6481.json")["rows"]
    rows = [row for row in rows if row["suite"] != "api"] + beside_peers
    figure = paint("speedup", rows)
    assert [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes] == [
        "GPU time of a call",
        "Host time of a small call",
    ]
    named = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes]
    assert all(name.startswith("api") for name in named[1]) and not any(name.startswith(("api", "dist")) for name in named[0])
    best = [found for row in rows if row["suite"] != "dist" and (found := summary.best_peer(row)) is not None]
    assert sorted((library, x) for library, x, _ in marks) == sorted(best)


def test_gated_delta_rule_has_its_picture_when_there_are_rows(rows, marks):
    assert paint("gdn", [row for row in rows if not row["op"].startswith("gdn")]) is None
    renamed = [
        copy.deepcopy(row) | {"suite": "gdn-prefill", "op": "gdn_prefill"} for row in rows if row["suite"] == "kda-prefill"
    ]
    titles = [axes.get_title() for axes in paint("gdn", renamed).axes]
    assert titles == ["GDN prefill, fast gates", "GDN prefill, slow gates"]


def test_scaling_has_a_panel_for_each_line_of_cases(rows):
    titles = [axes.get_title() for axes in paint("scaling", rows).axes]
    assert titles[0] == "8 heads" and titles[-1].endswith(" tokens") and len(titles) <= 3


def test_errors_stand_beside_times(rows, marks):
    paint("error", rows)
    row = next(row for row in rows if row["suite"] == "kda-prefill")
    for name, entry in row["entries"].items():
        assert (name, entry["over_floor"], summary.largest_error(entry)) in marks


def test_nothing_is_drawn_of_nothing():
    assert all(paint(picture.key, []) is None for picture in plots.PICTURES)
