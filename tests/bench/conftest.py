# SPDX-License-Identifier: Apache-2.0
"""A benchmark run in a second or two, and peers that misbehave."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cula.bench import runner, suites, timing
from cula.bench.inputs import Inputs
from cula.bench.ours import Cula
from cula.bench.peers import Call, Peer

CPU = torch.device("cpu")


class Twin(Cula):
    """Right, and a library of its own as far as the run knows."""

    name, title, package = "twin", "Twin", "twin"


class Wrong(Twin):
    name, title = "wrong", "Wrong"

    def prepare(self, x: Inputs) -> Call:
        call = super().prepare(x)
        return Call(call.run, lambda result: {key: value * 1.5 for key, value in call.read(result).items()})


class Raising(Twin):
    name, title = "raising", "Raising"

    def prepare(self, x: Inputs) -> Call:
        def run():
            raise RuntimeError("no kernel image is available\nand more")

        return Call(run, lambda result: {})


class Absent(Twin):
    name, title = "absent", "Absent"

    def missing(self) -> str:
        return "not installed (pip install absent)"


class Declining(Twin):
    name, title = "declining", "Declining"

    def why_not(self, case) -> str:
        return "it has other plans"


FAKES: tuple[Peer, ...] = (Twin(), Wrong(), Raising(), Absent(), Declining())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS_A_MEASURE", 0.0)
    monkeypatch.setattr(timing, "MIN_REPEATS", 2)
    monkeypatch.setattr(timing, "LOOP_SPAN", 0.05)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(tmp_path):
    """Runs suites small: (names, peers, file, options of `runner.run`, fields of Settings) -> result."""

    def go(names, *, peers=(), file="r.json", limit=1, resume=False, **settings):
        cases = suites.build(names, "cpu", suites.Custom(k=32, v=32), limit)
        cases = [replace(c, lens=tuple(min(length, 70 + i) for length in c.lens)) for i, c in enumerate(cases)]
        return runner.run(cases, runner.Settings(CPU, peers=peers, **settings), Path(tmp_path) / file, resume=resume)

    return go
