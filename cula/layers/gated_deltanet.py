# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet as a layer."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from cula.api import cula_decode, cula_gdn
from cula.dist import cula_gdn_cp
from cula.layers.base import LinearAttention, new_A_log, new_dt_bias, value_head_dim
from cula.layers.parallel import shared
from cula.layers.parts import RMSNormGated


class GatedDeltaNet(LinearAttention):
    """Gated DeltaNet with short convolutions, gates and norm, with FLA's parameters.

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads, use_short_conv, conv_size, conv_bias, allow_neg_eigval,
            layer_idx, norm_eps, tp_group, cp_group: as in `KimiDeltaAttention`.
        use_gate: whether the output has a gate.
        output_gate_activation: "swish", "silu" (the same) or "sigmoid".

    Example:
        >>> import torch
        >>> from cula.layers import GatedDeltaNet
        >>> GatedDeltaNet(hidden_size=32, head_dim=16, num_heads=2)(torch.randn(1, 20, 32)).shape
        torch.Size([1, 20, 32])
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        tp_group: Any = None,
        cp_group: Any = None,
    ) -> None:
        V = value_head_dim("GatedDeltaNet", head_dim, expand_v)
        super().__init__(
            hidden_size, head_dim, V, num_heads, num_v_heads, use_short_conv=use_short_conv, conv_size=conv_size,
            conv_bias=conv_bias, layer_idx=layer_idx, tp_group=tp_group, cp_group=cp_group,
        )  # fmt: skip
        self.allow_neg_eigval, self.use_gate = allow_neg_eigval, use_gate
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = new_A_log(self.num_v_heads, 0)
        self.dt_bias = new_dt_bias(self.num_v_heads)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
            self.o_norm: nn.Module = RMSNormGated(V, norm_eps, output_gate_activation)
        else:
            self.o_norm = nn.RMSNorm(V, norm_eps)

    def _gates(self, hidden_states: Tensor, x: Tensor) -> dict[str, Any]:
        return {
            "g": self.a_proj(x),
            "beta": self.b_proj(x),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_gate_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
        }

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, h0: Any, final: bool, cu_seqlens: Any) -> tuple[Tensor, Any]:
        return cula_gdn(q, k, v, **gates, initial_state=h0, output_final_state=final, cu_seqlens=cu_seqlens)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, states: Tensor) -> Tensor:
        return cula_decode(q, k, v, states, mode="gdn", **gates)[0]

    def _context_parallel(self, q: Tensor, k: Tensor, v: Tensor, gates: Any) -> Tensor:
        return cula_gdn_cp(q, k, v, **gates, **self._cp())[0]

    def _finish(self, o: Tensor, hidden_states: Tensor, x: Tensor) -> Tensor:
        weight = shared(self.o_norm.weight, self.tp_group)  # type: ignore[arg-type]
        if self.use_gate:
            return self.o_norm(o, self.g_proj(x).unflatten(-1, (-1, self.head_v_dim)), weight)
        return F.rms_norm(o.float(), (self.head_v_dim,), weight.float(), self.o_norm.eps).to(o.dtype)  # type: ignore[arg-type]
