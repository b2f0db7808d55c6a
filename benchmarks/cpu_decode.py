# SPDX-License-Identifier: Apache-2.0
"""Decode on one CPU thread beside Hugging Face's token loop, in one process: `cula_decode` and the loop take turns.

    python benchmarks/cpu_decode.py [--out benchmarks/results/cpu_decode.json]

The loop is written as transformers writes the recurrent form of its linear-attention layers where no kernel is installed
(`torch_recurrent_gated_delta_rule` of Qwen3-Next): tensors with heads in front, a state [K, V] that each step makes anew,
products as multiply and sum. Here it takes one gate a channel (KDA), one a head (the gated delta rule) or the fixed decay of
Lightning, without the delta. A round times each call once, so that other work on the machine falls on both alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cula
from cula import reference

H, K, V = 16, 128, 128
POOL = 64  # slots of the pool that rows with indices live in
CASES = ((1, 1), (1, 4), (8, 1), (32, 1))  # rows, tokens


def token_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """[N, T, H, ...] and a state [N, H, K, V] -> o [N, T, H, V] and the next state."""
    q, k, v, g = (t.transpose(1, 2).contiguous().to(torch.float32) for t in (q, k, v, g))
    q = q * q.shape[-1] ** -0.5
    if beta is not None:
        beta = beta.transpose(1, 2).contiguous().to(torch.float32)
    o = torch.zeros(v.shape)
    for t in range(q.shape[2]):
        q_t, k_t, u = q[:, :, t], k[:, :, t], v[:, :, t]
        decay = g[:, :, t].exp().unsqueeze(-1)
        state = state * (decay.unsqueeze(-1) if decay.dim() == 3 else decay)
        if beta is not None:
            u = (u - (state * k_t.unsqueeze(-1)).sum(dim=-2)) * beta[:, :, t].unsqueeze(-1)
        state = state + k_t.unsqueeze(-1) * u.unsqueeze(-2)
        o[:, :, t] = (state * q_t.unsqueeze(-1)).sum(dim=-2)
    return o.transpose(1, 2).contiguous(), state


class Case:
    """One shape of one recurrence: its tensors, and a step of ours and of the loop. Both carry their state along."""

    def __init__(self, name: str, N: int, T: int) -> None:
        gen = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen)

        self.name, self.N, self.T = name, N, T
        q, k = (torch.nn.functional.normalize(normal(N, T, H, K), dim=-1) for _ in range(2))
        v = normal(N, T, H, V)
        self.pool = normal(N if N == 1 else POOL, H, V, K)
        slots = None if N == 1 else torch.randperm(POOL, generator=gen)[:N]
        self.rows = torch.zeros(1, dtype=torch.long) if slots is None else slots
        self.loop_state = self.pool[self.rows].mT.contiguous()
        if name == "lightning":
            decay = torch.arange(1, H + 1) / (8 * H)
            self.ours: dict[str, Any] = {"mode": "lightning", "decay": decay}
            self.gates: tuple[Tensor, Tensor | None] = (-decay.expand(N, T, H), None)
        else:
            g = -torch.nn.functional.softplus(normal(N, T, H, K) if name == "kda" else normal(N, T, H))
            beta = torch.sigmoid(normal(N, T, H))
            self.ours = {"mode": "kda", "g": g, "beta": beta}
            self.gates = (g, beta)
        self.qkv = (q, k, v)
        self.ours["state_indices"] = slots

    def step(self) -> Tensor:
        return cula.cula_decode(*self.qkv, self.pool, **self.ours)[0]

    def loop(self) -> Tensor:
        o, self.loop_state = token_loop(*self.qkv, *self.gates, self.loop_state)
        return o

    def error(self) -> float:
        o, wanted = self.step(), self.loop()
        state = reference.relative_error(self.pool[self.rows].mT, self.loop_state.double())
        return max(reference.relative_error(o, wanted.double()), state)


def time_in_turns(calls: list[Callable[[], Any]], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds + 10):
        for call, of_call in zip(calls, times):
            start = time.perf_counter()
            call()
            if i >= 10:
                of_call.append((time.perf_counter() - start) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'':10} {'rows':>4} {'tokens':>6}   {'ours: least, median':>20} us   {'loop: least, median':>20} us   loop : ours")
    with torch.no_grad():
        for N, T in CASES:
            for name in ("kda", "one gate", "lightning"):
                case = Case(name, N, T)
                error = case.error()
                assert error < 1e-5, f"{name}: ours and the loop differ by {error:.1e}"
                ours, loop = time_in_turns([case.step, case.loop], max(args.rounds // (N * T), 20))
                row: dict[str, Any] = {"what": name, "rows": N, "tokens": T, "difference": error}
                for who, times in (("ours", ours), ("loop", loop)):
                    row |= {f"{who}_min_us": min(times), f"{who}_median_us": statistics.median(times)}
                row |= {f"{of}_ratio": row[f"loop_{of}_us"] / row[f"ours_{of}_us"] for of in ("min", "median")}
                rows.append(row)
                print(
                    f"{name:10} {N:4} {T:6}   {row['ours_min_us']:9.1f} {row['ours_median_us']:10.1f} us   "
                    f"{row['loop_min_us']:9.1f} {row['loop_median_us']:10.1f} us   "
                    f"{row['min_ratio']:8.2f} {row['median_ratio']:8.2f}"
                )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "script": "benchmarks/cpu_decode.py",
            "what": __doc__.splitlines()[0],
            "machine": {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1},
            "shape": {"H": H, "K": K, "V": V, "pool": POOL, "dtype": "float32"},
            "rows": rows,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
