# SPDX-License-Identifier: Apache-2.0
"""What crosses from host to kernel is described once: order, types, alignments, and the bytes of a workspace."""

import pytest

from cula.ops.cute.abi import Abi, InTurns, Section, Workspace, addresses, f32, i32, i64

TOY = Abi("toy", addresses(q=16, o=16), i64("q_token"), i32("T"), f32("scale"))


def test_arguments_come_in_the_described_order_and_type():
    assert TOY.pack_addresses({"o": 32, "q": 16}) == (16, 32)
    numbers = TOY.pack_numbers({"scale": 1, "T": True, "q_token": 2**40})
    assert numbers == (2**40, 1, 1.0)
    assert [type(x) for x in numbers] == [int, int, float]


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ({"q_token": 1, "T": 1}, TypeError, r"toy: arguments missing: \['scale'\]; unknown: none"),
        ({"q_token": 1, "T": 1, "scale": 1.0, "N": 2}, TypeError, r"toy: arguments missing: none; unknown: \['N'\]"),
        ({"q_token": 1, "T": 1.0, "scale": 1.0}, TypeError, "toy: T is 1.0; expected an integer"),
        ({"q_token": 1, "T": 2**31, "scale": 1.0}, OverflowError, "toy: T is 2147483648, which does not fit i32"),
    ],
)
def test_wrong_numbers_are_errors(numbers, error, message):
    with pytest.raises(error, match=message):
        TOY.pack_numbers(numbers)


def test_descriptions_that_make_no_sense_are_errors():
    with pytest.raises(ValueError, match="an argument is named twice"):
        Abi("toy", addresses(q=16), i32("q"))
    with pytest.raises(ValueError, match="addresses come before numbers"):
        Abi("toy", i32("T"), addresses(q=16))


def test_variants_may_read_in_other_pieces():
    other = TOY.with_alignment(o=2)
    assert (other.alignment, TOY.alignment) == ({"q": 16, "o": 2}, {"q": 16, "o": 16})
    with pytest.raises(ValueError, match=r"toy: \['T'\] are not addresses"):
        TOY.with_alignment(T=4)


def test_sections_of_a_workspace_follow_each_other():
    workspace = Workspace((Section("tiles", "records", 256), Section("flags", "segments", 4), Section("maps", "segments", 128)))
    assert workspace.offsets(records=3, segments=5) == {"tiles": 0, "flags": 768, "maps": 896, "end": 1536}


def test_sections_that_come_in_turns_have_one_place():
    early, late = (Section("tiles", "records", 256), Section("maps", "segments", 128)), (Section("sums", "rows", 128),)
    workspace = Workspace((Section("flags", "one", 4), InTurns((early, late)), Section("states", "records", 512)))
    at = {"flags": 0, "tiles": 128, "maps": 640, "sums": 128}
    assert workspace.offsets(one=1, records=2, segments=3, rows=5) == at | {"states": 1024, "end": 2048}
    assert workspace.offsets(one=1, records=2, segments=3, rows=9) == at | {"states": 1280, "end": 2304}
