# SPDX-License-Identifier: Apache-2.0
"""The report: Markdown and pictures from result files, and from nothing else. Where we lose, it says so.

A page is a machine's, `<GPU>.md` with its pictures beside it. It goes where the caller says; a README is touched only by name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cula.bench import passes, plots, suites, summary
from cula.bench.progress import table
from cula.bench.results import Result, is_of_script, short_name

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
Row = summary.Row


def merge(loaded: Sequence[Result]) -> list[Row]:
    """The rows of all files in the order of the suites; of a case measured twice, the later file's.

    Rows of a forced backend are cases of their own, after those that left the choice to dispatch.
    """
    rows = {(row["id"], row.get("forced")): row for result in loaded if not is_of_script(result) for row in result["rows"]}
    order = {suite: i for i, suite in enumerate(suites.known())}
    return sorted(rows.values(), key=lambda row: (order.get(row["suite"], len(order)), row.get("forced") or ""))


def is_taken(result: Result) -> bool:
    """Whether a report has a place for a file: rows of suites, and of the scripts' the passes of KDA."""
    return not is_of_script(result) or passes.is_passes(result)


def by_machine(loaded: Sequence[Result], sources: Sequence[str]) -> dict[str, tuple[list[Result], list[str]]]:
    """The results of each machine and their sources, in the order in which machines come."""
    found: dict[str, tuple[list[Result], list[str]]] = {}
    for result, source in zip(loaded, sources, strict=True):
        results, names = found.setdefault(short_name(result), ([], []))
        results.append(result)
        names.append(source)
    return found


def write(loaded: Sequence[Result], sources: Sequence[str], folder: Path, readme: Path | None = None) -> list[Path]:
    """`<GPU>.md` and its pictures for each machine in the results; the README's block for the first. Returns what was written."""
    if readme is not None:
        _split_at_block(readme)  # raises before anything is written
    written: list[Path] = []
    folder.mkdir(parents=True, exist_ok=True)
    for i, (name, (results, names)) in enumerate(by_machine(loaded, sources).items()):
        rows = merge(results)
        pictures = plots.draw([row for row in rows if not row.get("forced")] or rows, folder, name)
        page = folder / f"{name}.md"
        page.write_text(markdown(results, rows, names, pictures))
        written += [page, *pictures.values()]
        if readme is not None and i == 0:
            update_readme(readme, results, rows, page, pictures)
            written.append(readme)
    return written


def markdown(loaded: Sequence[Result], rows: Sequence[Row], sources: Sequence[str], pictures: dict[str, Path]) -> str:
    results = [r for r in loaded if not is_of_script(r)]
    out = [f"# Benchmarks: {short_name(loaded[-1])}", ""]
    out += [f"Made by `cula-bench report` from {', '.join(f'`{s}`' for s in sources)}. Nothing here is typed by hand.", ""]
    if results:
        out += _suites(rows, pictures)
    for result, source in zip(loaded, sources, strict=True):
        if passes.is_passes(result):
            out += ["## Passes of a KDA call", "", passes.text(result, source), ""]
            out += [*_md_table(passes.HEAD, passes.cells(result)), ""]
    if results:
        out += _footnotes(results, rows)
    return "\n".join(out).rstrip() + "\n"


def _suites(rows: Sequence[Row], pictures: dict[str, Path]) -> list[str]:
    out = _pictures(pictures, list(pictures)[:1])
    out += ["## Summary", "", *_md_table(summary.HEAD, [g.cells() for g in summary.groups(rows)]), ""]
    out += [
        "The floor is the time in which this machine copies the bytes that must move. A ratio above 1 means that the fastest "
        "peer that was right takes longer than cuLA. Only right results count; worst means worst for us.",
        "",
    ]
    out += _losses(rows)
    if len(pictures) > 1:
        out += ["## Pictures", "", *_pictures(pictures, list(pictures)[1:])]
    for suite in dict.fromkeys(row["suite"] for row in rows):
        out += _suite(suite, [row for row in rows if row["suite"] == suite])
    return out


