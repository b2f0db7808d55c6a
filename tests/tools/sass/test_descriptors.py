# SPDX-License-Identifier: Apache-2.0
"""A descriptor's constant is to be added to zero; in code like ptxas's."""

import pytest

pytest.importorskip("triton")

from tools.sass.descriptors import misplaced_in


def sass(*instructions):
    return "\n".join(f"        /*{16 * i:04x}*/                   {text} ;" for i, text in enumerate(instructions))


ADD = "IADD3.X R41, R7, 0x40000040, RZ, P0, !PT"  # the layout of 128 bytes, in the upper half of a descriptor


@pytest.mark.parametrize("before", ["MOV R7, RZ", "IMAD.MOV.U32 R7, RZ, RZ, R9", "@P1 CS2R R6, SRZ"])
def test_zero_and_copies_are_right(before):
    assert misplaced_in(sass(before, ADD)) == []


@pytest.mark.parametrize(
    "before", ["FMUL R7, R1, R2", "LDS.128 R4, [R1]", "HGMMA.64x32x16.F32.BF16 R0, R24, gdesc[UR4], R0", "@!P2 FADD R7, R1, R2"]
)
def test_what_holds_something_else_is_reported(before):
    (found,) = misplaced_in(sass("MOV R7, RZ", before, ADD))
    assert found.startswith(f"0020: {ADD} (after ")


def test_other_constants_and_stores_do_not_matter():
    assert misplaced_in(sass("FMUL R7, R1, R2", ADD.replace("0x40000040", "0x40"))) == []
    assert misplaced_in(sass("MOV R7, RZ", "STS [R1], R7", "ST.E R7, [R2]", ADD)) == []
