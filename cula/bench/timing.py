# SPDX-License-Identifier: Apache-2.0
"""How long a call takes: on the GPU by graph replay and with a cold L2, on the host by the clock. Medians throughout."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

WARM_UP = 3
SECONDS_A_MEASURE = 0.2
MIN_REPEATS, MAX_REPEATS = 5, 60
SHORT_MS = 0.5  # calls shorter than this are captured several times in one graph, whose own beginning and end take microseconds
MAX_COPIES = 100
HOST_REPEATS = 25
LOOP_CALLS, LOOP_SECONDS = 100, 0.01  # calls a batch: this many, or what fits in the time
LOOP_SPAN = 1.0  # seconds of batches: a host's clock takes some tenths of one to rise


@dataclass
class Timing:
    """Milliseconds. `time_ms` is what ratios use: graph replay where it works, else events; on a CPU the clock."""

    time_ms: float
    method: str  # "graph", "cold events", "clock"
    graph_ms: float | None = None
    cold_ms: float | None = None
    host_ms: float | None = None  # until the call returns, the device idle before it
    graph_host_ms: float | None = None  # until the replay of a captured graph returns
    graph_note: str | None = None  # why it could not be captured
    spread: float | None = None  # of `time_ms` between its repeats: the middle half of them, as a part of the median
    host_spread: float | None = None  # of `host_ms`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Median(NamedTuple):
    ms: float
    spread: float

    @classmethod
    def of(cls, times_ms: list[float]) -> Median:
        lower, middle, upper = statistics.quantiles(times_ms, n=4)
        return cls(middle, (upper - lower) / middle if middle else 0.0)


def measure(run: Callable[[], Any], device: torch.device) -> Timing:
    return _on_gpu(run, device) if device.type == "cuda" else _on_cpu(run)


def _on_cpu(run: Callable[[], Any]) -> Timing:
    run()
    found = _clock(run, lambda: None)
    return Timing(found.ms, "clock", host_ms=found.ms, spread=found.spread, host_spread=found.spread)


def _on_gpu(run: Callable[[], Any], device: torch.device) -> Timing:
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize(device)
    host = _clock(run, lambda: torch.cuda.synchronize(device), HOST_REPEATS)
    graph, note = _capture(run, 1)
    launch = run if graph is None else graph.replay
    cold = _cold(launch, device)
    if graph is None:
        return Timing(
            cold.ms,
            "cold events",
            cold_ms=cold.ms,
            host_ms=host.ms,
            graph_note=note,
            spread=cold.spread,
            host_spread=host.spread,
        )
    graph_host_ms = _clock(graph.replay, lambda: torch.cuda.synchronize(device), HOST_REPEATS).ms
    replayed = _replay(graph, device)
    copies = min(MAX_COPIES, math.ceil(SHORT_MS / replayed.ms))
    if copies > 1:
        several, _ = _capture(run, copies)
        if several is not None:
            ms, spread = _replay(several, device)
            replayed = Median(ms / copies, spread)
    ms = replayed.ms
    return Timing(ms, "graph", ms, cold.ms, host.ms, graph_host_ms, spread=replayed.spread, host_spread=host.spread)


def _capture(run: Callable[[], Any], copies: int) -> tuple[torch.cuda.CUDAGraph | None, str | None]:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(copies):
                run()
    except Exception as error:  # whatever a library does under capture is a fact about it, recorded in the row
        torch.cuda.synchronize()
        return None, f"{type(error).__name__}: {first_line(error)}"
    return graph, None


def _replay(graph: torch.cuda.CUDAGraph, device: torch.device) -> Median:
    for _ in range(WARM_UP):
        graph.replay()
    return _events(graph.replay, lambda: None, device)


def _cold(launch: Callable[[], Any], device: torch.device) -> Median:
    """With a write of twice the L2 before each launch; it also hides the host's part of the launch."""
    flush = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    return _events(launch, flush.zero_, device)


def _events(launch: Callable[[], Any], before: Callable[[], Any], device: torch.device) -> Median:
    def once() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        launch()
        end.record()
        return start, end

    start, end = once()
    torch.cuda.synchronize(device)
    repeats = _repeats(start.elapsed_time(end) / 1e3)
    pairs = [once() for _ in range(repeats)]
    torch.cuda.synchronize(device)
    return Median.of([start.elapsed_time(end) for start, end in pairs])


def _clock(run: Callable[[], Any], settle: Callable[[], None], repeats: int | None = None) -> Median:
    def once() -> float:
        settle()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    first = once()
    times = [once() for _ in range(repeats or _repeats(first))]
    settle()
    return Median.of([1e3 * seconds for seconds in times])


def _repeats(seconds: float) -> int:
    return max(MIN_REPEATS, min(MAX_REPEATS, int(SECONDS_A_MEASURE / max(seconds, 1e-6))))


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Memory a call takes at its highest, above what was there before (its inputs); None where torch does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kept
    return peak


def tune_for(warm_up_ms: int, repeat_ms: int) -> None:
    """How long Triton's tuners, a peer's mostly, time each variant from now on; left alone they take 25 and 100 ms.

    The verdict is still a median of cold-L2 events on an idle device, of a dozen samples even for a call of 2 ms.
    """
    from triton.runtime import driver
    from triton.testing import do_bench

    bench = functools.partial(do_bench, warmup=warm_up_ms, rep=repeat_ms)
    driver.active.get_benchmarker = lambda: bench


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["(no message)"])[0][:300]


def wall(run: Callable[[], Any], device: torch.device) -> Timing:
    """From the call until the device is idle again: for work that no single graph or event pair spans."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def whole() -> None:
        run()
        settle()

    whole()
    found = _clock(whole, settle)
    return Timing(found.ms, "clock", spread=found.spread)


def measure_loop(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds until a call returns that follows others like it: the median of a second of batches, each on an idle device.

    What a model pays for one of many calls; a call on its own (`host_ms`) finds the host's caches cold after a wait.
    """

    def batch(calls: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - began) / calls

    calls = max(1, min(LOOP_CALLS, int(LOOP_SECONDS / max(batch(1), 1e-6))))
    began, batches = time.perf_counter(), []
    while time.perf_counter() - began < LOOP_SPAN:
        batches.append(batch(calls))
    found = statistics.median(batches)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found * 1e3


def measure_host(run: Callable[[], Any]) -> float:
    """Milliseconds of host work alone."""
    run()
    return _clock(run, lambda: None, 200).ms
