# SPDX-License-Identifier: Apache-2.0
"""The calls that a KDA prefill kernel without a recorded run on hardware is tried with: see `toolchain/self_check.py`.

Packed and fixed-length, grouped heads, states, whole sequences and segments, warmed up and chained, from the start or from where
it is forgotten; states in slots of a pool, and those at chunk starts kept. Where there are a fused kernel and split ones, each
also looks at the lengths of packed sequences: serves those that are its own, and leaves others alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core.kernels import Pool
from cula.kda.problem import KdaInputs, KdaOptions, KdaProblem, check_kda
from cula.ops.cute import kda
from cula.ops.cute.archs import arch_of
from cula.ops.cute.kda_abi import K, Kept
from cula.ops.cute.kda_schedule import Schedule, fused, split_into
from cula.ops.cute.toolchain.self_check import relative_difference


class Flags(NamedTuple):
    """What a kernel's name says about its calls."""

    is_normalised: bool
    gate: str  # "gate", "softplus", "log", "safe"
    g: torch.dtype
    has_scalar_gate: bool

    @classmethod
    def of(cls, name: str) -> Flags:
        dtypes = {short: dtype for dtype, short in kda.SHORT.items()}
        _, dtype, gate, g, *rest = name.split("_")
        return cls(dtype == "f16" and "plain" not in rest, gate, dtypes[g], "scalar" in rest)


class Call(NamedTuple):
    lengths: tuple[int, ...]
    is_packed: bool
    H: int
    HV: int
    per_segment: int  # chunks
    is_slow: bool  # the gate forgets in thousands of tokens, not in ten: from the sixth on segments are chained
    has_state: bool
    beta: torch.dtype = torch.float32
    on_pool: bool = False  # states are slots of one, and those at chunk starts are kept
    is_halfway: bool = False  # three chunks nearly forget, and four do not by their bounds: chains begin late
    is_looked_at: bool = False  # kernels find out from the lengths whose call it is


CALLS = (
    Call((70, 0, 5, 100), is_packed=True, H=1, HV=2, per_segment=100, is_slow=False, has_state=True),
    Call((100, 100), is_packed=False, H=2, HV=2, per_segment=1, is_slow=True, has_state=False),
    Call((350, 33), is_packed=True, H=1, HV=2, per_segment=1, is_slow=True, has_state=True, beta=torch.bfloat16),
    Call((200,), is_packed=False, H=1, HV=1, per_segment=2, is_slow=False, has_state=True),
    Call((70, 20, 130), is_packed=True, H=1, HV=1, per_segment=1, is_slow=True, has_state=True, on_pool=True),
    Call((740,), is_packed=False, H=1, HV=1, per_segment=3, is_slow=False, has_state=True, is_halfway=True),
    Call((70, 0, 5, 66), is_packed=True, H=1, HV=2, per_segment=1, is_slow=False, has_state=True, is_looked_at=True),
)
# Shifts of gates that hardly forget; log decays, which are up to ten times as strong here, likewise.
SLOW = {"gate": -8.0, "safe": -8.0, "log": -10.3, "softplus": -8.0}
HALFWAY = {"gate": -4.3, "safe": -4.3, "log": -6.6, "softplus": -2.7}  # shifts of gates that then forget 7 bits a chunk


def make(call: Call, flags: Flags, device: torch.device, sm: tuple[int, int]) -> tuple[KdaProblem, KdaInputs]:
    random = torch.Generator().manual_seed(0)
    D = K

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    B, T = (1, sum(call.lengths)) if call.is_packed else (len(call.lengths), call.lengths[0])
    q, k = normal(B, T, call.H, D), normal(B, T, call.H, D)
    if not flags.is_normalised:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    of_gate = () if flags.has_scalar_gate else (D,)
    g, shift = normal(B, T, call.HV, *of_gate), 0.0
    if call.is_slow or call.is_halfway:
        shift = (SLOW if call.is_slow else HALFWAY)[flags.gate]
    is_raw, fastest = flags.gate in ("gate", "softplus"), -50.0 if flags.gate == "log" else -5.0
    x = KdaInputs(
        q=q.bfloat16(),
        k=k.bfloat16(),
        v=normal(B, T, call.HV, D).bfloat16(),
        g=(g if is_raw else fastest * torch.sigmoid(g + shift)).to(flags.g),
        beta=normal(B, T, call.HV).to(call.beta),
        A_log=0.1 * normal(call.HV) if is_raw else None,
        dt_bias=0.1 * normal(call.HV, *of_gate) + shift if is_raw else None,
        initial_state=normal(len(call.lengths), call.HV, D, D) if call.has_state else None,
        cu_seqlens=torch.tensor([0, *call.lengths]).cumsum(0).int() if call.is_packed else None,
    )
    options = KdaOptions(
        lower_bound=-5.0 if flags.gate == "gate" else None,
        use_gate_in_kernel=is_raw,
        use_qk_l2norm_in_kernel=flags.is_normalised,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=flags.gate == "safe",
        output_final_state=True,
        return_intermediate_states=call.on_pool,
    )
    moved: Any = (None if t is None else t.to(device) for t in x)
    problem, x = check_kda(KdaInputs(*moved), options)
    return dataclasses.replace(problem, sm=sm), x


