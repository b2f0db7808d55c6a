# SPDX-License-Identifier: Apache-2.0
"""The architectures that there are CuTe kernels for. To add one: its folder, with an `arch.py`, and one line here."""

from __future__ import annotations

from cula.ops.cute.arch import Arch
from cula.ops.cute.sm90.arch import HOPPER
from cula.ops.cute.sm100.arch import BLACKWELL

ARCHS: tuple[Arch, ...] = (
    HOPPER,
    BLACKWELL,
)

_OF_CAPABILITY = {capability: arch for arch in ARCHS for capability in arch.targets}


def find_arch(capability: tuple[int, int] | None) -> Arch | None:
    """The architecture of a GPU; None where there are no kernels for it."""
    return None if capability is None else _OF_CAPABILITY.get(capability)


def arch_of(capability: tuple[int, int] | None) -> Arch:
    """The architecture of a GPU that there are kernels for."""
    found = find_arch(capability)
    if found is None:
        raise ValueError(f"there are no CuTe kernels for compute capability {capability}; for {sorted(_OF_CAPABILITY)} there are")
    return found


def target_of(capability: tuple[int, int] | None) -> str:
    """What kernels for a GPU are compiled for: sm_90a, ..."""
    found = arch_of(capability)
    assert capability is not None
    return found.targets[capability]


def of_target(target: str) -> Arch:
    """The architecture that a target of the compiler belongs to."""
    return next(arch for arch in ARCHS if target in arch.targets.values())
