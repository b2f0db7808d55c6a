# SPDX-License-Identifier: Apache-2.0
"""Cutting sequences into chunks that a scan can visit in batches, with no loop over sequences.

Chunks are kept *time-major*: step j holds the j-th chunk of every sequence that has one, longest sequence first. The
sequences alive at a step are then a prefix of those alive at the step before, so a scan over steps carries one batch
of states and only ever shortens it:

    lengths 130, 64, 0 -> step 0: chunks of both, step 1 and 2: chunks of the first alone

States that the scan carries are kept by *position* in that order. A step updates a prefix of them in place; a sequence
that has ended, or never had a token, just keeps its state.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

SLAB_ELEMENTS = 1 << 19  # of a [n, heads, C, dim] tile: 2 MiB in float32, so that the tiles of a slab stay in cache


@dataclass(frozen=True)
class Slab:
    """A run of consecutive steps that is prepared at once: chunks [start, stop), and the steps' sizes."""

    start: int
    stop: int
    step_sizes: tuple[int, ...]  # chunks (that is, sequences alive) in each step

    def steps(self) -> list[tuple[int, int]]:
        """First and last chunk of each step, counted from the slab's start."""
        ends = list(itertools.accumulate(self.step_sizes))
        return list(zip([0, *ends[:-1]], ends, strict=True))


class ChunkPlan:
    """Which tokens make which chunk. Built on the host from offsets; packed offsets on a GPU are read back once."""

    def __init__(self, B: int, T: int, cu_seqlens: Tensor | None, C: int, device: torch.device):
        if cu_seqlens is None:
            first = _arange(B) * T
            lengths = torch.full((B,), T, device="cpu")
        else:
            offsets = cu_seqlens.detach().to("cpu", torch.int64)
            first, lengths = offsets[:-1], offsets.diff()
        self.B, self.T, self.C = B, T, C
        chunks = (lengths + C - 1) // C  # of each sequence
        self.order = torch.argsort(chunks, descending=True, stable=True)  # scan position -> sequence
        most = int(chunks.max()) if len(chunks) else 0
        # alive[j]: how many sequences have a j-th chunk
        alive = (chunks[None, :] > _arange(most)[:, None]).sum(1)
        self.step_sizes = tuple(alive.tolist())
        self.num_chunks = int(alive.sum())

        step = torch.repeat_interleave(_arange(most), alive)  # [NC] the step of a chunk
        step_start = torch.cumsum(alive, 0) - alive
        sequence = self.order[_arange(self.num_chunks) - step_start[step]]  # [NC] its sequence
        self.begin = first[sequence] + step * C  # [NC] its first token
        self.size = torch.clamp(lengths[sequence] - step * C, max=C)  # [NC] its tokens
        # where the c-th chunk, counted sequence by sequence as users do, is found in ours
        self.chunk_order = torch.argsort(sequence * max(most, 1) + step, stable=True).to(device)
        self.device = device
        self.order = self.order.to(device)
        self._is_one_full_run = B == 1 and len(lengths) == 1 and T % C == 0

    def slabs(self, width: int) -> list[Slab]:
        """Whole steps grouped into slabs whose tiles of `width` elements a token stay small (at least one step each)."""
        most = max(1, SLAB_ELEMENTS // (width * self.C))
        groups: list[list[int]] = []
        for size in self.step_sizes:
            if not groups or sum(groups[-1]) + size > most:
                groups.append([])
            groups[-1].append(size)
        ends = list(itertools.accumulate(sum(g) for g in groups))
        return [Slab(end - sum(g), end, tuple(g)) for g, end in zip(groups, ends, strict=True)]

    def by_position(self, states: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """States of sequences [N, ...] in scan order, a new tensor; zeros of the given shape where there are none."""
        if states is None:
            return torch.zeros(len(self.order), *shape, dtype=dtype, device=self.device)
        return states[self.order].to(dtype)

    def by_sequence(self, states: Tensor) -> Tensor:
        """States in scan order, as states of sequences [N, ...]."""
        out = torch.empty_like(states)
        out[self.order] = states
        return out

    def take(self, x: Tensor, slab: Slab, dtype: torch.dtype) -> Tensor:
        """Tokens of a slab as tiles: [B, T, heads, ...] -> [n, heads, C, ...], zero where a chunk has no token."""
        n, C = slab.stop - slab.start, self.C
        if self._is_one_full_run:
            tiles = x[0, slab.start * C : slab.stop * C].unflatten(0, (n, C))
        else:
            index, is_pad = self._tokens(slab)
            tiles = x.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, (n, C))
            if is_pad is not None:
                tiles = tiles.masked_fill(is_pad.view(n, C, *([1] * (x.dim() - 2))), 0)
        return tiles.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format, copy=True)  # never a view of x

    def put(self, tiles: Tensor, slab: Slab, out: Tensor) -> None:
        """The way back: write tiles [n, heads, C, ...] to their tokens in a contiguous `out` [B, T, heads, ...]."""
        n, C = slab.stop - slab.start, self.C
        rows = tiles.transpose(1, 2)
        if self._is_one_full_run:
            out[0, slab.start * C : slab.stop * C].unflatten(0, (n, C)).copy_(rows)
            return
        index, is_pad = self._tokens(slab)
        flat = out.view(self.B * self.T, *out.shape[2:])
        if is_pad is None:
            flat.index_copy_(0, index.flatten(), rows.flatten(0, 1).to(out.dtype))
        else:
            flat.index_copy_(0, index[~is_pad], rows[~is_pad].to(out.dtype))

    def sizes(self, slab: Slab) -> Tensor:
        """Tokens in each chunk of a slab, [n]."""
        return self.size[slab.start : slab.stop].to(self.device)

    def pads(self, slab: Slab) -> Tensor | None:
        """[n, C] True where a chunk has no token; None if all are full."""
        return None if self._is_one_full_run else self._tokens(slab)[1]

    def _tokens(self, slab: Slab) -> tuple[Tensor, Tensor | None]:
        position = _arange(self.C)
        begin, size = self.begin[slab.start : slab.stop, None], self.size[slab.start : slab.stop, None]
        is_pad = position >= size  # [n, C]
        index = torch.where(is_pad, begin, begin + position)
        return index.to(self.device), is_pad.to(self.device) if bool(is_pad.any()) else None


def _arange(stop: int) -> Tensor:
    """On the host, whatever `torch.set_default_device` says."""
    return torch.arange(stop, device="cpu")
