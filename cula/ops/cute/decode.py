# SPDX-License-Identifier: Apache-2.0
"""Decode on the CuTe kernels, one token a row on states in bfloat16 or several: which kernel, and the launch.

`sm90/decode.py` says what the kernels compute.
"""

from __future__ import annotations

from typing import Any as DecodeInputs

import torch
from torch import Tensor

from cula.core.problem import DecodeProblem
from cula.core.replay.record import Address, LaunchRecord
from cula.core.replay.torch_internals import form_of
from cula.ops.cute.common.decode_flags import (
    ASK_EARLY,
    BETA_IS_F32,
    COMMIT,
    G_IS_F32,
    INDEX_IS_I64,
    IS_BOUNDED,
    IS_SCALAR,
    IS_SOFTPLUS,
    TALL_TOKENS,
    TOKENS,
    USE_NORM,
    ZERO_IS_NULL,
)
from cula.ops.cute.launch import again as launch_again
from cula.ops.cute.tensors import address, stream_of
from cula.ops.cute.toolchain.loader import load

ARCH = "sm_90a"
SHORT = {torch.bfloat16: "bf16", torch.float32: "f32"}
WIDE_BYTES = 16  # q, k, gates a channel and states are read so many at a time
TOKEN_BYTES = 8  # v and o are read and written so many at a time
# States, one a row and head, up to which 16 lanes share a row of a float32 state instead of 8: a state then takes four blocks
# instead of two, for which there are multiprocessors. H200, H = 32, us with 16 / 8 lanes for two, four and eight tokens: N = 1
# 3.13 / 3.55, 3.60 / 3.93, 5.37 / 7.32; N = 2 3.81 / 4.03, 4.52 / 4.63, 7.48 / 7.83; N = 4 4.92 / 5.33, 6.11 / 5.94, 11.8 / 10.3.
WIDE_STATES = 64
# States in bfloat16 from which on, and up to which, a warp has 32 rows of one instead of 16: a state then takes one block, which
# prepares for it once. With fewer states there are multiprocessors for more blocks; with more, all wait for the memory. H200,
# H = 32, us with 32 / 16 rows for four tokens, during development: N = 2 2.65 / 2.34, N = 3 2.86 / 2.97, N = 8 4.93 / 5.50,
# N = 16 7.70 / 8.84, N = 32 15.6 / 18.2, N = 48 30.0 / 29.8, N = 64 41.3 / 39.4.
TALL_STATES = range(96, 1025)
# States in bfloat16 above which the blocks for one token, 8 for each, are not all there at once, 20 on 132 multiprocessors each.
EARLY_STATES = 330


def variant(problem: DecodeProblem) -> str:
    """The kernel's name."""
    p, is_kda, is_f32 = problem, problem.options.is_kda, problem.pool_dtype == torch.float32
    T = p.T
    if T > 1:  # Lightning's in bfloat16 is for all
        T = next(T for T in TOKENS if T >= p.T) if is_kda or is_f32 else TOKENS[-1]
    shape = "_wide" if is_f32 and p.N * p.HV <= WIDE_STATES else ""
    if is_kda and not is_f32 and T in TALL_TOKENS and p.N * p.HV in TALL_STATES:
        shape = "_tall"
    return f"decode_{T}_{SHORT[p.pool_dtype]}{shape}" + ("" if is_kda else "_lightning")


def decode(problem: DecodeProblem, x: DecodeInputs) -> Tensor:
    """Outputs `[N, T, HV, V]`, in `x.out` where given; updates `x.state` in place."""
    return run(problem, x, variant(problem))


def run(problem: DecodeProblem, x: DecodeInputs, name: str) -> Tensor:
    """Launch a kernel of that name; returns o."""
    p, device = problem, x.q.device
    o = torch.empty((p.N, p.T, p.HV, p.V), dtype=x.q.dtype, device=device) if x.out is None else x.out
    to = o if _is_aligned(o) else torch.empty(o.shape, dtype=o.dtype, device=device)
    x = x._replace(
        q=_aligned(x.q, WIDE_BYTES),
        k=_aligned(x.k, WIDE_BYTES),
        v=_aligned(x.v),
        g=None if x.g is None else _aligned(x.g, WIDE_BYTES),
        beta=None if x.beta is None else _aligned(x.beta),
        dt_bias=_aligned(x.dt_bias) if p.T == 1 and x.dt_bias is not None else x.dt_bias,  # read one at a time by the others
    )
    addresses = [address(t) for t in (*x[:10], to)]  # in the order of `DecodeInputs`, which is the kernel's
    load(name, ARCH)(*addresses, *_numbers(p, x, to), stream_of(device))
    if to is not o:
        o.copy_(to)
    return o


