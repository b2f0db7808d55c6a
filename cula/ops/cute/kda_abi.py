# SPDX-License-Identifier: Apache-2.0
"""What crosses from host to kernel for KDA: the arguments of the two host functions, and the workspace between the split kernels.

Free of cutlass. The host call, the arguments that kernels are compiled for, recorded launches, and the bytes and offsets of the
workspace are all made from these descriptions.

| argument                  | what                                                                                            |
|---------------------------|-------------------------------------------------------------------------------------------------|
| q, k                      | [T, H, 128], bf16; T is that of all sequences together                                          |
| v, o                      | [T, HV, 128], bf16                                                                              |
| g                         | [T, HV, 128], or [T, HV] for one gate a head                                                    |
| beta                      | [T, HV], of `beta_bits` bits: 32 or 16                                                          |
| A_log, dt_bias            | [HV], and [HV, 128] or [HV]; float32                                                            |
| h0, ht, read_from,        | first and last states: see `states_abi.py`                                                      |
| write_to, has_state, ...  |                                                                                                 |
| cu                        | [N + 1], where sequences begin; read if `length` is 0                                           |
| kept                      | states inside of the sequences [kept_rows, HV, V, K], of a `StateKind`, `kept_kind`, and with   |
|                           | `kept_step` bytes from row to row: which, says `kept_mode`, a `Kept`                            |
| kept_offsets              | [N]: see `Kept.OFFSETS`                                                                         |
| kept_every                | chunks from one state that is kept to the next                                                  |
| *_token, *_head           | strides, in elements                                                                            |
| lower, beta_top           | the bound of a gate; the largest beta that a raw one is activated to, 0 for one that is already |
| length                    | tokens of every sequence, or 0 where `cu` has them                                              |
| halvings                  | how often N sequences are halved to find one of them                                            |
| chunks ... helpers        | a `kda_schedule.Schedule`                                                                       |
| clusters                  | of the fused kernel, which take N HV heads in waves                                             |
| longest                   | tokens of packed sequences: where none has more the call is the fused kernel's, otherwise the   |
|                           | split kernels' (`common/kda_lengths.py`); `ANY_LENGTH` and `NO_LENGTH` where that is settled    |

To hand over a tensor would cost the caller microseconds, so tensors are addresses and strides.
"""

from __future__ import annotations

import enum

from cula.core.constants import CHUNK
from cula.ops.cute.abi import TMA_BYTES, Abi, Section, Workspace, addresses, f32, i32, i64
from cula.ops.cute.states_abi import KINDS_OF_STATES, SLOTS, STEPS

K = V = 128
ANY_LENGTH, NO_LENGTH = 2**31 - 1, -1  # that no sequence exceeds, and that each does


class Kept(enum.IntEnum):
    """Which states inside of a sequence are kept. Rows are counted through the sequences."""

    NOTHING = 0
    STARTS = 1  # at the start of every chunk
    EVERY = 2  # behind every `kept_every` whole chunks
    OFFSETS = 3  # row n: behind the first `kept_offsets[n]` tokens of sequence n, whole chunks; 0 for none


_TENSORS = addresses(
    q=TMA_BYTES, k=TMA_BYTES, v=TMA_BYTES, g=TMA_BYTES, beta=2, A_log=4, dt_bias=4, o=TMA_BYTES, h0=16, ht=16, cu=4
)  # fmt: skip
_SLOTS = (*SLOTS, *addresses(kept=16, kept_offsets=4))
_STRIDES = i64(*(f"{name}_{of}" for name in "qkvgo" for of in ("token", "head")), "beta_token")
_STATES = (*STEPS, *i64("kept_step"), *KINDS_OF_STATES, *i32("kept_kind", "kept_mode", "kept_every", "kept_rows"))
_PROBLEM = (*i32("T", "N", "H", "HV"), *f32("scale", "lower", "beta_top"), *i32("beta_bits", "has_h0", "has_ht", "length"))
_SCHEDULE = i32(
    "halvings", "chunks", "segments", "per_segment", "per_chained_segment", "has_transitions", "helpers", "longest"
)  # fmt: skip

SPLIT = Abi("kda", _TENSORS, _SLOTS, addresses(workspace=64), _STRIDES, _STATES, _PROBLEM, _SCHEDULE)
FUSED = Abi("fused_kda", _TENSORS, _SLOTS, _STRIDES, _STATES, _PROBLEM, i32("clusters", "longest"))


def of_gates(abi: Abi, has_scalar_gate: bool, g_bytes: int) -> Abi:
    """The description for gates of so many bytes: one a head is read by itself, gates of channels are read by TMA."""
    return abi.with_alignment(g=g_bytes) if has_scalar_gate else abi


# The workspace. A record is a chunk's of one head. A segment's transition, S <- M S + B, is one head's too.

VEC = 256  # floats of a record: e^{G_C} [128], b [64], and what bounds the chunk's transition, 4 to be added
BETA, BOUND = 128, 192  # where the latter two begin
LOWER_LEFT, UPPER_RIGHT = 1, 2  # quarters of a square, rows first: that of T^T and that of P which are zero
COUNT = 3  # the bits of a segment's word in `done` that count its B and M; the others are those of |M|^2, a float32
TILE_BYTES, SQUARE_BYTES, STATE = CHUNK * K * 2, CHUNK * CHUNK * 2, V * K

# What the intra-chunk kernel makes. It comes first, so that a workspace which is kept serves the backward too.
TILES = Workspace(
    (
        Section("tiles", "records", 3 * TILE_BYTES),  # kb, qg, kr
        Section("T", "records", SQUARE_BYTES),
        Section("P", "records", SQUARE_BYTES),
        Section("vec", "records", 4 * VEC),
    )
)
WORKSPACE = Workspace(
    (
        *TILES.sections,
        Section("done", "segments", 4),  # how many of B and M there are, and M's norm
        Section("B", "transitions", 4 * STATE),
        Section("M", "transitions", 2 * 2 * STATE),  # a pair of 16-bit values, hi + lo
    )
)
