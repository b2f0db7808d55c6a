# SPDX-License-Identifier: Apache-2.0
"""What a run prints: a progress bar where rich is installed and someone watches, otherwise a line a case; then a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from cula.bench import summary


class Progress:
    def __init__(self, total: int):
        self.total, self.done = total, 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def finish(self, row: dict[str, Any]) -> None:
        self.done += 1
        self.say(f"[{self.done}/{self.total}] {row['suite']}: {summary.line(row)}")
        if self._bar is not None:
            self._bar.update(self._task, advance=1)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in (head, *rows)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
