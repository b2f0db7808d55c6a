# SPDX-License-Identifier: Apache-2.0
"""What layers are made of: the short convolution, the gated norm, the cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerCache:
    """What a layer remembers of N sequences. Layers write into these tensors, so that a CUDA graph may, too.

    No dataclass: FSDP casts the tensors of those in a copy, where writes would be lost.
    """

    def __init__(self, conv: tuple[Tensor, ...], recurrent: Tensor) -> None:
        self.conv = conv  # of each convolution the last W - 1 inputs, [N, D, W - 1]
        self.recurrent = recurrent  # [N, HV, V, K] float32


class ShortConvolution(nn.Conv1d):
    """A causal convolution over each channel's last `kernel_size` inputs, then SiLU."""

    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False, activation: str | None = "silu") -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)
        if activation not in ("silu", "swish", None):
            raise ValueError(f"ShortConvolution: activation is {activation!r}; expected 'silu', 'swish' or None")
        self.activation = activation

    def forward(self, x: Tensor, past: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """
        Args:
            x: `[B, T, D]`, or `[1, T, D]` with `cu_seqlens`.
            past: the inputs before x, `[N, D, W - 1]`; zeros by default.
            cu_seqlens: offsets `[N + 1]` of packed sequences.
        """
        y = self._dense(x, past) if cu_seqlens is None else self._packed(x[0], past, cu_seqlens)[None]
        return y if self.activation is None else F.silu(y)

    def _dense(self, x: Tensor, past: Tensor | None) -> Tensor:
        if past is None:
            past = x.new_zeros(x.shape[0], x.shape[2], self.kernel_size[0] - 1)
        if x.shape[1] == 0:  # which torch's convolution does not take
            return x
        inputs = torch.cat([past.to(x.dtype), x.transpose(1, 2)], -1)
        return F.conv1d(inputs, self.weight, self.bias, groups=self.groups).transpose(1, 2)

    def _packed(self, x: Tensor, past: Tensor | None, cu_seqlens: Tensor) -> Tensor:
        """[T, D], tap by tap, without a look at the offsets' values."""
        T, W = x.shape[0], self.kernel_size[0]
        token = torch.arange(T, device=x.device)
        of = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)  # the sequence of each token
        position = token - cu_seqlens[of]
        y = x.new_zeros(()) if self.bias is None else self.bias
        for back in range(W):
            tap = F.pad(x, (0, 0, back, 0))[:T]
            if past is None or back == 0:  # the token itself
                before = x.new_zeros(())
            else:
                before = past[of, :, (W - 1 - back + position).clamp_max(W - 2)].to(x.dtype)
            y = y + self.weight[:, 0, W - 1 - back] * torch.where((position >= back)[:, None], tap, before)
        return y

    @torch.no_grad()
    def remember(self, past: Tensor, x: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Write the last W - 1 inputs of each sequence into `past` `[N, D, W - 1]`."""
        W = self.kernel_size[0]
        if W == 1:
            return
        if cu_seqlens is None:
            past.copy_(torch.cat([past, x.transpose(1, 2).to(past.dtype)], -1)[:, :, x.shape[1] :])
            return
        length = cu_seqlens.diff()
        columns = []
        for back in range(W - 1, 0, -1):
            tail = x[0, (cu_seqlens[1:] - back).clamp_min(0)].to(past.dtype)
            column = (W - 1 - back + length).clamp_max(W - 2)
            before = past.gather(2, column.view(-1, 1, 1).expand(-1, past.shape[1], 1).long())[..., 0]
            columns.append(torch.where((length >= back)[:, None], tail, before))
        past.copy_(torch.stack(columns, -1))


class RMSNormGated(nn.Module):
    """`x / rms(x) * weight * activation(gate)` over the last dimension, in float32."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "swish") -> None:
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"RMSNormGated: activation is {activation!r}; expected 'swish', 'silu' or 'sigmoid'")
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor, gate: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = self.weight if weight is None else weight
        y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), self.eps)
        gate = gate.float()
        return (y * (torch.sigmoid(gate) if self.activation == "sigmoid" else F.silu(gate))).to(x.dtype)
