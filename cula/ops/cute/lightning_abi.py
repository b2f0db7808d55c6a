# SPDX-License-Identifier: Apache-2.0
"""What the host side of Lightning's prefill and its kernels agree on. Free of cutlass, which the host side does without."""

from cula.ops.cute.abi import Abi, addresses, f32, i32, i64
from cula.ops.cute.states_abi import KINDS_OF_STATES, SLOTS, STEPS

# Strides are in elements. Batches follow one another along T, which counts all tokens of a call.
LIGHTNING = Abi(
    "lightning",
    addresses(
        q=16,  # [T, H, K]
        k=16,
        v=16,  # [T, HV, V]
        o=16,
        decay=4,  # [HV]: -log of the decay a token
        h0=16,  # first and last states: see `states_abi.py`
        ht=16,
        seeds=16,  # [ids, HV, V, K] float32: what segments leave to each other
        cu_seqlens=4,  # [N + 1], read where `length` is 0
    ),
    SLOTS,
    i64("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "o_token", "o_head"),
    STEPS,
    KINDS_OF_STATES,
    i32("T", "H", "HV"),
    f32("scale"),
    i32(
        "num_seqs",
        "length",  # tokens of every sequence; 0: packed
        "segment",  # tokens of a segment; 0: sequences are whole
        "per_seq",  # segments of every sequence, where `length` is given
        "num_ids",  # segments in all, or sequences
        "group",  # value heads that share a head of q and k
        "has_h0",
        "has_ht",
        "num_blocks",
    ),
)
