# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on a call before its first message, or all of them raise the same error.

What must be equal on all ranks (shapes, dtypes, options) makes the *signature* of a call. Ranks compare digests of it,
eight bytes each, and only where those differ the signatures themselves, to say in what.

When they compare: on gloo, every call, which is cheap there and finds a rank that changes its call later. On other
backends, the first time a signature is seen; agreed ones are remembered, so that a repeated call costs a dictionary
look-up and never waits for a GPU. CULA_CHECK=1 compares every call everywhere.

A rank that refuses a call by itself (a bad argument) takes part wherever the others are sure to, and they learn its
reason. So a call counts as made on every rank, accepted or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cula import settings
from cula.core.explain import is_explaining
from cula.dist.comm import group_state

MAX_REMEMBERED = 4096  # signatures a group; all ranks forget the same ones, because they agreed on them in one order
MAX_TEXT = 8192  # bytes of a signature or of a reason, as shown to the other ranks

Signature = tuple[tuple[str, Any], ...]


class Agreed:
    """The signatures that the ranks of a group have agreed on, latest last."""

    def __init__(self) -> None:
        self.signatures: OrderedDict[tuple[str, Signature], None] = OrderedDict()
        self.comparisons = 0

    def remember(self, key: tuple[str, Signature]) -> None:
        self.signatures[key] = None
        self.signatures.move_to_end(key)
        if len(self.signatures) > MAX_REMEMBERED:
            self.signatures.popitem(last=False)


def agree(who: str, signature: Signature, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise ValueError, the same on every rank, unless all ranks of the group make this call.

    Args:
        device: where the call's tensors are; the backend may only move tensors from there.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    agreed, key = _agreed(group), (who, signature)
    if key not in agreed.signatures or _compares_every_call(group):
        _compare(who, {"who": who, "signature": [[name, repr(value)] for name, value in signature]}, group, device)
    agreed.remember(key)


@contextlib.contextmanager
def announced_refusal(who: str, group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Around the checks that a rank makes by itself: tell the others what they raise, where those are listening. They are not
    where a call is only explained."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if group is not None and not is_explaining.get() and dist.get_world_size(group) > 1:
            is_heard = _compares_every_call(group) or not _agreed(group).signatures
            if is_heard:
                with contextlib.suppress(ValueError):  # this rank raises its own error
                    _compare(who, {"who": who, "refused": f"{type(error).__name__}: {error}"[:1000]}, group, device)
        raise


def _agreed(group: dist.ProcessGroup) -> Agreed:
    state = group_state(group)
    with state.lock:
        if state.agreed is None:
            state.agreed = Agreed()
        return state.agreed


def _compares_every_call(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo" or settings.check_values()


def _compare(who: str, note: dict[str, Any], group: dist.ProcessGroup, device: torch.device) -> None:
    text = json.dumps(note).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")  # an int64 holds 7 bytes of any value
    _agreed(group).comparisons += 1
    digests = _all_gather(torch.tensor([digest], device="cpu"), group, device)
    if all(d.item() == digest for d in digests) and "refused" not in note:
        return
    assert len(text) <= MAX_TEXT
    shown = torch.frombuffer(bytearray(text.ljust(MAX_TEXT)), dtype=torch.uint8)
    notes = [json.loads(bytes(t.tolist())) for t in _all_gather(shown, group, device)]
    raise ValueError(_explanation(who, notes))


def _all_gather(t: Tensor, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    payload = t if dist.get_backend(group) == "gloo" else t.to(device)
    parts = [torch.empty_like(payload) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, payload, group=group)
    return [part.cpu() for part in parts]


def _explanation(who: str, notes: list[dict[str, Any]]) -> str:
    for rank, note in enumerate(notes):
        if "refused" in note:
            return f"{note['who']}: rank {rank} of the group refused the call: {note['refused']}"
    calls = [note["who"] for note in notes]
    if len(set(calls)) > 1:
        return f"cula.dist: ranks of the group make different calls: {_by_value(calls)}"
    fields = [dict(note["signature"]) for note in notes]
    names = list(dict.fromkeys(name for f in fields for name in f))
    values = {name: [f.get(name, "nothing") for f in fields] for name in names}
    different = [f"{name} ({_by_value(of_rank)})" for name, of_rank in values.items() if len(set(of_rank)) > 1]
    return f"{who}: ranks of the group disagree on " + ", ".join(different)


def _by_value(values: list[str]) -> str:
    """["64", "32", "64"] -> "64 on rank 0, 2; 32 on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    shown = [(value, ", ".join(map(str, on[:8])) + (", ..." if len(on) > 8 else "")) for value, on in ranks.items()]
    return "; ".join(f"{value} on rank {on}" for value, on in shown)
