# SPDX-License-Identifier: Apache-2.0
"""Pictures of result rows, each readable by itself. Needs matplotlib; without it, none.

| picture | what it shows |
|---|---|
| `speedup` | the best peer's time over ours, by suite, on a log axis: GPU times and host times apart |
| `kda-prefill`, `kda-train`, `gdn`, `gdn-train`, `lightning`, `decode` | one a family: the floor, peers and us, case by case |
| `scaling` | KDA prefill over the length, and over heads |
| `error` | the error against float64 beside the time |

A painter gets a figure and the rows, and returns whether they had what it shows. Results that were not right are in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cula.bench import summary

Row = summary.Row
COLOURS = {
    "cula": "#1b6ca8",
    "fla": "#d1495b",
    "cudnn": "#d98e04",
    "flashkda": "#4f8a5b",
    "flashqla": "#8d6a9f",
    "flashinfer": "#3d405b",
}
OTHER = "#888888"
MARKERS = {"cula": "o", "fla": "s", "cudnn": "^", "flashkda": "D", "flashqla": "v", "flashinfer": "P"}
TITLES = {
    "cula": "cuLA",
    "fla": "FLA",
    "cudnn": "cuDNN frontend",
    "flashkda": "FlashKDA",
    "flashqla": "FlashQLA",
    "flashinfer": "FlashInfer",
}
WORDS = {"kda": "KDA", "gdn": "GDN", "lightning": "Lightning", "train": "training"}
WIDTH, ROW_HEIGHT = 9.0, 0.25  # inches: text stays readable where a page shows a picture 800 pixels wide
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
}
GRID = {"color": "#dddddd", "linewidth": 0.7}
Painter = Callable[[Any, Sequence[Row]], bool]


def draw(rows: Sequence[Row], folder: Path, name: str) -> dict[str, Path]:
    """The pictures these rows have the data for, by title; the speed-up first, for the README."""
    try:
        import matplotlib
    except ImportError:
        return {}
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    pictures: dict[str, Path] = {}
    with plt.rc_context(STYLE):
        for key, title, _, paint in PICTURES:
            figure = plt.figure(figsize=(WIDTH, 4), layout="constrained")
            if paint(figure, rows):
                figure.suptitle(f"{title} ({name})", x=0.01, ha="left", fontsize=11, fontweight="bold")
                pictures[title] = folder / f"{name}-{key}.png"
                figure.savefig(pictures[title], dpi=150, metadata={"Software": None})
            plt.close(figure)
    return pictures


def title_of(library: str) -> str:
    return TITLES.get(library, library)


# Speed-up by suite


def _speedup(figure: Any, rows: Sequence[Row]) -> bool:
    groups = [g for g in summary.groups(rows) if g.against_best and g.suite != "dist"]
    parts = {
        "GPU time of a call": [g for g in groups if g.rows[0]["metric"] != "host_ms"],
        "Host time of a small call": [g for g in groups if g.rows[0]["metric"] == "host_ms"],
    }
    parts = {title: members for title, members in parts.items() if members}
    if not parts:
        return False
    figure.set_size_inches(WIDTH, 1.6 + ROW_HEIGHT * len(groups) + 0.5 * len(parts))
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=[len(members) + 1 for members in parts.values()])
    seen: dict[str, None] = {}
    for axes, (title, members) in zip(panels[:, 0], parts.items()):
        seen |= _ratios(axes, title, members)
    panels[-1, 0].set_xlabel("the best peer's time / cuLA's time: bars are geomeans, marks are cases; left of 1 cuLA is slower")
    _legend(figure, [name for name in COLOURS if name in seen] + [name for name in seen if name not in COLOURS], "beside ")
    return True


def _ratios(axes: Any, title: str, groups: Sequence[summary.Group]) -> dict[str, None]:
    """A bar a group; returns the peers that were the best of a case."""
    seen: dict[str, None] = {}
    for place, group in enumerate(groups):
        best = [found for found in map(summary.best_peer, group.ranked) if found is not None]
        mean = summary.geomean(ratio for _, ratio in best) or 1.0
        axes.barh(place, mean - 1, left=1, height=0.62, color=COLOURS["cula" if mean >= 1 else "fla"], alpha=0.25)
        for name, ratio in best:
            _mark(axes, name, ratio, place, size=4)
            seen[name] = None
        axes.text(1.01, place, summary.times(mean), va="center", transform=axes.get_yaxis_transform(), fontweight="bold")
    _log_axis(axes, (r for g in groups for r, _ in g.against_best))
    axes.axvline(1, color="black", linewidth=1)
    _cases(axes, [g.name for g in groups])
    axes.set_title(title)
    return seen


# One picture a family


def _family(suites: Sequence[str], ops: Sequence[str]) -> Painter:
    """A painter of the cases of some suites and operations: a panel for each operation and gate, a line for each shape."""

    def paint(figure: Any, rows: Sequence[Row]) -> bool:
        panels: dict[str, dict[str, Row]] = {}
        for row in rows:
            if row["suite"] in suites and row["op"] in ops and "over_floor" in summary.ours(row):
                panels.setdefault(_panel(row), {})[_shape(row)] = row
        if not panels:
            return False
        shapes = _by_floor(panels.values())
        figure.set_size_inches(WIDTH, 1.7 + ROW_HEIGHT * len(shapes))
        found = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        seen: dict[str, None] = {}
        for axes, (title, members) in zip(found, panels.items()):
            seen |= _over_floor(axes, title, members, shapes)
        figure.supxlabel("time / bandwidth floor; beside each line: cuLA's time", fontsize=9)
        _legend(figure, list(seen))
        return True

    return paint


def _panel(row: Row) -> str:
    return f"{_operation(row)}, {row['case']['gate']} gates" if row["op"].startswith(("kda", "gdn")) else _operation(row)


def _operation(row: Row) -> str:
    return " ".join(WORDS.get(word, word) for word in row["op"].split("_"))


def _shape(row: Row) -> str:
    """A label without the gate, that fits beside an axis."""
    lens = row["case"]["lens"]
    packed = f"[{','.join(map(str, lens))}]"
    label: str = row["label"].replace(packed, f"{len(lens)} packed, {sum(lens)}")
    return label.replace(f", {row['case']['gate']}", "").replace("bfloat16 states", "bf16 states")


def _by_floor(panels: Iterable[dict[str, Row]]) -> list[str]:
    floors = {shape: row["floor"]["ms"] for panel in panels for shape, row in panel.items()}
    return sorted(floors, key=lambda shape: floors[shape])


def _over_floor(axes: Any, title: str, rows: dict[str, Row], shapes: Sequence[str]) -> dict[str, None]:
    seen: dict[str, None] = {}
    values: list[float] = [1.0]
    for place, shape in enumerate(shapes):
        if shape not in rows:
            continue
        right = {n: e["over_floor"] for n, e in rows[shape]["entries"].items() if e["status"] == "ok" and "over_floor" in e}
        if not right:
            continue
        axes.plot([min(right.values()), max(right.values())], [place, place], color="#cccccc", linewidth=1.2, zorder=1)
        for name, value in right.items():
            _mark(axes, name, value, place)
            seen[name] = None
        values += right.values()
        time = summary.ms(summary.ours(rows[shape]).get("time_ms"))
        axes.text(1.01, place, f"{time} ms", va="center", fontsize=8, color="#555555", transform=axes.get_yaxis_transform())
    _log_axis(axes, values, one="floor")
    axes.axvline(1, color="black", linewidth=1)
    _cases(axes, shapes)
    axes.set_title(title)
    return seen


# Scaling


SCALING = ("kda-prefill", "segments")  # suites whose calls differ in sizes and gates alone


def _scaling(figure: Any, rows: Sequence[Row]) -> bool:
    """Time of KDA prefill over one dimension, at each value of the other that has points enough for a line."""
    plain = [row for row in rows if _is_plain(row)]
    panels = [
        (along, held, lines)
        for along, fixed in (("T", "H"), ("H", "T"))
        for held, lines in sorted(_lines(plain, along, fixed).items())
        if len(lines) >= 4
    ][:3]
    if not panels:
        return False
    figure.set_size_inches(WIDTH, 4.6)
    found = figure.subplots(1, len(panels), squeeze=False)[0]
    seen: dict[str, None] = {}
    for axes, (along, held, lines) in zip(found, panels):
        seen |= _curves(axes, lines)
        axes.set_title(f"{held} heads" if along == "T" else f"{held} tokens")
        axes.set_xlabel("tokens of one sequence" if along == "T" else "heads")
    found[0].set_ylabel("ms; solid: fast gates, dashed: slow gates")
    _legend(figure, list(seen), floor=True)
    return True


def _is_plain(row: Row) -> bool:
    case = row["case"]
    is_one = row["suite"] in SCALING and row["op"] == "kda_prefill" and len(case["lens"]) == 1 and case["H"] == case["HV"]
    return is_one and case["gate"] in ("fast", "slow")


def _lines(rows: Sequence[Row], along: str, fixed: str) -> dict[int, dict[int, dict[str, Row]]]:
    """Rows by the value of the fixed dimension, then by the size along the other one, then by gate."""
    lines: dict[int, dict[int, dict[str, Row]]] = {}
    for row in rows:
        sizes = {"T": row["case"]["lens"][0], "H": row["case"]["H"]}
        lines.setdefault(sizes[fixed], {}).setdefault(sizes[along], {})[row["case"]["gate"]] = row
    return lines


def _curves(axes: Any, lines: dict[int, dict[str, Row]]) -> dict[str, None]:
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for size, by_gate in sorted(lines.items()):
        curves.setdefault(("floor", ""), []).append((size, next(iter(by_gate.values()))["floor"]["ms"]))
        for gate, row in by_gate.items():
            for name, entry in row["entries"].items():
                if entry["status"] == "ok" and entry.get("time_ms"):
                    curves.setdefault((name, gate), []).append((size, entry["time_ms"]))
    for (name, gate), points in curves.items():
        colour = "black" if name == "floor" else COLOURS.get(name, OTHER)
        style = "--" if gate == "slow" else ":" if name == "floor" else "-"
        axes.plot(*zip(*points), style, color=colour, marker=MARKERS.get(name), markersize=4, linewidth=1.4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lines), [f"{n // 1024}k" if n >= 1024 else str(n) for n in sorted(lines)])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(**GRID)
    return {name: None for name, _ in curves if name != "floor"}


# Error beside speed


def _error(figure: Any, rows: Sequence[Row]) -> bool:
    """A mark a case and library; a panel an operation."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row["metric"] == "time_ms" and row["suite"] != "dist" and "over_floor" in summary.ours(row):
            panels.setdefault(_operation(row), []).append(row)
    if not panels:
        return False
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure.set_size_inches(WIDTH, 0.9 + 2.5 * down)
    found = figure.subplots(down, across, squeeze=False, sharey=True).flatten()
    seen: dict[str, None] = {}
    for axes, (title, members) in zip(found, panels.items()):
        values = [1.0]
        for row in members:
            for name, entry in row["entries"].items():
                error = summary.largest_error(entry)
                if entry["status"] == "ok" and error and "over_floor" in entry:
                    _mark(axes, name, entry["over_floor"], error, size=3.7)
                    seen[name] = None
                    values.append(entry["over_floor"])
        _log_axis(axes, values, one="floor", steps=(1, 4))
        axes.set_yscale("log")
        axes.grid(axis="y", **GRID)
        axes.set_title(title)
    ticks = [m * 10.0**e for e in range(-7, 0) for m in (1, 2, 5)]
    low, high = found[0].get_ylim()
    found[0].set_yticks([t for t in ticks if low <= t <= high], [f"{t:g}" for t in ticks if low <= t <= high])
    found[0].minorticks_off()
    for axes in found[len(panels) :]:
        axes.axis("off")
    figure.supxlabel("time / bandwidth floor; left is faster", fontsize=9)
    figure.supylabel("largest relative error against float64; down is better", fontsize=9)
    _legend(figure, list(seen))
    return True


