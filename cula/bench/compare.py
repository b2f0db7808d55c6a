# SPDX-License-Identifier: Apache-2.0
"""Two result files beside each other: is the second slower, or wrong where the first was right?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cula.bench import summary
from cula.bench.progress import table
from cula.bench.results import Result

DEFAULT_THRESHOLD = 1.10
BUSY = 0.5  # processes that want to run, for each CPU
SPREADS = {"time_ms": "spread", "host_ms": "host_spread"}  # of a metric, where its spread is


@dataclass(frozen=True)
class Comparison:
    lines: list[list[str]]  # case, time before, time after, after over before, verdict
    regressions: list[str]
    notes: list[str]

    def text(self) -> str:
        parts = [table(("case", "before ms", "after ms", "after/before", ""), self.lines)] if self.lines else []
        parts += self.notes
        parts += [f"REGRESSION {text}" for text in self.regressions] or ["no regressions"]
        return "\n".join(parts)


def _busy(result: Result, name: str) -> str | None:
    """What is to be said of a machine that others used while it was measured."""
    machine = result["machine"]
    load, cpus = machine.get("load"), machine.get("cpus") or 1
    if load is None or load <= BUSY * cpus:
        return None
    return f"note: the machine was busy before the run of the {name} file: load {load} on {cpus} CPUs"


def compare(before: Result, after: Result, threshold: float = DEFAULT_THRESHOLD) -> Comparison:
    """Rows with the same id. A regression: our time grew by more than `threshold`, and by more than the repeats of a measurement
    differ, or a right result became wrong or failed. Times of a CPU that was busy with other things decide nothing."""
    notes = [note for result, name in ((before, "first"), (after, "second")) if (note := _busy(result, name)) is not None]
    is_busy = bool(notes) and "gpu" not in after["machine"]
    for what, name in (("machine", "device"), ("versions", "torch")):
        if before[what][name] != after[what][name]:
            notes.append(f"note: {what} {name} differs: {before[what][name]} and {after[what][name]}")
    old, new = ({row["id"]: row for row in result["rows"]} for result in (before, after))
    for rows, others, name in ((old, new, "the first"), (new, old, "the second")):
        alone = [rows[i]["label"] for i in rows if i not in others]
        if alone:
            some = ", ".join(alone[:5]) + (", ..." if len(alone) > 5 else "")
            notes.append(f"note: {len(alone)} case{'s' * (len(alone) != 1)} only in {name} file: {some}")
    lines: list[list[str]] = []
    regressions: list[str] = []
    ratios: list[float] = []
    unsure: list[float] = []
    for key in [key for key in old if key in new]:
        row, was, now = new[key], summary.ours(old[key]), summary.ours(new[key])
        name, metric, verdict, ratio = f"{row['suite']} {row['op']} {row['label']}", row["metric"], "", None
        if was["status"] == "ok" and now["status"] != "ok":
            verdict = now["status"]
            regressions.append(f"{name}: was right, now {now['status']} ({now.get('reason', '')})")
        if was.get(metric) and now.get(metric):
            ratio = now[metric] / was[metric]
            ratios.append(ratio)
            noise = math.prod(1.0 + (entry.get(SPREADS.get(metric, "")) or 0.0) for entry in (was, now))
            if ratio > threshold and (is_busy or ratio <= threshold * noise):
                verdict = verdict or ("slower, busy" if is_busy else "slower, noise")
                unsure.append(ratio)
            elif ratio > threshold:
                verdict = verdict or "slower"
                change = f"{summary.ms(was[metric])} -> {summary.ms(now[metric])} ms"
                regressions.append(f"{name}: {summary.times(ratio)} the time ({change})")
            elif ratio < 1 / threshold:
                verdict = verdict or "faster"
        lines.append([name, summary.ms(was.get(metric)), summary.ms(now.get(metric)), summary.times(ratio), verdict])
    if ratios:
        notes.append(f"geomean of after/before over {len(ratios)} cases: {summary.times(summary.geomean(ratios))}")
    if unsure:
        why = "the CPU was busy" if is_busy else "no more than the repeats of a measurement differ"
        notes.append(f"note: {len(unsure)} cases took up to {summary.times(max(unsure))} the time, which is no regression: {why}")
    if not lines:
        regressions.append("the files have no case in common")
    return Comparison(lines, regressions, notes)
