# SPDX-License-Identifier: Apache-2.0
"""What is installed beside what cuLA is written for: the rows of `python -m cula`."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from typing import NamedTuple

import torch

from cula.core.dispatch import BACKENDS
from cula.core.versions import SUPPORTED, Range, installed
from cula.ops.cute.archs import ARCHS, find_arch
from cula.ops.cute.toolchain import build, loader
from cula.utils import describe_device

OK = "ok"


class Row(NamedTuple):
    what: str
    found: str
    supported: str
    verdict: str  # OK, or what to do next


def rows() -> list[Row]:
    cpu = Row("CPU", f"{torch.get_num_threads()} threads", "any", OK)
    return [*map(_package, SUPPORTED.values()), _dsl(), _linker(), _driver(), *_gpus(), cpu]


def _package(wanted: Range) -> Row:
    found = installed(wanted)
    if found is None:
        return Row(wanted.title, "-", str(wanted), f"{wanted.needed_for}: {wanted.install}")
    return Row(wanted.title, found, str(wanted), wanted.objection(found) or wanted.doubt(found) or OK)


def _dsl() -> Row:
    """CuTe DSL is one release: kernels are written for it, and its runtime library loads them."""
    try:
        found = build.dsl_version()
    except importlib.metadata.PackageNotFoundError:
        has_kernels = any(loader.has_wheel_kernels(t, a.kernel_modules) for a in ARCHS for t in a.targets.values())
        verdict = "not needed: this install came with compiled kernels"
        if not has_kernels:
            verdict = "compiles CuTe kernels for a GPU: pip install 'cuda-linear-attention[cute]'"
        return Row("CuTe DSL", "-", build.DSL_VERSION, verdict)
    is_right = found == build.DSL_VERSION
    return Row("CuTe DSL", found, build.DSL_VERSION, OK if is_right else f"pip install '{build.DSL}=={build.DSL_VERSION}'")


def _linker() -> Row:
    found = build.linker()
    what = "links kernels that are compiled here: install g++, or use a wheel with kernels"
    return Row("C++ compiler", found or "-", "any", OK if found else what)


def _driver() -> Row:
    wanted = f"CUDA {torch.version.cuda} or later, as this torch" if torch.version.cuda else "none, this torch is for CPUs"
    version = driver_version()
    if version is None:
        return Row("driver", "-", wanted, OK if torch.version.cuda is None else "install NVIDIA's driver, or work on the CPU")
    found = f"CUDA {version[0]}.{version[1]}"
    if torch.version.cuda is None:
        return Row("driver", found, wanted, "to use the GPU install a torch with CUDA (pytorch.org)")
    needed = tuple(int(n) for n in re.findall(r"\d+", torch.version.cuda)[:2])
    is_old = version[:1] < needed[:1]
    return Row("driver", found, wanted, "update NVIDIA's driver, or take a torch for an older CUDA" if is_old else OK)


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver knows; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _gpus() -> list[Row]:
    of_cute = ", ".join(f"{major}.{minor}" for arch in ARCHS for major, minor in arch.targets)
    wanted = f"SM 8.0 or later; CuTe kernels: {of_cute}"
    if not torch.cuda.is_available():
        return [Row("GPU", "-", wanted, "calls run on the CPU, by the torch backend")]
    found = []
    for i in range(torch.cuda.device_count()):
        sm = torch.cuda.get_device_capability(i)
        verdict = OK if sm >= (8, 0) else "the torch backend serves it"
        if verdict == OK and find_arch(sm) is None:
            verdict = f"{OK}, by Triton"
        found.append(Row("GPU", describe_device(f"cuda:{i}"), wanted, verdict))
    return found


def backends() -> list[tuple[str, str, str]]:
    """(name, summary, "ready" or what is missing), best first."""
    return [(b.name, b.summary, b.unavailable() or "ready") for b in BACKENDS]
