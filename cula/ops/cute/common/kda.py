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
from cula.ops.cute.common.arguments import fake_arguments
from cula.ops.cute.common.kda_intra import (
    THREADS,
    GateInputs,
    IntraResults,
    IntraScalars,
    IntraTma,
)
from cula.ops.cute.common.kda_intra_steps import intra_mmas
from cula.ops.cute.common.kda_variant import KdaVariant, split_variants
from cula.ops.cute.common.states import KeptStates, States
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


def operands(abi: Abi, addresses: Any, strides: Any, sizes: Any, variant: KdaVariant) -> Operands:
    """Tensors from addresses and strides, as `abi` aligns them."""
    q, k, v, g, beta, A_log, dt_bias, o, cu = addresses
    of_q, of_k, of_v, of_g, of_o, beta_token = strides
    T, N, H, HV = sizes
    align = kda_abi.of_gates(abi, variant.is_scalar, variant.g_type.width // 8).alignment
    mQ, mK, mV, mO = [
        of_tokens(at_address(BF16, at, align[name]), T, heads, 128, of)
        for name, at, heads, of in (("q", q, H, of_q), ("k", k, H, of_k), ("v", v, HV, of_v), ("o", o, HV, of_o))
    ]
    at_g = at_address(variant.g_type, g, align["g"])
    by_token = cute.make_layout((T, HV), stride=(beta_token, 1))
    of_bias = cute.make_layout((HV, 128), stride=(1, 0) if variant.is_scalar else (128, 1))
    has_channels = not (variant.is_scalar or variant.has_gate_tile)
    of_gates = cute.make_layout((T, HV, 128), stride=(*of_g, 1)) if has_channels else cute.make_layout((T, HV), stride=of_g)
    gates = GateInputs(
        mGate=cute.make_tensor(at_g, of_gates),
        mBeta=cute.make_tensor(at_address(F32, beta, 4), by_token),
        mBeta16=cute.make_tensor(at_address(BF16, beta, align["beta"]), by_token),
        mA=cute.make_tensor(at_address(F32, A_log, align["A_log"]), cute.make_layout(HV)),
        mBias=cute.make_tensor(at_address(F32, dt_bias, align["dt_bias"]), of_bias),
    )
    return Operands(
        q=mQ,
        k=mK,
        v=mV,
        o=mO,
        gate=of_tokens(at_g, T, HV, 128, of_g) if variant.has_gate_tile else mK,
        gates=gates,
        cu=cute.make_tensor(at_address(I32, cu, align["cu"]), cute.make_layout(N + 1)),
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
def split_host(
    q: Int64,
    k: Int64,
    v: Int64,
    g: Int64,
    beta: Int64,
    A_log: Int64,
    dt_bias: Int64,
    o: Int64,
    h0: Int64,
    ht: Int64,
    cu: Int64,
    read_from: Int64,
    write_to: Int64,
    has_state: Int64,
    kept: Int64,
    kept_offsets: Int64,
    workspace: Int64,
    q_token: Int64,
    q_head: Int64,
    k_token: Int64,
    k_head: Int64,
    v_token: Int64,
    v_head: Int64,
    g_token: Int64,
    g_head: Int64,
    o_token: Int64,
    o_head: Int64,
    beta_token: Int64,
    state_step: Int64,
    index_step: Int64,
    mask_step: Int64,
    kept_step: Int64,
    state_kind: I32,
    index_bits: I32,
    first_slot: I32,
    num_slots: I32,
    kept_kind: I32,
    kept_mode: I32,
    kept_every: I32,
    kept_rows: I32,
    T: I32,
    N: I32,
    H: I32,
    HV: I32,
    scale: F32,
    lower: F32,
    beta_top: F32,
    beta_bits: I32,
    has_h0: I32,
    has_ht: I32,
    length: I32,
    halvings: I32,
    chunks: I32,
    segments: I32,
    per_segment: I32,
    per_chained_segment: I32,
    has_transitions: I32,
    helpers: I32,
    longest: I32,
    stream,
    variant: cutlass.Constexpr,
    target: cutlass.Constexpr,
):
    """The arguments of `kda_abi.SPLIT`; launches the intra-chunk kernel and then the recurrence."""
    dtype, traits = variant.dtype, target.arch.kda
    longest = longest if traits.has_fused and dtype is F16 else None  # the fused kernel's, or this one's whatever there is
    x = operands(
        kda_abi.SPLIT,
        (q, k, v, g, beta, A_log, dt_bias, o, cu),
        ((q_token, q_head), (k_token, k_head), (v_token, v_head), (g_token, g_head), (o_token, o_head), beta_token),
        (T, N, H, HV),
        variant,
    )
    work = work_at(workspace, chunks, segments, HV, dtype, traits.has_whole_squares)
    lt = tile_layout(64, 128)
    tma = IntraTma(
        q=tma_load(by_head(x.q), lt, (64, 128)),
        k=tma_load(by_head(x.k), lt, (64, 128)),
        g=tma_load(by_head(x.gate), lt, (64, 128)),
        tiles=tma_store(work.tiles, tile_layout(64, 128, dtype=dtype), (64, 128)),
    )
    target.intra_kernel(
        tma,
        x.gates,
        IntraResults(work.T, work.P, work.vec, work.done),
        x.cu,
        IntraScalars(scale, lower, beta_top, beta_bits, longest),
        length,
        halvings,
        HV // H,
        intra_mmas(),
        lt,
        variant,
        traits.has_whole_squares,
    ).launch(
        grid=(HV, chunks // N if length > 0 else chunks, N if length > 0 else I32(1)),
        block=(THREADS, 1, 1),
        stream=stream,
        min_blocks_per_mp=traits.intra_blocks if cutlass.const_expr(dtype is F16) else 2,
        preferred_smem_carveout=100,
        use_pdl=True,
    )

    states = States(
        h0, ht, state_step, state_kind, has_h0, has_ht, read_from, write_to, has_state, index_step, mask_step, index_bits,
        first_slot, num_slots,
    )  # fmt: skip
    kept_states = KeptStates(kept, kept_offsets, kept_step, kept_kind, kept_mode, kept_every, kept_rows)
    target.launch_recurrence(
        work,
        Tokens(x.v, x.o, states, kept_states, x.cu),
        Sizes(per_segment, per_chained_segment, length, halvings, segments, has_transitions, helpers, longest),
        dtype,
        stream,
    )


def variants_for(arch: Arch, intra_kernel: Any, launch_recurrence: Any, uses: tuple[str, ...]) -> Iterator[Variant]:
    """What is compiled for an architecture, whose code must hold these instructions."""
    target = Target(intra_kernel, launch_recurrence, arch)
    for variant in split_variants():
        yield Variant(variant.name, split_host, fake_arguments(kda_abi.SPLIT, split_host, variant, target), uses=uses)
