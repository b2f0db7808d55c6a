# SPDX-License-Identifier: Apache-2.0
"""What a host function is compiled for, made from the description of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass.cute.runtime import make_fake_stream

from cula.ops.cute.abi import ADDRESS, F32, I32, I64, Abi, check_host_function

# One of each type. The compiler sees that it is a number, not which.
FAKES = {ADDRESS: cutlass.Int64(0), I64: cutlass.Int64(8), I32: cutlass.Int32(1), F32: cutlass.Float32(1.0)}


def fake_arguments(abi: Abi, host: Callable[..., Any], *constants: Any) -> tuple[Any, ...]:
    """The arguments that `cute.compile` takes for a host function: a fake of each that is described, a stream, and then the
    constants that the code depends on. TypeError where the host function takes others than the description says."""
    check_host_function(abi, host)
    return (*(FAKES[a.type] for a in abi.args), make_fake_stream(), *constants)
