# SPDX-License-Identifier: Apache-2.0
"""What a call means: the one place that validates arguments and turns them into plain values.

`check_kda`, `check_lightning` and `check_decode` take the tensors and the options of a call, raise on anything wrong,
and return a frozen *problem* (shapes, dtypes, flags: no tensors) beside the normalised tensors. A problem is hashable,
so that the choice of a kernel can be made, cached and tested on a machine without the hardware it names.

Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads (HV % H == 0), K and V head dims, P slots.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

CHUNK = 64  # tokens in a chunk: `return_intermediate_states` and `checkpoint_every` count in these
MAX_DECODE_TOKENS = 8
LOWER_BOUND_MIN = -5.0

IO_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POOL_DTYPES = (torch.float32, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


class ArgumentTypeError(TypeError, ValueError):
    """A wrong dtype or Python type. Also a ValueError, so that one `except ValueError` catches every bad argument."""


class Flags:
    """A frozen dataclass of switches whose booleans travel as one string through a `torch.library` operator."""

    switches: ClassVar[tuple[str, ...]]  # names of the boolean fields, filled in by `with_flags`

    def flags(self) -> str:
        return " ".join([name for name in self.switches if getattr(self, name)])

    @classmethod
    def from_flags(cls, flags: str, **values: Any) -> Any:
        switched_on = flags.split()
        return cls(**{name: name in switched_on for name in cls.switches}, **values)


FlagsT = TypeVar("FlagsT", bound=type[Flags])


def with_flags(cls: FlagsT) -> FlagsT:
    """Class decorator for a dataclass derived from `Flags`."""
    cls.switches = tuple(f.name for f in fields(cls) if f.type == "bool")  # type: ignore[arg-type]
    return cls


def gate_of(options: KdaOptions | DecodeOptions) -> str:
    """Which formula makes the log decay: `"log"` (g is it already), `"softplus"` or `"bounded"`."""
    if not options.use_gate_in_kernel:
        return "log"
    return "softplus" if options.lower_bound is None else "bounded"


# KDA


class KdaInputs(NamedTuple):
    """The tensors of a KDA call."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K], or [B, T, HV]: one gate a head
    beta: Tensor  # [B, T, HV]
    A_log: Tensor | None = None  # [HV] float32
    dt_bias: Tensor | None = None  # [HV, K] float32, or [HV] with one gate a head
    initial_state: Tensor | None = None  # [N, HV, V, K] float32
    cu_seqlens: Tensor | None = None  # [N + 1] int32


@with_flags
@dataclass(frozen=True)
class KdaOptions(Flags):
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


@dataclass(frozen=True)
class KdaProblem:
    """Everything about a KDA call but its data."""

    device: str  # "cpu", "cuda", ...
    sm: tuple[int, int] | None  # compute capability; None off CUDA
    dtype: torch.dtype
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    is_packed: bool
    has_scalar_gate: bool
    has_initial_state: bool
    needs_grad: bool
    scale: float
    options: KdaOptions

    @property
    def gate(self) -> str:
        return gate_of(self.options)


def check_kda(x: KdaInputs, options: KdaOptions, who: str = "cula_kda") -> tuple[KdaProblem, KdaInputs]:
    """Validate a KDA call; return its problem and its tensors, normalised (int32 offsets, unit last strides)."""
    q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens = x
    B, T, H, K, HV, V = _check_qkv(who, q, k, v)
    N = _check_cu_seqlens(who, cu_seqlens, q)
    device = q.device

    has_scalar_gate = _dim(who, "g", g) == 3
    _check_shape(
        who, "g", g, "[B, T, HV]" if has_scalar_gate else "[B, T, HV, K]", (B, T, HV) if has_scalar_gate else (B, T, HV, K)
    )
    _check_dtype(who, "g", g, IO_DTYPES)
    _check_shape(who, "beta", beta, "[B, T, HV]", (B, T, HV))
    _check_dtype(who, "beta", beta, IO_DTYPES)
    _check_devices(who, device, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=h0)
    dt_bias = _check_gate(who, options, A_log, dt_bias, HV, K, has_scalar_gate)
    _check_state(who, "initial_state", h0, N, HV, V, K)

    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    if options.return_intermediate_states and needs_grad:
        raise ValueError(
            f"{who}: return_intermediate_states=True is for inference, but an input requires grad; "
            "call under torch.no_grad() or torch.inference_mode()"
        )
    problem = KdaProblem(
        device=device.type,
        sm=compute_capability(device),
        dtype=q.dtype,
        g_dtype=g.dtype,
        beta_dtype=beta.dtype,
        B=B,
        T=T,
        N=N,
        H=H,
        HV=HV,
        K=K,
        V=V,
        is_packed=cu_seqlens is not None,
        has_scalar_gate=has_scalar_gate,
        has_initial_state=h0 is not None,
        needs_grad=needs_grad,
        scale=K**-0.5 if options.scale is None else float(options.scale),
        options=options,
    )
    g_unit = g.resolve_neg() if has_scalar_gate else unit_last_stride(g)
    return problem, KdaInputs(
        unit_last_stride(q),
        unit_last_stride(k),
        unit_last_stride(v),
        g_unit,
        beta.resolve_neg(),
        None if A_log is None else A_log.contiguous(),
        None if dt_bias is None else dt_bias.contiguous(),
        None if h0 is None else h0.contiguous(),
        None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(),
    )


