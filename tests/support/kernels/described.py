# SPDX-License-Identifier: Apache-2.0
"""sm_90a: o = scale x + shift y of numbers, by host functions that are made from descriptions of their arguments."""

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute

from cula.ops.cute.common.arguments import variant_of, vector_of
from cula.ops.cute.common.tiles import F32
from cula.ops.cute.toolchain.variants import Variant
from tests.support.abi import ORDERS


@cute.kernel
def sum_kernel(mX: cute.Tensor, mY: cute.Tensor, mO: cute.Tensor, scale: F32, shift: F32):
    i, _, _ = cute.arch.thread_idx()
    if i < cute.size(mO):
        mO[i] = scale * mX[i] + shift * mY[i]


@cute.jit
def sum_host(x: cutlass.Constexpr, stream, asks_for: cutlass.Constexpr):
    of_x, of_y, o = [vector_of(F32, address, x.n) for address in (x.x, x.y, x.o)]
    sum_kernel(of_x, of_y, o, x.scale, getattr(x, asks_for)).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def variants() -> Iterator[Variant]:
    for order, abi in ORDERS.items():
        yield variant_of(f"sum_{order}", abi, sum_host, "shift")
    yield variant_of("sum_of_more", ORDERS["as_read"], sum_host, "not_described")
