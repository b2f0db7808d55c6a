# SPDX-License-Identifier: Apache-2.0
"""What the first call of a kind costs on a machine that has compiled nothing yet, and what a new length costs after it.

    python benchmarks/first_call.py [--out benchmarks/results/H200-first-call.json]

Seconds from call to result, each kind in a process of its own with an empty Triton cache, importing not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import cula
from cula.utils import describe_device

# of kind: (backend, whether gradients are taken)
KINDS = {"triton forward": ("triton", False), "triton training": ("triton", True), "dispatched forward": ("auto", False)}


def seconds(kind: str) -> dict[str, float]:
    """Of a call at T = 1024, then of one at T = 1500, then of that again."""
    backend, has_grad = KINDS[kind]

    def call(T: int) -> float:
        torch.manual_seed(T)
        q, k, v, g = (torch.randn(1, T, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=has_grad) for _ in range(4))
        beta = torch.randn(1, T, 4, device="cuda", dtype=torch.bfloat16)
        A_log, dt_bias = torch.zeros(4, device="cuda"), torch.zeros(4, 128, device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        o, _ = cula.cula_kda(
            q,
            k,
            v,
            g,
            beta,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=-5.0,
            safe_gate=True,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            backend=backend,
        )
        if has_grad:
            o.float().square().sum().backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return {"first": call(1024), "new length": call(1500), "again": call(1500)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kind", choices=KINDS, help="this one, in this process; prints JSON")
    args = parser.parse_args()
    if args.kind:
        torch.zeros(1, device="cuda")  # the context is not ours to count
        print(json.dumps(seconds(args.kind)))
        return
    result = {
        "script": "benchmarks/first_call.py",
        "what": __doc__.splitlines()[0],
        "machine": describe_device("cuda"),
        "torch": torch.__version__,
        "seconds": {},
    }
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as empty:
            command = [sys.executable, __file__, "--kind", kind]
            run = subprocess.run(
                command, env={**os.environ, "TRITON_CACHE_DIR": empty}, capture_output=True, text=True, check=True
            )
        result["seconds"][kind] = json.loads(run.stdout.splitlines()[-1])
        print(f"{kind:>20}: " + ", ".join(f"{n} {s:.3f} s" for n, s in result["seconds"][kind].items()), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
