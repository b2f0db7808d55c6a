# SPDX-License-Identifier: Apache-2.0
"""A kernel that tunes itself, compiled by `warm.compile_only` for a GPU that is not there; run by test_run.py as a module.

Prints what each of two processes' worth of calls compiled. (Its own process: triton must not be in interpreter mode.)
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from cula.bench import timing, warm
from tests.support.triton_offline import _AbsentGpu


class Gpu(_AbsentGpu):
    """Loads what is compiled, and would be asked to launch it."""

    def __init__(self, arch: int):
        super().__init__(arch)
        self.loaded: list[str] = []
        self.launched: list[str] = []

    def launcher_cls(self, src, metadata):
        return lambda *args: self.launched.append(metadata.name)

    def load_binary(self, name, kernel, shared, device):
        self.loaded.append(name)
        return None, None, 32, 0, 1024


@triton.autotune([triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 128) for w in (1, 2)], key=["N"], cache_results=True)
@triton.jit
def double(x, y, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, 2 * tl.load(x + o, mask=o < N), mask=o < N)


@triton.jit
def negate(x, N, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + o, -tl.load(x + o, mask=o < N), mask=o < N)


def call(N: int) -> None:
    x = torch.empty(N)
    double[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, x, N)
    negate[(1,)](x, N, BLOCK=64)


def main() -> None:
    gpu = Gpu(90)
    driver.set_active(gpu)
    before = JITFunction.run, Autotuner.run
    told = []

    def first(share: partial, what: str) -> bool:
        told.append(what)
        return share(what)

    with tempfile.TemporaryDirectory() as folder:
        mine = partial(warm.claim, Path(folder))
        for _ in range(2):
            with warm.compile_only(partial(first, mine)):
                call(1000)
            for kernel in (double.fn, negate):  # as in another process
                kernel.device_caches.clear()
    said = {"loaded": gpu.loaded, "launched": gpu.launched, "asked": len(told), "verdicts": len(double.cache)}
    timing.tune_for(5, 20)
    said |= {"restored": (JITFunction.run, Autotuner.run) == before, "tuner": double.do_bench.keywords}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
