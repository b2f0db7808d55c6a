# SPDX-License-Identifier: Apache-2.0
"""Try the oldest and the newest release of each package that cuLA is used with, and write down what came of it.

    python tools/compatibility.py --folder /somewhere/large [--only torch triton tvm_ffi] [--kernels DIR]

Each release is installed into a folder of its own (`<module>-<release>`, kept for the next time) and put in front of what this
Python has. On each, without a GPU:

| package | what is tried |
|---|---|
| torch   | `python -m cula check`, and tests of the calls, their operators and gradients on the torch backend |
| Triton  | the main kernels compiled for sm_90 and sm_100: do they, which registers, how much is spilled |
| tvm-ffi | calls of its functions around its Python side, and with --kernels every kernel of that folder loaded |

`docs/compatibility-tried.md` gets the tables. A torch with CUDA brings some gigabytes of libraries along.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cula.core.versions import SUPPORTED  # noqa: E402

PAGE = ROOT / "docs" / "compatibility-tried.md"
# module -> releases, oldest and newest
RELEASES = {"torch": ("2.9.0", "2.15.0"), "triton": ("3.5.0", "3.9.0"), "tvm_ffi": ("0.1.9", "0.1.15.post2")}
TESTS = ("tests/test_api.py", "tests/core/test_operator.py", "tests/ops/test_gdn.py")
TESTS += ("tests/ops/test_lightning.py", "tests/ops/test_decode.py")

COMPILE = """
import json, sys
import triton
from tests.ops.triton import compile_variants as c
arch, kept = int(sys.argv[1]), ("call", "name", "registers", "spill_bytes", "shared_bytes", "fits")
families = {"KDA": c.KDA, "LIGHTNING": c.LIGHTNING, "DECODE": c.DECODE}
found, failed = {}, []
for family, calls in families.items():
    for name in [name for name in calls if name in c.FIRST and "256" not in name and "60" not in name]:
        for other in families:
            setattr(c, other, {name: calls[name]} if other == family else {})
        try:
            for r in (*c.compile_all(arch, "first", 0), *c.compile_all(arch, "first", 1)):
                found[r["call"], r["name"], r["registers"]] = {k: r[k] for k in kept} | {"faults": len(r["faults"])}
        except Exception as error:  # what a release does not compile is its outcome
            failed.append(f"{family} {name} ({type(error).__name__}: {str(error).strip().splitlines()[-1]})")
print("REPORT", json.dumps({"kernels": list(found.values()), "failed": failed}))
"""

LOAD = """
import json, sys
import tvm_ffi
from cula import settings
from cula.ops.cute.toolchain import loader
kernels = settings.kernel_dir()
count = 0
for arch in sorted(path.name for path in kernels.iterdir() if path.is_dir()):
    for name in loader.read_manifest(kernels, arch)["kernels"]:
        loader.load(name, arch)
        count += 1
