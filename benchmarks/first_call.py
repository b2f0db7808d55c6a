# SPDX-License-Identifier: Apache-2.0
"""What the first call of a kind costs on a machine that has compiled nothing yet, and what a new length costs after it.

    python benchmarks/first_call.py [--out benchmarks/results/H200-first-call.json]

Seconds from call to result, each kind in a process of its own with an empty Triton cache, importing not counted. With kernels
that came compiled, by a wheel or CULA_KERNEL_DIR, an empty cache of CuTe kernels changes nothing; in a clone it is what a first
user meets, and --keep-cute leaves that cache as it is. Beside the seconds is what was compiled: a call that CuTe serves must
not compile anything by Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cula
from cula.utils import describe_device

# of kind: (what is called, backend)
KINDS = {
    "prefill": ("kda", "auto"),
    "training": ("kda train", "auto"),
    "decode": ("decode", "auto"),
    "decode, four tokens": ("decode 4", "auto"),
    "gdn prefill": ("gdn", "auto"),
    "lightning prefill": ("lightning", "auto"),
    "triton prefill": ("kda", "triton"),
    "triton training": ("kda train", "triton"),
}
H, D = 4, 128
SWITCHES: dict[str, Any] = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def call_of(what: str, backend: str, T: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A function and its arguments: T tokens, or T rows of a decode."""
    torch.manual_seed(T)
    is_decode, has_grad = what.startswith("decode"), what.endswith("train")
    shape = (T, 4 if what == "decode 4" else 1) if is_decode else (1, T)

    def normal(*more: int) -> torch.Tensor:
        return torch.randn(*shape, *more, device="cuda", dtype=torch.bfloat16, requires_grad=has_grad)

    q, k, v = (normal(H, D) for _ in range(3))
    if what == "lightning":
        return cula.cula_lightning, (q, k, v, torch.linspace(0.1, 0.9, H, device="cuda")), {"backend": backend}
    per_head = what == "gdn"
    gates = {"A_log": torch.zeros(H, device="cuda"), "dt_bias": torch.zeros(*((H,) if per_head else (H, D)), device="cuda")}
    g, beta = normal(H) if per_head else normal(H, D), normal(H)
    options = SWITCHES | gates | {"backend": backend}
    if per_head:
        return cula.cula_gdn, (q, k, v, g, beta), options
    options["lower_bound"] = -5.0
    if is_decode:
        pool = torch.zeros(T, H, D, D, device="cuda")
        return cula.cula_decode, (q, k, v, pool), options | {"g": g, "beta": beta}
    return cula.cula_kda, (q, k, v, g, beta), options | {"safe_gate": True}


def seconds(what: str, backend: str, T: int) -> float:
    function, args, options = call_of(what, backend, T)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.set_grad_enabled(what.endswith("train")):
        o = function(*args, **options)[0]
        if o.requires_grad:
            o.float().square().sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(kind: str) -> dict[str, Any]:
    """Of a first call, then of one of another length, then of that again; who served it, and what was compiled for it."""
    what, backend = KINDS[kind]
    compiled = listen()
    first, other = (64, 24) if what.startswith("decode") else (1024, 1500)
    function, args, options = call_of(what, backend, first)
    chosen = str(cula.explain(function, *args, **options)).splitlines()[0]
    found: dict[str, Any] = {"first": seconds(what, backend, first), "new length": seconds(what, backend, other)}
    return found | {"again": seconds(what, backend, other), "served by": chosen, "compiled by Triton": compiled}


def listen() -> list[str]:
    """Names of the kernels that Triton compiles from now on, as they come; what it finds in its cache is not among them."""
    names: list[str] = []
    try:
        from triton import knobs
    except ImportError:
        return names

    def heard(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(str(getattr(src, "name", src)))

    knobs.compilation.listener = heard
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="some of them")
    parser.add_argument("--kind", choices=KINDS, help="this one, in this process; prints JSON")
    parser.add_argument("--keep-cute", action="store_true", help="with the CuTe kernels that the cache has")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/first_call.py: torch sees no GPU here, and on a CPU nothing is compiled", file=sys.stderr)
        return 2
    if args.kind:
        torch.zeros(1, device="cuda")  # the context is not ours to count
        print(json.dumps(measure(args.kind)))
        return 0
    result: dict[str, Any] = {
        "script": "benchmarks/first_call.py",
        "what": (__doc__ or "").splitlines()[0],
        "machine": describe_device("cuda"),
        "torch": torch.__version__,
        "cute_cache": "as it was" if args.keep_cute else "empty",
        "seconds": {},
    }
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as empty:
            environment = {**os.environ, "TRITON_CACHE_DIR": f"{empty}/triton"}
            if not args.keep_cute:
                environment["XDG_CACHE_HOME"] = f"{empty}/cache"
            command = [sys.executable, __file__, "--kind", kind]
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = result["seconds"][kind] = json.loads(run.stdout.splitlines()[-1])
        times = ", ".join(f"{name} {s:.3f} s" for name, s in found.items() if isinstance(s, float))
        print(f"{kind:>20}: {times}; {found['served by']}; Triton compiled {len(found['compiled by Triton'])}", flush=True)
        if args.out:  # whoever ends this early has what was measured
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    by_cute = {kind: f for kind, f in result["seconds"].items() if ": cute_" in f["served by"] and "train" not in kind}
    wrong = [kind for kind, f in by_cute.items() if f["compiled by Triton"]]
    for kind in wrong:
        print(
            f"{kind}: served by CuTe, and yet Triton compiled {', '.join(by_cute[kind]['compiled by Triton'])}", file=sys.stderr
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
