# SPDX-License-Identifier: Apache-2.0
"""The KDA backward on the CuTe kernels: what they serve, their launch, and a record of it; transitions, and gradients of first
states alone, by the same kernels.

`sm90/kda_bwd.py` launches three kernels and a short one, and two more where few heads are cut into segments that have to be
chained. `kda_bwd_schedule.py` says how long segments are, and `kda_bwd_abi.py` what the kernels are given. The forward keeps
nothing for them but its inputs or, with `disable_recompute=True`, what the first of them would make.
"""

from __future__ import annotations

import functools
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
from cula.ops.cute.abi import Abi, Workspace
from cula.ops.cute.archs import target_of
from cula.ops.cute.kda_abi import K, V, of_gates
from cula.ops.cute.kda_bwd_abi import BACKWARD, WITHOUT_GRADIENTS, WORKSPACE, WRITTEN, Home, Makes, counts, homes, tiles_bytes
from cula.ops.cute.kda_bwd_schedule import Schedule, schedule, schedule_on, whole_on
from cula.ops.cute.kda_schedule import are_too_many
from cula.ops.cute.kda_schedule import variant as forward_variant
from cula.ops.cute.launch import Launch, Operand, places, token_strides
from cula.ops.cute.tensors import as_states, as_tokens, sms_of, stream_of
from cula.ops.cute.toolchain.loader import load

OPS = ("kda_bwd", "kda_transition", "kda_state_grad")  # which these kernels do
TOKENS = ("q", "k", "v", "g", "beta", "do")
Inputs = TypeVar("Inputs", KdaInputs, GdnInputs)
BYTES_OF_TILES = SECOND + 1  # the label of what the forward kept: the third size of a record


def why_not(problem: KdaProblem) -> str | None:
    """Why the backward does not serve a call whose forward the kernels would take, as a sentence; None if it does."""
    p = problem
    if not p.options.use_qk_l2norm_in_kernel:
        return "has a backward for keys that are normalised in the kernel: use_qk_l2norm_in_kernel=True"
    return None


def kda_bwd(problem: KdaProblem, x: KdaInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None) -> KdaGrads:
    """Gradients of every input from those of the outputs and (where not None) of the final states."""
    return run(problem, x, do, dht, schedule_on(problem, x.q.device), saved[0] if saved else None)


def run(
    problem: KdaProblem, x: KdaInputs, do: Tensor, dht: Tensor | None, made_for: Schedule, tiles: Tensor | None = None
) -> KdaGrads:
    """The same with a given schedule, and with the tiles that the forward kept."""
    p, device = problem, x.q.device
    made = [
        None if form is None else torch.empty(form[0], dtype=form[2], device=device) for form in forms(p, parameters_there(x))
    ]
    grads = KdaGrads(*made)  # type: ignore[arg-type]  # some may be None
    written = {MADE.get(name, name): t for name, t in zip(KdaGrads._fields, grads)}
    _launch(p, x, do, dht, written, made_for, Makes.GRADIENTS, tiles)
    return grads


def kda_transition(problem: KdaProblem, x: KdaInputs) -> tuple[Tensor, Tensor]:
    """The affine transition of each sequence, `ht = h0 @ M + B`: M [N, HV, K, K] and B [N, HV, V, K], float32."""
    return transition(problem, x, whole_on(problem, x.q.device))


def transition(problem: KdaProblem, x: KdaInputs, made_for: Schedule) -> tuple[Tensor, Tensor]:
    """The same with a given schedule."""
    p = problem
    M, B = (torch.empty((p.N, p.HV, rows, K), dtype=torch.float32, device=x.q.device) for rows in (K, V))
    _launch(p, x, x.v, None, {"M": M, "B": B}, made_for, Makes.TRANSITION)  # v stands for do, which nobody reads
    return M, B


def kda_state_grad(problem: KdaProblem, x: KdaInputs, do: Tensor, dht: Tensor | None = None) -> Tensor:
    """The gradient of the first states, and nothing else."""
    return state_grad(problem, x, do, dht, whole_on(problem, x.q.device))


def state_grad(problem: KdaProblem, x: KdaInputs, do: Tensor, dht: Tensor | None, made_for: Schedule) -> Tensor:
    """The same with a given schedule."""
    p = problem
    dh0 = torch.empty((p.N, p.HV, V, K), dtype=torch.float32, device=x.q.device)
    _launch(p, x._replace(initial_state=None), do, dht, {"dh0": dh0}, made_for, Makes.STATE_GRAD)
    return dh0


