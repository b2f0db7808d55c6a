# SPDX-License-Identifier: Apache-2.0
"""The torch backend beside float32 token loops, in one process on one thread: is chunking worth it on a CPU?

    python benchmarks/cpu_token_loop.py [--out benchmarks/results/cpu_token_loop.json]

Three loops, because how a loop is written decides its speed: `einsum` (the formula as one writes it down), `matmul`
(batched matrix-vector products) and `elementwise` (multiply and sum, the fastest on a CPU). Backward through a loop is
timed on 512 tokens and scaled, since autograd keeps every state it passed through.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from pathlib import Path

import torch
from torch import Tensor

import cula
from cula import reference

T, H, K, V = 4096, 8, 128, 128
LOOP_TOKENS = 512


def einsum_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    S, o = q.new_zeros(H, V, K), []
    for t in range(q.shape[0]):
        S = S * g[t].exp()[:, None, :]
        u = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
        S = S + torch.einsum("hv,hk->hvk", u, k[t])
        o.append(torch.einsum("hvk,hk->hv", S, q[t]))
    return torch.stack(o)


def matmul_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    S, o = q.new_zeros(H, V, K), []
    for t in range(q.shape[0]):
        S = S * g[t].exp()[:, None, :]
        u = beta[t][:, None] * (v[t] - (S @ k[t].unsqueeze(-1)).squeeze(-1))
        S = torch.baddbmm(S, u.unsqueeze(-1), k[t].unsqueeze(-2))
        o.append((S @ q[t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(o)


def elementwise_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    S, o = q.new_zeros(H, V, K), []
    for t in range(q.shape[0]):
        S = S * g[t].exp()[:, None, :]
        u = beta[t][:, None] * (v[t] - (S * k[t][:, None, :]).sum(-1))
        S = S + u[:, :, None] * k[t][:, None, :]
        o.append((S * q[t][:, None, :]).sum(-1))
    return torch.stack(o)


def best_of(call, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    normalise = torch.nn.functional.normalize
    inputs = (
        normalise(normal(1, T, H, K), dim=-1),
        normalise(normal(1, T, H, K), dim=-1),
        normal(1, T, H, V),
        -5 * torch.sigmoid(normal(1, T, H, K)),
        torch.sigmoid(normal(1, T, H)),
    )

    def chunked(x: tuple[Tensor, ...]) -> Tensor:
        return cula.cula_kda(*x, scale=1.0)[0]

    def training(function, x: tuple[Tensor, ...]):
        leaves = tuple(t.clone().requires_grad_() for t in x)
        torch.autograd.grad(function(leaves).sum(), leaves)

    with torch.no_grad():
        forward = best_of(lambda: chunked(inputs), 5)
    both = best_of(lambda: training(chunked, inputs), 3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows = []
    for loop in (einsum_loop, matmul_loop, elementwise_loop):
        plain = [t[0] for t in inputs]
        with torch.no_grad():
            loop_forward = best_of(lambda loop=loop, plain=plain: loop(*plain), 2)
            error = reference.relative_error(chunked(inputs)[0], loop(*plain).double())
        short = tuple(t[:, :LOOP_TOKENS] for t in inputs)
        loop_both = best_of(lambda loop=loop, short=short: training(lambda x: loop(*(t[0] for t in x)), short), 2)
        loop_both *= T / LOOP_TOKENS
        rows.append(
            {
                "loop": loop.__name__.removesuffix("_loop"),
                "forward_s": loop_forward,
                "forward_ratio": loop_forward / forward,
                "forward_backward_s": loop_both,
                "forward_backward_ratio": loop_both / both,
                "difference": error,
            }
        )
    print(f"chunked: forward {forward:.3f} s, forward + backward {both:.3f} s, peak memory {peak / 1e9:.2f} GB")
    for r in rows:
        print(
            f"{r['loop']:>12} loop: forward {r['forward_s']:.2f} s ({r['forward_ratio']:.1f}x), "
            f"forward + backward {r['forward_backward_s']:.1f} s ({r['forward_backward_ratio']:.1f}x)"
        )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "script": "benchmarks/cpu_token_loop.py",
            "what": __doc__.splitlines()[0],
            "machine": {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1},
            "shape": {"B": 1, "T": T, "H": H, "K": K, "V": V, "dtype": "float32", "gate": "-5 sigmoid(N(0,1))"},
            "chunked": {"forward_s": forward, "forward_backward_s": both, "peak_bytes": peak},
            "loops": rows,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
