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
otherwise the pool's slot. A null slot makes the row padding: zeros come out, no state is read or written.

States move at the speed of memory: 2 * N * HV * V * K * (bytes an element), once in and once out, is the floor.
Limits: K <= 256 (any V). Grid: 1-D, so N is bounded only by 2^31 programs; for any N there are two kernels at most.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cula.contract import DecodeInputs, DecodeProblem
from cula.ops.host import form_of
from cula.ops.native import Address, Recipe
from cula.ops.triton.launch import ALIGNMENT, Launch

LOG2_E = tl.constexpr(1.4426950408889634)
L2_NORM_EPS = tl.constexpr(1e-6)
# Parameters that one kernel takes at any address: of these it reads one number at a time.
ANY_ADDRESS = ["indices", "beta", "A_log", "decay", "accepted"]
MANY_STATES = 1024  # of a call, one a row and value head: from here on tiles of states [K, V] are larger


# Device code


@triton.jit
def _is_null(slot, NULL_IS_NONPOSITIVE: tl.constexpr):
    return slot <= 0 if NULL_IS_NONPOSITIVE else slot < 0


@triton.jit
def _load_tile(p, m_s, IS_WHOLE: tl.constexpr):
    """A tile of a state in fp32; zeros past its edges."""
    if IS_WHOLE:
        return tl.load(p).to(tl.float32)
    else:
        return tl.load(p, mask=m_s, other=0.0).to(tl.float32)


