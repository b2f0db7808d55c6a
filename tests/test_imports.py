# SPDX-License-Identifier: Apache-2.0
"""Imports point down: 2 -> 1 -> 0 -> ops -> what a family is -> core. Read off the sources, imports inside functions too."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first; a module is what the first pattern says that matches all of its name.
LAYERS = {
    "plain values": r"cula\.(version|settings|models|core\.constants)",
    "core": r"cula\.core(\..*)?",
    "what a family is": r"cula\.(?!bench\.|fuzz\.)\w+\.(problem|transition|family|reference)",
    "ops": r"cula\.(ops(\..*)?|compile)",
    "level 0": r"cula\.(utils|kda|gdn|lightning|(kda|gdn|lightning)\.(fla|serving|prefill))",
    "level 1": r"cula\.(api|\w+\.api|registry|reference)",
    "level 2": r"cula\.(dist(\..*)?|\w+\.parallel)",
    "layers": r"cula\.layers(\..*)?",
    "integrations": r"cula\.integrations(\..*)?",
    "the package": r"cula",
    "programs": r"cula\.(bench(\..*)?|fuzz(\..*)?|\w+\.(bench|fuzz)|checking|install|warming|__main__)",
}


def layer_of(module):
    found = [i for i, pattern in enumerate(LAYERS.values()) if re.fullmatch(pattern, module)]
    assert found, f"{module} has no layer"
    return found[0]


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted((ROOT / "cula").rglob("*.py"))}


def imported(module, path):
    """Modules of the package that a source imports, wherever in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "cula")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            if base.split(".")[0] == "cula":
                for alias in node.names:
                    yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    here = layer_of(module)
    names = list(LAYERS)
    for other in imported(module, MODULES[module]):
        there = layer_of(other)
        assert there <= here, f"{module} ({names[here]}) imports {other} ({names[there]})"


def test_every_import_is_seen():
    """The reader itself: absolute, relative, of a module by its package, inside a function."""
    assert "cula.core.checks" in set(imported("cula.core.decode_checks", MODULES["cula.core.decode_checks"]))
    assert "cula.core.prefill" in set(imported("cula.core.operator", MODULES["cula.core.operator"]))
    assert layer_of("cula.dist.cp") > layer_of("cula.api") > layer_of("cula.kda.fla") > layer_of("cula.ops.torch.kda")
