#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""All that only a GPU can show of cuLA, in one command, and one file to send back.

    python tools/hardware_run.py                     # some hours; hardware-report.zip
    python tools/hardware_run.py --steps self-checks,tests
    python tools/hardware_run.py --budget 540        # ends after nine minutes; the same command again goes on from there
    python tools/hardware_run.py --most 120          # no step takes more than two minutes
    python tools/hardware_run.py --fla FLA           # also flash-linear-attention's own tests, from a clone of it

CI has no GPU: it compiles and simulates. This runs on hardware what CI cannot. Kernels that never ran there come first, on the
small calls of their self-checks, then the tests that need a GPU, other people's tests, CUDA's checkers, the benchmarks beside the
peers that are installed, and calls drawn at random. A step is a process with a time limit; one that fails, faults or hangs is
noted with the end of its output, and the next begins. A step that was good is not repeated, if the sources are still the same.

| step        | what it runs                                                                                                 |
|-------------|--------------------------------------------------------------------------------------------------------------|
| machine     | `python -m cula` and `nvidia-smi`                                                                            |
| compile     | every CuTe kernel for the GPU, into the cache                                                                |
| self-checks | every kernel that is new against the torch backend; the result is kept, so that calls do not repeat it       |
| tests       | `pytest -m gpu`, a run for each file of CuTe's tests: one that faults does not take the others along          |
| fla         | `tools/fla_tests.py` on the clone that `--fla` names                                                         |
| sanitizers  | memcheck, racecheck and synccheck over the calls of the self-checks of every CuTe kernel                      |
| bench       | `python -m cula.bench run` for every suite, and the scripts of `benchmarks/`, a result file for each         |
| fuzz        | `python -m cula.fuzz`                                                                                        |

Without a GPU it does what can be done: the machine is described, a benchmark and the fuzzer run small on the CPU, the other steps
are left out, and the report says so.
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
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script, from a clone that is not installed

import torch  # noqa: E402

from cula import settings  # noqa: E402
from cula.bench.results import commit, source_digest  # noqa: E402
from cula.ops.cute.archs import find_arch  # noqa: E402
from cula.ops.cute.toolchain import build, loader, self_check  # noqa: E402
from cula.ops.cute.toolchain.variants import collect, modules_of  # noqa: E402

SUITES = (  # what models call first
    "kda-gates", "gdn-prefill", "kda-train", "gdn-train", "models", "decode", "kda-prefill", "lightning", "api", "segments",
    "gva", "invariant", "dist",
)  # fmt: skip
SCRIPTS = {"train-model": "train_model.py", "fla-layers": "fla_layers.py", "first-call": "first_call.py"}
OURS = "cutlass"  # in the name of every kernel that CuTe DSL compiles, and of none of torch's
SANITIZERS = ("memcheck", "racecheck", "synccheck")
PACKAGES = ("torch", "triton", build.DSL, "apache-tvm-ffi", "fla-core", "numpy")
TAIL = 40  # lines of a step that did not succeed
NO_GPU = "torch sees no GPU on this machine"
PARTLY = "ok, and some cases are left for another run"


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
    what: str  # "ok", "failed (exit status 1)", "stopped after 60 s", "left out: ...", PARTLY
    seconds: float = 0.0
    tail: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.what in ("ok", PARTLY) or self.what.startswith("left out: ")


