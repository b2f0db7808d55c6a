# SPDX-License-Identifier: Apache-2.0
"""What the CuTe kernels can address as it is, and what is copied for them."""

import pytest
import torch

from cula.ops.cute.tensors import TMA_BYTES, as_states, as_tokens


def tokens(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).bfloat16().view(shape)


@pytest.mark.parametrize(
    "t",
    [
        tokens(2, 5, 3, 8),
        tokens(1, 5, 2, 16)[..., :8],
        tokens(2, 10, 1, 8)[:, ::2],
        tokens(2, 5, 3),
        tokens(3, 1, 2, 8),
    ],
    ids=["contiguous", "padded", "every second", "one a head", "single tokens"],
)
def test_taken_as_it_is(t):
    assert as_tokens(t) is t


@pytest.mark.parametrize(
    "t",
    [
        tokens(2, 10, 1, 8)[:, :5],
        tokens(3, 10, 2, 8)[:, :1],
        tokens(1, 5, 1, 8).expand(1, 5, 4, 8),
        tokens(1, 1, 2, 8).expand(1, 5, 2, 8),
        tokens(1, 5, 2, 9)[..., :8],
        tokens(41)[1:].view(1, 5, 1, 8),
        tokens(2, 3, 5).transpose(1, 2),
    ],
    ids=[
        "gaps between sequences",
        "first tokens",
        "one head for all",
        "one token for all",
        "odd strides",
        "odd address",
        "heads first",
    ],
)
def test_copied(t):
    copy = as_tokens(t)
    assert copy is not t
    assert copy.is_contiguous()
    assert torch.equal(copy, t)
    assert as_tokens(copy) is copy


def test_tokens_follow_each_other_by_the_second_stride():
    """What a kernel reads: [B, T, ...] as [B T, ...] with the stride of T."""
    for t in (tokens(3, 10, 2, 8)[:, :1], tokens(2, 10, 1, 8)[:, ::2], tokens(2, 5, 3, 8)):
        flat = as_tokens(t)
        B, T = flat.shape[:2]
        seen = flat.as_strided((B * T, *flat.shape[2:]), flat.stride()[1:])
        assert torch.equal(seen, t.reshape(B * T, *t.shape[2:]))


def test_states_at_an_odd_address_are_copied():
    t = torch.arange(33.0)
    assert as_states(t) is t
    odd = t[1:]
    assert odd.data_ptr() % TMA_BYTES
    assert torch.equal(as_states(odd), odd)
    assert as_states(odd).data_ptr() % TMA_BYTES == 0
