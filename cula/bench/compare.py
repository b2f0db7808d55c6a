# SPDX-License-Identifier: Apache-2.0
"""Two result files beside each other: is the second slower, or wrong where the first was right?"""

from __future__ import annotations

from dataclasses import dataclass

from cula.bench import summary
from cula.bench.progress import table
from cula.bench.results import Result

DEFAULT_THRESHOLD = 1.10


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


def compare(before: Result, after: Result, threshold: float = DEFAULT_THRESHOLD) -> Comparison:
    """Rows with the same id. A regression: our time grew by more than `threshold`, or a right result became wrong or failed."""
    notes = []
    for what, name in (("machine", "device"), ("versions", "torch")):
        if before[what][name] != after[what][name]:
            notes.append(f"note: {what} {name} differs: {before[what][name]} and {after[what][name]}")
    old, new = ({row["id"]: row for row in result["rows"]} for result in (before, after))
    for rows, others, name in ((old, new, "the first"), (new, old, "the second")):
        alone = [rows[i]["label"] for i in rows if i not in others]
        if alone:
            some = ", ".join(alone[:5]) + (", ..." if len(alone) > 5 else "")
            notes.append(f"note: {len(alone)} cases only in {name} file: {some}")
    lines: list[list[str]] = []
    regressions: list[str] = []
    ratios: list[float] = []
    for key in [key for key in old if key in new]:
        row, was, now = new[key], summary.ours(old[key]), summary.ours(new[key])
        name, metric, verdict, ratio = f"{row['suite']} {row['op']} {row['label']}", row["metric"], "", None
        if was["status"] == "ok" and now["status"] != "ok":
            verdict = now["status"]
            regressions.append(f"{name}: was right, now {now['status']} ({now.get('reason', '')})")
        if was.get(metric) and now.get(metric):
            ratio = now[metric] / was[metric]
            ratios.append(ratio)
            if ratio > threshold:
                verdict = verdict or "slower"
                change = f"{summary.ms(was[metric])} -> {summary.ms(now[metric])} ms"
                regressions.append(f"{name}: {summary.times(ratio)} the time ({change})")
            elif ratio < 1 / threshold:
                verdict = verdict or "faster"
        lines.append([name, summary.ms(was.get(metric)), summary.ms(now.get(metric)), summary.times(ratio), verdict])
    if ratios:
        notes.append(f"geomean of after/before over {len(ratios)} cases: {summary.times(summary.geomean(ratios))}")
    if not lines:
        regressions.append("the files have no case in common")
    return Comparison(lines, regressions, notes)
