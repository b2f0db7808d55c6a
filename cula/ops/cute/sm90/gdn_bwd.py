# SPDX-License-Identifier: Apache-2.0
"""The backward of Gated DeltaNet on Hopper: one host function, three launches, and a short one.

| kernel                             | a block for each                | makes                                                  |
|------------------------------------|---------------------------------|--------------------------------------------------------|
| `common/kda_intra.py`, as for KDA  | chunk, value head               | what the recurrences multiply with                     |
| `kda_bwd_recurrence.py`, likewise  | direction, segment, value head  | S, U; dS, dX, dh0                                      |
| `gdn_bwd_chunk.py`                 | chunk, key head                 | all other gradients, those of A_log, dt_bias in shares |
| `gdn_bwd_shares.py`                | value head                      | sums over chunks, where gates are raw                  |

KDA's kernels know one gate a head, for which they make what they make for one a channel. Where heads are few, sequences are cut
into segments as KDA's are, and two more launches may come before the second (`kda_bwd.py`).

bf16 q, k, v, do with K = V = 128; q and k are normalised, in the kernel or before, so that fp16 holds all operands.
`gdn_bwd_abi.py` describes the arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute import gdn_bwd_abi
from cula.ops.cute.common.arguments import variant_of
from cula.ops.cute.common.kda import grid_of_chunks, operands
from cula.ops.cute.common.kda_intra import IntraScalars
from cula.ops.cute.common.kda_variant import KdaVariant
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, at_address, by_head, tile_layout, tma_load
from cula.ops.cute.gdn_bwd_abi import SHARES
from cula.ops.cute.kda_bwd_abi import Makes
from cula.ops.cute.toolchain.variants import Variant

from .gdn_bwd_chunk import THREADS, ChunkMemory, ChunkScalars, ChunkTma, chunk_kernel, chunk_mmas
from .gdn_bwd_shares import THREADS as SHARES_THREADS
from .gdn_bwd_shares import Sums, shares_kernel
from .kda_bwd import (
    Counts,
    Gradients,
    Work,
    end_states,
    gradients_of,
    launch_intra,
    launch_transitions,
    launch_walks,
    rows_by_head,
    section_at,
    sections,
    walk_sizes,
    work_at,
)


def shares_at(at: dict[str, Any], chunks: Any, HV: Any) -> Any:
    """What chunks leave of the gradients of dt_bias and A_log, [chunks, HV, SHARES]."""
    return section_at(at, "shares", F32, cute.make_layout((chunks, HV, SHARES), stride=(HV * SHARES, SHARES, 1)))


def chunk_memory(work: Work, shares: Any, x: Any, made: Gradients, T: Any, H: Any, HV: Any, g_type: Any) -> ChunkMemory:
    """What threads of the last kernel read and write."""
    align = gdn_bwd_abi.BACKWARD.alignment

    def of_heads(name: str, address: Any, heads: Any) -> Any:
        return cute.make_tensor(at_address(BF16, address, align[name]), rows_by_head(T, heads))

    by_token = cute.make_layout((T, HV), stride=(Int64(HV), 1))
    return ChunkMemory(
        mVec=work.vec,
        mFactors=work.factors,
        mCu=x.cu,
        mGate=x.gates.mGate,
        mA=x.gates.mA,
        mBias=x.gates.mBias,
        mV=by_head(x.v),
        mDq=of_heads("dq", made.dq, H),
        mDk=of_heads("dk", made.dk, H),
        mDv=of_heads("dv", made.dv, HV),
        mDg=cute.make_tensor(at_address(g_type, made.dg, g_type.width // 8), by_token),
        mDbeta=cute.make_tensor(at_address(F32, made.dbeta, 4), by_token),
        mDbeta16=cute.make_tensor(at_address(BF16, made.dbeta, align["dbeta"]), by_token),
        mShares=shares,
    )


@cute.jit
def launch_chunks(
    work: cutlass.Constexpr,
    x: cutlass.Constexpr,
    memory: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    grid: cutlass.Constexpr,
    stream,
    variant: cutlass.Constexpr,
):
    """All that is inside of chunks."""
    lt, state, tokens = tile_layout(64, 128), tile_layout(128, 128, dtype=F16), tile_layout(64, 128, dtype=F16)
    tma = ChunkTma(
        q=tma_load(by_head(x.q), lt, (64, 128)),
        k=tma_load(by_head(x.k), lt, (64, 128)),
        do=tma_load(by_head(x.o), lt, (64, 128)),
        S=tma_load(work.S, state, (128, 128)),
        dS=tma_load(work.dS, state, (128, 128)),
        U=tma_load(work.U, tokens, (64, 128)),
        dX=tma_load(work.dX, tokens, (64, 128)),
    )
    chunk_kernel(tma, memory, scalars, chunk_mmas(), variant).launch(
        grid=grid, block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
    )


@cute.jit
def backward_host(x: cutlass.Constexpr, stream, variant: cutlass.Constexpr):
    """The arguments of `gdn_bwd_abi.BACKWARD`."""
    of = operands(gdn_bwd_abi.BACKWARD, x, variant, "do")
    made, group, transitions = gradients_of(x), x.HV // x.H, x.segments * x.HV * x.has_transitions
    counts = Counts(records=Int64(x.chunks * x.HV), has_tiles=0, shared=0, transitions=Int64(transitions))
    at = sections(gdn_bwd_abi.WORKSPACE, x.workspace, counts, (x.home_of_T, x.home_of_P), made)
    work, grid = work_at(at, x.chunks, transitions, x.HV), grid_of_chunks(x)
    shares = shares_at(at, x.chunks, x.HV)
    of_intra = IntraScalars(x.scale, F32(0.0), x.beta_top, x.beta_bits)
    launch_intra(work, of, of_intra, x.length, x.halvings, group, grid, stream, variant)
    ends = end_states((x.h0, x.dht, x.dh0, x.dh0, x.dh0), x.N, x.HV)  # nobody asks for transitions of whole sequences here
    sizes = walk_sizes(x, I32(Makes.GRADIENTS))
    if x.has_transitions == 1:
        launch_transitions(work, of, ends, sizes, x.N, x.segments, stream)
    launch_walks(work, of, ends, sizes, x.segments, stream, True)
    memory = chunk_memory(work, shares, of, made, x.T, x.H, x.HV, variant.g_type)
    scalars = ChunkScalars(x.scale, x.beta_top, x.beta_bits, x.length, x.halvings, group)
    launch_chunks(work, of, memory, scalars, (x.H, *grid[1:]), stream, variant)
    if cutlass.const_expr(variant.is_raw):
        align = gdn_bwd_abi.BACKWARD.alignment
        places = (("dA_log", x.dA_log), ("ddt_bias", x.ddt_bias))
        mDa, mDbias = [cute.make_tensor(at_address(F32, at, align[name]), cute.make_layout(x.HV)) for name, at in places]
        shares_kernel(Sums(shares, mDa, mDbias, x.has_A, x.has_bias)).launch(
            grid=(x.HV, 1, 1), block=(SHARES_THREADS, 1, 1), stream=stream, use_pdl=True
        )


def variants() -> Iterator[Variant]:
    uses = ("wgmma", "tma_load", "tma_store", "mma", "ldmatrix")
    kinds = (("softplus", False), ("log", False), ("log", True))
    for (gate, is_plain), (short, g_type) in itertools.product(kinds, (("f32", F32), ("bf16", BF16))):
        variant, name = KdaVariant(F16, g_type, gate, is_scalar=True, is_plain=is_plain), f"bwd_gdn_{gate}_{short}"
        yield variant_of(f"{name}_plain" if is_plain else name, gdn_bwd_abi.BACKWARD, backward_host, variant, uses=uses)
