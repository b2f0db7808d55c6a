# SPDX-License-Identifier: Apache-2.0
"""PTX text to numbered instructions and registers; straight-line pieces of it to Python functions, made when first needed."""

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from tools.ptx import operations
from tools.ptx.flight import reads_in_flight
from tools.ptx.instruction import (
    ALL_VIEWS,
    COLLECTIVES,
    DTYPE_OF_VIEW,
    FILE_OF_TYPE,
    SPECIAL_REGISTERS,
    VIEWS_OF_FILE,
    WIDTH,
    Instruction,
    parse_operands,
)
from tools.ptx.proxies import is_generic
from tools.ptx.translate import translate
from tools.ptx.values import PARAM_BASE, SMEM_BASE, SimulationError, Unsupported

NAME = re.compile(r"(?<![%\w$.])([A-Za-z_]\w*)(?!\w)")
LABEL = re.compile(r"(\$?\w+):(?=\s)")
PARAM_ALIGNMENT = 64  # what a TMA descriptor needs
FILE_OF_PREFIX = {"%rd": "D", "%fd": "D", "%rs": "H", "%h": "H", "%p": "P"}  # all others are U


class Segment(NamedTuple):
    """Instructions that run without the scheduler."""

    function: object  # of a Views and a mask of lanes (None: all)
    end: int
    writes: tuple  # (file, number) of the registers it writes
    instructions: tuple
    is_collective: bool


