# SPDX-License-Identifier: Apache-2.0
"""Which loads an instruction of sm_90 machine code waits for.

A warp has six scoreboards. A load takes one until it has come, and an instruction names those that must be free before it is
issued, so two loads that share one are waited for together. Neither PTX nor a simulator shows it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from triton import knobs

NUM_SCOREBOARDS = 6
NONE = 7  # in place of a scoreboard's number, which has three bits
# Where they are in the upper half of an instruction: bits 110 to 112 and, one a scoreboard, 116 to 121 of the whole.
TAKES, WAITS_FOR = 110 - 64, 116 - 64
WORD = r"/\* 0x([0-9a-f]{16}) \*/"
INSTRUCTION = re.compile(rf"^\s+/\*[0-9a-f]{{4,6}}\*/\s+(.*?)\s*;\s+{WORD}\s*\n\s+{WORD}", re.M)


class Instruction(NamedTuple):
    text: str
    takes: int  # the scoreboard, or NONE
    waits_for: frozenset[int]


def instructions(cubin: Path) -> list[Instruction]:
    """Of a file with one kernel, in the order of the code."""
    command = [str(Path(knobs.nvidia.cuobjdump.path).with_name("nvdisasm")), "-hex", str(cubin)]
    return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parse(text: str) -> list[Instruction]:
    """What `nvdisasm -hex` prints."""
    return [Instruction(operation, *control(int(upper, 16))) for operation, _, upper in INSTRUCTION.findall(text)]


def control(upper: int) -> tuple[int, frozenset[int]]:
    """The scoreboard that an instruction takes and those that it waits for, from the upper half of its 128 bits."""
    return upper >> TAKES & NONE, frozenset(n for n in range(NUM_SCOREBOARDS) if upper >> WAITS_FOR >> n & 1)


def work_before(code: list[Instruction], load: str) -> list[Instruction]:
    """What stands between the last of the loads, the most numerous ones from one register that match, and the first instruction
    that waits for any of them."""
    bases = [found[1] for x in code if (found := re.search(load + r".*\[(R\d+)\.64", x.text))]
    base = max(set(bases), key=bases.count)
    places = [i for i, x in enumerate(code) if re.search(load + rf".*\[{base}\.64", x.text)]
    boards = {code[i].takes for i in places} - {NONE}
    assert boards, f"loads of {base} take no scoreboard"
    behind = code[places[-1] + 1 :]
    return behind[: next(i for i, x in enumerate(behind) if x.waits_for & boards)]
