# SPDX-License-Identifier: Apache-2.0
"""The KDA backward on Hopper: one host function, three launches, and a short one.

| kernel                             | a block for each               | makes                                              |
|------------------------------------|--------------------------------|----------------------------------------------------|
| `common/kda_intra.py`, unchanged   | chunk, value head              | what the recurrences multiply with                 |
| `kda_bwd_recurrence.py`            | direction, segment, value head | S, U; dS, dX, dh0                                  |
| `kda_bwd_chunk.py`                 | chunk, value head              | all other gradients, those of A_log, dt_bias in shares |
| `kda_bwd_shares.py`                | value head; rows of dq and dk  | sums over chunks, and over value heads that share keys |

Where the forward has kept what the first makes, the second comes first. Where sequences are cut into segments that may not warm
up (`kda_bwd_segments.py`), two launches come before the second: the same recurrences without results, and `kda_bwd_scan.py`. They
and the first kernel also make transitions, and gradients of first states alone, of whole sequences (`Makes`), which context
parallelism asks for.

bf16 q, k, v, do with K = V = 128; q and k are normalised, in the kernel or before, so that fp16 holds all operands.
`kda_bwd_abi.py` describes the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute import kda_abi, kda_bwd_abi
from cula.ops.cute.abi import TMA_BYTES, Workspace
from cula.ops.cute.common.arguments import variant_of
from cula.ops.cute.common.kda import grid_of_chunks, operands
from cula.ops.cute.common.kda_intra import THREADS as INTRA_THREADS
from cula.ops.cute.common.kda_intra import IntraResults, IntraScalars, IntraTma, intra_kernel
from cula.ops.cute.common.kda_intra_steps import intra_mmas
from cula.ops.cute.common.kda_variant import KdaVariant, backward_variants
from cula.ops.cute.common.tiles import BF16, F16, F32, I32, at_address, by_head, tile_layout, tma_load, tma_store
from cula.ops.cute.kda_abi import SQUARE_BYTES, STATE, VEC
from cula.ops.cute.kda_bwd_abi import FACTORS, PARTS, SHARES, Home, Makes
from cula.ops.cute.sm90.arch import HOPPER
from cula.ops.cute.toolchain.variants import Variant

from .kda_bwd_chunk import THREADS as CHUNK_THREADS
from .kda_bwd_chunk import ChunkMemory, ChunkScalars, ChunkTma, chunk_kernel, wgmma_pair
from .kda_bwd_chunk_steps import chunk_mmas
from .kda_bwd_recurrence import THREADS as WALK_THREADS
from .kda_bwd_recurrence import WalkMemory, WalkTma, walks_kernel
from .kda_bwd_scan import PLACES, ScanMemory, scan_kernel, scan_mmas
from .kda_bwd_scan import THREADS as SCAN_THREADS
from .kda_bwd_segments import Of, WalkSizes
from .kda_bwd_shares import GateSums, KeySums, launch_shares
from .kda_recurrence_steps import STAGES, recurrence_mmas


class Work(NamedTuple):
    """The workspace up to what the recurrences leave, for KDA and Gated DeltaNet. A record is a chunk's of one value head."""

    tiles: Any  # [192 records, 128]: kb, qg, kr
    T: Any  # [128 records, 32], by quarters, transposed; in a `Home`
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


class Shares(NamedTuple):
    """The rest of KDA's, which the kernel of chunks leaves."""

    of_gates: Any  # [chunks, HV, 2, 128]
    parts: Any  # [records, PARTS, 64]
    dq: Any  # [T, 128, HV], float32
    dk: Any


def rows_by_head(T: Any, heads: Any) -> Any:
    """The layout of a contiguous [T, heads, 128] as [T, 128, heads]."""
    return cute.make_layout((T, 128, heads), stride=(cute.assume(Int64(heads) * 128, divby=128), 1, 128))


class Gradients(NamedTuple):
    """Addresses of what the last kernel writes."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dbeta: Any


def gradients_of(x: Any) -> Gradients:
    """Those of a call's arguments."""
    return Gradients(*(getattr(x, name) for name in Gradients._fields))


@cute.jit
def at_home(home: I32, there: Int64, dq: Int64, dv: Int64, dg: Int64):
    """The address of T or P; `there`, where it is in the workspace."""
    at = there
    if home == Home.DV:
        at = dv
    if home == Home.DG:
        at = dg
    if home == Home.DQ:
        at = dq
    return at


@cute.jit
def either(is_first: I32, first: Int64, second: Int64):
    return first if is_first == 1 else second


class Counts(NamedTuple):
    """Of what a workspace has sections, as `kda_bwd_abi.counts` takes it."""

    records: Any
    has_tiles: Any
    shared: Any
    transitions: Any


