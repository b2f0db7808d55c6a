# SPDX-License-Identifier: Apache-2.0
"""The report and the comparison say what the result files hold, and no more."""

import copy
import json
import math
import re

import pytest

from cula.bench import report, summary
from cula.bench.cli import main
from tests.bench.conftest import FAKES

MADE: list[dict] = []  # one run serves all tests of this file


@pytest.fixture
def result(run):
    """A result as a GPU would leave it: a run's file, its numbers replaced by known ones."""
    if not MADE:
        MADE.append(run(["kda-prefill", "kda-train", "decode", "segments", "api"], peers=FAKES, limit=2))
    made = copy.deepcopy(MADE[0])
    made["machine"] |= {"gpu": "NVIDIA H200", "device": "NVIDIA H200 (cuda:0, SM 9.0)"}
    made["left_out"] = ["kda-prefill/kda_prefill/1x999/left"]
    for i, row in enumerate(made["rows"]):
        for j, entry in enumerate(row["entries"].values()):
            if "time_ms" in entry:
                entry |= {"time_ms": 1.2345 + i + j / 7, "graph_ms": 1.2345 + i + j / 7, "cold_ms": 2.5 + i, "host_ms": 0.02 + i}
                entry["peak_bytes"] = (100 + i) * 2**20 if "peak_bytes" in entry else None
                if "over_floor" in entry:
                    entry["over_floor"] = entry["time_ms"] / row["floor"]["ms"]
        metric = row["metric"]
        row["ratios"] = {"twin": row["entries"]["twin"][metric] / row["entries"]["cula"][metric]}
    made["rows"][0]["ratios"]["twin"] = 0.5
    return made


def write(result, folder, name="H200-1.json"):
    path = folder / name
    path.write_text(json.dumps(result))
    return path


