# SPDX-License-Identifier: Apache-2.0
"""The calls that a Lightning prefill kernel without a recorded run on hardware is tried with: see `toolchain/self_check.py`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from cula.core.kernels import Pool
from cula.lightning.problem import LightningInputs, LightningOptions, LightningProblem, check_lightning
from cula.ops.cute import lightning
from cula.ops.cute.lightning_schedule import make_schedule
from cula.ops.cute.toolchain.self_check import relative_difference


class Call(NamedTuple):
    lengths: tuple[int, ...]
    is_packed: bool
    H: int
    HV: int
    per_seq: int  # segments of a sequence
    num_blocks: int  # fewer than there are items: blocks go on to others
    pool_dtype: torch.dtype | None  # of the pool that first states come from and last states go to; None: plain states


CALLS = (
    Call((70, 0, 5, 300), is_packed=True, H=1, HV=2, per_seq=1, num_blocks=3, pool_dtype=None),
    Call((260, 260), is_packed=False, H=2, HV=2, per_seq=1, num_blocks=8, pool_dtype=torch.bfloat16),
    Call((900, 33, 1), is_packed=True, H=1, HV=2, per_seq=2, num_blocks=5, pool_dtype=torch.float32),
)


def make(call: Call, D: int, device: torch.device, sm: tuple[int, int]) -> tuple[LightningProblem, LightningInputs]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device)

    B, T = (1, sum(call.lengths)) if call.is_packed else (len(call.lengths), call.lengths[0])
    x = LightningInputs(
        q=normal(B, T, call.H, D).bfloat16(),
        k=normal(B, T, call.H, D).bfloat16(),
        v=normal(B, T, call.HV, D).bfloat16(),
        decay=torch.tensor([0.5 / 16**i for i in range(call.HV)], device=device),  # forgets in some tokens, in a chunk
        initial_state=normal(len(call.lengths), call.HV, D, D),
        cu_seqlens=torch.tensor([0, *call.lengths]).cumsum(0).int().to(device) if call.is_packed else None,
    )
    problem, x = check_lightning(x, LightningOptions(output_final_state=True))
    return dataclasses.replace(problem, sm=sm), x


def kernel_of(name: str) -> tuple[str, int]:
    """What a schedule calls the kernel, as in "d128_half", and its head dim."""
    kernel = name[name.index("_d") + 1 :]
    return kernel, int(kernel.removesuffix("_half")[1:])


def worst_error(name: str, device: torch.device, sm: tuple[int, int]) -> float:
    """The largest relative difference, of outputs and last states of the calls. The first pass over segments is among them."""
    from cula.ops.torch.lightning import lightning_fwd

    worst, (kernel, D) = 0.0, kernel_of(name)
    for call in CALLS:
        p, x = make(call, D, device, sm)
        schedule = make_schedule(p, kernel, call.per_seq, call.num_blocks)
        assert x.initial_state is not None
        o, ht = torch.full_like(x.v, torch.nan), torch.full_like(x.initial_state, torch.nan)
        if call.pool_dtype is None:
            want = lightning_fwd(p, x)
            lightning.run(p, x, schedule, ht, o)
        else:
            ht = x.initial_state.to(call.pool_dtype).flip(0).contiguous()
            want = lightning_fwd(p, x._replace(initial_state=ht.float().flip(0)))
            slots = torch.arange(p.N - 1, -1, -1, device=device)
            lightning.run(p, x._replace(initial_state=None), schedule, None, o, Pool(ht, slots, None))
            ht = ht.flip(0)
        assert want.final_state is not None
        for got, right in ((o, want.o), (ht, want.final_state)):
            worst = max(worst, relative_difference(got, right))
    return worst