def _pictures(pictures: dict[str, Path], titles: Sequence[str]) -> list[str]:
    out = []
    for title in titles:
        out += [f"![{title}]({pictures[title].name})", ""]
        if title in plots.CAPTIONS:
            out += [f"*{title}.* {plots.CAPTIONS[title]}", ""]
    return out


def _setting(results: Sequence[Result]) -> list[str]:
    head = ("file", "date", "device", "cuLA", "commit", "source", "torch", "CUDA", "Triton", "copy TB/s", "seconds")
    lines = []
    for i, r in enumerate(results):
        v = r["versions"]
        cells = [str(i + 1), r["date"], r["machine"]["device"], v["cula"], (r["commit"] or "")[:20], r["source"], v["torch"]]
        cells += [v["cuda"] or "", v["triton"] or "", f"{r['bandwidth'] / 1e12:.2f}", f"{r['seconds']:.0f}"]
        lines.append(cells)
    found = [(p["title"], p["status"], p.get("version") or p.get("reason", "")) for p in _peers(results).values()]
    tables = [*_md_table(head, lines), "", *_md_table(("peer", "", "version, or what to install"), found), ""]
    return ["## Machine and versions", "", *tables]


def _peers(results: Sequence[Result]) -> dict[str, dict[str, str]]:
    """Every peer: as a file that found it says, or as one that did not."""
    peers: dict[str, dict[str, str]] = {}
    for r in results:
        for name, facts in r["peers"].items():
            if peers.get(name, {}).get("status") != "found":
                peers[name] = facts
    return peers


def _losses(rows: Sequence[Row]) -> list[str]:
    body = [f"- {text}" for text in losses(rows)] or ["Nowhere in these results."]
    return ["## Where we lose", "", *body, ""]


def losses(rows: Sequence[Row]) -> list[str]:
    """Cases where a peer was faster, and cases where we failed or were wrong, by name."""
    lost = []
    for row in rows:
        best, entry = summary.best_peer(row), summary.ours(row)
        if entry["status"] in ("failed", "wrong"):
            lost.append(f"{row['suite']}, {row['label']}: cuLA {entry['status']} ({entry.get('reason', '')})")
        elif best is not None and best[1] < 1:
            forced = f", backend {row['forced']}" if row.get("forced") else ""
            lost.append(f"{row['suite']}, {_op(row)}{row['label']}{forced}: {best[0]} takes {summary.times(best[1])} our time")
    return lost


def _op(row: Row) -> str:
    return f"{row['op'].replace('_', ' ')}, " if row["suite"] in ("lightning", "decode", "gva", "api") else ""


def _suite(suite: str, rows: Sequence[Row]) -> list[str]:
    columns = _columns(suite, rows)
    after = [f"- {text}" for text in summary.more_tokens(rows)]
    known = suites.known()
    title = f"## {suite}: {known[suite]}" if suite in known else f"## {suite}"  # another version's
    table = _md_table([column.title for column in columns], [[column.cell(row) for column in columns] for row in rows])
    return [title, "", *table, "", *([*after, ""] if after else [])]


class Column(NamedTuple):
    """One column of a suite's table."""

    title: str
    cell: Callable[[Row], str]