def sections(of: Workspace, workspace: Any, counts: Counts, homes: tuple[Any, Any], made: Gradients) -> dict[str, Any]:
    """The addresses of what the kernels hand on, by name, where no tiles were kept."""
    in_workspace = [Int64(home == Home.WORKSPACE) for home in homes]
    offsets = of.laid_out(kda_bwd_abi.counts(*counts, in_workspace), cutlass.max)
    at = {name: workspace + offset for name, offset in offsets.items()}
    return at | {name: at_home(home, at[name], made.dq, made.dv, made.dg) for name, home in zip("TP", homes)}


def alignment_of(name: str) -> int:
    """Of a section, in bytes. Gradients are aligned as TMA needs it."""
    return TMA_BYTES if name in ("T", "P") else kda_bwd_abi.BACKWARD.alignment["workspace"]


def section_at(at: dict[str, Any], name: str, t: Any, layout: Any) -> Any:
    """A section of the workspace as a tensor, where it lies."""
    return cute.make_tensor(at_address(t, at[name], alignment_of(name)), layout)


def work_at(at: dict[str, Any], chunks: Any, transitions: Any, HV: Any) -> Work:
    """The tensors of the workspace, where its sections lie."""
    records, of_kind = chunks * HV, cute.assume(Int64(transitions) * STATE, divby=STATE)
    part = functools.partial(section_at, at)

    def rows(name: str, t: Any, count: int, columns: int) -> Any:
        return part(name, t, cute.make_layout((records * count, columns), stride=(columns, 1)))

    return Work(
        tiles=rows("tiles", F16, 192, 128),
        T=rows("T", F16, SQUARE_BYTES // 64, 32),
        P=rows("P", F16, SQUARE_BYTES // 64, 32),
        vec=part("vec", F32, cute.make_layout((chunks, HV, VEC), stride=(HV * VEC, VEC, 1))),
        all_vecs=rows("vec", F32, 1, VEC),
        done=part("done", I32, cute.make_layout(1)),
        M=part("M", F16, cute.make_layout((transitions, 128, 128), stride=(STATE, 128, 1))),
        all_m=part("M", F16, cute.make_layout((transitions * 128, 128), stride=(128, 1))),
        ends=part("ends", F32, cute.make_layout((3, transitions, 128, 128), stride=(of_kind, STATE, 128, 1))),
        S=rows("S", F16, STATE // 128, 128),
        U=rows("U", F16, 64, 128),
        dS=rows("dS", F16, STATE // 128, 128),
        dX=rows("dX", F16, 64, 128),
        factors=rows("factors", F32, 1, FACTORS),
    )


def shares_at(at: dict[str, Any], chunks: Any, T: Any, HV: Any) -> Shares:
    part = functools.partial(section_at, at)
    return Shares(
        of_gates=part("shares", F32, cute.make_layout((chunks, HV, 2, 128), stride=(HV * SHARES, SHARES, 128, 1))),
        parts=part("parts", F32, cute.make_layout((chunks * HV, PARTS, 64), stride=(PARTS * 64, 64, 1))),
        dq=part("dq", F32, rows_by_head(T, HV)),
        dk=part("dk", F32, rows_by_head(T, HV)),
    )


class EndStates(NamedTuple):
    """States at the ends of sequences, [N, HV, 128, 128]."""

    h0: Any
    dht: Any
    dh0: Any
    M: Any
    B: Any


def end_states(addresses: Any, N: Any, HV: Any) -> EndStates:
    of_sequence = cute.assume(Int64(HV) * STATE, divby=STATE)
    states = cute.make_layout((N, HV, 128, 128), stride=(of_sequence, STATE, 128, 1))
    return EndStates(*[cute.make_tensor(at_address(F32, at, 16), states) for at in addresses])


@cute.jit
def launch_walks(
    work: cutlass.Constexpr,
    x: cutlass.Constexpr,
    ends: cutlass.Constexpr,
    of_block: cutlass.Constexpr,
    segments: I32,
    stream,
    keeps: cutlass.Constexpr,
):
    """Both recurrences over all segments; or what segments do to a state, B, D and M of each."""
    lw, lv = tile_layout(64, 128, STAGES, F16), tile_layout(64, 128, STAGES)
    lq, state, tokens = tile_layout(32, 32, 4 * STAGES, F16), tile_layout(64, 128, 2, F16), tile_layout(64, 64, 2, F16)
    tma = WalkTma(
        tiles=tma_load(work.tiles, lw, (64, 128)),
        T=tma_load(work.T, lq, (32, 32)),
        P=tma_load(work.P, lq, (32, 32)),
        vec=tma_load(work.all_vecs, cute.make_layout((1, VEC)), (1, VEC)),
        v=tma_load(by_head(x.v), lv, (64, 128)),
        do=tma_load(by_head(x.o), lv, (64, 128)),
        S=tma_store(work.S, state, (64, 128)),
        dS=tma_store(work.dS, state, (64, 128)),
        U=tma_store(work.U, tokens, (64, 64)),
        dX=tma_store(work.dX, tokens, (64, 64)),
    )
    memory = WalkMemory(ends.h0, ends.dht, ends.dh0, work.ends, work.M, work.vec, work.factors, x.cu)
    walks_kernel(tma, memory, of_block, recurrence_mmas(F16), lw, lv, keeps).launch(
        grid=((2 if cutlass.const_expr(keeps) else len(Of)) * of_block.HV, segments, 1),
        block=(WALK_THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


@cute.jit
def launch_transitions(
    work: cutlass.Constexpr,
    x: cutlass.Constexpr,
    ends: cutlass.Constexpr,
    of_block: cutlass.Constexpr,
    N: I32,
    segments: I32,
    stream,
):
    """What segments do to a state, and from that the states at their boundaries or what whole sequences do to one."""
    launch_walks(work, x, ends, of_block, segments, stream, False)
    lm = tile_layout(128, 128, PLACES, F16)
    memory = ScanMemory(work.ends, work.vec, x.cu, ends.B, ends.dh0, ends.M)
    scan_kernel(tma_load(work.all_m, lm, (128, 128)), memory, of_block, scan_mmas(), lm).launch(
        grid=(len(Of) * of_block.HV, 2, N), block=(SCAN_THREADS, 1, 1), stream=stream, use_pdl=True
    )


@cute.jit
def launch_intra(
    work: cutlass.Constexpr,
    x: cutlass.Constexpr,
    scalars: cutlass.Constexpr,
    length: I32,
    halvings: I32,
    group: I32,
    grid: cutlass.Constexpr,
    stream,
    variant: cutlass.Constexpr,
):
    """The intra-chunk kernel of the forward."""
    lt = tile_layout(64, 128)
    tma = IntraTma(
        q=tma_load(by_head(x.q), lt, (64, 128)),
        k=tma_load(by_head(x.k), lt, (64, 128)),
        g=tma_load(by_head(x.gate), lt, (64, 128)),
        tiles=tma_store(work.tiles, tile_layout(64, 128, dtype=F16), (64, 128)),
    )
    intra_kernel(
        tma,
        x.gates,
        IntraResults(work.T, work.P, work.vec, work.done),
        x.cu,
        scalars,
        length,
        halvings,
        group,
        intra_mmas(),
        lt,
        variant,
        False,
    ).launch(
        grid=grid,
        block=(INTRA_THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=HOPPER.kda.intra_blocks,
        preferred_smem_carveout=100,
        use_pdl=True,
    )


def gates_by_head(x: Any, variant: KdaVariant) -> Any:
    """Gates as [T, 128, HV]; one a head is that of all its channels."""
    if not variant.is_scalar:
        return by_head(x.gate if variant.has_gate_tile else x.gates.mGate)
    (T, HV), (of_token, of_head) = x.gates.mGate.shape, x.gates.mGate.stride
    return cute.make_tensor(x.gates.mGate.iterator, cute.make_layout((T, 128, HV), stride=(of_token, 0, of_head)))


def chunk_memory(
    work: Work, shares: Shares, x: Any, made: Gradients, T: Any, H: Any, HV: Any, variant: KdaVariant
) -> ChunkMemory:
    """What threads of the last kernel read and write."""
    align, g_type = kda_bwd_abi.BACKWARD.alignment, variant.g_type

    def of_heads(name: str, t: Any, address: Any, heads: Any) -> Any:
        return cute.make_tensor(at_address(t, address, align[name]), rows_by_head(T, heads))

    by_token = cute.make_layout((T, HV), stride=(HV, 1))
    mDg = of_heads("dg", g_type, made.dg, HV)
    if cutlass.const_expr(variant.is_scalar):
        mDg = cute.make_tensor(at_address(g_type, made.dg, g_type.width // 8), cute.make_layout((T, 128, HV), stride=(HV, 0, 1)))
    return ChunkMemory(
        mVec=work.vec,
        mFactors=work.factors,
        mCu=x.cu,
        mA=x.gates.mA,
        mBias=x.gates.mBias,
        mQ=by_head(x.q),
        mK=by_head(x.k),
        mV=by_head(x.v),
        mGate=gates_by_head(x, variant),
        mDq=of_heads("dq", BF16, made.dq, H),
        mDk=of_heads("dk", BF16, made.dk, H),
        mShareQ=shares.dq,
        mShareK=shares.dk,
        mDv=of_heads("dv", BF16, made.dv, HV),
        mDg=mDg,
        mDbeta=cute.make_tensor(at_address(F32, made.dbeta, 4), by_token),
        mDbeta16=cute.make_tensor(at_address(BF16, made.dbeta, align["dbeta"]), by_token),
        mShares=shares.of_gates,
        mParts=shares.parts,
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
    k = tma_load(by_head(x.k), lt, (64, 128))
    tma = ChunkTma(
        q=tma_load(by_head(x.q), lt, (64, 128)),
        k=k,
        g=tma_load(by_head(x.gate), lt, (64, 128)) if cutlass.const_expr(variant.has_gate_tile) else k,
        do=tma_load(by_head(x.o), lt, (64, 128)),
        S=tma_load(work.S, state, (128, 128)),
        dS=tma_load(work.dS, state, (128, 128)),
        U=tma_load(work.U, tokens, (64, 128)),
        dX=tma_load(work.dX, tokens, (64, 128)),
    )
    chunk_kernel(tma, memory, scalars, wgmma_pair(), chunk_mmas(), intra_mmas(), variant).launch(
        grid=grid,
        block=(CHUNK_THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=2,
        preferred_smem_carveout=100,
        use_pdl=True,
    )


def walk_sizes(x: Any, makes: Any) -> WalkSizes:
    """The numbers that recurrences go by, of a call's arguments."""
    return WalkSizes(
        x.has_h0, x.has_dht, x.has_dh0, x.length, x.HV, x.halvings, x.per_segment, x.has_transitions, makes
    )  # fmt: skip


@cute.jit
def backward_host(x: cutlass.Constexpr, stream, variant: cutlass.Constexpr):
    """The arguments of `kda_bwd_abi.BACKWARD`."""
    of = operands(kda_bwd_abi.BACKWARD, x, variant, "do")
    shared = Int64(x.T) * Int64(x.HV) if x.HV != x.H else Int64(0)
    made, records, transitions = gradients_of(x), Int64(x.chunks * x.HV), x.segments * x.HV * x.has_transitions
    counts = Counts(records, x.has_tiles, shared, Int64(transitions))
    at = sections(kda_bwd_abi.WORKSPACE, x.workspace, counts, (x.home_of_T, x.home_of_P), made)
    kept = kda_abi.TILES.offsets(records=records)
    at = at | {s.name: either(x.has_tiles, x.tiles + kept[s.name], at[s.name]) for s in kda_abi.TILES.sections}
    work, shares = work_at(at, x.chunks, transitions, x.HV), shares_at(at, x.chunks, x.T, x.HV)
    grid = grid_of_chunks(x)
    scalars = IntraScalars(x.scale, x.lower, x.beta_top, x.beta_bits)
    if x.has_tiles == 0:
        launch_intra(work, of, scalars, x.length, x.halvings, x.HV // x.H, grid, stream, variant)
    ends, sizes = end_states((x.h0, x.dht, x.dh0, x.M, x.B), x.N, x.HV), walk_sizes(x, x.makes)
    if x.has_transitions == 1:
        launch_transitions(work, of, ends, sizes, x.N, x.segments, stream)
    if x.makes == Makes.GRADIENTS:
        launch_walks(work, of, ends, sizes, x.segments, stream, True)
        memory = chunk_memory(work, shares, of, made, x.T, x.H, x.HV, variant)
        of_chunks = ChunkScalars(x.scale, x.lower, x.beta_top, x.beta_bits, x.length, x.halvings, x.HV // x.H)
        launch_chunks(work, of, memory, of_chunks, grid, stream, variant)
        align = kda_bwd_abi.BACKWARD.alignment
        mDa = cute.make_tensor(at_address(F32, x.dA_log, align["dA_log"]), cute.make_layout(x.HV))
        of_bias = cute.make_layout((x.HV, 128), stride=(1, 0) if variant.is_scalar else (128, 1))
        mDbias = cute.make_tensor(at_address(F32, x.ddt_bias, align["ddt_bias"]), of_bias)
        keys = KeySums(shares.dq, shares.dk, memory.mDq, memory.mDk)
        launch_shares(GateSums(shares.of_gates, mDa, mDbias, x.has_A, x.has_bias), keys, x.T, x.H, x.HV, stream, variant)


def variants() -> Iterator[Variant]:
    uses = ("wgmma", "tma_load", "tma_store", "mma", "ldmatrix")
    for variant in backward_variants():
        yield variant_of(f"bwd_{variant.name}", kda_bwd_abi.BACKWARD, backward_host, variant, uses=uses)
