# SPDX-License-Identifier: Apache-2.0
"""The checks that families share. Each raises with who was called, what came and what was expected, before anything is written.

Dimensions: B batch, T tokens, N sequences, H query/key heads, HV value heads (HV % H == 0), K and V head dims, P slots.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cula.core.replay.torch_internals import is_forward_mode

IO_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NULL_INDICES = {"negative": False, "nonpositive": True}  # whether slot 0 marks padding too
STATE_LAYOUTS = {"vk": False, "kv": True}  # whether K is in front
INDEX_DTYPES = (torch.int32, torch.int64)


class ArgumentTypeError(TypeError, ValueError):
    """A wrong dtype or Python type. Also a ValueError, so that one `except ValueError` catches every bad argument."""


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


def shape_of(t: Tensor) -> str:
    return str(list(t.shape))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as sentences have it, `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def has_no_data(t: Any) -> bool:
    """Whether a tensor is a shape alone: on the "meta" device, or one of `FakeTensorMode`."""
    return isinstance(t, Tensor) and (t.is_meta or isinstance(t, torch._subclasses.FakeTensor))


def check_tensor(who: str, name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise ArgumentTypeError(f"{who}: {name} is {type(t).__name__}; expected a torch.Tensor")


def check_given(who: str, mode: str, **tensors: Tensor | None) -> None:
    """ValueError for a tensor that a mode of decode cannot do without."""
    for name, t in tensors.items():
        if t is None:
            raise ValueError(f"{who}: mode {mode!r} needs {name}=")


def rank_of(who: str, name: str, t: Tensor) -> int:
    check_tensor(who, name, t)
    return t.dim()


def check_shape(who: str, name: str, t: Tensor, letters: str, wanted: tuple[int, ...]) -> None:
    check_tensor(who, name, t)
    if t.shape != wanted:
        raise ValueError(f"{who}: {name} has shape {shape_of(t)}; expected {letters} = {list(wanted)}")


def reshaped(who: str, name: str, t: Tensor, letters: str, wanted: tuple[int, ...]) -> Tensor:
    """A tensor that may come in any shape, in the one that is wanted."""
    check_tensor(who, name, t)
    if t.numel() != math.prod(wanted):
        raise ValueError(f"{who}: {name} has shape {shape_of(t)}; expected the elements of {letters} = {list(wanted)}")
    return t.reshape(wanted)


def check_dtype(who: str, name: str, t: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if t.dtype not in allowed:
        raise ArgumentTypeError(f"{who}: {name} has dtype {dtype_name(t.dtype)}; expected {', '.join(map(dtype_name, allowed))}")


def check_devices(who: str, device: torch.device, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is None:
            continue
        check_tensor(who, name, t)
        if t.device != device:
            raise ValueError(f"{who}: {name} is on {t.device} but q is on {device}; all tensors must share a device")


def check_tokens(who: str, **tokens: Tensor) -> None:
    """That tokens are tensors of four dimensions."""
    for name, t in tokens.items():
        if rank_of(who, name, t) != 4:
            raise ValueError(f"{who}: {name} has shape {shape_of(t)}; expected four dimensions [B, T, heads, dim]")


def check_qkv(who: str, q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v")) -> tuple[int, ...]:
    """Shapes, dtypes and devices of q, k, v; returns B, T, H, K, HV, V."""
    check_tokens(who, **dict(zip(names, (q, k, v), strict=True)))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    check_shape(who, names[1], k, "[B, T, H, K]", (B, T, H, K))
    check_shape(who, names[2], v, "[B, T, HV, V]", (B, T, HV, V))
    if H == 0 or HV % H != 0 or HV == 0:
        raise ValueError(
            f"{who}: {HV} value heads are not a multiple of {H} query/key heads; "
            f"{names[2]} needs HV heads with HV % H == 0 (grouped value heads)"
        )
    if K == 0 or V == 0:
        raise ValueError(f"{who}: head dims are K = {K}, V = {V}; both must be positive")
    check_dtype(who, names[0], q, IO_DTYPES)
    for name, t in zip(names[1:], (k, v), strict=True):
        if t.dtype != q.dtype:
            raise ArgumentTypeError(f"{who}: {name} has dtype {t.dtype} but {names[0]} has {q.dtype}; q, k and v share a dtype")
    check_devices(who, q.device, **{names[1]: k, names[2]: v})
    return B, T, H, K, HV, V


def check_int32_offsets(who: str, cu_seqlens: Tensor) -> None:
    """For functions whose callers have int32 offsets and no others."""
    check_tensor(who, "cu_seqlens", cu_seqlens)
    check_dtype(who, "cu_seqlens", cu_seqlens, (torch.int32,))


def check_cu_seqlens(who: str, cu_seqlens: Tensor | None, q: Tensor, name: str = "q") -> int:
    """Shape, dtype and device of the offsets of q's tokens (or another tensor's, `name`); returns the number of sequences."""
    if cu_seqlens is None:
        return q.shape[0]
    if rank_of(who, "cu_seqlens", cu_seqlens) != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{who}: cu_seqlens has shape {shape_of(cu_seqlens)}; expected [N + 1] with N >= 1")
    check_dtype(who, "cu_seqlens", cu_seqlens, INDEX_DTYPES)
    check_devices(who, q.device, cu_seqlens=cu_seqlens)
    if q.shape[0] != 1:
        raise ValueError(f"{who}: cu_seqlens packs sequences along T and needs B == 1, but {name} has shape {shape_of(q)}")
    return cu_seqlens.shape[0] - 1


def check_cu_seqlens_values(cu_seqlens: Tensor | None, q: Tensor, who: str) -> None:
    """Offsets start at 0, never fall, and end at T. Reads them back."""
    if cu_seqlens is None:
        return
    offsets = cu_seqlens.tolist()
    T = q.shape[1]
    if offsets[0] != 0 or offsets[-1] != T or any(b < a for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"{who}: cu_seqlens is {shown_offsets(offsets)}; expected non-decreasing offsets from 0 to T = {T}")


def shown_offsets(offsets: Sequence[int]) -> list[Any]:
    """Offsets as an error shows them: of many, the first and the last."""
    return list(offsets) if len(offsets) <= 12 else [*offsets[:6], "...", *offsets[-3:]]


def check_state(who: str, name: str, h: Tensor | None, N: int, HV: int, V: int, K: int) -> None:
    if h is None:
        return
    if h.shape == (N, HV, K, V) and K != V:
        raise ValueError(
            f"{who}: {name} has shape {shape_of(h)}, which is [N, HV, K, V]; "
            f"states are [N, HV, V, K] = {[N, HV, V, K]} here (K last): pass {name}.transpose(-1, -2)"
        )
    check_shape(who, name, h, "[N, HV, V, K]", (N, HV, V, K))
    check_dtype(who, name, h, (torch.float32,))


def check_pool(who: str, name: str, pool: Tensor, layout: str, inner: tuple[int, int, int]) -> int:
    if rank_of(who, name, pool) != 4 or pool.shape[1:] != inner:
        raise ValueError(f"{who}: {name} has shape {shape_of(pool)}; expected {layout} = {['P', *inner]}")
    check_dtype(who, name, pool, POOL_DTYPES)
    if not has_contiguous_slots(pool):
        raise ValueError(
            f"{who}: {name} has strides {pool.stride()}; a slot must be contiguous (its stride may be padded), "
            "because the pool is updated in place"
        )
    return pool.shape[0]


def check_own_elements(who: str, name: str, t: Tensor) -> None:
    """ValueError for a tensor that is written to while several of its elements are one place in memory (`expand`)."""
    if 0 in t.stride() and any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride())):
        raise ValueError(
            f"{who}: {name} has shape {shape_of(t)} and strides {t.stride()}: it is written to, and elements of it share memory; "
            "pass a tensor of its own, such as .clone() makes"
        )


def check_slots(
    who: str, name: str, indices: Tensor, slots: int, null_is_nonpositive: bool, holder: str = "the pool", slot: str = "slot"
) -> None:
    """Indices of slots (or of what the holder else has) are in range and distinct, but for null ones. Reads them back."""
    least = 1 if null_is_nonpositive else 0
    live = [i for i in indices.flatten().tolist() if i >= least]
    if live and max(live) >= slots:
        raise ValueError(f"{who}: {name} holds {max(live)}, but {holder} has {slots} {slot}s (0 to {slots - 1})")
    if len(set(live)) != len(live):
        raise ValueError(f"{who}: {name} names a {slot} twice: {indices.tolist()}; rows of a call must not share a {slot}")


def check_finite(who: str, x: NamedTuple, skip: tuple[str, ...] = ()) -> None:
    for name, t in zip(x._fields, x, strict=True):
        if name not in skip and t is not None and t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise ValueError(f"{who}: {name} holds NaN or Inf")


def as_number(who: str, name: str, given: Any) -> float:
    """A number, as a plain float; text is none, though `float` reads it."""
    try:
        if isinstance(given, (str, bytes, bytearray)):
            raise TypeError(f"{type(given).__name__} is text")
        return float(given)
    except (TypeError, ValueError) as error:
        shown = f"a tensor of shape {shape_of(given)}" if isinstance(given, Tensor) else repr(given)
        raise ArgumentTypeError(f"{who}: {name} is {shown}; expected a number") from error


def check_choice(who: str, name: str, given: Any, known: tuple[Any, ...]) -> None:
    """ValueError unless an argument is one of the known values."""
    if given not in known:
        raise ValueError(f"{who}: {name} is {given!r}; expected one of {list(known)}")


def is_null_nonpositive(who: str, null_index: str) -> bool:
    """Whether slot 0 marks padding too; ValueError for an unknown word."""
    return _meaning(who, "null_index", null_index, NULL_INDICES)


def is_state_kv(who: str, state_layout: str) -> bool:
    """Whether states have K in front; ValueError for an unknown word."""
    return _meaning(who, "state_layout", state_layout, STATE_LAYOUTS)


def _meaning(who: str, name: str, given: str, known: dict[str, bool]) -> bool:
    try:
        return known[given]
    except (KeyError, TypeError):
        check_choice(who, name, given, tuple(known))
        raise


def refuse_transforms(who: str, tensors: Iterable[Any]) -> None:
    """NotImplementedError inside of `torch.func`'s transforms, whose tensors have no memory that a kernel could read, and for
    tangents of forward-mode AD, which kernels would drop."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{who}: torch.func transforms (grad, vmap, jvp, functional_call under them) are not supported; "
            "use torch.autograd.grad for gradients, and the batch dimension or cu_seqlens instead of vmap"
        )
    if is_forward_mode() and any([isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors]):
        raise NotImplementedError(
            f"{who}: forward-mode gradients (torch.autograd.forward_ad) are not supported, and an input has a tangent; "
            "use torch.autograd.grad for gradients, or torch.autograd.forward_ad.unpack_dual(t).primal without them"
        )


