# SPDX-License-Identifier: Apache-2.0
"""Host functions that the DSL compiles, made from the description of their arguments.

A module's own host function lays out tensors and launches. It takes all arguments as one tuple, by the names that an `Abi` gives
them, so that their order is said in the description and nowhere else:

    @cute.jit
    def toy_host(x: cutlass.Constexpr, stream, variant: cutlass.Constexpr):
        toy_kernel(tokens_of(x, "q", x.H), x.scale).launch(grid=(x.HV, 1, 1), stream=stream, ...)

    def variants():
        yield variant_of("toy", TOY, toy_host, variant)

`Constexpr` says that a parameter is a Python object while this is traced; what the tuple holds are numbers of the call.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from cula.ops.cute.abi import ADDRESS, F32, I32, I64, Abi
from cula.ops.cute.common.tiles import BF16, at_address, of_tokens
from cula.ops.cute.toolchain.variants import Variant

# One of each type. The compiler sees that it is a number, not which.
FAKES = {ADDRESS: cutlass.Int64(0), I64: cutlass.Int64(8), I32: cutlass.Int32(1), F32: cutlass.Float32(1.0)}


def variant_of(
    name: str, abi: Abi, host: Callable[..., None], *constants: Any, uses: tuple[str, ...] = (), options: str = ""
) -> Variant:
    """A function to compile, which takes the arguments that are described and a stream. `host` gets the arguments by their names,
    the stream, and the constants that the code depends on."""
    Arguments = namedtuple("Arguments", [a.name for a in abi.args])  # type: ignore[misc]

    def whole(*given: Any) -> None:
        host(Arguments(*given[:-1]), given[-1], *constants)

    whole.__name__ = name
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in (*Arguments._fields, "stream")]
    whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # whose names are in the DSL's errors
    fakes = (*(FAKES[a.type] for a in abi.args), make_fake_stream())
    return Variant(name, cute.jit(preprocess=False)(whole), fakes, uses=uses, options=options)


def tokens_of(x: Any, name: str, heads: Any, channels: int = 128, align: int = 16) -> Any:
    """An argument as a tensor [T, heads, channels] in bf16: its address, and its strides `<name>_token` and `<name>_head`."""
    strides = getattr(x, f"{name}_token"), getattr(x, f"{name}_head")
    return of_tokens(at_address(BF16, getattr(x, name), align), x.T, heads, channels, strides)


def vector_of(dtype: Any, address: Any, n: Any, align: int = 4) -> Any:
    """A tensor [n]."""
    return cute.make_tensor(at_address(dtype, address, align), cute.make_layout((n,), stride=(1,)))
