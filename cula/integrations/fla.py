# SPDX-License-Identifier: Apache-2.0
"""cuLA inside of flash-linear-attention (FLA): its models, and all that call its functions, run on cuLA's kernels.

    import cula.integrations.fla
    cula.integrations.fla.register()

From then on FLA's `chunk_kda`, `fused_recurrent_kda`, `chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule`, and
`chunk_simple_gla`, `fused_recurrent_simple_gla` with a constant decay (RetNet, Lightning Attention) ask cuLA first. A call that
cuLA does not serve goes where it went before, and FLA's logger says why. `FLA_CULA=0` in the environment turns cuLA off at
any time, without `unregister()`.

FLA (0.6 and 0.5) has a registry of backends for some functions; cuLA's backend stands before FlashKDA and FlashQLA in it.
Functions that FLA does not dispatch are replaced where all their callers end: in the module that defines them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cula import settings
from cula.core.constants import CHUNK, MAX_DECODE_TOKENS
from cula.core.fla import is_decode_on_pool
from cula.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from cula.integrations.changes import Changes, count, logger
from cula.kda import chunk_kda, fused_recurrent_kda
from cula.lightning import chunk_simple_gla, fused_recurrent_simple_gla

PRIORITY = 2  # FLA asks lower numbers first; FlashKDA and FlashQLA have 3, TileLang 5
MAX_GPU_KEY_DIM = 256  # beyond it cuLA's GPU kernels do not reach, and its torch backend is no gain on a GPU
Arguments = dict[str, Any]  # of a call, by FLA's names


def register(*, cpu_modules: bool = False) -> list[str]:
    """Make flash-linear-attention ask cuLA first.

    Args:
        cpu_modules: also serve the small kernels around FLA's layers (norms, short convolution, activations, cross entropy,
            rotary embedding) for CPU tensors in plain PyTorch, so that FLA's models train and generate without a GPU. FLA 0.6.

    Returns:
        The functions that cuLA serves from now on; none if they were registered before.

    Example:
        >>> from cula.integrations import fla  # doctest: +SKIP
        >>> fla.register(cpu_modules=True)  # doctest: +SKIP
    """
    base, register_with_06 = _backend_api()
    if cpu_modules and register_with_06 is None:
        raise NotImplementedError("cula.integrations.fla: cpu_modules needs flash-linear-attention 0.6 or newer")
    done = []
    if not _changes:
        with _changes.or_none():
            for served in SERVED:
                _serve(served, base, register_with_06)
                done.append(f"{served.module}.{served.name}")
        _backend_class(base).active = True
        _changes.on_undo(lambda: setattr(_backend_class(base), "active", False))
    if cpu_modules and not _cpu_changes:
        from cula.integrations import fla_cpu

        with _cpu_changes.or_none():
            done += fla_cpu.register(_cpu_changes)
    if done:
        logger.info("cula.integrations.fla: FLA asks cuLA first for %s", ", ".join(done))
    return done


def unregister() -> None:
    """Undo `register()`: FLA is as it was."""
    _changes.undo()
    _cpu_changes.undo()


def is_registered() -> bool:
    return bool(_changes)


def silenced() -> str | None:
    """Why FLA leaves cuLA alone though it is registered, as a clause; None if it does not."""
    return None if settings.fla_may_use_cula() else "FLA_CULA=0 in the environment makes FLA pass it over"


@dataclass(frozen=True)
class Served:
    """A function of FLA that cuLA serves."""

    module: str
    name: str
    run: Callable[[Arguments], Any]
    why_not: Callable[[Arguments], str | None]
    operation: str | None = None  # FLA 0.6's registry: an operation's, "" for the function's own, None for none
    operation_05: str | None = None  # the same in FLA 0.5
    is_autograd_function: bool = False  # a class, called by `.apply`


def _shared_objection(a: Arguments) -> str | None:
    if a.get("cp_context") is not None:
        return "context parallelism: use cula.dist"
    if a.get("beta") is not None and a["beta"].dim() == 4:
        return "beta has one value a channel; cuLA takes one a head"
    return _dims_objection(a)


def _dims_objection(a: Arguments) -> str | None:
    K = a["q"].shape[-1]
    if a["q"].device.type != "cpu" and K > MAX_GPU_KEY_DIM:
        return f"head dim {K}; cuLA's GPU kernels take K up to {MAX_GPU_KEY_DIM}"
    return None


def _why_not_chunk_kda(a: Arguments) -> str | None:
    if a.get("use_graph"):
        return "use_graph=True asks for FLA's CUDA graphs; cuLA replays launches itself"
    if a.get("return_intermediate_states") and a.get("chunk_size", CHUNK) != CHUNK:
        return f"states every {a['chunk_size']} tokens; cuLA has those every {CHUNK}"
    return _shared_objection(a)


def _why_not_recurrent_kda(a: Arguments) -> str | None:
    uses_pool = a.get("inplace_final_state", True) or a.get("ssm_state_indices") is not None
    if uses_pool and not is_decode_on_pool(a["q"], a.get("cu_seqlens"), a.get("ssm_state_indices")):
        return f"slots of a pool go with 1 to {MAX_DECODE_TOKENS} tokens of every sequence"
    return _shared_objection(a)


def _why_not_recurrent_gdn(a: Arguments) -> str | None:
    if a.get("gv") is not None:
        return "gv (one decay a value channel) is not served"
    if a.get("gk") is not None and a.get("A_log") is not None:
        return "gk beside a gate that the kernel makes is not served"
    return _shared_objection(a)


def _why_not_simple_gla(a: Arguments) -> str | None:
    if a.get("g") is not None:
        return "g makes decays depend on data; cuLA serves g_gamma, one decay a head"
    if a.get("reverse"):
        return "reverse=True is not served"
    if a.get("gk") is not None or a.get("gv") is not None:
        return "gk and gv are not served"
    return _dims_objection(a)


def _run_recurrent_kda(a: Arguments) -> Any:
    return fused_recurrent_kda(**Arguments(inplace_final_state=True) | a)


def _run_recurrent_gdn(a: Arguments) -> Any:
    """FLA's inner function: A_log is None unless the kernel makes the gate."""
    return fused_recurrent_gated_delta_rule(**Arguments(use_gate_in_kernel=a.get("A_log") is not None) | a)


