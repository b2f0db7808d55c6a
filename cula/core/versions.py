# SPDX-License-Identifier: Apache-2.0
"""Versions of other packages that cuLA is written for and has been tried with (docs/compatibility-tried.md)."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Releases of a package. Older ones are declined; newer ones are used, and said to be untried."""

    title: str
    module: str
    distributions: tuple[str, ...]  # names that it is installed under
    oldest: str
    newest: str  # that was tried
    needed_for: str
    install: str

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"

    def objection(self, version: str) -> str | None:
        """Why a release will not do, as a sentence with what to do; None if it will."""
        if key(version) >= key(self.oldest):
            return None
        return f"{self.title} {version} is older than {self.oldest}, the oldest that is supported ({self.install})"

    def doubt(self, version: str) -> str | None:
        """What is to be said of a release that is newer than those tried."""
        if key(version)[: len(key(self.newest))] <= key(self.newest):
            return None
        return f"newer than {self.newest}, the newest that was tried: python -m cula check tells whether it works"


SUPPORTED = {
    r.module: r
    for r in (
        Range("torch", "torch", ("torch",), "2.9", "2.15", "everything", "pip install 'torch>=2.9'"),
        Range(
            "Triton",
            "triton",
            ("triton", "pytorch-triton"),
            "3.5",
            "3.9",
            "GPU kernels, comes with torch's CUDA builds",
            "pip install 'triton>=3.5'",
        ),
        Range(
            "tvm-ffi",
            "tvm_ffi",
            ("apache-tvm-ffi",),
            "0.1.9",
            "0.1.15",
            "loads CuTe kernels",
            "pip install 'cuda-linear-attention[cuda]'",
        ),
    )
}


def key(version: str) -> tuple[int, ...]:
    """The numbers of a release, to compare: "2.9.1+cpu" is (2, 9, 1)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in numbers[0].split(".")) if numbers else ()


@functools.cache
def installed(wanted: Range) -> str | None:
    """The installed release, without importing it; None where there is none that says so."""
    for name in wanted.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def objection(module: str) -> str | None:
    """Why an installed module is of a release that will not do, as a sentence; None if it will, or nothing is known of it."""
    wanted = SUPPORTED.get(module)
    found = None if wanted is None else installed(wanted)
    return None if wanted is None or found is None else wanted.objection(found)
