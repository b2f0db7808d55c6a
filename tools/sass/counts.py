# SPDX-License-Identifier: Apache-2.0
"""How many instructions of which kind a kernel issues, read off its machine code: for estimates on paper.

    python -m tools.sass.counts KERNEL.cubin

A line for each kernel of the file and, indented, for each of its loops that no other contains: what one turn issues where every
branch inside falls through to the end. A warp instruction takes one issue slot of its scheduler; what else it takes depends on
the kind.
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from triton import knobs

# The first that fits is an instruction's kind.
KINDS = {
    "special functions": r"MUFU",
    "multiply-add": r"FFMA|FMUL|FADD|HFMA|HADD|HMUL|IMAD",
    "tensor core": r"HMMA|UTCHMMA",
    "tensor memory": r"LDTM|STTM",
    "shared memory": r"LDS|STS|ATOMS|UBLKCP|UTMA",
    "global memory": r"LDG|STG|LDC|RED|ATOM",
    "other arithmetic": (
        r"[IF](ADD|SETP|MNMX|SEL|CHK|LO)|LOP|SHF|SEL|PRMT|LEA|MOV|F2|I2|VI|P2R|R2P|PLOP|IABS|POPC|FLO|CS2R|SHFL|VOTE|S2R|R2UR"
    ),
    "uniform": r"U|R2U|S2U",
}
LABEL, JUMP = re.compile(r"^(\.L_x_\d+):", re.M), re.compile(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)")


class Loop(NamedTuple):
    """From the target of a jump backwards to that jump."""

    first: int  # instructions, by their places in the kernel
    last: int


class Kernel(NamedTuple):
    name: str
    code: tuple[str, ...]  # instructions without predicates
    labels: dict[str, int]  # where they stand

    @property
    def loops(self) -> list[Loop]:
        """Those that no other contains. Waiting is none: neither jumps of a few instructions nor those behind the kernel's end,
        which come back from where a wait that was not over at once goes on."""
        end = max((i for i, text in enumerate(self.code) if text == "EXIT"), default=len(self.code))
        jumps = ((i, JUMP.search(text)) for i, text in enumerate(self.code[:end]))
        found = [Loop(self.labels[to[1]], i) for i, to in jumps if to is not None and self.labels.get(to[1], i) < i - 4]
        outermost: list[Loop] = []
        for loop in sorted(found, key=lambda loop: (loop.first, -loop.last)):
            if not outermost or loop.last > outermost[-1].last:
                outermost.append(loop)
        return outermost


def kind_of(instruction: str) -> str:
    """Of an instruction's text, with or without a predicate."""
    operation = re.sub(r"^@\S+\s+", "", instruction)
    return next((kind for kind, pattern in KINDS.items() if re.match(pattern, operation)), "control")


def count(code: Sequence[str]) -> dict[str, int]:
    """Instructions by kind, the most frequent first; without padding."""
    return dict(collections.Counter(kind_of(text) for text in code if not text.startswith("NOP")).most_common())


def kernels(cubin: Path) -> list[Kernel]:
    """Of a file, in the order of their numbers."""
    command = [str(Path(knobs.nvidia.cuobjdump.path).with_name("nvdisasm")), "-c", str(cubin)]
    return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parse(text: str) -> list[Kernel]:
    """What `nvdisasm -c` prints."""
    parts = re.split(r"^\s*\.section\s+\.text\.([^\s,]+),.*$", text, flags=re.M)
    found = []
    for name, body in zip(parts[1::2], parts[2::2]):
        code: list[str] = []
        labels: dict[str, int] = {}
        for line in body.splitlines():
            if label := LABEL.match(line):
                labels[label[1]] = len(code)
            elif instruction := re.search(r"/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;", line):
                code.append(instruction[1])
        found.append(Kernel(name, tuple(code), labels))
    return sorted(found, key=lambda kernel: kernel.name[::-1])


def describe(code: Sequence[str]) -> str:
    of_kind = count(code)
    return f"{sum(of_kind.values())}: " + ", ".join(f"{n} {kind}" for kind, n in of_kind.items())


def main(argv: Sequence[str]) -> None:
    for path in argv:
        for kernel in kernels(Path(path)):
            print(f"{kernel.name[-24:]} {describe(kernel.code)}")
            for first, last in kernel.loops:
                print(f"  loop at {first} {describe(kernel.code[first : last + 1])}")


if __name__ == "__main__":
    main(sys.argv[1:])