def _run_simple_gla(function: Callable[..., Any], a: Arguments) -> Any:
    left_out = ("reverse", "chunk_size", "gk", "gv")
    return function(**{name: value for name, value in a.items() if name not in left_out})


SERVED = (
    Served("fla.ops.kda.chunk", "chunk_kda", lambda a: chunk_kda(**a), _why_not_chunk_kda, "", "kda"),
    Served("fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd", _run_recurrent_kda, _why_not_recurrent_kda, "kda"),
    Served(
        "fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule", lambda a: chunk_gated_delta_rule(**a), _shared_objection,
        "gated_delta_rule", "gated_delta_rule",
    ),
    Served(
        "fla.ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule_fwd", _run_recurrent_gdn,
        _why_not_recurrent_gdn,
    ),
    Served(
        "fla.ops.simple_gla.chunk", "ChunkSimpleGLAFunction", functools.partial(_run_simple_gla, chunk_simple_gla),
        _why_not_simple_gla, is_autograd_function=True,
    ),
    Served(
        "fla.ops.simple_gla.fused_recurrent", "fused_recurrent",
        functools.partial(_run_simple_gla, fused_recurrent_simple_gla), _why_not_simple_gla,
    ),
)  # fmt: skip

_changes = Changes()
_cpu_changes = Changes()


def _backend_api() -> tuple[type, Callable[..., Any] | None]:
    """FLA's `BaseBackend`, and 0.6's `register` (None in 0.5)."""
    try:
        module: Any = importlib.import_module("fla.backends")
    except ModuleNotFoundError as missing:
        if missing.name != "fla.backends":
            raise _without_fla(missing) from missing
        module = importlib.import_module("fla.ops.backends")
    if module._DISPATCH_DISABLED:
        raise RuntimeError(
            "cula.integrations.fla: FLA_DISABLE_BACKEND_DISPATCH=1 took the dispatch out of FLA when it was imported; "
            "unset it to use cuLA in FLA"
        )
    return module.BaseBackend, getattr(module, "register", None)


def _without_fla(missing: ModuleNotFoundError) -> ImportError:
    if missing.name != "fla":
        return missing
    return ImportError("cula.integrations.fla needs flash-linear-attention: pip install flash-linear-attention", name="fla")


@functools.cache
def _backend_class(base: Any) -> Any:
    """cuLA as a backend of FLA. Once in FLA's registries it stays there; `active` is whether it takes calls."""

    class CulaBackend(base):
        backend_type = "cula"
        env_var = "FLA_CULA"
        priority = PRIORITY
        active = False

        @classmethod
        def is_enabled(cls) -> bool:
            return CulaBackend.active and settings.fla_may_use_cula()

        can_use = is_enabled

    return CulaBackend


def _serve(served: Served, base: type, register_with_06: Callable[..., Any] | None) -> None:
    """Into FLA's registry where it has one for the function, otherwise in the function's place."""
    owner = importlib.import_module(served.module)
    default = getattr(owner, served.name)
    backend = _backend_class(base)
    operation = served.operation_05 if register_with_06 is None else served.operation
    if operation is None:
        _changes.set(owner, served.name, _replacement(served, default, backend))
        return
    names = _parameters(default)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        count(f"fla.{served.name}")
        return served.run(_by_name(names, args, kwargs))

    def verify(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        why_not = served.why_not(_by_name(names, args, kwargs))
        return why_not is None, why_not

    adapter = type(f"Cula_{served.name}", (backend,), {served.name: run, f"{served.name}_verifier": verify})
    if register_with_06 is not None:
        register_with_06(operation or default)(adapter)
    else:
        registries: Any = importlib.import_module("fla.ops.backends").BackendRegistry
        registries.ensure_initialized(operation)
        registries._registries[operation].register(adapter())


def _replacement(served: Served, default: Any, backend: Any) -> Any:
    """A function (or what has the `apply` of an autograd function) that asks cuLA first."""
    names = _parameters(default.forward)[1:] if served.is_autograd_function else _parameters(default)
    otherwise = default.apply if served.is_autograd_function else default
    logged: set[str] = set()

    @functools.wraps(otherwise)
    def ask_cula_first(*args: Any, **kwargs: Any) -> Any:
        if not backend.is_enabled():
            return otherwise(*args, **kwargs)
        arguments = _by_name(names, args, kwargs)
        why_not = served.why_not(arguments)
        if why_not is None:
            count(f"fla.{served.name}")
            return served.run(arguments)
        if why_not not in logged:
            logged.add(why_not)
            logger.info("cula.integrations.fla: %s.%s stays FLA's: %s", served.module, served.name, why_not)
        return otherwise(*args, **kwargs)

    if not served.is_autograd_function:
        return ask_cula_first
    return type(served.name, (default,), {"apply": staticmethod(ask_cula_first)})


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what FLA's function takes by position: its releases differ in their order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    if len(args) > len(names):
        raise TypeError(f"takes {len(names)} positional arguments, {len(args)} were given")
    return dict(zip(names, args)) | kwargs
