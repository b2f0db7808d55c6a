# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention as a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cula.api import cula_decode, cula_kda
from cula.core.constants import LOWER_BOUND_MIN
from cula.dist import cula_kda_cp
from cula.kda.fla import deep_gate, is_deep
from cula.layers.base import LinearAttention, new_A_log, new_dt_bias, value_head_dim
from cula.layers.parallel import shared
from cula.layers.parts import RMSNormGated


class KimiDeltaAttention(LinearAttention):
    """Kimi Delta Attention with short convolutions, gates and norm: the layer of Kimi-Linear, with FLA's parameters.

    Args:
        hidden_size: width of the input and the output.
        expand_v: V / K of a head.
        head_dim: K of a head.
        num_heads: query and key heads.
        num_v_heads: value heads, a multiple of them; as many by default.
        use_short_conv, conv_size, conv_bias: of the short convolutions.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        safe_gate, lower_bound: the bounded gate, see `cula.cula_kda`. A bound below -5, which kernels do not take, is applied
            outside of them; then `safe_gate` cannot be promised.
        layer_idx: kept for the reader.
        norm_eps: of the output norm.
        tp_group: heads are shared out over this process group or `DeviceMesh`: a rank has the parameters of its heads.
        cp_group: tokens are shared out over this process group or `DeviceMesh`: a rank takes and returns its slice.

    Example:
        >>> import torch
        >>> from cula.layers import KimiDeltaAttention
        >>> layer, x = KimiDeltaAttention(hidden_size=32, head_dim=16, num_heads=2), torch.randn(1, 20, 32)
        >>> y = layer(x)
        >>> with torch.no_grad():
        ...     cache = layer.new_cache(1)
        ...     first, rest = layer(x[:, :19], cache=cache), layer(x[:, 19:], cache=cache)
        >>> torch.allclose(y, torch.cat([first, rest], 1), atol=1e-5)
        True
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        tp_group: Any = None,
        cp_group: Any = None,
    ) -> None:
        V = value_head_dim("KimiDeltaAttention", head_dim, expand_v)
        super().__init__(
            hidden_size, head_dim, V, num_heads, num_v_heads, use_short_conv=use_short_conv, conv_size=conv_size,
            conv_bias=conv_bias, layer_idx=layer_idx, tp_group=tp_group, cp_group=cp_group,
        )  # fmt: skip
        if safe_gate and lower_bound is None:
            raise ValueError("KimiDeltaAttention: safe_gate=True needs lower_bound=, the bound it promises")
        self.has_deep_gate = is_deep("KimiDeltaAttention", lower_bound)
        if safe_gate and self.has_deep_gate:
            raise ValueError(
                f"KimiDeltaAttention: lower_bound is {lower_bound}, and safe_gate=True promises {LOWER_BOUND_MIN:g} or more; "
                "drop safe_gate, or raise the bound"
            )
        self.allow_neg_eigval, self.safe_gate, self.lower_bound = allow_neg_eigval, safe_gate, lower_bound
        gate_dim = self.num_v_heads * head_dim
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, V, bias=False), nn.Linear(V, gate_dim, bias=False))
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = new_A_log(self.num_v_heads, 1)
        if safe_gate:
            nn.init.zeros_(self.A_log)
        self.dt_bias = new_dt_bias(gate_dim)
        self.g_proj = nn.Sequential(nn.Linear(hidden_size, V, bias=False), nn.Linear(V, self.value_dim, bias=True))
        self.o_norm = RMSNormGated(V, norm_eps, "sigmoid")

    def _gates(self, hidden_states: Tensor, x: Tensor) -> dict[str, Any]:
        narrow = shared(self.f_proj[0](hidden_states), self.tp_group)
        g = self.f_proj[1](narrow).unflatten(-1, (-1, self.head_k_dim))
        gates = {
            "beta": self.b_proj(x),
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
        }
        if self.has_deep_gate:
            assert self.lower_bound is not None
            return gates | {"g": deep_gate(type(self).__name__, g, self.A_log, self.dt_bias, self.lower_bound)}
        in_kernel = {"A_log": self.A_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound, "use_gate_in_kernel": True}
        return gates | {"g": g} | in_kernel

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, h0: Any, final: bool, cu_seqlens: Any) -> tuple[Tensor, Any]:
        return cula_kda(
            q, k, v, **gates, safe_gate=self.safe_gate, initial_state=h0, output_final_state=final, cu_seqlens=cu_seqlens
        )

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, states: Tensor) -> Tensor:
        return cula_decode(q, k, v, states, **gates)[0]

    def _context_parallel(self, q: Tensor, k: Tensor, v: Tensor, gates: Any) -> Tensor:
        return cula_kda_cp(q, k, v, **gates, safe_gate=self.safe_gate, **self._cp())[0]

    def _finish(self, o: Tensor, hidden_states: Tensor, x: Tensor) -> Tensor:
        narrow = shared(self.g_proj[0](hidden_states), self.tp_group)
        gate = self.g_proj[1](narrow).unflatten(-1, (-1, self.head_v_dim))
        return self.o_norm(o, gate, shared(self.o_norm.weight, self.tp_group))
