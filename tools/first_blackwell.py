#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""All that the first person with a Blackwell GPU can do for cuLA, in one command, and one file to send back.

    python tools/first_blackwell.py                  # about an hour on a B200; blackwell-report.zip
    python tools/first_blackwell.py --steps self-checks,tests
    python tools/first_blackwell.py --most 120       # no step takes more than two minutes

cuLA's Blackwell kernels were written without such a GPU. This runs them there for the first time: each kernel on the small calls
of its self-check, then the tests that need a GPU, the benchmarks beside the peers that are installed, and calls drawn at random.
A step is a process with a time limit; one that fails, faults or hangs is noted with the end of its output, and the next begins.

| step        | what it runs                                                                                                 |
|-------------|--------------------------------------------------------------------------------------------------------------|
| machine     | `python -m cula` and `nvidia-smi`                                                                            |
| compile     | every CuTe kernel for the GPU, into the cache                                                                |
| self-checks | every kernel against the torch backend; the result is kept, so that calls do not repeat it                   |
| tests       | `pytest -m gpu`, a process for each file of CuTe's tests: one that faults does not take the others along      |
| bench       | `python -m cula.bench run` for KDA's, Gated DeltaNet's and Lightning's prefill and decode, a file for each   |
| fuzz        | `python -m cula.fuzz`                                                                                        |

Without a GPU it does what can be done: the machine is described, a benchmark and the fuzzer run small on the CPU, the other steps
are left out, and the report says so. On a Hopper GPU all of it runs but the self-checks, which only kernels without a recorded
run have.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script, from a clone that is not installed

import torch  # noqa: E402

from cula.bench.results import commit, source_digest  # noqa: E402
from cula.ops.cute.archs import find_arch  # noqa: E402
from cula.ops.cute.toolchain import build, loader, self_check  # noqa: E402
from cula.ops.cute.toolchain.variants import collect, modules_of  # noqa: E402

SUITES = ("kda-prefill", "gdn-prefill", "lightning", "decode")
PACKAGES = ("torch", "triton", build.DSL, "apache-tvm-ffi", "fla-core", "numpy")
TAIL = 40  # lines of a step that did not succeed
NO_GPU = "torch sees no GPU on this machine"