print("REPORT", json.dumps({"loaded": count}))
"""


class Outcome(NamedTuple):
    """What came of one thing that was tried."""

    release: str
    what: str
    said: str  # in words, or the last line of an error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where releases are installed, and kept")
    parser.add_argument("--only", nargs="+", default=list(RELEASES), choices=list(RELEASES))
    parser.add_argument("--kernels", type=Path, help="what `python -m cula.compile` made, to load with each tvm-ffi")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that is written (default: %(default)s)")
    args = parser.parse_args(argv)
    tables = read_tables(args.page) if args.page.is_file() else {}
    for module in args.only:
        tried: list[Outcome] = []
        for release in RELEASES[module]:
            where = path_of(module, release, args.folder)
            lacking = install(module, release, where) or hidden(module, where)
            here = TRY[module](release, where, args.kernels) if lacking is None else []
            tried += here if lacking is None else [Outcome(release, "installing", lacking)]
            for outcome in tried[-max(len(here), 1) :]:
                print(f"{module} {release}, {outcome.what}: {outcome.said}", flush=True)
        tables[SUPPORTED[module].title] = table(tried)
    args.page.write_text(page(tables))
    print(args.page)
    return 0


# Releases.


def path_of(module: str, release: str, folder: Path) -> Path:
    return (folder / f"{module}-{release}").absolute()


def hidden(module: str, where: Path) -> str | None:
    """Whether another release is imported than that of a folder, as a sentence."""
    _, said = run_with(where, "-c", f"import {module}; print({module}.__file__)")
    found = Path(last_line(said))
    return None if where.resolve() in found.resolve().parents else f"is not what is imported: {last_line(said)}"


def install(module: str, release: str, to: Path) -> str | None:
    """Install a release, if it is not there; why that failed, as a sentence."""
    if to.exists():
        return None
    name = SUPPORTED[module].distributions[0]
    alone = [] if module == "torch" else ["--no-deps"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *alone, "--target", str(to), f"{name}=={release}"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return f"could not be installed: {last_line(run.stdout)}" if run.returncode else None


def run_with(where: Path, *command: str, **environment: str) -> tuple[int, str]:
    """A command of this Python with a release in front: its status and what it printed."""
    path = os.pathsep.join([str(where), str(ROOT)])
    found = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    run = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=found, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return run.returncode, run.stdout


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing was said"


def report_in(text: str) -> str | None:
    return next((line.removeprefix("REPORT ") for line in text.splitlines() if line.startswith("REPORT ")), None)


# What is tried.


def try_torch(release: str, where: Path, kernels: Path | None) -> list[Outcome]:
    status, said = run_with(where, "-m", "cula", "check", "--device", "cpu")
    found = [Outcome(release, "`python -m cula check`", last_line(said))]
    if status == 2 or "Traceback" in said:
        return found  # the tests would say the same, at length
    # Without Triton: each torch wants its own, and what is tried here is torch.
    chosen = "torch or not (triton or cute)"
    _, said = run_with(where, "-m", "pytest", "-q", "-m", "not slow", "-k", chosen, "-p", "no:cacheprovider", *TESTS)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?|deselected)", last_line(said))
    if not counts:  # the summary line is left out by -q -q
        marks = "".join(re.findall(r"^([.sFExX]+) +\[", said, re.MULTILINE))
        counts = [f"{marks.count('.')} passed", f"{marks.count('F') + marks.count('E')} failed", f"{marks.count('s')} skipped"]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return [*found, Outcome(release, "tests on the CPU", ", ".join(counts) + "".join(f"; {name}" for name in failed))]


def try_triton(release: str, where: Path, kernels: Path | None) -> list[Outcome]:
    found = []
    for arch in ("90", "100"):
        with tempfile.TemporaryDirectory() as cache:  # an empty one: what ptxas spills is in no cache
            _, said = run_with(where, "-c", COMPILE, arch, TRITON_CACHE_DIR=cache, TRITON_INTERPRET="0")
        reports = json.loads(report_in(said) or "null")
        words = f"fails: {last_line(said)}"
        if reports is not None:
            words = in_words(reports["kernels"], reports["failed"])
        found.append(Outcome(release, f"compiled for sm_{arch}", words))
    return found


def in_words(kernels: Sequence[dict[str, Any]], failed: Sequence[str]) -> str:
    """Registers and spills of all kernels; the worst spill of each that has any."""
    if not kernels:
        return f"none compiles: {'; '.join(failed)}"
    worst: dict[str, int] = {}
    for r in kernels:
        worst[r["name"]] = max(worst.get(r["name"], 0), r["spill_bytes"])
    spilled = [f"`{name}` up to {size} B" for name, size in sorted(worst.items()) if size]
    words = f"{len(kernels)} kernels, {sum(r['registers'] for r in kernels) / len(kernels):.0f} registers on average; "
    words += f"spilled a thread: {', '.join(spilled) or 'nothing'}"
    if large := sorted({r["name"] for r in kernels if not r["fits"]}):
        words += f"; do not fit: {', '.join(large)}"
    if faults := sum(r["faults"] for r in kernels):
        words += f"; {faults} misplaced descriptors"
    return words + (f"; **do not compile**: {'; '.join(failed)}" if failed else "")


def try_tvm_ffi(release: str, where: Path, kernels: Path | None) -> list[Outcome]:
    status, said = run_with(where, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/cute/test_launch.py")
    found = [Outcome(release, "calls from C", "right" if status == 0 else f"wrong: {last_line(said)}")]
    if kernels is not None:
        _, said = run_with(where, "-c", LOAD, CULA_KERNEL_DIR=str(kernels))
        report = report_in(said)
        words = f"{json.loads(report)['loaded']} kernels loaded" if report else f"fails: {last_line(said)}"
        found.append(Outcome(release, "kernels compiled by CuTe DSL", words))
    return found


TRY: dict[str, Callable[[str, Path, Path | None], list[Outcome]]] = {
    "torch": try_torch,
    "triton": try_triton,
    "tvm_ffi": try_tvm_ffi,
}


# The page.

HEAD = """# Releases that were tried

Written by `tools/compatibility.py`, without a GPU: the oldest and the newest release of each package, each beside the newest of
the others that the tests use. `python -m cula` compares an install with the supported ranges (`cula/core/versions.py`), and a
backend whose package is older declines with a sentence.
"""


def table(tried: Sequence[Outcome]) -> str:
    rows = [f"| {o.release} | {o.what} | {o.said.replace('|', '/')} |" for o in tried]
    return "\n".join(["| release | tried | outcome |", "|---|---|---|", *rows])


def page(tables: dict[str, str]) -> str:
    return HEAD + "".join(f"\n## {title}\n\n{text}\n" for title, text in tables.items())


def read_tables(path: Path) -> dict[str, str]:
    """The tables of a page, so that one package can be tried again."""
    return {title: text.strip() for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", path.read_text(), re.M | re.S)}


if __name__ == "__main__":
    sys.exit(main())
