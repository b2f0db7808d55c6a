# SPDX-License-Identifier: Apache-2.0
"""The split KDA forward of every architecture: one host function that lays out the workspace, launches the intra-chunk kernel and
hands over to the architecture's own launch of the recurrence.

bf16 q, k, v, o with K = V = 128. `kda_abi.py` describes the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute import kda_abi
from cula.ops.cute.abi import Abi
from cula.ops.cute.arch import Arch
from cula.ops.cute.common.arguments import tokens_of, variant_of
from cula.ops.cute.common.kda_intra import (
    THREADS,
    GateInputs,
    IntraResults,
    IntraScalars,
    IntraTma,
)
from cula.ops.cute.common.kda_intra_steps import intra_mmas
from cula.ops.cute.common.kda_variant import KdaVariant, split_variants
from cula.ops.cute.common.states import KeptStates, States, kept_states_of, states_of
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    at_address,
    by_head,
    of_tokens,
    tile_layout,
    tma_load,
    tma_store,
)
from cula.ops.cute.kda_abi import SQUARE_BYTES, STATE, VEC, WORKSPACE
from cula.ops.cute.toolchain.variants import Variant


class Work(NamedTuple):
    """The workspace between the kernels. A record is a chunk's of one head, a transition a segment's."""

    tiles: Any  # [192 records, 128]: kb, qg, kr
    T: Any  # [64 records, 64], transposed; or by quarters, [128 records, 32]
    P: Any  # the same
    vec: Any  # [chunks, HV, VEC]
    all_vecs: Any  # the same as [records, VEC]
    done: Any  # [segments HV]: how many of a transition's B and M there are, and M's norm
    B: Any  # [segments HV, 128, 128]
    M: Any  # [2 segments HV, 128, 128]: hi, lo
    all_m: Any  # the same as [256 segments HV, 128]


class Tokens(NamedTuple):
    """What the recurrence reads and writes besides."""

    v: Any  # [T, HV, 128]
    o: Any
    states: States
    kept: KeptStates
    cu: Any  # [N + 1]


class Sizes(NamedTuple):
    """Numbers that the recurrence goes by."""

    per_segment: Any
    per_chained_segment: Any
    length: Any
    halvings: Any
    segments: Any
    has_transitions: Any
    helpers: Any
    longest: Any  # None where there is no fused kernel


class Target(NamedTuple):
    """What an architecture does its own way."""

    intra_kernel: Any  # that of `kda_intra.py`, or one with its arguments
    launch_recurrence: Any  # (Work, Tokens, Sizes, dtype, stream)
    arch: Arch


class Operands(NamedTuple):
    """The tensors of a call."""

    q: Any  # [T, H, 128]
    k: Any
    v: Any  # [T, HV, 128]
    o: Any
    gate: Any  # [T, HV, 128]; k where TMA does not read it
    gates: GateInputs
    cu: Any  # [N + 1]


def operands(abi: Abi, x: Any, variant: KdaVariant, output: str = "o") -> Operands:
    """Tensors of a call's arguments, as `abi` aligns them; `output` is o, or its gradient."""
    align = kda_abi.of_gates(abi, variant.is_scalar, variant.g_type.width // 8).alignment
    at_g, of_g = at_address(variant.g_type, x.g, align["g"]), (x.g_token, x.g_head)
    by_token = cute.make_layout((x.T, x.HV), stride=(x.beta_token, 1))
    of_bias = cute.make_layout((x.HV, 128), stride=(1, 0) if variant.is_scalar else (128, 1))
    has_channels = not (variant.is_scalar or variant.has_gate_tile)
    of_channels, of_heads = (x.T, x.HV, 128), (x.T, x.HV)
    of_gates = cute.make_layout(of_channels, stride=(*of_g, 1)) if has_channels else cute.make_layout(of_heads, stride=of_g)
    gates = GateInputs(
        mGate=cute.make_tensor(at_g, of_gates),
        mBeta=cute.make_tensor(at_address(F32, x.beta, 4), by_token),
        mBeta16=cute.make_tensor(at_address(BF16, x.beta, align["beta"]), by_token),
        mA=cute.make_tensor(at_address(F32, x.A_log, align["A_log"]), cute.make_layout(x.HV)),
        mBias=cute.make_tensor(at_address(F32, x.dt_bias, align["dt_bias"]), of_bias),
    )
    mK = tokens_of(x, "k", x.H, align=align["k"])
    return Operands(
        q=tokens_of(x, "q", x.H, align=align["q"]),
        k=mK,
        v=tokens_of(x, "v", x.HV, align=align["v"]),
        o=tokens_of(x, output, x.HV, align=align[output]),
        gate=of_tokens(at_g, x.T, x.HV, 128, of_g) if variant.has_gate_tile else mK,
        gates=gates,
        cu=cute.make_tensor(at_address(I32, x.cu, align["cu"]), cute.make_layout(x.N + 1)),
    )


def work_at(workspace: Any, chunks: Any, segments: Any, HV: Any, dtype: Any, has_whole_squares: bool) -> Work:
    """The tensors of the workspace."""
    records, transitions = chunks * HV, segments * HV
    records64, transitions64 = Int64(records), Int64(transitions)
    offsets = WORKSPACE.offsets(records=records64, segments=transitions64, transitions=transitions64)

    def part(name: str, t: Any, layout: Any) -> Any:
        return cute.make_tensor(at_address(t, workspace + offsets[name], kda_abi.SPLIT.alignment["workspace"]), layout)

    columns = 64 if has_whole_squares else 32
    square = cute.make_layout((records * (SQUARE_BYTES // 2) // columns, columns), stride=(columns, 1))
    state = (STATE, 128, 1)
    return Work(
        tiles=part("tiles", dtype, cute.make_layout((records * 192, 128), stride=(128, 1))),
        T=part("T", dtype, square),
        P=part("P", dtype, square),
        vec=part("vec", F32, cute.make_layout((chunks, HV, VEC), stride=(HV * VEC, VEC, 1))),
        all_vecs=part("vec", F32, cute.make_layout((records, VEC), stride=(VEC, 1))),
        done=part("done", I32, cute.make_layout(transitions)),
        B=part("B", F32, cute.make_layout((transitions, 128, 128), stride=state)),
        M=part("M", dtype, cute.make_layout((2 * transitions, 128, 128), stride=state)),
        all_m=part("M", dtype, cute.make_layout((2 * transitions * 128, 128), stride=(128, 1))),
    )


@cute.jit
def split_host(x: cutlass.Constexpr, stream, variant: cutlass.Constexpr, target: cutlass.Constexpr):
    """The arguments of `kda_abi.SPLIT`; launches the intra-chunk kernel and then the recurrence."""
    dtype, traits = variant.dtype, target.arch.kda
    longest = x.longest if traits.has_fused and dtype is F16 else None  # the fused kernel's, or this one's whatever there is
    of = operands(kda_abi.SPLIT, x, variant)
    work = work_at(x.workspace, x.chunks, x.segments, x.HV, dtype, traits.has_whole_squares)
    lt = tile_layout(64, 128)
    tma = IntraTma(
        q=tma_load(by_head(of.q), lt, (64, 128)),
        k=tma_load(by_head(of.k), lt, (64, 128)),
        g=tma_load(by_head(of.gate), lt, (64, 128)),
        tiles=tma_store(work.tiles, tile_layout(64, 128, dtype=dtype), (64, 128)),
    )
    target.intra_kernel(
        tma,
        of.gates,
        IntraResults(work.T, work.P, work.vec, work.done),
        of.cu,
        IntraScalars(x.scale, x.lower, x.beta_top, x.beta_bits, longest),
        x.length,
        x.halvings,
        x.HV // x.H,
        intra_mmas(),
        lt,
        variant,
        traits.has_whole_squares,
    ).launch(
        grid=grid_of_chunks(x),
        block=(THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=traits.intra_blocks if cutlass.const_expr(dtype is F16) else 2,
        preferred_smem_carveout=100,
        use_pdl=True,
    )
    sizes = Sizes(
        x.per_segment, x.per_chained_segment, x.length, x.halvings, x.segments, x.has_transitions, x.helpers, longest
    )  # fmt: skip
    target.launch_recurrence(work, Tokens(of.v, of.o, states_of(x), kept_states_of(x), of.cu), sizes, dtype, stream)


@cute.jit
def grid_of_chunks(x: cutlass.Constexpr):
    """Of blocks with a chunk of a value head each: chunks of a sequence and sequences, where all have one length."""
    return x.HV, x.chunks // x.N if x.length > 0 else x.chunks, x.N if x.length > 0 else I32(1)


def variants_for(arch: Arch, intra_kernel: Any, launch_recurrence: Any, uses: tuple[str, ...]) -> Iterator[Variant]:
    """What is compiled for an architecture, whose code must hold these instructions."""
    target = Target(intra_kernel, launch_recurrence, arch)
    for variant in split_variants():
        yield variant_of(variant.name, kda_abi.SPLIT, split_host, variant, target, uses=uses)
