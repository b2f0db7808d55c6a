# SPDX-License-Identifier: Apache-2.0
"""Records of whole calls, made by watching one: what it allocates and launches is written down while it runs.

Every tensor that a call makes comes from `memory.allocator`, and every kernel is launched by a `launch.Variant`. So a call that
has run once says all that a `LaunchRecord` needs: which launches there are, and for each of their tensors whether it is one of
the call's, a result, or something that kernels hand on to each other. The latter become places in one workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from cula.core.replay.record import Address, LaunchRecord
from cula.core.replay.torch_internals import Form, form_of, is_capturing
from cula.core.replay.workspace import workspace

from .launch import ALIGNMENT, is_ready
from .memory import Log, current

STEP = 256  # bytes: where tensors in a workspace begin
# Tokens times value heads of a call, up to which the host takes longer than the GPU, and a record pays. It keeps all that a call
# hands on at once, where the call itself frees what it has used.
MOST_TOKENS = 1 << 14
MOST_CALLS = 4096  # of which is remembered that they have come

_seen: set[Hashable] = set()


def record_call(
    call: Hashable,
    run: Callable[[], Sequence[Tensor | None]],
    given: Sequence[Tensor | None],
    tokens: int,
    device: torch.device,
) -> LaunchRecord | None:
    """A record of the call that `run` makes, which it does once more; None where it is not worth it, or cannot be.

    It is when a call comes again: a record holds for one length, and a prompt of another length at every step would run twice
    for nothing. A graph that is captured takes each launch once.

    Args:
        call: what is called, and the problem.
        run: returns the call's results.
        given: the call's tensors.
        tokens: times value heads.
    """
    if not 0 < tokens <= MOST_TOKENS or device.type != "cuda" or current.log is not None or is_capturing():
        return None
    if not _has_come_before(call):
        return None
    places = _Places()
    for i, t in enumerate(given):
        places.add(t, i)
    if places.are_ambiguous:  # before it runs again: what it writes may be what it reads
        return None
    current.log = log = Log()
    try:
        results = run()
    finally:
        current.log = None
    return _written_down(log, results, places, device)


def _has_come_before(call: Hashable) -> bool:
    """Whether it is remembered, which it is from now on."""
    if call in _seen:
        return True
    if len(_seen) >= MOST_CALLS:
        _seen.clear()
    _seen.add(call)
    return False


def _written_down(log: Log, results: Sequence[Tensor | None], places: _Places, device: torch.device) -> LaunchRecord | None:
    """The record; `places` knows the call's own tensors."""
    outputs: list[int | Form | None] = []
    for i, t in enumerate(results):
        found = places.find(t)
        if t is not None and found is None:
            places.add(t, ~i)
        outputs.append(None if t is None else form_of(t) if found is None else found.of)
    end, of_workspace = 0, ~len(results)
    for t in log.tensors:
        if places.find(t) is None:
            places.add(t, of_workspace, end)
            end += -(-t.numel() * t.element_size() // STEP) * STEP
    if places.are_ambiguous or any(o is not None and isinstance(o, int) and o < 0 for o in outputs):
        return None
    launches = []
    for variant, grid, named in log.launches:
        of = {name: places.find(named[name]) for name in variant.kernel.tensors}
        if any(named[name] is not None and found is None for name, found in of.items()):
            return None  # memory that the call did not make, as of a copy by torch
        absent = Address(None)
        addresses = {
            name: absent if found is None else found._replace(alignment=1 if name in variant.kernel.any_address else ALIGNMENT)
            for name, found in of.items()
        }
        if any(named[n] is not None and named[n].data_ptr() % a.alignment for n, a in addresses.items()):
            return None
        launches.append(variant.record(grid, addresses, **named)[1])
    kept = workspace(device.index, end) if end else None
    return LaunchRecord(device.index, tuple(launches), tuple(outputs), kept, is_ready)


class _Places:
    """Where the memory of tensors is, and whose it is."""

    def __init__(self) -> None:
        self._known: list[tuple[int, int, Address]] = []  # first and last address
        self.are_ambiguous = False  # two tensors share memory, and only one of them would be found

    def add(self, t: Tensor | None, of: int, offset: int = 0) -> None:
        if t is None or not t.numel():
            return
        first = t.data_ptr()
        last = first + t.element_size() * (1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))) - 1
        self.are_ambiguous |= any(first <= other_last and other_first <= last for other_first, other_last, _ in self._known)
        self._known.append((first, last, Address(of, offset=offset)))

    def find(self, t: Tensor | None) -> Address | None:
        """The address of a tensor, as a place in the one that it is, or is a part of."""
        if t is None or not t.numel():
            return None
        at = t.data_ptr()
        found = next(((first, a) for first, last, a in self._known if first <= at <= last), None)
        return None if found is None else found[1]._replace(offset=found[1].offset + at - found[0])