def steps(folder: Path, target: str | None, most: float, fla: Path | None = None) -> Iterator[Step]:
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
    cute, shared = ROOT / "tests/ops/cute", ["-n", jobs, "--maxschedchunk", "1"]
    for path in sorted(cute.rglob("test_*.py")):
        if any(word in path.read_text() for word in ("mark.gpu", "def device(")):  # such tests run where their GPU is
            name = "-".join(["tests", *path.relative_to(cute).parent.parts, path.stem.removeprefix("test_")])
            yield step("tests", name, 600, *pytest, str(path.relative_to(ROOT)), *shared, left_out=None if gpu else NO_GPU)
    rest = ["tests", "--ignore=tests/ops/cute", *shared]
    yield step("tests", "tests-others", 1800, *pytest, *rest, left_out=None if gpu else NO_GPU)
    if fla is not None:
        of_fla = [python, "tools/fla_tests.py", str(fla), "-n", jobs]
        unchecked = {"CULA_SELF_CHECK": "0"}  # a kernel that is off shall run, and show where; our own tests say so themselves
        yield step("fla", "fla", 1800, *of_fla, left_out=None if gpu else NO_GPU, **unchecked)
    sanitizer = shutil.which("compute-sanitizer")
    no_sanitizer = NO_GPU if not gpu else None if sanitizer else "there is no compute-sanitizer"
    for tool in SANITIZERS:
        ours_alone = ["--kernel-name", f"kernel_substring={OURS}"]
        checked = [sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *ours_alone]
        yield step("sanitizers", tool, 1800, *checked, *here, "--do", "calls", left_out=no_sanitizer or no_kernels)
    small = [] if gpu else ["--device", "cpu", "--shapes-limit", "1", "--peers", "none"]
    for suite in SUITES if gpu else SUITES[:1]:
        out, budget = folder / f"{suite}.json", max(1.0, min(480.0, most - 60))
        run = [python, "-m", "cula.bench", "run", suite, "--out", str(out), "--resume", "--budget", str(budget), *small]
        yield step("bench", f"bench-{suite}", 600, *run, *(["--warm", jobs] if gpu else []))
    for name, script in SCRIPTS.items():
        run = [python, f"benchmarks/{script}", "--out", str(folder / f"{name}.json")]
        yield step("bench", name, 600, *run, left_out=None if gpu else NO_GPU)
    draw = ["--seconds", str(min(300.0, most / 2) if gpu else 1.0), "--device", "cuda" if gpu else "cpu"]
    yield step("fuzz", "fuzz", 600, python, "-m", "cula.fuzz", *draw, *(["--jobs", jobs] if gpu else []))


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
            what = f"failed (exit status {status})" if status else PARTLY if _has_more(step, folder) else "ok"
        except subprocess.TimeoutExpired:
            what = f"stopped after {step.seconds:.0f} s"
        finally:
            _stop(process)
    tail = () if what in ("ok", PARTLY) else tuple(log.read_text(errors="replace").splitlines()[-TAIL:])
    return Outcome(step.name, what, time.monotonic() - start, tail)