@triton.jit
def _store_tile(p, b_s, m_s, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        tl.store(p, b_s.to(p.dtype.element_ty))
    else:
        tl.store(p, b_s.to(p.dtype.element_ty), mask=m_s)


# The tile S is [BV, BC] or cut, [BR, NC, NR, BC]; accordingly a vector over K is [BC] or [BR, NC, 1, BC], and what there is
# one of for each row [BV] or [BR, NR].


@triton.jit
def _sum(b_x):
    """Over K. Pieces first, which are in registers."""
    if len(b_x.shape) == 1:
        return tl.sum(b_x, axis=0)
    elif len(b_x.shape) == 2:
        return tl.sum(b_x, axis=1)
    else:
        return tl.sum(tl.sum(b_x, axis=1), axis=2)


@triton.jit
def _across(b_x):
    """A vector over K, to meet S."""
    return b_x[None, :] if len(b_x.shape) == 1 else b_x


@triton.jit
def _down(b_x):
    """What there is one of for each row, or a sum over K of a vector, to meet S or a vector."""
    if len(b_x.shape) == 0:
        return b_x
    elif len(b_x.shape) == 1:
        return b_x[:, None]
    else:
        return b_x[:, None, :, None]


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def _log_decay(b_x, b_A, lower_bound, GATE: tl.constexpr):
    """The log decay: x itself, -exp(A) softplus(x) or lower_bound sigmoid(exp(A) x); the bias is in x."""
    if GATE == "log":
        return b_x
    elif GATE == "softplus":
        return -_exp(b_A) * (tl.maximum(b_x, 0.0) + tl.log(1.0 + _exp(-tl.abs(b_x))))
    else:
        return lower_bound * tl.sigmoid(_exp(b_A) * b_x)


@triton.jit(do_not_specialize_on_alignment=ANY_ADDRESS)
def decode_kernel(
    q,
    k,
    v,
    pool,
    indices,
    g,
    beta,
    A_log,
    dt_bias,
    decay,
    accepted,
    kept,
    o,
    q_strides,
    k_strides,
    v_strides,
    g_strides,
    beta_strides,
    A_stride,
    bias_strides,
    decay_stride,
    o_strides,
    slot_stride,
    index_strides,
    accepted_stride,
    kept_strides,
    scale,
    lower_bound,
    T: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NC: tl.constexpr,
    NR: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    PER_LANE: tl.constexpr,
    GATE: tl.constexpr,
    HAS_SCALAR_GATE: tl.constexpr,
    HAS_TOKEN_INDICES: tl.constexpr,
    USE_L2_NORM: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    BETA_MAX: tl.constexpr,
    NULL_IS_NONPOSITIVE: tl.constexpr,
    COMMIT: tl.constexpr,
    STATE_IS_KV: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One (row, value head, V block). `decay` given: Lightning; otherwise KDA."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
    BV: tl.constexpr = NR * BR
    NV: tl.constexpr = (V + BV - 1) // BV
    IS_WHOLE: tl.constexpr = (NC * BC == K) and (V % BV == 0)
    i_v, i_nh = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_h = i_nh % HV
    i_n = (i_nh // HV).to(tl.int64)
    i_qk = i_h // (HV // H)

    if NC * BR > 1:
        # The same numbers as arange's, but the compiler sees no more than PER_LANE in a row and gives a lane no more.
        o_c = tl.arange(0, BC) // PER_LANE * PER_LANE + tl.arange(0, BC) % PER_LANE
        o_k = tl.arange(0, NC)[None, :, None, None] * BC + o_c[None, None, None, :]
        o_k = tl.broadcast_to(o_k, [BR, NC, 1, BC])
        o_v = i_v * BV + tl.arange(0, NR)[None, :] * BR + tl.arange(0, BR)[:, None]  # [BR, NR]
    else:
        o_k = tl.arange(0, BC)
        o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = _down(m_v) & _across(m_k)
    p_o = o + i_n * o_strides[0] + i_h * o_strides[2] + o_v * o_strides[3]

    num_accepted = 0
    if accepted is not None:
        num_accepted = tl.load(accepted + i_n * accepted_stride).to(tl.int32)
    if indices is None:
        slot = i_n
    else:
        p_index = indices + i_n * index_strides[0]
        if HAS_TOKEN_INDICES and accepted is not None:
            slot = tl.load(p_index + tl.maximum(num_accepted - 1, 0) * index_strides[1]).to(tl.int64)
        else:
            slot = tl.load(p_index).to(tl.int64)
        if _is_null(slot, NULL_IS_NONPOSITIVE):
            for i_t in range(T):
                tl.store(p_o + i_t * o_strides[1], tl.zeros(o_v.shape, dtype=o.dtype.element_ty), mask=m_v)
            return

    # A slot is contiguous, [V, K] or [K, V]; the kept states may lie anyhow.
    o_s = (_down(o_v) + _across(o_k) * V) if STATE_IS_KV else (_down(o_v) * K + _across(o_k))
    pool += i_h * (V * K)
    if kept is None:
        b_s = _load_tile(pool + slot * slot_stride + o_s, m_s, IS_WHOLE)
    else:
        if STATE_IS_KV:
            o_kept = _down(o_v) * kept_strides[4] + _across(o_k) * kept_strides[3]
        else:
            o_kept = _down(o_v) * kept_strides[3] + _across(o_k) * kept_strides[4]
        kept += i_n * kept_strides[0] + i_h.to(tl.int64) * kept_strides[2]
        if num_accepted > 0:
            b_s = _load_tile(kept + tl.cast(num_accepted - 1, tl.int64) * kept_strides[1] + o_kept, m_s, IS_WHOLE)
        else:
            b_s = _load_tile(pool + slot * slot_stride + o_s, m_s, IS_WHOLE)

    p_q = q + i_n * q_strides[0] + i_qk * q_strides[2] + o_k
    p_k = k + i_n * k_strides[0] + i_qk * k_strides[2] + o_k
    p_v = v + i_n * v_strides[0] + i_h * v_strides[2] + o_v
    for i_t in range(T):
        b_q = tl.load(p_q + i_t * q_strides[1], mask=m_k, other=0.0)
        b_k = tl.load(p_k + i_t * k_strides[1], mask=m_k, other=0.0)
        b_v = tl.load(p_v + i_t * v_strides[1], mask=m_v, other=0.0)
        if decay is not None:
            b_decay = tl.load(decay + i_h * decay_stride)
        else:
            p_g = g + i_n * g_strides[0] + i_t * g_strides[1] + i_h * g_strides[2]
            b_A = 0.0 if A_log is None else tl.load(A_log + i_h * A_stride)
            b_bias = 0.0
            if HAS_SCALAR_GATE:
                b_g = tl.load(p_g)
                if dt_bias is not None:
                    b_bias = tl.load(dt_bias + i_h * bias_strides[0])
            else:
                b_g = tl.load(p_g + o_k, mask=m_k, other=0.0)
                if dt_bias is not None:
                    b_bias = tl.load(dt_bias + i_h * bias_strides[0] + o_k * bias_strides[1], mask=m_k, other=0.0)
            b_beta = tl.load(beta + i_n * beta_strides[0] + i_t * beta_strides[1] + i_h * beta_strides[2])

        b_q = b_q.to(tl.float32)
        b_k = b_k.to(tl.float32)
        if USE_L2_NORM:
            b_q *= _down(tl.rsqrt(_sum(b_q * b_q) + L2_NORM_EPS))
            b_k *= _down(tl.rsqrt(_sum(b_k * b_k) + L2_NORM_EPS))
        b_q *= scale
        b_kq = _sum(b_k * b_q)
        b_u = b_v.to(tl.float32)
        if decay is not None:
            b_s *= _exp(-b_decay)
            b_o = _sum(b_s * _across(b_q))
        else:
            b_g = _log_decay(b_g.to(tl.float32) + b_bias, b_A, lower_bound, GATE)
            b_s *= _exp(b_g) if HAS_SCALAR_GATE else _across(_exp(b_g))
            b_beta = b_beta.to(tl.float32)
            if USE_BETA_SIGMOID:
                b_beta = BETA_MAX * tl.sigmoid(b_beta)
            b_u = b_beta * (b_u - _sum(b_s * _across(b_k)))
            b_o = _sum(b_s * _across(b_q))
        b_s += _down(b_u) * _across(b_k)
        b_o += b_u * b_kq
        tl.store(p_o + i_t * o_strides[1], b_o.to(o.dtype.element_ty), mask=m_v)
        if kept is not None:
            _store_tile(kept + tl.cast(i_t, tl.int64) * kept_strides[1] + o_kept, b_s, m_s, IS_WHOLE)
        if COMMIT and HAS_TOKEN_INDICES:
            slot_t = tl.load(indices + i_n * index_strides[0] + i_t * index_strides[1]).to(tl.int64)
            if not _is_null(slot_t, NULL_IS_NONPOSITIVE):
                _store_tile(pool + slot_t * slot_stride + o_s, b_s, m_s, IS_WHOLE)
    if COMMIT and not HAS_TOKEN_INDICES:
        _store_tile(pool + slot * slot_stride + o_s, b_s, m_s, IS_WHOLE)


# Host code


def _tiles(problem: DecodeProblem, BK: int) -> tuple[int, int]:
    """BV and num_warps. A tile of one warp needs no barrier for its sums over K.

    H200, K = V = 128, H = 32, us at N = 1 / 64 / 256. KDA: 16 rows and 1 warp 3.2 / 69 / 267, 8 and 1 3.4 / 70 / 270,
    32 and 4 3.8 / 78 / 295. Lightning: 8 and 1 2.8 / 69 / 268, 16 and 1 3.0 / 69 / 268, 32 and 4 3.3 / 72 / 274.
    In the layout [K, V] a row of the tile is a column of BV channels, and more of them ask less of the memory: 64 and 4
    3.4 / 71 / 271, 32 and 1 3.2 / 75 / 289. All with the tile uncut, which several tokens a row in the layout [V, K] do
    not have: cut, a token takes 33 shuffles a warp instead of 175 (read off the machine code). Taken during development.
    """
    if problem.options.state_is_kv:
        BV, num_warps = (64, 4) if problem.N * problem.HV >= MANY_STATES else (32, 1)
    else:
        BV, num_warps = max((2048 if problem.options.is_kda else 1024) // BK, 4), 1
    return min(BV, 1 << (problem.V - 1).bit_length()), num_warps


def _strides(t: Tensor | None, T: int) -> tuple[int, ...] | None:
    """The strides, without that of a single token: a packed call's counts the rows, and would compile for each."""
    if t is None:
        return None
    strides = t.stride()
    return strides if T > 1 or len(strides) < 2 else (strides[0], 0, *strides[2:])


def _arguments(
    problem: DecodeProblem, x: DecodeInputs, o: Tensor
) -> tuple[int, tuple[Tensor | None, ...], tuple, dict[str, Any]]:
    """The kernel's grid, its tensors, all its other parameters, and how it is launched."""
    options, T = problem.options, problem.T
    # Programmatic dependent launch: blocks may come to the multiprocessors while the kernel in front, whichever it is, still runs
    # there, and wait for its end before they read anything.
    is_early = problem.sm is not None and problem.sm >= (9, 0)
    BK = 1 << (problem.K - 1).bit_length()
    BV, num_warps = _tiles(problem, BK)
    grid = problem.N * problem.HV * -(-problem.V // BV)
    BR, BC = 1, BK
    if T > 1 and not options.state_is_kv:
        BR, BC = min(4, BV), min(BK, 128 // x.state.element_size())
    tensors = (*x[:12], o)
    strides = (
        _strides(x.q, T),
        _strides(x.k, T),
        _strides(x.v, T),
        _strides(x.g, T),
        _strides(x.beta, T),
        None if x.A_log is None else x.A_log.stride(0),
        None if x.dt_bias is None else x.dt_bias.stride(),
        None if x.decay is None else x.decay.stride(0),
        _strides(o, T),
        x.state.stride(0),
        _strides(x.state_indices, T),
        None if x.num_accepted_tokens is None else x.num_accepted_tokens.stride(0),
        _strides(x.intermediate_states, T),
    )
    constants = dict(
        T=T,
        H=problem.H,
        HV=problem.HV,
        K=problem.K,
        V=problem.V,
        NC=BK // BC,
        NR=BV // BR,
        BR=BR,
        BC=BC,
        PER_LANE=16 // x.state.element_size(),
        GATE=problem.gate,
        HAS_SCALAR_GATE=problem.has_scalar_gate,
        HAS_TOKEN_INDICES=problem.has_token_indices,
        USE_L2_NORM=options.use_qk_l2norm_in_kernel,
        USE_BETA_SIGMOID=options.use_beta_sigmoid_in_kernel,
        BETA_MAX=2.0 if options.allow_neg_eigval else 1.0,
        NULL_IS_NONPOSITIVE=options.null_is_nonpositive,
        COMMIT=options.commit,
        STATE_IS_KV=options.state_is_kv,
        IS_EARLY=is_early,
    )
    assert list(constants) == decode_kernel.arg_names[-len(constants) :]
    launch = {"num_warps": num_warps} | ({"launch_pdl": True} if is_early else {})
    return grid, tensors, (*strides, problem.scale, options.lower_bound, *constants.values()), launch


def decode(problem: DecodeProblem, x: DecodeInputs) -> Tensor:
    """Outputs `[N, T, HV, V]`, in `x.out` where given; updates `x.state` and `x.intermediate_states` in place."""
    shape = (problem.N, problem.T, problem.HV, problem.V)
    o = torch.empty(shape, dtype=x.q.dtype, device=x.q.device) if x.out is None else x.out
    grid, tensors, rest, launch = _arguments(problem, x, o)
    decode_kernel[(grid,)](*tensors, *rest, **launch)
    return o


def record_decode(problem: DecodeProblem, x: DecodeInputs, given: DecodeInputs) -> Recipe | None:
    """A recipe for calls like this one, or None where it has none; x are the tensors as normalised, `given` as they came, which
    are at the same addresses. It makes o and names the pool."""
    like_v = torch.empty(given.v.shape, dtype=given.v.dtype, device=given.v.device)
    grid, tensors, rest, options = _arguments(problem, x, like_v.view(x.v.shape) if x.out is None else x.out)
    names = decode_kernel.arg_names
    of = [Address(i if i < 12 else ~0, 1 if names[i] in ANY_ADDRESS else ALIGNMENT) for i in range(len(tensors))]
    if any(t is not None and t.data_ptr() % a.alignment for a, t in zip(of, tensors)):
        return None
    launch = Launch(decode_kernel, grid, tensors, rest, of, **options)
    fields = x._fields
    outputs = (form_of(like_v) if x.out is None else fields.index("out"), fields.index("state"))
    return Recipe(launch.device, (launch.run,), outputs, is_ready=launch.is_ready)
