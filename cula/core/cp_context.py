# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention's deprecated `cp_context=`, handed on to level 2, which is above this: it registers who takes it."""

from __future__ import annotations

import importlib
from typing import Any

from cula.core.family import Family
from cula.core.pool import Serving

_taker: str | None = None  # "module:function"; filled by `cula/registry.py`


def register_cp_context(taker: str) -> None:
    global _taker
    _taker = taker


def from_cp_context(
    family: Family,
    x: Any,
    options: Any,
    serving: Serving,
    checkpoint_every: int | None,
    cp_context: Any,
    device: Any,
    backend: str,
    extra: dict[str, Any],
    who: str = "",
) -> Any:
    """Make a prefill over the ranks of a context. Level 2 refuses what it does not take: pools, checkpoints, `out`."""
    assert _taker is not None
    module, _, name = _taker.partition(":")
    taker = getattr(importlib.import_module(module), name)
    for keyword, given in (*serving._asdict().items(), ("checkpoint_every", checkpoint_every)):
        if given is not None:
            extra = {**extra, keyword: given}
    return taker(family, x, options, cp_context, device=device, backend=backend, extra=extra, who=who or family.function)
