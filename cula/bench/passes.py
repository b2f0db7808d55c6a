# SPDX-License-Identifier: Apache-2.0
"""The section of a report on the passes of one KDA call, from the file that `benchmarks/kda_passes.py` writes."""

from __future__ import annotations

import re

from cula.bench import summary
from cula.bench.results import Result

SCRIPT = "benchmarks/kda_passes.py"
FIELDS = {"machine", "torch", "shape", "backends", "forward_error", "gradient_errors", "passes"}
HEAD = ("pass", "ms", "kernels, us", "peak MiB")


def is_passes(result: Result) -> bool:
    return result.get("script") == SCRIPT and result.keys() >= FIELDS


def text(result: Result, source: str) -> str:
    """What was measured, and how exact it was, in sentences."""
    shape = ", ".join(f"{name}={value}" for name, value in result["shape"].items())
    backends = ", ".join(f"{op} {name}" for op, name in result["backends"].items())
    errors = {"o": result["forward_error"], **result["gradient_errors"]}
    return (
        f"`{source}`, by `{SCRIPT}`: {shape}; backends {backends}; torch {result['torch']}. Times are medians of CUDA graph "
        "replays, those of kernels the profiler's. Relative errors against float64: "
        f"{', '.join(f'{name} {summary.error(value)}' for name, value in errors.items())}."
    )


def line(result: Result) -> str:
    """For the screen, which has no room for kernels."""
    shape = result["shape"]
    times = ", ".join(f"{name} {summary.ms(entry['graph_ms'])} ms" for name, entry in result["passes"].items())
    return f"passes of a KDA call, H={shape['H']}, {shape['B']}x{shape['T']}, {shape['gate']}: {times}"


def cells(result: Result) -> list[list[str]]:
    """The lines of the table, under `HEAD`."""
    lines = []
    for name, entry in result["passes"].items():
        peak = entry.get("peak_bytes")
        lines.append([name, summary.ms(entry["graph_ms"]), _kernels(entry["kernels_us"]), f"{peak / 2**20:.0f}" if peak else ""])
    return lines


def _kernels(times: dict[str, float]) -> str:
    """Kernels by their bare names, the longest first; templates and arguments say nothing here."""
    by_name: dict[str, float] = {}
    for name, us in times.items():
        bare = re.split(r"[<(]", name.removeprefix("void "))[0]
        by_name[bare] = by_name.get(bare, 0.0) + us
    return ", ".join(f"`{name}` {us:.0f}" for name, us in sorted(by_name.items(), key=lambda item: -item[1]))
