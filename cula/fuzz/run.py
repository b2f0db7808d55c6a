# SPDX-License-Identifier: Apache-2.0
"""`python -m cula.fuzz`: draw calls and hold them to float64 until the time is over; a line for each failure reproduces it."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cula.api import cula_decode, explain
from cula.core.dispatch import backend_names
from cula.core.family import FAMILIES
from cula.fuzz.bad_input import judge_bad_input
from cula.fuzz.decode import DecodeCall, draw_decode, judge_decode
from cula.fuzz.draw import Draw, keywords
from cula.fuzz.family import Shape, fuzz_of, with_fuzz
from cula.fuzz.judge import tolerance
from cula.fuzz.prefill import Prefill, draw_prefill, judge_prefill

# With the same dtypes, dims, heads and switches. On a GPU a kernel may cost seconds of compiling, and a call milliseconds: there
# the calls of a variant are of few kinds, which agree in the rest that a kernel is compiled for (`Draw.switch`).
CALLS_A_VARIANT = {"cuda": 960}
KINDS_A_VARIANT = {"cuda": 4}
PATIENCE = 60.0  # seconds behind the end, in which processes finish their last call, which may compile


@dataclass(frozen=True)
class Plan:
    """What a worker does."""

    seed: int
    seconds: float
    family: str | None
    backend: str
    device: str
    worker: int = 0
    workers: int = 1
    case: int | None = None  # this one alone
    max_calls: int | None = None

    @property
    def calls_a_variant(self) -> int:
        return CALLS_A_VARIANT.get(torch.device(self.device).type, 24)

    def kind(self, case: int) -> str:
        kinds = KINDS_A_VARIANT.get(torch.device(self.device).type)
        return f"{self.seed}/variant {case // self.calls_a_variant}/kind {case % kinds}" if kinds else f"{self.seed}/case {case}"

    def command(self, case: int) -> str:
        family = f" --family {self.family}" if self.family else ""
        return f"python -m cula.fuzz --seed {self.seed} --case {case} --backend {self.backend} --device {self.device}{family}"


@dataclass
class Outcome:
    """What came of one call."""

    kind: str  # "kda prefill", "kda decode", "kda gradient", "kda bad input"
    backend: str  # that served it; "declined" where the backend that was asked for does not take it
    wrong: str | None = None
    call: str = ""
    command: str = ""  # that makes it again


def draw_variant(plan: Plan, index: int) -> tuple[str, Shape, dict[str, Any], bool]:
    """(family, sizes, switches, whether it is about decode) of the calls numbered index * calls_a_variant and on."""
    draw = Draw(f"{plan.seed}/variant {index}", torch.device(plan.device))
    family = plan.family or draw.one_of(with_fuzz())
    on_gpu = draw.device.type != "cpu"
    H, group = draw.integer(1, 3), draw.one_of((1, 1, 2, 4))
    K = draw.one_of((128, 128, 128, 64, 96, 100, 33, 192) if on_gpu else (8, 16, 24, 32, 64))
    V = K if draw.chance(0.7) else draw.one_of((128, 64, 48, 60, 320) if on_gpu else (8, 16, 40))
    dtype = draw.one_of((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    shape = Shape(B=1, T=1, N=1, H=H, HV=H * group, K=K, V=V, dtype=dtype)
    return family, shape, fuzz_of(family).switches(draw), draw.chance(0.35) and FAMILIES[family].decode is not None


def make_call(plan: Plan, case: int) -> Outcome:
    """Draw call number `case`, make it, and judge it."""
    family, variant, switches, is_decode = draw_variant(plan, case // plan.calls_a_variant)
    draw = Draw(f"{plan.seed}/case {case}", torch.device(plan.device), plan.kind(case))
    kind = f"{family} {'decode' if is_decode else 'prefill'}"
    call: Prefill | DecodeCall
    if is_decode:
        call = draw_decode(draw, family, variant, switches)
        function, names = cula_decode, {}
    else:
        call = draw_prefill(draw, family, variant, switches, is_long=draw.chance(0.03))
        function, names = FAMILIES[family].load_entry(), dict(zip(("q", "k", "v"), fuzz_of(family).arguments))
        kind = f"{family} gradient" if call.wants_grad else kind
    shown = keywords(call.keywords)
    if draw.chance(0.1):
        mistake, wrong = judge_bad_input(draw, family, call.keywords, is_decode)
        return Outcome(f"{family} bad input", "none", wrong and f"{mistake}: {wrong}", shown)
    try:
        served = explain(function, **{names.get(n, n): x for n, x in call.keywords.items()}, backend=plan.backend).name
    except NotImplementedError:
        return Outcome(kind, "declined", None, shown)
    limit = tolerance(variant.dtype, served)
    try:
        wrong = (
            judge_decode(draw, call, plan.backend, limit)
            if isinstance(call, DecodeCall)
            else judge_prefill(draw, call, plan.backend, limit)
        )
        return Outcome(kind, served, wrong, shown)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(kind, served, f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})", shown)


def cases_of(plan: Plan) -> Iterator[int]:
    """The numbers of this worker's calls, variant by variant."""
    if plan.case is not None:
        yield plan.case
        return
    variant = plan.worker
    while True:
        yield from range(variant * plan.calls_a_variant, (variant + 1) * plan.calls_a_variant)
        variant += plan.workers


