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

from cula.ops.cute.common.arguments import tokens_of, variant_of, vector_of
from cula.ops.cute.common.lightning_items import Sizes
from cula.ops.cute.common.lightning_states import LightningStates
from cula.ops.cute.common.states import states_of
from cula.ops.cute.common.tiles import F32, I32, at_address
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
def lightning_host(x: cutlass.Constexpr, stream, target: cutlass.Constexpr):
    """The arguments that `LIGHTNING` describes. `target` is the architecture's kernel: it has a `cfg` and launches."""
    cfg = target.cfg
    of = {"q": (x.H, cfg.K), "k": (x.H, cfg.K), "v": (x.HV, cfg.V), "o": (x.HV, cfg.V)}
    tokens = [tokens_of(x, name, heads, channels) for name, (heads, channels) in of.items()]
    of_id = cute.assume(Int64(x.HV) * (cfg.V * cfg.K), divby=cfg.V * cfg.K)
    of_seeds = cute.make_layout((x.num_ids, x.HV, cfg.V, cfg.K), stride=(of_id, cfg.V * cfg.K, cfg.K, 1))
    states = LightningStates(states_of(x), cute.make_tensor(at_address(F32, x.seeds, 16), of_seeds))
    decay, cu = vector_of(F32, x.decay, x.HV), vector_of(I32, x.cu_seqlens, x.num_seqs + 1)
    sizes = Sizes(*(getattr(x, name) for name in Sizes._fields))
    target.launch(Tensors(*tokens, decay, cu, states), x.scale, sizes, x.num_blocks, stream)


def variants_for(
    target: Any, configs: Mapping[str, Any], uses: tuple[str, ...], uses_of_ends: tuple[str, ...]
) -> Iterator[Variant]:
    """`lightning_<config>`, and `lightning_ends_<config>` for the first pass over segments."""
    for name, config in configs.items():
        for prefix, only_ends, instructions in (("lightning", False, uses), ("lightning_ends", True, uses_of_ends)):
            of_config = target(replace(config, only_ends=only_ends))
            yield variant_of(f"{prefix}_{name}", LIGHTNING, lightning_host, of_config, uses=instructions)
