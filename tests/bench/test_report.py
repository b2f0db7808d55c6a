# SPDX-License-Identifier: Apache-2.0
"""The report and the comparison say what the result files hold, and no more."""

import copy
import json
import math
import re
from pathlib import Path

import pytest

from cula.bench import report, results, summary
from cula.bench.cli import main
from tests.bench.conftest import FAKES
from tests.support.once import once_a_run

ROOT = Path(__file__).resolve().parents[2]
MADE: list[dict] = []  # one run serves all tests of this file


@pytest.fixture
def result(run):
    """A result as a GPU would leave it: a run's file, its numbers replaced by known ones."""
    if not MADE:
        suites = ["kda-prefill", "kda-train", "decode", "segments", "api"]
        MADE.append(once_a_run("bench-report", lambda: run(suites, peers=FAKES, limit=2)))
    made = copy.deepcopy(MADE[0])
    made["machine"] |= {"gpu": "NVIDIA H200", "device": "NVIDIA H200 (cuda:0, SM 9.0)", "load": 0.0}
    made["left_out"] = ["kda-prefill/kda_prefill/1x999/left"]
    for i, row in enumerate(made["rows"]):
        for j, entry in enumerate(row["entries"].values()):
            if "time_ms" in entry:
                entry |= {"time_ms": 1.2345 + i + j / 7, "graph_ms": 1.2345 + i + j / 7, "cold_ms": 2.5 + i, "host_ms": 0.02 + i}
                entry |= {"spread": 0.0, "host_spread": 0.0}
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
    assert main(["report", str(source), "--to", str(tmp_path / "docs")]) == 0
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


def test_a_block_is_filled_only_where_it_is_asked_for_and_can_be(result, tmp_path, capsys):
    readme, source, folder = tmp_path / "README.md", write(result, tmp_path), tmp_path / "docs"
    for text, command, said in (
        ("no markers", ["--to", str(folder), "--readme", str(readme)], "has no block to fill"),
        (f"{report.END}{report.BEGIN}", ["--to", str(folder), "--readme", str(readme)], "has no block to fill"),
        (f"{report.BEGIN}{report.END}", ["--readme", str(readme)], "--readme needs --to"),
        (f"{report.BEGIN}{report.END}", ["--to", str(folder), "--readme", str(tmp_path / "none.md")], "none.md"),
    ):
        readme.write_text(text)
        assert main(["report", str(source), *command]) == 2
        assert said in capsys.readouterr().err
        assert readme.read_text() == text and not folder.exists()


def test_a_block_links_to_a_page_elsewhere(result, tmp_path):
    readme = tmp_path / "project" / "README.md"
    readme.parent.mkdir()
    readme.write_text(f"{report.BEGIN}{report.END}")
    assert main(["report", str(write(result, tmp_path)), "--to", str(tmp_path / "pages"), "--readme", str(readme)]) == 0
    assert "(../pages/H200.md)" in readme.read_text()


def test_a_report_stays_out_of_the_project(result, tmp_path, monkeypatch, capsys):
    """In a clone, the README and the project's pages are as they were; the user's page is in a folder of its own."""
    theirs = {"README.md": f"# Head\n\n{report.BEGIN}\nold\n{report.END}\n", "docs/benchmarks/H200.md": "the project's"}
    for name, text in theirs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    source = write(result, tmp_path, "mine.json")
    monkeypatch.chdir(tmp_path)
    assert main(["report", source.name]) == 0
    assert {name: (tmp_path / name).read_text() for name in theirs} == theirs
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "bench-report", "docs", "mine.json"]
    assert "from `mine.json`" in (tmp_path / "bench-report" / "H200.md").read_text()
    said = capsys.readouterr().out
    assert "bench-report/H200.md" in said and "kda-prefill, fast gate" in said
    assert f"slower on kda-prefill, {result['rows'][0]['label']}: twin takes 0.50x our time" in said


