# SPDX-License-Identifier: Apache-2.0
"""Pictures of result rows: time over the floor, speed-ups, scaling with T and with heads. Needs matplotlib; without it, none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cula.bench import summary

Row = summary.Row
FORMATS = ("png", "svg")
COLOURS = {
    "cula": "#1b6ca8",
    "fla": "#d1495b",
    "cudnn": "#edae49",
    "flashkda": "#66a182",
    "flashqla": "#8d6a9f",
    "flashinfer": "#3d405b",
}
OTHER = "#888888"


def draw(rows: Sequence[Row], folder: Path, name: str) -> dict[str, Path]:
    """The pictures these rows have the data for, by title; the speed-up first, for the README."""
    try:
        import matplotlib
    except ImportError:
        return {}
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "cula"  # the same rows give the same file
    pictures: dict[str, Path] = {}
    painters: tuple[tuple[str, str, Callable[[Any, Sequence[Row]], bool]], ...] = (
        ("speedup", "Best peer's time over cuLA's, by suite", _speedup),
        ("floor", "Time over the bandwidth floor, by shape", _over_floor),
        ("scaling-tokens", "KDA prefill over tokens", _over_tokens),
        ("scaling-heads", "KDA prefill over heads", _over_heads),
    )
    for key, title, paint in painters:
        figure, axes = plt.subplots(figsize=(10, 6))
        if paint(axes, rows):
            axes.set_title(f"{title} ({name})")
            figure.tight_layout()
            for kind in FORMATS:
                path = folder / f"{name}-{key}.{kind}"
                figure.savefig(path, dpi=130, metadata={"Date": None} if kind == "svg" else None)
                pictures[title if kind == "png" else f"{title} ({kind})"] = path
        plt.close(figure)
    return pictures


def _speedup(axes: Any, rows: Sequence[Row]) -> bool:
    groups = [g for g in summary.groups(rows) if g.against_best]
    if not groups:
        return False
    means = [summary.geomean(v for v, _ in g.against_best) or 0.0 for g in groups]
    places = list(range(len(groups)))
    axes.barh(places, means, color=[COLOURS["cula"] if m >= 1 else COLOURS["fla"] for m in means], height=0.6)
    for place, group, mean in zip(places, groups, means):
        values = [v for v, _ in group.against_best]
        axes.plot(values, [place] * len(values), "o", color="black", alpha=0.45, markersize=3)
        axes.text(max(mean, *values) * 1.03, place, summary.times(mean), va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(0, 1.12 * max(v for g in groups for v, _ in g.against_best))
    axes.set_yticks(places, [g.name for g in groups], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the best peer: bar, geomean; points, cases; left of 1 we are slower")
    return True


def _over_floor(axes: Any, rows: Sequence[Row]) -> bool:
    """Every case of the KDA prefill suite; of all suites where that one is absent."""
    shown = [r for r in rows if r["suite"] == "kda-prefill"] or list(rows)
    shown = [r for r in shown if "over_floor" in summary.ours(r)]
    if not shown:
        return False
    shown.sort(key=lambda r: (r["op"], r["case"]["gate"], r["floor"]["ms"]))
    names = list(dict.fromkeys(n for r in shown for n, e in r["entries"].items() if "over_floor" in e))
    for name in names:
        points = [
            (i, r["entries"][name]["over_floor"]) for i, r in enumerate(shown) if "over_floor" in r["entries"].get(name, {})
        ]
        axes.plot(*zip(*points), "o", label=name, color=COLOURS.get(name, OTHER), markersize=4)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    names_of = [_short(r) for r in shown]
    axes.set_xticks(range(len(shown)), names_of, rotation=90, fontsize=max(5, min(8, 360 // len(shown))))
    axes.set_ylabel("time / floor")
    axes.legend(fontsize=8)
    return True


def _short(row: Row) -> str:
    """A label that fits under an axis."""
    lens = row["case"]["lens"]
    packed = f"[{','.join(map(str, lens))}]"
    return row["label"].replace(packed, f"{len(lens)} packed, {sum(lens)}")


def _over_tokens(axes: Any, rows: Sequence[Row]) -> bool:
    return _scaling(axes, rows, along="T", fixed="H", label="tokens of one sequence")


def _over_heads(axes: Any, rows: Sequence[Row]) -> bool:
    return _scaling(axes, rows, along="H", fixed="T", label="heads")


def _scaling(axes: Any, rows: Sequence[Row], along: str, fixed: str, label: str) -> bool:
    """Time over one dimension, at the value of the other that has the most points; a line a library and gate."""
    lines: dict[int, dict[int, list[Row]]] = {}
    for row in rows:
        case = row["case"]
        if row["op"] == "kda_prefill" and len(case["lens"]) == 1 and case["H"] == case["HV"] and not case["mode"]:
            sizes = {"T": case["lens"][0], "H": case["H"]}
            lines.setdefault(sizes[fixed], {}).setdefault(sizes[along], []).append(row)
    if not lines:
        return False
    held = max(lines, key=lambda value: len(lines[value]))
    if len(lines[held]) < 2:
        return False
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for size, members in sorted(lines[held].items()):
        for gate, row in {r["case"]["gate"]: r for r in members}.items():
            curves.setdefault(("floor", ""), []).append((size, row["floor"]["ms"]))
            for name, entry in row["entries"].items():
                if entry["status"] == "ok" and entry.get("time_ms"):
                    curves.setdefault((name, gate), []).append((size, entry["time_ms"]))
    styles = {"fast": "-", "slow": "--", "init": ":", "": "-"}
    for (name, gate), points in curves.items():
        colour = "black" if name == "floor" else COLOURS.get(name, OTHER)
        axes.plot(*zip(*points), styles.get(gate, "-"), marker=".", label=f"{name} {gate}".strip(), color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(f"{label} ({fixed} = {held})")
    axes.set_ylabel("ms")
    axes.legend(fontsize=8)
    return True
