# SPDX-License-Identifier: Apache-2.0
"""Every environment variable cuLA reads, in one table.

| name               | default | meaning                                                                               |
|--------------------|---------|---------------------------------------------------------------------------------------|
| `CULA_CHECK`       | `0`     | `1` reads values back and checks them: offsets, slot indices, gate signs, NaN and Inf |
| `TRITON_INTERPRET` | `0`     | Triton's own: `1` runs its kernels in an interpreter, so that CPU tensors will do     |

Variables are read when they are needed, so a test or a debugging session may set them at any time.
None of them changes a result.
"""

import os


def check_values() -> bool:
    """Whether `CULA_CHECK=1` asks for checks that read tensor values (a synchronisation on a GPU)."""
    return os.environ.get("CULA_CHECK", "0") not in ("", "0")


def triton_is_interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
