# SPDX-License-Identifier: Apache-2.0
"""One long sequence over several ranks: KDA with context parallelism, forward and backward.

    torchrun --nproc-per-node 4 examples/context_parallel.py

Every rank holds a slice of the sequence. What crosses ranks is a state of fixed size, whatever the length: the table
sets it against the keys and values that ring attention would move. Runs on CPUs (gloo) in under a minute, and on GPUs
(NCCL) where there is one for each rank.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from cula import cula_kda
from cula.dist import cula_kda_cp

HEADS, DIM = 2, 32


def make_sequence(T: int, device: torch.device) -> list[Tensor]:
    """q, k, v, g, beta of the whole sequence, the same on every rank."""
    gen = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(1, T, HEADS, DIM, generator=gen) for _ in range(3))
    g = -0.02 * torch.rand(1, T, HEADS, DIM, generator=gen)
    beta = torch.rand(1, T, HEADS, generator=gen)
    return [t.to(device) for t in (q, k, v, g, beta)]


def train_step(tokens: list[Tensor], cp_mode: str) -> tuple[Tensor, list[Tensor], float]:
    """This rank's outputs, its gradients, and the seconds until all ranks had theirs."""
    leaves = [t.clone().requires_grad_() for t in tokens]
    dist.barrier()
    started = time.perf_counter()
    o, _ = cula_kda_cp(
        *leaves,
        sp_group=None,
        sp_size=dist.get_world_size(),
        sp_rank=dist.get_rank(),
        cp_mode=cp_mode,
        use_qk_l2norm_in_kernel=True,
    )
    o.square().sum().backward()
    dist.barrier()
    return o.detach(), [t.grad for t in leaves if t.grad is not None], time.perf_counter() - started


def single_rank(tokens: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    leaves = [t.clone().requires_grad_() for t in tokens]
    o, *_ = cula_kda(*leaves, use_qk_l2norm_in_kernel=True)
    o.square().sum().backward()
    return o.detach(), [t.grad for t in leaves if t.grad is not None]


def worst_error(got: list[Tensor], want: list[Tensor], mine: slice) -> float:
    errors = [float((a - b[:, mine]).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)]
    worst = torch.tensor(max(errors), device=got[0].device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    arguments = parser.parse_args()

    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()

    if rank == 0:
        print(f"{world} ranks on {'GPUs' if on_gpus else 'CPUs'}, KDA, {HEADS} heads of {DIM}, forward and backward")
        print("  tokens | a rank sends | ring attention would |   ring |   scan | error against one rank")
    train_step([t[:, :64] for t in make_sequence(64, device)], "scan")  # warm up
    state_bytes = HEADS * DIM * DIM * 4
    for T in arguments.lengths:
        whole = make_sequence(T, device)
        mine = slice(rank * T // world, (rank + 1) * T // world)
        tokens = [t[:, mine] for t in whole]
        seconds = {}
        for cp_mode in ("ring", "scan"):
            o, grads, seconds[cp_mode] = train_step(tokens, cp_mode)
        o_one, grads_one = single_rank(whole)
        error = worst_error([o, *grads], [o_one, *grads_one], mine)
        if rank == 0:
            attention_bytes = (world - 1) * (T // world) * HEADS * DIM * 2 * 4
            print(
                f"{T:8,} | {state_bytes / 1024:8,.0f} KiB | {attention_bytes / 1024:16,.0f} KiB |"
                f" {seconds['ring']:4.2f} s | {seconds['scan']:4.2f} s | {error:.1e}",
                flush=True,
            )
        assert error < 1e-4, error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
