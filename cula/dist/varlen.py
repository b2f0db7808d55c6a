# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which tokens of packed sequences, worked out on the host from the global offsets.

Two ways to share out `cu_seqlens` over P ranks (`sp_mode`):

- "complete": every sequence lies on one rank, longest first to the rank with the fewest tokens so far. A rank's tokens
  are those of its sequences, in ascending order of the sequences' numbers. No state crosses ranks.
- "split": rank r holds the tokens [r T // P, (r + 1) T // P) of the packed range. A sequence cut by a rank boundary
  continues on the next rank, where it is the first; a rank whose range is empty passes its state through.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import weakref
from dataclasses import dataclass

from torch import Tensor

from cula.core.checks import INDEX_DTYPES, ArgumentTypeError, shown_offsets

SP_MODES = ("complete", "split")


@dataclass(frozen=True)
class Share:
    """What one rank holds, and which of it continues elsewhere."""

    ids: tuple[int, ...]  # the global number of each local sequence
    cu_seqlens: tuple[int, ...] | None  # local offsets; None: a batch, every row a sequence
    num_before: int = 0  # ranks before this one that hold the beginning of the first local sequence (of all, for a batch)
    num_after: int = 0  # ranks after this one that hold the rest of the last local sequence

    @property
    def rows_in(self) -> slice:
        """The local sequences that continue from the rank before, where `num_before`."""
        return slice(0, len(self.ids)) if self.cu_seqlens is None else slice(0, 1)

    @property
    def rows_out(self) -> slice:
        """The local sequences that continue on the next rank, where `num_after`."""
        return slice(0, len(self.ids)) if self.cu_seqlens is None else slice(len(self.ids) - 1, len(self.ids))

    @property
    def rows_begin(self) -> slice:
        """The local sequences whose first token is here."""
        return slice(self.rows_in.stop if self.num_before else 0, len(self.ids))

    @property
    def rows_end(self) -> slice:
        """The local sequences whose last token is here."""
        return slice(0, self.rows_out.start if self.num_after else len(self.ids))

    @property
    def is_passage(self) -> bool:
        """Whether what leaves depends on what arrives: the same sequences come in and go out."""
        return bool(self.num_before and self.num_after) and self.rows_in == self.rows_out

    def tokens(self, rows: slice) -> slice:
        """The tokens of `rows`, which are all of a batch or one packed sequence."""
        return slice(None) if self.cu_seqlens is None else slice(self.cu_seqlens[rows.start], self.cu_seqlens[rows.stop])


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a call begin and end, and this rank's share."""

    share: Share
    begins_on: tuple[int, ...]  # rank of each sequence's first state
    ends_on: tuple[int, ...]  # rank of each sequence's last state
    longest_chain: int  # most ranks that one sequence runs through


def batch_layout(num_sequences: int, sp_rank: int, sp_size: int) -> Layout:
    """Rank r holds the r-th slice of every sequence of a batch."""
    share = Share(tuple(range(num_sequences)), None, sp_rank, sp_size - 1 - sp_rank)
    return Layout(share, (0,) * num_sequences, (sp_size - 1,) * num_sequences, sp_size)


@functools.lru_cache(maxsize=64)
def packed_layout(offsets: tuple[int, ...], sp_mode: str, sp_rank: int, sp_size: int) -> Layout:
    """Where packed sequences lie; see the head of this file."""
    N = len(offsets) - 1
    if sp_mode == "complete":
        owner = _balance(offsets, sp_size)
        ids = tuple(n for n in range(N) if owner[n] == sp_rank)
        lengths = (offsets[n + 1] - offsets[n] for n in ids)
        share = Share(ids, tuple(itertools.accumulate(lengths, initial=0)))
        return Layout(share, owner, owner, 1)
    spans = [_span(offsets, rank, sp_size) for rank in range(sp_size)]
    begins_on, ends_on = [0] * N, [0] * N
    for rank in reversed(range(sp_size)):
        for n in range(*spans[rank]):
            begins_on[n] = rank
    for rank in range(sp_size):
        for n in range(*spans[rank]):
            ends_on[n] = rank
    first, stop = spans[sp_rank]
    lo, hi = split_bounds(offsets[-1], sp_rank, sp_size)
    local = tuple(min(max(offset, lo), hi) - lo for offset in offsets[first : stop + 1]) if stop > first else (0,)
    share = Share(
        ids=tuple(range(first, stop)),
        cu_seqlens=local,
        num_before=sp_rank - begins_on[first] if stop > first else 0,
        num_after=ends_on[stop - 1] - sp_rank if stop > first else 0,
    )
    chain = max((end - begin + 1 for begin, end in zip(begins_on, ends_on, strict=True)), default=1)
    return Layout(share, tuple(begins_on), tuple(ends_on), chain)


def split_bounds(total: int, sp_rank: int, sp_size: int) -> tuple[int, int]:
    """The packed tokens [lo, hi) that rank `sp_rank` holds in mode "split"."""
    return sp_rank * total // sp_size, (sp_rank + 1) * total // sp_size


def split_cu_seqlens_for_sp(
    cu_seqlens: Tensor, sp_rank: int, sp_size: int, max_seqlen: int | None = None
) -> tuple[Tensor, Tensor]:
    """The whole sequences a rank takes in `sp_mode="complete"`, balanced by tokens.

    Args:
        cu_seqlens: global offsets, `[N + 1]` int32 or int64.
        sp_rank, sp_size: this rank and how many there are.
        max_seqlen: the longest sequence a rank is prepared for; a longer one is a ValueError. None: any length.

    Returns:
        `(local_cu_seqlens, sequence_ids)`: offsets `[n + 1]` of this rank's sequences in its own packed tokens, and their
        global numbers `[n]`, ascending; dtype and device of `cu_seqlens`. Over all ranks every sequence occurs once.

    Example:
        >>> import torch
        >>> split_cu_seqlens_for_sp(torch.tensor([0, 5, 7, 10]), 1, 2, 8)
        (tensor([0, 2, 5]), tensor([1, 2]))
    """
    who = "split_cu_seqlens_for_sp"
    check_rank(who, "sp", sp_rank, sp_size)
    offsets = host_offsets(cu_seqlens, who)
    longest = max(b - a for a, b in itertools.pairwise(offsets))
    if max_seqlen is not None and longest > max_seqlen:
        raise ValueError(
            f"{who}: a sequence of {longest} tokens is longer than max_seqlen = {max_seqlen}; "
            'share it between ranks with sp_mode="split"'
        )
    share = packed_layout(offsets, "complete", sp_rank, sp_size).share
    return cu_seqlens.new_tensor(share.cu_seqlens), cu_seqlens.new_tensor(share.ids)


_host_copies: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, ...]]] = {}  # of tensors on a GPU


