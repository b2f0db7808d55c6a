# SPDX-License-Identifier: Apache-2.0
"""A run: every case through cuLA and each peer, checked and timed, one row after another until done or out of time."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cula.bench import check, distributed, floor, results, states, timing, warm
from cula.bench.cases import Case
from cula.bench.inputs import Inputs, make
from cula.bench.ours import Cula
from cula.bench.peers import PEERS, Peer
from cula.bench.progress import Progress

Entry = dict[str, Any]


@dataclass
class Settings:
    device: torch.device
    backend: str = "auto"
    peers: tuple[Peer, ...] = PEERS
    seed: int = 0
    budget: float | None = None  # seconds
    warm: int = 0  # processes that compile kernels before the first case
    tune_ms: tuple[int, int] | None = None  # for `timing.tune_for`
    options: dict[str, Any] = field(default_factory=dict)  # the command line, for the record

    def to_json(self) -> dict[str, Any]:
        return {
            "device": str(self.device),
            "backend": self.backend,
            "peers": [p.name for p in self.peers],
            "seed": self.seed,
            "budget": self.budget,
            "warm": self.warm,
            "tune_ms": self.tune_ms,
        } | self.options


def run(
    cases: Sequence[Case], settings: Settings, path: Path, *, resume: bool = False, revision: str | None = None
) -> results.Result:
    """Measure the cases into `path`; with `resume`, those it lacks, wholly or a peer of, or where a peer failed. Returns what the
    file holds."""
    began = time.perf_counter()
    result = results.new(settings.device, settings.to_json(), revision)
    if resume and path.exists():
        result = results.resume(path, result)
    elif path.exists():
        raise FileExistsError(f"{path} exists; --resume adds to it, another --out keeps it")
    result["peers"] |= {p.name: _presence(p) for p in settings.peers}
    result["bandwidth"] = floor.copy_bandwidth(settings.device)
    seconds_before = result["seconds"]
    contenders = [Cula(settings.backend), *(p for p in settings.peers if p.missing() is None)]
    names = {c.name for c in contenders}
    done = {
        row["id"]
        for row in result["rows"]
        if row["suite"] == "dist" or names <= measured(row) or Case.from_json(row["case"]).is_ours_alone
    }
    todo = [c for c in cases if c.id not in done]
    if settings.tune_ms is not None and settings.device.type == "cuda":
        timing.tune_for(*settings.tune_ms)
    with Progress(len(todo)) as progress:
        if settings.warm and todo:
            kernels = warm.units(todo, [c.name for c in contenders[1:]], settings.backend, str(settings.device))
            share = warm.SECONDS if settings.budget is None else settings.budget / 2
            visited = warm.warm(kernels, settings.warm, share)
            progress.say(f"compiled for {visited} of {len(kernels)} calls in {time.perf_counter() - began:.0f} s")
        for i, case in enumerate(todo):
            elapsed = time.perf_counter() - began
            if settings.budget is not None and elapsed >= settings.budget:
                result["left_out"] = [c.id for c in todo[i:]]
                progress.say(f"budget of {settings.budget:.0f} s used: {len(todo) - i} cases left out (--resume runs them)")
                break
            progress.start(f"{case.suite}: {case.label}")
            row = measure(case, settings, contenders, result["bandwidth"])
            result["rows"] = [r for r in result["rows"] if r["id"] != row["id"]] + [row]
            result["seconds"] = seconds_before + time.perf_counter() - began
            results.save(path, result)
            progress.finish(row)
    result["seconds"] = seconds_before + time.perf_counter() - began
    results.save(path, result)
    return result


def measured(row: results.Row) -> set[str]:
    """The contenders that a row need not ask again."""
    return {name for name, entry in row["entries"].items() if name == "cula" or entry["status"] != "failed"}


def _presence(peer: Peer) -> dict[str, str]:
    missing = peer.missing()
    if missing is not None:
        return {"title": peer.title, "status": "absent", "reason": missing}
    return {"title": peer.title, "status": "found", "version": peer.version()}


def measure(case: Case, settings: Settings, contenders: Sequence[Peer], bandwidth: float) -> results.Row:
    """One row: every contender on the same inputs."""
    began = time.perf_counter()
    device = settings.device
    x = make(case, device, settings.seed)
    part = check.choose_slice(case, device)
    want = check.expected(x, part)
    nbytes = floor.floor_bytes(case)
    row: results.Row = {
        "id": case.id,
        "suite": case.suite,
        "op": case.op,
        "label": case.label,
        "case": case.to_json(),
        "metric": "host_ms" if case.is_host else "time_ms",
        "floor": {"bytes": nbytes, "ms": nbytes / bandwidth * 1e3, "bandwidth": bandwidth},
        "checked": part.describe(case),
        "forced": None if settings.backend == "auto" else settings.backend,
    }
    entries: dict[str, Entry] = {}
    if case.suite == "dist":
        entries = _dist_entries(x, settings, want, part)
    else:
        for contender in contenders[:1] if case.is_ours_alone else contenders:
            entries[contender.name] = _entry(contender, x, want, part)
            _free(device)
    ours = contenders[0]
    if isinstance(ours, Cula):
        row |= _choice(ours, x)
    for entry in entries.values():
        if "time_ms" in entry and row["metric"] == "time_ms":
            entry["over_floor"] = entry["time_ms"] / row["floor"]["ms"]
    if case.is_decode and not case.is_host and x.h0 is not None and x.state_indices is not None:
        row |= states.measure(x.h0, x.state_indices)
    row["entries"] = entries
    row["ratios"] = _ratios(entries, row["metric"])
    row["seconds"] = time.perf_counter() - began
    return row


def _entry(contender: Peer, x: Inputs, want: check.Outputs, part: check.Slice) -> Entry:
    """What one library does with a case. Whatever it raises is the row's to show, not the run's to die of."""
    reason = contender.why_not(x.case)
    if reason is not None:
        return {"status": "declined", "reason": reason}
    try:
        with torch.set_grad_enabled(x.case.is_train):
            call = contender.prepare(x)
            found = check.errors(call.read(call.run()), want, x.case, part)
            entry = _judge(found, x.case) | timing.measure(call.run, x.device).to_json()
            if call.note:
                entry["note"] = call.note
            if not x.case.is_host:
                entry["peak_bytes"] = timing.peak_bytes(call.run, x.device)
            if x.case.is_host:
                entry["host_loop_ms"] = timing.measure_loop(call.run, x.device)
                if isinstance(contender, Cula):
                    entry["dispatch_ms"] = timing.measure_host(contender.dispatch_only(x))
                    one = torch.zeros(1, device=x.device)
                    entry["add_loop_ms"] = timing.measure_loop(lambda: one.add_(1), x.device)  # torch's own: how fast the host is
            return entry
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {timing.first_line(error)}"}


def _judge(found: dict[str, float], case: Case) -> Entry:
    wrong = check.is_wrong(found, case)
    return {"status": "ok" if wrong is None else "wrong", "error": found} | ({} if wrong is None else {"reason": wrong})


def _dist_entries(x: Inputs, settings: Settings, want: check.Outputs, part: check.Slice) -> dict[str, Entry]:
    """`cula.dist`, and as its peer cuLA on one device."""
    reason = distributed.why_not(x.case)
    if reason is not None:
        return {"cula": {"status": "declined", "reason": reason}}
    entries: dict[str, Entry] = {}
    try:
        measured, got, note = distributed.measure(x.case, settings.device, settings.backend, settings.seed)
        entries["cula"] = _judge(check.errors(got, want, x.case, part), x.case) | measured.to_json() | {"note": note}
        call = Cula(settings.backend).prepare(x)
        with torch.no_grad():
            found = check.errors(call.read(call.run()), want, x.case, part)
            entries["one-device"] = _judge(found, x.case) | timing.wall(call.run, settings.device).to_json()
    except Exception as error:
        entries.setdefault("cula", {"status": "failed", "reason": f"{type(error).__name__}: {timing.first_line(error)}"})
    return entries


def _choice(ours: Cula, x: Inputs) -> dict[str, Any]:
    try:
        choice = ours.explain(x)
        backward = None if choice.backward is None else choice.backward.name
    except Exception as error:  # the entry has the same exception as its failure
        return {"backend": None, "backend_bwd": None, "passed_over": [["", timing.first_line(error)]]}
    return {"backend": choice.name, "backend_bwd": backward, "passed_over": [list(pair) for pair in choice.passed_over]}


def _ratios(entries: dict[str, Entry], metric: str) -> dict[str, float]:
    """Each right peer's time over ours: above 1, we are faster."""
    ours = entries.get("cula", {})
    if ours.get("status") != "ok" or not ours.get(metric):
        return {}
    return {
        name: entry[metric] / ours[metric]
        for name, entry in entries.items()
        if name != "cula" and entry["status"] == "ok" and entry.get(metric)
    }


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
