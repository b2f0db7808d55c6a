# SPDX-License-Identifier: Apache-2.0
"""What crosses from host to kernel for the KDA backward: the arguments of its host function, the workspace between its kernels.

Free of cutlass. Arguments that the forward has too are those of `kda_abi.py`; these come besides:

| argument       | what                                                                                                       |
|----------------|------------------------------------------------------------------------------------------------------------|
| do             | [T, HV, 128], bf16: the gradient of the outputs                                                            |
| dht, dh0       | [N, HV, 128 (V), 128 (K)], float32: gradients of the last and the first states; there if `has_dht`, `has_dh0` |
| dq, dk         | [T, H, 128], bf16                                                                                          |
| dv, dg, dbeta  | as v, g and beta, contiguous                                                                               |
| dA_log, ddt_bias | as A_log and dt_bias, float32; there if `has_A`, `has_bias`                                               |
| M, B           | [N, HV, 128 (K), 128 (K)] and [N, HV, 128 (V), 128 (K)], float32: transitions of whole sequences           |
| tiles          | `kda_abi.TILES` that the forward kept; there if `has_tiles`, and else made again, in the workspace         |
| segments ... has_transitions | a `kda_bwd_schedule.Schedule`                                                                 |
| home_of_T, home_of_P | a `Home` each                                                                                        |
| makes          | a `Makes`: which of all this a call writes                                                                 |
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from cula.core.constants import CHUNK
from cula.ops.cute.abi import TMA_BYTES, Abi, InTurns, Section, Workspace, addresses, f32, i32, i64
from cula.ops.cute.kda_abi import SQUARE_BYTES, STATE, TILE_BYTES, TILES, VEC, K


class Makes(enum.IntEnum):
    """What a call is for."""

    GRADIENTS = 0  # all but M and B
    TRANSITION = 1  # M and B, which no gradient is given for
    STATE_GRAD = 2  # dh0 alone


class Home(enum.IntEnum):
    """Where T or P of all chunks lies until the recurrences have ended: in the workspace, or where a gradient will be, of which
    nothing is written before then, and all of it afterwards."""

    WORKSPACE = 0
    DV = 1
    DG = 2
    DQ = 3


_GIVEN = addresses(
    q=TMA_BYTES, k=TMA_BYTES, v=TMA_BYTES, g=TMA_BYTES, beta=2, A_log=4, dt_bias=4, do=TMA_BYTES, h0=16, dht=16, cu=4, tiles=64
)  # fmt: skip
_MADE = addresses(
    dq=TMA_BYTES, dk=16, dv=TMA_BYTES, dg=TMA_BYTES, dbeta=2, dA_log=4, ddt_bias=4, dh0=16, M=16, B=16, workspace=64
)  # fmt: skip
WRITTEN = tuple(a.name for a in _MADE if a.name != "workspace")
_STRIDES = i64(*(f"{name}_{of}" for name in ("q", "k", "v", "g", "do") for of in ("token", "head")), "beta_token")
_PROBLEM = (
    *i32("T", "N", "H", "HV"),
    *f32("scale", "lower", "beta_top"),
    *i32("beta_bits", "has_h0", "has_dht", "has_dh0", "has_A", "has_bias", "has_tiles", "length", "halvings", "chunks"),
)
SCHEDULE = i32("segments", "per_segment", "has_transitions")
HOMES = i32("home_of_T", "home_of_P")

BACKWARD = Abi("kda_bwd", _GIVEN, _MADE, _STRIDES, _PROBLEM, SCHEDULE, HOMES, i32("makes"))

# A record is a chunk's of one head, a transition a segment's.

FACTOR_OF_S, FACTOR_OF_DS = 0, 1  # powers of two that S and U, and dS and dX, are scaled by
FACTORS = 2  # floats of a record
SHARES = 2 * 128  # floats of a record: what the chunk adds to the gradients of dt_bias and, by channels, of A_log
# Sums over all channels, of which each of eight warps has a part; [PARTS, 64 tokens] of a record: <k, gradient of b k>, <dX, v>,
# which make the gradient of an activated beta, and the gradient of a log decay, where there is one a head.
OF_STRENGTHS, OF_V, OF_GATES, PARTS = 0, 8, 9, 17

# What the intra-chunk kernel makes is left out where the forward has kept it, and T and P where they have other homes.
VECTORS = Section("vec", "made", 4 * VEC)
UNTIL_WALKED = (  # which nobody reads once the recurrences have ended
    Section("tiles", "made", 3 * TILE_BYTES),
    Section("T", "T", SQUARE_BYTES),
    Section("P", "P", SQUARE_BYTES),
    Section("done", "one", 4),  # which the forward's segments count; those of the backward do not
    Section("M", "transitions", 2 * STATE),
    Section("ends", "transitions", 3 * 4 * STATE),  # B, D and M in float32; then what walks over segments end with
)
WALKED = (  # which the recurrences leave
    Section("S", "records", 2 * STATE),  # before the chunk
    Section("U", "records", TILE_BYTES),
    Section("dS", "records", 2 * STATE),  # after the chunk
    Section("dX", "records", TILE_BYTES),  # negated
    Section("factors", "records", 4 * FACTORS),
)
_FROM_THEN_ON = (  # which nobody writes before
    Section("shares", "records", 4 * SHARES),
    Section("parts", "records", 4 * PARTS * CHUNK),
    Section("dq", "shared", 4 * K),  # where value heads share keys, a share for each: tokens times value heads
    Section("dk", "shared", 4 * K),
)
WORKSPACE = Workspace((VECTORS, InTurns((UNTIL_WALKED, _FROM_THEN_ON)), *WALKED))
WITHOUT_GRADIENTS = Workspace((VECTORS, *UNTIL_WALKED))  # the beginning of it


def homes(records: int, room: Mapping[Home, int]) -> tuple[Home, Home]:
    """Those of T and P: a gradient each that has room, of those that are given with their bytes; the workspace where none has."""
    found = [home for home, size in room.items() if size >= records * SQUARE_BYTES]
    T, P, *_ = *found, Home.WORKSPACE, Home.WORKSPACE
    return T, P


def counts(records: Any, has_tiles: Any, shared: Any, transitions: Any, in_workspace: Sequence[Any]) -> dict[str, Any]:
    """Of what sections have one each; `in_workspace`, whether T and P are there. Integers may be Python's or the DSL's."""
    made = records * (1 - has_tiles)
    T, P = [made * is_there for is_there in in_workspace]
    return {"made": made, "T": T, "P": P, "one": 1, "transitions": transitions, "records": records, "shared": shared}


def tiles_bytes(records: int) -> int:
    """What the intra-chunk kernel makes."""
    return TILES.offsets(records=records)["end"]