def _has_more(step: Step, folder: Path) -> bool:
    """Whether a benchmark's budget ended before its cases did."""
    path = folder / f"{step.name.removeprefix('bench-')}.json"
    return step.group == "bench" and path.is_file() and bool(json.loads(path.read_text()).get("left_out"))


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
    """Into the cache, where calls look for them; nothing, where all came compiled."""
    if (compiled := settings.kernel_dir()) is not None:
        print(f"CULA_KERNEL_DIR={compiled} has {len(loader.read_manifest(compiled, target)['kernels'])} kernels")
        return 0
    modules, jobs = modules_of(target), max(1, min(8, (os.cpu_count() or 2) // 2))
    folder = loader.cache_folder(target, modules)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        made = pool.map(lambda i: build.build(target, modules, folder, None, reuse=True, part=(i, jobs)), range(jobs))
        for facts in sorted((f for part in made for f in part), key=lambda f: f.name):
            spilled = f", {facts.stack_bytes} bytes of stack" if facts.stack_bytes else ""
            print(f"{facts.name}: {facts.smem_bytes} bytes of shared memory{spilled}")
    return 0


def kernels_of(target: str) -> list[str]:
    """Names; of kernels that came compiled, without the DSL."""
    if (compiled := settings.kernel_dir()) is not None:
        return list(loader.read_manifest(compiled, target)["kernels"])
    if loader.has_wheel_kernels(target, modules_of(target)):
        return list(loader.read_manifest(loader.IN_WHEEL, target)["kernels"])
    return [variant.name for variant in collect(modules_of(target))]


def check_kernels(target: str, folder: Path) -> int:
    """Compare the kernels that are new with the torch backend, into self-checks.json; 1 where one is off."""
    gpu = torch.cuda.current_device()
    arch = find_arch(torch.cuda.get_device_capability(gpu))
    assert arch is not None
    found: dict[str, dict] = {}
    for name in filter(arch.is_new, kernels_of(target)):
        try:
            of_kernel = self_check.recorded(name, target, torch.cuda.get_device_name(gpu), gpu)
        except build.CompileError as error:
            of_kernel = {"failure": str(error)}
        reason = self_check.judge(name, of_kernel)
        found[name] = of_kernel | {"objection": reason}
        print(f"{name}: {reason or format(of_kernel['error'], '.1e')}", flush=True)
        (folder / "self-checks.json").write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(of["objection"] for of in found.values()) else 0


def make_calls(target: str, of: str) -> int:
    """The calls of the self-check of every kernel whose name begins so; 1 where one is off, or there is none."""
    device, capability = torch.device("cuda"), torch.cuda.get_device_capability()
    objections = []
    for name in kernels_of(target):
        if name.startswith(of):
            found = {"error": self_check.worst_error(name, device, capability)}
            objections.append(self_check.judge(name, found))
            print(f"{name}: {objections[-1] or format(found['error'], '.1e')}", flush=True)
    if not objections:
        print(f"no kernel of {target} has a name that begins with {of!r}")
    return int(not objections or any(objections))


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


def done_before(folder: Path, facts: dict) -> dict[str, Outcome]:
    """Steps of an earlier run on the same machine and sources that came to an end, by name."""
    path = folder / "summary.json"
    before = json.loads(path.read_text()) if path.is_file() else {"machine": None}
    if before["machine"] != json.loads(json.dumps(facts)):
        return {}
    found = (Outcome(**(of | {"tail": tuple(of["tail"])})) for of in before["steps"])
    return {outcome.name: outcome for outcome in found if outcome.what == "ok"}


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
    parser.add_argument("--out", type=Path, default=Path("hardware-report"), help="a folder, beside which its .zip is made")
    parser.add_argument("--steps", help="some of them, as in self-checks,tests")
    parser.add_argument("--most", type=float, default=3600.0, metavar="SECONDS", help="that a step may take")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="after which no step is begun")
    parser.add_argument("--fla", type=Path, help="a clone of flash-linear-attention, whose tests are run too")
    parser.add_argument("--do", choices=("compile", "self-checks", "calls"), help=argparse.SUPPRESS)  # a step's own process
    parser.add_argument("--kernels", default="", help=argparse.SUPPRESS)  # how the names begin of those whose calls are made
    args = parser.parse_args(argv)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    arch = find_arch(capability)
    target = None if arch is None or capability is None else arch.targets[capability]
    if args.do is not None:
        if target is None:
            parser.error(f"--do {args.do}: {NO_GPU}, or none that there are kernels for")
        if args.do == "calls":
            return make_calls(target, args.kernels)
        return compile_kernels(target) if args.do == "compile" else check_kernels(target, args.out)
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    listed = list(steps(folder, target, args.most, args.fla))
    wanted = {step.group for step in listed} if args.steps is None else set(args.steps.split(","))
    if unknown := wanted - {step.group for step in listed}:
        parser.error(f"--steps {','.join(sorted(unknown))}: there are {', '.join(dict.fromkeys(s.group for s in listed))}")
    facts = machine()
    outcomes = {name: of for name, of in done_before(folder, facts).items() if name in {step.name for step in listed}}
    for step in listed:
        left = args.budget - (time.monotonic() - began)
        if step.group not in wanted or step.name in outcomes or left <= 0:
            continue
        print(f"{step.name} ...", flush=True)
        outcomes[step.name] = outcome = run(replace(step, seconds=min(step.seconds, left)), folder)
        print(f"{step.name}: {outcome.what}, {outcome.seconds:.0f} s", flush=True)
        in_order = [outcomes[each.name] for each in listed if each.name in outcomes]
        (folder / "summary.md").write_text(summary(facts, in_order))
        report = {"machine": facts, "steps": [asdict(each) for each in in_order]}
        (folder / "summary.json").write_text(json.dumps(report, indent=1) + "\n")
    archive = shutil.make_archive(str(folder), "zip", folder.parent, folder.name)
    print(f"{folder / 'summary.md'}\nplease send {archive} with an issue: what failed is as welcome as what did not")
    return 0 if all(outcome.is_good for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
