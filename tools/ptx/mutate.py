# SPDX-License-Identifier: Apache-2.0
r"""Edits that break a kernel's PTX on purpose, for tests that show that the simulator would notice.

    compiled("kda_fwd").edited(ptx=without_wait(3))                 # the fourth mbarrier wait is over at once
    compiled("kda_fwd").edited(ptx=without(NAMED_BARRIER, 0))       # the first named barrier is gone
    compiled("kda_fwd").edited(ptx=without(PROXY_FENCE, 2))         # the third proxy fence is gone
    compiled("kda_fwd").edited(ptx=replace(r"bar\.sync \t1, 128", "bar.sync \t1, 160"))

Each returns a function from text to text, which is what `Compiled.edited` and the function that `interpret` returns take. Both
refuse an edit that changes nothing, and a place that does not exist is an error, so a mutation cannot quietly become void
when a kernel changes.
"""

import re
from collections.abc import Callable

Edit = Callable[[str], str]

# What kernels wait at, and fences, as the DSL writes them.
MBARRIER_WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 (\S+), [^;]*;"
BLOCK_BARRIER = r"bar\.sync \t0;"
NAMED_BARRIER = r"bar(?:rier)?\.sync \t%?\w+, \d+;"
CLUSTER_WAIT = r"barrier\.cluster\.wait[^;]*;"
WGMMA_WAIT = r"wgmma\.wait_group\.sync\.aligned \t?\d+;"
BULK_STORE_WAIT = r"cp\.async\.bulk\.wait_group(?:\.read)? \t?\d+;"
PROXY_FENCE = r"fence\.proxy\.async[^;]*;"

IS_OVER = r"setp.eq.b32 \1, 0, 0;"  # in place of an mbarrier wait: its predicate is true


def replace(pattern: str, by: str | Callable[[re.Match], str], *places: int) -> Edit:
    """Replace all matches of a pattern, or those at some places (the first is 0), by a template or by what a function of the
    match returns."""

    def edit(text: str) -> str:
        matches = list(re.finditer(pattern, text))
        if any(place >= len(matches) for place in places):
            raise ValueError(f"{pattern!r} has {len(matches)} matches, and those at {places} are to be replaced")
        for m in reversed([matches[place] for place in sorted(places)] if places else matches):
            text = text[: m.start()] + (by(m) if callable(by) else m.expand(by)) + text[m.end() :]
        return text

    return edit


def without(pattern: str, *places: int) -> Edit:
    """Leave out all matches of a pattern, or those at some places."""
    return replace(pattern, "", *places)


def without_wait(*places: int) -> Edit:
    """Let all mbarrier waits of a kernel be over at once, or those at some places."""
    return replace(MBARRIER_WAIT, IS_OVER, *places)


def change(pattern: str, f: Callable[[int], int], *places: int) -> Edit:
    """Replace the number that a pattern's first group holds by a function of it."""
    return replace(pattern, lambda m: m[0].replace(m[1], str(f(int(m[1])))), *places)
