# SPDX-License-Identifier: Apache-2.0
"""cuLA in other packages: one line each, and each can be taken back. Importing this changes nothing.

`cula.integrations.fla.register()`: flash-linear-attention.

`CALLS` counts the calls that came through them.
"""

from cula.integrations import fla
from cula.integrations.changes import CALLS

__all__ = ["CALLS", "fla"]
