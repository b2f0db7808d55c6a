# SPDX-License-Identifier: Apache-2.0
"""The backward of Gated DeltaNet on the CuTe kernels: what they serve, their launch, and a record of it.

`sm90/gdn_bwd.py` launches three kernels and a short one, `kda_bwd_schedule.py` says how long segments are where heads are few,
and `gdn_bwd_abi.py` what the kernels are given. The forward keeps nothing for them but its inputs,
with `disable_recompute=True` too: its own kernels make no tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.core.problem import beta_top
from cula.core.replay.record import LaunchRecord, Resized, Sizes
from cula.core.replay.sizes import prefill_labels, resized
from cula.core.replay.workspace import workspace
from cula.gdn.problem import GdnInputs, GdnProblem, kda_problem
from cula.kda.problem import KdaGrads
from cula.ops.cute.abi import Abi
from cula.ops.cute.archs import target_of
from cula.ops.cute.gdn_bwd_abi import BACKWARD, workspace_bytes
from cula.ops.cute.kda_abi import of_gates
from cula.ops.cute.kda_bwd import MADE, GivenGrads, forms, parameters_there
from cula.ops.cute.kda_bwd_schedule import Schedule, schedule, schedule_on
from cula.ops.cute.kda_schedule import SHORT, are_too_many
from cula.ops.cute.launch import Source, record
from cula.ops.cute.tensors import address, as_states, as_tokens, sms_of, stream_of
from cula.ops.cute.toolchain.loader import load

OPS = ("gdn_bwd", "gdn_transition", "gdn_state_grad")  # the latter two are KDA's, with one gate a head
TOKENS = ("q", "k", "v", "g", "beta", "do")


def why_not(problem: GdnProblem) -> str | None:
    """Why the backward does not serve a call whose forward the kernels would take, as a sentence; None if it does."""
    if not problem.options.use_qk_l2norm_in_kernel:
        return "has a backward for keys that are normalised in the kernel: use_qk_l2norm_in_kernel=True"
    return None


def variant(problem: GdnProblem) -> str:
    """The name of the kernels."""
    return f"bwd_gdn_{problem.gate}_{SHORT[problem.g_dtype]}"


def gdn_bwd(problem: GdnProblem, x: GdnInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """Gradients of every input from those of the outputs and (where not None) of the final states."""
    return run(problem, x, do, dht, schedule_on(problem, x.q.device))


def run(problem: GdnProblem, x: GdnInputs, do: Tensor, dht: Tensor | None, made_for: Schedule) -> KdaGrads:
    """The same with a given schedule."""
    p, device = problem, x.q.device
    x = x._replace(
        **{name: as_tokens(getattr(x, name)) for name in TOKENS[:-1]},
        initial_state=None if x.initial_state is None else as_states(x.initial_state),
    )
    do = as_tokens(do)
    dht = None if dht is None else as_states(dht.float().contiguous())
    made = [None if f is None else torch.empty(f[0], dtype=f[2], device=device) for f in forms(p, parameters_there(x))]
    grads = KdaGrads(*made)  # type: ignore[arg-type]  # some may be None
    none = _no_gate(device, p.HV)
    tensors: dict[str, Tensor | None] = {name: getattr(x, name) for name in TOKENS[:-1]}
    tensors |= {"A_log": none if x.A_log is None else x.A_log, "dt_bias": none if x.dt_bias is None else x.dt_bias}
    tensors |= {"do": do, "h0": x.initial_state, "dht": dht, "cu": x.cu_seqlens}
    tensors |= {MADE.get(name, name): t for name, t in zip(KdaGrads._fields, grads)}
    tensors["workspace"] = torch.empty(_workspace_bytes(p, made_for), dtype=torch.uint8, device=device)
    addresses = BACKWARD.pack_addresses({name: address(t) for name, t in tensors.items()})
    numbers = BACKWARD.pack_numbers(_numbers(p, x, do, dht, made_for))
    _kernel(p)(*addresses, *numbers, stream_of(device))
    return grads


def record_gdn_bwd(
    problem: GdnProblem, x: GdnInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None
) -> LaunchRecord | None:
    """A record of this call's launch, which serves calls of other lengths too; None if some tensors would have to be copied. It
    takes those of x, do and dht, and makes the gradients."""
    p, device, given = problem, x.q.device, GivenGrads(do, dht)
    is_copied = dht is not None and not (dht.dtype is torch.float32 and dht.is_contiguous())
    if saved or is_copied or any(as_tokens(t) is not t for t in (*x[:5], do)):
        return None
    none, of = address(_no_gate(device, p.HV)), {name: i for i, name in enumerate((*x._fields, *given._fields))}
    sources: dict[str, Source | int | None] = {name: of[name] for name in (*TOKENS, "dht")}
    sources |= {"A_log": Source(of["A_log"], none), "dt_bias": Source(of["dt_bias"], none)}
    sources |= {"h0": of["initial_state"], "cu": of["cu_seqlens"]}
    sources |= {MADE.get(name, name): ~i for i, name in enumerate(KdaGrads._fields)}
    sources["workspace"] = ~len(KdaGrads._fields)
    made_for, there = schedule_on(p, device), parameters_there(x)
    launch = record(_abi(p), _kernel(p), sources, _numbers(p, x, do, dht, made_for), tuple(_sizes(p, made_for)))
    labels = prefill_labels(x, given, TOKENS, p.is_packed)
    work = workspace(device.index, _workspace_bytes(p, made_for))
    return LaunchRecord(device.index, (launch,), forms(p, there), work, sizes=Sizes(labels, _resize(p, there, device)))


def _resize(p: GdnProblem, there: tuple[bool, bool, bool], device: torch.device) -> Callable[[int, int], Resized | None]:
    """What a record needs for other numbers of tokens and sequences; None where other kernels serve those."""
    is_packed, num_sms = p.is_packed, sms_of(device)

    def resize(first: int, second: int) -> Resized | None:
        B, T, N = (1, first, second) if is_packed else (first, second, first)
        other = resized(p, B, T, N)
        if not (B * T and N) or are_too_many(kda_problem(other)):
            return None
        made = schedule(other, num_sms)
        work = workspace(device.index, _workspace_bytes(other, made))
        return Resized(tuple(_sizes(other, made).values()), forms(other, there), work)

    return resize


def _kernel(p: GdnProblem) -> Any:
    return load(variant(p), target_of(p.sm))


def _abi(p: GdnProblem) -> Abi:
    return of_gates(BACKWARD, True, p.g_dtype.itemsize)


def _workspace_bytes(p: GdnProblem, made_for: Schedule) -> int:
    return workspace_bytes(made_for.chunks * p.HV, made_for.transitions * p.HV)


def _numbers(p: GdnProblem, x: GdnInputs, do: Tensor, dht: Tensor | None, made_for: Schedule) -> dict[str, int | float]:
    """The arguments that are not addresses, by name."""
    numbers: dict[str, int | float] = {}
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("do", do)):
        numbers[f"{name}_token"], numbers[f"{name}_head"] = t.stride()[1:3]
    has_A, has_bias, has_h0 = parameters_there(x)
    numbers |= {
        "beta_token": x.beta.stride(1),
        "H": p.H,
        "HV": p.HV,
        "scale": p.scale,
        "beta_top": beta_top(p.options),
        "beta_bits": 8 * x.beta.element_size(),
        "has_h0": int(has_h0),
        "has_dht": int(dht is not None),
        "has_dh0": int(has_h0),
        "has_A": int(has_A),
        "has_bias": int(has_bias),
    }
    return numbers | _sizes(p, made_for)


def _sizes(p: GdnProblem, made_for: Schedule) -> dict[str, int]:
    """The arguments that follow from the numbers of tokens and sequences, by name."""
    return {
        "T": p.B * p.T,
        "N": p.N,
        "length": 0 if p.is_packed else p.T,
        "halvings": (p.N - 1).bit_length(),
        **made_for.numbers(),
    }


@functools.cache
def _no_gate(device: torch.device, HV: int) -> Tensor:
    """A_log and dt_bias where a call has none."""
    return torch.zeros(HV, dtype=torch.float32, device=device)
