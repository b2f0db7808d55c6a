# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a call, so that the same call again costs the host a few microseconds.

Whether a call is valid, which backend takes it and how its kernel is launched follow from its *signature*: type, shape,
strides, dtype and device of every tensor, and every argument that is no tensor (its *words*). A call whose signature has
been seen runs its plan; any other goes the long way (contract, dispatch, operator) and leaves a plan.

What differs between calls of one signature is looked at each time. Here: gradients and `CULA_CHECK`, which go the long
way. In a plan: addresses, streams, the current device; a plan that does not fit these returns None, and the call goes the
long way. On a CPU there are no plans: offsets and slots are checked there on every call.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from cula import settings
from cula.ops import Plan
from cula.ops.native import Likeness, addresses, likeness

CAPACITY = 4096  # signatures; a serving engine has some hundred, and one that outruns this starts over

LATEST = 4  # plans compared with before a signature is written down

Tensors = tuple[Tensor | None, ...]


class Plans:
    """The plans of one function, by signature. Safe to use from several threads."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}
        # By words alone, the plans that last ran for them, newest first: most calls repeat one of those before, and to compare
        # tensors with those of a plan is several times as fast as to write their signature down.
        self._latest: dict[Hashable, tuple[tuple[Likeness, Plan], ...]] = {}

    def run(self, tensors: Tensors, words: Hashable) -> Any:
        """What the plan for such a call returns. None: there is none or it does not fit, and the call goes the long way."""
        if settings.check_values():
            return None
        for is_like, plan in self._latest.get(words, ()):
            at = is_like(tensors)
            if at is not None:
                return plan(tensors, at)
        found = self._plans.get((signature(tensors), words))
        if found is None:
            return None
        self._remember(tensors, words, found)
        return found(tensors, addresses(tensors))

    def keep(self, tensors: Tensors, words: Hashable, plan: Plan | None) -> None:
        """Use `plan` for calls like this one, which went the long way; nothing is kept for a call that may have none."""
        seen = signature(tensors)
        if seen is None or plan is None or settings.check_values():
            return
        if len(self._plans) >= CAPACITY:
            self._plans.clear()
            self._latest.clear()
        self._plans[seen, words] = plan
        self._remember(tensors, words, plan)

    def _remember(self, tensors: Tensors, words: Hashable, plan: Plan) -> None:
        is_like = likeness(tensors)
        if is_like is not None:
            self._latest[words] = ((is_like, plan), *self._latest.get(words, ())[: LATEST - 1])


def signature(tensors: Tensors) -> Hashable | None:
    """What tensors have in common with those of a call like theirs; None if such a call has no plan.

    Cheap rather than general: what is no CUDA tensor where one belongs is left to the contract to complain about.
    """
    try:
        if not tensors[0].is_cuda:  # type: ignore[union-attr]
            return None
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):
            return None
        return tuple([t if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    except (AttributeError, TypeError):
        return None
