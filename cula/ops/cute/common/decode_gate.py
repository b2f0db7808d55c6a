# SPDX-License-Identifier: Apache-2.0
"""Decode: decays, write strengths and norms. `gate.py` has the formulas; a call says at run time, in its flags, which it uses."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.decode_memory import select
from cula.ops.cute.common.gate import bounded_gate, exp2, inverse_norm, log_gate, sigmoid, softplus_gate, to_log2
from cula.ops.cute.common.tiles import F32, I32
from cula.ops.cute.decode_abi import Flag


@cute.jit
def decays(x: cute.Tensor, A: F32, lower: F32, flags: I32):
    """x <- e^g, where g is the gate that the flags name. x has its bias."""
    a = exp2(to_log2(A))
    if (flags & Flag.IS_BOUNDED) != 0:
        bounded_gate(x, a, lower)
    else:
        if (flags & Flag.IS_SOFTPLUS) != 0:
            softplus_gate(x, a)
        else:
            log_gate(x)
    for t in cutlass.range_constexpr(cute.size(x)):
        x[t] = exp2(x[t])
    return x


def gate_parameters(call: Any, A: Any, bias: Any) -> tuple[Any, Any]:
    """A_log and the bias as they were loaded; 0 where the call has none."""
    return select(call.has(call.A), A, F32(0.0)), select(call.has(call.bias), bias, F32(0.0))


def write_strength(beta: Any, beta_top: Any) -> Any:
    """b of a token, activated."""
    return select(beta_top > F32(0.0), beta_top * sigmoid(beta), beta)


def norm_factor(square: Any, flags: Any) -> Any:
    """1 / |x| of a vector with that sum of squares where a call has its q and k normalised, otherwise 1."""
    return select((flags & Flag.USE_NORM) != 0, inverse_norm(square), F32(1.0))
