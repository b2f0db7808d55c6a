# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper: one kernel, with nothing in memory but inputs and outputs.

A chunk of 64 tokens of a value head, with log2 decays summed from its start (G_t; G_C over all of it), write strengths b, unit
keys and queries k, q, and the state S [128 dk, 128 dv] in float32:

    f = 2^G    r = 2^(G_C - G)    D[t, i] = 2^(G_t - G_i), i <= t               factors, all at most 1
    T = (I + strict(k k^T D) b)^-1                                              b on the columns
    R = k S    Y = v - f R    E = T Y    S <- 2^G_C S + k^T (r b E)             the chain
    P = lower(q k^T D) b      o = scale (f (q S) + P E)

With one gate a head, decays, norms and strengths are factors of rows and columns, so that q and k are operands as they lie in
shared memory. Where they are to be normalised here, 1 / |k| joins f, r b and the exponents of D, and 1 / |q| the rows of P and
f. E is the error of the prediction, and b E what is written: b is never divided by, and zero is a number like any other. The
output is not in the chain: it takes S and E, in bf16, from shared memory.

| warpgroup       | role                                                      | registers, half (whole) |
|-----------------|-----------------------------------------------------------|-------------------------|
| 0 (and 1)       | `state_role`: the chain, 64 rows dv each                  | 176 (160) |
| the next        | `output_role`                                             | 160 (112) |
| the last (two)  | `prepare_role`: T and all factors, two chunks ahead       | 88 (80)   |

A block has a whole state, or half of one where heads are too few; then two warpgroups prepare in each of the two blocks. Keys
and vectors are each block's own, T of every other chunk comes from the partner (`share_head`). Beside a whole state one warpgroup
prepares two chunks at a time (`prepare_head`). Every role asks for its own tiles by TMA.

| shared memory                | bytes, whole | half  |
|------------------------------|--------------|-------|
| k: five stages, or four      | 80 K         | 64 K  |
| q: one; two, and o in place  | 16 K         | 32 K  |
| v: two stages                | 32 K         | 16 K  |
| S; E, and o in its place     | 48 K         | 24 K  |
| half of M                    |              | 16 K  |
| T: two, or four of them      | 16 K         | 32 K  |
| A of two chunks, to be inverted | 25 K      | 25 K  |
| vectors                      | 9.3 K        | 9.3 K |

`Bars` in `gdn_smem.py` has the mbarriers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from cula.ops.cute.common.arguments import variant_of, vector_of
from cula.ops.cute.common.gdn_items import GateInputs, GdnTma, Items, Scalars, States, items_of, longest_first, operands
from cula.ops.cute.common.registers import set_registers
from cula.ops.cute.common.tiles import (
    BF16,
    F16,
    F32,
    I32,
    K_MAJOR,
    MN_MAJOR,
    at_address,
    by_head,
    tile_layout,
    tma_load,
    tma_store,
    wgmma,
)
from cula.ops.cute.gdn_abi import GDN, STATE, WORKSPACE
from cula.ops.cute.toolchain.variants import Variant

from .gdn_items import GdnVariant, Handed
from .gdn_output import output_role
from .gdn_prepare import prepare_role
from .gdn_segments import Keys, plan_piece
from .gdn_smem import allocate, init_barriers
from .gdn_state import state_role

THREADS, LAUNCH_REGISTERS = 512, 128
REGISTERS = {2: (160, 112, 80), 1: (176, 160, 88)}  # of roles, in the order above, by parts: 512 in all warpgroups


class GdnMmas(NamedTuple):
    """Products: of a warpgroup by where operands lie, and of a warp."""

    kk: Any  # [64, 64], both in shared memory
    q_k: Any  # the same
    q_s: Any  # the same, [64, columns of o]
    p_e: Any  # the same, A in registers
    x: Any  # [64, 64] of a K-major tile, A in registers
    t: Any  # [64, 64] of an MN-major tile
    s: Any  # [64, 128] of an MN-major tile
    chain: Any  # the same as s, in fp16
    tf32: Any  # of a warp, for the inverse
    squares: Any  # of a warp, for norms


def gdn_mmas() -> GdnMmas:
    both_shared, one_shared = [wgmma(64, K_MAJOR, is_in_registers) for is_in_registers in (False, True)]
    return GdnMmas(
        both_shared,
        both_shared,
        both_shared,
        one_shared,
        one_shared,
        wgmma(64, MN_MAJOR, True),
        wgmma(128, MN_MAJOR, True),
        wgmma(128, MN_MAJOR, True, F16),
        cute.make_tiled_mma(warp.MmaTF32Op((16, 8, 8)), (1, 1, 1)),
        cute.make_tiled_mma(warp.MmaF16BF16Op(BF16, F32, (16, 8, 16)), (1, 1, 1)),
    )


