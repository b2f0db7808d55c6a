# SPDX-License-Identifier: Apache-2.0
"""What crosses from host to kernel for the backward of Gated DeltaNet. Free of cutlass.

Arguments that the forward has too are those of `gdn_abi.py`; these come besides:

| argument   | what                                                                                                           |
|------------|----------------------------------------------------------------------------------------------------------------|
| do         | [T, HV, 128], bf16: the gradient of the outputs                                                                |
| dht, dh0   | [N, HV, 128 (V), 128 (K)], float32: gradients of the last and the first states; there if `has_dht`, `has_dh0`  |
| dq, dk     | [T, H, 128], bf16, contiguous, as all gradients are                                                            |
| g          | [T, HV], in bf16 or float32: kernels of its type                                                               |
| dv, dg, dbeta | as v, g and beta                                                                                            |
| dA_log, ddt_bias | [HV], float32; there if `has_A`, `has_bias`                                                              |
| segments ... has_transitions | a `kda_bwd_schedule.Schedule`                                                                |
| home_of_T, home_of_P | a `kda_bwd_abi.Home` each                                                                           |
| halvings   | how often N sequences are halved to find one of them                                                           |
| workspace  | `WORKSPACE`                                                                                                     |
"""

from __future__ import annotations

from cula.ops.cute import kda_bwd_abi
from cula.ops.cute.abi import TMA_BYTES, Abi, InTurns, Section, Workspace, addresses, f32, i32, i64

SHARES = 2  # floats of a chunk and value head: what it adds to the gradients of dt_bias and A_log
OF_BIAS, OF_A = 0, 1

_GIVEN = addresses(
    q=TMA_BYTES, k=TMA_BYTES, v=TMA_BYTES, g=2, beta=2, A_log=4, dt_bias=4, do=TMA_BYTES, h0=16, dht=16, cu=4
)  # fmt: skip
_MADE = addresses(dq=TMA_BYTES, dk=16, dv=TMA_BYTES, dg=2, dbeta=2, dA_log=4, ddt_bias=4, dh0=16, workspace=64)
_STRIDES = i64(*(f"{name}_{of}" for name in ("q", "k", "v", "g", "do") for of in ("token", "head")), "beta_token")
_PROBLEM = (
    *i32("T", "N", "H", "HV"),
    *f32("scale", "beta_top"),
    *i32("beta_bits", "has_h0", "has_dht", "has_dh0", "has_A", "has_bias", "length", "halvings", "chunks"),
)

BACKWARD = Abi("gdn_bwd", _GIVEN, _MADE, _STRIDES, _PROBLEM, kda_bwd_abi.SCHEDULE, kda_bwd_abi.HOMES)

# What KDA's kernels hand on. A record is a chunk's of one value head, a transition a segment's.
_SHARES = Section("shares", "records", 4 * SHARES)
WORKSPACE = Workspace((kda_bwd_abi.VECTORS, InTurns((kda_bwd_abi.UNTIL_WALKED, (_SHARES,))), *kda_bwd_abi.WALKED))
