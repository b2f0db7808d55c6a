# SPDX-License-Identifier: Apache-2.0
"""Decode on the CuTe kernels: which kernel, how many rows a block, and the launch.

`sm90/decode.py` says what the kernels compute.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from cula.contract import DecodeInputs, DecodeProblem
from cula.ops import Plan
from cula.ops.cute.loader import load
from cula.ops.cute.tensors import stream_of

ARCH = "sm_90a"
TOKENS = (1, 2, 4, 8)  # that kernels are compiled for
SHORT = {torch.bfloat16: "bf16", torch.float32: "f32"}
# Bits of the kernel's flags, in the order of sm90/decode.py.
IS_KDA, USE_NORM, IS_SOFTPLUS, IS_BOUNDED, G_IS_F32, BETA_IS_F32, INDEX_IS_I64, ZERO_IS_NULL, COMMIT, IS_SCALAR = (
    1 << i for i in range(10)
)
TOKEN_BYTES = 8  # q, k, v and o are read and written so many at a time
POOL_BYTES = 16


def variant(problem: DecodeProblem) -> str:
    """The kernel's name."""
    T = next(T for T in TOKENS if T >= problem.T)
    return f"decode_{T}_{SHORT[problem.pool_dtype]}"


def num_warps(problem: DecodeProblem, num_sms: int) -> int:
    """Of a block, with 16 rows of a state each: few where there would not be blocks enough."""
    if problem.T > 4:
        return 4
    return 2 if problem.N * problem.HV < num_sms else 4


@functools.lru_cache(maxsize=1024)
def _num_warps_on(problem: DecodeProblem, device: torch.device) -> int:
    return num_warps(problem, torch.cuda.get_device_properties(device).multi_processor_count)


def decode(problem: DecodeProblem, x: DecodeInputs) -> Tensor:
    """Outputs `[N, T, HV, V]`, in `x.out` where given; updates `x.state` in place."""
    return run(problem, x, _num_warps_on(problem, x.q.device))


def run(problem: DecodeProblem, x: DecodeInputs, warps: int) -> Tensor:
    """Launch with a given number of warps; returns o."""
    p, device = problem, x.q.device
    o = torch.empty((p.N, p.T, p.HV, p.V), dtype=x.q.dtype, device=device) if x.out is None else x.out
    to = o if _is_aligned(o) else torch.empty(o.shape, dtype=o.dtype, device=device)
    q, k, v, g, beta = (
        t if t is None or _is_aligned(t) else t.clone(memory_format=torch.contiguous_format)
        for t in (x.q, x.k, x.v, x.g, x.beta)
    )
    x = x._replace(q=q, k=k, v=v, g=g, beta=beta)
    addresses = [address(t) for t in (*x[:10], to)]  # in the order of `DecodeInputs`, which is the kernel's
    load(variant(p), ARCH)(*addresses, *_numbers(p, x, to), warps, stream_of(device))
    if to is not o:
        o.copy_(to)
    return o


def decode_again(problem: DecodeProblem, x: DecodeInputs, given: DecodeInputs) -> Plan | None:
    """A plan for calls like this one, or None where it has none; x are the tensors as normalised, `given` as they came.

    The plan takes tensors as they come, which do for the kernel where normalising copied nothing: their addresses are
    the same, and so the strides that x has.
    """
    if any(a is not None and b is not None and a.data_ptr() != b.data_ptr() for a, b in zip(given, x)):
        return None
    p, device = problem, x.q.device
    makes_dense = given.v.is_contiguous()  # then an output like v is dense, as the strides say
    o = torch.empty((p.N, p.T, p.HV, p.V), dtype=x.q.dtype, device=device) if x.out is None else x.out
    if not all(t is None or _is_aligned(t) for t in (x.q, x.k, x.v, x.g, x.beta, o)):
        return None
    kernel, numbers = load(variant(p), ARCH), (*_numbers(p, x, o), _num_warps_on(p, device))
    current_device, current_stream = torch.accelerator.current_device_index, torch._C._cuda_getCurrentRawStream
    index = torch.cuda.current_device() if device.index is None else device.index
    del o

    def again(call: Sequence[Tensor | None]) -> Tensor | None:
        if current_device() != index:
            return None
        values, out = call[2], call[12]
        assert values is not None
        if out is None and makes_dense:
            out = torch.empty_like(values)
        elif out is None:
            out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        addresses = [0 if t is None else t.data_ptr() for t in call[:10]]
        addresses.append(out.data_ptr())
        q, k, v, pool, *_, o = addresses
        if (q | k | v | o) % TOKEN_BYTES or pool % POOL_BYTES:
            return None
        kernel(*addresses, *numbers, current_stream(index))
        return out

    return again


def _is_aligned(t: Tensor) -> bool:
    """Whether four numbers can be read or written at a time, and places in a row counted with 32 bits."""
    unit = 4 if t.dim() == 4 else 1
    row, *inside = t.stride()
    if t.dim() == 4:
        inside.pop()
    is_near = sum(size * stride for size, stride in zip(t.shape[1:], inside)) < 2**31
    return is_near and t.data_ptr() % (unit * t.element_size()) == 0 and all(s % unit == 0 for s in (row, *inside))


def address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _numbers(p: DecodeProblem, x: DecodeInputs, o: Tensor) -> tuple[int | float, ...]:
    """The other arguments but the number of warps, in the order of `sm90/decode.py`."""
    options = p.options
    tokens = (x.q, x.k, x.v, o, x.g, x.beta)
    beta_top = 0.0
    if options.use_beta_sigmoid_in_kernel:
        beta_top = 2.0 if options.allow_neg_eigval else 1.0
    flags = (
        IS_KDA * options.is_kda
        | USE_NORM * options.use_qk_l2norm_in_kernel
        | IS_SOFTPLUS * (p.gate == "softplus")
        | IS_BOUNDED * (p.gate == "bounded")
        | G_IS_F32 * _is_f32(x.g)
        | BETA_IS_F32 * _is_f32(x.beta)
        | INDEX_IS_I64 * (x.state_indices is not None and x.state_indices.dtype == torch.int64)
        | ZERO_IS_NULL * options.null_is_nonpositive
        | COMMIT * options.commit
        | IS_SCALAR * p.has_scalar_gate
    )
    return (
        *(_strides(t)[0] for t in tokens),
        x.state.stride(0),
        _strides(x.state_indices)[0],
        *(stride for t in tokens for stride in _strides(t)[1:3]),
        _strides(x.A_log)[0],
        *_strides(x.dt_bias)[:2],
        _strides(x.decay)[0],
        p.scale,
        options.lower_bound or 0.0,
        beta_top,
        p.N,
        p.HV,
        p.HV // p.H,
        p.T,
        flags,
    )


def _strides(t: Tensor | None) -> tuple[int, ...]:
    """At least three, 0 where there is none."""
    return (*(() if t is None else t.stride()), 0, 0, 0)


def _is_f32(t: Tensor | None) -> bool:
    return t is not None and t.dtype == torch.float32
