# SPDX-License-Identifier: Apache-2.0
"""A package that is installed, as if it were not."""

import importlib.abc
import sys


def hide(monkeypatch, package):
    """Until the test ends, importing `package` fails as it does where it is not installed."""

    class Hidden(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            return None

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
