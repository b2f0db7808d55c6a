# SPDX-License-Identifier: Apache-2.0
"""What crosses from host to kernel about a sequence's first and last states, for every family. Free of cutlass.

| argument                | what                                                                                                |
|-------------------------|-----------------------------------------------------------------------------------------------------|
| h0, ht                  | states [slots, HV, V, K], of a `StateKind`; there if `has_h0`, `has_ht`                             |
| read_from, write_to     | [N], where `index_bits` is 32 or 64: the slots of first and last states; otherwise the sequence's   |
|                         | number. Slots are those from `first_slot` to `num_slots` - 1, other numbers stand for none: such a  |
|                         | sequence starts from zero, and its last state is dropped                                            |
| has_state               | [N] bytes, or address 0: where one is 0 the sequence starts from zero                               |
| state_step, index_step, | bytes from a slot, an index, a byte of `has_state` to the next                                      |
| mask_step               |                                                                                                     |
"""

from __future__ import annotations

import enum

from cula.ops.cute.abi import addresses, i32, i64


class StateKind(enum.IntEnum):
    """The dtype of states in memory, which kernels look at when they run."""

    F32 = 0
    BF16 = 1
    F16 = 2


SLOTS = addresses(read_from=4, write_to=4, has_state=1)
STEPS = i64("state_step", "index_step", "mask_step")
KINDS_OF_STATES = i32("state_kind", "index_bits", "first_slot", "num_slots")
