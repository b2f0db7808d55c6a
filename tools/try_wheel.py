# SPDX-License-Identifier: Apache-2.0
"""Try a wheel as a user meets it: in a virtual environment of its own, far from the sources, without a compiler on PATH and with
a home that cannot be written.

    python tools/try_wheel.py dist/*.whl

Installs it with what loads its kernels (`[cuda]`), runs the quick start of the README and `python -m cula check`, loads every
kernel library that came with it and calls each without arguments, which it must refuse in words. Exits 1 where something fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LOAD_ALL = """
import pathlib
import cula
from cula.core.replay import record
from cula.ops.cute.toolchain import build, loader

assert build.linker() is None, "a compiler is on the path"
folder = pathlib.Path(cula.__file__).parent / loader.IN_WHEEL.name
count = 0
for arch in sorted(path.name for path in folder.iterdir()):
    assert loader.missing(arch) is None, loader.missing(arch)
    for name in loader.read_manifest(folder, arch)["kernels"]:
        try:
            loader.load(name, arch)()
        except TypeError as refused:
            assert "parameters" in str(refused), refused
            count += 1
print(f"{count} kernels of {', '.join(sorted(path.name for path in folder.iterdir()))} are loaded; "
      f"native.c is {'the wheel' if 'cula_native' in getattr(record._compiled(), '__file__', '') else 'not there'}'s")
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="which torch (default: CPU builds)")
    args = parser.parse_args(argv)
    quick_start = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        python = folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        install = ["-m", "pip", "install", "--quiet", "-c", str(args.constraints), f"{args.wheel.absolute()}[cuda]"]
        subprocess.run([str(python), *install], check=True)
        tries = {"quick start": ["-c", quick_start], "check": ["-m", "cula", "check"], "kernels": ["-c", LOAD_ALL]}
        return max([run(python, folder, name, command) for name, command in tries.items()])


def run(python: Path, folder: Path, name: str, command: Sequence[str]) -> int:
    """One command of the virtual environment, in an empty folder, with nothing else on the path and no home."""
    kept = {key: os.environ[key] for key in ("LANG", "LD_LIBRARY_PATH") if key in os.environ}
    environment = kept | {"PATH": str(python.parent), "HOME": "/dev/null/home", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), *command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(f"{name}: {'ok' if done.returncode == 0 else 'FAILED'}\n{done.stdout.strip()}\n", flush=True)
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