def outcomes(plan: Plan, begins: Callable[[int], object] = lambda case: None) -> Iterator[Outcome]:
    """What comes of calls until the time is over; each is named before it is made."""
    torch.set_num_threads(1)
    end = time.monotonic() + plan.seconds
    for made, case in enumerate(cases_of(plan)):
        if time.monotonic() > end or (plan.max_calls is not None and made >= plan.max_calls):
            return
        begins(case)
        yield dataclasses.replace(make_call(plan, case), command=plan.command(case))


def work(plan: Plan, to: multiprocessing.Queue) -> None:
    """The same in a process of its own, which says before each call which it is, and None when it is through."""
    for outcome in outcomes(plan, lambda case: to.put((plan.worker, plan.command(case)))):
        to.put((plan.worker, outcome if outcome.wrong else dataclasses.replace(outcome, call="")))
    to.put((plan.worker, None))


def together(plans: Sequence[Plan]) -> Iterator[Outcome]:
    """What comes of the calls of several processes; one that dies in a call, or does not come back from it, is wrong."""
    context = multiprocessing.get_context("spawn")
    made, doing = context.Queue(), {plan.worker: "" for plan in plans}
    workers = {plan.worker: context.Process(target=work, args=(plan, made), daemon=True) for plan in plans}
    for process in workers.values():
        process.start()
    end = time.monotonic() + plans[0].seconds + PATIENCE
    while doing and time.monotonic() < end:
        try:
            worker, said = made.get(timeout=1.0)
        except queue.Empty:
            dead = [worker for worker in doing if workers[worker].exitcode is not None]
            for worker in dead:
                what = f"its process ended with status {workers[worker].exitcode}"
                yield Outcome("a process", "none", what, command=doing.pop(worker))
            continue
        if said is None:
            del doing[worker]
        elif isinstance(said, str):
            doing[worker] = said
        else:
            yield said
    for process in workers.values():
        process.terminate()
    for worker, process in workers.items():
        process.join(PATIENCE)
        process.kill()
        if worker in doing:
            yield Outcome("a process", "none", f"not back {PATIENCE:.0f} s after the time was over", command=doing[worker])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cula.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to draw calls (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=with_fuzz(), help="one family instead of all")
    parser.add_argument(
        "--backend", default="auto", choices=["auto", *backend_names()], help="calls it declines are counted, not made"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--case", type=int, help="make this call alone, as a failure's line says")
    parser.add_argument("--calls", type=int, help="at most so many a process")
    args = parser.parse_args(arguments)
    try:
        kind = torch.device(args.device).type
    except RuntimeError:
        parser.error(f"--device {args.device}: torch knows no such device; use --device cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here; use --device cpu")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: expected 1 or more")
    plans = [
        Plan(args.seed, args.seconds, args.family, args.backend, args.device, j, args.jobs, args.case, args.calls)
        for j in range(1 if args.case is not None else args.jobs)
    ]
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    wrong = 0
    for outcome in outcomes(plans[0]) if len(plans) == 1 else together(plans):
        counts[outcome.kind, outcome.backend] += 1
        if outcome.wrong:
            wrong += 1
            print(f"{outcome.kind} on {outcome.backend}: {outcome.wrong}\n  {outcome.call}\n  {outcome.command}", flush=True)
    for (kind, backend), n in sorted(counts.items()):
        print(f"{kind:<22} {backend:<11} {n:7d}")
    made = sum(n for (_, backend), n in counts.items() if backend != "declined")
    print(f"{made} calls, {wrong} wrong (seed {args.seed}, backend {args.backend}, {args.device})")
    if not wrong and all(backend in ("declined", "none") for _, backend in counts):
        print(f"no call was made: {args.backend} serves none on {args.device}; `python -m cula` says why")
        return 2
    return 1 if wrong else 0