def _launch(
    p: KdaProblem,
    x: KdaInputs,
    do: Tensor,
    dht: Tensor | None,
    made: dict[str, Tensor | None],
    made_for: Schedule,
    makes: Makes,
    tiles: Tensor | None = None,
) -> None:
    """Launch the kernels, which write to the tensors in `made`, by their names."""
    device = x.q.device
    assert tiles is None or tiles.numel() >= tiles_bytes(made_for.chunks * p.HV), "what the forward kept is of another call"
    x, do, dht = as_read(x, do, dht)
    work = torch.empty(_workspace_bytes(p, made_for, tiles is not None, makes), dtype=torch.uint8, device=device)
    _launch_of(p, x, do, dht, made, made_for, makes, tiles, work).now(stream_of(device))


def _launch_of(
    p: KdaProblem,
    x: KdaInputs,
    do: Tensor,
    dht: Tensor | None,
    made: Mapping[str, Tensor | None],
    made_for: Schedule,
    makes: Makes,
    tiles: Tensor | None = None,
    work: Tensor | None = None,
) -> Launch:
    """A call's launch, on tensors that the kernels can read as they are; `made` are those that they write to, by their names."""
    between = () if tiles is None else (Kept,)
    operands = operands_of(x, between, GivenGrads(do, dht), made, _no_gate(x.q.device, p.HV), work)
    operands["tiles"] = Operand(tiles, places(x, *between).get("tiles"))
    operands |= {name: Operand(made.get(name)) for name in WRITTEN if name not in operands}  # which no record makes
    sizes = _sizes_of(p, made_for, tiles is not None, makes)
    numbers = numbers_of(p, x, do, dht) | sizes
    numbers |= {"lower": p.options.lower_bound or 0.0, "has_tiles": int(tiles is not None), "makes": makes}
    return Launch(_abi(p), _kernel(p), operands, numbers, tuple(sizes))


class Kept(NamedTuple):
    """What a forward may have kept for a backward."""

    tiles: Tensor


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


def operands_of(
    x: KdaInputs | GdnInputs,
    between: tuple[Any, ...],
    given: GivenGrads,
    made: Mapping[str, Tensor | None],
    no_gate: tuple[Tensor, Tensor],
    work: Tensor | None,
) -> dict[str, Operand]:
    """What stands at the addresses that all backwards have, by name. A record takes the tensors of x, those `between`, and then
    the given ones; it makes the gradients."""
    of, (no_A, no_bias) = places(x, *between, given), no_gate
    operands = {name: Operand(getattr(x, name), of[name]) for name in TOKENS[:-1]}
    operands |= {"A_log": Operand(x.A_log, of["A_log"], no_A), "dt_bias": Operand(x.dt_bias, of["dt_bias"], no_bias)}
    operands |= {"h0": Operand(x.initial_state, of["initial_state"]), "cu": Operand(x.cu_seqlens, of["cu_seqlens"])}
    operands |= {name: Operand(t, of[name]) for name, t in zip(given._fields, given)}
    names = [MADE.get(name, name) for name in KdaGrads._fields]
    operands |= {name: Operand(made.get(name), ~i) for i, name in enumerate(names)}
    return operands | {"workspace": Operand(work, ~len(names))}


def record_kda_bwd(
    problem: KdaProblem, x: KdaInputs, saved: tuple[Tensor | None, ...], do: Tensor, dht: Tensor | None
) -> LaunchRecord | None:
    """A record of this call's launch, which serves calls of other lengths too; None if some tensors would have to be copied. It
    takes those of x, what was saved, do and dht, and makes the gradients."""
    p, device, given, has_tiles = problem, x.q.device, GivenGrads(do, dht), bool(saved)
    if not is_as_read(x, do, dht):
        return None
    made_for = schedule_on(p, device)
    launch = _launch_of(p, x, do, dht, {}, made_for, Makes.GRADIENTS, saved[0] if saved else None)
    labels = prefill_labels(x, given, TOKENS, p.is_packed)
    labels = (*labels[: len(x)], *((BYTES_OF_TILES,),) * has_tiles, *labels[len(x) :])
    work = workspace(device.index, _workspace_bytes(p, made_for, has_tiles))
    there = parameters_there(x)
    return LaunchRecord(device.index, (launch.recorded(),), forms(p, there), work, sizes=Sizes(labels, _resize(p, there, device)))


def _resize(p: KdaProblem, there: tuple[bool, bool, bool], device: torch.device) -> Callable[..., Resized | None]:
    """What a record needs for other numbers of tokens and sequences, and of bytes that the forward kept; None where other kernels
    serve those."""
    is_packed, num_sms = p.is_packed, sms_of(device)

    def resize(first: int, second: int, kept: int | None = None) -> Resized | None:
        B, T, N = (1, first, second) if is_packed else (first, second, first)
        other = resized(p, B, T, N)
        if not (B * T and N) or are_too_many(other):
            return None
        made = schedule(other, num_sms)
        assert kept is None or kept >= tiles_bytes(made.chunks * p.HV), "what the forward kept is of another call"
        has_tiles = kept is not None
        work = workspace(device.index, _workspace_bytes(other, made, has_tiles))
        return Resized(tuple(_sizes_of(other, made, has_tiles).values()), forms(other, there), work)

    return resize


