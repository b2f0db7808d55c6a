# SPDX-License-Identifier: Apache-2.0
"""What the host knows of an architecture before it looks at any kernel: the facts that each `sm*/arch.py` states.

Free of cutlass. `archs.py` lists the architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

ALL = ("*",)  # kernels


@dataclass(frozen=True)
class KdaTraits:
    """How KDA's kernels differ from one architecture to another."""

    has_fused: bool  # there is a fused kernel beside the split ones
    has_chained_schedule: bool  # chained segments may be longer than others, which blocks decide from the data
    shortest_segment: float  # chunks, as a multiple of the root of a sequence's
    has_whole_squares: bool  # the recurrence reads T and P as squares; otherwise by quarters, without the one that is zero
    intra_blocks: int  # blocks of the smallest intra-chunk kernel on an SM: as many as registers allow without spills


@dataclass(frozen=True)
class Arch:
    """One generation of GPUs: a folder of kernels."""

    name: str  # of the folder
    title: str  # what people call it
    targets: Mapping[tuple[int, int], str]  # what is compiled for each compute capability
    modules: Mapping[str, tuple[str, ...]]  # kernel modules of each family, relative to `cula.ops.cute`
    serves: tuple[str, ...]  # what dispatch offers it: families' prefills and other passes by name, "decode"
    summary: str  # one line for `python -m cula`
    num_sms: tuple[int, ...]  # of its GPUs: what `python -m cula warmup` compiles for where there is none
    new: tuple[str, ...]  # names of kernels without a recorded run on hardware, as patterns: these check themselves at first use
    kda: KdaTraits

    def is_new(self, kernel: str) -> bool:
        """Whether nobody has recorded that a kernel ran on hardware, and was right."""
        return any(fnmatchcase(kernel, pattern) for pattern in self.new)

    @property
    def kernel_modules(self) -> tuple[str, ...]:
        """All of them, by their full names."""
        return tuple(f"cula.ops.cute.{module}" for family in self.modules.values() for module in family)
