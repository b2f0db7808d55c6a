# SPDX-License-Identifier: Apache-2.0
"""Lightning decode by the name existing code imports."""

from __future__ import annotations

from torch import Tensor

from cula.core import checks
from cula.core.decode import decode
from cula.core.problem import DecodeOptions
from cula.lightning.family import FAMILY
from cula.lightning.problem import LightningDecodeInputs


def linear_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    out: Tensor,
    softmax_scale: float,
    stride_q: int,
    stride_k: int,
    stride_v: int,
    stride_s: int,
    stride_o: int,
    s_offsets: Tensor,
    decay_scales: Tensor,
    HEAD_DIM: int,
    K_SPLIT_DIM: int,
    V_SPLIT_DIM: int,
) -> None:
    """One token a row, written to `out`; the pool `s` is updated in place.

    Args:
        q, k: `[N, H, K]`.
        v, out: `[N, H, V]`.
        s: pool `[P, H, V, K]`, or `[P * H, V, K]`.
        softmax_scale: factor on o.
        s_offsets: `[N]` slots; negative ones mark padded rows, whose output is zero.
        decay_scales: s >= 0 of each head, H numbers in any shape; the state's factor is exp(-s).
        stride_*, HEAD_DIM, K_SPLIT_DIM, V_SPLIT_DIM: what an older kernel needed to be told; the tensors say it.
    """
    who = "linear_attention_decode"
    for name, t in (("q", q), ("k", k), ("v", v), ("out", out)):
        if checks.rank_of(who, name, t) != 3:
            raise ValueError(f"{who}: {name} has shape {checks.shape_of(t)}; expected three dimensions [N, H, dim]")
    H, V, K = v.shape[1], v.shape[2], k.shape[2]
    if checks.rank_of(who, "s", s) != 4 and (s.numel() % (H * V * K) or not s.is_contiguous()):
        raise ValueError(
            f"{who}: s has shape {checks.shape_of(s)}; expected a pool [P, H, V, K] or [P * H, V, K], H V K = {[H, V, K]}"
        )
    pool = s if s.dim() == 4 else s.view(-1, H, V, K)
    q, k, v, out = (t.unsqueeze(1) for t in (q, k, v, out))
    decay = checks.reshaped(who, "decay_scales", decay_scales, "[H]", (H,))
    x = LightningDecodeInputs(q, k, v, pool, s_offsets, decay, out=out)
    decode(FAMILY, x, DecodeOptions(scale=softmax_scale), who=who)
