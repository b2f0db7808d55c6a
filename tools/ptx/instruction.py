# SPDX-License-Identifier: Apache-2.0
"""PTX instructions and their operands, and the tables of types and registers."""

import functools
import re
from typing import NamedTuple

from tools.ptx.values import F32, S16, S32, S64, U16, U32, U64, Unsupported

# A register is a row of one of four arrays, by its size: U 32 bits, D 64 bits, H 16 bits, P predicates.
FILE_OF_TYPE = {
    "pred": "P", "b16": "H", "u16": "H", "s16": "H", "f16": "H", "bf16": "H", "b32": "U", "u32": "U", "s32": "U", "f32": "U",
    "f16x2": "U", "bf16x2": "U", "b64": "D", "u64": "D", "s64": "D", "f64": "D",
}  # fmt: skip
# A view is one way to look at such rows: U S F are uint32, int32, float32; D L uint64, int64; H G uint16, int16.
VIEWS_OF_FILE = {"U": "USF", "D": "DL", "H": "HG", "P": "P"}
VIEW_OF_TYPE = {
    "b16": "H", "u16": "H", "s16": "G", "b32": "U", "u32": "U", "s32": "S", "f32": "F", "b64": "D", "u64": "D", "s64": "L",
    "pred": "P",
}  # fmt: skip
DTYPE_OF_VIEW = {"U": U32, "S": S32, "F": F32, "D": U64, "L": S64, "H": U16, "G": S16}
# Beside those: the float32 pair in a 64-bit register, and the halves of 64-bit and of 32-bit registers.
ALL_VIEWS = ("U", "S", "F", "D", "L", "H", "G", "P", "DF", "D0", "D1", "U0", "U1")

# Bytes of a type.
WIDTH = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8,
    "s64": 8,
}  # fmt: skip

SPECIAL_REGISTERS = {
    *(f"%{name}.{axis}" for name in ("tid", "ctaid", "nctaid", "ntid", "clusterid", "nclusterid") for axis in "xyz"),
    *(f"%{name}.{axis}" for name in ("cluster_ctaid", "cluster_nctaid") for axis in "xyz"),
    "%laneid", "%cluster_ctarank", "%cluster_nctarank",
}  # fmt: skip

# Instructions whose first operand is read.
NO_RESULT = (
    "st", "bra", "ret", "exit", "bar", "barrier", "fence", "prefetch", "setmaxnreg", "stmatrix", "cp", "griddepcontrol",
    "nanosleep", "red", "tcgen05.st", "tcgen05.mma", "tcgen05.commit", "tcgen05.alloc", "tcgen05.dealloc", "mbarrier.init",
)  # fmt: skip
# Instructions behind which a thread may stand elsewhere, or nowhere.
BRANCHES = ("bra", "ret", "exit")
# Instructions that all 32 lanes of a warp take part in.
COLLECTIVES = ("shfl", "ldmatrix", "stmatrix", "mma", "vote", "redux")

REGISTER = re.compile(r"%\w+(?:\.[xyz])?")
ADDRESS = re.compile(r"([\w%.$]+)\s*(?:\+\s*(-?\w+))?\s*(?:,\s*\{(.*)\})?")


class Vector(NamedTuple):
    """An operand in braces."""

    items: tuple[str, ...]


class Address(NamedTuple):
    """An operand in brackets: a register or a symbol plus a constant; for a TMA descriptor the coordinates too."""

    base: str
    offset: int
    coordinates: tuple[str, ...]


class Instruction:
    """One instruction. An operand is an Address, a Vector, or the text of a register or a constant."""

    __slots__ = ("args", "is_move", "negated", "op", "parts", "place", "predicate", "reads", "source", "text", "writes")

    def __init__(self, text, op, args, predicate, negated, place):
        self.text, self.op, self.args, self.predicate, self.negated = text, op, args, predicate, negated
        self.parts, self.place = op.split("."), place
        self.is_move = self.parts[0] == "mov"
        self.source = None  # Python, once translated; "" if it has none
        if self.parts[0] == "bra":  # whose operand is a label
            self.reads, self.writes = {predicate} if predicate else set(), set()
            return
        has_result = bool(args) and not isinstance(args[0], Address) and makes_result(op)
        self.writes = registers_in(args[0]) if has_result else set()
        self.reads = set().union({predicate} if predicate else set(), *(registers_in(a) for a in args[has_result:]))

    def starts(self, *names):
        """Whether the opcode begins with one of these, by whole parts."""
        return any(begins(self.op, name) for name in names)


def begins(op, name):
    """Whether an opcode is `name`, or that with more parts behind it."""
    return op == name or op.startswith((name + ".", name + "::"))


@functools.cache
def makes_result(op):
    """Whether the first operand of an opcode is written."""
    return not any(begins(op, name) for name in NO_RESULT)


def registers_in(operand):
    """The names of the registers that an operand holds."""
    if isinstance(operand, Address):
        operand = " ".join((operand.base, *operand.coordinates))
    elif isinstance(operand, Vector):
        operand = " ".join(operand.items)
    if "%" not in operand:
        return set()
    return set(REGISTER.findall(operand)) - SPECIAL_REGISTERS


def parse_operands(text):
    """Operands apart, at the commas that are not in braces or brackets."""
    if "{" not in text and "[" not in text:
        return [operand.strip() for operand in text.split(",") if operand.strip()]
    found, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        found.append(current.strip())
    return [parse_operand(operand) for operand in found]


def parse_operand(text):
    if text.startswith("{"):
        return Vector(tuple(item.strip() for item in text[1:-1].split(",")))
    if text.startswith("["):
        match = ADDRESS.fullmatch(text[1:-1].strip())
        if match is None:
            raise Unsupported(f"address {text}")
        base, offset, coordinates = match.groups()
        return Address(base, int(offset or "0", 0), tuple(x.strip() for x in coordinates.split(",")) if coordinates else ())
    return text
