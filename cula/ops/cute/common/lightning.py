# SPDX-License-Identifier: Apache-2.0
"""The Lightning prefill of every architecture: one host function that makes tensors of its arguments and hands over to the
architecture's own launch.

bf16 q, k, v, o with K = V. `lightning_abi.py` describes the arguments. Words that kernels share:

Recurrence of a head, f = exp(-s):   S_t = f S_{t-1} + v_t k_t^T   [V, K],      o_t = scale S_t q_t   [V]

Segments. Where (sequence, head) pairs are too few to fill the GPU, sequences are split into segments of L tokens (a multiple
of a chunk). A first pass makes the state that each segment but the last leaves when it starts from zero: k and v are read
twice, q and o once. seeds[id of segment 0] is the sequence's first state, seeds[id of segment j] the end of segment j - 1, and
the recurrence of segment j starts from sum_{i<=j} f^((j-i)L) seeds[i]. Terms below 2^-REACH, zero in fp32, are neither made nor
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.arguments import fake_arguments
from cula.ops.cute.common.lightning_items import Sizes
from cula.ops.cute.common.lightning_states import LightningStates
from cula.ops.cute.common.states import States
from cula.ops.cute.common.tiles import BF16, F32, I32, at_address, of_tokens
from cula.ops.cute.lightning_abi import LIGHTNING
from cula.ops.cute.toolchain.variants import Variant


class Tensors(NamedTuple):
    """Of a call."""

    q: Any  # [T, H, K]
    k: Any
    v: Any  # [T, HV, V]
    o: Any
    decay: Any  # [HV]
    cu: Any  # [N + 1]
    states: LightningStates


@cute.jit
def lightning_host(
    q: Int64,
    k: Int64,
    v: Int64,
    o: Int64,
    decay: Int64,
    h0: Int64,
    ht: Int64,
    seeds: Int64,
    cu_seqlens: Int64,
    read_from: Int64,
    write_to: Int64,
    has_state: Int64,
    q_token: Int64,
    q_head: Int64,
    k_token: Int64,
    k_head: Int64,
    v_token: Int64,
    v_head: Int64,
    o_token: Int64,
    o_head: Int64,
    state_step: Int64,
    index_step: Int64,
    mask_step: Int64,
    state_kind: I32,
    index_bits: I32,
    first_slot: I32,
    num_slots: I32,
    T: I32,
    H: I32,
    HV: I32,
    scale: F32,
    num_seqs: I32,
    length: I32,
    segment: I32,
    per_seq: I32,
    num_ids: I32,
    group: I32,
    has_h0: I32,
    has_ht: I32,
    num_blocks: I32,
    stream,
    target: cutlass.Constexpr,
):
    """The arguments that `LIGHTNING` describes. `target` is the architecture's kernel: it has a `cfg` and launches."""
    cfg = target.cfg
    mQ, mK = [of_tokens(at_address(BF16, a, 16), T, H, cfg.K, s) for a, s in ((q, (q_token, q_head)), (k, (k_token, k_head)))]
    mV, mO = [of_tokens(at_address(BF16, a, 16), T, HV, cfg.V, s) for a, s in ((v, (v_token, v_head)), (o, (o_token, o_head)))]
    mDecay, mCu = [
        cute.make_tensor(at_address(dtype, a, 4), cute.make_layout((n,), stride=(1,)))
        for dtype, a, n in ((F32, decay, HV), (I32, cu_seqlens, num_seqs + 1))
    ]
    of_id = cute.assume(Int64(HV) * (cfg.V * cfg.K), divby=cfg.V * cfg.K)
    of_seeds = cute.make_layout((num_ids, HV, cfg.V, cfg.K), stride=(of_id, cfg.V * cfg.K, cfg.K, 1))
    mSeeds = cute.make_tensor(at_address(F32, seeds, 16), of_seeds)
    ends = States(
        h0, ht, state_step, state_kind, has_h0, has_ht, read_from, write_to, has_state, index_step, mask_step, index_bits,
        first_slot, num_slots,
    )  # fmt: skip
    tensors = Tensors(mQ, mK, mV, mO, mDecay, mCu, LightningStates(ends, mSeeds))
    target.launch(tensors, scale, Sizes(num_seqs, length, segment, per_seq, num_ids, group), num_blocks, stream)


def variants_for(
    target: Any, configs: Mapping[str, Any], uses: tuple[str, ...], uses_of_ends: tuple[str, ...]
) -> Iterator[Variant]:
    """`lightning_<config>`, and `lightning_ends_<config>` for the first pass over segments."""
    for name, config in configs.items():
        for prefix, only_ends, instructions in (("lightning", False, uses), ("lightning_ends", True, uses_of_ends)):
            arguments = fake_arguments(LIGHTNING, lightning_host, target(replace(config, only_ends=only_ends)))
            yield Variant(f"{prefix}_{name}", lightning_host, arguments, uses=instructions)
