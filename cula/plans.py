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

from cula import settings
from cula.ops import Plan, native
from cula.ops.native import Again, Tensors

CAPACITY = 4096  # signatures; a serving engine has some hundred, and one that outruns this starts over

LATEST = 8  # plans compared with before a signature is written down


class Plans:
    """The plans of one function, by signature. Safe to use from several threads."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}
        # The latest of them to be used, newest first, with their words: most calls repeat one of those before, and to compare
        # tensors with those of a plan is several times as fast as to write their signature down.
        self._latest: tuple[tuple[Hashable, Again], ...] = ()
        self._first: Any = None  # looks through them; there once something is

    def run(self, tensors: Tensors, words: Hashable) -> Any:
        """What the plan for such a call returns. None: there is none or it does not fit, and the call goes the long way."""
        if settings.check_values():
            return None
        if self._first is None:
            return None
        done = self._first(self._latest, tensors, words)
        if done is not NotImplemented:
            return done
        if torch.compiler.is_compiling():  # torch.export's tensors, whose sizes may be no numbers
            return None
        plan = self._plans.get((signature(tensors), words))
        if plan is None:
            return None
        again = native.planned(tensors, plan)
        done = again(tensors)
        if done is NotImplemented:
            return None
        self._remember(words, again)
        return done

    def keep(self, tensors: Tensors, words: Hashable, plan: Plan | None) -> None:
        """Use `plan` for calls like this one, which went the long way; nothing is kept for a call that may have none."""
        seen = signature(tensors)
        if seen is None or plan is None or settings.check_values():
            return
        if len(self._plans) >= CAPACITY:
            self._plans.clear()
            self._latest = ()
        self._plans[seen, words] = plan
        self._remember(words, native.planned(tensors, plan))

    def _remember(self, words: Hashable, again: Again) -> None:
        self._latest = ((words, again), *self._latest[: LATEST - 1])
        self._first = native.finder()


def signature(tensors: Tensors) -> Hashable | None:
    """What tensors have in common with those of a call like theirs; None if such a call has no plan."""
    return native.signature(tensors) if getattr(tensors[0], "is_cuda", False) else None
