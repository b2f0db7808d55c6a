# SPDX-License-Identifier: Apache-2.0
"""The cost model: formulas against a simulation, decisions against exhaustive search, and the numbers in the docs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cula.dist import cost
from cula.dist.cost import BLOCKS, Load, Machine, Schedule, cheapest, sent_bytes, total_time
from tests.dist.simulation import ring_attention, simulate, simulate_call

MACHINE = Machine()
KDA = Load(ranks=8, states=1, heads=32, K=128, V=128, tokens=8192, has_dense_transition=True, with_backward=True)
LIGHTNING = replace(KDA, has_dense_transition=False)
DOCS = Path(__file__).parents[2] / "docs" / "distributed.md"


@pytest.mark.parametrize("load", [KDA, LIGHTNING], ids=["kda", "lightning"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1024])
@pytest.mark.parametrize("mode", ["ring", "chain", "gather"])
def test_formulas_hold_in_simulation(load, ranks, mode):
    if mode == "gather" and ranks > 64:
        pytest.skip("half a million messages, for a mode nobody would choose there")
    load = replace(load, ranks=ranks)
    schedule = min((Schedule(mode, k) for k in (BLOCKS if mode == "chain" else (1,))), key=lambda s: total_time(load, s, MACHINE))
    outcome = simulate_call(load, schedule, MACHINE)
    assert 0.93 < outcome.seconds / total_time(load, schedule, MACHINE) < 1.001
    assert max(outcome.sent) == pytest.approx(sent_bytes(load, schedule))
    if mode != "gather":
        assert outcome.sent[:-1] == [pytest.approx(load.state_bytes)] * (ranks - 1)  # one state, however many ranks
        assert outcome.sent[-1] == 0


@pytest.mark.parametrize("ranks", [8, 64])
def test_ring_attention_in_simulation(ranks):
    for tokens in (256, 8192):  # bound by messages, bound by attention
        load = replace(KDA, ranks=ranks, tokens=tokens)
        outcome = simulate([ring_attention(load, MACHINE, rank) for rank in range(ranks)], MACHINE)
        size, seconds = cost.ring_attention(load, MACHINE)
        assert outcome.seconds == pytest.approx(seconds, rel=1e-6)
        assert max(outcome.sent) == pytest.approx(size)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("tokens", [64, 1024, 32768])
@pytest.mark.parametrize("has_dense_transition", [True, False])
@pytest.mark.parametrize("with_backward", [True, False])
def test_auto_is_near_the_best_of_the_simulation(ranks, tokens, has_dense_transition, with_backward):
    load = Load(ranks, 1, 16, 128, 128, tokens, has_dense_transition, with_backward)
    chosen = simulate_call(load, cheapest(load), MACHINE).seconds
    all_ways = [Schedule("ring"), Schedule("gather"), *(Schedule("chain", k) for k in BLOCKS)]
    assert chosen <= 1.1 * min(simulate_call(load, s, MACHINE).seconds for s in all_ways)


def test_choices():
    assert cheapest(KDA).exchange == "chain"
    assert cheapest(KDA, "ring").exchange == "ring"
    assert cheapest(replace(KDA, ranks=1024)).blocks == 16
    # two ranks with little to do: making transitions is not worth it
    few_tokens = replace(KDA, ranks=2, tokens=64, with_backward=False)
    assert cheapest(few_tokens).exchange == "ring"
    assert cheapest(few_tokens, "scan").exchange != "ring"
    # few ranks with little to send: one step of many messages beats a chain of steps
    assert cheapest(Load(4, 1, 1, 64, 64, 8192, True, True)).exchange == "gather"


def table() -> list[str]:
    """The table of docs/distributed.md: KDA, 32 heads of 128, 8,192 tokens a rank, one sequence."""
    lines = []
    for ranks in (8, 64, 1024):
        load = replace(KDA, ranks=ranks)
        scan = cheapest(load, "scan")
        for label, schedule in (
            ("ring", Schedule("ring")),
            (f"chain, {scan.blocks} blocks", scan),
            ("gather", Schedule("gather")),
        ):
            steps = {"ring": ranks - 1, "chain": ranks + schedule.blocks - 2, "gather": 1}[schedule.exchange]
            forward = total_time(replace(load, with_backward=False), schedule, MACHINE) * 1e3
            both = total_time(load, schedule, MACHINE) * 1e3
            mib = sent_bytes(load, schedule) / 2**20
            lines.append(f"| {ranks:,} | {label} | {steps:,} | {mib:,.0f} MiB | {forward:,.1f} ms | {both:,.1f} ms |")
        size, seconds = cost.ring_attention(load, MACHINE)
        lines.append(f"| {ranks:,} | ring attention | {ranks - 1:,} | {size / 2**20:,.0f} MiB | {seconds * 1e3:,.1f} ms | |")
    return lines


def test_the_table_in_the_docs_is_the_model():
    text = DOCS.read_text()
    missing = [line for line in table() if line not in text]
    assert not missing, "\n".join(["docs/distributed.md lacks", *table()])
