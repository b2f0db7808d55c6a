# SPDX-License-Identifier: Apache-2.0
"""Result files: JSON with the machine, versions, source, settings and one row a case. Written after every row.

    {"schema": 1, "machine": {...}, "versions": {...}, "commit": ..., "source": ..., "settings": {...},
     "bandwidth": bytes a second, "peers": {name: {"status": "found" | "absent", ...}},
     "rows": [{"id", "suite", "case", "metric", "floor", "checked", "forced", "backend", "entries", "ratios", ...}],
     "left_out": [ids], "seconds": ...}

An entry (cuLA or a peer) has a status: `ok`, `wrong` (out of tolerance: timed, shown, never ranked), `failed` (raised),
or `declined` (the library has nothing to compare). Only entries that ran have times. `forced` names the backend that was
asked for where the choice was not left to dispatch; a report keeps such rows apart from the others.

Scripts of `benchmarks/` write files of their own form, which name the script and say what it measures: `{"script", "what", ...}`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import cula
from cula.utils import describe_device

SCHEMA = 1
FIELDS = ("machine", "versions", "commit", "source", "date", "settings", "bandwidth", "peers", "rows", "left_out", "seconds")
Result = dict[str, Any]
Row = dict[str, Any]

PACKAGE = Path(cula.__file__).resolve().parent


def machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"device": describe_device(device), "host": platform.machine(), "cpus": os.cpu_count()}
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 1)  # of the last minute, before the run
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "sms": properties.multi_processor_count}
        facts |= {"memory_bytes": properties.total_memory, "l2_bytes": properties.L2_cache_size}
    else:
        facts["threads"] = torch.get_num_threads()
    return facts


def short_name(result: Result) -> str:
    """ "H200" of "NVIDIA H200", "CPU" without a GPU: names the report."""
    machine = result["machine"]
    gpu = machine.split(" (")[0] if isinstance(machine, str) else machine.get("gpu")  # a script's is `describe_device`
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


def read(path: Path) -> Result:
    """What a run or a script wrote; a ValueError that names the file where neither did."""
    try:
        result = json.loads(path.read_text())
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(result, dict) or not ("schema" in result or {"script", "what"} <= result.keys()):
        raise ValueError(f"{path} is not a result file: `cula-bench run` writes those, and the scripts of benchmarks/")
    if is_of_script(result):
        return result
    if result["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {result['schema']!r}; this version reads {SCHEMA}")
    if missing := [name for name in FIELDS if name not in result]:
        raise ValueError(f"{path} is not whole: it has no {', '.join(missing)}")
    return result


def is_of_script(result: Result) -> bool:
    return "schema" not in result


def describe_script(result: Result) -> str:
    """Why a script's file is not like others: what wrote it, and what that measures."""
    return f"it has no rows of a suite, {result['script']} wrote it ({str(result['what']).rstrip('.')})"


def load(path: Path) -> Result:
    """What a run wrote."""
    result = read(path)
    if is_of_script(result):
        raise ValueError(f"{path} cannot be compared: {describe_script(result)}")
    return result


def save(path: Path, result: Result) -> None:
    """In one step: a run that is killed leaves the rows it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, allow_nan=True) + "\n")
    partial.replace(path)
