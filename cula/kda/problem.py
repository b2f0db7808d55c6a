# SPDX-License-Identifier: Apache-2.0
"""What a KDA call is: its tensors, its options, what is checked of them, and the problem that describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.core import checks
from cula.core.checks import IO_DTYPES
from cula.core.constants import LOWER_BOUND_MIN
from cula.core.problem import DecodeOptions, DecodeProblem, Problem, describe_tokens, gate_of, normalise_tokens

DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


class KdaInputs(NamedTuple):
    """The tensors of a KDA call."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K], or [B, T, HV]: one gate a head
    beta: Tensor  # [B, T, HV]
    A_log: Tensor | None = None  # [HV] float32 once checked; as models keep it, before
    dt_bias: Tensor | None = None  # [HV, K] float32, or [HV] with one gate a head; likewise
    initial_state: Tensor | None = None  # [N, HV, V, K] float32
    cu_seqlens: Tensor | None = None  # [N + 1] int32


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


class KdaOptions(NamedTuple):
    """The switches of a KDA call, by their public names."""

    scale: float | None = None  # None: K ** -0.5
    lower_bound: float | None = None
    use_gate_in_kernel: bool = False
    safe_gate: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    output_final_state: bool = False
    return_intermediate_states: bool = False
    disable_recompute: bool = False
    null_is_nonpositive: bool = False  # `null_index="nonpositive"`
    batch_invariant: bool = False


@dataclass(frozen=True, kw_only=True)
class KdaProblem(Problem):
    """Everything about a KDA call but its data."""

    family = "kda"

    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    has_scalar_gate: bool
    options: KdaOptions

    @property
    def gate(self) -> str:
        return gate_of(self.options)


def check_kda(x: KdaInputs, options: KdaOptions, who: str = "cula_kda") -> tuple[KdaProblem, KdaInputs]:
    """Validate a KDA call; return its problem and its tensors, normalised (int32 offsets, unit last strides)."""
    tokens = describe_tokens(x, options, who, ("q", "k", "v"), DIFFERENTIABLE)
    B, T, HV, K = tokens["B"], tokens["T"], tokens["HV"], tokens["K"]
    has_scalar_gate = _check_gate_and_beta(who, x.g, x.beta, (B, T), "[B, T", HV, K)
    checks.check_devices(who, x.q.device, g=x.g, beta=x.beta, A_log=x.A_log, dt_bias=x.dt_bias)
    A_log, dt_bias = check_gate(who, options, x.A_log, x.dt_bias, HV, K, has_scalar_gate)
    problem = KdaProblem(**tokens, g_dtype=x.g.dtype, beta_dtype=x.beta.dtype, has_scalar_gate=has_scalar_gate)
    return problem, normalise_tokens(
        x,
        g=x.g.resolve_neg() if has_scalar_gate else checks.unit_last_stride(x.g),
        beta=x.beta.resolve_neg(),
        A_log=None if A_log is None else A_log.contiguous(),
        dt_bias=None if dt_bias is None else dt_bias.contiguous(),
    )


def check_kda_values(x: KdaInputs, problem: KdaProblem, who: str = "cula_kda") -> None:
    """The checks that read data: NaN and Inf, the sign of a log decay. Synchronises on a GPU."""
    checks.check_finite(who, x)
    _check_log_decay(x.g, problem.gate, who)
    if problem.gate == "log" and problem.options.safe_gate and bool((x.g < LOWER_BOUND_MIN).any()):
        raise ValueError(
            f"{who}: g holds a log decay of {float(x.g.min()):.3g}, and safe_gate=True promises {LOWER_BOUND_MIN:g} or more; "
            "leave safe_gate out"
        )


# Decode


class KdaDecodeInputs(NamedTuple):
    """The tensors of a KDA decode: N rows of T tokens, or as they came."""

    q: Tensor  # [N, T, H, K]
    k: Tensor  # [N, T, H, K]
    v: Tensor  # [N, T, HV, V]
    state: Tensor  # [P, HV, V, K] ([P, HV, K, V] for state_layout="kv"); updated in place
    state_indices: Tensor | None = None  # [N], or [N, T]: a slot for each draft token
    g: Tensor | None = None  # [N, T, HV, K] or [N, T, HV]
    beta: Tensor | None = None  # [N, T, HV]
    A_log: Tensor | None = None  # [HV]
    dt_bias: Tensor | None = None  # [HV, K] or [HV]
    num_accepted_tokens: Tensor | None = None  # [N]
    intermediate_states: Tensor | None = None  # [N, T, HV, V, K] (K, V for "kv"), or larger; read and written
    intermediate_state_indices: Tensor | None = None  # [N]: rows of it; row n without
    cu_seqlens: Tensor | None = None  # [N + 1]: rows of several lengths, packed; tokens are then [1, all of them, ...]
    out: Tensor | None = None  # [N, T, HV, V]; written


