# SPDX-License-Identifier: Apache-2.0
"""What several workers of a test run need and one of them makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cula.ops.cute.toolchain.build import locked

folder: Path | None = None  # that the workers of this run share; None where there is one process. Set by conftest.py


def once_a_run(name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, which JSON can hold: made by the worker that asks first, and read by the others, which wait for it."""
    if folder is None:
        return make()
    with locked(folder / f"{name}.lock"):
        path = folder / f"{name}.json"
        if not path.is_file():
            path.write_text(json.dumps(make()))
        return json.loads(path.read_text())
