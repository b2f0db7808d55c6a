# SPDX-License-Identifier: Apache-2.0
"""The backward of Lightning Attention on Hopper: three attentions of the forward's kind, in one launch.

With D_t [V, K] the gradient of S_t, everything that a token's output and its successors ask of it,

    D_t = f D_{t+1} + scale do_t q_t^T

each gradient is a recurrence of `lightning.py` on other tensors:

| o    | q, k, v   | state | time     | first state | last state |
|------|-----------|-------|----------|-------------|------------|
| dq_t | do, v, k  | S^T   | forward  | h0^T        |            |
| dk_t | v, do, q  | D^T   | backward | dht^T       |            |
| dv_t | k, q, do  | D     | backward | dht         | dh0        |

Backward in time the state that is carried is X = f D_{t+1}, which starts as dht itself and ends as dh0. So `scale` multiplies
what enters the state instead of what leaves it, and with tokens counted from the sequence's end

    O^T   = X q^T f^r  +  V^T P^T            X  <-  f^n X  +  (V^T scale f^(n-i)) k

In a chunk as it lies in memory, column c = C - 1 - r, that is f^(C-1-c) for O^T and scale f^(c+1) for V^T of a whole chunk: what
forward in time V^T and O^T are multiplied by. Chunks are cut from the sequence's end, so that all but the last one, at its
start, are whole: TMA reads on in front of the sequence there, rows of negative numbers as zeros.

Segments. The first pass makes S from k and v and D from q and do, each the way that it goes; dq and dk read them transposed.

What is read, and why not fewer bytes: `docs/lightning-hopper.md`. Limits: those of the forward, and no groups of value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cula.ops.cute.common.arguments import tokens_of, variant_of, vector_of
from cula.ops.cute.common.lightning_items import Attention, Sizes
from cula.ops.cute.common.lightning_states import LightningStates
from cula.ops.cute.common.states import States
from cula.ops.cute.common.tiles import BF16, F32, I32, at_address, of_tokens
from cula.ops.cute.lightning_bwd_abi import INPUTS, LIGHTNING_BWD, OUTPUTS
from cula.ops.cute.states_abi import StateKind
from cula.ops.cute.toolchain.variants import Variant

from .lightning import CONFIGS, USES, USES_OF_ENDS, LightningSm90
from .lightning_config import Config

GRADIENTS = (
    Attention(("v", "k", "do"), is_swapped=True),
    Attention(("do", "q", "v"), is_reversed=True, is_swapped=True),
    Attention(("q", "do", "k"), is_reversed=True),
)
ENDS = (Attention(("k", "v")), Attention(("q", "do"), is_reversed=True))


class Tensors(NamedTuple):
    """Of a call; all but the last three are [T, H, D]."""

    q: Any
    k: Any
    v: Any
    do: Any
    dq: Any
    dk: Any
    dv: Any
    decay: Any  # [H]
    cu: Any  # [N + 1]
    states: LightningStates


class LightningBwdSm90(LightningSm90):
    """The backward's kernel."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        assert cfg.K == cfg.V == cfg.channels, f"{cfg}: tensors change roles, so all tiles are alike"


@cute.jit
def backward_host(x: cutlass.Constexpr, stream, target: cutlass.Constexpr):
    """The arguments that `LIGHTNING_BWD` describes."""
    T, H, D = x.T, x.H, target.cfg.K
    reads = [tokens_of(x, name, H, D) for name in INPUTS]
    writes = [of_tokens(at_address(BF16, getattr(x, name), 16), T, H, D, (Int64(H) * D, Int64(D))) for name in OUTPUTS]
    decay, cu = vector_of(F32, x.decay, H), vector_of(I32, x.cu_seqlens, x.num_seqs + 1)
    of_id = cute.assume(Int64(H) * (D * D), divby=D * D)
    of_seeds = cute.make_layout((2 * x.num_ids, H, D, D), stride=(of_id, D * D, D, 1))
    states = LightningStates(
        plain_states(x.h0, Int64(0), x.has_h0, I32(0), 4 * of_id),
        cute.make_tensor(at_address(F32, x.seeds, 16), of_seeds),
        plain_states(x.dht, x.dh0, x.has_dht, x.has_dh0, 4 * of_id),
    )
    sizes = Sizes(x.num_seqs, x.length, x.segment, x.per_seq, x.num_ids, I32(1))
    target.launch(Tensors(*reads, *writes, decay, cu, states), x.scale, sizes, x.num_blocks, stream)


def plain_states(first: Int64, last: Int64, has_first: I32, has_last: I32, step: Int64) -> States:
    """First and last states in float32, one for each sequence."""
    none, no = Int64(0), I32(0)
    return States(first, last, step, I32(StateKind.F32), has_first, has_last, none, none, none, none, none, no, no, no)


def variants() -> Iterator[Variant]:
    """`bwd_lightning_<config>`, and `bwd_lightning_ends_<config>` for the first pass over segments."""
    for name in ("d128", "d64"):
        config = replace(CONFIGS[name], inputs=INPUTS, outputs=OUTPUTS, attentions=GRADIENTS)
        whole, ends = LightningBwdSm90(config), LightningBwdSm90(replace(config, only_ends=True, attentions=ENDS))
        yield variant_of(f"bwd_lightning_{name}", LIGHTNING_BWD, backward_host, whole, uses=USES)
        yield variant_of(f"bwd_lightning_ends_{name}", LIGHTNING_BWD, backward_host, ends, uses=USES_OF_ENDS)