@cute.kernel
def gdn_kernel(
    tma: GdnTma,
    mO: cute.Tensor,
    mK: Any,
    gates: GateInputs,
    states: States,
    scalars: Scalars,
    items: Items,
    mmas: GdnMmas,
    variant: cutlass.Constexpr,
):
    """With whole states block i takes the heads i, i + blocks, ...; otherwise cluster i has a piece of head i % heads, those of
    longer sequences first."""
    parts = cutlass.const_expr(variant.parts)
    warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    role = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    smem, bars = allocate(SmemAllocator(), variant)
    if warp_id == 0:
        with cute.arch.elect_one():
            init_barriers(bars, parts, block & 1)
        for of in tma:
            cpasync.prefetch_descriptor(of.atom)
    cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(parts == 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()  # for the kernel before, whichever it is: this one may be launched before it has ended

    ours, plan = items._replace(first=block, step=grid, rank=I32(0)), None
    if cutlass.const_expr(parts == 1):
        ours = items._replace(rank=block & 1)
        cluster = block >> 1
        keys = None if variant.is_normalised else Keys(mK, items.group, mmas.squares)
        item = longest_first(items, cluster % items.total)
        plan = plan_piece(ours, keys, gates, scalars, smem.warm_ups, item, cluster // items.total)
    of_state, of_output, of_preparing = cutlass.const_expr(REGISTERS[parts])
    if role < parts:
        set_registers(of_state, LAUNCH_REGISTERS)
        state_role(tma.v, states, scalars, ours, plan, mmas, smem, bars, role, variant)
    elif role == parts:
        set_registers(of_output, LAUNCH_REGISTERS)
        output_role(tma, mO, scalars.scale, ours, plan, mmas, smem, bars, variant)
    else:
        set_registers(of_preparing, LAUNCH_REGISTERS)
        prepare_role(tma.k, gates, scalars, ours, plan, mmas, smem, bars, role - parts - 1, variant)
    if cutlass.const_expr(parts == 1):
        cute.arch.cluster_arrive()  # the partner may still send
        cute.arch.cluster_wait()


@cute.kernel
def clear_kernel(done: cute.Tensor):
    """Nothing has been handed on."""
    cute.arch.griddepcontrol_wait()  # for a kernel that may still read it
    cute.arch.griddepcontrol_launch_dependents()
    tid, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(tid, cute.size(done), 128, unroll=1):
        done[i] = I32(0)


@cute.jit
def gdn_host(x: cutlass.Constexpr, stream, variant: cutlass.Constexpr):
    """The arguments of `gdn_abi.GDN`."""
    of, of_warp = operands(x), tile_layout(16, 64)
    tma = GdnTma(
        q=tma_load(by_head(of.q), of_warp, (16, 64)),
        k=tma_load(by_head(of.k), tile_layout(64, 128), (64, 128)),
        v=tma_load(by_head(of.v), tile_layout(64, 64), (64, 64)),
        o=tma_store(by_head(of.o), of_warp, (16, 64)),
    )
    records = 2 * x.pieces * x.N * x.HV
    at = WORKSPACE.offsets(records=Int64(records))
    handed = Handed(
        cute.make_tensor(at_address(F32, x.workspace, 16), cute.make_layout((records, STATE // 2), stride=(STATE // 2, 1))),
        vector_of(I32, x.workspace + at["done"], records),
    )
    if cutlass.const_expr(variant.parts == 1):  # noqa: SIM102 (known when this is compiled, which the other is not)
        if x.pieces > 1:
            clear_kernel(handed.done).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream, use_pdl=True)
    states, items = of.states._replace(handed=handed), items_of(x, of.cu, first=I32(0), step=I32(0), rank=I32(0))
    mK = by_head(of.k) if cutlass.const_expr(variant.parts == 1 and not variant.is_normalised) else None
    gdn_kernel(tma, by_head(of.o), mK, of.gates, states, of.scalars, items, gdn_mmas(), variant).launch(
        grid=(x.blocks if variant.parts == 2 else records, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(3 - variant.parts, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


def variants() -> Iterator[Variant]:
    uses = ("wgmma", "tma_load", "tma_store", "mma", "ldmatrix", "stmatrix", "setmaxnreg")
    for variant in (GdnVariant(norm, parts) for norm in (True, False) for parts in (2, 1)):
        yield variant_of(variant.name, GDN, gdn_host, variant, uses=uses)
