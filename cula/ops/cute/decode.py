# SPDX-License-Identifier: Apache-2.0
"""Decode on the CuTe kernels: what they serve, which kernel, and the launch.

`common/decode_frame.py` says what the kernels compute in which all tokens of a row meet its state at once,
`common/decode_steps.py` what those do that go token by token and keep states, `decode_abi.py` what they are given. The thresholds
below are measured on Hopper; Blackwell takes the same, until somebody measures there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cula.core.checks import dtype_name
from cula.core.problem import DecodeProblem, beta_top
from cula.core.replay.record import LaunchRecord
from cula.core.replay.torch_internals import form_of
from cula.ops.cute.abi import Abi
from cula.ops.cute.archs import target_of
from cula.ops.cute.decode_abi import TALL_TOKENS, TOKEN_TENSORS, TOKENS, Flag, decode_abi, steps_abi
from cula.ops.cute.launch import Launch, Operand, places
from cula.ops.cute.tensors import stream_of
from cula.ops.cute.toolchain.loader import load

SHORT = {torch.bfloat16: "bf16", torch.float32: "f32"}
# Up to this many states, one a row and head, 16 lanes share a row of a float32 state instead of 8. A state then takes four blocks
# instead of two, and there are multiprocessors for them. H200, H = 32, us with 16 / 8 lanes for two, four and eight tokens: N = 1
# 3.13 / 3.55, 3.60 / 3.93, 5.37 / 7.32; N = 2 3.81 / 4.03, 4.52 / 4.63, 7.48 / 7.83; N = 4 4.92 / 5.33, 6.11 / 5.94, 11.8 / 10.3.
WIDE_STATES = 64
# With this many states in bfloat16 a warp has 32 rows of one instead of 16. A state then takes one block, so that its tokens meet
# each other once. With fewer states there are multiprocessors for more blocks; with more, all wait for the memory. H200, H = 32,
# us with 32 / 16 rows for four tokens, during development: N = 2 2.65 / 2.34, N = 3 2.86 / 2.97, N = 8 4.93 / 5.50,
# N = 16 7.70 / 8.84, N = 32 15.6 / 18.2, N = 48 30.0 / 29.8, N = 64 41.3 / 39.4.
TALL_STATES = range(96, 1025)
# A state has so many blocks for one token. With more blocks than the other number they are not all there at once: 20 fit a
# multiprocessor, and there are 132.
STATE_BLOCKS = {torch.bfloat16: 8, torch.float32: 16}
PREFETCH_BLOCKS = 2640

PARAMETERS = ("A_log", "dt_bias")  # in dtypes that a kernel does not read, they are converted to float32 in front of it

Tensors = Mapping[str, Tensor | None]  # by their names in `DECODE`


def is_kda(problem: DecodeProblem) -> bool:
    """Whether a call has gates and betas, as KDA's do; Lightning's have a decay a head."""
    return problem.family != "lightning"


def goes_by_steps(problem: DecodeProblem) -> bool:
    """Whether a call's tokens meet the state one after another: its states are kept after each, or its rows may differ in
    length."""
    p = problem
    return p.is_ragged or p.has_token_indices or p.has_accepted or p.has_intermediate_states


def why_not(op: str, problem: Any) -> str | None:
    """What the kernels do not take, as a sentence; None if they take the call."""
    p = problem
    if p.K != 128 or p.V != 128:
        return f"takes K = V = 128, and this call has K = {p.K}, V = {p.V}"
    if goes_by_steps(p):
        if p.kept_dtype not in (None, p.pool_dtype):
            return "takes intermediate_states in the dtype of the pool"
        if not p.has_aligned_kept:
            return "takes intermediate_states [..., V, K] that are contiguous and begin at multiples of 16 bytes"
    if p.pool_dtype not in SHORT:
        return "takes states in bfloat16 or float32, and this pool is in float16"
    if p.options.state_is_kv:
        return "takes pools [P, HV, V, K], and this one is [P, HV, K, V]"
    for name, dtype in (("g", p.g_dtype), ("beta", p.beta_dtype)):
        if dtype not in (None, torch.bfloat16, torch.float32):
            return f"takes {name} in bfloat16 or float32, and this call has {dtype_name(dtype)}"
    if not p.has_aligned_slots:
        return "reads 16 bytes at a time, and slots of the pool do not begin at multiples of that"
    if p.N >= 2**16 or p.HV >= 2**16:
        return "takes fewer than 2^16 rows and value heads a call"
    return None


def yields_to(op: str, problem: Any) -> tuple[str, str] | None:
    """(Backend, why) of calls that the kernels take, and another backend runs better as far as anybody has measured."""
    p = problem
    if not isinstance(p, DecodeProblem) or p.T > 1 or goes_by_steps(p):
        return None
    if not (p.has_float32_parameters or p.has_scalar_gate):
        return "triton", "leaves one token with A_log or dt_bias in 16 bits to triton, which reads them as they are"
    return None


def variant(problem: DecodeProblem) -> str:
    """The kernel's name."""
    p, of_kda, is_f32, short = problem, is_kda(problem), problem.pool_dtype == torch.float32, SHORT[problem.pool_dtype]
    if goes_by_steps(p) or p.T == 1:
        kind = "_scalar" if p.has_scalar_gate else "" if of_kda else "_lightning"
        return f"decode_{'steps' if goes_by_steps(p) else 1}_{short}{kind}"
    T = next(T for T in TOKENS if T >= p.T) if of_kda or is_f32 else TOKENS[-1]  # Lightning's in bfloat16 is for all
    shape = "_wide" if is_f32 and p.N * p.HV <= WIDE_STATES else ""
    if of_kda and not is_f32 and T in TALL_TOKENS and p.N * p.HV in TALL_STATES:
        shape = "_tall"
    if p.options.batch_invariant:  # one shape for any number of rows
        shape = ""
    return f"decode_{T}_{short}{shape}" + ("" if of_kda else "_lightning")


