# SPDX-License-Identifier: Apache-2.0
"""Repairs of Triton 3.6.0's CPU interpreter, so that a kernel's numbers can be trusted without a GPU.

Set `TRITON_INTERPRET=1` before triton is first imported (a `@triton.jit` function decides at decoration), then call
`apply()` once, before any kernel runs. What it repairs, each a defect or a gap of the interpreter as shipped:

| repair   | without it                                                                                               |
|----------|----------------------------------------------------------------------------------------------------------|
| `index`  | a loop over a run-time bound dies with numpy >= 2.4                                                      |
| `bf16`   | arithmetic and `tl.dot` on bf16 take the raw bits for integers; fp32 -> bf16 truncates instead of rounds |
| `tf32`   | an fp32 `tl.dot` is exact, where the GPU's default rounds its operands to tf32                           |
| `mindot` | a `tl.dot` with a contraction shorter than 16 is accepted, which the compiler refuses                    |
| `leak`   | a `@triton.jit` helper (`tl.sum` is one) leaves `triton.language` patched; every call pays for it again  |
| `bounds` | a pointer outside its tensors reads or writes the heap unnoticed; with it, IndexError                    |
| `tune`   | `@triton.autotune` with several configs wants a GPU to time them; with it, the first config is taken     |

All of them are monkey patches of `triton.runtime.interpreter`: the triton version is pinned for that reason. What stays
unseen: races between programs, shared memory and register limits, overflow of int32 offsets (see `triton_offline`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._C.libtriton import ir
from triton.runtime.autotuner import Autotuner

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle
FLOATS = (tl.bfloat16, tl.float16, tl.float32)
ARITHMETIC = ("fadd", "fsub", "fmul", "fdiv", "frem", "fma", "precise_divf")
SELECTION = ("minimumf", "maximumf", "minnumf", "maxnumf", "clampf")

_applied: set[str] = set()


def apply(*names: str) -> None:
    """Apply the named repairs, or all of them; each at most once a process."""
    for name in names or REPAIRS:
        if name not in _applied:
            REPAIRS[name]()
            _applied.add(name)


# Number formats


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of x rounded to nearest even; a NaN stays one."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))


def round_tf32(x: np.ndarray) -> np.ndarray:
    """x with ten explicit mantissa bits, rounded to nearest even; Inf and NaN stay."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def _is_bf16(h: Handle) -> bool:
    return h.dtype.scalar == tl.bfloat16


def _widen(h: Any) -> Any:
    return Handle(bf16_to_f32(h.data), tl.float32) if isinstance(h, Handle) and _is_bf16(h) else h


def _narrow(h: Handle) -> Handle:
    return Handle(f32_to_bf16(h.data), tl.bfloat16)


def _repair_bf16() -> None:
    """bf16 is held as uint16 bits: compute in fp32, round the result back."""
    cast, fp_to_fp = Builder.cast_impl, Builder.create_fp_to_fp

    def cast_impl(self: Builder, src: Handle, dst_type: Any) -> Handle:
        if _is_bf16(src):
            return src if dst_type.scalar == tl.bfloat16 else cast(self, _widen(src), dst_type)
        if dst_type.scalar == tl.bfloat16:
            return Handle(f32_to_bf16(src.data.astype(np.float32)), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Builder, src: Handle, dst_type: Any, rounding: Any) -> Handle:
        to_nearest = rounding is None or rounding == ir.ROUNDING_MODE.RTNE
        if to_nearest and dst_type.scalar in FLOATS and src.dtype.scalar in FLOATS:
            return self.cast_impl(src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding)

    Builder.cast_impl = cast_impl
    Builder.create_fp_to_fp = create_fp_to_fp
    Builder.get_bf16 = lambda self, value: Handle(f32_to_bf16(np.array([value], np.float32)), tl.bfloat16)

    def in_fp32(name: str, keeps_type: bool) -> None:
        old = getattr(Builder, name)

        @functools.wraps(old)
        def new(self: Builder, *args: Any) -> Handle:
            if not any(isinstance(a, Handle) and _is_bf16(a) for a in args):
                return old(self, *args)
            out = old(self, *map(_widen, args))
            return _narrow(out) if keeps_type else out

        setattr(Builder, name, new)

    for op in ARITHMETIC + SELECTION:
        in_fp32("create_" + op, keeps_type=True)
    for name in dir(Builder):
        if name.startswith("create_fcmp"):
            in_fp32(name, keeps_type=False)
    in_fp32("create_dot", keeps_type=False)  # the accumulator decides the type of the result
    _reduce_in_fp32(interpreter.ReduceOps, "sum")
    _reduce_in_fp32(interpreter.ScanOps, "cumsum")


