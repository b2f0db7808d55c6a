# SPDX-License-Identifier: Apache-2.0
"""Edits of PTX reach the places they name, and say when there is no such place."""

import pytest

from tools.ptx import Compiled
from tools.ptx.mutate import BLOCK_BARRIER, MBARRIER_WAIT, change, replace, without, without_wait

WAITS = "".join(f"mbarrier.try_wait.parity.shared.b64 %p{n}, [%r{n}], 0;\n" for n in range(3))


def test_places_are_counted_from_zero():
    assert replace("a", "b")("a-a-a") == "b-b-b"
    assert replace("a", "b", 2, 0)("a-a-a") == "b-a-b"
    assert replace("a", lambda m: m[0].upper(), 1)("a-a-a") == "a-A-a"
    assert without(BLOCK_BARRIER, 1)("bar.sync \t0; ret; bar.sync \t0;") == "bar.sync \t0; ret; "
    assert change(r"n=(\d+)", lambda n: n + 1)("n=9 m=9") == "n=10 m=9"


def test_a_wait_without_its_wait_leaves_a_predicate_that_is_true():
    lines = without_wait(1)(WAITS).splitlines()
    assert lines == [WAITS.splitlines()[0], "setp.eq.b32 %p1, 0, 0;", WAITS.splitlines()[2]]


def test_an_edit_that_does_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"has 3 matches, and those at \(3,\) are to be replaced"):
        without(MBARRIER_WAIT, 3)(WAITS)
    with pytest.raises(ValueError, match="some: the edit changes nothing"):
        Compiled("some", "sm_90a", WAITS, "").edited(ptx=without(BLOCK_BARRIER))