def worst_error(name: str, device: torch.device, sm: tuple[int, int]) -> float:
    """The largest relative difference, of outputs, last states and kept ones of the calls; infinite for a kernel that serves one
    which is not its own."""
    is_fused, flags, found = name.startswith("fused"), Flags.of(name.removeprefix("fused_")), [0.0]
    has_both = arch_of(sm).kda.has_fused and flags.is_normalised
    for call in CALLS:
        p, x = make(call, flags, device, sm)
        found += differences(call, schedule_of(call, p, is_fused), p, x)
        if call.is_looked_at and has_both:
            found.append(torch.inf if writes(schedule_of(call, p, is_fused, is_its_own=False), p, x) else 0.0)
    return max(found)


def schedule_of(call: Call, p: KdaProblem, is_fused: bool, is_its_own: bool = True) -> Schedule:
    """That of one of the kernels alone: the fused one, on two clusters, or the split ones."""
    made = fused(clusters=2) if is_fused else split_into(p, call.per_segment, num_sms=0)
    if not call.is_looked_at:
        return made
    return made._replace(longest=max(call.lengths) - (is_fused != is_its_own))


def writes(schedule: Schedule, p: KdaProblem, x: KdaInputs) -> bool:
    """Whether a call writes anything."""
    assert x.initial_state is not None
    o, last = torch.full_like(x.v, torch.nan), torch.full_like(x.initial_state, torch.nan)
    kda.run(p, x, schedule, last, o)
    return not bool(o.isnan().all() & last.isnan().all())


def differences(call: Call, schedule: Schedule, p: KdaProblem, x: KdaInputs) -> list[float]:
    """Between the kernel and the torch backend, of each tensor that a call writes."""
    from cula.ops.torch.kda import kda_fwd

    pool = make_pool(x.initial_state) if call.on_pool else None
    if pool is not None:
        x = x._replace(initial_state=torch.where(has_slot(pool)[:, None, None, None], pool.states[pool.indices].float(), 0.0))
    want = kda_fwd(p, x)
    assert want.final_state is not None
    o = torch.full_like(x.v, torch.nan)
    last = torch.full_like(want.final_state, torch.nan) if pool is None else pool.states
    pairs = [(o, want.o), (last, want.final_state if pool is None else after(pool, want.final_state))]
    kept = None
    if want.states is not None:
        kept = kda.KeptStates(torch.full_like(want.states, torch.nan).flatten(0, 1), Kept.STARTS, 1, None)
        pairs += [(kept.states, want.states.flatten(0, 1))]
    if pool is None:
        kda.run(p, x, schedule, last, o, kept=kept)
    else:
        kda.run(p, x._replace(initial_state=None), schedule, None, o, pool, kept)
    return [relative_difference(got, right) for got, right in pairs]


def make_pool(initial_state: Tensor | None) -> Pool:
    """A pool with the first states of a call, of which the second sequence has no slot; its slot 0 is nobody's."""
    assert initial_state is not None
    N = initial_state.shape[0]
    states = torch.cat([initial_state.flip(0), initial_state[:1]]).to(torch.float16)
    indices = torch.arange(N, 0, -1, dtype=torch.int32, device=states.device)
    indices[1] = 0
    return Pool(states, indices, None, null_is_nonpositive=True)


def has_slot(pool: Pool) -> Tensor:
    """Which sequences have one, [N]."""
    return pool.indices >= pool.first_slot


def after(pool: Pool, final_state: Tensor) -> Tensor:
    """The states of a pool with the last ones of a call in its slots."""
    states, live = pool.states.clone(), has_slot(pool)
    states[pool.indices[live]] = final_state[live].to(states.dtype)
    return states