def host_offsets(cu_seqlens: Tensor, who: str) -> tuple[int, ...]:
    """The offsets as Python numbers, checked. Copied from a GPU once for each tensor (and each change made to it)."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in INDEX_DTYPES:
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ArgumentTypeError(f"{who}: cu_seqlens is {got}; expected an int32 or int64 tensor [N + 1]")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{who}: cu_seqlens has shape {list(cu_seqlens.shape)}; expected [N + 1] with N >= 1")
    key = id(cu_seqlens)
    # what lies on a CPU is at hand, and may be written to unseen: by NumPy, whose array it shares
    is_kept = not (cu_seqlens.is_cpu or cu_seqlens.is_inference())
    if is_kept:
        known = _host_copies.get(key)
        if known is not None and known[0]() is cu_seqlens and known[1] == cu_seqlens._version:
            return known[2]
    offsets = tuple(cu_seqlens.tolist())
    if offsets[0] != 0 or any(b < a for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"{who}: cu_seqlens is {shown_offsets(offsets)}; expected non-decreasing offsets from 0")
    if is_kept:
        _host_copies[key] = (weakref.ref(cu_seqlens, lambda _: _host_copies.pop(key, None)), cu_seqlens._version, offsets)
    return offsets


def check_rank(who: str, prefix: str, rank: int, size: int) -> None:
    """ValueError unless there are `size` ranks and `rank` is one of them."""
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{who}: {prefix}_size is {size!r}; expected a positive number of ranks")
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise ValueError(f"{who}: {prefix}_rank is {rank!r}; expected 0 to {prefix}_size - 1 = {size - 1}")


def _balance(offsets: tuple[int, ...], sp_size: int) -> tuple[int, ...]:
    """The rank of each sequence: longest first, each to the rank with the fewest tokens (the lowest such)."""
    lengths = [b - a for a, b in itertools.pairwise(offsets)]
    loads = [(0, rank) for rank in range(sp_size)]
    owner = [0] * len(lengths)
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        load, rank = heapq.heappop(loads)
        owner[n] = rank
        heapq.heappush(loads, (load + lengths[n], rank))
    return tuple(owner)


def _span(offsets: tuple[int, ...], sp_rank: int, sp_size: int) -> tuple[int, int]:
    """The sequences [first, stop) that rank `sp_rank` knows in mode "split".

    An empty sequence goes to the rank that holds the token after it, one at the very end to the last rank. A rank with
    no token knows the sequence it lies inside, if any: as an empty piece of it.
    """
    total, N = offsets[-1], len(offsets) - 1
    lo, hi = split_bounds(total, sp_rank, sp_size)
    if total == 0:
        return (0, N) if sp_rank == 0 else (0, 0)
    if lo == hi:
        inside = bisect.bisect_left(offsets, lo) - 1  # the last one that begins before lo
        return (inside, inside + 1) if inside >= 0 and offsets[inside + 1] > lo else (0, 0)
    first = bisect.bisect_left(offsets, lo)
    if offsets[first] != lo:
        first -= 1
    stop = N if hi == total else bisect.bisect_left(offsets, hi)
    return first, stop
