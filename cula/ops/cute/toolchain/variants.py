# SPDX-License-Identifier: Apache-2.0
"""What a kernel module exports, and the table of kernel modules, which `archs.py` and each `sm*/arch.py` fill.

A kernel module imports cutlass at its top and has one function for the outside:

    def variants() -> Iterator[Variant]:
        for gate in ("safe", "any"):
            yield Variant(f"kda_fwd_{gate}", kda_fwd_host, (fake(...), ..., gate), uses=("wgmma", "tma_load"))

A variant is one compiled function. Sizes known only at run time are symbolic in its fake arguments, so there are as many
variants as there are different codes, not shapes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cula.ops.cute.archs import ARCHS

# The kernel modules of each target. Everything that compiles, ships, simulates or tests kernels starts here.
MODULES: dict[str, tuple[str, ...]] = {target: arch.kernel_modules for arch in ARCHS for target in arch.targets.values()}

CUTE = Path(__file__).parent.parent
COMMON = CUTE / "common"
# What kernels of every architecture are made from besides: the arguments they take, and numbers shared with other backends.
SHARED = (*sorted(CUTE.glob("*abi.py")), CUTE.parents[1] / "core" / "constants.py")


@dataclass(frozen=True)
class Variant:
    """One function to compile."""

    name: str  # the symbol it is loaded by; unique within an architecture
    host: Callable[..., Any]  # the @cute.jit function that launches
    args: tuple[Any, ...]  # what cute.compile takes after it: fake tensors, fake stream, constants
    uses: tuple[str, ...] = ()  # instructions its code must hold, by the names of `build.INSTRUCTIONS`
    options: str = ""  # more options for cute.compile


def modules_of(arch: str) -> tuple[str, ...]:
    """The kernel modules of an architecture."""
    if arch not in MODULES:
        raise ValueError(f"unknown architecture {arch!r}; cuLA has kernels for {', '.join(MODULES)}")
    return MODULES[arch]


def collect(modules: Iterable[str], names: Iterable[str] | None = None) -> list[Variant]:
    """The variants of some modules, or those of them that are named. Imports the modules, and so cutlass."""
    found: dict[str, Variant] = {}
    for module in modules:
        for variant in importlib.import_module(module).variants():
            if not variant.name.isidentifier():
                raise ValueError(f"{module}: variant {variant.name!r} is not a name that a library can export")
            if variant.name in found:
                raise ValueError(f"{module}: a second variant is called {variant.name!r}")
            found[variant.name] = variant
    if names is None:
        return list(found.values())
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(f"no variant {', '.join(unknown)} in {', '.join(modules)}; there are {', '.join(found) or 'none'}")
    return [found[name] for name in names]


@functools.cache
def source_hash(modules: tuple[str, ...]) -> str:
    """A digest of all that decides what the kernels of these modules do: their folders, `common/`, and `SHARED`.

    Nothing is imported but the packages the modules are in, so it works where there is no DSL. Files are named relative to
    their folder: a copy of the sources elsewhere has the same digest.
    """
    digest = hashlib.sha256()
    for folder in sorted({_folder(module) for module in modules} | {COMMON}):
        for path in _sources(folder):
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(path.read_bytes())
            digest.update(b"\0")
    for path in SHARED:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _folder(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"kernel module {module} does not exist")
    return Path(spec.origin).parent


def _sources(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*.py") if path.is_file())