MADE = {"d_initial_state": "dh0"}  # gradients whose addresses have other names


def parameters_there(x: KdaInputs | GdnInputs) -> tuple[bool, bool, bool]:
    """Whether a call has A_log, dt_bias and first states."""
    return x.A_log is not None, x.dt_bias is not None, x.initial_state is not None


def forms(p: KdaProblem | GdnProblem, there: tuple[bool, bool, bool]) -> tuple[Form | None, ...]:
    """Those of the gradients, in order."""
    has_A, has_bias, has_h0 = there
    of_tokens, of_gate = (p.B, p.T), (K,) if isinstance(p, KdaProblem) and not p.has_scalar_gate else ()
    return (
        _contiguous(*of_tokens, p.H, K, dtype=p.dtype),
        _contiguous(*of_tokens, p.H, K, dtype=p.dtype),
        _contiguous(*of_tokens, p.HV, V, dtype=p.dtype),
        _contiguous(*of_tokens, p.HV, *of_gate, dtype=p.g_dtype),
        _contiguous(*of_tokens, p.HV, dtype=p.beta_dtype),
        _contiguous(p.HV) if has_A else None,
        _contiguous(p.HV, *of_gate) if has_bias else None,
        _contiguous(p.N, p.HV, V, K) if has_h0 else None,
    )


def _contiguous(*shape: int, dtype: torch.dtype = torch.float32) -> Form:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(size * strides[-1])
    return shape, tuple(strides[::-1]), dtype


def variant(problem: KdaProblem) -> str:
    """The name of the kernels."""
    return f"bwd_{forward_variant(problem)}"


def _kernel(p: KdaProblem) -> Any:
    return load(variant(p), target_of(p.sm))


def _abi(p: KdaProblem) -> Abi:
    return of_gates(BACKWARD, p.has_scalar_gate, p.g_dtype.itemsize)


def _workspace_bytes(p: KdaProblem, made_for: Schedule, has_tiles: bool, makes: Makes = Makes.GRADIENTS) -> int:
    sections = WORKSPACE if makes == Makes.GRADIENTS else WITHOUT_GRADIENTS
    return bytes_of(sections, p, made_for, _sizes_of(p, made_for, has_tiles, makes), has_tiles)


def _sizes_of(p: KdaProblem, made_for: Schedule, has_tiles: bool, makes: Makes = Makes.GRADIENTS) -> dict[str, int]:
    """The arguments that follow from the numbers of tokens and sequences, by name."""
    return sizes_of(p, made_for, lends=makes == Makes.GRADIENTS and not has_tiles)


def numbers_of(p: KdaProblem | GdnProblem, x: KdaInputs | GdnInputs, do: Tensor, dht: Tensor | None) -> dict[str, int | float]:
    """The arguments that all backwards have, are not addresses and do not follow from sizes, by name."""
    has_A, has_bias, has_h0 = parameters_there(x)
    return {
        **token_strides(q=x.q, k=x.k, v=x.v, g=x.g, do=do),
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


def sizes_of(p: KdaProblem | GdnProblem, made_for: Schedule, lends: bool) -> dict[str, int]:
    """Those of all backwards. `lends`: T and P may lie where gradients will be."""
    dq, _, dv, dg = [math.prod(form[0]) * form[2].itemsize for form in forms(p, (False, False, False))[:4] if form is not None]
    of_T, of_P = homes(made_for.chunks * p.HV, {Home.DV: dv, Home.DG: dg, Home.DQ: dq} if lends else {})
    return {
        "T": p.B * p.T,
        "N": p.N,
        "length": 0 if p.is_packed else p.T,
        "halvings": (p.N - 1).bit_length(),
        **made_for.numbers(),
        "home_of_T": of_T,
        "home_of_P": of_P,
    }


def bytes_of(
    of: Workspace, p: KdaProblem | GdnProblem, made_for: Schedule, sizes: Mapping[str, int], has_tiles: bool = False
) -> int:
    """Of a workspace, for a call with these `sizes_of` it."""
    shared = p.B * p.T * p.HV if p.H != p.HV else 0
    in_workspace = [sizes[name] == Home.WORKSPACE for name in ("home_of_T", "home_of_P")]
    return of.offsets(**counts(made_for.chunks * p.HV, has_tiles, shared, made_for.transitions * p.HV, in_workspace))["end"]


@functools.cache
def _no_gate(device: torch.device, HV: int) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias where a call has none."""
    return torch.zeros(HV, dtype=torch.float32, device=device), torch.zeros((HV, K), dtype=torch.float32, device=device)
