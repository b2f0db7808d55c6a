# SPDX-License-Identifier: Apache-2.0
"""Rows in words and numbers: ratios, geomeans, worst cases, losses. Everything here is computed from a result's rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


def geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def ms(value: float | None) -> str:
    """Milliseconds to three digits."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.1f}x" if value < 100 else f"{value:.0f}x"


def error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def best_peer(row: Row) -> tuple[str, float] | None:
    """The fastest peer that was right, and its time over ours."""
    return min(row["ratios"].items(), key=lambda item: item[1]) if row["ratios"] else None


def ours(row: Row) -> dict[str, Any]:
    return row["entries"].get("cula", {"status": "failed", "reason": "no entry"})


def largest_error(entry: dict[str, Any], names: Sequence[str] | None = None) -> float | None:
    """The largest error of an entry's outputs, or of the named ones; NaN counts as the largest."""
    found = [e for name, e in entry.get("error", {}).items() if names is None or name in names]
    return max(found, key=lambda e: (math.isnan(e), e)) if found else None


def line(row: Row) -> str:
    """One row as a line of text."""
    entry = ours(row)
    if "time_ms" not in entry:
        return f"{row['label']}: {entry['status']} ({entry.get('reason', '')})"
    parts = [f"{row['label']}: {ms(entry[row['metric']])} ms", row.get("backend") or ""]
    if "over_floor" in entry:
        parts.append(f"{times(entry['over_floor'])} floor")
    for name, other in row["entries"].items():
        if name == "cula" or other["status"] == "declined":
            continue
        ratio = row["ratios"].get(name)
        parts.append(f"{name} {times(ratio)}" if ratio is not None else f"{name} {other['status']}")
    parts.append(f"error {error(largest_error(entry))}")
    if entry["status"] != "ok":
        parts.append(f"{entry['status'].upper()}: {entry.get('reason', '')}")
    return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Group:
    """Rows that may be averaged: one suite, operation and gate."""

    suite: str
    name: str
    rows: tuple[Row, ...]

    @property
    def ranked(self) -> list[Row]:
        return [r for r in self.rows if ours(r)["status"] == "ok"]

    @property
    def over_floor(self) -> list[tuple[float, str]]:
        return [(ours(r)["over_floor"], r["label"]) for r in self.ranked if "over_floor" in ours(r)]

    @property
    def against_best(self) -> list[tuple[float, str]]:
        pairs = [(best_peer(r), r["label"]) for r in self.ranked]
        return [(best[1], label) for best, label in pairs if best is not None]

    @property
    def losses(self) -> int:
        return sum(ratio < 1 for ratio, _ in self.against_best)

    @property
    def rivals(self) -> str:
        """Which peer was the best, in how many rows."""
        found = Counter(best[0] for r in self.ranked if (best := best_peer(r)) is not None)
        return ", ".join(f"{name} {n}" for name, n in found.most_common())

    @property
    def failures(self) -> list[str]:
        """Peers that raised: without them, the best of the others says less."""
        found = Counter(name for r in self.rows for name, e in r["entries"].items() if name != "cula" and e["status"] == "failed")
        return [f"{name} failed on {n}" for name, n in found.items()]

    @property
    def is_headline(self) -> bool:
        """What most users call, as it is dispatched: for a short table."""
        case = self.rows[0]["case"]
        is_plain = self.suite != "decode" or (case["lens"][0], case.get("pool", "float32")) == (1, "float32")
        return self.suite in HEADLINE and is_plain and not self.rows[0].get("forced")

    def cells(self) -> list[str]:
        """The line of a summary table, under `HEAD`."""
        floors, ratios = self.over_floor, self.against_best
        slowest, weakest = max(floors, default=None), min(ratios, default=None)
        return [
            self.name,
            f"{len(self.ranked)}/{len(self.rows)}",
            times(geomean(v for v, _ in floors)),
            f"{times(slowest[0])} ({slowest[1]})" if slowest else "",
            f"{times(geomean(v for v, _ in ratios))} ({'; '.join([f'{len(ratios)} of {len(self.rows)} rows', *self.failures])})"
            if ratios
            else "",
            f"{times(weakest[0])} ({weakest[1]})" if weakest else "",
            self.rivals,
            str(self.losses) if ratios else "",
        ]


HEADLINE = ("kda-prefill", "kda-train", "gdn-prefill", "gdn-train", "lightning", "decode")
HEAD = (
    "suite",
    "right",
    "time over floor, geomean",
    "worst",
    "best peer / cuLA, geomean of the rows with a peer",
    "worst",
    "best peer, rows",
    "slower than a peer",
)


def groups(rows: Sequence[Row]) -> list[Group]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        case = row["case"]
        words = [row["suite"]]
        if row["suite"] in ("lightning", "decode", "gva", "api"):
            words.append(" ".join(word for word in row["op"].split("_") if word != row["suite"]))
        if "scalar" in case["flags"]:
            words.append("one gate a head")
        elif row["op"].startswith(("kda", "gdn")) and row["suite"] != "api":
            words.append(f"{case['gate']} gate")
        if row["suite"] == "dist":
            words.append(case["mode"])
        if row["suite"] == "decode" and (case["lens"][0], case.get("pool", "float32")) != (1, "float32"):
            tokens = case["lens"][0]
            words.append(f"{tokens} token{'s' if tokens > 1 else ''}, {case['pool']} states")
        if row.get("forced"):
            words.append(f"backend {row['forced']}")
        found.setdefault((row["suite"], ", ".join(words)), []).append(row)
    return [Group(suite, name, tuple(members)) for (suite, name), members in found.items()]


def more_tokens(rows: Sequence[Row]) -> list[str]:
    """What several tokens a row cost a decode beside one, for each operation and dtype of states: one sentence each."""
    times_of: dict[tuple[Any, ...], dict[tuple[Any, ...], tuple[float, str]]] = {}
    for row in rows:
        case, entry = row["case"], ours(row)
        if row["suite"] == "decode" and entry["status"] == "ok":
            pool, tokens = case.get("pool", "float32"), case["lens"][0]
            shape = (len(case["lens"]), case["H"], case["HV"], case["K"], case["V"], case["gate"], row.get("forced"))
            times_of.setdefault((row["op"], pool, tokens), {})[shape] = (entry[row["metric"]], row["label"])
    said = []
    for (op, pool, tokens), found in times_of.items():
        one = times_of.get((op, pool, 1), {})
        if pairs := [(time / one[shape][0], label) for shape, (time, label) in found.items() if tokens > 1 and shape in one]:
            worst, label = max(pairs)
            name = f"{op.replace('_', ' ')}, {pool} states"
            mean = times(geomean(ratio for ratio, _ in pairs))
            said.append(f"{name}: {tokens} tokens / 1 token {mean}, at worst {times(worst)} ({label})")
    return said


def problems(rows: Sequence[Row]) -> list[str]:
    """Every entry, ours or a peer's, that raised or was wrong: one sentence for each reason."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        for name, entry in row["entries"].items():
            if entry["status"] in ("failed", "wrong"):
                found.setdefault((name, entry["status"], row["suite"], entry.get("reason", "")), []).append(row["label"])
    return [f"{name} {status} on {suite} {'; '.join(labels)}: {why}" for (name, status, suite, why), labels in found.items()]