def test_report_holds_the_numbers_of_the_file(result, tmp_path):
    source = write(result, tmp_path)
    assert main(["report", str(source), "--to", str(tmp_path / "docs"), "--readme", str(tmp_path / "none")]) == 0
    page = (tmp_path / "docs" / "H200.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    for row in result["rows"]:
        ours, name = row["entries"]["cula"], f"| {row['op'].replace('_', ' ')} | {row['label']} |"
        (line,) = [text for text in lines if text.startswith(name) and f"| {report._time(ours, row['metric'])} |" in text]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert f"{ours['host_ms'] * 1e3:.1f}" in cells
        assert summary.times(row["ratios"]["twin"]) in cells
        assert summary.error(max(ours["error"].values())) in cells
        assert any(cell.endswith("**wrong**") for cell in cells) and "**failed**" in cells
        if row["metric"] == "time_ms":
            assert {summary.ms(ours["time_ms"]), summary.ms(ours["cold_ms"]), summary.times(ours["over_floor"])} <= set(cells)
        else:
            assert {report._us(ours["host_loop_ms"]), report._us(ours["add_loop_ms"])} <= set(cells)
        assert ("states_ms" in row) == (row["suite"] == "decode")
        if "states_ms" in row:
            assert summary.ms(row["states_ms"]) in cells
        if ours["peak_bytes"]:
            assert f"{ours['peak_bytes'] / 2**20:.0f}" in cells
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", page):
        assert (tmp_path / "docs" / picture).stat().st_size > 1000
    assert "`kda-prefill/kda_prefill/1x999/left`" in page
    assert "raising failed on kda-prefill" in page and page.count("no kernel image") == len({r["suite"] for r in result["rows"]})
    rows = sum(row["suite"] == "kda-prefill" for row in result["rows"])
    assert f"raising failed on {rows})" in page  # where the best peer is named
    assert "not installed (pip install absent)" in page


def test_files_from_before_loops_were_measured(result):
    assert "in a loop us" in report.markdown([result], report.merge([result]), ["r.json"], {})
    older = json.loads(json.dumps(result))
    for row in older["rows"]:
        for entry in row["entries"].values():
            entry.pop("host_loop_ms", None), entry.pop("add_loop_ms", None)
    assert "in a loop us" not in report.markdown([older], report.merge([older]), ["r.json"], {})


def test_every_number_in_the_tables_comes_from_the_file(result, tmp_path):
    """Numbers that appear in the file or are a geomean of its ratios, and no others."""
    rows = report.merge([result])
    page = report.markdown([result], rows, ["r.json"], {})
    allowed = {"1", "2", "0"} | {str(n) for n in range(len(rows) + 1)}
    for row in rows:
        for e in row["entries"].values():
            for key in ("time_ms", "cold_ms", "host_ms", "host_loop_ms", "add_loop_ms", "graph_host_ms", "dispatch_ms"):
                value = e.get(key)
                allowed |= {summary.ms(value), report._us(value)}
            allowed |= {summary.times(e.get("over_floor")).rstrip("x"), report._mib(e)}
            allowed |= {summary.error(v) for v in e.get("error", {}).values()}
        allowed |= {summary.ms(row["floor"]["ms"]), summary.ms(row.get("states_ms")), summary.ms(row.get("slots_ms"))}
        allowed |= {summary.times(v).rstrip("x") for v in row["ratios"].values()}
    for group in summary.groups(rows):
        for values in (group.over_floor, group.against_best):
            if values:
                mean = math.prod(v for v, _ in values) ** (1 / len(values))
                allowed.add(summary.times(mean).rstrip("x"))
    body = page[page.index("## Summary") : page.index("## Failed or wrong")]
    for line in (text for text in body.splitlines() if text.startswith("| ") or text.startswith("- ")):
        for label in (row["label"] for row in rows):
            line = line.replace(label, "")
        for number in re.findall(r"(?<![\w.])\d+\.?\d*(?:e[+-]\d+)?(?=x?\b)", line):
            assert number in allowed, f"{number} in {line}"


def test_losses_are_named_and_wrong_peers_never_ranked(result):
    rows = report.merge([result])
    page = report.markdown([result], rows, ["r.json"], {})
    lost = page[page.index("## Where we lose") : page.index("## kda-prefill")]
    assert f"{rows[0]['label']}: twin takes 0.50x our time" in lost
    fast = next(g for g in summary.groups(rows) if g.name == "kda-prefill, fast gate")
    assert fast.losses == 1 and summary.best_peer(rows[0]) == ("twin", 0.5)
    broken = copy.deepcopy(result)
    broken["rows"][1]["entries"]["cula"] |= {"status": "wrong", "reason": "relative error o 1.0e+00 > 2.0e-02"}
    page = report.markdown([broken], broken["rows"], ["r.json"], {})
    assert "cuLA wrong (relative error o" in page[page.index("## Where we lose") :]


def test_a_later_file_replaces_a_case(result):
    later = copy.deepcopy(result)
    later["rows"] = later["rows"][:1]
    later["rows"][0]["entries"]["cula"]["time_ms"] = 777.0
    merged = report.merge([result, later])
    assert len(merged) == len(result["rows"])
    assert next(r for r in merged if r["id"] == later["rows"][0]["id"])["entries"]["cula"]["time_ms"] == 777.0


def test_readme_block_is_generated(result, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Head\n\n{report.BEGIN}\nold\n{report.END}\n\ntail\n")
    source = write(result, tmp_path)
    command = ["report", str(source), "--to", str(tmp_path / "docs" / "benchmarks"), "--readme", str(readme)]
    assert main(command) == 0
    text = readme.read_text()
    assert text.startswith("# Head\n\n") and text.endswith(f"{report.END}\n\ntail\n") and "old" not in text
    assert "(docs/benchmarks/H200.md)" in text and "(docs/benchmarks/H200-speedup.png)" in text
    assert main(command) == 0 and readme.read_text() == text
    readme.write_text("no markers")
    assert main(command) == 0 and readme.read_text() == "no markers"


def test_compare_exits_by_threshold(result, tmp_path, capsys):
    slower = copy.deepcopy(result)
    slower["rows"][1]["entries"]["cula"]["time_ms"] *= 1.2
    before, after = write(result, tmp_path, "a.json"), write(slower, tmp_path, "b.json")
    assert main(["compare", str(before), str(before)]) == 0
    assert main(["compare", str(before), str(after), "--threshold", "1.3"]) == 0
    assert main(["compare", str(after), str(before)]) == 0
    capsys.readouterr()
    assert main(["compare", str(before), str(after), "--threshold", "1.1"]) == 1
    said = capsys.readouterr().out
    assert f"REGRESSION kda-prefill kda_prefill {slower['rows'][1]['label']}: 1.20x the time" in said


def test_compare_sees_a_result_that_became_wrong(result, tmp_path, capsys):
    broken = copy.deepcopy(result)
    broken["rows"][0]["entries"]["cula"] = {"status": "failed", "reason": "RuntimeError: boom"}
    broken["rows"].pop()
    before, after = write(result, tmp_path, "a.json"), write(broken, tmp_path, "b.json")
    assert main(["compare", str(before), str(after)]) == 1
    said = capsys.readouterr().out
    assert "was right, now failed (RuntimeError: boom)" in said and "1 cases only in the first file" in said


def test_rows_of_a_forced_backend_stand_beside_the_others(result):
    forced = copy.deepcopy(result)
    for row in forced["rows"]:
        row["forced"] = "triton"
    rows = report.merge([result, forced])
    assert len(rows) == 2 * len(result["rows"])
    names = [group.name for group in summary.groups(rows)]
    assert "kda-prefill, fast gate" in names and "kda-prefill, fast gate, backend triton" in names
    assert report.merge([result, result]) == report.merge([result])


def test_several_tokens_are_compared_with_one():
    def row(tokens, N, ms, op="kda_decode", pool="float32", status="ok"):
        case = {"lens": [tokens] * N, "pool": pool, "H": 2, "HV": 2, "K": 128, "V": 128, "gate": "fast", "flags": []}
        entries = {"cula": {"status": status, "time_ms": ms}}
        return {"suite": "decode", "op": op, "case": case, "label": f"N={N} T={tokens}", "metric": "time_ms", "entries": entries}

    rows = [row(1, 1, 2.0), row(1, 8, 4.0), row(4, 1, 2.0), row(4, 8, 9.0), row(4, 64, 9.0), row(4, 8, 1.0, pool="bfloat16")]
    rows.append(row(4, 1, 1.0, op="lightning_decode"))
    said = ["kda decode, float32 states: 4 tokens / 1 token 1.50x, at worst 2.25x (N=8 T=4)"]
    assert summary.more_tokens(rows) == said
    assert summary.more_tokens([*rows[1:], row(1, 1, 2.0, status="wrong")]) == [said[0].replace("1.50x", "2.25x")]
    assert summary.more_tokens(rows[2:]) == []
