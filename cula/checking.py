# SPDX-License-Identifier: Apache-2.0
"""`python -m cula check`: does it work here? Every family's prefill, decode and gradient, by whatever backend takes the call,
against float64, with the time it took.

The calls are the first of each kind among the benchmarks' cases, small ones on a CPU. On a GPU whose result files are at hand, as
in a clone, the time is shown beside theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cula
from cula.bench import check, results, suites, summary, timing
from cula.bench.cases import Case
from cula.bench.family import with_benches
from cula.bench.inputs import make
from cula.bench.ours import Cula
from cula.bench.progress import table

RESULTS = Path(cula.__file__).parent.parent / "benchmarks" / "results"
CPU_TOKENS = 160  # two chunks and a half
KINDS = ("prefill", "train", "decode")
NOT_HERE = ("api", "dist", "models")  # suites that measure something else


class Checked(NamedTuple):
    """What came of one call."""

    case: Case
    backend: str
    error: float | None  # the largest of its outputs'
    tolerance: float
    problem: str | None  # why it is wrong, or what it raised
    ms: float | None
    ms_before: float | None  # of a result file of the same GPU

    @property
    def cells(self) -> tuple[str, ...]:
        verdict = "ok" if self.problem is None else f"WRONG: {self.problem}"
        times = (summary.ms(self.ms), summary.ms(self.ms_before))
        return (self.case.op, self.case.label, self.backend, summary.error(self.error), f"{self.tolerance:.0e}", *times, verdict)


def cases(device: torch.device) -> list[Case]:
    """The first case of each kind, of every family."""
    names = [name for name in suites.known() if name not in NOT_HERE]
    first: dict[str, Case] = {}
    for case in suites.build(names, device.type):
        first.setdefault(case.op, case)
    found = [first[op] for family in with_benches() for kind in KINDS if (op := f"{family}_{kind}") in first]
    return found if device.type == "cuda" else [replace(c, lens=tuple(min(n, CPU_TOKENS) for n in c.lens)) for c in found]


def run(device: torch.device, backend: str = "auto") -> Iterator[Checked]:
    known = recorded(device)
    for case in cases(device):
        x, part, ours = make(case, device), check.choose_slice(case, device), Cula(backend)
        want = check.expected(x, part)
        limit = max(check.tolerance(case, name) for name in want)
        try:
            choice = ours.explain(x)
            with torch.set_grad_enabled(case.is_train):
                call = ours.prepare(x)
                found = check.errors(call.read(call.run()), want, case, part)
                ms = timing.measure(call.run, device).time_ms if device.type == "cuda" else best_of_three(call.run)
        except Exception as error:  # what is wrong with a call is the row's to show
            yield Checked(case, "-", None, limit, f"{type(error).__name__}: {timing.first_line(error)}", None, known.get(case.id))
            continue
        named = choice.name if choice.backward is None else f"{choice.name}, gradient {choice.backward.name}"
        yield Checked(case, named, max(found.values()), limit, check.is_wrong(found, case), ms, known.get(case.id))


def best_of_three(call: Callable[[], Any]) -> float:
    """Milliseconds, on a CPU: nothing to compare, and not worth more time."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def recorded(device: torch.device) -> dict[str, float]:
    """Milliseconds by case, of result files of this GPU, where they are at hand."""
    if device.type != "cuda" or not RESULTS.is_dir():
        return {}
    gpu = torch.cuda.get_device_name(device)
    found: dict[str, float] = {}
    for path in sorted(RESULTS.glob("*.json")):
        result = results.read(path)
        if not results.is_of_script(result) and result["machine"].get("gpu") == gpu:
            times = {row["id"]: summary.ours(row).get("time_ms") for row in result["rows"] if row.get("forced") is None}
            found |= {name: ms for name, ms in times.items() if ms is not None}
    return found


def main(device: str | None, backend: str) -> int:
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no GPU here; use --device cpu")
    print(f"cuLA {cula.__version__} on {results.machine(where)['device']}: every family against float64", flush=True)
    found = list(run(where, backend))
    head = ["call", "shape", "backend", "error", "tolerance", "ms", "result file's ms", ""]
    print(table(head, [f.cells for f in found]))
    wrong = [f for f in found if f.problem is not None]
    print(f"{len(found) - len(wrong)} of {len(found)} calls are right" + ("" if wrong else ": cuLA works here"))
    return 1 if wrong else 0
