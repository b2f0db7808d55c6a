# SPDX-License-Identifier: Apache-2.0
"""`make wheel`: an archive of the sources, and a wheel with every CuTe kernel in it, so that a first call needs no compiler.

    python tools/wheel.py [--out dist] [--arch sm_90a ...] [--kernels DIR] [--python python3.12 ...]

First comes an archive of the sources, with all that their tests need (`MANIFEST.in`), and from that the wheel of sources that the
build backend makes; both go to --out. To the wheel this adds `cula/compiled/<arch>/`, which `python -m cula.compile` makes
here (or made before, in the folder that --kernels names), and `native.c` compiled for each Python that is named; writes down in
the file's name which system they are for; and packs it again. An install finds both by itself: `toolchain/loader.py` takes
kernels from there as long as they are of the sources beside them, and `core/replay/record.py` the module for its Python.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cula.ops.cute.toolchain import loader  # noqa: E402
from cula.ops.cute.toolchain.variants import MODULES, modules_of, source_hash  # noqa: E402
from tools import site  # noqa: E402

NATIVE = Path("cula/core/replay/native.c")
NATIVE_MODULE = "cula_native"
SDIST = "import sys, setuptools.build_meta as backend; print(backend.build_sdist(sys.argv[1]))"
PROJECT_URLS = {  # under the address
    "Source": "",
    "Documentation": "docs/guide/getting-started.md",
    "Benchmarks": "docs/benchmarks/H200.md",
    "Changelog": "CHANGELOG.md",
}
FACTS_OF_PYTHON = "import sysconfig as s; print(s.get_path('include')); print(s.get_config_var('EXT_SUFFIX'))"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/wheel.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel goes (default: dist)")
    parser.add_argument("--arch", nargs="+", default=list(MODULES), choices=list(MODULES), help="default: all that have kernels")
    parser.add_argument("--kernels", type=Path, help="compiled kernels to take; architectures that it lacks are compiled into it")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to compile native.c for")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--address",
        help="where the repository's files are: links and pictures of the package's page lead there, and its project URLs",
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        kernels = args.kernels or Path(scratch) / "kernels"
        for arch in args.arch:
            compile_kernels(arch, kernels, args.jobs)
        archive = build_sdist(Path(scratch), args.out)
        pure = build_sources(Path(scratch), archive)
        tree = unpack(pure, Path(scratch) / "tree")
        add_kernels(tree, kernels, args.arch)
        for python in args.python:
            add_native(tree, python)
        describe(tree, args.address)
        wheel = pack(tree, args.out)
    print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    return 0


def compile_kernels(arch: str, kernels: Path, jobs: int) -> None:
    """Compile what is not there yet, or is of other sources."""
    if (kernels / arch / loader.MANIFEST).is_file():
        manifest = loader.read_manifest(kernels, arch)
        if manifest["sources"] == source_hash(modules_of(arch)):
            print(f"{len(manifest['kernels'])} kernels for {arch} are taken from {kernels}")
            return
    run(sys.executable, "-m", "cula.compile", "--arch", arch, "--out", kernels, "--no-runtime", "--jobs", jobs)


def build_sdist(scratch: Path, out: Path) -> Path:
    """The archive of sources, from a copy of what git tracks: nothing that lies about gets in."""
    copy = scratch / "sources"
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    out.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        [sys.executable, "-c", SDIST, str(out.absolute())], cwd=copy, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    return out / made[-1]


def build_sources(scratch: Path, archive: Path) -> Path:
    """The wheel of sources alone, from their archive."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch / "pure", archive.absolute())
    (wheel,) = (scratch / "pure").glob("*.whl")
    return wheel


def unpack(wheel: Path, to: Path) -> Path:
    run(sys.executable, "-m", "wheel", "unpack", "--dest", to, wheel)
    (tree,) = to.iterdir()
    return tree


def add_kernels(tree: Path, kernels: Path, archs: Sequence[str]) -> None:
    for arch in archs:
        to = tree / "cula" / loader.IN_WHEEL.name / arch
        to.mkdir(parents=True)
        shutil.copy(kernels / arch / loader.MANIFEST, to)
        for name in loader.read_manifest(kernels, arch)["kernels"]:
            shutil.copy(kernels / arch / f"{name}.so", to)
            run("strip", "--strip-unneeded", to / f"{name}.so")


def add_native(tree: Path, python: str) -> None:
    """`native.c` as a module of one Python: its file name says of which, so that several lie side by side."""
    found = subprocess.run([python, "-c", FACTS_OF_PYTHON], check=True, capture_output=True, text=True).stdout
    include, suffix = found.splitlines()
    to = (tree / NATIVE).with_name(NATIVE_MODULE + suffix)
    run("gcc", "-O2", "-shared", "-fPIC", "-s", "-I", include, "-o", to, tree / NATIVE)


def describe(tree: Path, address: str | None) -> None:
    """The package's page is the README, without links that would lead nowhere from there. A clone does not know where it is
    published: who makes the wheel says so."""
    about = next(tree.glob("*.dist-info")) / "METADATA"
    head, _, readme = about.read_text().partition("\n\n")
    urls = {} if address is None else {name: f"{address.rstrip('/')}/{path}".rstrip("/") for name, path in PROJECT_URLS.items()}
    head = "\n".join([head, *(f"Project-URL: {name}, {url}" for name, url in urls.items())])
    about.write_text(f"{head}\n\n{site.detach(readme, address)}")


def pack(tree: Path, out: Path) -> Path:
    """Name the system in the wheel's metadata, and zip it with a new list of its files."""
    about = next(tree.glob("*.dist-info")) / "WHEEL"
    text = re.sub(r"^Root-Is-Purelib: .*$", "Root-Is-Purelib: false", about.read_text(), flags=re.M)
    about.write_text(re.sub(r"^Tag: .*$", f"Tag: py3-none-{platform_tag(tree)}", text, flags=re.M))
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.glob("*.whl"))
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", out, tree)
    made = set(out.glob("*.whl")) - before
    return made.pop() if made else max(before, key=lambda path: path.stat().st_mtime)


def platform_tag(tree: Path) -> str:
    """manylinux of the newest glibc that a library asks for; no older than 2.28, as torch's own wheels are."""
    libraries = sorted(tree.rglob("*.so"))
    needed = subprocess.run(
        ["readelf", "--version-info", *map(str, libraries)], check=True, capture_output=True, text=True
    ).stdout
    minor = max([28, *(int(found) for found in re.findall(r"GLIBC_2\.(\d+)", needed))])
    machine = subprocess.run(["uname", "-m"], check=True, capture_output=True, text=True).stdout.strip()
    return f"manylinux_2_{minor}_{machine}"


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
