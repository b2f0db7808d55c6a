# SPDX-License-Identifier: Apache-2.0
"""The order in which a scan visits chunks, and the tiles it is given."""

import pytest
import torch

from cula.ops.torch import chunks
from cula.ops.torch.chunks import ChunkPlan

CPU = torch.device("cpu")


def plan_of(lengths, C=4):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ChunkPlan(1, int(offsets[-1]), offsets, C, CPU)


def test_steps_are_time_major_and_longest_first():
    plan = plan_of([3, 9, 0, 4])
    assert plan.step_sizes == (3, 1, 1)  # three sequences have a first chunk, one has three
    assert plan.order.tolist() == [1, 0, 3, 2]
    assert plan.begin.tolist() == [3, 0, 12, 7, 11]
    assert plan.size.tolist() == [4, 3, 4, 4, 1]
    assert plan.chunk_order.tolist() == [1, 0, 3, 4, 2]  # sequence 0, then the three of sequence 1, then sequence 3


@pytest.mark.parametrize("lengths", [[5], [8], [3, 9, 0, 4], [0, 0], [1] * 7])
def test_take_and_put_are_inverse(lengths, monkeypatch):
    monkeypatch.setattr(chunks, "SLAB_ELEMENTS", 4 * 2 * 3)  # small slabs
    plan = plan_of(lengths)
    x = torch.randn(1, sum(lengths), 2, 3)
    out = torch.full_like(x, float("nan"))
    for slab in plan.slabs(6):
        tiles = plan.take(x, slab, torch.float32)
        assert tiles.shape == (slab.stop - slab.start, 2, 4, 3)
        pads = plan.pads(slab)
        if pads is not None:
            assert not tiles.transpose(1, 2)[pads].any(), "rows past the end are zero"
        plan.put(tiles, slab, out)
    assert torch.equal(out, x)


def test_slabs_cover_every_step_once(monkeypatch):
    monkeypatch.setattr(chunks, "SLAB_ELEMENTS", 4 * 4 * 2)
    plan = plan_of([3, 9, 0, 4, 30])
    slabs = plan.slabs(4)
    assert len(slabs) > 1
    assert sum((s.step_sizes for s in slabs), ()) == plan.step_sizes
    assert [s.start for s in slabs] == [0, *(s.stop for s in slabs[:-1])]
    assert slabs[-1].stop == plan.num_chunks
    for slab in slabs:
        assert slab.steps()[-1][1] == slab.stop - slab.start


def test_a_batch_is_as_many_equal_sequences():
    batch = ChunkPlan(3, 6, None, 4, CPU)
    packed = plan_of([6, 6, 6])
    assert batch.step_sizes == packed.step_sizes
    assert batch.begin.tolist() == packed.begin.tolist()


def test_tiles_are_copies():
    x = torch.ones(1, 8, 1, 2)
    plan = ChunkPlan(1, 8, None, 4, CPU)
    (slab,) = plan.slabs(2)
    plan.take(x, slab, torch.float32).zero_()
    assert bool((x == 1).all())
