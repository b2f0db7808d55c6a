# SPDX-License-Identifier: Apache-2.0
"""Every environment variable cuLA reads, in one table.

| name         | default | meaning                                                                              |
|--------------|---------|--------------------------------------------------------------------------------------|
| `CULA_CHECK` | `0`     | `1` reads values back and checks them: offsets, slot indices, gate signs, NaN and Inf |

Variables are read when they are needed, so a test or a debugging session may set them at any time.
None of them changes a result.
"""

import os


def check_values() -> bool:
    """Whether `CULA_CHECK=1` asks for checks that read tensor values (a synchronisation on a GPU)."""
    return os.environ.get("CULA_CHECK", "0") not in ("", "0")
