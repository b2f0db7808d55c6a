# SPDX-License-Identifier: Apache-2.0
"""What a reader can hold in mind: no function of the package, or of its tools, is longer than two screens."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_LINES = 120  # without the docstring
FILES = sorted([*(ROOT / "cula").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])


def length(function):
    """Lines of a function without its docstring; a signature that is nothing but names counts as what it is."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_are_short(path):
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    long = {f.name: length(f) for f in functions if length(f) > MOST_LINES}
    assert not long
