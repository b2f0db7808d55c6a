# SPDX-License-Identifier: Apache-2.0
"""What tests of CuTe kernels share: whether kernels can be compiled here, new memory that holds nothing, and waits that are
removed in turn."""

import re

import pytest
import torch

from cula.ops.cute.toolchain import build
from tools.ptx.mutate import MBARRIER_WAIT, without, without_wait

needs_dsl = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

TMEM_LOAD_WAIT, TMEM_STORE_WAIT, COMMIT = (rf"tcgen05\.{what}[^;]*;" for what in ("wait::ld", "wait::st", "commit"))


def skip_without_dsl():
    """For fixtures, which a mark does not reach."""
    if build.missing() is not None:
        pytest.skip(str(build.missing()))


def poison_new_memory(monkeypatch):
    """What `torch.empty` makes is NaN, and 0xFF where it is bytes: a kernel that reads it before it is written is noticed."""
    empty = torch.empty

    def poisoned(*shape, **kwargs):
        made = empty(*shape, **kwargs)
        if made.dtype.is_floating_point:
            return made.fill_(torch.nan)
        return made.fill_(0xFF) if made.dtype == torch.uint8 else made

    monkeypatch.setattr(torch, "empty", poisoned)


# A kernel's waits: by pattern how many there are, and the places of those that nothing notices when they are gone.


def count_waits(ptx, waits):
    """How often each pattern stands in the PTX."""
    return {what: len(re.findall(what, ptx)) for what in waits}


def removals(waits, quick):
    """(pattern, place) of every wait whose removal must be noticed; all are slow tests but those that are named."""
    return [
        pytest.param(what, place, marks=[] if (what, place) in quick else [pytest.mark.slow])
        for what, (count, unnoticed) in waits.items()
        for place in range(count)
        if place not in unnoticed
    ]


def without_the_wait(what, place):
    """The edit that removes one."""
    return without_wait(place) if what == MBARRIER_WAIT else without(what, place)