@dataclass(frozen=True)
class Step:
    """A command, and how long it may take."""

    group: str
    name: str
    command: Sequence[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    left_out: str | None = None  # why it is not run


@dataclass(frozen=True)
class Outcome:
    name: str
    what: str  # "ok", "failed (exit status 1)", "stopped after 60 s", "left out: ..."
    seconds: float = 0.0
    tail: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.what == "ok" or self.what.startswith("left out: ")


def steps(folder: Path, target: str | None, most: float) -> Iterator[Step]:
    """What is run, for a GPU that kernels are compiled for as `target`; None without a GPU."""
    python, here = sys.executable, [sys.executable, str(Path(__file__).resolve())]
    gpu = torch.cuda.is_available()
    no_kernels = None if target else NO_GPU if not gpu else "there are no CuTe kernels for this GPU"
    jobs = str(max(1, min(16, (os.cpu_count() or 2) // 2)))

    def step(group: str, name: str, seconds: float, *command: str, left_out: str | None = None, **environment: str) -> Step:
        return Step(group, name, command, min(seconds, most), environment, left_out)

    yield step("machine", "machine", 60, python, "-m", "cula")
    yield step("machine", "nvidia-smi", 60, "nvidia-smi", left_out=None if shutil.which("nvidia-smi") else "there is none")
    yield step("compile", "compile", 1800, *here, "--do", "compile", left_out=no_kernels)
    yield step("self-checks", "self-checks", 1200, *here, "--do", "self-checks", "--out", str(folder), left_out=no_kernels)
    pytest = [python, "-m", "pytest", "-m", "gpu", "-q", "-rf", "--tb=short", "-o", "faulthandler_timeout=300"]
    cute = sorted((ROOT / "tests/ops/cute").glob("test_*.py"))
    unchecked = {"CULA_SELF_CHECK": "0"}  # a kernel that is off shall run, and show where
    for path in cute:
        if "mark.gpu" in path.read_text():
            name = f"tests-{path.stem.removeprefix('test_')}"
            yield step("tests", name, 600, *pytest, str(path.relative_to(ROOT)), left_out=None if gpu else NO_GPU, **unchecked)
    rest = ["tests", "--ignore=tests/ops/cute", "-n", jobs, "--maxschedchunk", "1"]
    yield step("tests", "tests-others", 1800, *pytest, *rest, left_out=None if gpu else NO_GPU, **unchecked)
    small = [] if gpu else ["--device", "cpu", "--shapes-limit", "1", "--peers", "none"]
    for suite in SUITES if gpu else SUITES[:1]:
        out, budget = folder / f"{suite}.json", max(1.0, min(480.0, most - 60))
        run = [python, "-m", "cula.bench", "run", suite, "--out", str(out), "--budget", str(budget), *small]
        yield step("bench", f"bench-{suite}", 600, *run, *(["--warm", jobs] if gpu else []))
    draw = ["--seconds", str(min(300.0, most / 2) if gpu else 1.0), "--device", "cuda" if gpu else "cpu"]
    yield step("fuzz", "fuzz", 600, python, "-m", "cula.fuzz", *draw)


def run(step: Step, folder: Path) -> Outcome:
    """Run a step to its end or its limit, with all that it prints in a file."""
    if step.left_out is not None:
        return Outcome(step.name, f"left out: {step.left_out}")
    start, log = time.monotonic(), folder / f"{step.name}.log"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **step.environment}
    with log.open("w") as out:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(step.seconds)
            what = "ok" if status == 0 else f"failed (exit status {status})"
        except subprocess.TimeoutExpired:
            what = f"stopped after {step.seconds:.0f} s"
        finally:
            _stop(process)
    tail = () if what == "ok" else tuple(log.read_text(errors="replace").splitlines()[-TAIL:])
    return Outcome(step.name, what, time.monotonic() - start, tail)


def _stop(process: subprocess.Popen) -> None:
    """End a process and those that it has started, which are a group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


# The steps that are no command of the package


def compile_kernels(target: str) -> int:
    """Into the cache, where calls look for them."""
    modules, jobs = modules_of(target), max(1, min(8, (os.cpu_count() or 2) // 2))
    folder = loader.cache_folder(target, modules)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        made = pool.map(lambda i: build.build(target, modules, folder, None, reuse=True, part=(i, jobs)), range(jobs))
        for facts in sorted((f for part in made for f in part), key=lambda f: f.name):
            spilled = f", {facts.stack_bytes} bytes of stack" if facts.stack_bytes else ""
            print(f"{facts.name}: {facts.smem_bytes} bytes of shared memory{spilled}")
    return 0


def check_kernels(target: str, folder: Path) -> int:
    """Compare every kernel of a GPU with the torch backend; self-checks.json has all of them, off or not. 1 where one is off."""
    gpu = torch.cuda.current_device()
    arch = find_arch(torch.cuda.get_device_capability(gpu))
    assert arch is not None
    found: dict[str, dict] = {}
    if arch.has_run:
        print(f"{arch.title}'s kernels have a recorded run: none has to be compared")
    for name in [] if arch.has_run else [variant.name for variant in collect(modules_of(target))]:
        try:
            of_kernel = self_check.recorded(name, target, torch.cuda.get_device_name(gpu), gpu)
        except build.CompileError as error:
            of_kernel = {"failure": str(error)}
        reason = self_check.judge(name, of_kernel)
        found[name] = of_kernel | {"objection": reason}
        print(f"{name}: {reason or format(of_kernel['error'], '.1e')}", flush=True)
        (folder / "self-checks.json").write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(of["objection"] for of in found.values()) else 0


# The report


def machine() -> dict[str, object]:
    """What decides what a GPU does with a kernel, as far as it can be asked for."""

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": [f"{gpu.name}, SM {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs" for gpu in gpus],
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "packages": {package: version(package) for package in PACKAGES},
        "commit": commit(),
        "source": source_digest(),
    }


def summary(facts: dict, outcomes: Sequence[Outcome]) -> str:
    """The page that a reader sees first."""
    gpus = "; ".join(facts["gpus"])
    lines = [f"# cuLA on {gpus or 'a machine without a GPU'}", ""]
    if not gpus:
        lines += [f"{NO_GPU[0].upper()}{NO_GPU[1:]}: this report shows that the command works, and nothing about a GPU.", ""]
    packages = ", ".join(f"{name} {version or '(not installed)'}" for name, version in facts["packages"].items())
    lines += [
        f"Python {facts['python']}, CUDA {facts['cuda']}, {packages}; commit {facts['commit']}, source {facts['source']}.",
        "",
    ]
    lines += ["| step | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {o.name} | {o.what} | {o.seconds:.0f} |" for o in outcomes]
    for outcome in outcomes:
        if not outcome.is_good:
            lines += ["", f"## {outcome.name}: {outcome.what}", "", "```", *outcome.tail, "```"]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("blackwell-report"), help="a folder, beside which its .zip is made")
    parser.add_argument("--steps", help="some of them, as in self-checks,tests")
    parser.add_argument("--most", type=float, default=3600.0, metavar="SECONDS", help="that a step may take")
    parser.add_argument("--do", choices=("compile", "self-checks"), help=argparse.SUPPRESS)  # a step's own process
    args = parser.parse_args(argv)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    arch = find_arch(capability)
    target = None if arch is None or capability is None else arch.targets[capability]
    if args.do is not None:
        if target is None:
            parser.error(f"--do {args.do}: {NO_GPU}, or none that there are kernels for")
        return compile_kernels(target) if args.do == "compile" else check_kernels(target, args.out)
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    listed = list(steps(folder, target, args.most))
    wanted = {step.group for step in listed} if args.steps is None else set(args.steps.split(","))
    if unknown := wanted - {step.group for step in listed}:
        parser.error(f"--steps {','.join(sorted(unknown))}: there are {', '.join(dict.fromkeys(s.group for s in listed))}")
    facts, outcomes = machine(), []
    for step in listed:
        if step.group in wanted:
            print(f"{step.name} ...", flush=True)
            outcomes.append(run(step, folder))
            print(f"{step.name}: {outcomes[-1].what}, {outcomes[-1].seconds:.0f} s", flush=True)
            (folder / "summary.md").write_text(summary(facts, outcomes))
            report = {"machine": facts, "steps": [asdict(outcome) for outcome in outcomes]}
            (folder / "summary.json").write_text(json.dumps(report, indent=1) + "\n")
    archive = shutil.make_archive(str(folder), "zip", folder.parent, folder.name)
    print(f"{folder / 'summary.md'}\nplease send {archive} with an issue: what failed is as welcome as what did not")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
