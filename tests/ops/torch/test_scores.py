# SPDX-License-Identifier: Apache-2.0
"""Pair scores by blocks against the plain sum, in float64: every block size, both forms of the diagonal, gradients."""

import pytest
import torch

from cula.ops.torch.scores import Decays, Operands, choose_block, pair_scores, pair_scores_bwd

FORMS = [(64, True), (32, True), (16, True), (16, False)]  # rows of a block, diagonal as a product


def tiles(decay, n=2, H=2, G=2, C=64, K=8):
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, H, 1, C, K, generator=gen, dtype=torch.float64) for _ in range(2))
    g = -decay * torch.rand(n, H, G, C, K, generator=gen, dtype=torch.float64)
    return q, k, g


def plain_scores(q, k, g):
    """[n, H, G, 2, C, C] by definition."""
    G = g.cumsum(-2)
    pair = (G.unsqueeze(-2) - G.unsqueeze(-3)).clamp(max=0).exp()
    qk, kk = (torch.einsum("nhgtc,nhgic,nhgtic->nhgti", x.expand_as(g), k.expand_as(g), pair) for x in (q, k))
    return torch.stack([qk.tril(), kk.tril(-1)], dim=3)


@pytest.mark.parametrize(("s", "is_product"), FORMS)
@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_scores_are_the_plain_sum(s, is_product, decay):
    q, k, g = tiles(decay)
    d = Decays.of(g, s, is_product)
    torch.testing.assert_close(pair_scores(Operands.of(q, k, d), d), plain_scores(q, k, g))


@pytest.mark.parametrize(("s", "is_product"), FORMS)
def test_gradients_are_those_of_the_plain_sum(s, is_product):
    q, k, g = tiles(1.0)
    ds = torch.randn(2, 2, 2, 2, 64, 64, dtype=torch.float64).tril(-1)
    rows, columns = (x.expand_as(g).clone().requires_grad_() for x in (k, k))
    q_rows = q.expand_as(g).clone().requires_grad_()
    G = g.cumsum(-2)
    pair = (G.unsqueeze(-2) - G.unsqueeze(-3)).clamp(max=0).exp()
    qk = torch.einsum("nhgtc,nhgic,nhgtic->nhgti", q_rows, columns, pair)
    kk = torch.einsum("nhgtc,nhgic,nhgtic->nhgti", rows, columns, pair)
    want = torch.autograd.grad((torch.stack([qk, kk], 3) * ds).sum(), (q_rows, rows, columns))
    d = Decays.of(g, s, is_product)
    x = Operands.of(q, k, d)
    d_rows, d_columns = pair_scores_bwd(x, d, ds, torch.zeros_like(x.qk_prefix))
    dq, dk_row = (t.flatten(-3, -2) for t in d_rows.unbind(-3))
    for got, wanted in zip((dq, dk_row, d_columns.flatten(-3, -2)), want):
        torch.testing.assert_close(got, wanted)


def test_no_exponent_above_zero_is_taken_for_strong_gates():
    q, k, g = (t.float() for t in tiles(50.0))
    s, is_product = choose_block(g, 64, is_bounded=False)
    assert (s, is_product) == (16, False)
    d = Decays.of(g, s, is_product)
    for factor in (d.prefix, d.suffix, d.block, d.token, d.before(), d.after()):
        assert float(factor.max()) <= 1
    assert bool(pair_scores(Operands.of(q, k, d), d).isfinite().all())


@pytest.mark.parametrize(("strongest", "expected"), [(1.0, (64, True)), (2.5, (32, True)), (5.0, (16, True)), (5.1, (16, False))])
def test_mild_gates_get_larger_blocks(strongest, expected):
    g = torch.zeros(1, 1, 1, 64, 4)
    g[..., 3, 2] = -strongest
    assert choose_block(g, 64, is_bounded=False) == expected