# What they share


def _mark(axes: Any, library: str, x: float, y: float, size: float = 4.7) -> None:
    is_ours = library == "cula"
    axes.plot(
        x, y, MARKERS.get(library, "x"), color=COLOURS.get(library, OTHER), markersize=size, markeredgewidth=0,
        alpha=1.0 if is_ours else 0.75, zorder=3 if is_ours else 2,
    )  # fmt: skip


def _log_axis(axes: Any, values: Iterable[float], one: str = "1x", steps: Sequence[float] = (1, 2, 5)) -> None:
    """A log axis of x with ticks that are read as they stand: 1x, 2x, 5x, 10x, ...; `one` is what stands at 1."""
    found = list(values)
    low, high = min([*found, 1.0]) / 1.12, max([*found, 1.0]) * 1.12
    if high / low < 12:
        steps = (1, 1.5, 2, 3, 5, 7)
    ticks = [m * 10.0**e for e in range(-3, 4) for m in steps if low <= m * 10.0**e <= high]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [one if t == 1 else f"{t:g}x" for t in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", **GRID)


def _cases(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _legend(figure: Any, libraries: Sequence[str], before: str = "", floor: bool = False) -> None:
    from matplotlib.lines import Line2D

    ordered = [name for name in COLOURS if name in libraries] + [name for name in libraries if name not in COLOURS]
    handles = [
        Line2D([], [], linestyle="", marker=MARKERS.get(n, "x"), color=COLOURS.get(n, OTHER), label=before + title_of(n))
        for n in ordered
    ]
    if floor:
        handles.append(Line2D([], [], linestyle=":", color="black", label="bandwidth floor"))
    columns = len(handles) if len(handles) <= 3 else -(-len(handles) // 2)  # beside the title
    figure.legend(handles=handles, loc="outside upper right", ncols=columns, fontsize=9)


class Picture(NamedTuple):
    key: str  # of its file
    title: str
    caption: str  # how to read it
    paint: Painter


OF_FAMILY = (
    "Each mark is a call's time over the bandwidth floor: further left is faster, and a grey line joins the libraries that ran "
    "the same case. cuLA's time in ms stands at the right."
)
PICTURES = (
    Picture(
        "speedup",
        "How many times as fast as the best peer",
        "A bar is the geomean of a suite's cases, a mark is a case and says which peer was the fastest right one. Times on the "
        "GPU and times of the host are apart, each on a log axis of its own.",
        _speedup,
    ),
    Picture("kda-prefill", "KDA prefill", OF_FAMILY, _family(("kda-prefill",), ("kda_prefill",))),
    Picture("kda-train", "KDA training", OF_FAMILY, _family(("kda-train", "gva"), ("kda_train",))),
    Picture("gdn", "Gated DeltaNet prefill", OF_FAMILY, _family(("gdn-prefill",), ("gdn_prefill",))),
    Picture("gdn-train", "Gated DeltaNet training", OF_FAMILY, _family(("gdn-train",), ("gdn_train",))),
    Picture("lightning", "Lightning Attention", OF_FAMILY, _family(("lightning",), ("lightning_prefill", "lightning_train"))),
    Picture(
        "decode",
        "Decode",
        f"{OF_FAMILY} Calls are repeated on the same states, and those that fit the L2 may be faster than the memory's floor.",
        _family(("decode",), ("kda_decode", "gdn_decode", "lightning_decode")),
    ),
    Picture("scaling", "KDA prefill, scaling", "Time of one sequence over its length, and over heads.", _scaling),
    Picture(
        "error",
        "Error beside speed",
        "A mark is a case: its time over the floor, and the largest relative error of any of its outputs (for training, of any "
        "gradient) against float64.",
        _error,
    ),
)
CAPTIONS = {picture.title: picture.caption for picture in PICTURES}