def _columns(suite: str, rows: Sequence[Row]) -> list[Column]:
    """What there is to show of these rows: the case, our times, and each peer that took part. Older files have not all of it."""
    is_host = rows[0]["metric"] == "host_ms"
    unit = "us" if is_host else "ms"

    def has(name: str) -> bool:
        return any(summary.ours(row).get(name) for row in rows)

    def us(title: str, name: str) -> Column:
        return Column(title, lambda row: _us(summary.ours(row).get(name)))

    columns = [
        Column("operation", lambda row: _operation(row, with_mode=suite == "dist")),
        Column("shape, gate", lambda row: row["label"]),
        Column("backend", _backends),
        Column(f"host {unit}" if is_host else unit, lambda row: _time(summary.ours(row), row["metric"])),
    ]
    if has("graph_ms") and not is_host:
        columns += [Column("cold L2 ms", lambda row: summary.ms(summary.ours(row).get("cold_ms"))), us("host us", "host_ms")]
    if has("host_loop_ms"):
        columns.append(us("in a loop us", "host_loop_ms"))
    if has("add_loop_ms"):
        columns.append(us("torch add_ in a loop us", "add_loop_ms"))
    if is_host:
        columns += [us("dispatch us", "dispatch_ms"), us("graph replay us", "graph_host_ms")]
    else:
        columns.append(Column("floor ms", lambda row: summary.ms(row["floor"]["ms"])))
        columns.append(Column("over floor", lambda row: summary.times(summary.ours(row).get("over_floor"))))
    if any("states_ms" in row for row in rows):
        columns.append(Column("torch mul_ of the states ms", lambda row: summary.ms(row.get("states_ms"))))
    if any("slots_ms" in row for row in rows):
        columns.append(Column("of the slots in their order ms", lambda row: summary.ms(row.get("slots_ms"))))
    columns += _errors(summary.ours, "", has("peak_bytes"))
    for peer in _compared(rows):
        columns += _of_peer(peer, unit, has("peak_bytes"))
    return columns


def _of_peer(peer: str, unit: str, has_peak: bool) -> list[Column]:
    theirs = functools.partial(_entry_of, peer)
    time = Column(f"{peer} {unit}", lambda row: _time(theirs(row), row["metric"]))
    ratio = Column(f"{peer} / cuLA", lambda row: summary.times(row["ratios"].get(peer)))
    return [time, ratio, *_errors(theirs, f"{peer} ", has_peak)]


def _errors(entry_of: Callable[[Row], dict[str, Any]], whose: str, has_peak: bool) -> list[Column]:
    """The error of a library's entry and, where rows have it, the peak of its memory."""
    error = Column(f"{whose}error", lambda row: summary.error(summary.largest_error(entry_of(row))))
    return [error, *[Column(f"{whose}peak MiB", lambda row: _mib(entry_of(row)))] * has_peak]


def _compared(rows: Sequence[Row]) -> list[str]:
    """Peers that did not decline all of the rows."""
    peers = dict.fromkeys(name for row in rows for name in row["entries"] if name != "cula")
    return [peer for peer in peers if any(_entry_of(peer, row)["status"] != "declined" for row in rows)]


def _entry_of(peer: str, row: Row) -> dict[str, Any]:
    found: dict[str, Any] = row["entries"].get(peer, {"status": "declined"})
    return found


def _operation(row: Row, with_mode: bool) -> str:
    return f"{row['op'].replace('_', ' ')} {row['case']['mode'] if with_mode else ''}".strip()


def _backends(row: Row) -> str:
    """Who served the case, and its gradient if that was another."""
    backend = row.get("backend") or ""
    return backend if row.get("backend_bwd") in (None, backend) else f"{backend} / {row['backend_bwd']}"


def _time(entry: dict[str, Any], metric: str) -> str:
    """The time; with its verdict where the result was not right, or the verdict alone."""
    if entry["status"] == "declined":
        return "-"
    text = _us(entry.get(metric)) if metric == "host_ms" else summary.ms(entry.get(metric))
    return text if entry["status"] == "ok" else f"{text} **{entry['status']}**".strip()


def _us(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:.1f}"


def _mib(entry: dict[str, Any]) -> str:
    peak = entry.get("peak_bytes")
    return "" if peak is None else f"{peak / 2**20:.0f}"


