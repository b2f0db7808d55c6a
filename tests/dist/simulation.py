# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulation of ranks that compute and exchange messages, to check the formulas of `cula.dist.cost`.

A rank is a generator that yields steps, each taken when the one before is over:

    Step(seconds, sends, receives)   compute for so long and exchange messages at the same time

A message starts when both ends have reached it, needs `latency`, then occupies the sender's outgoing and the receiver's
incoming port while its bytes pass. Nothing else is assumed: no formula of the model is used.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from cula.dist.cost import Load, Machine, Schedule, passes


@dataclass(frozen=True)
class Step:
    seconds: float = 0.0
    sends: tuple[tuple[int, float], ...] = ()  # (rank, bytes)
    receives: tuple[int, ...] = ()


Program = Generator[Step, None, None]


@dataclass
class Outcome:
    seconds: float  # when the last rank was done
    sent: list[float]  # bytes, of each rank


def simulate(programs: Iterable[Program], machine: Machine) -> Outcome:
    ranks = list(programs)
    sent = [0.0] * len(ranks)
    outgoing, incoming = [0.0] * len(ranks), [0.0] * len(ranks)  # when a port is free again
    waiting: list[int] = [0] * len(ranks)  # parts of the current step still open
    posted: dict[tuple[int, int, str], list[float]] = {}  # messages one end of which is there
    clock, order = 0.0, itertools.count()
    events: list[tuple[float, int, str, tuple[int, ...], float]] = []

    def at(time: float, kind: str, who: tuple[int, ...], size: float = 0.0) -> None:
        heapq.heappush(events, (time, next(order), kind, who, size))

    def meet(source: int, target: int, end: str, size: float) -> None:
        """One end of a message has come; with both there it starts."""
        other = posted.get((source, target, "receive" if end == "send" else "send"))
        if other:
            at(clock + machine.latency, "transfer", (source, target), max(size, other.pop(0)))
        else:
            posted.setdefault((source, target, end), []).append(size)

    for rank in range(len(ranks)):
        at(0.0, "next", (rank,))
    while events:
        clock, _, kind, who, size = heapq.heappop(events)
        if kind == "next":
            step = next(ranks[who[0]], None)
            if step is None:
                continue
            waiting[who[0]] = 1 + len(step.sends) + len(step.receives)
            at(clock + step.seconds, "part", who)
            for target, count in step.sends:
                sent[who[0]] += count
                meet(who[0], target, "send", count)
            for source in step.receives:
                meet(source, who[0], "receive", 0.0)
        elif kind == "transfer":
            source, target = who
            free = max(outgoing[source], incoming[target])
            if free > clock:
                at(free, "transfer", who, size)
                continue
            end = clock + size / machine.bandwidth
            outgoing[source] = incoming[target] = end
            at(end, "part", (source,))
            at(end, "part", (target,))
        else:
            waiting[who[0]] -= 1
            if waiting[who[0]] == 0:
                at(clock, "next", who)
    assert not any(posted.values()), "a message without its other end"
    return Outcome(clock, sent)


def ring(load: Load, run: float, rank: int) -> Program:
    if rank > 0:
        yield Step(receives=(rank - 1,))
    yield Step(run)
    if rank < load.ranks - 1:
        yield Step(sends=((rank + 1, load.state_bytes),))


def chain(load: Load, summarise: float, run: float, blocks: int, machine: Machine, rank: int) -> Program:
    block, last = load.state_bytes / blocks, load.ranks - 1
    apply = load.apply_flops / machine.fp32_rate / blocks
    if rank < last:
        yield Step(summarise)
    if rank == 0:
        yield Step(sends=tuple((1, block) for _ in range(blocks)))
    elif rank == last:
        yield Step(receives=(rank - 1,) * blocks)
    else:
        yield Step(receives=(rank - 1,))
        for i in range(blocks):
            yield Step(apply)
            yield Step(sends=((rank + 1, block),), receives=(rank - 1,) if i + 1 < blocks else ())
    yield Step(run)


def gather(load: Load, summarise: float, run: float, machine: Machine, rank: int) -> Program:
    size = load.state_bytes + load.transition_bytes
    if rank < load.ranks - 1:
        yield Step(summarise)
    yield Step(sends=tuple((to, size) for to in range(rank + 1, load.ranks)), receives=tuple(range(rank)))
    yield Step(rank * load.apply_flops / machine.fp32_rate + run)


def ring_attention(load: Load, machine: Machine, rank: int) -> Program:
    block_bytes = load.tokens * load.heads * (load.K + load.V) * 2
    seconds = load.tokens**2 * load.heads * (load.K + load.V) / machine.attention_rate
    for _ in range(load.ranks - 1):
        yield Step(seconds, ((((rank + 1) % load.ranks), block_bytes),), ((rank - 1) % load.ranks,))
    yield Step(seconds)


def simulate_call(load: Load, schedule: Schedule, machine: Machine) -> Outcome:
    """Forward and, in training, backward; the bytes are those of the forward."""
    outcomes = []
    for summarise, run in passes(load, machine):
        if schedule.exchange == "ring":
            programs = [ring(load, run, rank) for rank in range(load.ranks)]
        elif schedule.exchange == "chain":
            programs = [chain(load, summarise, run, schedule.blocks, machine, rank) for rank in range(load.ranks)]
        else:
            programs = [gather(load, summarise, run, machine, rank) for rank in range(load.ranks)]
        outcomes.append(simulate(programs, machine))
    return Outcome(sum(o.seconds for o in outcomes), outcomes[0].sent)
