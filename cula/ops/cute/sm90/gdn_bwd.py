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

bf16 q, k, v, do with K = V = 128; q and k are normalised in the kernel, so that fp16 holds all operands. `gdn_bwd_abi.py`
describes the arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute import gdn_bwd_abi, kda_abi
from cula.ops.cute.common.arguments import fake_arguments
from cula.ops.cute.common.kda import operands
from cula.ops.cute.common.kda_intra import IntraScalars
from cula.ops.cute.common.kda_variant import KdaVariant
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, at_address, by_head, tile_layout, tma_load
from cula.ops.cute.gdn_bwd_abi import SHARES
from cula.ops.cute.kda_abi import SQUARE_BYTES, STATE, VEC
from cula.ops.cute.kda_bwd_abi import FACTORS, Makes
from cula.ops.cute.toolchain.variants import Variant

from .gdn_bwd_chunk import THREADS, ChunkMemory, ChunkScalars, ChunkTma, chunk_kernel, chunk_mmas
from .gdn_bwd_shares import THREADS as SHARES_THREADS
from .gdn_bwd_shares import Sums, shares_kernel
from .kda_bwd import (
    Counts,
    Gradients,
    alignment_of,
    end_states,
    launch_intra,
    launch_transitions,
    launch_walks,
    sections,
    transitions_at,
)
from .kda_bwd_segments import WalkSizes


class Work(NamedTuple):
    """The workspace between the kernels. A record is a chunk's of one value head."""

    tiles: Any  # [192 records, 128]: kb, qg, kr
    T: Any  # [128 records, 32], by quarters, transposed
    P: Any  # the same
    vec: Any  # [chunks, HV, VEC]
    all_vecs: Any  # the same as [records, VEC]
    done: Any  # [1]
    M: Any  # [segments HV, 128, 128]
    all_m: Any  # the same as [128 segments HV, 128]
    ends: Any  # [3, segments HV, 128, 128]
    S: Any  # [128 records, 128]
    U: Any  # [64 records, 128]
    dS: Any
    dX: Any
    factors: Any  # [records, FACTORS]
    shares: Any  # [chunks, HV, SHARES]


