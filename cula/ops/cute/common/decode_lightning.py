# SPDX-License-Identifier: Apache-2.0
"""Decode, several tokens of Lightning: KDA's formulas in `decode_frame.py` with u = v and one decay a head, so with less to do.

With d = e^{-s}, the decay a token, and the scale inside q:

    Q_t = d^{t+1} S0 . q_t     P[t, i] = d^{t-i} q_t . k_i, i <= t     o_t = Q_t + sum_i P[t, i] v_i
    S_T = d^T S0 + sum_i (d^{T-1-i} v_i) k_i

No token waits for another, powers of d and norms are factors of sums, and what meets the state are q and k as they came: 2T + 1
multiply-adds a number of it. Products q_t . k_i are on tensor cores for either kind of states (`decode_lightning_f32.py`,
`decode_lightning_bf16.py`), with (q; k) as A and k as B: lane (g, c) = (lane / 4, lane % 4) has channels 8c .. 8c + 7 of 32 and
token g of both, and gets q_g . k_i and k_g . k_i for i = 2c and 2c + 1. A token that a row does not have is loaded as the last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import warp

from cula.core.constants import LOG2_E
from cula.ops.cute.common.decode_call import Call, Place
from cula.ops.cute.common.decode_memory import number_at, select
from cula.ops.cute.common.decode_state_bf16 import multiply
from cula.ops.cute.common.fragments import flat
from cula.ops.cute.common.gate import exp2
from cula.ops.cute.common.tiles import BF16, F32, I32

FASTEST = 1000.0  # of decays, log2: as good as infinite, and 0 times it is 0


class FirstTokens(NamedTuple):
    """Where q, k and v of a (row, head) begin, v with the warp's rows, and what a token further is, in numbers."""

    q: Any
    k: Any
    v: Any
    q_token: Any
    k_token: Any
    v_token: Any


def addresses(rows: Any, call: Call, place: Place) -> list:
    """Of -log of the decay a token, then what `rows` wants of the tokens. Made before the kernel in front has ended."""
    n, hv, h, warp_row, wid, lane = place
    q, k, v = call.q, call.k, call.v
    of_head = (h * q.head, h * k.head, hv * v.head + warp_row)
    firsts = (t.at + (Int64(n) * t.row + head) * 2 for t, head in zip((q, k, v), of_head))
    of_decay = call.A.at + Int64(hv * call.A.head) * 4
    return [of_decay, *rows.token_addresses(FirstTokens(*firsts, q.token, k.token, v.token), call.tokens, wid, lane)]


def load_before_slot(rows: Any, call: Call, at: list, place: Place, tables: Any) -> tuple:
    """All of them: with as little to do without the state as here, it is better to have tokens early than to have them apart
    from the state."""
    return rows.load_tokens(*at[1:]), number_at(F32, at[0], 0)


def load_behind_state(rows: Any, call: Call, at: list, found: tuple, place: Place) -> tuple:
    """Nothing more."""
    return found


def intra(rows: Any, call: Call, raw: tuple, place: Place, tables: Any) -> tuple:
    """What `rows.decode_rows` wants to know of the tokens."""
    of_tokens, s = raw
    rate = cute.arch.fmax(s * F32(-LOG2_E), F32(-FASTEST))
    return rows.intra(call, of_tokens, rate, place, tables)


def power(rate: Any, n: Any) -> Any:
    """d^n"""
    return exp2(rate * F32(n))


def there(token: Any, tokens: Any) -> Any:
    """A token, or the last."""
    return select(token < tokens, token, tokens - 1)


@cute.jit
def products(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    """x_g . z_i, then y_g . z_i, of the two i of a lane, over channels that the lanes have. In two sums, so that half as many
    products wait for each other."""
    k16 = cute.make_mma_atom(warp.MmaF16BF16Op(BF16, F32, (16, 8, 16)))
    sums = cute.make_rmem_tensor((4, 2), F32)
    sums.fill(0.0)
    for step in cutlass.range_constexpr(cute.size(x) // 2):
        multiply(k16, flat(sums, 4 * (step % 2), 4), two_rows(x, y, step), flat(z, 2 * step, 2))
    for e in cutlass.range_constexpr(4):
        sums[e, 0] += sums[e, 1]
    return flat(sums, 0, 4)


@cute.jit
def two_rows(x: cute.Tensor, y: cute.Tensor, step: cutlass.Constexpr):
    """16 channels of two vectors as rows g and g + 8 of A."""
    a = cute.make_rmem_tensor((4,), I32)
    for e in cutlass.range_constexpr(2):
        a[2 * e], a[2 * e + 1] = flat(x, 2 * step + e, 1)[0], flat(y, 2 * step + e, 1)[0]
    return a
