# SPDX-License-Identifier: Apache-2.0
"""What crosses from host to kernel for Gated DeltaNet's prefill. Free of cutlass.

| argument               | what                                                                                               |
|------------------------|----------------------------------------------------------------------------------------------------|
| q, k                   | [T, H, 128], bf16; T is that of all sequences together                                             |
| v, o                   | [T, HV, 128], bf16                                                                                 |
| g, beta                | [T, HV], of `g_bits`, `beta_bits` bits: 32 (float32) or 16 (bfloat16)                              |
| A_log, dt_bias         | [HV], float32; read where `has_gate`                                                               |
| h0, ht                 | [slots, HV, 128 (V), 128 (K)]; `h0_kind`, `ht_kind` say of which type (`KINDS`), 0 for none        |
| cu                     | [N + 1], where sequences begin; read if `length` is 0                                              |
| read_from, write_to    | [N], where `is_indexed`: slots of first and of last states; none outside `first_slot` .. `num_slots`  |
| *_token, *_head, *_slot | strides, in elements                                                                              |
| beta_top               | the largest beta that a raw one is activated to, 0 for one that is activated already               |
| length                 | tokens of every sequence, or 0 where `cu` has them                                                 |
| blocks                 | with a whole state each, that take N HV heads of sequences in turns; none where `pieces` is given  |
| pieces                 | pairs of blocks a head, with half of a state each                                                  |
| workspace              | `WORKSPACE`, where `pieces` is more than 1: states that pairs of blocks hand on to the next        |

To hand over a tensor would cost the caller microseconds, so tensors are addresses and strides.
"""

from __future__ import annotations

from cula.ops.cute.abi import TMA_BYTES, Abi, Section, Workspace, addresses, f32, i32, i64

K = V = 128
TILE_BYTES = 64 * K * 2
STATE = V * K
FEWEST_CHUNKS = 4  # of a sequence for each of its pieces
FLOAT32, BFLOAT16, FLOAT16 = 1, 2, 3  # kinds of states

GDN = Abi(
    "gdn",
    addresses(
        q=TMA_BYTES,
        k=TMA_BYTES,
        v=TMA_BYTES,
        g=2,
        beta=2,
        A_log=4,
        dt_bias=4,
        o=TMA_BYTES,
        h0=4,
        ht=4,
        cu=4,
        read_from=4,
        write_to=4,
        workspace=16,
    ),
    i64(*(f"{name}_{of}" for name in ("q", "k", "v", "g", "beta", "o") for of in ("token", "head")), "h0_slot", "ht_slot"),
    i32("T", "N", "H", "HV"),
    f32("scale", "beta_top"),
    i32(
        "g_bits",
        "beta_bits",
        "has_gate",
        "h0_kind",
        "ht_kind",
        "is_indexed",
        "first_slot",
        "num_slots",
        "length",
        "blocks",
        "pieces",
    ),
)

# A record is half of a state, of a head and a pair of blocks.
WORKSPACE = Workspace((Section("states", "records", 4 * STATE // 2), Section("done", "records", 4)))