class Program:
    """One kernel: its instructions, labels, parameters and registers."""

    def __init__(self, ptx, name=None, block=None):
        ptx = re.sub(r"//[^\n]*", "", ptx)
        shared = re.search(r"\.extern \.shared .*? (\w+)\[\]", ptx)
        self.smem_name = shared[1] if shared else ""
        entries = list(re.finditer(r"\.entry\s+(\S+?)\(\s*(.*?)\)\s*(.*?)\{", ptx, re.S))
        head = next((e for e in entries if name in (None, e[1])), None)
        if head is None:
            raise SimulationError(f"no kernel {name} among {[e[1] for e in entries]}")
        end = next((e.start() for e in entries if e.start() > head.start()), len(ptx))
        self.name = head[1]
        self.params, self.param_bytes = parameters(head[2])
        self.block = block_size(head[3], block)
        if "cluster" in head[3]:
            raise Unsupported("a kernel that says itself how large its clusters are: the DSL leaves it to the launch")
        self.registers, self.count = {}, dict.fromkeys("UDHP", 0)
        self.environment = dict(operations.ENVIRONMENT)
        self.code, self.labels = [], {}
        self.read(ptx[head.end() : ptx.rindex("}", head.end(), end)])
        self.joins = set(self.labels.values())
        self.wgmma_places = {n for n, i in enumerate(self.code) if i.starts("wgmma.mma_async")}
        self.segments = {}

    # Reading.

    def read(self, body):
        """Statements, labels and scopes; a register declared in braces is known only there."""
        at, scopes, local = 0, [], {}
        while True:
            while at < len(body) and body[at].isspace():
                at += 1
            if at >= len(body):
                return
            if body[at] == "{":
                scopes.append(len(local) + 1)
                local[scopes[-1]] = {}
                at += 1
            elif body[at] == "}":
                scopes.pop()
                at += 1
            elif label := LABEL.match(body, at):
                self.labels[self.label_key(label[1], scopes)] = len(self.code)
                at = label.end()
            else:
                end = body.index(";", at)
                self.read_statement(" ".join(body[at:end].split()), scopes, local)
                at = end + 1

    @staticmethod
    def label_key(label, scopes):
        """A label without $ is known only in its braces."""
        return (0 if label.startswith("$") or not scopes else scopes[-1], label)

    def read_statement(self, text, scopes, local):
        """A declaration of registers, or an instruction."""
        declared = re.match(r"\.reg \.(\w+) (.*)", text)
        if declared:
            file = FILE_OF_TYPE[declared[1]]
            for name in re.split(r"[,\s]+", declared[2]) if scopes else []:
                if not name.startswith("%"):
                    local[scopes[-1]][name] = f"%{file}_{scopes[-1]}_{name}"
                    self.number(local[scopes[-1]][name], file)
            return
        if not text or text.startswith("."):
            return
        names = {name: full for scope in scopes for name, full in local[scope].items()}
        rest, predicate, negated = text, None, False
        guard = re.match(r"@(!?)(%?\w+)\s+", text)
        if guard:
            predicate, negated, rest = names.get(guard[2], guard[2]), bool(guard[1]), text[guard.end() :]
        op, _, operands = rest.partition(" ")
        if op.startswith("bra"):
            args = [self.label_key(operands.strip(), scopes)]
        else:
            args = parse_operands(NAME.sub(lambda m: names.get(m[1], m[1]), operands) if names else operands)
        instruction = Instruction(text, op, args, predicate, negated, len(self.code))
        for register in instruction.reads | instruction.writes:
            self.number(register)
        self.code.append(instruction)

    def number(self, name, file=None):
        """The file and number of a register, which its first mention gives it; the file by its name, unless it is declared."""
        if name not in self.registers:
            file = file or next((f for prefix, f in FILE_OF_PREFIX.items() if name.startswith(prefix)), "U")
            self.registers[name] = (file, self.count[file])
            self.count[file] += 1
        return self.registers[name]

    # Operands as Python source.

    def reference(self, operand, view):
        """An operand seen in one way: `F[12]` for a register, the name of a constant, or a special register."""
        if not operand.startswith("%"):
            return self.constant(view, self.literal(operand))
        if operand in SPECIAL_REGISTERS:
            return f"v.special[{operand!r}]"
        file, n = self.registers[operand]
        if view not in VIEWS_OF_FILE[file]:
            raise Unsupported(f"{operand} used as {view}")
        return f"{view}[{n}]"

    def bits(self, operand, width):
        """An operand as bits, whatever its width's type."""
        if not operand.startswith("%"):
            return self.constant({1: "H", 2: "H", 4: "U", 8: "D"}[width], self.literal(operand))
        file, n = self.registers[operand]
        return f"{file}[{n}]"

    def address(self, operand):
        """The source of an address's register, or None, and the constant to add."""
        if operand.base.startswith("%"):
            file, n = self.registers[operand.base]
            return f"{file}[{n}]", operand.offset
        return None, self.literal(operand.base) + operand.offset

    def literal(self, text):
        """The number that a constant, or the name of a symbol, stands for."""
        if text[:2] in ("0f", "0F"):
            return int(text[2:], 16)
        if text == self.smem_name:
            return SMEM_BASE
        if text in self.params:
            return PARAM_BASE + self.params[text][0]
        return int(text, 0)

    def constant(self, view, value):
        """The name under which generated code finds a constant: the same in every program."""
        name = f"{view}_{value}".replace("-", "minus_")
        if name not in self.environment:
            if view == "P":
                self.environment[name] = np.bool_(value != 0)
            else:
                dtype = np.dtype(DTYPE_OF_VIEW[view])
                bits = np.array([value & (2 ** (8 * dtype.itemsize) - 1)], f"u{dtype.itemsize}")
                self.environment[name] = bits.view(dtype)[0]
        return name

    # Functions.

    @functools.cached_property
    def in_flight(self):
        """Places of reads of shared memory that may not have happened, by the places of releases."""
        return reads_in_flight(self)

    @functools.cached_property
    def is_generic(self):
        """For each place, whether what is written there is written through the generic proxy."""
        return np.array([is_generic(i) for i in self.code])

    @functools.cached_property
    def is_acquire(self):
        """For each place, whether it is a load by which a warp knows what others did before they wrote what it reads."""
        return np.array([i.parts[0] == "ld" and "acquire" in i.parts for i in self.code])

    def source(self, at):
        """Python for an instruction that needs no scheduler and has no predicate, else ""."""
        instruction = self.code[at]
        if instruction.source is None:
            instruction.source = "" if instruction.predicate else translate(self, instruction) or ""
        return instruction.source

    def segment(self, at):
        """Straight-line code from `at` on as a function, or one without where the scheduler must act."""
        found = self.segments.get(at)
        if found is None:
            end = at
            while end < len(self.code) and self.source(end) and (end == at or end not in self.joins):
                end += 1
            if end == at:
                found = Segment(None, at + 1, (), (), False)
            else:
                found = self.compile(self.code[at:end], [self.code[i].source for i in range(at, end)], at, end)
            self.segments[at] = found
        return found

    def guarded(self, at):
        """A predicated instruction as a segment; None if it is not a simple one."""
        key = ("guarded", at)
        if key not in self.segments:
            source = translate(self, self.code[at])
            self.segments[key] = self.compile([self.code[at]], [source], at, at + 1) if source else None
        return self.segments[key]

    def compile(self, instructions, lines, start, end):
        """Lines of Python as one function, with the views they use taken from its argument first."""
        body = "\n ".join(lines)
        views = [view for view in ALL_VIEWS if re.search(rf"(?<![\w.'\"]){view}\[", body)]
        source = "def segment(v, m):\n " + "".join(f"{view}=v.{view};" for view in views) + f"\n {body}\n"
        exec(byte_code(source, f"<{self.name[:40]} {start}>"), self.environment)
        writes = sorted({self.registers[name] for i in instructions for name in i.writes})
        is_collective = any(i.parts[0] in COLLECTIVES for i in instructions)
        return Segment(self.environment.pop("segment"), end, writes, instructions, is_collective)


@functools.lru_cache(maxsize=8192)
def byte_code(source, name):
    """Python compiled, once for a kernel and all that edits leave as it was."""
    return compile(source, name, "exec")


def parameters(text):
    """Where each parameter of a kernel is in the space that holds them, with its bytes; and the bytes of all."""
    found, at = {}, 0
    for align, type_, name, n in re.findall(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?", text):
        size = WIDTH[type_] * int(n or 1)
        at += -at % max(int(align or 1), PARAM_ALIGNMENT)
        found[name] = (at, size)
        at += size
    return found, at


def block_size(directives, launched):
    """Threads along x, y, z: what the kernel requires, or what it is launched with where it sets no more than a limit."""
    said = re.search(r"\.(reqntid|maxntid)\s+([\d, ]+)", directives)
    sizes = [int(x) for x in said[2].split(",")]
    sizes += [1] * (3 - len(sizes))
    if launched is None and said[1] == "reqntid":
        return sizes
    fits = list(launched) == sizes if said[1] == "reqntid" else math.prod(launched) <= math.prod(sizes)
    if not fits:
        raise SimulationError(f"a block of {tuple(launched)} threads, and the kernel has .{said[1]} {said[2].strip()}")
    return list(launched)