def decode(problem: DecodeProblem, x: Any) -> Tensor:
    """Outputs `[N, T, HV, V]`, in `x.out` where given; updates `x.state` in place."""
    return run(problem, x, variant(problem))


def run(problem: DecodeProblem, x: Any, name: str) -> Tensor:
    """Launch the kernel of that name; returns o."""
    o = _output(x)
    tensors = _named(problem, x, o)
    for key in _unreadable(problem, tensors):
        t = tensors[key]
        assert t is not None
        dtype = torch.float32 if key in PARAMETERS else t.dtype
        tensors[key] = t.to(dtype, copy=True, memory_format=torch.contiguous_format)
    _launch(problem, x, tensors, name).now(stream_of(o.device))
    if (written := tensors["o"]) is not o and written is not None:
        o.copy_(written)
    return o


def record_decode(problem: DecodeProblem, x: Any, given: Any) -> LaunchRecord | None:
    """A record for calls like this one, or None where some tensors would have to be copied; x are the tensors as normalised,
    `given` as they came, which are at the same addresses. It makes o and names the pool."""
    o = _output(x)
    tensors = _named(problem, x, o)
    if _unreadable(problem, tensors):
        return None
    launch, of = _launch(problem, x, tensors, variant(problem)), places(x)
    outputs = (form_of(o) if x.out is None else of["out"], of["state"])
    return LaunchRecord(o.device.index, (launch.recorded(),), outputs)


def _launch(p: DecodeProblem, x: Any, tensors: Tensors, name: str) -> Launch:
    """The launch of the kernel of that name."""
    of = places(x) | {"o": ~0}
    operands = {key: Operand(t, of.get(key)) for key, t in tensors.items()}
    return Launch(_abi(p), load(name, target_of(p.sm)), operands, _numbers(p, tensors))


def _output(x: Any) -> Tensor:
    return torch.empty(x.v.shape, dtype=x.q.dtype, device=x.q.device) if x.out is None else x.out


def _abi(p: DecodeProblem) -> Abi:
    return steps_abi(p.has_scalar_gate) if goes_by_steps(p) else decode_abi(p.T, p.has_scalar_gate)


def _named(p: DecodeProblem, x: Any, o: Tensor) -> dict[str, Tensor | None]:
    """The tensors of a call by the names of the description; None for what its family does not have."""
    return {name: getattr(x, name, None) for name in _abi(p).alignment} | {"o": o}


def _unreadable(p: DecodeProblem, tensors: Tensors) -> list[str]:
    """Which tensors the kernels cannot read or write as they lie. Others than these will always do."""
    align = _abi(p).alignment
    reads_bias = p.T == 1 and not p.has_scalar_gate and not goes_by_steps(p)
    read_in_vectors = (*TOKEN_TENSORS, "dt_bias") if reads_bias else TOKEN_TENSORS
    given = [(name, tensors[name]) for name in read_in_vectors]
    found = [name for name, t in given if t is not None and not _is_readable(t, align[name])]
    read = (torch.float32, torch.bfloat16) if _reads_16_bits(p) else (torch.float32,)
    in_others = [name for name in PARAMETERS if (t := tensors[name]) is not None and t.dtype not in read]
    return [*dict.fromkeys((*found, *in_others))]


