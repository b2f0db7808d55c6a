# SPDX-License-Identifier: Apache-2.0
"""The arguments of a decode kernel by name, and which part of the call a warp has."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int64

D = 128  # K and V
WARPS = D // 32  # of a block that has several tokens: while tokens meet each other, a lane has a channel
BLOCKS = 4  # of those on a multiprocessor at least, and so 128 registers: 8 rows of 32 heads, 512 blocks, are there at once


class TokenTensor(NamedTuple):
    """An address and strides in elements."""

    at: Any
    row: Any
    token: Any
    head: Any

    def offset(self, n: Any, head: Any) -> Any:
        """Of the first token of a row and head."""
        return Int64(n) * self.row + head * self.head


class Parameter(NamedTuple):
    """Of a gate: [heads] or [heads, channels], float32; kernels for one gate a head read them in bfloat16, too."""

    at: Any
    head: Any
    channel: Any = 0


class Pool(NamedTuple):
    """Of states."""

    at: Any
    stride: Any  # of a slot
    slots: Any


class Indices(NamedTuple):
    """Of slots, one a row."""

    at: Any
    stride: Any


class Call(NamedTuple):
    """The kernel's arguments. A tensor that the call does not have is at the address of q, so that it can be read in vain."""

    q: TokenTensor
    k: TokenTensor
    v: TokenTensor
    o: TokenTensor
    g: TokenTensor
    beta: TokenTensor
    state: Pool
    indices: Indices
    A: Parameter  # A_log; of Lightning -log of the decay a token
    bias: Parameter
    scale: Any
    lower_bound: Any
    beta_top: Any
    tokens: Any
    flags: Any

    @classmethod
    def of(
        cls, addresses: tuple, row_strides: tuple, strides: tuple, factors: tuple, slots: Any, tokens: Any, flags: Any
    ) -> Call:
        """From the arguments as `decode_host` groups them."""
        q, k, v, state, indices, g, beta, A, bias, o = addresses
        *rows, slot_stride, index_stride = row_strides
        *inner, A_head, bias_strides = strides
        tensors = [TokenTensor(at, row, *pair) for at, row, pair in zip((q, k, v, o, g, beta), rows, inner)]
        return cls(
            *tensors,
            Pool(state, slot_stride, slots),
            Indices(indices, index_stride),
            Parameter(A, A_head),
            Parameter(bias, *bias_strides),
            *factors,
            tokens,
            flags,
        )

    def has(self, tensor: Any) -> Any:
        """Whether an optional tensor was given."""
        return self.q.at != tensor.at


class Place(NamedTuple):
    """What a warp works on."""

    n: Any  # the row of the call
    hv: Any  # the value head
    h: Any  # its head of q and k
    warp_row: Any  # the first of its rows of the state
    wid: Any  # which warp of the block it is
    lane: Any
