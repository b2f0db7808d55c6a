# SPDX-License-Identifier: Apache-2.0
"""Result files: JSON with the machine, versions, source, settings and one row a case. Written after every row.

    {"schema": 1, "machine": {...}, "versions": {...}, "commit": ..., "source": ..., "settings": {...},
     "bandwidth": bytes a second, "peers": {name: {"status": "found" | "absent", ...}},
     "rows": [{"id", "suite", "case", "metric", "floor", "checked", "forced", "backend", "entries", "ratios", ...}],
     "left_out": [ids], "seconds": ...}

An entry (cuLA or a peer) has a status: `ok`, `wrong` (out of tolerance: timed, shown, never ranked), `failed` (raised),
or `declined` (the library has nothing to compare). Only entries that ran have times. `forced` names the backend that was
asked for where the choice was not left to dispatch; a report keeps such rows apart from the others.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cula
from cula.utils import describe_device

SCHEMA = 1
Result = dict[str, Any]
Row = dict[str, Any]

PACKAGE = Path(cula.__file__).resolve().parent


def machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"device": describe_device(device), "host": platform.machine(), "cpus": os.cpu_count()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "sms": properties.multi_processor_count}
        facts |= {"memory_bytes": properties.total_memory, "l2_bytes": properties.L2_cache_size}
    else:
        facts["threads"] = torch.get_num_threads()
    return facts


def short_name(result: Result) -> str:
    """ "H200" of "NVIDIA H200", "CPU" without a GPU: names the report."""
    gpu = result["machine"].get("gpu")
    return "CPU" if gpu is None else re.sub(r"[^A-Za-z0-9.]+", "-", gpu.replace("NVIDIA ", "")).strip("-")


def versions() -> dict[str, str | None]:
    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = None
    return {
        "cula": cula.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": triton_version,
    }


def commit() -> str | None:
    """The checked-out commit, with "+changes" where the tree differs from it; None outside a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", str(PACKAGE)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def source_digest() -> str:
    """A hash over the library's source (the benchmark aside): rows of one file come from one source."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix in (".py", ".c", ".cu", ".cuh", ".so", ".o", ".cubin") and not name.startswith("bench/"):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def new(device: torch.device, settings: dict[str, Any], revision: str | None = None) -> Result:
    return {
        "schema": SCHEMA,
        "machine": machine(device),
        "versions": versions(),
        "commit": revision or commit(),
        "source": source_digest(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "settings": settings,
        "bandwidth": None,
        "peers": {},
        "rows": [],
        "left_out": [],
        "seconds": 0.0,
    }


def resume(path: Path, fresh: Result) -> Result:
    """The file's result, to be added to; ValueError where its rows would not be comparable with new ones."""
    old = load(path)
    for what, name in (("machine", "device"), ("versions", "torch")):
        if old[what][name] != fresh[what][name]:
            raise ValueError(f"{path} was measured with {what} {old[what][name]}, this is {fresh[what][name]}: take a new file")
    if old["settings"]["backend"] != fresh["settings"]["backend"]:
        raise ValueError(f"{path} was measured with backend {old['settings']['backend']!r}: take a new file")
    if old["source"] != fresh["source"]:
        raise ValueError(f"{path} was measured with other source of cula ({old['commit']}): take a new file")
    return old | {"left_out": [], "settings": fresh["settings"]}


def load(path: Path) -> Result:
    result = json.loads(path.read_text())
    if result.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {result.get('schema')!r}; this version reads {SCHEMA}")
    return result


def load_all(paths: Sequence[Path]) -> list[Result]:
    if not paths:
        raise ValueError("no result files given")
    return [load(path) for path in paths]


def save(path: Path, result: Result) -> None:
    """In one step: a run that is killed leaves the rows it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, allow_nan=True) + "\n")
    partial.replace(path)
