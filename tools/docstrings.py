# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe, which reads docstrings for the site: it knows a section `Examples:`, and ours is `Example:`."""

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
