# SPDX-License-Identifier: Apache-2.0
"""cuLA: linear-attention kernels for PyTorch. Kimi Delta Attention, Gated DeltaNet, Lightning Attention, decode, one GPU or many.

Level 1 is here: `cula_kda`, `cula_gdn`, `cula_lightning`, `cula_decode` and `explain`; `warmup` compiles ahead of calls.
Level 0, the kernels by name: `cula.kda`, `cula.gdn`, `cula.lightning`, `cula.utils`. Level 2, many GPUs: `cula.dist`. The
definitions in float64: `cula.reference`.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cula import registry as registry
from cula.api import cula_decode, cula_gdn, cula_kda, cula_lightning, explain
from cula.version import __version__

__all__ = ["__version__", "cula_decode", "cula_gdn", "cula_kda", "cula_lightning", "explain", "warmup"]


def warmup(
    model: str | Sequence[str],
    tp: int = 1,
    *,
    train: bool = False,
    arch: str | None = None,
    out: Path | str | None = None,
    jobs: int | None = None,
    show: bool = True,
) -> Any:
    """Compile what a model will call, in parallel, before it serves; `python -m cula warmup` does the same.

    Args:
        model: a name of `cula/models.py`, or its beginning ("kimi-linear-48b", "kimi-k3", "qwen3-next", "qwen3.5", "minimax"), or
            several.
        tp: ranks that share the heads; kernels are those of one of them.
        train: training steps too, not only prefill and decode.
        arch: compile the CuTe kernels for this target ("sm_90a") instead of for the GPU at hand, which need not be there.
        out: with `arch`, the folder that `CULA_KERNEL_DIR` will name; the cache by default.
        jobs: processes; as many as there are cores, up to 8, by default.
        show: print what is done, and how far it is.

    Returns:
        `(kernels, calls, seconds)`: names of the CuTe kernels that were compiled, the number of calls made, and the time taken.
    """
    warming = importlib.import_module("cula.warming")  # a program on top of this package, loaded where it is asked for
    return warming.warmup(model, tp, train=train, arch=arch, out=out, jobs=jobs, show=show)
