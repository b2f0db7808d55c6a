# SPDX-License-Identifier: Apache-2.0
"""cuLA in other packages: one line each, and each can be taken back. Importing this changes nothing.

| package | line |
|---|---|
| flash-linear-attention | `cula.integrations.fla.register()` |
| Hugging Face transformers | `cula.integrations.transformers.patch()` |
| both, if they are installed | `cula.integrations.enable()` |
| vLLM | `CULA_VLLM=1` in its environment |
| SGLang | `--linear-attn-backend cula` |

`CALLS` counts the calls that came through them. docs/integrations.md says what cuLA takes over and what it leaves.
"""

from cula.integrations import fla, sglang, transformers, vllm
from cula.integrations.changes import CALLS
from cula.integrations.overview import disable, enable

__all__ = ["CALLS", "disable", "enable", "fla", "sglang", "transformers", "vllm"]
