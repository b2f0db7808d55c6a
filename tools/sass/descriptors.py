# SPDX-License-Identifier: Apache-2.0
"""A check of machine code for a fault of ptxas 12.8, which Triton 3.6 carries.

A product on tensor cores (wgmma) names its operands in shared memory by 64-bit descriptors: an address in the lower half, a
constant in the upper one, which is added to zero. With nearly all registers taken, ptxas was seen to add it to a register that
had long been given to something else; the product then reads wrong or unmapped shared memory. The PTX is right, so neither a
simulator nor a look at PTX shows it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile

from triton import knobs

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", re.M)
REGISTER = re.compile(r"(U?R)(\d+)$")
ZERO_OR_COPY = re.compile(r"(MOV|UMOV|R2UR|CS2R|IMAD\.MOV)\b")
SWIZZLES = (0x4000, 0x8000, 0xC000)  # upper 16 bits of the constant: the layout, 128, 64 or 32 bytes wide


def misplaced_descriptors(cubin: bytes) -> list[str]:
    """Instructions of sm_90 code that add a descriptor's constant to a register which is neither zero nor a copy."""
    return misplaced_in(_disassemble(cubin))


def misplaced_in(sass: str) -> list[str]:
    """The same of code that has been disassembled."""
    last: dict[str, str] = {}  # register -> the instruction that wrote it last, in the order of the code
    bad = []
    for address, text in INSTRUCTION.findall(sass):
        operation, _, rest = text.partition(" ")
        arguments = [a.strip().removesuffix(".reuse") for a in rest.split(",")]
        if operation in ("IADD3.X", "UIADD3.X") and any(_is_descriptor_constant(a) for a in arguments[1:4]):
            for a in arguments[1:4]:
                if REGISTER.match(a) and a in last and not ZERO_OR_COPY.match(last[a]):
                    bad.append(f"{address}: {text} (after {last[a]})")
        if (target := REGISTER.match(arguments[0])) and not operation.startswith(("ST", "RED", "BAR")):
            for i in range(_registers_written(operation)):
                last[f"{target[1]}{int(target[2]) + i}"] = text
    return bad


def _is_descriptor_constant(argument: str) -> bool:
    return bool(re.match(r"-?0x", argument)) and (int(argument, 16) & 0xFFFFFFFF) >> 16 in SWIZZLES


def _registers_written(operation: str) -> int:
    if wgmma := re.match(r"HGMMA\.64x(\d+)x", operation):
        return int(wgmma[1]) // 2
    if operation.startswith("LD"):
        return 4 if operation.endswith((".128", ".4")) else 2 if operation.endswith((".64", ".2")) else 1
    return 2 if operation.startswith(("CS2R", "IMAD.WIDE")) else 1


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
