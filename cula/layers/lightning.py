# SPDX-License-Identifier: Apache-2.0
"""Lightning Attention as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cula.api import cula_decode, cula_lightning
from cula.dist import cula_lightning_cp
from cula.layers.base import LinearAttention
from cula.layers.parallel import shared, summed


class LightningAttention(LinearAttention):
    """Lightning Attention as in MiniMax: SiLU on q, k and v, constant decays, a norm over all heads, a sigmoid output gate.

    Value head i of H has the decay `2 ** (-8 (i + 1) / H) * (1 - layer_idx / (num_layers - 1))` a token, as MiniMax has.

    Args:
        hidden_size: width of the input and the output.
        num_heads: heads.
        head_dim: K and V of a head; `hidden_size / num_heads` by default.
        layer_idx, num_layers: where in the model the layer stands; deeper ones forget less.
        norm_eps: of the output norm.
        tp_group, cp_group: as in `KimiDeltaAttention`.

    Parameters: `q_proj`, `k_proj`, `v_proj`, `g_proj` (the output gate), `o_norm`, `o_proj`. MiniMax keeps the first three as
    one, head by head: `qkv_proj.weight.view(H, 3, D, hidden_size).unbind(1)`.

    Example:
        >>> import torch
        >>> from cula.layers import LightningAttention
        >>> LightningAttention(hidden_size=32, num_heads=2)(torch.randn(1, 20, 32)).shape
        torch.Size([1, 20, 32])
    """

    decay: Tensor

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 16,
        head_dim: int | None = None,
        layer_idx: int = 0,
        num_layers: int = 1,
        norm_eps: float = 1e-5,
        tp_group: Any = None,
        cp_group: Any = None,
    ) -> None:
        D = hidden_size // num_heads if head_dim is None else head_dim
        super().__init__(
            hidden_size, D, D, num_heads, None, use_short_conv=False, conv_size=1, conv_bias=False, layer_idx=layer_idx,
            tp_group=tp_group, cp_group=cp_group,
        )  # fmt: skip
        self.norm_eps = norm_eps
        self.all_heads = num_heads
        self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.o_norm = nn.RMSNorm(self.value_dim, norm_eps)
        first = 0 if self.tp_group is None else torch.distributed.get_rank(self.tp_group) * self.num_heads
        factor = 1 - layer_idx / (num_layers - 1 + 1e-5) + 1e-5
        self._decays = [2.0 ** (-8 * (head + 1) / num_heads) * factor for head in range(first, first + self.num_heads)]
        self.register_buffer("decay", torch.tensor(self._decays, dtype=torch.float32), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> LightningAttention:
        """Decays are constants that no checkpoint holds: `.bfloat16()` must not round them, nor `.to_empty()` lose them."""
        super()._apply(fn, recurse)
        self.decay = torch.tensor(self._decays, dtype=torch.float32, device=self.decay.device)
        return self

    def _gates(self, hidden_states: Tensor, x: Tensor) -> Tensor:
        return self.decay

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, h0: Any, final: bool, cu_seqlens: Any) -> tuple[Tensor, Any]:
        return cula_lightning(
            q, k, v, gates, scale=1.0, initial_state=h0, output_final_state=final, cu_seqlens=cu_seqlens
        )  # fmt: skip

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, states: Tensor) -> Tensor:
        return cula_decode(q, k, v, states, mode="lightning", decay=gates, scale=1.0)[0]

    def _context_parallel(self, q: Tensor, k: Tensor, v: Tensor, gates: Any) -> Tensor:
        return cula_lightning_cp(q, k, v, gates, scale=1.0, **self._cp())[0]

    def _finish(self, o: Tensor, hidden_states: Tensor, x: Tensor) -> Tensor:
        wide = o.flatten(-2).float()  # this rank's heads; the norm is over all
        squares = shared(summed(wide.square().sum(-1, keepdim=True), self.tp_group), self.tp_group)
        y = wide * torch.rsqrt(squares / (self.all_heads * self.head_v_dim) + self.norm_eps) * self.o_norm.weight.float()
        return (torch.sigmoid(self.g_proj(x)) * y.to(o.dtype)).unflatten(-1, (-1, self.head_v_dim))
