# SPDX-License-Identifier: Apache-2.0
"""Every environment variable cuLA reads, in one table.

| name                   | default    | meaning                                                                               |
|------------------------|------------|---------------------------------------------------------------------------------------|
| `CULA_BATCH_INVARIANT` | `0`        | `1` is `batch_invariant=True` for every call                                          |
| `CULA_CHECK`           | `0`        | `1` reads values back and checks them: offsets, slot indices, gate signs, NaN and Inf |
| `CULA_KERNEL_DIR`      |            | what `python -m cula.compile` made: CuTe kernels come from there and nowhere else     |
| `CULA_NVTX`            | `0`        | `1` puts a range around each call of level 1, for profilers; read on import           |
| `CULA_SELF_CHECK`      | `1`        | kernels that never ran on hardware: `1` compares them with torch at their first use   |
|                        |            | on a machine, `0` uses them without, `decline` does not use them                      |
| `CULA_VLLM`            | `0`        | `1`: the plug-in that vLLM loads puts cuLA in the place of its GDN and KDA kernels    |
| `CUTE_DSL_RUNTIME`     |            | the file `libcute_dsl_runtime.so`, if it is in none of the places `loader.py` looks   |
| `FLA_CULA`             | `1`        | `0`: FLA does not ask cuLA, though `cula.integrations.fla.register()` was called      |
| `TRITON_INTERPRET`     | `0`        | Triton's own: `1` runs its kernels in an interpreter, on CPU tensors. For the tests,  |
|                        |            | which repair it first (`tests/support/triton_interpreter.py`)                         |
| `XDG_CACHE_HOME`       | `~/.cache` | CuTe kernels compiled on first use are kept in its folder `cula`                      |

Variables but `CULA_NVTX` are read when they are needed, so a test or a debugging session may set them at any time.
None of them changes a result, but for its last bits.
"""

import os
from pathlib import Path
from typing import Any, Literal

# Asked on every call: the mapping behind os.environ answers ten times faster where a variable is not set.
_environ: Any = getattr(os.environ, "_data", os.environ)
_CULA_CHECK, _CULA_BATCH_INVARIANT = (
    os.environ.encodekey(name) if hasattr(os.environ, "_data") else name for name in ("CULA_CHECK", "CULA_BATCH_INVARIANT")
)
_OFF = (None, "", "0", b"", b"0")


def check_values() -> bool:
    """Whether `CULA_CHECK=1` asks for checks that read tensor values (a synchronisation on a GPU)."""
    return _environ.get(_CULA_CHECK) not in _OFF


def batch_invariant() -> bool:
    """Whether every call is to be batch-invariant."""
    return _environ.get(_CULA_BATCH_INVARIANT) not in _OFF


def triton_is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def kernel_dir() -> Path | None:
    """The folder of kernels compiled ahead of time that `CULA_KERNEL_DIR` names."""
    named = os.environ.get("CULA_KERNEL_DIR")
    return Path(named) if named else None


def self_check() -> Literal["1", "0", "decline"]:
    """What becomes of kernels that have never run on hardware: compared with the torch backend at their first use on a machine,
    used without that, or not used."""
    named = os.environ.get("CULA_SELF_CHECK", "1")
    if named not in ("1", "0", "decline"):
        raise ValueError(f"CULA_SELF_CHECK is 1, 0 or decline; got {named!r}")
    return named  # type: ignore[return-value]  # mypy does not narrow a str by a tuple


def nvtx() -> bool:
    """Whether calls are to show as ranges in a profiler."""
    return os.environ.get("CULA_NVTX", "0") == "1"


def fla_may_use_cula() -> bool:
    """Whether FLA may hand calls to cuLA once cuLA is registered with it."""
    return os.environ.get("FLA_CULA", "1") != "0"


def vllm_uses_cula() -> bool:
    """Whether the vLLM plug-in is switched on."""
    return os.environ.get("CULA_VLLM", "0") not in ("", "0")


def cute_runtime() -> Path | None:
    """The CuTe runtime library that `CUTE_DSL_RUNTIME` names."""
    named = os.environ.get("CUTE_DSL_RUNTIME")
    return Path(named) if named else None


def cache_dir() -> Path:
    """Where cuLA keeps what can be made again."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "cula"
