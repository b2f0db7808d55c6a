# SPDX-License-Identifier: Apache-2.0
"""KDA in Triton: any gate, any K up to 256, any V, sm_80 and later.

| module           | kernels                              | reads                      | writes                                 |
|------------------|--------------------------------------|----------------------------|----------------------------------------|
| `kda_intra`      | intra_fwd: chunk, head               | q, k, g, beta              | kb, kr, qg, T, Aqk, ... (`IntraTiles`) |
| `kda_recurrence` | recurrence_fwd: chain, head, BV rows | IntraTiles, v, first state | o, last state; or h and u; or (M, B)   |
| `kda_intra_bwd`  | scores_bwd, states_bwd, finish_bwd   | inputs, dO, h, dh, u, dx   | all other gradients                    |
| `kda_pairs_bwd`  | pairs_bwd                            |                            |                                        |

Around them: `kda_fwd` and `kda_bwd` (the order of the passes), `kda_launches` (each launch and its workspace), `kda_schedule`
(how a problem is cut, precisions, constants), `configs` (tiles), and what they share: `gate`, `kda_levels`, `tiles`, `varlen`,
`launch`. Head dims that are no powers of two are masked inside of the kernels (`tiles`).

A forward is intra + recurrence. A chain is a sequence, or a segment of one where too few sequences and heads would leave the GPU
idle (`configs.kda_segment_chunks`). A forward that will be differentiated keeps what costs most to make and little to hold: T and
Aqk (64 + 64 numbers a token and head) and the segments' transitions and first states. The backward makes kb, kr, qg, the states
and U again (or takes them, too, with `disable_recompute`), then runs the chains in reverse, then the chunks.

The host reads no device memory: packed input is launched on an upper bound of its chunks, T // 64 + N, and surplus programs
find in a table made on the device that they have nothing to do. There are no atomics: every sum has a fixed order.
"""

from .decode import decode as kda_decode
from .decode import record_decode as record_kda_decode
from .kda_bwd import kda_bwd, record_kda_bwd
from .kda_fwd import kda_fwd, kda_transition, record_kda_fwd

__all__ = [
    "kda_bwd",
    "kda_decode",
    "kda_fwd",
    "kda_transition",
    "record_kda_bwd",
    "record_kda_decode",
    "record_kda_fwd",
]
