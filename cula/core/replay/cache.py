# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a function's calls, so that the same call again costs the host a few microseconds.

Whether a call is valid, which backend takes it and how its kernels are launched follow from its *signature*: type, shape,
strides, dtype, device and alignment of every tensor, and every argument that is no tensor (its *static arguments*). A call
whose signature has been seen is made by its record; any other goes the long way (checks, choice, kernels) and leaves a record.
Where a backend says how (`record.Sizes`), a record holds for other numbers of tokens and sequences as well.

What differs between calls of one signature is looked at each time. Here: gradients, forward-mode AD and `CULA_CHECK`, which go
the long way. (Inside of an autograd node there are no gradients to make, and its forward and backward have records of their own.)
In a record: addresses, streams, the current device; a record that does not fit these returns None, and the call goes the long way
and leaves the record as it is. On a CPU there are no records: offsets and slots are checked there on every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from cula import settings
from cula.core.problem import needs_grad
from cula.core.replay import record
from cula.core.replay.record import LaunchRecord, Replayer, Tensors
from cula.core.replay.torch_internals import is_forward_mode

CAPACITY = 4096  # signatures; a serving engine has some hundred, and one that outruns this starts over

LATEST = 8  # records compared with before a signature is written down


class ReplayCache:
    """The records of one function, by signature. Safe to use from several threads."""

    def __init__(self) -> None:
        self._records: dict[Hashable, LaunchRecord | Replayer] = {}
        # Those that hold for tensors of other sizes too, by static arguments: a handful each, one for each choice of kernels.
        self._of_any_size: dict[Hashable, tuple[Replayer, ...]] = {}
        # The latest of them to be used, newest first, with their static arguments: most calls repeat one of those before, and to
        # compare tensors with those of a record is several times as fast as to write their signature down.
        self._latest: tuple[tuple[Hashable, Replayer], ...] = ()
        self._first: Any = None  # looks through them; there once something is

    def run(self, tensors: Tensors, static_args: Hashable) -> Any:
        """What the record for such a call returns. NotImplemented: there is none; None: there is one that does not fit. The call
        then goes the long way."""
        if self._first is None or settings.check_values() or is_forward_mode():
            return NotImplemented
        done = self._first(self._latest, tensors, static_args)
        if done is not NotImplemented or torch.compiler.is_compiling():  # torch.export's tensors, whose sizes may be no numbers
            return done
        if needs_grad(tensors):
            return NotImplemented
        for replay in self._of_any_size.get(static_args, ()):
            done = replay(tensors)
            if done is not NotImplemented:
                self._remember(static_args, replay)
                return done
        found = self._records.get((signature(tensors), static_args))
        if found is None:
            return NotImplemented
        replay = record.replayer(tensors, found)
        done = replay(tensors)
        if done is not NotImplemented:
            self._remember(static_args, replay)
        return done

    def keep(self, tensors: Tensors, static_args: Hashable, make: Callable[[], LaunchRecord | Replayer | None]) -> None:
        """Make a record for calls like this one, for which there was none. Nothing is kept of a call that may have none."""
        seen = signature(tensors)
        if seen is None or settings.check_values():
            return
        made = make()
        if made is None:
            return
        if len(self._records) + len(self._of_any_size) >= CAPACITY:
            self._records.clear()
            self._of_any_size.clear()
            self._latest = ()
        replay = record.replayer(tensors, made)
        if isinstance(made, LaunchRecord) and made.sizes is not None:
            self._of_any_size[static_args] = (*self._of_any_size.get(static_args, ()), replay)
        else:
            self._records[seen, static_args] = made
        self._remember(static_args, replay)

    def forget(self) -> None:
        """Start over."""
        self._records, self._of_any_size, self._latest, self._first = {}, {}, (), None

    def _remember(self, static_args: Hashable, replay: Replayer) -> None:
        self._latest = ((static_args, replay), *self._latest[: LATEST - 1])
        self._first = record.finder()


class ChoiceCache:
    """What checks and dispatch found out about calls that have no records, by signature: those that make a gradient, and decode
    on a CPU. Checks that read values are the callers'."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def find(self, tensors: Tensors, static_args: Hashable) -> Any:
        """What was kept for such a call; None if nothing was."""
        if not self._known or settings.check_values() or is_forward_mode():
            return None
        return self._known.get((record.forms(tensors), static_args))

    def keep(self, tensors: Tensors, static_args: Hashable, found: Any) -> None:
        forms = record.forms(tensors)
        if forms is None:
            return
        if len(self._known) >= CAPACITY:
            self._known.clear()
        self._known[forms, static_args] = found


def signature(tensors: Tensors) -> Hashable | None:
    """What tensors have in common with those of a call like theirs; None if such a call has no record."""
    return record.signature(tensors) if getattr(tensors[0], "is_cuda", False) else None
