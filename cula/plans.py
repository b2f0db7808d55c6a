# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a call, so that the same call again costs the host a few microseconds.

Whether a call is valid, which backend takes it and how its kernel is launched follow from its *signature*: type, shape,
strides, dtype and device of every tensor, and every argument that is no tensor. A call whose signature has been seen runs
its plan; any other goes the long way (contract, dispatch, operator) and leaves a plan.

What differs between calls of one signature is looked at each time. Here: gradients and `CULA_CHECK`, which go the long
way. In a plan: addresses, streams, the current device; a plan that does not fit these returns None, and the call goes the
long way. On a CPU there are no plans: offsets and slots are checked there on every call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from cula import settings
from cula.ops import Plan

CAPACITY = 4096  # signatures; a serving engine has some hundred, and one that outruns this starts over


class Plans:
    """The plans of one function, by signature. Safe to use from several threads."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}

    def find(self, signature: Hashable | None) -> Plan | None:
        return None if signature is None else self._plans.get(signature)

    def keep(self, signature: Hashable | None, plan: Plan | None) -> None:
        if signature is None or plan is None:
            return
        if len(self._plans) >= CAPACITY:
            self._plans.clear()
        self._plans[signature] = plan


def signature(tensors: Sequence[Tensor | None], words: tuple[Any, ...]) -> Hashable | None:
    """What a plan is found by; None for a call that goes the long way whatever was seen before.

    Cheap rather than general: what is no CUDA tensor where one belongs is left to the contract to complain about.
    """
    try:
        if not tensors[0].is_cuda or settings.check_values():  # type: ignore[union-attr]
            return None
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):
            return None
        found = tuple([t if t is None else (type(t), t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors])
    except (AttributeError, TypeError):
        return None
    return found, words