def _reduce_in_fp32(cls: type, name: str) -> None:
    old = getattr(cls, name)

    def narrow(t: Any) -> Any:
        kind = tl.block_type(tl.bfloat16, list(t.shape)) if t.type.is_block() else tl.bfloat16
        return tl.core.tensor(_narrow(t.handle), kind)

    def new(self: Any, x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return old(self, x)
        out = old(self, tl.core.tensor(_widen(x.handle), tl.block_type(tl.float32, list(x.shape))))
        return [narrow(t) for t in out] if isinstance(out, list) else narrow(out)

    setattr(cls, name, new)


def _repair_tf32() -> None:
    dot = Builder.create_dot

    def create_dot(self: Builder, a: Handle, b: Handle, acc: Handle, precision: Any, *rest: Any) -> Handle:
        if precision == ir.INPUT_PRECISION.TF32 and a.dtype.scalar == tl.float32 == b.dtype.scalar:
            a, b = Handle(round_tf32(a.data), tl.float32), Handle(round_tf32(b.data), tl.float32)
        return dot(self, a, b, acc, precision, *rest)

    Builder.create_dot = create_dot


def _repair_mindot() -> None:
    interpreter.interpreter_builder.codegen_fns["min_dot_size"] = lambda lhs, rhs: (
        (1, 1, 32) if lhs.scalar.primitive_bitwidth == 8 else (1, 1, 16)
    )


# Running a kernel


def _repair_index() -> None:
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    interpreter._patch_lang_tensor = patched


def _repair_leak() -> None:
    """Patch each language module once a launch, and put all of them back when the launch ends."""
    launch = interpreter.GridExecutor.__call__
    patched: set[frozenset[int]] = set()
    scopes: list[Any] = []
    depth = 0

    def grid_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return launch(self, *args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                while scopes:
                    scopes.pop().restore()
                patched.clear()

    @functools.cache
    def languages(fn: Callable[..., Any]) -> frozenset[int]:
        return frozenset(id(m) for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core))

    def helper_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        used = languages(self.fn)
        if used not in patched:
            scopes.append(interpreter._patch_lang(self.fn))
            patched.add(used)
        try:
            return self.rewrite()(*args, **kwargs)
        except interpreter.InterpreterError:
            raise
        except Exception as e:
            raise interpreter.InterpreterError(repr(e)) from e

    interpreter.GridExecutor.__call__ = grid_call
    interpreter.InterpretedFunction.__call__ = helper_call


def _repair_tune() -> None:
    def run(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        self.best_config = config = self.prune_configs(kwargs)[0]
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    Autotuner.run = run


# Addresses


def _byte_ranges(args: Iterable[Any]) -> np.ndarray:
    """Merged [begin, end) byte ranges of the tensors among a launch's arguments, sorted: [R, 2]."""
    ranges, rest = [], list(args)
    while rest:
        a = rest.pop()
        if isinstance(a, (tuple, list)):
            rest.extend(a)
        elif hasattr(a, "block_shape"):  # a TensorDescriptor
            rest.append(a.base)
        elif hasattr(a, "data_ptr"):
            a = interpreter._unwrap_tensor(a)
            if a.numel():
                span = 1 + sum((n - 1) * stride for n, stride in zip(a.shape, a.stride(), strict=True))
                ranges.append((a.data_ptr(), a.data_ptr() + span * a.element_size()))
    merged: list[list[int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return np.array(merged, dtype=np.uint64).reshape(-1, 2)


def _repair_bounds() -> None:
    init_args, restore_args = interpreter.GridExecutor._init_args_hst, interpreter.GridExecutor._restore_args_dev
    legal = np.empty((0, 2), dtype=np.uint64)
    running = False

    def init(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal legal, running
        on_host = init_args(self, args, kwargs)
        legal = _byte_ranges([*on_host[0], *on_host[1].values()])
        running = True
        return on_host

    def restore(self: Any, *args: Any) -> Any:
        nonlocal running
        running = False
        return restore_args(self, *args)

    def check(builder: Builder, what: str, pointers: Handle, mask: Handle | None) -> None:
        if not running:
            return
        p = pointers.data
        if mask is not None:
            p = p[np.broadcast_to(np.asarray(mask.data, dtype=bool), p.shape)]
        if not p.size:
            return
        low, high = p.min(), p.max()
        if ((legal[:, 0] <= low) & (high < legal[:, 1])).any():  # a tile lies inside one tensor, nearly always
            return
        if len(legal):
            nearest = np.searchsorted(legal[:, 0], p, side="right").astype(np.int64) - 1
            outside = (nearest < 0) | (p >= legal[np.maximum(nearest, 0), 1])
        else:
            outside = np.ones(p.shape, dtype=bool)
        if outside.any():
            where = "no tensor was passed"
            if len(legal):
                first, j = int(p[outside].flat[0]), int(nearest[outside].flat[0])
                past = j >= 0
                gap = first - int(legal[j, 1]) if past else int(legal[0, 0]) - first
                where = f"the first lies {gap} bytes {'past the end' if past else 'before the start'} of the nearest tensor"
            raise IndexError(
                f"out-of-bounds {what} in program {builder.grid_idx}: {int(outside.sum())} of {p.size} addresses; {where}"
            )

    def guarded(name: str, what: str, pointer_at: int, mask_at: int) -> None:
        old = getattr(Builder, name)

        def new(self: Builder, *args: Any, **kwargs: Any) -> Any:
            check(self, what, args[pointer_at], args[mask_at])
            return old(self, *args, **kwargs)

        setattr(Builder, name, new)

    interpreter.GridExecutor._init_args_hst, interpreter.GridExecutor._restore_args_dev = init, restore
    guarded("create_masked_load", "load", pointer_at=0, mask_at=1)
    guarded("create_masked_store", "store", pointer_at=0, mask_at=2)
    guarded("create_atomic_rmw", "atomic", pointer_at=1, mask_at=3)


REPAIRS: dict[str, Callable[[], None]] = {
    "tune": _repair_tune,
    "index": _repair_index,
    "bf16": _repair_bf16,
    "tf32": _repair_tf32,
    "mindot": _repair_mindot,
    "leak": _repair_leak,
    "bounds": _repair_bounds,
}
