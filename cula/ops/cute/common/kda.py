# SPDX-License-Identifier: Apache-2.0
"""The KDA forward of every architecture: one host function that cuts the workspace, launches `kda_prepare` and hands over to the
architecture's own launch of the state kernel.

bf16 q, k, v, o with K = V = 128.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_stream

from cula.ops.cute.common.kda_prepare import prepare_kernel
from cula.ops.cute.common.kda_prepare_steps import VEC, Kind
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

TILE, SQUARE, STATE = 64 * 128, 64 * 64, 128 * 128


class Work(NamedTuple):
    """The workspace between the kernels. A record is a chunk's of one head, a map a segment's."""

    tiles: Any  # [192 records, 128]: kb, qg, kr
    T: Any  # [64 records, 64], transposed; or by quarters, [128 records, 32]
    P: Any  # the same
    vec: Any  # [chunks, HV, VEC]
    done: Any  # [maps]: how many of a map's two halves there are
    all_vecs: Any  # the same as [records, VEC]
    B: Any  # [maps, 128, 128]
    M: Any  # [2 maps, 128, 128]: hi, lo
    all_m: Any  # the same as [256 maps, 128]


class Target(NamedTuple):
    """What an architecture does its own way."""

    # (work, (v, o), (h0, ht), cu, sizes, dtype, stream); the sizes are
    # (has_h0, has_ht, per_segment, per_cold_segment, length, steps, segments, has_maps, helpers)
    launch_state: Any
    has_zeros: bool  # it reads T and P as whole tiles
    blocks: int  # of the smallest prepare kernel on a multiprocessor: as many as registers allow without spills


class Operands(NamedTuple):
    """The tensors of a call."""

    q: Any  # [T, H, 128]
    k: Any
    v: Any  # [T, HV, 128]
    o: Any
    gates: Any  # [T, HV], where there is one a head
    g: Any  # [T, HV, 128]; k where there is one gate a head
    beta: Any  # [T, HV], as float32
    beta16: Any  # and as bfloat16
    A_log: Any  # [HV]
    dt_bias: Any  # [HV, 128]
    cu: Any  # [N + 1]
    h0: Any  # [N, HV, dv, dk]
    ht: Any


def operands(addresses: Any, strides: Any, sizes: Any, kind: Kind) -> Operands:
    q, k, v, g, beta, A_log, dt_bias, o, h0, ht, cu = addresses
    of_q, of_k, of_v, of_g, of_o, beta_token = strides
    T, N, H, HV = sizes
    mQ, mK = [of_tokens(at_address(BF16, a, 16), T, H, 128, s) for a, s in ((q, of_q), (k, of_k))]
    mV, mO = [of_tokens(at_address(BF16, a, 16), T, HV, 128, s) for a, s in ((v, of_v), (o, of_o))]
    at_g = at_address(kind.g_type, g, kind.g_type.width // 8 if kind.is_scalar else 16)
    by_token = cute.make_layout((T, HV), stride=(beta_token, 1))
    of_sequence = cute.assume(Int64(HV) * STATE, divby=STATE)
    states = cute.make_layout((N, HV, 128, 128), stride=(of_sequence, STATE, 128, 1))
    return Operands(
        q=mQ,
        k=mK,
        v=mV,
        o=mO,
        gates=cute.make_tensor(at_g, cute.make_layout((T, HV), stride=of_g)),
        g=mK if kind.is_scalar else of_tokens(at_g, T, HV, 128, of_g),
        beta=cute.make_tensor(at_address(F32, beta, 4), by_token),
        beta16=cute.make_tensor(at_address(BF16, beta, 2), by_token),
        A_log=cute.make_tensor(at_address(F32, A_log, 4), cute.make_layout(HV)),
        dt_bias=cute.make_tensor(
            at_address(F32, dt_bias, 4), cute.make_layout((HV, 128), stride=(1, 0) if kind.is_scalar else (128, 1))
        ),
        cu=cute.make_tensor(at_address(I32, cu, 4), cute.make_layout(N + 1)),
        h0=cute.make_tensor(at_address(F32, h0, 16), states),
        ht=cute.make_tensor(at_address(F32, ht, 16), states),
    )


def prepare_mmas() -> tuple[Any, Any, Any]:
    """Products of `kda_prepare`: of fp16, bf16 and tf32."""
    of_16, shape = [warp.MmaF16BF16Op(t, F32, (16, 8, 16)) for t in (F16, BF16)], (16, 16, 16)
    mma_f16, mma_bf16 = [cute.make_tiled_mma(op, (1, 1, 1), permutation_mnk=shape) for op in of_16]
    return mma_f16, mma_bf16, cute.make_tiled_mma(warp.MmaTF32Op((16, 8, 8)), (1, 1, 1))


@cute.jit
def kda_host(
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
    steps: I32,
    chunks: I32,
    segments: I32,
    per_segment: I32,
    per_cold_segment: I32,
    has_maps: I32,
    helpers: I32,
    stream,
    kind: cutlass.Constexpr,
    target: cutlass.Constexpr,
):
    """Addresses of q, k [T, H, 128], v, g, o [T, HV, 128], beta [T, HV], A_log [HV], dt_bias [HV, 128], states [N, HV, dv, dk],
    offsets [N + 1] and the workspace, then strides. Numbers only: to hand over a tensor costs the caller microseconds.

    T is that of all sequences, `length` that of each or 0 (then `cu` has them), `chunks` and `segments` are how many numbers
    there are (`kda_cut`), `per_cold_segment` is for sequences that start cold (`kda_segments`), `beta_top` is 0 for a beta that
    is activated already, `beta_bits` 32 or 16.
    """
    dtype = kind.dtype
    mQ, mK, mV, mO, gates, mG, mBeta, mBeta16, mA, mBias, mCu, mH0, mHt = operands(
        (q, k, v, g, beta, A_log, dt_bias, o, h0, ht, cu),
        ((q_token, q_head), (k_token, k_head), (v_token, v_head), (g_token, g_head), (o_token, o_head), beta_token),
        (T, N, H, HV),
        kind,
    )

    records = chunks * HV
    maps = segments * HV
    records64, maps64 = Int64(records), Int64(maps)
    part = lambda t, at: at_address(t, workspace + at, 128)
    tiles = cute.make_tensor(part(dtype, 0), cute.make_layout((records * 192, 128), stride=(128, 1)))
    at = records64 * (3 * TILE * 2)
    columns = 64 if cutlass.const_expr(target.has_zeros) else 32
    square = cute.make_layout((records * SQUARE // columns, columns), stride=(columns, 1))
    mT = cute.make_tensor(part(dtype, at), square)
    at += records64 * (SQUARE * 2)
    mP = cute.make_tensor(part(dtype, at), square)
    at += records64 * (SQUARE * 2)
    mVec = cute.make_tensor(part(F32, at), cute.make_layout((chunks, HV, VEC), stride=(HV * VEC, VEC, 1)))
    all_vecs = cute.make_tensor(part(F32, at), cute.make_layout((records, VEC), stride=(VEC, 1)))
    at += records64 * (VEC * 4)
    mDone = cute.make_tensor(part(I32, at), cute.make_layout(maps))
    at += (maps64 * 4 + 127) // 128 * 128
    mB = cute.make_tensor(part(F32, at), cute.make_layout((maps, 128, 128), stride=(STATE, 128, 1)))
    at += maps64 * (STATE * 4)
    mM = cute.make_tensor(part(dtype, at), cute.make_layout((2 * maps, 128, 128), stride=(STATE, 128, 1)))
    all_m = cute.make_tensor(part(dtype, at), cute.make_layout((2 * maps * 128, 128), stride=(128, 1)))

    lt, lg = tile_layout(64, 128), tile_layout(64, 128, dtype=mG.element_type)
    (tma_q, gQ), (tma_k, gK) = [tma_load(by_head(t), lt, (64, 128)) for t in (mQ, mK)]
    tma_g, gG = tma_load(by_head(mG), lg, (64, 128))
    tma_out, gOut = tma_store(tiles, tile_layout(64, 128, dtype=dtype), (64, 128))
    prepare_kernel(
        tma_q,
        gQ,
        tma_k,
        gK,
        tma_g,
        gG,
        tma_out,
        gOut,
        gates,
        mBeta,
        mBeta16,
        mA,
        mBias,
        mT,
        mP,
        mVec,
        mDone,
        mCu,
        scale,
        lower,
        beta_top,
        beta_bits,
        length,
        steps,
        HV // H,
        *prepare_mmas(),
        lt,
        lg,
        kind,
        target.has_zeros,
    ).launch(
        grid=(HV, chunks // N if length > 0 else chunks, N if length > 0 else I32(1)),
        block=(256, 1, 1),
        stream=stream,
        min_blocks_per_mp=target.blocks if cutlass.const_expr(dtype is F16 and mG.element_type.width == 16) else 2,
        preferred_smem_carveout=100,
        use_pdl=True,
    )

    target.launch_state(
        Work(tiles, mT, mP, mVec, mDone, all_vecs, mB, mM, all_m),
        (mV, mO),
        (mH0, mHt),
        mCu,
        (has_h0, has_ht, per_segment, per_cold_segment, length, steps, segments, has_maps, helpers),
        dtype,
        stream,
    )


def arguments(kind: Kind) -> tuple[Any, ...]:
    """What `kda_host` is compiled for, but for the last."""
    return (
        *(Int64(0) for _ in range(12)),
        *(Int64(8) for _ in range(11)),
        *(I32(1) for _ in range(4)),
        F32(1.0),
        F32(-5.0),
        F32(1.0),
        *(I32(1) for _ in range(11)),
        make_fake_stream(),
        kind,
    )


def kinds() -> Iterator[Kind]:
    """All that are compiled."""
    for dtype, g_type, has_gate in itertools.product((F16, BF16), (BF16, F32), (True, False)):
        yield Kind(dtype, g_type, has_gate)
        yield Kind(dtype, g_type, has_gate, is_scalar=True)
