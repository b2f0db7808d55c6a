# SPDX-License-Identifier: Apache-2.0
"""One to eight tokens a row on a pool of states: KDA and Lightning decode in Triton, one launch.

One program owns a tile [BV, K] of the state S [V, K] of one (row, value head): it reads the tile once, keeps it in fp32
registers over the row's tokens, and writes it once (once a token where each draft token's state is kept). The tile is held
as [BR, NC, NR, BC]: key channels are NC pieces of BC, rows NR groups of BR. Lanes lie along BR and BC, the rest is in a
thread's registers. With several tokens a row, BC is 128 bytes: a sum over K then takes three shuffles, not five, and of a
quarter as many values. Vectors over K are loaded as [BR, NC, 1, BC], which costs loads that hit the L1, so that each lane has
its channels without an exchange.

KDA, a token:         S <- S diag(exp g);   u = beta (v - S k);   o = scale (S q + u (k . q));   S <- S + u k^T
Lightning, a token:   S <- exp(-s) S;       u = v;                o and S as above

The two products with S come before the update, so they share one pass over the tile: (S + u k^T) q = S q + u (k . q).

Start state of row n, with a = num_accepted_tokens[n] (0 where not given) and slot = state_indices[n] or
state_indices[n, max(a - 1, 0)] (n without indices):  intermediate_states[n, a - 1] where that buffer is given and a >= 1,
otherwise the pool's slot. A null slot makes the row padding: zeros come out, no state is read or written. Row n of
intermediate_states is row intermediate_state_indices[n] where those are given; a negative one keeps nothing.

Ragged rows (cu_seqlens): row n has the tokens from cu_seqlens[n] to cu_seqlens[n + 1], at most T of them, and a row without any
does nothing. T is a bound, so that one kernel serves rows of any lengths.

States move at the speed of memory: 2 * N * HV * V * K * (bytes an element), once in and once out, is the floor.
The kernel is in `decode_kernel.py`.
Limits: K <= 256 (any V). Grid: 1-D, so N is bounded only by 2^31 programs; for any N there are two kernels at most.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cula.core.problem import DecodeOptions, DecodeProblem
from cula.core.replay.record import Address, LaunchRecord
from cula.core.replay.torch_internals import form_of

from .decode_kernel import decode_kernel
from .launch import ALIGNMENT, Variant, is_ready
from .memory import allocator

MANY_STATES = 1024  # of a call, one a row and value head: from here on tiles of states [K, V] are larger
# The kernel's names for tensors of the call that are not the call's own; the last is the output.
NAMES = {
    "pool": "state",
    "indices": "state_indices",
    "accepted": "num_accepted_tokens",
    "kept": "intermediate_states",
    "kept_rows": "intermediate_state_indices",
    "cu": "cu_seqlens",
}
TENSORS = decode_kernel.tensors[:-1]


def _tiles(problem: DecodeProblem, BK: int) -> tuple[int, int]:
    """BV and num_warps. A tile of one warp needs no barrier for its sums over K.

    H200, K = V = 128, H = 32, us at N = 1 / 64 / 256. KDA: 16 rows and 1 warp 3.2 / 69 / 267, 8 and 1 3.4 / 70 / 270,
    32 and 4 3.8 / 78 / 295. Lightning: 8 and 1 2.8 / 69 / 268, 16 and 1 3.0 / 69 / 268, 32 and 4 3.3 / 72 / 274.
    In the layout [K, V] a row of the tile is a column of BV channels, and more of them ask less of the memory: 64 and 4
    3.4 / 71 / 271, 32 and 1 3.2 / 75 / 289. All with the tile uncut, which several tokens a row in the layout [V, K] do
    not have: cut, a token takes 33 shuffles a warp instead of 175 (read off the machine code). Taken during development.
    """
    if problem.options.state_is_kv:
        is_many = problem.N * problem.HV >= MANY_STATES and not problem.options.batch_invariant
        BV, num_warps = (64, 4) if is_many else (32, 1)
    else:
        BV, num_warps = max((1024 if problem.family == "lightning" else 2048) // BK, 4), 1
    return min(BV, 1 << (problem.V - 1).bit_length()), num_warps


def _strides(t: Tensor | None, p: DecodeProblem) -> tuple[int, ...] | None:
    """The strides, without that of a single token, or of the one row that ragged rows lie in: a packed call's counts the rows,
    and would compile for each."""
    if t is None:
        return None
    strides = t.stride()
    if p.is_ragged and len(strides) > 2:
        return (0, *strides[1:])
    return strides if p.T > 1 or len(strides) < 2 else (strides[0], 0, *strides[2:])


def _schedule(problem: DecodeProblem) -> tuple[int, Variant]:
    """How many programs run, and of which kernel."""
    p = problem
    BV, num_warps = _tiles(p, 1 << (p.K - 1).bit_length())
    dims, gate = (p.T, p.H, p.HV, p.K, p.V), (p.gate, p.has_scalar_gate, p.has_token_indices)
    return p.N * p.HV * -(-p.V // BV), _kernel(p.sm, dims, BV, num_warps, p.pool_dtype.itemsize, gate, p.options)


@functools.cache
def _kernel(
    sm: tuple[int, int] | None,
    dims: tuple[int, int, int, int, int],
    BV: int,
    num_warps: int,
    state_bytes: int,
    gate: tuple[str, bool, bool],
    options: DecodeOptions,
) -> Variant:
    """The kernel, by all that it is compiled for, and by nothing else: one serves any number of rows."""
    T, H, HV, K, V = dims
    # Programmatic dependent launch: blocks may come to the multiprocessors while the kernel in front, whichever it is, still runs
    # there, and wait for its end before they read anything.
    is_early = sm is not None and sm >= (9, 0)
    BK = 1 << (K - 1).bit_length()
    BR, BC = 1, BK
    if T > 1 and not options.state_is_kv:
        BR, BC = min(4, BV), min(BK, 128 // state_bytes)
    GATE, has_scalar_gate, has_token_indices = gate
    return decode_kernel.variant(
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        NC=BK // BC,
        NR=BV // BR,
        BR=BR,
        BC=BC,
        PER_LANE=16 // state_bytes,
        GATE=GATE,
        HAS_SCALAR_GATE=has_scalar_gate,
        HAS_TOKEN_INDICES=has_token_indices,
        USE_L2_NORM=options.use_qk_l2norm_in_kernel,
        USE_BETA_SIGMOID=options.use_beta_sigmoid_in_kernel,
        BETA_MAX=2.0 if options.allow_neg_eigval else 1.0,
        NULL_IS_NONPOSITIVE=options.null_is_nonpositive,
        COMMIT=options.commit,
        STATE_IS_KV=options.state_is_kv,
        IS_EARLY=is_early,
        num_warps=num_warps,
        launch_pdl=True if is_early else None,
    )


def _arguments(problem: DecodeProblem, x: Any, o: Tensor) -> dict[str, Any]:
    """What the kernel takes, by its names."""
    options = problem.options
    tensors = {name: getattr(x, NAMES.get(name, name), None) for name in TENSORS} | {"o": o}
    strides = {f"{name}_strides": _strides(t, problem) for name, t in tensors.items()}
    # There is no token among the dimensions of these, or it is not the call's, and slots are contiguous.
    for name in ("dt_bias", "indices", "kept"):
        strides[f"{name}_strides"] = None if (t := tensors[name]) is None else t.stride()
    strides["pool_strides"] = x.state.stride()[:1]
    return {**tensors, **strides, "scale": float(problem.scale), "lower_bound": float(options.lower_bound or 0)}


def decode(problem: DecodeProblem, x: Any) -> Tensor:
    """Outputs `[N, T, HV, V]`, in `x.out` where given; updates `x.state` and `x.intermediate_states` in place."""
    o = x.out
    if o is None:
        o = allocator(x.q.device)(tuple(x.v.shape), x.q.dtype)
    grid, launch = _schedule(problem)
    launch(grid, **_arguments(problem, x, o))
    return o


def record_decode(problem: DecodeProblem, x: Any, given: Any) -> LaunchRecord | None:
    """A record for calls like this one, or None where it has none; x are the tensors as normalised, `given` as they came, which
    are at the same addresses. It makes o and names the pool."""
    like_v = torch.empty(given.v.shape, dtype=given.v.dtype, device=given.v.device)
    arguments = _arguments(problem, x, like_v.view(x.v.shape) if x.out is None else x.out)
    fields = x._fields
    places = {name: NAMES.get(name, name) for name in TENSORS}
    numbers = {name: fields.index(field) if field in fields else None for name, field in places.items()} | {"o": ~0}
    of = {name: Address(i, 1 if name in decode_kernel.any_address else ALIGNMENT) for name, i in numbers.items()}
    if any(arguments[name] is not None and arguments[name].data_ptr() % a.alignment for name, a in of.items()):
        return None
    grid, variant = _schedule(problem)
    device, launch = variant.record(grid, of, **arguments)
    outputs = (form_of(like_v) if x.out is None else fields.index("out"), fields.index("state"))
    return LaunchRecord(device, (launch,), outputs, is_ready=is_ready)
