# SPDX-License-Identifier: Apache-2.0
"""`cula-bench run SUITE...`, `cula-bench report RESULT.json...`, `cula-bench compare A.json B.json`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cula.bench import compare as comparing
from cula.bench import report as reporting
from cula.bench import results, runner, suites
from cula.bench.cases import DTYPES, FLAGS
from cula.bench.family import all_gates
from cula.bench.peers import PEERS, Peer
from cula.core.dispatch import backend_names

EXAMPLES = """examples:
  cula-bench run kda-prefill decode --out prefill.json --budget 480
  cula-bench run kda-prefill --t 8192 --h 16 --hv 32 --gate slow
  cula-bench run kda-prefill --lens 1300,547,2048 --h 96 --peers fla
  cula-bench report prefill.json
  cula-bench compare before.json after.json --threshold 1.05
"""

REPORTS = Path("bench-report")

PAGES = """Prints a summary and writes a page with every row, <GPU>.md and its pictures. No README is touched unless it is named.

examples:
  cula-bench report mine.json                 a page in bench-report/
  cula-bench report mine.json --to pages      in pages/
  make bench-pages                            the project's own: docs/benchmarks and the block of README.md, which is
    cula-bench report benchmarks/results/*.json --to docs/benchmarks --readme README.md
"""


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more; got {text}")
    return value


def positives(text: str) -> tuple[int, ...]:
    return tuple(positive(word) for word in text.split(",") if word)


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cula-bench", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure suites and write a result file")
    listed = "; ".join(f"{name}: {what}" for name, what in suites.known().items())
    run.add_argument("suites", nargs="+", metavar="SUITE", help=f"{listed}; or 'all'")
    run.add_argument("--out", type=Path, default=Path("bench.json"), help="result file (default: %(default)s)")
    run.add_argument("--resume", action="store_true", help="add the cases that the file does not hold yet")
    run.add_argument("--budget", type=float, help="seconds after which no further case is started")
    run.add_argument("--warm", type=int, default=0, metavar="N", help="processes that compile first, for half the budget at most")
    run.add_argument("--tune-ms", type=numbers, metavar="WARMUP,REPEAT", help="of a peer's tuner, a variant (Triton: 25,100)")
    run.add_argument("--shapes-limit", type=positive, help="at most so many cases of each suite")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--backend", choices=("auto", *backend_names()), default="auto", help="force a cuLA backend")
    run.add_argument("--peers", default="all", help=f"all, none, or some of {','.join(p.name for p in PEERS)}")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--commit", help="what to record as the commit where there is no git")
    shape = run.add_argument_group("any shape, instead of the suite's own")
    shape.add_argument("--t", type=positives, default=(), metavar="T,...", help="tokens of a sequence")
    shape.add_argument("--h", type=positives, default=(), metavar="H,...", help="query/key heads")
    shape.add_argument("--hv", type=positive, help="value heads")
    shape.add_argument("--b", type=positive, help="sequences of length T (decode: rows)")
    shape.add_argument("--lens", type=positives, default=(), metavar="L,...", help="lengths of packed sequences")
    shape.add_argument("--k", type=positive, help="head dim of q and k")
    shape.add_argument("--v", type=positive, help="head dim of v")
    shape.add_argument("--gate", type=words, default=(), metavar="NAME,...", help=f"some of {','.join(all_gates())}")
    shape.add_argument("--dtype", choices=list(DTYPES))
    shape.add_argument("--flags", type=suites.parse_flags, help=f"all, none, or some of {', '.join(FLAGS)}")
    report = commands.add_parser(
        "report",
        help="a summary on the screen, Markdown and pictures in a folder, from result files",
        description="A report from result files, and from nothing else.",
        epilog=PAGES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    report.add_argument(
        "--to", "--out", type=Path, help=f"folder of the page and its pictures (default: {REPORTS}/ in the current folder)"
    )
    report.add_argument("--readme", type=Path, help="fill the generated block of this file too; needs --to, to which it links")
    compare = commands.add_parser("compare", help="regressions between two result files; exits 1 where there are any")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    threshold = comparing.DEFAULT_THRESHOLD
    compare.add_argument("--threshold", type=float, default=threshold, help="time ratio that counts (default: %(default)s)")
    return parser


def chosen_peers(text: str) -> tuple[Peer, ...]:
    if text in ("all", "none"):
        return PEERS if text == "all" else ()
    by_name = {p.name: p for p in PEERS}
    unknown = [name for name in words(text) if name not in by_name]
    if unknown:
        raise ValueError(f"unknown peers {unknown}; choose from {list(by_name)}")
    return tuple(by_name[name] for name in words(text))


def run(args: argparse.Namespace) -> int:
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        raise ValueError(f"--device {args.device}: torch knows no such device; use --device cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {args.device}: nothing can be measured there; use --device cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch sees no GPU here; use --device cpu")
    bad = [gate for gate in args.gate if gate not in all_gates()]
    if bad:
        raise ValueError(f"unknown gates {bad}; choose from {list(all_gates())}")
    names = list(suites.known()) if args.suites == ["all"] else args.suites
    custom = suites.Custom(args.t, args.h, args.hv, args.b, args.lens, args.k, args.v, args.gate, args.dtype, args.flags)
    cases = suites.build(names, device.type, custom, args.shapes_limit)
    record = {"suites": names, "shapes_limit": args.shapes_limit}
    if args.tune_ms is not None and len(args.tune_ms) != 2:
        raise ValueError(f"--tune-ms takes two numbers, as in 5,20; got {args.tune_ms}")
    peers = chosen_peers(args.peers)
    settings = runner.Settings(device, args.backend, peers, args.seed, args.budget, args.warm, args.tune_ms, record)
    result = runner.run(cases, settings, args.out, resume=args.resume, revision=args.commit)
    rows = len(result["rows"])
    print(f"\n{reporting.screen([result])}\n{args.out}: {rows} row{'s' * (rows != 1)}")
    return 0


def report(args: argparse.Namespace) -> int:
    if args.readme is not None and args.to is None:
        raise ValueError("--readme needs --to, the folder of the page that its block links to")
    taken = {}
    for path in args.results:
        result = results.read(path)
        if reporting.is_taken(result):
            taken[path.as_posix()] = result
        else:
            print(f"cula-bench: {path} is left out: {results.describe_script(result)}", file=sys.stderr)
    if not taken:
        raise ValueError("none of these files has anything for a report")
    for name, (found, files) in reporting.by_machine(list(taken.values()), list(taken)).items():
        print(f"{name}, from {', '.join(files)}\n\n{reporting.screen(found)}\n")
    for path in reporting.write(list(taken.values()), list(taken), args.to or REPORTS, args.readme):
        print(path)
    return 0


def compare(args: argparse.Namespace) -> int:
    found = comparing.compare(results.load(args.before), results.load(args.after), args.threshold)
    print(found.text())
    return 1 if found.regressions else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return {"run": run, "report": report, "compare": compare}[args.command](args)
    except (ValueError, OSError) as error:
        print(f"cula-bench: {error}", file=sys.stderr)
        return 2
