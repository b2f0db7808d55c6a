# SPDX-License-Identifier: Apache-2.0
"""Scoreboards are found in an instruction's 128 bits, as nvdisasm prints them."""

import pytest

pytest.importorskip("triton")

from tools.sass.scoreboards import NONE, Instruction, parse


def line(address, text, takes=NONE, waits_for=()):
    upper = takes << 46 | sum(1 << 52 + n for n in waits_for)
    word = lambda bits: f"/* 0x{bits:016x} */"
    return f"        /*{address:04x}*/                   {text} ;   {word(0x7981)}\n{' ' * 40}{word(upper)}\n"


def test_instructions_are_read_with_their_scoreboards():
    text = line(0, "LDG.E.128 R4, desc[UR4][R8.64]", takes=5) + line(16, "FMUL R0, R4, R2", waits_for=(0, 5))
    assert parse(text) == [
        Instruction("LDG.E.128 R4, desc[UR4][R8.64]", 5, frozenset()),
        Instruction("FMUL R0, R4, R2", NONE, frozenset({0, 5})),
    ]
