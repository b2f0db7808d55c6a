# SPDX-License-Identifier: Apache-2.0
"""Raw kernels: tensors in, tensors out. No autograd, no choice of backend, no checks of user input.

Every backend is a folder here whose modules export the same names, so that swapping one for another is importing
another module. Arguments have passed `cula.contract`: shapes agree, last dimensions of tokens are contiguous (other strides
may be anything), offsets are int32; they, states and a gate's parameters are contiguous.

| module         | function                                         | returns                                         |
|----------------|--------------------------------------------------|-------------------------------------------------|
| `kda.py`       | `kda_fwd(problem, x, out=None)`                  | `KdaForward`                                    |
|                | `record_kda_fwd(problem, x, out)` (optional)     | a `Plan` for calls like this one, or None       |
|                | `kda_bwd(problem, x, saved, do, dht)`            | `KdaGrads`, each in the dtype of its input      |
|                | `kda_map(problem, x)`                            | `(M, B)`: the affine map of each sequence       |
|                | `kda_state_grad(problem, x, do, dht=None)`       | `d_initial_state` and nothing else              |
| `lightning.py` | `lightning_fwd(problem, x, out=None)`            | `(o, final_state or None)`                      |
|                | `record_lightning_fwd(problem, x, out)`          | a `Plan` for calls like this one, or None       |
|                | (optional)                                       |                                                 |
|                | `lightning_fwd_pool(problem, x, pool, indices,   | o; states come from a pool's slots and go       |
|                | has_initial_state, out)` (optional)              | there                                           |
|                | `pool_why_not(problem, pool_dtype, slot_stride,  | why not from this pool, as a sentence, or None; |
|                | address)` (with it)                              | asked before                                    |
|                | `lightning_bwd(problem, x, do, dht)`             | `(dq, dk, dv, d_initial_state or None)`         |
|                | `lightning_map(problem, x)`                      | `(M, B)`, M one number a head: [N, HV, 1, 1]    |
|                | `lightning_state_grad(problem, x, do, dht=None)` | `d_initial_state` and nothing else              |
| `decode.py`    | `decode(problem, x)`                             | `o [N, T, HV, V]`; writes x.state, ..., x.out   |
|                | `record_decode(problem, x, given)` (optional)    | a `Plan` for calls like this one, or None       |

`dht` is None when nothing was differentiated through the final state. States are [N, HV, V, K], so a sequence maps its
first state to its last as `ht = h0 @ M + B` with M [N, HV, K, K] and B [N, HV, V, K]; a gradient goes back through it
as `dh0 = dht @ M^T + C`, C being `*_state_grad` at dht = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from cula.ops.native import Recipe, Tensors

# How to make a call for tensors of the shapes, strides, dtypes and device it was made for (see `cula.plans`); a function returns
# None where it cannot.
Plan = Recipe | Callable[[Tensors], Any]


class KdaForward(NamedTuple):
    """What a KDA forward returns."""

    o: Tensor  # [B, T, HV, V]
    final_state: Tensor | None  # [N, HV, V, K] float32, where options.output_final_state
    states: Tensor | None  # [B, NT, HV, V, K] float32, where options.return_intermediate_states
    saved: tuple[Tensor | None, ...] = ()  # what the same backend's kda_bwd may use; it must do without, too


class KdaGrads(NamedTuple):
    """Gradients of a KDA call, in the order of `KdaInputs`; None where the input is None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dA_log: Tensor | None
    ddt_bias: Tensor | None
    d_initial_state: Tensor | None
