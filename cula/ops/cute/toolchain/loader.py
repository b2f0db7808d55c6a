# SPDX-License-Identifier: Apache-2.0
"""Get a compiled kernel by its name.

    kernel = load("kda_f16_gate_bf16", "sm_90a")   # cheap from the second time on
    kernel(*addresses, *numbers, stream)           # a tvm-ffi function: what it takes is the variant's host function's

With `CULA_KERNEL_DIR` set, kernels come from that folder, which `python -m cula.compile` made, and from nowhere else: a machine
that serves never compiles. Otherwise they come from the folder that a wheel brought (`make wheel`), as long as the sources are
the wheel's. Otherwise they come from the cache, and one that is not there is compiled first, which is said. The loading is the
same: the CuTe runtime library, then `tvm_ffi.load_module`; the DSL is not imported into this process. A folder that others may
write to is not loaded from (`folders.py`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cula.version
from cula import settings
from cula.ops.cute.toolchain import build, folders
from cula.ops.cute.toolchain.variants import modules_of, source_hash

logger = logging.getLogger("cula")

RUNTIME = "libcute_dsl_runtime.so"
MANIFEST = "manifest.json"
SECONDS = 20  # that compiling a kernel takes, about
IN_WHEEL = Path(cula.version.__file__).parent / "compiled"  # one folder an architecture; not there in a clone


@functools.cache
def load(name: str, arch: str, modules: tuple[str, ...] | None = None) -> Callable[..., Any]:
    """The kernel `name` for `arch`, from the modules of the table or from the given ones."""
    reason = missing(arch)
    if reason is not None:
        raise RuntimeError(f"cannot load the kernel {name} for {arch}: {reason}")
    library = locate(name, arch, modules_of(arch) if modules is None else modules)
    _load_runtime()
    import tvm_ffi

    return getattr(tvm_ffi.load_module(str(library)), name)


def missing(arch: str) -> str | None:
    """Why kernels for `arch` cannot be loaded on this machine, with what to install or set; None if they can.

    Looks at what is installed and set, not at the kernels: a folder of other kernels than these sources' is an error of
    `load`, not a reason to quietly use another backend.
    """
    return _missing(arch, settings.kernel_dir())


@functools.cache
def _missing(arch: str, kernels: Path | None) -> str | None:
    if importlib.util.find_spec("tvm_ffi") is None:
        return "apache-tvm-ffi is not installed (pip install apache-tvm-ffi)"
    if kernels is not None:
        if not (kernels / arch / MANIFEST).is_file():
            return f"CULA_KERNEL_DIR={kernels} has no kernels for {arch} ({_how_to_compile(arch, kernels)})"
    elif not has_wheel_kernels(arch, modules_of(arch)):
        lacking = build.missing()
        if lacking is not None:
            return f"{lacking}, CULA_KERNEL_DIR names no folder of compiled kernels, and this install came without any"
    if find_runtime() is None:
        return f"{RUNTIME} is not found (name it in CUTE_DSL_RUNTIME, or pip install '{build.DSL}=={build.DSL_VERSION}')"
    return None


def locate(name: str, arch: str, modules: tuple[str, ...]) -> Path:
    """The library that holds a kernel; compiles it first where that is called for."""
    kernels = settings.kernel_dir()
    if kernels is not None:
        return _locate_compiled(kernels, name, arch, modules)
    if has_wheel_kernels(arch, modules):
        return IN_WHEEL / arch / f"{name}.so"
    library, root = cache_folder(arch, modules) / f"{name}.so", settings.cache_dir()
    if library.is_file() and folders.distrust(folders.within(root, library)) is None:
        return library  # also where nothing can be written
    library = folders.writable(library.parent, root) / library.name
    if not library.is_file():
        logger.warning(
            "compiling the kernel %s for %s: some %d seconds, once, because this install came without compiled kernels; kept in "
            "%s (python -m cula warmup compiles ahead of time)",
            name,
            arch,
            SECONDS,
            library.parent,
        )
        build.build(arch, modules, library.parent, [name], reuse=True)
    return library


@functools.cache
def uncompiled(name: str, arch: str) -> str | None:
    """Why a kernel is not to be had because compiling it failed, as a sentence, which is also said; None if it is there, now."""
    try:
        locate(name, arch, modules_of(arch))
    except build.CompileError as error:
        logger.warning(
            "the kernel %s for %s does not compile on this machine, and calls that want it go to another backend:\n%s\n"
            "Kernels are compiled by %s %s and linked by %s; a wheel with kernels (make wheel) or CULA_KERNEL_DIR needs neither.",
            name,
            arch,
            error,
            build.DSL,
            build.DSL_VERSION,
            build.linker(),
        )
        return f"its kernel {name} does not compile on this machine: {str(error).splitlines()[-1]}"
    return None


@functools.cache
def has_wheel_kernels(arch: str, modules: tuple[str, ...]) -> bool:
    """Whether the installed wheel has kernels compiled from just these sources."""
    if not (IN_WHEEL / arch / MANIFEST).is_file():
        return False
    compiled_from, here = read_manifest(IN_WHEEL, arch)["sources"], source_hash(modules)
    if compiled_from != here:
        logger.warning("kernels of the installed wheel are not used: they are of sources %s, here are %s", compiled_from, here)
    return compiled_from == here


def _locate_compiled(kernels: Path, name: str, arch: str, modules: tuple[str, ...]) -> Path:
    manifest = read_manifest(kernels, arch)
    if manifest["sources"] != source_hash(modules):
        raise RuntimeError(
            f"CULA_KERNEL_DIR={kernels} was compiled from other sources than this version of cuLA "
            f"({manifest['sources']}, not {source_hash(modules)}): {_how_to_compile(arch, kernels)}"
        )
    if name not in manifest["kernels"]:
        raise RuntimeError(
            f"CULA_KERNEL_DIR={kernels} has no kernel {name} for {arch}: {_how_to_compile(arch, kernels)} without --only"
        )
    library, runtime = kernels / arch / f"{name}.so", kernels / RUNTIME
    reason = folders.distrust([*folders.within(kernels, library), *([runtime] if runtime.is_file() else [])])
    if reason is not None:
        raise RuntimeError(f"CULA_KERNEL_DIR={kernels} is refused: {reason}")
    return library


def read_manifest(kernels: Path, arch: str) -> dict[str, Any]:
    """What `python -m cula.compile` wrote about the kernels of one architecture."""
    return json.loads((kernels / arch / MANIFEST).read_text())


def cache_folder(arch: str, modules: tuple[str, ...]) -> Path:
    """Where kernels compiled on first use are kept: a folder for each state of the sources, the DSL and `build.py`."""
    parts = (source_hash(modules), build.dsl_version(), platform.machine(), _text_of_build())
    return settings.cache_dir() / "cute" / f"{arch}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"


@functools.cache
def _text_of_build() -> str:
    return Path(build.__file__).read_text()


def find_runtime() -> Path | None:
    """The CuTe runtime library: as set, beside the compiled kernels, or in the installed DSL."""
    named = settings.cute_runtime()
    if named is not None:
        if not named.is_file():
            raise FileNotFoundError(f"CUTE_DSL_RUNTIME={named} is not a file")
        return named
    kernels = settings.kernel_dir()
    if kernels is not None and (kernels / RUNTIME).is_file():
        return kernels / RUNTIME
    return installed_runtime()


@functools.cache
def installed_runtime() -> Path | None:
    """The runtime library of the installed DSL, without importing that."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = spec.submodule_search_locations if spec is not None else None
    # lib, or one folder a CUDA release; the DSL itself takes them in this order
    found = (Path(folder) / sub / RUNTIME for folder in folders or () for sub in ("lib", "cu12/lib", "cu13/lib"))
    return next((path for path in found if path.is_file()), None)


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    """Make the runtime's symbols visible to the kernels loaded after it."""
    return ctypes.CDLL(str(find_runtime()), mode=ctypes.RTLD_GLOBAL)


def _how_to_compile(arch: str, kernels: Path) -> str:
    return f"python -m cula.compile --arch {arch} --out {kernels}"