def decode_again(problem: DecodeProblem, x: DecodeInputs, given: DecodeInputs) -> LaunchRecord | None:
    """A recipe for calls like this one, or None where it has none; x are the tensors as normalised, `given` as they came, which
    are at the same addresses. It makes o and names the pool."""
    p, device = problem, x.q.device
    o = torch.empty((p.N, p.T, p.HV, p.V), dtype=x.q.dtype, device=device) if x.out is None else x.out
    wide, by_four = (x.q, x.k, x.g), (x.v, x.beta, o, x.dt_bias if p.T == 1 else None)
    if not all(t is None or _is_aligned(t, WIDE_BYTES) for t in wide) or not all(t is None or _is_aligned(t) for t in by_four):
        return None
    bytes_of = {
        "dt_bias": WIDE_BYTES if p.T == 1 else 1,
        "q": WIDE_BYTES,
        "k": WIDE_BYTES,
        "v": TOKEN_BYTES,
        "state": WIDE_BYTES,
        "g": 1 if x.g is None or x.g.dim() == 3 else WIDE_BYTES,  # one a head is read one at a time
    }
    of = [*(Address(i, bytes_of.get(name, 1)) for i, name in enumerate(x._fields[:10])), Address(~0, TOKEN_BYTES)]
    launch = launch_again(load(variant(p), ARCH), of, _numbers(p, x, o))
    fields = x._fields
    return LaunchRecord(device.index, (launch,), (form_of(o) if x.out is None else fields.index("out"), fields.index("state")))


def _aligned(t: Tensor, size: int | None = None) -> Tensor:
    """t, or a copy that is aligned."""
    return t if _is_aligned(t, size) else t.clone(memory_format=torch.contiguous_format)


def _is_aligned(t: Tensor, size: int | None = None) -> bool:
    """Whether so many bytes of channels, four channels if not given, can be read or written at a time, and places in a row
    counted with 32 bits.

    t is [N, T, heads, channels], [heads, channels], or [N, T, heads] with one number a head.
    """
    unit = 1 if t.dim() == 3 else 4 if size is None else size // t.element_size()
    row, *inside = t.stride()
    if t.dim() != 3 and inside.pop() != 1:
        return False
    is_near = sum(size * stride for size, stride in zip(t.shape[1:], inside)) < 2**31
    return is_near and t.data_ptr() % (unit * t.element_size()) == 0 and all(s % unit == 0 for s in (row, *inside))


def _numbers(p: DecodeProblem, x: DecodeInputs, o: Tensor) -> tuple[int | float, ...]:
    """The other arguments, in the order of `sm90/decode.py`."""
    options = p.options
    tokens = (x.q, x.k, x.v, o, x.g, x.beta)
    beta_top = 0.0
    if options.use_beta_sigmoid_in_kernel:
        beta_top = 2.0 if options.allow_neg_eigval else 1.0
    flags = (
        USE_NORM * options.use_qk_l2norm_in_kernel
        | IS_SOFTPLUS * (p.gate == "softplus")
        | IS_BOUNDED * (p.gate == "bounded")
        | G_IS_F32 * _is_f32(x.g)
        | BETA_IS_F32 * _is_f32(x.beta)
        | INDEX_IS_I64 * (x.state_indices is not None and x.state_indices.dtype == torch.int64)
        | ZERO_IS_NULL * options.null_is_nonpositive
        | COMMIT * options.commit
        | IS_SCALAR * p.has_scalar_gate
        | ASK_EARLY * (p.N * p.HV > EARLY_STATES)
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
        x.state.shape[0],
        flags,
    )


def _strides(t: Tensor | None) -> tuple[int, ...]:
    """At least three, 0 where there is none."""
    return (*(() if t is None else t.stride()), 0, 0, 0)


def _is_f32(t: Tensor | None) -> bool:
    return t is not None and t.dtype == torch.float32