def _footnotes(results: Sequence[Result], rows: Sequence[Row]) -> list[str]:
    out: list[str] = []
    if found := summary.problems(rows):
        out += ["## Failed or wrong", "", *(f"- {text}" for text in found), ""]
    notes: set[str] = set()
    for row in rows:
        for name, entry in row["entries"].items():
            if entry.get("note"):
                notes.add(f"{name}, {row['op'].replace('_', ' ')}: {entry['note']}")
            if entry.get("graph_note"):
                why = f"not captured in a graph, timed by events ({entry['graph_note']})"
                notes.add(f"{name}, {row['suite']} {row['label']}: {why}")
    if notes:
        out += ["## Notes", "", *(f"- {text}" for text in sorted(notes)), ""]
    if left := _left_out(results, rows):
        out += ["## Left out for lack of time", "", *(f"- `{i}`" for i in left), ""]
    out += [
        "## How it was measured",
        "",
        "`ms` is GPU time a call: the median of CUDA graph replays, or of events where a call cannot be captured; on a CPU the "
        "clock. `cold L2` writes twice the L2 before each call. `host us` is the time until the call returns, the device idle "
        "before it; `in a loop`, with others like it before it. Peers ran in the same process on the same inputs. "
        f"{_tuning(results)} `error` is the largest relative error of any output against float64; the slice that was checked "
        "stands in each row of the result files. Peak memory is above the inputs.",
        "",
    ]
    return out + _setting(results)


def _left_out(results: Sequence[Result], rows: Sequence[Row]) -> list[str]:
    """Cases that some file left out, and that no file has."""
    done = {row["id"] for row in rows}
    return [i for i in dict.fromkeys(i for r in results for i in r["left_out"]) if i not in done]


def _tuning(results: Sequence[Result]) -> str:
    """How peers that choose among variants of their kernels came to do so."""
    given = dict.fromkeys(tuple(r["settings"]["tune_ms"]) for r in results if r["settings"].get("tune_ms"))
    times = " or ".join(f"{warm_up} + {repeat} ms" for warm_up, repeat in given) or "as long as they take by themselves"
    return f"Peers that tune themselves did so on the first case that asked for it, alone on the device ({times} a variant)."


def _split_at_block(readme: Path) -> tuple[str, str]:
    """What stands before the generated block, and what behind it."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} has no block to fill: it takes a line {BEGIN} and, below it, a line {END}")
    return before, after


def update_readme(readme: Path, loaded: Sequence[Result], rows: Sequence[Row], page: Path, pictures: dict[str, Path]) -> None:
    """Fill the generated block."""
    before, after = _split_at_block(readme)

    def link(path: Path) -> str:
        return Path(os.path.relpath(path.resolve(), readme.parent.resolve())).as_posix()

    results = [r for r in loaded if not is_of_script(r)]
    device = results[-1]["machine"]["device"] if results else loaded[-1]["machine"]
    keep = (0, 2, 3, 4, 5, 6, 7)
    groups = summary.groups(rows)
    shown = [g for g in groups if g.is_headline] or groups
    body = _md_table([summary.HEAD[i] for i in keep], [[g.cells()[i] for i in keep] for g in shown])
    against = [f"{p['title']} {p['version']}" for p in _peers(results).values() if p["status"] == "found"]
    block = [
        BEGIN,
        f"On {device}, generated from result files; [all tables and pictures]({link(page)}). "
        f"Peers ran in the same process on the same inputs: {', '.join(against) or 'none'}. "
        "The best peer of a case is the fastest one that was right. Fast gates forget within a few chunks, slow ones do not.",
        "",
        *body,
        "",
    ]
    for title, picture in list(pictures.items())[:1]:
        block += [f"![{title}, by suite]({link(picture)})", ""]
    readme.write_text(before + "\n".join([*block, END]) + after)


def _md_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [row(head), "|" + "---|" * len(head), *(row(line) for line in lines)]


def screen(loaded: Sequence[Result]) -> str:
    """What a run shows at its end, and a report of the files of one machine."""
    results = [r for r in loaded if not is_of_script(r)]
    rows = merge(results)
    parts = [table(summary.HEAD, [g.cells() for g in summary.groups(rows)])] if rows else []
    parts += summary.more_tokens(rows)
    parts += [passes.line(r) for r in loaded if passes.is_passes(r)]
    parts += [f"{p['title']}: {p['reason']}" for p in _peers(results).values() if p["status"] == "absent"]
    parts += [f"slower on {text}" for text in losses([row for row in rows if summary.ours(row)["status"] == "ok"])]
    parts += summary.problems(rows)
    if left := _left_out(results, rows):
        parts.append(f"{len(left)} cases left out for lack of time")
    return "\n".join(parts)
