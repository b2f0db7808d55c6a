# SPDX-License-Identifier: Apache-2.0
"""sm_90a: where chains of transitions begin (`cula/ops/cute/common/kda_chain.py`), of words that a test makes up."""

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from cula.ops.cute.common.kda_chain import begin_of_chain
from cula.ops.cute.toolchain.variants import Variant
from tests.support.kernels.tiles import fake

I32 = cutlass.Int32


@cute.kernel
def begin_kernel(mWords: cute.Tensor, mLengths: cute.Tensor, mBegin: cute.Tensor, has_h0: I32, waits: cutlass.Constexpr):
    """A warp for each chain."""
    chain, _, _ = cute.arch.block_idx()
    words = cute.make_tensor(mWords.iterator, cute.make_layout(cute.size(mWords)))
    mBegin[chain] = begin_of_chain(words, chain, mWords.shape[1], mLengths[chain], has_h0, waits)


@cute.jit
def begin_host(mWords: cute.Tensor, mLengths: cute.Tensor, mBegin: cute.Tensor, has_h0: I32, stream, waits: cutlass.Constexpr):
    """begin [chains] of words [segments, chains], of which the first so many are each chain's"""
    begin_kernel(mWords, mLengths, mBegin, has_h0, waits).launch(grid=(mWords.shape[1], 1, 1), block=(32, 1, 1), stream=stream)


def variants() -> Iterator[Variant]:
    chains = cute.sym_int()
    tensors = fake(I32, cute.sym_int(), chains), fake(I32, chains), fake(I32, chains)
    for name, waits in (("begin_of_chain", False), ("begin_of_chain_waits", True)):
        yield Variant(name, begin_host, (*tensors, I32(1), make_fake_stream(), waits))
