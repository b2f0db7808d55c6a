# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which tokens: checked by counting tokens one by one."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from cula.dist import alloc_decode_state_pool, alloc_state_buffer, split_cu_seqlens_for_sp
from cula.dist.varlen import batch_layout, host_offsets, packed_layout, split_bounds


def offsets_of(lengths):
    return tuple(itertools.accumulate(lengths, initial=0))


def random_lengths(seed):
    rng = random.Random(seed)
    return [rng.choice([0, 0, 1, 2, 5, 17]) for _ in range(rng.randint(1, 7))]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(12))
def test_split_covers_every_token_once_and_links_neighbours(seed, size):
    lengths = random_lengths(seed)
    offsets = offsets_of(lengths)
    layouts = [packed_layout(offsets, "split", rank, size) for rank in range(size)]
    held = {n: [] for n in range(len(lengths))}  # rank of each token of a sequence
    for rank, layout in enumerate(layouts):
        share = layout.share
        lo, hi = split_bounds(offsets[-1], rank, size)
        assert share.cu_seqlens[0] == 0
        assert share.cu_seqlens[-1] == hi - lo
        for n, (a, z) in zip(share.ids, itertools.pairwise(share.cu_seqlens), strict=True):
            held[n] += [rank] * (z - a)
    for n, ranks in held.items():
        assert len(ranks) == lengths[n]
        layout = layouts[0]
        if ranks:
            assert (layout.begins_on[n], layout.ends_on[n]) == (ranks[0], ranks[-1])
        else:
            assert layout.begins_on[n] == layout.ends_on[n]
            assert n in layouts[layout.begins_on[n]].share.ids
    for rank, layout in enumerate(layouts):
        share = layout.share
        assert layout.begins_on == layouts[0].begins_on
        if share.num_before:
            assert rank - share.num_before == layout.begins_on[share.ids[0]]
            assert layouts[rank - 1].share.num_after > 0
        if share.num_after:
            assert rank + share.num_after == layout.ends_on[share.ids[-1]]
            assert layouts[rank + 1].share.num_before > 0
        begins = [layout.begins_on[n] == rank for n in share.ids]
        ends = [layout.ends_on[n] == rank for n in share.ids]
        assert [i for i, b in enumerate(begins) if b] == list(range(len(share.ids)))[share.rows_begin]
        assert [i for i, e in enumerate(ends) if e] == list(range(len(share.ids)))[share.rows_end]


def test_a_rank_without_tokens_inside_a_sequence_passes_it_on():
    shares = [packed_layout((0, 2), "split", rank, 4).share for rank in range(4)]
    assert [s.cu_seqlens for s in shares] == [(0,), (0, 1), (0, 0), (0, 1)]
    assert [(s.num_before, s.num_after) for s in shares] == [(0, 0), (0, 2), (1, 1), (2, 0)]
    assert [s.is_passage for s in shares] == [False, False, True, False]


def test_batch():
    layout = batch_layout(3, 1, 4)
    assert (layout.share.num_before, layout.share.num_after, layout.share.is_passage) == (1, 2, True)
    assert layout.begins_on == (0, 0, 0)
    assert layout.ends_on == (3, 3, 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_complete_shares_out_whole_sequences_evenly(dtype):
    lengths = [100, 3, 40, 0, 41, 60, 7, 55]
    cu_seqlens = torch.tensor(offsets_of(lengths), dtype=dtype)
    seen, loads = [], []
    for rank in range(3):
        local, ids = split_cu_seqlens_for_sp(cu_seqlens, rank, 3, 100)
        assert local.dtype == ids.dtype == dtype
        assert local.diff().tolist() == [lengths[n] for n in ids.tolist()]
        assert ids.tolist() == sorted(ids.tolist())
        seen += ids.tolist()
        loads.append(int(local[-1]))
    assert sorted(seen) == list(range(len(lengths)))
    assert max(loads) - min(loads) < 15


def test_more_ranks_than_sequences():
    local, ids = split_cu_seqlens_for_sp(torch.tensor([0, 5]), 1, 2, 5)
    assert local.tolist() == [0]
    assert ids.tolist() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.tensor([0, 5, 15]), 0, 2, 8), "longer than max_seqlen = 8"),
        ((torch.tensor([0, 5, 3]), 0, 2, 8), "non-decreasing"),
        ((torch.tensor([1, 5]), 0, 2, 8), "from 0"),
        ((torch.tensor([0]), 0, 2, 8), "has shape"),
        ((torch.tensor([0.0, 1.0]), 0, 2, 8), "expected an int32 or int64 tensor"),
        (([0, 5], 0, 2, 8), "cu_seqlens is list"),
        ((torch.tensor([0, 5]), 2, 2, 8), "sp_rank is 2"),
        ((torch.tensor([0, 5]), 0, 0, 8), "sp_size is 0"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        split_cu_seqlens_for_sp(*arguments)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on no CPU, and counts how often it is read."""

    is_cpu, reads = False, 0

    def tolist(self):
        Elsewhere.reads += 1
        return super().tolist()


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_offsets_are_read_again_after_a_change(kind):
    cu_seqlens = torch.tensor([0, 5]).as_subclass(kind)
    Elsewhere.reads = 0
    for _ in range(2):
        assert host_offsets(cu_seqlens, "test") == (0, 5)
    cu_seqlens[1] = 7
    for _ in range(2):
        assert host_offsets(cu_seqlens, "test") == (0, 7)
    assert Elsewhere.reads == (2 if kind is Elsewhere else 0)


def test_offsets_that_share_their_memory_are_read_each_time():
    """As of a data loader that fills one array of NumPy's again and again."""
    array = np.array([0, 5])
    cu_seqlens = torch.from_numpy(array)
    assert host_offsets(cu_seqlens, "test") == (0, 5)
    array[1] = 7
    assert host_offsets(cu_seqlens, "test") == (0, 7)


def test_buffers():
    assert alloc_state_buffer(3, 8, 64, 32, tp_size=4, device="cpu").shape == (3, 2, 32, 64)
    pool = alloc_decode_state_pool(5, 8, 64, 32, dtype=torch.bfloat16, device="cpu")
    assert pool.shape == (5, 8, 32, 64)
    assert pool.dtype == torch.bfloat16
    assert not pool.any()
    with pytest.raises(ValueError, match="tp_size = 3 does not divide num_heads = 8"):
        alloc_state_buffer(3, 8, 64, 32, tp_size=3, device="cpu")
    with pytest.raises(ValueError, match="pool_size is -1"):
        alloc_decode_state_pool(-1, 8, 64, 32, device="cpu")
    with pytest.raises(TypeError, match=r"torch\.float32, torch\.bfloat16 or torch\.float16"):
        alloc_state_buffer(3, 8, 64, 32, dtype=torch.int32, device="cpu")
