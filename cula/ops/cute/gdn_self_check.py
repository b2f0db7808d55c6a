# SPDX-License-Identifier: Apache-2.0
"""The calls that a prefill kernel of Gated DeltaNet without a recorded run on hardware is tried with: see
`toolchain/self_check.py`.

Packed and fixed-length, grouped heads, fewer blocks than heads of sequences, so that blocks go on to others, or several pairs of
blocks a head, which share its chunks; slow, mild, fast and steep gates, as log decays and by softplus in the kernel, in both
types; states and slots of a pool.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.kernels import Pool
from cula.gdn.problem import GdnInputs, GdnOptions, GdnProblem, check_gdn
from cula.ops.cute import gdn
from cula.ops.cute.gdn_abi import K
from cula.ops.cute.gdn_schedule import Schedule
from cula.ops.cute.kda_self_check import after, has_slot, make_pool
from cula.ops.cute.toolchain.self_check import relative_difference


class Call(NamedTuple):
    lengths: tuple[int, ...]
    is_packed: bool
    H: int
    HV: int
    blocks: int  # with a whole state; where they have half of one, pairs of them a head
    gate: str  # one of BIASES by softplus in the kernel, "steep" log decays
    numbers: torch.dtype  # of g and beta
    has_state: bool = True
    on_pool: bool = False


BIASES = {"slow": -8.0, "mild": -3.7, "fast": 0.0}
CALLS = (
    Call((70, 0, 5, 330), is_packed=True, H=1, HV=2, blocks=3, gate="fast", numbers=torch.float32),
    Call((200, 200), is_packed=False, H=2, HV=2, blocks=1, gate="slow", numbers=torch.bfloat16, has_state=False),
    Call((150,), is_packed=False, H=1, HV=3, blocks=3, gate="steep", numbers=torch.float32),
    Call((70, 20, 130), is_packed=True, H=1, HV=1, blocks=1, gate="slow", numbers=torch.float32, on_pool=True),
)
# Where blocks have half of a state, sequences long enough to be cut: pieces that are chained, and such that warm up over one
# chunk or over more than are asked for at once.
IN_PIECES = (
    Call((900, 30), is_packed=True, H=1, HV=1, blocks=3, gate="slow", numbers=torch.float32),
    Call((900,), is_packed=False, H=1, HV=2, blocks=3, gate="fast", numbers=torch.bfloat16),
    Call((1340,), is_packed=False, H=1, HV=1, blocks=3, gate="mild", numbers=torch.float32),
)


def calls_of(kernel: str) -> tuple[Call, ...]:
    return CALLS + IN_PIECES if kernel == "half" else CALLS


def make(call: Call, is_normalised: bool, device: torch.device, sm: tuple[int, int]) -> tuple[GdnProblem, GdnInputs]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    B, T = (1, sum(call.lengths)) if call.is_packed else (len(call.lengths), call.lengths[0])
    q, k = normal(B, T, call.H, K), normal(B, T, call.H, K)
    if not is_normalised:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, is_raw = normal(B, T, call.HV), call.gate != "steep"
    x = GdnInputs(
        q=q.bfloat16(),
        k=k.bfloat16(),
        v=normal(B, T, call.HV, K).bfloat16(),
        g=(g if is_raw else -50.0 * torch.sigmoid(g) * (g > 0)).to(call.numbers),
        beta=normal(B, T, call.HV).to(call.numbers),
        A_log=0.1 * normal(call.HV) if is_raw else None,
        dt_bias=0.1 * normal(call.HV) + BIASES[call.gate] if is_raw else None,
        initial_state=normal(len(call.lengths), call.HV, K, K) if call.has_state else None,
        cu_seqlens=torch.tensor([0, *call.lengths]).cumsum(0).int() if call.is_packed else None,
    )
    options = GdnOptions(
        use_gate_in_kernel=is_raw,
        use_qk_l2norm_in_kernel=is_normalised,
        use_beta_sigmoid_in_kernel=True,
        output_final_state=True,
    )
    moved: Any = (None if t is None else t.to(device) for t in x)
    problem, x = check_gdn(GdnInputs(*moved), options)
    return dataclasses.replace(problem, sm=sm), x


def worst_error(name: str, device: torch.device, sm: tuple[int, int]) -> float:
    """The largest relative difference, of outputs and last states of the calls."""
    _, keys, kernel = name.split("_")
    found = (differences(call, kernel, *make(call, keys == "norm", device, sm)) for call in calls_of(kernel))
    return max(max(of_call) for of_call in found)


def differences(call: Call, kernel: str, p: GdnProblem, x: GdnInputs) -> list[float]:
    """Between the kernel and the torch backend, of each tensor that a call writes."""
    from cula.ops.torch.gdn import gdn_fwd

    pool: Pool | None = make_pool(x.initial_state) if call.on_pool else None
    if pool is not None:
        x = x._replace(initial_state=torch.where(has_slot(pool)[:, None, None, None], pool.states[pool.indices].float(), 0.0))
    want = gdn_fwd(p, x)
    assert want.final_state is not None
    o, schedule = torch.full_like(x.v, torch.nan), Schedule(blocks=0, pieces=call.blocks)
    if kernel == "whole":
        schedule = Schedule(blocks=call.blocks)
    if pool is None:
        last, right = torch.full_like(want.final_state, torch.nan), want.final_state
        gdn.run(p, x, schedule, x.initial_state, last, out=o)
    else:
        last, right = pool.states, after(pool, want.final_state)
        gdn.run(p, x, schedule, last, last, pool.indices, pool.indices, o, pool.first_slot)
    return [relative_difference(o, want.o), relative_difference(last, right)]
