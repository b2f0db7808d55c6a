# SPDX-License-Identifier: Apache-2.0
"""Decayed pair scores of a chunk: sum_c x[t,c] k[i,c] exp(G[t,c] - G[i,c]) for i <= t, and their gradient.

G is the running sum of the log decay. A chunk of C rows is cut into nb blocks of s rows.

- Off the diagonal, a pair (t, i) has a block boundary between them, and its factor splits there into two that are at
  most 1: `prefix` of the row, `suffix` of the column. Halving the chunk again and again gives each pair to exactly one
  boundary, and each halving is one batched product of second halves (rows) against first halves (columns).
- On the diagonal there is no boundary. Where the gate allows it, rows keep their `prefix` and columns take
  `suffix / block` = exp(-sum), at most e^80: one more batched product. Otherwise pairs are walked by their distance,
  and the factor of distance d is that of d - 1 times exp(g) <= 1: no exponent above 0 is ever taken.

q and k scores share their columns, so the rows of both are stacked. Tiles are [n, H, G, ...]: n chunks, H query/key
heads, G value heads for each; q and k have G = 1 and broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL_BLOCK = 16
MAX_SPAN = 80.0  # nats in a block: exp(80) is inside float32, and rounding its exponent costs 80 * 2^-24 = 5e-6


def choose_block(g: Tensor, C: int, is_bounded: bool) -> tuple[int, bool]:
    """(rows of a block, whether its diagonal may be a matrix product) for log decays g.

    On a CPU the values are at hand, so a mild gate gets blocks larger than the promise of a bounded one would allow.
    """
    if g.device.type != "cpu":
        return SMALL_BLOCK, is_bounded
    strongest = -float(g.min()) if g.numel() else 0.0
    for s in (C, C // 2, C // 4):
        if s >= SMALL_BLOCK and strongest * s <= MAX_SPAN:
            return s, True
    return SMALL_BLOCK, False


@dataclass(frozen=True)
class Decays:
    """exp of partial sums of the log decay, all at most 1."""

    prefix: Tensor  # [n, H, G, nb, s, K] from the block's first row to t
    suffix: Tensor  # [n, H, G, nb, s, K] from i + 1 to the block's last row
    block: Tensor  # [n, H, G, nb, 1, K] the whole block
    token: Tensor | None  # [n, H, G, nb, s, K] exp(g), where the diagonal is walked instead of multiplied

    @staticmethod
    def of(g: Tensor, s: int, is_product: bool) -> Decays:
        g = g.unflatten(-2, (g.shape[-2] // s, s))
        if is_product:
            prefix = g.cumsum(-2).exp_()
            block = prefix[..., -1:, :]
            return Decays(prefix, block / prefix, block, None)
        # sums without a bound: their differences would cancel in float32
        sums = g.cumsum(-2, dtype=torch.float64)
        total = sums[..., -1:, :]
        prefix, suffix, block = (x.to(g.dtype).exp() for x in (sums, total - sums, total))
        return Decays(prefix, suffix, block, g.exp())

    def before(self) -> Tensor:
        """Product of the blocks before each block, [n, H, G, nb, 1, K]."""
        return _exclusive_product(self.block)

    def after(self) -> Tensor:
        """Product of the blocks after each block."""
        return _exclusive_product(self.block.flip(-3)).flip(-3)


def _exclusive_product(x: Tensor) -> Tensor:
    """Along the blocks of [..., nb, 1, K]: the product of all that come before."""
    first = torch.ones_like(x[..., :1, :, :])
    return first if x.shape[-3] == 1 else torch.cat([first, x[..., :-1, :, :].cumprod(-3)], dim=-3)


@dataclass(frozen=True)
class Operands:
    """q and k, plain and times the decays that the scores share with the products that meet the state."""

    q: Tensor  # [n, H, 1, nb, s, K]
    k: Tensor
    qk_prefix: Tensor  # [n, H, G, nb, 2, s, K]: rows of q and of k, times prefix
    k_suffix: Tensor  # [n, H, G, nb, s, K]

    @staticmethod
    def of(q: Tensor, k: Tensor, d: Decays) -> Operands:
        """From tiles q, k [n, H, 1, C, K]."""
        n, H, G, nb, s, _ = d.prefix.shape
        q, k = q.unflatten(-2, (nb, s)), k.unflatten(-2, (nb, s))
        qk_prefix = q.new_empty(n, H, G, nb, 2, s, q.shape[-1])
        torch.mul(q, d.prefix, out=qk_prefix[..., 0, :, :])
        torch.mul(k, d.prefix, out=qk_prefix[..., 1, :, :])
        return Operands(q, k, qk_prefix, k * d.suffix)


@dataclass(frozen=True)
class _Product:
    """One batched product: `groups` squares of scores, each of m rows [q; k] by m columns."""

    rows: Tensor  # [n, H, G, groups, blocks, 2, s, K]
    columns: Tensor  # [n, H, G, groups, m, K]
    row_factor: Tensor | None  # what rows are beyond qk_prefix, columns beyond k_suffix (None: nothing)
    column_factor: Tensor | None
    first_block: int  # in its group of `stride` blocks: where the rows start; columns start at the group's first block
    stride: int

    def squares(self, scores: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(group, its view [..., 2, m, m]) of scores [..., 2, C, C]."""
        m = self.columns.shape[-2]
        s = self.rows.shape[-2]
        for i in range(self.columns.shape[-3]):
            c = i * self.stride * s
            r = c + self.first_block * s
            yield i, scores[..., r : r + m, c : c + m]


