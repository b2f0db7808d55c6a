# SPDX-License-Identifier: Apache-2.0
"""Where the GPU time of a KDA call goes: forward, backward and the affine map, kernel by kernel.

    python benchmarks/kda_passes.py --backend triton [--t 8192 --h 32 --gate fast] [--out benchmarks/results/H200-kda-passes.json]

Times are medians of CUDA graph replays; the kernels' own times come from the profiler. bf16, K = V = 128, every activation in
the kernel. "backward" starts from what the forward kept for it, "training" is the two together, with the peak of memory
above the inputs. Errors are taken against float64: of the forward on the first 256 tokens of one head, of the gradients on a
problem of two heads and 200 tokens.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from cula import reference
from cula.core.dispatch import choose
from cula.kda.problem import KdaInputs, KdaOptions, KdaProblem, check_kda
from cula.utils import describe_device

GATES = {"fast": ("bounded", 0.0), "slow": ("bounded", -8.0), "softplus": ("softplus", 0.0)}


def make(T: int, H: int, gate: str) -> tuple[KdaProblem, KdaInputs]:
    form, shift = GATES[gate]
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda", dtype=torch.bfloat16)

    q, k, v, g = (normal(1, T, H, 128) for _ in range(4))
    x = KdaInputs(q, k, v, g, normal(1, T, H), torch.zeros(H, device="cuda"), torch.full((H, 128), shift, device="cuda"))
    options = KdaOptions(
        lower_bound=-5.0 if form == "bounded" else None,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=form == "bounded",
        output_final_state=True,
    )
    return check_kda(x, options)


def graph_time(call, repeats: int = 20) -> float:
    """Median milliseconds of a replay."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def kernel_times(call, repeats: int = 5) -> dict[str, float]:
    """Microseconds a call, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    rows = {e.key: e.self_device_time_total / repeats for e in trace.key_averages() if e.self_device_time_total > 0}
    return dict(sorted(rows.items(), key=lambda item: -item[1]))


def forward_error(problem: KdaProblem, x: KdaInputs, o: torch.Tensor) -> float:
    """Of the first head's first tokens, which depend on nothing after them."""
    opt = problem.options
    first = [t[:, :256, :1] for t in (x.q, x.k, x.v, x.g, x.beta)]
    want, _ = reference.kda(
        *first,
        A_log=None if x.A_log is None else x.A_log[:1],
        dt_bias=None if x.dt_bias is None else x.dt_bias[:1],
        lower_bound=opt.lower_bound,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    return reference.relative_error(o[:, :256, :1], want)


def gradient_errors(gate: str, fwd, bwd) -> dict[str, float]:
    problem, x = make(200, 2, gate)
    problem = replace(problem, needs_grad=True)
    gen = torch.Generator("cuda").manual_seed(1)
    do = torch.randn(x.v.shape, generator=gen, device="cuda", dtype=torch.bfloat16)
    dht = torch.randn(1, 2, 128, 128, generator=gen, device="cuda")
    leaves = [None if t is None else t.double().requires_grad_() for t in x]
    opt = problem.options
    switches = {
        n: getattr(opt, n) for n in ("lower_bound", "use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
    }
    o, state = reference.kda(**dict(zip(x._fields, leaves)), **switches)
    ((o * do).sum() + (state * dht).sum()).backward()
    grads = bwd(problem, x, fwd(problem, x).saved, do, dht)
    return {f"d{n}": reference.relative_error(g, t.grad) for n, g, t in zip(x._fields, grads, leaves) if g is not None}


def peak_bytes(call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--t", type=int, default=8192)
    parser.add_argument("--h", type=int, default=32)
    parser.add_argument("--gate", choices=GATES, default="fast")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    problem, x = make(args.t, args.h, args.gate)
    passes = {op: choose(op, problem, args.backend) for op in ("kda_fwd", "kda_transition", "kda_bwd")}
    fwd, transition, bwd = (c.backend.load("kda", op) for op, c in passes.items())
    training = replace(problem, needs_grad=True)
    do = torch.randn_like(x.v)
    saved = fwd(training, x).saved
    calls = {
        "forward": lambda: fwd(problem, x),
        "transition": lambda: transition(problem, x),
        "backward": lambda: bwd(training, x, saved, do, None),
        "training": lambda: bwd(training, x, fwd(training, x).saved, do, None),
    }
    result = {
        "script": "benchmarks/kda_passes.py",
        "what": __doc__.splitlines()[0],
        "machine": describe_device("cuda"),
        "torch": torch.__version__,
        "shape": {"B": 1, "T": args.t, "H": args.h, "K": 128, "V": 128, "gate": args.gate, "dtype": "bfloat16"},
        "backends": {op: c.name for op, c in passes.items()},
        "forward_error": forward_error(problem, x, fwd(problem, x).o),
        "gradient_errors": gradient_errors(args.gate, fwd, bwd),
        "passes": {},
    }
    for name, call in calls.items():
        entry = {"graph_ms": graph_time(call), "kernels_us": kernel_times(call)}
        result["passes"][name] = entry
        if name == "training":
            entry["peak_bytes"] = peak_bytes(call)
        print(f"{name:>9} {entry['graph_ms']:.3f} ms")
        for kernel, us in list(entry["kernels_us"].items())[:9]:
            print(f"{'':>10}{us:8.1f} us  {kernel[:60]}")
    print(f"relative error of the forward: {result['forward_error']:.1e}; of the gradients:")
    print("  ".join(f"{n} {e:.1e}" for n, e in result["gradient_errors"].items()))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
