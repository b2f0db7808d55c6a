# SPDX-License-Identifier: Apache-2.0
"""sm_90a: the order in which heads of packed sequences are taken (`cula/ops/cute/common/gdn_items.py`)."""

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from cula.ops.cute.common.gdn_items import Items, longest_first
from cula.ops.cute.toolchain.variants import Variant
from tests.support.kernels.tiles import fake

I32 = cutlass.Int32


@cute.kernel
def order_kernel(mCu: cute.Tensor, mOrder: cute.Tensor, HV: I32, length: I32):
    """A warp for each item."""
    nth, _, _ = cute.arch.block_idx()
    items = Items(HV=HV, group=1, length=length, total=cute.size(mOrder), mCu=mCu, pieces=1)
    item = longest_first(items, nth)
    if cute.arch.lane_idx() == 0:
        mOrder[nth] = item


@cute.jit
def order_host(mCu: cute.Tensor, mOrder: cute.Tensor, HV: I32, length: I32, stream):
    """order [N HV] of sequences whose offsets are cu [N + 1], or of one length"""
    order_kernel(mCu, mOrder, HV, length).launch(grid=(cute.size(mOrder), 1, 1), block=(32, 1, 1), stream=stream)


def variants() -> Iterator[Variant]:
    tensors = fake(I32, cute.sym_int()), fake(I32, cute.sym_int())
    yield Variant("longest_first", order_host, (*tensors, I32(1), I32(1), make_fake_stream()))
