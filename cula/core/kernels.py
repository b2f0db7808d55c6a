# SPDX-License-Identifier: Apache-2.0
"""What a backend's kernels are called, take and return.

A backend is a package under `cula/ops/` with a module for each family that it serves. For a family `kda`, its module may export:

| function                                        | returns                                                          |
|-------------------------------------------------|------------------------------------------------------------------|
| `kda_fwd(problem, x, out=None)`                 | `Forward`                                                        |
| `kda_bwd(problem, x, saved, do, dht)`           | a gradient for each input but `cu_seqlens`, in order, in the     |
|                                                 | input's dtype; None where the input is None or has none          |
| `kda_transition(problem, x)`                    | `(M, B)`: what each sequence does to a state                     |
| `kda_state_grad(problem, x, do, dht=None)`      | `d_initial_state` and nothing else                               |
| `kda_fwd_pool(problem, x, pool, out=None)`      | o; states come from a pool's slots and go there                  |
| `pool_why_not(problem)`                         | why `kda_fwd_pool` does not serve a call, or None                |
| `kda_fwd_checkpoints(problem, x, pool,`         | `Forward`; keeps states inside of the sequences. The pool is     |
| `checkpoints, out=None)`                        | None, or read and written as by `kda_fwd_pool`                   |
| `checkpoints_why_not(problem)`                  | why it does not serve a call, or None                            |
| `record_kda_fwd(problem, x, out)`,              | a `LaunchRecord` for calls like this one, or None                |
| `record_kda_fwd_pool(problem, x, pool, out)`,   |                                                                  |
| `record_kda_fwd_checkpoints(problem, x, pool,`  |                                                                  |
| `checkpoints, out)`                             |                                                                  |
| `record_kda_fwd_saved(problem, x, out)`         | the same for a forward that saves more than its inputs; makes o, |
|                                                 | the final state and what is saved                                |
| `record_kda_bwd(problem, x, saved, do, dht)`    | the same for a backward; takes x, what was saved, do and dht     |
| `kda_decode(problem, x)`                        | `o [N, T, HV, V]`; writes x.state, x.intermediate_states, x.out  |
| `record_kda_decode(problem, x, given)`          | a `LaunchRecord` for calls like this one, or None                |
| `why_not(op, problem)`                          | why `op` of this module does not serve a call, or None           |

All are optional; what is missing, the backend does not serve. Arguments have passed the family's checks: shapes agree, last
dimensions of tokens are contiguous (other strides may be anything), offsets are int32; they, states and a gate's parameters are
contiguous. `dht` is None where nothing was differentiated through the final state.

States are [N, HV, V, K], so a sequence maps its first state to its last as `ht = h0 @ M + B` with M [N, HV, K, K] (or one
number a head, [N, HV, 1, 1]) and B [N, HV, V, K]; a gradient goes back through it as `dh0 = dht @ M^T + C`, C being
`*_state_grad` at dht = 0.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Forward(NamedTuple):
    """What a forward returns."""

    o: Tensor  # [B, T, HV, V]
    final_state: Tensor | None  # [N, HV, V, K] float32, where options.output_final_state
    states: Tensor | None = None  # [B, NT, HV, V, K] float32 at chunk starts, where options.return_intermediate_states
    saved: tuple[Tensor | None, ...] = ()  # what the same backend's backward may use; it must do without, too


class Pool(NamedTuple):
    """The slots that a prefill reads its first states from and leaves its last ones in."""

    states: Tensor  # [P, HV, V, K]
    indices: Tensor  # [N]; one that is null starts at zero and writes nothing
    has_initial_state: Tensor | None  # [N] bool; False starts from zero and still writes the slot
    null_is_nonpositive: bool = False  # index 0 is null, as negative ones always are

    @property
    def first_slot(self) -> int:
        """The least index that is not null."""
        return int(self.null_is_nonpositive)


class Checkpoints(NamedTuple):
    """States inside of the sequences, and where they are kept: behind every so many tokens, one row after the other, or one for
    each sequence. Where there is no such state the rows are left as they are."""

    states: Tensor  # [M, HV, V, K]
    every: int | None  # tokens, whole chunks
    offsets: Tensor | None  # [N] int32: row n is the state behind so many tokens of sequence n, whole chunks; 0: none