def _reads_16_bits(p: DecodeProblem) -> bool:
    """Whether the kernel reads the gate's parameters in bfloat16 as well: with one gate a head, as engines have them, but for
    several tokens that meet the state at once."""
    return p.has_scalar_gate and (p.T == 1 or goes_by_steps(p))


def _is_readable(t: Tensor, align: int) -> bool:
    """Whether vectors of so many bytes of channels are aligned, and 32 bits hold the offsets in a row.

    t is [N, T, heads, channels], [heads, channels], or [N, T, heads] with one number a head.
    """
    has_channels = t.dim() != 3
    unit = align // t.element_size() if has_channels else 1
    row, *inside = t.stride()
    if has_channels and inside.pop() != 1:
        return False
    is_near = sum(size * stride for size, stride in zip(t.shape[1:], inside)) < 2**31
    return is_near and t.data_ptr() % (unit * t.element_size()) == 0 and all(s % unit == 0 for s in (row, *inside))


def _numbers(p: DecodeProblem, tensors: Tensors) -> dict[str, int | float | bool]:
    """The arguments behind the addresses, by name."""
    numbers: dict[str, int | float | bool] = {}
    for name in TOKEN_TENSORS:
        row, numbers[f"{name}_token"], numbers[f"{name}_head"] = _strides(tensors[name])[:3]
        numbers[f"{name}_row"] = 0 if p.is_ragged else row  # ragged rows lie behind each other in one
    numbers["slot_stride"], numbers["index_stride"] = _strides(tensors["state"])[0], _strides(tensors["state_indices"])[0]
    numbers["A_head"], numbers["decay_head"] = _strides(tensors["A_log"])[0], _strides(tensors["decay"])[0]
    numbers["bias_head"], numbers["bias_channel"] = _strides(tensors["dt_bias"])[:2]
    numbers |= {"scale": p.scale, "lower_bound": p.options.lower_bound or 0.0, "beta_top": beta_top(p.options)}
    numbers |= {"N": p.N, "HV": p.HV, "group": p.HV // p.H, "tokens": p.T, "slots": p.P, "flags": _flags(p, tensors)}
    return numbers | (_draft_numbers(p, tensors) if goes_by_steps(p) else {})


def _draft_numbers(p: DecodeProblem, tensors: Tensors) -> dict[str, int]:
    """The strides that `STEPS` has besides, by name."""
    numbers = dict(zip(("kept_row", "kept_token", "kept_head"), _strides(tensors["intermediate_states"])))
    numbers["token_slot_stride"] = _strides(tensors["state_indices"])[1] if p.has_token_indices else 0
    for key, name in (
        ("accepted", "num_accepted_tokens"),
        ("kept_rows", "intermediate_state_indices"),
        ("offsets", "cu_seqlens"),
    ):
        numbers[f"{key}_stride"] = _strides(tensors[name])[0]
    return numbers


def _flags(p: DecodeProblem, tensors: Tensors) -> int:
    options = p.options
    is_i64 = lambda name: (t := tensors.get(name)) is not None and t.dtype == torch.int64
    return (
        Flag.USE_NORM * options.use_qk_l2norm_in_kernel
        | Flag.IS_SOFTPLUS * (p.gate == "softplus")
        | Flag.IS_BOUNDED * (p.gate == "bounded")
        | Flag.G_IS_F32 * _is_f32(tensors["g"])
        | Flag.BETA_IS_F32 * _is_f32(tensors["beta"])
        | Flag.INDEX_IS_I64 * is_i64("state_indices")
        | Flag.ZERO_IS_NULL * options.null_is_nonpositive
        | Flag.COMMIT * options.commit
        | Flag.IS_SCALAR * p.has_scalar_gate
        | Flag.PREFETCH * (p.N * p.HV * STATE_BLOCKS[p.pool_dtype] > PREFETCH_BLOCKS)
        | Flag.HAS_TOKEN_SLOTS * p.has_token_indices
        | Flag.ACCEPTED_IS_I64 * is_i64("num_accepted_tokens")
        | Flag.KEPT_ROWS_IS_I64 * is_i64("intermediate_state_indices")
        | Flag.OFFSETS_IS_I64 * is_i64("cu_seqlens")
        | Flag.A_IS_F32 * _is_f32(tensors["A_log"])
        | Flag.BIAS_IS_F32 * _is_f32(tensors["dt_bias"])
    )


def _strides(t: Tensor | None) -> tuple[int, ...]:
    """The strides of a tensor, at least three: 0 stands for those that it does not have."""
    return (*(() if t is None else t.stride()), 0, 0, 0)


def _is_f32(t: Tensor | None) -> bool:
    return t is not None and t.dtype == torch.float32