def check_device_argument(device: torch.device | str | None, q: Tensor, who: str) -> None:
    """`device=` is a statement, not a transfer: it must name the device the tensors are on."""
    if device is None:
        return
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{who}: device is {device!r}, which torch does not know; expected q's, {str(q.device)!r}") from error
    if wanted.type != q.device.type or wanted.index not in (None, q.device.index):
        raise ValueError(f"{who}: device={str(wanted)!r} but q is on {q.device}; move the tensors first")


def one_of(who: str, named: dict[str, Tensor | None]) -> Tensor:
    """The one that is given of a tensor's spellings; TypeError where it is none, or more than one."""
    given = [name for name, tensor in named.items() if tensor is not None]
    if not given:
        raise TypeError(f"{who}: missing argument {' or '.join(map(repr, named))}")
    if len(given) > 1:
        raise TypeError(f"{who}: got {' and '.join(map(repr, given))}, which are the same argument")
    found = named[given[0]]
    assert found is not None
    return found


def refuse_keywords(who: str, given: Iterable[str], known: Iterable[str], backend: str, options: Iterable[str]) -> None:
    """TypeError for a keyword that neither the function nor the backend knows; names the nearest one that they do."""
    options = sorted(options)
    for name in given:
        if name in options:
            continue
        meant = meant_by(name, [*known, *options])
        takes = f"the options {', '.join(options)}" if options else "no options of its own"
        raise TypeError(f"{who}: unknown keyword argument {name!r}{meant} (backend {backend!r} takes {takes})")


def meant_by(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that nothing has: the nearest one that there is, if one is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def has_contiguous_slots(state: Tensor) -> bool:
    """Each slot [HV, V, K] is contiguous, as torch has it: a dimension of one may have any stride, as the first one may."""
    return state[:1].is_contiguous()


def has_aligned_slots(state: Tensor) -> bool:
    """Slots begin at multiples of 16 bytes."""
    return state.stride(0) * state.element_size() % 16 == 0 and _has_aligned_memory(state)


def has_aligned_states(states: Tensor) -> bool:
    """Matrices `[..., V, K]` each lie in one piece, which begins at a multiple of 16 bytes."""
    *outer, rows, columns = states.stride()
    is_whole = columns == 1 and rows == states.shape[-1]
    return is_whole and all(s * states.element_size() % 16 == 0 for s in outer) and _has_aligned_memory(states)


def _has_aligned_memory(t: Tensor) -> bool:
    """Tensors without memory (a compiler's) are taken for aligned."""
    return torch.compiler.is_compiling() or isinstance(t, torch._subclasses.FakeTensor) or t.data_ptr() % 16 == 0