def check_kda_values(x: KdaInputs, options: KdaOptions, who: str = "cula_kda") -> None:
    """The checks that read data: offsets, NaN and Inf, the sign of a log decay. Synchronises on a GPU."""
    check_cu_seqlens_values(x.cu_seqlens, x.q, who)
    _check_finite(who, x)
    if not options.use_gate_in_kernel and bool((x.g > 0).any()):
        raise ValueError(f"{who}: g holds a positive log decay ({float(x.g.max()):.3g}); a log decay is <= 0")


# Lightning


class LightningInputs(NamedTuple):
    """The tensors of a Lightning call."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    decay: Tensor  # [HV] float32, s >= 0: the state's factor is exp(-s) a token
    initial_state: Tensor | None = None  # [N, HV, V, K] float32
    cu_seqlens: Tensor | None = None  # [N + 1] int32


@dataclass(frozen=True)
class LightningProblem:
    """Everything about a Lightning call but its data."""

    device: str
    sm: tuple[int, int] | None
    dtype: torch.dtype
    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    is_packed: bool
    has_initial_state: bool
    output_final_state: bool
    needs_grad: bool
    scale: float
    chunk_size: int


def check_lightning(
    x: LightningInputs,
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    chunk_size: int = CHUNK,
    who: str = "cula_lightning",
) -> tuple[LightningProblem, LightningInputs]:
    """Validate a Lightning call; return its problem and its normalised tensors."""
    q, k, v, decay, h0, cu_seqlens = x
    B, T, H, K, HV, V = _check_qkv(who, q, k, v, names=("Q", "K", "V"))
    N = _check_cu_seqlens(who, cu_seqlens, q)
    _check_tensor(who, "decay", decay)
    _check_shape(who, "decay", decay, "[HV]", (HV,))
    _check_dtype(who, "decay", decay, (torch.float32,))
    _check_devices(who, q.device, decay=decay, initial_state=h0)
    _check_state(who, "initial_state", h0, N, HV, V, K)
    if chunk_size not in (16, 32, 64, 128, 256):
        raise ValueError(f"{who}: chunk_size is {chunk_size!r}; expected a power of two from 16 to 256")
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, h0))
    problem = LightningProblem(
        device=q.device.type,
        sm=compute_capability(q.device),
        dtype=q.dtype,
        B=B,
        T=T,
        N=N,
        H=H,
        HV=HV,
        K=K,
        V=V,
        is_packed=cu_seqlens is not None,
        has_initial_state=h0 is not None,
        output_final_state=output_final_state,
        needs_grad=needs_grad,
        scale=K**-0.5 if scale is None else float(scale),
        chunk_size=chunk_size,
    )
    return problem, LightningInputs(
        unit_last_stride(q),
        unit_last_stride(k),
        unit_last_stride(v),
        decay.contiguous(),
        None if h0 is None else h0.contiguous(),
        None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(),
    )


def check_lightning_values(x: LightningInputs, who: str = "cula_lightning") -> None:
    check_cu_seqlens_values(x.cu_seqlens, x.q, who)
    _check_finite(who, x)
    _check_decay_sign(who, x.decay)


# Decode


class DecodeInputs(NamedTuple):
    """The tensors of a decode call in one form: N rows of T tokens (a packed `[1, N, H, K]` call is N rows of one)."""

    q: Tensor  # [N, T, H, K]
    k: Tensor  # [N, T, H, K]
    v: Tensor  # [N, T, HV, V]
    state: Tensor  # [P, HV, V, K] ([P, HV, K, V] for state_layout="kv"); updated in place
    state_indices: Tensor | None = None  # [N], or [N, T]: a slot for each draft token
    g: Tensor | None = None  # KDA: [N, T, HV, K] or [N, T, HV]
    beta: Tensor | None = None  # KDA: [N, T, HV]
    A_log: Tensor | None = None  # KDA: [HV]
    dt_bias: Tensor | None = None  # KDA: [HV, K] or [HV]
    decay: Tensor | None = None  # Lightning: [HV]
    num_accepted_tokens: Tensor | None = None  # [N]
    intermediate_states: Tensor | None = None  # [N, T, HV, V, K] (K, V for "kv"); read and written
    out: Tensor | None = None  # [N, T, HV, V]; written


@with_flags
@dataclass(frozen=True)
class DecodeOptions(Flags):
    """The switches of a decode call, by their public names where those are booleans."""

    scale: float | None = None
    lower_bound: float | None = None
    is_kda: bool = True
    use_gate_in_kernel: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    null_is_nonpositive: bool = False  # slot 0 marks padding too
    commit: bool = True
    state_is_kv: bool = False


@dataclass(frozen=True)
class DecodeProblem:
    """Everything about a decode call but its data."""

    device: str
    sm: tuple[int, int] | None
    dtype: torch.dtype
    pool_dtype: torch.dtype
    N: int
    T: int
    P: int
    H: int
    HV: int
    K: int
    V: int
    has_indices: bool
    has_token_indices: bool  # state_indices is [N, T]
    has_scalar_gate: bool
    has_accepted: bool
    has_intermediate_states: bool
    scale: float
    options: DecodeOptions
    g_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    has_aligned_slots: bool = True  # slots of the pool begin at multiples of 16 bytes

    @property
    def gate(self) -> str:
        return gate_of(self.options)


def check_decode(x: DecodeInputs, options: DecodeOptions, who: str = "cula_decode") -> tuple[DecodeProblem, DecodeInputs, bool]:
    """Validate a decode call; return its problem, its tensors as N rows of T tokens, and whether it came packed."""
    q, k, v, state = x.q, x.k, x.v, x.state
    B, rows, H, K, HV, V = _check_qkv(who, q, k, v)
    layout, inner = ("[P, HV, K, V]", (HV, K, V)) if options.state_is_kv else ("[P, HV, V, K]", (HV, V, K))
    P = _check_pool(who, "state", state, layout, inner)
    _check_devices(
        who,
        q.device,
        **{name: t for name, t in zip(DecodeInputs._fields[3:], x[3:], strict=True)},
    )

    indices = x.state_indices
    if indices is not None:
        _check_tensor(who, "state_indices", indices)
        _check_dtype(who, "state_indices", indices, INDEX_DTYPES)
        if indices.dim() not in (1, 2):
            raise ValueError(f"{who}: state_indices has shape {_shape(indices)}; expected [N] or [N, T]")
    sequences = P if indices is None else indices.shape[0]
    if sequences == B:
        is_packed = False
    elif B == 1 and sequences == rows:
        is_packed = True
    else:
        given = (
            f"state holds {P} slots and state_indices is None"
            if indices is None
            else f"state_indices has shape {_shape(indices)}"
        )
        raise ValueError(
            f"{who}: q has shape {_shape(q)}, that is {B} rows of {rows} tokens or {rows} packed rows, but {given}; "
            "give one index a row"
        )
    N, T = (rows, 1) if is_packed else (B, rows)
    if not 1 <= T <= MAX_DECODE_TOKENS:
        raise ValueError(f"{who}: {T} tokens a row; decode takes 1 to {MAX_DECODE_TOKENS} (use prefill for more)")
    if indices is not None and indices.dim() == 2:
        _check_shape(who, "state_indices", indices, "[N, T]", (N, T))

    lead = (1, N) if is_packed else (N, T)
    lead_name = "[1, N" if is_packed else "[N, T"
    g, beta, dt_bias = x.g, x.beta, x.dt_bias
    has_scalar_gate = False
    if options.is_kda:
        for name, t in (("g", g), ("beta", beta)):
            if t is None:
                raise ValueError(f"{who}: mode 'kda' needs {name}=")
        assert g is not None and beta is not None
        has_scalar_gate = _dim(who, "g", g) == 3
        shape = (*lead, HV) if has_scalar_gate else (*lead, HV, K)
        _check_shape(who, "g", g, lead_name + (", HV]" if has_scalar_gate else ", HV, K]"), shape)
        _check_dtype(who, "g", g, IO_DTYPES)
        _check_shape(who, "beta", beta, lead_name + ", HV]", (*lead, HV))
        _check_dtype(who, "beta", beta, IO_DTYPES)
        dt_bias = _check_gate(who, options, x.A_log, dt_bias, HV, K, has_scalar_gate)
        if x.decay is not None:
            raise ValueError(f"{who}: decay= belongs to mode 'lightning'; mode 'kda' takes g= and beta=")
    else:
        if x.decay is None:
            raise ValueError(f"{who}: mode 'lightning' needs decay=")
        _check_shape(who, "decay", x.decay, "[HV]", (HV,))
        _check_dtype(who, "decay", x.decay, (torch.float32,))
        for name in ("g", "beta", "A_log", "dt_bias"):
            if getattr(x, name) is not None:
                raise ValueError(f"{who}: {name}= belongs to mode 'kda'; mode 'lightning' takes decay=")

    if x.num_accepted_tokens is not None:
        _check_shape(who, "num_accepted_tokens", x.num_accepted_tokens, "[N]", (N,))
        _check_dtype(who, "num_accepted_tokens", x.num_accepted_tokens, INDEX_DTYPES)
        if x.intermediate_states is None and (indices is None or indices.dim() != 2):
            raise ValueError(
                f"{who}: num_accepted_tokens needs the states it goes back to: pass intermediate_states=, "
                "or state_indices of shape [N, T]"
            )
    if x.intermediate_states is not None:
        wanted = (N, T, *inner)
        _check_shape(who, "intermediate_states", x.intermediate_states, "[N, T" + layout[2:], wanted)
        _check_dtype(who, "intermediate_states", x.intermediate_states, POOL_DTYPES)
    if x.out is not None:
        _check_shape(who, "out", x.out, lead_name + ", HV, V]", (*lead, HV, V))
        _check_dtype(who, "out", x.out, (q.dtype,))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        raise ValueError(
            f"{who}: decode updates its state in place and has no gradient, but an input requires grad; "
            "call it under torch.no_grad() or torch.inference_mode()"
        )

    problem = DecodeProblem(
        device=q.device.type,
        sm=compute_capability(q.device),
        dtype=q.dtype,
        pool_dtype=state.dtype,
        N=N,
        T=T,
        P=P,
        H=H,
        HV=HV,
        K=K,
        V=V,
        has_indices=indices is not None,
        has_token_indices=indices is not None and indices.dim() == 2,
        has_scalar_gate=has_scalar_gate,
        has_accepted=x.num_accepted_tokens is not None,
        has_intermediate_states=x.intermediate_states is not None,
        scale=K**-0.5 if options.scale is None else float(options.scale),
        options=options,
        g_dtype=None if g is None else g.dtype,
        beta_dtype=None if beta is None else beta.dtype,
        has_aligned_slots=state.data_ptr() % 16 == 0 and state.stride(0) * state.element_size() % 16 == 0,
    )

    def as_rows(t: Tensor) -> Tensor:
        return t.transpose(0, 1) if is_packed else t

    normalised = x._replace(
        q=as_rows(unit_last_stride(q)),
        k=as_rows(unit_last_stride(k)),
        v=as_rows(unit_last_stride(v)),
        g=None if g is None else as_rows(g.resolve_neg() if has_scalar_gate else unit_last_stride(g)),
        beta=None if beta is None else as_rows(beta.resolve_neg()),
        A_log=None if x.A_log is None else x.A_log.resolve_neg(),
        dt_bias=None if dt_bias is None else dt_bias.resolve_neg(),
        decay=None if x.decay is None else x.decay.resolve_neg(),
        out=None if x.out is None else as_rows(x.out),
    )
    return problem, normalised, is_packed


def check_decode_values(x: DecodeInputs, problem: DecodeProblem, who: str = "cula_decode") -> None:
    """The checks that read data: slots in range and distinct, accepted counts, NaN and Inf, signs of decays."""
    if x.state_indices is not None:
        _check_slots(who, "state_indices", x.state_indices, problem.P, problem.options.null_is_nonpositive)
    accepted = x.num_accepted_tokens
    if accepted is not None and bool(((accepted < 0) | (accepted > problem.T)).any()):
        raise ValueError(f"{who}: num_accepted_tokens holds {accepted.tolist()}; each is 0 to T = {problem.T}")
    _check_finite(who, x, skip=("state", "state_indices", "num_accepted_tokens", "intermediate_states", "out"))
    if x.decay is not None:
        _check_decay_sign(who, x.decay)
    if x.g is not None and problem.gate == "log" and bool((x.g > 0).any()):
        raise ValueError(f"{who}: g holds a positive log decay ({float(x.g.max()):.3g}); a log decay is <= 0")


# State pools of a prefill


def check_state_pool(
    problem: KdaProblem | LightningProblem,
    state_pool: Tensor | None,
    indices: Tensor | None,
    has_initial_state: Tensor | None,
    device: torch.device,
    who: str,
) -> None:
    """Validate `state_pool`, `initial_state_indices` and `has_initial_state` of a prefill."""
    if state_pool is None:
        for name, t in (("initial_state_indices", indices), ("has_initial_state", has_initial_state)):
            if t is not None:
                raise ValueError(f"{who}: {name} was given without state_pool")
        return
    if problem.has_initial_state:
        raise ValueError(f"{who}: initial_state and state_pool were both given; a sequence has one first state")
    if problem.needs_grad:
        raise ValueError(
            f"{who}: state_pool is updated in place and has no gradient, but an input requires grad; "
            "use initial_state= to train, or call under torch.no_grad()"
        )
    _check_pool(who, "state_pool", state_pool, "[P, HV, V, K]", (problem.HV, problem.V, problem.K))
    if indices is None:
        raise ValueError(f"{who}: state_pool needs initial_state_indices [N]: the slot of each sequence")
    _check_tensor(who, "initial_state_indices", indices)
    _check_shape(who, "initial_state_indices", indices, "[N]", (problem.N,))
    _check_dtype(who, "initial_state_indices", indices, INDEX_DTYPES)
    if has_initial_state is not None:
        _check_shape(who, "has_initial_state", has_initial_state, "[N]", (problem.N,))
        _check_dtype(who, "has_initial_state", has_initial_state, (torch.bool,))
    _check_devices(who, device, state_pool=state_pool, initial_state_indices=indices, has_initial_state=has_initial_state)


def check_state_pool_values(state_pool: Tensor, indices: Tensor, who: str) -> None:
    _check_slots(who, "initial_state_indices", indices, state_pool.shape[0], null_is_nonpositive=False)


def check_out(out: Tensor | None, v: Tensor, problem: KdaProblem | LightningProblem, who: str) -> None:
    if out is None:
        return
    _check_tensor(who, "out", out)
    _check_shape(who, "out", out, "[B, T, HV, V]", (problem.B, problem.T, problem.HV, problem.V))
    _check_dtype(who, "out", out, (v.dtype,))
    _check_devices(who, v.device, out=out)
    if problem.needs_grad:
        raise ValueError(f"{who}: out= is for inference, but an input requires grad; call under torch.no_grad()")


def check_device_argument(device: torch.device | str | None, q: Tensor, who: str) -> None:
    """`device=` is a statement, not a transfer: it must name the device the tensors are on."""
    if device is None:
        return
    wanted = torch.device(device)
    if wanted.type != q.device.type or wanted.index not in (None, q.device.index):
        raise ValueError(f"{who}: device={str(wanted)!r} but q is on {q.device}; move the tensors first")


# The pieces


@functools.cache
def _capability_of(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """`(9, 0)` for Hopper and so on; None for anything but CUDA. Read once a device."""
    if device.type != "cuda":
        return None
    return _capability_of(torch.cuda.current_device() if device.index is None else device.index)


def unit_last_stride(t: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous, otherwise a copy: kernels assume it."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _shape(t: Tensor) -> str:
    return str(list(t.shape))


def _check_tensor(who: str, name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise ArgumentTypeError(f"{who}: {name} is {type(t).__name__}; expected a torch.Tensor")


def _dim(who: str, name: str, t: Tensor) -> int:
    _check_tensor(who, name, t)
    return t.dim()


def _check_shape(who: str, name: str, t: Tensor, letters: str, wanted: tuple[int, ...]) -> None:
    _check_tensor(who, name, t)
    if t.shape != wanted:
        raise ValueError(f"{who}: {name} has shape {_shape(t)}; expected {letters} = {list(wanted)}")


def _check_dtype(who: str, name: str, t: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if t.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ArgumentTypeError(f"{who}: {name} has dtype {str(t.dtype).removeprefix('torch.')}; expected {names}")


def _check_devices(who: str, device: torch.device, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is None:
            continue
        _check_tensor(who, name, t)
        if t.device != device:
            raise ValueError(f"{who}: {name} is on {t.device} but q is on {device}; all tensors must share a device")


def _check_qkv(who: str, q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v")) -> tuple[int, ...]:
    """Shapes, dtypes and devices of q, k, v; returns B, T, H, K, HV, V."""
    for name, t in zip(names, (q, k, v), strict=True):
        if _dim(who, name, t) != 4:
            raise ValueError(f"{who}: {name} has shape {_shape(t)}; expected four dimensions [B, T, heads, dim]")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    _check_shape(who, names[1], k, "[B, T, H, K]", (B, T, H, K))
    _check_shape(who, names[2], v, "[B, T, HV, V]", (B, T, HV, V))
    if H == 0 or HV % H != 0 or HV == 0:
        raise ValueError(
            f"{who}: {HV} value heads are not a multiple of {H} query/key heads; "
            f"{names[2]} needs HV heads with HV % H == 0 (grouped value heads)"
        )
    if K == 0 or V == 0:
        raise ValueError(f"{who}: head dims are K = {K}, V = {V}; both must be positive")
    _check_dtype(who, names[0], q, IO_DTYPES)
    for name, t in zip(names[1:], (k, v), strict=True):
        if t.dtype != q.dtype:
            raise ArgumentTypeError(f"{who}: {name} has dtype {t.dtype} but {names[0]} has {q.dtype}; q, k and v share a dtype")
    _check_devices(who, q.device, **{names[1]: k, names[2]: v})
    return B, T, H, K, HV, V


def _check_cu_seqlens(who: str, cu_seqlens: Tensor | None, q: Tensor) -> int:
    """Shape, dtype and device of the offsets; returns the number of sequences."""
    if cu_seqlens is None:
        return q.shape[0]
    if _dim(who, "cu_seqlens", cu_seqlens) != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{who}: cu_seqlens has shape {_shape(cu_seqlens)}; expected [N + 1] with N >= 1")
    _check_dtype(who, "cu_seqlens", cu_seqlens, INDEX_DTYPES)
    _check_devices(who, q.device, cu_seqlens=cu_seqlens)
    if q.shape[0] != 1:
        raise ValueError(f"{who}: cu_seqlens packs sequences along T and needs B == 1, but q has shape {_shape(q)}")
    return cu_seqlens.shape[0] - 1


def check_cu_seqlens_values(cu_seqlens: Tensor | None, q: Tensor, who: str) -> None:
    """Offsets start at 0, never fall, and end at T. Reads them back."""
    if cu_seqlens is None:
        return
    offsets = cu_seqlens.tolist()
    T = q.shape[1]
    if offsets[0] != 0 or offsets[-1] != T or any(b < a for a, b in itertools.pairwise(offsets)):
        shown = offsets if len(offsets) <= 12 else [*offsets[:6], "...", *offsets[-3:]]
        raise ValueError(f"{who}: cu_seqlens is {shown}; expected non-decreasing offsets from 0 to T = {T}")


def _check_state(who: str, name: str, h: Tensor | None, N: int, HV: int, V: int, K: int) -> None:
    if h is None:
        return
    if h.shape == (N, HV, K, V) and K != V:
        raise ValueError(
            f"{who}: {name} has shape {_shape(h)}, which is [N, HV, K, V]; "
            f"states are [N, HV, V, K] = {[N, HV, V, K]} here (K last): pass {name}.transpose(-1, -2)"
        )
    _check_shape(who, name, h, "[N, HV, V, K]", (N, HV, V, K))
    _check_dtype(who, name, h, (torch.float32,))


def _check_pool(who: str, name: str, pool: Tensor, layout: str, inner: tuple[int, int, int]) -> int:
    if _dim(who, name, pool) != 4 or pool.shape[1:] != inner:
        raise ValueError(f"{who}: {name} has shape {_shape(pool)}; expected {layout} = {['P', *inner]}")
    _check_dtype(who, name, pool, POOL_DTYPES)
    if pool.stride()[1:] != (inner[1] * inner[2], inner[2], 1):
        raise ValueError(
            f"{who}: {name} has strides {pool.stride()}; a slot must be contiguous (its stride may be padded), "
            "because the pool is updated in place"
        )
    return pool.shape[0]


def _check_gate(
    who: str,
    options: KdaOptions | DecodeOptions,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    HV: int,
    K: int,
    has_scalar_gate: bool,
) -> Tensor | None:
    """The gate's parameters; returns dt_bias as [HV, K] (or [HV] with one gate a head)."""
    bound = options.lower_bound
    if bound is not None:
        if not isinstance(bound, (int, float)):
            raise ArgumentTypeError(f"{who}: lower_bound is {type(bound).__name__}; expected a number in [-5, 0)")
        if not LOWER_BOUND_MIN <= bound < 0:
            raise ValueError(f"{who}: lower_bound is {bound}; expected a number in [-5, 0)")
    if options.allow_neg_eigval and not options.use_beta_sigmoid_in_kernel:
        raise ValueError(f"{who}: allow_neg_eigval=True doubles sigmoid(beta) and needs use_beta_sigmoid_in_kernel=True")
    if not options.use_gate_in_kernel:
        for name, given in (("A_log", A_log), ("dt_bias", dt_bias)):
            if given is not None:
                raise ValueError(f"{who}: {name} was given, but g is a log decay already; pass use_gate_in_kernel=True")
        return None
    if getattr(options, "safe_gate", False) and bound is None:
        raise ValueError(
            f"{who}: safe_gate=True with use_gate_in_kernel=True promises a bounded gate; pass lower_bound in [-5, 0)"
        )
    if A_log is None and bound is None:
        raise ValueError(f"{who}: use_gate_in_kernel=True needs A_log [HV] (it may be None only with lower_bound)")
    if A_log is not None:
        _check_shape(who, "A_log", A_log, "[HV]", (HV,))
        _check_dtype(who, "A_log", A_log, (torch.float32,))
    if dt_bias is None:
        return None
    _check_tensor(who, "dt_bias", dt_bias)
    _check_dtype(who, "dt_bias", dt_bias, (torch.float32,))
    if has_scalar_gate:
        _check_shape(who, "dt_bias", dt_bias, "[HV]", (HV,))
        return dt_bias
    if dt_bias.shape not in ((HV * K,), (HV, K)):
        raise ValueError(f"{who}: dt_bias has shape {_shape(dt_bias)}; expected [HV, K] = {[HV, K]} or [HV * K] = {[HV * K]}")
    return dt_bias if dt_bias.dim() == 2 else dt_bias.reshape(HV, K)


def _check_slots(who: str, name: str, indices: Tensor, slots: int, null_is_nonpositive: bool) -> None:
    live = indices[indices > 0] if null_is_nonpositive else indices[indices >= 0]
    if live.numel() and int(live.max()) >= slots:
        raise ValueError(f"{who}: {name} holds {int(live.max())}, but the pool has {slots} slots (0 to {slots - 1})")
    if live.unique().numel() != live.numel():
        raise ValueError(f"{who}: {name} names a slot twice: {indices.tolist()}; rows of a call must not share a slot")


def _check_finite(who: str, x: NamedTuple, skip: tuple[str, ...] = ()) -> None:
    for name, t in zip(x._fields, x, strict=True):
        if name not in skip and t is not None and t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise ValueError(f"{who}: {name} holds NaN or Inf")


def _check_decay_sign(who: str, decay: Tensor) -> None:
    if bool((decay < 0).any()):
        raise ValueError(f"{who}: decay holds {float(decay.min()):.3g}; decays are s >= 0 (the state's factor is exp(-s))")
