# SPDX-License-Identifier: Apache-2.0
"""What the host side of Lightning's backward and its kernels agree on. Free of cutlass, which the host side does without."""

from cula.ops.cute.abi import TMA_BYTES, Abi, addresses, f32, i32, i64

INPUTS = ("q", "k", "v", "do")  # [T, H, D], of any strides that TMA takes
OUTPUTS = ("dq", "dk", "dv")  # contiguous

# Strides are in elements. Batches follow one another along T, which counts all tokens of a call. Arguments that the forward has
# too mean the same (`lightning_abi.py`).
LIGHTNING_BWD = Abi(
    "lightning_bwd",
    addresses(**dict.fromkeys((*INPUTS, *OUTPUTS), TMA_BYTES)),
    addresses(
        decay=4,  # [H]
        h0=16,  # [N, H, D, D] float32, as the three that follow: first states, there if `has_h0`
        dht=16,  # gradients of last states, there if `has_dht`
        dh0=16,  # gradients of first states, written if `has_dh0`
        seeds=16,  # [2 ids, H, D, D] float32: what segments leave to each other, of S and then of its gradient
        cu_seqlens=4,
    ),
    i64(*(f"{name}_{of}" for name in INPUTS for of in ("token", "head"))),
    i32("T", "H"),
    f32("scale"),
    i32("num_seqs", "length", "segment", "per_seq", "num_ids", "has_h0", "has_dht", "has_dh0", "num_blocks"),
)
