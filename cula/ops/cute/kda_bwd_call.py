# SPDX-License-Identifier: Apache-2.0
"""What the backwards of KDA and Gated DeltaNet have in common on the host: tensors as their kernels take them, arguments, memory
for gradients, and records. `kda_bwd.py` and `gdn_bwd.py` have the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cula.core.problem import beta_top
from cula.core.replay.record import LaunchRecord, Resized, Sizes
from cula.core.replay.sizes import SECOND, prefill_labels, resized
from cula.core.replay.torch_internals import Form
from cula.core.replay.workspace import workspace
from cula.gdn.problem import GdnInputs, GdnProblem
from cula.kda.problem import KdaGrads, KdaInputs, KdaProblem
from cula.ops.cute.abi import Workspace
from cula.ops.cute.kda_abi import K, V
from cula.ops.cute.kda_bwd_abi import Home, counts, homes, tiles_bytes
from cula.ops.cute.kda_bwd_schedule import Schedule
from cula.ops.cute.kda_bwd_schedule import schedule as make_schedule
from cula.ops.cute.kda_schedule import are_too_many
from cula.ops.cute.launch import Launch, Operand, places, token_strides
from cula.ops.cute.tensors import as_states, as_tokens, sms_of, zeros_on

TOKENS = ("q", "k", "v", "g", "beta", "do")
GRADIENTS = tuple("dh0" if name == "d_initial_state" else name for name in KdaGrads._fields)  # by the names of their addresses
BYTES_OF_TILES = SECOND + 1  # the label of what the forward kept: the third size of a record

Inputs = TypeVar("Inputs", KdaInputs, GdnInputs)
Problem = KdaProblem | GdnProblem


class GivenGrads(NamedTuple):
    """What a backward takes besides the inputs."""

    do: Tensor
    dht: Tensor | None


def as_read(x: Inputs, do: Tensor, dht: Tensor | None) -> tuple[Inputs, Tensor, Tensor | None]:
    """The tensors of a call as the kernels read them; copies where they are not so already."""
    h0 = None if x.initial_state is None else as_states(x.initial_state)
    x = x._replace(initial_state=h0, **{name: as_tokens(getattr(x, name)) for name in TOKENS[:-1]})
    return x, as_tokens(do), None if dht is None else as_states(dht.float().contiguous())


def is_as_read(x: KdaInputs | GdnInputs, do: Tensor, dht: Tensor | None) -> bool:
    """Whether the kernels read all tensors as they are."""
    is_plain = dht is None or (dht.dtype is torch.float32 and dht.is_contiguous())
    return is_plain and all(as_tokens(t) is t for t in (*x[:5], do))


class Present(NamedTuple):
    """Which of the inputs that a call may do without are there, and have gradients."""

    A_log: bool
    dt_bias: bool
    initial_state: bool


NOTHING = Present(A_log=False, dt_bias=False, initial_state=False)


def present_in(x: KdaInputs | GdnInputs) -> Present:
    return Present(*[getattr(x, name) is not None for name in Present._fields])


def forms(p: Problem, present: Present) -> tuple[Form | None, ...]:
    """Those of the gradients, in order."""
    of_tokens, of_gate = (p.B, p.T), (K,) if isinstance(p, KdaProblem) and not p.has_scalar_gate else ()
    return (
        _contiguous(*of_tokens, p.H, K, dtype=p.dtype),
        _contiguous(*of_tokens, p.H, K, dtype=p.dtype),
        _contiguous(*of_tokens, p.HV, V, dtype=p.dtype),
        _contiguous(*of_tokens, p.HV, *of_gate, dtype=p.g_dtype),
        _contiguous(*of_tokens, p.HV, dtype=p.beta_dtype),
        _contiguous(p.HV) if present.A_log else None,
        _contiguous(p.HV, *of_gate) if present.dt_bias else None,
        _contiguous(p.N, p.HV, V, K) if present.initial_state else None,
    )


def _contiguous(*shape: int, dtype: torch.dtype = torch.float32) -> Form:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(size * strides[-1])
    return shape, tuple(strides[::-1]), dtype


def empty_gradients(p: Problem, x: KdaInputs | GdnInputs) -> dict[str, Tensor | None]:
    """Memory for the gradients of a call, in order and by the names of their addresses."""
    made = [None if f is None else torch.empty(f[0], dtype=f[2], device=x.q.device) for f in forms(p, present_in(x))]
    return dict(zip(GRADIENTS, made))


def operands_of(
    x: KdaInputs | GdnInputs,
    between: tuple[Any, ...],
    given: GivenGrads,
    written: Mapping[str, Tensor | None],
    of_bias: tuple[int, ...],
    work: Tensor | None,
) -> dict[str, Operand]:
    """What stands at the addresses that both backwards have, by name. A record takes the tensors of x, those `between`, and then
    the given ones; it makes the gradients. `of_bias`: dimensions of dt_bias behind that of the heads."""
    of, device, HV = places(x, *between, given), x.q.device, x.v.shape[2]
    operands = {name: Operand(getattr(x, name), of[name]) for name in TOKENS[:-1]}
    operands["A_log"] = Operand(x.A_log, of["A_log"], zeros_on(device, HV))
    operands["dt_bias"] = Operand(x.dt_bias, of["dt_bias"], zeros_on(device, HV, *of_bias))
    operands |= {"h0": Operand(x.initial_state, of["initial_state"]), "cu": Operand(x.cu_seqlens, of["cu_seqlens"])}
    operands |= {name: Operand(t, of[name]) for name, t in zip(given._fields, given)}
    operands |= {name: Operand(written.get(name), ~i) for i, name in enumerate(GRADIENTS)}
    return operands | {"workspace": Operand(work, ~len(GRADIENTS))}


def numbers_of(p: Problem, x: KdaInputs | GdnInputs, given: GivenGrads) -> dict[str, int | float]:
    """The arguments that both backwards have, are not addresses and do not follow from sizes, by name."""
    present = present_in(x)
    return {
        **token_strides(q=x.q, k=x.k, v=x.v, g=x.g, do=given.do),
        "beta_token": x.beta.stride(1),
        "H": p.H,
        "HV": p.HV,
        "scale": p.scale,
        "beta_top": beta_top(p.options),
        "beta_bits": 8 * x.beta.element_size(),
        "has_h0": int(present.initial_state),
        "has_dht": int(given.dht is not None),
        "has_dh0": int(present.initial_state),
        "has_A": int(present.A_log),
        "has_bias": int(present.dt_bias),
    }


def check_tiles(p: Problem, schedule: Schedule, size: int | None) -> None:
    """That tiles of so many bytes, where the forward kept any, are of this call."""
    assert size is None or size >= tiles_bytes(schedule.chunks * p.HV), "what the forward kept is of another call"


class Sized(NamedTuple):
    """What follows from the numbers of tokens and sequences, and from the schedule that is made for them."""

    numbers: dict[str, int]  # arguments, by name
    workspace: int  # bytes


def sized_by(of: Workspace, p: Problem, schedule: Schedule, lends: bool, has_tiles: bool = False) -> Sized:
    """For a backward with this workspace. `lends`: T and P may lie where gradients will be."""
    records, tokens = schedule.chunks * p.HV, p.B * p.T
    dq, _, dv, dg = [math.prod(form[0]) * form[2].itemsize for form in forms(p, NOTHING)[:4] if form is not None]
    of_T, of_P = homes(records, {Home.DV: dv, Home.DG: dg, Home.DQ: dq} if lends else {})
    shared, in_workspace = tokens * p.HV if p.H != p.HV else 0, [home == Home.WORKSPACE for home in (of_T, of_P)]
    offsets = of.offsets(**counts(records, has_tiles, shared, schedule.transitions * p.HV, in_workspace))
    numbers = {
        "T": tokens,
        "N": p.N,
        "length": 0 if p.is_packed else p.T,
        "halvings": (p.N - 1).bit_length(),
        **schedule.numbers(),
        "home_of_T": of_T,
        "home_of_P": of_P,
    }
    return Sized(numbers, offsets["end"])


def record_of(
    launch: Launch,
    p: Problem,
    x: KdaInputs | GdnInputs,
    given: GivenGrads,
    schedule: Schedule,
    sized: Callable[[Any, Schedule], Sized],
    has_tiles: bool = False,
) -> LaunchRecord:
    """A record of a backward's launch, for calls of other lengths too.

    Args:
        sized: what follows from a problem of other lengths and its schedule.
        has_tiles: the call takes tiles that the forward kept, behind the inputs.
    """
    device, is_packed, present, num_sms = x.q.device, p.is_packed, present_in(x), sms_of(x.q.device)

    def resize(first: int, second: int, bytes_of_tiles: int | None = None) -> Resized | None:
        B, T, N = (1, first, second) if is_packed else (first, second, first)
        other = resized(p, B, T, N)
        if not (B * T and N) or are_too_many(other):
            return None
        made = make_schedule(other, num_sms)
        check_tiles(other, made, bytes_of_tiles)
        numbers, size = sized(other, made)
        return Resized(tuple(numbers.values()), forms(other, present), workspace(device.index, size))

    labels = prefill_labels(x, given, TOKENS, is_packed)
    if has_tiles:
        labels = (*labels[: len(x)], (BYTES_OF_TILES,), *labels[len(x) :])
    work = workspace(device.index, sized(p, schedule).workspace)
    return LaunchRecord(device.index, (launch.recorded(),), forms(p, present), work, sizes=Sizes(labels, resize))
