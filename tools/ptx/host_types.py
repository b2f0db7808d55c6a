# SPDX-License-Identifier: Apache-2.0
"""Types of LLVM's dialect as the host code uses them: their sizes, and values from and to bytes.

An integer or a pointer is a Python int without sign, a float a float, a struct or an array a list.
"""

import functools
import re
import struct

from tools.ptx.values import Unsupported


class Type:
    """A type, and how its values lie in memory. `count`: bits of an integer, elements of an array."""

    def __init__(self, kind, size, align, elements=(), count=0):
        self.kind, self.size, self.align, self.elements, self.count = kind, size, align, elements, count
        if kind == "struct":
            self.offsets, at = [], 0
            for e in elements:
                at += -at % e.align
                self.offsets.append(at)
                at += e.size
            self.align = max((e.align for e in elements), default=1)
            self.size = at + -at % self.align

    def zero(self):
        """The value of what was never set."""
        if self.kind == "struct":
            return [e.zero() for e in self.elements]
        if self.kind == "array":
            return [self.elements[0].zero() for _ in range(self.count)]
        return 0.0 if self.kind in FLOATS else 0

    def pack(self, value, memory, at):
        """Write a value into memory."""
        if self.kind == "struct":
            for e, x, offset in zip(self.elements, value, self.offsets):
                e.pack(x, memory, at + offset)
        elif self.kind == "array":
            for j, x in enumerate(value):
                self.elements[0].pack(x, memory, at + j * self.elements[0].size)
        elif self.kind in FLOATS:
            struct.pack_into(FLOATS[self.kind], memory, at, value)
        else:
            memory[at : at + self.size] = (value & (2 ** (8 * self.size) - 1)).to_bytes(self.size, "little")

    def unpack(self, memory, at):
        """Read a value from memory."""
        if self.kind == "struct":
            return [e.unpack(memory, at + offset) for e, offset in zip(self.elements, self.offsets)]
        if self.kind == "array":
            return [self.elements[0].unpack(memory, at + j * self.elements[0].size) for j in range(self.count)]
        if self.kind in FLOATS:
            return struct.unpack_from(FLOATS[self.kind], memory, at)[0]
        return int.from_bytes(memory[at : at + self.size], "little") & (2**self.count - 1)


FLOATS = {"f32": "<f", "f64": "<d"}
SCALARS = {"f32": 4, "f64": 8, "bf16": 2, "f16": 2}


@functools.cache
def parse_type(text):
    found, rest = take_type(text)
    if rest.strip():
        raise Unsupported(f"host type {text}")
    return found


def take_type(text):
    """The type at the beginning of a text, and what follows it."""
    text = text.lstrip().removeprefix("!llvm.")
    if m := re.match(r"i(\d+)", text):
        bits = int(m[1])
        size = 1 << (max(1, (bits + 7) // 8) - 1).bit_length()
        return Type("int", size, size, count=bits), text[m.end() :]
    for name, size in SCALARS.items():
        if text.startswith(name):
            return Type(name, size, size), text[len(name) :]
    if m := re.match(r"ptr(<\d+>)?", text):
        return Type("int", 8, 8, count=64), text[m.end() :]
    if m := re.match(r"(array|vector)<(\d+) ?x ?", text):
        element, rest = take_type(text[m.end() :])
        size = int(m[2]) * element.size
        align = size if m[1] == "vector" else element.align
        return Type("array", size, align, (element,), int(m[2])), rest.lstrip()[1:]
    if m := re.match(r'struct<(?:"[^"]*", )?\(', text):
        rest, elements = text[m.end() :], []
        while not rest.lstrip().startswith(")"):
            element, rest = take_type(rest)
            elements.append(element)
            rest = rest.lstrip().removeprefix(",")
        return Type("struct", 0, 1, tuple(elements)), rest.lstrip()[2:]
    if text.startswith("void"):
        return Type("void", 0, 1), text[4:]
    raise Unsupported(f"host type {text[:40]}")


def signed(value, bits):
    """An integer without sign as one with, of so many bits."""
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def unescape(text):
    """Bytes of a string constant, in which a backslash and two hexadecimal digits are a byte."""
    return re.sub(rb"\\([0-9A-Fa-f]{2})", lambda m: bytes([int(m[1], 16)]), text.encode())
