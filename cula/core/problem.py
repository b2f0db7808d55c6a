# SPDX-License-Identifier: Apache-2.0
"""What a call is, without its data: a frozen, hashable *problem* of plain values, and the switches it was made with.

A problem holds no tensors, so the choice of a kernel can be made, cached and tested on a machine without the hardware that the
problem names. Families derive theirs from `Problem`; decode has one for all families, `DecodeProblem`.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cula import settings
from cula.core import checks
from cula.core.constants import CHUNK

if TYPE_CHECKING:
    from typing_extensions import Self

LONE_TOKENS = 8192  # of the sequence that batch-invariant calls are scheduled for


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything about a prefill but its data. `options` is the family's own NamedTuple, as the kernels are to see it."""

    family: ClassVar[str]

    device: str  # "cpu", "cuda", ...
    sm: tuple[int, int] | None  # compute capability; None off CUDA
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
    needs_grad: bool
    scale: float
    options: Any
    grads: tuple[str, ...] = ()  # names of the inputs that need a gradient
    pool_dtype: torch.dtype | None = None  # of `state_pool`; None: the call has none
    has_aligned_slots: bool = True  # slots of the pool begin at multiples of 16 bytes
    checkpoint_dtype: torch.dtype | None = None  # of `checkpoint_states`; None: the call has none
    has_aligned_checkpoints: bool = True  # its rows are contiguous and begin at multiples of 16 bytes

    def alone(self) -> Self:
        """A call of one sequence like these. What is scheduled for it, a batch-invariant call does to each of its sequences."""
        options = self.options._replace(batch_invariant=False)
        return replace(self, B=1, T=LONE_TOKENS, N=1, is_packed=False, options=options)

    def by_row(self, states: Tensor) -> Tensor:
        """States at chunk starts, sequence by sequence [chunks, HV, V, K], as [B, NT, HV, V, K]."""
        NT = states.shape[0] if self.is_packed else -(-self.T // CHUNK)
        return states.view(self.B, NT, *states.shape[1:])


@dataclass(frozen=True, kw_only=True)
class DecodeProblem:
    """Everything about a decode but its data."""

    family: str
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
    has_accepted: bool
    has_intermediate_states: bool
    scale: float
    options: DecodeOptions
    has_aligned_slots: bool = True  # slots of the pool begin at multiples of 16 bytes
    kept_dtype: torch.dtype | None = None  # of intermediate_states
    has_aligned_kept: bool = True  # each of those is one piece of memory that begins at a multiple of 16 bytes
    is_ragged: bool = False  # rows have up to T tokens each, as cu_seqlens says; token tensors are [1, all of them, ...]
    # of families with gates
    has_scalar_gate: bool = False
    g_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    has_float32_parameters: bool = True  # A_log and dt_bias; they may have any dtype

    @property
    def gate(self) -> str:
        return gate_of(self.options)


class DecodeOptions(NamedTuple):
    """The switches of a decode, by their public names where those are booleans. A family reads those that it has."""

    scale: float | None = None
    lower_bound: float | None = None
    use_gate_in_kernel: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    null_is_nonpositive: bool = False  # slot 0 marks padding too
    commit: bool = True
    state_is_kv: bool = False
    batch_invariant: bool = False


# The public names of options that are kept as booleans under others.
PUBLIC_NAMES = {"null_is_nonpositive": "null_index", "state_is_kv": "state_layout"}


def with_settings(options: Any) -> Any:
    """The options of a call, with what the environment asks for."""
    if settings.batch_invariant() and not getattr(options, "batch_invariant", True):
        return options._replace(batch_invariant=True)
    return options


def gate_of(options: Any) -> str:
    """Which formula makes the log decay: `"log"` (g is it already), `"softplus"` or `"bounded"`."""
    if not options.use_gate_in_kernel:
        return "log"
    return "softplus" if options.lower_bound is None else "bounded"


def beta_top(options: Any) -> float:
    """The largest write strength that kernels make of a raw beta, `beta_top * sigmoid(beta)`; 0 for a beta that is activated."""
    if not options.use_beta_sigmoid_in_kernel:
        return 0.0
    return 2.0 if options.allow_neg_eigval else 1.0


def describe_tokens(
    x: Any, options: Any, who: str, names: tuple[str, str, str], differentiable: tuple[str, ...]
) -> dict[str, Any]:
    """The fields of `Problem` that follow from q, k, v, the offsets and the first states; raises where those are wrong."""
    B, T, H, K, HV, V = checks.check_qkv(who, x.q, x.k, x.v, names)
    N = checks.check_cu_seqlens(who, x.cu_seqlens, x.q)
    checks.check_devices(who, x.q.device, initial_state=x.initial_state)
    checks.check_state(who, "initial_state", x.initial_state, N, HV, V, K)
    grads = tuple([name for name in differentiable if needs_grad([getattr(x, name)])]) if torch.is_grad_enabled() else ()
    return {
        "device": x.q.device.type,
        "sm": checks.compute_capability(x.q.device),
        "dtype": x.q.dtype,
        "B": B,
        "T": T,
        "N": N,
        "H": H,
        "HV": HV,
        "K": K,
        "V": V,
        "is_packed": x.cu_seqlens is not None,
        "has_initial_state": x.initial_state is not None,
        "needs_grad": bool(grads),
        "grads": grads,
        "scale": K**-0.5 if options.scale is None else float(options.scale),
        "options": options,
    }


def needs_grad(tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)


def normalise_tokens(x: Any, **changes: Tensor | None) -> Any:
    """q, k, v with unit last strides, contiguous states, int32 offsets, and what else is given."""
    return x._replace(
        q=checks.unit_last_stride(x.q),
        k=checks.unit_last_stride(x.k),
        v=checks.unit_last_stride(x.v),
        initial_state=None if x.initial_state is None else x.initial_state.contiguous(),
        cu_seqlens=None if x.cu_seqlens is None else x.cu_seqlens.to(torch.int32).contiguous(),
        **changes,
    )


# Options travel through a `torch.library` operator as numbers, and their booleans as one string of names.


class Encoding(NamedTuple):
    """How the options of one NamedTuple cross an operator's boundary."""

    options: type
    flags: tuple[str, ...]  # booleans
    numbers: tuple[str, ...]  # the others
    schema: str  # of both, as an operator declares them

    def encode(self, options: Any) -> tuple[Any, ...]:
        flags = " ".join([name for name in self.flags if getattr(options, name)])
        return (*[getattr(options, name) for name in self.numbers], flags)

    def decode(self, values: tuple[Any, ...]) -> Any:
        *numbers, flags = values
        on = flags.split()
        return self.options(**{name: name in on for name in self.flags}, **dict(zip(self.numbers, numbers)))


_SCHEMA = {float | None: "float?", int | None: "int?", int: "int", float: "float", str: "str"}


def encoding_of(options: Any) -> Encoding:
    types = typing.get_type_hints(options)
    flags = tuple(name for name, of in types.items() if of is bool)
    numbers = tuple(name for name in types if name not in flags)
    schema = ", ".join([*(f"{_SCHEMA[types[name]]} {name}" for name in numbers), "str flags"])
    return Encoding(options, flags, numbers, schema)