def work_at(at: dict[str, Any], chunks: Any, transitions: Any, HV: Any) -> Work:
    """The tensors of the workspace, where its sections lie."""
    records = chunks * HV

    def part(name: str, t: Any, layout: Any) -> Any:
        return cute.make_tensor(at_address(t, at[name], alignment_of(name)), layout)

    def rows(name: str, t: Any, count: int, columns: int) -> Any:
        return part(name, t, cute.make_layout((records * count, columns), stride=(columns, 1)))

    squares = {name: rows(name, F16, SQUARE_BYTES // 64, 32) for name in ("T", "P")}
    states = {name: rows(name, F16, STATE // 128, 128) for name in ("S", "dS")}
    tokens = {name: rows(name, F16, 64, 128) for name in ("U", "dX")}
    return Work(
        tiles=rows("tiles", F16, 192, 128),
        vec=part("vec", F32, cute.make_layout((chunks, HV, VEC), stride=(HV * VEC, VEC, 1))),
        all_vecs=rows("vec", F32, 1, VEC),
        done=part("done", I32, cute.make_layout(1)),
        factors=rows("factors", F32, 1, FACTORS),
        shares=part("shares", F32, cute.make_layout((chunks, HV, SHARES), stride=(HV * SHARES, SHARES, 1))),
        **transitions_at(part, transitions),
        **squares,
        **states,
        **tokens,
    )


def chunk_memory(work: Work, x: Any, made: Gradients, T: Any, H: Any, HV: Any, g_type: Any) -> ChunkMemory:
    """What threads of the last kernel read and write."""
    align = gdn_bwd_abi.BACKWARD.alignment

    def of_heads(name: str, address: Any, heads: Any) -> Any:
        layout = cute.make_layout((T, 128, heads), stride=(cute.assume(Int64(heads) * 128, divby=128), 1, 128))
        return cute.make_tensor(at_address(BF16, address, align[name]), layout)

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
        mShares=work.shares,
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
def backward_host(
    q: Int64,
    k: Int64,
    v: Int64,
    g: Int64,
    beta: Int64,
    A_log: Int64,
    dt_bias: Int64,
    do: Int64,
    h0: Int64,
    dht: Int64,
    cu: Int64,
    dq: Int64,
    dk: Int64,
    dv: Int64,
    dg: Int64,
    dbeta: Int64,
    dA_log: Int64,
    ddt_bias: Int64,
    dh0: Int64,
    workspace: Int64,
    q_token: Int64,
    q_head: Int64,
    k_token: Int64,
    k_head: Int64,
    v_token: Int64,
    v_head: Int64,
    g_token: Int64,
    g_head: Int64,
    do_token: Int64,
    do_head: Int64,
    beta_token: Int64,
    T: I32,
    N: I32,
    H: I32,
    HV: I32,
    scale: F32,
    beta_top: F32,
    beta_bits: I32,
    has_h0: I32,
    has_dht: I32,
    has_dh0: I32,
    has_A: I32,
    has_bias: I32,
    length: I32,
    halvings: I32,
    chunks: I32,
    segments: I32,
    per_segment: I32,
    has_transitions: I32,
    home_of_T: I32,
    home_of_P: I32,
    stream,
    variant: cutlass.Constexpr,
):
    """The arguments of `gdn_bwd_abi.BACKWARD`."""
    x = operands(
        kda_abi.SPLIT,
        (q, k, v, g, beta, A_log, dt_bias, do, cu),
        ((q_token, q_head), (k_token, k_head), (v_token, v_head), (g_token, g_head), (do_token, do_head), beta_token),
        (T, N, H, HV),
        variant,
    )
    made, group, transitions = Gradients(dq, dk, dv, dg, dbeta), HV // H, segments * HV * has_transitions
    counts = Counts(records=Int64(chunks * HV), has_tiles=0, shared=0, transitions=Int64(transitions))
    at = sections(gdn_bwd_abi.WORKSPACE, workspace, counts, (home_of_T, home_of_P), made)
    work = work_at(at, chunks, transitions, HV)
    spans, rows = chunks // N if length > 0 else chunks, N if length > 0 else I32(1)
    of_intra = IntraScalars(scale, F32(0.0), beta_top, beta_bits)
    launch_intra(work, x, of_intra, length, halvings, group, (HV, spans, rows), stream, variant)
    ends = end_states((h0, dht, dh0, dh0, dh0), N, HV)  # nobody asks for transitions of whole sequences here
    of_block = WalkSizes(
        has_h0, has_dht, has_dh0, length, HV, halvings, per_segment, has_transitions, I32(Makes.GRADIENTS)
    )  # fmt: skip
    if has_transitions == 1:
        launch_transitions(work, x, ends, of_block, N, segments, stream)
    launch_walks(work, x, ends, of_block, segments, stream, True)
    memory = chunk_memory(work, x, made, T, H, HV, variant.g_type)
    scalars = ChunkScalars(scale, beta_top, beta_bits, length, halvings, group)
    launch_chunks(work, x, memory, scalars, (H, spans, rows), stream, variant)
    if cutlass.const_expr(variant.is_raw):
        align = gdn_bwd_abi.BACKWARD.alignment
        places = (("dA_log", dA_log), ("ddt_bias", ddt_bias))
        mDa, mDbias = [cute.make_tensor(at_address(F32, at, align[name]), cute.make_layout(HV)) for name, at in places]
        shares_kernel(Sums(work.shares, mDa, mDbias, has_A, has_bias)).launch(
            grid=(HV, 1, 1), block=(SHARES_THREADS, 1, 1), stream=stream, use_pdl=True
        )


def variants() -> Iterator[Variant]:
    uses = ("wgmma", "tma_load", "tma_store", "mma", "ldmatrix")
    for gate, (short, g_type) in itertools.product(("softplus", "log"), (("f32", F32), ("bf16", BF16))):
        arguments = fake_arguments(gdn_bwd_abi.BACKWARD, backward_host, KdaVariant(F16, g_type, gate, is_scalar=True))
        yield Variant(f"bwd_gdn_{gate}_{short}", backward_host, arguments, uses=uses)