def test_help_says_how_the_projects_pages_are_made(capsys):
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    said = capsys.readouterr().out
    assert "bench-report/" in said and "make bench-pages" in said
    options = re.search(r"^    cula-bench report benchmarks/results/\*\.json (.*)$", said, re.MULTILINE)[1]
    rule = re.search(r"^bench-pages:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert rule == f"$(BIN)/python -m cula.bench report $(sort $(wildcard benchmarks/results/*.json)) {options}"


def test_the_committed_files_give_the_committed_pages(tmp_path, monkeypatch, capsys):
    """`make bench-pages` takes every file, and would change nothing."""
    monkeypatch.chdir(ROOT)
    files = sorted(Path("benchmarks/results").glob("*.json"))
    readme = tmp_path / "README.md"
    readme.write_text(Path("README.md").read_text())
    monkeypatch.setattr(report.plots, "draw", lambda rows, folder, name: pictures(folder, name))
    assert main(["report", *map(str, files), "--to", str(tmp_path / "docs/benchmarks"), "--readme", str(readme)]) == 0
    said, of_scripts = (
        capsys.readouterr().err,
        {
            "cpu_decode": "cpu_decode",
            "cpu_token_loop": "cpu_token_loop",
            "H200-first-call": "first_call",
            "H200-fla-layers": "fla_layers",
            "H200-train-model": "train_model",
        },
    )
    for name, script in of_scripts.items():
        assert f"results/{name}.json is left out: it has no rows of a suite, benchmarks/{script}.py wrote it (" in said
    page = Path("docs/benchmarks/H200.md").read_text()
    assert all(f"`{file}`" in page for file in files if file.stem not in of_scripts)
    assert (tmp_path / "docs/benchmarks/H200.md").read_text() == page, "make bench-pages"
    assert readme.read_text() == Path("README.md").read_text(), "make bench-pages"


def pictures(folder, name):
    """Those of the committed page, which are not drawn again."""
    page = (ROOT / "docs" / "benchmarks" / f"{name}.md").read_text()
    return {title: folder / file for title, file in re.findall(r"!\[(.*?)\]\((.*?)\)", page)}


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results" / "history").glob("*.json")), ids=lambda path: path.stem)
def test_earlier_files_are_read(path):
    loaded = results.load(path)
    assert report.markdown([loaded], report.merge([loaded]), [path.name], {}).startswith("# Benchmarks: H200")


def test_a_suite_has_one_file_that_stands():
    found = [results.read(path) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))]
    rows = [(row["id"], row["forced"]) for result in found if not results.is_of_script(result) for row in result["rows"]]
    assert len(rows) == len(set(rows))


def test_passes_of_a_call_have_a_section(tmp_path, capsys):
    source = ROOT / "benchmarks" / "results" / "H200-kda-passes.json"
    assert main(["report", str(source), "--to", str(tmp_path)]) == 0
    assert "passes of a KDA call, H=32, 1x8192, fast: forward 0.919 ms" in capsys.readouterr().out
    page = (tmp_path / "H200.md").read_text()
    taken = json.loads(source.read_text())["passes"]
    for name, entry in taken.items():
        assert f"| {name} | {summary.ms(entry['graph_ms'])} | `" in page
    reduces = sum(us for name, us in taken["training"]["kernels_us"].items() if "reduce_kernel" in name)
    assert f"`at::native::reduce_kernel` {reduces:.0f}" in page and "<" not in page
    assert f" {taken['training']['peak_bytes'] / 2**20:.0f} |" in page


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "x.json is not JSON"),
        ("\x00", "x.json is not JSON"),
        ("[1]", "x.json is not a result file"),
        ('{"name": "else"}', "x.json is not a result file"),
        ('{"schema": 99}', "x.json has schema 99; this version reads 1"),
        ('{"schema": 1, "rows": []}', "x.json is not whole: it has no machine"),
        (
            '{"script": "benchmarks/s.py", "what": "How fast."}',
            "x.json is left out: it has no rows of a suite, benchmarks/s.py wrote it (How fast)\n",
        ),
        (
            '{"script": "benchmarks/kda_passes.py", "what": "Passes."}',
            "no rows of a suite, benchmarks/kda_passes.py wrote it (Passes)\n",
        ),
        (None, "No such file or directory"),
    ],
)
def test_other_files_get_a_sentence(tmp_path, capsys, text, said):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path), "--to", str(tmp_path / "docs")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("cula-bench: ") and "Traceback" not in error
    assert not (tmp_path / "docs").exists()


def test_a_script_file_has_nothing_to_compare(result, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text('{"script": "benchmarks/s.py", "what": "How fast."}')
    assert main(["compare", str(write(result, tmp_path)), str(path)]) == 2
    assert "x.json cannot be compared: it has no rows of a suite, benchmarks/s.py wrote it (How fast)" in capsys.readouterr().err


def test_a_suite_of_another_version_is_shown(result):
    for row in result["rows"][:1]:
        row["suite"] = "retired"
    rows = report.merge([result])
    assert rows[-1]["suite"] == "retired" and "## retired\n" in report.markdown([result], rows, ["r.json"], {})


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


def test_compare_knows_noise_from_a_regression(result, tmp_path, capsys):
    slower = copy.deepcopy(result)
    entry = slower["rows"][1]["entries"]["cula"]
    entry["time_ms"] *= 1.5
    before, after = write(result, tmp_path, "a.json"), write(slower, tmp_path, "b.json")
    assert main(["compare", str(before), str(after)]) == 1
    entry["spread"] = 0.4  # repeats differ that much: 1.1 * 1.4 > 1.5
    after = write(slower, tmp_path, "b.json")
    capsys.readouterr()
    assert main(["compare", str(before), str(after)]) == 0
    said = capsys.readouterr().out
    assert "slower, noise" in said and "1 cases took up to 1.50x the time, which is no regression: no more than" in said


def test_a_busy_cpu_decides_nothing_and_is_said(result, tmp_path, capsys):
    result["machine"]["cpus"] = 2
    del result["machine"]["gpu"]
    slower = copy.deepcopy(result)
    slower["machine"]["load"] = 5.3
    slower["rows"][1]["entries"]["cula"]["time_ms"] *= 3
    before, after = write(result, tmp_path, "a.json"), write(slower, tmp_path, "b.json")
    capsys.readouterr()
    assert main(["compare", str(before), str(after)]) == 0
    said = capsys.readouterr().out
    assert "the machine was busy before the run of the second file: load 5.3 on 2 CPUs" in said
    assert "slower, busy" in said and "no regressions" in said
    for made in (result, slower):  # a GPU is not the CPUs' business
        made["machine"]["gpu"] = "NVIDIA H200"
    before, after = write(result, tmp_path, "a.json"), write(slower, tmp_path, "b.json")
    assert main(["compare", str(before), str(after)]) == 1


def test_compare_sees_a_result_that_became_wrong(result, tmp_path, capsys):
    broken = copy.deepcopy(result)
    broken["rows"][0]["entries"]["cula"] = {"status": "failed", "reason": "RuntimeError: boom"}
    broken["rows"].pop()
    before, after = write(result, tmp_path, "a.json"), write(broken, tmp_path, "b.json")
    assert main(["compare", str(before), str(after)]) == 1
    said = capsys.readouterr().out
    assert "was right, now failed (RuntimeError: boom)" in said and "1 case only in the first file" in said


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
