# SPDX-License-Identifier: Apache-2.0
"""cuLA in other packages: one line each, and each can be taken back. Importing this changes nothing.

`cula.integrations.fla.register()`: flash-linear-attention.
`cula.integrations.transformers.patch()`: Hugging Face transformers.

`CALLS` counts the calls that came through them.
"""

from cula.integrations import fla, transformers
from cula.integrations.changes import CALLS

__all__ = ["CALLS", "fla", "transformers"]
