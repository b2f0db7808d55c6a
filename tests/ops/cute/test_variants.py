# SPDX-License-Identifier: Apache-2.0
"""The table of kernel modules, and what is taken from them."""

import sys
import types

import pytest

from cula.ops.cute.toolchain.variants import MODULES, Variant, collect, modules_of


@pytest.fixture
def module(monkeypatch):
    """Make a kernel module whose variants have these names."""

    def make(name, *variants):
        new = types.ModuleType(name)
        new.variants = lambda: iter([Variant(v, print, ()) for v in variants])
        monkeypatch.setitem(sys.modules, name, new)
        return name

    return make


def test_variants_come_in_order(module):
    modules = [module("kernels_one", "a", "b"), module("kernels_two", "c")]
    assert [v.name for v in collect(modules)] == ["a", "b", "c"]
    assert [v.name for v in collect(modules, ["c", "a"])] == ["c", "a"]


def test_wrong_names_are_errors(module):
    one, two, bad = module("kernels_one", "a", "b"), module("kernels_two", "b"), module("kernels_bad", "a-b")
    with pytest.raises(ValueError, match="kernels_two: a second variant is called 'b'"):
        collect([one, two])
    with pytest.raises(ValueError, match="kernels_bad: variant 'a-b' is not a name that a library can export"):
        collect([bad])
    with pytest.raises(ValueError, match="no variant x, y in kernels_one; there are a, b"):
        collect([one], ["x", "a", "y"])


def test_the_table():
    assert modules_of("sm_90a") is MODULES["sm_90a"]
    with pytest.raises(ValueError, match="unknown architecture 'sm_80'; cuLA has kernels for sm_90a, sm_100a, sm_103a"):
        modules_of("sm_80")
