# SPDX-License-Identifier: Apache-2.0
"""Compile variants for an architecture, without a GPU, into `.so` files and a few facts about each.

CuTe DSL fixes the architecture when it is first imported, so every build runs in a process of its own, whatever the caller
has imported: `build(...)` starts `python -m cula.ops.cute.toolchain.build ...` and reads what it leaves behind.

For each variant the folder gets `NAME.so`, which tvm-ffi loads, and `NAME.json`, its `Facts`; with `keep_text` also `NAME.ptx`,
`NAME.cubin` and `NAME.host.mlir`, the device and the host code. Files appear whole or not at all: they are written under another
name and moved.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cula.ops.cute.toolchain import folders
from cula.ops.cute.toolchain.variants import Variant, collect

DSL = "nvidia-cutlass-dsl"
# The release that kernels are written for and checked with; the one in pyproject.toml.
DSL_VERSION = "4.8.1"

# Counted in the PTX, by the names that `Variant.uses` and the tests go by.
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async\b",
    "tcgen05": r"\btcgen05\.mma\b",
    "mma": r"\bmma\.sync\b",
    "tma_load": r"\bcp\.async\.bulk\.tensor\.\dd\.shared",
    "tma_store": r"\bcp\.async\.bulk\.tensor\.\dd\.global|\bcp\.reduce\.async\.bulk\.tensor",
    "ldmatrix": r"\bldmatrix\b",
    "stmatrix": r"\bstmatrix\b",
    "setmaxnreg": r"\bsetmaxnreg\b",
}


class CompileError(RuntimeError):
    """A variant did not compile; the message ends with what the compiler said."""


@dataclass(frozen=True)
class KernelFacts:
    """One kernel, as the driver will see it."""

    name: str
    threads: int  # of a block
    registers: int  # of a thread
    stack_bytes: int  # of a thread; not 0 where registers are spilled or an array lives in local memory


@dataclass(frozen=True)
class Facts:
    """What came out of compiling one variant."""

    name: str
    arch: str
    kernels: tuple[KernelFacts, ...]  # most variants launch one
    smem_bytes: int | None  # the most that a launch asks for, static and dynamic; None if not a constant
    instructions: dict[str, int]  # by the names of INSTRUCTIONS; those that are there
    uses: tuple[str, ...]  # what the variant declares
    seconds: float
    tmem_columns: int = 0  # of tensor memory, the most that a kernel allocates

    @property
    def registers(self) -> int:
        return max(kernel.registers for kernel in self.kernels)

    @property
    def threads(self) -> int:
        return max(kernel.threads for kernel in self.kernels)

    @property
    def stack_bytes(self) -> int:
        return max(kernel.stack_bytes for kernel in self.kernels)

    @classmethod
    def from_json(cls, text: str) -> Facts:
        values = json.loads(text)
        values["kernels"] = tuple(KernelFacts(**kernel) for kernel in values["kernels"])
        return cls(**{**values, "uses": tuple(values["uses"])})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


# The caller's side.


def missing() -> str | None:
    """What this machine lacks to compile, as a sentence; None if nothing."""
    if importlib.util.find_spec("cutlass") is None:
        return f"{DSL} is not installed (pip install '{DSL}=={DSL_VERSION}')"
    if linker() is None:
        return "no C compiler is installed to link kernels with (install g++, or name one in CXX)"
    return None


@functools.cache
def linker() -> str | None:
    """A compiler driver that can link a shared library."""
    return next(
        (path for name in (os.environ.get("CXX"), "c++", "g++", "clang++", "cc") if name and (path := shutil.which(name))), None
    )


@functools.cache
def dsl_version() -> str:
    return importlib.metadata.version(DSL)


def build(
    arch: str,
    modules: Sequence[str],
    out: Path,
    names: Sequence[str] | None = None,
    keep_text: bool = False,
    part: tuple[int, int] = (0, 1),
    reuse: bool = False,
) -> list[Facts]:
    """Compile variants into the folder `out`.

    Args:
        arch: `sm_90a`, ...
        modules: the kernel modules to take variants from.
        names: which of them; None for all.
        keep_text: leave PTX, machine code and host code too.
        part: `(i, n)` compiles every n-th of them from the i-th on, so that n processes can share the work.
        reuse: keep what `out` has already; for a folder that belongs to one state of the sources.

    Returns:
        The facts, in the order of `names` or of the modules.
    """
    lacking = missing()
    if lacking is not None:
        raise RuntimeError(f"cannot compile kernels for {arch}: {lacking}")
    folders.make(out)
    with tempfile.TemporaryDirectory() as scratch:
        listing = Path(scratch) / "built.json"
        command = [
            sys.executable,
            "-m",
            "cula.ops.cute.toolchain.build",
            arch,
            str(out.absolute()),
            str(listing),
            "--modules",
            *modules,
        ]
        command += ["--names", *names] if names is not None else []
        command += ["--keep-text"] if keep_text else []
        command += ["--reuse"] if reuse else []
        command += ["--part", str(part[0]), str(part[1])]
        # The same modules as here: this process's path, and an empty folder where -m would look first.
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        environment = {**os.environ, "CUTE_DSL_ARCH": arch, "PYTHONPATH": path}
        run = subprocess.run(command, cwd=scratch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode:
            what = ", ".join(names) if names is not None else ", ".join(modules)
            raise CompileError(f"compiling {what} for {arch} failed:\n{run.stdout[-6000:].strip()}")
        built = json.loads(listing.read_text())
    return [read_facts(out, name) for name in built]


def read_facts(folder: Path, name: str) -> Facts:
    return Facts.from_json((folder / f"{name}.json").read_text())


# The compiling process.


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cula.ops.cute.toolchain.build", description="The process behind build(); not a command."
    )
    parser.add_argument("arch")
    parser.add_argument("out", type=Path)
    parser.add_argument("listing", type=Path, help="gets the names of what was built, as JSON")
    parser.add_argument("--modules", nargs="+", required=True)
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--keep-text", action="store_true")
    parser.add_argument("--reuse", action="store_true")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1))
    args = parser.parse_args(argv)
    if os.environ.get("CUTE_DSL_ARCH") != args.arch:
        raise RuntimeError(f"CUTE_DSL_ARCH must be {args.arch} before cutlass is imported")
    try:
        variants = collect(args.modules, args.names)[args.part[0] :: args.part[1]]
    except ValueError as error:  # a wrong name: the sentence says it, a traceback would hide it
        sys.exit(str(error))
    for variant in variants:
        with locked(args.out / f".{variant.name}.lock") if args.reuse else contextlib.nullcontext():
            if not (args.reuse and (args.out / f"{variant.name}.so").is_file()):
                compile_variant(variant, args.arch, args.out, args.keep_text)
    args.listing.write_text(json.dumps([variant.name for variant in variants]))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time: the ranks of a job that all lack a kernel wait for the first instead of each compiling it."""
    import fcntl  # not on every system that can import this module

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_variant(variant: Variant, arch: str, out: Path, keep_text: bool) -> Facts:
    """Compile one variant in this process, whose DSL must be set to `arch`."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory(dir=out, prefix=f".{variant.name}.") as scratch:
        folder = Path(scratch)
        options = f"--enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir={folder} {variant.options}".strip()
        start = time.perf_counter()
        compiled = cute.compile(variant.host, *variant.args, options=options)
        seconds = time.perf_counter() - start
        ptx, cubin, host = compiled.__ptx__, compiled.__cubin__, str(compiled.ir_module)
        facts = gather(variant, arch, ptx, cubin, host, seconds)
        for_any_cpu(compiled.ir_module)
        compiled.export_to_c(str(folder / "kernel.o"), function_name=variant.name)
        command = [str(linker()), "-shared", "-fPIC", "-o", str(folder / "kernel.so"), str(folder / "kernel.o")]
        subprocess.run(command, check=True)
        (folder / "kernel.so").chmod(0o755)  # whatever the umask: code that others may write to is not loaded
        (folder / "kernel.json").write_text(facts.to_json())
        ends = ["json", "so"]  # the library last: where it is, the rest is
        if keep_text:
            (folder / "kernel.ptx").write_text(ptx)
            (folder / "kernel.cubin").write_bytes(cubin)
            # without the device binary, which is most of it and which no reader of the text wants
            (folder / "kernel.host.mlir").write_text("\n".join(x for x in host.splitlines() if "@kernels_binary(" not in x))
            ends = ["ptx", "cubin", "host.mlir", *ends]
        for end in ends:
            (folder / f"kernel.{end}").replace(out / f"{variant.name}.{end}")
    return facts


# The least CPU of a kind, as LLVM calls it, and what it has.
LEAST_CPU = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}


def for_any_cpu(module: Any) -> None:
    """Have the host code compiled for every CPU of this machine's kind.

    Left alone the DSL takes all that the compiling CPU has, AVX-512 for one, and a kernel of a wheel or of a shared cache would
    stop a process on a lesser CPU with an illegal instruction.
    """
    ir: Any = importlib.import_module("cutlass._mlir.ir")  # its stubs do not have what is in it
    cpu, features = LEAST_CPU[platform.machine()]
    wanted = ir.Attribute.parse(f'[["target-cpu", "{cpu}"], ["target-features", "{features}"]]', context=module.context)
    for operation in module.body.operations:
        if operation.operation.name == "llvm.func" and operation.regions[0].blocks:
            others = operation.attributes.get("passthrough", ())
            operation.attributes["passthrough"] = ir.ArrayAttr.get([*others, *wanted], context=module.context)


# Facts.


def gather(variant: Variant, arch: str, ptx: str, cubin: bytes, host: str, seconds: float) -> Facts:
    threads = block_sizes(ptx)
    resources, static = cubin_resources(cubin)
    dynamic = launch_smem(host)
    return Facts(
        name=variant.name,
        arch=arch,
        kernels=tuple(
            KernelFacts(name, n, resources[name][REGISTERS], resources[name].get(STACK, 0)) for name, n in threads.items()
        ),
        smem_bytes=max(dynamic) + static if dynamic else None,
        instructions={name: n for name, pattern in INSTRUCTIONS.items() if (n := len(re.findall(pattern, ptx)))},
        uses=variant.uses,
        seconds=round(seconds, 2),
        tmem_columns=tensor_memory(ptx),
    )


def block_sizes(ptx: str) -> dict[str, int]:
    """Threads of a block, by kernel."""
    found = {}
    for name, after in re.findall(r"\.entry\s+(\S+?)\(.*?\)(.*?)\{", ptx, re.S):
        sizes = re.search(r"\.(?:reqntid|maxntid)\s+([\d, ]+)", after)
        if sizes is None:
            raise RuntimeError(f"the PTX of {name} does not say how large a block is")
        found[name] = functools.reduce(lambda x, y: x * int(y), sizes[1].split(","), 1)
    return found


def tensor_memory(ptx: str) -> int:
    """Columns of tensor memory that the kernel which takes most of it allocates."""
    most = 0
    for kernel in re.split(r"\.entry\s", ptx)[1:]:
        total = 0
        for alloc in re.finditer(r"tcgen05\.alloc[^;]*, (\S+);", kernel):
            count = alloc[1]
            if not count.isdigit():  # a register: what was last put there
                count = re.findall(rf"mov\.b32\s+{count}, (\d+);", kernel[: alloc.start()])[-1]
            total += int(count)
        most = max(most, total)
    return most


# Attributes of a cubin's .nv.info section, each a record of a symbol's number and a value.
REGISTERS, STACK = 0x2F, 0x11
# From sm_90 on every kernel's section of shared memory holds this much that is the system's.
RESERVED_SMEM = 1024


def cubin_resources(blob: bytes) -> tuple[dict[str, dict[int, int]], int]:
    """Registers and stack of each kernel, by the attribute's number, and the static shared memory of the largest."""
    (table,) = struct.unpack_from("<Q", blob, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", blob, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", blob, table + i * size) for i in range(count)]

    def text(section: int, offset: int) -> str:
        start = sections[section][4] + offset
        return blob[start : blob.index(b"\0", start)].decode()

    symbols = next(i for i, s in enumerate(sections) if s[1] == 2)  # SHT_SYMTAB

    def symbol(i: int) -> str:
        return text(sections[symbols][6], struct.unpack_from("<I", blob, sections[symbols][4] + 24 * i)[0])

    resources: dict[str, dict[int, int]] = {}
    static = 0
    for section in sections:
        name = text(names_at, section[0])
        if name.startswith(".nv.shared.") and "reserved" not in name:
            static = max(static, section[5] - RESERVED_SMEM)
        if name != ".nv.info":
            continue
        at, end = section[4], section[4] + section[5]
        while at + 4 <= end:
            form, attribute, length = struct.unpack_from("<BBH", blob, at)
            if form != 4:  # the value is in the record's own two bytes
                at += 4
                continue
            if attribute in (REGISTERS, STACK):
                index, value = struct.unpack_from("<II", blob, at + 4)
                resources.setdefault(symbol(index), {})[attribute] = value
            at += 4 + length
    return resources, static


# The launch configuration that the host code fills in; its third field is the dynamic shared memory.
CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"


def launch_smem(host: str) -> list[int]:
    """Dynamic shared memory of each launch, as far as it is a constant in the host code."""
    found = []
    for function in re.split(r"\n  (?=llvm\.func )", host):
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i\d+\)", function))
        for field in re.finditer(
            rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {CONFIG}", function
        ):
            store = re.search(rf"llvm\.store (%\w+), {field[1]} :", function[field.end() :])
            if store is None or store[1] not in constants:
                return []
            found.append(int(constants[store[1]]))
    return found


if __name__ == "__main__":
    main()
