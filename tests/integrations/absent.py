# SPDX-License-Identifier: Apache-2.0
"""A package that is installed, as if it were not."""

import importlib.abc
import sys


def hide(monkeypatch, package):
    """Until the test ends, `package` is not found, as where it is not installed."""

    class AllBut(importlib.abc.MetaPathFinder):
        def __init__(self, finders):
            self.finders = finders

        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == package:
                return None
            specs = (finder.find_spec(name, path, target) for finder in self.finders)
            return next((spec for spec in specs if spec is not None), None)

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [AllBut(list(sys.meta_path))])
