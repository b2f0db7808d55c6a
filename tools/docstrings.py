# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe, which reads docstrings for the site, for two habits of ours that it does not know: a section is called
`Example:`, and names that share a description may take more than one line."""

import re
from typing import Any

import griffe

NAMES_THAT_GO_ON = re.compile(r"^( +(?:\w+, )*\w+,)\n +", re.MULTILINE)


class OurDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = NAMES_THAT_GO_ON.sub(r"\1 ", text)
