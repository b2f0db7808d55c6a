# SPDX-License-Identifier: Apache-2.0
"""What the host side of decode and its kernels agree on. Free of cutlass, which the host side does without.

`DECODE` lists the arguments of `decode_host` (`decode_frame.py`); one list serves every kernel of all families, and a tensor
that a family or a call does not have is passed as address 0 with strides of 0.
"""

import enum
import functools

from cula.core.constants import MAX_DECODE_TOKENS
from cula.ops.cute.abi import Abi, addresses, f32, i32, i64

TOKENS = (2, 4, MAX_DECODE_TOKENS)  # that kernels are compiled for, beside one; a call of another number takes the next
TALL_TOKENS = (2, 4)  # that KDA on bfloat16 states also has a kernel with 32 rows a warp for


class Flag(enum.IntFlag):
    """Bits of the argument `flags`."""

    USE_NORM = enum.auto()  # q and k are normalised
    IS_SOFTPLUS = enum.auto()  # the gate; with neither this nor the next bit, g is the log decay itself
    IS_BOUNDED = enum.auto()
    G_IS_F32 = enum.auto()  # otherwise bfloat16
    BETA_IS_F32 = enum.auto()
    INDEX_IS_I64 = enum.auto()  # slots; otherwise int32
    ZERO_IS_NULL = enum.auto()  # slot 0 marks padding too
    COMMIT = enum.auto()  # the states after the last token are written
    IS_SCALAR = enum.auto()  # one gate a head, not one a channel
    PREFETCH = enum.auto()  # the first blocks have the L2 fetch their states before the kernel in front has ended
    # Of calls that go token by token:
    HAS_TOKEN_SLOTS = enum.auto()  # a slot for the state after each token
    ACCEPTED_IS_I64 = enum.auto()
    KEPT_ROWS_IS_I64 = enum.auto()
    OFFSETS_IS_I64 = enum.auto()
    # Of kernels for one gate a head, which read the gate's parameters in either dtype; otherwise bfloat16:
    A_IS_F32 = enum.auto()
    BIAS_IS_F32 = enum.auto()


TOKEN_TENSORS = ("q", "k", "v", "o", "g", "beta")  # [N, T, heads, channels], or [N, T, heads]

# Addresses are named as the fields of a family's inputs; `o` is the output. Tokens and states are read and written in vectors,
# the others number by number. `decode_abi` has what depends on the call.
DECODE = Abi(
    "decode",
    addresses(
        q=16, k=16, v=8, state=16, state_indices=4, g=2, beta=2, A_log=4, dt_bias=4, decay=4, o=8,
    ),
    i64(*(f"{name}_row" for name in TOKEN_TENSORS), "slot_stride", "index_stride"),
    i32(*(f"{name}_{of}" for name in TOKEN_TENSORS for of in ("token", "head"))),
    i32("A_head", "bias_head", "bias_channel", "decay_head"),
    f32("scale", "lower_bound", "beta_top"),  # beta_top: the factor of beta's sigmoid, 0 for a beta that is activated already
    i32("N", "HV", "group", "tokens", "slots", "flags"),  # group: HV / H; slots: of the pool
)  # fmt: skip


# Draft tokens: the call goes token by token, and the state after each may be kept (`common/decode_steps.py`).
_OF_DRAFTS = addresses(num_accepted_tokens=4, intermediate_states=16, intermediate_state_indices=4, cu_seqlens=4)
_STRIDES_OF_DRAFTS = i64(
    "kept_row", "kept_token", "kept_head", "token_slot_stride", "accepted_stride", "kept_rows_stride", "offsets_stride"
)  # fmt: skip
STEPS = Abi("decode_steps", DECODE.addresses, _OF_DRAFTS, DECODE.numbers, _STRIDES_OF_DRAFTS)
_OF_PARAMETERS = {"A_log": 2, "dt_bias": 2}  # where they may be in bfloat16
BESIDES = tuple(a.name for a in (*_OF_DRAFTS, *_STRIDES_OF_DRAFTS))  # what it has that `DECODE` has not


@functools.cache
def decode_abi(T: int, has_scalar_gate: bool) -> Abi:
    """`DECODE` with the alignments of a call of T tokens. Gates a channel are read in vectors, and so is the bias of one token;
    several tokens have it copied number by number."""
    if has_scalar_gate:
        return DECODE.with_alignment(**_OF_PARAMETERS) if T == 1 else DECODE
    return DECODE.with_alignment(g=16, **({"dt_bias": 16} if T == 1 else {}))


@functools.cache
def steps_abi(has_scalar_gate: bool) -> Abi:
    """`STEPS` with the alignments of a call: gates a channel are read in vectors."""
    return STEPS.with_alignment(**_OF_PARAMETERS if has_scalar_gate else {"g": 16})