def check_kda_decode(
    x: KdaDecodeInputs, options: DecodeOptions, dims: Any, who: str
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Validate the tensors that are KDA's own; return them normalised, and the fields of the problem that follow from them."""
    checks.check_given(who, "kda", g=x.g, beta=x.beta)
    assert x.g is not None and x.beta is not None
    has_scalar_gate = _check_gate_and_beta(who, x.g, x.beta, dims.lead, dims.lead_name, dims.HV, dims.K)
    A_log, dt_bias = check_gate(who, options, x.A_log, x.dt_bias, dims.HV, dims.K, has_scalar_gate, in_float32=False)
    own = {
        "g": x.g.resolve_neg() if has_scalar_gate else checks.unit_last_stride(x.g),
        "beta": x.beta.resolve_neg(),
        "A_log": None if A_log is None else A_log.resolve_neg(),
        "dt_bias": None if dt_bias is None else dt_bias.resolve_neg(),
    }
    return own, {
        "has_scalar_gate": has_scalar_gate,
        "g_dtype": x.g.dtype,
        "beta_dtype": x.beta.dtype,
        "has_float32_parameters": all(t is None or t.dtype == torch.float32 for t in (A_log, dt_bias)),
    }


def check_kda_decode_values(x: KdaDecodeInputs, problem: DecodeProblem, who: str) -> None:
    assert x.g is not None
    _check_log_decay(x.g, problem.gate, who)


# Both


def _check_gate_and_beta(who: str, g: Tensor, beta: Tensor, lead: tuple[int, ...], lead_name: str, HV: int, K: int) -> bool:
    """Shapes and dtypes of g and beta, whose first dimensions are `lead`; whether there is one gate a head."""
    has_scalar_gate = checks.rank_of(who, "g", g) == 3
    wanted, letters = ((*lead, HV), ", HV]") if has_scalar_gate else ((*lead, HV, K), ", HV, K]")
    checks.check_shape(who, "g", g, lead_name + letters, wanted)
    checks.check_dtype(who, "g", g, IO_DTYPES)
    checks.check_shape(who, "beta", beta, lead_name + ", HV]", (*lead, HV))
    checks.check_dtype(who, "beta", beta, IO_DTYPES)
    return has_scalar_gate


def check_gate(
    who: str,
    options: KdaOptions | DecodeOptions,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    HV: int,
    K: int,
    has_scalar_gate: bool,
    in_float32: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """The gate's parameters as kernels read them: A_log [HV], and dt_bias [HV, K] (or [HV] with one gate a head).

    Models keep them in other dtypes (`model.bfloat16()`, mixed precision) and shapes (`[1, 1, HV, 1]`). A prefill converts them
    to float32, as a part of the graph, so that gradients have the parameters' own; for a decode that would be another kernel
    beside one of a few microseconds, so that backends read what comes.
    """
    dtype = torch.float32 if in_float32 else None
    bound = options.lower_bound
    if bound is not None:
        if not isinstance(bound, (int, float)):
            raise checks.ArgumentTypeError(f"{who}: lower_bound is {type(bound).__name__}; expected a number in [-5, 0)")
        if not LOWER_BOUND_MIN <= bound < 0:
            raise ValueError(f"{who}: lower_bound is {bound}; expected a number in [-5, 0)")
    if options.allow_neg_eigval and not options.use_beta_sigmoid_in_kernel:
        raise ValueError(f"{who}: allow_neg_eigval=True doubles sigmoid(beta) and needs use_beta_sigmoid_in_kernel=True")
    if not options.use_gate_in_kernel:
        for name, given in (("A_log", A_log), ("dt_bias", dt_bias)):
            if given is not None:
                raise ValueError(f"{who}: {name} was given, but g is a log decay already; pass use_gate_in_kernel=True")
        return None, None
    if getattr(options, "safe_gate", False) and bound is None:
        raise ValueError(
            f"{who}: safe_gate=True with use_gate_in_kernel=True promises a bounded gate; pass lower_bound in [-5, 0)"
        )
    if A_log is None and bound is None:
        raise ValueError(f"{who}: use_gate_in_kernel=True needs A_log [HV] (it may be None only with lower_bound)")
    if A_log is not None:
        checks.check_tensor(who, "A_log", A_log)
        if A_log.numel() != HV:
            raise ValueError(f"{who}: A_log has shape {checks.shape_of(A_log)}; expected HV = {HV} elements, [HV] = {[HV]}")
        checks.check_dtype(who, "A_log", A_log, IO_DTYPES)
        A_log = _reshaped(A_log, (HV,), dtype)
    if dt_bias is None:
        return A_log, None
    checks.check_tensor(who, "dt_bias", dt_bias)
    checks.check_dtype(who, "dt_bias", dt_bias, IO_DTYPES)
    if has_scalar_gate:
        checks.check_shape(who, "dt_bias", dt_bias, "[HV]", (HV,))
        return A_log, _reshaped(dt_bias, (HV,), dtype)
    if dt_bias.shape not in ((HV * K,), (HV, K)):
        raise ValueError(
            f"{who}: dt_bias has shape {checks.shape_of(dt_bias)}; expected [HV, K] = {[HV, K]} or [HV * K] = {[HV * K]}"
        )
    return A_log, _reshaped(dt_bias, (HV, K), dtype)


def _reshaped(t: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """A tensor in this shape, and in a dtype where one is given; the tensor itself where it is that already."""
    t = t if t.shape == shape else t.reshape(shape)
    return t if dtype in (None, t.dtype) else t.to(dtype)


def _check_log_decay(g: Tensor, gate: str, who: str) -> None:
    if gate == "log" and bool((g > 0).any()):
        raise ValueError(f"{who}: g holds a positive log decay ({float(g.max()):.3g}); a log decay is <= 0")
