# SPDX-License-Identifier: Apache-2.0
"""The kernels of calls that dispatch sends to Triton compile and fit, for every architecture, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from cula.ops.triton import launch

ROOT = Path(__file__).resolve().parents[3]
OTHERS = (100, 103, 80, 120)  # architectures
QUICK = (90, "first", 1)

# Bytes a thread may spill. 16-bit kernels with head dims up to 128 are the ones that serve models; float32 (three products
# for one) and 256 channels spill in the state kernels, which is accepted there and stated here.
MAX_SPILL = {"16 bit, up to 128": 2000, "other": 24000}


@pytest.mark.parametrize(
    ("arch", "which", "part"),
    [
        pytest.param(arch, which, part, marks=[] if (arch, which, part) == QUICK else [pytest.mark.slow])
        for arch, which in ((90, "first"), (90, "others"), *((a, "first") for a in OTHERS))
        for part in range(4)
    ],
)
def test_kernels_compile_and_fit(arch, which, part):
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.triton.compile_variants", str(arch), which, str(part)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=800)
    assert run.returncode == 0, run.stderr[-3000:]
    reports = json.loads(run.stdout)
    assert len(reports) > 10
    for r in reports:
        assert r["fits"], f"too much shared memory: {r}"
        assert not r["faults"], f"ptxas went wrong: {r}"
        assert r["is_early"] == (r["name"] == "decode_kernel" and arch >= 90), r
        assert not r["accesses"], f"launched early, it touches memory before it waits for the kernel in front: {r}"
        declared, passed = r["parameters"]
        assert declared == passed + launch.NUM_SCRATCH, f"a launch passes other parameters than the kernel has: {r}"
        is_main = "fp32" not in r["call"] and "256" not in r["call"]
        bound = MAX_SPILL["16 bit, up to 128" if is_main else "other"]
        assert r["spill_bytes"] <= bound, f"spills more than {bound} B: {r}"
