#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare compiled kernels of two states of the sources: is the machine code the same?

    python -m cula.compile --arch sm_90a --out OLD --no-runtime --keep-text      # before a change
    python -m cula.compile --arch sm_90a --out NEW --no-runtime --keep-text      # behind it
    python tools/compare_code.py OLD/sm_90a NEW/sm_90a

Kernels' symbols hold the names of Python functions and of argument types, which a change of words changes. So kernels are paired
by their code, and compared are the bytes of it and of the constants beside it, of which the parameters are a part. Where those
differ it also counts the lines of the PTX that do.
"""

from __future__ import annotations

import argparse
import difflib
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

SECTION = struct.Struct("<IIQQQQIIQQ")


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """The names and bytes of an ELF file's sections."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [SECTION.unpack_from(cubin, table + i * size) for i in range(count)]
    for name, kind, _, _, at, length, *_ in headers:
        start = headers[names][4] + name
        yield cubin[start : cubin.index(b"\0", start)].decode(), b"" if kind == 8 else cubin[at : at + length]


def code(cubin: bytes) -> list[tuple[str, list[bytes]]]:
    """For each kernel, the shortest first: its name, and what the GPU gets of it."""
    found = dict(sections(cubin))
    order = [name.removeprefix(".text.") for name in found if name.startswith(".text.")]
    order.sort(key=lambda kernel: (len(found[f".text.{kernel}"]), found[f".text.{kernel}"]))  # names may change, and their order
    parts = (".text.", ".nv.constant0.", ".nv.constant2.", ".nv.constant4.")
    return [(kernel, [found.get(part + kernel, b"") for part in parts]) for kernel in order]


def instructions(ptx: str) -> list[str]:
    """Lines of PTX without names of kernels, parameters and source lines."""
    lines = [re.sub(r"//.*", "", line).strip() for line in ptx.splitlines()]
    symbols = re.findall(r"\.entry\s+(\S+?)\(", ptx)
    text = "\n".join(line for line in lines if line and not line.startswith((".loc", ".file")))
    for i, symbol in enumerate(symbols):
        text = text.replace(symbol, f"kernel_{i}")
    return text.splitlines()


def compare(old: Path, new: Path) -> str | None:
    """What is different about a variant, given by its cubin, in a phrase; None if nothing."""
    before, after = code(old.read_bytes()), code(new.read_bytes())
    if len(before) != len(after):
        return f"{len(before)} kernels, now {len(after)}"
    if [parts for _, parts in before] == [parts for _, parts in after]:
        return None
    sizes = ", ".join(f"{len(x[0]) // 16} -> {len(y[0]) // 16}" for (_, x), (_, y) in zip(before, after))
    lines = [instructions(path.with_suffix(".ptx").read_text()) for path in (old, new)]
    changed = [x for x in difflib.unified_diff(*lines, lineterm="", n=0) if x[:1] in "+-" and x[:3] not in ("+++", "---")]
    removed = sum(x.startswith("-") for x in changed)
    return f"instructions {sizes}; in the PTX {removed} lines gone, {len(changed) - removed} new"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a folder of cubins")
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    old, new = ({path.stem for path in folder.glob("*.cubin")} for folder in (args.old, args.new))
    for folder, found in ((args.old, old), (args.new, new)):
        if not found:
            parser.error(f"{folder} has no cubins")
    differences: dict[str, str | None] = {}
    for name in sorted(old | new):
        if name in old and name in new:
            differences[name] = compare(args.old / f"{name}.cubin", args.new / f"{name}.cubin")
        else:
            differences[name] = f"only in {args.old if name in old else args.new}"
        print(f"{name}: {differences[name] or 'the same'}")
    changed = sum(difference is not None for difference in differences.values())
    print(f"{len(differences) - changed} of {len(differences)} have the same machine code")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