def _products(x: Operands, d: Decays) -> Iterator[_Product]:
    nb = d.block.shape[-3]
    half = nb // 2  # in blocks
    while half >= 1:
        group = (nb // (2 * half), 2, half)
        row_factor = _exclusive_product(d.block.unflatten(-3, group)[..., 1, :, :, :]) if half > 1 else None
        later = d.block.unflatten(-3, group)[..., 0, :, :, :].flip(-3)
        column_factor = _exclusive_product(later).flip(-3) if half > 1 else None
        rows = x.qk_prefix.unflatten(-4, group)[..., 1, :, :, :, :]
        columns = x.k_suffix.unflatten(-3, group)[..., 0, :, :, :]
        if half > 1:
            assert row_factor is not None and column_factor is not None
            rows, columns = rows * row_factor.unsqueeze(-3), columns * column_factor
        yield _Product(rows, columns.flatten(-3, -2), row_factor, column_factor, half, 2 * half)
        half //= 2
    if d.token is None:
        inverse = d.block.reciprocal()
        rows = x.qk_prefix.unsqueeze(-4)
        yield _Product(rows, x.k_suffix * inverse, None, inverse.unsqueeze(-3), 0, 1)


def pair_scores(x: Operands, d: Decays) -> Tensor:
    """[n, H, G, 2, C, C]: q k scores (lower triangle) and k k scores (strictly lower); zero above."""
    n, H, G, nb, s, _ = d.prefix.expand(x.k_suffix.shape).shape
    out = d.prefix.new_zeros(n, H, G, 2, nb * s, nb * s)
    for p in _products(x, d):
        m, blocks = p.columns.shape[-2], p.rows.shape[-4]
        product = torch.matmul(p.rows.flatten(-4, -2), p.columns.mT)  # [n, H, G, groups, blocks 2 s, m]
        product = product.unflatten(-2, (blocks, 2, s)).transpose(-4, -3).flatten(-3, -2)  # [..., groups, 2, m, m]
        if p.first_block == 0:
            # by selection, since what stands above the diagonal may be huge
            product = torch.where(torch.ones(m, m, dtype=torch.bool, device=out.device).tril(), product, 0)
        for i, square in p.squares(out):
            square.copy_(product[..., i, :, :, :])
    if d.token is not None:
        squares = _diagonal_squares(out, nb, s)
        for distance, E in _walk(d.token):
            kE = x.k[..., : s - distance, :] * E
            for row, t in enumerate((x.q, x.k)):
                score = (t[..., distance:, :] * kE).sum(-1).expand(n, H, G, nb, s - distance)
                squares[..., row, :, :].diagonal(-distance, -2, -1).copy_(score)
    out[..., 1, :, :].diagonal(dim1=-2, dim2=-1).zero_()
    return out


def pair_scores_bwd(x: Operands, d: Decays, ds: Tensor, d_prefix: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of q and k as rows [n, H, G, nb, 2, s, K] and of k as columns [n, H, G, nb, s, K].

    ds [n, H, G, 2, C, C] is zero on and above the diagonal: the diagonal carries no decay and is left to the caller,
    so that q dq and k dk of what is returned are gradients of the decays too. `d_prefix` is what qk_prefix has from its
    other uses; it is added in (and overwritten).
    """
    nb, s = d.prefix.shape[-3:-1]
    d_suffix = torch.zeros_like(x.k_suffix)
    for p in _products(x, d):
        blocks = p.rows.shape[-4]
        stacked = torch.stack([square for _, square in p.squares(ds)], dim=3)  # [n, H, G, groups, 2, m, m]
        stacked = stacked.unflatten(-2, (blocks, s)).transpose(-4, -3).flatten(-4, -2)  # rows as in p.rows
        d_rows = torch.matmul(stacked, p.columns).view(p.rows.shape)
        d_columns = torch.matmul(stacked.mT, p.rows.flatten(-4, -2)).unflatten(-2, (blocks, s))
        if p.row_factor is not None:
            d_rows *= p.row_factor.unsqueeze(-3)
        if p.column_factor is not None:
            d_columns *= p.column_factor
        group = (nb // p.stride, p.stride)
        d_prefix.unflatten(-4, group)[..., p.first_block : p.first_block + blocks, :, :, :] += d_rows
        d_suffix.unflatten(-3, group)[..., :blocks, :, :] += d_columns
    d_rows = d_prefix.mul_(d.prefix.unsqueeze(-3))
    d_columns = d_suffix.mul_(d.suffix)
    if d.token is not None:
        squares = _diagonal_squares(ds, nb, s)
        for distance, E in _walk(d.token):
            dqk, dkk = (squares[..., i, :, :].diagonal(-distance, -2, -1).unsqueeze(-1) for i in range(2))
            kE = x.k[..., : s - distance, :] * E
            d_rows[..., 0, distance:, :] += dqk * kE
            d_rows[..., 1, distance:, :] += dkk * kE
            d_columns[..., : s - distance, :] += (dqk * x.q[..., distance:, :] + dkk * x.k[..., distance:, :]) * E
    return d_rows, d_columns


def _diagonal_squares(scores: Tensor, nb: int, s: int) -> Tensor:
    """A view [n, H, G, nb, 2, s, s] of the diagonal blocks of [n, H, G, 2, C, C]."""
    return scores.unflatten(-1, (nb, s)).unflatten(-3, (nb, s)).diagonal(dim1=-4, dim2=-2).movedim(-1, 3)


def _walk(token: Tensor) -> Iterator[tuple[int, Tensor | float]]:
    """(distance, E) with E[t] = exp(sum of g from t - distance + 1 to t) for rows distance..s-1 of each block."""
    yield 0, 1.0
    E = token[..., 1:, :]
    for distance in range(1, token.shape[-2]):
        if distance > 1:
            E = token[..., distance:, :] * E[..., :-1, :]
        yield distance, E
